"""The scheduler's guarantee, live: decode times beside plain's with drafters that cannot help."""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import outrider
from outrider import reference
from outrider.bench import prompts
from outrider.bench.report import provenance, save_as
from outrider.bench.schedule import Writer
from outrider.control.guard import GRANT, READING
from outrider.core.types import Draft
from outrider.drafters.model import ModelDrafter
from outrider.models import load as models
from outrider.runtime import profiler
from outrider.runtime.door import Runtime

SLOWER = 20


class Slow:
    """A drafter that takes SLOWER times as long as another, which it is otherwise."""

    queues = False  # it is drafting alone that takes longer

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def extend(self, *how: Any, **more: Any) -> Draft:
        start = time.perf_counter()
        out: Draft = self.drafter.extend(*how, **more)
        end = time.perf_counter() + (SLOWER - 1) * (time.perf_counter() - start)
        while time.perf_counter() < end:
            pass
        return out


def guarantee(count: int = 1, max_tokens: int = 256, rounds: int = 7, progress: Callable[[str], None] = print, **settings: Any) -> dict[str, Any]:
    """Total decode times beside plain's, paired, with drafters that cannot help: random weights, SLOWER times slower, open-ended text at T = 1. The
    promise is (1 + limit) x plain + GRANT plain steps, and for a drafter that reads the prompt READING of what the target took to."""
    settings = {"compile": "wait", "dtype": "bfloat16", **settings, "rows": 1}
    target, rows = reference.target(), []
    with tempfile.TemporaryDirectory() as folder:
        random = _random_weights(Path(folder))
        plain, usual = (
            outrider.load(target, [], **settings),
            outrider.load(target, ["lookup", f"model:{reference.draft()}"], **settings, profile="off"),
        )
        spec = usual.engine.target.spec
        blind, _, _ = models.load_model(
            random, name="random", device=spec.device, dtype=spec.dtype, rows=1, chunk=512, compile="off", context=spec.context, clip=True
        )
        useless = outrider.load(target, [ModelDrafter(blind, "random", spec.vocab_size)], **settings, profile="off")
        slow_part = usual.engine.drafters["model"]
        slow = outrider.load(target, [Slow(ModelDrafter(slow_part.model, "slow", spec.vocab_size))], **settings, profile="off")  # type: ignore[attr-defined]
        cases = {"random weights": (useless, 0), f"{SLOWER}x slower": (slow, 0), "open-ended, T = 1": (usual, 1)}
        for case, (rt, open_ended) in cases.items():
            for sampled in (False, True):  # as `outrider.load` does when nobody waits
                profiler.sweep(rt.engine, rt.keeper.tables, patience=4, sampled=sampled)  # type: ignore[union-attr]
            asked = prompts.load("open_ended")[: 3 * count] if open_ended else [p for c in prompts.CATEGORIES[:4] for p in prompts.load(c)[:count]]
            for prompt in asked:
                progress(f"{case}: {prompt.id}")
                rows.append({"case": case, "prompt": prompt.id, **_paired(Writer(plain), rt, prompt, max_tokens, rounds)})
    return {"where": provenance(), "settings": {"rounds": rounds, "max_tokens": max_tokens, **settings}, "rows": rows}


def _random_weights(folder: Path) -> Path:
    """The draft's shape with weights that know nothing."""
    module = models.load_module(models.locate(reference.draft()), "float32")
    for p in module.parameters():
        if p.ndim > 1:
            p.data.normal_(0, 0.02)
    module.save_pretrained(folder)
    for file in Path(reference.draft()).glob("token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def _paired(plain: Writer, rt: Runtime, prompt: prompts.Prompt, max_tokens: int, rounds: int) -> dict[str, float]:
    """Medians over rounds of guarded / plain and of plain / plain, per token, and what was promised; `beyond`: rounds in which the ratio was more than
    that, and `most`, by how much at most. `off`: of the guarded runtime, told not to speculate: one whose weights lie elsewhere in memory is not as
    fast as another, and that is not what the guard can see."""
    ratios, same, promise, off = [], [], [], []
    guarded, still, ledger = Writer(rt), Writer(rt, speculation="off"), rt.engine.controller.ledger  # type: ignore[attr-defined]
    stalls, debts = ledger.stalls, ledger.debts
    for _ in range(rounds):
        a, (seq, b), d, c = (
            plain(prompt, max_tokens).pace,
            guarded(prompt, max_tokens),
            still(prompt, max_tokens).pace,
            plain(prompt, max_tokens).pace,
        )
        base = (a + c) / 2
        ratios.append(b / base)
        off.append(d / base)
        same.append(c / a)
        reading = READING * seq.records[0].seconds.get("prefill", 0.0) / base
        promise.append(1.05 + (GRANT + reading) / max(seq.produced, 1))
    over = [ratio - promised for ratio, promised in zip(ratios, promise, strict=True)]
    return {
        "ratio": median(ratios),
        "promised": median(promise),
        "beyond": sum(x > 0 for x in over),
        "most": max(over),
        "stalls": ledger.stalls - stalls,
        "debts": ledger.debts - debts,
        "off": median(off),
        "same": median(same),
        "same_low": min(same),
        "same_high": max(same),
    }


def markdown(result: dict[str, Any]) -> str:
    head = "case, prompt, time / plain, promised, rounds beyond, most beyond, off / plain, plain / plain, its spread, stalls, debts".split(", ")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for r in result["rows"]:
        numbers = [f"{r['ratio']:.3f}", f"{r['promised']:.3f}", f"{r['beyond']} of {result['settings']['rounds']}", f"{r['most']:+.3f}"]
        numbers += [f"{r['off']:.3f}", f"{r['same']:.3f}", f"{r['same_low']:.2f}..{r['same_high']:.2f}", f"{r['stalls']}", f"{r['debts']}"]
        lines.append(f"| {' | '.join([r['case'], r['prompt'], *numbers])} |")
    return "\n".join(lines)


def save(result: dict[str, Any], folder: Path) -> None:
    save_as(folder, "guarantee", json.dumps(result, indent=1), markdown(result))
