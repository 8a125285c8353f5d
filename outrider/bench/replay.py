"""Replay any policy: the same engine and controllers over texts and guesses that were written down (`recording`), on a clock
that advances by a table of costs.

Greedy and seeded sampling replay exactly: what comes out hangs on nothing else. The time of the controllers' own thinking is
measured apart, live.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from outrider.bench.recording import AT_ONCE, DEPTH, Text, Trace, tier_of
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.sampling import Settings
from outrider.core.sockets import Controller
from outrider.core.types import Draft, ModelSpec, Outcome, Places, Request, SamplingParams, Scores, Sequence, StepRecord
from outrider.measure.cost import CALM, DEEPEST, FAR, Costs, situation
from outrider.runtime.engine import Engine


class World:
    """The clock, the costs and the text of a replay."""

    def __init__(self, costs: Costs, tier: str) -> None:
        self.costs, self.tier, self.time = costs, tier, 0.0
        self.text: Text | None = None
        self.read: dict[str, int] = {}
        self.plain = 0

    def now(self) -> float:
        return self.time

    def at(self) -> Any:
        assert self.text is not None
        return situation(self.tier, 1, self.text.length + len(self.text.tokens), self.text.sampled)

    def verify(self, nodes: int) -> None:
        """A target's step of so many nodes."""
        self.plain = 0 if nodes else self.plain + 1
        curve = self.costs.verifying(self.at())
        assert curve is not None
        self.time += self.costs.plainly(self.at()) if self.plain > CALM else curve.drawn().line[min(nodes, DEEPEST)]

    def draft(self, name: str, levels: int, more: int, length: int, tail: int | None = None, along: int = 0) -> None:
        """A drafter takes `more` steps; `tail`: with how many tokens of the text's end it begins, 0: with all, None: as it began. What it says is
        what it said when it had read all. `along`: tokens that it reads besides, which costs what it does to read them when it catches up."""
        curve = self.costs.drafting(name, self.at())
        assert curve is not None
        line = curve.drawn().line
        if levels == 0:
            behind, self.read[name] = length if tail == 0 else length - self.read.get(name, 0), length
            behind = min(behind, tail or behind)
            self.time += self.costs.catching_up(name, self.at(), behind) if behind > FAR else 0.0
        self.time += line[min(levels + more, DEEPEST)] - (line[levels] if levels else 0.0) + along * beside(self.costs, name, self.at())


def beside(costs: Costs, name: str, at: Any) -> float:
    """Seconds of a token that a drafter reads along with its own."""
    return costs.catching_up(name, at, FAR + 1) / (FAR + 1)


class _Target:
    """A Model that writes the text of the trace."""

    class _Meter:
        def __init__(self, tier: str) -> None:
            self.tier = tier

        def take(self) -> float:
            return 0.0

    def __init__(self, world: World) -> None:
        self.world, self.meter = world, self._Meter(world.tier)
        self.spec = ModelSpec("replay", "-", 1 << 30, 1 << 30, 1, 1, "cpu", "float32")

    def open(self, seq: Sequence) -> None: ...

    def close(self, seq: Sequence) -> None: ...

    def prefill(self, seqs: list[Sequence]) -> None:
        assert self.world.text is not None
        self.world.time += 0.0 if seqs[0].steps else self.world.text.prefill

    def commit(self, seqs: list[Sequence], draft: Draft, outcome: Outcome) -> None: ...

    def drop(self, seqs: list[Sequence]) -> None: ...

    def view(self, layers: tuple[int, ...]) -> "_Target":
        raise OutriderError(f"layers {layers} are no view of a trace", "what was written down has no layers", "a live model")

    def score(self, seqs: list[Sequence], draft: Draft, places: Places, reusing: object = None) -> Scores:
        """What comes next is what came next; below a wrong guess, something that is no token."""
        assert self.world.text is not None
        tokens, done = self.world.text.tokens, seqs[0].produced
        found = []
        for place in places:
            path = draft.text(tree.ancestors(draft, place))
            right = path == tokens[done : done + len(path)] and done + len(path) < len(tokens)
            found.append([float(tokens[done + len(path)]) if right else -1.0, 0.0, 0.0])
        self.world.verify(len(places) - 1)
        return Scores(torch.empty(len(found), 0), found=torch.tensor([found], dtype=torch.float64))


@dataclass(frozen=True, slots=True)
class _Known:
    """Tells, as lookup's own state does, how likely its guess is."""

    all: list[tuple[list[int], list[float]]]
    prompt: int

    def chance(self, tokens: list[int]) -> float:
        scores = self.all[len(tokens) - self.prompt][1]
        return scores[0] if scores else 0.0


class _Guesser:
    """A Drafter that repeats what was written down; it goes a level at a time where the one it stands for did."""

    def __init__(self, name: str, world: World, at_once: bool) -> None:
        self.name, self.world, self.at_once, self.saved, self.bit, self.likely = name, world, at_once, 0, 0, 0
        self.tail: int | None = None

    def begin(self, seq: Sequence) -> None:
        self.world.read.pop(self.name, None)
        if self.at_once and self.world.text is not None:
            seq.slots[self.name] = _Known(self.world.text.guesses[self.name], len(seq.tokens))

    def end(self, seq: Sequence) -> None:
        seq.slots.pop(self.name, None)

    def observe(self, seqs: list[Sequence], draft: Draft, outcome: Outcome) -> None:
        if self.name in self.world.read:
            self.world.read[self.name] += sum([draft.source[n] & self.bit > 0 for n in outcome.paths[0]])

    def extend(
        self, seqs: list[Sequence], draft: Draft, frontier: Places, width: int, source: int, *how: Any, levels: int = 1, on: Any = None
    ) -> Draft:
        text, seq, place, self.bit = self.world.text, seqs[0], frontier[0], source
        assert text is not None
        tail, self.tail, likely, self.likely = self.tail, None, self.likely or DEPTH, 0
        tokens, scores = text.guesses[self.name][seq.produced]
        done, most = 0 if place < 0 else draft.depth[place], len(tokens)
        upto, taken = min(done + levels, most), partial(text.taken, self.name, seq.produced)
        if on is not None and not self.at_once:
            upto = next((n for n in range(done + 1, upto) if not on(scores[n - 1], taken(n + 1) == taken(n))), upto)
        steps = upto - done if self.at_once else taken(upto) - taken(done)
        self.saved = upto - done - steps
        if self.at_once:
            self.world.draft(self.name, done, max(steps, 1), len(seq.tokens))
        else:
            for step in range(taken(done), taken(done) + max(steps, 1)):
                along = min(text.foreseen(self.name, seq.produced, step, done + levels), likely - 1)
                self.world.draft(self.name, step, 1, len(seq.tokens), tail, along)
        return tree.run(draft, place, tokens[done:upto], source, scores[done:upto]) if upto > done else draft


def _as_greedy(seqs: list[Sequence]) -> Settings:
    """Takes what was written down, however it was sampled: to the controller it was sampled, and costs what sampled steps do."""
    return replace(Settings.of(seqs), greedy=np.ones(len(seqs), bool), all_greedy=True, raw=True)


def engine_of(trace: Trace, world: World, controller: Controller, at_once: frozenset[str] = AT_ONCE) -> Engine:
    """The real engine over a trace."""
    engine = Engine(_Target(world), {name: _Guesser(name, world, name in at_once) for name in trace.drafters}, controller, 1)
    engine.now, engine.read = world.now, _as_greedy
    return engine


@dataclass(frozen=True, slots=True)
class Replayed:
    """One text under one policy: seconds after the target's prefill, steps, nodes drafted and accepted, and the records."""

    text: Text
    seconds: float
    steps: int
    drafted: int
    accepted: int
    records: list[StepRecord]


def replay(trace: Trace, controller: Controller) -> list[Replayed]:
    """Every text of the trace, one after the other, under one controller."""
    costs = Costs({})
    costs.take(trace.costs)
    world = World(costs, tier_of(trace))
    engine, out = engine_of(trace, world, controller), []
    for i, text in enumerate(trace.texts):
        world.text, start = text, world.time
        params = SamplingParams(max_tokens=max(text.asked, len(text.tokens)), temperature=float(text.sampled), ignore_eos=True)
        prompt = tuple([0] * text.length)
        seq = engine.submit(Request(f"replay-{i}", prompt, params, 0, "coupled"))
        while seq.finish_reason is None:
            engine.step()
            if seq.produced >= len(text.tokens):
                engine.cancel(seq)
        assert seq.generated[: len(text.tokens)] == text.tokens, "a replay wrote another text"
        drafted, accepted = sum(r.drafted[0] for r in seq.records), sum(r.accepted[0] for r in seq.records)
        out.append(Replayed(text, world.time - start - text.prefill, len(seq.records), drafted, accepted, seq.records))
    return out
