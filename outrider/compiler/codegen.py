"""Code generation: a lowered program as Python source for one step. Bounded loops with break, no dispatch, and nothing that the
facts of the batch rule out. Equal, token for token, to the interpreter."""

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
    "agreed": forest.agreed,
}  # fmt: skip

LEVELS = """\
    # {text}
    frontier, level, first = {starts}, 0, len(full)
    while level < {depth} and frontier:
{ask}        frontier = {fitting}
        if not frontier:
            break
        full = {part}.extend(seqs, full, frontier, {width}, {bit}, settings, noise, levels={ahead}{on})
        deepest = [depth for n, depth in enumerate(full.depth) if depth > level and full.source[n] & {bit}]
        level = max(deepest, default=level + 1)
        frontier = [n for n, depth in enumerate(full.depth) if depth == level and full.source[n] & {bit}]
    if level:
        levels["{name}"] = level
        clock.mark("draft {name}")
"""


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
        self.names: dict[SSAValue, str] = {}
        self.made: dict[SSAValue, frozenset[Operation]] = {}  # the proposals whose nodes a value holds
        self.all: frozenset[Operation] = frozenset()

    def text(self) -> str:
        ops = list(self.program.body.block.ops)
        self.say("def step(parts, now):")
        self.say(f"    # {', '.join(k for k, v in self.facts._asdict().items() if v) or 'any batch'}")
        self.say("    seqs, settings, noise, clock, reason = now.seqs, now.settings, now.noise, now.clock, now.reason")
        if any(isinstance(op, ProposeOp) for op in ops):
            self.say(f"    forest = Forest(parts, now, {self.budget}, free={self.rule in FREE})")
            self.say("    room, full, levels = forest.room, forest.full, forest.levels")
        else:
            self.say(f"    full, levels = tree.empty({self.rows}), {{}}")
        for op in ops:
            self.op(op)
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

    def propose(self, op: ProposeOp) -> None:
        self.all |= {op}
        seen = ", ".join(f"*{self.names[v]}" for v in op.operands if isinstance(v.type, DraftType))
        again = any(isinstance(o, ProposeOp) and o.name_of == op.name_of for o in self.all if o is not op)
        plain = op.how.data == ON and "blind" not in op.properties and (op.order is None or op.order.data == "level") and op.shape is None
        if plain and self.facts.free and not again:
            self.levels(op)
            self.name(op, f"[*sorted({{{seen}}}), *range(first, len(full))]" if seen else "list(range(first, len(full)))", own=op)
            return
        how, name = op.how.data, op.name_of
        at = "[]" if how == ON else self.names[op.at]
        starts = f'forest.starts("{how}", {at}, "{name}", own={isinstance(op.at.owner, AgreeOp)})'
        size = "" if how == OVER else f", {value_of(op.depth)}, {value_of(op.width)}"
        if op.shape is not None:
            size = f", {parents_of(op.shape.data)}"
        verb = (
            "shaped"
            if op.shape is not None
            else "over"
            if how == OVER
            else "best_first"
            if op.order is not None and op.order.data == "best-first"
            else "grow"
        )
        self.say(f"    # {_words(op)}")
        self.say(f'    grown = forest.{verb}("{name}", {starts}, {f"sorted({{{seen}}})" if seen else "[]"}{size})')
        self.say("    full = forest.full")
        self.name(op, "grown", own=op)

    def levels(self, op: ProposeOp) -> None:
        """Level by level from the roots: what nearly all steps do."""
        name, one, bounded = op.name_of, self.facts.one, "bounded" in op.properties or self.rule not in FREE
        depth, width = value_of(op.depth), value_of(op.width)
        ask = "" if self.facts.told else f'        frontier = parts.controller.more(seqs, "{name}", full, frontier)\n'
        if bounded:
            fits, ahead = "forest.fitting(frontier, across)", f"1 if across > 1 else forest.ahead(frontier, {depth} - level)"
            self.say(f"    across = min({width}, max(forest.caps))")
        elif one:
            fits, ahead = "frontier if room[0] > level else ()", f"min({depth}, room[0]) - level"
        else:
            fits = "[p for p in frontier if room[~p if p < 0 else full.row[p]] > level]"
            ahead = f"min([{depth}, *[room[~p if p < 0 else full.row[p]] for p in frontier]]) - level"
        part = f'parts.drafters["{name}"]'
        for line in LEVELS.format(
            text=_words(op), starts="[-1]" if one else "tree.roots(len(seqs))", depth=depth, ask=ask, fitting=fits, part=part,
            width=width if not bounded else "across", bit=self.bits[name], ahead=ahead if width == 1 or bounded else 1, name=name,
            on="" if self.facts.told else ", on=parts.controller.on",
        ).splitlines():  # fmt: skip
            self.say(line)
            if bounded and "full = parts" in line:
                self.say("        forest.full = full")
        self.say("    forest.full = full")

    def prune(self, op: PruneOp) -> None:
        idle = self.facts.told and self.facts.free and not self.budget and op.chain is None
        if idle or not any(isinstance(o, ProposeOp) for o in self.program.body.block.ops):
            self.names[op.out], self.made[op.out] = self.names[op.at], self.made[op.at]
            return
        flags = f"chain={op.chain is not None}, unless_sampled={op.unless_sampled is not None}"
        self.name(op, f"forest.prune({self.names[op.at]}, {value_of(op.budget) or 0}, {flags})", part=True)
        self.say("    reason = forest.reason")

    def score(self, op: ScoreOp) -> None:
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


def _words(op: ProposeOp) -> str:
    size = "" if op.how.data == OVER else f", depth {shown(op.depth)} width {shown(op.width)}"
    return f'propose "{op.name_of}" {op.how.data}{size}'
