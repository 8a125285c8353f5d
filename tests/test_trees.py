"""Trees from a profile: which one is chosen by cost, where a chain stays, what is refused, and that no text hangs on it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from contracts import plain, request
from programs import TREE as PROGRAM
from programs import written
from test_profiler import toys
from written import costs, linear

from outrider.compiler.opt import opt
from outrider.compiler.passes.specialize import calls, grown
from outrider.core.errors import OutriderError
from outrider.core.types import Plan
from outrider.ir.text import parse
from outrider.measure.cost import best_tree, expected_accepted
from outrider.models.toy import ToyModel
from outrider.runtime.profiler import rank, sweep

THREE = (0.6, 0.3, 0.1)
FOUR = (0.45, 0.3, 0.15, 0.1)
SIXTEEN = "-1 0 -1 1 0 2 3 1 4 5 -1 2 6 3 7 8"


def known(node: float, level: float, ranks: tuple[float, ...] = ()) -> dict[str, Any]:
    """What a profile holds where a verified node and a drafted level cost so many plain steps more, and these chances were counted."""
    cells = {f"model r{k}": [1e6, share] for k, share in enumerate(ranks)}
    return {"costs": costs(linear(node), {"model": linear(level, 0.0)}), "next": cells}


def specialised(folder: Path, data: Any, text: str = PROGRAM, *, trees: bool = True, before: str = "", budget: int = 0) -> str:
    file = folder / "profile.json"
    file.write_text(json.dumps({"data": data}))
    return opt(text, "tree", f'{before}specialize{{profile="{file}" budget={budget}{" trees=true" * trees}}}')


def proposal(text: str) -> str:
    return next(line.partition("%text ")[2].partition(" :")[0] for line in text.splitlines() if "propose" in line)


@pytest.mark.parametrize(
    ("node", "level", "ranks", "budget", "chosen"),
    [
        (0.01, 0.05, THREE, 0, f'depth 5 width 3 shape "{SIXTEEN}"'),  # nodes cost next to nothing, levels little: wide and deep
        (0.01, 0.05, THREE, 6, 'depth 3 width 2 shape "-1 0 -1 1 0 2"'),  # no more nodes than are verified
        (0.10, 0.05, THREE, 0, 'depth 3 width 2 shape "-1 0 -1 1"'),
        (0.05, 0.30, FOUR, 0, 'depth 1 width 2 shape "-1 -1"'),  # levels cost much
        (0.02, 0.20, FOUR, 0, 'depth 2 width 3 shape "-1 -1 0 -1"'),
        (0.20, 0.05, THREE, 0, "depth 2 width 1"),  # nodes cost much: a chain
        (0.02, 0.05, (0.95, 0.02), 0, "depth 18 width 1"),  # hardly anything but the likeliest comes out
        (0.02, 0.05, (0.95, 0.02), 5, "depth 5 width 1"),
        (0.30, 0.30, THREE, 0, "depth 0 width 1"),  # nothing pays
        (0.50, 0.01, (0.4,), 0, "depth 0 width 1"),
    ],
)  # fmt: skip
def test_the_tree_is_the_one_that_costs_deserve(
    tmp_path: Path, node: float, level: float, ranks: tuple[float, ...], budget: int, chosen: str
) -> None:
    assert proposal(specialised(tmp_path, known(node, level, ranks), budget=budget)) == chosen


def test_where_all_is_nearly_free_the_largest_tree_is_drawn_and_none_is_higher_than_eight() -> None:
    parents = grown(known(0.001, 0.001, THREE), ["model"])["model"]
    assert parents == best_tree(THREE, 32, 8)
    tall = grown(known(0.0, 0.0, (0.75, 0.2)), ["model"])["model"]
    assert len(tall) == 32 and height(tall) == 8 < height(best_tree((0.75, 0.2), 32, 32))


def nested(parents: list[int], at: int = -1) -> tuple[Any, ...]:
    """A tree without the numbers of its nodes, siblings in their order."""
    return tuple(nested(parents, n) for n, parent in enumerate(parents) if parent == at)


def height(parents: list[int], at: int = -1) -> int:
    return max((1 + height(parents, n) for n, parent in enumerate(parents) if parent == at), default=0)


def test_expected_nodes_are_sums_of_products_of_paths() -> None:
    assert expected_accepted([], [0.6]) == 0
    assert expected_accepted([-1, -1, 0, 0, 1], [0.6, 0.3]) == pytest.approx(0.6 + 0.3 + 0.6 * 0.6 + 0.6 * 0.3 + 0.3 * 0.6)


@pytest.mark.parametrize("shape", ["-1", "-1 0 1", "-1 -1 -1", "-1 0 -1 1", "-1 -1 0 0 1", "-1 -1 0 1 1 2", SIXTEEN])
def test_a_tree_is_priced_by_the_forwards_that_it_takes(shape: str) -> None:
    engine, _ = toys()
    text = PROGRAM.replace("depth ? width ?", f'depth 9 width 9 shape "{shape}"').replace("budget ?", "budget 0")
    engine.equip(engine.drafters, source=lambda rule: parse(text))
    model = engine.drafters["model"].model  # type: ignore[attr-defined]
    seq = engine.submit(request([1, 2, 3], max_tokens=100))
    engine.step()
    before = model.forwards
    engine.step()
    parents = [int(p) for p in shape.split()]
    assert seq.records[-1].drafted == (len(parents),) and model.forwards - before == calls(parents)


def test_ranks_that_rise_by_chance_are_as_likely_as_the_one_before_and_those_never_right_are_left_out() -> None:
    assert grown(known(0.01, 0.1, (0.3, 0.5, 0.0, 0.2)), ["model"]) == grown(known(0.01, 0.1, (0.3, 0.3)), ["model"])
    parents = grown(known(0.01, 0.1, (0.3, 0.5, 0.0, 0.2)), ["model"])["model"]
    assert max(parents.count(p) for p in parents) == 2


def test_few_observations_are_not_believed() -> None:
    """A second guess that was right once is not yet worth a node."""
    data = known(0.2, 0.2, (0.5, 0.5))
    assert len(grown(data, ["model"])["model"]) == 2
    data["next"]["model r1"][0] = 1.0
    assert grown(data, ["model"])["model"] == [-1]


def test_without_ranks_the_plan_is_the_chain_of_before(tmp_path: Path) -> None:
    """Also for those drafters that have none, beside one that has."""
    chain = specialised(tmp_path, known(0.05, 0.05), trees=False)
    assert proposal(chain) == "depth 3 width 1" and specialised(tmp_path, known(0.05, 0.05)) == chain
    both = PROGRAM.replace(
        "  %kept", '  %near = outrider.propose "lookup" on %text depth ? width ? : point\n  %all = outrider.union %draft, %near\n  %kept', 1
    )
    both = both.replace("prune %draft", "prune %all")
    lines = [[line for line in specialised(tmp_path, known(0.05, 0.05, ranks), both).splitlines() if "propose" in line] for ranks in ((), THREE)]
    assert lines[0][1] == lines[1][1] and "shape" not in lines[0][0] and "shape" in lines[1][0]
    ranked = specialised(tmp_path, known(0.05, 0.05, THREE), trees=False)
    assert ranked == chain, "nobody asked for trees"


KEPT = {
    "drawn": PROGRAM.replace(": point", ": sampled").replace("budget ?", "budget ? unless sampled").replace("coupled", "exact"),
    "one path": PROGRAM.replace("budget ?", "budget ? chain"),
    "fixed depth": PROGRAM.replace("depth ?", "depth 2"),
    "fixed width": PROGRAM.replace("width ?", "width 2"),
    "fixed tree": PROGRAM.replace("depth ? width ?", 'depth 2 width 2 shape "-1 -1 0"'),
    "out of order": PROGRAM.replace("width ?", 'width ? order "best-first"'),
    "relay": PROGRAM.replace('"model" on', '"lookup" on').replace("  %kept", '  %m = outrider.relay "model" over %draft depth ? : point\n  %kept', 1).replace(
        "prune %draft", "prune %m"),
    "after": PROGRAM.replace('"model" on', '"lookup" on').replace(
        "  %kept", '  %m = outrider.propose "model" after %draft depth ? width ? : point\n  %kept', 1).replace("prune %draft", "prune %m"),
}  # fmt: skip


@pytest.mark.parametrize("kept", KEPT)
def test_where_no_tree_may_stand_or_the_program_says_what_to_do_all_stays(tmp_path: Path, kept: str) -> None:
    """Chances by rank are of what a drafter chooses, and trees are drawn from the roots."""
    data = known(0.05, 0.05, THREE)
    assert "shape" in specialised(tmp_path, data)
    assert specialised(tmp_path, data, KEPT[kept]) == specialised(tmp_path, data, KEPT[kept], trees=False)


def test_what_would_be_drawn_is_chosen_at_temperature_0_and_may_be_a_tree(tmp_path: Path) -> None:
    cold = KEPT["drawn"].replace('by "exact"', 'by "exact" at temperature 0')
    assert "shape" in specialised(tmp_path, known(0.05, 0.05, THREE), cold, before="canonicalize,")


@pytest.mark.parametrize("cell", ["model r0", "model r1", "model s 2"])
@pytest.mark.parametrize(
    "held", [[3, 1.7], [3, -0.1], [-1, 0.5], [math.nan, 0.5], [3, math.nan], [math.inf, 0.5], [3], [1, 2, 3], "high", None, 7], ids=str
)
def test_nonsense_in_a_profile_is_refused_with_its_cell(tmp_path: Path, cell: str, held: Any) -> None:
    data = known(0.05, 0.05, THREE)
    data["next"][cell] = held
    with pytest.raises(OutriderError, match=f"the profile's '{cell}' is .*the share that came true.*outrider profile"):
        specialised(tmp_path, data)


@pytest.mark.parametrize(("node", "word"), [(-1.0, None), (None, "costs")], ids=str)
def test_a_profile_without_costs_is_refused(tmp_path: Path, node: float | None, word: str | None) -> None:
    data = known(0.05, 0.05, THREE)
    if word:
        del data[word]
    else:
        data["costs"]["verify"] = {}
    with pytest.raises(OutriderError, match="says nothing of what steps cost"):
        specialised(tmp_path, data)


def test_a_later_schedule_draws_its_own_tree_and_gives_a_shape_no_order(tmp_path: Path) -> None:
    chosen = specialised(tmp_path, known(0.05, 0.05, THREE))
    assert proposal(opt(chosen, "tree", 'schedule{trees="model:0.9" nodes=3}')) == "depth 3 width 1"
    assert proposal(opt(chosen, "tree", 'schedule{trees="model:0.6,0.3" nodes=3}')) == 'depth 2 width 2 shape "-1 0 -1"'
    assert opt(chosen, "tree", 'schedule{order="best-first"}') == chosen


def test_trees_need_a_profile() -> None:
    with pytest.raises(OutriderError, match="trees are chosen by a profile"):
        opt(PROGRAM, "tree", 'specialize{plan="model:4" trees=true}')


# --- writing


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("hot", [None, 0])
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_the_chosen_tree_writes_what_plain_decoding_writes(tmp_path: Path, rule: str, hot: int | None, rows: int) -> None:
    chosen = specialised(tmp_path, known(0.01, 0.05, THREE))
    want, _, _ = written(lambda rule: None, Plan, rule, rows=rows, tokens=24, hot=hot)
    text, records, _ = written(lambda rule: parse(chosen), lambda: Plan((("model", 1, 1),)), rule, rows=rows, tokens=24, hot=hot)
    assert text == want
    assert nested([int(p) for p in SIXTEEN.split()]) in [nested(r.draft.parent) for r in records if r.draft], "of the first row"


def test_from_measuring_to_a_tree_that_runs(tmp_path: Path) -> None:
    """Costs on a clock that ticks once a look, chances on texts: whatever comes of it, it is a program that writes plain's text."""
    engine, tables = toys()
    sweep(engine, tables, context=100, patience=1e9, repeats=1)
    rank(engine, tables, [request([1, 2, 3, i], f"k{i}", max_tokens=60) for i in range(4)], patience=1e9)
    chosen = specialised(tmp_path, tables.state())
    engine.equip(engine.drafters, source=lambda rule: parse(chosen))
    asked = request([1, 2, 3, 1, 2], max_tokens=40)
    seq = engine.submit(asked)
    while seq.finish_reason is None:
        engine.step()
    assert [seq.generated] == plain(ToyModel(12, 5), [asked])
