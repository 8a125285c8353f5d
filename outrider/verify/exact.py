"""Lossless rules: the text keeps the target's distribution whatever was drafted.

`Coupled`: the target's own token is fixed by addressed noise at every place; a node is kept iff it is that token
(2408.07978). Greedy is the same walk without noise. `MultiRound`: rejection sampling down the tree (2211.17192,
siblings as in SpecInfer 2305.09781 and Sequoia 2402.12374): a sampled child with its q, then the residual
norm(max(0, r - q)); a point child with probability r(x), then r without x. Both are vectorised over rows.
"""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from outrider.core import tree
from outrider.core.noise import BONUS, RowNoise
from outrider.core.sampling import argmax
from outrider.core.types import DISTINCT, POINT, Draft, Outcome


class Greedy:
    """The most likely token everywhere. Takes logits or log-probabilities: only their argmax matters."""

    name: ClassVar = "greedy"
    lossless: ClassVar = True

    def accept(self, draft: Draft, logp: Tensor, noise: RowNoise) -> Outcome:
        return walk(draft, argmax(logp).tolist())


class Coupled:
    """The token that wins the race of its position: a function of text, settings and seed, not of the draft."""

    name: ClassVar = "coupled"
    lossless: ClassVar = True

    def accept(self, draft: Draft, logp: Tensor, noise: RowNoise) -> Outcome:
        places = tree.all_places(draft)
        return walk(draft, argmax(noise.race(logp, tree.row_of(places, draft), tree.depth_of(places, draft) + 1)).tolist())


def walk(draft: Draft, choice: list[int]) -> Outcome:
    """Keep what was drafted as the target would have chosen it. choice [rows + nodes]: its token at every place."""
    paths, bonus = tree.follow(draft, choice)
    return Outcome(paths, list(bonus), [0] * draft.rows)


class MultiRound:
    """Token-wise rejection sampling, the children of a node one after the other."""

    name: ClassVar = "exact"
    lossless: ClassVar = True

    def accept(self, draft: Draft, logp: Tensor, noise: RowNoise) -> Outcome:
        p, table, rows = logp.exp(), tree.children(draft), draft.rows
        within = np.array([draft.row[:i].count(r) for i, r in enumerate(draft.row)], np.int64)
        paths: list[list[int]] = [[] for _ in range(rows)]
        place = np.array(tree.roots(rows))
        residual = p[:rows].clone()
        walking = np.arange(rows)
        while len(walking):
            stepped = np.full(rows, -1)
            lines = {r: table.get(int(place[r]), []) for r in walking.tolist()}
            q_of: dict[tuple[int, int], Tensor] = {}
            for round_ in range(max(map(len, lines.values()), default=0)):
                trying = np.array([r for r in walking.tolist() if stepped[r] < 0 and round_ < len(lines[r])], np.int64)
                if not len(trying):
                    break
                nodes = np.array([lines[r][round_] for r in trying])
                taken = self._try(draft, nodes, trying, residual, q_of, noise, within)
                stepped[trying[taken]] = nodes[taken]
            for r in np.flatnonzero(stepped >= 0).tolist():
                paths[r].append(int(stepped[r]))
                place[r] = stepped[r]
                residual[r] = p[rows + stepped[r]]
            walking = np.flatnonzero(stepped >= 0)
        everyone = np.arange(rows)
        bonus = noise.draw(residual, everyone, BONUS, np.zeros(rows, np.int64))
        return Outcome(paths, [int(t) for t in bonus.tolist()], [0] * rows)

    def _try(
        self,
        draft: Draft,
        nodes: np.ndarray,
        rows: np.ndarray,
        residual: Tensor,
        q_of: dict[tuple[int, int], Tensor],
        noise: RowNoise,
        within: np.ndarray,
    ) -> np.ndarray:
        """One child of each of `rows`: bool [n], whether it is accepted; the residuals of the others are reduced."""
        at = torch.from_numpy(rows).to(residual.device)
        token = torch.tensor(draft.text(nodes.tolist()), device=residual.device)[:, None]
        point = torch.tensor([draft.kind[n] == POINT for n in nodes.tolist()], device=residual.device)[:, None]
        r = residual[at]
        q = torch.stack([self._q(draft, int(n), int(i), q_of, r) for n, i in zip(nodes, rows, strict=True)])
        r_x, q_x = r.gather(-1, token), q.gather(-1, token)
        probability = torch.where(point, r_x, (r_x / q_x.clamp_min(torch.finfo(q.dtype).tiny)).clamp_max(1.0))
        taken = noise.flip(probability[:, 0], rows, within[nodes]).cpu().numpy()
        rest = torch.where(point, r.scatter(-1, token, 0.0), (r - q).clamp_min(0.0))
        mass = rest.sum(-1, keepdim=True)
        rest = torch.where(mass > 0, rest / mass.clamp_min(torch.finfo(r.dtype).tiny), r)
        for i, (node, row) in enumerate(zip(nodes.tolist(), rows.tolist(), strict=True)):
            if not taken[i]:
                residual[row] = rest[i]
                if draft.kind[node] == DISTINCT:
                    left = q[i].scatter(0, token[i], 0.0)
                    q_of[row, draft.q_row[node]] = left / left.sum().clamp_min(torch.finfo(q.dtype).tiny)
        return taken

    def _q(self, draft: Draft, node: int, row: int, q_of: dict[tuple[int, int], Tensor], like: Tensor) -> Tensor:
        """What the node was drawn from; without replacement, what was left of it."""
        if draft.kind[node] == POINT or draft.q is None:
            return torch.zeros_like(like[0])
        name = draft.q_row[node]
        return q_of[row, name] if (row, name) in q_of else draft.q[name].to(like)


RULES: dict[str, type[Greedy] | type[Coupled] | type[MultiRound]] = {"greedy": Greedy, "coupled": Coupled, "exact": MultiRound}
