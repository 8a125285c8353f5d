"""Drafters that begin with a text's end: what their caches hold then, when the scheduler lets them, what it learns of that, and that no text hangs on it."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zoo
from contracts import always, plain, random_draft, random_outcome, recompute, request, run, sequence
from test_controller import seconds
from written import adaptive, costs, drive, linear, trace

from outrider.bench import oracle
from outrider.control.controller import Adaptive
from outrider.control.guard import Ledger
from outrider.control.rows import Row
from outrider.control.starts import LONG, SAMPLE, TAIL, Starts
from outrider.control.step import Step
from outrider.control.tables import Tables
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.noise import RowNoise
from outrider.core.sampling import Settings
from outrider.core.types import Draft, Sequence
from outrider.drafters.model import ModelDrafter
from outrider.measure.cost import Costs
from outrider.models.kv import SPARES
from outrider.models.toy import ToyModel
from outrider.runtime.engine import Engine

VOCAB = 40

# --- the cache


@pytest.mark.parametrize(("name", "seed"), always(4, [(name, seed) for seed in range(3) for name in zoo.CLASSES]))
def test_a_text_that_begins_later_is_one_of_its_own(name: str, seed: int) -> None:
    """Ragged rows begin anew somewhere now and then, and take random steps in between: every score equals that of what is left of the text, from its first token on."""
    model, rng = zoo.model(name, rows=2, chunk=8), np.random.default_rng(seed)
    whole, seqs = recompute(model), [sequence(rng.integers(0, VOCAB, n).tolist(), f"r{n}") for n in (30, 41)]
    for seq in seqs:
        model.open(seq)
    begun = [0, 0]
    for _ in range(10):
        for r, seq in enumerate(seqs):
            tail = int(rng.choice([0, 3, 9, 25, 200]))
            if rng.random() < 0.5:
                unread = model.rows.behind(seq)
                model.begin_at(seq, tail)
                begun[r] = 0 if tail == 0 else len(seq.tokens) - tail if SPARES * tail < unread else begun[r]
        asked = [r for r in range(2) if rng.random() < 0.7]  # who is left out has more to read later
        draft = random_draft(rng, 2, VOCAB, int(rng.integers(0, 7)))
        places = [p for p in tree.all_places(draft) if tree.row_at(draft, p) in asked]
        logits = model.score(seqs, draft, places).logits if places else []
        for place, got in zip(places, logits, strict=True):
            row = tree.row_at(draft, place)
            want = whole(seqs[row].tokens[begun[row] :] + draft.text(tree.ancestors(draft, place) if place >= 0 else []))
            assert float((got - want).abs().max()) < 2e-3 * float(want.std())
        for r in asked:
            model.begin_at(seqs[r], 1)  # in the midst of a step nothing begins anew
        outcome = random_outcome(rng, draft, VOCAB)
        for seq, path, bonus in zip(seqs, outcome.paths, outcome.bonus, strict=True):
            seq.tokens += [*draft.text(path), bonus]
        model.commit(seqs, draft, outcome)
        for r in asked:
            row = model.rows.of(seqs[r])
            assert row.skipped == begun[r] and row.text == seqs[r].tokens[begun[r] : begun[r] + row.cached]


def test_what_was_read_of_an_end_is_no_beginning_of_another_text() -> None:
    """Neither while its row is in use nor after; and what was read whole still is."""
    model = ToyModel(VOCAB, 3)
    end, other = list(range(1, 10)), [7] * 30 + list(range(1, 10))
    first = sequence(other, "a")
    model.open(first)
    model.begin_at(first, 9)
    model.prefill([first])
    assert model.rows.of(first).text == end[:-1] and model.rows.of(first).skipped == 30
    for name in ("b", "c"):
        later = sequence([*end, 5], name)
        model.open(later)
        assert model.rows.of(later).text == [] and model.rows.reused == 0
        model.close(later)
        if name == "b":
            model.close(first)
            assert all(row.skipped == 0 for row in model.rows.all)
    model.open(read := sequence([*end, 5], "d"))
    model.prefill([read])
    model.close(read)
    model.open(sequence([*end, 5, 6], "e"))
    assert model.rows.reused == 9


def test_what_is_cached_of_a_long_text_is_not_given_up_for_little() -> None:
    """Of a conversation that goes on, a row still holds all but the last words."""
    model = ToyModel(VOCAB, 3)
    model.open(seq := sequence(list(range(20)), "a"))
    model.prefill([seq])
    seq.tokens += [1] * 11  # with the last one of before: 12 that are not cached
    model.begin_at(seq, 3)
    assert model.rows.of(seq).skipped == 0 and model.rows.behind(seq) == 12
    seq.tokens += [1]
    model.begin_at(seq, 3)
    assert model.rows.of(seq).skipped == 29 and model.rows.behind(seq) == 3


def test_less_than_nothing_is_no_end_of_a_text() -> None:
    model = ToyModel(VOCAB, 3)
    model.open(seq := sequence([1, 2, 3], "a"))
    with pytest.raises(OutriderError, match="toy cannot begin with -5 tokens"):
        model.begin_at(seq, -5)
    assert model.rows.behind(seq) == 3


def test_a_view_reads_what_its_owner_has_read() -> None:
    model = zoo.model("llama")
    model.open(seq := sequence(list(range(20))))
    model.view((0,)).begin_at(seq, 3)
    assert model.rows.of(seq).skipped == 0
    model.begin_at(seq, 3)
    assert model.rows.of(seq).skipped == 17


# --- texts


class Anywhere(Adaptive):
    """Lets drafters begin anywhere, at any time."""

    chance = random.Random(0)

    def tail(self, name: str) -> int | None:
        return self.chance.choice([None, None, 0, 2, 5, 30])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("seed", always(3, range(10)))
def test_no_text_hangs_on_where_a_drafter_begins(seed: int, temperature: float) -> None:
    asked = [request([seed, n, 3] * 9, f"r{n}", max_tokens=40, temperature=temperature, seed=n) for n in range(3)]
    want = plain(ToyModel(VOCAB, 3, order=2), asked)
    drafter = ModelDrafter(ToyModel(VOCAB, 3, order=2, name="small", blend=(4, 0.3)), "model", VOCAB)
    controller = Anywhere(Tables({"model": 1}, Costs({"model": 0.1})), lambda: "", slowdown=10.0)
    Anywhere.chance.seed(seed)
    engine = Engine(ToyModel(VOCAB, 3, order=2), {"model": drafter}, controller, 1)
    seqs = [run(engine, [one])[0] for one in asked]
    assert [s.generated for s in seqs] == want
    assert any(r.accepted[0] for s in seqs for r in s.records), "it never guessed right"
    assert drafter.tail is None


# --- who begins where


def begun(
    length: int, *, each: float = 0.05, read: int = 0, number: int = 1, share: float | None = None, tails: bool = True
) -> tuple[Starts, Step, Sequence, bool]:
    """A step in which a draft model is asked whether it may start, in a text of so many tokens that takes it so many plain steps each to read."""
    of = trace(1, costs(linear(0.1), {"model": linear(0.1, 0.0)}) | {"catch_up": {"model": [1, each]}}, {"model": lambda t, d: 0.9}, length=20)
    tables = adaptive(of).tables
    if share is not None:
        tables.next.cells["model tail"] = [1000.0, share]
    row = Row(read={"model": read} if read else {})
    step = Step(tables, tables.page(next(iter(tables.costs.verify))), [row], number, 99.0, 1.0, names=["model"])
    starts, seq = Starts(tables, Ledger(), False, frozenset({"model"} if tails else ())), sequence([0] * length, "a")
    return starts, step, seq, starts.may(step, [seq], "model", tree.empty(1), cheap=True)


@pytest.mark.parametrize(
    ("told", "tail"),
    [
        ({"length": LONG + 1}, TAIL),
        ({"length": LONG}, None),
        ({"length": 4000}, TAIL),
        ({"length": 4000, "read": 3800}, None),
        ({"length": 4000, "read": 3000}, TAIL),  # it was long left out
        ({"length": 4000, "tails": False}, None),
        ({"length": LONG + 1, "each": 0.001}, 0),  # reading is as good as free
        ({"length": LONG + 1, "share": 0.2}, 0),  # it was seldom enough in texts before
        ({"length": LONG + 1, "share": 0.4}, TAIL),
        ({"length": 4000, "share": 0.1}, TAIL),  # the longer the text, the less it costs to try
        ({"length": LONG + 1, "share": 0.2, "number": SAMPLE}, TAIL),  # now and then it is tried
    ],
)
def test_who_begins_with_the_end(told: dict[str, Any], tail: int | None) -> None:
    _, step, seq, _ = begun(**told)
    assert step.tails == ({} if tail is None else {"model": tail})
    unread = len(seq.tokens) - told.get("read", 0)
    assert step.unread(step.rows[0], "model", len(seq.tokens)) == (tail or unread), "what it has to read is what it is charged for"


@pytest.mark.parametrize(
    ("sure", "length", "rate", "again"),
    [
        (0.2, 400, 1.0, True),
        (0.99, 400, 1.0, False),  # it could hardly be surer
        (0.2, 4000, 1.0, False),  # to read all would take longer than it could save
        (0.2, 400, 9.0, False),  # others write so many tokens for the time of a plain step without it
    ],
)
def test_who_is_not_sure_enough_at_the_end_reads_all(sure: float, length: int, rate: float, again: bool) -> None:
    starts, step, seq, _ = begun(length, each=0.02)
    starts.rates["model"] = ("a", 1, 0), rate
    for i in range(8):
        starts.tables.next.cells[f"model t{i}"] = [1000.0, float(i == 6)]  # in texts before it was nearly always right
    row = step.rows[0]
    row.read["model"], row.sure["model"], row.steps["model"] = length, sure, 1.0
    seq.tokens += [0, 0]
    step.tails = {}
    asked = starts.may(step, [seq], "model", tree.empty(1), cheap=True)
    assert asked
    assert step.tails == ({"model": 0} if again else {}) and step.unread(row, "model", len(seq.tokens)) == (length + 2 if again else 2)
    assert ("model" in row.sure) != again, "what it was sure of was of another text, so to speak"
    assert (starts.tables.next.cells.get("model tail", [0, 1.0])[1] < 0.5) == again
    step.tails = {}
    row.sure["model"], row.steps["model"] = sure, 1.0
    assert starts.may(step, [seq], "model", tree.empty(1), cheap=True) or not again
    assert step.tails == {}, "once"


def test_that_the_end_was_enough_is_remembered() -> None:
    """Of texts in which it guessed, and had not to read all after all."""
    starts, step, _, _ = begun(400)
    row = step.rows[0]
    starts.ended(row)
    assert "model tail" not in starts.tables.next.cells, "it said nothing there"
    row.sure["model"], row.steps["model"] = 0.9, 1.0
    starts.ended(row)
    assert starts.tables.next.cells["model tail"] == [1.0, 1.0]
    row.tail["model"] = 0
    starts.ended(row)
    assert starts.tables.next.cells["model tail"] == [1.0, 1.0]


def long_texts(length: int) -> Any:
    """Four texts of 30 tokens behind prompts of so many, and a draft model that takes a twentieth of a plain step to read each of their tokens."""
    priced = costs(linear(0.05), {"model": linear(0.15, 0.0)}) | {"catch_up": {"model": [1, 0.05]}}
    of = trace(5, priced, {"model": lambda t, d: 0.95}, texts=4, length=30)
    return replace(of, texts=[replace(one, length=length, prefill=100.0) for one in of.texts])


def test_what_it_reads_is_what_is_charged_and_learned() -> None:
    """A replay charges the end alone, and what reading a token takes is what it was, though the text is six times as long."""
    took = {}
    for tails in (True, False):
        of = long_texts(400)
        controller = adaptive(of)
        if not tails:
            controller.starts.tails = frozenset()
        took[tails] = seconds(r for records in drive(of, controller) for r in records) - 4 * 100.0
        assert all(0.03 < each < 0.07 for each in controller.tables.costs.catch_up["model"].values())
    assert took[False] - took[True] > 0.5 * 4 * 0.05 * (400 - TAIL)


def test_oracles_begin_with_the_end_as_well() -> None:
    short, long = (long_texts(n) for n in (LONG, LONG + 200))
    assert oracle.prices(long, long.texts[0]).first["model"] == pytest.approx(0.05 * TAIL)
    assert oracle.prices(short, short.texts[0]).first["model"] == pytest.approx(0.05 * LONG)


def test_the_drafter_is_told() -> None:
    """A draft model whose scheduler lets it begin with the end computes that, and no more, and goes on from there."""
    model, target = (ToyModel(VOCAB, 3, order=2, name=name, context=1000) for name in ("small", "target"))
    drafter = ModelDrafter(model, "model", VOCAB)
    tables = Tables({"model": 1}, Costs({"model": 0.1}), state={"drafts": 1000})
    controller = Adaptive(tables, lambda: "", slowdown=10.0, tails=frozenset({"model"}))
    engine = Engine(target, {"model": drafter}, controller, 1)
    engine.now = iter(float(n) / 100 for n in range(10**9)).__next__
    tables.costs.catch_up["model"] = {9: 0.001}
    asked = request([n % 7 for n in range(500)], max_tokens=60)
    (seq,) = run(engine, [asked])
    assert seq.generated == plain(target, [asked])[0]
    assert any(r.accepted[0] for r in seq.records) and model.computed < 300, "it read all"


def test_what_a_drafter_is_told_holds_for_one_call() -> None:
    drafter = ModelDrafter(ToyModel(VOCAB, 3), "model", VOCAB)
    drafter.begin(seq := sequence([1, 2, 3] * 5))
    drafter.tail = 3
    made = drafter.extend([seq], Draft(1), [-1], 1, 1, Settings.of([seq]), RowNoise((0,), (0,), (0,)))
    assert len(made) == 1 and drafter.model.rows.of(seq).skipped == 12 and drafter.tail is None
