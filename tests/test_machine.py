"""What a machine is measured for: once, kept on disk, anew on another machine. And what `load` makes of it."""

import json
import math
import os
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_folder

import outrider
from outrider.control.fixed import fixed
from outrider.core import processor
from outrider.core.config import LoadSettings, load_settings
from outrider.core.errors import OutriderError
from outrider.core.types import Plan, Request, SamplingParams
from outrider.measure import machine
from outrider.measure.machine import fastest_dtype
from outrider.models import compiled
from outrider.models.toy import ToyModel
from outrider.runtime.assemble import _dtype
from outrider.runtime.engine import Engine

SECONDS = {torch.float32: 4.0, torch.bfloat16: 2.0, torch.float16: 8.0}
BOTH = ("float32", "bfloat16")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def timed(monkeypatch, cache) -> list[tuple[torch.dtype, int]]:
    """What was timed: products take the seconds that SECONDS says."""
    calls: list[tuple[torch.dtype, int]] = []

    def seconds(dtype: torch.dtype, rows: int) -> float:
        calls.append((dtype, rows))
        return SECONDS[dtype] * rows

    monkeypatch.setattr(machine, "_product_seconds", seconds)
    return calls


@pytest.fixture
def measured(monkeypatch, timed) -> list[tuple[torch.dtype, int]]:
    """The same, reached through `load`."""
    monkeypatch.setattr(machine, "fastest_dtype", fastest_dtype)
    return timed


# --- measured once


def test_the_fastest_dtype_is_measured_once_and_kept(timed, cache):
    assert fastest_dtype(BOTH) == "bfloat16"
    assert timed == machine.ROUNDS * [(torch.float32, 1), (torch.float32, 8), (torch.bfloat16, 1), (torch.bfloat16, 8)], "in turn"
    kept = json.loads((cache / "machine.json").read_text())
    assert kept["products"] == {"float32": 36.0, "bfloat16": 18.0}
    assert fastest_dtype(BOTH) == "bfloat16" == fastest_dtype(BOTH[::-1]) and len(timed) == 4 * machine.ROUNDS
    assert [f.name for f in cache.iterdir()] == ["machine.json"], "nothing half written is left"


def test_a_candidate_that_is_new_is_measured_beside_the_others(timed):
    """What was measured in another hour is no measure for it."""
    fastest_dtype(BOTH)
    assert fastest_dtype(("float32", "float16")) == "float32" and {dtype for dtype, _ in timed[4 * machine.ROUNDS :]} == set(SECONDS)
    assert fastest_dtype(("float16", "bfloat16", "float32")) == "bfloat16" and len(timed) == 10 * machine.ROUNDS


@pytest.mark.parametrize("busy", [range(1, 15), range(12), range(22, 24)], ids=str)
def test_a_machine_that_is_busy_for_a_while_does_not_choose_for_good(monkeypatch, cache, busy):
    """Seen: other work beside the first start made bfloat16 look seven times as slow as float32, which is kept."""
    calls: list[float] = []

    def seconds(dtype: torch.dtype, rows: int) -> float:
        calls.append(SECONDS[dtype] * rows * (50 if len(calls) in busy else 1))
        return calls[-1]

    monkeypatch.setattr(machine, "_product_seconds", seconds)
    assert fastest_dtype(BOTH) == "bfloat16" and len(calls) > max(busy)


def test_of_equals_the_first_is_taken(timed, monkeypatch):
    monkeypatch.setitem(SECONDS, torch.bfloat16, SECONDS[torch.float32])
    assert fastest_dtype(BOTH) == "float32" and fastest_dtype(BOTH[::-1]) == "bfloat16"


@pytest.mark.parametrize("part", ["processor", "torch", "threads", "version"])
def test_another_machine_or_torch_or_thread_count_measures_anew(timed, cache, monkeypatch, part):
    fastest_dtype(BOTH)
    key = machine._key()
    monkeypatch.setattr(machine, "_key", lambda: {**key, part: "another"})
    monkeypatch.setitem(SECONDS, torch.bfloat16, 9.0)
    assert fastest_dtype(BOTH) == "float32" and len(timed) == 8 * machine.ROUNDS
    assert json.loads((cache / "machine.json").read_text())["key"][part] == "another"
    assert fastest_dtype(BOTH) == "float32" and len(timed) == 8 * machine.ROUNDS


def test_the_key_says_what_figures_hang_on(cache):
    before = torch.get_num_threads()
    one = machine._key()
    try:
        torch.set_num_threads(before + 1)
        two = machine._key()
    finally:
        torch.set_num_threads(before)
    assert one["threads"] == str(before) != two["threads"] == str(before + 1)
    assert one["torch"] == torch.__version__ and torch.backends.cpu.get_cpu_capability() in one["processor"]


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"{", b"\xff\xfe", b"[]", b"7", b"null", b'"words"', b"{}", b'{"key": {}, "products": {}}', b'{"products": {"float32": 1, "bfloat16": 9}}',
        "no products", "products of another kind",
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_file_is_measured_anew(timed, cache, damage):
    """And written whole again."""
    texts = {"no products": {"key": machine._key()}, "products of another kind": {"key": machine._key(), "products": ["float32"]}}
    cache.mkdir()
    (cache / "machine.json").write_bytes(damage if isinstance(damage, bytes) else json.dumps(texts[damage]).encode())
    assert fastest_dtype(BOTH) == "bfloat16" and len(timed) == 4 * machine.ROUNDS
    assert fastest_dtype(BOTH) == "bfloat16" and len(timed) == 4 * machine.ROUNDS


def test_products_and_memory_take_time(monkeypatch):
    """The real clock, on little: positive, finite, and of as many products as are said."""
    monkeypatch.setattr(machine, "SIDE", 32)
    made = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(machine.F, "linear", lambda x, m: made.append((x.shape, x.dtype, m.shape)) or linear(x, m))
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 8):
            made.clear()
            assert 0 < machine._product_seconds(dtype, rows) < math.inf
            assert set(made) == {((rows, 32), dtype, (32, 32))} and len(made) % machine.COUNT == 0
    assert 0 < machine.bandwidth(megabytes=1) < math.inf


# --- what load makes of it


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints that say float32, bfloat16, float16 and nothing of their dtype."""
    root = tmp_path_factory.mktemp("dtypes")
    made = {}
    for name in ("float32", "bfloat16", "float16", "nothing"):
        made[name] = tiny_folder(root / name)
        config = json.loads((made[name] / "config.json").read_text())
        config.pop("torch_dtype", None)
        config.pop("dtype", None)
        (made[name] / "config.json").write_text(json.dumps(config if name == "nothing" else {**config, "dtype": name}))
    return made


@pytest.mark.parametrize("name", ["float32", "nothing"])
def test_a_float32_checkpoint_stays_float32(folders, measured, name):
    assert _dtype(folders[name], LoadSettings()) == "float32" and measured == []


def test_a_named_dtype_wins(folders, measured):
    for own in ("float32", "bfloat16"):
        for name in ("float32", "bfloat16", "float16"):
            assert _dtype(folders[own], LoadSettings(dtype=name)) == name
    assert measured == []


@pytest.mark.parametrize(("own", "half", "want"), [("bfloat16", 2.0, "bfloat16"), ("bfloat16", 8.0, "float32"), ("bfloat16", 4.0, "float32"),
                                                   ("float16", 2.0, "float16"), ("float16", 8.0, "float32")])  # fmt: skip
def test_a_half_checkpoint_takes_what_is_faster_here(folders, measured, monkeypatch, own, half, want):
    """float32 where that is as fast: it is never less exact."""
    monkeypatch.setitem(SECONDS, getattr(torch, own), half)
    assert _dtype(folders[own], LoadSettings(compile="off")) == want
    assert {dtype for dtype, _ in measured} == {torch.float32, getattr(torch, own)}


@pytest.mark.parametrize(("isa", "free", "compiler", "own", "want"), [
    ("AVX2", 1 << 33, "g++", "bfloat16", "bfloat16"), ("AVX512", 1 << 33, "g++", "bfloat16", "bfloat16"), ("AVX2", 1 << 33, "g++", "float16", "float32"),
    ("DEFAULT", 1 << 33, "g++", "bfloat16", "float32"), ("AVX2", 0, "g++", "bfloat16", "float32"), ("AVX2", 1 << 33, None, "bfloat16", "float32")])  # fmt: skip
def test_a_bfloat16_checkpoint_stays_where_its_steps_are_compiled_with_the_house_s_kernels(
    folders, measured, monkeypatch, isa, free, compiler, own, want
):
    """What torch's own products take is then no matter: here they are slow. They count where memory has no room for packed weights, and where there are no kernels
    or nobody to compile them."""
    monkeypatch.setattr(compiled.shutil, "which", lambda name: compiler)
    monkeypatch.setitem(SECONDS, getattr(torch, own), 8.0)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: isa)
    monkeypatch.setattr("outrider.models.load.psutil.virtual_memory", lambda: SimpleNamespace(available=free))
    assert _dtype(folders[own], LoadSettings(compile="auto")) == want and (not measured) == (want == "bfloat16")


def test_a_gpu_takes_the_checkpoint_s_own(folders, measured, monkeypatch):
    """There `auto` is resolved when the model is loaded."""
    monkeypatch.setattr("outrider.models.load.pick_device", lambda name: torch.device("cuda"))
    assert _dtype(folders["bfloat16"], LoadSettings()) == "auto" and measured == []


@pytest.mark.parametrize("half", [2.0, 8.0])
def test_target_and_drafts_are_loaded_in_the_dtype_that_was_picked(folders, measured, monkeypatch, half):
    """The target's checkpoint decides, whatever the draft's says."""
    monkeypatch.setitem(SECONDS, torch.bfloat16, half)
    rt = outrider.load(folders["bfloat16"], [f"model:{folders['float32']}"], compile="off")
    want = "bfloat16" if half == 2.0 else "float32"
    target, draft = rt.engine.target, rt.engine.drafters["model"].model
    assert target.spec.dtype == draft.spec.dtype == want
    assert target.module.dtype == draft.module.dtype == getattr(torch, want)
    other = outrider.load(folders["float32"], [f"model:{folders['bfloat16']}"], compile="off")
    assert other.engine.drafters["model"].model.spec.dtype == "float32"


# --- threads, compile, strict


def test_threads_are_torch_s_for_the_whole_process(folders):
    before = torch.get_num_threads()
    try:
        rt = outrider.load(folders["float32"], [], threads=before + 1, compile="off")
        assert torch.get_num_threads() == before + 1
        assert len(rt.generate("the fox", max_tokens=2, ignore_eos=True).tokens) == 2 and torch.get_num_threads() == before + 1
        outrider.load(folders["float32"], [], compile="off")
        assert torch.get_num_threads() == before + 1, "without the setting they are left as they are"
    finally:
        torch.set_num_threads(before)


def test_the_dtype_is_measured_on_the_threads_that_will_run(folders, measured, monkeypatch, cache):
    before = torch.get_num_threads()
    try:
        outrider.load(folders["bfloat16"], [], threads=before + 1, compile="off")
        assert json.loads((cache / "machine.json").read_text())["key"]["threads"] == str(before + 1)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "values", "remedy"),
    [
        ("compile", [True, "on", "", None, "Off"], "auto, wait or off"),
        ("strict", ["yes", 1, 0, None], "True or False"),
        ("threads", [0, -1, 1.5, "2", 100_000], f"threads={os.cpu_count()}, one for each core"),
    ],
)
def test_bad_values_are_refused_by_name(folders, name, values, remedy):
    before = torch.get_num_threads()
    for value in values:
        with pytest.raises(OutriderError, match=f"{name}={value!r}") as refused:
            outrider.load(folders["float32"], [], **{name: value})
        assert remedy in str(refused.value)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("given", "meant"), [("compiled", "compile"), ("strickt", "strict"), ("thread", "threads")])
def test_a_misspelt_setting_names_the_nearest(given, meant):
    with pytest.raises(OutriderError, match=f"'{meant}'"):
        load_settings(**{given: True})


def test_good_values_are_kept():
    s = LoadSettings()
    assert (s.compile, s.strict, s.threads, s.dtype) == ("auto", False, None, "auto")
    assert load_settings(compile="wait", strict=True, threads=3) == LoadSettings(compile="wait", strict=True, threads=3)


def test_threads_are_chosen_again_when_nobody_waits_ever_more_seldom(monkeypatch):
    """Who loads while the machine is busy for a moment is not served by one thread for good; who is strict keeps what it began with. Who serves single
    tokens hangs on threads, and is asked with them."""
    now, asked, weighed = [100.0], [], []
    monkeypatch.setattr(compiled.time, "monotonic", lambda: now[0])
    served = compiled.Compiled.__new__(compiled.Compiled)
    served.packages = {"any": SimpleNamespace(place=lambda *given, patience: asked.append((now[0], patience)), keep=lambda: None, independent=False)}
    served.packages["one"] = SimpleNamespace(place=lambda *given, patience: None, keep=lambda: None)
    served._weigh = lambda: weighed.append(now[0])
    served.placed, served.trusted, served.reason, served.look, served._start = 100.0, compiled.SOON, "", lambda: None, lambda: None
    served._given = lambda shape: (shape,)
    for _ in range(5000):
        served.rest()
        now[0] += 1.0
    times = [at - 100 for at, _ in asked]
    assert times[:5] == [2, 6, 14, 30, 62] and times[-1] - times[-2] == compiled.SELDOM and {patience for _, patience in asked} == {compiled.BRIEF}
    assert weighed == [at for at, _ in asked]
    served.settle()
    now[0] += 1e9
    served.rest()
    assert len(asked) == len(times)


def test_models_rest_when_nobody_runs_or_waits():
    engine, rested = Engine(ToyModel(5, 1, rows=1), {}, fixed(Plan()), 1), []
    engine.models = [SimpleNamespace(rest=lambda: rested.append("model")), SimpleNamespace()]
    seq = engine.submit(Request("r", (1, 2), SamplingParams(max_tokens=3), 0, "exact"))
    engine.rest()
    engine.step()
    assert engine.batcher.running == [seq]
    engine.rest()
    assert not rested
    while engine.step():
        pass
    engine.rest()
    assert rested == ["model"]


@pytest.mark.parametrize(
    ("listed", "name", "can"),
    [
        ("processor\t: 0\nmodel name\t: A 1\nflags\t\t: fma avx2\n\nmodel name\t: B\nflags\t\t: sse\n", "A 1", "avx2 fma"),
        ("processor\t: 0\nFeatures\t: fp asimd\n", None, "asimd fp"),
        (None, None, None),
    ],
)
def test_a_processor_is_told_by_its_name_and_by_what_it_can_do(tmp_path, monkeypatch, listed, name, can):
    """The first of them, in words whose order says nothing; where the system lists none, by what Python knows."""
    monkeypatch.setattr(processor, "LISTED", tmp_path / "cpuinfo")
    monkeypatch.setattr(processor, "name", processor.name.__wrapped__)  # nothing of this is remembered for the tests after it
    if listed:
        (tmp_path / "cpuinfo").write_text(listed)
    known = processor.name()
    assert known == name or (name is None and known in (platform.processor(), platform.machine()) and known)
    assert processor.instructions.__wrapped__() == (can or processor.name())
