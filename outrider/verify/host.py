"""The verdicts of `verify.exact` a place at a time, where logits lie in the host's memory.

The laws are the same. What the walk does not reach is never looked at, and most of a step's places are behind a guess that was
wrong; one vocabulary in numpy takes a fraction of what the vectorised rules take.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.core import tree
from outrider.core.noise import BONUS, RowNoise
from outrider.core.sampling import Settings, line, raced, seen, walked, weights, within
from outrider.core.types import DISTINCT, POINT, Draft, Outcome, Scores

KNOWN = ("greedy", "coupled", "exact")


@dataclass(slots=True)
class Walk:
    """One step's verdict. `scores`: of all places of the draft; `rule`: of KNOWN, for rows that sample: others are greedy."""

    draft: Draft
    scores: Scores
    settings: Settings
    noise: RowNoise
    rule: str

    def outcome(self) -> Outcome:
        here = within(self.scores.computed)
        if here and self.rule == "coupled" and (told := walked(self.scores, self.draft, self.settings, self.noise)):
            return Outcome([told[0]], [told[1]], [0])
        logits = self.scores.computed if here else self.scores.computed.cpu()
        table, rows = tree.children(self.draft), self.draft.rows
        paths, bonus = list[list[int]](), list[int | None]()
        for row in range(rows):
            path = list[int]()
            node, token = self._verdict(logits, ~row, row, table.get(~row, []))
            while node is not None:
                path.append(node)
                node, token = self._verdict(logits, node, row, table.get(node, []))
            paths.append(path)
            bonus.append(token)
        return Outcome(paths, bonus, [0] * rows)

    def _verdict(self, logits: Tensor, place: int, row: int, children: list[int]) -> tuple[int | None, int]:
        """The child that is kept, or None, and the token that comes after the place. logits [..., V], in the host's memory."""
        draft, sampling, at = self.draft, self.settings.params[row], tree.index_of(place, self.draft.rows)
        at = at if self.scores.at is None else self.scores.at[at]
        if sampling.temperature > 0 and self.rule != "exact":
            token, _ = raced(logits, at, place, draft, self.settings, self.noise)
        else:
            x, token = line(seen(logits)[at], place, draft, self.settings)
            if sampling.temperature > 0:
                return self._tried(weights(x, sampling), row, children)
        return next((n for n in children if draft.token[n] == token), None), token

    def _tried(self, r: NDArray[Any], row: int, children: list[int]) -> tuple[int | None, int]:
        """Rejection sampling among the children. r [V]: the target's distribution, not normalised; then the residual."""
        draft, total, left = self.draft, float(r.sum(dtype=np.float64)), dict[int, NDArray[Any]]()
        for node in children:
            token, q = draft.token[node], self._q(node, left)
            chance = float(r[token]) / total
            if self.noise.flip_one(chance if q is None else chance / max(float(q[token]), np.finfo(q.dtype).tiny), row, draft.row[:node].count(row)):
                return node, token
            rest = r.copy() if q is None else np.maximum(r / total - q, 0)
            if q is None:
                rest[token] = 0
            elif draft.kind[node] == DISTINCT:
                left[draft.q_row[node]] = _without(q, token)
            if (mass := float(rest.sum(dtype=np.float64))) > 0:
                r, total = rest, mass
        return None, self.noise.draw_one(r, row, BONUS, 0)

    def _q(self, node: int, left: dict[int, NDArray[Any]]) -> NDArray[Any] | None:
        """What the node was drawn from; without replacement, what was `left` of it; None for a point."""
        if self.draft.kind[node] == POINT or self.draft.q is None:
            return None
        name = self.draft.q_row[node]
        return left[name] if name in left else self.draft.q[name].cpu().numpy()


def _without(q: NDArray[Any], token: int) -> NDArray[Any]:
    left: NDArray[Any] = q.copy()
    left[token] = 0
    left /= max(left.sum(), np.finfo(q.dtype).tiny)
    return left
