"""The table of a step: what each column sees, by brute force, and where the places of a forward come back."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import zoo
from contracts import opened, random_draft, recompute, request, sequence

from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.sampling import Settings, decided
from outrider.core.types import MAX_NODES, Draft, Outcome, Sequence
from outrider.drafters.model import ModelDrafter
from outrider.models.kv import Rows
from outrider.models.step import Step


def seen_by(table: np.ndarray, read: int, windows: tuple[int | None, ...]) -> list[list[list[set[int]]]]:
    """Slots that each column of each row sees, by kind of window, as the step's masks say."""
    step = SimpleNamespace(windows={f"kind {i}": w for i, w in enumerate(windows)}, module=SimpleNamespace(dtype=torch.float32))
    masks = Step._masks(step, torch.from_numpy(table), torch.arange(read), True)
    each = list(masks.values()) if isinstance(masks, dict) else [masks]
    return [[[set((column == 0).nonzero()[:, 0].tolist()) for column in row[0]] for row in mask] for mask in each]


class NoStore:
    """A store that moves nothing, because nothing is there."""

    def copy(self, *_: int) -> None: ...
    def move(self, *_: object) -> None: ...
    def swap(self, *_: int) -> None: ...
    def broken(self, row: int) -> bool:
        return False


@pytest.mark.parametrize("seed", range(12))
def test_a_column_sees_its_text_and_its_ancestors_within_the_window(seed):
    """Random trees in one or two calls, as drafters score them; windows below and above the depth of the tree."""
    rng = np.random.default_rng(seed)
    windows = (None, 1 + seed % 8)
    rows = Rows("m", 3, 60, NoStore(), windows)
    tail = int(rng.integers(1, 4))
    seqs = opened(rows, [int(rng.integers(tail + 1, 40)) for _ in range(2)], tail)
    draft = random_draft(rng, 2, 9, int(rng.integers(1, 24)))
    nodes = list(range(len(draft)))
    cut = int(rng.integers(0, len(nodes) + 1))
    where: dict[tuple[int, int], int] = {(r, p): p for r, seq in enumerate(seqs) for p in range(len(seq.tokens))}  # slot -> position
    slot_of: dict[int, int] = {}
    for places in ([*tree.roots(2), *nodes[:cut]], nodes[cut:]):
        if not places:
            continue
        layout = rows.layout(seqs, draft, places)
        sights = [seen_by(block.table, block.read, windows) for block in layout.blocks]
        columns = [(block.first + r, block.table[r, c], [kind[r][c] for kind in sight])
                   for block, sight in zip(layout.blocks, sights, strict=True) for r in range(block.table.shape[0]) for c in range(block.table.shape[1])]  # fmt: skip
        asked = [columns[i] for i in (layout.at if layout.at is not None else range(len(columns)))]
        for place, (row, (token, position, slot, *_), sight) in zip(places, asked, strict=True):
            seq, path = seqs[row], tree.ancestors(draft, place)
            assert rows.of(seq).index == row == (~place if place < 0 else draft.row[place])
            assert token == ([*seq.tokens, *draft.text(path)])[-1] and position == len(seq.tokens) - 1 + len(path)
            if place >= 0:
                slot_of[place], where[row, int(slot)] = int(slot), int(position)
                assert slot == rows.of(seq).base + list(rows.of(seq).scratch).index(place)
            past = set(range(len(seq.tokens))) | {slot_of[n] for n in path}
            for window, found in zip(windows, sight, strict=True):
                assert found == {s for s in past if window is None or where[row, s] > position - window}, f"place {place}, window {window}"


@pytest.mark.parametrize("window", [None, *range(1, 9), 63, 64, 65])
def test_all_64_nodes_of_a_step_have_a_bit(window):
    """The last one is the sign. A chain and a bush, each as large as a step may be."""
    for parents in (range(-1, MAX_NODES - 1), [-1] * (MAX_NODES - 1) + [MAX_NODES - 2]):
        rows = Rows("m", 1, 20, NoStore(), (window,))
        seqs, draft = opened(rows, [7]), Draft(rows=1)
        for parent in parents:
            draft = tree.grow(draft, [parent], [len(draft)], 1)
        block = rows.layout(seqs, draft, tree.all_places(draft)).blocks[0]
        assert block.table.shape[1] == 1 + MAX_NODES
        (sight,) = seen_by(block.table, block.read, (window,))
        for node, found in enumerate(sight[0][1:]):
            path = tree.ancestors(draft, node)
            chain = [*range(7), *(7 + n for n in path)]  # in the order of positions
            assert found == set(chain if window is None else chain[-window:])


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("tail", [1, 3])
@pytest.mark.parametrize("count", [1, 4, 5, 39])
@pytest.mark.parametrize("bushy", [False, True])
def test_a_tree_is_laid_out_at_once_as_it_is_place_by_place(window, tail, count, bushy, monkeypatch):
    """Columns, what is remembered as scratch, and where the places are, also where a window ends or the row is full."""
    found = []
    for short in (True, False):
        if not short:
            monkeypatch.setattr(tree, "ascending", lambda places: False)
        rows = Rows("m", 1, 20, NoStore(), (None, window))
        seqs = opened(rows, [18], tail)
        draft = tree.run(Draft(rows=1), -1, [t % 5 for t in range(MAX_NODES)], 1, [0.5] * MAX_NODES)
        draft = replace(draft, parent=[max(n // 2 - 1, -1) for n in range(MAX_NODES)]) if bushy else draft
        layout = rows.layout(seqs, draft, [-1, *range(count)])
        found.append((layout.blocks[0].table.tolist(), layout.blocks[0].read, layout.at, rows.of(seqs[0]).scratch, rows.of(seqs[0]).base))
    assert found[0] == found[1]


def test_a_chain_too_long_for_its_row_is_refused_with_its_size():
    rows = Rows("m", 1, 20, NoStore(), (None,))
    seqs, draft = opened(rows, [21]), tree.run(Draft(rows=1), -1, [1] * MAX_NODES, 1, [0.5] * MAX_NODES)
    with pytest.raises(OutriderError, match="85 slots a row and needs 86"):
        rows.layout(seqs, draft, tree.all_places(draft))


def test_without_nodes_nobody_sees_scratch():
    """A prefill chunk leaves the bits out; with them in, the answer is the same."""
    step = SimpleNamespace(windows={"a": None, "b": 3}, module=SimpleNamespace(dtype=torch.float32))
    rows = Rows("m", 1, 60, NoStore(), (None, 3))
    seq = opened(rows, [9], tail=1)[0]
    block = rows.append(seq, [4, 4, 4, 4])
    masks = [Step._masks(step, torch.from_numpy(block.table), torch.arange(block.read), nodes) for nodes in (False, True)]
    assert all(torch.equal(masks[0][kind], masks[1][kind]) for kind in ("a", "b"))
    assert [int((row == 0).sum()) for row in masks[0]["a"][0, 0]] == [9, 10, 11, 12]


def test_rows_that_are_no_neighbours_come_back_in_the_order_asked():
    """Rows 0 and 2 of three, last first: two forwards, each place its own logits and its own best token."""
    model = zoo.model("llama", rows=4)
    seqs = [sequence(text, f"n{i}") for i, text in enumerate(([3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]))]
    for seq in seqs:
        model.open(seq)
    model.prefill(seqs)
    asked = [seqs[2], seqs[0]]
    draft = tree.grow(Draft(rows=2), [~1, ~0, ~1], [11, 12, 13], 1)
    draft = tree.grow(draft, [2, 1], [14, 15], 1)
    places = [~1, ~0, 2, 1, 0, 4, 3]
    before = model.forwards
    scores = model.score(asked, draft, places)
    assert model.forwards - before == 2
    tokens, logp = decided(scores)
    for i, place in enumerate(places):
        row = ~place if place < 0 else draft.row[place]
        want = recompute(model)([*asked[row].tokens, *draft.text(tree.ancestors(draft, place))])
        torch.testing.assert_close(scores.logits[i], want, atol=1e-3, rtol=1e-3)
        assert tokens[i] == int(scores.logits[i].argmax())
        assert logp[i] == pytest.approx(float(scores.logits[i].log_softmax(-1).max()), abs=1e-4)
    model.commit(asked, draft, Outcome([[1], [0]], [1, 1], [0, 0]))
    assert model.rows.of(seqs[1]).base == -1 and model.rows.of(seqs[2]).text == [*seqs[2].tokens, 12]


@pytest.mark.parametrize(
    ("found", "names"),
    [
        ([7, 3, 4], {2: 0, 3: 2, 4: 3}),  # the first was guessed by others
        ([3, 4, 7], {}),
        ([7, 9, 3, 4], {2: 0, 3: 2, 4: ~4, 5: ~5}),  # the end token is the second: it was computed, and so was what came after it
        ([3, 9, 4], {4: ~4}),
        ([7, 8, 9], {2: 0, 3: 1, 4: 2}),
    ],
)
def test_what_a_chain_computed_goes_by_the_names_of_its_nodes(found, names):
    """Beside two guesses of others, 7 and 8, where 9 ends a text."""
    told = []
    model = SimpleNamespace(
        chain=lambda *_: (found, [0.5] * len(found), len(found)), rename=lambda seq, names: told.append(names), spec=SimpleNamespace(device="cpu")
    )
    seq = Sequence(replace(request([3, 1, 4]), ends=frozenset({9})), [3, 1, 4])
    draft = tree.run(tree.empty(1), -1, [7, 8], 1, [0.5, 0.5])
    target = SimpleNamespace(queued=object(), rename=lambda seq, names: told.append(names))  # it scores them, too
    made = ModelDrafter._chain(SimpleNamespace(model=model, foresees=False), [seq], draft, -1, 4, 2, Settings.of([seq]), None, None, target, 4)
    assert told == [names, names][: 2 * bool(names)]
    assert made.text(tree.below(made, -1, found)) == found[: found.index(9) + 1 if 9 in found else None]
