"""Growth out of order: below the places that the controller thinks likeliest to survive, which is not what drafters say of
themselves; and it never changes a text."""

from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import pytest
from contracts import plain, request, run
from programs import VOCAB, Contrary, contrary

from outrider.compiler.forest import best
from outrider.control.controller import Adaptive
from outrider.control.fixed import Told, fixed
from outrider.control.tables import Tables
from outrider.core import tree
from outrider.core.sockets import Controller
from outrider.core.types import Draft, Places, Plan, Sequence
from outrider.drafters.model import ModelDrafter
from outrider.ir.text import parse
from outrider.measure.cost import Costs
from outrider.models.toy import ToyModel
from outrider.runtime.engine import Engine

ROUNDS, WIDTH = 4, 2
PROGRAM = f"""outrider.program @tree {{
  %text = outrider.context
  %draft = outrider.propose "model" on %text depth {ROUNDS} width {WIDTH} order "best-first" : point
  %scores = outrider.score %draft on %text by "target"
  %outcome = outrider.accept %draft, %scores by "RULE"
  outrider.commit %outcome
}}
"""
RULES = ("greedy", "coupled")
TOLD = Plan((("model", ROUNDS, WIDTH),))


@dataclass
class Watched:
    """A drafter, and of each of its calls the draft and the places that it was to extend."""

    of: ModelDrafter
    calls: list[tuple[Draft, Places]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)

    def extend(self, seqs: list[Sequence], draft: Draft, frontier: Places, *how: Any, levels: int = 1, on: Any = None) -> Draft:
        self.calls.append((draft, list(frontier)))
        return self.of.extend(seqs, draft, frontier, *how, levels=levels, on=on)


class Backwards:
    """A Predictor by which drafters are wrong about themselves."""

    def predict(self, drafter: str, depth: int, score: float, history: int) -> float:
        return 1 - score

    def update(self, drafter: str, depth: int, score: float, history: int, verdict: float, weight: float = 1.0) -> None: ...


def learned(rows: int, sampled: bool) -> Adaptive:
    """An Adaptive controller that knows what steps cost, next to nothing, and believes in Backwards."""
    at = f"- rows {rows} context 512 {'sampled' if sampled else 'greedy'}"
    flat = {"spread": 1.0, "seen": {str(n): [9.0, 1 + 0.001 * n] for n in range(33)}, "start": 1.0, "slope": 0.001}
    draft = {"spread": 1.0, "seen": {str(n): [9.0, 0.001 * n] for n in range(33)}, "start": 0.0, "slope": 0.001}
    state = {"costs": {"verify": {at: flat}, "draft": {f"model @ {at}": draft}, "plains": {at: 9}}, "drafts": 1000}
    tables = Tables({"model": 1}, Costs({}), state=state)
    tables.predictor = Backwards()
    return Adaptive(tables, lambda: "", slowdown=10.0)


def grown(control: Controller, rule: str, hot: int | None, rows: int = 1) -> tuple[list[list[int]], Watched, Engine]:
    """The texts of two requests, the drafter, and the engine."""
    drafter = Watched(ModelDrafter(ToyModel(VOCAB, 5, rows=rows, scale=1.5, blend=(8, 0.4), name="draft"), "model"))
    engine = Engine(ToyModel(VOCAB, 5, rows=rows, scale=1.5), {"model": drafter}, control, rows, hot=hot,
                    source=lambda wanted: parse(PROGRAM.replace("RULE", wanted)))  # fmt: skip
    engine.now = partial(next, count(0.0, 0.1))  # a step takes about what `learned` knows of it
    return [s.generated for s in run(engine, asked(rule))], drafter, engine


def asked(rule: str) -> list[Any]:
    heat = {} if rule == "greedy" else {"temperature": 0.9, "rule": rule}
    return [request([1 + i, 2, 3], f"b{i}", seed=i, max_tokens=20, **heat) for i in range(2)]


def waiting(calls: list[tuple[Draft, Places]], at: int) -> Places:
    """The places that were not extended yet in the step of a call."""
    first = max(i for i in range(at + 1) if not len(calls[i][0]))
    done = {p for _, places in calls[first:at] for p in places}
    draft = calls[at][0]
    return [p for p in [*tree.roots(draft.rows), *range(len(draft))] if p not in done]


@pytest.mark.parametrize("hot", [None, 0])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["told", "adaptive"])
def test_what_is_calibrated_decides_and_not_what_drafters_say(kind: str, rule: str, hot: int | None) -> None:
    """Every place that is extended is the likeliest by calibration; by the scores, most would have been others."""
    control = learned(1, rule != "greedy") if kind == "adaptive" else Contrary(lambda seqs: (TOLD, "told"))
    texts, drafter, engine = grown(control, rule, hot)
    assert texts == plain(ToyModel(VOCAB, 5, scale=1.5), asked(rule))
    chosen = others = 0
    for i, (draft, places) in enumerate(drafter.calls):
        if len(draft):
            left = waiting(drafter.calls, i)
            assert places == best(draft, left, WIDTH, contrary(draft))
            chosen, others = chosen + 1, others + (places != best(draft, left, WIDTH, tree.survival(draft)))
    assert others > 5 and others > chosen / 2, f"{others} of {chosen}"
    assert {r.tiers["step"] for r in engine.ring if r.levels} == {"interpreted" if hot is None else "generated"}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rows", [1, 2])
def test_generated_code_expands_the_same_places(rule: str, rows: int) -> None:
    found = [grown(Contrary(lambda seqs: (TOLD, "told")), rule, hot, rows) for hot in (None, 0)]
    texts, calls = zip(*[(texts, [(d.token, places) for d, places in drafter.calls]) for texts, drafter, _ in found], strict=True)
    assert texts[0] == texts[1] == plain(ToyModel(VOCAB, 5, scale=1.5), asked(rule)) and calls[0] == calls[1]


def test_who_only_tells_plans_believes_the_drafters() -> None:
    _, drafter, _ = grown(fixed(TOLD), "greedy", 0)
    for i, (draft, places) in enumerate(drafter.calls):
        if len(draft):
            assert places == best(draft, waiting(drafter.calls, i), WIDTH, tree.survival(draft))


def test_a_controller_keeps_its_own_list() -> None:
    """What it is asked may be changed by who asked; before it decides anything it answers the scores."""
    control = learned(1, sampled=False)
    (_, drafter, engine) = grown(control, "greedy", 0)
    draft = max((d for d, _ in drafter.calls), key=len)
    control.step = None
    assert control.survivals([], draft) == tree.survival(draft)
    seqs = [engine.submit(asked("greedy")[0])]
    control.choose(seqs)
    answer = control.survivals(seqs, draft)
    assert answer == pytest.approx(contrary(draft)) and len(draft) > 2
    answer[0] = 9.0
    assert control.survivals(seqs, draft) == pytest.approx(contrary(draft))


class Reluctant(Told):
    """Begins with the first row alone."""

    def more(self, seqs: list[Sequence], name: str, draft: Draft, frontier: Places) -> Places:
        assert -2 not in frontier or not len(draft), "it said so once"
        return [p for p in frontier if p != -2]


@pytest.mark.parametrize("hot", [None, 0])
def test_a_place_that_was_refused_is_not_asked_for_again(hot: int | None) -> None:
    texts, drafter, _ = grown(Reluctant(lambda seqs: (TOLD, "told")), "greedy", hot, rows=2)
    assert texts == plain(ToyModel(VOCAB, 5, scale=1.5), asked("greedy"))
    assert any(d.rows == 2 and len(d) for d, _ in drafter.calls)
