"""Law: drafters are looked at where that can pay, and asked only for what is likely enough; whoever becomes right is seen to be."""

import itertools
import time
from collections import Counter
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
from contracts import request, run, sequence
from test_controller import FREE, flat, lookups
from tiny import Ruled
from written import Weather, adaptive, costs, drive, linear, trace

from outrider.control import controller as controllers
from outrider.control.accounts import Held
from outrider.control.controller import YOUNG, Adaptive
from outrider.control.rows import EARLY, GUESSES, LATE, LOST, PATIENCE, RESTS, SHARE, SILENT, UNPAID, Row, awake
from outrider.control.sleep import EARN
from outrider.control.starts import SAMPLE
from outrider.control.tables import WARM, Tables
from outrider.core.types import Draft, Plan, Sequence, StepRecord
from outrider.drafters.lookup import Lookup
from outrider.measure.cost import Costs
from outrider.models.toy import ToyModel
from outrider.runtime.engine import Engine


class Says:
    """What a drafter keeps with a request, and may tell."""

    def __init__(self, answer: float) -> None:
        self.answer, self.asked = answer, 0

    def chance(self, tokens: list[int]) -> float:
        self.asked += 1
        return self.answer


def test_a_drafter_is_looked_at_before_it_is_asked() -> None:
    """One row with a guess wakes it for all; who cannot tell, or must read much first, is asked; looking in vain leads to rest."""

    def made(name: str, answer: float | None, read: int = 90) -> tuple[Sequence, Row]:
        seq = sequence([0] * 100, name)
        if answer is not None:
            seq.slots["lookup"] = Says(answer)
        return seq, Row(read={"lookup": read})

    def told(*pairs: tuple[Sequence, Row], least: float = 0.5) -> int:
        return awake([s for s, _ in pairs], [r for _, r in pairs], "lookup", lambda name, history: least)

    (no, row), yes, unread, dumb, hardly = made("a", 0.0), made("b", 0.5), made("c", 0.0, read=0), made("d", None), made("e", 0.4)
    assert told((no, row)) == SILENT and told((no, row), yes) == GUESSES and told(yes, (no, row)) == GUESSES
    assert told(unread) == GUESSES and unread[0].slots["lookup"].asked == 0 and told(dumb) == GUESSES
    rested, long = made("f", 0.0, read=100 - EARLY - 1), made("g", 0.0, read=1)
    long[0].tokens.extend([0] * LATE)
    assert told(rested) == SILENT and told(long) == GUESSES, "what was left unread in a rest is read in passing, if it is not much"
    assert told(hardly) == UNPAID and told(hardly, yes) == GUESSES and told(hardly, least=0.4) == GUESSES and hardly[1].vain["lookup"] == 2
    assert row.vain["lookup"] == 3 and row.read["lookup"] == 100
    while not row.rest.get("lookup"):
        assert told((no, row)) == SILENT
    assert row.vain["lookup"] == PATIENCE and told((no, row)) == RESTS and told((no, row), yes) == GUESSES and told((no, row), hardly) == UNPAID


def thinks(controller: Any, world: Weather, seconds: float) -> Weather:
    """Deciding takes so much in each step in which somebody is asked."""
    choose = controller.choose

    def slowly(seqs: list[Sequence]) -> tuple[Plan, str]:
        plan, why = choose(seqs)
        world.time += seconds * bool(plan.drafters)
        return plan, why

    controller.choose = slowly
    return world


@pytest.mark.parametrize(("thinking", "share"), [(0.0, 0.9), (0.3, 0.15)])
def test_thinking_counts_in_whether_a_look_pays(thinking: float, share: float) -> None:
    """The same guesses, which are worth a tenth of a plain step each: asked for nearly always where thinking is free, seldom where it takes more than that."""
    of = trace(4, costs(linear(0.1), {"lookup": linear(0.0, 0.01)}), {"lookup": lambda t, d: 0.25}, texts=4)
    controller = adaptive(of)
    records = flat(drive(of, controller, thinks(controller, Weather(of), thinking)))
    asked = sum(bool(r.levels) for r in records) / len(records)
    assert asked > share if thinking == 0 else asked < share


@pytest.mark.parametrize("thinking", [0.0, 0.3])
def test_where_looks_lose_a_step_that_was_thought_about_is_settled_at_once(monkeypatch: pytest.MonkeyPatch, thinking: float) -> None:
    """Its worth says who rests in the next one; where looks pay several are settled together."""
    of = trace(4, costs(linear(0.1), {"lookup": linear(0.0, 0.01)}), {"lookup": lambda t, d: 0.2}, texts=4)
    controller, went = adaptive(of), list[str]()
    hold, settle = controller.accounts.hold, controller.accounts.settle

    def holds(held: Held) -> bool:
        worth = min(row.worth for row in controller._rows(held.seqs))
        went.append("plain" if held.step is None else "lost" if worth < 0 else "paid")
        return hold(held)

    monkeypatch.setattr(controller.accounts, "hold", holds)
    monkeypatch.setattr(controller.accounts, "settle", lambda *how, **more: went.append("settled") or settle(*how, **more))
    drive(of, controller, thinks(controller, Weather(of), thinking))
    after = Counter(itertools.pairwise(went))
    assert after[("lost", "settled") if thinking else ("paid", "paid")] > 20
    assert {b for a, b in after if a == "lost"} <= {"settled"}


def test_guesses_too_unlikely_to_pay_are_not_asked_for() -> None:
    """Every second guess is nearly always wrong, and its drafter knows it: of those only the ones are asked for that teach, or follow a rest."""
    of = trace(5, costs(linear(0.2), FREE), {"lookup": lambda t, d: 0.9 if t // 4 % 2 else 0.1}, length=3000)
    controller, hardly = adaptive(of), Counter[tuple[bool, bool]]()
    guesses, done = of.texts[0].guesses["lookup"], 0
    for i, r in enumerate(flat(drive(of, controller)), 1):
        if r.reason not in ("off:resting", "off:guard", "probe:plain") and i > YOUNG and guesses[done][0]:
            low = guesses[done][1][0] < 0.5
            assert not low or r.levels or r.reason == "off:unpaid"
            hardly[low, bool(r.levels)] += 1
        done += r.emitted[0]
    assert hardly[False, True] > 100 and not hardly[False, False]
    assert hardly[True, False] > 100 and hardly[True, True] < 2 * (hardly[True, False] + hardly[True, True]) / SAMPLE


def test_what_a_first_token_must_promise_grows_with_what_deciding_takes() -> None:
    of = lookups(linear(0.2), 0.6)
    tables = adaptive(of).tables
    page = tables.page(next(iter(tables.costs.verify)))
    assert page is not None
    asked = [tables.least(replace(page, least={}), "lookup", 0, thinking) for thinking in (0.0, 0.2, 0.5, 1.0, 50.0)]
    assert asked == sorted(asked) and len(set(asked)) == 5 and asked[-1] == 1.0
    assert tables.least(page, "lookup", 0, 0.5) == asked[2] == tables.least(page, "lookup", 0, 1.0), "kept for the life of a page"
    tables.drafts = 0
    assert tables.least(replace(page, least={}), "lookup", 0, 0.5) == 0, "of a new pair everything is asked"


def test_who_lost_in_the_requests_before_is_looked_at_later_and_is_not_forgotten() -> None:
    """Long texts of wrong guesses, then short ones of right guesses, over before the rest that the others earned them: found all the same."""
    priced = costs(linear(0.3), {"lookup": linear(0.0, 0.21)})
    wrong = trace(6, priced, {"lookup": lambda t, d: 0.02}, texts=20, length=200)
    right = trace(7, priced, {"lookup": lambda t, d: 0.95}, texts=40, length=7)
    controller = adaptive(wrong)
    first = [next(i for i, r in enumerate(records) if r.levels) for records in drive(wrong, controller)]
    assert first[0] == 0 and min(first[-5:]) > 10 and controller.tables.past.worth < 0
    verified = [sum(r.drafted[0] for r in records) for records in drive(right, controller)]
    assert not any(verified[:5]) and min(verified[20:]) > 5 and controller.tables.past.worth > 0


def test_who_was_looked_at_in_vain_rests_as_long_as_the_loss_asks_for() -> None:
    """A guess in vain earns a short rest, and a look that lost a long one, of which the short one is no part to begin anew with."""
    priced = costs(linear(0.3), {"lookup": linear(0.0, 0.21)})
    wrong = trace(6, priced, {"lookup": lambda t, d: 0.02}, texts=1, length=2000)
    controller = adaptive(wrong)
    controller.tables.past.worth = -0.1
    asked = [i for i, r in enumerate(flat(drive(wrong, controller))) if r.levels]
    gaps = [b - a for a, b in itertools.pairwise(asked)]
    assert len(gaps) > 15 and min(gaps[3:]) >= LOST * 0.05 / SHARE


def test_a_first_look_that_must_read_much_is_later_still() -> None:
    """Where looks lost, what is read for the next request's first one counts in it: here half a plain step. LOST times as many steps go before it as where it would
    take SHARE of the time, in this text and those before. And it is made, the more seldom the more it lost."""

    def apart(catch_up: float) -> list[int]:
        priced = costs(linear(0.3), {"lookup": linear(0.0, 0.21)}, catch_up)
        of = trace(6, priced, {"lookup": lambda t, d: 0.02}, texts=30, length=300)
        of = replace(of, texts=[replace(text, length=100) for text in of.texts])
        (controller := adaptive(of)).tables.past.gain = 0.0  # none of many has gained
        first, *later = drive(of, controller)
        asked = [i for i, r in enumerate(flat(later), len(first)) if r.levels]
        return [b - a for a, b in itertools.pairwise([max(i for i, r in enumerate(first) if r.levels), *asked])]

    near, far, reading = apart(0.0), apart(0.005), LOST * 0.5 / SHARE
    assert len(near) > 100 and max(near) < 0.8 * reading, "it is made, and in every text"
    assert 0.9 * reading < far[0] < 1.5 * reading and mean(far[-10:]) > 2.2 * reading, "what a look loses is earned back in more texts than one"


def test_a_long_rest_is_slept_soundly_and_earns_as_much() -> None:
    """Steps of a long rest are neither noted nor settled one by one, and leave nearly the credit, and the time, as if they had been."""

    def rested(sound: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, float, int, float]:
        monkeypatch.setattr(controllers, "SOUND", sound)
        of = trace(seed, costs(linear(0.3), {"lookup": linear(0.0, 0.21)}), {"lookup": lambda t, d: 0.02}, texts=1, length=450)
        controller, noted, credit = adaptive(of), list[StepRecord](), list[float]()
        controller.tables.past.worth = -0.2  # rests of 80 steps and more
        note, ended = controller._note, controller.starts.ended
        controller._note = lambda seqs, record: (noted.append(record), note(seqs, record))[1]
        controller.starts.ended = lambda row: (credit.extend(controller.ledger.credit.values()), ended(row))[1]
        records = flat(drive(of, controller, thinks(controller, Weather(of), 0.6)))
        assert controller.steps == len(records)
        return len(noted), credit[0], len(records), sum(r.reading.seconds for r in records)

    with pytest.MonkeyPatch.context() as patch:
        for seed in range(6, 12):
            each, soundly = rested(10**6, seed, patch), rested(8, seed, patch)
            assert each[0] == each[2] and soundly[0] < 0.6 * soundly[2]
            assert abs(each[1] - soundly[1]) < 1, "it earns its share, and no more"
            assert soundly[3] == pytest.approx(each[3], rel=0.01)


@pytest.mark.parametrize("how", ["alone", "rules"])
def test_who_rests_rests_though_others_take_turns(how: str) -> None:
    """Two requests that never share a step are looked at as seldom as one by itself: what is slept in the one is not forgotten in the other."""

    class Silent:
        name, draws, looks = "lookup", False, 0

        def begin(self, seq: Sequence) -> None:
            seq.slots["lookup"] = self

        def chance(self, tokens: list[int]) -> float:
            self.looks += 1
            return 0.0

        def end(self, seq: Sequence) -> None:
            seq.slots.pop("lookup", None)

        def observe(self, *step: object) -> None: ...

        def extend(self, seqs: list[Sequence], draft: Draft, *how: object, **more: object) -> Draft:
            return draft

    def looks(count: int) -> float:
        drafter, ticks = Silent(), itertools.count()
        controller = Adaptive(Tables({"lookup": 1}, Costs({"lookup": 0.05})), lambda: "")
        engine = Engine(ToyModel(20, 1, context=500), {"lookup": drafter}, controller, 2, strict=how == "alone")
        engine.now = lambda: next(ticks) * 1e-4
        heat = {"temperature": 1.0} if how == "rules" else {}
        run(engine, [request([1, 2, 3], f"r{i}", rule=("exact", "coupled")[i], max_tokens=300, **heat) for i in range(count)])
        return drafter.looks / count

    one = looks(1)
    assert one < 80 and looks(2) <= 1.2 * one


def too_dear(every: int) -> list[StepRecord]:
    """A text for which there is hardly any credit: lookup has a guess at every so manyth place, the model, which costs more than there is, always."""
    chances = {"lookup": lambda t, d: 0.9 if t % every == every - 1 else 0.0, "model": lambda t, d: 0.2}
    of = trace(6, costs(linear(0.02), {"lookup": linear(0.0, 0.01), "model": linear(4.0, 0.0)}), chances, length=300)
    controller = adaptive(of)
    drive(of, controller)
    controller.ledger.credit["w0"] = 0.4
    return drive(of, controller)[0]


def test_who_is_too_dear_does_not_keep_a_cheap_one_from_being_looked_at() -> None:
    records = too_dear(5)
    assert records[0].reason == "off:guard" and not any(r.levels.get("model") for r in records[:10])
    assert [i for i, r in enumerate(records[:5]) if r.drafted[0]] == [4], "its first guess"


def test_who_is_too_dear_is_weighed_again_when_there_may_be_more() -> None:
    """To weigh it every few steps would cost what they earn."""
    assert [i for i, r in enumerate(too_dear(40)[: EARN + 2]) if r.reason == "off:guard"] == [0, EARN + 1]


def test_nobody_sleeps_for_a_dear_drafter_longer_than_for_the_cheapest() -> None:
    """The dear one has a guess, the cheap one none just now, and neither could be paid: it is the cheap one that can be first."""
    chances = {"lookup": lambda t, d: 0.0, "model": lambda t, d: 0.9}
    of = trace(6, costs(linear(0.5), {"lookup": linear(0.0, 0.01), "model": linear(2.0, 0.5)}), chances, length=60)
    drive(of, controller := adaptive(of))
    seqs, slept = [sequence([0] * 20, "w0")], []
    controller._earn = lambda missing, page: slept.append(missing) or "off:guard"
    controller.last, controller.sleep.left, controller.since_plain = None, 0, 0
    at = controller._situation(seqs)
    controller.page = controller.tables.page(at)
    controller.ledger.credit["w0"] = 1.02 * controller.page.owed
    controller.page.spread = 4.0
    controller.rows["w0"] = Row(rest={"lookup": 5})
    assert controller.choose(seqs)[1] == "off:guard"
    room = controller._room(seqs, controller.page)
    assert slept == [pytest.approx(controller.page.cheapest - room)] and controller.page.drafting["model"][1] > 1


def test_no_guess_is_made_that_would_not_pay_if_it_were_sure() -> None:
    """Drafts are as deep as verifying so many may pay: behind a stair at eight nodes nobody looks, and where there is none twice as far."""

    def deepest(cost: Any) -> int:
        of = trace(2, costs(cost, {"lookup": linear(0.01, 0.0)}), {"lookup": lambda t, d: 0.97}, length=600)
        return max(r.levels.get("lookup", 0) for r in drive(of, adaptive(of))[0][-100:])

    assert deepest(lambda n: 1 + 0.01 * n + 2.0 * (n > 8)) == 8 and deepest(linear(0.01)) > 8


def test_what_looking_took_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage of its own, in steps in which somebody was looked at; the stages of a step are all of it."""
    monkeypatch.setattr(time, "perf_counter", itertools.count(0.0, 2e-5).__next__)  # each reading 20 us after the last, on a busy machine too
    controller = Adaptive(Tables({"lookup": 1}, Costs({"lookup": 0.01})), lambda: "")
    rule = lambda text: (text[-1] + 1) % 7 if text[0] == 1 else (7 * len(text) ** 2 + len(text)) % 293  # noqa: E731
    engine = Engine(Ruled(300, rule, rows=1), {"lookup": Lookup()}, controller, 1)
    (seq,) = run(engine, [request([1, 2, 3], "a", max_tokens=80)])
    assert any(r.seconds.get("look", 0) > 0 for r in seq.records)
    for record in seq.records:
        assert min(record.seconds.values()) >= 0 and sum(record.seconds.values()) == pytest.approx(record.reading.seconds)
    (vain,) = run(engine, [request([200, 2, 3], "vain", max_tokens=200)])
    asleep = [r for r in vain.records if r.reason == "off:resting"]
    assert len(asleep) > 20 and not any("look" in r.seconds for r in asleep)
    (off,) = run(engine, [replace(request([1, 2, 3], "off", max_tokens=9), drafters=frozenset())])
    assert not any("look" in r.seconds for r in off.records)


def test_a_pair_on_which_nothing_pays_is_not_new_for_ever() -> None:
    """A drafter that is dear and nearly always wrong drafts a few times. Looks at it become rare all the same."""
    of = trace(8, costs(linear(0.3), {"model": linear(0.6, 0.0)}), {"model": lambda t, d: 0.02}, texts=8, length=300)
    controller = adaptive(of, drafts=0)
    each = drive(of, controller, thinks(controller, Weather(of), 0.2))
    assert controller.tables.drafts < WARM
    looked = [sum(r.reason != "off:resting" for r in records) for records in each]
    assert max(looked[-3:]) < 0.3 * looked[0]
