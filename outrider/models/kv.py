"""Slots: who holds which row of a KV cache, where each token's keys lie, and what may look at what.

A cache is a block of `rows` x `capacity` slots per layer. A row's committed tokens lie at slot == position; a step's
draft nodes lie behind them as scratch, in the order they were scored. Commit moves the accepted ones to their
positions (a chain is already there) and forgets the rest by lowering the length. Rows in use are rows 0..n-1, so a
step of the whole batch reads the cache without a gather; rows given back keep their text for reuse by later prompts.
Invariant after every commit: slots [0, cached) of a row hold exactly what recomputing its first `cached` tokens gives.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.types import MAX_NODES, Draft, Ints, Outcome, Sequence

BUCKET = 64  # slots read are rounded up to this, so that shapes recur


@dataclass(slots=True)
class Row:
    """One row. `text`: the tokens whose keys are in slots [0, cached); `base`: where scratch begins in this step, or
    -1 when the step has not touched the row; `scratch`: the nodes there, in order."""

    index: int
    text: list[int] = field(default_factory=list)
    owner: Sequence | None = None
    base: int = -1
    scratch: list[int] = field(default_factory=list)
    used: int = 0

    @property
    def cached(self) -> int:
        return len(self.text)


@dataclass(frozen=True, slots=True)
class Layout:
    """One forward: which rows, and per row and column the token, its position, its slot; what each may see.

    tokens, positions, slots [b, w]; slot_positions [b, c]; visible [b, w, c]; out_row, out_col: where the asked places
    are. Padding columns write to the last slot, which nothing reads.
    """

    rows: Ints
    tokens: Ints
    positions: Ints
    slots: Ints
    slot_positions: Ints
    visible: NDArray[np.bool_]
    out_row: Ints
    out_col: Ints

    def windowed(self, window: int) -> NDArray[np.bool_]:
        """`visible` for a layer that sees the last `window` positions, its own included."""
        return self.visible & (self.positions[:, :, None] - self.slot_positions[:, None, :] < window)


class Store(Protocol):
    """What Rows asks of the memory behind it."""

    def copy(self, source: int, goal: int, start: int, stop: int) -> None:
        """Copy slots [start, stop) of row `source` to the same slots of row `goal`."""

    def move(self, row: int, sources: Ints, start: int) -> None:
        """Move the slots `sources` of a row to start, start + 1, ... (gather first, then write)."""

    def swap(self, a: int, b: int, stop: int) -> None:
        """Exchange slots [0, stop) of two rows."""


class Rows:
    """The bookkeeping of one model's cache."""

    def __init__(self, name: str, count: int, context: int, store: Store) -> None:
        self.name, self.capacity, self.store = name, slots_for(context), store
        self.all = [Row(i) for i in range(count)]
        self.active, self.clock, self.reused = 0, 0, 0

    def of(self, seq: Sequence) -> Row:
        row: Row = seq.slots[self.name]
        return row

    def open(self, seq: Sequence) -> Row:
        """Give `seq` a row, with as much of its prompt already cached as any row holds."""
        if self.active == len(self.all):
            raise OutriderError(f"all {self.active} rows of {self.name} are taken", "", "fewer requests at a time, or load with more rows")
        prompt = seq.request.prompt
        shared = [min(_common(row.text, prompt), len(prompt) - 1) for row in self.all]
        best = int(np.argmax(shared))
        free = self.all[self.active :]
        own = best >= self.active and 2 * shared[best] >= self.all[best].cached
        row = self.all[best] if own else min(free, key=lambda r: (r.cached > 0, r.used))
        if not own and shared[best]:
            self.store.copy(best, row.index, 0, shared[best])
        row.text = list(prompt[: shared[best]])
        self.reused += shared[best]
        self._exchange(row, self.all[self.active])
        self.active += 1
        row.owner, row.base, row.scratch = seq, -1, []
        seq.slots[self.name] = row
        return row

    def close(self, seq: Sequence) -> None:
        """Free the row of `seq`; its text stays for reuse. The last row in use takes its index."""
        row: Row = seq.slots.pop(self.name)
        self.clock += 1
        row.owner, row.base, row.scratch, row.used = None, -1, [], self.clock
        self.active -= 1
        self._exchange(row, self.all[self.active])

    def _exchange(self, a: Row, b: Row) -> None:
        if a is not b:
            self.store.swap(a.index, b.index, max(a.cached, b.cached))
            self.all[a.index], self.all[b.index] = b, a
            a.index, b.index = b.index, a.index

    def tail(self, seq: Sequence) -> list[int]:
        """Tokens that are committed but not cached."""
        return seq.tokens[self.of(seq).cached :]

    def append(self, seq: Sequence, tokens: list[int]) -> tuple[Row, Layout]:
        """The layout of a prefill chunk. Its tokens count as cached when `appended` says that they were computed."""
        row = self.of(seq)
        start, width = row.cached, len(tokens)
        position = np.arange(start, start + width)[None]
        slots = np.arange(_bucket(start + width, self.capacity))[None]
        visible = slots[:, None, :] <= position[:, :, None]
        at = np.array([0]), np.array([width - 1])
        return row, Layout(np.array([row.index]), np.array([tokens]), position, position, slots, visible, *at)

    def appended(self, seq: Sequence, tokens: list[int]) -> None:
        """The chunk is in the cache now."""
        self.of(seq).text += tokens

    def layout(self, seqs: list[Sequence], draft: Draft, places: Ints) -> Layout:
        """Where everything goes in one forward over `places`; marks it as this step's scratch."""
        columns: dict[int, list[tuple[int, int, int, list[int]]]] = {}  # row -> (token, position, slot, scratch slots it sees)
        out_row, out_col = np.zeros((2, len(places)), np.int64)
        order = {r: i for i, r in enumerate(dict.fromkeys(tree.row_of(places, draft).tolist()))}
        for i, place in enumerate(places.tolist()):
            r = ~place if place < 0 else int(draft.row[place])
            line = columns.setdefault(r, [])
            if place < 0:
                line += self._tail_columns(seqs[r])
            else:
                line.append(self._node_column(self.of(seqs[r]), draft, place))
            out_row[i], out_col[i] = order[r], len(line) - 1
        held = [self.of(seqs[r]) for r in order]
        return self._arrays(held, [columns[r] for r in order], draft, out_row, out_col)

    def _tail_columns(self, seq: Sequence) -> list[tuple[int, int, int, list[int]]]:
        row, tail = self.of(seq), self.tail(seq)
        row.base, row.scratch = row.cached + len(tail), []
        return [(t, p, p, []) for p, t in enumerate(tail, row.cached)]

    def _node_column(self, row: Row, draft: Draft, node: int) -> tuple[int, int, int, list[int]]:
        assert row.base >= 0, "a node is scored before its root"
        row.scratch.append(node)
        path = tree.ancestors(draft, node)
        sees = [row.base + row.scratch.index(n) for n in path]
        return int(draft.token[node]), row.base + len(path) - 1, sees[-1], sees

    def _arrays(self, held: list[Row], lines: list[list[tuple[int, int, int, list[int]]]], draft: Draft, out_row: Ints, out_col: Ints) -> Layout:
        width = max(map(len, lines))
        top = max(row.base + len(row.scratch) for row in held)
        if top >= self.capacity:
            raise OutriderError(f"{self.name} has {self.capacity} slots a row and needs {top + 1}", "", "a larger context or a smaller draft")
        slot = np.arange(_bucket(top, self.capacity))
        tokens, positions = np.zeros((2, len(held), width), np.int64)
        slots = np.full((len(held), width), self.capacity - 1)
        visible = np.zeros((len(held), width, len(slot)), bool)
        visible[:, :, 0] = True  # padding must see something
        slot_positions = np.tile(slot, (len(held), 1))
        for i, (row, line) in enumerate(zip(held, lines, strict=True)):
            tokens[i, : len(line)], positions[i, : len(line)], slots[i, : len(line)] = zip(*[c[:3] for c in line], strict=True)
            visible[i, : len(line)] = slot <= np.minimum(positions[i, : len(line)], row.base - 1)[:, None]
            for j, column in enumerate(line):
                visible[i, j, column[3]] = True
            if row.scratch:
                slot_positions[i, row.base : row.base + len(row.scratch)] = row.base - 1 + draft.depth[row.scratch]
        index = np.array([row.index for row in held])
        return Layout(index, tokens, positions, slots, slot_positions, visible, out_row, out_col)

    def commit(self, seqs: list[Sequence], draft: Draft, outcome: Outcome) -> None:
        """Keep the longest scored prefix of each accepted path; a row this step did not touch keeps what it had.

        Call it before or after the tokens were added to the sequences: it goes by its own base.
        """
        for seq, path in zip(seqs, outcome.paths, strict=True):
            row = self.of(seq)
            if row.base < 0:
                continue
            kept: list[int] = []
            for node in path:
                if node not in row.scratch:
                    break
                kept.append(row.scratch.index(node))
            if kept != list(range(len(kept))):
                self.store.move(row.index, row.base + np.array(kept), row.base)
            row.text += seq.tokens[row.cached : row.base] + draft.token[path[: len(kept)]].tolist()
            row.base, row.scratch = -1, []


def slots_for(context: int) -> int:
    """Slots of a row: its text, one step's scratch, and one that padding writes to."""
    return context + MAX_NODES + 1


def _bucket(top: int, capacity: int) -> int:
    return min(-(-top // BUCKET) * BUCKET, capacity)


def _common(a: Iterable[int], b: Iterable[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
