"""Laws 6 and 8: every backend passes the contract; every cache equals a recomputed one after every step.

Windows are 6 positions and texts go past them; prefill chunks are 4 tokens, so chunk borders are crossed.
"""

import numpy as np
import pytest
import torch
import zoo
from contracts import check_scores, request, run, sequence

from outrider.control.fixed import fixed
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.types import Draft, Outcome, Plan
from outrider.drafters.model import ModelDrafter
from outrider.models.load import self_check
from outrider.models.toy import ToyModel
from outrider.runtime.engine import Engine


def recompute(module: torch.nn.Module):
    def logits(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]

    return logits


@pytest.mark.parametrize("order", [1, 2, None])
def test_toy_contract(order):
    toy = ToyModel(7, 3, order=order)
    check_scores(toy, lambda t: torch.from_numpy(toy.logits(t)), np.random.default_rng(0), 7, 0.0, steps=40)


@pytest.mark.parametrize("name", zoo.CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_hf_contract(name, dtype):
    model = zoo.model(name, dtype=dtype, chunk=4)
    tolerance = 1e-3 if dtype == torch.float32 else 0.25
    routed = 0.2 if name == "mixtral" and dtype == torch.bfloat16 else 0.0
    check_scores(model, recompute(model.module), np.random.default_rng(1), zoo.VOCAB, tolerance, outliers=routed)


@pytest.mark.parametrize("name", zoo.CLASSES)
def test_load_time_check_passes(name):
    self_check(zoo.model(name))


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "gpt-neox"])
def test_early_exit_view_is_the_truncated_model(name):
    owner = zoo.model(name, layers=4)
    view = owner.view((0, 1))
    short = zoo.module(name, layers=4)
    base = getattr(short, short.base_model_prefix)
    base.layers = base.layers[:2]
    base.config.num_hidden_layers = 2
    tokens = [3, 5, 8, 13, 21, 34, 2, 9, 4]
    seq = sequence(tokens)
    owner.open(seq)
    owner.prefill([seq])
    draft = tree.grow(Draft(rows=1), np.array([~0]), np.array([7]), 1)
    got = view.score([seq], draft, tree.all_places(draft)).logits
    for row, text in zip(got, (tokens, [*tokens, 7]), strict=True):
        torch.testing.assert_close(row, recompute(short)(text), atol=1e-3, rtol=1e-3)


def test_layer_skip_view_drafts_and_leaves_the_text_alone():
    owner = zoo.model("gemma3", layers=4)
    requests = [request([5, 9, 2, 7] * 3, f"v{i}", max_tokens=24) for i in range(2)]
    want = [s.generated for s in run(Engine(owner, {}, fixed(Plan()), 2), requests)]
    for layers in ((0, 1), (0, 2, 3), (0, 1, 2, 3)):
        drafter = ModelDrafter(owner.view(layers), "self")
        seqs = run(Engine(owner, {"self": drafter}, fixed(Plan((("self", 3, 2),))), 2), requests)
        assert [s.generated for s in seqs] == want
        assert all(not s.slots for s in seqs)
        if len(layers) == 4:
            assert all(r.accepted == tuple(min(3, d) for d in r.drafted) or min(r.emitted) for r in seqs[0].records)


def test_view_refuses_layers_that_are_not_there():
    with pytest.raises(OutriderError, match="layers 0..1"):
        zoo.model("llama").view((0, 9))


def test_rows_are_a_compact_prefix_and_a_prefix_is_reused():
    toy = ToyModel(11, 0, rows=3)
    a, b = sequence(list(range(8)), "a"), sequence([9, 9, 9], "b")
    for seq in (a, b):
        toy.open(seq)
    toy.prefill([a, b])
    toy.close(a)
    assert toy.rows.of(b).index == 0
    before = toy.computed
    c = sequence([*range(8), 4, 4], "c")
    toy.open(c)
    toy.prefill([c])
    assert toy.computed - before == 2, "only what is new is computed (the last token waits for the step)"
    assert toy.rows.of(c).text == c.tokens[:-1]


def test_prefix_of_a_running_row_is_copied():
    toy = ToyModel(11, 0, rows=2)
    a = sequence(list(range(8)), "a")
    toy.open(a)
    toy.prefill([a])
    b = sequence([*range(6), 10, 10], "b")
    toy.open(b)
    assert toy.rows.reused == 6
    toy.prefill([b])
    draft = Draft(rows=2)
    got = toy.score([a, b], draft, tree.roots(2)).logits
    assert torch.equal(got[1], torch.from_numpy(toy.logits(b.tokens)))


def test_too_many_rows_is_an_error_that_names_the_remedy():
    toy = ToyModel(5, 0, rows=1)
    toy.open(sequence([1], "a"))
    with pytest.raises(OutriderError, match="more rows"):
        toy.open(sequence([1], "b"))


def test_a_step_that_is_dropped_before_commit_loses_nothing():
    toy = ToyModel(7, 3)
    seq = sequence([1, 2, 3])
    toy.open(seq)
    toy.prefill([seq])
    draft = tree.grow(Draft(rows=1), np.array([~0, ~0]), np.array([4, 5]), 1)
    toy.score([seq], draft, tree.all_places(draft))  # interrupted here
    again = toy.score([seq], Draft(rows=1), tree.roots(1)).logits
    assert torch.equal(again[0], torch.from_numpy(toy.logits([1, 2, 3])))
    toy.commit([seq], Draft(rows=1), Outcome([[]], [6], [0]))
    assert toy.rows.of(seq).text == [1, 2, 3]


def stopped(monkeypatch, store, verb: str, when: str, do) -> None:
    """Ctrl-C in the midst of what `do` has the memory do."""
    whole = getattr(store, verb)

    def broken(*about: int) -> None:
        if when == "after":
            whole(*about)
        elif when == "amid":
            whole(*about[:-1], about[-1] // 2)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store, verb, broken)
        do()


def holds(toy: ToyModel) -> None:
    """Every row has in its slots what it says."""
    for at, row in enumerate(toy.rows.all):
        assert row.index == at and row.text == toy.store.cells[at, : row.cached, 0].tolist()
        assert (row.owner is not None) == (at < toy.rows.active)
        assert row.owner is None or toy.rows.of(row.owner) is row


@pytest.mark.parametrize("others", [False, True])
def test_a_row_is_closed_once_though_its_end_was_interrupted(monkeypatch, others):
    """Who is closed again takes no row from who has it by now."""
    toy = ToyModel(11, 0, order=None, rows=2)
    a, b, c = sequence([1, 2, 3], "a"), sequence([4, 5], "b"), sequence([1, 2, 3, 4], "c")
    for seq in (a, b):
        toy.open(seq)
    toy.prefill([a, b])
    stopped(monkeypatch, toy.store, "swap", "after", lambda: toy.close(a))
    if others:
        toy.open(c)
    toy.close(a)
    toy.close(a)
    holds(toy)
    assert toy.rows.active == 1 + others and not a.slots
    for seq in [b, c][: 1 + others]:
        assert torch.equal(toy.score([seq], Draft(rows=1), [-1]).logits[0], torch.from_numpy(toy.logits(seq.tokens)))


@pytest.mark.parametrize("when", ["before", "amid", "after"])
@pytest.mark.parametrize("verb", ["close", "open", "copy"])
def test_an_interrupted_move_of_rows_costs_reading_again_and_no_text(monkeypatch, verb, when):
    toy = ToyModel(11, 0, order=None, rows=4)
    a, b, c = sequence([1, 2, 3, 4, 5, 6], "a"), sequence([9, 8, 7, 6, 5, 4], "b"), sequence([1, 2, 3, 7, 7, 7, 7], "c")
    for seq in (a, b, c):
        toy.open(seq)
    toy.prefill([a, b, c])
    if verb == "close":
        stopped(monkeypatch, toy.store, "swap", when, lambda: toy.close(a))
        running = [b, c]
    elif verb == "copy":
        old, d = sequence([5, 5, 5, 5, 5], "old"), sequence([1, 2, 3, 4, 9], "d")
        toy.open(old)
        toy.prefill([old])
        toy.close(old)
        stopped(monkeypatch, toy.store, "copy", when, lambda: toy.open(d))
        assert not d.slots
        holds(toy)
        toy.open(d)
        running = [a, b, c, d]
    else:
        toy.close(b)
        toy.close(c)
        d = sequence([*b.tokens, 3], "d")  # whose beginning lies behind the text of c now
        stopped(monkeypatch, toy.store, "swap", when, lambda: toy.open(d))
        assert not d.slots and toy.rows.active == 1
        holds(toy)
        toy.open(d)
        running = [a, d]
    holds(toy)
    for seq in running:
        got = toy.score([seq], Draft(rows=1), [-1]).logits[0]
        assert torch.equal(got, torch.from_numpy(toy.logits(seq.tokens)))
        toy.commit([seq], Draft(rows=1), Outcome([[]], [6], [0]))
    holds(toy)
    for seq in running:
        toy.close(seq)
    holds(toy)
    again = sequence([1, 2, 3, 4, 5, 6, 7], "again")
    toy.open(again)
    assert torch.equal(toy.score([again], Draft(rows=1), [-1]).logits[0], torch.from_numpy(toy.logits(again.tokens)))


def test_an_interrupted_prefill_leaves_nothing_to_reuse(monkeypatch):
    """The text of a row is what was computed, never what was about to be."""
    toy, prompt = ToyModel(7, 3, rows=1), [1, 2, 3, 4, 5, 6]
    write = toy._write
    monkeypatch.setattr(toy, "_write", lambda layout: (_ for _ in ()).throw(KeyboardInterrupt))
    seq = sequence(prompt)
    toy.open(seq)
    with pytest.raises(KeyboardInterrupt):
        toy.prefill([seq])
    toy.close(seq)
    monkeypatch.setattr(toy, "_write", write)
    again = run(Engine(toy, {}, fixed(Plan()), 1), [request(prompt, max_tokens=8)])[0]
    assert again.generated == run(Engine(ToyModel(7, 3), {}, fixed(Plan()), 1), [request(prompt, max_tokens=8)])[0].generated
