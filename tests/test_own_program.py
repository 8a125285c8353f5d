"""Programs that users write: run for requests of their rule, refused where they cannot be."""

from pathlib import Path

import pytest

import outrider
from outrider import reference
from outrider.core.errors import OutriderError

TEXT = "Once upon a time there was a small boat. The small boat"
PROGRAM = """outrider.program @mine {
  %text = outrider.context
  %near = outrider.propose "lookup" on %text depth 3 width 1 : point
  %kept = outrider.prune %near budget 2
  %scores = outrider.score %kept on %text by "target"
  %outcome = outrider.accept %kept, %scores by "coupled"
  outrider.commit %outcome
}
"""


def runtime(tmp_path: Path, text: str, **how: object) -> outrider.Runtime:
    file = tmp_path / "mine.mlir"
    file.write_text(text)
    return outrider.load(None, ["lookup"], program=file, compile="off", dtype="float32", **{"depth": 8, **how})


def test_a_program_of_ones_own_is_what_runs(tmp_path: Path) -> None:
    """Its numbers stand, whatever the plan says; greedy requests run it at temperature 0, those of another rule the usual one."""
    rt = runtime(tmp_path, PROGRAM)
    for how in ({}, {"temperature": 1.0, "seed": 3}):
        plain = rt.generate(TEXT, max_tokens=40, speculation="off", **how)
        rt.engine.ring.clear()
        assert rt.generate(TEXT, max_tokens=40, **how).tokens == plain.tokens
        assert max(max(r.drafted) for r in rt.engine.ring) <= 2 and (how or any(any(r.trimmed) for r in rt.engine.ring))
    rt.engine.ring.clear()
    rt.generate(TEXT, max_tokens=40, temperature=1.0, rule="exact")
    assert "@default" in str(rt.engine.jit.module("exact")) or 'sym_name = "default"' in str(rt.engine.jit.module("exact"))
    assert "@mine" in rt.program()["program"] and 'by "greedy"' in rt.program()["program"]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"lookup"', '"model"', "@mine asks 'model' to draft"),
        ('by "coupled"', 'by "block"', "the rule 'block' has no step yet"),
        ("%scores by", "%scoers by", "mine.mlir:6:"),
        (": point", ": sampled", "draws twice"),
        ('by "target"', 'by "small"', "'small' cannot score yet"),
        ("width 1 : point", 'width 1 device "cuda-1" : point overlapped', "no step uses a second device yet"),
        ('by "target"', 'by "target" reusing 3 layers', "@mine asks 'early-exit:3' to draft"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    text = PROGRAM.replace(old, new)
    if "twice" in sentence:
        again = '  %near2 = outrider.propose "lookup" on %text depth 2 width 1 : sampled\n  %kept = outrider.union %near, %near2\n'
        text = text.replace("  %kept = outrider.prune %near budget 2\n", again).replace("coupled", "exact")
    with pytest.raises(OutriderError) as refused:
        runtime(tmp_path, text)
    assert sentence in str(refused.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(OutriderError, match="cannot be read"):
        outrider.load(None, ["lookup"], program="/nowhere/x.mlir", compile="off")


def test_what_draws_cannot_be_called_a_point(tmp_path: Path) -> None:
    """Else a prune of drawn nodes would verify, and change the distribution."""
    file = tmp_path / "mine.mlir"
    file.write_text(PROGRAM.replace('"lookup"', '"early-exit:3"').replace("coupled", "exact"))
    with pytest.raises(OutriderError, match="'early-exit:3' draws under 'exact'"):
        outrider.load(None, ["early-exit:3"], program=file, compile="off", depth=2)
    file.write_text(file.read_text().replace("exact", "coupled"))
    assert outrider.load(None, ["early-exit:3"], program=file, compile="off", depth=2).generate(TEXT, max_tokens=8).tokens


def test_what_is_said_at_temperature_0_is_for_greedy_requests_alone(tmp_path: Path) -> None:
    rt = runtime(tmp_path, PROGRAM.replace('by "coupled"', 'by "coupled" at temperature 0'))
    how = {"temperature": 1.0, "seed": 3, "max_tokens": 40}
    assert rt.generate(TEXT, **how).tokens == outrider.load(None, [], compile="off", dtype="float32").generate(TEXT, **how).tokens
    assert rt.generate(TEXT, max_tokens=40).tokens != rt.generate(TEXT, **how).tokens
    assert "@mine" in rt.program()["program"]


def test_a_fixed_tree_is_drawn_under_the_scheduler_too(tmp_path: Path) -> None:
    """It is not asked of places below which the tree has nothing; a drafter that costs little is let go on."""
    file = tmp_path / "tree.mlir"
    file.write_text(
        PROGRAM.replace('"lookup" on %text depth 3 width 1', '"model" on %text depth 2 width 2 shape "-1 -1 0"').replace("budget 2", "budget 0")
    )
    rt = outrider.load(None, [f"model:{reference.draft()}"], program=file, compile="off", dtype="float32", profile="off")
    rt.keeper.tables.costs.assumed["model"] = 0.1
    plain = rt.generate(TEXT, max_tokens=40, speculation="off")
    rt.engine.ring.clear()
    assert rt.generate(TEXT, max_tokens=40).tokens == plain.tokens
    assert any(r.draft.parent == [-1, -1, 0] for r in rt.engine.ring)
