"""Predictors of acceptance side by side on a trace, as predictors of branches are: each sees every guess once, in order, says
how likely it is to come true, is told, and learns.

Cold: the first tokens of a pair nobody has met; warm: a later pass with what the first ones left. What counts in the end is how soon the tokens
come: the trace is replayed under the scheduler with each of them, twice.
"""

import time
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from outrider.bench.oracle import accepted, prices
from outrider.bench.policies import policy
from outrider.bench.recording import DEPTH, Text, Trace, tier_of
from outrider.bench.replay import replay
from outrider.control.predict import LADDER, predictor
from outrider.control.tables import past

BINS = 10


@dataclass(slots=True)
class Score:
    """What a predictor said and what came."""

    said: list[float]
    came: list[bool]
    products: list[float]
    whole: list[bool]
    tokens: int = 0
    rejected: int = 0
    stopped: int = 0
    wasted: float = 0.0
    seconds: float = 0.0

    def figures(self) -> dict[str, float]:
        """Per 1000 tokens: mis-speculations (verified and rejected, or stopped though the next was right) and milliseconds
        they wasted. AUC, Brier score, expected calibration errors of single guesses and of products; microseconds of a
        prediction and its lesson."""
        n = max(len(self.said), 1)
        return {
            "misspeculations": 1e3 * (self.rejected + self.stopped) / self.tokens, "rejected": 1e3 * self.rejected / self.tokens,
            "stopped": 1e3 * self.stopped / self.tokens, "wasted_ms": 1e6 * self.wasted / self.tokens, "auc": auc(self.said, self.came),
            "brier": sum((p - y) ** 2 for p, y in zip(self.said, self.came, strict=True)) / n, "ece": ece(self.said, self.came),
            "product_ece": ece(self.products, self.whole), "microseconds": 1e6 * self.seconds / n,
        }  # fmt: skip


def auc(said: list[float], came: list[bool]) -> float:
    """The chance that a guess that came true was called likelier than one that did not; ties count half."""
    pairs = sorted(zip(said, came, strict=True))
    good, total, below, rank_sum, i = sum(came), len(came), 0, 0.0, 0
    while i < total:
        j = i
        while j < total and pairs[j][0] == pairs[i][0]:
            j += 1
        rank_sum += (below + (j - i + 1) / 2) * sum(y for _, y in pairs[i:j])
        below, i = j, j
    bad = total - good
    return (rank_sum - good * (good + 1) / 2) / (good * bad) if good and bad else 0.5


def ece(said: list[float], came: list[bool]) -> float:
    """Mean distance of what was said from what came, over BINS bins."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for p, y in zip(said, came, strict=True):
        bins[min(int(p * BINS), BINS - 1)].append((p, y))
    return sum(abs(sum(p for p, _ in b) - sum(y for _, y in b)) for b in bins if b) / max(len(said), 1)


def contest(trace: Trace, cold_tokens: int = 1000) -> dict[str, dict[str, dict[str, float]]]:
    """Figures by predictor: cold (the first tokens) and warm (a third pass over all); `speed`: times plain under the scheduler, which begins
    knowing nothing of guesses, and in its second pass."""
    out, plain = {}, _seconds(trace, policy("plain", trace.drafters, trace.costs, tier_of(trace)))
    for name in LADDER:
        one, controller = predictor(name), policy(f"adaptive:{name}", trace.drafters, trace.costs, tier_of(trace))
        cold = _pass(trace, one, cold_tokens)
        _pass(trace, one, None)
        passes = {"cold": cold.figures(), "warm": _pass(trace, one, None).figures()}
        out[name] = {window: f | {"speed": _faster(plain, _seconds(trace, controller))} for window, f in passes.items()}
    return out


def _seconds(trace: Trace, controller: Any) -> list[float]:
    return [played.seconds for played in replay(trace, controller)]


def _faster(plain: list[float], seconds: list[float]) -> float:
    return geometric_mean([a / b for a, b in zip(plain, seconds, strict=True)])


def _pass(trace: Trace, one: Any, most: int | None) -> Score:
    score = Score([], [], [], [])
    for text in trace.texts:
        for name in trace.drafters:
            _text(trace, text, name, one, score)
        score.tokens += len(text.tokens)
        if most is not None and score.tokens >= most:
            break
    return score


def _text(trace: Trace, text: Text, name: str, one: Any, score: Score) -> None:
    """One drafter over one text, verified as deep as the product of what is said stays above a half of a node's price."""
    price, t, history = prices(trace, text), 0, 0
    slope = (price.verify[8] - price.verify[0]) / 8 / price.verify[0]
    while t < len(text.tokens):
        right, survival, verified = accepted(text, name, t), 1.0, 0
        scores = text.guesses[name][t][1][: min(len(text.tokens) - t, DEPTH)]
        for depth, own in enumerate(scores, 1):
            seen, start = past(history, depth), time.perf_counter()
            p = one.predict(name, depth, own, seen)
            if depth <= right + 1:  # what comes after a wrong guess says nothing of itself
                one.update(name, depth, own, seen, depth <= right)
                score.seconds += time.perf_counter() - start
                score.said.append(p)
                score.came.append(depth <= right)
            survival *= p
            score.products.append(survival)
            score.whole.append(depth <= right)
            verified += verified == depth - 1 and survival > slope
        score.rejected += verified > right
        score.stopped += verified < right
        score.wasted += (price.verify[verified] - price.verify[right]) if verified > right else 0.0
        if scores:
            history = (past(history, right + 1) << (right < len(scores))) & 0xFFFF
        t += 1 + right


def markdown(found: dict[str, dict[str, dict[str, float]]]) -> str:
    columns = ("misspeculations", "rejected", "stopped", "wasted_ms", "auc", "brier", "ece", "product_ece", "microseconds", "speed")
    heads = ("mis-spec. / 1000", "rejected", "stopped", "wasted ms / 1000", "AUC", "Brier", "ECE", "ECE of products", "us a guess", "times plain")
    lines = [f"| predictor | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, windows in found.items():
        for window, f in windows.items():
            lines.append(f"| {name}, {window} | {' | '.join(f'{f[c]:.3f}' if f[c] < 10 else f'{f[c]:.1f}' for c in columns)} |")
    return "\n".join(lines)
