"""A table language model: the oracle of the tests.

Its "keys" are the tokens themselves, kept in the same slots as a real cache and read back through the same masks. So
a wrong slot, a stale row or a leaking neighbour changes the text at once, and probabilities are exact in float64.
"""

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.noise import address, uniform
from outrider.core.types import MAX_NODES, Draft, Ints, ModelSpec, Outcome, Places, Scores, Sequence
from outrider.models.kv import Block, Rows, slots_for


class TokenStore:
    """Tokens and their positions, by row and slot."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.cells: Ints = np.full((rows, capacity, 2), -1)

    def copy(self, source: int, goal: int, start: int, stop: int) -> None:
        self.cells[goal, start:stop] = self.cells[source, start:stop]

    def move(self, row: int, sources: list[int], start: int) -> None:
        self.cells[row, start : start + len(sources)] = self.cells[row, sources]

    def swap(self, a: int, b: int, stop: int) -> None:
        self.cells[[a, b], :stop] = self.cells[[b, a], :stop]

    def broken(self, row: int) -> bool:
        return False  # all of them are tokens

    def clear(self, row: int) -> None:
        self.cells[row] = -1


@functools.lru_cache(maxsize=1 << 16)
def _table(vocab: int, seed: int, seen: tuple[int, ...]) -> NDArray[np.float64]:
    key = address(np.array([seed]), *[np.array([t + 1]) for t in seen])[0]
    ids = np.arange(vocab)
    u = uniform(address(np.broadcast_to(np.int64(key >> np.uint64(1)), ids.shape), ids))
    out: NDArray[np.float64] = -np.log(-np.log(u * (1 - 2e-9) + 1e-9))
    return out


class ToyModel:
    """Next-token logits are a random function of the last `order` visible tokens (None: of all of them).

    `scale` sharpens the distribution. Two models with the same seed are the same model; `blend` mixes in the logits
    of a second seed, which makes drafters that agree more or less.
    """

    def __init__(
        self, vocab: int, seed: int, *, order: int | None = 2, scale: float = 2.0, blend: tuple[int, float] | None = None,
        rows: int = 4, context: int = 256, name: str = "toy",
    ) -> None:  # fmt: skip
        self.vocab, self.seed, self.order, self.scale, self.blend = vocab, seed, order, scale, blend
        self.store = TokenStore(rows, slots_for(context))
        self.rows = Rows(name, rows, context, self.store)
        self.spec = ModelSpec(name, f"toy-{vocab}", vocab, context, 1, 0, "cpu", "float64")
        self.forwards = 0
        self.computed = 0

    def logits(self, text: list[int]) -> NDArray[np.float64]:
        """The rule itself: logits [V] after `text`."""
        seen = text if self.order is None else text[len(text) - self.order :] if len(text) >= self.order else text
        out = _table(self.vocab, self.seed, tuple(seen))
        if self.blend:
            seed, share = self.blend
            out = (1 - share) * out + share * _table(self.vocab, seed, tuple(seen))
        return self.scale * out

    def open(self, seq: Sequence) -> None:
        self.rows.open(seq)

    def close(self, seq: Sequence) -> None:
        self.rows.close(seq)

    def view(self, layers: tuple[int, ...]) -> "ToyModel":
        raise ValueError("a table has no layers")

    def begin_at(self, seq: Sequence, tail: int) -> None:
        self.rows.begin_at(seq, tail)

    def prefill(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            tail = self.rows.tail(seq)[:-1]
            if tail:
                self._write(self.rows.append(seq, tail))
                self.rows.appended(seq, tail)

    def _write(self, block: Block) -> None:
        self.forwards += 1
        rows, width = block.table.shape[:2]
        self.computed += rows * width
        row = np.arange(block.first, block.first + rows)[:, None]
        self.store.cells[row, block.table[..., 2]] = block.table[..., :2]

    def score(self, seqs: list[Sequence], draft: Draft, places: Places, reusing: object = None) -> Scores:
        layout = self.rows.layout(seqs, draft, places)
        seen: list[Tensor] = []
        for block in layout.blocks:
            self._write(block)
            seen += [self._read(block.first + r, column) for r, line in enumerate(block.table) for column in line]
        return Scores(torch.stack(seen), at=layout.at)

    def _read(self, row: int, column: Ints) -> Tensor:
        _, position, slot, upto, sees = column.tolist()
        if slot == self.rows.capacity - 1:
            return torch.zeros(self.vocab, dtype=torch.float64)  # padding
        cells = self.store.cells[row, [*range(upto), *(upto + k for k in range(MAX_NODES) if sees >> k & 1)]]
        ordered = cells[np.argsort(cells[:, 1], kind="stable")]
        assert ordered[:, 1].tolist() == list(range(position + 1)), f"positions {ordered[:, 1].tolist()} are not a text"
        return torch.from_numpy(self.logits(ordered[:, 0].tolist()))

    def commit(self, seqs: list[Sequence], draft: Draft, outcome: Outcome) -> None:
        self.rows.commit(seqs, draft, outcome)

    def drop(self, seqs: list[Sequence]) -> None:
        self.rows.drop(seqs)
