"""Inlining of a drafter that is the target's own first layers: what they computed for drafted nodes is not computed again, scoring
goes on from the layer above. Not in strict programs (those that prune to a chain), whose steps all have one shape."""

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from outrider.core.config import whole
from outrider.ir.deciding import ScoreOp
from outrider.ir.drafting import ProposeOp, PruneOp, RelayOp
from outrider.ir.text import programs
from outrider.ir.types import number

EARLY_EXIT = "early-exit:"


def layers_of(drafter: str) -> int | None:
    """How many of the target's layers a drafter is made of."""
    return whole(drafter.removeprefix(EARLY_EXIT)) if drafter.startswith(EARLY_EXIT) else None


class InlineEarlyExit(ModulePass):
    name = "inline-early-exit"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for program in programs(op):
            ops = list(program.body.block.ops)
            exits = [n for o in ops if isinstance(o, ProposeOp | RelayOp) and (n := layers_of(o.drafter.data)) is not None]
            strict = any(isinstance(o, PruneOp) and o.chain is not None for o in ops)
            for score in [o for o in ops if isinstance(o, ScoreOp)]:
                if len(set(exits)) == 1 and not strict and score.model.data == "target":
                    score.reusing = number(exits[0])
