"""What could have been reached on a trace: in hindsight, and by one who knows how likely every guess is but not how it ends.

Hindsight: V(t) = min over (drafter, depth) of cost + V(t + 1 + accepted), exact by dynamic programming; no policy can know it.
Informed: at every position the plan that maximises tokens - rate x cost, with the acceptance probabilities that the
trace itself shows and the rate at which this very policy produces (Dinkelbach's iteration).
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations

from outrider.bench.replay import DEPTH, Text, Trace, tier_of
from outrider.control.predict import bucket
from outrider.measure.cost import CALM, Costs, situation

Choice = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of plans on one text; `first`: what a drafter's first use costs more, its reading of the prompt."""

    steady: float
    verify: list[float]
    draft: dict[str, list[float]]
    first: dict[str, float]

    def plain(self, calm: int) -> float:
        """A plain step after `calm` others."""
        return self.steady if calm >= CALM else self.verify[0]

    def of(self, name: str, depth: int) -> float:
        return self.verify[depth] + self.draft[name][depth]


def prices(trace: Trace, text: Text) -> Prices:
    costs = Costs({})
    costs.take(trace.costs)
    at = situation(tier_of(trace), 1, text.length + len(text.tokens), text.sampled)
    curve = costs.verifying(at)
    assert curve is not None
    drafting, first = {}, {}
    for name in trace.drafters:
        own = costs.drafting(name, at)
        assert own is not None
        drafting[name], first[name] = own.drawn().line, costs.catching_up(name, at, text.length)
    return Prices(costs.plainly(at), curve.drawn().line, drafting, first)


def _teams(trace: Trace) -> list[tuple[str, ...]]:
    """Every set of drafters: who is in it reads the prompt once."""
    return [team for n in range(len(trace.drafters) + 1) for team in combinations(trace.drafters, n)]


def accepted(text: Text, name: str, t: int) -> int:
    """Guesses of a drafter at position t that came true."""
    count = 0
    for guess, token in zip(text.guesses[name][t][0], text.tokens[t:], strict=False):
        if guess != token:
            break
        count += 1
    return count


def hindsight(trace: Trace, text: Text) -> float:
    """Seconds of the best plans for a text whose end is known."""
    price = prices(trace, text)
    return min(_hindsight(text, price, team) + sum(price.first[name] for name in team) for team in _teams(trace))


def _hindsight(text: Text, price: Prices, team: tuple[str, ...]) -> float:
    total = len(text.tokens)
    later = [[0.0] * (CALM + 1) for _ in range(total + DEPTH + 2)]  # by position and plain steps before it
    for t in range(total - 1, -1, -1):
        drafted = [
            price.of(name, depth) + later[t + 1 + min(depth, right)][0]
            for name, right, said in ((name, accepted(text, name, t), len(text.guesses[name][t][0])) for name in team)
            for depth in range(1, min(said, total - t - 1) + 1)
        ]
        later[t] = [min([price.plain(calm) + later[t + 1][min(calm + 1, CALM)], *drafted]) for calm in range(CALM + 1)]
    return later[0][CALM]


def informed(trace: Trace, text: Text) -> float:
    """Seconds of one who knows the probabilities of this text's own guesses."""
    price, table = prices(trace, text), _shares(trace, text)
    return min(_informed(text, price, table, team) + sum(price.first[name] for name in team) for team in _teams(trace))


def _informed(text: Text, price: Prices, table: dict[tuple[str, int, int], float], team: tuple[str, ...]) -> float:
    total = len(text.tokens)
    rate, seconds = 1 / price.steady, 0.0
    for _ in range(8):
        t, seconds, calm = 0, 0.0, CALM
        while t < total:
            name, depth = _best(text, t, price, table, team, rate, calm)
            seconds += price.of(name, depth) if depth else price.plain(calm)
            calm = 0 if depth else calm + 1
            t += 1 + min(depth, accepted(text, name, t) if depth else 0, total - t - 1)
        if abs(total / seconds - rate) < 1e-3 * rate:
            break
        rate = total / seconds
    return seconds


def _best(
    text: Text, t: int, price: Prices, table: dict[tuple[str, int, int], float], team: tuple[str, ...], rate: float, calm: int
) -> Choice:  # fmt: skip
    best, choice = 1 - rate * price.plain(calm), ("", 0)
    for name in team:
        survival, gained = 1.0, 1.0
        for depth, score in enumerate(text.guesses[name][t][1][: len(text.tokens) - t - 1], 1):
            survival *= table[name, min(depth, 3), bucket(score)]
            gained += survival
            worth = gained - rate * price.of(name, depth)
            if worth > best:
                best, choice = worth, (name, depth)
    return choice


def _shares(trace: Trace, text: Text) -> dict[tuple[str, int, int], float]:
    """How often guesses of a drafter, depth and score came true, given that those before them did; on this text, leaning on
    all texts of its category."""
    own, all_ = _count(trace, [text]), _count(trace, [t for t in trace.texts if t.category == text.category])
    out: dict[tuple[str, int, int], float] = defaultdict(lambda: 0.5)
    for key, (seen, right) in all_.items():
        n, r = own.get(key, (0, 0))
        out[key] = (r + 4 * right / seen) / (n + 4)
    return out


def _count(trace: Trace, texts: list[Text]) -> dict[tuple[str, int, int], tuple[int, int]]:
    found: dict[tuple[str, int, int], tuple[int, int]] = {}
    for text in texts:
        for name in trace.drafters:
            for t in range(len(text.tokens)):
                right = accepted(text, name, t)
                scores = text.guesses[name][t][1][: len(text.tokens) - t]
                for depth, score in enumerate(scores[: right + 1], 1):
                    key = (name, min(depth, 3), bucket(score))
                    seen, came = found.get(key, (0, 0))
                    found[key] = (seen + 1, came + (depth <= right))
    return found
