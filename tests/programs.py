"""Random programs over the drafters and rules that exist, and engines that run them. Test modules share these."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from contracts import request, run
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, Region, SSAValue

from outrider.compiler.passes.lower import refuse
from outrider.control.controller import Adaptive
from outrider.control.fixed import Told
from outrider.control.tables import Tables
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.types import Draft, Limits, Places, Plan, Sequence, StepRecord
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.ir.deciding import AcceptOp, CommitOp, ProgramOp, ScoreOp
from outrider.ir.drafting import ContextOp, EmptyOp, ProposeOp, PruneOp, RelayOp, UnionOp
from outrider.ir.text import programs, verify
from outrider.ir.types import AFTER, ON, OVER, POINT, SAMPLED, kind_of
from outrider.measure.cost import Costs
from outrider.models.toy import ToyModel
from outrider.runtime.engine import Engine

VOCAB = 6
TREE = """outrider.program @tree {
  %text = outrider.context
  %draft = outrider.propose "model" on %text depth ? width ? : point
  %kept = outrider.prune %draft budget ?
  %scores = outrider.score %kept on %text by "target"
  %outcome = outrider.accept %kept, %scores by "coupled"
  outrider.commit %outcome
}
"""
NAMES = ("lookup", "model", "weak")
NO_LIMITS = Limits()


def random_program(rng: random.Random, rule: str) -> ModuleOp:
    """A program that verifies and has a step: up to six operations on drafts, some of them dead, some the same twice."""
    while True:
        module = _made(rng, rule)
        try:
            verify(module)
            refuse(programs(filled(module))[0])
            return module
        except OutriderError:
            continue


def filled(module: ModuleOp) -> ModuleOp:
    from outrider.compiler.passes.specialize import fill

    fill(copy := module.clone(), Plan(tuple((n, 2, 1) for n in NAMES)))
    return copy


def _made(rng: random.Random, rule: str) -> ModuleOp:
    text = ContextOp()
    ops: list[Operation] = [text]
    drafts: list[SSAValue] = []
    own = {n: SAMPLED if rule == "exact" and n != "lookup" else POINT for n in NAMES}
    for _ in range(rng.randint(1, 6)):
        name, verb = rng.choice(NAMES), rng.choice(["on", "on", "on", "beside", "after", "over", "relay", "prune", "union", "empty"])
        if verb == "on" or not drafts:
            op: Operation = EmptyOp() if verb == "empty" else ProposeOp(name, text.out, own[name], how=ON)
        elif verb == "beside":
            op = ProposeOp(
                name, text.out, own[name], how=ON, beside=rng.sample(drafts, rng.randint(1, len(drafts))), order=rng.choice([None, "best-first"])
            )
        elif verb == "after":
            op = ProposeOp(name, rng.choice(drafts), own[name], how=AFTER, depth=rng.choice([None, 1, 2]))
        elif verb == "over":
            op = ProposeOp(name, rng.choice(drafts), own[name], how=OVER)
        elif verb == "relay":
            op = RelayOp(name, rng.choice(drafts), own[name])
        elif verb == "prune":
            op = PruneOp(one := rng.choice(drafts), rng.choice([None, 2, 5]), chain=rng.random() < 0.2, unless_sampled=kind_of(one) != POINT)
        elif verb == "union":
            op = UnionOp(rng.sample(drafts, rng.randint(1, len(drafts))))
        else:
            op = EmptyOp()
        ops.append(op)
        drafts.append(op.results[0])
    last = UnionOp(rng.sample(drafts, rng.randint(1, len(drafts))))
    score = ScoreOp(last.out, text.out)
    accept = AcceptOp(last.out, score.out, rule)
    return ModuleOp([ProgramOp("random", Region(Block([*ops, last, score, accept, CommitOp(accept.out)])))])


def random_plan(rng: random.Random) -> Plan:
    return Plan(tuple((n, rng.randint(0, 4), rng.randint(1, 3)) for n in rng.sample(NAMES, rng.randint(0, 3))), rng.choice([0, 0, 3, 7]))


def contrary(draft: Draft) -> list[float]:
    """Survivals where a guess is the likelier to be accepted the less its drafter thinks of it."""
    return tree.survival(replace(draft, score=[1 - score for score in draft.score]))


class Contrary(Told):
    """A controller by which drafters are wrong about themselves."""

    def survivals(self, seqs: list[Sequence], draft: Draft) -> list[float]:
        return contrary(draft)


class Picky(Told):
    """A controller that has a say, which hangs on nothing but what it is shown."""

    def survivals(self, seqs: list[Sequence], draft: Draft) -> list[float]:
        return [(7 * token + 3 * depth) % 5 / 5 for token, depth in zip(draft.token, draft.depth, strict=True)]

    def more(self, seqs: list[Sequence], name: str, draft: Draft, frontier: Places) -> Places:
        return [p for p in frontier if (p + len(draft) + len(name)) % 5]

    def fill(self, seqs: list[Sequence], draft: Draft, reason: str) -> tuple[list[int] | None, str]:
        kept: set[int] = set()
        for n, parent in enumerate(draft.parent):
            if (parent < 0 or parent in kept) and (draft.token[n] + draft.depth[n]) % 4:
                kept.add(n)
        return sorted(kept), "picked"


def scheduler(say: object) -> Adaptive:
    """The adaptive scheduler over the drafters below, all cheap enough to be asked; it chooses its own plans."""
    tables = Tables(dict(zip(NAMES, (1, 2, 4), strict=True)), Costs(dict.fromkeys(NAMES, 0.02)))
    return Adaptive(tables, lambda: "", 10.0)


def ticks() -> Callable[[], float]:
    """A clock of which every look takes a millisecond."""
    count = itertools.count()
    return lambda: 1e-3 * next(count)


def written(source: Callable[[str], ModuleOp], plans: Callable[[], Plan], rule: str, *, rows: int = 2, control: Callable[..., Any] = Told, seed: int = 0,
            tokens: int = 10, limits: Limits = NO_LIMITS, **jit: Any) -> tuple[list[list[int]], list[StepRecord], Engine]:  # fmt: skip
    """The texts of three requests under a program, the records of their steps, and the engine."""
    target = ToyModel(VOCAB, 5, rows=rows, scale=1.5)
    drafters = {
        "lookup": Lookup(floor=0.0),
        "model": ModelDrafter(ToyModel(VOCAB, 5, rows=rows, scale=1.5, blend=(8, 0.4), name="draft"), "model"),
        "weak": ModelDrafter(ToyModel(VOCAB, 77, rows=rows, name="weak draft"), "weak"),
    }
    engine = Engine(target, drafters, control(lambda seqs: (plans(), "random")), rows, source=source, **jit)
    engine.now = ticks()
    heat = {} if rule == "greedy" else {"temperature": 0.9, "rule": rule}
    asked = [replace(request([1 + i, 2, 3, 1, 2, 3][: 3 + i], f"p{i}", seed=seed + i, max_tokens=tokens, **heat), limits=limits) for i in range(3)]
    seqs = run(engine, asked)
    return [s.generated for s in seqs], list(engine.ring), engine
