"""Slots: who holds which row of a KV cache, where each token's keys lie, and what may look at what.

A cache is a block of `rows` x `capacity` slots per layer. A row's committed tokens lie at slot == position; a step's draft nodes lie behind them as
scratch, in the order they were scored. Commit moves the accepted ones to their positions (a chain is already there) and forgets the rest by lowering
the length. Rows in use are rows 0..n-1, so a step of the whole batch reads the cache without a gather; rows given back keep their text for reuse by
later prompts. Invariant after every commit: slots [0, cached) of a row hold exactly what recomputing its first `cached` tokens gives, of a text that
may begin behind the request's beginning (`begin_at`).
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import numpy as np

from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.noise import races
from outrider.core.types import MAX_NODES, Draft, Ints, Outcome, Places, Sequence

SPARES = 4  # times as much as it begins with that a text must have unread, for what is cached of it to be given up
BUCKET = 64  # slots read are rounded up to this, so that shapes recur


@dataclass(slots=True)
class Row:
    """One row."""

    index: int
    text: list[int] = field(default_factory=list)  # the tokens whose keys are in slots [0, cached)
    owner: Sequence | None = None
    base: int = -1  # where scratch begins in this step; -1: it has not touched the row
    scratch: dict[int, int] = field(default_factory=dict)  # node -> which scratch slots it sees, in the order of slots
    resumed: bool = False  # does what is laid out now go on with this step's scratch?
    used: int = 0  # when it was given back last, in requests
    skipped: int = 0  # tokens of the request before `text`, which are left out: positions and slots count from behind them
    writer: Any = None  # the view that wrote scratch last

    @property
    def cached(self) -> int:
        return len(self.text)


Column = tuple[int, ...]


@dataclass(slots=True)
class Block:
    """One forward over rows first .. first + b - 1.

    Of a column the table says: token, position, slot, upto, sees. It sees every slot below upto (within its layer's window), and slot upto + k if bit k
    of sees is set: a step's scratch is no more than 64 slots. Padding columns write to the last slot, which nothing reads.
    """

    first: int
    table: Ints  # [b, w, 4 + kinds of windows]
    read: int  # slots of each row that are read
    kept: int = 0  # how wide the table is, if the row's next forward of this width is written into it; else 0


@dataclass(slots=True)
class Layout:
    """The forwards of one `score`, and where each asked place is among their places laid one after the other, padding
    included; None: these are the asked ones, in order."""

    blocks: list[Block]
    at: list[int] | None


@dataclass(slots=True)
class Table:
    """That of a row's forwards of one width, its numbers one after the other, and where they lie."""

    made: Ints
    numbers: Any  # a memoryview, which mypyc knows by no name
    address: int


class Store(Protocol):
    """What Rows asks of the memory behind it."""

    def copy(self, source: int, goal: int, start: int, stop: int) -> None:
        """Copy slots [start, stop) of row `source` to the same slots of row `goal`."""

    def move(self, row: int, sources: list[int], start: int) -> None:
        """Move the slots `sources` of a row, which ascend and lie nowhere below their goals, to start, start + 1, ..."""

    def swap(self, a: int, b: int, stop: int) -> None:
        """Exchange slots [0, stop) of two rows."""

    def broken(self, row: int) -> bool:
        """Does it hold what is no number, or more than any? A mask hides no such slot."""

    def clear(self, row: int) -> None:
        """Nothing of that is left."""


class Rows:
    """The bookkeeping of one model's cache."""

    def __init__(self, name: str, count: int, context: int, store: Store, windows: tuple[int | None, ...] = (None,)) -> None:
        self.name, self.capacity, self.store, self.windows = name, slots_for(context), store, windows
        self.reuse, self.blind = True, (0,) * len(windows)
        self.narrowest = min([w for w in windows if w is not None], default=self.capacity)
        self.all = [Row(i) for i in range(count)]
        self.active, self.clock, self.reused = 0, 0, 0
        self.tables: dict[tuple[int, int], Table] = {}  # of single rows, by row and width

    def of(self, seq: Sequence) -> Row:
        row: Row = seq.slots[self.name]
        return row

    def open(self, seq: Sequence) -> Row:
        """Give `seq` a row, with as much of its prompt already cached as any row holds."""
        if self.active == len(self.all):
            raise OutriderError(f"all {self.active} rows of {self.name} are taken", "", "fewer requests at a time, or load with more rows")
        prompt = seq.request.prompt
        shared = [min(_common(row.text, prompt), len(prompt) - 1) if self.reuse and not row.skipped else 0 for row in self.all]
        best = int(np.argmax(shared))
        free = self.all[self.active :]
        own = best >= self.active and 2 * shared[best] >= self.all[best].cached
        row = self.all[best] if own else min(free, key=lambda r: (r.cached > 0, r.used))
        if not own:
            row.text = []  # an interrupted copy is none
            if shared[best]:
                self.store.copy(best, row.index, 0, shared[best])
        row.text = list(prompt[: shared[best]])
        self.reused += shared[best]
        self._exchange(row, self.all[self.active], self.active)
        self.active += 1
        row.owner, row.base, row.scratch, row.skipped = seq, -1, {}, 0
        seq.slots[self.name] = row
        return row

    def close(self, seq: Sequence) -> None:
        """Free the row of `seq`, if it has one; its text stays for reuse. The last row in use takes its index. What was interrupted is done by the next
        call."""
        row: Row | None = seq.slots.get(self.name)
        if row is None:
            return
        if row.owner is seq:
            self._forget(row)
            self.clock += 1
            row.owner, row.base, row.scratch, row.used = None, -1, {}, self.clock
        if row.owner is None and row.index < self.active:  # else somebody has it by now, or it has its place
            self._exchange(row, self.all[self.active - 1], self.active - 1)
        del seq.slots[self.name]

    def _exchange(self, a: Row, b: Row, active: int) -> None:
        """Let two rows change places, of which `active` are in use from then on. While memory is moved neither has a text: an interruption costs
        reading again, and nothing that is called before it could come between what belongs together."""
        texts, stop = (a.text, b.text), max(a.cached, b.cached)
        a.text, b.text = [], []
        self.all[a.index], self.all[b.index] = b, a
        a.index, b.index = b.index, a.index
        self.active = active
        if a is not b:
            self.store.swap(a.index, b.index, stop)
        a.text, b.text = texts

    def begin_at(self, seq: Sequence, tail: int) -> None:
        """Let the text begin with its last `tail` tokens, where SPARES times as many are not cached yet; 0: with all, if any were left out. Within a
        step nothing is changed.

        Raises OutriderError where `tail` is less than 0."""
        if tail < 0:
            raise OutriderError(f"{self.name} cannot begin with {tail} tokens of a text's end", "", "0 for all of the text, or how many")
        row = self.of(seq)
        if row.base >= 0:
            return
        if tail == 0:
            self._forget(row)
        elif self.behind(seq) > SPARES * tail:
            row.text, row.skipped = [], len(seq.tokens) - tail

    def _forget(self, row: Row) -> None:
        """What was read of a text without its beginning is of no use for any other."""
        if row.skipped:
            row.text, row.skipped = [], 0

    def tail(self, seq: Sequence) -> list[int]:
        """Tokens that are committed but not cached."""
        row = self.of(seq)
        return seq.tokens[row.skipped + row.cached :]

    def behind(self, seq: Sequence) -> int:
        """How many they are."""
        row = self.of(seq)
        return len(seq.tokens) - row.skipped - len(row.text)

    def append(self, seq: Sequence, tokens: list[int]) -> Block:
        """The forward of a prefill chunk. Its tokens count as cached when `appended` says that they were computed."""
        row = self.of(seq)
        position = np.arange(row.cached, row.cached + len(tokens))
        nothing = np.zeros((len(self.windows), len(tokens)), np.int64)
        table = np.stack([np.array(tokens), position, position, position + 1, *nothing], -1)
        return Block(row.index, table[None], _bucket(row.cached + len(tokens), self.capacity))

    def appended(self, seq: Sequence, tokens: list[int]) -> None:
        """The chunk is in the cache now."""
        self.of(seq).text += tokens

    def layout(self, seqs: list[Sequence], draft: Draft, places: Places, *, resume: bool = False) -> Layout:
        """Where everything goes in one forward over `places`; marks it as this step's scratch. resume: what is scratch of this
        step already keeps its slots when its root is asked for again."""
        if resume:
            for row in [self.of(seqs[~p]) for p in places if p < 0]:
                row.resumed = row.base >= 0
        if len(places) == 1 and places[0] < 0 and not resume:  # the most frequent: a plain step, the first of a chain
            return self._anew(seqs[~places[0]], draft.token, draft.parent, 0)
        if len(places) == 1:
            row, columns = self._columns(seqs, draft, places[0])
            return Layout([self._line(row, columns)], None if len(columns) == 1 else [len(columns) - 1])
        if not resume and draft.rows == 1 and tree.ascending(places):
            return self._anew(seqs[0], draft.token, draft.parent, len(places) - 1)
        lines: dict[int, list[Column]] = {}
        asked: list[tuple[int, int]] = []
        for place in places:
            r = ~place if place < 0 else draft.row[place]
            line = lines.setdefault(r, [])
            line += self._columns(seqs, draft, place)[1]
            asked.append((r, len(line) - 1))
        blocks: list[Block] = []
        start, size = {}, 0
        for run in _neighbours({self.of(seqs[r]).index: r for r in lines}):
            blocks.append(self._block([self.of(seqs[r]) for r in run], [lines[r] for r in run]))
            width = blocks[-1].table.shape[1]
            start.update({r: size + i * width for i, r in enumerate(run)})
            size += len(run) * width
        at = [start[r] + c for r, c in asked]
        return Layout(blocks, None if at == list(range(size)) else at)

    def _anew(self, seq: Sequence, tokens: list[int], parents: list[int], count: int, first: int = 0) -> Layout:
        """`layout` of one row's root and of the first `count` of some nodes, called `first` and so on, none of them scored before: what most steps
        ask."""
        row = self.of(seq)
        start, end = len(row.text), len(seq.tokens) - row.skipped
        width = end - start + count
        at = tree.span(width - count - 1, width) if end - start > 1 else None
        if races is None or end + count >= self.capacity or self.narrowest <= count:  # too long, or not all sees all
            columns = self._root_columns(row, seq)
            columns += [self._node_column(row, first + n, first + p if (p := parents[n]) >= 0 else p, tokens[n]) for n in range(count)]
            return Layout([self._line(row, columns)], at)
        row.base, row.scratch, row.resumed = end, _sights(parents, count, first), False
        table = self._table(row.index, width)
        races.laid(table.address, len(self.windows), seq.tokens, start, tokens, parents, count, row.skipped)
        return Layout([Block(row.index, table.made, _bucket(end + count, self.capacity), width)], at)

    def _columns(self, seqs: list[Sequence], draft: Draft, place: int) -> tuple[Row, list[Column]]:
        """The row of a place and what scoring it computes: for a root the tokens not cached yet, for a node itself, after what of
        its ancestors was not scored since the root was."""
        if place >= 0:
            row = self.of(seqs[draft.row[place]])
            first = [] if row.base >= 0 else self._columns(seqs, draft, ~draft.row[place])[1]
            missing = [n for n in tree.ancestors(draft, place)[:-1] if n not in row.scratch] if draft.parent[place] not in row.scratch else []
            return row, [*first, *[self._node_column(row, n, draft.parent[n], draft.token[n]) for n in [*missing, place]]]
        row = self.of(seqs[~place])
        return row, self._root_columns(row, seqs[~place])

    def _root_columns(self, row: Row, seq: Sequence) -> list[Column]:
        start = len(row.text)
        tail = seq.tokens[row.skipped + start :]
        row.base, row.scratch, row.resumed = start + len(tail), row.scratch if row.resumed else {}, False
        return [(t, p, p, p + 1, *self.blind) for p, t in enumerate(tail, start)]

    def _node_column(self, row: Row, node: int, parent: int, token: int) -> Column:
        k = list(row.scratch).index(node) if node in row.scratch else len(row.scratch)  # one that is scored again keeps its slot
        if row.base + k + 1 >= self.capacity:
            raise OutriderError(
                f"{self.name} has {self.capacity} slots a row and needs {row.base + k + 2}", "", "a larger context or a smaller draft"
            )
        sees = row.scratch[node] = (row.scratch[parent] if parent >= 0 else 0) | 1 << k
        depth = sees.bit_count()
        kinds = [_signed(sees if w is None or w > depth else _recent(sees, w)) for w in self.windows]
        return (token, row.base - 1 + depth, row.base + k, row.base, *kinds)

    def begin(self, seqs: list[Sequence], draft: Draft, place: int, ahead: list[int]) -> Layout:
        """`layout` of a place and of what may follow it, as nodes len(draft), len(draft) + 1, ..., one below the other."""
        if place < 0:
            return self._anew(seqs[~place], ahead, tree.span(-1, len(ahead) - 1), len(ahead), len(draft.token))
        row, columns = self._columns(seqs, draft, place)
        first = len(columns) - 1
        columns += self._below(row, len(draft), place, ahead)
        return Layout([self._line(row, columns)], list(range(first, len(columns))))

    def onward(self, seq: Sequence, node: int, parent: int, tokens: list[int]) -> Block:
        """The forward of more nodes of this step, one below the other, from a place on that was scored."""
        row = self.of(seq)
        sees, k, count = row.scratch[parent] if parent >= 0 else 0, len(row.scratch), len(tokens)
        depth = sees.bit_count()
        if races is None or row.base + k + count >= self.capacity or self.narrowest <= depth + count:
            return self._line(row, self._below(row, node, parent, tokens))
        table = self._table(row.index, count)
        races.chained(table.address, len(self.windows), tokens, row.base + depth, row.base + k, row.base, sees)
        for n in range(count):
            sees |= 1 << k + n
            row.scratch[node + n] = sees
        return Block(row.index, table.made, _bucket(row.base + k + count, self.capacity), count)

    def _below(self, row: Row, node: int, parent: int, tokens: list[int]) -> list[Column]:
        columns = list[Column]()
        for token in tokens:
            columns.append(self._node_column(row, node, parent, token))
            node, parent = node + 1, node
        return columns

    def undo(self, seq: Sequence, nodes: list[int]) -> None:
        """These nodes, the last that were scored, are none: their slots are free again."""
        scratch = self.of(seq).scratch
        for node in nodes:
            del scratch[node]

    def _block(self, held: list[Row], lines: list[list[Column]]) -> Block:
        if len(lines) == 1:
            return self._line(held[0], lines[0])
        width, top = max(map(len, lines)), max([row.base + len(row.scratch) for row in held])
        padding: Column = (0, 0, self.capacity - 1, 1, *self.blind)
        lines = [line + [padding] * (width - len(line)) for line in lines]
        return Block(held[0].index, np.array(lines), _bucket(top, self.capacity))

    def _line(self, row: Row, columns: list[Column]) -> Block:
        """`_block` of one row, in a table that is kept: what touches least memory takes least time."""
        table = self._table(row.index, len(columns))
        if len(columns) == 1:
            for i, number in enumerate(columns[0]):
                table.numbers[i] = number
        else:
            table.numbers[:] = array("q", chain.from_iterable(columns))
        return Block(row.index, table.made, _bucket(row.base + len(row.scratch), self.capacity), len(columns))

    def _table(self, index: int, width: int) -> Table:
        table = self.tables.get((index, width))
        if table is None:
            made = np.empty((1, width, 4 + len(self.windows)), np.int64)
            table = self.tables[index, width] = Table(made, made.data.cast("B").cast("q"), made.ctypes.data)
        return table

    def rename(self, seq: Sequence, names: dict[int, int]) -> None:
        """Nodes of this step's scratch that are called otherwise now. One whose name is taken is no node any more, but keeps its slot."""
        row = self.of(seq)
        taken = row.scratch.keys() - names.keys()
        row.scratch = {~node if (name := names.get(node, node)) in taken and node in names else name: sees for node, sees in row.scratch.items()}

    def drop(self, seqs: list[Sequence]) -> None:
        """Forget the scratch of a step that failed: its nodes' names mean others in the next; and rows in which something overflowed, which
        would spoil whatever text comes to lie there."""
        rows = list(map(self.of, seqs))
        for row in rows:
            row.base, row.scratch, row.resumed = -1, {}, False
        for row in rows:
            if self.store.broken(row.index):
                row.text, row.skipped = [], 0
                self.store.clear(row.index)

    def commit(self, seqs: list[Sequence], draft: Draft, outcome: Outcome) -> None:
        """Keep the longest scored prefix of each accepted path; a row this step did not touch keeps what it had.

        Call it before or after the tokens were added to the sequences: it goes by its own base.
        """
        for r, seq in enumerate(seqs):
            row, path = self.of(seq), outcome.paths[r]
            if row.base < 0:
                continue
            if not path:
                row.text += seq.tokens[row.skipped + row.cached : row.skipped + row.base]
                row.base, row.scratch = -1, {}
                continue
            row.text += seq.tokens[row.skipped + row.cached : row.skipped + row.base] + draft.text(path[: self._gather(row, path)])
            row.base, row.scratch = -1, {}

    def _gather(self, row: Row, path: list[int]) -> int:
        """Bring what was scored of an accepted path, up to the first node that was not, to the slots behind the text. Returns how many nodes that
        are."""
        there = 0  # that lie there already, as those of a chain do
        for scored in row.scratch:
            if there == len(path) or path[there] != scored:
                break
            there += 1
        if there == len(path) or there == len(row.scratch):
            return there
        order, kept = {node: k for k, node in enumerate(row.scratch)}, list[int]()
        for node in path:
            if node not in order:
                break
            kept.append(order[node])
        if len(kept) > there:
            self.store.move(row.index, [row.base + k for k in kept], row.base)
        return len(kept)


def slots_for(context: int) -> int:
    """Slots of a row: its text, one step's scratch, and one that padding writes to."""
    return context + MAX_NODES + 1


def _bucket(top: int, capacity: int) -> int:
    return min(-(-top // BUCKET) * BUCKET, capacity - 1)  # the last slot is padding's


def _neighbours(by_index: dict[int, int]) -> Iterator[list[int]]:
    """Batch rows in runs whose cache rows lie side by side."""
    run: list[int] = []
    last = -1
    for index in sorted(by_index):
        if run and index != last + 1:
            yield run
            run = []
        run.append(by_index[index])
        last = index
    if run:
        yield run


def _sights(parents: list[int], count: int, first: int) -> dict[int, int]:
    """Which scratch slots each of these nodes sees, by its name, if they lie there in order."""
    sees = dict[int, int]()
    for n in range(count):
        parent = parents[n]
        sees[first + n] = (sees[first + parent] if parent >= 0 else 0) | 1 << n
    return sees


def _recent(sees: int, window: int) -> int:
    """Of the scratch slots on a node's path, those of itself and its window - 1 nearest ancestors: the last ones."""
    while sees.bit_count() > window:
        sees &= sees - 1
    return sees


def _signed(bits: int) -> int:
    """64 bits as an int64."""
    return bits - (1 << 64) if bits >> 63 else bits


def _common(a: Iterable[int], b: Iterable[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
