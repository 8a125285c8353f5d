"""Why a speculative text and a plain one differ, if they do: the first place, both tokens, and how far apart they were.

Without `strict` a step of another width rounds differently in the last bits and may flip a near-tie: the gap is then
about the rounding error of the dtype. A wide gap would be a bug.
"""

from dataclasses import dataclass
from typing import Any

from outrider.core.types import SamplingParams
from outrider.runtime.door import Generation, Message, Runtime


@dataclass(frozen=True, slots=True)
class Divergence:
    """Generated token `position` (from 0) is `plain` without drafting and `drafted` with it; None: the text ended there.
    `gap`: how much larger the plain token's raw logit is (None when one of them is not among the 100 best)."""

    position: int
    plain: int | None
    drafted: int | None
    gap: float | None

    def __str__(self) -> str:
        there = f"token {self.position} is {self.plain} without drafting and {self.drafted} with it"
        if self.plain is None or self.drafted is None:
            return f"{there}: one text ended there"
        return f"{there}; gap of their logits {'unknown: one of them is not among the 100 best' if self.gap is None else f'{self.gap:.4f}'}"


def compare(rt: Runtime, prompt: str | list[Message], params: SamplingParams | None = None, **knobs: Any) -> tuple[Generation, Divergence | None]:
    """(the speculative generation, where a plain one of the same prompt leaves it, or None).

    A sampled request needs a seed: without one both texts are drawn anew.
    """
    write: Any = rt.generate if isinstance(prompt, str) else rt.chat
    drafted: Generation = write(prompt, params, **knobs)
    plain: Generation = write(prompt, params, **{**knobs, "speculation": "off"})
    if plain.tokens == drafted.tokens:
        return drafted, None
    both = [*plain.tokens], [*drafted.tokens]
    at = next((i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
    a, b = (tokens[at] if at < len(tokens) else None for tokens in both)
    return drafted, Divergence(at, a, b, None if a is None or b is None else _gap(rt, plain, at, a, b))


def _gap(rt: Runtime, plain: Generation, at: int, a: int, b: int) -> float | None:
    """Difference of the raw logits of two tokens after the first `at` generated ones."""
    asked: dict[str, Any] = {"max_tokens": 1, "logprobs": 100, "speculation": "off", "ignore_eos": True}
    (written,) = rt.write([[*plain.prompt_tokens, *plain.tokens[:at]]], None, asked)
    found = (written.logprobs or [{}])[0]
    return found[a] - found[b] if a in found and b in found else None
