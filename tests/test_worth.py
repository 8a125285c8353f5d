"""What a draft is worth: the short ways for one row's chain give what the general ones give."""

import itertools
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from contracts import random_draft
from test_controller import lookups, ours
from written import Weather, adaptive, drive, linear, trace
from written import costs as priced

from outrider.control import rows as memory
from outrider.control.controller import Adaptive
from outrider.control.predict import Bias
from outrider.control.rows import BEFORE, LOOKS, LOST, NEAR, SHARE, WORST, Row, looked
from outrider.control.step import Step
from outrider.control.tables import Lesson, Page, Tables
from outrider.core import tree
from outrider.core.types import QUEUED, Draft
from outrider.measure.cost import DEEPEST, Costs, Curve, Situation
from outrider.measure.trace import verdicts

BITS = {"lookup": 1, "model": 2}


class Told:
    """A predictor whose answer hangs on all that a page tells apart."""

    def predict(self, name: str, depth: int, score: float, history: int) -> float:
        return 0.2 + 0.7 * random.Random(f"{name} {depth} {score} {history & 3}").random()


def chain(rng: random.Random, most: int = 40) -> Draft:
    """A chain of one row by one or two drafters, in runs of equal scores."""
    count = rng.randint(1, most)
    source, score = [rng.choice([1, 2, 3])], [rng.random()]
    for _ in range(count - 1):
        again = rng.random() < 0.7
        source.append(source[-1] if again else rng.choice([1, 2, 3]))
        score.append(score[-1] if again else rng.random())
    depth = list(range(1, count + 1))
    return Draft(1, [rng.randrange(3) for _ in depth], list(range(-1, count - 1)), [0] * count, depth, source, [0] * count, [-1] * count, score)


@pytest.mark.parametrize("seed", range(40))
def test_the_best_of_a_chain_is_the_best_of_a_tree_that_is_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over curves with cliffs and dents; where nothing pays it is nothing."""
    rng = random.Random(seed)
    draft, verify = chain(rng), [1.0]
    for _ in range(DEEPEST):
        verify.append(max(verify[-1] + rng.choice([0.0, 0.02, 0.1, 0.7, -0.05]), 0.5))
    tables = Tables(BITS, Costs({}), "static")
    page = Page(Situation("", 1, 512, False), 1.0, 1.0, False, 1.0, verify, verify, {}, {}, {}, 1.0, DEEPEST, 1.0)
    made = lambda: Step(tables, page, [Row(history=5)], 1, 9.0, 1.0, spent=0.3 * (seed % 3))  # noqa: E731
    short = made().best(draft)
    monkeypatch.setattr(tree, "straight", lambda draft: False)
    assert short == pytest.approx(made().best(draft), rel=1e-12)
    if seed == 0:
        verify[:] = [1.0 + n for n in range(DEEPEST + 1)]
        assert made().best(draft)[0] == 0


@pytest.mark.parametrize("seed", range(40))
def test_what_another_says_again_is_weighed_anew(seed: int) -> None:
    """A draft that was weighed when one had guessed is worth, when another has, what it is worth to who sees it for the first time: also where every node of it was there.
    Each is believed by its own score, and a node as likely as the surest of them says."""
    rng, tables = random.Random(seed), Tables(BITS, Costs({}), "static")
    tables.predictor = Told()
    verify = [1 + 0.11 * n for n in range(DEEPEST + 1)]
    page = Page(Situation("", 1, 512, False), 1.0, 1.0, False, 1.0, verify, verify, {}, {}, {}, 1.0, DEEPEST, 1.0)
    made = lambda: Step(tables, page, [Row()], 1, 9.0, 1.0)  # noqa: E731
    tokens, step = [rng.randrange(3) for _ in range(6)], made()
    first = tree.run(tree.empty(1), -1, tokens, 1, [0.4] * 6)
    step.best(first)
    again = tokens if seed % 2 else [*tokens[:3], *[rng.randrange(3) for _ in range(4)]]
    both = tree.run(first, -1, again, 2, [rng.random() for _ in again])
    assert step.best(both) == made().best(both) and step.survivals(both) == made().survivals(both)
    for n, survival in enumerate(step.survivals(both)):
        own = [tables.chance(name, both.depth[n], both.said(n, bit), 0) for name, bit in BITS.items() if both.source[n] & bit]
        assert survival == pytest.approx(max(own) * (step.survival[both.parent[n]] if both.parent[n] >= 0 else 1.0))
    queued = made()
    queued.survivals(first)
    queued.queued = True
    assert Adaptive.fill(SimpleNamespace(step=queued), [], both, "") == (None, QUEUED)
    assert queued.expected == pytest.approx(1 + sum(made().apart(both))), "of what is being verified already, too"


@pytest.mark.parametrize("seed", range(20))
def test_a_drafter_alone_is_worth_what_its_best_depth_is(seed: int) -> None:
    """Tokens for the time of a plain step, each depth weighed by powers of the chance; and it is kept by drafter, chance and steps."""
    rng, tables = random.Random(seed), Tables(BITS, Costs({}), "static")
    verify, drafting = [1.0], {name: [0.0] for name in BITS}
    for _ in range(DEEPEST):
        verify.append(verify[-1] + rng.choice([0.0, 0.05, 0.4]))
        for line in drafting.values():
            line.append(line[-1] + rng.choice([0.02, 0.2]))
    page = Page(Situation("", 1, 512, False), 1.0, 1.0, False, 1.0, verify, verify, drafting, {}, {}, 1.0, DEEPEST, 1.0)
    for name, percent, steps in [(rng.choice([*BITS]), rng.randrange(101), rng.choice([1.0, 0.5, 0.2])) for _ in range(60)]:
        cost = [drafting[name][max(int(-(-k * steps // 1)), 1)] + verify[k] for k in range(1, 17)]
        worth = [sum((percent / 100) ** i for i in range(k + 1)) / cost[k - 1] for k in range(1, 17)]
        score, depth = tables.depth(page, name, percent / 100, steps)
        assert score == pytest.approx(max(worth)) == pytest.approx(worth[depth - 1])


def test_what_was_weighed_serves_again_only_where_nothing_differs() -> None:
    """One page for many steps, which differ in one thing or another, gives each what a page of its own would."""
    rng, tables = random.Random(3), Tables(BITS, Costs({}), "static")
    tables.predictor = Told()
    verify = [1 + 0.11 * n for n in range(DEEPEST + 1)]
    fresh = lambda: Page(Situation("", 1, 512, False), 1.0, 1.0, False, 1.0, verify, verify, {}, {}, {}, 1.0, DEEPEST, 1.0)  # noqa: E731
    page, drafts = fresh(), [chain(rng, 9) for _ in range(4)]
    drafts += [replace(d, source=[3 - s if s < 3 else 3 for s in d.source]) for d in drafts] + [replace(d, score=d.score[::-1]) for d in drafts]
    found = []
    for _ in range(2000):
        bias = {"lookup": Bias(rng.choice([0.5, 1.0, 2.0]))} if rng.random() < 0.5 else {}
        draft, how = rng.choice(drafts), (Row(history=rng.randrange(8), bias=bias), 9.0, rng.choice([0.8, 1.0, 1.6]), rng.choice([0.0, 0.5]))
        row, room, plain, spent = how
        answers = [Step(tables, on, [row], 1, room, plain, spent=spent).best(draft) for on in (page, fresh())]
        assert answers[0] == answers[1]
        found.append(answers[0])
    assert len(set(found)) > 50


@pytest.mark.parametrize("seed", range(40))
def test_verdicts_of_a_chain_are_those_of_its_nodes(seed: int) -> None:
    """Right up to the first that is wrong, and none beyond where the text ends."""
    rng = random.Random(seed)
    draft = chain(rng, 9)
    right = rng.randint(0, len(draft))
    text = [*draft.token[:right], *[7] * rng.randint(0, 1)] or [7]
    record, row, want = SimpleNamespace(draft=draft, tokens=(tuple(text),)), Row(history=rng.randrange(1 << 16)), 0
    want = row.history
    for _, verdict in verdicts(record):
        want = (want << 1 | verdict) & 0xFFFF
    memory._judged([row], record)
    assert row.history == want


@pytest.mark.parametrize("seed", range(40))
def test_what_a_chain_says_of_its_drafters_is_what_its_nodes_say(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a drafter, or of two that have said the same; where the text ends before it, and where it is right to the end."""
    rng, tables, rows = random.Random(seed), Tables(BITS, Costs({}), "static"), (Row(), Row())
    draft = chain(rng, 9)
    draft = replace(draft, source=[draft.source[0]] * len(draft))
    text = [*draft.token[: rng.randint(0, len(draft))], *[7] * rng.randint(0, 1)] or [7]
    record = SimpleNamespace(draft=draft, tokens=(tuple(text),))
    page = Page(Situation("", 1, 512, False), 1.0, 1.0, False, 1.0, [1.0], [1.0], {}, {}, {}, 1.0, DEEPEST, 1.0)
    for row, short in zip(rows, (True, False), strict=True):
        if not short:
            monkeypatch.setattr(tree, "straight", lambda draft: False)
        for _ in range(3):
            Step(tables, page, [row], 1, 9.0, 1.0).judged(record)
    assert rows[0].bias.keys() == rows[1].bias.keys() == set(tables.marks.of(draft.source[0]))
    for name, bias in rows[0].bias.items():
        other = rows[1].bias[name]
        assert (bias.factor, bias.excess, bias.weight) == pytest.approx((other.factor, other.excess, other.weight))


@pytest.mark.parametrize("seed", range(40))
def test_what_is_walked_in_one_pass_is_walked_place_by_place(seed: int) -> None:
    """Forests and chains: from each root on to the child that says what is chosen there, until none does."""
    rng = random.Random(seed)
    draft = chain(rng, 9) if seed % 4 == 0 else random_draft(np.random.default_rng(seed), rng.randint(1, 3), 3, rng.randint(0, 20))
    choice = [rng.randrange(3) for _ in tree.all_places(draft)]
    paths, bonus = [], []
    for row in range(draft.rows):
        place, path = ~row, []
        while right := [n for n in range(len(draft)) if draft.parent[n] == place and draft.token[n] == choice[tree.index_of(place, draft.rows)]]:
            (place,) = right
            path.append(place)
        paths.append(path)
        bonus.append(choice[tree.index_of(place, draft.rows)])
    before = choice[:]
    assert tree.follow(draft, choice) == (paths, bonus) and choice == before


def test_looks_that_lose_are_so_rare_that_they_take_a_small_share() -> None:
    """At any loss; one stall says no more than the worst look; where looks win, none rests. A look may be as bad as what is seldom done and so finds
    everything cold."""
    for seldom, loss in itertools.product((1, LOST), (0.03, 0.1, 0.5, 1.0, 6.0, 100.0)):
        row, took, steps = Row(seldom=seldom), 0.0, 0
        for _ in range(400):
            looked([row], ("lookup",), -loss)
            took, steps = took + min(loss, WORST), steps + 1 + row.rest.pop("lookup", 0)
        assert 0.5 * SHARE / seldom < took / steps < 1.6 * SHARE / seldom, loss
    row = Row(worth=0.4, looked=LOOKS)
    looked([row], ("lookup",), -0.1)
    assert not row.rest
    row.rest["model"] = 9
    for _ in range(200):
        looked([row], ("model", "lookup"), -0.1)
    assert row.rest == {"model": 9, "lookup": 4}, "who rests longer goes on resting"
    seldom = Row(worth=-0.1, seldom=LOST)
    looked([seldom], ("lookup",), -0.1)
    assert seldom.rest == {"lookup": 5 * LOST}
    several = Row()
    looked([several], (), -0.1, times=LOOKS)
    assert several.worth == pytest.approx(-0.1)


def test_what_a_text_shows_soon_says_more_than_what_was_before() -> None:
    """Half of what is believed after BEFORE looks; later ones each say the same, so that it can change its mind."""
    row = Row(worth=1.0)
    for _ in range(BEFORE - 1):
        looked([row], (), 0.0)
    assert row.worth == pytest.approx((BEFORE) / (2 * BEFORE - 1))
    for _ in range(100):
        looked([row], (), 0.0)
    looked([row], (), 1.0)
    assert row.worth == pytest.approx(1 / LOOKS, abs=0.01)


@pytest.mark.parametrize("longer", [0.0, 1.5])
def test_a_look_is_worth_what_its_step_took(longer: float) -> None:
    """Drafts that pay by what steps are believed to take, and do not where they take longer than that after many plain ones."""
    of = trace(4, priced(linear(0.1), {"lookup": linear(0.0, 0.01)}), {"lookup": lambda t, d: 0.7 if t % 3 == 0 and d == 1 else 0.0}, length=600)
    controller = adaptive(of)
    worth = list[float]()
    ended = controller.starts.ended
    controller.starts.ended = lambda row: (worth.append(row.worth), ended(row))[1]
    drive(of, controller, Weather(of, lambda n, name: 1 + longer * (name == "verify")))
    assert worth[0] > 0 if longer == 0 else worth[0] < 0


def test_who_says_nothing_tells_no_price() -> None:
    """A drafter that was let go and made no node, in a time in which nothing can be computed."""
    costs, at = Costs({}), Situation("", 1, 512, False)
    costs.verify[at], costs.draft["model", at] = Curve(1.0, 0.1, {0: [50.0, 1.0]}), Curve(0.0, 0.3, {1: [50.0, 0.3]}, nested=True)
    tables = Tables(BITS, costs, "static")
    costs.verify[at], costs.draft["model", at] = Curve(1.0, 0.1, {0: [50.0, 1.0]}), Curve(0.0, 0.3, {1: [50.0, 0.3]}, nested=True)
    said = tree.run(tree.empty(1), -1, [1], BITS["model"], [0.5])
    for draft, price in ((Draft(1), 0.3), (said, 0.3 - 0.02 * 0.2)):
        seconds = {"draft model": 1e-5}
        record = SimpleNamespace(
            levels={"model": 1},
            seconds=seconds,
            drafted=(0,),
            nodes=lambda: 0,
            draft=draft,
            tokens=((1,),),
            reading=SimpleNamespace(seconds=1.0),
            emitted=(1,),
        )
        tables.take_in([Lesson(record, at, [0], {"model": 1}, False, 1.0)])
        assert costs.draft["model", at].seen[1][1] == pytest.approx(price, abs=1e-3)


def test_drafts_are_planned_deep_at_once_where_all_guesses_came_true() -> None:
    """And near again after one that did not."""
    records, depths = ours(lookups(linear(0.001), 0.97, length=900)), Counter[int]()
    for before, now in pairwise(records):
        if before.drafted[0] and now.plan.drafters:
            depths[depth := now.plan.drafters[0][1]] += 1
            assert (depth > NEAR) == (before.accepted[0] == before.drafted[0])
    assert len(depths) == 2 and min(depths.values()) > 8
