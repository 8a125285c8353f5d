"""Requests that run beside one another, or follow one another: what the scheduler learns of one says nothing of those that did not want it."""

import pytest
from contracts import plain, request
from tiny import Ruled

from outrider.control.controller import Adaptive
from outrider.control.fixed import fixed
from outrider.control.tables import Tables
from outrider.core import tree
from outrider.core.types import Plan, Sequence
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.measure.cost import Costs
from outrider.models.toy import ToyModel
from outrider.runtime.engine import Engine

NOBODY = frozenset[str]()


def rule(text: list[int]) -> int:
    return (7 * len(text) ** 2 + len(text) + text[0]) % 293


class Knowing:
    """Knows the rule, and says nothing in the first `quiet` tokens of request a."""

    name, draws = "model", False

    def __init__(self, quiet: int) -> None:
        self.quiet = quiet

    def begin(self, seq): ...

    def end(self, seq): ...

    def observe(self, *step): ...

    def extend(self, seqs, draft, frontier, width, source, settings, noise, levels=1, on=None):
        for p in frontier:
            seq = seqs[tree.row_at(draft, p)]
            if seq.request.id == "a" and seq.produced < self.quiet:
                continue
            text = [*seq.tokens, *draft.text(tree.ancestors(draft, p))]
            for _ in range(levels):
                text.append(rule(text))
            draft = tree.run(draft, p, text[-levels:], source, [0.95] * levels)
        return draft


class Long(Ruled):
    """One whose context holds long texts."""

    def __init__(self, name: str = "toy", rows: int = 2, says=rule) -> None:
        ToyModel.__init__(self, 300, 0, rows=rows, name=name, context=4000)
        self.rule = says


def scheduled(price: float, drafter=None, rows: int = 2, says=rule, state=None) -> tuple[Engine, Adaptive]:
    """One drafter, a level of which is assumed to take `price` plain steps; seconds are forwards."""
    target, draft = Long(rows=rows), Long("model", rows, says)
    controller = Adaptive(Tables({"model": 1}, Costs({"model": price}), state=state), lambda: "")
    engine = Engine(target, {"model": drafter or ModelDrafter(draft, "model")}, controller, rows)
    engine.now = lambda: target.forwards + 0.02 * target.computed + price * draft.forwards
    return engine, controller


def ended(engine: Engine, seq: Sequence) -> Sequence:
    while seq.finish_reason is None:
        engine.advance([seq])
    return seq


@pytest.mark.parametrize("price", [0.01, 0.2])
@pytest.mark.parametrize("beside", [False, True])
def test_who_rests_in_one_text_wakes_though_it_guesses_in_another(price: float, beside: bool) -> None:
    """Forty tokens without a guess, and then all of them right: within a rest (of sixteen steps) the drafter is asked again, whoever runs beside."""
    engine, _ = scheduled(price, Knowing(40))
    one = engine.submit(request([97, 2, 3], "a", max_tokens=220))
    if beside:
        engine.submit(request([98, 2, 3], "b", max_tokens=2000))
    ended(engine, one)
    done = quiet = drafted = 0
    for r in one.records:
        at = r.requests.index("a")
        drafted += r.drafted[at]
        quiet += done >= 40 and not drafted
        done += r.emitted[at]
    assert quiet <= 20 and drafted > 100


def test_who_does_not_want_a_drafter_says_nothing_of_it() -> None:
    """Twenty requests with speculation off beside one that drafts: not one of them is a text in which the drafter was sure, or had to read."""
    engine, controller = scheduled(0.2)
    ended(engine, engine.submit(request([9], "first", max_tokens=4, drafters=NOBODY)))
    other = engine.submit(request([1, 2, 3], "drafts", max_tokens=3000))
    for n in range(20):
        off = ended(engine, engine.submit(request([4, 5, 6 + n], f"off {n}", max_tokens=30, drafters=NOBODY)))
        assert set(off.origins) == {"target"}
    assert other.finish_reason is None and "model" in other.origins
    assert "model steps" not in controller.tables.next.cells, "no text that used it has ended"
    engine.cancel(other)
    assert controller.tables.next.cells["model steps"][0] == 1


def test_what_looks_were_worth_is_not_forgotten_in_requests_that_want_none() -> None:
    engine, controller = scheduled(0.2)
    ended(engine, engine.submit(request([9], "first", max_tokens=12)))
    controller.tables.past.worth = -0.5
    for n in range(10):
        ended(engine, engine.submit(request([1, 2, n], f"off {n}", max_tokens=4, drafters=NOBODY)))
    assert controller.tables.past.worth == -0.5


@pytest.mark.parametrize("rows", [1, 2])
def test_a_last_token_is_no_try(rows: int) -> None:
    """Where nothing may be drafted nobody is asked, and no try of a drafter that does not pay is counted."""
    kinds = {
        **{f"model t{i}": [1000.0, float(i == 0)] for i in range(8)},
        **{f"model s {k}": [1000.0, 0.2] for k in range(4)},
        "model ?": [1000.0, 0.2],
    }
    engine, controller = scheduled(0.4, rows=rows, says=lambda text: 5, state={"next": kinds, "drafts": 1000})
    ended(engine, engine.submit(request([9], "first", max_tokens=12, drafters=NOBODY)))
    before = dict(controller.starts.pause), controller.starts.explored
    for n in range(300):
        seqs = [engine.submit(request([1, 2, 3 + n % 200 + r], f"{n} {r}", max_tokens=1)) for r in range(rows)]
        for seq in seqs:
            ended(engine, seq)
    assert (controller.starts.pause, controller.starts.explored) == before
    longer = ended(engine, engine.submit(request([1, 2], "longer", max_tokens=400)))
    assert any(r.levels for r in longer.records), "it is tried where it may be"


@pytest.mark.parametrize("hot", [None, 0])
def test_a_staged_drafter_that_is_not_in_the_plan_is_not_asked(hot: int | None) -> None:
    """Plain decoding is plain decoding; and the first stage alone drafts alone."""
    for plan, who in ((Plan(), set()), (Plan((("lookup", 3, 1),)), {"lookup"}), (Plan((("lookup", 3, 1), ("model", 3, 1))), {"lookup", "model"})):
        target, draft = ToyModel(20, 1, rows=2), ToyModel(20, 1, rows=2, name="model", blend=(2, 0.1))
        drafters = {"lookup": Lookup(floor=0.1), "model": ModelDrafter(draft, "model")}
        engine = Engine(target, drafters, fixed(plan), 2, stages=[["lookup", "model"]], hot=hot)
        seq = ended(engine, engine.submit(request([1, 2, 3, 1, 2, 3], max_tokens=30)))
        assert {name for r in seq.records for name in r.levels} == who and draft.forwards * ("model" not in who) == 0
        assert any(sum(r.drafted) for r in seq.records) == bool(who)
        assert seq.generated == plain(ToyModel(20, 1), [seq.request])[0]
