"""Code generation: a lowered program as Python source for one step. Bounded loops with break, no dispatch, and nothing that the
facts of the batch rule out. Equal, token for token, to the interpreter."""

import json
import re
from collections.abc import Callable
from typing import Any

from xdsl.ir import Operation, SSAValue

from outrider.compiler import forest, step
from outrider.compiler.interpret import budget_of
from outrider.compiler.passes.inline_early_exit import EARLY_EXIT
from outrider.compiler.step import Done, Facts, Now, Parts
from outrider.core import tree
from outrider.core.sampling import decided
from outrider.ir.deciding import AcceptOp, ProgramOp, ScoreOp
from outrider.ir.drafting import AgreeOp, EmptyOp, ProposeOp, PruneOp, UnionOp
from outrider.ir.types import FREE, ON, OVER, DraftType, parents_of, rule_of, shown, value_of
from outrider.verify.exact import walk

Step = Callable[[Parts, Now], Done]
NAMES: dict[str, Any] = {
    "Done": Done, "Forest": forest.Forest, "tree": tree, "decided": decided, "walk": walk, "accept": step.accept,
    "agreed": forest.agreed, "usual": forest.usual,
}  # fmt: skip


def source(program: ProgramOp, facts: Facts, bits: dict[str, int]) -> str:
    """The text of `step(parts, now)` for a lowered program, under facts."""
    return _Writer(program, facts, bits).text()


def compiled(program: ProgramOp, facts: Facts, bits: dict[str, int]) -> Step:
    """A lowered program as a function."""
    scope = dict(NAMES)
    exec(compile(text := source(program, facts, bits), f"<step {program.sym_name.data}>", "exec"), scope)  # type: ignore[attr-defined]
    made: Step = scope["step"]
    made.source = text  # type: ignore[attr-defined]
    return made


class _Writer:
    """Writes operations one after the other. `names`: of values, the expression for its nodes."""

    def __init__(self, program: ProgramOp, facts: Facts, bits: dict[str, int]) -> None:
        self.program, self.facts, self.bits = program, facts, bits
        rule = rule_of(program.body.block.last_op)  # type: ignore[arg-type]
        assert rule is not None
        self.rule, self.budget, self.lines = rule, budget_of(program), list[str]()
        self.weighed: SSAValue | None = None  # what the controller leaves of all that is drafted
        self.pruned = self.usual = False  # is anything left out; is what is verified all, or what the controller left of all?
        self.names: dict[SSAValue, str] = {}
        self.made: dict[SSAValue, frozenset[Operation]] = {}  # the proposals whose nodes a value holds
        self.all: frozenset[Operation] = frozenset()

    def text(self) -> str:
        ops = list(self.program.body.block.ops)
        self.say("def step(parts, now):")
        self.say(f"    # {', '.join(k for k, v in self.facts._asdict().items() if v) or 'any batch'}")
        first = len(self.lines)
        self.say("    seqs, settings, noise, clock, reason = now.seqs, now.settings, now.noise, now.clock, now.reason")
        if any(isinstance(op, ProposeOp) for op in ops):
            self.say(f"    forest = Forest(parts, now, {self.budget}, free={self.rule in FREE})")
            self.say("    full, levels = forest.full, forest.levels")
        else:
            self.say(f"    full, levels = tree.empty({self.rows}), {{}}")
        for op in ops:
            self.op(op)
        if self.usual and self.lean(ops):
            self.lines[first:] = self.call(ops)
        written = "\n".join(self.lines)
        return "\n".join(line for line in self.lines if not _idle(line, written)) + "\n"

    @property
    def rows(self) -> str:
        return "1" if self.facts.one else "len(seqs)"

    def say(self, line: str) -> None:
        self.lines.append(line.rstrip("\n"))

    def op(self, op: Operation) -> None:
        if isinstance(op, ProposeOp):
            self.propose(op)
        elif isinstance(op, AgreeOp):
            self.name(op, f"agreed(full, {self.names[op.at]}, {self.bits[op.drafter.data]})", part=True)
        elif isinstance(op, PruneOp):
            self.prune(op)
        elif isinstance(op, UnionOp):
            self.name(op, "sorted({" + ", ".join(f"*{self.names[v]}" for v in op.arms) + "})")
        elif isinstance(op, EmptyOp):
            self.names[op.out], self.made[op.out] = "[]", frozenset()
        elif isinstance(op, ScoreOp):
            self.score(op)
        elif isinstance(op, AcceptOp):
            self.accept(op)

    def name(self, op: Operation, expression: str, *, own: Operation | None = None, part: bool = False) -> None:
        """Give the nodes of an operation a name. `own`: a proposal that made more; `part`: some of its operand's are left out."""
        value = op.results[0]
        made = frozenset().union(*(self.made.get(v, frozenset()) for v in op.operands)) | ({own} if own else set())
        self.made[value] = made if not part else made - self.all
        self.names[value] = f"nodes_{len(self.names)}"
        self.say(f"    {self.names[value]} = {'list(range(len(full)))' if self.whole(value) else expression}")

    def whole(self, value: SSAValue) -> bool:
        """Does a value hold all that is drafted by now?"""
        return self.made[value] == self.all

    def lean(self, ops: list[Operation]) -> bool:
        """Is it what nearly all steps do: one row, which asks for nothing, whose drafters each begin at its root, once, as far as its plan lets them?
        Machine code has that as a whole (`forest.usual`)."""
        names = [op.name_of for op in ops if isinstance(op, ProposeOp)]
        return (
            self.facts.one and self.facts.free and self.rule in FREE and not self.budget and len(set(names)) == len(names)
            and sum(isinstance(op, PruneOp) for op in ops) <= 1 and all(map(_simple, ops))
        )  # fmt: skip

    def call(self, ops: list[Operation]) -> list[str]:
        """The lines of a step that is lean."""
        made = [op for op in ops if isinstance(op, ProposeOp)]
        asked = "".join(f"({_quoted(op)}, {value_of(op.depth)}, {value_of(op.width)}), " for op in made).rstrip()
        return [
            *[f"    # {_words(op)}" for op in made],
            f'    return usual(parts, now, ({asked}), "{self.rule}", {not self.facts.told}, {self.pruned})  # ask, weigh',
        ]

    def propose(self, op: ProposeOp) -> None:
        seen = ", ".join(f"*{self.names[v]}" for v in op.operands if isinstance(v.type, DraftType))
        how, name, depth, width = op.how.data, _quoted(op), value_of(op.depth), value_of(op.width)
        self.say(f"    # {_words(op)}")
        if depth == 0:
            self.name(op, f"sorted({{{seen}}})" if seen else "[]")
            return
        self.all |= {op}
        self.weighed = None
        at = "[]" if how == ON else self.names[op.at]
        starts = f'forest.starts("{how}", {at}, {name}, own={isinstance(op.at.owner, AgreeOp)})'
        first_best = op.order is not None and op.order.data == "best-first"
        verb = "shaped" if op.shape is not None else "over" if how == OVER else "best_first" if first_best else "grow"
        size = f", {parents_of(op.shape.data)}" if op.shape is not None else "" if how == OVER else f", {depth}, {width}"
        self.say(f"    grown = forest.{verb}({name}, {starts}, {f'sorted({{{seen}}})' if seen else '[]'}{size})")
        self.say("    full = forest.full")
        self.name(op, "grown", own=op)

    def prune(self, op: PruneOp) -> None:
        idle = self.facts.told and self.facts.free and not self.budget and op.chain is None
        if idle or not any(isinstance(o, ProposeOp) for o in self.program.body.block.ops):
            self.names[op.out], self.made[op.out] = self.names[op.at], self.made[op.at]
            return
        self.pruned, self.weighed = True, op.out if self.whole(op.at) else None
        flags = f"chain={op.chain is not None}, unless_sampled={op.unless_sampled is not None}"
        self.name(op, f"forest.prune({self.names[op.at]}, {value_of(op.budget) or 0}, {flags})", part=True)
        self.say("    reason = forest.reason")

    def score(self, op: ScoreOp) -> None:
        self.usual = op.at == self.weighed if self.pruned else self.whole(op.at)
        roots = "[-1]" if self.facts.one else "tree.roots(len(seqs))"
        nodes = self.names[op.at]
        self.say('    clock.mark("draft")')
        places = roots if nodes == "[]" else f"[-1, *{nodes}]" if self.facts.one else f"[*{roots}, *{nodes}]"
        reusing = f', reusing=parts.drafters["{EARLY_EXIT}{shown(op.reusing)}"].model' if op.reusing is not None else ""
        self.say(f"    scores = parts.target.score(seqs, full, {places}{reusing})")
        self.say('    clock.mark("score")')

    def accept(self, op: AcceptOp) -> None:
        nodes = self.names[op.at]
        draft = "full"
        if not self.whole(op.at):
            draft = "draft"
            self.say(f"    draft = full if len({nodes}) == len(full) else tree.select(full, {nodes})")
        if self.facts.raw:
            self.say(f"    outcome = walk({draft}, decided(scores)[0])")
        else:
            self.say(f'    outcome = accept({draft}, scores, settings, noise, "{self.rule}")')
        self.say(f"    return Done(full, {nodes}, {draft}, levels, reason, scores, outcome)")


def _idle(line: str, written: str) -> bool:
    """Does a line give a name that is not used?"""
    name, _, rest = line.strip().partition(" = ")
    return bool(rest) and name.startswith("nodes_") and "forest." not in rest and len(re.findall(rf"\b{name}\b", written)) == 1


def _simple(op: Operation) -> bool:
    """Is it nothing but what `forest.usual` does?"""
    if isinstance(op, ProposeOp):
        return op.how.data == ON and not {"blind", "bounded", "order", "shape"}.intersection(op.properties)
    if isinstance(op, PruneOp):
        return not (value_of(op.budget) or op.chain or op.unless_sampled)
    return op.reusing is None if isinstance(op, ScoreOp) else not isinstance(op, AgreeOp)


def _quoted(op: ProposeOp) -> str:
    return json.dumps(op.name_of, ensure_ascii=False)


def _words(op: ProposeOp) -> str:
    size = ", depth 0" * (op.depth is not None) if op.how.data == OVER else f", depth {shown(op.depth)} width {shown(op.width)}"
    return f"propose {_quoted(op)} {op.how.data}{size}"
