"""Trees from a profile: what is counted by rank, which tree is chosen by cost, where a chain stays, and that no text hangs on it."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.control.tables import Lesson, Tables
from outrider.core.types import POINT, SAMPLED, Draft, Plan, Reading, StepRecord
from outrider.measure import profile
from outrider.measure.cost import Costs, situation

AT = situation("", 1, 100, False)
BITS = {"model": 1, "other": 2}
Node = tuple[int, int, int, float]  # parent, token, source, score


def record(nodes: list[Node], came: list[int], kind: int = POINT) -> StepRecord:
    """A step of one row that drafted these and wrote `came`; nothing was verified."""
    depth: list[int] = []
    for parent, *_ in nodes:
        depth.append(1 if parent < 0 else depth[parent] + 1)
    parent, token, source, score = map(list, zip(*nodes, strict=True))
    n = len(nodes)
    draft = Draft(1, token, parent, [0] * n, depth, source, [kind] * n, [-1] * n, score)
    return StepRecord(
        Plan(), ("r",), (10,), (0,), (0,), (len(came),), (0,), {}, {}, Reading(1.0), "", levels={"model": max(depth)}, draft=draft, tokens=(tuple(came),)
    )  # fmt: skip


def counted(*records: StepRecord) -> dict[str, list[float]]:
    """Cells by rank of tables that took these in."""
    tables = Tables(BITS, Costs({}))
    tables.costs.verified(AT, 0, 1.0)
    tables.take_in([Lesson(r, AT, [0], {}, False) for r in records])
    return {cell: known for cell, known in tables.next.cells.items() if cell.split()[-1].startswith("r")}


# --- counting

TREE: list[Node] = [
    (-1, 5, 1, 0.2),  # third likeliest of the root
    (-1, 6, 1, 0.5),  # first
    (-1, 7, 1, 0.3),  # second
    (1, 8, 1, 0.4),  # below the first: two alike, the earlier is the first
    (1, 9, 1, 0.4),
    (2, 8, 1, 0.9),  # below the second
    (2, 1, 1, 0.05),
]


def test_siblings_are_counted_by_rank_where_their_parent_came_out() -> None:
    """The root's third child came out, below which nothing was drafted; then its first, and the second of two alike."""
    assert counted(record(TREE, [5, 4])) == {"model r0": [1, 0], "model r1": [1, 0], "model r2": [1, 1]}
    assert counted(record(TREE, [6, 9, 3])) == {"model r0": [2, 0.5], "model r1": [2, 0.5], "model r2": [1, 0]}
    assert counted(record(TREE, [2])) == {"model r0": [1, 0], "model r1": [1, 0], "model r2": [1, 0]}
    both = counted(record(TREE, [7, 8, 3]), record(TREE, [6]))
    assert {cell: [n, pytest.approx(share)] for cell, (n, share) in both.items()} == {"model r0": [3, 2 / 3], "model r1": [3, 1 / 3], "model r2": [2, 0]}


def test_a_chain_a_lone_child_and_what_is_drawn_count_for_no_rank() -> None:
    assert counted(record([(-1, 5, 1, 0.9), (0, 6, 1, 0.9), (1, 7, 1, 0.9)], [5, 6, 7, 8])) == {}
    beside = [(-1, 5, 1, 0.9), (-1, 6, 2, 0.4), (0, 7, 1, 0.8), (1, 7, 2, 0.8)]  # two drafters, a chain each
    assert counted(record(beside, [5, 7, 1])) == {}
    assert counted(record(TREE, [6, 9, 3], kind=SAMPLED)) == {}


def test_each_drafter_is_ranked_among_its_own() -> None:
    """What both guessed is a guess of either; the other's likelier token takes no rank away."""
    nodes = [(-1, 5, 2, 0.9), (-1, 6, 3, 0.5), (-1, 7, 1, 0.4)]
    assert counted(record(nodes, [6, 1])) == {"model r0": [1, 1], "model r1": [1, 0], "other r0": [1, 0], "other r1": [1, 1]}


def test_ranks_beyond_the_eighth_are_not_told_apart() -> None:
    nodes = [(-1, token, 1, 0.05) for token in range(10)]
    assert list(counted(record(nodes, [9]))) == [f"model r{k}" for k in range(8)]


def test_what_was_counted_by_rank_is_kept_and_added_between_writers(tmp_path: Path) -> None:
    cells = [{"next": counted(record(TREE, came))} for came in ([6, 9, 3], [5, 4])]
    for known in cells:
        profile.save(tmp_path / "p.json", {}, known, {})
    whole = profile.load(tmp_path / "p.json", {})
    assert whole == {"next": {"model r0": [3, pytest.approx(1 / 3)], "model r1": [3, pytest.approx(1 / 3)], "model r2": [2, 0.5]}}
    assert Tables(BITS, Costs({}), state=whole).next.share("model r2", 0.0) == pytest.approx(0.25)
