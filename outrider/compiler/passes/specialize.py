"""Profile-guided optimisation: the holes are filled by a plan, or by what a profile says of this machine and this pair. Who is not
in the plan, or never pays, proposes to depth 0, which folding then removes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from outrider.core.errors import OutriderError
from outrider.core.types import Plan
from outrider.ir.drafting import ProposeOp, PruneOp, RelayOp
from outrider.ir.text import programs
from outrider.ir.types import OVER, number
from outrider.measure.cost import DEEPEST, Costs, Situation, named

UNSEEN = 0.6  # acceptance of a drafter that a profile says nothing of


def plan_of(text: str, budget: int = 0) -> Plan:
    """A plan from words like `lookup:8 model:4x2`: drafter, depth, and width where it is not 1."""
    drafters = []
    for word in text.split():
        name, _, size = word.rpartition(":")
        depth, _, width = size.partition("x")
        if not name or not depth.isdigit() or not (width or "1").isdigit():
            raise OutriderError(f"'{word}' is no part of a plan", "", "DRAFTER:DEPTH or DRAFTER:DEPTHxWIDTH, as in 'lookup:8 model:4x2'")
        drafters.append((name, int(depth), int(width or 1)))
    return Plan(tuple(drafters), budget)


@dataclass(frozen=True)
class Specialize(ModulePass):
    """`plan`: words of `plan_of`; `budget`: nodes a row, 0 for none; `profile`: a file of `outrider profile`, in place of a plan."""

    name = "specialize"
    plan: str = ""
    budget: int = 0
    profile: str = ""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        proposals = [o for p in programs(op) for o in p.body.block.ops if isinstance(o, ProposeOp | RelayOp)]
        names = list(dict.fromkeys(o.drafter.data for o in proposals))
        fill(op, profiled(_read(Path(self.profile)), names, self.budget) if self.profile else plan_of(self.plan, self.budget))


def fill(module: ModuleOp, plan: Plan) -> None:
    """Put a plan's numbers into the holes. What a program fixed itself stays, unless the plan leaves its drafter out."""
    wanted = {name: (depth, width) for name, depth, width in plan.drafters}
    for op in [o for p in programs(module) for o in p.body.block.ops]:
        if isinstance(op, RelayOp) or (isinstance(op, ProposeOp) and op.how.data != OVER):
            depth, width = wanted.get(op.drafter.data, (0, 1))
            if op.depth is None or depth == 0:
                op.depth = number(depth)
            if isinstance(op, ProposeOp) and op.width is None:
                op.width = number(max(width, 1))
        elif isinstance(op, PruneOp) and op.budget is None:
            op.budget = number(plan.budget)


def _read(file: Path) -> Mapping[str, Any]:
    try:
        data: Mapping[str, Any] = json.loads(file.read_text())["data"]
        return data
    except (OSError, ValueError, KeyError, TypeError) as bad:
        raise OutriderError(f"{file} is no profile", f"{type(bad).__name__}: {bad}", "a file that `outrider profile` wrote") from bad


def profiled(data: Mapping[str, Any], names: list[str], budget: int = 0) -> Plan:
    """By what a profile knows, per drafter the depth that is best by itself, by acceptance and cost in its best known situation; none
    where even that does not pay."""
    try:
        costs = Costs({})
        costs.take(data["costs"])
        at = named(max(data["costs"]["verify"], key=lambda name: len(data["costs"]["verify"][name]["seen"])))
        chosen = []
        for name in names:
            first = sum(_share(data, f"{name} s {last}") for last in range(4)) / 4
            after = _share(data, f"{name} ?")
            gain = {k: 1 + sum(first * after**i for i in range(k)) for k in range(DEEPEST + 1)}
            if depth := max(gain, key=lambda k: gain[k] / _cost(costs, name, at, k)):
                chosen.append((name, depth, 1))
    except (ValueError, KeyError, TypeError, AttributeError) as bad:
        raise OutriderError(
            "this profile says nothing of what steps cost", f"{type(bad).__name__}: {bad}", "a file that `outrider profile` wrote"
        ) from bad
    return Plan(tuple(chosen), budget)


def _share(data: Mapping[str, Any], cell: str) -> float:
    """How often guesses of a kind came true."""
    seen, share = data.get("next", {}).get(cell, [0.0, UNSEEN])
    return float((seen * share + 2 * UNSEEN) / (seen + 2))


def _cost(costs: Costs, name: str, at: Situation, depth: int) -> float:
    """Of a step that drafts and verifies a chain, in plain steps."""
    verify = costs.verifying(at)
    assert verify is not None
    return verify.shape[depth] + (costs.drafting_share(name, at, depth) if depth else 0.0)
