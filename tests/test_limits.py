"""Ends, limits, penalties, seeds and batches: the engine with drafts against the engine without, on table models."""

import functools
from collections.abc import Callable

import contracts
import numpy as np
import pytest
import torch
from tiny import Ruled

from outrider.control.fixed import fixed
from outrider.core import tree
from outrider.core.types import Plan, Request, SamplingParams, Sequence
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.models.toy import ToyModel
from outrider.runtime.engine import Engine

VOCAB = 24
PROMPT = (1, 2, 3, 1, 2)
PLAIN = frozenset()  # no drafter is allowed
STOP = 9

same = functools.partial(ToyModel, VOCAB, 5, name="draft")
close = functools.partial(ToyModel, VOCAB, 5, blend=(6, 0.25), name="draft")


def toy_engine(draft: Callable[..., ToyModel] = close, *, depth: int = 4, rows: int = 4, target: ToyModel | None = None) -> Engine:
    """A toy target with a model drafter and, after it, lookup."""
    target = target or ToyModel(VOCAB, 5, rows=rows)
    parts = {"model": ModelDrafter(draft(rows=rows)), "lookup": Lookup(floor=0.2)}
    return Engine(target, parts, fixed(Plan((("model", depth, 1),))), rows)


def ask(
    prompt: tuple[int, ...] = PROMPT, *, name: str = "a", seed: int = 7, rule: str = "exact", ends: tuple[int, ...] = (), cut=None,
    drafters: frozenset[str] | None = None, **settings,
) -> Request:  # fmt: skip
    settings = {"max_tokens": 24} | settings
    return Request(name, prompt, SamplingParams(**settings), seed, rule, frozenset(ends), cut, drafters)


def run(engine: Engine, *requests: Request) -> list[Sequence]:
    seqs = [engine.submit(r) for r in requests]
    while any(s.finish_reason is None for s in seqs):
        engine.step()
    return seqs


def plain(target: ToyModel | None = None, **settings) -> Sequence:
    return run(toy_engine(target=target), ask(drafters=PLAIN, **settings))[0]


def drafted(seq: Sequence) -> int:
    return sum(r.drafted[r.requests.index(seq.request.id)] for r in seq.records)


def emitted(seq: Sequence) -> int:
    return sum(r.emitted[r.requests.index(seq.request.id)] for r in seq.records)


def script(tokens: list[int], start: int = len(PROMPT), **about) -> Ruled:
    """A model that writes `tokens` after `start` tokens, then 0 for ever."""
    return Ruled(VOCAB, lambda text: (tokens + [0] * 300)[max(0, len(text) - start)], **about)


def scripted(target: list[int], draft: list[int], depth: int = 4) -> Engine:
    return toy_engine(lambda rows: script(draft, rows=rows, name="draft"), depth=depth, target=script(target))


def texts_in_cache(model: ToyModel) -> list[list[int]]:
    return [row.text for row in model.rows.all if row.text]


# --- ends and limits


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("draft", [same, close], ids=["same", "close"])
def test_every_token_in_turn_as_the_end(draft, depth):
    whole = plain().generated
    for end in set(whole):
        found = run(toy_engine(draft, depth=depth), ask(ends=(end,)))[0]
        assert found.generated == whole[: whole.index(end) + 1]
        assert found.finish_reason == "stop"
        assert found.generated == plain(ends=(end,)).generated


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_the_stop_comes_before_the_limit(depth):
    text = [10, 11, STOP, 20, 21]
    for limit in range(1, 7):
        seq = run(scripted(text, text, depth), ask(ends=(STOP,), max_tokens=limit))[0]
        assert seq.generated == text[: min(limit, 3)]
        assert seq.finish_reason == ("stop" if limit >= 3 else "length")


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("depth", [1, 4, 8])
def test_a_small_limit_is_met_exactly(limit, depth):
    seq = run(toy_engine(same, depth=depth), ask(max_tokens=limit))[0]
    assert seq.generated == plain().generated[:limit]
    assert seq.finish_reason == "length"
    assert emitted(seq) == limit and drafted(seq) <= limit - 1
    assert all(r.emitted[0] > 0 for r in seq.records), "a step for nothing"


def test_nothing_is_counted_past_the_end():
    text = [10, 11, STOP, 20, 21, 22]
    seq = run(scripted(text, text, 6), ask(ends=(STOP,)))[0]
    (record,) = seq.records
    assert len(seq.generated) == len(seq.origins) == emitted(seq) == 3
    assert record.drafted == record.accepted == (3,) and record.discarded == (1,), "nor is anything guessed there"


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_an_end_that_is_only_proposed_ends_nothing(depth):
    seq = run(scripted([10, 11, 12, 13, 14], [10, STOP, STOP, STOP, STOP], depth), ask(ends=(STOP,), max_tokens=5))[0]
    assert seq.generated == [10, 11, 12, 13, 14] and seq.finish_reason == "length"
    assert drafted(seq) > 0


@pytest.mark.parametrize("rule", ["exact", "coupled"])
def test_min_tokens_counts_tokens_and_not_steps(rule):
    for least in (1, 3, 6, 14):
        for heat in (0.0, 1.0):
            how = {"ends": tuple(range(0, VOCAB, 2)), "min_tokens": least, "temperature": heat, "rule": rule}
            seq = run(toy_engine(same, depth=3), ask(**how))[0]
            assert seq.produced > least, "an end among the first min_tokens"
            assert seq.generated[-1] % 2 == 0 and seq.finish_reason == "stop"
            if rule == "coupled" or heat == 0:
                assert seq.generated == plain(**how).generated


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_min_tokens_and_a_stop_string_agree_with_plain_decoding(depth):
    """The stop comes back inside one block: first too early, then in time."""
    text = [10, STOP, 11, STOP, 12, 13]

    def cut(generated: list[int], new: list[int]) -> int | None:
        return new.index(STOP) + 1 if STOP in new else None

    seq = run(scripted(text, text, depth), ask(cut=cut, min_tokens=2))[0]
    assert seq.generated == plain(target=script(text), cut=cut, min_tokens=2).generated == text[:4]


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8])
def test_a_cut_inside_a_block_cuts_everything_at_the_same_place(depth):
    whole = plain().generated
    for end in set(whole[2:]):

        def cut(generated: list[int], new: list[int], end: int = end) -> int | None:
            return new.index(end) + 1 if end in new else None

        engine = toy_engine(same, depth=depth)
        seq = run(engine, ask(cut=cut, logprobs=1))[0]
        size = whole.index(end) + 1
        assert seq.generated == whole[:size] and seq.finish_reason == "stop"
        assert len(seq.origins) == len(seq.logprobs) == emitted(seq) == size
        for text in texts_in_cache(engine.target) + texts_in_cache(engine.drafters["model"].model):
            assert len(text) >= len(PROMPT) and text == seq.tokens[: len(text)]
        last = seq.records[-1]
        assert last.emitted[0] + last.discarded[0] <= depth + 1
        assert last.accepted[0] + (last.discarded[0] == 0) == last.emitted[0]


# --- penalties, log-probabilities, seeds

PENALTIES = [
    {"repetition_penalty": 1.5}, {"presence_penalty": 1.2}, {"frequency_penalty": 0.7}, {"logit_bias": ((4, 2.0), (5, -3.0))},
    {"min_tokens": 20, "ends": (3, 4, 8)}, {"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.1},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": ((7, 1.0),), "top_k": 12, "top_p": 0.9},
]  # fmt: skip


@pytest.mark.parametrize("settings", PENALTIES, ids=lambda s: "+".join(s))
@pytest.mark.parametrize("depth", [2, 8, 48])
def test_penalised_text_is_that_of_plain_decoding(settings, depth):
    for way in ({"temperature": 0.0}, {"temperature": 0.8, "rule": "coupled"}):
        how = {**settings, **way, "max_tokens": 50}
        wanted = plain(**how).generated
        for draft in (same, close):
            seq = run(toy_engine(draft, depth=depth), ask(**how))[0]
            assert seq.generated == wanted
            assert drafted(seq) > 0


def test_penalties_change_the_text():
    """Otherwise the test above would say nothing."""
    for settings in PENALTIES[:5]:
        assert plain(**settings, max_tokens=50).generated != plain(max_tokens=50).generated


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9}, {"temperature": 0.9, "rule": "coupled"}, {"presence_penalty": 1.0}], ids=str)
def test_logprobs_equal_a_recomputation(settings):
    engine = toy_engine(close, depth=4)
    seq = run(engine, ask(logprobs=2, **settings))[0]
    for i, (token, found) in enumerate(zip(seq.generated, seq.logprobs, strict=True)):
        logp = torch.log_softmax(torch.from_numpy(engine.target.logits(seq.tokens[: len(PROMPT) + i])), -1)
        assert set(found) == {token, *logp.topk(2).indices.tolist()}
        assert all(value == pytest.approx(float(logp[t]), abs=1e-4) for t, value in found.items())


@pytest.mark.parametrize("rule", ["exact", "coupled"])
def test_a_seed_fixes_the_text_and_another_seed_changes_it(rule):
    def text(seed: int) -> list[int]:
        return run(toy_engine(), ask(seed=seed, temperature=1.0, rule=rule))[0].generated

    assert text(1) == text(1)
    assert len({tuple(text(seed)) for seed in range(6)}) == 6


def test_rows_of_one_batch_have_their_own_noise():
    seqs = run(toy_engine(), *[ask(name=str(i), seed=i, temperature=1.0) for i in range(4)])
    assert len({tuple(s.generated) for s in seqs}) == 4


# --- batches and life cycle


def mixed(drafters: frozenset[str] | None = None) -> list[Request]:
    """Greedy, exact and coupled requests; every other one must not draft."""
    ways = [{}, {"temperature": 1.0}, {"temperature": 1.0, "rule": "coupled"}, {}, {"temperature": 0.7}, {"temperature": 0.7, "rule": "coupled"}]
    return [
        ask((1 + i, 2, 3, 1 + i, 2), name=str(i), seed=i, drafters=PLAIN if i % 2 else drafters, max_tokens=10 + 3 * i, **way)
        for i, way in enumerate(ways)
    ]


def test_plain_and_speculative_rows_in_one_batch_are_what_they_are_alone():
    together = run(toy_engine(rows=6), *mixed())
    for request, seq in zip(mixed(), together, strict=True):
        assert seq.generated == run(toy_engine(), request)[0].generated
        assert (drafted(seq) > 0) == (request.drafters is None)


def test_more_requests_than_rows_are_all_answered_as_if_alone():
    engine = toy_engine(rows=2)
    for request, seq in zip(mixed(), run(engine, *mixed()), strict=True):
        assert seq.generated == run(toy_engine(), request)[0].generated
    assert not engine.batcher.running and not engine.batcher.waiting


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_cancelling_leaves_nothing_behind_and_disturbs_nobody(gone):
    requests = mixed()[:3]
    engine = toy_engine(rows=3)
    seqs = [engine.submit(r) for r in requests]
    engine.step()
    engine.step()
    engine.cancel(seqs[gone])
    left = seqs[gone].generated
    assert seqs[gone].finish_reason == "cancelled" and seqs[gone].slots == {}
    later = engine.submit(ask((8, 2, 3), name="later"))
    while any(s.finish_reason is None for s in [*seqs, later]):
        engine.step()
    assert seqs[gone].generated == left
    for request, seq in zip(requests, seqs, strict=True):
        alone = run(toy_engine(), request)[0].generated
        assert alone[: len(left)] == left if seq is seqs[gone] else seq.generated == alone
    assert later.generated == run(toy_engine(), ask((8, 2, 3)))[0].generated
    assert engine.target.rows.active == engine.drafters["model"].model.rows.active == 0
    assert all(s.slots == {} for s in seqs)


def test_cancelling_a_waiting_or_finished_request_is_harmless():
    engine = toy_engine(rows=1)
    first, second = engine.submit(ask(name="1")), engine.submit(ask(name="2"))
    engine.step()
    engine.cancel(second)
    while first.finish_reason is None:
        engine.step()
    engine.cancel(first)
    assert (first.finish_reason, second.finish_reason) == ("length", "cancelled")
    assert engine.step() == [] and second.generated == []


def test_drafting_goes_on_for_one_request_after_another():
    engine = toy_engine()
    counts = []
    for i in range(5):
        seq = run(engine, ask(name=str(i)))[0]
        counts.append((drafted(seq), len(seq.records)))
        assert seq.generated == plain().generated
    assert counts[0][0] > 0 and len(set(counts)) == 1


def test_a_row_without_a_match_does_not_stop_its_neighbour():
    """Row "new" never repeats itself; row "loop" says 5 6 7 for ever."""

    def rule(text: list[int]) -> int:
        return 5 + (text[-1] - 4) % 3 if text[0] == 5 else text[-1] + 1

    engine = Engine(Ruled(64, rule), {"lookup": Lookup()}, fixed(Plan((("lookup", 4, 1),))), 4)
    new, loop = run(engine, ask((10, 11), name="new"), ask((5, 6, 7, 5, 6, 7), name="loop"))
    assert drafted(new) == 0
    assert loop.generated == [5, 6, 7] * 8 and drafted(loop) > 12 and len(loop.records) < 8


class Oracle:
    """Guesses right for the requests in `right` and wrong for all others."""

    def __init__(self, model: ToyModel, right: set[str]) -> None:
        self.name, self.model, self.right = "oracle", model, right

    def begin(self, seq: Sequence) -> None: ...
    def end(self, seq: Sequence) -> None: ...
    def observe(self, *args) -> None: ...
    def extend(self, seqs, draft, frontier, width, source, settings, noise, levels=1, on=None):
        rows = tree.row_of(frontier, draft).tolist()
        texts = [seqs[r].tokens + draft.text(tree.ancestors(draft, p)) for r, p in zip(rows, frontier, strict=True)]
        wrong = [seqs[r].request.id not in self.right for r in rows]
        guess = [(int(self.model.logits(t).argmax()) + w) % VOCAB for t, w in zip(texts, wrong, strict=True)]
        return tree.grow(draft, frontier, np.array(guess), source)


def test_rows_advance_at_their_own_speed():
    target = ToyModel(VOCAB, 5)
    engine = Engine(target, {"oracle": Oracle(target, {"fast"})}, fixed(Plan((("oracle", 4, 1),))), 4)
    fast, slow = run(engine, ask(name="fast", max_tokens=20), ask((4, 5), name="slow", max_tokens=20))
    assert fast.generated == plain(max_tokens=20).generated
    assert slow.generated == run(toy_engine(), ask((4, 5), drafters=PLAIN, max_tokens=20))[0].generated
    assert len(fast.records) == 4 and len(slow.records) == 20
    assert fast.origins.count("oracle") == 16 and set(slow.origins) == {"target"}


def test_a_failure_after_the_verdict_loses_nothing(monkeypatch):
    """The verdict is written with the tokens or not at all."""
    engine = Engine(ToyModel(6, 5), {}, fixed(Plan()), 1)
    seq = engine.submit(contracts.request([1, 2], max_tokens=1))
    monkeypatch.setattr(engine, "_write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert seq.finish_reason is None and seq.generated == []
    monkeypatch.undo()
    engine.step()
    assert (seq.finish_reason, seq.produced) == ("length", 1)


def test_a_budget_below_the_width_narrows_the_draft():
    draft = ModelDrafter(ToyModel(6, 9, name="draft"), "model")
    engine = Engine(ToyModel(6, 5), {"model": draft}, fixed(Plan((("model", 2, 4),), budget=3)), 1)
    seq = engine.submit(contracts.request([1, 2], max_tokens=12, temperature=1.0, rule="exact"))
    while seq.finish_reason is None:
        engine.step()
    assert {d for r in seq.records[:-1] for d in r.drafted} == {3}
