"""Traces written by hand: random texts, guesses that come true as often as is wished, costs of any shape, and a run of the
real engine over them. Seconds are plain steps: a plain step takes 1.

Test modules share these as they share the toys.
"""

import random
from collections.abc import Callable
from typing import Any

from outrider.bench.policies import policy
from outrider.bench.recording import Text, Trace, tier_of
from outrider.bench.replay import World, engine_of
from outrider.core.sockets import Controller
from outrider.core.types import Request, SamplingParams, StepRecord
from outrider.measure.cost import DEEPEST, Costs

AT = "replay rows 1 context 512 greedy"
WRONG = 1_000_000  # no text holds it
Chance = Callable[[int, int], float]  # (position, depth) -> that a guess comes true, its parent having done so
Shape = Callable[[int], float]  # nodes or levels -> plain steps


def linear(slope: float, start: float = 1.0) -> Shape:
    return lambda n: start + slope * n


def curve(shape: Shape, seen: float = 50.0) -> dict[str, Any]:
    """A Curve's state: measured everywhere, with little spread."""
    return {"start": shape(0), "slope": shape(1) - shape(0), "spread": 1.1, "seen": {str(n): [seen, shape(n)] for n in range(DEEPEST + 1)}}


def costs(verify: Shape, drafters: dict[str, Shape], catch_up: float = 0.003) -> dict[str, Any]:
    """A Costs' state. `catch_up`: of a token that a drafter has not read."""
    drafting = {f"{name} @ {AT}": curve(shape) for name, shape in drafters.items()}
    rest = {"catch_up": {name: [1, catch_up] for name in drafters}, "plains": {AT: 50}, "steady": {AT: [1, verify(0)]}}
    return {"verify": {AT: curve(verify)}, "draft": drafting, **rest}


def text(rng: random.Random, length: int, chances: dict[str, Chance], score: Callable[[float], float] = lambda p: p, depth: int = 16) -> Text:
    """`score(p)`: what a drafter says of a guess that comes true with probability p. A chance of 0 or less is no guess."""
    tokens = [rng.randrange(100) for _ in range(length)]
    guesses: dict[str, list[tuple[list[int], list[float]]]] = {}
    for name, chance in chances.items():
        guesses[name] = []
        for t in range(length):
            right, said, scores = True, [], []
            for d in range(1, min(depth, length - t) + 1):
                if (p := chance(t, d)) <= 0:
                    break
                right = right and rng.random() < p
                said.append(tokens[t + d - 1] if right else WRONG)
                scores.append(score(p))
            guesses[name].append((said, scores))
    return Text(f"text {rng.random()}", "made up", False, 8, tokens, guesses)


def trace(seed: int, priced: dict[str, Any], chances: dict[str, Chance], *, texts: int = 1, length: int = 400, **how: Any) -> Trace:
    rng = random.Random(seed)
    return Trace(list(chances), priced, [text(rng, length, chances, **how) for _ in range(texts)])


def adaptive(of: Trace, kind: str = "logistic", believed: dict[str, Any] | None = None, drafts: int = 1000) -> Any:
    """Ours, which begins with the trace's costs or with what else is `believed`, and has seen `drafts` drafts."""
    state = {"drafts": drafts, **({"costs": believed} if believed is not None else {})}
    return policy(f"adaptive:{kind}", of.drafters, of.costs, "replay", state)


class Weather(World):
    """A World whose `n`th work, of the target or a drafter, takes `factor(n, name)` times as long."""

    def __init__(self, of: Trace, factor: Callable[[int, str], float] = lambda n, name: 1.0) -> None:
        super().__init__(known := Costs({}), tier_of(of))
        known.take(of.costs)
        self.factor, self.works = factor, 0

    def _slowed(self, before: float, name: str) -> None:
        self.works += 1
        self.time = before + (self.time - before) * self.factor(self.works, name)

    def verify(self, nodes: int) -> None:
        before = self.time
        super().verify(nodes)
        self._slowed(before, "plain" if nodes == 0 else "verify")

    def draft(self, name: str, levels: int, more: int, length: int, tail: int | None = None, along: int = 0) -> None:
        before = self.time
        super().draft(name, levels, more, length, tail, along)
        self._slowed(before, name)


def drive(of: Trace, controller: Controller, world: World | None = None, at_once: tuple[str, ...] = ("lookup",)) -> list[list[StepRecord]]:
    """The records of every text, one after the other."""
    world = world or Weather(of)
    engine, out = engine_of(of, world, controller, at_once), []
    for i, one in enumerate(of.texts):
        world.text = one
        seq = engine.submit(Request(f"w{i}", (0,) * one.length, SamplingParams(max_tokens=len(one.tokens), ignore_eos=True), 0, "coupled"))
        while seq.finish_reason is None:
            engine.step()
        assert seq.generated == one.tokens
        out.append(seq.records)
    return out


def late(records: list[StepRecord], share: float = 0.5) -> list[int]:
    """Nodes verified in each of the last steps."""
    return [r.drafted[0] for r in records[int(len(records) * (1 - share)) :]]
