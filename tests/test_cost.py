"""Law: the cost model reproduces the numbers printed by Leviathan et al. (2211.17192), and its optimum is the optimum.
Tables of measured costs: what a curve keeps, assumes and believes."""

import json
import random
from typing import Any

import pytest

from outrider.control.tables import Tables
from outrider.measure.cost import (
    CALM,
    CLIP,
    COLD,
    DEEPEST,
    FAR,
    FEW,
    LATER,
    SLOPE,
    TRUST,
    WIDEST,
    Costs,
    Curve,
    Situation,
    best_depth,
    expected_tokens,
    named,
    operations,
    situation,
    speedup,
)  # fmt: skip

TABLE_1 = [(0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44), (0.8, 5, 1.63, 3.69), (0.9, 2, 1.11, 2.71), (0.9, 10, 1.60, 6.86)]
TABLE_4 = [(0.75, 7, 0.02, 3.2), (0.80, 7, 0.04, 3.3), (0.82, 7, 0.11, 2.5), (0.65, 5, 0.02, 2.4), (0.73, 5, 0.04, 2.6), (0.74, 3, 0.11, 2.0)]
GRID = [(0.01, 14, 4.23), (0.02, 11, 3.82), (0.05, 8, 3.09), (0.1, 6, 2.47), (0.2, 4, 1.87)]


@pytest.mark.parametrize(("alpha", "gamma", "ops", "speed"), TABLE_1)
def test_table_1(alpha: float, gamma: int, ops: float, speed: float) -> None:
    assert round(operations(alpha, gamma, 0.0), 2) == ops
    assert round(speedup(alpha, gamma, 0.0), 2) == speed


@pytest.mark.parametrize(("alpha", "gamma", "c", "speed"), TABLE_4)
def test_table_4(alpha: float, gamma: int, c: float, speed: float) -> None:
    """The paper used unrounded alpha and c."""
    assert speedup(alpha, gamma, c) == pytest.approx(speed, abs=0.07)


@pytest.mark.parametrize(("c", "gamma", "speed"), GRID)
def test_best_depth(c: float, gamma: int, speed: float) -> None:
    assert best_depth(0.8, c) == gamma
    assert round(speedup(0.8, gamma, c), 2) == speed


@pytest.mark.parametrize(("gamma", "tokens"), [(1, 1.75), (3, 2.7344), (5, 3.2881), (7, 3.5995)])
def test_expected_tokens(gamma: int, tokens: float) -> None:
    assert expected_tokens(0.75, gamma) == pytest.approx(tokens, abs=5e-5)


@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_expected_tokens_at_the_ends(gamma: int) -> None:
    assert expected_tokens(1.0, gamma) == gamma + 1
    assert expected_tokens(0.0, gamma) == 1


def test_a_bigram_drafter_that_costs_nothing() -> None:
    assert speedup(0.2, 3, 0.0) == pytest.approx(1.248)


@pytest.mark.parametrize(("alpha", "c"), [(0.3, 0.2), (0.6, 0.1), (0.9, 0.5)])
def test_drafting_pays_exactly_when_it_is_more_often_right_than_costly(alpha: float, c: float) -> None:
    """Corollary 3.9: with alpha > c some depth gains at least (1 + alpha) / (1 + c)."""
    assert speedup(alpha, best_depth(alpha, c), c) >= (1 + alpha) / (1 + c) > 1
    assert best_depth(c, alpha) == 0


# --- curves


def measured(means: dict[int, float], count: float = 50.0, slope: float = 0.1) -> Curve:
    return Curve(1.0, slope, {n: [count, mean] for n, mean in means.items()})


def test_a_curve_that_saw_nothing_is_a_line_from_its_start() -> None:
    assert Curve(2.0, 0.5).line == pytest.approx([2.0 + 0.5 * n for n in range(DEEPEST + 1)])


def test_measured_numbers_stand_cliffs_included_and_between_them_is_a_straight_line() -> None:
    means = {0: 1.0, 4: 1.2, 5: 3.0, 8: 3.3, 16: 2.5}
    line = measured(means).line
    assert {n: line[n] for n in means} == means
    assert [line[2], line[6], line[12]] == pytest.approx([1.1, 3.1, 2.9])
    assert len(line) == DEEPEST + 1 and line[20] == pytest.approx(2.5 + 4 * 0.1)


def test_below_the_first_measured_number_the_slope_goes_down_and_never_to_nothing() -> None:
    assert measured({4: 2.0}, slope=0.3).line[:5] == pytest.approx([0.8, 1.1, 1.4, 1.7, 2.0])
    assert measured({4: 2.0}, slope=0.9).line[:5] == pytest.approx([0.2, 0.2, 0.2, 1.1, 2.0])


def test_the_shape_is_the_line_over_its_value_at_zero() -> None:
    curve = measured({0: 2.0, 3: 5.0})
    assert [curve.shape[0], curve.shape[3]] == [1.0, 2.5]
    assert Curve(0.0, 0.4).shape == Curve(0.0, 0.4).line


def test_what_was_added_shows_when_the_line_is_drawn() -> None:
    curve = measured({0: 1.0}, count=2.0)
    curve.add(0, 2.0)
    assert curve.line[0] == 1.0 and curve.drawn().line[0] == curve.seen[0][1] > 1.0 and not curve.stale


@pytest.mark.parametrize("count", [1, 10, 1000])
def test_one_stall_moves_a_mean_no_more_than_the_clip_allows(count: int) -> None:
    stalled, tripled = measured({3: 1.0}, count), measured({3: 1.0}, count)
    stalled.add(3, 10.0)
    tripled.add(3, CLIP)
    assert stalled.seen == tripled.seen and 1.0 < stalled.seen[3][1] <= 1.0 + (CLIP - 1) / 2
    fast = measured({3: 1.0}, count)
    fast.add(3, 1e-9)
    assert 1 / CLIP <= fast.seen[3][1] < 1.0


def test_an_assumption_is_worth_a_few_observations_and_then_forgotten() -> None:
    curve = Curve(1.0, 0.0)
    curve.add(4, 2.0)
    assert curve.seen[4] == [1.0, pytest.approx(1 + 1 / (1 + TRUST))]
    for _ in range(60):
        curve.add(4, 2.0)
    assert curve.seen[4][0] == 61 and curve.seen[4][1] == pytest.approx(2.0, rel=0.05)


def test_a_mean_of_many_observations_still_follows_a_change() -> None:
    curve = measured({0: 1.0}, count=1e6)
    for _ in range(200):
        curve.add(0, 1.5)
    assert curve.seen[0][1] == pytest.approx(1.5, rel=0.02)


def test_the_spread_is_the_99th_percentile_of_observations_over_expectations() -> None:
    draw, curve = random.Random(0), measured({0: 1.0}, count=1e6)
    for _ in range(20000):
        curve.add(0, draw.uniform(0.8, 1.2))
    assert curve.spread == pytest.approx(1.196, abs=0.03)


def test_a_moment_that_held_up_every_tenth_step_makes_no_step_unaffordable() -> None:
    """Plain steps are held up as well: what a sweep met, or a profile kept, is no reason to be afraid of every draft for thousands of steps."""
    curve = Curve(1.0, 0.1, {0: [9.0, 1.0]}, spread=8.0)
    assert curve.spread == WIDEST == Curve.of(curve.state() | {"spread": 8.0}).spread
    for n in range(1000):
        curve.add(0, 10.0 if n % 10 == 0 else 1.0)
        assert curve.spread <= WIDEST


def test_what_holds_steps_up_is_no_part_of_what_they_may_cost() -> None:
    """One step in thirty takes twenty times as long: the percentile is that of the others."""
    rng = random.Random(5)
    curves = [Curve(1.0, 0.0, {0: [9.0, 1.0]}) for _ in range(2)]
    for i in range(6000):
        took = 1 + 0.2 * rng.random()
        for curve, held in zip(curves, (False, i % 30 == 0), strict=True):
            curve.add(0, 20.0 if held else took)
    worst = [curve.spread * curve.seen[0][1] for curve in curves]
    assert worst[1] == pytest.approx(worst[0], rel=0.03) and curves[0].spread < 1.2


# --- tables

AT = Situation("compiled", 1, 512, False)


def table(**more: Curve) -> Costs:
    costs = Costs({"model": 0.25})
    costs.verify[AT] = measured({n: 1 + 0.1 * n for n in range(9)})
    costs.draft |= {(name, AT): curve for name, curve in more.items()}
    return costs


@pytest.mark.parametrize(
    ("rows", "context", "bucket"), [(1, 1, (1, 512)), (2, 512, (2, 512)), (3, 513, (4, 1024)), (4, 1024, (4, 1024)), (5, 1025, (8, 2048))]
)
def test_rows_and_context_go_by_powers_of_two(rows: int, context: int, bucket: tuple[int, int]) -> None:
    assert situation("t", rows, context, True) == Situation("t", *bucket, True)


@pytest.mark.parametrize("tier", ["", "compiled", "eager:off", "eager: g++ was not found"])
def test_a_situation_has_a_name_and_the_name_a_situation(tier: str) -> None:
    for at in (Situation(tier, 1, 512, False), Situation(tier, 16, 8192, True)):
        assert named(at.name()) == at


def test_a_new_situation_begins_as_its_nearest_relative_and_goes_its_own_way() -> None:
    known = {(1, 512, False): 1.0, (1, 4096, False): 2.0, (8, 512, False): 3.0, (1, 512, True): 4.0}
    nearest = {(1, 1024, False): 1.0, (1, 8192, False): 2.0, (2, 512, False): 1.0, (16, 4096, False): 3.0, (1, 4096, True): 4.0, (8, 512, True): 4.0}
    for met, start in nearest.items():
        costs = Costs({})
        costs.verify = {Situation("t", *at): measured({0: mean}) for at, mean in known.items()}
        curve = costs.verifying(Situation("t", *met))
        assert curve is not None and curve.seen == {0: [1.0, start]}, "what a relative saw counts as one observation"
        curve.add(0, 9.0)
        assert all(costs.verify[Situation("t", *at)].seen == {0: [50.0, mean]} for at, mean in known.items())


def test_a_new_situation_takes_over_what_plain_steps_cost_its_relative() -> None:
    costs = table()
    costs.steady[AT] = 0.9 * costs.verify[AT].drawn().line[0]
    longer = AT._replace(context=2 * AT.context)
    assert costs.verifying(longer) is not None and costs.plainly(longer) == costs.steady[AT]
    costs.steady[longer] = 7.0
    assert costs.plainly(AT) != 7.0


def test_another_tier_is_no_relative() -> None:
    costs = table()
    other = AT._replace(tier="eager:off")
    assert costs.verifying(other) is None and costs.drafting("model", other) is None and costs.plainly(other) == 0
    costs.drafted("model", other, 3, 1.0, 0)
    assert not costs.draft
    costs.verified(other, 0, 2.0)
    assert costs.verify[other].drawn().line[:2] == pytest.approx([2.0, 2.0 + 2.0 * SLOPE])


def test_a_drafter_never_measured_costs_what_is_assumed_of_a_plain_step() -> None:
    costs = table()
    assert costs.drafting_share("model", AT, 4) == pytest.approx(4 * 0.25)
    assert costs.drafting_share("nobody", AT, 2) == pytest.approx(2 * 0.2)
    assert Costs({"model": 0.25}).drafting_share("model", AT, 3) == pytest.approx(0.75), "also before any step"


def test_a_drafter_begins_elsewhere_as_it_is_known_here() -> None:
    costs = table(model=measured({1: 0.5, 2: 1.5}), other=measured({1: 9.0}))
    curve = costs.drafting("model", AT._replace(context=2048))
    assert curve is not None and curve.line[:3] == pytest.approx([0.4, 0.5, 1.5])


def test_a_machine_twice_as_slow_changes_the_pace_and_not_the_shape() -> None:
    costs = table()
    shape = costs.verify[AT].shape[:9]
    for i in range(400):
        seconds = 2 * (1 + 0.1 * (i % 9))
        costs.felt(seconds / (costs.verify[AT].drawn().line[i % 9] * costs.pace))
        costs.verified(AT, i % 9, seconds / costs.pace)
    costs.verify[AT].drawn()
    assert costs.verify[AT].shape[:9] == pytest.approx(shape, rel=0.02)
    assert costs.pace > 1.5
    assert costs.pace * costs.verify[AT].line[0] == pytest.approx(2.0, rel=0.03)


def test_one_stall_hardly_moves_the_pace() -> None:
    costs = table()
    assert 1.0 < costs.felt(1000.0) == costs.pace <= 1.11
    assert costs.pace * costs.felt(1e-3) < 1.05


def test_first_steps_of_a_text_tell_nothing_of_the_pace() -> None:
    """They find caches cold: how much longer each takes is kept apart, and never less than later ones."""
    costs = table()
    for _ in range(60):
        for age, took in enumerate((2.0, 1.5, 0.5)):
            costs.felt(took / costs.chill(age), age)
    assert costs.pace == 1.0 and [costs.chill(age) for age in range(COLD + 2)] == pytest.approx([2.0, 1.5, 1.0, 1.0, 1.0, 1.0], rel=0.02)
    assert costs.felt(1.5, COLD) == costs.pace > 1.0


def test_what_plain_decoding_takes_is_no_more_than_all_steps_tell() -> None:
    """Where nearly all steps draft, a few plain ones between them tell: they met a busy moment, or cold caches. That is not given away; a machine that has become
    slow is seen in all steps, and what plain steps take less than that counts at once."""
    costs = table()
    for _ in range(4):
        assert costs.owe(AT, 1.8) <= costs.plainly(AT) * costs.pace == pytest.approx(1.0)
    for _ in range(400):
        costs.felt(2.0 / costs.pace)
    assert costs.owe(AT, 2.0) == pytest.approx(costs.owed(AT)) and 1.5 < costs.owed(AT) < 2.2
    for _ in range(200):
        costs.owe(AT, 0.9)
    assert costs.owed(AT) == pytest.approx(0.9, rel=0.02)


def test_plain_steps_among_plain_steps_have_a_cost_of_their_own() -> None:
    costs = table()
    for _ in range(100):
        for n in (4, 8, 0):
            costs.verified(AT, n, 1 + 0.1 * n)
        for _ in range(3):
            costs.verified(AT, 0, 0.8, calm=True)
    assert costs.plainly(AT) / costs.verify[AT].drawn().line[0] == pytest.approx(0.8, rel=0.03)
    assert costs.plains[AT] == 400 and CALM > 1


def test_a_long_catching_up_is_counted_apart_from_levels() -> None:
    costs = table(model=measured({1: 0.5, 2: 1.0}))
    before = costs.state()["draft"]
    costs.drafted("model", AT, 2, 1.0 + 100 * 0.01, behind=100)
    assert costs.state()["draft"] == before and costs.catch_up == {"model": {7: pytest.approx(0.01)}}
    costs.drafted("model", AT, 2, 1.0 + 100 * 5.0, behind=100)
    assert costs.catch_up["model"][7] == pytest.approx(0.01 * (1 + LATER * (CLIP - 1))), "a stall counts for CLIP times what is known"
    assert costs.catching_up("model", AT, FAR) == 0
    assert costs.catching_up("model", AT, 200) == pytest.approx(200 * costs.catch_up["model"][7])
    costs.drafted("model", AT, 2, 2.0, behind=FAR)
    assert costs.draft["model", AT].seen[2][0] == 51


@pytest.mark.parametrize("kept", [{}, {"catch_up": {"model @ 7": [1, 0.0], "model @ 9": [1, 0.0]}}])
def test_a_reading_that_seemed_to_cost_nothing_gets_its_price(kept: dict[str, Any]) -> None:
    """The first one was as quick as the level behind it was believed to be; so one is held to be no news, and all of them are."""
    costs = table(model=measured({1: 0.5, 2: 1.0}))
    costs.take(costs.state() | kept)
    costs.drafted("model", AT, 1, 0.4, behind=100)
    assert costs.catching_up("model", AT, 100) == pytest.approx(0.05)
    for behind in (100, 500):
        for _ in range(60):
            costs.drafted("model", AT, 1, 0.5 + behind * 0.02, behind=behind)
        assert costs.catching_up("model", AT, behind) == pytest.approx(behind * 0.02, rel=0.01)


def test_a_reading_that_was_timed_cold_is_soon_forgotten() -> None:
    """Ten times too dear, it would keep a drafter from being asked in whole texts: three readings later it is nearly right."""
    costs = table(lookup=measured({8: 0.5}))
    costs.catch_up["lookup"] = {8: 0.1}
    for _ in range(3):
        costs.drafted("lookup", AT, 8, 0.5 + 200 * 0.01, behind=200)
    assert costs.catch_up["lookup"][8] == pytest.approx(0.01 + 0.09 / 8)


def test_few_tokens_cost_more_each_than_many() -> None:
    """One forward reads 20 or 200: either number is priced by its like, one never met by the nearest."""
    costs = table(model=measured({1: 0.5}))
    for _ in range(60):
        for behind in (20, 200):
            costs.drafted("model", AT, 1, 0.5 + 2.0, behind=behind)
    assert costs.catching_up("model", AT, 25) == pytest.approx(2.5, 1e-3)
    assert costs.catching_up("model", AT, 150) == pytest.approx(1.5, 1e-3) and costs.catching_up("model", AT, 1000) == pytest.approx(10.0, 1e-3)
    again = Costs({})
    again.take({"catch_up": {"model": [1, 0.02], "my model 2": [1, 0.03], "other @ 5": [3, 0.5]}})
    assert again.catch_up == {"model": {8: 0.02}, "my model 2": {8: 0.03}, "other": {5: 0.5}}


def test_one_stall_at_a_number_first_met_does_not_set_its_price() -> None:
    """It counts for CLIP times what the nearest number costs."""
    costs = table(model=measured({1: 0.5}))
    costs.drafted("model", AT, 1, 0.5 + 200 * 0.01, behind=200)
    costs.drafted("model", AT, 1, 0.5 + 300 * 5.0, behind=300)
    assert costs.catch_up["model"] == {8: pytest.approx(0.01), 9: pytest.approx(0.01 * (1 + LATER * (CLIP - 1)))}


@pytest.mark.parametrize("seen", [{}, {4: 0.6}, {1: 0.5, 8: 1.0}], ids=str)
def test_a_drafter_that_is_not_started_costs_nothing(seen: dict[int, float]) -> None:
    """What its first level costs beyond the others is counted when it starts."""
    costs = table(**({"model": measured(seen)} if seen else {}))
    page = Tables({"model": 1}, Costs({"model": 0.25}), state={"costs": costs.state()}).page(AT)
    assert page is not None and page.drafting["model"][0] == 0
    assert page.drafting["model"][1:] == pytest.approx([costs.drafting_share("model", AT, n) for n in range(1, DEEPEST + 1)])


def test_what_a_profile_keeps_comes_back_through_json() -> None:
    costs = table(model=measured({1: 0.5, 4: 2.0}))
    draw, elsewhere = random.Random(3), Situation("", 4, 2048, True)
    costs.draft["two @ words", elsewhere] = measured({1: 3.0})
    for i in range(80):
        costs.verified(AT, draw.randrange(9), draw.uniform(0.5, 3))
        costs.verified(elsewhere, 0, draw.uniform(1, 2), calm=i % 2 > 0)
        costs.verified(AT, 0, draw.uniform(0.8, 1.2), calm=True)
        costs.drafted("model", AT, draw.randrange(1, 5), draw.uniform(0.5, 2), behind=draw.choice([0, 90]))
    again = Costs({"model": 0.25})
    again.take(json.loads(json.dumps(costs.state())))
    assert again.state() == costs.state() and again.pace == 1.0
    assert {at: c.line for at, c in again.verify.items()} == {at: c.drawn().line for at, c in costs.verify.items()}
    assert {k: c.line for k, c in again.draft.items()} == {k: c.drawn().line for k, c in costs.draft.items()}
    assert (again.steady, again.plains, again.catch_up) == (costs.steady, costs.plains, costs.catch_up)


def test_a_busy_moment_is_no_cliff() -> None:
    """What was seen a few times is not believed to take longer than more of it; what was seen often is, and bounds what is below it that was not."""
    rare, often = [1.0, 3.0], [FEW + 1.0, 3.0]
    assert Curve(1.0, 0.0, {0: [9.0, 1.0], 1: rare, 4: [1.0, 2.0]}).line[:5] == [1.0, 2.0, 2.0, 2.0, 2.0]
    assert Curve(1.0, 0.0, {0: [9.0, 1.0], 1: often, 4: [1.0, 2.0]}).line[:2] == [1.0, 3.0]
    assert Curve(1.0, 0.0, {0: [9.0, 1.0], 1: [1.0, 5.0], 2: often, 4: [1.0, 2.0]}).line[:3] == [1.0, 3.0, 3.0]
    kept = Curve(1.0, 0.0, {1: list(rare), 4: [1.0, 2.0]})
    assert kept.state()["seen"] == {"1": rare, "4": [1.0, 2.0]}, "what was measured is kept as it was"


def test_part_of_a_draft_takes_no_longer_than_all_of_it() -> None:
    """However often a busy moment was seen: a drafter goes its first levels on its way to the others."""
    busy = {1: [38.0, 9.8], 2: [37.0, 3.8], 4: [12.0, 1.1], 7: [40.0, 5.2]}
    kept = Curve(0.0, 0.3, busy, nested=True)
    assert kept.line[1:5] == [1.1] * 4
    assert kept.line[7] == 5.2
    costs = Costs({})
    costs.take({"draft": {"model @ - rows 1 context 512 greedy": kept.state()}})
    assert costs.draft["model", situation("", 1, 512, False)].line == kept.line, "as a profile gives it back"
