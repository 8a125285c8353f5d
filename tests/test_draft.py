"""Drafts as forests: grown by one drafter and by several, chosen from, and what is known of a node throughout."""

from dataclasses import replace

import numpy as np
import pytest
from contracts import random_draft

from outrider.core import tree
from outrider.core.types import POINT, SAMPLED, Draft


def mixed(draft: Draft, rng: np.random.Generator) -> Draft:
    """The forest with some nodes drawn, and sources and scores at random."""
    nodes = len(draft)
    kinds = [POINT if rng.random() < 0.7 else SAMPLED for _ in range(nodes)]
    return replace(draft, kind=kinds, source=rng.integers(1, 4, nodes).tolist(), score=rng.random(nodes).tolist())


@pytest.mark.parametrize("seed", range(40))
def test_a_run_below_a_place_is_grown_node_by_node(seed):
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 4))
    draft = mixed(random_draft(rng, rows, 3, int(rng.integers(0, 15))), rng)
    place = int(rng.integers(-rows, len(draft)))
    tokens, scores = rng.integers(0, 3, int(rng.integers(0, 6))).tolist(), rng.random(6).tolist()
    want, end = draft, place
    for token, score in zip(tokens, scores, strict=False):
        want = tree.grow(want, np.array([end]), np.array([token]), 8, score=[score])
        end = next(n for n in range(len(want)) if want.parent[n] == end and want.token[n] == token and want.kind[n] == POINT)
    grown = tree.run(draft, place, tokens, 8, scores[: len(tokens)])
    assert grown == want
    path = tree.ancestors(grown, end)[len(tree.ancestors(grown, place)) :]
    assert tree.below(grown, place, tokens) == path and tree.below(draft, place, tokens) == [n for n in path if n < len(draft)]
    assert grown.text(path) == tokens and all(grown.source[n] & 8 for n in path)
    assert [s & 8 for s in draft.source] == [0] * len(draft) and draft.again is None, "the draft it grew from is as it was"
    assert [grown.said(n, 8) for n in path] == scores[: len(tokens)] and grown.score[: len(draft)] == draft.score


@pytest.mark.parametrize("seed", range(40))
def test_of_what_was_said_again_each_score_is_kept(seed):
    """Many nodes in one call as one by one, by a second drafter and a third; nodes that were drawn are none of theirs. What is selected of it says the same."""
    rng = np.random.default_rng(seed)
    draft = first = mixed(random_draft(rng, 2, 3, int(rng.integers(1, 15))), rng)
    want, told = draft, {}
    for mark in (8, 16, 8):
        parents = rng.integers(-2, len(first), 6).tolist()
        pairs = list(dict.fromkeys(zip(parents, rng.integers(0, 3, 6).tolist(), strict=True)))
        scores = rng.random(len(pairs)).tolist()
        draft = tree.grow(draft, [p for p, _ in pairs], [t for _, t in pairs], mark, score=scores)
        for (parent, token), score in zip(pairs, scores, strict=True):
            want = tree.grow(want, [parent], [token], mark, score=score)
            told.setdefault((parent, token, mark), score)
    assert draft == want and draft.score[: len(first)] == first.score
    for n, (parent, token, kind) in enumerate(zip(draft.parent, draft.token, draft.kind, strict=True)):
        for mark in (8, 16):
            mine = kind == POINT and (parent, token, mark) in told
            assert draft.said(n, mark) == (told[parent, token, mark] if mine else draft.score[n]) and bool(draft.source[n] & mark) == mine
    keep = sorted({n for s in range(len(draft)) if rng.random() < 0.4 for n in tree.ancestors(draft, s)})
    for kept in (keep, list(range(len(draft) // 2))):
        some = tree.select(draft, kept)
        assert [some.said(new, mark) for new in range(len(kept)) for mark in (1, 8, 16)] == [draft.said(n, mark) for n in kept for mark in (1, 8, 16)]
        assert all(n < len(kept) for n, _ in some.again or {})


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("first", [True, False], ids=["the first nodes", "any nodes"])
def test_selected_nodes_keep_their_paths(seed, first):
    rng = np.random.default_rng(seed)
    draft = mixed(random_draft(rng, 3, 4, int(rng.integers(1, 20))), rng)
    seeds = range(int(rng.integers(0, len(draft) + 1))) if first else [n for n in range(len(draft)) if rng.random() < 0.3]
    keep = sorted({n for s in seeds for n in tree.ancestors(draft, s)})
    chosen = tree.select(draft, keep)
    assert len(chosen) == len(keep) and chosen.rows == draft.rows
    for new, old in enumerate(keep):
        assert chosen.text(tree.ancestors(chosen, new)) == draft.text(tree.ancestors(draft, old))
        for column in ("token", "row", "depth", "source", "kind", "q_row", "score"):
            assert getattr(chosen, column)[new] == getattr(draft, column)[old]


@pytest.mark.parametrize("seed", range(20))
def test_the_heaviest_nodes_fit_the_budget_of_each_row(seed):
    rng = np.random.default_rng(seed)
    draft = mixed(random_draft(rng, 3, 4, 20), rng)
    budgets, weight = rng.integers(0, 9, 3).tolist(), tree.survival(draft)
    kept = tree.heaviest(draft, budgets)
    for row in range(3):
        mine = [n for n in range(len(draft)) if draft.row[n] == row]
        assert sum(draft.row[n] == row for n in kept) == min(budgets[row], len(mine))
        left = [weight[n] for n in mine if n not in kept]
        assert not left or all(weight[n] >= max(left) for n in kept if draft.row[n] == row)
    assert all(draft.parent[n] < 0 or draft.parent[n] in kept for n in kept)
