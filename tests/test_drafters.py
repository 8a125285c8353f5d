"""Law 7: every drafter passes one contract suite. The suffix tree against brute force."""

from collections import Counter

import numpy as np
import pytest
import zoo
from contracts import check_drafter, request, run, sequence

from outrider.control.fixed import fixed
from outrider.core.noise import RowNoise
from outrider.core.sampling import Settings
from outrider.core.tree import roots
from outrider.core.types import Draft, Plan
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.drafters.suffix import SuffixTree
from outrider.models.toy import ToyModel
from outrider.runtime.engine import Engine


def brute_force(text: list[int], cap: int) -> tuple[int, Counter]:
    """Longest suffix (below `cap`) seen before with a continuation, and how often each token followed it."""
    for length in range(min(len(text) - 1, cap - 1), 0, -1):
        suffix = text[-length:]
        follow = Counter(text[i + length] for i in range(len(text) - length) if text[i : i + length] == suffix)
        if follow:
            return length, follow
    return 0, Counter()


@pytest.mark.parametrize("seed", range(12))
def test_suffix_tree_equals_brute_force_after_every_token(seed):
    rng = np.random.default_rng(seed)
    cap = int(rng.integers(2, 9))
    index, text = SuffixTree(cap), []
    for token in rng.integers(0, int(rng.integers(2, 6)), 90).tolist():
        index.append(token)
        text.append(token)
        length, follow = brute_force(text, cap)
        cursor = index.match()
        if not follow:
            assert cursor is None
            continue
        assert cursor[0].depth == length
        found = {t: share for t, share, _ in index.next(cursor, 99)}
        assert found == pytest.approx({t: n / follow.total() for t, n in follow.items()})


def test_continuations_go_on_deeper_than_the_cap_and_in_loops():
    index = SuffixTree(4)
    for token in [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]:
        index.append(token)
    cursor, out = index.match(), []
    while step := index.next(cursor, 1):
        out.append(step[0][0])
        cursor = step[0][2]
    assert out == [3, 4, 5, 6, 7, 8, 9, 1, 2]
    loop = SuffixTree(6)
    for token in [7, 8] * 20:
        loop.append(token)
    cursor, out = loop.match(), []
    while len(out) < 20 and (step := loop.next(cursor, 1)):
        out.append(step[0][0])
        cursor = step[0][2]
    assert out == [7, 8] * 10


def test_plain_prose_costs_about_a_node_a_token():
    index = SuffixTree(24)
    for token in range(2000):
        index.append(token)

    def count(node):
        return 1 + sum(count(c) for c in (node.children or {}).values())

    assert count(index.root) <= 2001


def test_lookup_prefers_the_frequent_continuation_and_needs_two_matching_tokens():
    seq = sequence([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 8, 1, 2])
    lookup = Lookup()
    lookup.begin(seq)
    settings, noise = Settings.of([seq]), RowNoise(*np.zeros((3, 1), np.int64))
    draft = lookup.extend([seq], Draft(rows=1), roots(1), 2, 1, settings, noise)
    assert draft.token == [4, 3]
    assert draft.score[0] > draft.score[1]
    lone = sequence([1, 5, 6, 1])
    lookup.begin(lone)
    assert len(lookup.extend([lone], Draft(rows=1), roots(1), 1, 1, Settings.of([lone]), noise)) == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["lookup", "same model", "other model"])
def test_drafter_contract(kind, seed):
    target = ToyModel(6, 5, rows=3, scale=3.0)
    makers = {
        "lookup": Lookup,
        "same model": lambda: ModelDrafter(ToyModel(6, 5, rows=3, scale=3.0, name="draft")),
        "other model": lambda: ModelDrafter(ToyModel(6, 5, rows=3, scale=3.0, blend=(8, 0.4), name="draft")),
    }
    check_drafter(makers[kind], target, np.random.default_rng(seed), 6)


@pytest.mark.parametrize("depth", range(1, 9))
def test_draft_equal_to_target_is_accepted_whole_also_after_a_pause(depth):
    """B2 and B7, on a real model class: 100% acceptance, also after 50 plain steps."""
    target, twin = zoo.model("llama", label="target"), zoo.model("llama", label="draft")
    engine = Engine(target, {"model": ModelDrafter(twin)}, fixed(Plan((("model", depth, 1),))), 1)
    seq = engine.submit(request([3, 1, 4, 1, 5], max_tokens=50 + 20 * depth))
    for pause in (0, 50):
        engine.controller = fixed(Plan())
        for _ in range(pause):
            engine.step()
        engine.controller = fixed(Plan((("model", depth, 1),)))
        for _ in range(5):
            engine.step()
    speculative = [r for r in seq.records if r.plan.drafters]
    assert len(speculative) == 10
    assert all(r.drafted == (depth,) and r.accepted == (depth,) for r in speculative)
    engine.cancel(seq)


def test_a_draft_with_a_shorter_context_stops_and_the_text_goes_on():
    """B11: beyond the draft's own limit there is no proposal, and nothing breaks."""
    target = ToyModel(6, 5, rows=1, context=200)
    draft = ModelDrafter(ToyModel(6, 5, rows=1, context=30, name="draft"))
    seq = run(Engine(target, {"model": draft}, fixed(Plan((("model", 4, 1),))), 1), [request([1, 2], max_tokens=80)])[0]
    assert len(seq.generated) == 80
    late = [r for r in seq.records if r.context[0] >= 30]
    assert late and all(r.drafted == (0,) for r in late)
    assert all(r.accepted == r.drafted for r in seq.records)
