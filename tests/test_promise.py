"""Law: at every token, decode time is at most (1 + x) plain + 8 plain steps + one stall, whatever speculation costs and brings.

Seconds are plain steps, which the worlds below leave alone: all else may be arbitrarily slow.
"""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from contracts import always, request
from written import Weather, adaptive, costs, drive, linear, trace

from outrider.bench.recording import Trace
from outrider.control import controller as controllers
from outrider.control import rows
from outrider.control.accounts import LONG, SETTLED, Held
from outrider.control.controller import REMEASURE, Adaptive
from outrider.control.guard import GRANT, Ledger
from outrider.control.rows import awake
from outrider.control.sleep import EARN
from outrider.control.tables import Tables
from outrider.core.types import StepRecord
from outrider.drafters.lookup import Lookup
from outrider.measure.cost import CALM_BEFORE, COLD, FADE, LONGEST, Costs
from outrider.models.toy import ToyModel
from outrider.runtime.engine import Engine

ALLOWANCE = 0.05
USELESS = {
    "lookup": ({"lookup": linear(0.0, 0.2)}, 0.2),
    "cheap model": ({"model": linear(0.1, 0.0)}, 0.2),
    "dear model": ({"model": linear(0.4, 0.0)}, 0.2),
    "lookup and model": ({"lookup": linear(0.0, 0.1), "model": linear(0.3, 0.0)}, 0.5),
    "twenty times slower": ({"model": linear(20.0, 0.0)}, 0.2),
}


def beyond(records: list[StepRecord], read: int = -1) -> float:
    """Most by which the promise is exceeded at any token, but for one stall: the longest step with a drafter in it, other than the one in which drafters `read`."""
    worst, spent, stall = -GRANT, 0.0, 0.0
    for n, r in enumerate(records):
        took = r.reading.seconds - r.seconds.get("prefill", 0.0)
        spent += took
        stall = max(stall, took if r.levels and n != read else 0.0)
        worst = max(worst, spent - (1 + ALLOWANCE) * (r.context[0] - records[0].context[0] + r.emitted[0]) - GRANT - stall)
    return worst


@pytest.mark.parametrize("believed", ["true", "nothing", "too cheap"])
@pytest.mark.parametrize("case", USELESS)
def test_a_useless_drafter(case: str, believed: str) -> None:
    """That is sure of itself; of whose price the truth, nothing, or a tenth is known beforehand."""
    drafters, slope = USELESS[case]
    of = trace(4, costs(linear(slope), drafters), dict.fromkeys(drafters, lambda t, d: 0.01), texts=3, score=lambda p: 0.95)
    cheap = {name: (lambda n, shape=shape: 0.1 * shape(n)) for name, shape in drafters.items()}
    state = {"true": of.costs, "nothing": {}, "too cheap": costs(linear(slope / 10), cheap)}[believed]
    controller = adaptive(of, believed=state, drafts=0 if believed == "nothing" else 1000)
    for records in drive(of, controller):
        assert beyond(records) <= 0
    if believed == "true":
        assert controller.ledger.worst < 0.1, "what was known beforehand leaves no debt"


def works(kind: str, rng: random.Random) -> Callable[[int, str], float]:
    """How many times longer than believed a work takes."""
    draws: dict[str, Callable[[int], float]] = {
        "rare": lambda n: 10.0 if rng.random() < 0.02 else 1.0,
        "heavy tail": lambda n: min(20.0, rng.paretovariate(1.2)),
        "phases": lambda n: 6.0 if n // 50 % 2 else 1.0,
        "always": lambda n: 5.0,
        "growing": lambda n: 1.0 + n / 50,
    }
    return lambda n, name: 1.0 if name == "plain" else draws[kind](n)


def world(rng: random.Random) -> Trace:
    priced = costs(linear(rng.uniform(0.01, 0.3)), {"lookup": linear(0.0, 0.02), "model": linear(rng.uniform(0.05, 0.5), 0.0)})
    how = {"lookup": lambda t, d: rng.choice([0, 0.1, 0.5, 0.95]), "model": lambda t, d: rng.choice([0.1, 0.9])}
    return trace(rng.randrange(1000), priced, how, length=260, score=lambda p: rng.random())


@pytest.mark.parametrize("kind", ["rare", "heavy tail", "phases", "always", "growing"])
@pytest.mark.parametrize("cold", [False, True])
def test_adversarial_costs(kind: str, cold: bool) -> None:
    for seed in range(15):
        rng = random.Random(seed)
        of = world(rng)
        controller = adaptive(of, believed={} if cold else None, drafts=0 if cold else 1000)
        (records,) = drive(of, controller, Weather(of, works(kind, rng)))
        assert beyond(records) <= 0, f"{kind}, seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rare", "heavy tail", "phases", "always", "growing"])
def test_adversarial_costs_of_many_seeds(kind: str) -> None:
    for seed in range(1000, 1200):
        rng = random.Random(seed)
        (records,) = drive(of := world(rng), adaptive(of, believed=rng.choice([None, {}])), Weather(of, works(kind, rng)))
        assert beyond(records) <= 0, f"{kind}, seed {seed}"


def test_nothing_is_admitted_when_the_credit_is_gone() -> None:
    """And speculation that pays goes on when it has been earned back."""
    of = trace(6, costs(linear(0.05), {"lookup": linear(0.0, 0.05)}), {"lookup": lambda t, d: 0.8})
    controller = adaptive(of)
    engine_records = drive(of, controller)[0]
    assert sum(r.drafted[0] > 0 for r in engine_records) > 50
    controller.ledger.credit["w0"] = -3.0
    records = drive(of, controller)[0]
    poor = next(i for i, r in enumerate(records) if r.levels)
    assert records[0].reason == "off:guard" and not any(r.drafted[0] for r in records[:poor]) and poor >= 3 / ALLOWANCE - 20
    assert sum(r.drafted[0] > 0 for r in records[poor:]) > 20


def test_credit_is_earned_without_thinking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thinking in every step would cost what a step earns, and who cannot be paid is not looked at: only when there is credit for a draft, and once more, for
    at first it does not suffice for the reading as well."""
    of = trace(6, costs(linear(0.05), {"lookup": linear(0.0, 0.05)}), {"lookup": lambda t, d: 0.8})
    controller, thoughts, looks = adaptive(of), [], []
    drive(of, controller)
    controller.ledger.credit["w0"] = -3.0
    left, start = Ledger.left, controller.steps
    monkeypatch.setattr(Ledger, "left", lambda *how: thoughts.append(controller.steps - start) or left(*how))
    monkeypatch.setattr(controllers, "awake", lambda *how: looks.append(controller.steps - start) or awake(*how))
    records = drive(of, controller)[0]
    poor = next(i for i, r in enumerate(records) if r.levels)
    assert poor > 40 and sum(at <= poor for at in thoughts) <= poor // EARN + 2
    assert sum(at <= poor for at in looks) <= 2 and min(looks) > poor - EARN


def test_what_is_earned_is_more_than_what_waking_takes() -> None:
    """Where thinking takes as much as five plain steps earn, it is thought again when several times that is earned."""
    of = trace(6, costs(linear(0.05), {"lookup": linear(0.0, 0.05)}), {"lookup": lambda t, d: 0.8})
    controller = adaptive(of)
    drive(of, controller)
    page = controller.page
    assert page is not None
    for thinking, least in ((0.0, 3), (5 * ALLOWANCE, 20), (50 * ALLOWANCE, EARN)):
        controller.accounts.thinking = thinking
        controller._earn(1e-6, page)
        assert controller.sleep.left == pytest.approx(least, abs=1)


def test_the_ledger() -> None:
    """By hand: a grant of 8 steps of 2 seconds, 5% more than what a token takes, and what goes beyond the bad case."""
    ledger = Ledger(0.05)
    assert ledger.left(("a",), 2.0) == pytest.approx(16 + 2.1)
    ledger.charge("a", 2.0, 3, 10.0, 12.0)
    assert ledger.credit["a"] == pytest.approx(16 + 6.3 - 10) and (ledger.stalls, ledger.debts) == (0, 0)
    ledger.charge("a", 2.0, 1, 30.0, 14.0)
    assert (ledger.stalls, ledger.debts) == (1, 1) and ledger.worst == pytest.approx(30 - 2.1 - 12.3)
    ledger.charge("b", 2.0, 1, 30.0, None)
    assert ledger.stalls == 1, "a plain step is no stall"
    assert ledger.left(("a", "c"), 2.0) == pytest.approx(ledger.credit["a"] + 2.1), "the poorest row counts"
    ledger.end("a")
    assert ledger.left(("a",), 2.0) == pytest.approx(16 + 2.1)


def test_a_request_that_ends_asleep_leaves_nothing_behind() -> None:
    of = trace(6, costs(linear(0.05), {"lookup": linear(0.0, 0.0)}), {"lookup": lambda t, d: 0.0}, texts=3, length=40)
    drive(of, controller := adaptive(of))
    assert not controller.ledger.credit and not controller.rows and not controller.accounts.held


def test_steps_slept_through_are_filed_by_what_was_before_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain step among plain steps takes less than one between wider ones; whoever wakes in between files neither as the other."""
    filed, verified = [], Costs.verified
    monkeypatch.setattr(Costs, "verified", lambda self, at, n, took, calm=False: filed.append((n, took, calm)) or verified(self, at, n, took, calm))
    for every in range(2, 12):
        priced = costs(linear(0.05), {"lookup": linear(0.0, 0.01)})
        (at,) = priced["steady"]
        priced["steady"][at] = [1, 0.8]
        drive(of := trace(6, priced, {"lookup": lambda t, d, every=every: 0.9 if t % every == 0 else 0.0}, length=200), adaptive(of))
    plain = {(round(took, 6), calm) for n, took, calm in filed if n == 0}
    assert plain == {(0.8, True), (1.0, False)}


@pytest.mark.parametrize("pace", [0.5, 1.0, 2.0])
def test_plain_steps_earn_by_their_own_clock(pace: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in which nobody drafts is plain decoding, at whatever pace the machine goes now: it earns 5% of what it takes, no more where the
    machine has become faster than was believed, and no less where slower, however long it sleeps."""
    monkeypatch.setattr(rows, "PATIENCE", 1)
    monkeypatch.setattr(rows, "REST", LONG)
    of = trace(6, costs(linear(0.05), {"lookup": linear(0.0, 0.0)}), {"lookup": lambda t, d: 0.0}, length=400)
    controller = adaptive(of)
    drive(of, controller, Weather(of, lambda n, name: pace))
    before = controller.ledger.credit["w0"] = -100.0
    monkeypatch.setattr(Ledger, "end", lambda self, request: None)
    (records,) = drive(of, controller, Weather(of, lambda n, name: pace))
    assert not any(r.drafted[0] for r in records)
    assert controller.ledger.credit["w0"] - before == pytest.approx(ALLOWANCE * sum(r.reading.seconds for r in records), rel=0.05)


@pytest.mark.parametrize("where", [0, 1, LONG // SETTLED, LONG - 1])
def test_what_was_thought_in_a_step_that_is_slept_through_is_charged_once(where: float) -> None:
    """Of a long sleep some steps are looked at, each for those behind it; what was thought in one, most of all in that in which sleeping was decided, was
    thought in no other."""
    of = trace(6, costs(linear(0.05), {"lookup": linear(0.0, 0.0)}), {"lookup": lambda t, d: 0.0}, length=60)
    (records,) = drive(of, controller := adaptive(of))
    seqs = [SimpleNamespace(request=SimpleNamespace(id="z"))]
    thought = replace(records[-1], seconds={**records[-1].seconds, "choose": 40.0}, reading=replace(records[-1].reading, seconds=41.0))
    controller.ledger.credit["z"] = 0.0
    controller.accounts.held = [Held(seqs, thought if i == where else records[-1], None, (), True, COLD) for i in range(LONG)]
    controller._settle()
    assert controller.ledger.credit["z"] == pytest.approx(ALLOWANCE * LONG - 40.0, abs=0.1)


def test_what_speculation_takes_in_a_step_that_verifies_nothing_is_not_plain_decodings() -> None:
    """Its drafting, and the code of its plan, made once."""
    of = trace(6, costs(linear(0.5), {"lookup": linear(0.0, 0.03)}), {"lookup": lambda t, d: 0.05}, length=60)
    (records,) = drive(of, controller := adaptive(of))
    asked = next(r for r in records if r.levels and not any(r.drafted))
    plain = next(r for r in records if not r.levels)
    with_code = lambda r: replace(r, seconds={**r.seconds, "jit": r.seconds.get("jit", 0.0) + 5.0})  # noqa: E731
    beside = lambda r: controller.accounts.overhead(r, sum(r.seconds.get(f"draft {name}", 0.0) for name in r.levels))  # noqa: E731
    assert asked.reading.seconds - beside(asked) == pytest.approx(1.0)
    assert beside(with_code(asked)) == pytest.approx(beside(asked) + 5.0)
    assert beside(with_code(plain)) == beside(plain), "plain decoding needs its code as well"


@pytest.mark.parametrize("slow", [2.0, 5.0])
def test_slow_speculation_does_not_make_plain_decoding_look_slow(slow: float) -> None:
    """The price of plain decoding is what the promise rests on: it comes from plain steps alone."""
    of = trace(7, costs(linear(0.1), {"lookup": linear(0.0, 0.05)}), {"lookup": lambda t, d: 0.9}, texts=2)
    controller = adaptive(of)
    drive(of, controller, Weather(of, lambda n, name: 1.0 if name == "plain" else slow))
    assert controller.page.owed == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("every", [10, 40])
def test_what_holds_up_plain_steps_is_not_charged_to_speculation(every: int) -> None:
    """A machine that is held up now and then while nothing is verified: drafting goes on as on one that is not."""
    of = trace(
        8, costs(linear(0.1), {"lookup": linear(0.0, 0.05)}), {"lookup": lambda t, d: 0.9 if t % 40 > 15 else 0.0}, length=400, score=lambda p: p
    )
    calm, held = ([sum(r.drafted) for r in drive(of, adaptive(of), Weather(of, how))[0]] for how in (
        lambda n, name: 1.0, lambda n, name: 30.0 if name == "plain" and n % every == 0 else 1.0))  # fmt: skip
    assert sum(n > 0 for n in calm) > 25
    assert sum(held) == pytest.approx(sum(calm), rel=0.15)


@pytest.mark.parametrize("hit", ["all", "speculation"])
def test_a_machine_that_holds_up_all_steps_keeps_nobody_from_drafting(hit: str) -> None:
    """One step in sixty takes forty times as long, whatever it does: plain decoding would meet as many, and what it would meet is not charged. If none but
    speculative steps are held up, all is."""
    of = trace(3, costs(linear(0.05), {"lookup": linear(0.0, 0.01)}), {"lookup": lambda t, d: 0.9 if t % 40 > 20 else 0.0}, length=150, texts=24)
    held = lambda n, name: n % 61 == 0 and (hit == "all" or name != "plain")  # noqa: E731
    controller = adaptive(of)
    texts = drive(of, controller, Weather(of, lambda n, name: 40.0 if held(n, name) else 1.0))
    guarded = [sum(r.reason == "off:guard" for r in records) for records in texts]
    if hit == "all":
        assert sum(guarded[4:]) < 0.01 * sum(map(len, texts[4:])) and controller.ledger.holdups.held > 0
    else:
        assert controller.ledger.holdups.held == 0 and controller.ledger.spared == 0


def test_what_is_spared_is_what_plain_steps_would_have_met() -> None:
    """By hand: plain steps were held up for a known share of their time; so may speculative ones be, and no more."""
    ledger = Ledger(0.05)
    assert ledger.fairly(10.0, 2.0) == 10.0, "nothing is known yet"
    for _ in range(9):
        assert ledger.plainly(1.0, 1.0) == 1.0
    ledger.plainly(5.0, 1.0)
    left = 1 - FADE
    share = 4 / (CALM_BEFORE * left**10 + sum(left**n for n in range(1, 10)) + 5)
    assert ledger.holdups.held / ledger.holdups.met == pytest.approx(share)
    assert ledger.fairly(2.0, 2.0) == 2.0 and ledger.spared == pytest.approx(2 * share)
    assert ledger.fairly(20.0, 2.0) == pytest.approx(20 - 22 * share) and ledger.spared == pytest.approx(0.0)
    assert ledger.fairly(1.0, 2.0) == 1.0


def test_a_machine_that_was_suspended_forgives_nobody() -> None:
    """A plain step of an hour is one hold-up among thousands, and forgotten in time; a speculative step of an hour is charged but for what a hold-up counts."""
    ledger = Ledger(0.05)
    assert ledger.plainly(3.6e6, 1.0) == LONGEST
    assert 0 < ledger.holdups.held / ledger.holdups.met < 0.11
    for _ in range(10_000):
        ledger.plainly(1.0, 1.0)
    assert ledger.holdups.held / ledger.holdups.met < 0.001
    for _ in range(1000):
        ledger.fairly(100.0, 100.0)
    assert ledger.fairly(3.6e6, 1.0) >= 3.6e6 - LONGEST and ledger.spared < LONGEST


def test_an_hour_in_a_plain_step_earns_no_share_of_an_hour() -> None:
    """The same text twice, once with a plain step that took an hour: what may be spent is hardly more."""
    of = trace(3, costs(linear(0.05), {"lookup": linear(0.0, 0.01)}), {"lookup": lambda t, d: 0.9 if t % 40 > 20 else 0.0}, length=150)
    credit: dict[float, list[float]] = {1.0: [], 3600.0: []}
    for longest, seen in credit.items():
        controller = adaptive(of)

        def slow(n: int, name: str, longest: float = longest, seen: list[float] = seen, controller: Adaptive = controller) -> float:
            seen.extend(controller.ledger.credit.values())
            return longest if n == 31 and name == "plain" else 1.0

        records = drive(replace(of, texts=of.texts[:1]), controller, Weather(of, slow))[0]
        assert any(r.reading.seconds >= longest and not any(r.drafted) for r in records)
    assert 0 < max(credit[3600.0]) - max(credit[1.0]) < 2 * ALLOWANCE * LONGEST


@pytest.mark.parametrize(("chance", "length"), always(1, [(0.6, 450), (0.9, 1500)]))
@pytest.mark.parametrize("pace", [2.0, 0.5])
def test_a_machine_that_changes_its_pace_for_good_is_found_out(pace: float, chance: float, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All takes twice as long: the guard holds drafting back until plain steps have shown it, and no longer. Or half as long: nothing is
    promised by what plain decoding took before. Where drafting goes well hardly a step is plain, so one is asked for; where a text grows longer than
    any before it, what plain steps told of shorter ones serves. (Nobody's credit is ample here: who has that is not asked. A plain step, which is how it is asked, promises nothing.)"""
    monkeypatch.setattr(controllers, "AMPLE", math.inf)
    held: list[int] = []
    for seed in range(6):
        of = trace(seed, costs(linear(0.1), {"lookup": linear(0.0, 0.01)}), {"lookup": lambda t, d: chance}, length=length, texts=6)
        controller, owed = adaptive(of), list[float]()

        def slowed(n: int, name: str, controller: Adaptive = controller, owed: list[float] = owed) -> float:
            if n >= 1600 and name == "lookup":
                owed.append(controller.page.owed if controller.page else 1.0)
            return pace if n > 1200 else 1.0

        texts = drive(of, controller, Weather(of, slowed))
        assert owed == pytest.approx([pace] * len(owed), rel=0.1) and len(owed) > 100, f"seed {seed}"
        held += [sum(r.reason == "off:guard" for r in records) for records in texts]
        assert held[-1] == 0 and sum(r.reason == "probe:plain" for records in texts for r in records) < 20
    assert sum(held) < 150 and (sum(held) > 0) == (pace > 1 and chance < 0.9), "credit is short where drafting saves little, on a slower machine"


def test_who_has_ample_credit_is_not_asked_what_plain_decoding_takes_now() -> None:
    """A machine becomes twice as slow in the midst of a text that has saved a hundred steps: a plain one would cost it several of its own and change no plan. The next
    text begins with little, and is asked."""
    first, second = (
        trace(seed, costs(linear(0.1), {"lookup": linear(0.0, 0.01)}), {"lookup": chance}, length=900)
        for seed, chance in ((1, lambda t, d: 0.95 if t > 30 else 0.0), (2, lambda t, d: 0.6))
    )
    of, steps = replace(first, texts=first.texts + second.texts), list[str]()
    controller = adaptive(of)

    def slowed(n: int, name: str) -> float:
        steps.append(name)
        return 2.0 if len(steps) > 160 else 1.0

    one, other = drive(of, controller, Weather(of, slowed))
    assert 60 < len(one) < REMEASURE and not any(r.reason == "probe:plain" for r in one)
    asked = [i for i, r in enumerate(other) if r.reason == "probe:plain"]
    assert asked[:3] == [COLD, COLD + 1, COLD + 2 + REMEASURE], "once caches are warm, as often as it takes to tell, and then when it is time again"


def test_a_text_that_begins_cold_is_no_slower_machine() -> None:
    """Short texts, the first four steps of which take up to twice as long, more or less: the pace stays what it is, so do costs, their spread and what plain decoding takes, and
    no plain step is asked for where it would tell least."""
    of = trace(3, costs(linear(0.1), {"lookup": linear(0.0, 0.01)}), {"lookup": lambda t, d: 0.7}, length=24, texts=60)
    controller, paces, steps, cold = adaptive(of), list[float](), list[int](), (2.0, 1.6, 1.3, 1.1)
    world, rng = Weather(of), random.Random(5)

    def slowed(n: int, name: str) -> float:
        if name == "lookup":
            return 1.0
        paces.append(controller.tables.costs.pace)
        steps[:] = [*steps, 0] if steps and world.text is begun[0] else [0]
        begun[0] = world.text
        return cold[len(steps) - 1] * rng.uniform(0.8, 1.2) if len(steps) <= COLD else 1.0

    begun, world.factor = [None], slowed
    texts = drive(of, controller, world)
    assert controller.tables.costs.cold == pytest.approx(cold, rel=0.1)
    assert paces == pytest.approx([1.0] * len(paces), rel=0.05)
    assert controller.page.owed == pytest.approx(1.0, rel=0.05) and controller.page.spread <= 1.1
    assert controller.tables.costs.verify[controller.page.at].line[:9] == pytest.approx([1 + 0.1 * n for n in range(9)], rel=0.1)
    assert not any(r.reason in ("probe:plain", "off:guard") for records in texts for r in records)
    controller.since_plain = 10_000
    (records,) = drive(replace(of, texts=of.texts[:1]), controller)
    assert next(i for i, r in enumerate(records) if r.reason == "probe:plain") >= COLD, "once caches are warm"


@pytest.mark.parametrize("right", [0.8, 0.0])
def test_the_pace_follows_every_step(right: float) -> None:
    """Also those that nothing else is learned from: after thirty steps on a machine that takes twice as long, whatever they were, it is known."""
    of = trace(2, costs(linear(0.1), {"lookup": linear(0.0, 0.01)}), {"lookup": lambda t, d: right}, length=1500)
    controller, paces = adaptive(of), list[float]()

    def slowed(n: int, name: str) -> float:
        if name in ("plain", "verify"):
            paces.append(controller.tables.costs.pace)
        return 2.0 if len(paces) > 300 else 1.0

    drive(of, controller, Weather(of, slowed))
    assert paces[250:300] == pytest.approx([1.0] * 50, rel=0.02)
    late = paces[300 + 30 + (LONG if right == 0 else 0) :]  # who has nothing to say is settled with many others
    assert len(late) > 20 and late == pytest.approx([2.0] * len(late), rel=0.1)


def test_steps_of_many_rows_do_not_tell_what_one_row_is_owed(monkeypatch) -> None:
    """Nobody has anything to say, a second row joins, and every step takes twice as long: each situation keeps its own price, at every step."""
    model = ToyModel(4000, 5, rows=2, context=4096)
    controller = Adaptive(Tables({"lookup": 1}, Costs({"lookup": 0.05})), lambda: "toy")
    engine = Engine(model, {"lookup": Lookup()}, controller, 2)
    time = [0.0]

    def now() -> float:
        time[0] += max(len(engine.batcher.running), 1)
        return time[0]

    engine.now = now
    prices, owe = set[tuple[int, int]](), controller.tables.costs.owe

    def seen(at, seconds):
        prices.add((at.rows, round(seconds)))
        return owe(at, seconds)

    monkeypatch.setattr(controller.tables.costs, "owe", seen)
    seqs = [engine.submit(request([1, 2, 3], max_tokens=120, ignore_eos=True, temperature=1.0, seed=1))]
    for _ in range(40):
        engine.step()
    ((_, alone),) = prices
    seqs.append(engine.submit(request([5, 6, 7], max_tokens=40, ignore_eos=True, temperature=1.0, seed=2)))
    while seqs[0].finish_reason is None:
        engine.step()
    assert all(price <= alone for rows, price in prices if rows == 1) and max(prices) > (2, 0)
    assert all(price > 1.5 * alone for rows, price in prices if rows == 2)
