"""Paired speed runs over the six categories: plain with no drafter loaded against each set of drafters, in one process.

Every prompt is written once by every contender before the next prompt, contenders in rotating order; ratios are taken
per prompt and averaged geometrically. Seconds are those of decoding (the target's prefill left out, the draft's kept).
Sampled prompts are seeded, so that texts can be compared there too.
"""

import json
import math
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import outrider
from outrider import reference
from outrider.bench import prompts
from outrider.core.types import Sequence
from outrider.measure.trace import repetition, stats
from outrider.runtime.door import Runtime

CONTENDERS: dict[str, tuple[str, ...]] = {"plain": (), "lookup": ("lookup",), "model": ("model",), "lookup + model": ("lookup", "model")}


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt written by one contender."""

    prompt: str
    category: str
    contender: str
    tokens: list[int]
    finish_reason: str
    seconds: float
    tokens_per_call: float
    acceptance_rate: float | None


def speed(count: int, max_tokens: int, depth: int, progress: Callable[[str], None], **settings: Any) -> dict[str, Any]:
    """Rows, a summary by category and contender, and where it was measured. `count`: prompts of each category."""
    runtimes = {
        "plain": outrider.load(reference.target(), drafters=[], rows=1, **settings),
        "fast": outrider.load(reference.target(), drafters=["lookup", f"model:{reference.draft()}"], rows=1, depth=depth, **settings),
    }
    for rt in runtimes.values():
        rt.generate("Warm up the caches", max_tokens=16)
    rows: list[Row] = []
    names = list(CONTENDERS)
    for category in prompts.CATEGORIES:
        progress(category)
        for i, prompt in enumerate(prompts.load(category)[:count]):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                rows.append(_write(runtimes["fast" if CONTENDERS[name] else "plain"], prompt, name, max_tokens))
    return {"where": provenance(), "settings": {"depth": depth, "max_tokens": max_tokens, **settings}, "summary": summary(rows)}


def _write(rt: Runtime, prompt: prompts.Prompt, contender: str, max_tokens: int) -> Row:
    allowed = list(CONTENDERS[contender]) or "off"
    request = rt.request(prompt.encode(rt.tokenizer), max_tokens=max_tokens, temperature=prompt.temperature, seed=1, speculation=allowed)
    seq: Sequence = rt.engine.submit(request)
    while seq.finish_reason is None:
        rt.engine.step()
    figures = stats(seq.records, request.id)
    seconds = figures["seconds"] - figures["seconds_by_stage"]["prefill"]
    return Row(
        prompt.id, prompt.category, contender, seq.generated, seq.finish_reason, seconds, figures["mean_acceptance_length"],
        figures["draft_acceptance_rate"],
    )  # fmt: skip


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """Per category and contender, and over all: geometric mean of paired ratios, the worst prompt, and what explains it."""
    plain = {r.prompt: r for r in rows if r.contender == "plain"}
    out = []
    for category in (*prompts.CATEGORIES, "all"):
        for contender in CONTENDERS:
            own = [r for r in rows if r.contender == contender and category in (r.category, "all")]
            ratios = sorted((plain[r.prompt].seconds / r.seconds, r.prompt) for r in own)
            rates = [r.acceptance_rate for r in own if r.acceptance_rate is not None]
            out.append({
                "category": category, "contender": contender, "prompts": len(own),
                "tokens_per_second": sum(len(r.tokens) for r in own) / sum(r.seconds for r in own),
                "ratio": math.exp(sum(math.log(x) for x, _ in ratios) / len(ratios)), "worst": ratios[0][0], "best": ratios[-1][0],
                "tokens_per_call": sum(r.tokens_per_call for r in own) / len(own),
                "acceptance_rate": sum(rates) / len(rates) if rates else None,
                "repetition": repetition([r.tokens for r in own]),
                "identical": sum((r.tokens, r.finish_reason) == (plain[r.prompt].tokens, plain[r.prompt].finish_reason) for r in own),
            })  # fmt: skip
    return out


def provenance() -> dict[str, Any]:
    """Where a figure comes from."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip() or None, "machine": platform.processor() or platform.machine(), "system": platform.platform(),
        "threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": transformers.__version__, "outrider": outrider.__version__,
    }  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    """The summary as a table."""
    lines = ["| category | drafted by | tokens/s | ratio | worst..best | tokens per call | accepted | repeated | identical |", "|---" * 9 + "|"]
    for r in result["summary"]:
        rate = "-" if r["acceptance_rate"] is None else f"{r['acceptance_rate']:.0%}"
        lines.append(
            f"| {r['category']} | {r['contender']} | {r['tokens_per_second']:.0f} | {r['ratio']:.2f}x | {r['worst']:.2f}..{r['best']:.2f} "
            f"| {r['tokens_per_call']:.2f} | {rate} | {r['repetition']:.0%} | {r['identical']} of {r['prompts']} |"
        )
    return "\n".join(lines)


def save(result: dict[str, Any], folder: Path, name: str) -> None:
    """name.json and name.md below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    where = ", ".join(f"{k} {v}" for k, v in {**result["where"], **result["settings"]}.items())
    (folder / f"{name}.md").write_text(f"{where}\n\n{markdown(result)}\n")
