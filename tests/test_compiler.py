"""Laws 3 and 4: generated code equals the interpreter, and no pass changes what a program writes. What passes save, counted."""

import random
from collections import Counter
from typing import Any

import pytest
from programs import NAMES, Picky, random_plan, random_program, written
from xdsl.dialects.builtin import ModuleOp

from outrider.compiler import jit as jit_module
from outrider.compiler.pipeline import BACK, FRONT, PASSES, Pipeline, passes
from outrider.control.fixed import Told
from outrider.core.types import Plan
from outrider.ir.text import parse, programs, show

RULES = ("greedy", "coupled", "exact")


def told(records: list[Any]) -> list[Any]:
    """All that a step decided."""
    return [
        (
            r.plan,
            r.context,
            r.drafted,
            r.accepted,
            r.emitted,
            r.tokens,
            r.kept,
            r.levels,
            r.reason,
            r.trimmed,
            r.draft.token,
            r.draft.parent,
            r.draft.source,
        )
        for r in records
    ]


@pytest.mark.parametrize("control", [Told, Picky])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("first", [0, 21, 42, pytest.param(63, marks=pytest.mark.slow), pytest.param(84, marks=pytest.mark.slow)])
def test_generated_code_equals_the_interpreter(first: int, rule: str, control: type[Told]) -> None:
    """Law 3, token for token and node for node, 21 random programs at a time, a random plan at every step."""
    drafted = 0
    for seed in range(first, first + 21):
        rng = random.Random(f"{seed} {rule}")
        module, rows = random_program(rng, rule), rng.choice([1, 1, 3])
        found = []
        for hot in (None, 0):
            plans = random.Random(seed)
            texts, records, _engine = written(
                lambda rule, m=module: m.clone(), lambda p=plans: random_plan(p), rule, rows=rows, control=control, front=(), hot=hot
            )
            assert {r.tiers["step"] for r in records} == {"interpreted" if hot is None else "generated"}
            found.append((texts, told(records)))
            drafted += sum(sum(r.drafted) for r in records)
        assert found[0] == found[1], f"seed {seed}\n{show(module)}"
    assert drafted > 50


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("seed", range(40))
def test_passes_change_no_text(rule: str, seed: int) -> None:
    """Law 4: each pass alone, and some in a random order, on a program that is run."""
    rng = random.Random(f"{seed} {rule}")
    module = random_program(rng, rule)
    plain, _, _ = written(lambda rule: module.clone(), Plan, rule, front=(), hot=None)
    order = rng.sample(FRONT, len(FRONT))
    for front in [(name,) for name in FRONT] + [tuple(order[: rng.randint(2, len(order))]), FRONT]:
        plans = random.Random(seed)
        text, _, _ = written(lambda rule: module.clone(), lambda p=plans: random_plan(p), rule, front=front, hot=rng.choice([None, 0]))
        assert text == plain, f"{front}\n{show(Pipeline(passes(front)).run(module.clone()))}"


def test_every_pass_is_run_somewhere() -> None:
    assert set(FRONT) | set(BACK) == set(PASSES)


TWICE = """outrider.program @twice {
  %text = outrider.context
  %a = outrider.propose "model" on %text depth 3 width 1 : point
  %b = outrider.propose "model" on %text depth 3 width 1 : point
  %c = outrider.propose "weak" on %text depth 3 width 1 : point
  %draft = outrider.union %a, %b
  %scores = outrider.score %draft on %text by "target"
  %outcome = outrider.accept %draft, %scores by "greedy"
  outrider.commit %outcome
}
"""
ALL = Plan(tuple((n, 3, 1) for n in NAMES))


def forwards(text: str, front: tuple[str, ...], back: tuple[str, ...] = ("specialize", "lower")) -> tuple[list[list[int]], Counter[str], int]:
    """(texts, forwards of each model a step, nodes scored a step)."""
    texts, records, engine = written(lambda rule: parse(text), lambda: ALL, "greedy", rows=1, front=front, back=back, hot=0)
    count = Counter({name: engine.drafters[name].model.forwards for name in ("model", "weak")})  # type: ignore[attr-defined]
    return texts, count, sum(sum(r.drafted) for r in records)


def test_cse_and_dce_save_calls_of_models() -> None:
    texts, all_of_it, nodes = forwards(TWICE, ())
    same, once, fewer = forwards(TWICE, ("cse",))
    again, alive, as_many = forwards(TWICE, ("dce",))
    assert texts == same == again
    assert once["model"] * 2 == all_of_it["model"] > 0 and fewer * 2 == nodes
    assert alive["model"] == all_of_it["model"] and as_many == nodes and alive["weak"] == 0 < all_of_it["weak"]


def test_independent_draws_are_never_one() -> None:
    text = TWICE.replace("width 1 : point\n  %b", "width 1 sample 0 : sampled\n  %b").replace(
        "3 width 1 : point\n  %c", "3 width 1 sample 1 : sampled\n  %c"
    )
    text = text.replace('"greedy"', '"k_seq"')
    module = Pipeline(passes("canonicalize,cse,dce")).run(parse(text))
    assert show(module).count('propose "model"') == 2
    cold = Pipeline(passes("canonicalize,cse,dce")).run(parse(text.replace('"k_seq"', '"k_seq" at temperature 0')))
    assert show(cold).count('propose "model"') == 1, "at temperature 0 they are the same guess"


def test_merged_tries_score_fewer_nodes() -> None:
    text = TWICE.replace("%a, %b", "%a, %c, %l").replace(
        '  %draft', '  %l = outrider.propose "lookup" on %text depth 3 width 1 : point\n  %draft'
    )  # fmt: skip
    texts, _calls, apart = forwards(text, ("cse", "dce"))
    same, _fewer_calls, merged = forwards(text, ("cse", "merge-tries", "dce"))
    assert texts == same and merged < apart


def test_a_relay_asks_the_small_model_less() -> None:
    """What the lookup guessed right the small model reads in one forward."""
    staged = TWICE.replace('%a = outrider.propose "model" on %text depth 3 width 1 : point', '%l = outrider.propose "lookup" on %text depth 3 width 1 : point\n'
                           '  %a = outrider.relay "model" over %l depth 1 : point').replace("%a, %b", "%a")  # fmt: skip
    texts, calls, _ = forwards(staged, ("dce",))
    flat, same, _ = forwards(staged, ("flatten-relay", "dce"))
    assert texts == flat and calls == same
    alone, per_token, _ = forwards(TWICE.replace("%a, %b", "%a"), ("dce",))
    assert texts == alone and calls["model"] < per_token["model"]


def test_a_plan_becomes_code_when_it_is_hot_and_starts_anew_with_the_batch() -> None:
    _, records, _engine = written(lambda rule: parse(TWICE), lambda: ALL, "greedy", rows=2, tokens=25)
    tiers = [(len(r.requests), r.tiers["step"]) for r in records]
    alike = [tier for rows, tier in tiers if rows == 2]
    assert alike[: jit_module.HOT] == ["interpreted"] * jit_module.HOT and set(alike[jit_module.HOT :]) <= {"generated"}
    lone = [tier for rows, tier in tiers if rows == 1]
    assert lone[0] == "interpreted" and "generated" in lone, "other facts, a tier lower"


@pytest.mark.parametrize("hot", [None, 0])
def test_who_is_made_of_a_controller_that_only_tells_is_asked(hot: int | None) -> None:
    pruned = TWICE.replace("  %scores", "  %kept = outrider.prune %draft budget ?\n  %scores", 1)
    pruned = pruned.replace("score %draft", "score %kept").replace("accept %draft", "accept %kept")
    for control, reason in ((Picky, "picked"), (Told, "random")):
        _, records, _ = written(lambda rule: parse(pruned), lambda: ALL, "greedy", control=control, hot=hot)
        assert {r.reason for r in records if any(r.drafted) or any(r.trimmed)} == {reason}


def test_the_cache_forgets_the_oldest_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_module, "MOST", 3)
    rng = random.Random(0)
    _, _, engine = written(lambda rule: parse(TWICE), lambda: random_plan(rng), "greedy", tokens=40)
    assert len(engine.jit.known) <= 3


def test_facts_rule_out_what_code_leaves_out() -> None:
    """Nothing is asked of a controller that only tells, and no limit is looked for where there is none."""
    from outrider.compiler.opt import PLAIN, step_of

    lowered = Pipeline(passes(["flatten-relay", "dce", "lower"])).run(parse(TWICE))
    sure = step_of(programs(lowered)[0])
    wary = step_of(programs(lowered)[0], PLAIN._replace(told=False, free=False, one=False, raw=False))
    assert "controller" not in sure and "decided(scores)" in sure and "[-1" in sure
    assert "forest.grow" in wary and "accept(" in wary and "len(seqs)" in wary


def test_a_program_of_ones_own_is_run(tmp_path: Any) -> None:
    module: ModuleOp = parse(TWICE)
    texts, records, _engine = written(lambda rule: module.clone(), lambda: ALL, "greedy", rows=1)
    assert texts and all(r.levels.get("lookup") is None for r in records), "it asks no lookup"
