"""Compiled steps: a package built from a folder scores as the eager step does, is used only where that holds, and when there
is none the reason is said. One pair of packages is built for the whole module, by the real builder; other builds are slow.

The head of the model has every row twice, so that every largest logit is an exact tie; the vocabulary is padded.
"""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import zoo
from contracts import check_scores, opened, plain, random_draft, recompute, request, run
from safetensors.torch import load_file, save_file
from tiny import tiny_folder

import outrider
from outrider.control.fixed import fixed
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.sampling import decided
from outrider.core.types import MAX_NODES, Draft, Plan, Scores
from outrider.drafters.lookup import Lookup
from outrider.models import compiled, load
from outrider.models.compiled import SHAPES, Compiled, Recipe, start_builder, worth_freezing
from outrider.models.hf import HFModel, HFView
from outrider.models.kv import Block
from outrider.models.load import MemoryPlan, load_module, memory_plan, wrap
from outrider.models.step import Step
from outrider.runtime.engine import Engine

PAIRED = torch.cpu._is_avx512_bf16_supported()
DTYPE = "bfloat16" if PAIRED else "float32"
CLOSE = 0.25 if PAIRED else 0.02  # of the logits' spread, as at load time
VOCAB, TWIN = 300, 150  # tokens; token t and token t + TWIN have the same row in the head
PROMPT = [5, 9, 2, 7, 5, 9, 2]


def twin_folder(path: Path, seed: int = 0) -> Path:
    """A tiny Llama whose logits tie exactly, with 20 rows of padding that would win if they were let."""
    file = tiny_folder(path, seed, rows=VOCAB + 20) / "model.safetensors"
    weights = load_file(file)
    head = weights["lm_head.weight"]
    weights["lm_head.weight"] = torch.cat([head[:TWIN], head[:TWIN], head[VOCAB:]]).contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    return path


def model_of(folder: Path, rows: int = 4, context: int = 200, dtype: str = DTYPE, tokens: int = VOCAB) -> HFModel:
    return wrap(load_module(folder, dtype), "target", "tiny", rows=rows, context=context, chunk=32, tokens=tokens)


def recipe_of(folder: Path, **changes: object) -> Recipe:
    return Recipe(**{"folder": str(folder), "dtype": DTYPE, "threads": 1, "vocab": VOCAB, **changes})


@pytest.fixture(autouse=True)
def even(monkeypatch) -> None:
    """All steps take a second: whether a package is used must not hang on a clock here."""
    monkeypatch.setattr(compiled, "seconds_of", lambda call, **_: (call(), 1.0)[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return twin_folder(tmp_path_factory.mktemp("compiled") / "target")


@pytest.fixture(scope="module", autouse=True)
def builder(request, tmp_path_factory, folder) -> tuple[Path, Path]:
    """(the cache, the folder in it) where packages are being built while the first tests run, once for all workers."""
    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "packages"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(cache))
        place = recipe_of(folder).place()
    if any("built" in item.fixturenames for item in request.session.items):
        try:
            cache.mkdir()
        except FileExistsError:
            return cache, place  # another worker was first
        place.mkdir(parents=True)
        start_builder(recipe_of(folder), place)
    return cache, place


@pytest.fixture(scope="module")
def built(builder) -> Path:
    """The folder with both packages."""
    place = builder[1]
    end = time.monotonic() + 600
    while not all((place / f"{shape}.pt2").exists() for shape in SHAPES):
        assert not (place / "failed").exists(), (place / "failed").read_text()
        assert time.monotonic() < end, (place / "log").read_text()
        time.sleep(0.2)
    return place


@pytest.fixture
def serve(built, folder, builder, monkeypatch):
    """Makes a model that the packages serve, with a context of its own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(builder[0]))

    def make(context: int) -> HFModel:
        model = model_of(folder, context=context)
        model.compiled = Compiled(recipe_of(folder), model.step)
        model.compiled.look()
        assert set(model.compiled.packages) == set(SHAPES), model.compiled.reason
        return model

    return make


@pytest.fixture
def served(serve) -> HFModel:
    return serve(200)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def started(monkeypatch) -> list[Path]:
    """The folders that builders were started for; none is."""
    calls: list[Path] = []
    monkeypatch.setattr(compiled, "start_builder", lambda recipe, place: calls.append(place))
    return calls


@pytest.fixture
def dead() -> Iterator[int]:
    """The number of a process that has ended and is not yet forgotten."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    yield child.pid
    child.wait()


# --- where packages lie, and what they may weigh


def recipe_folder(path: Path, weights: bytes = b"abc", config: str = '{"hidden_size": 8}') -> Path:
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(weights)
    (path / "config.json").write_text(config)
    return path


def test_a_place_is_a_hash_of_what_the_package_depends_on(tmp_path, cache):
    base = recipe_folder(tmp_path / "a")
    place = recipe_of(base).place()
    assert place.parent == cache / "steps"
    assert recipe_of(base).place() == place == recipe_of(recipe_folder(tmp_path / "elsewhere" / "b")).place(), "a folder's path says nothing"
    (base / "README.md").write_text("words")
    assert recipe_of(base).place() == place
    others = [
        recipe_of(recipe_folder(tmp_path / "weights", b"abd")),
        recipe_of(recipe_folder(tmp_path / "config", config='{"hidden_size": 9}')),
        recipe_of(base, dtype="float16"),
        recipe_of(base, threads=2),
        recipe_of(base, vocab=VOCAB - 1),
        recipe_of(base, frozen=("any",)),
        recipe_of(base, frozen=()),
    ]
    places = [place, *(r.place() for r in others)]
    assert len(set(places)) == len(places)


def test_a_package_without_weights_serves_all_models_of_its_config(tmp_path, cache):
    a, b = recipe_folder(tmp_path / "a", b"abc"), recipe_folder(tmp_path / "b", b"abd")
    other = recipe_folder(tmp_path / "c", b"abc", '{"hidden_size": 9}')
    assert recipe_of(a, frozen=()).place() == recipe_of(b, frozen=()).place() != recipe_of(other, frozen=()).place()
    assert recipe_of(a, frozen=("any",)).place() != recipe_of(b, frozen=("any",)).place()


@pytest.mark.parametrize(
    ("weights", "free", "shapes"),
    [(100, 0, 0), (100, 399, 0), (100, 400, 1), (100, 799, 1), (100, 800, 2), (100, 10**9, 2), (0, 0, 0), (0, 400, 2), (10**9, 10**9, 0)],
)
def test_frozen_packages_may_take_a_quarter_of_what_is_free(weights, free, shapes):
    assert worth_freezing(weights, free) == SHAPES[:shapes]


def test_a_memory_plan_counts_the_copies_that_packages_carry(folder, monkeypatch):
    assert [MemoryPlan(100, 7, SHAPES[:n]).packed for n in range(3)] == [0, 100, 200]
    assert [MemoryPlan(100, 7, SHAPES[:n]).total for n in range(3)] == [107, 207, 307]
    off = memory_plan(folder, "float32", 2, 100)
    assert off == memory_plan(folder, "float32", 2, 100, "off") and off.frozen == () and off.total == off.weights + off.cache
    for copies in range(3):
        free = off.weights + off.cache + 4 * copies * off.weights
        monkeypatch.setattr(load.psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
        assert memory_plan(folder, "float32", 2, 100, "auto") == dataclasses.replace(off, frozen=SHAPES[:copies])
    monkeypatch.setattr(load.psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    assert memory_plan(folder, "float32", 2, 100, "auto").frozen == ()


# --- no package, and why


def texts_and_tiers(rt: outrider.Runtime, count: int = 2) -> tuple[list[list[int]], dict[str, int]]:
    made = [rt.generate("the quick fox", max_tokens=8, ignore_eos=True) for _ in range(count)]
    tiers: dict[str, int] = {}
    for g in made:
        assert sum(g.stats["tiers"]["target"].values()) == g.stats["steps"]
        for tier, n in g.stats["tiers"]["target"].items():
            tiers[tier] = tiers.get(tier, 0) + n
    return [g.tokens for g in made], tiers


def insist(found: Compiled) -> None:
    """As many looks in vain as it takes to begin building."""
    for _ in range(compiled.HOT):
        found.looked = -1e9
        assert found.get(1, 1) is None


def test_building_begins_after_a_few_looks_and_once(folder, cache, started):
    found = Compiled(recipe_of(folder), model_of(folder).step)
    found.looked = -1e9
    assert found.get(1, 1) is None and started == [], "the first tokens come undisturbed"
    insist(found)
    insist(found)
    assert len(started) == 1


def test_tiers_say_off_and_building(folder, cache, started):
    off = texts_and_tiers(outrider.load(folder, [], compile="off", dtype="float32"))
    assert set(off[1]) == {"eager:off"} and started == [] and not cache.exists()
    building = texts_and_tiers(outrider.load(folder, [], dtype="float32"))
    assert set(building[1]) == {"eager:building"} and len(started) <= 1
    assert building[0] == off[0]
    rt = outrider.load(folder, [], dtype="float32")
    assert HFView(rt.engine.target, (0,)).meter.tier == "eager:view"


def test_without_a_compiler_texts_come_and_it_is_said_once(folder, cache, started, monkeypatch, caplog):
    want = texts_and_tiers(outrider.load(folder, [], compile="off", dtype="float32"))[0]
    monkeypatch.setattr(compiled.shutil, "which", lambda *_: None)
    texts, tiers = texts_and_tiers(outrider.load(folder, [], compile="wait", dtype="float32"))
    assert texts == want and set(tiers) == {"eager:no-compiler"} and started == []
    assert [r.levelname for r in caplog.records if r.name == "outrider" and "compiler" in r.getMessage()] == ["WARNING"]


def test_a_compiler_named_by_the_environment_is_looked_for(folder, cache, started, monkeypatch):
    model = model_of(folder)
    for name, reason in (("no-such-compiler", "eager:no-compiler"), (sys.executable, "eager:building")):
        monkeypatch.setenv("CXX", name)
        assert Compiled(recipe_of(folder), model.step).reason == reason


def build_here(recipe: Recipe, monkeypatch) -> Path:
    """The builder's work in this process, at this process's priority."""
    place = recipe.place()
    place.mkdir(parents=True)
    (place / "lock").write_text(str(os.getpid()))
    monkeypatch.setattr(os, "nice", lambda by: by)
    compiled.main(json.dumps(dataclasses.asdict(recipe)), str(place))
    return place


def test_a_graph_that_breaks_says_so_for_good(folder, cache, started, monkeypatch):
    """A forward that branches on its numbers cannot be exported: the builder leaves a note, later starts read it."""

    def branching(*_: object) -> torch.nn.Module:
        module = load_module(folder, "float32")
        mlp = module.model.layers[1].mlp
        whole = mlp.forward
        mlp.forward = lambda x: whole(x) if x.sum().item() > 0 else whole(x) * 2
        return module

    recipe = recipe_of(folder, dtype="float32")
    with monkeypatch.context() as patch:
        patch.setattr(load, "load_module", branching)
        with pytest.raises(OutriderError, match="^eager:graph-break"):
            build_here(recipe, patch)
    place = recipe.place()
    assert sorted(p.name for p in place.iterdir()) == ["failed"], "the lock is given back, and nothing half made is left"
    assert (place / "failed").read_text().startswith("eager:graph-break\n")
    texts, tiers = texts_and_tiers(outrider.load(folder, [], compile="wait", dtype="float32"))
    assert set(tiers) == {"eager:graph-break"} and started == [], "it is not tried again"
    assert texts == texts_and_tiers(outrider.load(folder, [], compile="off", dtype="float32"))[0]


def test_a_build_that_fails_leaves_a_reason_and_no_package(folder, cache, started, monkeypatch):
    """The compiler dies half way: nothing is in place, what it wrote has another name."""
    seen: list[Path] = []

    def die(program: object, *, package_path: str, inductor_configs: dict) -> None:
        Path(package_path).write_bytes(b"half")
        seen.extend(place.glob("*.pt2"))
        raise RuntimeError("the disk is full")

    recipe = recipe_of(folder, dtype="float32")
    place = recipe.place()
    with monkeypatch.context() as patch:
        patch.setattr(torch.export, "export", lambda *_, **__: None)
        patch.setattr(torch._inductor, "aoti_compile_and_package", die)
        with pytest.raises(RuntimeError, match="disk is full"):
            build_here(recipe, patch)
    assert [p.name for p in seen] == [f"any.{os.getpid()}.pt2"]
    assert (place / "failed").read_text() == "eager:not-compiled\nthe disk is full" and not (place / "lock").exists()
    assert Compiled(recipe, model_of(folder, dtype="float32").step).reason == "eager:not-compiled"


def test_half_a_package_is_not_taken_up(folder, cache, started, monkeypatch):
    model = model_of(folder)
    monkeypatch.setattr(compiled, "POLL", 0.0)
    place = recipe_of(folder).place()
    place.mkdir(parents=True)
    for shape in SHAPES:
        (place / f"{shape}.{os.getpid()}.pt2").write_bytes(b"half")
    found = Compiled(recipe_of(folder), model.step)
    assert found.get(1, 1) is None and found.get(3, 4) is None and found.reason == "eager:building" and found.bytes == 0


@pytest.mark.parametrize("note", ["", "12 monkeys", "-5"])
def test_a_lock_of_nobody_is_no_lock(folder, cache, started, note):
    place = recipe_of(folder).place()
    place.mkdir(parents=True)
    (place / "lock").write_text(note)
    insist(Compiled(recipe_of(folder), model_of(folder).step))
    assert started == [place]


def test_a_living_builder_is_left_alone_and_a_dead_one_replaced(folder, cache, started, dead):
    place = recipe_of(folder).place()
    place.mkdir(parents=True)
    (place / "lock").write_text(str(os.getpid()))
    found = Compiled(recipe_of(folder), model_of(folder).step)
    insist(found)
    assert found.reason == "eager:building" and started == []
    (place / "lock").write_text(str(dead))
    insist(Compiled(recipe_of(folder), model_of(folder).step))
    assert started == [place]


def test_waiting_ends_when_the_builder_has_died(folder, cache, monkeypatch, dead):
    monkeypatch.setattr(compiled, "start_builder", lambda recipe, place: (place / "lock").write_text(str(dead)))
    texts, tiers = texts_and_tiers(outrider.load(folder, [], compile="wait", dtype="float32"))
    assert set(tiers) == {"eager:builder-died"}
    assert texts == texts_and_tiers(outrider.load(folder, [], compile="off", dtype="float32"))[0]


def test_waiting_ends_with_an_error_when_a_builder_never_comes_back(folder, cache, monkeypatch):
    monkeypatch.setattr(compiled, "start_builder", lambda recipe, place: (place / "lock").write_text(str(os.getpid())))
    monkeypatch.setattr(compiled, "WAIT", 0.1)
    found = Compiled(recipe_of(folder), model_of(folder).step)
    with pytest.raises(OutriderError, match="not built after 0.1 s"):
        found.wait()


def test_strict_stays_eager_where_nothing_is_built_yet(folder, cache, started, monkeypatch):
    """What is built later is not even looked at: it would change the bits in the middle of a text."""
    monkeypatch.setattr(compiled, "POLL", 0.0)
    model = model_of(folder)
    model.compiled = Compiled(recipe_of(folder), model.step)
    model.pin()
    for shape in SHAPES:
        (model.compiled.folder / f"{shape}.pt2").write_bytes(b"would raise if it were opened")
    assert model.compiled.get(1, 1) is None and model.compiled.get(1, 8) is None
    assert len(plain(model, [request(PROMPT, max_tokens=3)])[0]) == 3 and model.meter.tier == "eager:strict-pinned"


# --- a package serves as the eager step does


def filled(model: HFModel, seed: int) -> None:
    """Random keys and values in every slot, so that what is seen matters."""
    torch.manual_seed(seed)
    with torch.inference_mode():
        for x in model.store.rows(0, len(model.rows.all)):
            x.normal_()


def both_ways(model: HFModel, block: Block) -> tuple[tuple, list, tuple, list, list]:
    """(eager's answers, its rows after, the package's answers, its rows after, rows before) of one forward."""
    table, read, rows = model._inputs(block)
    one, other = [x.clone() for x in rows], [x.clone() for x in rows]
    with torch.inference_mode():
        want = model.step(table, read, one)
    package = model.compiled.get(*block.table.shape[:2])
    assert package is model.compiled.packages["one" if block.table.shape[:2] == (1, 1) else "any"]
    return want, one, package(table, read, other), other, [x.clone() for x in rows]


@pytest.mark.parametrize("shape", ["plain", "chain", "tree"])
@pytest.mark.parametrize("lengths", [[1], [3], [70], [150], [120, 4, 64], [2, 2]], ids=str)
def test_a_package_scores_and_writes_as_the_eager_step(served, lengths, shape):
    """Ragged rows, short and long contexts, tails, chains and trees up to a whole step; over caches of random numbers."""
    rng = np.random.default_rng(sum(lengths))
    filled(served, 1)
    tail = 1 if min(lengths) < 3 else 3
    seqs = opened(served.rows, lengths, tail)
    for seq in seqs:
        seq.tokens[:] = rng.integers(0, VOCAB, len(seq.tokens)).tolist()
    for nodes in [0] if shape == "plain" else [1, 7, 16, 30]:
        draft = random_draft(rng, len(seqs), VOCAB, nodes if shape == "tree" else 0)
        for i in range(nodes if shape == "chain" else 0):
            draft = tree.grow(draft, [~i if i < len(seqs) else i - len(seqs)], [i], 1)
        (block,) = served.rows.layout(seqs, draft, tree.all_places(draft)).blocks
        want, one, got, other, before = both_ways(served, block)
        logits, found = got
        assert logits.shape == (*block.table.shape[:2], VOCAB) and logits.dtype == want[0].dtype and found.dtype == torch.float64
        spread = float(want[0].float().std())
        assert float((logits.float() - want[0].float()).abs().max()) < CLOSE * spread
        for a, b, old in zip(one, other, before, strict=True):
            changed = torch.zeros_like(old, dtype=torch.bool)
            for r, slots in enumerate(block.table[..., 2]):
                changed[r, :, sorted(set(slots) - {served.store.capacity - 1})] = True
            spare = torch.zeros_like(changed)
            spare[:, :, -1] = True  # padding columns write there, any of them last
            assert torch.equal(b[~changed & ~spare], old[~changed & ~spare]), "only the slots of the table are written"
            assert not torch.equal(b[changed], old[changed])
            assert float((a[changed].float() - b[changed].float()).abs().max()) < CLOSE * float(a[changed].float().std())


def test_a_package_reads_up_to_the_last_slot_of_a_row(served):
    """A text that nearly fills its context: all slots are read, which are no multiple of 64."""
    filled(served, 1)
    draft, seqs = Draft(rows=1), opened(served.rows, [199])
    for i in range(MAX_NODES - 1):
        draft = tree.grow(draft, [i - 1], [i], 1)
    (block,) = served.rows.layout(seqs, draft, tree.all_places(draft)).blocks
    assert served.store.capacity == 265 and block.read > 256
    want, _, got, *_ = both_ways(served, block)
    assert float((got[0].float() - want[0].float()).abs().max()) < CLOSE * float(want[0].float().std())


def test_found_is_what_the_package_s_own_logits_say(served):
    """Every largest logit is there twice (and in bfloat16 more often): the lowest id wins, and the mass is theirs."""
    filled(served, 2)
    seqs = opened(served.rows, [90, 11, 40])
    draft = random_draft(np.random.default_rng(3), 3, VOCAB, 40)
    ties = 0
    for block in (served.rows.layout(seqs, draft, tree.all_places(draft)).blocks[0], served.rows.layout(seqs[:1], Draft(1), [~0]).blocks[0]):
        logits, found = both_ways(served, block)[2]
        for line, (token, value, mass) in zip(logits.float().flatten(0, 1), found.flatten(0, 1).tolist(), strict=True):
            best = (line == line.max()).nonzero()[:, 0].tolist()
            ties += len(best) > 1
            assert token == best[0] and token < TWIN and value == float(line.max())
            assert mass == pytest.approx(float(line.double().logsumexp(-1)), rel=1e-5)
    assert ties > 40, "this is about ties"


def test_a_nan_in_the_logits_is_found(served):
    filled(served, 3)
    seqs = opened(served.rows, [20, 20])
    block = served.rows.layout(seqs, Draft(2), tree.roots(2)).blocks[0]
    with torch.inference_mode():
        for x in served.store.rows(1, 1):
            x[0, :, 4] = torch.nan
    logits, found = both_ways(served, block)[2]
    assert logits[1].isnan().all() and bool(found[1, 0, 1].isnan()) and not found[0].isnan().any()
    with pytest.raises(OutriderError, match="NaN"):
        decided(Scores(logits, found=found))


def test_the_contract_holds_when_packages_serve(served):
    """Caches stay exact over random steps, commits, rows that leave and come."""
    check_scores(served, recompute(served), np.random.default_rng(4), VOCAB, CLOSE)
    assert served.meter.tier == "compiled"


def same_or_nearly_tied(model: HFModel, prompt: list[int], a: list[int], b: list[int]) -> None:
    """Two greedy texts are equal, or where they part the model can hardly tell the two tokens apart."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
    if at is not None:
        logits = recompute(model)([*prompt, *a[:at]]).float()
        assert float(logits.max() - torch.minimum(logits[a[at]], logits[b[at]])) < CLOSE * float(logits.std()), f"token {at} is no near-tie"


def test_greedy_texts_are_those_of_eager_steps(served, folder):
    asked = [request(PROMPT[:n] * 2, f"g{n}", max_tokens=40) for n in (2, 7, 5)]
    eager = model_of(folder)
    want = plain(eager, asked)
    for plan in (Plan(), Plan((("lookup", 4, 1),)), Plan((("lookup", 3, 2),))):
        for rows in (1, 3):
            seqs = run(Engine(served, {"lookup": Lookup(least=1)}, fixed(plan), rows), asked)
            for r, seq, text in zip(asked, seqs, want, strict=True):
                same_or_nearly_tied(eager, list(r.prompt), text, seq.generated)
                assert {record.tiers["target"] for record in seq.records} == {"compiled"}
    assert sum(sum(record.drafted) for seq in seqs for record in seq.records) > 0


def test_a_step_wider_than_a_package_is_eager(served):
    assert served.compiled.get(1, MAX_NODES) and served.compiled.get(4, 2) and not served.compiled.get(1, MAX_NODES + 1)


@pytest.mark.parametrize(
    "context",
    [600, 200],
)
def test_strict_steps_of_packages_are_the_same_bits_with_and_without_a_draft(serve, context):
    """At every width from 1 to 9 and every place in the step; one package for all of it."""
    served = serve(context)
    filled(served, 5)
    served.pin()
    assert set(served.compiled.packages) == {"any"}
    seq = opened(served.rows, [77])[0]
    tokens = np.random.default_rng(6).integers(0, VOCAB, 9).tolist()
    seen: dict[int, bytes] = {}
    for start in range(9):
        for width in range(1, 10 - start):
            seq.tokens[:] = [1] * 76 + tokens[: start + 1]
            row = served.rows.of(seq)
            row.text = seq.tokens[:-1]
            draft = Draft(rows=1)
            for token in tokens[start + 1 : start + width]:
                draft = tree.grow(draft, [len(draft) - 1], [token], 1)
            logits = served.score([seq], draft, tree.all_places(draft)).logits
            assert served.meter.tier == "compiled"
            for at, line in enumerate(logits, start):
                bits = line.view(torch.uint8).numpy().tobytes()
                assert seen.setdefault(at, bits) == bits, f"token {at} in a step of {width} from {start}"
    assert len(set(seen.values())) == 9


def test_a_package_runs_on_its_own_threads_and_gives_them_back(served):
    package = served.compiled.packages["any"]
    loader, during = package.loader, []
    package.loader = SimpleNamespace(boxed_run=lambda x: during.append(torch.get_num_threads()) or loader.boxed_run(x))
    block = served.rows.layout(opened(served.rows, [5]), Draft(1), [~0]).blocks[0]
    for threads in (1, 2):
        package.threads = threads
        package(*served._inputs(block))
    assert during == [1, 2] and torch.get_num_threads() == 1


@pytest.mark.parametrize(("one", "two", "want"), [(1.0, 2.0, 1), (1.0, 1.0, 1), (2.0, 1.0, 2)])
def test_a_package_takes_the_fewer_threads_where_that_is_no_slower(served, monkeypatch, one, two, want):
    package = served.compiled.packages["any"]
    monkeypatch.setattr(compiled, "seconds_of", lambda call: {1: one, 2: two}[package.threads])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert package.place(*served._inputs(served.rows.layout(opened(served.rows, [5]), Draft(1), [~0]).blocks[0])) == min(one, two)
    assert package.threads == want


def test_a_package_that_is_slower_than_eager_steps_is_not_used(serve, monkeypatch):
    """It must be faster at the step that it is for: refused one by one, and said."""
    times = iter([1.0, 3.0, 3.0, 1.0])  # the wide one 1 s and eager 3 s; the narrow one 3 s and eager 1 s
    served = serve(100)
    monkeypatch.setattr(compiled, "seconds_of", lambda call: next(times))
    again = Compiled(served.compiled.recipe, served.step)
    assert set(again.packages) == {"any"} and again.reason == "eager:package-slower" and next(times, None) is None
    assert again.get(1, 1) is again.packages["any"] and again.bytes == again.packages["any"].bytes


def test_seconds_are_those_of_the_lower_quartile(monkeypatch):
    monkeypatch.undo()
    calls = []
    assert 0 <= compiled.seconds_of(lambda: calls.append(1)) < 1 and 3 <= len(calls) <= 50
    calls.clear()
    assert compiled.seconds_of(lambda: calls.append(1), patience=0.0) >= 0 and len(calls) == 3


def test_loading_finds_what_is_on_disk(built, folder, builder, started, monkeypatch):
    """The second start of a process: packages serve from the first step on, nobody builds, bytes are counted."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(builder[0]))
    before = {f.name: (f.stat().st_size, f.stat().st_mtime_ns) for f in built.iterdir()}
    how = {"dtype": DTYPE, "context": 120, "rows": 2, "depth": 3}
    rt, off = outrider.load(folder, ["lookup"], **how), outrider.load(folder, ["lookup"], compile="off", **how)
    prompt = rt.tokenizer("she sells sea shells")["input_ids"]
    (tokens, again), tiers = texts_and_tiers(rt)
    assert set(tiers) == {"compiled"} and started == [] and tokens == again
    same_or_nearly_tied(off.engine.target, prompt, *(x.generate("she sells sea shells", max_tokens=20, ignore_eos=True).tokens for x in (off, rt)))
    assert {f.name: (f.stat().st_size, f.stat().st_mtime_ns) for f in built.iterdir()} == before and not {"lock", "failed"} & set(before)
    packed = sum((built / f"{shape}.pt2").stat().st_size for shape in SHAPES)
    assert rt.engine.target.compiled.bytes == packed == rt.engine.target.held_bytes() - off.engine.target.held_bytes()


def test_waiting_takes_up_what_a_living_builder_puts_there(built, folder, cache, started):
    recipe = recipe_of(folder)
    place = recipe.place()
    place.mkdir(parents=True)
    (place / "lock").write_text(str(os.getpid()))
    found = Compiled(recipe, model_of(folder).step)

    def finish() -> None:
        for shape in SHAPES:
            shutil.copy(built / f"{shape}.pt2", place / f"{shape}.tmp")
            (place / f"{shape}.tmp").replace(place / f"{shape}.pt2")

    late = threading.Timer(0.3, finish)
    late.start()
    found.wait()
    late.join()
    assert set(found.packages) == set(SHAPES) and found.reason == "eager:building" and started == []


def test_running_text_changes_over_when_the_package_comes(built, folder, cache, started, monkeypatch):
    """Eager steps serve until then; the wide package alone serves every shape until the narrow one is there."""
    monkeypatch.setattr(compiled, "POLL", 0.0)
    model = model_of(folder)
    model.compiled = Compiled(recipe_of(folder), model.step)
    engine = Engine(model, {}, fixed(Plan()), 1)
    seq = engine.submit(request(PROMPT, max_tokens=9))
    for shape in (None, "any", "one"):
        if shape:
            shutil.copy(built / f"{shape}.pt2", model.compiled.folder)
        for _ in range(3):
            engine.step()
        if shape == "any":
            assert model.compiled.get(1, 1) is model.compiled.packages["any"] and "one" not in model.compiled.packages
    assert [record.tiers["target"] for record in seq.records] == ["eager:building"] * 3 + ["compiled"] * 6
    assert model.compiled.get(1, 1) is model.compiled.packages["one"]
    same_or_nearly_tied(model, PROMPT, plain(model_of(folder), [request(PROMPT, max_tokens=9)])[0], seq.generated)


def test_a_package_that_differs_from_the_model_is_not_used(built, tmp_path, cache, started, caplog):
    """Packages of other weights, put in place: the first one that is tried is refused, and texts are the eager ones."""
    other = twin_folder(tmp_path / "other", seed=5)
    place = recipe_of(other).place()
    place.mkdir(parents=True)
    for shape in SHAPES:
        shutil.copy(built / f"{shape}.pt2", place)
    rt = outrider.load(other, [], dtype=DTYPE, compile="auto")
    assert rt.engine.target.compiled.folder == place
    texts, tiers = texts_and_tiers(rt)
    assert set(tiers) == {"eager:package-differs"} and rt.engine.target.compiled.packages == {}
    assert texts == texts_and_tiers(outrider.load(other, [], dtype=DTYPE, compile="off"))[0]
    assert any("differs" in r.getMessage() for r in caplog.records)


# --- what must not stop a text, and what must not pass


@pytest.mark.parametrize("trouble", ["failed", "no compiler"])
def test_one_package_serves_though_the_other_cannot_be_built(built, folder, cache, started, monkeypatch, trouble):
    recipe = recipe_of(folder)
    place = recipe.place()
    place.mkdir(parents=True)
    shutil.copy(built / "any.pt2", place)
    if trouble == "failed":
        (place / "failed").write_text("eager:not-compiled\nthe disk is full")
    else:
        monkeypatch.setattr(compiled.shutil, "which", lambda *_: None)
    assert Compiled(recipe, model_of(folder).step).get(3, 4) is not None


def test_a_damaged_package_is_not_used(folder, cache, started):
    recipe, model = recipe_of(folder), model_of(folder)
    model.compiled = Compiled(recipe, model.step)
    model.compiled.folder.mkdir(parents=True)
    for shape in SHAPES:
        (model.compiled.folder / f"{shape}.pt2").write_bytes(b"PK damaged")
    assert len(plain(model, [request(PROMPT, max_tokens=3)])[0]) == 3 and model.meter.tier.startswith("eager:")


def test_a_package_with_other_attention_is_not_used(built, folder, builder, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(builder[0]))
    model = model_of(folder)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.module.named_parameters():
            if "self_attn" in name:
                weight.normal_(0, 0.3)
    found = Compiled(recipe_of(folder), model.step)
    found.look()
    assert not found.packages and found.reason == "eager:package-differs"


# --- slow: more builds


def build_wide(recipe: Recipe, step: Step) -> Compiled:
    """Its wide package, built here."""
    place = recipe.place()
    place.mkdir(parents=True)
    compiled.build(step, "any", "any" in recipe.frozen, place / "any.pt2")
    found = Compiled(recipe, step)
    found.look()
    assert set(found.packages) == {"any"}, found.reason
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_package_without_weights_borrows_the_model_s(folder, cache, started, dtype):
    recipe = recipe_of(folder, frozen=(), dtype=dtype)
    model = model_of(folder, dtype=dtype)
    model.compiled = build_wide(recipe, model.step)
    assert model.compiled.bytes == 0
    check_scores(model, recompute(model), np.random.default_rng(7), VOCAB, 0.02 if dtype == "float32" else 0.25)
    assert model.meter.tier == "compiled"
    with torch.no_grad():  # weights that change are seen: they were not copied
        model.module.model.layers[1].mlp.down_proj.weight.normal_(0, 0.4)
    check_scores(model, recompute(model), np.random.default_rng(8), VOCAB, 0.02 if dtype == "float32" else 0.25)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gpt2", "float32"), ("gpt2", "bfloat16"), ("gemma2", "float32"), ("gemma2", "bfloat16"), ("gemma3", "float32")],
)
def test_other_classes_compile_and_agree(name, dtype, tmp_path, cache, started):
    """Windows of two kinds, learned positions, tied heads."""
    zoo.module(name).save_pretrained(tmp_path / name)
    model = model_of(tmp_path / name, dtype=dtype, tokens=zoo.VOCAB)
    model.compiled = build_wide(recipe_of(tmp_path / name, dtype=dtype, vocab=zoo.VOCAB), model.step)
    check_scores(model, recompute(model), np.random.default_rng(9), zoo.VOCAB, 0.02 if dtype == "float32" else 0.25)
    assert model.meter.tier == "compiled"


@pytest.mark.slow
def test_the_float32_package_agrees_closely(folder, cache, started):
    model = model_of(folder, dtype="float32")
    model.compiled = build_wide(recipe_of(folder, dtype="float32"), model.step)
    check_scores(model, recompute(model), np.random.default_rng(10), VOCAB, 1e-3, steps=30)


START = """
import json, sys, outrider
rt = outrider.load(sys.argv[1], ["lookup"], dtype=sys.argv[2], threads=1, compile="wait")
out = rt.generate("the quick brown fox", max_tokens=24, ignore_eos=True)
print(json.dumps([out.tokens, out.stats["tiers"]]))
"""


@pytest.mark.slow
def test_the_second_start_is_served_from_disk(folder, tmp_path):
    def start() -> list:
        env = {**os.environ, "OUTRIDER_CACHE": str(tmp_path / "cache")}
        done = subprocess.run([sys.executable, "-c", START, str(folder), DTYPE], env=env, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    def files() -> dict[str, tuple[int, int]]:
        return {str(f): (f.stat().st_size, f.stat().st_mtime_ns) for f in (tmp_path / "cache" / "steps").rglob("*") if f.is_file()}

    first = start()
    there = files()
    assert sorted(Path(f).name for f in there) == ["any.pt2", "log", "one.pt2"]
    assert set(first[1]["target"]) == {"compiled"}
    assert start() == first and files() == there


@pytest.mark.slow
def test_a_builder_that_is_killed_is_replaced_at_the_next_start(folder, cache, monkeypatch):
    """Nothing half made is in place, the dead builder's lock does not count, and the wait ends at once."""
    monkeypatch.setattr(compiled, "start_builder", start_builder)
    recipe, model = recipe_of(folder), model_of(folder)
    found = Compiled(recipe, model.step)
    victim = int((found.folder / "lock").read_text())
    time.sleep(4)
    os.kill(victim, signal.SIGKILL)
    found.wait()
    assert found.reason == "eager:builder-died" and not any(found._file(shape).exists() for shape in SHAPES)
    again = Compiled(recipe, model.step)
    assert int((found.folder / "lock").read_text()) != victim
    again.wait()
    assert set(again.packages) == set(SHAPES)


@pytest.mark.slow
@pytest.mark.skipif(not PAIRED, reason="this CPU multiplies no pairs of bfloat16")
@pytest.mark.parametrize(("k", "n"), [(2, 64), (30, 64), (64, 192), (336, 320), (4096, 128), (62, 4096)])
def test_products_of_pairs_are_right_at_every_width(k, n, tmp_path):
    """The kernel alone, as the builder asks for it, against float64: 1 to 17 rows, odd and even ones, sums in several blocks.
    And a row's result is the same bits whoever its neighbours are."""
    from outrider.models import microkernel

    assert microkernel.register() and microkernel.register()
    torch.manual_seed(k)
    linear = torch.nn.Linear(k, n, bias=False).bfloat16()
    x = torch.randn(17, k).bfloat16()
    how = {"freezing": True, "aot_inductor.package_constants_in_so": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP"}
    with torch.no_grad():
        program = torch.export.export(linear, (x[:9],), dynamic_shapes=({0: torch.export.Dim("w", min=1, max=MAX_NODES)},), strict=False)
        file = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "linear.pt2"), inductor_configs=how)
    with zipfile.ZipFile(file) as package:
        assert any(b"_mm512_dpbf16_ps" in package.read(name) for name in package.namelist() if name.endswith(".cpp")), "another kernel was chosen"
    product = torch._inductor.aoti_load_package(file)
    want = x.double() @ linear.weight.detach().double().T
    error = (x.double().abs() @ linear.weight.detach().double().abs().T) * 2.0**-16 + want.abs() * 2.0**-8  # of the sums, and of rounding them
    alone = [product(x[i : i + 1])[0] for i in range(17)]
    for rows in range(1, 18):
        got = product(x[:rows])
        assert bool(((got.double() - want[:rows]).abs() <= error[:rows]).all()), f"{rows} rows"
        assert all(torch.equal(got[i], alone[i]) for i in range(rows)), f"{rows} rows"
