"""Exact laws instead of samples: a noise that visits every way a run can go, and the plain law to compare with.

`law(run)` executes `run` once for every combination of choices (depth first, replaying a recorded prefix) and adds
up the probabilities of what it returns. Branches of probability zero are never entered. For batches of one row.
Invariant: within a step no address of the noise is asked for twice, for then two choices would not be independent.
"""

import math
from collections.abc import Callable, Collection, Hashable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from outrider.core.noise import ACCEPT, RowNoise
from outrider.core.sampling import Settings
from outrider.core.types import Draft, Ints, Outcome, Request, SamplingParams, Scores, Sequence
from outrider.models.toy import ToyModel
from outrider.verify.host import Walk

Text = tuple[int, ...]
Law = dict[Text, float]
Next = Callable[[Text], list[float]]
T = TypeVar("T", bound=Hashable)


class Enumerator:
    """One run: follows the turns of `script`, then takes the first turn everywhere. Speaks the verbs of RowNoise."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.weight = script, 1.0
        self.trail: list[tuple[int, int]] = []  # (turn taken, turns there are)
        self.asked: set[tuple[int, int]] = set()

    def fresh(self) -> "Enumerator":
        """A new step: addresses may be used again."""
        self.asked.clear()
        return self

    def choose(self, weights: list[float]) -> int:
        turns = [i for i, w in enumerate(weights) if w > 0]
        total = math.fsum(weights[i] for i in turns)
        assert turns and math.isfinite(total), f"nothing to choose from: {weights}"
        at = len(self.trail)
        turn = self.script[at] if at < len(self.script) else 0
        self.trail.append((turn, len(turns)))
        self.weight *= weights[turns[turn]] / total
        return turns[turn]

    def _ask(self, purpose: int, row: Ints, index: Ints) -> None:
        assert (row == 0).all()
        for i in index.tolist():
            assert (purpose, i) not in self.asked, f"address {(purpose, i)} asked twice in a step"
            self.asked.add((purpose, i))

    def flip(self, p: Tensor, row: Ints, index: Ints) -> Tensor:
        self._ask(ACCEPT, row, index)
        return torch.tensor([self.choose([x, 1 - x]) == 0 for x in p.tolist()])

    def draw(self, p: Tensor, row: Ints, purpose: int, index: Ints) -> Tensor:
        self._ask(purpose, row, index)
        return torch.tensor([self.choose(weights) for weights in p.tolist()])

    def flip_one(self, p: float, row: int, index: int) -> bool:
        return bool(self.flip(torch.tensor([p], dtype=torch.float64), np.array([row]), np.array([index])))

    def draw_one(self, weights: np.ndarray, row: int, purpose: int, index: int) -> int:
        return int(self.draw(torch.from_numpy(weights)[None], np.array([row]), purpose, np.array([index])))

    def next_script(self) -> list[int] | None:
        trail = list(self.trail)
        while trail and trail[-1][0] + 1 == trail[-1][1]:
            trail.pop()
        return [turn for turn, _ in trail[:-1]] + [trail[-1][0] + 1] if trail else None


def noise_of(rows: int, seed: int = 0, step: int = 0, length: int = 0) -> RowNoise:
    return RowNoise(np.arange(rows) + 1000 * seed, np.full(rows, step), np.full(rows, length))


class OnHost:
    """A rule as `Walk` applies it, place by place."""

    lossless = True

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> "OnHost":
        return self

    def __repr__(self) -> str:
        return f"{self.name} on the host"

    def accept(self, draft: Draft, logp: Tensor, noise: Any) -> Outcome:
        sampling = SamplingParams(temperature=float(self.name != "greedy"))
        settings = Settings.of([Sequence(Request(str(r), (0,), sampling, 0, self.name), [0]) for r in range(draft.rows)])
        return Walk(draft, Scores(logp.contiguous()), settings, noise, self.name).outcome()


def law(run: Callable[[Enumerator], T]) -> dict[T, float]:
    """Every outcome of `run`, with its probability."""
    out: dict[T, float] = {}
    script: list[int] | None = []
    while script is not None:
        noise = Enumerator(script)
        outcome = run(noise)
        out[outcome] = out.get(outcome, 0.0) + noise.weight
        script = noise.next_script()
    return out


def completed(texts: Law, p: Next, length: int, ends: Collection[int] = ()) -> Law:
    """The law over texts of `length` tokens (or ended ones) when shorter texts are carried on by plain decoding."""
    out = dict(texts)
    for n in range(length):
        for text in [t for t in out if len(t) == n and not (t and t[-1] in ends)]:
            weight = out.pop(text)
            for token, share in enumerate(p(text)):
                out[*text, token] = out.get((*text, token), 0.0) + weight * share
    return out


def distance(a: Law, b: Law) -> float:
    """Total variation."""
    return sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys()) / 2


class Table(ToyModel):
    """A ToyModel that remembers its tables: an enumeration asks for the same ones thousands of times."""

    def logits(self, text: list[int]) -> np.ndarray:
        known = self.__dict__.setdefault("known", {})
        if (key := tuple(text)) not in known:
            known[key] = super().logits(text)
        return known[key].copy()


def plain(model: ToyModel, prompt: Text, s: SamplingParams, ends: Collection[int] = ()) -> Next:
    """The next-token law of plain decoding: every processor, one scalar at a time, from its definition."""

    def after(new: Text) -> list[float]:
        x = [float(v) for v in model.logits([*prompt, *new])]
        for token, bias in s.logit_bias:
            x[token] += bias
        for t in range(len(x)):
            if t in prompt or t in new:
                x[t] = x[t] / s.repetition_penalty if x[t] > 0 else x[t] * s.repetition_penalty
            if t in new:
                x[t] -= s.presence_penalty + s.frequency_penalty * new.count(t)
            if t in ends and len(new) < s.min_tokens:
                x[t] = -math.inf
        if s.temperature == 0:
            return [float(t == x.index(max(x))) for t in range(len(x))]
        return truncated([math.exp((v - max(x)) / s.temperature) for v in x], s)

    return after


def truncated(weights: list[float], s: SamplingParams) -> list[float]:
    """Top-k, then top-p of what is left, then min-p of what is left."""
    order = sorted(range(len(weights)), key=lambda t: -weights[t])
    order = order[: s.top_k] if s.top_k else order
    total, before, kept = sum(weights[t] for t in order), 0.0, []
    for t in order:
        if before < s.top_p * total:
            kept.append(t)
        before += weights[t]
    kept = [t for t in kept if weights[t] >= s.min_p * weights[order[0]]]
    total = sum(weights[t] for t in kept)
    return [weights[t] / total if t in kept else 0.0 for t in range(len(weights))]
