"""Law: the noise that rules rest on is pure, fresh and fair, and of a race only few entries are looked at closely."""

import numpy as np
import pytest
import torch
from enumeration import Table, noise_of

from outrider.control.fixed import fixed
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.noise import ACCEPT, BONUS, DRAFT, FEW, NEAR, RowNoise, address, gumbel, uniform
from outrider.core.sampling import Settings, warp
from outrider.core.types import Plan, Request, SamplingParams, Sequence
from outrider.runtime.engine import Engine

F64 = torch.float64


def tail(counts: np.ndarray, p: np.ndarray) -> float:
    """Chi-square of counts against p as a normal deviate (Wilson and Hilferty): 3.09 is a p-value of 0.001."""
    n, k = counts.sum(), len(p) - 1
    x = float(((counts - n * p) ** 2 / (n * p)).sum())
    return ((x / k) ** (1 / 3) - (1 - 2 / (9 * k))) / (2 / (9 * k)) ** 0.5


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("verb", ["draw", "race", "draw_one", "contenders"])
def test_noise_draws_what_it_is_told(seed: int, verb: str) -> None:
    n, p = 20_000, np.random.default_rng(seed).dirichlet(np.ones(8))
    many, rows = torch.from_numpy(p).expand(n, -1), np.arange(n)
    if verb == "draw":
        tokens = noise_of(n, 5 + seed).draw(3 * many, rows, DRAFT, np.zeros(n, int))
    elif verb == "draw_one":
        noise = noise_of(n, 5 + seed)
        tokens = [noise.draw_one(3 * p, r, DRAFT, 0) for r in range(n)]
    elif verb == "contenders":
        noise, x = noise_of(n, 5 + seed), np.log(p)
        tokens = [ids[raced.argmax()] for ids, raced in (noise.contenders(x, r, 1) for r in range(n))]
    else:
        tokens = noise_of(n, 5 + seed).race(many.log(), rows, np.ones(n, int)).argmax(-1)
    assert tail(np.bincount(tokens, minlength=8), p) < 3.09


@pytest.mark.parametrize("seed", range(20))
def test_who_contends_is_who_may_win(seed: int) -> None:
    """All that end near the first, with the noise that the race of all gives them; and so among some alone."""
    rng = np.random.default_rng(seed)
    for step in range(20):
        vocab = int(rng.integers(1, 400))
        x = (rng.choice([0.1, 3.0, 30.0]) * rng.standard_normal(vocab)).astype(rng.choice(["float32", "float64"]))
        x -= x.max()
        x[rng.random(vocab) < 0.1 * (x < 0)] = -np.inf
        noise = noise_of(1, seed, length=step)
        raced = noise.race(torch.from_numpy(x.astype(np.float64))[None], np.array([0]), np.array([2]))[0].numpy()
        some = np.union1d(x.argmax(), rng.choice(vocab, vocab // 2, replace=False))
        for among in (None, some):
            ids, values = noise.contenders(x, 0, 2, among)
            mine = np.arange(vocab) if among is None else among
            assert set(mine[raced[mine] >= raced[mine].max() - NEAR]) <= set(ids.tolist()) <= set(mine.tolist()) and (np.diff(ids) > 0).all()
            assert values == pytest.approx(raced[ids], abs=1e-9) and ids[values.argmax()] == mine[raced[mine].argmax()]


@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0])
def test_few_contend(scale: float) -> None:
    """What the bound is for: of ten thousand entries hardly any have their logarithms taken."""
    noise, x = noise_of(100), -np.random.default_rng(0).exponential(scale, 10_000)
    assert np.mean([len(noise.contenders(x, r, 1)[0]) for r in range(100)]) < 40


def test_draws_of_one_row_are_independent_along_index_and_purpose() -> None:
    n, one = 20_000, RowNoise(np.array([7]), np.array([3]), np.array([0]))
    p, row = torch.full((n, 3), 1 / 3, dtype=F64), np.zeros(n, int)
    a, b = (one.draw(p, row, purpose, np.arange(n)).numpy() for purpose in (DRAFT, BONUS))
    for x, y in ((a, b), (a[:-1], a[1:])):
        assert tail(np.bincount(3 * x + y, minlength=9), np.full(9, 1 / 9)) < 3.09


def test_noise_is_a_function_of_its_address() -> None:
    n = 50
    p, rows, zero = torch.full((n, 1000), 1e-3), np.arange(n), np.zeros(n, int)

    def draws(seed: int, step: int, purpose: int, index: int) -> list[int]:
        return noise_of(n, seed, step).draw(p, rows, purpose, zero + index).tolist()

    first = draws(1, 0, DRAFT, 0)
    assert first == draws(1, 0, DRAFT, 0)
    for other in ((2, 0, DRAFT, 0), (1, 1, DRAFT, 0), (1, 0, BONUS, 0), (1, 0, ACCEPT, 0), (1, 0, DRAFT, 1)):
        assert np.mean(np.array(first) == draws(*other)) < 0.1


def test_a_few_addresses_are_those_of_many() -> None:
    """Negative words, the largest ones, and any number of them at once."""
    rng = np.random.default_rng(0)
    words = [np.concatenate([rng.integers(-(2**63), 2**63 - 1, 60), [-1, 0, 2**63 - 1, -(2**63)]]) for _ in range(4)]
    for count in range(1, 5):
        many = address(*words[:count])
        for few in (1, 2, FEW, FEW + 1):
            assert (np.concatenate([address(*[w[i : i + few] for w in words[:count]]) for i in range(0, 64, few)]) == many).all()


@pytest.mark.parametrize("broken", [0, 3])
def test_scores_that_are_no_numbers_are_no_distribution(broken: int) -> None:
    logits = torch.zeros(1, 5)
    logits[0, broken] = torch.nan
    seq = Sequence(Request("r", (0,), SamplingParams(temperature=0.7), seed=1, rule="exact"), [0])
    with pytest.raises(OutriderError, match="NaN"):
        warp(logits, [-1], tree.empty(1), Settings.of([seq]))


def test_every_step_of_the_engine_is_fresh() -> None:
    engine = Engine(Table(100, 0, scale=0.0, rows=1, context=32), {}, fixed(Plan()), rows=1)
    seq = engine.submit(Request("r", (0,), SamplingParams(temperature=1.0, max_tokens=20), seed=1, rule="exact"))
    while engine.step():
        pass
    assert len(set(seq.generated)) > 10


def test_a_race_depends_on_seed_and_position_alone() -> None:
    flat, row = torch.zeros(1, 6, dtype=F64), np.array([0])

    def race(seed: int, step: int, length: int, depth: int) -> list[float]:
        return RowNoise(np.array([seed]), np.array([step]), np.array([length])).race(flat, row, np.array([depth]))[0].tolist()

    assert race(1, 0, 10, 3) == race(1, 8, 12, 1)
    assert race(1, 0, 10, 3) != race(1, 0, 10, 4)
    assert race(1, 0, 10, 3) != race(2, 0, 10, 3)


def test_gumbel_has_its_moments() -> None:
    g = gumbel(address(np.arange(100)), 1000, torch.device("cpu"), F64)
    assert g.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert g.var().item() == pytest.approx(np.pi**2 / 6, abs=0.05)
    assert (gumbel(address(np.arange(100)), 10, torch.device("cpu"), F64) == g[:, :10]).all()


def test_uniform_fills_the_unit_interval() -> None:
    u = uniform(address(np.arange(20_000), np.zeros(20_000, int)))
    assert (u >= 0).all()
    assert (u < 1).all()
    assert tail(np.histogram(u, 16, (0, 1))[0], np.full(16, 1 / 16)) < 3.09


def test_a_draft_model_that_knows_fewer_ids_races_before_its_target() -> None:
    """At one position of one step: the noise of the target's ids is what it is where nobody has asked before."""
    x, alone, beside = np.linspace(-2.0, 2.0, 40), noise_of(1, 3), noise_of(1, 3)
    beside.contenders(x[:25], 0, 1)
    for of in (alone, beside):
        assert all(np.array_equal(a, b) for a, b in zip(of.contenders(x, 0, 1), alone.contenders(x, 0, 1), strict=True))
