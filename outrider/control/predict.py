"""How likely is a drafted node to be accepted, given that its parent was? A ladder of predictors, as for branches.

All see the same: which drafter, how deep, the drafter's own estimate (`score`), the row's last verdicts (`history`,
latest in the lowest bit). All are a few thousand numbers that a profile keeps. Knows nothing of costs or models.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from outrider.core.config import nearest

LEVELS = 4  # depths told apart; deeper ones count as the deepest
HALVE = 1000.0  # observations that a counter stands for at most
FLOOR, CEILING = 0.005, 0.995
KEPT = 0.9  # of what a text has shown, from one step to the next
DOUBT = 3.0  # variance of verdicts that nothing shown stands for
MOST = 1.5  # largest offset of log-odds


def logit(p: float) -> float:
    p = min(max(p, FLOOR), CEILING)
    return math.log(p / (1 - p))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-min(max(x, -30.0), 30.0)))


def _recent(history: int) -> int:
    """How many of the last four verdicts were right."""
    return (history & 1) + (history >> 1 & 1) + (history >> 2 & 1) + (history >> 3 & 1)


def bucket(score: float) -> int:
    """0..7: steps of one in the log-odds of a score, from an even chance on."""
    return min(max(int(logit(score) + 1.5), 0), 7)


class Counters:
    """Shares of successes by key, each beginning as a prior worth two observations. A cell is [observations, share]; it
    forgets what lies more than about HALVE observations back."""

    def __init__(self, known: dict[str, list[float]] | None = None) -> None:
        self.cells: dict[str, list[float]] = known or {}

    def share(self, key: str, prior: float) -> float:
        cell = self.cells.get(key)
        return prior if cell is None else (cell[0] * cell[1] + 2 * prior) / (cell[0] + 2)

    def count(self, key: str, verdict: float, weight: float = 1.0) -> None:
        cell = self.cells.setdefault(key, [0.0, 0.0])
        cell[1] += (verdict - cell[1]) * weight / (cell[0] + weight)
        cell[0] = min(cell[0] + weight, HALVE)


@dataclass(slots=True)
class Bias:
    """How much likelier the guesses of a drafter are in one text than in all: a factor of their odds. The offset of the log-odds is where verdicts
    exceed what was expected of them by nothing: one Newton step after each step of the text, of which the latest count most."""

    factor: float = 1.0
    excess: float = 0.0  # verdicts less what was expected of them at no offset, nearly
    weight: float = 0.0  # their variance

    def of(self, p: float) -> float:
        """A chance in all texts, in this one."""
        return p * self.factor / (1 - p + p * self.factor)

    def learn(self, excess: float, weight: float) -> None:
        """In a step verdicts exceeded by so much what was expected of them in this text; `weight`: the sum of p (1 - p) of what was."""
        self.excess = KEPT * self.excess + excess + weight * math.log(self.factor)
        self.weight = KEPT * self.weight + weight
        self.factor = math.exp(min(max(self.excess / (self.weight + DOUBT), -MOST), MOST))


class Predictor(ABC):
    """What all rungs of the ladder do. `depth`: from 1; `history`: the row's verdicts before this node; `weight`: nodes that a verdict stands for."""

    @abstractmethod
    def predict(self, drafter: str, depth: int, score: float, history: int) -> float:
        """The chance, in FLOOR..CEILING, that a node is accepted if its parent is."""

    @abstractmethod
    def update(self, drafter: str, depth: int, score: float, history: int, verdict: float, weight: float = 1.0) -> None:
        """Learn from a verdict (1: accepted)."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a later process starts from."""


class Static(Predictor):
    """The drafter's own estimate."""

    def predict(self, drafter: str, depth: int, score: float, history: int) -> float:
        return min(max(score, FLOOR), CEILING)

    def update(self, drafter: str, depth: int, score: float, history: int, verdict: float, weight: float = 1.0) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}


class Bimodal(Predictor):
    """A counter per drafter and depth."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.counters = Counters((state or {}).get("cells"))

    def predict(self, drafter: str, depth: int, score: float, history: int) -> float:
        return min(max(self.counters.share(f"{drafter} {min(depth, LEVELS)}", 0.5), FLOOR), CEILING)

    def update(self, drafter: str, depth: int, score: float, history: int, verdict: float, weight: float = 1.0) -> None:
        self.counters.count(f"{drafter} {min(depth, LEVELS)}", verdict, weight)

    def state(self) -> dict[str, Any]:
        return {"cells": self.counters.cells}


class GShare(Predictor):
    """A counter per drafter, depth and the row's last eight verdicts, hashed into a table of fixed size."""

    SIZE = 1024

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.counters = Counters((state or {}).get("cells"))

    def _key(self, drafter: str, depth: int, history: int) -> str:
        place = ((history & 255) << 4 ^ min(depth, LEVELS) ^ sum(drafter.encode()) * 37) % self.SIZE
        return f"{place:x}"

    def predict(self, drafter: str, depth: int, score: float, history: int) -> float:
        return min(max(self.counters.share(self._key(drafter, depth, history), 0.5), FLOOR), CEILING)

    def update(self, drafter: str, depth: int, score: float, history: int, verdict: float, weight: float = 1.0) -> None:
        self.counters.count(self._key(drafter, depth, history), verdict, weight)

    def state(self) -> dict[str, Any]:
        return {"cells": self.counters.cells}


class Logistic(Predictor):
    """A perceptron with a soft threshold: log-odds linear in the score's log-odds, the depth and the last verdicts,
    learned at every verdict with steps that shrink by feature (AdaGrad). The score never counts against a node."""

    RATE = 0.2

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.weights: dict[str, list[float]] = (state or {}).get("weights", {})
        self.squares: dict[str, list[float]] = (state or {}).get("squares", {})

    @staticmethod
    def _features(depth: int, score: float, history: int) -> tuple[float, ...]:
        recent = _recent(history)
        return (1.0, 0.5 * logit(score), 0.25 * min(depth, LEVELS), 0.5 * (recent - 2), 1.0 if history & 1 else 0.0, 1.0 if score >= CEILING else 0.0)

    def _known(self, drafter: str) -> list[float]:
        """[observations, weights...]."""
        weights = self.weights.get(drafter)
        if weights is None:
            weights = self.weights[drafter] = [0.0, 0.0, 1.6, 0.0, 0.0, 0.0, 0.0]
            self.squares[drafter] = [0.0, *[1.0] * 6]
        return weights

    def predict(self, drafter: str, depth: int, score: float, history: int) -> float:
        """Of `_features`, written out: this is asked for many times a step."""
        _, a, b, c, d, e, f = self.weights.get(drafter) or self._known(drafter)
        p, recent = min(max(score, FLOOR), CEILING), _recent(history)
        x = a + b * (0.5 * math.log(p / (1 - p))) + c * (0.25 * min(depth, LEVELS)) + d * (0.5 * (recent - 2))
        x += (e if history & 1 else 0.0) + (f if score >= CEILING else 0.0)
        return min(max(1 / (1 + math.exp(-x)), FLOOR), CEILING) if -30 < x < 30 else CEILING if x > 0 else FLOOR

    def update(self, drafter: str, depth: int, score: float, history: int, verdict: float, weight: float = 1.0) -> None:
        error = weight * (verdict - self.predict(drafter, depth, score, history))
        weights, squares = self.weights[drafter], self.squares[drafter]
        weights[0] += weight
        squares[0] += weight
        for i, x in enumerate(self._features(depth, score, history), 1):
            gradient = error * x
            squares[i] = squares[i] * 0.9995 + gradient * gradient
            weights[i] += self.RATE * gradient / math.sqrt(squares[i])
        weights[2] = max(weights[2], 0.0)

    def state(self) -> dict[str, Any]:
        return {"weights": self.weights, "squares": self.squares}


class Tage(Predictor):
    """Tagged tables of geometric history lengths over a base table (Seznec & Michaud, JILP 2006). The longest history whose
    tag fits and that has been seen often enough answers; a logistic corrects it where it has more to say.

    The base tells drafters, depths and scores apart; the tables, these and the last 2, 4, 8 or 16 verdicts.
    """

    LENGTHS = (2, 4, 8, 16)
    SIZE = 256
    TAGS = 1 << 10
    CONFIDENT = 6

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        state = state or {}
        self.base = Counters(state.get("base"))
        self.tables: list[dict[str, list[float]]] = [{} for _ in self.LENGTHS]  # place -> count, share, tag, usefulness
        for i, length in enumerate(self.LENGTHS):
            for key, (count, share, useful) in state.get("tables", {}).get(str(length), {}).items():
                place, tag = key.split()
                if place not in self.tables[i] or self.tables[i][place][0] < count:
                    self.tables[i][place] = [count, share, float(tag), useful]
        self.corrector = Logistic(state.get("corrector"))
        self.hits = [0] * len(self.LENGTHS)

    @staticmethod
    def _where(drafter: str, depth: int, score: float) -> str:
        return f"{drafter} {min(depth, LEVELS)} {bucket(score)}"

    def _slots(self, key: str, history: int) -> list[tuple[str, int]]:
        """Place and tag in each table."""
        own = sum(ord(c) * 31**i for i, c in enumerate(key[-6:])) + len(key)
        out = []
        for length in self.LENGTHS:
            mixed = (own * 0x9E3779B1 ^ (history & ((1 << length) - 1)) * 0x85EBCA6B ^ length * 0xC2B2AE35) & 0xFFFFFFFF
            out.append((f"{mixed % self.SIZE:x}", mixed >> 16 & (self.TAGS - 1)))
        return out

    def _answer(self, key: str, history: int) -> tuple[float, int]:
        """The probability, and the table it came from (-1: the base)."""
        slots = self._slots(key, history)
        for i in range(len(self.LENGTHS) - 1, -1, -1):
            cell = self.tables[i].get(slots[i][0])
            if cell is not None and cell[2] == slots[i][1] and cell[0] >= self.CONFIDENT:
                return (cell[0] * cell[1] + 1) / (cell[0] + 2), i
        return self.base.share(key, 0.5), -1

    def predict(self, drafter: str, depth: int, score: float, history: int) -> float:
        key = self._where(drafter, depth, score)
        p, table = self._answer(key, history)
        if table >= 0:
            self.hits[table] += 1
        own = self.corrector.predict(drafter, depth, score, history)
        seen = self.base.cells.get(key, (0.0,))[0]
        share = seen / (seen + 20) * 0.5  # how much the tables have to say beside the corrector
        return sigmoid(share * logit(p) + (1 - share) * logit(own))

    def update(self, drafter: str, depth: int, score: float, history: int, verdict: float, weight: float = 1.0) -> None:
        key = self._where(drafter, depth, score)
        p, table = self._answer(key, history)
        slots = self._slots(key, history)
        for i, (place, tag) in enumerate(slots):
            cell = self.tables[i].get(place)
            if cell is not None and cell[2] == tag:
                cell[1] += (verdict - cell[1]) * weight / (cell[0] + weight)
                cell[0] = min(cell[0] + weight, 64.0)
                if i == table:
                    cell[3] += 1 if abs(verdict - p) < 0.5 else -1
        if abs(verdict - p) > 0.5:  # a surprise: the next longer history gets a place, if what is there is of no use
            for i in range(table + 1, len(self.LENGTHS)):
                place, tag = slots[i]
                cell = self.tables[i].get(place)
                if cell is None or (cell[2] != tag and cell[3] <= 0):
                    self.tables[i][place] = [weight, verdict, float(tag), 0.0]
                    break
                if cell[2] != tag:
                    cell[3] -= 1
        self.base.count(key, verdict, weight)
        self.corrector.update(drafter, depth, score, history, verdict, weight)

    def state(self) -> dict[str, Any]:
        tables = {
            str(n): {f"{place} {tag:.0f}": [c, s, u] for place, (c, s, tag, u) in table.items()}
            for n, table in zip(self.LENGTHS, self.tables, strict=True)
        }
        return {"base": self.base.cells, "tables": tables, "corrector": self.corrector.state()}


LADDER: dict[str, Any] = {"static": Static, "bimodal": Bimodal, "gshare": GShare, "logistic": Logistic, "tage": Tage}


def predictor(name: str, state: dict[str, Any] | None = None) -> Predictor:
    """A predictor of the ladder, as it was when its state was kept."""
    if name not in LADDER:
        raise nearest(name, LADDER, "predictor")
    made: Predictor = LADDER[name]() if name == "static" else LADDER[name](state)
    return made
