"""The memory behind a row: a transformers Cache whose layers write and read given slots.

Knows nothing of sequences or drafts: `Aim` says where the forward at hand writes and what it reads.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from outrider.core.noise import brought, races
from outrider.core.sampling import within
from outrider.models.kv import slots_for


@dataclass(slots=True)
class Aim:
    """Where the layers write and read in the forward at hand: slot [b, w] of each row, and the slots read."""

    slot: Tensor | None = None
    read: int = 0
    index: dict[int, Tensor] = field(default_factory=dict)

    def at(self, slot: Tensor, read: int) -> None:
        self.slot, self.read, self.index = slot, read, {}

    def lines(self, heads: int, capacity: int) -> Tensor:
        """Where [b, heads, w] entries go in rows seen as [b * heads * capacity] lines; the same for layers of as many heads."""
        if heads not in self.index:
            assert self.slot is not None
            row, head = (torch.arange(n, device=self.slot.device) for n in (self.slot.shape[0], heads))
            line = (row[:, None, None] * heads + head[None, :, None]) * capacity + self.slot[:, None, :]
            self.index[heads] = line.flatten()
        return self.index[heads]


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # types of transformers are not read (pyproject.toml)
    """One layer's keys and values [rows, heads, capacity, d]; of one slot, until `SlotCache.allocate` has seen their shapes.

    `rows`: the keys and values of the rows in the forward at hand, views of them.
    """

    is_compileable = True

    def __init__(self, aim: Aim, capacity: int) -> None:
        super().__init__()
        self.aim, self.capacity = aim, capacity
        self.rows: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (x.new_zeros(x.shape[0], x.shape[1], 1, x.shape[3]) for x in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.rows is None:
            assert self.keys is not None and self.values is not None
            self.rows = (self.keys[: len(key_states)], self.values[: len(key_states)])
        keys, values = self.rows
        index = self.aim.lines(keys.shape[1], keys.shape[2])
        keys.view(-1, keys.shape[3]).index_copy_(0, index, key_states.reshape(-1, keys.shape[3]))
        values.view(-1, values.shape[3]).index_copy_(0, index, value_states.reshape(-1, values.shape[3]))
        return keys[:, :, : self.aim.read], values[:, :, : self.aim.read]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.aim.read, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.capacity


class SlotCache:
    """The transformers Cache made of SlotLayers, and the Store that moves their slots.

    `blocks`: their memory [keys and values, rows, heads, capacity, d], one block for all of one shape: what is moved is moved in all layers at once.
    `lies`: of those in the host's memory, what machine code asks, which would take longer to ask a tensor in each step than to move what it has.
    """

    def __init__(self, layers: int, rows: int, context: int) -> None:
        self.aim, self.count, self.capacity = Aim(), rows, slots_for(context)
        self.layers = [SlotLayer(self.aim, self.capacity) for _ in range(layers)]
        self.cache = Cache(layers=list(self.layers))
        self.blocks: list[Tensor] = []
        self.lies: list[tuple[int, int, int, int, int, int, int]] | None = None
        self.views: dict[tuple[int, int], list[Tensor]] = {}

    @torch.inference_mode()
    def allocate(self, device: torch.device, probe: Callable[[Tensor], object]) -> None:
        """Let the model show the shapes of its keys, and make room for them, zero at first (a NaN behind a mask would leak): `probe` runs one forward
        of a zero [1, 1]."""
        zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.aim.at(zero, 1)
        probe(zero)
        shown = self._tensors()
        alike = {kind: [x for x in shown if _kind(x) == kind] for kind in map(_kind, shown)}
        self.blocks = [some[0].new_zeros(len(some), self.count, heads, self.capacity, d) for (heads, d, *_), some in alike.items()]
        self.lies = [_lies(block) for block in self.blocks] if all(map(within, self.blocks)) else None
        parts = dict(zip(alike, map(iter, self.blocks), strict=True))
        made = iter([next(parts[_kind(x)]) for x in shown])
        for layer in self._used():
            layer.keys, layer.values, layer.rows = next(made), next(made), None

    def rows(self, first: int, count: int) -> list[Tensor]:
        """Keys and values of some rows, layer by layer, as views [count, heads, capacity, d]."""
        if (first, count) not in self.views:
            self.views[first, count] = [x[first : first + count] for x in self._tensors()]
        return self.views[first, count]

    def use(self, rows: list[Tensor], slot: Tensor, read: int) -> None:
        """Aim the next forward at these rows."""
        self.aim.at(slot, read)
        for i, layer in enumerate(self._used()):
            layer.rows = (rows[2 * i], rows[2 * i + 1])

    def _used(self) -> list[SlotLayer]:
        return [layer for layer in self.layers if layer.is_initialized]

    def _tensors(self) -> list[Tensor]:
        return [x for layer in self._used() for x in (layer.keys, layer.values) if x is not None]

    @property
    def bytes(self) -> int:
        return sum(block.untyped_storage().nbytes() for block in self.blocks)

    @torch.inference_mode()
    def copy(self, source: int, goal: int, start: int, stop: int) -> None:
        for block in self.blocks:
            block[:, goal, :, start:stop] = block[:, source, :, start:stop]

    def move(self, row: int, sources: list[int], start: int) -> None:
        if races is None or self.lies is None:
            self._move(row, sources, start)
            return
        for address, wide, times, stride, heads, each, slot in self.lies:
            races.moved(address + row * wide, times, stride, heads, each, slot, sources, start)

    @torch.inference_mode()
    def _move(self, row: int, sources: list[int], start: int) -> None:
        index = torch.tensor(sources)
        for block in self.blocks:
            slots = block[:, row]
            slots[:, :, start : start + len(sources)] = slots.index_select(2, brought(index, block.device))

    @torch.inference_mode()
    def swap(self, a: int, b: int, stop: int) -> None:
        pair = torch.tensor([a, b])
        for block in self.blocks:
            here = brought(pair, block.device)
            for part in block:  # one by one: two whole rows may be large
                part[here, :, :stop] = part[here.flip(0), :, :stop]

    @torch.inference_mode()
    def broken(self, row: int) -> bool:
        return any(not part[row].isfinite().all() for block in self.blocks for part in block)  # one by one: a whole row may be large

    @torch.inference_mode()
    def clear(self, row: int) -> None:
        for block in self.blocks:
            block[:, row] = 0


def _lies(block: Tensor) -> tuple[int, int, int, int, int, int, int]:
    """Where a block begins, the bytes from row to row, and what else `races.moved` asks of it."""
    stride, wide, each, slot, _ = [block.stride(i) * block.itemsize for i in range(5)]
    return block.data_ptr(), wide, len(block), stride, block.shape[2], each, slot


def _kind(x: Tensor) -> tuple[int, int, torch.dtype, torch.device]:
    """What tensors [rows, heads, slots, d] of one block have in common."""
    return x.shape[1], x.shape[3], x.dtype, x.device
