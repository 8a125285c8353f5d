"""Law: a sampled row's verdicts in one call of machine code are those of Python, race by race, and what is no place is not read."""

# ruff: noqa: F811 (fixtures of the races)

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from test_races import TYPES, made, races, sequence  # noqa: F401

from outrider.core import sampling as sampling_module
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.noise import RowNoise
from outrider.core.sampling import Settings
from outrider.core.types import POINT, Draft, Scores
from outrider.verify.host import Walk


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("seed", range(25))
def test_a_tree_is_walked_as_python_walks_it(races, monkeypatch, dtype, seed):
    """Of few ids, so that guesses are right: chains, bushes, siblings that say the same; logits in the order of places, or elsewhere among others."""
    rng, depths = np.random.default_rng(seed), []
    for step in range(60):
        draft, vocab = Draft(rows=1), int(rng.choice([1, 3, 6]))
        for n in range(int(rng.integers(0, 12))):
            draft.row.append(0)
            draft.parent.append(int(rng.integers(max(-1, n - 3), n)))
            draft.token.append(int(rng.integers(vocab)))
            draft.kind.append(POINT)
            draft.depth.append(1 if draft.parent[n] < 0 else draft.depth[draft.parent[n]] + 1)
        order = None if step % 2 else (3 + rng.permutation(len(draft.token) + 1)).tolist()
        logits = torch.from_numpy(rng.standard_normal((1, len(draft.token) + 7, vocab))).to(dtype)
        settings, noise = Settings.of([sequence(step, temperature=float(rng.choice([1.0, 0.6])))]), RowNoise((2**64 - step,), (0,), (step + 7,))
        with monkeypatch.context() as patch:
            mine = Walk(draft, Scores(logits, at=order), settings, noise, "coupled").outcome()
            patch.setattr(sampling_module, "races", None)
            assert mine == Walk(draft, Scores(logits, at=order), settings, noise, "coupled").outcome()
        depths.append(len(mine.paths[0]))
    assert len(races) == 60 and max(depths) >= 3 and min(depths) == 0


@pytest.mark.parametrize("at", [0, 1, 2])
def test_no_number_is_an_error_where_the_walk_comes(races, at):
    """And none where it does not: only the first guess is right."""
    logits, noise, settings = torch.zeros(1, 3, 40), RowNoise((3,), (0,), (2,)), Settings.of([sequence(3, temperature=1.0)])
    logits[0, 0, 5] = 60.0
    logits[0, 1, 6] = 60.0
    draft = tree.grow(tree.grow(tree.empty(1), [-1], [5], 1, POINT, [1.0]), [0], [7], 1, POINT, [1.0])
    assert Walk(draft, Scores(logits), settings, noise, "coupled").outcome().paths == [[0]]
    logits[0, at, 9] = torch.nan
    with pytest.raises(OutriderError, match="NaN") if at < 2 else nullcontext():
        Walk(draft, Scores(logits), settings, noise, "coupled").outcome()
    assert len(races) == 2


@pytest.mark.parametrize("wrong", [{2: [0]}, {2: [0, 9]}, {2: [0, -1]}, {1: 1}, {4: [1, 2]}, {2: 3}, {3: None}, {0: (1, 2)}, {0: [1] * 8}], ids=str)
def test_a_walk_reads_no_place_that_is_none(made, wrong):
    logits = torch.zeros(2, 10)
    logits[0, 4] = 99.0
    given = [RowNoise((3,), (0,), (2,)).races_at(logits.data_ptr(), 4, 10, 1.0, 0, 1), 2, None, [-1], [4]]
    assert made.walked(*given)[0] == [0]
    with pytest.raises((TypeError, IndexError)):
        made.walked(*[wrong.get(i, x) for i, x in enumerate(given)])
    with pytest.raises(TypeError):
        made.walked(*given[:-1])


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"min_p": 0.1}, {"presence_penalty": 1.0}], ids=str)
def test_a_walk_that_machine_code_does_not_know_is_pythons(races, settings):
    seq, logits = sequence(3, temperature=0.9, **settings), torch.randn(1, 2, 300, generator=torch.Generator().manual_seed(1))
    draft = tree.grow(tree.empty(1), [-1], [5], 1, POINT, [1.0])
    Walk(draft, Scores(logits), Settings.of([seq]), RowNoise((3,), (0,), (2,)), "coupled").outcome()
    assert not races
