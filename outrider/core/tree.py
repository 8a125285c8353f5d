"""Pure functions on Draft. Nothing here looks at probabilities or moves data off the host."""

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
from torch import Tensor, cat

from outrider.core.types import POINT, Draft, Ints, Places
from outrider.core.types import Sequence as Text


@cache
def empty(rows: int) -> Draft:
    """The draft without nodes: one for all steps, since drafts are never changed in place."""
    return Draft(rows)


def roots(rows: int) -> Places:
    """The places of all roots, row 0 first."""
    return [~r for r in range(rows)]


def all_places(draft: Draft) -> Places:
    """Every root, then every node: place p is at index `index_of(p, draft.rows)`."""
    return [*roots(draft.rows), *range(len(draft))]


def index_of(place: int, rows: int) -> int:
    """Position of a place in `all_places`."""
    return ~place if place < 0 else rows + place


def row_of(places: Iterable[int], draft: Draft) -> Ints:
    return np.array([~p if p < 0 else draft.row[p] for p in places], np.int64)


def depth_of(places: Iterable[int], draft: Draft) -> Ints:
    return np.array([0 if p < 0 else draft.depth[p] for p in places], np.int64)


def sizes(draft: Draft) -> tuple[int, ...]:
    """Nodes of each row."""
    return (len(draft.token),) if draft.rows == 1 else tuple([draft.row.count(row) for row in range(draft.rows)])


def span(start: int, end: int) -> list[int]:
    """start, start + 1, ... below end. Machine code counts by itself, and calls Python to list a range."""
    return [n for n in range(start, end)]  # noqa: C416


def longest(draft: Draft) -> int:
    """Nodes of the row that has most."""
    if draft.rows == 1:
        return len(draft.token)
    most = 0
    for row in range(draft.rows):
        most = max(most, draft.row.count(row))
    return most


def row_at(draft: Draft, place: int) -> int:
    return ~place if place < 0 else draft.row[place]


def depth_at(draft: Draft, place: int) -> int:
    return 0 if place < 0 else draft.depth[place]


def open_at(seqs: list[Text], draft: Draft, places: Places) -> Places:
    """Those below which a text may go on: no end token stands there. What comes after one is cut, whatever it is."""
    return [p for p in places if p < 0 or draft.token[p] not in seqs[draft.row[p]].request.ends]


def ended(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """The tokens up to the first end token, which is the last one that a text can have."""
    return tokens if ends.isdisjoint(tokens) else tokens[: 1 + next(i for i, token in enumerate(tokens) if token in ends)]


def grow(
    draft: Draft,
    parent: Sequence[int],
    token: Sequence[int],
    source: int,
    kind: int = POINT,
    score: Sequence[float] | float = 1.0,
    q: Tensor | None = None,
    q_row: Sequence[int] | None = None,
) -> Draft:
    """The draft with one node per (parent place, token).

    A point whose twin (same parent, same token, also a point) is there already is not added twice: the twin gains the
    source, and `again` holds its score. `q` [s, V] are new distributions, `q_row` points into them (-1 for points).
    """
    parents, tokens = list(map(int, parent)), list(map(int, token))  # arrays, too, and what they hold
    if len(tokens) == 1 and q is None:
        return _one_more(draft, parents[0], tokens[0], source, kind, float(score) if isinstance(score, (int, float)) else float(score[0]))
    scores = [float(score)] * len(tokens) if isinstance(score, (int, float)) else list(map(float, score))
    new = list(range(len(tokens)))
    if kind == POINT and len(draft):
        known = {(p, t): i for i, (p, t, k) in enumerate(zip(draft.parent, draft.token, draft.kind, strict=True)) if k == POINT}
        twins = [known.get(pair, -1) for pair in zip(parents, tokens, strict=True)]
        new = [i for i, twin in enumerate(twins) if twin < 0]
        if len(new) < len(twins):
            draft = _said_again(draft, [n for n in twins if n >= 0], source, [score for score, n in zip(scores, twins, strict=True) if n >= 0])
    offset, its_q = 0 if draft.q is None else len(draft.q), [] if q_row is None else list(map(int, q_row))
    return Draft(
        draft.rows,
        draft.token + [tokens[i] for i in new],
        draft.parent + [parents[i] for i in new],
        draft.row + [~p if (p := parents[i]) < 0 else draft.row[p] for i in new],
        draft.depth + [1 if (p := parents[i]) < 0 else draft.depth[p] + 1 for i in new],
        draft.source + [source] * len(new),
        draft.kind + [kind] * len(new),
        draft.q_row + ([its_q[i] + offset if its_q[i] >= 0 else -1 for i in new] if its_q else [-1] * len(new)),
        draft.score + [scores[i] for i in new],
        q if draft.q is None else draft.q if q is None else cat([draft.q, q.to(draft.q.device)]),
        draft.again,
    )


def _one_more(draft: Draft, parent: int, token: int, source: int, kind: int, score: float) -> Draft:
    """`grow` by one node: the most frequent case, chains of one row."""
    if kind == POINT:
        for i, (p, t, k) in enumerate(zip(draft.parent, draft.token, draft.kind, strict=True)):
            if p == parent and t == token and k == POINT:
                return _said_again(draft, [i], source, [score])
    row, depth = (~parent, 1) if parent < 0 else (draft.row[parent], draft.depth[parent] + 1)
    return Draft(
        draft.rows, [*draft.token, token], [*draft.parent, parent], [*draft.row, row], [*draft.depth, depth], [*draft.source, source],
        [*draft.kind, kind], [*draft.q_row, -1], [*draft.score, score], draft.q, draft.again,
    )  # fmt: skip


def _said_again(draft: Draft, nodes: list[int], source: int, scores: list[float]) -> Draft:
    """The draft of whose `nodes` another drafter thinks so much."""
    d, sources, again = draft, draft.source[:], dict[tuple[int, int], float]()
    if d.again is not None:
        again.update(d.again)
    for i, n in enumerate(nodes):
        if not sources[n] & source:
            sources[n] |= source
            again[n, source] = scores[i]
    return Draft(d.rows, d.token, d.parent, d.row, d.depth, sources, d.kind, d.q_row, d.score, d.q, again or None)


def run(draft: Draft, place: int, tokens: list[int], source: int, scores: list[float]) -> Draft:
    """The draft with a chain of points below `place`. What of it is there already gains the source, as in `grow`."""
    if tokens and not draft.token:
        n = len(tokens)
        return Draft(draft.rows, tokens, [place, *span(0, n - 1)], [~place] * n, span(1, n + 1), [source] * n, [POINT] * n, [-1] * n, scores, draft.q)
    twins = below(draft, place, tokens) if draft.token else []
    if twins:
        draft, place = _said_again(draft, twins, source, scores), twins[-1]
    at, parents, depths = len(twins), draft.parent[:], draft.depth[:]
    count, node = len(tokens) - at, len(parents)
    row, depth = (~place, 0) if place < 0 else (draft.row[place], draft.depth[place])
    for _ in range(count):
        depth += 1
        parents.append(place)
        depths.append(depth)
        place, node = node, node + 1
    return Draft(
        draft.rows, draft.token + tokens[at:], parents, draft.row + [row] * count, depths, draft.source + [source] * count, draft.kind + [POINT] * count,
        draft.q_row + [-1] * count, draft.score + scores[at:], draft.q, draft.again,
    )  # fmt: skip


def below(draft: Draft, place: int, tokens: list[int]) -> list[int]:
    """The points that say these tokens, one below the other, from `place` on, as far as they are there. Parents stand before their children."""
    found = list[int]()
    for n in range(len(draft.token)):
        if len(found) == len(tokens):
            break
        if draft.parent[n] == place and draft.token[n] == tokens[len(found)] and draft.kind[n] == POINT:
            found.append(n)
            place = n
    return found


def ancestors(draft: Draft, place: int) -> list[int]:
    """Nodes from depth 1 down to the place itself; [] for a root."""
    path = []
    while place >= 0:
        path.append(place)
        place = draft.parent[place]
    path.reverse()
    return path


def straight(draft: Draft) -> bool:
    """Is it one row's chain, as most drafts are?"""
    return draft.rows == 1 and ascending(draft.parent)


def ascending(places: Places) -> bool:
    """Are they -1, 0, 1, 2, ...: the root of row 0, and the first nodes?"""
    return all(place == n - 1 for n, place in enumerate(places))


def children(draft: Draft) -> dict[int, list[int]]:
    """Place -> its child nodes in the order they are to be tried: sampled ones as drawn, then points."""
    table: dict[int, list[int]] = {}
    for node, parent in enumerate(draft.parent):
        table.setdefault(parent, []).append(node)
    if POINT in draft.kind and len(set(draft.kind)) > 1:
        table = {p: sorted(nodes, key=lambda n: draft.kind[n] == POINT) for p, nodes in table.items()}
    return table


def survival(draft: Draft) -> list[float]:
    """Per node: the product of the scores on its path."""
    out: list[float] = []
    for parent, score in zip(draft.parent, draft.score, strict=True):
        out.append(score * out[parent] if parent >= 0 else score)
    return out


def heaviest(draft: Draft, budgets: list[int]) -> list[int]:
    """Nodes to keep so that each row has at most its budget: the most likely to survive, ties to the shallower. Closed
    under parents. Whether pruning is lawful is the caller's affair."""
    weight = survival(draft)
    left = list(budgets)
    kept = []
    for n in sorted(range(len(draft)), key=lambda n: (-weight[n], draft.depth[n], n)):
        if left[draft.row[n]]:
            left[draft.row[n]] -= 1
            kept.append(n)
    return sorted(kept)


def chain(draft: Draft) -> list[int]:
    """Nodes of one path a row: from each root down, always the child that is likeliest to be accepted."""
    table, kept = children(draft), []
    for row in range(draft.rows):
        below = table.get(~row, [])
        while below:
            kept.append(max(below, key=lambda n: (draft.score[n], -n)))
            below = table.get(kept[-1], [])
    return sorted(kept)


def select(draft: Draft, keep: list[int]) -> Draft:
    """The draft with only the nodes `keep` (ascending, closed under parents), renumbered in that order."""
    d, new_name = draft, dict[int, int]()
    if keep == span(0, n := len(keep)):  # the first ones, as of a chain
        again = d.again if d.again is None or n == len(d) else {pair: said for pair, said in d.again.items() if pair[0] < n} or None
        return Draft(d.rows, d.token[:n], d.parent[:n], d.row[:n], d.depth[:n], d.source[:n], d.kind[:n], d.q_row[:n], d.score[:n], d.q, again)
    for n in keep:
        new_name[n] = len(new_name)
    again = d.again if d.again is None else {(new_name[n], mark): said for (n, mark), said in d.again.items() if n in new_name} or None
    return Draft(
        d.rows, [d.token[n] for n in keep], [p if (p := d.parent[n]) < 0 else new_name[p] for n in keep], [d.row[n] for n in keep],
        [d.depth[n] for n in keep], [d.source[n] for n in keep], [d.kind[n] for n in keep], [d.q_row[n] for n in keep], [d.score[n] for n in keep], d.q, again,
    )  # fmt: skip


def follow(draft: Draft, choice: list[int]) -> tuple[list[list[int]], list[int]]:
    """Walk each row along the chosen tokens. choice [rows + nodes], in the order of `all_places`.

    Returns the accepted path of each row and the token chosen where it ends.
    """
    rows, paths, bonus = draft.rows, list[list[int]](), choice[: draft.rows]
    at = roots(rows)  # where each row's path ends so far
    for _ in at:
        paths.append([])
    for n in range(len(draft.token)):  # parents stand before their children
        row = draft.row[n]
        if draft.parent[n] == at[row] and draft.token[n] == bonus[row]:
            paths[row].append(n)
            at[row], bonus[row] = n, choice[rows + n]
    return paths, bonus
