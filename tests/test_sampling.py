"""From logits to probabilities: against transformers and against formulas, at roots and at draft nodes, alone and batched."""

import numpy as np
import pytest
import torch
import transformers as hf

from outrider.core import tree
from outrider.core.sampling import Settings, argmax, kept, line, on_host, process, top_logprobs, warp, weights
from outrider.core.types import Draft, Request, SamplingParams, Sequence

VOCAB = 40
ENDS = frozenset({3, 4})
PROMPT, WRITTEN = [1, 2, 2, 5, 9], [7, 7, 2, 11]
EVERY = [
    {"temperature": 0.3}, {"temperature": 1.5}, {"temperature": 1.0, "top_k": 5}, {"temperature": 0.7, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.2}, {"temperature": 0.8, "top_k": 20, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 1.0, "repetition_penalty": 1.4}, {"temperature": 1.0, "repetition_penalty": 0.7},
    {"temperature": 0.9, "repetition_penalty": 1.2, "top_k": 10, "top_p": 0.9},
]  # fmt: skip
OURS = [
    {"temperature": 1.0, "presence_penalty": 0.8}, {"temperature": 1.0, "frequency_penalty": 0.5}, {"temperature": 1.0, "min_tokens": 6},
    {"temperature": 1.0, "logit_bias": ((7, 3.0), (2, -4.0))}, {"presence_penalty": 1.5}, {"frequency_penalty": 1.0, "min_tokens": 5},
]  # fmt: skip


@pytest.mark.parametrize("size", [1e4, 1e9])
def test_among_tokens_that_are_wanted_by_all_means_the_likelier_stays_so(size):
    """Beside a bias of a thousand million float32 would lose what the logits say."""
    for seed in range(20):
        logits = random_logits(1, seed, torch.float32)[0]
        seq = sequence([7], temperature=1.0, logit_bias=((3, size), (9, size), (12, -size)))
        found = at_root(logits, seq).double().exp()
        torch.testing.assert_close(found[[3, 9]], logits[[3, 9]].double().softmax(0), atol=1e-6, rtol=1e-4)
        assert found.sum() == pytest.approx(1.0) and found.count_nonzero() == 2
        none = at_root(logits, sequence([7], temperature=1.0, logit_bias=tuple((t, -size) for t in range(VOCAB))))
        torch.testing.assert_close(none.float(), logits.log_softmax(0), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [1e2, 1e6, 1e9])
def test_what_is_wanted_by_all_means_and_may_not_come_yet_takes_nothing_from_the_others(size):
    """`min_tokens` holds an end that a bias favours, and penalties see logits where they are."""
    logits = random_logits(1, 5, torch.float32)[0]
    held, free = (at_root(logits, sequence([7], temperature=1.0, min_tokens=5, logit_bias=bias)).double().exp() for bias in (((3, size),), ()))
    torch.testing.assert_close(held, free, atol=1e-5, rtol=1e-4)
    wanted = at_root(logits, sequence([9, 9], temperature=1.0, repetition_penalty=1.3, logit_bias=((8, size), (9, size)))).double().exp()
    assert float(wanted[8]) == pytest.approx(1.0), "what was there is worth 1.3 times less, however much it is wanted"
    seen = at_root(logits, sequence([9, 11], temperature=1.0, presence_penalty=-size)).double().exp()
    torch.testing.assert_close(seen[[9, 11]] / seen[[9, 11]].sum(), logits[[9, 11]].double().softmax(0), atol=1e-6, rtol=1e-4)


def named(settings: dict) -> str:
    return ",".join(f"{k}={v}" for k, v in settings.items())


def sequence(generated: list[int], **settings) -> Sequence:
    return Sequence(Request("r", tuple(PROMPT), SamplingParams(**settings), 0, "exact", ends=ENDS), [*PROMPT, *generated])


def random_logits(places: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (3 * torch.randn(places, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def at_root(logits: torch.Tensor, seq: Sequence, how=warp) -> torch.Tensor:
    return how(logits[None], tree.roots(1), Draft(rows=1), Settings.of([seq]))[0]


def forest() -> Draft:
    """Row 0: a chain 20, 7, 22 with a sibling 2 of the 7. Row 1: siblings 2 and 30, a child 2 of the 30."""
    draft = tree.grow(Draft(rows=2), np.array([~0, ~1, ~1]), np.array([20, 2, 30]), 1)
    draft = tree.grow(draft, np.array([0, 0, 2]), np.array([7, 2, 2]), 1)
    return tree.grow(draft, np.array([3]), np.array([22]), 1)


def by_transformers(logits: torch.Tensor, text: list[int], s: SamplingParams) -> torch.Tensor:
    steps = [
        hf.RepetitionPenaltyLogitsProcessor(s.repetition_penalty),
        hf.TemperatureLogitsWarper(float(s.temperature)),
        hf.TopKLogitsWarper(s.top_k or VOCAB),
        hf.TopPLogitsWarper(s.top_p),
        hf.MinPLogitsWarper(s.min_p),
    ]
    out = logits[None]
    for step in steps:
        out = step(torch.tensor([text]), out)
    return torch.log_softmax(out[0], -1)


@pytest.mark.parametrize("settings", EVERY, ids=named)
def test_roots_are_warped_as_transformers_does(settings):
    for seed in range(5):
        seq, logits = sequence(WRITTEN, **settings), random_logits(1, seed)[0]
        torch.testing.assert_close(at_root(logits, seq), by_transformers(logits, seq.tokens, seq.request.sampling))


@pytest.mark.parametrize("settings", EVERY, ids=named)
def test_nodes_are_warped_as_transformers_does_for_the_longer_text(settings):
    draft, seqs = forest(), [sequence(WRITTEN, **settings), sequence([9], **settings)]
    places = tree.all_places(draft)
    logits = random_logits(len(places))
    found = warp(logits, places, draft, Settings.of(seqs))
    for i, place in enumerate(places):
        seq = seqs[int(tree.row_of(np.array([place]), draft)[0])]
        text = seq.tokens + draft.text(tree.ancestors(draft, place))
        torch.testing.assert_close(found[i], by_transformers(logits[i], text, seq.request.sampling))


@pytest.mark.parametrize("seed", range(40))
def test_what_is_kept_on_the_host_is_what_is_kept_anywhere(seed):
    """Top-k, top-p and min-p, each there or not, over logits with ties; and its shares are those of `warp`."""
    rng = np.random.default_rng(seed)
    for _ in range(10):
        settings = {"temperature": float(rng.choice([0.5, 1.0, 2.0])), "top_k": int(rng.choice([0, 1, 3, 17, 99]))}
        settings |= {"top_p": float(rng.choice([0.01, 0.5, 0.9, 0.999, 1.0])), "min_p": float(rng.choice([0.0, 0.05, 0.9]))}
        logits, seq = torch.from_numpy(rng.integers(-9, 9, 60) * rng.choice([0.3, 2.0])), sequence(WRITTEN, **settings)
        x, best = line(on_host(logits[None])[0], -1, Draft(rows=1), Settings.of([seq]))
        found, shares = kept(x, seq.request.sampling), weights(x, seq.request.sampling)
        wanted = at_root(logits, seq).exp().numpy()
        assert np.array_equal(np.arange(60) if found is None else found, np.flatnonzero(wanted)) and best == int(logits.argmax())
        assert shares / shares.sum() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_line_has_the_numbers_of_its_dtype(dtype):
    logits = random_logits(3, dtype=dtype)
    x, best = line(on_host(logits)[1], -1, Draft(rows=1), Settings.of([sequence([], temperature=1.0)]))
    wide = logits[1].to(torch.float64 if dtype == torch.float64 else torch.float32)
    assert np.array_equal(x, (wide - wide.max()).numpy()) and best == int(wide.argmax())


def test_presence_and_frequency_look_at_the_output_alone():
    logits = random_logits(1)[0]
    counts = torch.bincount(torch.tensor(WRITTEN), minlength=VOCAB)
    presence = at_root(logits, sequence(WRITTEN, presence_penalty=0.8), process)
    frequency = at_root(logits, sequence(WRITTEN, frequency_penalty=0.5), process)
    torch.testing.assert_close(presence, logits - 0.8 * (counts > 0))
    torch.testing.assert_close(frequency, logits - 0.5 * counts)
    assert counts[7] == 2 and counts[5] == 0  # 5 is in the prompt only


def test_repetition_penalty_comes_before_presence_and_frequency():
    logits = random_logits(1)[0]
    found = at_root(logits, sequence(WRITTEN, repetition_penalty=1.3, presence_penalty=0.8, frequency_penalty=0.5), process)
    counts = torch.bincount(torch.tensor(WRITTEN), minlength=VOCAB)
    seen = torch.bincount(torch.tensor(PROMPT + WRITTEN), minlength=VOCAB) > 0
    divided = torch.where(seen, torch.where(logits > 0, logits / 1.3, logits * 1.3), logits)
    torch.testing.assert_close(found, divided - 0.8 * (counts > 0) - 0.5 * counts)


def test_bias_is_added_where_it_is_asked_for():
    logits = random_logits(1)[0]
    found = at_root(logits, sequence(WRITTEN, logit_bias=((7, 3.0), (2, -4.0), (7, 1.0))), process)
    wanted = logits.clone()
    wanted[7] += 4.0
    wanted[2] -= 4.0
    torch.testing.assert_close(found, wanted)


def test_min_tokens_holds_the_ends_back_until_enough_is_written():
    logits = random_logits(1)[0]
    for written in range(6):
        found = at_root(logits, sequence([7] * written, min_tokens=3), process)
        assert bool(found[list(ENDS)].isinf().all()) == (written < 3)
        assert torch.equal(found[5:], logits[5:])


def test_min_tokens_counts_the_nodes_above():
    draft = tree.grow(tree.grow(Draft(rows=1), np.array([~0]), np.array([8]), 1), np.array([0]), np.array([8]), 1)
    places = tree.all_places(draft)
    found = process(random_logits(3), places, draft, Settings.of([sequence([7], min_tokens=3)]))
    assert found[:, 3].isinf().tolist() == [True, True, False]


@pytest.mark.parametrize("settings", EVERY + OURS, ids=named)
@pytest.mark.parametrize("how", [process, warp])
def test_a_node_is_a_root_whose_text_includes_its_ancestors(settings, how):
    draft, seqs = forest(), [sequence(WRITTEN, **settings), sequence([9], **settings)]
    places = tree.all_places(draft)
    logits = random_logits(len(places), 3)
    found = how(logits, places, draft, Settings.of(seqs))
    for i, place in enumerate(places):
        seq = seqs[int(tree.row_of(np.array([place]), draft)[0])]
        longer = sequence(seq.generated + draft.text(tree.ancestors(draft, place)), **settings)
        torch.testing.assert_close(found[i], at_root(logits[i], longer, how), msg=f"place {place}")


@pytest.mark.parametrize("settings", EVERY + OURS, ids=named)
def test_a_line_is_processed_as_a_place_is(settings):
    draft, seqs = forest(), [sequence(WRITTEN, **settings), sequence([9], **settings)]
    places = tree.all_places(draft)
    logits = random_logits(len(places), 5)
    found = warp(logits, places, draft, Settings.of(seqs))
    for place, raw, wanted in zip(places, on_host(logits), found, strict=True):
        x, best = line(raw, place, draft, Settings.of(seqs))
        shares = weights(x, seqs[~place if place < 0 else draft.row[place]].request.sampling)
        if settings.get("temperature"):
            assert shares / shares.sum() == pytest.approx(wanted.exp().numpy(), abs=1e-12)
        assert best == int(wanted.argmax())


@pytest.mark.parametrize("settings", EVERY + OURS, ids=named)
def test_calling_twice_gives_the_same_and_changes_nothing(settings):
    draft, seqs = forest(), [sequence(WRITTEN, **settings), sequence([9], **settings)]
    places = tree.all_places(draft)
    logits = random_logits(len(places))
    before, texts = logits.clone(), [list(s.tokens) for s in seqs]
    first = warp(logits, places, draft, Settings.of(seqs))
    assert torch.equal(first, warp(logits, places, draft, Settings.of(seqs)))
    assert torch.equal(logits, before) and [s.tokens for s in seqs] == texts


def test_rows_with_mixed_settings_equal_each_row_alone():
    seqs = [sequence(WRITTEN, **settings) for settings in [*EVERY, *OURS, {}, {"temperature": 1.0}]]
    logits = random_logits(len(seqs), 1, torch.float32)
    together = warp(logits, tree.roots(len(seqs)), Draft(rows=len(seqs)), Settings.of(seqs))
    for row, seq in enumerate(seqs):
        torch.testing.assert_close(together[row], at_root(logits[row], seq), msg=f"row {row}: {seq.request.sampling}")


def test_a_neighbour_with_top_p_leaves_the_tail_of_a_row_without_it():
    """In float32 the running sum reaches 1 before the last tokens do."""
    seqs = [sequence([], temperature=1.0), sequence([], temperature=1.0, top_p=0.9)]
    logits = torch.linspace(30, 0, VOCAB).repeat(2, 1)
    together = warp(logits, tree.roots(2), Draft(rows=2), Settings.of(seqs))
    torch.testing.assert_close(together[0], at_root(logits[0], seqs[0]))


def test_greedy_is_one_hot_with_ties_to_the_lowest_id():
    logits = torch.zeros(VOCAB)
    logits[[6, 12, 20]] = 2.0
    found = at_root(logits, sequence(WRITTEN))
    assert found[6] == 0 and bool(found[np.arange(VOCAB) != 6].isinf().all())
    assert argmax(logits[None]).tolist() == [6]


def test_logprobs_are_of_the_raw_logits():
    logits = random_logits(1)[0]
    found = top_logprobs(logits, 5, 3)
    logp = torch.log_softmax(logits, -1)
    assert set(found) == {5, *logp.topk(3).indices.tolist()}
    assert all(value == pytest.approx(float(logp[token]), abs=1e-5) for token, value in found.items())
