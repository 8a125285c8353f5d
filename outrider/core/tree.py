"""Pure functions on Draft. Nothing here looks at probabilities or moves data off the host."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, cat

from outrider.core.types import POINT, Draft, Ints


def roots(rows: int) -> Ints:
    """The places of all roots, row 0 first."""
    return ~np.arange(rows)


def all_places(draft: Draft) -> Ints:
    """Every root, then every node: place p is at index `index_of(p, draft.rows)`."""
    return np.concatenate([roots(draft.rows), np.arange(len(draft))])


def index_of(place: int, rows: int) -> int:
    """Position of a place in `all_places`."""
    return ~place if place < 0 else rows + place


def row_of(places: Ints, draft: Draft) -> Ints:
    return np.where(places < 0, ~places, draft.row[np.maximum(places, 0)] if len(draft) else 0)


def depth_of(places: Ints, draft: Draft) -> Ints:
    return np.where(places < 0, 0, draft.depth[np.maximum(places, 0)] if len(draft) else 0)


def grow(
    draft: Draft,
    parent: Ints,
    token: Ints,
    source: int,
    kind: Ints | int = POINT,
    score: NDArray[np.float64] | float = 1.0,
    q: Tensor | None = None,
    q_row: Ints | None = None,
) -> Draft:
    """The draft with one node per (parent place, token).

    A point whose twin (same parent, same token, also a point) is there already is not added twice: the twin gains the
    source. `q` [s, V] are new distributions, `q_row` points into them (-1 for points).
    """
    n = len(token)
    kind, score = np.broadcast_to(kind, n), np.broadcast_to(score, n)
    q_row = np.full(n, -1) if q_row is None else q_row
    known = {(int(p), int(t)): i for i, (p, t, k) in enumerate(zip(draft.parent, draft.token, draft.kind, strict=True)) if k == POINT}
    twin = np.array([known.get((int(p), int(t)), -1) if k == POINT else -1 for p, t, k in zip(parent, token, kind, strict=True)], int)
    sources = draft.source.copy()
    sources[twin[twin >= 0]] |= source
    new = twin < 0
    offset = 0 if draft.q is None else len(draft.q)
    join = np.concatenate
    return Draft(
        rows=draft.rows,
        token=join([draft.token, token[new]]).astype(np.int64),
        parent=join([draft.parent, parent[new]]).astype(np.int64),
        row=join([draft.row, row_of(parent, draft)[new]]).astype(np.int64),
        depth=join([draft.depth, depth_of(parent, draft)[new] + 1]).astype(np.int64),
        source=join([sources, np.full(int(new.sum()), source)]).astype(np.int64),
        kind=join([draft.kind, kind[new]]).astype(np.int64),
        q_row=join([draft.q_row, np.where(q_row >= 0, q_row + offset, -1)[new]]).astype(np.int64),
        score=join([draft.score, score[new]]),
        q=q if draft.q is None else draft.q if q is None else cat([draft.q, q]),
    )


def ancestors(draft: Draft, place: int) -> list[int]:
    """Nodes from depth 1 down to the place itself; [] for a root."""
    path = []
    while place >= 0:
        path.append(place)
        place = int(draft.parent[place])
    return path[::-1]


def children(draft: Draft) -> dict[int, list[int]]:
    """Place -> its child nodes in the order they are to be tried: sampled ones as drawn, then points."""
    table: dict[int, list[int]] = {}
    for node, parent in enumerate(draft.parent.tolist()):
        table.setdefault(parent, []).append(node)
    if (draft.kind != POINT).any() and (draft.kind == POINT).any():
        table = {p: sorted(nodes, key=lambda n: bool(draft.kind[n] == POINT)) for p, nodes in table.items()}
    return table


def survival(draft: Draft) -> NDArray[np.float64]:
    """Per node: the product of the scores on its path."""
    out = draft.score.copy()
    for node, parent in enumerate(draft.parent.tolist()):
        if parent >= 0:
            out[node] *= out[parent]
    return out


def heaviest(draft: Draft, budget: int) -> Ints:
    """Nodes to keep so that each row has at most `budget`: the most likely to survive, ties to the shallower. Closed
    under parents. Whether pruning is lawful is the caller's affair."""
    weight = survival(draft)
    kept: list[int] = []
    for row in range(draft.rows):
        nodes = np.flatnonzero(draft.row == row)
        order = nodes[np.lexsort((nodes, draft.depth[nodes], -weight[nodes]))]
        kept += order[:budget].tolist()
    return np.array(sorted(kept), np.int64)


def select(draft: Draft, keep: Ints) -> Draft:
    """The draft with only the nodes `keep` (ascending, closed under parents), renumbered in that order."""
    new_name = np.full(len(draft), -1)
    new_name[keep] = np.arange(len(keep))
    parent = draft.parent[keep]
    arrays = {f: getattr(draft, f)[keep] for f in ("token", "row", "depth", "source", "kind", "q_row", "score")}
    return replace(draft, parent=np.where(parent < 0, parent, new_name[np.maximum(parent, 0)]), **arrays)


def follow(draft: Draft, choice: Ints) -> tuple[list[list[int]], list[int]]:
    """Walk each row along the chosen tokens. choice [rows + nodes], in the order of `all_places`.

    Returns the accepted path of each row and the token chosen where it ends.
    """
    table, paths, bonus = children(draft), [], []
    for row in range(draft.rows):
        place, path = ~row, []
        while True:
            wanted = choice[index_of(place, draft.rows)]
            step = next((n for n in table.get(place, ()) if draft.token[n] == wanted), None)
            if step is None:
                break
            path.append(step)
            place = step
        paths.append(path)
        bonus.append(int(choice[index_of(place, draft.rows)]))
    return paths, bonus
