"""Common subexpressions of tokens: drafters of a union grow one trie. What two of them guess is drafted and scored once."""

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from outrider.ir.drafting import ProposeOp, UnionOp
from outrider.ir.text import programs
from outrider.ir.types import FREE, POINT, kind_of, rule_of, value_of


class MergeTries(ModulePass):
    name = "merge-tries"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for program in programs(op):
            for union in [o for o in program.body.block.ops if isinstance(o, UnionOp)]:
                _merge(union)


def _merge(union: UnionOp) -> None:
    """Each proposal of the union grows beside the arms before it, where that is lawful: points, or a rule that does not care. One
    that is overlapped with verification waits for no other: they grow beside it."""
    free = rule_of(union) in FREE
    base: list[SSAValue] = []
    apart: list[SSAValue] = []
    proposals: list[ProposeOp] = []
    for arm in dict.fromkeys(union.arms):
        one = arm.owner
        if not (free or kind_of(arm) == POINT):
            apart.append(arm)
        elif isinstance(one, ProposeOp) and one.overlapped is None and all(use.operation is union for use in arm.uses):
            proposals.append(one)
        else:
            base.append(arm)
    if len(base) + len(proposals) < 2 or not proposals:
        return
    for one in proposals:
        grown = _beside(one, base, union) if base else one
        base = [grown.out]
    Rewriter.replace_op(union, UnionOp([*base, *apart]) if apart else [], None if apart else base)


def _beside(one: ProposeOp, base: list[SSAValue], before: UnionOp) -> ProposeOp:
    """The proposal, made beside `base`."""
    block = one.parent
    assert block is not None
    order, shape, device = (a.data if a else None for a in (one.order, one.shape, one.device))
    grown = ProposeOp(
        one.name_of, one.at, one.own.data, how=one.how.data, beside=[*one.beside, *base], depth=value_of(one.depth),
        width=value_of(one.width), sample=value_of(one.sample), order=order, shape=shape, device=device,
    )  # fmt: skip
    grown.out.name_hint = one.out.name_hint
    block.insert_op_before(grown, before)
    one.out.replace_all_uses_with(grown.out)
    block.erase_op(one)
    return grown
