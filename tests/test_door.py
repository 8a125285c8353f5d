"""The door: text in, text out. Generations, streams, stop strings, chats and figures, over folders loaded from disk."""

import gc

import pytest
from ggufs import spaced
from tiny import spelling, tiny_folders
from transformers import AutoTokenizer

import outrider
from outrider.core.errors import OutriderError
from outrider.core.types import SamplingParams
from outrider.runtime.door import RunningText

PROMPTS = ["the quick fox", "def add(", "she sells", "sea", "a + b"]
FIGURES = {
    "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps", "num_draft_tokens",
    "num_accepted_draft_tokens", "per_step_accepted", "per_step_drafted", "joules",
}  # fmt: skip
HOW = {"max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def rt(folders):
    """A target with lookup and a model that agrees often."""
    return outrider.load(folders["target"], ["lookup", f"model:{folders['draft']}"], depth=4)


@pytest.fixture(scope="module")
def lonely(folders):
    """The target alone: plain decoding."""
    return outrider.load(folders["target"], [])


def busy(runtime) -> int:
    rows = [runtime.engine.target.rows, *(d.model.rows for d in runtime.engine.drafters.values() if hasattr(d, "model"))]
    return len(runtime.engine.batcher.running) + len(runtime.engine.batcher.waiting) + sum(r.active for r in rows)


# --- generate


def test_one_prompt_gives_one_generation_and_a_list_gives_a_list(rt, lonely):
    one, many = rt.generate(PROMPTS[0], **HOW), rt.generate(PROMPTS[:3], **HOW)
    assert isinstance(one, outrider.Generation) and [type(g) for g in many] == [outrider.Generation] * 3
    assert many[0].tokens == one.tokens
    for prompt, found in zip(PROMPTS, many, strict=False):
        wanted = lonely.generate(prompt, **HOW)
        assert (found.text, found.tokens) == (wanted.text, wanted.tokens)


@pytest.mark.parametrize(
    "way", [{}, {"temperature": 1.0, "seed": 3}, {"presence_penalty": 1.0}, {"temperature": 0.8, "top_k": 20, "seed": 1}], ids=str
)
def test_drafts_do_not_change_the_text(rt, lonely, way):
    found, wanted = rt.generate(PROMPTS[0], **HOW, **way), lonely.generate(PROMPTS[0], **HOW, **way)
    assert found.tokens == wanted.tokens and found.lossless
    assert found.stats["drafted"] > 0 and wanted.stats["drafted"] == 0


def test_every_token_has_an_origin_and_the_figures_add_up(rt):
    out = rt.generate(PROMPTS[0], **HOW)
    s = out.stats
    assert len(out.origins) == len(out.tokens) == 24
    assert set(out.origins) <= {"target", "model", "lookup", "lookup+model"}
    assert any("model" in o for o in out.origins)
    assert set(s) >= FIGURES
    assert s["num_accepted_draft_tokens"] == sum(s["per_step_accepted"]) == sum(o != "target" for o in out.origins)
    assert s["num_draft_tokens"] == sum(s["per_step_drafted"]) > 0
    assert s["draft_acceptance_rate"] == s["num_accepted_draft_tokens"] / s["num_draft_tokens"]
    assert s["mean_acceptance_length"] == 24 / s["steps"]
    assert sum(s["acceptance_histogram"].values()) == s["steps"]


def test_an_unknown_joule_is_none(rt):
    assert rt.generate(PROMPTS[0], **HOW).stats["joules"] is None


def test_usage_counts_prompt_and_text(rt):
    out = rt.generate(PROMPTS[0], **HOW)
    assert out.usage == {"prompt_tokens": len(out.prompt_tokens), "completion_tokens": 24, "total_tokens": len(out.prompt_tokens) + 24}
    assert out.finish_reason == "length"


def test_usage_ends_at_the_end_token():
    out = spelling("short", depth=16).generate("x", max_tokens=100)
    assert out.text == "short" and out.finish_reason == "stop"
    assert out.usage["completion_tokens"] == len(out.tokens) == out.tokens.index(1) + 1


@pytest.mark.parametrize("count", [0, 2])
def test_logprobs_come_with_every_token(rt, lonely, count):
    out, wanted = rt.generate(PROMPTS[0], logprobs=count, **HOW), lonely.generate(PROMPTS[0], logprobs=count, **HOW)
    for token, found, other in zip(out.tokens, out.logprobs, wanted.logprobs, strict=True):
        assert token in found and count <= len(found) <= count + 1
        assert found == pytest.approx(other, abs=1e-3)
    assert rt.generate(PROMPTS[0], **HOW).logprobs is None


def test_speculation_off_drafts_nothing_and_a_list_names_the_drafters(rt):
    off, auto = rt.generate(PROMPTS[0], speculation="off", **HOW), rt.generate(PROMPTS[0], **HOW)
    assert off.tokens == auto.tokens
    assert off.stats["drafted"] == 0 and set(off.origins) == {"target"} and off.stats["steps"] == 24
    some = rt.generate(PROMPTS[0], speculation=["model"], **HOW)
    assert some.stats["drafted"] > 0 and set(some.origins) <= {"target", "model"}


def test_every_drafter_that_was_named_is_used(folders):
    for spec in ([f"model:{folders['twin']}"], ["lookup"]):
        out = outrider.load(folders["target"], spec, depth=4).generate("sea shells sea shells sea", **HOW, repetition_penalty=0.5)
        assert out.stats["drafted"] > 0, spec


def test_a_twin_is_always_accepted(folders):
    out = outrider.load(folders["target"], [f"model:{folders['twin']}"], depth=5).generate(PROMPTS[0], **HOW)
    assert out.stats["draft_acceptance_rate"] == 1.0 and out.stats["steps"] == 4


def test_more_prompts_than_rows_are_queued_and_answered(folders, lonely):
    narrow = outrider.load(folders["target"], [f"model:{folders['draft']}"], rows=2)
    for prompt, found in zip(PROMPTS, narrow.generate(PROMPTS, **HOW), strict=True):
        assert found.tokens == lonely.generate(prompt, **HOW).tokens
    assert busy(narrow) == 0


def test_the_text_ends_where_the_context_does(rt):
    out = rt.generate("sea " * 60, max_tokens=10_000, ignore_eos=True)
    assert out.usage["total_tokens"] == 256 and out.finish_reason == "length"


def test_a_seed_fixes_the_text_and_without_one_texts_differ(rt):
    assert rt.generate("sea", temperature=1.0, seed=5, **HOW).tokens == rt.generate("sea", temperature=1.0, seed=5, **HOW).tokens
    fixed = [rt.generate("sea", temperature=1.0, seed=5, rule="exact", speculation="off", **HOW).tokens for _ in range(2)]
    assert fixed[0] == fixed[1]
    assert rt.generate("sea", temperature=1.0, seed=5, **HOW).tokens != rt.generate("sea", temperature=1.0, seed=6, **HOW).tokens
    assert len({tuple(g.tokens) for g in rt.generate(["sea"] * 4, temperature=1.0, **HOW)}) == 4


# --- streams


@pytest.mark.parametrize("way", [{}, {"temperature": 1.0, "seed": 4}], ids=str)
def test_a_stream_says_what_generate_says(rt, way):
    out, chunks = rt.generate(PROMPTS[0], **HOW, **way), list(rt.stream(PROMPTS[0], **HOW, **way))
    assert "".join(c.text for c in chunks) == out.text
    assert sum((c.tokens for c in chunks), []) == out.tokens
    assert sum((c.origins for c in chunks), []) == out.origins
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + [out.finish_reason]
    assert len(chunks) == out.stats["steps"] < len(out.tokens)


def test_leaving_a_stream_frees_its_rows_and_disturbs_nobody(rt):
    wanted = rt.generate(PROMPTS[0], **HOW).tokens
    stream, other = rt.stream(PROMPTS[1], **HOW), rt.stream(PROMPTS[0], **HOW)
    next(stream)
    found = next(other).tokens
    stream.close()
    assert len(rt.engine.batcher.running) == rt.engine.target.rows.active == 1
    found += sum((c.tokens for c in other), [])
    assert found == wanted and busy(rt) == 0
    assert rt.generate(PROMPTS[0], **HOW).tokens == wanted


@pytest.mark.parametrize("depth", [0, 1, 2, 4, 8, 16])
def test_characters_that_span_tokens_are_never_shown_in_halves(depth):
    text = "naïve 🦊🦊 façade — 漢字, done"
    pieces = [c.text for c in spelling(text, depth=depth).stream("x")]
    assert "".join(pieces) == text
    assert not any("\ufffd" in p for p in pieces)


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_a_text_begins_with_its_space_where_the_tokenizer_would_drop_it(tmp_path, depth):
    """As the sentencepiece ones of Llama 2 and Mistral do at the beginning of a text: this one goes on after the prompt's."""
    runtime = spelling("quick brown 🦊 jumps", depth=depth, tokenizer=AutoTokenizer.from_pretrained(spaced(tmp_path, True)))
    out = runtime.generate("x")
    assert out.text == " quick brown 🦊 jumps" == "".join(c.text for c in runtime.stream("x"))
    assert runtime.tokenizer.decode([*out.prompt_tokens, *out.tokens], skip_special_tokens=True) == "x quick brown 🦊 jumps"
    for stop, left in ((" quick", ""), ("x q", out.text), (" brown", " quick")):
        cut = runtime.generate("x", stop=stop)
        assert cut.text == left == "".join(c.text for c in runtime.stream("x", stop=stop))
    (written,) = runtime.write([out.prompt_tokens[:1]], None, {"max_tokens": 2})
    assert not written.text.startswith(" "), "there is nothing that it goes on from"


def test_a_prompt_that_ends_in_half_a_character_is_gone_on_with():
    """Of token ids, which may end anywhere: the rest of it is the text's."""
    runtime = spelling("🦊 ends", depth=2)
    script = runtime.tokenizer("🦊 ends")["input_ids"][1:]
    half = [0, *runtime.tokenizer("x")["input_ids"][1:], script[0]]
    (out,) = runtime.write([half], None, {})
    assert out.tokens[:2] == script[1:3] and out.text == "🦊 ends"


def test_a_text_holds_nothing_of_its_prompt_s_characters(tmp_path):
    """Some tokenizers write what they do not know as bytes, all of which are half characters where the first one is cut off; and a prompt may hold
    the sign that stands for such."""
    bytewise = AutoTokenizer.from_pretrained(spaced(tmp_path, False))
    for prompt, tokenizer in (("the 漢字漢", bytewise), ("漢" * 40, bytewise), ("hi 😀😀😀", bytewise), ("bad \ufffd", None), ("\ufffd" * 9, None)):
        runtime = spelling("字 quick", prompt=prompt, tokenizer=tokenizer)
        out = runtime.generate(prompt)
        assert out.text.strip() == "字 quick", prompt
        assert tokenizer is not None or runtime.generate(prompt, stop=["\ufffd", "k"]).text == "字 quic"
        assert "".join(c.text for c in runtime.stream(prompt)) == out.text == runtime.generate(prompt).text


def test_a_stream_says_what_its_text_says_where_bytes_are_no_character(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(spaced(tmp_path, False))
    runtime = spelling("quick", tokenizer=tokenizer)
    prompt, new = tokenizer("the 漢")["input_ids"], [tokenizer.convert_tokens_to_ids("<0xE5>"), *tokenizer("quick")["input_ids"][1:]]
    running = RunningText(runtime._text, prompt)
    pieces = [running.add([token]) for token in new]
    assert pieces[-1] == runtime._text(new, prompt) and pieces[-1].count("\ufffd") == 1


def test_who_failed_in_another_s_step_is_told(monkeypatch):
    """Also where all had ended before anybody looked again."""
    runtime = spelling("hello")
    submit = runtime.engine.submit

    def failed(request):
        seq = submit(request)
        seq.finish_reason, seq.failure = "failed", RuntimeError("told to")
        return seq

    monkeypatch.setattr(runtime.engine, "submit", failed)
    with pytest.raises(RuntimeError, match="told to"):
        runtime.generate("x")


def test_half_a_character_at_the_limit_is_shown_at_the_end():
    runtime = spelling("ab🦊")
    out, chunks = runtime.generate("x", max_tokens=4), list(runtime.stream("x", max_tokens=4))
    assert out.text == "".join(c.text for c in chunks) and out.text.startswith("ab\ufffd")
    assert not any("\ufffd" in c.text for c in chunks[:-1])


# --- stop strings


@pytest.mark.parametrize("depth", [0, 1, 2, 4, 8, 16])
@pytest.mark.parametrize("stop", ["jumps", " over", "s o", "r the l", "z", ("nowhere", "the l", " the")], ids=str)
def test_text_ends_before_the_stop_string_and_tokens_with_its_last_token(stop, depth):
    text = "The quick brown fox jumps over the lazy dog"
    runtime = spelling(text, depth=depth)
    at, first = min((text.index(s), s) for s in ([stop] if isinstance(stop, str) else stop) if s in text)
    out = runtime.generate("x", stop=stop)
    assert out.text == text[:at] and out.finish_reason == "stop"
    whole, short = runtime.tokenizer.decode(out.tokens), runtime.tokenizer.decode(out.tokens[:-1])
    assert first in whole and first not in short
    assert len(out.origins) == len(out.tokens) == out.usage["completion_tokens"]
    assert sum(out.stats["per_step_accepted"]) == sum(o != "target" for o in out.origins)
    assert "".join(c.text for c in runtime.stream("x", stop=stop)) == out.text


def test_a_beginning_of_a_stop_string_is_shown_once_it_cannot_be_one():
    runtime = spelling("a stoat stops here", depth=1)
    chunks = list(runtime.stream("x", stop="stops"))
    assert "".join(c.text for c in chunks) == "a stoat "
    assert list(runtime.stream("x", stop="stomp"))[-1].finish_reason == "stop"
    assert "".join(c.text for c in runtime.stream("x", stop="stomp")) == "a stoat stops here"


def test_min_tokens_where_every_token_ends_the_text_are_refused(rt):
    everything = list(range(rt.engine.target.spec.vocab_size))
    with pytest.raises(OutriderError, match="min_tokens=5 cannot be kept.*every token would end the text"):
        rt.generate("x", min_tokens=5, stop_token_ids=everything)
    assert rt.generate("x", stop_token_ids=everything).finish_reason == "stop"
    rt.generate("x", min_tokens=2, max_tokens=4, stop_token_ids=everything[1:])


@pytest.mark.parametrize("depth", [0, 2, 8])
def test_a_stop_string_among_the_first_min_tokens_ends_nothing(depth):
    runtime = spelling("ab-cd-ef-gh", depth=depth)
    out = runtime.generate("x", stop="-", min_tokens=4)
    assert out.text == "ab-cd" and out.finish_reason == "stop"
    assert "".join(c.text for c in runtime.stream("x", stop="-", min_tokens=4)) == out.text
    whole = runtime.generate("x", stop="b-", min_tokens=4)
    assert whole.text == "ab-cd-ef-gh"
    assert "".join(c.text for c in runtime.stream("x", stop="b-", min_tokens=4)) == whole.text


def test_what_load_takes_is_told_by_the_package_itself():
    assert set(outrider.__all__) >= {"LoadSettings", "SamplingParams"} and all(hasattr(outrider, name) for name in outrider.__all__)
    assert "context" in outrider.LoadSettings.__doc__ and outrider.LoadSettings().rows == 4


# --- chats


def test_a_chat_needs_a_template_and_a_message(folders, rt):
    with pytest.raises(OutriderError, match="no chat template") as refused:
        outrider.load(folders["bare"], []).chat([{"role": "user", "content": "sea"}])
    assert "generate" in refused.value.try_this and "`outrider run` without --chat" in refused.value.try_this
    with pytest.raises(OutriderError, match="conversation is empty"):
        rt.chat([])
    assert rt.generate("sea", **HOW).finish_reason == "length"


def test_a_chat_is_streamed_like_it_is_said(rt):
    messages = [{"role": "user", "content": "sea shells"}]
    assert "".join(c.text for c in rt.stream(messages, **HOW)) == rt.chat(messages, **HOW).text


def test_the_second_turn_computes_only_what_is_new(folders):
    def fresh():
        return outrider.load(folders["target"], [f"model:{folders['twin']}"])

    runtime = fresh()
    target, draft = runtime.engine.target, runtime.engine.drafters["model"].model
    talk = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog, and then over the fence"}]
    first = runtime.chat(talk, **HOW)
    talk += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "again"}]
    before = target.computed, draft.computed
    second = runtime.chat(talk, max_tokens=6, ignore_eos=True)
    old, new = first.prompt_tokens + first.tokens, second.prompt_tokens
    common = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    shared = min(common, len(old) - 1)
    assert shared >= len(first.prompt_tokens) > 20
    assert target.computed - before[0] == len(new) - shared + sum(second.stats["per_step_drafted"]) + second.stats["steps"] - 1
    assert draft.computed - before[1] <= len(new) - shared + 6 + 2
    again = fresh().chat(talk, max_tokens=6, ignore_eos=True)
    assert (second.text, second.tokens) == (again.text, again.tokens)


def test_the_same_prompt_twice_is_computed_once(folders, lonely):
    runtime = outrider.load(folders["target"], [f"model:{folders['draft']}"])
    prompt = "the quick brown fox jumps over the lazy dog"
    first = runtime.generate(prompt, **HOW)
    before = runtime.engine.target.computed
    second = runtime.generate(prompt, **HOW)
    assert first.tokens == second.tokens == lonely.generate(prompt, **HOW).tokens
    assert runtime.engine.target.computed - before == 1 + second.stats["drafted"] + second.stats["steps"] - 1


def test_the_last_chunk_of_a_stream_holds_the_whole(rt):
    chunks = list(rt.stream(PROMPTS[0], max_tokens=9))
    assert [c.result is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].result.tokens == [t for c in chunks for t in c.tokens]


def test_a_stream_that_another_call_finishes_still_says_everything(rt):
    want = rt.generate(PROMPTS[0], max_tokens=12)
    stream = rt.stream(PROMPTS[0], max_tokens=12)
    chunks = [next(stream)]
    rt.generate(PROMPTS[1], max_tokens=40)
    chunks += list(stream)
    assert "".join(c.text for c in chunks) == want.text and chunks[-1].finish_reason == want.finish_reason


def test_a_long_stop_string_of_many_bytes_is_found_token_by_token(rt):
    stop = "\N{FOX FACE}" * 6
    cut, tokens = rt._cutter((stop,)), rt.tokenizer(stop, add_special_tokens=False)["input_ids"]
    assert len(tokens) > len(stop) + 8
    found = [cut(tokens[:i], [t]) for i, t in enumerate(tokens)]
    assert found == [None] * (len(tokens) - 1) + [1]
    assert cut([], tokens) == len(tokens)


@pytest.mark.parametrize("between", [1, 20, 500])
def test_a_stop_string_is_found_across_special_tokens_which_write_nothing(rt, between):
    silent, first, last = rt.tokenizer.eos_token_id, *(rt.tokenizer(c, add_special_tokens=False)["input_ids"] for c in "ab")
    cut = rt._cutter(("ab",))
    assert cut([*first, *[silent] * between], last) == 1
    assert cut([*first, *[silent] * between], [silent, *last, *first]) == 2
    assert cut([*last, *[silent] * between], last) is None and cut([silent] * between, last) is None


def test_a_single_stop_string_in_sampling_params_is_one_string(rt):
    text = rt.generate(PROMPTS[0], max_tokens=20).text
    stop = text[4:7]
    both = rt.generate(PROMPTS[0], max_tokens=20, stop=stop), rt.generate(PROMPTS[0], SamplingParams(max_tokens=20, stop=stop))
    assert both[0].text == both[1].text


def test_speculation_off_says_so(rt):
    assert set(rt.generate(PROMPTS[0], max_tokens=4, speculation="off").stats["reasons"]) == {"off:request"}


class Watched:
    """Another's attributes, and which of them were asked for."""

    def __init__(self, inner: object) -> None:
        self.inner, self.asked = inner, set[str]()

    def __getattr__(self, name: str) -> object:
        self.asked.add(name)
        return getattr(self.inner, name)


def test_who_wants_no_drafters_is_not_decided_about(rt, monkeypatch):
    """Off: nothing is chosen or learned, and no drafter hears what came; the next request is decided about again."""
    controller, lookup = Watched(rt.engine.controller), Watched(rt.engine.drafters["lookup"])
    monkeypatch.setattr(rt.engine, "controller", controller)
    monkeypatch.setitem(rt.engine.drafters, "lookup", lookup)
    for how, deciding, hearing in (("off", set(), set()), ("auto", {"choose", "learn"}, {"observe"}), ("off", set(), set())):
        controller.asked.clear()
        lookup.asked.clear()
        rt.generate(PROMPTS[0], max_tokens=4, speculation=how)
        assert controller.asked & {"choose", "learn"} == deciding and lookup.asked & {"observe"} == hearing


def test_a_draft_gets_the_context_of_the_target(folders):
    runtime = outrider.load(folders["target"], [f"model:{folders['draft']}"], context=100, rows=1)
    assert runtime.engine.drafters["model"].model.spec.context == 100


def test_what_the_libraries_hold_is_kept_from_the_collector(folders):
    """A full collection that looks at all of it would stall a step by a quarter of a second."""
    outrider.load(folders["target"], [], compile="off")
    assert (first := gc.get_freeze_count()) > 100_000
    held = [[n] for n in range(1000)]
    outrider.load(folders["target"], [], compile="off")
    assert gc.get_freeze_count() > first + len(held) // 2, "of a second load as well"


def test_plans_and_programs_are_asked_for_between_steps(rt, monkeypatch):
    """Tables and code grow within one, in another thread."""
    monkeypatch.setattr("outrider.control.explain.candidates", lambda *_: {"inside": rt.turns.inside()})
    monkeypatch.setattr("outrider.compiler.codegen.source", lambda *_: rt.turns.inside())
    assert rt.plan() == {"inside": True} and rt.program()["code"] is True and not rt.turns.inside()
