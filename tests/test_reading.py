"""What drafters take to read a prompt: asked of the guard, and paid by credit of its own."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from contracts import sequence
from test_promise import beyond
from written import Weather, adaptive, costs, drive, linear, trace

from outrider.control.guard import GRANT, READING, Ledger
from outrider.control.rows import Row, remember
from outrider.control.starts import Starts
from outrider.control.step import Step
from outrider.core import tree


@pytest.mark.parametrize("level", [0.1, 0.4])
def test_catching_up_is_asked_of_the_guard(level: float) -> None:
    """A drafter that would read for 12 plain steps before it begins, though what it says is nearly always right. (Longer texts it may begin at their end.)"""
    of = trace(5, costs(linear(0.05), {"model": linear(level, 0.0)}, catch_up=0.05), {"model": lambda t, d: 0.98})
    (records,) = drive(replace(of, texts=[replace(of.texts[0], length=250)]), adaptive(of))
    assert max(r.reading.seconds for r in records) < GRANT + 2


@pytest.mark.parametrize(("seed", "each"), [(3, 0.065), (7, 0.065), (6, 0.07), (8, 0.07)])
def test_reading_that_takes_longer_than_expected_finds_its_credit(seed: int, each: float) -> None:
    """What it takes to read a prompt is known least: it starts where the guard has more credit than that, or not at all."""
    priced = costs(linear(0.05), {"lookup": linear(0.0, 0.01), "model": linear(0.3, 0.0)}) | {"catch_up": {"lookup": [1, 1e-4], "model": [1, each]}}
    of = trace(seed, priced, {"lookup": lambda t, d: 0.95 if (t + d) % 4 < 2 else 0.0, "model": lambda t, d: 0.97}, length=300)
    controller, begun = adaptive(of := replace(of, texts=[replace(of.texts[0], length=100)])), list[int]()

    def slow(n: int, name: str) -> float:
        begun.extend([n] if name == "model" else [])
        return 1.8 if begun == [n] else 1.0

    drive(of, controller, Weather(of, slow))
    assert controller.ledger.stalls == 0 and len(begun) > 100


def test_reading_a_prompt_has_seconds_of_its_own() -> None:
    """A share of what the target took to read it, once, whoever reads; nothing before it is known, and for nothing else."""
    ledger, seqs = Ledger(), [SimpleNamespace(request=SimpleNamespace(id=name), read=0.0) for name in "ab"]
    assert ledger.reading(seqs) == 0.0 and ledger.forgive(seqs, 1.0) == 0.0
    ledger.end("a")
    ledger.end("b")
    for seq, took in zip(seqs, (4.0, 6.0), strict=True):
        seq.read = took
    assert ledger.reading(seqs) == 4 * READING and ledger.reading(seqs[1:]) == 6 * READING
    assert ledger.forgive(seqs, -1.0) == 0.0 and ledger.forgive(seqs, 0.5) == 0.5
    assert ledger.forgive(seqs, 9.0) == 4 * READING - 0.5 and ledger.reading(seqs) == 0.0
    assert ledger.forgive(seqs[1:], 9.0) == pytest.approx(2 * READING)
    ledger.end("a")
    assert ledger.reading(seqs[:1]) == 4 * READING, "the next request of that name begins anew"


@pytest.mark.parametrize("prefill", [0.0, 40.0])
def test_a_drafter_that_must_read_begins_where_the_target_read_for_long(prefill: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten plain steps of reading are more than the grant: the guard has them at once, in the step in which the target has read, only if that took 40 for the same
    prompt: many texts are over two steps later. What is beside them is within the promise."""
    monkeypatch.setattr("outrider.control.starts.AHEAD", 400)  # it is the guard alone that is in the way
    priced = costs(linear(0.05), {"model": linear(0.2, 0.0)}) | {"catch_up": {"model": [1, 0.1]}}
    of = trace(3, priced, {"model": lambda t, d: 0.9}, length=400)
    of = replace(of, texts=[replace(of.texts[0], length=100, prefill=prefill)])
    (records,) = drive(of, adaptive(of))
    began = next((n for n, r in enumerate(records) if r.levels), len(records))
    assert began == 0 if prefill else began > 2
    assert beyond(records, read=began) <= READING * prefill


@pytest.mark.parametrize(("seen", "chance", "waits"), [(1000, 0.1, True), (1000, 0.97, False), (1, 0.1, False)])
def test_a_try_that_the_guard_refuses_can_wait(seen: int, chance: float, waits: bool) -> None:
    """Of a drafter that is known and does not pay: at every look it would be weighed again for nothing. Who pays, or is new, may be there with the next credit."""
    of = trace(1, costs(linear(0.1), {"model": linear(0.5, 0.0)}), {"model": lambda t, d: 0.1}, length=20)
    tables = adaptive(of).tables
    tables.next.cells["model ?"] = [seen, chance]
    row = Row(sure={"model": chance}, steps={"model": 1.0})
    step = Step(tables, tables.page(next(iter(tables.costs.verify))), [row], 100, 1.0, 1.0)
    starts = Starts(tables, Ledger(), False)
    starts.due["model"] = 50
    assert not starts.may(step, [sequence([0] * 10, "a")], "model", tree.empty(1), False) and step.refused
    assert (starts.due["model"] > 100) == waits


@pytest.mark.parametrize(("right", "unread"), [(0, 12), (2, 10)])
def test_what_others_have_found_is_unread(right: int, unread: int) -> None:
    """Of eleven tokens that came true and one more, a drafter has read those that it had guessed as well."""
    row = Row()
    asked = SimpleNamespace(kept=(), reason="depth:all", drafted=(11,), accepted=(11,), levels={"model": 2}, context=(40,), right=lambda name: right)
    remember([row], asked, {"model": 0.1}, {})
    assert 52 - row.read["model"] == unread
