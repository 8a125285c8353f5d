"""Chances by rank: what is counted of a step, what survives, and how a profile measures them on texts."""

import itertools
import json
from pathlib import Path

import pytest
from contracts import plain, request
from test_profiler import at_rest, parts, toys

from outrider.control.tables import Lesson, Tables
from outrider.core.errors import OutriderError
from outrider.core.types import POINT, SAMPLED, Draft, Plan, Reading, StepRecord
from outrider.drafters.lookup import Lookup
from outrider.measure import profile
from outrider.measure.cost import Costs, situation
from outrider.measure.trace import write
from outrider.models.toy import ToyModel
from outrider.runtime.profiler import TREE as MEASURED
from outrider.runtime.profiler import rank

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
    tables.take_in([Lesson(r, AT, [0], {}, False, 1.0) for r in records])
    return ranks_of(tables)


def ranks_of(tables: Tables) -> dict[str, list[float]]:
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
    assert {cell: [n, pytest.approx(share)] for cell, (n, share) in both.items()} == {
        "model r0": [3, 2 / 3],
        "model r1": [3, 1 / 3],
        "model r2": [2, 0],
    }


def test_a_chain_a_lone_child_and_what_is_drawn_count_for_no_rank() -> None:
    assert counted(record([(-1, 5, 1, 0.9), (0, 6, 1, 0.9), (1, 7, 1, 0.9)], [5, 6, 7, 8])) == {}
    beside = [(-1, 5, 1, 0.9), (-1, 6, 2, 0.4), (0, 7, 1, 0.8), (1, 7, 2, 0.8)]  # two drafters, a chain each
    assert counted(record(beside, [5, 7, 1])) == {}
    assert counted(record(TREE, [6, 9, 3], kind=SAMPLED)) == {}


def test_each_drafter_is_ranked_among_its_own() -> None:
    """The other's likelier token takes no rank away, and what both guessed has for each the score that it gave."""
    nodes = [(-1, 5, 2, 0.9), (-1, 6, 2, 0.5), (-1, 7, 1, 0.4), (-1, 8, 1, 0.3)]
    assert counted(record(nodes, [6, 1])) == {"model r0": [1, 0], "model r1": [1, 0], "other r0": [1, 0], "other r1": [1, 1]}
    both = record([(-1, 5, 2, 0.9), (-1, 6, 3, 0.5), (-1, 7, 1, 0.4)], [6, 1])
    both.draft.again = {(1, BITS["model"]): 0.3}
    assert counted(both) == {"model r0": [1, 0], "model r1": [1, 1], "other r0": [1, 0], "other r1": [1, 1]}


def test_what_both_guessed_is_written_down_as_json(tmp_path: Path) -> None:
    """With what each thought of it: node, mark, score. Where nobody said anything again there is none."""
    both = record([(-1, 5, 2, 0.9), (-1, 6, 3, 0.5)], [6, 1])
    both.draft.again = {(1, BITS["model"]): 0.3}
    write([both, record(TREE, [5, 4])], file := tmp_path / "steps.jsonl")
    drafts = [json.loads(line)["draft"] for line in file.read_text("utf-8").splitlines()]
    assert [d["again"] for d in drafts] == [[[1, BITS["model"], 0.3]], []] and drafts[0]["score"] == [0.9, 0.5]


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


# --- measuring


def recounted(records: list[StepRecord]) -> dict[str, list[float]]:
    """The cells of full trees of depth 2 and width 4, in which siblings stand in the order of their rank."""
    hits: list[list[int]] = []
    for r in records:
        draft, out = r.draft, r.tokens[0]
        for place in [-1, *([draft.token.index(out[0])] if len(out) > 1 and r.accepted[0] else [])]:
            some = [draft.token[n] for n, parent in enumerate(draft.parent) if parent == place]
            hits += [[token == out[place >= 0] for token in some]] if some else []
    return {f"model r{k}": [len(hits), pytest.approx(sum(h[k] for h in hits) / len(hits))] for k in range(4)}


def test_ranks_are_counted_on_real_texts_and_nothing_else_is_learned() -> None:
    engine, tables = toys()
    before, known, asked = parts(engine), tables.state(), [request([1, 2, 3, i], f"k{i}", max_tokens=20) for i in range(3)]
    taken, records = rank(engine, tables, asked, patience=1e9), list(engine.ring)
    assert taken == len(records) and {r.plan.drafters for r in records} == {(("model", *MEASURED),)}
    texts = [[t for r in records if r.requests == (a.id,) for t in r.tokens[0]] for a in asked]
    assert texts == plain(ToyModel(12, 5), asked)
    assert ranks_of(tables) == recounted(records) == tables.next.cells and tables.next.cells["model r0"][0] > len(records)
    assert {**tables.state(), "next": {}} == {**known, "next": {}}
    assert parts(engine) == before and at_rest(engine)


def test_every_text_is_heard_when_time_is_short_and_who_has_no_model_is_not_asked() -> None:
    engine, tables = toys()
    assert rank(engine, tables, [request([1, 2, i], f"k{i}", max_tokens=50) for i in range(4)], patience=0.0) == 4
    engine.equip({"lookup": Lookup()})
    assert rank(engine, tables, [request([1, 2, 3])], patience=1e9) == 0


def test_whoever_interrupts_the_count_keeps_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tables = toys()
    before, score, calls = parts(engine), engine.target.score, itertools.count()

    def interrupted(*args: object) -> object:
        if next(calls) == 10:
            raise KeyboardInterrupt
        return score(*args)

    monkeypatch.setattr(engine.target, "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rank(engine, tables, [request([1, 2, 3], max_tokens=500)], patience=1e9)
    assert tables.next.cells == recounted(list(engine.ring)) and len(engine.ring) == 10
    assert parts(engine) == before and at_rest(engine)


def test_ranks_are_not_counted_while_requests_run() -> None:
    engine, tables = toys()
    seq = engine.submit(request([1, 2, 3]))
    with pytest.raises(OutriderError, match="while requests run"):
        rank(engine, tables, [request([1, 2])], patience=1e9)
    assert not tables.next.cells
    engine.cancel(seq)
