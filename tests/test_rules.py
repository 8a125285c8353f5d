"""Law: the rules, vectorised and place by place, equal their plain text.

`multi_round` below is the algorithm written one scalar at a time; the rule must agree with it to the token on ragged
batches under the same noise. The rest are the known ways of getting acceptance wrong.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from contracts import always
from enumeration import Enumerator, OnHost, Table, law, noise_of, plain

from outrider.compiler.step import accept
from outrider.core import noise as noise_module
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.noise import BONUS, RowNoise
from outrider.core.sampling import Settings, argmax, line, on_host, warp
from outrider.core.types import DISTINCT, POINT, SAMPLED, Draft, Outcome, Request, SamplingParams, Scores, Sequence
from outrider.drafters.model import ModelDrafter
from outrider.verify.exact import RULES, Coupled, Greedy, MultiRound

F64 = torch.float64
HANDS = [*RULES.values(), *map(OnHost, RULES)]
COUPLED = pytest.mark.parametrize("coupled", [Coupled, OnHost("coupled")])
EXACT = pytest.mark.parametrize("exact", [MultiRound, OnHost("exact")])


# --- the oracle ---


def multi_round(draft: Draft, p: list[list[float]], noise: RowNoise) -> Outcome:
    """Walk down from the root of each row. The residual r starts as the target's p. Children in turn, sampled ones
    first: a sampled child passes with probability r(x) / q(x), else r becomes norm(max(0, r - q)); a point passes with
    probability r(x), else r loses x. What was drawn without replacement leaves q. Nobody passed: draw from r."""
    paths, bonus = [], []
    for row in range(draft.rows):
        mine = [n for n in range(len(draft)) if draft.row[n] == row]
        place, path, at = ~row, [], np.array([row])
        while True:
            r, passed = list(p[row if place < 0 else draft.rows + place]), None
            left: dict[int, list[float]] = {}
            kids = [n for n in mine if draft.parent[n] == place]
            for n in [n for n in kids if draft.kind[n] != POINT] + [n for n in kids if draft.kind[n] == POINT]:
                x, name = int(draft.token[n]), int(draft.q_row[n])
                q = [] if draft.kind[n] == POINT else left.get(name) or draft.q[name].tolist()
                chance = min(1.0, r[x] / q[x]) if q else r[x]
                if noise.flip(torch.tensor([chance], dtype=F64), at, np.array([mine.index(n)])).item():
                    passed = n
                    break
                r = normalised([max(0.0, a - b) for a, b in zip(r, q, strict=True)] if q else [*r[:x], 0.0, *r[x + 1 :]])
                if draft.kind[n] == DISTINCT:
                    left[name] = normalised([*q[:x], 0.0, *q[x + 1 :]])
            if passed is None:
                break
            place = passed
            path.append(passed)
        paths.append(path)
        bonus.append(int(noise.draw(torch.tensor([r], dtype=F64), at, BONUS, np.array([0]))))
    return Outcome(paths, bonus, [0] * draft.rows)


def normalised(weights: list[float]) -> list[float]:
    return [w / sum(weights) for w in weights]


def random_draft(rng: np.random.Generator, rows: int, vocab: int) -> Draft:
    """Rows of zero to a dozen nodes, kinds mixed below one place, the rows' nodes interleaved."""
    draft = Draft(rows=rows)
    silent = rng.random(rows) < 0.2
    for level in range(int(rng.integers(0, 4))):
        places = tree.roots(rows) if level == 0 else [n for n, d in enumerate(draft.depth) if d == level]
        for place in rng.permutation(places)[: 2 * rows]:
            if silent[tree.row_of(np.array([place]), draft)[0]]:
                continue
            for kind in rng.permutation([POINT, SAMPLED, DISTINCT])[: rng.integers(1, 4)]:
                width = int(rng.integers(1, 3))
                tokens = rng.choice(vocab, width, replace=kind == SAMPLED)
                q = torch.from_numpy(rng.dirichlet(np.ones(vocab), 1))
                where = np.full(width, -1 if kind == POINT else 0)
                draft = tree.grow(draft, np.full(width, place), tokens, 1, int(kind), q=q, q_row=where)
    return draft


@EXACT
@pytest.mark.parametrize("seed", range(200))
def test_multi_round_equals_its_plain_text(seed: int, exact: type) -> None:
    rng = np.random.default_rng(seed)
    rows, vocab = int(rng.integers(1, 5)), int(rng.integers(2, 6))
    draft = random_draft(rng, rows, vocab)
    p = torch.from_numpy(rng.dirichlet(np.ones(vocab), rows + len(draft)))
    for step in range(3):
        noise = noise_of(rows, seed, step)
        assert exact().accept(draft, p.log(), noise) == multi_round(draft, p.log().exp().tolist(), noise)


@EXACT
def test_a_row_decides_the_same_alone_and_in_company(exact: type) -> None:
    rng = np.random.default_rng(1)
    for seed in range(20):
        draft = random_draft(rng, 3, 4)
        logp = torch.from_numpy(rng.dirichlet(np.ones(4), 3 + len(draft))).log()
        together = exact().accept(draft, logp, noise_of(3, seed))
        for r in range(3):
            keep = [n for n, row in enumerate(draft.row) if row == r]
            part = tree.select(draft, keep)
            alone = replace(part, rows=1, row=[0] * len(part), parent=[max(p, -1) for p in part.parent])
            one = RowNoise(np.array([r + 1000 * seed]), np.zeros(1, int), np.zeros(1, int))
            outcome = exact().accept(alone, logp[[r, *(3 + n for n in keep)]], one).renamed(keep)
            assert (outcome.paths[0], outcome.bonus[0]) == (together.paths[r], together.bonus[r])


@EXACT
def test_rows_may_share_a_distribution(exact: type) -> None:
    """Two rows draw without replacement from one q; what the first row took does not leave the other's q."""
    q, p = torch.tensor([[0.5, 0.3, 0.2]], dtype=F64), torch.tensor([[0.1, 0.4, 0.5], [0.55, 0.1, 0.35]] * 3, dtype=F64)
    draft = tree.grow(Draft(rows=2), np.array([-1, -1, -2, -2]), np.array([0, 1, 1, 0]), 1, DISTINCT, q=q, q_row=np.zeros(4, int))
    for seed in range(40):
        assert exact().accept(draft, p.log(), noise_of(2, seed)) == multi_round(draft, p.log().exp().tolist(), noise_of(2, seed))


# --- known mistakes ---


def chain(tokens: list[int], kind: int = POINT, q: torch.Tensor | None = None) -> Draft:
    n = len(tokens)
    draft = Draft(rows=1)
    for i, token in enumerate(tokens):
        how = {} if q is None else {"q": q[i : i + 1], "q_row": np.array([0])}
        draft = tree.grow(draft, np.array([i - 1]), np.array([token]), 1, kind, **how)
    assert len(draft) == n
    return draft


def certain(tokens: list[int], vocab: int = 5) -> torch.Tensor:
    """Log-probabilities of a model that is sure of one token at each place."""
    return torch.full((len(tokens), vocab), -torch.inf, dtype=F64).scatter(1, torch.tensor(tokens)[:, None], 0.0)


@pytest.mark.parametrize("rule", HANDS)
def test_a_match_after_a_miss_counts_for_nothing(rule: type) -> None:
    outcome = rule().accept(chain([1, 2, 3, 4]), certain([1, 0, 3, 4, 0]), noise_of(1))
    assert outcome == Outcome([[0]], [0], [0])


@pytest.mark.parametrize("rule", HANDS)
def test_full_acceptance_has_its_bonus(rule: type) -> None:
    outcome = rule().accept(chain([1, 2, 3]), certain([1, 2, 3, 4]), noise_of(1))
    assert outcome == Outcome([[0, 1, 2]], [4], [0])


@pytest.mark.parametrize("rule", HANDS)
def test_no_draft_is_plain_decoding(rule: type) -> None:
    assert rule().accept(Draft(rows=2), certain([3, 1]), noise_of(2)) == Outcome([[], []], [3, 1], [0, 0])
    assert rule.lossless


def test_ties_go_to_the_lowest_id_everywhere() -> None:
    x = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    seqs = [Sequence(Request(str(i), (0,), SamplingParams(), 0, "exact"), [0]) for i in range(2)]
    assert argmax(x).tolist() == [1, 0]
    assert warp(x, tree.roots(2), Draft(rows=2), Settings.of(seqs)).argmax(-1).tolist() == [1, 0]
    for width in (1, 2):
        drafted = ModelDrafter(Table(4, 0))._points(Draft(rows=2), tree.roots(2), x, width, 1)
        assert [drafted.token[drafted.row.index(r)] for r in range(2)] == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_an_error_and_never_a_token(temperature: float) -> None:
    x = torch.tensor([[0.0, float("nan"), 1.0]])
    cold = Sequence(Request("0", (0,), SamplingParams(), 0, "exact"), [0])
    warm = Sequence(Request("1", (0,), SamplingParams(temperature=temperature), 0, "exact"), [0])
    with pytest.raises(OutriderError):
        Greedy().accept(Draft(rows=1), x, noise_of(1))
    with pytest.raises(OutriderError):
        warp(x, tree.roots(1), Draft(rows=1), Settings.of([warm]))
    with pytest.raises(OutriderError):
        line(on_host(x)[0], -1, Draft(rows=1), Settings.of([warm]))
    with pytest.raises(OutriderError):
        warp(torch.cat([x[:, [0, 2, 2]], x]), tree.roots(2), Draft(rows=2), Settings.of([cold, warm]))


@pytest.mark.parametrize("rows", [1, 2])
def test_no_law_follows_from_infinite_logits(rows: int) -> None:
    x = torch.tensor([[0.0, 1.0, 1.0], [0.0, torch.inf, 1.0]])
    cold = Sequence(Request("0", (0,), SamplingParams(), 0, "exact"), [0])
    warm = Sequence(Request("1", (0,), SamplingParams(temperature=1.0), 0, "exact"), [0])
    with pytest.raises(OutriderError, match="NaN"):
        warp(x[-rows:], tree.roots(rows), Draft(rows=rows), Settings.of([cold, warm][-rows:]))
    with pytest.raises(OutriderError, match="NaN"):
        line(on_host(x)[1], ~(rows - 1), Draft(rows=rows), Settings.of([cold, warm][-rows:]))


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_no_token_outside_the_support_even_at_the_ends_of_u(monkeypatch: pytest.MonkeyPatch, u: float) -> None:
    """Tails of padded vocabularies have no mass, and u times a tiny sum rounds up to the sum."""
    p = torch.tensor([[0.0, 0.1, 0.2, 0.7, 0.0, 0.0], [0.0, 0.0, 5e-324, 0.0, 0.0, 0.0]], dtype=F64)
    monkeypatch.setattr(noise_module, "uniform", lambda key: np.full(len(key), u))
    tokens = noise_of(2).draw(p, np.arange(2), BONUS, np.zeros(2, int))
    assert (p.gather(1, tokens[:, None]) > 0).all()
    monkeypatch.setattr(RowNoise, "_uniform", lambda self, row, purpose, index: u)
    assert all(line[noise_of(2).draw_one(line, 0, BONUS, 0)] > 0 for line in p.numpy())
    assert noise_of(2).flip(torch.tensor([0.0, 1.0]), np.arange(2), np.zeros(2, int)).tolist() == [False, True]


@EXACT
def test_a_bonus_lies_within_the_vocabulary_when_nothing_is_left(exact: type) -> None:
    outcome = exact().accept(chain([2]), certain([2, 4]), noise_of(1))
    assert outcome == Outcome([[0]], [4], [0])


@EXACT
def test_a_rejection_that_leaves_no_residual_falls_back_to_p(monkeypatch: pytest.MonkeyPatch, exact: type) -> None:
    """p == q is accepted with probability one; where rounding rejects it all the same, nothing divides by zero."""
    monkeypatch.setattr(RowNoise, "flip", lambda self, p, row, index: torch.zeros(len(p), dtype=torch.bool))
    monkeypatch.setattr(RowNoise, "flip_one", lambda self, p, row, index: False)
    p = torch.tensor([[0.5, 0.5, 0.0]], dtype=F64)
    outcomes = [exact().accept(chain([0], SAMPLED, p), p.log().expand(2, -1), noise_of(1, seed)) for seed in range(20)]
    assert {o.bonus[0] for o in outcomes} == {0, 1}


def test_unset_temperature_is_greedy() -> None:
    assert SamplingParams().temperature == 0.0


@EXACT
@pytest.mark.parametrize("seed", range(20))
def test_greedy_is_the_one_hot_limit(seed: int, exact: type) -> None:
    rng = np.random.default_rng(seed)
    draft = random_draft(rng, 3, 4)
    hot = certain(rng.integers(0, 4, 3 + len(draft)).tolist(), 4)
    points = replace(draft, kind=np.full(len(draft), POINT))
    greedy, drawn = (rule().accept(points, hot, noise_of(3, seed)) for rule in (Greedy, exact))
    words = [[[*points.text(path), b] for path, b in zip(o.paths, o.bonus, strict=True)] for o in (greedy, drawn)]
    assert words[0] == words[1]


KNOBS = [{"temperature": 0.3}, {"temperature": 0.7}, {"temperature": 1.5}, {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.3, "presence_penalty": 1.0}]


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("width", [1, 2])
def test_q_is_what_was_sampled_from(knobs: dict, width: int) -> None:
    """The first draw's law, by enumeration, is the drafter's own distribution under the row's settings, and so is q."""
    model, sampling = Table(4, 5, rows=1, context=8), SamplingParams(**{"temperature": 1.0, **knobs})
    seq = Sequence(Request("r", (0, 1, 0), sampling, 0, "exact"), [0, 1, 0])
    drafter, want = ModelDrafter(model), plain(model, (0, 1, 0), sampling)(())

    def run(noise: Enumerator) -> int:
        drafter.begin(seq)
        draft = drafter.extend([seq], Draft(rows=1), tree.roots(1), width, 1, Settings.of([seq]), noise)
        assert draft.kind == [SAMPLED] if width == 1 else set(draft.kind) == {DISTINCT}
        assert draft.q[draft.q_row[0]].tolist() == pytest.approx(want, abs=1e-12)
        drafter.end(seq)
        return int(draft.token[0])

    found = law(run)
    assert [found.get(t, 0.0) for t in range(4)] == pytest.approx(want, abs=1e-12)


def test_rows_of_all_kinds_are_drafted_for_together_as_alone() -> None:
    """Greedy, drawn and raced rows in one call: points and draws, each as if its row were the only one."""
    kinds = [(0.0, "exact", POINT), (1.0, "exact", SAMPLED), (0.8, "coupled", POINT), (0.0, "coupled", POINT), (0.6, "exact", SAMPLED)]
    seqs = [Sequence(Request(str(i), (0, 1, i), SamplingParams(temperature=t), i, rule), [0, 1, i]) for i, (t, rule, _) in enumerate(kinds)]
    drafter = ModelDrafter(Table(7, 5, rows=5, context=8))

    def drafted(rows: list[int]) -> Draft:
        some, noise = [seqs[r] for r in rows], RowNoise(np.array(rows) + 3, np.zeros(len(rows), int), np.full(len(rows), 3))
        for seq in some:
            drafter.begin(seq)
        draft = drafter.extend(some, Draft(rows=len(rows)), tree.roots(len(rows)), 1, 1, Settings.of(some), noise)
        for seq in some:
            drafter.end(seq)
        return draft

    together = drafted([0, 1, 2, 3, 4])
    assert sorted(together.row) == [0, 1, 2, 3, 4]
    for n, row in enumerate(together.row):
        alone = drafted([row])
        assert (alone.token[0], alone.kind[0]) == (together.token[n], together.kind[n]) and alone.kind[0] == kinds[row][2]
        assert alone.score[0] == pytest.approx(together.score[n])
        if alone.kind[0] == SAMPLED:
            assert torch.equal(alone.q[0], together.q[together.q_row[n]])


def test_a_rule_that_the_host_does_not_know_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Last:
        def accept(self, draft: Draft, logp: torch.Tensor, noise: RowNoise) -> Outcome:
            return Outcome([[]], [logp.shape[-1] - 1], [0])

    monkeypatch.setitem(RULES, "last", Last)
    seq = Sequence(Request("r", (0,), SamplingParams(temperature=1.0), 0, "last"), [0])
    for rule, token in (("last", 3), ("exact", 1)):
        assert accept(Draft(rows=1), Scores(certain([1], 4)), Settings.of([seq]), noise_of(1), rule).bonus == [token]


# --- the coupled rule ---


@pytest.mark.parametrize("seed", always(3, range(6)))
@COUPLED
def test_coupled_acceptance_lies_between_its_bounds(seed: int, coupled: type) -> None:
    """And equals the closed form of Gumbel coupling (2408.07978)."""
    rng, n, vocab = np.random.default_rng(seed), 4000, 5
    p, q = rng.dirichlet(np.ones(vocab), 2)
    noise = noise_of(n, seed + 1)
    raced = noise.race(torch.from_numpy(q).log().expand(n, -1), np.arange(n), np.ones(n, int))
    draft = tree.grow(Draft(rows=n), tree.roots(n), raced.argmax(-1).numpy(), 1)
    outcome = coupled().accept(draft, torch.from_numpy(p).log().expand(2 * n, -1), noise)
    found, far, slack = np.mean([len(path) for path in outcome.paths]), np.abs(p - q).sum() / 2, 4 * 0.5 / np.sqrt(n)
    exact = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(vocab))
    assert (1 - far) / (1 + far) <= exact <= 1 - far
    assert abs(found - exact) < slack


@COUPLED
def test_coupled_text_does_not_depend_on_the_draft(coupled: type) -> None:
    rng, vocab = np.random.default_rng(3), 4
    model = Table(vocab, 6, order=None)
    for seed in range(30):
        noise, words = noise_of(1, seed, length=7), []
        for tokens in (rng.integers(0, vocab, 3).tolist(), rng.integers(0, vocab, 2).tolist(), [3, 0, 1]):
            texts = [tokens[:i] for i in range(len(tokens) + 1)]
            logp = torch.from_numpy(np.stack([model.logits(t) for t in texts])).log_softmax(-1)
            outcome = coupled().accept(chain(tokens), logp, RowNoise(noise.seed, rng.integers(0, 99, 1), noise.length))
            words.append([*tokens[: len(outcome.paths[0])], outcome.bonus[0]])
        shortest = min(map(len, words))
        assert words[0][:shortest] == words[1][:shortest] == words[2][:shortest]
