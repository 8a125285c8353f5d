"""What programs mean: every operation of a specialised program, one after the other. Generated code must equal this.

A draft is a set of nodes of one forest, which all proposals of a step grow; a proposal does not find what it may not see.
"""

from typing import Any

from xdsl.ir import Operation, SSAValue

from outrider.compiler.forest import Forest, agreed
from outrider.compiler.passes.inline_early_exit import EARLY_EXIT
from outrider.compiler.passes.lower import refuse
from outrider.compiler.step import Done, Now, Parts, accept
from outrider.core import tree
from outrider.core.types import Draft
from outrider.ir.deciding import AcceptOp, ProgramOp, ScoreOp
from outrider.ir.drafting import AgreeOp, ContextOp, EmptyOp, ProposeOp, PruneOp, RelayOp, UnionOp
from outrider.ir.types import AFTER, FREE, ON, OVER, DraftType, parents_of, rule_of, shown, value_of


def interpret(program: ProgramOp, parts: Parts, now: Now) -> Done:
    """Run a specialised program on a step. Raises OutriderError where a program has no meaning yet."""
    refuse(program)
    rule = rule_of(program.body.block.last_op)  # type: ignore[arg-type]
    assert rule is not None
    forest, known = Forest(parts, now, budget_of(program), free=rule in FREE), dict[SSAValue, Any]()
    for op in program.body.block.ops:
        if isinstance(op, ScoreOp):
            now.clock.mark("draft")
            exit_ = {} if op.reusing is None else {"reusing": getattr(parts.drafters[EARLY_EXIT + shown(op.reusing)], "model", None)}
            known[op.out] = parts.target.score(now.seqs, forest.full, [*tree.roots(forest.full.rows), *known[op.at]], **exit_)
            now.clock.mark("score")
        elif isinstance(op, AcceptOp):
            nodes, scores, draft = known[op.at], known[op.scores], _of(forest.full, known[op.at])
            done = Done(forest.full, nodes, draft, forest.levels, forest.reason, scores, accept(draft, scores, now.settings, now.noise, rule))
        elif op.results and not isinstance(op, ContextOp):
            known[op.results[0]] = _nodes(op, forest, known)
    return done


def _of(full: Draft, nodes: list[int]) -> Draft:
    return full if len(nodes) == len(full) else tree.select(full, nodes)


def _nodes(op: Operation, forest: Forest, known: dict[SSAValue, Any]) -> list[int]:
    """The nodes of an operation's draft, ascending."""
    if isinstance(op, ProposeOp):
        return _propose(op, forest, known)
    if isinstance(op, RelayOp):
        return _relay(op, forest, known[op.at])
    if isinstance(op, AgreeOp):
        return agreed(forest.full, known[op.at], forest.parts.bits[op.drafter.data])
    if isinstance(op, PruneOp):
        flags = {"chain": op.chain is not None, "unless_sampled": op.unless_sampled is not None}
        return forest.prune(known[op.at], value_of(op.budget) or 0, **flags)
    assert isinstance(op, UnionOp | EmptyOp)
    return sorted({n for v in op.operands for n in known[v]})


def _propose(op: ProposeOp, forest: Forest, known: dict[SSAValue, Any]) -> list[int]:
    seen = sorted({n for v in op.operands if isinstance(v.type, DraftType) for n in known[v]})
    how, name = op.how.data, op.name_of
    if value_of(op.depth) == 0:
        return seen
    starts = forest.starts(how, [] if how == ON else known[op.at], name, own=isinstance(op.at.owner, AgreeOp))
    if how == OVER:
        return forest.over(name, starts, seen)
    if op.shape is not None:
        return forest.shaped(name, starts, seen, parents_of(op.shape.data))
    grow = forest.best_first if op.order is not None and op.order.data == "best-first" else forest.grow
    return grow(name, starts, seen, value_of(op.depth) or 0, value_of(op.width) or 1)


def _relay(op: RelayOp, forest: Forest, nodes: list[int]) -> list[int]:
    """By its definition: over all of a draft, what agrees, and on from there."""
    name = op.drafter.data
    over = forest.over(name, forest.starts(OVER, nodes, name), nodes)
    path = agreed(forest.full, over, forest.parts.bits[name])
    return forest.grow(name, forest.starts(AFTER, path, name, own=True), path, value_of(op.depth) or 0, 1)


def budget_of(program: ProgramOp) -> int:
    """The nodes a row that its prune leaves; 0 for no bound."""
    return max([value_of(o.budget) or 0 for o in program.body.block.ops if isinstance(o, PruneOp)], default=0)
