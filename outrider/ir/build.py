"""Programs from settings: what the runtime says when the user wrote no program."""

from collections.abc import Mapping, Sequence

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, Region, SSAValue

from outrider.ir.deciding import AcceptOp, CommitOp, ProgramOp, ScoreOp
from outrider.ir.drafting import ContextOp, EmptyOp, ProposeOp, PruneOp, RelayOp, UnionOp
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


def _stage(stage: Sequence[str], kinds: Mapping[str, str], text: SSAValue, ops: list[Operation]) -> SSAValue:
    """Who draws cannot take over, nor be taken over from: the last of such a stage guesses by itself."""
    if any(kind != POINT for kind in kinds.values()):
        stage = stage[-1:]
    ops.append(ProposeOp(stage[0], text, kinds[stage[0]]))
    for name in stage[1:]:
        ops.append(RelayOp(name, ops[-1].results[0], kinds[name]))
    return ops[-1].results[0]
