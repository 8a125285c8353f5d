"""What a sampled verdict costs the host: a place at a time, as logits in its memory are judged, and by the vectorised rules.

Random logits, no model: the two are timed in turn on the same steps, so their ratio is the code's, not the machine's.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from outrider.bench.report import provenance, save_as
from outrider.core import tree
from outrider.core.noise import RowNoise
from outrider.core.sampling import Settings, warp
from outrider.core.types import Draft, Outcome, Request, SamplingParams, Scores, Sequence
from outrider.verify.exact import RULES
from outrider.verify.host import Walk

VOCABULARIES, GUESSES = (4_096, 128_000), (0, 4)
BOUNDS: dict[str, dict[str, Any]] = {"all tokens": {}, "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9}}


def verdicts(rule: str = "coupled", rounds: int = 20, vocabularies: tuple[int, ...] = VOCABULARIES) -> dict[str, Any]:
    """Milliseconds of a verdict at T = 1, medians over rounds, by vocabulary, guesses and bounds."""
    rows = []
    for vocab in vocabularies:
        for guesses in GUESSES:
            for name, bounds in BOUNDS.items():
                host, vectorised = _timed(rule, vocab, guesses, bounds, rounds)
                ratios = sorted(b / a for a, b in zip(host, vectorised, strict=True))
                rows.append({
                    "vocabulary": vocab, "guesses": guesses, "bounds": name, "host_ms": 1e3 * median(host), "vectorised_ms": 1e3 * median(vectorised),
                    "ratio": median(ratios), "least": ratios[0], "most": ratios[-1],
                })  # fmt: skip
    return {"where": provenance(), "rule": rule, "rounds": rounds, "rows": rows}


def _timed(rule: str, vocab: int, guesses: int, bounds: dict[str, Any], rounds: int) -> tuple[list[float], list[float]]:
    """Seconds by hand and round. The guesses are those of a drafter that is right half of the time."""
    rng, host, vectorised = np.random.default_rng(0), list[float](), list[float]()
    for turn in range(rounds + 1):
        logits = torch.from_numpy(rng.normal(0, 3, (guesses + 1, vocab)).astype(np.float32))
        draft = tree.run(tree.empty(1), -1, [int(x.argmax()) if rng.random() < 0.5 else 0 for x in logits[:guesses]], 1, [0.5] * guesses)
        sampling = SamplingParams(temperature=1.0, **bounds)
        settings = Settings.of([Sequence(Request("timed", (1,), sampling, turn, rule), [1])])
        took = [_seconds(call, RowNoise(*np.array([[turn], [0], [1]]))) for call in _hands(rule, draft, logits, settings)]
        if turn:  # the first warms up
            host.append(took[0])
            vectorised.append(took[1])
    return host, vectorised


def _hands(rule: str, draft: Draft, logits: torch.Tensor, settings: Settings) -> list[Callable[[RowNoise], Outcome]]:
    places = tree.all_places(draft)
    return [
        lambda noise: Walk(draft, Scores(logits), settings, noise, rule).outcome(),
        lambda noise: RULES[rule]().accept(draft, warp(logits, places, draft, settings), noise),
    ]


def _seconds(call: Callable[[RowNoise], Outcome], noise: RowNoise) -> float:
    start = time.perf_counter()
    call(noise)
    return time.perf_counter() - start


def markdown(result: dict[str, Any]) -> str:
    lines = ["| vocabulary | guesses | of | a place at a time, ms | vectorised, ms | times as long | over rounds |", "|---" * 7 + "|"]
    for r in result["rows"]:
        lines.append(
            f"| {r['vocabulary']:,} | {r['guesses']} | {r['bounds']} | {r['host_ms']:.2f} | {r['vectorised_ms']:.2f} | {r['ratio']:.1f} | {r['least']:.1f}..{r['most']:.1f} |"
        )
    return "\n".join(lines)


def save(result: dict[str, Any], folder: Path) -> None:
    """verdict.json and .md below `folder`."""
    save_as(folder, "verdict", json.dumps(result, indent=1), markdown(result))
