"""Policies to be compared with ours, as controllers: what others ship, and the textbook's bandit. Source: `transformers`'
assisted generation (threshold 0.4, at most 20 tokens; ten of prompt lookup, whose guesses have no chances), SGLang's moving
average of accepted lengths, UCB1 (Auer et al. 2002).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.bench.recording import AT_ONCE
from outrider.control.controller import Adaptive
from outrider.control.fixed import Told, fixed
from outrider.control.tables import Tables
from outrider.core import tree
from outrider.core.config import nearest, whole
from outrider.core.sockets import Controller
from outrider.core.types import MAX_NODES, Draft, Places, Plan, Sequence, StepRecord
from outrider.measure.cost import Costs

DYNAMIC_CAP, DYNAMIC_THRESHOLD, LOOKED_UP = 20, 0.4, 10
DEPTHS = (2, 4, 8, 16)


def chain(names: str, depth: int) -> Plan:
    """A chain of every drafter of NAME+NAME."""
    return Plan(tuple((name, depth, 1) for name in names.split("+"))) if depth else Plan()


def singly_and_together(drafters: Iterable[str]) -> list[str]:
    """Each drafter, and where there are more all of them: what fixed plans name."""
    return list(dict.fromkeys([*(names := list(drafters)), *["+".join(names)] * bool(names)]))


def of_others(drafter: str) -> tuple[str, str]:
    """What `transformers` and SGLang do with a drafter."""
    return f"{drafter}:{LOOKED_UP}" if drafter in AT_ONCE else f"dynamic:{drafter}", f"average:{drafter}"


@dataclass(frozen=True, slots=True)
class Threshold(Told):
    """Draft on while the drafter's own estimate stays at or above a threshold."""

    floor: float = DYNAMIC_THRESHOLD

    def more(self, seqs: list[Sequence], name: str, draft: Draft, frontier: Places) -> Places:
        return [p for p in frontier if p < 0 or draft.score[p] >= self.floor]

    def on(self, score: float, free: bool = False) -> bool:
        return score >= self.floor


@dataclass(slots=True)
class MovingAverage:
    """As deep as drafts of late were right, and one more."""

    name: str
    rate: float = 0.2
    cap: int = 16
    mean: float = 3.0

    def choose(self, seqs: list[Sequence]) -> tuple[Plan, str]:
        return chain(self.name, min(max(round(self.mean) + 1, 1), self.cap)), "average"

    def more(self, seqs: list[Sequence], name: str, draft: Draft, frontier: Places) -> Places:
        return frontier

    def on(self, score: float, free: bool = False) -> bool:
        return True

    def blind(self, name: str) -> int:
        return MAX_NODES

    def went(self, name: str, draft: Draft, frontier: Places) -> None: ...

    def survivals(self, seqs: list[Sequence], draft: Draft) -> list[float]:
        return tree.survival(draft)

    def fill(self, seqs: list[Sequence], draft: Draft, reason: str) -> tuple[list[int] | None, str]:
        return None, reason

    def learn(self, seqs: list[Sequence], record: StepRecord) -> None:
        if any(record.drafted):
            self.mean += self.rate * (sum(record.accepted) / len(record.accepted) - self.mean)

    def end(self, seq: Sequence) -> None: ...


@dataclass(slots=True)
class Bandit:
    """UCB1 over plans; the reward of a step is its tokens a second over the best seen."""

    plans: list[Plan]
    pulls: list[int] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    best: float = 1e-9
    at: int = 0

    def __post_init__(self) -> None:
        self.pulls, self.means = [0] * len(self.plans), [0.0] * len(self.plans)

    def choose(self, seqs: list[Sequence]) -> tuple[Plan, str]:
        total = sum(self.pulls) + 1
        bound = [m / self.best + math.sqrt(2 * math.log(total) / n) if n else math.inf for m, n in zip(self.means, self.pulls, strict=True)]
        self.at = bound.index(max(bound))
        return self.plans[self.at], "ucb1"

    def more(self, seqs: list[Sequence], name: str, draft: Draft, frontier: Places) -> Places:
        return frontier

    def on(self, score: float, free: bool = False) -> bool:
        return True

    def blind(self, name: str) -> int:
        return MAX_NODES

    def went(self, name: str, draft: Draft, frontier: Places) -> None: ...

    def survivals(self, seqs: list[Sequence], draft: Draft) -> list[float]:
        return tree.survival(draft)

    def fill(self, seqs: list[Sequence], draft: Draft, reason: str) -> tuple[list[int] | None, str]:
        return None, reason

    def learn(self, seqs: list[Sequence], record: StepRecord) -> None:
        rate = sum(record.emitted) / max(record.reading.seconds - record.seconds.get("prefill", 0.0), 1e-9)
        self.pulls[self.at] += 1
        self.means[self.at] += (rate - self.means[self.at]) / self.pulls[self.at]
        self.best = max(self.best, rate)

    def end(self, seq: Sequence) -> None: ...


def policy(name: str, drafters: list[str], costs: dict, tier: str, state: dict | None = None) -> Controller:
    """By name: plain, NAME:K, NAME+NAME:K, dynamic:NAME, average:NAME, ucb1, adaptive or adaptive:PREDICTOR (which begin with the costs
    of the trace, and with `state` if it is given)."""
    kind, _, rest = name.partition(":")
    if name == "plain":
        return fixed(Plan())
    if (depth := whole(rest)) is not None and set(asked := kind.split("+")) <= set(drafters) and len(set(asked)) == len(asked):
        return fixed(chain(kind, depth))
    if kind == "dynamic" and rest in drafters and rest not in AT_ONCE:
        return Threshold(lambda seqs: (chain(rest, DYNAMIC_CAP), "dynamic"))
    if kind == "average" and rest in drafters:
        return MovingAverage(rest)
    if name == "ucb1":
        return Bandit([Plan(), *(chain(d, k) for d in singly_and_together(drafters) for k in DEPTHS)])
    if kind == "adaptive":
        bits = {d: 1 << i for i, d in enumerate(drafters)}
        known = Costs({})
        tables = Tables(bits, known, rest or "logistic", state={"costs": costs, **(state or {})})
        return Adaptive(tables, lambda: tier, tails=frozenset(drafters) - AT_ONCE - known.views)
    others = [rule for d in drafters for rule in of_others(d)]
    raise nearest(name, ["plain", "ucb1", "adaptive", *(f"{d}:4" for d in singly_and_together(drafters)), *others], "policy")
