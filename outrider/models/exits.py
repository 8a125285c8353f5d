"""Drafting by a model's own first layers, whose work is not done twice.

An `EarlyExit` is a view of the first L layers that remembers what it computed for each slot of the step. The target's
`score(..., reusing=view)` runs those layers only where the view did not, and all columns through the layers above.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outrider.core.errors import OutriderError
from outrider.core.sampling import Race
from outrider.core.types import Draft, On, Outcome, Places, Scores, Sequence
from outrider.models.hf import Ahead, Behind, Guessed, HFModel, HFView, shortened
from outrider.models.kv import Block
from outrider.models.layers import decoder_layers, with_layers
from outrider.models.step import Step


class Tap(nn.Module):
    """A layer that keeps what it put out last."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.seen = layer, torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args: Any, **options: Any) -> Any:
        out = self.layer(*args, **options)
        self.seen = out if isinstance(out, Tensor) else out[0]
        return out


class EarlyExit(HFView):
    """The first `count` layers, final norm and head included. `known`: (row, slot) -> what the last of them put out there in this
    step, [d]; `spoiled`: rows of which nothing is kept, for another view wrote there."""

    def __init__(self, owner: HFModel, count: int) -> None:
        if not 0 < count < owner.spec.layers:
            raise OutriderError(
                f"early-exit:{count} is no part of {owner.spec.name}", f"it has {owner.spec.layers} layers", f"1..{owner.spec.layers - 1}"
            )
        super().__init__(owner, *shortened(owner, tuple(range(count))), layers=count)
        self.count = count
        self.tap = Tap(owner_stack(self.module)[count - 1])
        owner_stack(self.module)[count - 1] = self.tap
        rest = with_layers(owner.module, tuple(range(count, owner.spec.layers)))
        self.above = Step(rest, owner.store, owner.step.windows, owner.spec.vocab_size)
        self.known: dict[tuple[int, int], Tensor] = {}
        self.spoiled = set[int]()

    def score(self, seqs: list[Sequence], draft: Draft, places: Places, reusing: Any = None) -> Scores:
        """As any model's; what was computed is kept until its row is committed, or begins anew."""
        self.forget([self.rows.of(seqs[~p]).index for p in places if p < 0])
        return super().score(seqs, draft, places)

    def commit(self, seqs: list[Sequence], draft: Draft, outcome: Outcome) -> None:
        self.forget([self.rows.of(seq).index for seq in seqs])

    def drop(self, seqs: list[Sequence]) -> None:
        self.forget([self.rows.of(seq).index for seq in seqs])
        super().drop(seqs)

    def chain(
        self, seqs: list[Sequence], draft: Draft, place: int, levels: int, on: On | None = None, race: Race | None = None, ahead: Ahead | None = None,
        behind: Behind | None = None,
    ) -> Guessed:  # fmt: skip
        """Nothing is read ahead, and nothing runs behind it: what was computed is known by its slot."""
        self.forget([self.rows.of(seqs[~place]).index] if place < 0 else [])
        return super().chain(seqs, draft, place, levels, on, race)

    def _serve(self, block: Block, last: Tensor | None = None, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._look_back(block)
        out = super()._serve(block, last, table)
        self._keep(block)
        return out

    def _look_back(self, block: Block) -> None:
        """Where another view has written since, these layers' keys are its keys: what was found before, and is found from there on, is not what they
        give, until the root is computed again."""
        for r, line in enumerate(block.table):
            row = self.rows.all[block.first + r]
            if row.writer is not self:
                self.forget([row.index])
                self.spoiled.add(row.index)
            if row.base < 0 or (line[:, 2] == row.base - 1).any():
                self.spoiled.discard(row.index)

    def _keep(self, block: Block) -> None:
        for r, line in enumerate(block.table):
            if block.first + r in self.spoiled:
                continue
            for c, column in enumerate(line.tolist()):
                self.known[block.first + r, column[2]] = self.tap.seen[r, c]

    def forget(self, rows: list[int]) -> None:
        """What was computed for the slots of these rows holds no longer."""
        for key in [key for key in self.known if key[0] in rows]:
            del self.known[key]

    @torch.inference_mode()
    def finish(self, block: Block) -> tuple[Tensor, Tensor]:
        """What the owner's forward over a block gives: the first layers where they have not run, the others everywhere."""
        self._look_back(block)
        missing = [
            [c for c, column in enumerate(line.tolist()) if (block.first + r, column[2]) not in self.known] for r, line in enumerate(block.table)
        ]
        if width := max(map(len, missing)):
            table = np.zeros((len(missing), width, block.table.shape[2]), np.int64)
            table[..., 2:4] = self.store.capacity - 1, 1  # padding
            for r, columns in enumerate(missing):
                table[r, : len(columns)] = block.table[r, columns]
            self._serve(Block(block.first, table, block.read))
        hidden = torch.stack([torch.stack([self.known[block.first + r, c[2]] for c in line.tolist()]) for r, line in enumerate(block.table)])
        out: tuple[Tensor, Tensor] = self.above(*self._inputs(block), hidden=hidden)
        return out


def owner_stack(module: nn.Module) -> nn.ModuleList:
    """The layers of a module."""
    owner, name = decoder_layers(module)
    stack = owner._modules[name]
    assert isinstance(stack, nn.ModuleList)
    return stack


def check(view: EarlyExit) -> None:
    """Raise OutriderError unless going on from the view's layers gives what the whole model gives: some classes scale or shift what
    enters their first layer."""
    table = np.zeros((1, 2, 4 + len(view.owner.step.windows)), np.int64)
    table[0, :, 0], table[0, :, 1], table[0, :, 2], table[0, :, 3] = (1, 2), (0, 1), (0, 1), (1, 2)
    table[0, :, 4:] = 0
    block = Block(0, table, min(64, view.store.capacity - 1))
    whole = view.owner._eager(block)[0]
    view.forget([0])
    view._serve(block)
    resumed = view.finish(block)[0]
    view.forget([0])
    error = float((whole.float() - resumed.float()).abs().max())
    if error > 1e-2 * max(1.0, float(whole.float().abs().max())):
        raise OutriderError(
            f"{type(view.owner.module).__name__} cannot go on from layer {view.count}", f"its logits then differ by {error:.2g}", "a draft model"
        )
