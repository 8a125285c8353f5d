"""What looks at drafters brought in the requests before says how soon the next one is looked at: of a pair that pays, and of one that does not."""

from dataclasses import replace
from random import Random
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
from test_controller import flat
from written import adaptive, costs, drive, linear, trace

from outrider.bench.policies import policy
from outrider.bench.recording import Trace
from outrider.control.accounts import CHILLED, Held
from outrider.control.past import HOPED, LATE, MOST, PAYS, Past
from outrider.control.rows import LOST, SHARE, WORST, Row, looked
from outrider.core.types import StepRecord
from outrider.measure.cost import COLD
from outrider.measure.profile import merged

DEAR = costs(linear(0.3), {"lookup": linear(0.0, 0.5)})  # asking it takes half a plain step


def texts(right: list[bool], length: int = 40) -> Trace:
    """Short ones: all of lookup's guesses come true in some, hardly any in the others."""
    made = {said: trace(6, DEAR, {"lookup": lambda t, d, p=p: p}, texts=len(right), length=length) for said, p in ((True, 0.95), (False, 0.02))}
    return replace(made[True], texts=[made[said].texts[i] for i, said in enumerate(right)])


def first(records: list[StepRecord]) -> int:
    """The step of a text in which its drafter was first asked; as many as it has, where it never was."""
    return next((i for i, r in enumerate(records) if r.levels), len(records))


def driven(right: list[bool]) -> tuple[Any, list[list[StepRecord]]]:
    of = texts(right)
    return (controller := adaptive(of)), drive(of, controller)


def test_where_nothing_pays_looks_take_their_share_of_all_texts_and_not_of_each() -> None:
    """A look would be more than that of any of these texts: it is made in one of several, and not in none."""
    controller, each = driven([False] * 160)
    later, past = each[60:], controller.tables.past
    lost = sum(r.reading.seconds - r.emitted[0] for r in flat(later)) / sum(r.emitted[0] for r in flat(later))
    assert not past.pays
    assert 0.5 * SHARE / LOST < lost < 1.6 * SHARE / LOST
    asked = [first(records) < len(records) for records in later]
    assert 5 < sum(asked) < len(asked) / 3, "it is made all the same"


def test_a_text_that_gains_has_all_others_looked_at_at_once() -> None:
    """Who was looked at in a text in which it is right is looked at from the first step of those that follow, and for as long as one of many gains."""
    controller, each = driven([False] * 40 + [True] * 40 + ([False] * 9 + [True]) * 4)
    assert mean(first(records) for records in each[20:40]) > 20
    found = next(i for i, records in enumerate(each[40:], 40) if first(records) < 20)
    assert found < 80 and all(first(records) < 3 for records in each[found + 4 : 80]), "some texts go by until a look is due"
    assert controller.tables.past.pays
    assert mean(first(records) for records in each[89::10]) < 15, "what nine lost keeps the tenth from little of what it gains"


def test_a_pair_of_which_some_texts_gain_goes_on_to_pay_for_many_that_do_not() -> None:
    def writes(past: Past, brought: float) -> bool:
        row = past.row()
        row.looked, row.brought, row.worth, row.read = 3, brought, brought / 3, {"lookup": 9}
        past.ended(row, 40)
        return past.pays

    new, gone = Past(), 1
    while writes(new, 0.0):
        gone += 1
    assert 0.9 < (1 - LATE) ** gone * HOPED / PAYS < 1.1 and gone > 30, "the first texts say little of those to come"
    old, gone = Past({"requests": [64, -0.01]}), 1
    assert not old.pays and not writes(old, 1.0) and writes(old, 10.0), "one that gains says much, if it gains enough"
    began = old.gain
    while writes(old, 0.0):
        gone += 1
    assert 0.9 < (1 - LATE) ** gone * began / PAYS < 1.1


def test_chance_is_not_taken_for_a_gain_and_a_kind_of_texts_that_gains_is() -> None:
    """Where nothing is gained some requests seem to, by as much as clocks are off; where one of six gains, that is enough."""

    def paid(gains: list[float]) -> float:
        past, found = Past({"requests": [MOST, 0.1]}), []
        for gained in gains:
            row = past.row()
            row.looked, row.brought, row.read = 3, 40 * gained, {"lookup": 9}
            past.ended(row, 40)
            found.append(past.pays)
        return mean(found[80:])

    chance = Random(0)
    assert paid([chance.gauss(-0.01, 0.05) for _ in range(2000)]) < 0.1
    assert paid([chance.gauss(0.3 if i % 6 == 0 else -0.01, 0.05) for i in range(2000)]) == 1


def test_of_a_pair_that_does_not_pay_a_rest_goes_on_in_the_next_text_and_nothing_is_forgotten() -> None:
    past = Past({"looks": [20, -0.5], "requests": [9, -0.01]})
    row, past.last = past.row(), 1000
    rest = LOST * int(0.5 / SHARE)
    assert [past.rest(row, 0, now) for now in (1000, 1050, 1000 + rest, 5000)] == [rest, rest - 50, 0, 0]
    assert past.rest(row, 3 * rest, 1000 + rest) == 2 * rest, "what must be read first is earned in the texts before, too"
    past.ended(row, 40)
    assert (past.worth, past.state()["requests"]) == (-0.5, [9, -0.01]), "nobody was looked at"
    paying = Past({"looks": [20, -0.5], "requests": [9, 0.3]})
    assert paying.state()["looks"] == [20, 0.0], "what its last texts were says nothing of the first ones of another process"
    assert paying.rest(paying.row(), 0, 5000) == rest, "there it is what the last texts say of this one, whenever they were"
    paying.ended(paying.row(), 40)
    assert -0.5 < paying.worth < 0, "and is forgotten little by little"
    assert paying.rest(replace(paying.row(), worth=0.1), 10**6, 0) == 0


def test_looks_brought_what_came_and_not_what_was_expected() -> None:
    row = Row()
    looked([row], (), 0.5, luck=-0.1)
    looked([row], (), -0.1, times=3)
    looked([row], (), -100.0)
    assert row.brought == pytest.approx(0.4 - 0.3 - WORST)
    of = trace(6, costs(linear(0.3), {"lookup": linear(0.0, 0.05)}), {"lookup": lambda t, d: 0.6}, length=300, score=lambda p: 0.9)
    controller, brought = adaptive(of), list[float]()
    ended = controller.starts.ended
    controller.starts.ended = lambda row: (brought.append(row.brought), ended(row))[1]
    (records,) = drive(of, controller)
    gained = sum(r.emitted[0] - r.reading.seconds for r in records)
    assert gained > 30 and brought == [pytest.approx(gained, abs=3.0)], "what was expected is too much in the first steps"


def charged(gain: float, *, thought: bool, reading: float = 0.0, longer: float = 0.3, dearer: float = 1.0, thinking: float = 0.0) -> float:
    """Plain steps that a look is held to have brought, among plain steps, that found nothing: its step took 0.1 to ask and `longer` because all was cold, and its
    drafter read for so long, which the target's reading has paid for."""
    of = trace(6, costs(linear(0.3), {"lookup": linear(0.0, 0.1)}), {"lookup": lambda t, d: 0.02}, length=60)
    (records,) = drive(of, controller := adaptive(of))
    page, accounts, past = controller.page, controller.accounts, controller.tables.past
    past.requests, past.gain, page.plain = 9, gain, dearer * page.plain
    seq = SimpleNamespace(request=SimpleNamespace(id="z"), read=100.0)
    took = page.owed + longer + (0.1 + reading) * thought + thinking
    seconds = {"draft lookup": 0.1 + reading, "choose": thinking} if thought else {"choose": thinking}
    plain = next(r for r in records if not r.levels)
    record = replace(plain, requests=("z",), reading=replace(plain.reading, seconds=took), seconds=seconds, levels={"lookup": 1} if thought else {})
    row, step = Row(), SimpleNamespace(reads=reading > 0, spent=0.1, names=["lookup"])
    held = Held([seq], record, step if thought else None, ("lookup",), True, COLD)
    if thought:
        accounts.charge(page, [row], held)
    else:
        accounts.hold(held)
        accounts.settle(page, lambda seqs: [row], guarded=False)
    return row.brought


def test_where_looks_do_not_pay_one_is_charged_with_all_that_it_took() -> None:
    """Also with what others pay for where looks pay: what was read for it, and the plain step that found all cold."""
    assert charged(0.5, thought=True) == pytest.approx(-0.1, abs=0.02) and charged(-0.01, thought=True) == pytest.approx(-0.4, abs=0.02)
    assert charged(0.5, thought=True, reading=2.0) == pytest.approx(-0.1, abs=0.02)
    assert charged(-0.01, thought=True, reading=2.0) == pytest.approx(-2.4, abs=0.02)
    assert charged(0.5, thought=False) == pytest.approx(0, abs=0.02) and charged(-0.01, thought=False) == pytest.approx(-0.3, abs=0.02)
    assert charged(-0.01, thought=False, longer=-0.3) == pytest.approx(0, abs=0.02), "a quick step has gained nothing"
    assert charged(-0.01, thought=True, dearer=2.0) == pytest.approx(-0.4, abs=0.02), (
        "in steps such as go by in a rest, not such as stand between wider ones"
    )


def test_what_thinking_leaves_cold_is_none_of_what_a_look_brought() -> None:
    """Where looks pay, and a plain step's own clock says what plain decoding would have taken: that shows no cold. Elsewhere it is seen beside steps that
    went by in a rest, and counted once."""
    for thought, asking in ((True, 0.1), (False, 0.0)):
        assert charged(0.5, thought=thought, thinking=0.2) == pytest.approx(-asking - 0.2 * (1 + CHILLED), abs=0.02)
        assert charged(-0.01, thought=thought, thinking=0.2) == pytest.approx(-asking - 0.2 - 0.3, abs=0.02)


def test_a_second_process_begins_with_what_the_first_one_lost() -> None:
    of = texts([False] * 60)
    first_one = adaptive(of)
    drive(of, first_one)
    state = first_one.tables.state()
    second = policy("adaptive", of.drafters, of.costs, "replay", state)
    assert second.tables.past.state() == state["past"] and not second.tables.past.pays
    rested = [r.reason for r in drive(of, second)[0]]
    assert set(rested) == {"off:resting"}
    two = merged({"past": {"looks": [8, -1.0]}}, {"past": {"looks": [12, -2.0]}}, {"past": {"looks": [4, -1.0]}})["past"]["looks"]
    assert two == [16, pytest.approx(-1.75)], "two processes that learned at once are both heard"
    assert first_one.tables.past.looks <= MOST
    for kept in (state["past"], {"looks": [20, 0.0], "requests": [9, 0.3]}):
        assert Past(kept).state() == kept, "who learned nothing has nothing to write"


@pytest.mark.parametrize("state", [{"looks": [-1, 0.0]}, {"looks": [3, float("nan")]}, {"requests": [-1, 0.0]}, {"requests": [3, float("inf")]}])
def test_nonsense_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="what looks brought"):
        Past(state)
