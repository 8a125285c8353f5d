"""Law: each predictor of the ladder learns what it is made for, and there beats the one below it; what it has learned is
small, and survives being kept.
"""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from outrider.control.hedge import Hedge
from outrider.control.predict import CEILING, FLOOR, LADDER, Counters, Tage, bucket, logit, predictor, sigmoid
from outrider.control.tables import LESSONS, Lesson, Tables, past
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.types import Draft, Plan, Reading, StepRecord
from outrider.measure.cost import Costs, situation
from outrider.measure.trace import verdicts

Guess = tuple[str, int, float, int, bool]  # drafter, depth, score, history, verdict


def source(kind: str, count: int, seed: int = 0) -> Iterator[Guess]:
    """A stream of graded guesses. by place: drafters and depths differ; alternating: every second one; by score: the drafter
    knows; long pattern: of period 12, where the last eight verdicts do not tell."""
    rng, history = random.Random(seed), 0
    pattern = [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1]
    for i in range(count):
        drafter, depth, score = "a", 1, 0.6
        if kind == "by place":
            drafter, depth = rng.choice("ab"), rng.randint(1, 3)
            p = {"a": 0.9, "b": 0.3}[drafter] / depth
        elif kind == "alternating":
            p = 0.95 if i % 2 else 0.05
        elif kind == "by score":
            score = rng.uniform(0.02, 0.98)
            p = sigmoid(2 * logit(score) - 1)
        else:
            p = 0.99 if pattern[i % 12] else 0.01
        verdict = rng.random() < p
        yield drafter, depth, score, history, verdict
        history = (history << 1 | verdict) & 0xFFFF


def brier(name: str, kind: str, count: int = 4000) -> float:
    """Mean squared error over the second half of a stream."""
    one, errors = predictor(name), []
    for drafter, depth, score, history, verdict in source(kind, count):
        errors.append((one.predict(drafter, depth, score, history) - verdict) ** 2)
        one.update(drafter, depth, score, history, verdict)
    return sum(errors[count // 2 :]) / (count - count // 2)


@pytest.mark.parametrize(
    ("kind", "below", "name", "least"),
    [("by place", "static", "bimodal", 0.03), ("alternating", "bimodal", "gshare", 0.15), ("by score", "gshare", "logistic", 0.08)],
)
def test_each_beats_the_one_below_where_it_is_at_home(kind: str, below: str, name: str, least: float) -> None:
    assert brier(name, kind) < brier(below, kind) - least


def test_tage_learns_what_eight_verdicts_do_not_tell() -> None:
    found = {name: brier(name, "long pattern") for name in LADDER}
    assert found["tage"] < min(found[name] for name in ("static", "bimodal", "gshare", "logistic")), found


@pytest.mark.parametrize("name", LADDER)
@pytest.mark.parametrize("kind", ["by place", "alternating", "by score", "long pattern"])
def test_what_is_learned_survives_json(name: str, kind: str) -> None:
    one = predictor(name)
    for *guess, verdict in source(kind, 600):
        one.update(*guess, verdict)
    text = json.dumps(one.state())
    other = predictor(name, json.loads(text))
    for *guess, verdict in source(kind, 200, seed=1):
        assert other.predict(*guess) == pytest.approx(one.predict(*guess), abs=1e-9)
        one.update(*guess, verdict)
        other.update(*guess, verdict)
    assert json.dumps(predictor(name, json.loads(text)).state()) == text


@pytest.mark.parametrize("name", LADDER)
def test_a_long_life_stays_small(name: str) -> None:
    """20,000 guesses of random kinds by two drafters, in JSON."""
    one, rng = predictor(name), random.Random(2)
    for _ in range(20_000):
        one.update(rng.choice(["lookup", "model"]), rng.randint(1, 16), rng.random(), rng.getrandbits(16), rng.random() < 0.5)
    assert len(json.dumps(one.state())) < 64 * 1024


@pytest.mark.parametrize("name", LADDER)
def test_predictions_are_probabilities(name: str) -> None:
    one, rng = predictor(name), random.Random(3)
    for i in range(500):
        guess = ("a", rng.randint(1, 30), rng.choice([0.0, 0.5, 1.0]), rng.getrandbits(40))
        assert FLOOR <= one.predict(*guess) <= CEILING or (name == "tage" and 0 < one.predict(*guess) < 1)
        one.update(*guess, i % 7 == 0)


def test_an_unknown_predictor_names_the_nearest() -> None:
    with pytest.raises(OutriderError, match="gshare"):
        predictor("gshair")


# --- parts ---


def test_counters_by_hand() -> None:
    counters = Counters()
    assert counters.share("x", 0.6) == 0.6
    counters.count("x", True)
    counters.count("x", False, 3)
    assert counters.cells["x"] == [4, 0.25]
    assert counters.share("x", 0.6) == pytest.approx((4 * 0.25 + 2 * 0.6) / 6)
    for _ in range(3000):
        counters.count("x", True)
    for _ in range(1000):
        counters.count("x", False)
    assert counters.share("x", 0.5) < 0.4, "what lies far back is forgotten"


def test_buckets_and_odds() -> None:
    assert [bucket(p) for p in (0.0, 0.3, 0.5, 0.7, 0.8, 0.95, 0.999, 1.0)] == [0, 0, 1, 2, 2, 4, 6, 6]
    assert sigmoid(logit(0.3)) == pytest.approx(0.3) and sigmoid(-1000) == pytest.approx(0, abs=1e-12)


def test_the_past_of_a_deeper_node_ends_in_accepted_ones() -> None:
    assert past(0b10, 1) == 0b10 and past(0b10, 2) == 0b101 and past(0b10, 4) == 0b10111


def test_tage_answers_from_the_table_whose_tag_fits() -> None:
    tage = Tage()
    key, history = Tage._where("a", 1, 0.6), 0b1011_0111_0110_1101
    place, tag = tage._slots(key, history)[3]
    assert tage._answer(key, history)[1] == -1
    tage.tables[3][place] = [20.0, 1.0, float(tag), 0.0]
    assert tage._answer(key, history) == (pytest.approx(21 / 22), 3)
    tage.predict("a", 1, 0.6, history)
    assert tage.hits == [0, 0, 0, 1]
    tage.tables[3][place][2] = float(tag ^ 1)
    assert tage._answer(key, history)[1] == -1, "a different tag in the same place answers nothing"
    tage.predict("a", 1, 0.6, history)
    assert tage.hits == [0, 0, 0, 1]
    tage.tables[3][place] = [Tage.CONFIDENT - 1.0, 1.0, float(tag), 0.0]
    assert tage._answer(key, history)[1] == -1, "seen too seldom to be believed"


def test_tage_hits_its_tables_in_a_long_pattern_only() -> None:
    hits = {}
    for kind in ("long pattern", "by place"):
        one = Tage()
        for *guess, verdict in source(kind, 3000):
            one.predict(*guess)
            one.update(*guess, verdict)
        hits[kind] = sum(one.hits[2:])
    assert hits["long pattern"] > 500 and hits["by place"] < 100


def test_a_place_in_use_is_kept_from_strangers_until_it_is_of_no_use() -> None:
    tage = Tage()
    key, history = Tage._where("a", 1, 0.6), 0b0110
    place, tag = tage._slots(key, history)[0]
    for i in range(len(Tage.LENGTHS)):  # all longer tables are taken by others, with some use left
        there, own = tage._slots(key, history)[i]
        tage.tables[i][there] = [20.0, 1.0, float(own ^ 1), 1.0]
    for _ in range(5):
        tage.base.count(key, True)
    tage.update("a", 1, 0.6, history, False)
    assert tage.tables[0][place][2] == float(tag ^ 1) and tage.tables[0][place][3] == 0.0
    tage.update("a", 1, 0.6, history, False)
    assert tage.tables[0][place][2] == float(tag)


# --- Hedge, and what is learned from ---


def test_hedge_follows_who_is_better_and_forgets() -> None:
    hedge = Hedge()
    assert hedge.shares(["a", "b"]) == {"a": 0.5, "b": 0.5}
    for _ in range(50):
        hedge.grade({"a": 0.5, "b": -0.2})
    assert hedge.shares(["a", "b"])["a"] > 0.8
    for _ in range(100):
        hedge.grade({"a": -0.2, "b": 0.5})
    assert hedge.shares(["a", "b"])["b"] > 0.8
    before = dict(hedge.weights)
    hedge.grade({"b": 100.0})
    assert hedge.weights["a"] == before["a"], "who had no guess keeps its weight"
    assert hedge.weights["b"] <= before["b"] + 0.3, "a gain is bounded"
    again = Hedge(json.loads(json.dumps(hedge.state())))
    assert again.shares(["a", "b"]) == hedge.shares(["a", "b"]) and again.graded == hedge.graded
    assert math.isclose(sum(hedge.shares(["a", "b", "c"]).values()), 1)


AT = situation("", 1, 10, False)


def record(guesses: dict[str, list[int]], came: list[int], bits: dict[str, int], kept: tuple[int, ...] = ()) -> StepRecord:
    """One row in which drafters guessed chains side by side."""
    token, parent, depth, mark = [], [], [], []
    for name, chain in guesses.items():
        for i, t in enumerate(chain):
            parent.append(len(token) - 1 if i else -1)
            token.append(t)
            depth.append(i + 1)
            mark.append(bits[name])
    n = len(token)
    draft = Draft(1, token, parent, [0] * n, depth, mark, [0] * n, [-1] * n, [0.6] * n)
    levels = {name: max(len(chain), 1) for name, chain in guesses.items()}
    return StepRecord(
        Plan(), ("r",), (10,), (len(kept),), (0,), (len(came),), (0,), {}, {f"draft {name}": 0.01 for name in guesses}, Reading(1.0), "",
        levels=levels, draft=draft, kept=kept, tokens=(tuple(came),),
    )  # fmt: skip


def tables_of(bits: dict[str, int]) -> Tables:
    tables = Tables(bits, Costs({}))
    tables.costs.verified(AT, 0, 1.0)
    return tables


def test_what_a_slow_machine_took_is_kept_at_the_usual_pace() -> None:
    """That of the step itself, not of the moment at which it is learned from."""
    bits, states = {"a": 1}, []
    for pace in (1.0, 3.0):
        r = record({"a": [7, 7]}, [1], bits, kept=(0, 1))
        r = replace(r, seconds={"draft a": 0.01 * pace}, reading=Reading(0.5 * pace))
        tables = tables_of(bits)
        tables.costs.pace = 2.0
        tables.take_in([Lesson(r, AT, [0], {"a": 0}, False, pace), Lesson(replace(r, levels={}, drafted=(0,)), AT, [0], {}, True, pace)])
        states.append(tables.costs.state())
    assert states[0]["draft"] and states[0]["steady"]
    assert numbers(states[0]) == pytest.approx(numbers(states[1]))


def numbers(state: dict[str, object], at: str = "") -> dict[str, float]:
    """All numbers of nested dictionaries and lists, by their place."""
    pairs = state.items() if isinstance(state, dict) else enumerate(state)
    return {k: v for name, x in pairs for k, v in (numbers(x, f"{at}/{name}") if isinstance(x, dict | list) else {f"{at}/{name}": x}).items()}


def test_drafters_that_were_not_asked_to_be_right_are_graded() -> None:
    """`b` was right and never verified; `a` was verified and wrong."""
    bits = {"a": 1, "b": 2}
    tables, r = tables_of(bits), record({"a": [7, 7], "b": [1, 2]}, [1, 2, 3], bits, kept=(0, 1))
    assert list(verdicts(r)) == [(0, False), (2, True), (3, True)]
    tables.take_in([Lesson(r, AT, [0], {"a": 0, "b": 0}, False, 1.0)] * 9)
    assert tables.hedge.graded == {"a": 9, "b": 9} and tables.hedge.shares(["a", "b"])["b"] > 0.7
    assert tables.next.share("b s 0", 0.6) > 0.9 and tables.next.share("a s 0", 0.6) < 0.3


def test_each_drafter_is_learned_of_by_its_own_scores() -> None:
    """Of two nodes that both have said, one below the other."""
    bits, seen = {"a": 1, "b": 2}, []
    tables, r = tables_of(bits), record({"a": [1, 2]}, [1, 2, 3], bits, kept=(0, 1))
    r = replace(r, draft=tree.run(r.draft, -1, [1, 2], bits["b"], [0.97, 0.23]), levels={"a": 2, "b": 2})
    tables.predictor.update = lambda name, depth, score, *rest: seen.append((name, depth, score))
    tables.take_in([Lesson(r, AT, [0], {"a": 0, "b": 0}, False, 1.0)])
    assert seen == [("a", 1, 0.6), ("b", 1, 0.97), ("a", 2, 0.6), ("b", 2, 0.23)]
    assert {cell for cell in tables.next.cells if cell[2:].isdigit()} == {f"a {bucket(0.6)}", f"b {bucket(0.97)}"}


def test_lessons_are_sampled_without_an_eye_on_the_verdict() -> None:
    """Of many graded nodes a few are learned from and stand for all: what is learned is the share of all."""
    bits = {"a": 1}
    tables, rng, truth, learned = tables_of(bits), random.Random(4), [0, 0], [0.0, 0.0]
    update = tables.predictor.update

    def watched(drafter: str, depth: int, score: float, history: int, verdict: float, weight: float = 1.0) -> None:
        learned[0] += weight
        learned[1] += weight * verdict
        update(drafter, depth, score, history, verdict, weight)

    tables.predictor.update = watched
    for _ in range(3000):
        came = [rng.randrange(9) for _ in range(17)]
        right = min(int(rng.expovariate(0.12)), 16)
        r = record({"a": [*came[:right], *[99] * (16 - right)]}, came[: right + 1], bits)
        graded = list(verdicts(r))
        truth[0], truth[1] = truth[0] + len(graded), truth[1] + sum(v for _, v in graded)
        tables.take_in([Lesson(r, AT, [0], {"a": 0}, False, 1.0)])
    assert learned[0] == pytest.approx(truth[0], rel=0.03)
    assert learned[1] / learned[0] == pytest.approx(truth[1] / truth[0], abs=0.01)
    assert LESSONS < 8, "the test is of drafts longer than what is learned from"
