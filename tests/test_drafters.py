"""Law 7: every drafter passes one contract suite. The index against brute force. Chains in one call against chains
token by token."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
import zoo
from contracts import check_drafter, plain, request, run, sequence
from tiny import tiny_folder
from transformers import LlamaConfig, LlamaForCausalLM

import outrider
from outrider.control.fixed import fixed
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.noise import RowNoise
from outrider.core.sampling import Settings
from outrider.core.tree import roots
from outrider.core.types import Draft, Plan
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.drafters.suffix import CERTAIN, DOUBT, RECENT, SuffixIndex, sure
from outrider.models.hf import HFModel
from outrider.models.load import wrap
from outrider.models.toy import ToyModel
from outrider.runtime.engine import Engine


def brute_force(text: list[int], cap: int) -> tuple[int, Counter]:
    """Longest suffix (up to `cap`) seen before with a continuation, and how often each token followed it."""
    for length in range(min(len(text) - 1, cap), 0, -1):
        suffix = text[-length:]
        follow = Counter(text[i + length] for i in range(len(text) - length) if text[i : i + length] == suffix)
        if follow:
            return length, follow
    return 0, Counter()


@pytest.mark.parametrize("seed", range(12))
def test_the_index_equals_brute_force_after_every_token(seed):
    rng = np.random.default_rng(seed)
    cap = int(rng.integers(2, 9))
    index, text = SuffixIndex(cap), []
    for token in rng.integers(0, int(rng.integers(2, 6)), 90).tolist():
        index.extend([token])
        text.append(token)
        length, follow = brute_force(text, cap)
        cursor = index.match()
        if not follow:
            assert cursor is None
            continue
        assert cursor.depth == length
        found = {t: chance for t, chance, _ in index.next(cursor, 99)}
        evidence = {t: min(n * length, CERTAIN) ** 2 for t, n in follow.items()}
        assert found == pytest.approx({t: n / follow.total() * evidence[t] / (evidence[t] + DOUBT) for t, n in follow.items()})


def test_continuations_go_on_deeper_than_the_cap_and_in_loops():
    index = SuffixIndex(4)
    for token in [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]:
        index.extend([token])
    cursor, out = index.match(), []
    while len(out) < 30 and (step := index.next(cursor, 1)):
        out.append(step[0][0])
        cursor = step[0][2]
    assert out == [3, 4, 5, 6, 7, 8, 9, 1, 2]
    loop = SuffixIndex(6)
    for token in [7, 8] * 20:
        loop.extend([token])
    cursor, out = loop.match(), []
    while len(out) < 20 and (step := loop.next(cursor, 1)):
        out.append(step[0][0])
        cursor = step[0][2]
    assert out == [7, 8] * 10


@pytest.mark.parametrize("seed", range(40))
def test_a_continuation_in_one_go_is_the_same_as_token_by_token(seed):
    rng = np.random.default_rng(seed)
    index = SuffixIndex(int(rng.integers(2, 12)))
    for token in rng.integers(0, int(rng.integers(2, 6)), 80).tolist():
        index.extend([token])
        start = index.match()
        if start is None:
            continue
        levels, cursor, tokens, shares = int(rng.integers(0, 12)), start, [], []
        while len(tokens) < levels and (step := index.next(cursor, 1)):
            (token_, share, cursor) = step[0]
            tokens.append(token_)
            shares.append(share)
        assert index.follow(start, levels) == (tokens, shares, cursor)
        middle = index.follow(start, levels // 2)
        assert [a + b for a, b in zip(middle[:2], index.follow(middle[2], levels - levels // 2)[:2], strict=True)] == [tokens, shares]


@pytest.mark.parametrize("period", [1, 2, 7])
def test_a_loop_goes_on_and_a_copy_ends_where_the_text_does(period):
    """Said once and begun again is a copy; said twice is a loop, whose continuation the text does not hold yet."""
    words = list(range(period))
    index = SuffixIndex(24)
    index.extend([50, *words, *words])
    assert index.follow(index.match(), 20)[0] == (words * 20)[:20]
    index = SuffixIndex(24)
    index.extend([*words, 60, 61, *words])
    assert index.follow(index.match(), 20)[0] == [60, 61, *words]


@pytest.mark.parametrize("seed", range(20))
def test_how_likely_a_first_token_is_needs_no_continuation(seed):
    """Of few places and many, of one going on and several: what a guess of one token would have said."""
    rng = random.Random(seed)
    index, seen = SuffixIndex(6), set()
    for _ in range(150):
        index.extend([rng.randrange(3) for _ in range(rng.randint(1, 3))])
        if cursor := index.match():
            assert index.first(cursor) == index.follow(cursor, 1)[1][0]
            seen.add(min(len(cursor.places), 3))
    assert seen == {1, 2, 3}


def test_text_that_repeats_itself_is_looked_at_in_its_latest_places():
    """Looking costs the same however long it went on; what followed lately counts."""
    index = SuffixIndex(2)
    index.extend([1, 2, 3] * 500 + [1, 2, 4] * RECENT + [1, 2])
    cursor = index.match()
    assert len(cursor.places) == RECENT and [(t, chance) for t, chance, _ in index.next(cursor, 9)] == [(4, sure(CERTAIN))]


def test_a_word_in_many_places_hides_no_longer_match() -> None:
    """The latest places of one word are many; the pair that matches longer stood before all of them."""
    index = SuffixIndex(24)
    index.extend([7, 8, 1, 5, *[9, 1, 3] * (2 * RECENT), 8, 1])
    assert index.match().depth == 2 and index.follow(index.match(), 2)[0] == [5, 9]


@pytest.mark.parametrize(("text", "chances"), [
    ([1, 5, 6, 1], [1 / 3.4, 4 / 6.4]), ([1, 5, 6, 1, 5, 6, 9, 1], [4 / 6.4, 16 / 18.4]), ([1, 5, 6, 1, 7, 8, 1], [1 / 6.8, 4 / 6.4]),
    ([1, 2, 3, 4, 1, 2], [4 / 6.4, 9 / 11.4]),
])  # fmt: skip
def test_more_places_and_longer_matches_leave_less_doubt(text: list[int], chances: list[float]) -> None:
    """By hand: a word once, a word twice and both alike, both unlike, two words once. Each token that came true lengthens the match."""
    index = SuffixIndex(24)
    index.extend(text)
    assert index.follow(index.match(), 2)[1] == pytest.approx(chances)


def test_text_is_indexed_in_any_pieces():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 3, 60).tolist()
    whole, pieces = SuffixIndex(6, 2), SuffixIndex(6, 2)
    whole.extend(text)
    while len(pieces.text) < 60:
        pieces.extend(text[len(pieces.text) :][: int(rng.integers(0, 9))])
        pieces.match()
    assert (pieces.text, pieces.latest, pieces.pair, pieces.one) == (
        whole.text,
        whole.latest,
        whole.pair,
        whole.one,
    ) and pieces.match() == whole.match()


def test_lookup_prefers_the_frequent_continuation():
    seq = sequence([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 8, 1, 2])
    lookup = Lookup()
    lookup.begin(seq)
    settings, noise = Settings.of([seq]), RowNoise(*np.zeros((3, 1), np.int64))
    draft = lookup.extend([seq], Draft(rows=1), roots(1), 2, 1, settings, noise)
    assert draft.token == [4, 3]
    assert draft.score[0] > draft.score[1]


@pytest.mark.parametrize(("how", "text", "guess"), [
    ({}, [1, 5, 6, 1], []), ({"floor": 0.2}, [1, 5, 6, 1], [5]), ({"floor": 0.2, "least": 2}, [1, 5, 6, 1], []), ({}, [1, 5, 6, 1, 5, 7, 1], [5]),
    ({"floor": 0.2}, [1, 5, 1, 6, 1], []), ({"floor": 0.0}, [1, 5, 6, 7], []),
])  # fmt: skip
def test_lookup_has_no_guess_that_is_too_unlikely(how: dict, text: list[int], guess: list[int]) -> None:
    seq, lookup = sequence(text), Lookup(**how)
    lookup.begin(seq)
    draft = lookup.extend([seq], Draft(rows=1), roots(1), 1, 1, Settings.of([seq]), RowNoise(*np.zeros((3, 1), np.int64)))
    assert draft.token == guess and seq.slots["lookup"].chance(seq.tokens) == (draft.score[0] if guess else 0.0)


@pytest.mark.parametrize(
    ("how", "named"), [({"least": 0}, "least=0"), ({"least": 30}, "least=30"), ({"floor": 1.5}, "floor=1.5"), ({"floor": float("nan")}, "floor=nan")]
)
def test_a_lookup_that_could_not_be_is_refused_by_name(how: dict, named: str) -> None:
    with pytest.raises(OutriderError, match=named):
        Lookup(**how)


@pytest.mark.parametrize("seed", range(10))
def test_lookup_knows_how_likely_its_guess_is_before_it_is_asked(seed):
    """However often it is looked at, asked or let alone; what it then says is what one says that nobody looked at."""
    rng = np.random.default_rng(seed)
    seq, lookup, other = sequence(rng.integers(0, 5, 3).tolist()), Lookup(floor=0.4), Lookup("other", floor=0.4)
    lookup.begin(seq)
    other.begin(seq)
    settings, noise, seen = Settings.of([seq]), RowNoise(*np.zeros((3, 1), np.int64)), set()
    for _ in range(60):
        seq.tokens += rng.integers(0, 5, int(rng.integers(0, 3))).tolist()
        told = [seq.slots["lookup"].chance(seq.tokens) for _ in range(int(rng.integers(1, 3)))]
        if rng.random() < 0.6:
            first, second = (part.extend([seq], Draft(rows=1), roots(1), 1, 1, settings, noise, levels=3) for part in (lookup, other))
            assert (first.token, first.score) == (second.token, second.score) and set(told) == {first.score[0] if len(first) else 0.0}
            seen |= set(told)
    assert len(seen) > 3 and 0.0 in seen


def chains(lookup: Lookup, seqs: list, draft: Draft, calls: list[int]) -> Draft:
    """A chain a row of sum(calls) levels, so many a call, as the engine asks for them."""
    settings, noise = Settings.of(seqs), RowNoise(*np.zeros((3, len(seqs)), np.int64))
    frontier, deep = roots(len(seqs)), 0
    for levels in calls:
        draft = lookup.extend(seqs, draft, frontier, 1, 4, settings, noise, levels=levels)
        deep += levels
        frontier = [n for n in range(len(draft)) if draft.source[n] & 4 and draft.depth[n] == deep]
    return draft


def by_path(draft: Draft) -> dict:
    """What is known of every node, by row and the tokens that lead to it."""
    return {(draft.row[n], *draft.text(tree.ancestors(draft, n))): (draft.source[n], draft.score[n], draft.kind[n]) for n in range(len(draft))}


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("union", [False, True], ids=["alone", "after another"])
def test_lookup_goes_many_levels_in_one_call_as_in_many(seed, union):
    """`after another`: part of its chain was guessed by others, whose nodes gain the source and keep their score; `again` has its own."""
    rng = np.random.default_rng(seed)
    seqs = [sequence(rng.integers(0, 3, 40).tolist(), f"l{r}") for r in range(2)]
    lookup, depth = Lookup(cap=8), int(rng.integers(1, 9))
    for seq in seqs:
        lookup.begin(seq)
    draft = Draft(rows=2)
    if union:
        alone = chains(lookup, seqs, draft, [depth])
        for row in range(2):
            guess = [alone.token[n] for n in range(len(alone)) if alone.row[n] == row][: int(rng.integers(0, depth + 1))]
            draft = tree.run(draft, ~row, guess + [7], 1, [0.5] * (len(guess) + 1))
    slow = chains(lookup, seqs, draft, [1] * depth)
    half = depth // 2
    assert by_path(chains(lookup, seqs, draft, [depth])) == by_path(slow)
    assert by_path(chains(lookup, seqs, draft, [half, depth - half] if half else [depth])) == by_path(slow)
    assert max((d for d, s in zip(slow.depth, slow.source, strict=True) if s & 4), default=0) <= depth
    if union:
        shared = [s for s in slow.source if s == 5]
        assert len(slow.source) == len(by_path(slow)) and slow.source.count(1) + len(shared) == len(draft)
        assert [x for x, s in zip(slow.score, slow.source, strict=True) if s & 1] == draft.score
        own = {path: score for path, (_, score, _) in by_path(alone).items()}
        for path, n in zip(by_path(slow), range(len(slow)), strict=True):
            assert slow.said(n, 1) == slow.score[n] and (not slow.source[n] & 4 or slow.said(n, 4) == own[path])
        assert (slow.again is None) == (not shared)


def test_a_step_that_drafts_nothing_makes_no_lists():
    """What every plain step would leave behind is what full collections would have to look at."""
    assert tree.empty(2) is tree.empty(2) and tree.empty(2) == Draft(2) and tree.empty(3).rows == 3
    engine = Engine(ToyModel(6, 5, rows=1), {}, fixed(Plan()), 1)
    run(engine, [request([1, 2, 3], max_tokens=4)])
    assert len({id(r.draft) for r in engine.ring}) == 1


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


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("kind", ["lookup", "model"])
def test_nothing_is_guessed_after_an_end_token(kind: str, width: int) -> None:
    """What comes there is cut, whatever it is: guesses would be drafted and verified in vain. An end token itself may be guessed."""
    end, told, guessed = 4, fixed(Plan(((kind, 6, width),))), 0
    part = Lookup("lookup", floor=0.0) if kind == "lookup" else ModelDrafter(ToyModel(13, 1, name="draft", blend=(2, 0.3)), "model")
    engine = Engine(ToyModel(13, 1, name="target", blend=(2, 0.0)), {kind: part}, told, 1)
    for seed in range(12):
        prompt = [5, 6, 7, end, 8, 9, 10, 11, 5, 6] if kind == "lookup" else [1, 2 + seed % 9, 3]
        (seq,) = run(engine, [request(prompt, max_tokens=30, seed=seed, ends=frozenset({end}))])
        for draft in [r.draft for r in seq.records if r.draft]:
            guessed += draft.token.count(end)
            assert not any(parent >= 0 and draft.token[parent] == end for parent in draft.parent)
    assert guessed, "a test that cannot fail"


def test_a_chain_ends_at_an_end_token() -> None:
    """Also where guesses are made in one call: no forward is made for what would come after it."""

    def drafted(ends: frozenset[int]) -> tuple[list[int], int]:
        model, seq = zoo.model("llama", noise=0.1), sequence([3, 4, 5], ends=ends)
        drafter = ModelDrafter(model, "model")
        drafter.begin(seq)
        before = model.forwards
        draft = drafter.extend([seq], tree.empty(1), roots(1), 1, 1, Settings.of([seq]), RowNoise((0,), (0,), (3,)), levels=6)
        return draft.token, model.forwards - before

    tokens, forwards = drafted(frozenset())
    kept = tokens.index(tokens[2]) + 1
    assert drafted(frozenset({tokens[2]})) == (tokens[:kept], forwards - (len(tokens) - kept)) and len(tokens) == 6


FEW, MANY = 32, 40  # ids that a draft model has, and its target


def few(vocab: int, seed: int = 0, name: str = "target") -> HFModel:
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **shape))
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.25)
    return wrap(made, name, "v", rows=3, context=100)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("how", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_a_draft_model_is_silent_in_texts_that_it_cannot_read(width, how):
    """Its embedding ends before the target's: who has such an id gets no guesses from then on, and others beside it do."""
    target, drafter = few(MANY), ModelDrafter(few(FEW, 1, "draft"), "model", MANY)
    engine = Engine(target, {"model": drafter}, fixed(Plan((("model", 3, width),))), 3)
    asked = [request(prompt, str(n), max_tokens=40, seed=n, **how) for n, prompt in enumerate(([1, 5, 2], [1, MANY - 1, 2], [1, 6, FEW]))]
    seqs, heard = run(engine, asked), 0
    assert [seq.generated for seq in seqs] == plain(target, asked)
    for seq in seqs:
        told = len(seq.request.prompt)
        for record in seq.records:
            at = record.requests.index(seq.request.id)
            assert not record.drafted[at] or max(seq.tokens[:told]) < FEW
            told, heard = told + record.emitted[at], heard + record.drafted[at]
    assert heard and not any(record.drafted[record.requests.index(seq.request.id)] for seq in seqs[1:] for record in seq.records)
    assert not any(seq.slots for seq in seqs)


def test_a_draft_model_does_not_go_on_from_what_it_cannot_read():
    """Guesses of others, of which some have ids that it lacks; what was read of a text is not looked at again."""
    drafter, seq = ModelDrafter(few(FEW, 1, "draft"), "model", MANY), sequence([1, 2, 3], "a")
    drafter.begin(seq)
    others = tree.grow(tree.grow(Draft(rows=1), [~0, ~0], [FEW, 4], 1), [0], [5], 1)
    grown = drafter.extend([seq], others, [0, 1, 2], 1, 2, Settings.of([seq]), RowNoise((7,), (0,), (3,)))
    assert grown.parent[3:] == [1] and grown.source[3:] == [2]
    assert seq.slots[drafter.mark] == 3
    seq.tokens += [FEW, 1]
    assert drafter.extend([seq], Draft(rows=1), [~0], 1, 2, Settings.of([seq]), RowNoise((7,), (1,), (5,)), 3) == Draft(rows=1)
    drafter.end(seq)
    assert not seq.slots


def test_that_a_draft_model_has_fewer_ids_is_said_at_load(tmp_path, caplog):
    target, draft = tiny_folder(tmp_path / "target"), tiny_folder(tmp_path / "draft", jitter=0.03)
    small = LlamaForCausalLM.from_pretrained(draft)
    small.resize_token_embeddings(270, mean_resizing=False)
    small.save_pretrained(draft)
    with caplog.at_level("WARNING", "outrider"):
        rt = outrider.load(target, [f"model:{draft}"], depth=3, compile="off")
    assert "270 of the target's 300 ids" in caplog.text
    how = {"max_tokens": 30, "ignore_eos": True}
    out = rt.generate("the quick brown fox", **how)
    assert max([*out.prompt_tokens, *out.tokens]) >= 270
    assert out.tokens == outrider.load(target, [], compile="off").generate("the quick brown fox", **how).tokens
