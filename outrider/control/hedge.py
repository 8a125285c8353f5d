"""Which drafter has been worth its cost lately? Exponential weights over drafters, with full information.

Every verification grades every drafter that had a guess, used or not (Freund & Schapire 1997; sleeping experts as in
Freund et al. 1997: who had no guess keeps its weight). Regret grows with the root of the steps.
"""

import math
from typing import Any

RATE, FORGET, BOUND = 0.1, 0.99, 3.0


class Hedge:
    """Log-weights by drafter. A gain is (tokens a step would have given) / (its cost in plain steps) - 1, bounded."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        kept = (state or {}).get("weights", {})
        self.weights: dict[str, float] = {name: weight for name, (_, weight) in kept.items()}
        self.graded: dict[str, int] = {name: count for name, (count, _) in kept.items()}

    def grade(self, gains: dict[str, float]) -> None:
        """Take in what each awake drafter would have brought this step."""
        for name, gain in gains.items():
            self.weights[name] = FORGET * self.weights.get(name, 0.0) + RATE * min(max(gain, -BOUND), BOUND)
            self.graded[name] = self.graded.get(name, 0) + 1

    def shares(self, names: list[str]) -> dict[str, float]:
        """Weights of these drafters, summing to 1."""
        raw = {name: math.exp(self.weights.get(name, 0.0)) for name in names}
        total = sum(raw.values())
        return {name: x / total for name, x in raw.items()}

    def state(self) -> dict[str, Any]:
        return {"weights": {name: [self.graded[name], weight] for name, weight in self.weights.items()}}
