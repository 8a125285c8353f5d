"""Copies of a target's weights that draft on its own cache: they read no text, and nothing that they write is left in one.

Most have weights that are far from the target's: what they left behind would be seen.
"""

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from contracts import always, plain, recompute, request, run
from test_strict import PROMPTS, requests, run_with
from tiny import tiny_folder

import outrider
from outrider.bench import policies
from outrider.control.controller import Adaptive
from outrider.control.fixed import Told, fixed
from outrider.control.rows import Row
from outrider.control.step import Step
from outrider.core import tree
from outrider.core.types import Draft, Plan, Sequence
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.measure.cost import Costs, Situation
from outrider.models import load
from outrider.models.compiled import SHAPES, STEPS
from outrider.models.exits import EarlyExit
from outrider.models.hf import HFModel, HFView
from outrider.models.load import load_copy, memory_plan
from outrider.models.quantised import QuantisedLinear
from outrider.runtime import assemble, profiler
from outrider.runtime.engine import Engine

CLASSES = ["llama", "gemma3", "mistral", "gpt2", "mixtral"]
COPY, EXIT = "copy", "early-exit:1"
PLANS = [
    Plan(((COPY, 3, 1),)), Plan(((COPY, 2, 2),)), Plan(), Plan((("lookup", 3, 1), (COPY, 2, 1))), Plan((("lookup", 4, 1),)),
    Plan(((COPY, 6, 1),)), Plan(((COPY, 3, 2),), budget=3),
]  # fmt: skip
HOW = {"compile": "off", "profile": "off"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("copies") / "m")


def made(name: str, rows: int = 3, noise: float = 0.5) -> Engine:
    """A target with a copy, and with plans in turn."""
    target, turn = zoo.model(name, label="target", chunk=8), iter(range(10**6))
    copied = ModelDrafter(HFView(target, zoo.module(name, noise=noise), COPY), COPY)
    return Engine(target, {"lookup": Lookup(floor=0.0), COPY: copied}, Told(lambda seqs: (PLANS[next(turn) % len(PLANS)], "turn")), rows)


def asked(**how: Any) -> list[Any]:
    return [request([3, 1, 4, 1, 5, 9, 2, 6][:n] * 3, f"c{n}", seed=n, max_tokens=24, **how) for n in (2, 8, 5)]


def read_anew(name: str, tokens: list[int]) -> list[torch.Tensor]:
    """Keys and values of a text [heads, tokens, d], by a model that no copy has touched."""
    model = zoo.model(name, label="fresh", chunk=8)
    seq = Sequence(request(tokens, "anew"), list(tokens))
    model.open(seq)
    model.prefill([seq])
    return [x[0, :, : len(tokens) - 1] for x in model.store.rows(model.rows.of(seq).index, 1)]


def check_cache(name: str, target: Any, seqs: list[Sequence]) -> None:
    for seq in seqs:
        if seq.slots:
            row = target.rows.of(seq)
            assert row.base == -1 and row.text == seq.tokens[:-1]
            for x, want in zip(target.store.rows(row.index, 1), read_anew(name, seq.tokens), strict=True):
                torch.testing.assert_close(x[0, :, : row.cached], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("heat", always(1, [{}, {"temperature": 1.0}, {"temperature": 1.0, "rule": "exact"}]), ids=["greedy", "coupled", "exact"])
@pytest.mark.parametrize("name", CLASSES)
def test_whatever_it_drafts_the_cache_is_the_target_s(name: str, heat: dict[str, Any]) -> None:
    engine = made(name)
    target, want = engine.target, plain(zoo.model(name, label="target", chunk=8), asked(**heat))
    seqs, steps = [engine.submit(one) for one in asked(**heat)], 0
    while any(seq.finish_reason is None for seq in seqs):
        engine.step()
        if (steps := steps + 1) % 3 == 1:
            check_cache(name, target, seqs)
    drafted = sum(sum(r.drafted) for seq in seqs for r in seq.records if r.levels.get(COPY))
    assert drafted > 20
    if heat.get("rule") != "exact":
        assert [seq.generated for seq in seqs] == want


def test_a_good_one_is_believed_and_a_failed_step_leaves_nothing(monkeypatch) -> None:
    engine = made("llama", rows=1, noise=0.02)
    target, want = engine.target, plain(zoo.model("llama", label="target", chunk=8), asked()[:1])[0]
    seq, score, broken = engine.submit(asked()[0]), target.score, [False]

    def fails(*given: Any, **named: Any) -> Any:
        if broken[0]:
            raise RuntimeError("told to")
        return score(*given, **named)

    monkeypatch.setattr(target, "score", fails)
    for step in range(100):
        broken[0] = step % 3 == 1
        try:
            engine.step()
        except RuntimeError:
            check_cache("llama", target, [seq])
        if seq.finish_reason:
            break
    assert seq.generated == want and sum(r.accepted[0] for r in seq.records if r.levels.get(COPY)) > 5


def test_it_reads_no_text_and_forgets_none() -> None:
    target = zoo.model("llama", label="target", chunk=8)
    view = HFView(target, zoo.module("llama", noise=0.5), COPY)
    seq = Sequence(request([3, 1, 4, 1, 5] * 20, "long"), [3, 1, 4, 1, 5] * 20)
    target.open(seq)
    view.begin_at(seq, 4)
    view.prefill([seq])
    assert (view.computed, target.computed) == (0, 99), "text is the target's to read"
    assert target.rows.of(seq).text == seq.tokens[:-1]
    engine = Engine(target, {COPY: ModelDrafter(view, COPY)}, fixed(Plan(((COPY, 2, 1),))), 4)
    run(engine, [request([5, 4, 3] * 30, "asked", max_tokens=2, drafters=frozenset([COPY]))])
    assert 0 < view.computed < 8


def test_its_logits_are_those_of_its_weights_on_the_target_s_text() -> None:
    """With the target's own weights: the target's."""
    target = zoo.model("gemma3", label="target", chunk=8)
    view, tokens = HFView(target, zoo.module("gemma3"), COPY), [3, 5, 8, 13, 21, 34, 2, 9, 4]
    seq = Sequence(request(tokens, "one"), list(tokens))
    target.open(seq)
    target.prefill([seq])
    draft = tree.grow(Draft(rows=1), np.array([~0]), np.array([7]), 1)
    got = view.score([seq], draft, tree.all_places(draft)).logits
    for row, text in zip(got, (tokens, [*tokens, 7]), strict=True):
        torch.testing.assert_close(row, recompute(target)(text), atol=1e-3, rtol=1e-3)


def test_it_holds_no_cache_and_none_is_planned_for_it(folder, monkeypatch) -> None:
    target, _, whole = load.load_model(folder, rows=8, dtype="float32")
    copied, plan = load_copy(target, folder, COPY, "int8")
    assert plan.cache == 0 < whole.cache and plan.weights == copied.spec.weight_bytes > 0
    assert copied.held_bytes() < target.held_bytes() - target.store.bytes
    (mine, its), norms = [m.module.get_input_embeddings().weight for m in (copied, target)], [m.module.model.norm.weight for m in (copied, target)]
    assert mine is its and norms[0] is norms[1], "what is whole in both is held once"
    assert copied.module.lm_head.weight.dtype == target.module.lm_head.weight.dtype and isinstance(copied.module.lm_head, QuantisedLinear)
    room = whole.total + memory_plan(folder, "float32", 0, 256, quantise="int8").total + 1000
    monkeypatch.setattr(load.psutil, "virtual_memory", lambda: type("Memory", (), {"available": room}))
    assert outrider.load(folder, ["quantised:int8"], rows=8, dtype="float32", **HOW).engine.drafters
    monkeypatch.setattr(assemble, "near", lambda device: False)
    with pytest.raises(outrider.OutriderError, match="the pipeline needs"):
        outrider.load(folder, ["quantised:int8"], rows=8, dtype="float32", **HOW)


def test_where_guesses_stay_on_a_device_it_has_a_cache_of_its_own(folder, monkeypatch) -> None:
    monkeypatch.setattr(assemble, "near", lambda device: False)
    copied = outrider.load(folder, ["quantised:int8"], rows=1, **HOW).engine.drafters["quantised"].model  # type: ignore[attr-defined]
    assert type(copied) is HFModel and copied.own


def test_who_reads_no_text_does_not_begin_with_its_end(folder) -> None:
    rt = outrider.load(folder, ["quantised:int8", "early-exit:1", f"model:{folder}"], rows=1, **HOW)
    controller, at, views = rt.engine.controller, Situation("", 1, 512, False), ("quantised", "early-exit:1")
    assert isinstance(controller, Adaptive) and controller.starts.tails == {"model"}
    costs = controller.tables.costs
    assert costs.views == set(views)
    costs.verified(at, 0, 0.01)
    assert costs.catching_up("model", at, 1000) > 0.01 and not any(costs.catching_up(name, at, 1000) for name in views)
    page = controller.tables.page(at)
    assert page is not None
    step = Step(controller.tables, page, [Row()], 1, 10.0, 1.0)
    assert [step.unread(Row(), name, 1000) for name in (*views, "model")] == [0, 0, 1000]
    again = Costs({})
    again.take(json.loads(json.dumps(costs.state())))
    assert again.views == costs.views, "replays know it, too"
    played = policies.policy("adaptive", list(rt.engine.drafters), costs.state(), "")
    assert isinstance(played, Adaptive) and played.starts.tails == {"model"}


def test_a_sweep_takes_what_it_drafts_for_drafting(folder) -> None:
    """And tells nothing of reading, whatever it has left out before."""
    rt = outrider.load(folder, ["quantised:int8", f"model:{folder}"], rows=1, compile="off", profile="off")
    assert rt.keeper is not None
    profiler.sweep(rt.engine, rt.keeper.tables, context=48, patience=20.0, repeats=2)
    costs = rt.keeper.tables.costs
    assert set(costs.catch_up) == {"model"} and len(costs.draft) == 2


@pytest.mark.parametrize(
    "drafters",
    always(
        3,
        [
            ["quantised:int8", "quantised:int4", "early-exit:1", "lookup"],
            ["early-exit:1", "quantised:int8"],
            ["staged:early-exit:1>quantised:int4"],
            ["early-exit:1", "quantised:int4", "lookup"],
            ["staged:quantised:int4>early-exit:1"],
        ],
    ),
    ids=" ".join,
)
def test_several_share_one_cache(folder, drafters: list[str]) -> None:
    """What an early exit has computed is not taken for its own where a copy has written since."""
    plainly, rt = outrider.load(folder, [], rows=1, **HOW), outrider.load(folder, drafters, rows=2, depth=3, **HOW)
    for prompt in ("the quick brown", "a b c a b"):
        out = rt.generate(prompt, max_tokens=60, ignore_eos=True)
        assert out.tokens == plainly.generate(prompt, max_tokens=60, ignore_eos=True).tokens and out.stats["accepted"] > 5
    assert len({id(part.model.rows) for part in rt.engine.drafters.values() if hasattr(part, "model")}) == 1
    assert "reusing" in rt.program()["program"]


@pytest.mark.parametrize("again", [[1, 2], [2], [~0, 0, 1], []], ids=str)
def test_an_early_exit_goes_on_behind_a_copy(again: list[int]) -> None:
    """It was asked, a copy was, and it is again: what it computed first is there no longer, and what it finds then hangs on the copy's keys, unless it
    begins anew."""
    target = zoo.model("llama", label="target", chunk=8)
    exits, copied, tokens = EarlyExit(target, 1), HFView(target, zoo.module("llama", noise=0.5), COPY), [3, 5, 8, 13, 21, 34, 2, 9, 4]
    seq = Sequence(request(tokens, "one"), list(tokens))
    target.open(seq)
    target.prefill([seq])
    draft = tree.run(Draft(rows=1), ~0, [7, 11, 13], 1, [1.0] * 3)
    for view, places in ((exits, [~0, 0]), (copied, [~0, 0, 1]), (exits, again)):
        if places:
            view.score([seq], draft, places)
    assert len(exits.known) == (3 if ~0 in again else 0 if again else 2)
    got = target.score([seq], draft, tree.all_places(draft), reusing=exits).logits
    for n, row in enumerate(got):
        torch.testing.assert_close(row, recompute(target)([*tokens, 7, 11, 13][: len(tokens) + n]), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("seed", always(4, range(24)))
def test_whoever_drafts_in_whatever_order_the_text_is_the_target_s(seed: int) -> None:
    """Two copies, an early exit that is inlined and lookup: in random unions and stages, to random depths and widths; steps fail, requests are
    cancelled."""
    draw, name = random.Random(seed), ("llama", "mistral", "qwen2")[seed % 3]
    want, target = plain(zoo.model(name, label="target", chunk=8), asked()), zoo.model(name, label="target", chunk=8)
    views = [HFView(target, zoo.module(name, noise=noise), f"copy-{noise}") for noise in (0.02, 0.5)]
    parts: list[Any] = [Lookup(floor=0.0), ModelDrafter(EarlyExit(target, 1), EXIT), *[ModelDrafter(view, view.spec.name) for view in views]]
    draw.shuffle(parts)
    names = [part.name for part in parts]

    def plan(_: Any) -> tuple[Plan, str]:
        some = [(name, draw.choice([1, 2, 3, 8]), 1 if name == "lookup" else draw.choice([1, 1, 2, 3])) for name in names if draw.random() < 0.6]
        return Plan(tuple(some), draw.choice([0, 0, 3, 10]) if some else 0), "drawn"

    def fails(score: Any) -> Any:
        def scored(*given: Any, **named: Any) -> Any:
            out = score(*given, **named)
            if draw.random() < 0.03:
                raise RuntimeError("told to")
            return out

        return scored

    for model in (target, *views):
        model.score = fails(model.score)  # type: ignore[method-assign]
    stages = [names[:2], names[2:]] if seed % 2 else None
    engine = Engine(target, {part.name: part for part in parts}, Told(plan), 1 + seed % 3, stages=stages)
    seqs = [engine.submit(one) for one in asked()]
    while any(seq.finish_reason is None for seq in seqs):
        with contextlib.suppress(RuntimeError):
            engine.step()
        if draw.random() < 0.01:
            engine.cancel(draw.choice([seq for seq in seqs if seq.finish_reason is None] or seqs))
    for seq, whole in zip(seqs, want, strict=True):
        assert seq.generated == (whole[: seq.produced] if seq.finish_reason in ("cancelled", "failed") else whole)
        assert (str(seq.failure) == "told to") == (seq.finish_reason == "failed")
    assert any("reusing" in str(op) for op in engine.jit.module("greedy").walk())


def test_one_that_overflows_is_an_error_and_leaves_nothing() -> None:
    """Not slots that are no numbers, which no mask hides from the target."""
    target, module = zoo.model("llama", label="target", chunk=8), zoo.module("llama")
    torch.nn.init.constant_(module.get_input_embeddings().weight, torch.nan)
    plans = iter([Plan(((COPY, 3, 2),), budget=2), Plan(((COPY, 2, 1),)), Plan(((COPY, 2, 2),))])
    engine = Engine(target, {COPY: ModelDrafter(HFView(target, module, COPY), COPY)}, Told(lambda _: (next(plans, Plan()), "turn")), 1)
    seq = engine.submit(asked()[1])
    for _ in range(3):
        with pytest.raises(outrider.OutriderError, match="NaN"):
            engine.step()
    while seq.finish_reason is None:
        engine.step()
    assert seq.generated == plain(zoo.model("llama", label="target", chunk=8), asked()[1:2])[0]


def test_who_reads_no_text_has_no_package_for_it(folder, cache) -> None:
    rt = outrider.load(folder, ["quantised:int8"], rows=1, profile="off")
    target, copied = [model.compiled for model in (rt.engine.target, rt.engine.drafters["quantised"].model)]  # type: ignore[attr-defined]
    assert (target.shapes, copied.shapes) == (SHAPES, STEPS) and not copied._whole()
    for shape in STEPS:
        copied._file(shape).parent.mkdir(parents=True, exist_ok=True)
        copied._file(shape).write_bytes(b"")
    assert copied._whole() and copied.recipe.frozen == SHAPES, "built for a target in as many bits it is the same folder"
    _, plan = load_copy(rt.engine.target, folder, COPY, "int8", "auto")  # type: ignore[arg-type]
    assert plan.frozen == STEPS


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "coupled"])
def test_strict_logits_are_the_same_bits_with_it(folder, sampling: dict[str, Any]) -> None:
    rt = outrider.load(folder, ["quantised:int4"], strict=True, dtype="bfloat16", rows=2, **HOW)
    want = run_with(rt, Plan(), requests(rt, sampling, PROMPTS[:3]))
    for plan in (Plan((("quantised", 3, 1),)), Plan((("quantised", 2, 2),)), Plan((("quantised", 8, 1),))):
        seqs, bits = run_with(rt, plan, requests(rt, sampling, PROMPTS[:3]))
        assert [seq.generated for seq in seqs] == [seq.generated for seq in want[0]] and bits == want[1]
        assert sum(r.accepted[0] for seq in seqs for r in seq.records) > 5
