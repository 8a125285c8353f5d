"""How many tokens differ between plain and speculative texts, with strict and without, and what strict costs.

Every prompt is written greedily and with a seed at T = 1 (rule coupled) by a plain runtime that has no drafter loaded and
by one that drafts, each set of drafters in turn; tokens are compared place by place, a missing one differs. A text that
parts at one near-tie differs from there on, so one flip may count for many. Seconds are of decoding.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import outrider
from outrider import reference
from outrider.bench import prompts
from outrider.bench.report import provenance, save_as
from outrider.bench.run import fresh
from outrider.measure.trace import stats
from outrider.runtime.door import Runtime

DRAFTERS: dict[str, list[str]] = {"lookup": ["lookup"], "model": ["model"], "lookup + model": ["lookup", "model"]}


@dataclass(frozen=True, slots=True)
class Text:
    """One text and the seconds its decoding took."""

    tokens: list[int]
    seconds: float

    @property
    def rate(self) -> float:
        return len(self.tokens) / self.seconds


def strict(count: int = 5, max_tokens: int = 256, depth: int = 4, progress: Callable[[str], None] = print, **settings: Any) -> dict[str, Any]:
    """Tokens compared and differing by mode, kind of text and drafters; geometric means of tokens a second."""
    settings = {"compile": "wait", "dtype": "bfloat16", **settings, "rows": 1, "depth": depth}
    pair = ["lookup", f"model:{reference.draft()}"]
    runtimes = {
        (mode, kind): fresh(outrider.load(reference.target(), drafters=names, strict=mode == "strict", **settings))
        for mode in ("strict", "free") for kind, names in (("plain", []), ("fast", pair))
    }  # fmt: skip
    asked = [prompt for category in prompts.CATEGORIES for prompt in prompts.load(category)[:count]]
    differing: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    rates: dict[str, list[float]] = defaultdict(list)
    for i, prompt in enumerate(asked):
        progress(f"{i + 1} of {len(asked)} prompts")
        for mode in ("strict", "free"):
            for temperature in (0.0, 1.0):
                plain = _write(runtimes[mode, "plain"], prompt, temperature, max_tokens, "off")
                rates[f"{mode}, plain"].append(plain.rate)
                for name, drafters in DRAFTERS.items():
                    fast = _write(runtimes[mode, "fast"], prompt, temperature, max_tokens, drafters)
                    rates[f"{mode}, {name}"].append(fast.rate)
                    wrong = sum(a != b for a, b in zip_longest(plain.tokens, fast.tokens))
                    entry = differing[f"{mode}, {'greedy' if temperature == 0 else 'coupled, T = 1'}, {name}"]
                    entry[:] = entry[0] + max(len(plain.tokens), len(fast.tokens)), entry[1] + wrong, entry[2] + (wrong > 0)
    told = {key: dict(zip(("tokens", "differing", "texts_that_part"), entry, strict=True)) for key, entry in differing.items()}
    mean = {key: math.exp(sum(map(math.log, values)) / len(values)) for key, values in rates.items()}
    return {"where": provenance(), "settings": {"prompts": count, "max_tokens": max_tokens, **settings}, "compared": told, "tokens_per_second": mean}


def _write(rt: Runtime, prompt: prompts.Prompt, temperature: float, max_tokens: int, drafters: Any) -> Text:
    request = rt.request(prompt.encode(rt.tokenizer), max_tokens=max_tokens, temperature=temperature, seed=1, rule="coupled", speculation=drafters)
    seq = rt.engine.submit(request)
    while seq.finish_reason is None:
        rt.engine.advance([seq])
    figures = stats(seq.records, request.id)
    return Text(seq.generated, figures["seconds"] - figures["seconds_by_stage"]["prefill"])


def markdown(result: dict[str, Any]) -> str:
    """Two tables."""
    lines = ["| texts against plain ones of the same mode | tokens | differing | texts that part |", "|---|---|---|---|"]
    lines += [f"| {key} | {e['tokens']} | {e['differing']} | {e['texts_that_part']} |" for key, e in result["compared"].items()]
    speed = result["tokens_per_second"]
    lines += ["", "| tokens/s, geometric mean | strict | free | strict costs |", "|---|---|---|---|"]
    for name in ("plain", *DRAFTERS):
        a, b = speed[f"strict, {name}"], speed[f"free, {name}"]
        lines.append(f"| {name} | {a:.0f} | {b:.0f} | {b / a:.2f}x |")
    return "\n".join(lines)


def save(result: dict[str, Any], folder: Path) -> None:
    """strict.json and strict.md below `folder`."""
    save_as(folder, "strict", json.dumps(result, indent=1), markdown(result))
