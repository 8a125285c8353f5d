"""List scheduling: proposals in the order of their costs, cheap ones first, so that what is dear sees what is there already; trees
grow best-first, the likeliest paths before all others of a level; and who has a device of its own is marked to draft on while the
target verifies, where that is expected to pay.
"""

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr, UnitAttr
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass

from outrider.compiler.passes.inline_early_exit import layers_of
from outrider.compiler.passes.specialize import draw
from outrider.core.config import nearest
from outrider.core.errors import OutriderError
from outrider.core.types import TARGET
from outrider.ir.deciding import ProgramOp
from outrider.ir.drafting import ProposeOp, PruneOp, UnionOp
from outrider.ir.text import programs
from outrider.ir.types import ON, OVER, value_of
from outrider.measure.cost import best_tree, overlapped

UNKNOWN = 1e9  # last
ORDERS = ("level", "best-first")


@dataclass(frozen=True)
class Schedule(ModulePass):
    """`trees`: words like `model:0.7,0.2,0.05`, how often a drafter's k-th likeliest child is right: it draws the best tree of `nodes` nodes, at most
    as deep as its plan. `costs`: words like `lookup:0.02 model:0.3`, what asking a drafter costs for all of its draft (none: the order stands), and
    `target:1`, what it costs to verify that; `devices`: words like `model:cuda-1`, drafters that do not share the target's device (which
    `target:cuda-0` names); `order`: best-first or level, of trees. `acceptance`: words like `model:0.8`, drafters that are overlapped with
    verification where that saves more than the share `margin` of a step, at a cost of `sync` a step for two devices to meet."""

    name = "schedule"
    costs: str = ""
    devices: str = ""
    order: str = "level"
    trees: str = ""
    nodes: int = 16
    acceptance: str = ""
    sync: float | int = 0.0
    margin: float | int = 0.05

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise nearest(self.order, ORDERS, "order")
        if min(self.sync, self.margin) < 0:
            raise OutriderError(f"sync={self.sync} margin={self.margin}", "neither can be negative", "sync=0.02 margin=0.05")

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        costs = {name: float(x) for name, x in _pairs(self.costs, number=True).items()}
        alike = {name: _acceptance(name, x) for name, x in _pairs(self.acceptance, number=True).items()}
        devices, trees = _pairs(self.devices), {name: _chances(name, ranks) for name, ranks in _pairs(self.trees).items()}
        for program in programs(op):
            for one in _proposals(program):
                if one.name_of in devices:
                    one.device = StringAttr(devices[one.name_of])
                if one.name_of in trees and one.how.data == ON:
                    draw(one, best_tree(trees[one.name_of], self.nodes, value_of(one.depth) or self.nodes))
                elif one.order is None and one.shape is None and (value_of(one.width) or 1) > 1 and one.how.data != OVER and self.order != "level":
                    one.order = StringAttr(self.order)
                if one.name_of in alike:
                    one.properties.pop("overlapped", None)  # decided anew
            if costs:
                _sort(program, costs)
            for one in _proposals(program):
                if one.name_of in alike and _apart(one, program, devices.get(TARGET)) and self._pays(one, alike[one.name_of], costs):
                    one.overlapped = UnitAttr()

    def _pays(self, one: ProposeOp, alpha: float, costs: dict[str, float]) -> bool:
        """Is a step shorter by the margin, if the drafter goes on while the target verifies?"""
        if missing := [name for name in (TARGET, one.name_of) if name not in costs]:
            raise OutriderError(
                f"the overlap of '{one.name_of}' with verification cannot be weighed", f"what '{missing[0]}' costs is not said",
                f'costs="{TARGET}:1 {one.name_of}:0.3"',
            )  # fmt: skip
        draft, verify, depth = costs[one.name_of], costs[TARGET], value_of(one.depth) or 1
        step = overlapped(alpha, depth, draft=draft, verify=verify, sync=self.sync, own=draft / depth)
        return draft + verify - step > self.margin * (draft + verify)


def _proposals(program: ProgramOp) -> list[ProposeOp]:
    return [o for o in program.body.block.ops if isinstance(o, ProposeOp)]


def _apart(one: ProposeOp, program: ProgramOp, target: str | None) -> bool:
    """May a drafter go on while the target verifies: on a device that nobody else is on, from a chain that waits for nobody, that
    nobody goes on from, and that is verified whole?"""
    others = [o.device.data for o in _proposals(program) if o is not one and o.device is not None]
    if one.device is None or one.device.data in (target, *others) or layers_of(one.name_of) is not None:
        return False
    depth, alone = value_of(one.depth) or 0, not any(isinstance(use.operation, ProposeOp) and use.index == 0 for use in one.out.uses)
    cut = any(0 < (value_of(o.budget) or 0) < depth for o in program.body.block.ops if isinstance(o, PruneOp))
    chain = one.how.data == ON and not one.beside and value_of(one.width) == 1 and one.shape is None and depth > 0
    return chain and alone and not cut


def _chances(name: str, ranks: str) -> list[float]:
    try:
        return [float(x) for x in ranks.split(",")]
    except ValueError as bad:
        raise OutriderError(f"'{name}:{ranks}' are no chances by rank", str(bad), 'trees="model:0.7,0.2,0.05"') from bad


def _acceptance(name: str, share: str) -> float:
    if not 0 <= float(share) <= 1:
        raise OutriderError(f"'{name}:{share}' is no acceptance rate", "it is a share", 'acceptance="model:0.8"')
    return float(share)


def _pairs(text: str, *, number: bool = False) -> dict[str, str]:
    out = {}
    for word in text.split():
        name, _, value = word.rpartition(":")
        if not name or (number and not value.replace(".", "", 1).isdecimal()):
            raise OutriderError(f"'{word}' is not understood", "", "DRAFTER:VALUE, as in 'lookup:0.02 model:0.3'")
        out[name] = value
    return out


def _sort(program: ProgramOp, costs: dict[str, float]) -> None:
    """Ready proposals that wait for nothing, the cheapest first; a chain of `beside` is strung anew in that order."""
    block = program.body.block
    chains = [o for o in block.ops if isinstance(o, ProposeOp) and not any(isinstance(u.operation, ProposeOp) for u in o.out.uses)]
    for last in chains:
        links = _chain(last)
        wanted = sorted(links, key=lambda o: costs.get(o.name_of, UNKNOWN))
        if len(links) > 1 and wanted != links:
            _restring(last, links, wanted)
    for union in [o for o in block.ops if isinstance(o, UnionOp)]:
        union.operands = sorted(union.operands, key=lambda a: _dearest(a, costs))
        for arm in union.operands:
            if isinstance(arm.owner, ProposeOp) and len(list(arm.uses)) == 1:
                arm.owner.detach()
                block.insert_op_before(arm.owner, union)


def _dearest(value: SSAValue, costs: dict[str, float]) -> float:
    one = value.owner
    if isinstance(one, ProposeOp):
        return costs.get(one.name_of, UNKNOWN)
    return max([_dearest(v, costs) for v in one.operands], default=0.0) if isinstance(one, Operation) else 0.0


def _chain(last: ProposeOp) -> list[ProposeOp]:
    """Proposals from roots that grow beside one another and serve nothing else, first to last."""
    links = [last]
    while (
        len(links[0].beside) == 1
        and isinstance(before := links[0].beside[0].owner, ProposeOp)
        and before.overlapped is None
        and len(list(before.out.uses)) == 1
    ):
        links.insert(0, before)
    return links if all(o.how.data == ON for o in links) else [last]


def _restring(last: ProposeOp, links: list[ProposeOp], wanted: list[ProposeOp]) -> None:
    base = list(links[0].beside)
    block = last.parent
    assert block is not None
    goal, before = last, base
    for one in wanted:
        order, shape, device = (a.data if a else None for a in (one.order, one.shape, one.device))
        made = ProposeOp(one.name_of, one.at, one.own.data, beside=before, depth=value_of(one.depth), width=value_of(one.width),
                         sample=value_of(one.sample), order=order, shape=shape, device=device)  # fmt: skip
        block.insert_op_before(made, goal)
        before = [made.out]
    last.out.replace_all_uses_with(before[0])
    for one in reversed(links):
        block.erase_op(one)
