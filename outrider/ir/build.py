"""Programs from settings: what the runtime says when the user wrote no program."""

from collections.abc import Mapping, Sequence

from xdsl.dialects.builtin import ModuleOp, UnitAttr
from xdsl.ir import Block, Operation, Region, SSAValue

from outrider.ir.deciding import AcceptOp, CommitOp, ProgramOp, ScoreOp
from outrider.ir.drafting import ContextOp, EmptyOp, ProposeOp, PruneOp, RelayOp, UnionOp
from outrider.ir.text import programs
from outrider.ir.types import FREE, POINT, SAMPLED, kind_of


def program(stages: Sequence[Sequence[str]], draws: Mapping[str, bool], rule: str, *, chain: bool = False, name: str = "default") -> ModuleOp:
    """A module with one program. stages: drafters that guess side by side; of a stage of several, each takes over from the one
    before. draws: whether a drafter samples where the rule `rule` is not greedy or coupled. chain: verify one path a row."""
    text = ContextOp()
    text.out.name_hint = "text"
    ops: list[Operation] = [text]
    arms = [_stage(stage, {n: SAMPLED if draws[n] and rule not in FREE else POINT for n in stage}, text.out, ops) for stage in stages]
    last: Operation = EmptyOp() if not arms else UnionOp(arms)
    made = last.results[0]
    prune = PruneOp(made, chain=chain, unless_sampled=kind_of(made) != POINT)
    score = ScoreOp(prune.out, text.out)
    accept = AcceptOp(prune.out, score.out, rule)
    ops += [last, prune, score, accept, CommitOp(accept.out)]
    return ModuleOp([ProgramOp(name, Region(Block(ops)))])


def bound(module: ModuleOp, *, chain: bool = False) -> None:
    """Verify of every program what one last prune leaves, as the default one does: requests' limits, a plan's budget and the controller act there.
    chain: it leaves one path a row, of which all layers are run."""
    for one in programs(module):
        accept = next(op for op in one.body.block.ops if isinstance(op, AcceptOp))
        score, prune = accept.scores.owner, accept.at.owner
        assert isinstance(score, ScoreOp)
        if not isinstance(prune, PruneOp):
            prune = PruneOp(accept.at, unless_sampled=kind_of(accept.at) != POINT)
            one.body.block.insert_op_before(prune, score)
            score.operands[0] = accept.operands[0] = prune.out
        if chain:
            prune.chain = UnitAttr()
            score.properties.pop("reusing", None)


def pick(module: ModuleOp, rule: str) -> ModuleOp | None:
    """Of a module's programs the one for requests of a rule; greedy ones take any, at temperature 0. None where there is none."""
    rules = {_asked(p): p.body.block.last_op for p in reversed(programs(module))}
    last = rules.get(rule) or (next(iter(reversed(rules.values())), None) if rule == "greedy" else None)
    if last is None or last.parent_op() is None:
        return None
    chosen = last.parent_op().clone()  # type: ignore[union-attr]
    for op in chosen.walk():
        if isinstance(op, AcceptOp) and rule == "greedy" and op.rule.data != "greedy":
            op.cold = UnitAttr()
    return ModuleOp([chosen])


def _asked(one: ProgramOp) -> str | None:
    """The rule of the requests that a program is for: what is said at temperature 0 is for greedy ones alone."""
    accept = next((op for op in one.body.block.ops if isinstance(op, AcceptOp)), None)
    return None if accept is None else "greedy" if accept.cold is not None else accept.rule.data


def _stage(stage: Sequence[str], kinds: Mapping[str, str], text: SSAValue, ops: list[Operation]) -> SSAValue:
    """Who draws cannot take over, nor be taken over from: the last of such a stage guesses by itself."""
    if any(kind != POINT for kind in kinds.values()):
        stage = stage[-1:]
    ops.append(ProposeOp(stage[0], text, kinds[stage[0]]))
    for name in stage[1:]:
        ops.append(RelayOp(name, ops[-1].results[0], kinds[name]))
    return ops[-1].results[0]
