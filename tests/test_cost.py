"""Law: the cost model reproduces the numbers printed by Leviathan et al. (2211.17192), and its optimum is the optimum."""

import pytest

from outrider.measure.cost import best_depth, expected_tokens, operations, speedup

TABLE_1 = [(0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44), (0.8, 5, 1.63, 3.69), (0.9, 2, 1.11, 2.71), (0.9, 10, 1.60, 6.86)]
TABLE_4 = [(0.75, 7, 0.02, 3.2), (0.80, 7, 0.04, 3.3), (0.82, 7, 0.11, 2.5), (0.65, 5, 0.02, 2.4), (0.73, 5, 0.04, 2.6), (0.74, 3, 0.11, 2.0)]
GRID = [(0.01, 14, 4.23), (0.02, 11, 3.82), (0.05, 8, 3.09), (0.1, 6, 2.47), (0.2, 4, 1.87)]


@pytest.mark.parametrize(("alpha", "gamma", "ops", "speed"), TABLE_1)
def test_table_1(alpha: float, gamma: int, ops: float, speed: float) -> None:
    assert round(operations(alpha, gamma, 0.0), 2) == ops
    assert round(speedup(alpha, gamma, 0.0), 2) == speed


@pytest.mark.parametrize(("alpha", "gamma", "c", "speed"), TABLE_4)
def test_table_4(alpha: float, gamma: int, c: float, speed: float) -> None:
    """The paper used unrounded alpha and c."""
    assert speedup(alpha, gamma, c) == pytest.approx(speed, abs=0.07)


@pytest.mark.parametrize(("c", "gamma", "speed"), GRID)
def test_best_depth(c: float, gamma: int, speed: float) -> None:
    assert best_depth(0.8, c) == gamma
    assert round(speedup(0.8, gamma, c), 2) == speed


@pytest.mark.parametrize(("gamma", "tokens"), [(1, 1.75), (3, 2.7344), (5, 3.2881), (7, 3.5995)])
def test_expected_tokens(gamma: int, tokens: float) -> None:
    assert expected_tokens(0.75, gamma) == pytest.approx(tokens, abs=5e-5)


@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_expected_tokens_at_the_ends(gamma: int) -> None:
    assert expected_tokens(1.0, gamma) == gamma + 1
    assert expected_tokens(0.0, gamma) == 1


def test_a_bigram_drafter_that_costs_nothing() -> None:
    assert speedup(0.2, 3, 0.0) == pytest.approx(1.248)


@pytest.mark.parametrize(("alpha", "c"), [(0.3, 0.2), (0.6, 0.1), (0.9, 0.5)])
def test_drafting_pays_exactly_when_it_is_more_often_right_than_costly(alpha: float, c: float) -> None:
    """Corollary 3.9: with alpha > c some depth gains at least (1 + alpha) / (1 + c)."""
    assert speedup(alpha, best_depth(alpha, c), c) >= (1 + alpha) / (1 + c) > 1
    assert best_depth(c, alpha) == 0
