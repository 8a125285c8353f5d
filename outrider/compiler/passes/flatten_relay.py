"""Inlining of staged pipelines: a relay becomes what it does, one after the other: guess over all of a draft at once, keep what
agrees, go on from there."""

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from outrider.ir.drafting import AgreeOp, ProposeOp, RelayOp
from outrider.ir.text import programs
from outrider.ir.types import AFTER, OVER, value_of


class FlattenRelay(ModulePass):
    name = "flatten-relay"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for program in programs(op):
            for relay in [o for o in program.body.block.ops if isinstance(o, RelayOp)]:
                name, own = relay.drafter.data, relay.own.data
                over = ProposeOp(name, relay.at, own, how=OVER)
                agreed = AgreeOp(over.out, name)
                Rewriter.replace_op(relay, [over, agreed, ProposeOp(name, agreed.out, own, how=AFTER, depth=value_of(relay.depth), width=1)])
