"""The plans that the scheduler may name: few, for each has its code, which is written at load."""

import itertools

from outrider.control.rows import DEAR, NEAR, WHOLE
from outrider.control.tables import Page
from outrider.core.types import Plan
from outrider.measure.cost import DEEPEST

REACHES = (WHOLE, NEAR, DEEPEST)  # how deep plans let drafters go at most


class Plans:
    """Of drafters, the cheapest first. `made`: plans by (drafter, depth) of each."""

    def __init__(self, names: list[str]) -> None:
        self.made = {key: _plan(key) for some in _subsets(names) for key in _depths(some)}
        self.last: tuple[Page, list[str], int, Plan] | None = None  # what was asked for last, and the answer

    def get(self, page: Page, names: list[str], reach: int) -> Plan:
        """That of these drafters, where drafts are worth looking at `reach` nodes deep."""
        near = WHOLE if reach <= WHOLE else NEAR if reach <= NEAR else DEEPEST
        if (last := self.last) is not None and last[0] is page and last[1] == names and last[2] == near:
            return last[3]
        key = tuple([(name, DEEPEST if page.prices[name] > DEAR else near) for name in names])  # of who goes a level at a time each level is weighed
        plan = self.made.get(key) or self.made.setdefault(key, _plan(key))
        self.last = page, names, near, plan
        return plan


def _plan(depths: tuple[tuple[str, int], ...]) -> Plan:
    return Plan(tuple([(name, depth, 1) for name, depth in depths]))


def _subsets(names: list[str]) -> list[tuple[str, ...]]:
    """In their order; of many drafters, those of up to two, and all."""
    return [tuple(some) for size in dict.fromkeys((1, 2, len(names))) if size <= len(names) for some in itertools.combinations(names, size)]


def _depths(names: tuple[str, ...]) -> list[tuple[tuple[str, int], ...]]:
    """How deep each of these may go, the cheapest first: some to one reach, the others, which cost something, to the end."""
    ways = [(*[near] * count, *[DEEPEST] * (len(names) - count)) for near in REACHES for count in range(len(names) + 1)]
    return [tuple(zip(names, way, strict=True)) for way in dict.fromkeys(ways)]
