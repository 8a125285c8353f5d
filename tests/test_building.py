"""Where packages lie, what they may weigh, when they are built, and the reason that is said when there is none.

Nothing here waits for a package, so these tests run while those of `test_compiled` are being built.
"""

import ctypes
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import packages
import pytest
import torch
from contracts import always, plain, request
from packages import OWN, PROMPT, VOCAB, model_of, recipe_of, texts_and_tiers
from tiny import tiny_folder
from transformers import GPT2Config, GPT2LMHeadModel

import outrider
from outrider.core.cache import UNUSED
from outrider.core.errors import OutriderError
from outrider.models import builder as builder_module
from outrider.models import compiled, load, room
from outrider.models.builder import main as build_packages
from outrider.models.compiled import COLUMNS, FEWER, SHAPES, Compiled, Recipe, worth_freezing
from outrider.models.load import MemoryPlan, load_module, memory_plan
from outrider.models.package import INDEPENDENT

even, folder, builder = packages.even, packages.folder, packages.builder
cache, started, dead, alive = packages.cache, packages.started, packages.dead, packages.alive


# --- where packages lie, and what they may weigh


def recipe_folder(path: Path, weights: bytes = b"abc", config: str = '{"hidden_size": 8}') -> Path:
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(weights)
    (path / "config.json").write_text(config)
    return path


def test_a_place_is_a_hash_of_what_the_package_depends_on(tmp_path, cache, monkeypatch):
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
    monkeypatch.setattr(compiled.processor, "instructions", lambda: "another's")
    places.append(recipe_of(base).place())
    assert len(set(places)) == len(places)


def test_a_package_without_weights_serves_all_models_of_its_config(tmp_path, cache):
    a, b = recipe_folder(tmp_path / "a", b"abc"), recipe_folder(tmp_path / "b", b"abd")
    other = recipe_folder(tmp_path / "c", b"abc", '{"hidden_size": 9}')
    assert recipe_of(a, frozen=()).place() == recipe_of(b, frozen=()).place() != recipe_of(other, frozen=()).place()
    assert recipe_of(a, frozen=("any",)).place() != recipe_of(b, frozen=("any",)).place()


@pytest.mark.parametrize(
    ("weights", "free", "shapes"),
    [
        (100, 0, 0),
        (100, 399, 0),
        (100, 400, 1),
        (100, 799, 1),
        (100, 800, 2),
        (100, 1200, 3),
        (100, 10**9, 3),
        (0, 0, 0),
        (0, 400, 3),
        (10**9, 10**9, 0),
    ],
)
def test_frozen_packages_may_take_a_quarter_of_what_is_free(weights, free, shapes):
    assert worth_freezing(weights, free) == SHAPES[:shapes]


def test_a_memory_plan_counts_the_copies_that_packages_carry(folder, monkeypatch):
    assert [MemoryPlan(100, 7, SHAPES[:n]).packed for n in range(4)] == [0, 100, 200, 300]
    assert [MemoryPlan(100, 7, SHAPES[:n]).total for n in range(4)] == [107, 207, 307, 407]
    off = memory_plan(folder, "float32", 2, 100)
    assert off == memory_plan(folder, "float32", 2, 100, "off") and off.frozen == () and off.total == off.weights + off.cache
    for copies in range(4):
        free = off.weights + off.cache + 4 * copies * off.weights
        monkeypatch.setattr(load.psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
        assert memory_plan(folder, "float32", 2, 100, "auto") == dataclasses.replace(off, frozen=SHAPES[:copies])
    monkeypatch.setattr(load.psutil, "virtual_memory", lambda: SimpleNamespace(available=off.total + 4 * off.weights - 1))
    numbers, head = off.weights // 4, 320 * 64
    assert [memory_plan(folder, "float32", 2, 100, "auto", q).packed for q in (None, "int8", "int4")] == [0, 3 * numbers, 3 * head]
    monkeypatch.setattr(load.psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    assert memory_plan(folder, "float32", 2, 100, "auto", "int4").frozen == SHAPES, "blocks are read where they are"
    assert memory_plan(folder, "float32", 2, 100, "auto").frozen == ()


@pytest.mark.skipif(not OWN, reason="the house has no kernels for this CPU")
@pytest.mark.parametrize("quantise", [None, "int8", "int4"])
@pytest.mark.parametrize(
    ("threads", "head", "hidden", "independent"), always(2, [(1, 64, 64, True), (5, 64, 64, False), (1, 64, 48, False), (1, 8, 64, False)])
)
def test_a_package_says_that_its_columns_are_independent_only_where_all_kernels_make_them_so(
    threads, head, hidden, independent, quantise, tmp_path, monkeypatch
):
    """Every product's outputs must fill blocks, one for each thread, and every head the attention's; weights lie beside the code, to be shared."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    model, asked = model_of(tiny_folder(tmp_path / "model", rows=VOCAB + 20, head=head, hidden=hidden, layers=1), quantise=quantise), []
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", lambda program, package_path, inductor_configs: asked.append(inductor_configs))
    monkeypatch.setattr(builder_module, "complete", lambda file: True)
    for frozen in (True, False) if independent else (True,):
        with pytest.raises(FileNotFoundError):  # nothing was written
            builder_module.build(model.step, "any", frozen, tmp_path / "any.pt2")
    assert [how["aot_inductor.metadata"] for how in asked] == ([INDEPENDENT, {}] if independent else [{}]), "packed, then borrowed"
    assert not any(how["aot_inductor.package_constants_in_so"] for how in asked)


@pytest.mark.slow
@pytest.mark.skipif(not OWN, reason="the house has no kernels for this CPU")
def test_where_the_house_s_attention_cannot_be_built_torch_s_is(tmp_path, monkeypatch):
    model, asked = model_of(tiny_folder(tmp_path / "model", rows=VOCAB + 20, head=64, hidden=64, layers=1)), []

    def compile_it(program, package_path, inductor_configs):
        asked.append((inductor_configs, {str(node.target) for node in program.graph.nodes}))
        if "outrider.attend.default" in asked[-1][1]:
            raise RuntimeError("another Inductor")
        Path(package_path).write_text("built", "utf-8")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_it)
    monkeypatch.setattr(builder_module, "complete", lambda file: True)
    monkeypatch.setattr(builder_module, "leave_out", lambda file, known: None)
    builder_module.build(model.step, "any", True, tmp_path / "any.pt2")
    assert (tmp_path / "any.pt2").read_text("utf-8") == "built" and not (tmp_path / "failed").exists()
    said = [how["aot_inductor.metadata"] for how, _ in asked]
    assert said == [INDEPENDENT, INDEPENDENT, {}, *[{"note": "RuntimeError: another Inductor"}] * 2], (
        "with products of torch's beside it no column is independent"
    )
    assert any("scaled_dot" in name for name in asked[4][1])


@pytest.mark.skipif(not OWN, reason="the house has no kernels for this CPU")
@pytest.mark.slow
def test_a_product_without_a_kernel_of_the_house_s_costs_no_attention(tmp_path, monkeypatch):
    """Torch's products are let in first, torch's attention last, and before both what lies between kernels is made and freed as tensors; a model that compiles in no way
    is an error."""
    model, asked = model_of(tiny_folder(tmp_path / "model", rows=VOCAB + 20, head=64, hidden=64, layers=1)), []
    one = list[bool]()

    def compile_it(program, package_path, inductor_configs):
        backends = inductor_configs.get("max_autotune_gemm_backends", "")
        stacked = inductor_configs.get(builder_module.STACK, False)
        asked.append((backends, any(str(node.target) == "outrider.attend.default" for node in program.graph.nodes), stacked))
        if backends == "CPP" or one:
            raise RuntimeError("no kernel fits")
        Path(package_path).write_text("built", "utf-8")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_it)
    monkeypatch.setattr(builder_module, "complete", lambda file: True)
    monkeypatch.setattr(builder_module, "leave_out", lambda file, known: None)
    builder_module.build(model.step, "any", True, tmp_path / "any.pt2")
    assert asked == [("CPP", True, True), ("CPP", True, False), ("CPP,ATEN", True, False)]
    asked.clear()
    one.append(True)
    with pytest.raises(RuntimeError, match="no kernel fits"):
        builder_module.build(model.step, "one", True, tmp_path / "one.pt2")
    ways = [("CPP", True), ("CPP", False), ("CPP,ATEN", False), ("", False)]
    assert asked == [(backends, own, stacked) for own in (True, False) for backends, stacked in ways]


def test_what_would_be_given_from_the_stack_is_written_in_another_way():
    """Memory of what came before may be used a second time, on the stack or not."""
    writer = room.writer()
    writes = writer.__new__(writer)
    writes.stack_allocated_buffers = {"buf0": None, "buf2": None}
    given = SimpleNamespace(get_output_names=lambda: ["buf1", "buf2"])
    with torch._inductor.virtualized.V.set_graph_handler(given), pytest.raises(RuntimeError, match=r"\['buf2'\] would be given from the stack"):
        writes.generate_return(["buf1", "buf2"])


ASKED = """
#include <cstdint>
extern "C" void ask(int calls, int count, const int64_t* sizes, uintptr_t* where) {
    for (int call = 0; call < calls; call++) {
        Room room;
        for (int i = 0; i < count; i++) where[call * count + i] = reinterpret_cast<uintptr_t>(room.take<char>(sizes[i]));
    }
}
"""


@pytest.mark.skipif(not compiled.has_compiler(), reason="no compiler")
def test_what_is_given_room_in_a_call_lies_apart_and_starts_a_line(tmp_path):
    """However much it is; and what fits into the room that is kept lies where it lay in the call before."""
    source, made, size = tmp_path / "room.cpp", tmp_path / "room.so", 1 << 20
    source.write_text(room.ROOM + ASKED)
    subprocess.run([os.environ.get("CXX", "g++"), "-std=c++17", "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    sizes = [1, 0, 3 * size, 70, 2 * size, size // 2, 5 * size, 64]
    asked, where = (ctypes.c_int64 * len(sizes))(*sizes), (ctypes.c_size_t * (2 * len(sizes)))()
    ctypes.CDLL(str(made)).ask(2, len(sizes), asked, where)
    for call in (list(where[: len(sizes)]), list(where[len(sizes) :])):
        ends = sorted((at, at + bytes_) for at, bytes_ in zip(call, sizes, strict=True) if bytes_)
        assert all(end <= after for (_, end), (after, _) in itertools.pairwise(ends)) and all(at % 64 == 0 for at in call)
    kept = [i for i, bytes_ in enumerate(sizes) if bytes_ not in (2 * size, 5 * size)]
    assert [where[i] for i in kept] == [where[len(sizes) + i] for i in kept]
    assert where[7] - where[0] < 4 * size < sum(sizes)


def test_a_forward_that_breaks_the_graph_is_not_tried_in_other_ways(tmp_path, monkeypatch):
    """Another attention may help; other products do not."""
    model, asked = model_of(tiny_folder(tmp_path / "model", rows=VOCAB + 20, head=64, hidden=64, layers=1)), []

    def export(*how, **more):
        asked.append(how)
        raise ValueError("a branch on data")

    monkeypatch.setattr(torch.export, "export", export)
    with pytest.raises(OutriderError, match="eager:graph-break"):
        builder_module.build(model.step, "any", True, tmp_path / "any.pt2")
    assert len(asked) == 1 + OWN


@pytest.mark.parametrize("vocab, positions", [(14, 256), (2, 256), (300, 12), (300, 2), (14, 10)])
def test_packages_are_tried_on_a_text_that_the_model_can_have(folder, cache, started, vocab, positions):
    """Few tokens, or few positions: a learned table of either ends there."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=vocab, n_embd=32, n_layer=2, n_head=4, n_positions=positions, bos_token_id=0, eos_token_id=1)
    model = load.wrap(GPT2LMHeadModel(config), "small", "v", rows=1, context=positions)
    found = Compiled(recipe_of(folder), model.step)
    for columns in (*COLUMNS.values(), *FEWER):
        table, read, rows = found._given(columns)
        with torch.inference_mode():
            logits, _ = model.step(table, read, rows)
        assert logits.shape == (1, table.shape[1], vocab) and logits.isfinite().all()


# --- when they are built, and why there is none


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
    assert rt.engine.target.view((0,)).meter.tier == "eager:view"


def test_without_a_compiler_texts_come_and_it_is_said_once(folder, cache, started, monkeypatch, caplog):
    compiled._say_once.cache_clear()  # another test may have heard it
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
    monkeypatch.setattr(builder_module, "step_back", lambda: None)
    build_packages(json.dumps(dataclasses.asdict(recipe)), str(place))
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
    assert {p.name for p in seen} == {f"any.{os.getpid()}.pt2"}
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


def test_a_living_builder_is_left_alone_and_a_dead_one_replaced(folder, cache, started, dead, alive):
    place = recipe_of(folder).place()
    place.mkdir(parents=True)
    (place / "lock").write_text(str(alive))
    found = Compiled(recipe_of(folder), model_of(folder).step)
    insist(found)
    assert found.reason == "eager:building" and started == []
    (place / "lock").write_text(str(dead))
    insist(Compiled(recipe_of(folder), model_of(folder).step))
    assert started == [place]


def test_packages_that_nobody_takes_up_are_removed_one_day(cache, alive):
    ours, young, old, held, elsewhere = (cache / "steps" / name for name in ("ours", "young", "old", "held", "../../elsewhere/old"))
    for place in (ours, young, old, held, elsewhere):
        place.mkdir(parents=True)
        (place / "any.pt2").write_bytes(b"weights")
    (held / "lock").write_text(str(alive))
    for place, age in ((ours, 2.0), (young, 0.9), (old, 1.1), (held, 2.0), (elsewhere, 2.0)):
        os.utime(place, (0, time.time() - age * UNUSED))
    (cache / "steps" / "note").write_text("of the user's")
    os.utime(cache / "steps" / "note", (0, 0))
    builder_module._clean(elsewhere.parent / "new")
    assert old.exists() and elsewhere.exists(), "who builds elsewhere cleans nothing"
    builder_module._clean(ours)
    assert sorted(f.name for f in ours.parent.iterdir()) == ["held", "note", "ours", "young"]
    assert elsewhere.exists() and all((place / "any.pt2").exists() for place in (ours, young, held))


def test_waiting_ends_when_the_builder_has_died(folder, cache, monkeypatch, dead):
    monkeypatch.setattr(compiled, "start_builder", lambda recipe, place: (place / "lock").write_text(str(dead)))
    texts, tiers = texts_and_tiers(outrider.load(folder, [], compile="wait", dtype="float32"))
    assert set(tiers) == {"eager:builder-died"}
    assert texts == texts_and_tiers(outrider.load(folder, [], compile="off", dtype="float32"))[0]


def test_waiting_ends_with_an_error_when_a_builder_never_comes_back(folder, cache, monkeypatch, alive):
    monkeypatch.setattr(compiled, "start_builder", lambda recipe, place: (place / "lock").write_text(str(alive)))
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


def test_another_process_of_a_dead_builders_number_is_no_builder(folder, cache, started):
    """Numbers are given again: this very process has the one that stands in the lock."""
    recipe = recipe_of(folder)
    place = recipe.place()
    place.mkdir(parents=True)
    (place / "lock").write_text(str(os.getpid()))
    found = Compiled(recipe, model_of(folder).step)
    found._start()
    assert len(started) == 1


@pytest.mark.parametrize("why, waits", [("eager:not-compiled\nthe disk is full", True), ("", True), ("eager:graph-breaks\nat line 3", False)])
def test_a_build_that_failed_is_told_and_tried_again_later(folder, cache, started, caplog, monkeypatch, why, waits):
    """What may be the machine's fault is tried again after an hour; what is the model's fault is not."""
    recipe, step = recipe_of(folder), model_of(folder).step
    place = recipe.place()
    place.mkdir(parents=True)
    (failed := place / "failed").write_text(why)
    compiled._say_once.cache_clear()
    with caplog.at_level("WARNING", "outrider"):
        found = Compiled(recipe, step)
        found.wait()
    assert found.reason == (why.split("\n")[0] or "eager:not-compiled") and not started
    assert "could not be built" in caplog.text and str(place / "log") in caplog.text and ("in an hour" in caplog.text) == waits
    os.utime(failed, (0, 0))
    again = Compiled(recipe, step)
    again._start()
    assert bool(started) == waits == (not failed.exists()) and (again.reason == "eager:building") == waits
