"""Integers of quantised layers on disk: rounded once, found again to the bit, and written anew where they are damaged."""

import io
import logging
import os
import subprocess
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import packages
import pytest
import torch
from tiny import tiny_folder

import outrider
from outrider.core.cache import UNUSED, draft_name
from outrider.core.errors import OutriderError
from outrider.models import load, mapped
from outrider.models.load import load_module, memory_plan
from outrider.models.quantised import FourBits, QuantisedLinear, kept_bytes, quantised

cache = packages.cache
ROUNDED = ("float32", "int4"), ("bfloat16", "int8"), ("bfloat16", "int4"), ("float16", "int8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("mapped") / "target", hidden=64, head=32, rows=320)


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """What is rounded, by its class."""
    found: list[str] = []
    for kind in (FourBits, QuantisedLinear):
        real = kind.rounded
        monkeypatch.setattr(kind, "rounded", staticmethod(lambda linear, kind=kind, real=real: (found.append(kind.__name__), real(linear))[1]))
    return found


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    one, other = state(a), state(b)
    return one.keys() == other.keys() and all(
        torch.equal(w, other[n]) and (w.dtype, w.stride()) == (other[n].dtype, other[n].stride()) for n, w in one.items()
    )


@pytest.mark.parametrize(("dtype", "kind"), ROUNDED)
def test_a_second_start_rounds_nothing_and_has_the_same_bits(folder, cache, calls, dtype: str, kind: str) -> None:
    want = quantised(load_module(folder, dtype), "m", kind)
    calls.clear()
    first = load_module(folder, dtype, kind)
    assert len(calls) == 15 and len(list(cache.glob("integers/*/*.pt"))) == 15, "seven in each of two layers, and the head"
    second = load_module(folder, dtype, kind)
    assert len(calls) == 15 and same(first, want) and same(second, want)
    text = torch.tensor([[3, 1, 4]])
    with torch.inference_mode():
        assert torch.equal(second(input_ids=text).logits, want(input_ids=text).logits)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say what is mapped")
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_integers_lie_where_the_file_is_mapped(folder, cache, kind: str) -> None:
    """At the first start, too."""
    module = load_module(folder, "bfloat16", kind)
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    places = [(*(int(x, 16) for x in line[0].split("-")), line[-1]) for line in lines if str(cache) in line[-1]]
    for layer in module.modules():
        if isinstance(layer, FourBits | QuantisedLinear):
            for tensor in (*layer.parameters(), *layer.buffers()):
                assert any(first <= tensor.data_ptr() < last and file.endswith(".pt") for first, last, file in places)
                assert tensor.data_ptr() % 64 == 0, "torch's own products read 16 or 64 bytes at once, and end the process where they may not"


def test_what_hangs_on_anything_else_lies_elsewhere(folder, cache, tmp_path, monkeypatch) -> None:
    other = tiny_folder(tmp_path / "other", hidden=64, head=32, rows=320, seed=1)
    asked = [(folder, "int4", "bfloat16"), (folder, "int8", "bfloat16"), (folder, "int8", "float32"), (other, "int4", "bfloat16")]
    found = [mapped.place_of(*some) for some in asked]
    assert [mapped.place_of(*some) for some in asked] == found
    config = other / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    found.append(mapped.place_of(*asked[-1]))
    for owner, name, changed in (
        (mapped, "VERSION", 1000), (torch, "__version__", "9.9"), (mapped.transformers, "__version__", "9.9"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "NEON"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, changed)
            found.append(mapped.place_of(*asked[0]))
    assert len(set(found)) == len(found) == 9


def test_a_start_that_was_cut_short_is_gone_on_with(folder, cache, calls) -> None:
    whole = load_module(folder, "bfloat16", "int4")
    for file in list(cache.glob("integers/*/*mlp*")):
        file.unlink()
    calls.clear()
    assert same(load_module(folder, "bfloat16", "int4"), whole) and calls == ["FourBits"] * 6


def test_a_start_that_was_killed_while_it_wrote_leaves_nothing_that_counts(folder, cache, calls, monkeypatch) -> None:
    def killed(tensors, file):
        file.write_bytes(b"some of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(mapped, "_write", killed)
        load_module(folder, "bfloat16", "int4")
    assert not list(cache.glob("integers/*/*.pt"))
    load_module(folder, "bfloat16", "int4")
    assert len(list(cache.glob("integers/*/*.pt"))) == 15


def test_a_damaged_file_is_written_anew_and_that_is_said(folder, cache, calls, caplog) -> None:
    whole = load_module(folder, "bfloat16", "int4")
    cut, empty, strange = list(cache.glob("integers/*/*up_proj*")) + list(cache.glob("integers/*/lm_head*"))
    before = cut.read_bytes()
    for file in (cut, empty, strange):
        file.unlink()  # what is mapped stays as it was
    cut.write_bytes(before[:-7])
    empty.touch()
    strange.mkdir()
    calls.clear()
    with caplog.at_level(logging.WARNING, "outrider"):
        again = load_module(folder, "bfloat16", "int4")
    assert same(again, whole) and cut.read_bytes() == before and {*calls} == {"FourBits", "QuantisedLinear"}
    assert all(f"{file} is damaged" in caplog.text and "anew" in caplog.text for file in (cut, empty))
    assert "not kept on disk" in caplog.text, "a folder is in the place of a file"
    strange.rmdir()


def emptied(file: bytes) -> bytes:
    """Its tensors made zeros, all else as it was."""
    with zipfile.ZipFile(io.BytesIO(file)) as held:
        for one in held.infolist():
            if "/data/" in one.filename:
                begin = (
                    one.header_offset
                    + 30
                    + int.from_bytes(file[one.header_offset + 26 :][:2], "little")
                    + int.from_bytes(file[one.header_offset + 28 :][:2], "little")
                )
                file = file[:begin] + bytes(one.file_size) + file[begin + one.file_size :]
    return file


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_file_of_zeros_or_of_another_layer_is_written_anew(folder, cache, calls, caplog, kind: str) -> None:
    """A disk that lost what was written gives zeros behind a header that is whole."""
    whole = load_module(folder, "bfloat16", kind)
    zeros, head, other = (next(cache.glob(f"integers/*/*layers.0*{name}*")) for name in ("up_proj", "q_proj", "down_proj"))
    before = {file: file.read_bytes() for file in (zeros, head, other)}
    for file in before:
        file.unlink()
    zeros.write_bytes(emptied(before[zeros]))
    head.write_bytes(before[zeros])
    torch.save({"nothing": torch.zeros(2)}, other)
    calls.clear()
    assert same(load_module(folder, "bfloat16", kind), whole) and len(calls) == 3
    assert all(f"{file} is damaged" in caplog.text and file.read_bytes() == kept for file, kept in before.items())


def test_what_is_written_is_on_the_disk_before_it_has_its_name(folder, cache, monkeypatch) -> None:
    settled = list[str]()
    monkeypatch.setattr(mapped, "settle", lambda file: settled.append(file.name))
    monkeypatch.setattr(mapped.Path, "replace", lambda self, goal, move=Path.rename: (settled.append(goal.name), move(self, goal))[1])
    load_module(folder, "bfloat16", "int4")
    settled = [name for name in settled if name.startswith(".") or name.endswith(".pt")]
    assert len(settled) == 30 and all(a.startswith(".") and b.endswith(".pt") for a, b in zip(settled[::2], settled[1::2], strict=True))


@pytest.mark.parametrize("why", ["no cache", "full", "full at last", "somebody else's"])
def test_where_nothing_can_be_kept_it_is_said_and_a_model_is_loaded_all_the_same(folder, cache, calls, caplog, monkeypatch, why: str) -> None:
    want, given_back = quantised(load_module(folder, "bfloat16"), "m", "int4"), []
    monkeypatch.setattr(mapped, "_give_back", lambda: given_back.append(1))
    if why == "no cache":
        monkeypatch.setenv("OUTRIDER_CACHE", "/proc/nowhere")
    elif why == "full":
        monkeypatch.setattr(mapped.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    elif why == "full at last":
        monkeypatch.setattr(mapped, "_write", lambda tensors, file: (file.write_bytes(b"some of it"), _failed(28))[1])
    else:
        monkeypatch.setattr(mapped, "_read", lambda file: _failed(13))
    calls.clear()
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "outrider"):
            assert same(load_module(folder, "bfloat16", "int4"), want)
        assert caplog.text.count("integers of weights are not kept on disk") == 1, "once a load"
        caplog.clear()
    assert len(calls) == len(given_back) == 30 and not [f for f in cache.glob("integers/*/*") if why != "somebody else's"]


def _failed(number: int) -> None:
    raise OSError(number, os.strerror(number))


def test_what_is_there_is_read_on_a_full_disk(folder, cache, calls, caplog, monkeypatch) -> None:
    whole, size = load_module(folder, "bfloat16", "int4"), kept_bytes(load_module(folder, "bfloat16"), "int4")
    for file in cache.glob("integers/*/*layers.1.*"):
        file.unlink()
    monkeypatch.setattr(mapped.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    calls.clear()
    assert same(load_module(folder, "bfloat16", "int4"), whole) and calls == ["FourBits"] * 7
    assert not mapped.keepable(folder, "int4", "bfloat16", size)
    monkeypatch.undo()
    load_module(folder, "bfloat16", "int4")
    monkeypatch.setenv("OUTRIDER_CACHE", str(cache))
    assert mapped.keepable(folder, "int4", "bfloat16", size)


def test_two_who_round_the_same_do_not_meet(folder, cache, caplog) -> None:
    """Threads of a process, too."""
    linear = {f"layer.{i}": torch.nn.Linear(256, 512) for i in range(8)}

    def load_them(_: int) -> list[dict[str, torch.Tensor]]:
        keep = mapped.Mapped(folder, "int4", "float32", 1)
        return [keep(name, partial(FourBits.rounded, layer), partial(FourBits.fit, layer)) for name, layer in linear.items()]

    with ThreadPoolExecutor(4) as several, caplog.at_level(logging.WARNING, "outrider"):
        found = list(several.map(load_them, range(4)))
    want = [FourBits.rounded(layer) for layer in linear.values()]
    assert all(torch.equal(some[n], one[n]) for each in found for some, one in zip(each, want, strict=True) for n in one)
    files = list(cache.glob("integers/*/*"))
    assert len(files) == 8 and all(file.suffix == ".pt" for file in files) and "not kept" not in caplog.text
    assert len({draft_name() for _ in range(100)}) == 100


def test_what_killed_processes_left_is_removed(folder, cache) -> None:
    load_module(folder, "bfloat16", "int4")
    (place,) = (cache / "integers").iterdir()
    gone = subprocess.Popen(["true"])
    gone.wait()
    theirs, ours = place / f".{gone.pid}-1", place / f".{os.getpid()}-1"
    theirs.touch(), ours.touch()
    load_module(folder, "bfloat16", "int4")
    assert not theirs.exists() and ours.exists()


def test_weights_that_lie_otherwise_are_kept_as_any(cache, tmp_path, folder) -> None:
    for kind, made in (("int8", QuantisedLinear), ("int4", FourBits)):
        linear = torch.nn.Linear(64, 32)
        linear.weight = torch.nn.Parameter(torch.randn(64, 32).t())
        keep = mapped.Mapped(folder, kind, "float32", 10_000)
        assert same(made(linear, keep("some", partial(made.rounded, linear), partial(made.fit, linear))), made(linear))


def test_no_weight_is_made_whole_where_a_model_is_loaded(folder, cache, monkeypatch) -> None:
    monkeypatch.setattr(QuantisedLinear, "weight", property(lambda self: pytest.fail("a head of two gigabytes")))
    assert load.load_model(folder, quantise="int4", dtype="bfloat16")[0].spec.vocab_size == 300


def test_on_a_gpu_a_model_counts_as_whole(folder, monkeypatch) -> None:
    monkeypatch.setattr(load, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(load, "refuse_too_large", lambda plan, where, name: (_ for _ in ()).throw(OutriderError(str(plan.weights))))
    for call in (
        lambda: load.load_model(folder, quantise="int8", dtype="float32"),
        lambda: outrider.load(folder, [], quantise="int8", dtype="float32"),
    ):
        with pytest.raises(OutriderError) as refused:
            call()
        assert str(memory_plan(folder, "float32", 1, 64).weights) in str(refused.value)


def tied_folder(path: Path) -> Path:
    module = load_module(tiny_folder(path, hidden=64, head=32, rows=320), "float32")
    module.config.tie_word_embeddings = True
    module.tie_weights()
    module.save_pretrained(path)
    assert "lm_head.weight" not in load.tensors(path)
    return path


def test_what_nobody_took_up_for_long_is_removed(folder, cache) -> None:
    load_module(folder, "bfloat16", "int4")
    (old,) = (cache / "integers").iterdir()
    os.utime(old, (0, time.time() - 1.1 * UNUSED))
    load_module(folder, "bfloat16", "int8")
    (kept,) = (cache / "integers").iterdir()
    assert kept != old
    os.utime(kept, (0, time.time() - 1.1 * UNUSED))
    load_module(folder, "bfloat16", "int8")
    load_module(folder, "bfloat16", "int4")
    assert {kept, old} == {*(cache / "integers").iterdir()}, "taking it up keeps it"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 5)])
def test_bytes_are_told_before_anything_is_read(folder, cache, tmp_path, monkeypatch, kind: str, bits: int, tied: bool) -> None:
    """Of what a step reads; torch's order of 4 bits lies in the file besides."""
    if tied:
        folder = tied_folder(tmp_path / "tied")
    stored = next(iter(load.tensors(folder).values()))[0]
    dtype = {text: name for name, text in load.STORED.items()}[stored]
    module = load_module(folder, dtype, kind)
    head = kind == "int4" and 320 * 64
    linear = sum(layer.weight.numel() for layer in module.modules() if isinstance(layer, FourBits | QuantisedLinear)) - head
    plan = memory_plan(folder, dtype, 2, 100, quantise=kind)
    whole = sum(p.nbytes for p in module.parameters() if p.dtype not in (torch.int8, torch.uint8) and p.ndim < 3)
    scales = sum(p.nbytes for n, p in module.named_parameters() if n.endswith("scale"))
    assert plan.weights == linear * bits // 8 + head + whole - scales
    monkeypatch.setattr(load, "keepable", lambda *_: False)
    more = linear * {8: 0, 5: 5}[bits] // 8
    assert memory_plan(folder, dtype, 2, 100, quantise=kind).weights == plan.weights + more, "what is not mapped is held"
    assert plan.weights < 0.7 * memory_plan(folder, dtype, 2, 100).weights
    files = sum(sum(t.nbytes for t in mapped._read(file).values()) for file in cache.glob("integers/*/*"))
    assert files == kept_bytes(load_module(folder, dtype), kind) + scales
    assert memory_plan(folder, "float64", 2, 100, quantise=kind).weights == memory_plan(folder, "float64", 2, 100).weights, "whole, on their way"


def test_a_model_that_fits_in_4_bits_alone_is_loaded(folder, cache, monkeypatch) -> None:
    """And a copy of it, which drafts, counts with its own bits."""
    how = {"compile": "off", "profile": "off", "rows": 1, "context": 64, "dtype": "float32"}
    room = memory_plan(folder, "float32", 1, 64, quantise="int4").total + 1000
    monkeypatch.setattr(load.psutil, "virtual_memory", lambda: SimpleNamespace(available=room))
    with pytest.raises(OutriderError, match="quantise='int4'"):
        outrider.load(folder, [], **how)
    assert outrider.load(folder, [], quantise="int4", **how).generate("the", max_tokens=3, ignore_eos=True).tokens
    room = memory_plan(folder, "float32", 1, 64).total + 1000
    with pytest.raises(OutriderError, match="the pipeline needs"):
        outrider.load(folder, ["quantised:int8"], **how)
    room += memory_plan(folder, "float32", 1, 64, quantise="int8").total
    assert outrider.load(folder, ["quantised:int8"], **how)
