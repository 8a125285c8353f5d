"""What could have been reached on a trace: in hindsight, and by one who knows how likely every guess is but not how it ends.

Hindsight: V(t) = min over (drafter, depth) of cost + V(t + 1 + accepted), exact by dynamic programming; no policy can know it. Informed: at every
position, of the likeliest nodes of every set of drafters the number that maximises tokens - rate x cost, with the acceptance probabilities that the
trace itself shows and the rate at which this very policy produces (Dinkelbach's iteration).
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from outrider.bench.recording import AT_ONCE, DEPTH, Text, Trace, tier_of
from outrider.bench.replay import beside
from outrider.control.predict import bucket
from outrider.control.starts import LONG, TAIL
from outrider.measure.cost import CALM, Costs, situation


class Offer(NamedTuple):
    """What may be drafted at a position: tokens expected, seconds, and how deep each drafter goes. {}: plain decoding."""

    tokens: float
    seconds: float
    depths: dict[str, int]


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of plans on one text; `first`: what a drafter's first use costs more, its reading of the prompt."""

    steady: float
    verify: list[float]
    draft: dict[str, list[float]]
    first: dict[str, float]
    beside: dict[str, float]  # of a token that a drafter reads along with its own

    def drafting(self, text: Text, name: str, t: int, levels: int) -> float:
        """So many levels of a drafter after t tokens."""
        steps = text.taken(name, t, levels)
        return self.draft[name][steps] + self.beside[name] * sum([text.foreseen(name, t, step, levels) for step in range(steps)])

    def plain(self, calm: int) -> float:
        """A plain step after `calm` others."""
        return self.steady if calm >= CALM else self.verify[0]


def prices(trace: Trace, text: Text) -> Prices:
    costs = Costs({})
    costs.take(trace.costs)
    at = situation(tier_of(trace), 1, text.length + len(text.tokens), text.sampled)
    curve = costs.verifying(at)
    assert curve is not None
    drafting, first, along = {}, {}, {}
    for name in trace.drafters:
        own = costs.drafting(name, at)
        assert own is not None
        read = TAIL if text.length > LONG and name not in AT_ONCE else text.length
        drafting[name], first[name], along[name] = own.drawn().line, costs.catching_up(name, at, read), beside(costs, name, at)
    return Prices(costs.plainly(at), curve.drawn().line, drafting, first, along)


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
            price.verify[depth] + price.drafting(text, name, t, depth) + later[t + 1 + min(depth, right)][0]
            for name, right, said in ((name, accepted(text, name, t), len(text.guesses[name][t][0])) for name in team)
            for depth in range(1, min(said, total - t - 1) + 1)
        ]
        later[t] = [min([price.plain(calm) + later[t + 1][min(calm + 1, CALM)], *drafted]) for calm in range(CALM + 1)]
    return later[0][CALM]


def informed(trace: Trace, text: Text) -> float:
    """Seconds of one who knows the probabilities of this text's own guesses."""
    price, table = prices(trace, text), _shares(trace, text)
    offers = {team: [_offers(text, t, price, table, team) for t in range(len(text.tokens))] for team in _teams(trace) if team}
    return min(
        _informed(text, price, [own for some, own in offers.items() if set(some) <= set(team)]) + sum(price.first[name] for name in team)
        for team in _teams(trace)
    )


def _informed(text: Text, price: Prices, offers: list[list[list[Offer]]]) -> float:
    """offers: by who drafts, position."""
    total = len(text.tokens)
    rate, seconds = 1 / price.steady, 0.0
    for _ in range(8):
        t, seconds, calm = 0, 0.0, CALM
        while t < total:
            plain = Offer(1.0, price.plain(calm), {})
            best = max([plain, *(offer for own in offers for offer in own[t])], key=lambda o: o.tokens - rate * o.seconds)
            seconds += best.seconds
            calm = 0 if best.depths else calm + 1
            t += 1 + min(max([min(depth, accepted(text, name, t)) for name, depth in best.depths.items()], default=0), total - t - 1)
        if abs(total / seconds - rate) < 1e-3 * rate:
            break
        rate = total / seconds
    return seconds


def _offers(text: Text, t: int, price: Prices, table: dict[tuple[str, int, int], float], team: tuple[str, ...]) -> list[Offer]:
    """What a team could draft: its likeliest nodes, any number of them. A node that two would guess is as likely as the surer says, and drafted by
    the first; those beside one another are together no likelier than what is before them."""
    survival, by = _survivals(text, t, table, team)
    tokens, depths, out = 1.0, dict.fromkeys(team, 0), []
    for n, path in enumerate(sorted(survival, key=lambda path: (-survival[path], len(path)))[: len(price.verify) - 1], 1):
        tokens += survival[path]
        depths[by[path]] = max(depths[by[path]], len(path))
        out.append(
            Offer(
                tokens,
                price.verify[n] + sum(price.drafting(text, name, t, k) for name, k in depths.items() if k),
                {k: v for k, v in depths.items() if v},
            )
        )
    return out


def _survivals(
    text: Text, t: int, table: dict[tuple[str, int, int], float], team: tuple[str, ...]
) -> tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], str]]:  # fmt: skip
    """By path: how likely it is to come true, and who drafts it."""
    chance: dict[tuple[int, ...], float] = {}
    by: dict[tuple[int, ...], str] = {}
    for name in team:
        said, scores = text.guesses[name][t]
        for depth, score in enumerate(scores[: len(text.tokens) - t - 1], 1):
            path = tuple(said[:depth])
            by.setdefault(path, name)
            chance[path] = max(chance.get(path, 0.0), table[name, min(depth, 3), bucket(score)])
    survival: dict[tuple[int, ...], float] = {(): 1.0}
    left = dict(survival)  # of each, what its children do not take
    for path in sorted(chance, key=lambda path: (len(path), -chance[path])):
        survival[path] = left[path] = min(survival[path[:-1]] * chance[path], left[path[:-1]])
        left[path[:-1]] -= survival[path]
    del survival[()]
    return survival, by


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
