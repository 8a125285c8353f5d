"""Law: at every step what is expected to pay best is done, by one rule, and what was expected follows what comes.

A simulator: the real engine and controller over texts and guesses written by hand, on a clock of given costs (seconds are
plain steps). `lookup` says all it has to say in one call, `model` goes a level at a time.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import mean
from types import SimpleNamespace

import pytest
from contracts import always, request
from tiny import Ruled
from written import AT, WRONG, Shape, Weather, adaptive, costs, drive, late, linear, trace

from outrider.bench.policies import policy
from outrider.bench.recording import Trace
from outrider.control import starts
from outrider.control.controller import YOUNG, Adaptive
from outrider.control.guard import Ledger
from outrider.control.rows import NEAR, PATIENCE, REST, WORST, Row, remember
from outrider.control.starts import EXPLORE, GIFT, PROBE, SAMPLE, UNMEASURED, Starts
from outrider.control.tables import BATCH, Tables
from outrider.core.types import Limits, StepRecord
from outrider.drafters.lookup import Lookup
from outrider.measure.cost import Costs
from outrider.runtime.engine import Engine

FREE = {"lookup": linear(0.0, 0.01)}
REASONS = {
    "off:request", "off:resting", "off:guard", "off:no-guess", "off:unpaid", "off:least", "off:floor",
    "probe:plain", "probe:drafter", "probe:whole", "depth:all", "depth:trimmed", "depth:guard", "depth:drawn",
}  # fmt: skip


def flat(records: list[list[StepRecord]]) -> list[StepRecord]:
    return [r for text in records for r in text]


def ours(of: Trace, **how: object) -> list[StepRecord]:
    """What the adaptive controller does."""
    return flat(drive(of, adaptive(of, **how)))


def told(of: Trace, name: str) -> list[StepRecord]:
    """What a simple policy does."""
    return flat(drive(of, policy(name, of.drafters, {}, "")))


def seconds(records: list[StepRecord]) -> float:
    return sum(r.reading.seconds for r in records)


def lookups(verify: Shape, chance: float, seed: int = 1, **how: object) -> Trace:
    return trace(seed, costs(verify, FREE), {"lookup": lambda t, d: chance}, **how)


def both(lookup: Callable[[int, int], float], reading: float, seed: int = 3) -> tuple[list[StepRecord], list[StepRecord]]:
    """What is done with lookup and a cheap model that is right four times in five and reads a token in `reading`, and with lookup alone."""
    priced = costs(linear(0.05), FREE | {"model": linear(0.15, 0.0)}) | {"catch_up": {"lookup": [1, 1e-4], "model": [1, reading]}}
    of = trace(seed, priced, {"lookup": lookup, "model": lambda t, d: 0.8}, texts=4, length=200)
    of = replace(of, texts=[replace(text, length=100) for text in of.texts])
    return ours(of), ours(replace(of, drafters=["lookup"]))


# --- beside others ---


@pytest.mark.parametrize(("lookup", "helps"), [(0.95, False), (0.8, False), (0.5, True)])
def test_a_drafter_is_asked_beside_another_where_that_leaves_something_to_gain(lookup: float, helps: bool) -> None:
    """What is right as often as what is there adds little, however cheap it is: most of its guesses are there already."""
    ratios = []
    for seed in (1, 2, 3, 4):
        two, alone = both(lambda t, d: lookup, 1e-4, seed)
        assert any(r.levels.get("model") for r in two) == helps
        ratios.append(seconds(two) / seconds(alone))
    assert mean(ratios) < 0.95 if helps else ratios == pytest.approx([1.0] * 4)


def test_much_to_read_is_weighed_however_cheap_the_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookup has nothing to say in one of ten places, but not at first: too few for a model that would read for eight plain steps first, though the guard has
    credit for that. In a text of which lookup knows nothing, a model that reads quickly is started. (The try that a new drafter has for nothing is left out.)"""
    monkeypatch.setattr(starts, "GIFT", 0.0)
    rare = lambda t, d: 0.95 if (t + d) % 10 != 9 else 0.0  # noqa: E731
    two, alone = both(rare, 0.08)
    assert not any(r.levels.get("model") for r in two) and seconds(two) == pytest.approx(seconds(alone))
    two, alone = both(rare, 0.05)
    assert seconds(two) < 1.12 * seconds(alone), "once it is known how fast such texts are written"
    two, alone = both(lambda t, d: 0.0, 0.02)
    assert seconds(two) < 0.7 * seconds(alone)


@pytest.mark.parametrize(("silent", "each"), [(4, 0.03), (1000, 0.025)])
def test_who_read_much_and_saved_little_is_believed_less(silent: int, each: float) -> None:
    """A model that is right everywhere reads all of a text, for two or three plain steps, to fill a gap of four tokens, before lookup writes the rest: after some texts it
    is no longer begun for that. Where lookup has nothing to say at all, it is begun in every text."""
    priced = costs(linear(0.05), {"lookup": linear(0.0, 0.01), "model": linear(0.15, 0.0)}) | {"catch_up": {"lookup": [1, 1e-4], "model": [1, each]}}
    says = {"lookup": lambda t, d: 0.0 if t < silent else 0.95, "model": lambda t, d: 0.9}
    of = trace(3, priced, says, texts=60, length=120, score=lambda p: 0.7)
    controller = adaptive(of := replace(of, texts=[replace(one, length=100) for one in of.texts]))
    began = [any(r.levels.get("model") for r in records) for records in drive(of, controller)]
    observations, saved = controller.tables.next.cells["model saved"]
    assert sum(began[:12]) > 4 and observations == sum(began)
    if silent > 120:
        assert all(began) and saved == 1.0
    else:
        assert not any(began[54:]) and saved < 0.2


def test_who_is_sure_in_some_texts_is_asked_in_all_and_left_in_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is right nearly always in one text of six, and hardly ever in the rest: in the mean it does not pay. It says so itself once it is asked,
    so every text begins with that. One that is right in none of them is no longer begun. (Tries of what does not seem to pay are left out.)"""
    monkeypatch.setattr(starts, "EXPLORE", 0.0)
    priced = costs(linear(0.05), {"model": linear(0.5, 0.0)})

    def began(good: int) -> tuple[list[list[StepRecord]], list[int]]:
        poor, fine = (trace(seed, priced, {"model": lambda t, d, p=p: p}, texts=40, length=60) for seed, p in ((5, 0.05), (6, 0.98)))
        of = replace(poor, texts=[fine.texts[i] if i % 6 < good else one for i, one in enumerate(poor.texts)])
        records = drive(of, adaptive(of))
        return records, [sum(bool(r.levels.get("model")) for r in text if r.reason != "probe:drafter") for text in records]

    records, asked = began(1)
    others = [(seconds(text), n) for i, (text, n) in enumerate(zip(records, asked, strict=True)) if i % 6 and i > 12]
    assert all(asked[12:]) and all(seconds(text) < 0.8 * 60 for text in records[12::6]), "in every text"
    assert mean(n for _, n in others) < 6 and mean(took for took, _ in others) < 1.1 * 60, "and not for long where it is not sure"
    assert not any(began(0)[1][25:])


def test_a_text_of_which_nothing_is_known_counts_as_every_kind_with_the_better_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: twice as fast in a fifth of all texts, half as fast in the rest, where it is left: 0.2 x 2 + 0.8 x 1."""
    controller = adaptive(trace(1, costs(linear(0.1), {"model": linear(0.5, 0.0)}), {"model": lambda t, d: 0.5}))
    monkeypatch.setattr(controller.tables, "kinds", lambda page, name: [(0.2, 2.0), (0.8, 0.5)])
    step = SimpleNamespace(page=None, of=lambda name: [Row()])
    assert controller.starts._promise(step, "model", 1.0) == pytest.approx(1.2)
    assert controller.starts._promise(step, "model", 3.0) == pytest.approx(3.0), "others do better in all"


# --- how deep ---


@pytest.mark.parametrize(("level", "least"), [(0.15, 8), (0.06, NEAR)])
def test_who_is_sure_goes_on_at_once(level: float, least: int) -> None:
    """A model that was right in half of its guesses is sure of them in a new text: its first draft there is as deep as pays, for who is sure goes on to be."""
    priced = costs(linear(0.05), {"model": linear(level, 0.0)})
    of, sure = (trace(seed, priced, {"model": lambda t, d, p=p: p}, texts=8, length=100) for seed, p in ((7, 0.5), (8, 0.98)))
    records = drive(of := replace(of, texts=[*of.texts, *sure.texts]), adaptive(of))
    first = [next(r.levels["model"] for r in text if r.levels.get("model")) for text in records[10:]]
    assert min(first) > least, first


@pytest.mark.parametrize("said", [None, 0.6])
def test_deep_where_nodes_are_cheap_and_shallow_where_they_are_not(said: float | None) -> None:
    """Also where the drafter's own estimate says nothing."""
    score = (lambda p: said) if said else (lambda p: p)
    assert mean(late(ours(lookups(linear(0.01), 0.9, score=score)))) > 7
    steep = late(ours(lookups(linear(0.4), 0.6, score=score)))
    assert mean(steep) < 1.5 and steep.count(0) < 0.1 * len(steep)


def test_nothing_is_verified_where_nothing_pays() -> None:
    records = ours(lookups(linear(0.5), 0.2))
    assert not any(late(records)) and {r.reason for r in records[200:-1]} == {"off:unpaid", "off:resting"}
    assert seconds(records) < 1.02 * 400


@pytest.mark.parametrize("name", ["lookup", "model"])
def test_a_cliff_is_filled_and_never_crossed(name: str) -> None:
    priced = costs(lambda n: 1 + 0.01 * n + 1.5 * (n > 4), {name: linear(0.02, 0.0)})
    found = late(ours(trace(1, priced, {name: lambda t, d: 0.9})))
    assert max(found) == 4 and found.count(4) > 0.9 * len(found)


@pytest.mark.parametrize("name", ["lookup", "model"])
@pytest.mark.parametrize("free", [0, 2])
def test_a_step_of_the_costs_is_looked_beyond(name: str, free: int) -> None:
    """The node after the free ones costs nine tenths of a step, those below it nearly nothing: alone it never pays."""
    priced = costs(lambda n: 1 + 0.01 * n + 0.9 * (n > free), {name: linear(0.02, 0.0)})
    assert mean(late(ours(trace(1, priced, {name: lambda t, d: 0.93})))) > 6


@pytest.mark.parametrize("level", [0.02, 0.1, 0.3])
def test_a_drafter_of_any_price_goes_as_deep_as_it_pays(level: float) -> None:
    of = trace(1, costs(linear(0.01), {"model": linear(level, 0.0)}), {"model": lambda t, d: 0.9}, texts=4)
    records = ours(of)
    fixed = {k: seconds(told(of, f"model:{k}")) for k in (1, 2, 4, 6, 8, 12, 16)}
    assert seconds(records) < 1.15 * min(fixed.values()), f"{mean(late(records))} deep, beside {fixed}"


WORLDS = {"slope": (linear(0.1), 0.7), "steep": (linear(0.4), 0.6), "flat": (linear(0.02), 0.85), "unpaid": (linear(0.6), 0.2)}


@pytest.mark.parametrize("world", always(2, WORLDS))
def test_as_good_as_the_best_fixed_depth(world: str) -> None:
    """Which none has told it, and which is another one in each of eight pairs of texts."""
    names = ["plain", *(f"lookup:{k}" for k in (1, 2, 3, 4, 6, 8, 12, 16))]
    took = best = 0.0
    for seed in range(1, 9):
        of = lookups(*WORLDS[world], seed=seed, texts=2)
        best += min(seconds(told(of, name)) for name in names)
        took += seconds(ours(of))
    assert took < 1.05 * best


@pytest.mark.parametrize("kind", ["static", "bimodal", "gshare", "logistic", "tage"])
def test_depth_follows_the_score_where_it_tells(kind: str) -> None:
    """Half of the guesses are good and half bad, and the drafter knows which; `static` believes it at once."""
    of = trace(5, costs(linear(0.15), FREE), {"lookup": lambda t, d: 0.95 if t // 4 % 2 else 0.1}, texts=2)
    by: dict[bool, list[int]] = {True: [], False: []}
    for r in drive(of, adaptive(of, kind))[1]:
        if r.draft and r.draft.score:
            by[r.draft.score[0] > 0.5].append(r.drafted[0])
    assert mean(by[True]) > (2 if kind in ("bimodal", "gshare") else 4)
    assert kind in ("bimodal", "gshare") or mean(by[False] or [0]) < 1


# --- over time ---


def drafted_from(records: list[StepRecord], start: int, stop: int) -> list[int]:
    return [r.drafted[0] for r in records if start <= r.context[0] - 8 < stop]


def test_drift_is_followed_down_and_up() -> None:
    """At once where the drafter knows; from verdicts alone where it does not."""
    for score, time in ((lambda p: p, 50), (lambda p: 0.7, 300)):
        of = trace(2, costs(linear(0.08), FREE), {"lookup": lambda t, d: 0.02 if 150 <= t < 550 else 0.9}, length=1000, score=score)
        records = ours(of)
        assert mean(drafted_from(records, 60, 150)) > 4
        assert mean(drafted_from(records, 150 + time, 550)) < 0.5
        assert mean(drafted_from(records, 550 + time, 1000)) > 3


def test_a_drafter_that_costs_much_comes_back_after_it_was_off() -> None:
    """And again after guesses in vain: the last verdicts stay as they are while nobody drafts, and are believed ever less."""
    chances = {"model": lambda t, d: 0.1 if t < 150 else 0.97}
    off, on = list[float](), list[float]()
    for seed in range(1, 13):  # of each by itself luck decides when it is tried
        of = trace(seed, costs(linear(0.05), {"model": linear(0.4, 0.0)}), chances, length=700)
        records = ours(of)
        off.append(mean(drafted_from(records, 50, 150)))
        on.append(mean(drafted_from(records, 200, 250)))  # by tries alone it would be twice as long
    assert mean(off) < 0.1 and mean(on) > 5 and min(on) > 2


@pytest.mark.parametrize("at", [30, 100, 200])
def test_one_stall_changes_no_policy(at: int) -> None:
    of = lookups(linear(0.1), 0.7, length=450, texts=3)
    calm = ours(of)
    stalled = flat(drive(of, adaptive(of), Weather(of, lambda n, name: 10.0 if n in (at, at + 1) else 1.0)))
    worst = max(stalled, key=lambda r: r.reading.seconds)
    assert worst.reading.seconds > 9
    after = stalled[stalled.index(worst) + 1 :]
    assert abs(mean(r.drafted[0] for r in after) - mean(late(calm))) < 1.5
    assert sum(r.drafted[0] == 0 for r in after) <= sum(r.drafted[0] == 0 for r in calm)
    assert seconds(stalled) - worst.reading.seconds < 1.03 * seconds(calm)


@pytest.mark.parametrize(
    ("came", "longer", "left"), [(0, 0.0, 12.0), (1, 0.0, 11.0), (2, 0.0, 10.0), (0, 5.0, 17.0), (0, 500.0, 12.0 + WORST), (0, -9.0, 12.0)]
)
def test_a_try_has_cost_what_it_did_not_bring_and_what_it_took_beyond_belief(came: int, longer: float, left: float) -> None:
    """Twelve plain steps of drafting, most of them reading, for a token or two; only where all was right the next one is soon. A stall says no more than the worst
    look."""
    starts = Starts(Tables({"model": 1}, Costs({})), Ledger(), cautious=False)
    starts.explored, starts.pause["model"], starts.due["model"] = 12.0, 1 << 20, 1 << 20
    page = SimpleNamespace(plain=0.5, drafting={"model": [0.0, 1.0, 2.0]}, seconds=[1.0, 1.2, 1.5])
    step = SimpleNamespace(trial=("model", 12.0), page=page, spent=2.0, number=0)
    took = 0.5 * (10.0 + 2.0 + 1.5 + longer)
    seconds = {"prefill": 3.0, "jit": 1.0}
    starts.tried(
        step, SimpleNamespace(right=lambda name: came, requests=("a",), nodes=lambda: 2, reading=SimpleNamespace(seconds=took + 4.0), seconds=seconds)
    )
    assert starts.explored == pytest.approx(left) and (starts.due["model"] == PATIENCE) == (came == 2)


def test_what_is_learned_from_is_chosen_by_no_verdict() -> None:
    """Of later steps one in so many, however the guesses before it ended: else those that follow vain ones would seem to be more than they are."""
    of = trace(2, costs(linear(0.3), FREE), {"lookup": lambda t, d: 0.9 if t // 300 % 2 else 0.05}, length=3000, score=lambda p: 0.7)
    controller, seen = adaptive(of), []
    take_in = controller.tables.take_in
    controller.tables.take_in = lambda lessons: seen.extend(r.record for r in lessons if r.record.levels) or take_in(lessons)
    records = [r for r in flat(drive(of, controller))[YOUNG:] if r.levels]
    kept = {id(r) for r in seen}
    for some in ([r for r in records if any(r.drafted)], [r for r in records if not any(r.drafted)]):
        assert len(some) > 200 and sum(id(r) in kept for r in some) < 2.5 * len(some) / SAMPLE + 8


@pytest.mark.parametrize("share", [EXPLORE, 0.1])
def test_tries_of_a_drafter_that_does_not_pay_are_few_and_grow_fewer(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Within what they may cost, and where that would be much, all the same."""
    monkeypatch.setattr(starts, "EXPLORE", share)
    of = trace(4, costs(linear(0.2), {"model": linear(0.5, 0.0)}), {"model": lambda t, d: 0.2}, texts=4, score=lambda p: 0.8)
    controller = adaptive(of)
    records = flat(drive(of, controller))
    asked, tries = ([i for i, r in enumerate(records) if r.levels and r.reason in some] for some in (REASONS, {"probe:drafter"}))
    gaps = [b - a for a, b in pairwise(tries) if b - a >= PROBE]
    assert 4 <= len(tries) < 16 and len(asked) <= len(tries) + 4, f"asked at {asked}, tried at {tries}; each text may be a better one"
    assert gaps == sorted(gaps) and gaps[-1] > 8 * PROBE
    assert controller.starts.explored <= GIFT + share * len(records)


def test_a_drafter_without_guesses_rests_longer_and_longer() -> None:
    of = lookups(linear(0.1), 0.0)
    records = ours(of)
    asked = [i for i, r in enumerate(records) if r.reason == "off:no-guess"]
    gaps = [b - a for a, b in pairwise(asked)]
    assert not any(r.levels for r in records), "who says that it has no guess is not asked for one"
    assert gaps[: PATIENCE - 2] == [1] * (PATIENCE - 2) and max(gaps) > 5 and len(asked) < len(records) / 3
    assert max(gaps) <= REST + 2


# --- requests, rows, records ---


def clocked(controller: Adaptive, target: Ruled, drafters: dict, rows: int) -> Engine:
    """A toy engine whose time is what its target computes."""
    engine = Engine(target, drafters, controller, rows)
    engine.now = lambda: target.forwards + 0.02 * target.computed
    return engine


def test_a_row_without_a_match_does_not_stop_its_neighbour() -> None:
    def rule(text: list[int]) -> int:
        return (text[-1] + 1) % 7 if text[0] == 1 else (7 * len(text) ** 2 + len(text)) % 293

    controller = Adaptive(Tables({"lookup": 1}, Costs({"lookup": 0.01})), lambda: "")
    engine = clocked(controller, Ruled(300, rule, rows=2), {"lookup": Lookup()}, 2)
    asked = [request([first, 2, 3], f"b{first}", max_tokens=200) for first in (1, 200)]
    seqs = [engine.submit(replace(r, limits=Limits(most=3))) for r in asked]
    while seqs[0].finish_reason is None:
        engine.step()
    found = late(seqs[0].records)
    assert mean(found) > 2 and sum(n > 0 for n in found) > 0.9 * len(found)
    assert sum(r.drafted[1] for r in seqs[0].records) < 20, "the other row had matches"


def test_what_a_request_asks_of_its_drafts_is_kept() -> None:
    target = Ruled(300, lambda text: (text[-1] + 1) % 7, rows=1)
    controller = Adaptive(Tables({"lookup": 1}, Costs({"lookup": 0.01})), lambda: "")
    engine = clocked(controller, target, {"lookup": Lookup()}, 1)

    def records(name: str, **wish: object) -> list[StepRecord]:
        seq = engine.submit(replace(request([1, 2, 3], name, max_tokens=80), **wish))
        while seq.finish_reason is None:
            engine.step()
        return seq.records

    assert max(r.drafted[0] for r in records("free")) > 3
    assert max(r.drafted[0] for r in records("most", limits=Limits(most=3))) == 3
    assert {r.drafted[0] for r in records("least", limits=Limits(most=3, least=3))} <= {0, 3}
    off = records("off", drafters=frozenset())
    assert not any(r.levels for r in off) and {r.reason for r in off} <= {"off:request", "probe:plain"}
    controller.sleep.left = 1000
    assert max(r.drafted[0] for r in records("free again")) > 3, "the sleep of one request is not the next one's"


@pytest.mark.parametrize("cautious", [True, False])
def test_a_cautious_controller_leaves_what_was_never_measured_to_a_sweep(cautious: bool) -> None:
    of = trace(8, costs(linear(0.05), {"model": linear(0.3, 0.0)}), {"model": lambda t, d: 0.9})
    unmeasured = {**of.costs, "draft": {}}
    for known, tried in ((unmeasured, not cautious), (of.costs, True)):
        tables = Tables({"model": 1}, Costs({"model": 0.3}), state={"costs": known, "drafts": 1000})
        records = flat(drive(of, Adaptive(tables, lambda: "replay", cautious=cautious)))
        assert any(r.levels for r in records) == tried


def test_who_is_never_measured_is_tried_in_the_end() -> None:
    """A server may never rest: nobody is waited for who would measure drafters then."""
    of = trace(8, costs(linear(0.05), {"model": linear(0.3, 0.0)}), {"model": lambda t, d: 0.9}, texts=8)
    tables = Tables({"model": 1}, Costs({"model": 0.3}), state={"costs": {**of.costs, "draft": {}}, "drafts": 1000})
    records = flat(drive(of, Adaptive(tables, lambda: "replay", cautious=True)))
    first = next(n for n, r in enumerate(records) if r.levels)
    after = records[first + 50 :]
    assert UNMEASURED - 1 <= first < UNMEASURED + 2 * BATCH and seconds(after) < 0.8 * sum(r.emitted[0] for r in after)


@pytest.mark.parametrize(("objective", "least", "most"), [(0.0, 5, 32), (1.0, 0, 2)])
def test_joules_count_as_much_as_the_objective_says(objective: float, least: int, most: int) -> None:
    """A made-up table in which nodes cost no time and many joules."""
    of, energy = lookups(linear(0.01), 0.7), Costs({})
    energy.take(costs(linear(0.4), FREE))
    tables = Tables({"lookup": 1}, Costs({}), objective=objective, energy=energy, state={"costs": of.costs, "drafts": 1000})
    assert least <= mean(late(flat(drive(of, Adaptive(tables, lambda: "replay"))))) <= most


@pytest.mark.parametrize(("reason", "kept", "vain"), [("off:guard", 0, 5), ("off:unpaid", 0, 6), ("off:no-guess", 0, 6), ("depth:all", 1, 0)])
def test_a_guess_that_the_guard_refuses_was_not_in_vain(reason: str, kept: int, vain: int) -> None:
    row = Row(vain={"lookup": 5})
    record = SimpleNamespace(
        kept=(), reason=reason, drafted=(kept,), accepted=(0,), levels={"lookup": 1}, context=(9,), right=lambda name: 0, draft=None
    )
    remember([row], record, {}, {})
    assert row.vain == {"lookup": vain}


def test_every_record_says_why() -> None:
    """From a closed set, whatever the world is like; and what it says is so."""
    seen = set()
    for seed, (slope, level, right) in enumerate([(0.01, 0.1, 0.6), (0.3, 0.3, 0.6), (0.8, 0.05, 0.6), (0.3, 0.3, 0.0)]):
        priced = costs(linear(slope), {"lookup": linear(0.0, 0.05), "model": linear(level, 0.0)})
        of = trace(seed, priced, {"lookup": lambda t, d, p=right: p * (t % 3 > 0), "model": lambda t, d: 0.7 if t < 200 else 0.1}, texts=2)
        for r in ours(of, believed={}, drafts=0):
            seen.add(r.reason)
            assert r.reason.startswith(("depth:", "probe:w", "probe:d")) == (r.drafted[0] > 0), r
            assert r.reason not in ("off:resting", "probe:plain") or not r.levels
            assert r.reason != "depth:all" or r.trimmed == (0,)
            assert r.reason != "depth:trimmed" or r.trimmed > (0,)
    assert {"off:resting", "off:unpaid", "depth:all", "depth:trimmed", "probe:plain", "probe:whole"} <= seen <= REASONS


def test_wrong_tokens_are_wrong() -> None:
    """The simulator itself: what is drafted there and wrong is never in a text."""
    of = lookups(linear(0.1), 0.5)
    assert all(WRONG not in t.tokens for t in of.texts) and AT in of.costs["verify"]
