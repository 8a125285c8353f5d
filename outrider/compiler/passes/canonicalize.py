"""Constant folding: temperature 0 is greedy verification, depth 0 is no draft, a union of one is that one."""

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from outrider.ir.deciding import AcceptOp, DeferOp, ProgramOp
from outrider.ir.drafting import AgreeOp, ContextOp, EmptyOp, ProposeOp, PruneOp, RelayOp, UnionOp
from outrider.ir.text import programs
from outrider.ir.types import FREE, ON, OVER, POINT, draft, joined, kind_of, value_of


class Canonicalize(ModulePass):
    name = "canonicalize"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for program in programs(op):
            changed = True
            while changed:
                folded = [o.parent is not None and _fold(o) for o in list(program.body.block.ops)]
                changed = any(folded)
            retype(program)


def retype(program: ProgramOp) -> None:
    """Give every draft the kind that its makers have now."""
    for op in list(program.body.block.ops):
        kinds = _kinds(op)
        if kinds and joined(kinds) != kind_of(op.results[0]):
            Rewriter.replace_value_with_new_type(op.results[0], draft(joined(kinds)))


def _kinds(op: Operation) -> list[str]:
    """Of all that the draft of an operation is made of."""
    if isinstance(op, ProposeOp):
        return [op.own.data, *map(kind_of, op.beside), *([kind_of(op.at)] if op.how.data != ON else [])]
    if isinstance(op, RelayOp):
        return [op.own.data, kind_of(op.at)]
    return [kind_of(a) for a in op.operands] if isinstance(op, UnionOp | PruneOp | AgreeOp | DeferOp) else []


def _fold(op: Operation) -> bool:
    """Simplify one operation; True if anything changed."""
    if isinstance(op, AcceptOp):
        return _cold(op)
    if isinstance(op, ProposeOp):
        return _propose(op)
    if isinstance(op, UnionOp):
        return _union(op)
    if isinstance(op, PruneOp):
        return _prune(op)
    if isinstance(op, RelayOp):
        return _relay(op)
    return isinstance(op, AgreeOp | DeferOp) and _empty(op.at) and _replace(op, op.at)


def _empty(value: SSAValue) -> bool:
    return isinstance(value.owner, EmptyOp)


def _replace(op: Operation, value: SSAValue) -> bool:
    Rewriter.replace_op(op, [], [value])
    return True


def _cold(op: AcceptOp) -> bool:
    """At temperature 0 every rule takes the likeliest token: drafts are points, and no distribution is kept."""
    block = op.parent
    assert block is not None
    drawn = [o for o in block.ops if isinstance(o, ProposeOp | RelayOp) and (o.own.data != POINT or o.properties.get("sample"))]
    if op.cold is None and (op.rule.data not in FREE or not drawn):
        return False
    if op.cold is not None:
        op.rule = StringAttr("greedy")
        del op.properties["cold"]
    for o in drawn:
        o.own = StringAttr(POINT)
        o.properties.pop("sample", None)
    program = op.parent_op()
    assert isinstance(program, ProgramOp)
    retype(program)
    return True


def _propose(op: ProposeOp) -> bool:
    beside = list(dict.fromkeys(d for d in op.beside if not _empty(d)))
    if value_of(op.depth) == 0:
        rest = beside + ([op.at] if op.how.data != ON else [])
        made = [] if len(rest) == 1 else [UnionOp(rest) if rest else EmptyOp()]
        Rewriter.replace_op(op, made, rest if len(rest) == 1 else None)
        return True
    if op.how.data != ON and _empty(op.at):
        block = op.parent
        assert block is not None
        context = next(o for o in block.ops if isinstance(o, ContextOp))
        return _again(op, context.out, ON, beside)
    return len(beside) < len(op.beside) and _again(op, op.at, op.how.data, beside)


def _again(op: ProposeOp, at: SSAValue, how: str, beside: list[SSAValue]) -> bool:
    """The same proposal from another place."""
    order, shape, device = (a.data if a else None for a in (op.order, op.shape, op.device))
    depth, width = (1, 1) if op.how.data == OVER != how else (value_of(op.depth), value_of(op.width))
    numbers = {"depth": depth, "width": width, "sample": value_of(op.sample)}
    Rewriter.replace_op(op, ProposeOp(op.name_of, at, op.own.data, how=how, beside=beside, order=order, shape=shape, device=device, **numbers))
    return True


def _union(op: UnionOp) -> bool:
    arms: list[SSAValue] = []
    for arm in op.arms:
        arms += arm.owner.arms if isinstance(arm.owner, UnionOp) else [] if _empty(arm) else [arm]
    arms = list(dict.fromkeys(arms))
    if len(arms) == 1:
        return _replace(op, arms[0])
    if arms == list(op.arms):
        return False
    Rewriter.replace_op(op, UnionOp(arms) if arms else EmptyOp())
    return True


def _prune(op: PruneOp) -> bool:
    if _empty(op.at):
        return _replace(op, op.at)
    if op.unless_sampled is not None and kind_of(op.at) == POINT:
        del op.properties["unless_sampled"]
        return True
    inner = op.at.owner
    if isinstance(inner, PruneOp) and (inner.chain, inner.unless_sampled) == (op.chain, op.unless_sampled) and op.budget == inner.budget:
        return _replace(op, inner.out)
    return False


def _relay(op: RelayOp) -> bool:
    if value_of(op.depth) == 0:
        return _replace(op, op.at)
    if not _empty(op.at):
        return False
    block = op.parent
    assert block is not None
    context = next(o for o in block.ops if isinstance(o, ContextOp))
    Rewriter.replace_op(op, ProposeOp(op.drafter.data, context.out, op.own.data, depth=value_of(op.depth), width=1))
    return True
