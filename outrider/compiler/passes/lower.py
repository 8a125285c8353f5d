"""The last pass: what is left must be what a step can do. Marks which proposals must not see what is drafted already (`blind`), and
where the most nodes a row may have can be reached (`bounded`): only there code looks."""

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, UnitAttr
from xdsl.ir import SSAValue
from xdsl.passes import ModulePass

from outrider.compiler.passes.flatten_relay import FlattenRelay
from outrider.core.errors import OutriderError
from outrider.core.types import MAX_NODES
from outrider.ir.deciding import AcceptOp, DeferOp, ProgramOp, ScoreOp
from outrider.ir.drafting import AgreeOp, ProposeOp, PruneOp, RelayOp
from outrider.ir.text import programs
from outrider.ir.types import LAWFUL, ON, OVER, POINT, rule_of, value_of

RUNS = ("greedy", "coupled", "exact")


class Lower(ModulePass):
    name = "lower"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        FlattenRelay().apply(ctx, op)
        for program in programs(op):
            refuse(program)
            _mark(program)


def refuse(program: ProgramOp) -> None:
    """What parses and verifies, and has no step yet."""
    proposals = [o for o in program.body.block.ops if isinstance(o, ProposeOp | RelayOp)]
    for op in program.body.block.ops:
        if isinstance(op, DeferOp):
            raise OutriderError("'defer' has no step yet", "programs that defer can be read, checked and printed", "accept without it")
        if isinstance(op, ScoreOp) and op.model.data != "target":
            raise OutriderError(f"'{op.model.data}' cannot score yet", "a step scores by the target alone", 'by "target"')
        if isinstance(op, AcceptOp) and op.rule.data not in RUNS:
            raise OutriderError(f"the rule '{op.rule.data}' has no step yet", "it can be read, checked and printed", ", ".join(RUNS))
        if isinstance(op, ProposeOp) and (op.depth is None or op.width is None) and op.how.data != OVER:
            raise OutriderError(f"the depth or width of '{op.name_of}' is still a hole", "", 'specialize{plan="..."} before')
        if isinstance(op, ProposeOp) and op.overlapped is not None:
            raise OutriderError(
                f"'{op.name_of}' is to draft while the target verifies", "no step uses a second device yet: the mark can be read, checked and printed",
                "without 'overlapped', or schedule without acceptance=",
            )  # fmt: skip
    drawn = [o.drafter.data for o in proposals if o.own.data != POINT]
    last = program.body.block.last_op
    if last is not None and rule_of(last) in LAWFUL and len(set(drawn)) < len(drawn):
        raise OutriderError("a drafter draws twice for one place", "its noise is addressed by place: the second draws would be the first", "a width")


def _mark(program: ProgramOp) -> None:
    made: dict[SSAValue, set[ProposeOp]] = {}
    before: set[ProposeOp] = set()
    most = 0.0
    for op in program.body.block.ops:
        if isinstance(op, ProposeOp):
            seen = set().union(*(made.get(v, set()) for v in op.operands))
            if before - seen and op.own.data == POINT:  # who draws finds nothing anyway
                op.properties["blind"] = UnitAttr()
            before.add(op)
            made[op.out] = seen | {op}
            depth, width = value_of(op.depth) or 1, value_of(op.width) or 1
            most += most + 1 if op.how.data == OVER else depth if width == 1 and op.how.data == ON else MAX_NODES + 1
            if most > MAX_NODES:
                op.properties["bounded"] = UnitAttr()
        elif op.results:  # what was dropped is drafted, and seen by nobody
            dropped = isinstance(op, AgreeOp | PruneOp)
            made[op.results[0]] = set() if dropped else set().union(*(made.get(v, set()) for v in op.operands))
