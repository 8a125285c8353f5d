"""Steps by program and plan: found, or made. A plan's first steps are interpreted; one that comes back is hot, and gets code
written for it. Facts of the batch are part of the key, so code is never run where its facts do not hold: a batch of which they
do not begins a tier lower and is promoted in its turn."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.compiler.codegen import compiled
from outrider.compiler.interpret import interpret
from outrider.compiler.passes.inline_early_exit import EARLY_EXIT
from outrider.compiler.passes.lower import Lower, refuse
from outrider.compiler.passes.schedule import Schedule
from outrider.compiler.passes.specialize import fill
from outrider.compiler.pipeline import BACK, FRONT, Pipeline, find, passes
from outrider.compiler.step import Done, Facts, Now, Parts
from outrider.core.errors import OutriderError
from outrider.core.types import Plan
from outrider.ir.build import bound, pick, program
from outrider.ir.deciding import ScoreOp
from outrider.ir.drafting import AgreeOp, ProposeOp, RelayOp
from outrider.ir.text import parse, programs
from outrider.ir.types import LAWFUL, POINT, rule_of, shown

HOT = 3  # steps of a plan after which code is written for it
MOST = 512  # plans that are remembered
INTERPRETED, GENERATED = "interpreted", "generated"
Step = Callable[[Parts, Now], Done]
Stages = Sequence[Sequence[str]]
Asked = tuple[str, int, int]  # of a drafter: depth and width


@dataclass(slots=True)
class Entry:
    """What runs a plan now, under which tier, and how often it did. `module`: the plan's program."""

    plan: Plan
    module: Any
    run: Step
    tier: str = INTERPRETED
    uses: int = 0


@dataclass
class Jit:
    """stages, draws, chain: see ir.build.program. `hot`: steps before code is written (0: at once; None: never). `front`, `back`:
    the passes; `source`: a program to run in place of the default one, as a function of the rule; None: the default one."""

    stages: Stages
    draws: Mapping[str, bool]
    bits: Mapping[str, int]
    chain: bool = False
    hot: int | None = HOT
    front: Sequence[str] = FRONT
    back: Sequence[str] = BACK
    source: Callable[[str], Any] | None = None
    known: dict[tuple[str, tuple[Asked, ...], int, Facts], Entry] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    last: tuple[str, Plan, Facts, Entry] | None = None  # what was asked for the last time

    def get(self, rule: str, plan: Plan, facts: Facts, uses: int = 1) -> Entry:
        """The step of a plan under a rule and facts, for `uses` more uses."""
        if (last := self.last) is not None and last[1] is plan and last[2] is facts and last[0] == rule and last[3].tier == GENERATED:
            last[3].uses += uses
            return last[3]
        name = rule, plan.drafters, plan.budget, facts  # a tuple of tuples: a plan's own hash is written in Python
        entry = self.known.get(name)
        if entry is None:
            if len(self.known) >= MOST:
                self.known.pop(next(iter(self.known)))
            entry = self.known[name] = self._made(rule, plan)
        entry.uses += uses
        if entry.tier == INTERPRETED and self.hot is not None and entry.uses > self.hot:
            lowered = Pipeline([Lower()], each=False).run(entry.module)
            entry.run, entry.tier = compiled(programs(lowered)[0], facts, dict(self.bits)), GENERATED
        self.last = rule, plan, facts, entry
        return entry

    def _made(self, rule: str, plan: Plan) -> Entry:
        """A plan's program, to be interpreted."""
        module = self.planned(rule, plan, [name for name in self.back if name != "lower"])
        one = programs(module)[0]
        return Entry(plan, module, lambda parts, now: interpret(one, parts, now))

    def prepare(self, plans: Iterable[Plan], facts: Facts) -> None:
        """Write the code of plans that will be asked for, while nobody waits: of greedy requests, and of those of either rule."""
        for rule in ("greedy", "coupled", "exact"):
            for plan in plans:
                if self.hot is not None:
                    self.get(rule, plan, facts._replace(raw=rule == "greedy"), uses=self.hot + 1).uses = 0  # nobody has asked for it yet

    def module(self, rule: str) -> Any:
        """The program of a rule, as the passes before any plan leave it."""
        if rule not in self.modules:
            made = self.source(rule) if self.source else None
            made = made or program(self.stages, self.draws, rule, chain=self.chain)
            self.modules[rule] = Pipeline(passes(self.front)).run(made)
        return self.modules[rule]

    def planned(self, rule: str, plan: Plan, back: Sequence[str]) -> Any:
        """A copy of it with the plan's numbers in its holes."""
        made = self.module(rule).clone()
        fill(made, plan)
        order = " ".join(f"{name}:{i}" for i, (name, _, _) in enumerate(plan.drafters, 1))  # a plan names them in the order that pays
        made_by = [Schedule(costs=order) if name == "schedule" else find(name)() for name in back if name != "specialize"]
        return Pipeline(made_by, each=False).run(made)


def of_file(file: Path, drafters: Mapping[str, Any], *, chain: bool = False) -> Callable[[str], Any]:
    """A `source` of what a file says; `chain`: as strict steps do it. Raises OutriderError with the place of what is wrong, and for what cannot be
    run here."""
    try:
        module = parse(file.read_text("utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as bad:
        raise OutriderError(f"{file} cannot be read", str(bad), "the name of a text file") from bad
    for one in programs(module):
        asked = {op.drafter.data for op in one.body.block.ops if isinstance(op, ProposeOp | RelayOp | AgreeOp)}
        asked |= {EARLY_EXIT + shown(op.reusing) for op in one.body.block.ops if isinstance(op, ScoreOp) and op.reusing is not None}
        if missing := sorted(asked - set(drafters)):
            raise OutriderError(
                f"@{one.sym_name.data} asks '{missing[0]}' to draft", f"loaded are {sorted(drafters)}", f"drafters=[..., '{missing[0]}']"
            )  # type: ignore[attr-defined]
        rule = rule_of(one.body.block.last_op)  # type: ignore[arg-type]
        for op in one.body.block.ops:  # what is said of a draft must be so: the law rests on it
            if isinstance(op, ProposeOp | RelayOp) and rule in LAWFUL and op.own.data == POINT and getattr(drafters[op.drafter.data], "draws", True):
                raise OutriderError(f"'{op.drafter.data}' draws under '{rule}'", "the program says that its drafts are points", ": sampled")
    fill(tried := module.clone(), Plan(tuple((name, 1, 1) for name in drafters)))
    for one in programs(tried):
        refuse(one)
    bound(module, chain=chain)
    return lambda rule: pick(module, rule)
