"""The memory behind a row: a transformers Cache whose layers write and read given slots.

Knows nothing of sequences or drafts: `Aim` says where the forward at hand writes and what it reads.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from outrider.core.types import Ints
from outrider.models.kv import Layout, slots_for


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values [rows, heads, capacity, d], zero at first (a NaN behind a mask would leak)."""

    is_compileable = True

    def __init__(self, where: "Aim", rows: int, capacity: int) -> None:
        super().__init__()
        self.where, self.shape = where, (rows, capacity)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, capacity = self.shape
        self.keys, self.values = (x.new_zeros(rows, x.shape[1], capacity, x.shape[3]) for x in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        read, ctx, width = self.where.read, self.where.ctx, self.keys.shape[-1]
        index = self.where.lines(self.keys.shape[1], self.keys.shape[2])
        self.keys.view(-1, width).index_copy_(0, index, key_states.reshape(-1, width))
        self.values.view(-1, width).index_copy_(0, index, value_states.reshape(-1, width))
        return self.keys[read][:, :, :ctx], self.values[read][:, :, :ctx]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.where.ctx, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.shape[1]


@dataclass(slots=True)
class Aim:
    """Where the layers write and read in the forward at hand: row [b, 1], slot [b, w], the rows and slots read."""

    row: Tensor | None = None
    slot: Tensor | None = None
    index: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    read: slice | Tensor = field(default_factory=lambda: slice(0))
    ctx: int = 0

    def at(self, layout: Layout, device: torch.device) -> None:
        rows = layout.rows
        dense = bool((np.diff(rows) == 1).all())
        self.row = torch.from_numpy(rows).to(device)[:, None]
        self.slot = torch.from_numpy(layout.slots).to(device)
        self.read = slice(int(rows[0]), int(rows[-1]) + 1) if dense else torch.from_numpy(rows).to(device)
        self.ctx = layout.visible.shape[-1]
        self.index = {}

    def lines(self, heads: int, capacity: int) -> Tensor:
        """Where [b, heads, w] entries go in a cache seen as [rows * heads * capacity] lines; the same for all layers."""
        if (heads, capacity) not in self.index:
            assert self.row is not None and self.slot is not None
            head = torch.arange(heads, device=self.slot.device)[None, :, None]
            self.index[heads, capacity] = ((self.row[:, :, None] * heads + head) * capacity + self.slot[:, None, :]).flatten()
        return self.index[heads, capacity]


class SlotCache:
    """The transformers Cache made of SlotLayers, and the Store that moves their slots."""

    def __init__(self, layers: int, rows: int, context: int) -> None:
        self.aim, capacity = Aim(), slots_for(context)
        self.layers = [SlotLayer(self.aim, rows, capacity) for _ in range(layers)]
        self.cache = Cache(layers=list(self.layers))

    def _tensors(self) -> list[Tensor]:
        return [x for layer in self.layers for x in (layer.keys, layer.values) if x is not None]

    @property
    def bytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for x in self._tensors())

    @torch.inference_mode()
    def copy(self, source: int, goal: int, start: int, stop: int) -> None:
        for x in self._tensors():
            x[goal, :, start:stop] = x[source, :, start:stop]

    @torch.inference_mode()
    def move(self, row: int, sources: Ints, start: int) -> None:
        index = torch.from_numpy(sources)
        for x in self._tensors():
            x[row, :, start : start + len(sources)] = x[row, :, index.to(x.device)]

    @torch.inference_mode()
    def swap(self, a: int, b: int, stop: int) -> None:
        for x in self._tensors():
            x[[a, b], :, :stop] = x[[b, a], :, :stop]
