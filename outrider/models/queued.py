"""A forward that was asked for before the host knows the last tokens of its draft: a chain of them lies on the device, made there by a forward before
it.

What the target says of the chain comes to the host together with the chain, in one wait.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core import tree
from outrider.core.types import Draft, Places, Scores
from outrider.models.kv import Row


class Lap:
    """Seconds from its making to `stop`, of the device's work where that is a CUDA one. To be read when the host has waited for that."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self.times = [self._now(0)]

    def _now(self, which: int) -> float:
        if self.events:
            self.events[which].record(torch.cuda.current_stream(self.device))
        return time.perf_counter()

    def stop(self) -> None:
        self.times.append(self._now(1))

    @property
    def seconds(self) -> float:
        return self.events[0].elapsed_time(self.events[1]) / 1000 if self.events else self.times[1] - self.times[0]


@dataclass(slots=True)
class Queued:
    """What was asked for of a row's text and its draft."""

    row: Row
    root: int  # the column of the text's last token, behind which the nodes stand as the row's scratch has them
    computed: Tensor  # [1, w, V], as `Scores` has it
    found: Tensor  # [1, w, 3], likewise; to be replaced by what the host has of it
    lap: Lap
    raced: bool

    def scores(self, places: Places) -> Scores | None:
        """Of these places: a root, then nodes. None: some were not computed."""
        order = {node: k for k, node in enumerate(self.row.scratch, self.root + 1)}
        if places[0] >= 0 or not all(n in order for n in places[1:]):
            return None
        at, width = [self.root, *[order[n] for n in places[1:]]], self.found.shape[1]
        return Scores(self.computed, at=at, found=self.found, lies=width if self.found.is_cpu else 0, raced=self.raced)


def unknown(draft: Draft, place: int, count: int) -> Draft:
    """The draft of one row with a chain below a place, of tokens that nobody knows yet (0), beside all that is there."""
    first, depth = len(draft), tree.depth_at(draft, place)
    parents = [place, *range(first, first + count - 1)]
    zeros = [0] * count
    return Draft(
        1, draft.token + zeros, draft.parent + parents, draft.row + zeros, draft.depth + list(range(depth + 1, depth + count + 1)),
        draft.source + zeros, draft.kind + zeros, draft.q_row + [-1] * count, draft.score + [1.0] * count, draft.q, draft.again,
    )  # fmt: skip
