"""A step that fails loses nothing and spoils nothing: the texts beside it and after it are those of plain decoding."""

import contextlib
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from contracts import plain, recompute, request, run
from transformers import LlamaConfig, LlamaForCausalLM
from zoo import module

from outrider.control.fixed import Told, fixed
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.types import Plan
from outrider.drafters.model import ModelDrafter
from outrider.models.exits import EarlyExit
from outrider.models.hf import HFModel
from outrider.models.load import wrap
from outrider.models.toy import ToyModel
from outrider.runtime.engine import Engine


class Oracle:
    """Guesses `known`. `broken`: the verb that fails once; `poisoned`: the request that it will not begin."""

    name, draws, broken, poisoned = "oracle", False, "", ""

    def __init__(self, known: list[int] | None = None) -> None:
        self.known = known or []

    def begin(self, seq):
        if seq.request.id == self.poisoned:
            raise RuntimeError("begin failed")

    def end(self, seq): ...

    def observe(self, *step):
        self._fail("observe")

    def extend(self, seqs, draft, frontier, width, source, settings, noise, levels=1, on=None):
        self._fail("extend")
        for p in frontier:
            seq, depth = seqs[tree.row_at(draft, p)], tree.depth_at(draft, p)
            guess = self.known[seq.produced + depth :][:levels]
            draft = tree.run(draft, p, guess, source, [0.5] * len(guess))
        return draft

    def _fail(self, verb):
        if self.broken == verb:
            self.broken = ""
            raise RuntimeError(f"{verb} failed")


def failed_step(engine):
    with pytest.raises(RuntimeError, match="failed"):
        engine.step()


BOTH, ALONE = Plan((("early", 2, 1), ("oracle", 2, 1))), Plan((("oracle", 2, 1),))


def test_a_cache_holds_what_it_says_after_a_failed_step():
    """The draft model had scored two nodes when another drafter failed; the next step's nodes have their numbers."""
    target, draft = ToyModel(20, 1), ToyModel(20, 2, name="draft")
    asked = request([1, 2, 3], max_tokens=30)
    oracle, plan = Oracle(plain(target, [asked])[0]), [BOTH]
    engine = Engine(target, {"early": ModelDrafter(draft, "early"), "oracle": oracle}, Told(lambda seqs: (plan[0], "told")), 2)
    seq = engine.submit(asked)
    engine.step()
    oracle.broken = "extend"
    failed_step(engine)
    plan[0] = ALONE
    engine.step()
    row = draft.rows.of(seq)
    assert row.text == seq.tokens[: row.cached] == draft.store.cells[row.index, : row.cached, 0].tolist()
    plan[0] = BOTH
    while seq.finish_reason is None:
        engine.step()
    assert seq.generated == oracle.known


def test_what_the_target_took_to_read_a_prompt_is_known_at_once_and_kept(monkeypatch):
    """In the step that reads it, before drafters are asked; when that fails, too; and what others take later is theirs."""
    target, now, told, oracle = ToyModel(20, 1), [0.0], list[float](), Oracle([1] * 40)
    engine = Engine(target, {"oracle": oracle}, Told(lambda seqs: (ALONE, "told")), 2)
    engine.now, prefill, extend = lambda: now[0], target.prefill, oracle.extend

    def slow(seqs):
        now[0] += 4.0 * sum(target.rows.behind(s) > 1 for s in seqs)
        prefill(seqs)

    def heard(seqs, *how, **more):
        told.append(seqs[0].read)
        return extend(seqs, *how, **more)

    monkeypatch.setattr(target, "prefill", slow)
    monkeypatch.setattr(oracle, "extend", heard)
    one = engine.submit(request([1, 2, 3], max_tokens=30))
    oracle.broken = "extend"
    failed_step(engine)
    engine.step()
    two = engine.submit(request([4, 5, 6, 7], max_tokens=30))
    engine.step()
    assert told == [4.0, 4.0, 4.0] and (one.read, two.read) == (4.0, 4.0)


def test_an_early_exit_reuses_nothing_of_a_failed_step():
    """Its hidden states are found by slots, which the next step's nodes take."""
    target = wrap(module("llama"), "target", "zoo", context=200)
    early = EarlyExit(target, 1)
    asked = request([3, 1, 4, 1, 5], max_tokens=24)
    oracle, plan = Oracle(plain(target, [asked])[0]), [BOTH]
    from outrider.compiler.passes.inline_early_exit import EARLY_EXIT

    name = f"{EARLY_EXIT}1"
    plan[0] = Plan(((name, 2, 1), ("oracle", 2, 1)))
    engine = Engine(target, {name: ModelDrafter(early, name), "oracle": oracle}, Told(lambda seqs: (plan[0], "told")), 1)
    seq = engine.submit(asked)
    engine.step()
    for _ in range(3):
        plan[0], oracle.broken = Plan(((name, 2, 1), ("oracle", 2, 1))), "extend"
        failed_step(engine)
        plan[0] = ALONE
        engine.step()
    while seq.finish_reason is None:
        engine.step()
    assert seq.generated == oracle.known
    with torch.inference_mode():
        want = recompute(target)(seq.tokens)
    assert torch.isfinite(want).all() and not early.known


OVER = 63  # a token that is too large for half precision


def halved(name: str = "target", over: bool = True, rows: int = 2) -> HFModel:
    """A model in half precision, whose numbers overflow where OVER is read."""
    torch.manual_seed(0)
    shape = {"vocab_size": OVER + 1, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    made = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2, max_position_embeddings=256)).half().eval()
    with torch.no_grad():
        for weight in made.model.layers[0].mlp.parameters():
            weight.mul_(40)
        made.model.embed_tokens.weight[OVER] = 65000.0 if over else 0.0
    return wrap(made, name, "v", rows=rows, context=100)


BAD = [1, 2, 3, 4] * 10 + [OVER] * 3 + [5]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("prompt", [[5, 6, 7, 8], [*BAD[:40], 6], [*BAD[:40], 6, *[7] * 20]], ids=["another", "its beginning", "and more"])
def test_a_text_that_overflowed_spoils_none_that_comes_after_it(rows, prompt):
    """In the row where it lay, and in others that begin as it did."""
    want = plain(halved(rows=rows), [request(prompt, max_tokens=12)])
    engine = Engine(halved(rows=rows), {}, fixed(Plan()), rows)
    for _ in range(rows):
        bad = engine.submit(request(BAD, "bad", max_tokens=9))
        with pytest.raises(OutriderError, match="NaN"):
            engine.step()
        engine.cancel(bad)
    assert all(block.isfinite().all() for block in engine.target.store.blocks)
    assert [seq.generated for seq in run(engine, [request(prompt, str(n), max_tokens=12) for n in range(rows)])] == want * rows


def test_a_text_that_overflowed_beside_another_costs_that_one_nothing_but_time():
    want = plain(halved(), [request([5, 6, 7, 8], max_tokens=12)])[0]
    engine = Engine(halved(), {}, fixed(Plan()), 2)
    good = engine.submit(request([5, 6, 7, 8], "good", max_tokens=12))
    engine.step()
    bad = engine.submit(request(BAD, "bad", max_tokens=9))
    assert engine.step() == [good, bad] and bad.finish_reason == "failed"
    assert engine.target.rows.of(good).text and good.steps == 2, "it is not read again"
    with pytest.raises(OutriderError, match="NaN"):
        engine.advance([bad])
    while good.finish_reason is None:
        engine.step()
    assert good.generated == want


def test_a_draft_model_that_overflowed_drafts_again():
    target, draft, deep = halved(over=False), halved("draft"), fixed(Plan((("model", 3, 1),)))
    engine = Engine(target, {"model": ModelDrafter(draft)}, deep, 2)
    bad = engine.submit(request(BAD, "bad", max_tokens=9))
    with pytest.raises(OutriderError, match="NaN"):
        engine.step()
    engine.cancel(bad)
    asked = [request([5, 6, 7, 8], str(n), max_tokens=12) for n in range(2)]
    assert [seq.generated for seq in run(engine, asked)] == plain(halved(over=False), asked[:1]) * 2
    assert sum(sum(record.drafted) for record in engine.ring) > 0


@pytest.mark.parametrize("why", ["stop", "length"])
def test_a_text_that_ended_in_a_failed_step_has_ended(why):
    """The failure came between its last token and its end; nobody writes on."""
    target, other = ToyModel(20, 1), request([7, 8], "other", max_tokens=20)
    text = plain(target, [request([1, 2, 3], max_tokens=20)])[0]
    asked = request([1, 2, 3], "asked", max_tokens=20 if why == "stop" else 2, ends=frozenset({text[1]} if why == "stop" else ()))
    want = plain(target, [asked, other])
    engine = Engine(target, {"oracle": (oracle := Oracle())}, fixed(Plan()), 2)
    seqs = [engine.submit(asked), engine.submit(other)]
    engine.step()
    oracle.broken = "observe"
    engine.step()
    assert [r.emitted for r in seqs[0].records] == [(1, 1), (1, 1)], "what was written is told, too"
    assert seqs[0].finish_reason == why and seqs[0] not in engine.batcher.running
    while seqs[1].finish_reason is None:
        engine.step()
    assert [s.generated for s in seqs] == want and seqs[0].finish_reason == why


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_who_fails_alone_fails_alone(rows, temperature, caplog):
    """A drafter fails at every guess for one text. Whoever asks for another hears nothing of it, and has what it would have alone."""
    target, how = ToyModel(20, 1, rows=rows), {"max_tokens": 9, "temperature": temperature, "seed": 3}
    asked = [request([1 + i, 2, 3], name, **how) for i, name in enumerate(["a", "bad", "c", "d"])]
    want = [plain(ToyModel(20, 1), [one])[0] for one in asked]
    engine = Engine(target, {"oracle": (oracle := Oracle([5] * 40))}, fixed(ALONE), rows)
    extend = oracle.extend

    def fails(seqs, *how, **more):
        if any(s.request.id == "bad" for s in seqs):
            raise RuntimeError("it does not know this one")
        return extend(seqs, *how, **more)

    oracle.extend = fails
    seqs = [engine.submit(one) for one in asked]
    while any(s.finish_reason is None for s in seqs):
        engine.advance([s for s in seqs if s.request.id != "bad"])
    assert [s.finish_reason for s in seqs] == ["length", "failed", "length", "length"] and not seqs[1].generated
    assert [s.generated for s in seqs if s is not seqs[1]] == [text for i, text in enumerate(want) if i != 1]
    assert ("each goes on by itself" in caplog.text) == (rows > 1) and target.rows.active == 0 and not engine.batcher.running
    with pytest.raises(RuntimeError, match="does not know"):
        engine.advance([seqs[1]])


def _chain(draft, tokens):
    return tree.run(draft, -1, tokens, 1, [0.5] * len(tokens))


@pytest.mark.parametrize(
    "made, why",
    [
        (lambda draft: None, "gave None. it is no continuation of the draft"),
        (lambda draft: [5], "gave .5.. it is no continuation of the draft"),
        (lambda draft: _chain(draft, [20]), "guessed token 20. the target's ids are 0..19"),
        (lambda draft: _chain(draft, [-1]), "guessed token -1. the target's ids are 0..19"),
        (lambda draft: _chain(draft, [None]), "guessed token None. the target's ids are 0..19"),
        (lambda draft: _chain(draft, [3] * 70), "guessed 70 tokens. it was asked for 2 at most"),
        (lambda draft: _chain(draft, [3] * 3), "guessed 3 tokens. it was asked for 2 at most"),
    ],
)  # fmt: skip
def test_a_drafter_of_ones_own_that_is_wrong_is_named(made, why):
    oracle = Oracle()
    engine = Engine(ToyModel(20, 1), {"oracle": oracle}, fixed(ALONE), 1)
    oracle.extend = lambda seqs, draft, *how, **more: made(draft)
    seq = engine.submit(request([1, 2, 3], max_tokens=9))
    with pytest.raises(OutriderError, match=f"drafter 'oracle' {why}"):
        engine.step()
    del oracle.extend
    while seq.finish_reason is None:
        engine.step()
    assert seq.generated == plain(ToyModel(20, 1), [request([1, 2, 3], max_tokens=9)])[0]


def test_guesses_may_be_numpy_s_numbers():
    (whole,) = plain(ToyModel(20, 1), [request([1, 2, 3])])
    oracle = Oracle(whole)
    engine = Engine(ToyModel(20, 1), {"oracle": oracle}, fixed(ALONE), 1)
    extend = oracle.extend

    def guess(seqs, draft, *how, **more):
        made = extend(seqs, draft, *how, **more)
        return replace(made, token=[np.int64(t) for t in made.token])

    oracle.extend = guess
    (seq,) = run(engine, [request([1, 2, 3])])
    assert seq.generated == whole and len(seq.records) < len(whole)


def test_a_drafter_that_leaves_something_behind_is_named():
    oracle = Oracle()
    engine = Engine(ToyModel(20, 1), {"oracle": oracle}, fixed(ALONE), 1)
    oracle.begin = lambda seq: seq.slots.update(oracle=1)
    engine.submit(request([1, 2, 3], "r1", max_tokens=1))
    with pytest.raises(OutriderError, match="'oracle' left what it kept in the slots of r1"):
        engine.step()


def test_what_was_measured_before_a_step_is_none_of_it():
    """Of its model's seconds: loading, and what failed."""
    target = wrap(module("llama"), "target", "zoo", context=200)
    engine = Engine(target, {}, fixed(Plan()), 1)
    target.meter.seconds = 1000.0
    seq = engine.submit(request([3, 1, 4], max_tokens=3))
    engine.step()
    assert 0 < seq.records[0].forward["target"] < 1000


def test_who_cannot_begin_holds_up_nobody():
    engine = Engine(ToyModel(20, 1), {"oracle": (oracle := Oracle())}, fixed(Plan()), 4)
    oracle.poisoned = "bad"
    bad, good = engine.submit(request([1, 2], "bad")), engine.submit(request([3, 4], "good"))
    assert engine.step() == [good]
    assert bad.finish_reason == "failed" and not bad.slots
    engine.advance([good])
    with pytest.raises(RuntimeError, match="begin failed"):
        engine.advance([bad, good])
    while good.finish_reason is None:
        engine.step()
    assert good.generated == plain(ToyModel(20, 1), [request([3, 4], "good")])[0]


@pytest.mark.parametrize("last", [False, True])
def test_who_does_not_end_keeps_nobody_from_ending(last):
    """A drafter fails when requests end: all that ended have ended, with what they had written, and their rows are free."""
    target, asked = ToyModel(20, 1), [request([1, 2, 3], "a", max_tokens=4), request([2, 3], "b", max_tokens=4), request([7, 8], "c", max_tokens=9)]
    want = plain(ToyModel(20, 1), asked)
    other = Oracle()
    other.name = "other"
    drafters = {"other": other, "oracle": (oracle := Oracle())} if last else {"oracle": (oracle := Oracle()), "other": other}
    engine, ended = Engine(target, drafters, fixed(Plan()), 3), []
    other.end = lambda seq: ended.append(seq.request.id)

    def fails(seq):
        raise RuntimeError(f"end of {seq.request.id} failed")

    oracle.end = fails
    seqs = [engine.submit(one) for one in asked]
    with pytest.raises(RuntimeError, match="end of a failed"):
        while True:
            engine.step()
    assert [s.finish_reason for s in seqs] == ["length", "length", None] and engine.batcher.running == [seqs[2]] and ended == ["a", "b"]
    del oracle.end
    while seqs[2].finish_reason is None:
        engine.step()
    assert [s.generated for s in seqs] == want and target.rows.active == 0


def test_whose_end_was_interrupted_is_written_no_more(monkeypatch):
    """Ctrl-C between its last token and its end: the next step ends it, and adds nothing."""
    text = plain(ToyModel(20, 1), [request([1, 2, 3], max_tokens=9)])[0]
    engine = Engine(ToyModel(20, 1), {}, fixed(Plan()), 2)
    one = request([1, 2, 3], "a", max_tokens=9, ends=frozenset({text[1]}))
    seqs = [engine.submit(one), engine.submit(request([2, 3], "b", max_tokens=6))]
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "cancel", lambda seq: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert seqs[0].finish_reason == "stop" and seqs[0] in engine.batcher.running
    while seqs[1].finish_reason is None:
        engine.step()
    assert [len(s.generated) for s in seqs] == [2, 6] and seqs[0].finish_reason == "stop" and not engine.batcher.running


class Interrupted:
    """Ctrl-C at the n-th call of one of our functions, where Python looks for it."""

    def __init__(self, n: int) -> None:
        self.n, self.calls = n, 0

    def __call__(self, frame, event, arg):
        if event == "call" and str(frame.f_globals.get("__name__")).startswith("outrider."):
            self.calls += 1
            if self.calls == self.n:
                raise KeyboardInterrupt


def test_wherever_an_interruption_comes_rows_and_texts_are_there(monkeypatch):
    """At every call of three requests on two rows, from the first one's beginning to the last one's end: they go on, and so do later ones."""
    asked = [request([1, 2, 3], "a", max_tokens=2), request([2, 3], "b", max_tokens=1), request([3, 1], "c", max_tokens=1)]
    want, at = [plain(ToyModel(9, 1), [one])[0] for one in asked], Interrupted(0)
    target, small = ToyModel(9, 1, rows=2), ToyModel(9, 1, rows=2, name="small")
    engine = Engine(target, {"small": ModelDrafter(small, "small", 9)}, fixed(Plan((("small", 2, 1),))), 2)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # some come where Python cannot raise them: in generators that it closes
    while at.calls >= at.n:
        at, seqs = Interrupted(at.n + 1), [engine.submit(one) for one in asked]
        while any(s.finish_reason is None for s in seqs) or engine.batcher.running:
            sys.setprofile(at)
            with contextlib.suppress(KeyboardInterrupt):
                engine.step()
            sys.setprofile(None)
        assert [s.generated for s in seqs] == want and target.rows.active == small.rows.active == 0, f"call {at.n}"


def test_an_interruption_is_nobodys_fault(monkeypatch):
    """Ctrl-C while a request begins: it is begun again."""
    engine = Engine(target := ToyModel(20, 1), {}, fixed(Plan()), 1)
    seq = engine.submit(request([1, 2]))
    monkeypatch.setattr(target, "open", lambda seq: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    assert seq.finish_reason is None
    assert run(engine, []) == [] and engine.step() == [seq]
