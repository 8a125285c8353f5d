"""Frozen settings and their checks. An unknown key is an error that names the nearest one."""

import difflib
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any

from outrider.core.errors import OutriderError
from outrider.core.types import Limits, SamplingParams

RULES = ("exact", "coupled")
QUANTISED = ("int8", "int4")
LARGE = 1e9  # of a bias or penalty: what others write for "never", and far from the end of float32


def nearest(key: object, known: Iterable[str], kind: str = "setting") -> OutriderError:
    """The error for an unknown name."""
    names = sorted(known)
    close = difflib.get_close_matches(str(key), names, 1, cutoff=0.4)
    remedy = f"'{close[0]}'" if close else f"one of {', '.join(names)}"
    return OutriderError(f"unknown {kind} '{key}'", "", remedy)


def whole(text: str) -> int | None:
    """The number that plain decimal digits write, if there are no more of them than 64 bits hold; else None. ("²" is a digit, and no number.)"""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


def _own(value: Any) -> Any:
    """A number of any library as Python's own. All else is left as it is, truths and texts too."""
    if isinstance(value, (bool, str)):
        return value
    with suppress(TypeError):
        return index(value)
    return float(value) if isinstance(value, Real) else value


def _must(ok: bool, what: str, remedy: str) -> None:
    if not ok:
        raise OutriderError(what, "", remedy)


def _number(settings: SamplingParams, name: str) -> None:
    value = getattr(settings, name)
    whole = not isinstance(next(f.default for f in fields(settings) if f.name == name), float)
    good = isinstance(value, int) if whole else isinstance(value, (int, float))
    _must(good and not isinstance(value, bool) and abs(value) < math.inf, f"{name}={value!r} is not a {'whole ' if whole else ''}number", "a number")


def check_sampling(s: SamplingParams, vocab: int | None = None) -> SamplingParams:
    """The settings, or an OutriderError that names the one that cannot be."""
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "max_tokens"):
        _number(s, name)
    for name in ("logprobs", "seed"):
        if getattr(s, name) is not None:
            _number(s, name)
    _must(isinstance(s.ignore_eos, bool), f"ignore_eos={s.ignore_eos!r} is neither True nor False", "True or False")
    _must(s.seed is None or -(2**63) <= s.seed < 2**63, f"seed={s.seed} does not fit 64 bits", "a smaller seed")
    _must(s.temperature >= 0, f"temperature={s.temperature} is negative", "0 for greedy text, 0.7 to 1 for varied text")
    _must(s.top_k >= 0, f"top_k={s.top_k} is negative", "0 for all tokens")
    _must(0 < s.top_p <= 1, f"top_p={s.top_p} is outside (0, 1]", "1 for all tokens")
    _must(0 <= s.min_p <= 1, f"min_p={s.min_p} is outside [0, 1]", "0 for all tokens")
    _fits_float32(s)
    _must(s.max_tokens >= 1, f"max_tokens={s.max_tokens} asks for no text", "1 or more")
    _must(0 <= s.min_tokens <= s.max_tokens, f"min_tokens={s.min_tokens} is outside 0..max_tokens={s.max_tokens}", "a smaller min_tokens")
    _must(s.logprobs is None or 0 <= s.logprobs <= 100, f"logprobs={s.logprobs} is outside 0..100", "0 for the emitted token alone")
    _must(all(isinstance(text, str) for text in s.stop), f"stop={s.stop!r} holds something that is no text", "strings, or stop_token_ids")
    _must(all(type(t) is int for t in s.stop_token_ids), f"stop_token_ids={s.stop_token_ids!r} holds something that is no id", "token ids")
    _must(all(s.stop), "an empty stop string would end every text at once", "leaving it out")
    if s.rule is not None and s.rule not in RULES:
        raise nearest(s.rule, RULES, "rule")
    for token in (*(t for t, _ in s.logit_bias), *s.stop_token_ids):
        _must(
            token >= 0 and (vocab is None or token < vocab),
            f"token id {token} is outside the vocabulary of {vocab}",
            "ids from the target's tokenizer",
        )
    return s


def _fits_float32(s: SamplingParams) -> None:
    """What overflows in a step fails the rows beside it too. A text's penalties add up, and are divided by its temperature."""
    _must(s.temperature == 0 or s.temperature >= 1e-3, f"temperature={s.temperature} is too small to divide by", "0, which is greedy")
    _must(s.temperature <= 1e3, f"temperature={s.temperature} is more than 1000", "0.7 to 1 for varied text")
    _must(s.top_k < 2**31, f"top_k={s.top_k} is more than any vocabulary holds", "0 for all tokens")
    _must(s.top_p >= 1e-9, f"top_p={s.top_p} is less than 1e-9", "top_k=1 for the likeliest token alone")
    _must(1e-3 <= s.repetition_penalty <= 1e3, f"repetition_penalty={s.repetition_penalty} is outside 0.001..1000", "1 for none")
    for name in ("presence_penalty", "frequency_penalty"):
        _must(abs(getattr(s, name)) <= LARGE, f"{name}={getattr(s, name)} is outside -1e9..1e9", "0 for none")
    _must(all(abs(v) <= LARGE for _, v in s.logit_bias), f"logit_bias={dict(s.logit_bias)} holds a number outside -1e9..1e9", "-100 to 100")


def sampling(given: SamplingParams | None, vocab: int, **knobs: Any) -> SamplingParams:
    """Settings from an object, from keywords, or the object with keywords laid over it."""
    _must(given is None or isinstance(given, SamplingParams), f"{given!r:.80} is no SamplingParams", "SamplingParams(...), or its fields as keywords")
    known = [f.name for f in fields(SamplingParams)]
    for key in knobs:
        if key not in known:
            raise nearest(key, [*known, *LIMITS, "speculation"])
    base = {} if given is None else {n: getattr(given, n) for n in known}
    return check_sampling(SamplingParams(**_plain({**base, **knobs})), vocab)


def _plain(knobs: dict[str, Any]) -> dict[str, Any]:
    """Numbers become Python's own, single stops tuples, a bias table pairs."""
    knobs = {key: _own(value) for key, value in knobs.items()}
    for key in ("stop", "stop_token_ids"):
        knobs[key] = _each(knobs.get(key))
    bias = () if knobs.get("logit_bias") is None else knobs["logit_bias"]
    try:
        pairs = bias.items() if isinstance(bias, dict) else bias
        knobs["logit_bias"] = tuple((int(t) if isinstance(t, str) else index(t), float(v)) for t, v in pairs)
    except (TypeError, ValueError, OverflowError) as bad:
        raise OutriderError(f"logit_bias={bias!r} is no table of token ids and numbers", "", "{token id: bias}") from bad
    return knobs


def _each(value: Any) -> tuple[Any, ...]:
    """What one or many were given, as a tuple."""
    if value is None:
        return ()
    try:
        return (value,) if isinstance(value, str) else tuple(_own(one) for one in value)
    except TypeError:  # one that is no text
        return (value,)


# what other programs call the limits of a request's drafts: theirs -> ours
LIMITS = {
    "most": "most", "least": "least", "floor": "floor",
    "speculative.n_max": "most", "speculative.n_min": "least", "speculative.p_min": "floor",  # llama.cpp's server
    "num_draft_tokens": "most",  # mlx-lm
    "num_speculative_tokens": "most",  # vLLM
    "num_assistant_tokens": "most", "prompt_lookup_num_tokens": "most", "assistant_confidence_threshold": "floor",  # transformers
}  # fmt: skip


def limits(given: dict[str, Any]) -> Limits:
    """Checked Limits from a request's knobs, under our names or those of other programs."""
    named: dict[str, Any] = {}
    for key, value in given.items():
        if key not in LIMITS:
            raise nearest(key, [*LIMITS, "drafters"], "speculation setting")
        if LIMITS[key] in named and named[LIMITS[key]] != value:
            raise OutriderError(f"{key}={value!r} says something else than another name for the same", "", "one of the two")
        named[LIMITS[key]] = _own(value)
    found = Limits(**named)
    for name in ("most", "least"):
        value = getattr(found, name)
        _must(
            (value is None and name == "most") or (type(value) is int and value >= 0),
            f"{name}={value!r} is not a whole number from 0 on",
            f"{name}=4",
        )
    _must(type(found.floor) in (int, float) and 0 <= found.floor <= 1, f"floor={found.floor!r} is no probability", "floor=0.5")
    _must(found.most is None or found.least <= found.most, f"least={found.least} is more than most={found.most}", "a smaller least")
    return found


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """What `outrider.load` takes beyond models and drafters.

    depth, width: of every drafter, always; depth None lets the controller decide at every step. budget: with a depth, most nodes a
    step (0: no limit). objective: "latency", "energy", or a number from 0 to 1 between them. slowdown_limit: how much
    slower than plain decoding a request may become. predictor: of acceptance, one of control.predict.LADDER.
    profile: "auto" (what was measured and learned is kept in the cache folder), "off", or a file. rows: requests that run together. context:
    tokens a text can hold. chunk: tokens prefilled at a time. compile: "auto" (another process builds compiled steps,
    eager ones serve until then), "wait" for them, or "off". strict: the same bits with and without drafting. threads:
    of torch, for the whole process. program: a file of pipelines in the language of docs/ir.md, run for requests of their rules in place of the
    usual ones. quantise: "int8" or "int4" keeps the target's linear weights in integers of 8 or
    4 bits: steps that fetch a half or a third of bfloat16's bytes, of another target (the same text by them: the drafter "quantised:int8").
    """

    device: str = "auto"
    dtype: str = "auto"
    rule: str | None = None
    depth: int | None = None
    width: int = 1
    budget: int = 0
    objective: str | float = "latency"
    slowdown_limit: float = 0.05
    predictor: str = "logistic"
    profile: str | Path = "auto"
    rows: int = 4
    context: int | None = None
    chunk: int = 512
    compile: str = "auto"
    strict: bool = False
    threads: int | None = None
    quantise: str | None = None
    program: str | Path | None = None


def _share(objective: object) -> bool:
    return objective in ("latency", "energy") or (type(objective) in (int, float) and 0 <= objective <= 1)  # type: ignore[operator]


def load_settings(**given: Any) -> LoadSettings:
    """Checked LoadSettings; an unknown key names the nearest."""
    known = [f.name for f in fields(LoadSettings)]
    for key in given:
        if key not in known:
            raise nearest(key, known)
    s = LoadSettings(**{key: _own(value) for key, value in given.items()})
    _must(s.dtype in ("auto", "float32", "bfloat16", "float16"), f"dtype={s.dtype!r} is not known", "auto, float32, bfloat16 or float16")
    for name, low in (("depth", 0), ("width", 1), ("budget", 0), ("rows", 1), ("chunk", 1)):
        value = getattr(s, name)
        if name == "depth" and value is None:
            continue
        _must(type(value) is int and value >= low, f"{name}={value!r} is not a whole number from {low} on", f"{name}={low}")
    _must(
        s.depth is not None or (s.width == 1 and s.budget == 0),
        f"width={s.width}, budget={s.budget} without a depth: the scheduler decides at every step, and draws chains",
        "depth=4; or speculation={'most': 8} of a request",
    )
    _must(type(s.slowdown_limit) in (int, float) and 0 <= s.slowdown_limit <= 10, f"slowdown_limit={s.slowdown_limit!r} is outside 0..10", "0.05")
    _must(_share(s.objective), f"objective={s.objective!r} is not known", "latency, energy, or a number from 0 to 1")
    _must(
        s.objective in ("latency", 0), f"objective={s.objective!r} needs measured joules, and nothing measures them here yet", "objective='latency'"
    )
    _must(isinstance(s.profile, (str, Path)) and s.profile != "", f"profile={s.profile!r} is neither a file nor auto or off", "profile='auto'")
    _must(s.program is None or isinstance(s.program, (str, os.PathLike)), f"program={s.program!r} is no file", "the name of a file (docs/ir.md)")
    _must(s.compile in ("auto", "wait", "off"), f"compile={s.compile!r} is not known", "auto, wait or off")
    _must(s.quantise in (None, *QUANTISED), f"quantise={s.quantise!r} is not known", "int8, int4, or leaving it out")
    _must(isinstance(s.strict, bool), f"strict={s.strict!r} is neither True nor False", "True or False")
    most = 16 * (os.cpu_count() or 1)
    _must(
        s.threads is None or (type(s.threads) is int and 1 <= s.threads <= most), f"threads={s.threads!r} is not a whole number from 1 to {most}",
        f"threads={os.cpu_count()}, one for each core",
    )  # fmt: skip
    _must(s.context is None or (type(s.context) is int and s.context >= 2), f"context={s.context!r} leaves no room for text", "at least 2 tokens")
    if s.rule is not None and s.rule not in RULES:
        raise nearest(s.rule, RULES, "rule")
    return s
