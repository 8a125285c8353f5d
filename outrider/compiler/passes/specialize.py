"""Profile-guided optimisation: the holes are filled by a plan, or by what a profile says of this machine and this pair. Who is not
in the plan, or never pays, proposes to depth 0, which folding then removes. A drafter of which the profile knows how often its
k-th likeliest guess is right may draw a fixed tree in place of a chain."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.passes import ModulePass

from outrider.core.config import nearest, whole
from outrider.core.errors import OutriderError
from outrider.core.types import Plan
from outrider.ir.drafting import ProposeOp, PruneOp, RelayOp
from outrider.ir.text import programs
from outrider.ir.types import ON, OVER, POINT, number
from outrider.measure.cost import DEEPEST, Costs, Situation, best_tree, expected_accepted, named

UNSEEN = 0.6  # acceptance of a drafter that a profile says nothing of
SIZES = (1, 2, 4, 8, 16, 32)  # nodes of the trees that are weighed
TALLEST = 8  # levels of one


def plan_of(text: str, budget: int = 0) -> Plan:
    """A plan from words like `lookup:8 model:4x2`: drafter, depth, and width where it is not 1."""
    drafters = []
    for word in text.split():
        name, _, size = word.rpartition(":")
        depth, _, width = size.partition("x")
        if not name or whole(depth) is None or whole(width or "1") is None:
            raise OutriderError(f"'{word}' is no part of a plan", "", "DRAFTER:DEPTH or DRAFTER:DEPTHxWIDTH, as in 'lookup:8 model:4x2'")
        drafters.append((name, int(depth), int(width or 1)))
    return Plan(tuple(drafters), budget)


@dataclass(frozen=True)
class Specialize(ModulePass):
    """`plan`: words of `plan_of`; `budget`: nodes a row, 0 for none; `profile`: a file of `outrider profile`, in place of a plan; `trees`: by
    that file also fixed trees, where they may stand."""

    name = "specialize"
    plan: str = ""
    budget: int = 0
    profile: str = ""
    trees: bool = False

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise OutriderError(f"budget={self.budget}", "no step verifies fewer nodes than none", "budget=8, or 0 for no limit")

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        if self.trees and not self.profile:
            raise OutriderError(
                "trees are chosen by a profile", "no file is named", 'specialize{profile="FILE" trees=true}, or schedule{trees="..."}'
            )
        proposals = [o for p in programs(op) for o in p.body.block.ops if isinstance(o, ProposeOp | RelayOp)]
        names = list(dict.fromkeys(o.drafter.data for o in proposals))
        for name, _, _ in plan_of(self.plan).drafters:
            if name not in names:
                raise nearest(name, names, "drafter of this program")
        data = _read(Path(self.profile)) if self.profile else {}
        branching = _branching(op) if self.trees else []
        fill(op, profiled(data, names, self.budget) if self.profile else plan_of(self.plan, self.budget))
        best = grown(data, names, self.budget) if branching else {}
        for one in branching:
            if one.name_of in best:
                draw(one, best[one.name_of])


def _branching(module: ModuleOp) -> list[ProposeOp]:
    """Proposals that may be trees of the likeliest guesses: they start at the roots, choose and do not draw, all that they propose may be
    verified (strict programs verify one path), and no program fixed their size."""
    found: list[ProposeOp] = []
    for program in programs(module):
        ops = list(program.body.block.ops)
        if not any(isinstance(o, PruneOp) and o.chain is not None for o in ops):
            found += [o for o in ops if isinstance(o, ProposeOp) and o.how.data == ON and o.own.data == POINT and _open(o)]
    return found


def _open(one: ProposeOp) -> bool:
    return one.depth is None and one.width is None and one.order is None and one.shape is None


def draw(one: ProposeOp, parents: list[int]) -> None:
    """Fix what a proposal draws: the tree of these parents. A chain needs no shape, nor does nothing."""
    depth: list[int] = []
    for parent in parents:
        depth.append(1 if parent < 0 else depth[parent] + 1)
    tallest = max(depth, default=0)
    one.properties.pop("shape", None)
    if tallest < len(parents):
        one.shape = StringAttr(" ".join(map(str, parents)))
    one.depth, one.width = number(tallest), number(max(Counter(parents).values(), default=1))


def fill(module: ModuleOp, plan: Plan) -> None:
    """Put a plan's numbers into the holes. What a program fixed itself stays, unless the plan leaves its drafter out."""
    wanted = {name: (depth, width) for name, depth, width in plan.drafters}
    for op in [o for p in programs(module) for o in p.body.block.ops]:
        if isinstance(op, RelayOp | ProposeOp):
            depth, width = wanted.get(op.drafter.data, (0, 1))
            over = isinstance(op, ProposeOp) and op.how.data == OVER  # one level and no other, or none
            if depth == 0 or (op.depth is None and not over):
                op.depth = number(depth)
            if isinstance(op, ProposeOp) and op.width is None and not over:
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
    with _understood():
        costs, at = _costs(data)
        chosen = []
        for name in names:
            first = sum(_share(data, f"{name} s {last}") for last in range(4)) / 4
            after = _share(data, f"{name} ?")
            gain = {k: 1 + sum(first * after**i for i in range(k)) for k in range(DEEPEST + 1)}
            if depth := max(gain, key=lambda k: gain[k] / _cost(costs, name, at, k, k)):
                chosen.append((name, depth, 1))
    return Plan(tuple(chosen), budget)


def grown(data: Mapping[str, Any], names: list[str], budget: int = 0) -> dict[str, list[int]]:
    """Per drafter of which a profile knows how often its k-th likeliest guess is right: the parents of what is best by itself in the best
    known situation, of no more nodes than a `budget`. Weighed are nothing, chains, and the best tree of each of SIZES."""
    found = {}
    with _understood():
        costs, at = _costs(data)
        for name in names:
            if ranks := _ranks(data, name):
                chains = [list(range(-1, n - 1)) for n in range(DEEPEST + 1)]
                shapes = [*chains, *(best_tree(ranks, min(n, budget or n), TALLEST) for n in SIZES)]
                lawful = [some for some in shapes if len(some) <= (budget or DEEPEST)]
                found[name] = max(lawful, key=lambda s: (1 + expected_accepted(s, ranks)) / _cost(costs, name, at, len(s), calls(s)))
    return found


def calls(parents: list[int]) -> int:
    """Forwards of its drafter that drawing a tree takes: one a level for each number of children that nodes of that level have."""
    level = {-1: 0}
    for n, parent in enumerate(parents):
        level[n] = level[parent] + 1
    return len({(level[parent], children) for parent, children in Counter(parents).items()})


@contextmanager
def _understood() -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as bad:
        raise OutriderError(
            "this profile says nothing of what steps cost", f"{type(bad).__name__}: {bad}", "a file that `outrider profile` wrote"
        ) from bad


def _costs(data: Mapping[str, Any]) -> tuple[Costs, Situation]:
    """What steps cost, and the situation of which most is known."""
    costs = Costs({})
    costs.take(data["costs"])
    return costs, named(max(data["costs"]["verify"], key=lambda name: len(data["costs"]["verify"][name]["seen"])))


def _share(data: Mapping[str, Any], cell: str, unseen: float = UNSEEN) -> float:
    """How often guesses of a kind came true; `unseen` is believed beforehand, and worth two of them."""
    known = data.get("next", {}).get(cell, [0.0, unseen])
    try:
        seen, share = map(float, known)
    except (ValueError, TypeError):
        seen = share = math.nan
    if not (0 <= seen < math.inf and 0 <= share <= 1):
        raise OutriderError(
            f"the profile's '{cell}' is {known!r}",
            "how many guesses were counted, and the share that came true",
            "a file that `outrider profile` wrote",
        )
    return (seen * share + 2 * unseen) / (seen + 2)


def _ranks(data: Mapping[str, Any], name: str) -> list[float]:
    """Chances of a drafter's likeliest, second, ... guess, as far as they were ever right; [] where none were counted. A rank that came out
    above the one before it did so by chance."""
    counted = itertools.takewhile(lambda cell: cell in data.get("next", {}), (f"{name} r{k}" for k in itertools.count()))
    chances = [_share(data, cell, 0.0 if k else UNSEEN) for k, cell in enumerate(counted)]
    return [p for p in itertools.accumulate(chances, min) if p > 0]


def _cost(costs: Costs, name: str, at: Situation, nodes: int, levels: int) -> float:
    """Of a step that drafts in so many levels and verifies so many nodes, in plain steps."""
    verify = costs.verifying(at)
    assert verify is not None
    return verify.shape[nodes] + (costs.drafting_share(name, at, levels) if levels else 0.0)
