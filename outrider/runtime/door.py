"""The door: text becomes a Request here, and tokens become text again. Below it nobody sees text."""

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, overload

from outrider.core.config import LIMITS, limits
from outrider.core.config import sampling as read_sampling
from outrider.core.errors import OutriderError
from outrider.core.types import Limits, Plan, Request, SamplingParams, Sequence
from outrider.measure.trace import stats
from outrider.runtime.engine import Engine
from outrider.runtime.profiler import Keeper
from outrider.runtime.turns import Turns

BEFORE = 8  # of the prompt's last tokens, behind which what follows is decoded
HALF = "\ufffd"  # what stands for a character that is not whole
Message = Mapping[str, str]
Speculation = str | list[str] | dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Generation:
    """What came out. `tokens`: generated ids only; `origins[i]`: who proposed token i ("target": nobody did); `finish_reason`: stop, length,
    cancelled, or failed (a drafter would not begin); `logprobs[i]`: id -> log-probability under the target's raw logits."""

    text: str
    tokens: list[int]
    prompt_tokens: list[int]
    origins: list[str]
    finish_reason: str
    lossless: bool
    stats: dict[str, Any]
    logprobs: list[dict[int, float]] | None = None

    @property
    def usage(self) -> dict[str, int]:
        n, m = len(self.prompt_tokens), len(self.tokens)
        return {"prompt_tokens": n, "completion_tokens": m, "total_tokens": n + m}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream: new text (may be empty), its tokens and their origins. The last one has a finish_reason and
    the whole Generation."""

    text: str
    tokens: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    result: Generation | None = None


class Runtime:
    """A loaded target with its drafters. Made by `outrider.load`. `memory`: bytes by model, predicted and held (what is mapped from disk among
    these), and the process's resident size when loading was done. Threads may call it as they like: their requests share steps."""

    def __init__(self, engine: Engine, tokenizer: Any, memory: dict[str, Any], rule: str | None = None, keeper: Keeper | None = None) -> None:
        self.engine, self.tokenizer, self.memory, self.rule, self.keeper = engine, tokenizer, memory, rule, keeper
        self.turns, self._numbers = Turns(), itertools.count(1)
        self._left = deque[Sequence]()  # over, for those who asked, and not yet for the engine

    @overload
    def generate(self, prompt: str, params: SamplingParams | None = None, **knobs: Any) -> Generation: ...
    @overload
    def generate(self, prompt: list[str], params: SamplingParams | None = None, **knobs: Any) -> list[Generation]: ...
    def generate(self, prompt: str | list[str], params: SamplingParams | None = None, **knobs: Any) -> Generation | list[Generation]:
        """Text for a prompt, or for a list of prompts that share the machine. Keywords are fields of SamplingParams,
        and `speculation`: "auto", "off", a list of drafter names, or a table {"drafters": ..., "most": tokens drafted a step,
        "least": ..., "floor": probability}; these limits also go by the names of core.config.LIMITS, as keywords too."""
        if not isinstance(prompt, list):
            return self.write([self._encode(prompt)], params, knobs)[0]
        return self.write([self._encode(p) for p in prompt], params, knobs)

    def chat(self, messages: list[Message], params: SamplingParams | None = None, **knobs: Any) -> Generation:
        """The assistant's next message. What earlier turns share with this one is not computed again."""
        return self.write([self._encode_chat(messages)], params, knobs)[0]

    def stream(self, prompt: str | list[Message], params: SamplingParams | None = None, **knobs: Any) -> Iterator[Chunk]:
        """Chunks of text as they are decided; a list of messages is a chat. Leaving the loop cancels the request."""
        tokens = self._encode(prompt) if isinstance(prompt, str) else self._encode_chat(prompt)
        return self._chunks(self.request(tokens, params, **knobs))  # a bad request is refused here, not at the first chunk

    def _chunks(self, request: Request) -> Iterator[Chunk]:
        with self.turns:
            self._forget()
            seq = self.engine.submit(request)
        told, sent, running = 0, "", RunningText(self._text, self._last(request.prompt))
        try:
            while True:
                with self.turns:
                    self._forget()
                    self.engine.advance([seq])  # unless another call has finished it
                    ended, new = seq.finish_reason, seq.generated[told:]
                    origins = seq.origins[told : told + len(new)]
                text = running.add(new)
                text = self._decode(seq) if ended else _settled(text, request.sampling.stop)
                yield Chunk(text[len(sent) :], new, origins, ended, self._result(seq) if ended else None)
                told, sent = told + len(new), text
                if ended:
                    return
        finally:
            self._leave([seq])

    def write(self, prompts: list[list[int]], params: SamplingParams | None, knobs: dict[str, Any]) -> list[Generation]:
        """What `generate` gives, for prompts that are token ids."""
        requests = [self.request(p, params, **knobs) for p in prompts]  # all are checked before the first is queued
        with self.turns:
            self._forget()
            seqs = [self.engine.submit(r) for r in requests]
        running = True
        try:
            while running:
                with self.turns:  # who ended in another's step is asked how, too
                    self._forget()
                    self.engine.advance(seqs)
                    running = any(s.finish_reason is None for s in seqs)
        finally:
            self._leave(seqs)
        return [self._result(s) for s in seqs]

    def _leave(self, seqs: list[Sequence]) -> None:
        """These are over, whatever they were doing. A stream that the collector ends within a step is so when that is over."""
        self._left += seqs
        if not self.turns.inside():
            with self.turns:
                self._forget()
                self._rest()

    def _forget(self) -> None:
        while self._left:
            self.engine.cancel(self._left.popleft())

    def _rest(self) -> None:
        """Where nobody waits, models and costs may be measured."""
        if not self.turns.queue:
            self.engine.rest()
            if self.keeper is not None:
                self.keeper.idle(self.engine)

    def plan(self) -> dict[str, Any]:
        """What the controller expects of every drafter alone, and what the last steps took; see `control.explain`."""
        from outrider.control.explain import candidates

        with self.turns:
            return candidates(self.engine.controller, self.engine.ring)

    def program(self) -> dict[str, str]:
        """As text: the `program` of a greedy request before a plan fills it, and the `code` of the step that ran most often; before
        the first, of all drafters at depth 8."""
        from outrider.compiler.codegen import source
        from outrider.compiler.opt import PLAIN
        from outrider.ir.text import programs, show

        with self.turns:
            jit = self.engine.jit
            usual = Plan(tuple((name, 8, 1) for name in jit.bits)), PLAIN._replace(told=not getattr(self.engine.controller, "asks", True))
            ran = [
                (entry.uses, entry.plan, facts)
                for (rule, drafters, _, facts), entry in jit.known.items()
                if rule == "greedy" and drafters and entry.uses
            ]
            plan, facts = max(ran, key=lambda r: r[0])[1:] if ran else usual
            lowered = programs(jit.planned("greedy", plan, jit.back))[0]
            return {"program": show(jit.module("greedy")), "code": source(lowered, facts, dict(jit.bits))}

    def _encode(self, text: str) -> list[int]:
        _must_be_text(text, "the prompt")
        tokens: list[int] = self.tokenizer(text)["input_ids"]
        if not tokens:
            raise OutriderError("the prompt is empty", "this tokenizer puts no begin-of-text token before it", "at least one word")
        return tokens

    def _encode_chat(self, messages: list[Message]) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise OutriderError(
                "this model has no chat template", "", "generate(prompt) or `outrider run` without --chat, or a model that was trained on chats"
            )
        if not messages:
            raise OutriderError("the conversation is empty", "", "[{'role': 'user', 'content': ...}]")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise OutriderError(f"{message!r} is no message", "", "{'role': 'user', 'content': ...}")
            _must_be_text(message["role"], "a role")
            _must_be_text(message.get("content"), f"the content of the {message['role']}'s message")
        from jinja2 import TemplateError, TemplateSyntaxError

        try:
            tokens = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
        except TemplateSyntaxError as bad:
            raise OutriderError(
                "this model's chat template cannot be read", f"line {bad.lineno}: {bad.message}", "another rt.tokenizer.chat_template"
            ) from bad
        except TemplateError as no:
            raise OutriderError("the chat template refuses this conversation", str(no), "other roles, or no system message") from no
        ids: list[int] = tokens["input_ids"]
        return ids

    def request(self, prompt: str | Iterable[int], params: SamplingParams | None = None, **knobs: Any) -> Request:
        """A checked Request for a text or its token ids. max_tokens is cut to what the context still holds."""
        prompt = self._encode(prompt) if isinstance(prompt, str) else _ids(prompt, self.engine.target.spec.vocab_size)
        drafters, most = self._speculation(knobs.pop("speculation", "auto"), knobs)
        s = read_sampling(params, self.engine.target.spec.vocab_size, **knobs)
        room = self.engine.target.spec.context - len(prompt)
        if room < 1:
            raise OutriderError(
                f"the prompt has {len(prompt)} tokens and the context holds {self.engine.target.spec.context}", "at least one must be left to write",
                "a shorter prompt, or load with a larger context if the model has one",
            )  # fmt: skip
        s = replace(s, max_tokens=min(s.max_tokens, room), min_tokens=min(s.min_tokens, room))
        ends = set(s.stop_token_ids) | (set() if s.ignore_eos else self._eos())
        if s.min_tokens and ends.issuperset(range(self.engine.target.spec.vocab_size)):
            raise OutriderError(
                f"min_tokens={s.min_tokens} cannot be kept", "every token would end the text", "min_tokens=0, or fewer stop_token_ids"
            )
        rule = s.rule or self.rule or ("exact" if s.seed is None and not self.engine.strict else "coupled")
        if self.engine.strict and s.temperature > 0 and rule == "exact":
            raise OutriderError("rule='exact' cannot be strict", "its noise is fresh in every step, so its text hangs on the steps", "rule='coupled'")
        return Request(
            id=f"request-{next(self._numbers)}", prompt=tuple(prompt), sampling=s, drafters=drafters, limits=most, ends=frozenset(ends),
            seed=s.seed if s.seed is not None else int.from_bytes(os.urandom(7), "big"),
            rule=rule,
            cut=self._cutter(s.stop, self._last(prompt)) if s.stop else None,
        )  # fmt: skip

    def _speculation(self, wish: Speculation, knobs: dict[str, Any]) -> tuple[frozenset[str] | None, Limits]:
        """Who may guess for a request (None: all), and how much. `knobs` loses the names that say so."""
        found = {key: knobs.pop(key) for key in list(knobs) if key in LIMITS}
        if isinstance(wish, dict):
            for key, value in wish.items():
                if key in found and found[key] != value:
                    raise OutriderError(f"{key}={value!r} in speculation, and {found[key]!r} beside it", "", "one of the two")
            found |= {key: value for key, value in wish.items() if key != "drafters"}
            wish = wish.get("drafters", "auto")
        if wish == "auto" or wish is None:
            return None, limits(found)
        if wish == "off":
            return frozenset(), limits(found)
        known = list(self.engine.drafters)
        if not isinstance(wish, (str, list, tuple, set, frozenset)):
            raise OutriderError(f"speculation={wish!r} names no drafters", "", f"auto, off, or some of {known}")
        asked = [wish] if isinstance(wish, str) else list(wish)
        for name in asked:
            if name not in known:
                raise OutriderError(f"speculation={wish!r}: no drafter '{name}' is loaded", "", f"auto, off, or some of {known}")
        return frozenset(asked), limits(found)

    def _eos(self) -> set[int]:
        configured = getattr(getattr(getattr(self.engine.target, "module", None), "generation_config", None), "eos_token_id", None)
        ids = configured if isinstance(configured, list) else [configured, self.tokenizer.eos_token_id]
        return {i for i in ids if i is not None}

    def _cutter(self, stops: tuple[str, ...], prompt: Iterable[int] = ()) -> Any:
        """How many new tokens stay so that the text ends with the token that completes a stop string."""
        for stop in stops:
            _must_be_text(stop, "a stop string")
        reach = max(len(stop.encode()) for stop in stops) + 8  # characters looked back at, and as many tokens if these write any

        def cut(generated: list[int], new: list[int]) -> int | None:
            old = generated[-reach:]
            before = self._text(old)
            while len(before) < reach and len(old) < len(generated):  # special tokens write nothing
                old = generated[-2 * len(old) :]
                before = self._text(old)
            first = prompt if len(old) == len(generated) else ()
            before = self._text(old, first)
            if _ended(self._text([*old, *new], first), before, stops) is None:
                return None
            return next(n for n in range(1, len(new) + 1) if _ended(self._text([*old, *new[:n]], first), before, stops) is not None)

        return cut

    def _text(self, tokens: list[int], before: Iterable[int] = ()) -> str:
        """What tokens write behind others: some tokenizers drop the space that a text would begin with."""
        first = list(before)
        text: str = self.tokenizer.decode([*first, *tokens], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if not first:
            return text
        return _behind(self._text(first), text, lambda: self._text(tokens))

    def _last(self, prompt: Iterable[int]) -> list[int]:
        """The prompt's last tokens, behind which what follows is decoded: they begin with a whole character. Bytes of some tokenizers are all half ones
        where the first of them is."""
        known, count = list(prompt), BEFORE
        while count < len(known) and self._text(known[-count:]).startswith(HALF):
            count *= 2
        return known[-count:]

    def _decode(self, seq: Sequence) -> str:
        """The generated text, ending before a stop string that ended it."""
        before = self._last(seq.request.prompt)
        text = self._text(seq.generated, before)
        if seq.finish_reason == "stop":
            text = text[: _ended(text, self._text(seq.generated[:-1], before), seq.request.sampling.stop)]
        return text

    def _result(self, seq: Sequence) -> Generation:
        return Generation(
            text=self._decode(seq), tokens=seq.generated, prompt_tokens=list(seq.request.prompt), origins=seq.origins,
            finish_reason=seq.finish_reason or "cancelled", lossless=True, stats=stats(seq.records, seq.request.id),
            logprobs=seq.logprobs if seq.request.sampling.logprobs is not None else None,
        )  # fmt: skip


def _must_be_text(text: object, name: str) -> None:
    if not isinstance(text, str):
        raise OutriderError(f"{name} is {text!r}", "it must be text", "a str")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as bad:
        raise OutriderError(f"{name} is not UTF-8 text", str(bad), "converting it, e.g. iconv -t utf-8") from bad


class RunningText:
    """The text of tokens that arrive in pieces, without decoding all of them again each time.

    Only what came since the last piece that ended in a whole character is decoded, behind the piece before it (some
    tokenizers write a token differently at the start of a text); the first, behind `before`.
    """

    def __init__(self, decode: Callable[[list[int]], str], before: Iterable[int] = ()) -> None:
        self.tokens = list(before)
        self.decode, self.text, self.start, self.settled = decode, "", 0, len(self.tokens)

    def add(self, new: list[int]) -> str:
        """The whole text so far; a half character at its end is left out."""
        self.tokens += new
        known, longer = self.decode(self.tokens[self.start : self.settled]), self.decode(self.tokens[self.start :])
        if longer.endswith(HALF):
            return self.text
        self.text += _behind(known, longer, lambda: self.decode(self.tokens[self.settled :]))
        self.start, self.settled = self.settled, len(self.tokens)
        return self.text


def _behind(known: str, text: str, alone: Callable[[], str]) -> str:
    """What `text` has behind `known`, half a character at whose end may be a whole one there; `alone` says it where that begins otherwise."""
    for begun in (known, known.rstrip(HALF)):
        if text.startswith(begun):
            return text[len(begun) :]
    return alone()


def _ended(text: str, before: str, stops: tuple[str, ...]) -> int | None:
    """Where the first stop string begins that ends after `before`, of which `text` is a continuation; None without one."""
    settled = len(before if text.startswith(before) else before.rstrip(HALF))
    at = [i for stop in stops if (i := text.find(stop, max(0, settled - len(stop) + 1))) >= 0]
    return min(at, default=None)


def _settled(text: str, stops: tuple[str, ...]) -> str:
    """The part of a running text that can no longer change: no half characters, no beginnings of stop strings."""
    for stop in stops:
        for n in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:n]):
                text = text[:-n]
                break
    return text


def _ids(prompt: Iterable[int], vocab: int) -> list[int]:
    """Token ids as plain numbers, each one of a vocabulary's."""
    try:
        ids = [index(token) for token in prompt]
    except TypeError as bad:
        raise OutriderError(f"{prompt!r:.80} is no prompt", str(bad), "a text, or a list of token ids") from bad
    if not ids:
        raise OutriderError("the prompt is empty", "there is no token to go on from", "at least one token")
    if (wrong := next((token for token in ids if not 0 <= token < vocab), None)) is not None:
        raise OutriderError(f"token {wrong} is none of this model's", f"its ids are 0..{vocab - 1}", "ids by rt.tokenizer")
    return ids
