"""Drafters beside one another: what their guesses are worth together, and who is asked where another has guessed."""

import itertools
import random
from dataclasses import replace
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
from test_ahead import reading
from test_controller import FREE, seconds
from written import adaptive, costs, drive, linear, trace

from outrider.control import siblings, starts
from outrider.control.guard import Ledger
from outrider.control.rows import Row
from outrider.control.starts import SAMPLE, Starts
from outrider.control.step import Step
from outrider.core import tree
from outrider.core.types import Draft


@pytest.mark.parametrize("seed", range(20))
def test_of_guesses_beside_one_another_one_comes_true(seed: int) -> None:
    """Their survivals sum to no more than what is above them has, the surest keep their own, and those of chains are what they were."""
    rng = random.Random(seed)
    draft, count = tree.empty(2), 14
    for n in range(count):
        place = rng.choice([-1, -2, *range(n)])
        draft = tree.grow(draft, [place], [n], rng.choice([1, 2]), score=[rng.random()])
    of = trace(1, costs(linear(0.1), FREE | {"model": linear(0.1, 0.0)}), {"lookup": lambda t, d: 0.5, "model": lambda t, d: 0.5}, length=20)
    tables = adaptive(of).tables
    step = Step(tables, tables.page(next(iter(tables.costs.verify))), [Row(), Row()], 1, 99.0, 1.0)
    own, apart = step.survivals(draft), step.apart(draft)
    for place in [-1, -2, *range(count)]:
        below = [n for n in range(count) if draft.parent[n] == place]
        above, had = (apart[place], own[place]) if place >= 0 else (1.0, 1.0)
        assert sum(apart[n] for n in below) <= above + 1e-9
        if below:
            best = max(below, key=lambda n: own[n])
            assert apart[best] * had == pytest.approx(own[best] * above)
    chain = tree.run(tree.empty(1), -1, [1, 2, 3], 1, [0.9, 0.8, 0.7])
    step = Step(tables, step.page, [Row()], 1, 99.0, 1.0)
    assert step.apart(chain) == pytest.approx(step.survivals(chain))


@pytest.mark.parametrize("seed", range(60))
def test_siblings_by_definition(seed: int) -> None:
    """Random forests, with equals: what each place leaves to its children in turn, and those that are first when all are put in order."""
    rng, rows = random.Random(seed), 1 + seed % 3
    draft, survival = tree.empty(rows), list[float]()
    for n in range(rng.randint(1, 20)):
        place = rng.choice([*tree.roots(rows), *range(n)])
        draft = tree.grow(draft, [place], [n], 1)
        survival.append(rng.choice([0.25, 0.5, 0.75, 1.0]) * (survival[place] if place >= 0 else 1.0))
    want = [0.0] * len(draft)
    for place in [*tree.roots(rows), *range(len(draft))]:
        children, left, above = [n for n, p in enumerate(draft.parent) if p == place], 1.0, want[place] if place >= 0 else 1.0
        for n in sorted(children, key=lambda n: -survival[n]):
            chance = survival[n] / (survival[place] if place >= 0 else 1.0)
            want[n] = min(chance, max(left, 0.0)) * above
            left -= chance
    chances = siblings.apart(draft, survival)
    assert chances == want
    lines = siblings.in_lines(draft, chances)
    for most in range(len(draft) + 1):
        first = [sorted([n for n in range(len(draft)) if draft.row[n] == row], key=lambda n: -chances[n])[:most] for row in range(rows)]
        kept = siblings.surest(draft, chances, lines, most)
        assert kept == sorted(itertools.chain(*first))
        assert all(draft.parent[n] < 0 or draft.parent[n] in kept for n in kept)


def test_who_is_sure_takes_the_place_of_doubtful_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookup guesses nearly everywhere, and is right in two of three; a cheap model that shows itself right nearly always in a text goes on from there by itself, though
    beside what lookup has said it adds little at first."""
    priced = costs(linear(0.03), FREE | {"model": linear(0.15, 0.0)}) | {"catch_up": {"lookup": [1, 1e-4], "model": [1, 1e-4]}}
    says = {"lookup": lambda t, d: 0.65 if t > 4 else 0.0, "model": lambda t, d: 0.97}
    of = trace(3, priced, says, texts=4, length=200, score=lambda p: p)
    records = list(itertools.chain(*drive(of, adaptive(of))))
    late = records[len(records) // 2 :]
    assert mean(bool(r.levels.get("model")) for r in late) > 0.7
    monkeypatch.setattr(Starts, "_outdoes", lambda *asked: False)
    assert seconds(records) < 0.97 * seconds(list(itertools.chain(*drive(of, adaptive(of)))))


def test_who_reads_ahead_is_heard_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookup is right in six of seven, but for the first tokens, and a model nearly always: where five tokens take it a step it is asked though it seems worth less
    than what lookup says. Where each takes one, nothing is asked of it that was not before."""
    priced = costs(linear(0.03), FREE | {"model": linear(0.2, 0.0)}) | {"catch_up": {"lookup": [1, 1e-4], "model": [1, 1e-4]}}
    says = {"lookup": lambda t, d: 0.85 if t > 4 else 0.0, "model": lambda t, d: 0.97}
    some, took = [trace(seed, priced, says, texts=6, length=200) for seed in range(3, 9)], dict[tuple[int, float], float]()
    for every, beside in itertools.product((1, 5), (starts.BESIDE, 1 + starts.RISK)):
        monkeypatch.setattr(starts, "BESIDE", beside)
        for of in some:
            given = reading(of, every)
            took[every, beside] = took.get((every, beside), 0.0) + seconds(list(itertools.chain(*drive(given, adaptive(given)))))
    at_once, ahead = list(took.values())[:2], list(took.values())[2:]
    assert len(set(at_once)) == 1
    assert ahead[0] < 0.95 * ahead[1]


def test_who_does_not_read_ahead_in_a_text_is_not_heard_as_if_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts in which five tokens take it a step, and then some in which each takes one: in these nearly nothing is asked of it that would not be asked of one
    that never reads ahead."""
    priced = costs(linear(0.03), FREE | {"model": linear(0.2, 0.0)}) | {"catch_up": {"lookup": [1, 1e-4], "model": [1, 1e-4]}}
    of = trace(3, priced, {"lookup": lambda t, d: 0.85 if t > 4 else 0.0, "model": lambda t, d: 0.97}, texts=14, length=200)
    of = replace(of, texts=[*reading(of, 5).texts[:2], *reading(of, 1).texts[2:]])
    asked = []
    for share in (starts.BESIDE, 1 + starts.RISK):
        monkeypatch.setattr(starts, "BESIDE", share)
        asked.append(sum(bool(r.levels.get("model")) for records in drive(of, adaptive(of))[2:] for r in records))
    assert asked[0] <= 1.4 * asked[1], asked


def beside(room: float, rows: int = 1) -> tuple[Starts, Step, Draft]:
    """A step in which lookup has said eight tokens to each row, and the model, which reads ahead and is sure, may be asked."""
    of = trace(1, costs(linear(0.1), FREE | {"model": linear(0.2, 0.0)}), {"lookup": lambda t, d: 0.5, "model": lambda t, d: 0.5}, length=20)
    tables = adaptive(of).tables
    of_text = [Row(sure={"model": 0.98}, steps={"model": 0.2}) for _ in range(rows)]
    step = Step(tables, tables.page(next(iter(tables.costs.verify))), of_text, 1, room, 1.0)
    draft = tree.empty(rows)
    for row in range(rows):
        draft = tree.run(draft, ~row, [1, 2, 3, 4, 5, 6, 7, 8], tables.bits["lookup"], [0.9] * 8)
    return Starts(tables, Ledger(), False), step, draft


def test_nobody_is_asked_for_whom_what_is_there_would_be_left() -> None:
    for room, asked in ((99.0, True), (1.3, False)):
        starts_, step, draft = beside(room)
        assert starts_._outdoes(step, "model", draft) == asked


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({}, True),
        ({"said": {"lookup": 0.99}}, False),  # it says more by itself
        ({"said": {}}, False),  # it was not looked at
        ({"sure": {}}, False),  # nothing was asked of the other in this text
        ({"sure": {"model": 0.2}}, False),  # who is worth little here
        ({"steps": {"model": 1.0}}, False),  # who does not read ahead
        ({"names": ["lookup"]}, False),  # who may not be asked
        ({"number": starts.SAMPLE}, False),  # now and then both are heard
        ({"rows": 2}, False),
    ],
)
def test_a_step_is_left_to_who_reads_ahead_and_is_worth_more(changes: dict[str, Any], left: bool) -> None:
    starts_, step, _ = beside(99.0, rows=changes.get("rows", 1))
    row = step.rows[0]
    row.said = {"lookup": 0.5}
    for name in ("said", "sure", "steps"):
        setattr(row, name, changes.get(name, getattr(row, name)))
    step.names, step.number = changes.get("names", ["lookup", "model"]), changes.get("number", 1)
    asked = tree.empty(len(step.rows))
    seqs = [SimpleNamespace(tokens=[1, 2], request=SimpleNamespace(id=str(r))) for r in range(len(step.rows))]
    assert starts_._left(step, "lookup") == left
    assert starts_.may(step, seqs, "lookup", asked, cheap=True) == (not left)


def test_where_a_model_reads_what_lookup_would_say_lookup_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It saves drafting, and columns of what the model would not say; where nobody reads ahead it is asked as ever."""
    priced = costs(linear(0.15), FREE | {"lookup": linear(0.06, 0.0), "model": linear(0.2, 0.0)}) | {
        "catch_up": {"lookup": [1, 1e-4], "model": [1, 1e-4]}
    }
    of = trace(3, priced, {"lookup": lambda t, d: 0.75 if t > 4 else 0.0, "model": lambda t, d: 0.97}, texts=6, length=200)
    took = {}
    for every, heard in itertools.product((1, 5), (SAMPLE, 1)):
        monkeypatch.setattr(starts, "SAMPLE", heard)
        given = reading(of, every)
        records = list(itertools.chain(*drive(given, adaptive(given))))
        took[every, heard] = seconds(records), sum(bool(r.levels.get("lookup")) for r in records) / len(records)
    assert took[1, SAMPLE] == took[1, 1]
    assert took[5, SAMPLE][0] < 0.97 * took[5, 1][0] and took[5, SAMPLE][1] < 0.5 * took[5, 1][1]


def test_in_a_batch_a_level_is_a_step() -> None:
    """Of a draft of eight nodes in each of two rows, which took eight levels."""
    starts_, step, draft = beside(99.0, rows=2)
    mine = replace(draft, source=[step.tables.bits["model"]] * len(draft))
    for row in step.rows:
        row.steps["model"] = 1.0
    starts_.used(step, [], SimpleNamespace(levels={"model": 8}, draft=mine))
    assert [row.steps["model"] for row in step.rows] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("kept", "sources", "spent", "told"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], "bbbbbbbb", 0.4, -0.4),  # it said what lookup had said
        ([0, 1, 2, 3, 4, 5, 6, 7], "bbmmmmmm", 0.4, 6 / 2 - 0.4),  # lookup was wrong at the third
        ([], "mmmmllll", 0.4, 0.0 - 0.4),  # nobody was right
        ([0, 1], "llm", 0.4, -0.4),  # lookup was right as far as it was heard
        ([0, 1, 2, 3], "bbbb", 0.4, -0.4),  # and was heard no further
        ([0, 1, 2], "llmm", 0.4, 1 / 2 + 0.4 - 0.4),  # lookup was wrong at the third: eight of its guesses would have been verified, and not four
        ([0, 1], "lll", 0.4, 0.5 - 0.4),  # the same, and the model had nothing better
    ],
)
def test_what_was_asked_beside_others_has_brought(kept: list[int], sources: str, spent: float, told: float) -> None:
    """Its own tokens at a pace of two in a plain step, and what is spared of verifying wrong guesses (a tenth of a plain step each), less what asking took."""
    _, step, _ = beside(99.0)
    bits = step.tables.bits
    marks = {"l": bits["lookup"], "m": bits["model"], "b": bits["lookup"] | bits["model"]}
    draft = SimpleNamespace(source=[marks[s] for s in sources])
    step.spent = 0.1 + spent
    record = SimpleNamespace(kept=kept, accepted=(len(kept),), draft=draft, nodes=lambda: len(sources))
    assert step.brought("model", 8, 0.1, 2.0, record) == pytest.approx(told)


@pytest.mark.parametrize(("lookup", "brings"), [(0.97, False), (0.8, True)])
def test_who_brings_little_beside_others_is_asked_more_rarely(lookup: float, brings: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that reads five tokens a step and is right nearly always, beside a lookup that is so too: what it says is there already. Beside one that often is
    wrong it is asked as ever. (Lookup is never left out for it here.)"""
    monkeypatch.setattr(starts, "SAMPLE", 1)
    priced = costs(linear(0.15), FREE | {"model": linear(0.2, 0.0)}) | {"catch_up": {"lookup": [1, 1e-4], "model": [1, 1e-4]}}
    says = {"lookup": lambda t, d: lookup if t > 4 else 0.0, "model": lambda t, d: 0.98}
    some, found = [reading(trace(seed, priced, says, texts=8, length=200), 5) for seed in range(3, 11)], []
    for apart, seldom in ((starts.APART, starts.SELDOM), (1, 1)):
        monkeypatch.setattr(starts, "APART", apart)
        monkeypatch.setattr(starts, "SELDOM", seldom)
        records = [r for of in some for r in itertools.chain(*drive(of, adaptive(of)))]
        found.append((seconds(records), sum({"lookup", "model"} <= r.levels.keys() for r in records)))
    (took, asked), (always, often) = found
    if brings:
        assert asked > 0.97 * often and took < 1.02 * always
    else:
        assert asked < 0.7 * often and took < 0.99 * always


def test_one_loss_beside_others_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of who lost a little again and again, the mean turns at last: it is asked so more and more rarely, up to a bound, and as ever once it has brought much."""
    starts_, step, draft = beside(99.0)
    record, row, waits, step.beside = SimpleNamespace(levels={"model": 1}, draft=draft), step.rows[0], [], ("model", 8, 0.0, 2.0)
    for brought in [*[-0.2] * 24, 3.0]:
        monkeypatch.setattr(Step, "brought", lambda *asked, brought=brought: brought)
        starts_.used(step, [], record)
        waits.append(max(row.beside["model"][1] - step.number, 0))
    assert waits[:6] == [0] * 6 and waits[-1] == 0
    assert [w for w in waits if w] == [starts.APART, 2 * starts.APART, 4 * starts.APART, *[starts.SELDOM] * (len([w for w in waits if w]) - 3)]
    assert row.beside["model"][2] == starts.APART, "and would wait no longer than at first"
