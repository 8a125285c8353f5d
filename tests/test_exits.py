"""Early exits: a draft by the target's own first layers, whose work is not done twice, and what they change of the text: nothing."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zoo
from contracts import plain, request, run

import outrider
from outrider import reference
from outrider.compiler.pipeline import FRONT
from outrider.control.fixed import Told, fixed
from outrider.core.errors import OutriderError
from outrider.core.types import Plan
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.models.exits import EarlyExit, check, owner_stack
from outrider.runtime.engine import Engine

RESUMABLE = ["llama", "mistral", "qwen2", "mixtral"]
NAME = "early-exit:1"
WHOLE = tuple(name for name in FRONT if name != "inline-early-exit")
PLANS = [
    Plan(((NAME, 4, 1),)), Plan(((NAME, 3, 2),)), Plan((("lookup", 3, 1), (NAME, 3, 1))), Plan((("lookup", 4, 1),)), Plan(), Plan(((NAME, 3, 2),), budget=3),
]  # fmt: skip


def engine(name: str, plan: Plan | None, rows: int = 3, **how: Any) -> Engine:
    target = zoo.model(name, label="target", chunk=8)
    view = EarlyExit(target, 1)
    check(view)
    turn = iter(range(10**6))
    control = fixed(plan) if plan is not None else Told(lambda seqs: (PLANS[next(turn) % len(PLANS)], "turn"))
    return Engine(target, {"lookup": Lookup(floor=0.0), NAME: ModelDrafter(view, NAME)}, control, rows, **how)


def asked(**how: Any) -> list[Any]:
    return [request([3, 1, 4, 1, 5, 9, 2, 6][:n] * 2, f"e{n}", seed=n, max_tokens=14, **how) for n in (2, 8, 5)]


@pytest.mark.parametrize("heat", [{}, {"temperature": 1.0, "rule": "coupled"}], ids=["greedy", "coupled"])
@pytest.mark.parametrize("name", [n for n in RESUMABLE if n in zoo.CLASSES])
def test_the_text_is_plains(name: str, heat: dict[str, Any]) -> None:
    """Chains, trees, unions and pauses, in a ragged batch."""
    want = plain(zoo.model(name, label="target", chunk=8), asked(**heat))
    for plan in [None, *PLANS[:3]]:
        made = engine(name, plan)
        seqs = run(made, asked(**heat))
        assert [s.generated for s in seqs] == want, plan
        assert any("reusing" in str(op) for op in made.jit.module("greedy" if not heat else "coupled").walk())
        drafts = [r for s in seqs for r in s.records if any(r.drafted)]
        assert drafts and (plan is None or sum(sum(r.accepted) for r in drafts) > 0)


def columns(plan: Plan, front: tuple[str, ...]) -> tuple[Counter[int], list[list[int]], Any]:
    """How many columns went through each layer of the target while three requests were written, one at a time."""
    made, count = engine("llama", plan, rows=1, front=front), Counter[int]()
    for number, layer in enumerate(owner_stack(made.target.module)):  # type: ignore[attr-defined]
        layer.register_forward_hook(lambda _, inputs, __, n=number: count.update({n: inputs[0].shape[0] * inputs[0].shape[1]}))
    seqs = [run(made, [r])[0] for r in asked()]
    return count, [s.generated for s in seqs], [r for s in seqs for r in s.records]


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[2]], ids=["alone", "beside lookup"])
def test_the_first_layers_run_once_for_every_node(plan: Plan) -> None:
    whole, text, records = columns(plan, WHOLE)
    reused, same, again = columns(plan, FRONT)
    assert text == same and [r.draft.token for r in records] == [r.draft.token for r in again]
    first, last = 0, max(whole)
    assert last >= 1 and reused[last] == whole[last], "above the exit all is as it was"
    assert reused[first] == reused[last], "below it every column runs once"
    by_exit = sum(len(r.draft.token) - len(_leaves(r)) + 1 for r in records if r.levels.get(NAME))
    if plan is PLANS[0]:
        assert whole[first] - reused[first] == by_exit > 20, "what the exit computed, and no more, is saved"
    assert whole[first] > reused[first]


def _leaves(record: Any) -> list[int]:
    return [n for n in range(len(record.draft.token)) if n not in record.draft.parent]


def test_a_class_that_cannot_go_on_is_refused() -> None:
    target = zoo.model("gpt2", label="target", chunk=8)
    with pytest.raises(OutriderError, match="cannot go on from layer 1"):
        check(EarlyExit(target, 1))


@pytest.mark.parametrize(
    ("spec", "sentence"), [("early-exit:x", "needs a number of layers"), ("early-exit:0", "is no part of"), ("early-exit:99", "is no part of")]
)
def test_wrong_exits_are_refused(spec: str, sentence: str) -> None:
    with pytest.raises(OutriderError, match=sentence):
        outrider.load(None, [spec], compile="off")


def test_staged_and_early_exit_by_name() -> None:
    """`outrider.load` builds both, and their texts are plain's."""
    want = outrider.load(None, [], compile="off", dtype="float32").generate("Once upon a time", max_tokens=40).tokens
    for spec in ("early-exit:3", f"staged:lookup>model:{reference.draft()}"):
        runtime = outrider.load(None, [spec], compile="off", dtype="float32", depth=3)
        out = runtime.generate("Once upon a time", max_tokens=40)
        assert out.tokens == want and out.stats["accepted"] > 0
    assert "outrider.relay" in runtime.program()["program"] and "forest.over(" in runtime.program()["code"]


@pytest.mark.parametrize("own", [False, True])
def test_a_strict_runtime_computes_every_node_anew(tmp_path: Path, own: bool) -> None:
    """Though its user's program says otherwise."""
    text = (Path(__file__).parent / "ir" / "early_exit.mlir").read_text().replace("early-exit:2", "early-exit:3")
    (file := tmp_path / "mine.mlir").write_text(text.replace('by "target"', 'by "target" reusing 3 layers', 1))
    runtime = outrider.load(None, ["early-exit:3"], compile="off", strict=True, depth=2, program=file if own else None)
    assert "reusing" not in runtime.program()["program"]
    out = runtime.generate("Once upon a time", max_tokens=24)
    assert out.tokens == runtime.generate("Once upon a time", max_tokens=24, speculation="off").tokens
