"""The stock contenders: what a user of `transformers` would pick instead.

Fresh copies of the models with the attention transformers gives them; nothing of ours is shared. Knows nothing of
prompts or categories.
"""

import copy
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils import logging as hf_logging

from outrider.models import load as models

PLAIN, CONSTANT, DYNAMIC, LOOKUP = "plain", "assisted 5", "assisted dynamic", "lookup"
SETTINGS = (PLAIN, CONSTANT, DYNAMIC, LOOKUP)
GUESSES = 5  # tokens a call of CONSTANT and LOOKUP guesses; DYNAMIC keeps transformers' own defaults


@dataclass(frozen=True, slots=True)
class Written:
    """What one `generate` call wrote: generated ids only, nothing cut. `first_tokens`: how many came with the first one;
    `seconds`: the whole call; `drafted`: guesses in the target's calls after the first."""

    tokens: list[int]
    first_tokens: int
    seconds: float
    first_token_seconds: float
    target_calls: int
    drafted: int


@dataclass(slots=True)
class Watch:
    """A streamer, and a forward hook of the target: notes when new tokens come and how wide the target's calls are."""

    sizes: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    first: float = 0.0

    def put(self, tokens: torch.Tensor) -> None:
        """Called with the prompt, then with the tokens of every call of the target."""
        self.sizes.append(tokens.numel())
        if len(self.sizes) == 2:
            self.first = time.perf_counter()

    def end(self) -> None: ...

    def call(self, module: Any, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        ids = named["input_ids"] if "input_ids" in named else given[0]
        self.widths.append(ids.shape[1])


class Stock:
    """Target and draft as transformers loads them, on the same device and in the same dtype as ours."""

    def __init__(self, target: str | os.PathLike[str], draft: str | os.PathLike[str], dtype: str, *, device: str = "auto") -> None:
        self.device = models.pick_device(device)
        self.target, self.draft = (models.load_module(models.locate(path), dtype).to(self.device).eval() for path in (target, draft))
        constant = copy.deepcopy(self.draft.generation_config)  # an assistant's settings are read from its own config
        constant.num_assistant_tokens, constant.num_assistant_tokens_schedule, constant.assistant_confidence_threshold = GUESSES, "constant", 0
        self.assistants = {CONSTANT: constant, DYNAMIC: self.draft.generation_config}

    def write(self, contender: str, tokens: list[int], max_tokens: int, temperature: float, ends: set[int]) -> Written:
        """Continue `tokens` with one of SETTINGS. Greedy at temperature 0, else samples with seed 1."""
        prompt, watch = torch.tensor([tokens], device=self.device), Watch()
        options = {**self._speculation(contender), **drawing(temperature)}
        with silent(), self.target.register_forward_hook(watch.call, with_kwargs=True):
            torch.manual_seed(1)
            start = time.perf_counter()
            out = self.target.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_tokens, streamer=watch,
                eos_token_id=sorted(ends) or [-1], pad_token_id=0, **options,
            )  # fmt: skip
            written = out[0].tolist()[len(tokens) :]
            seconds = time.perf_counter() - start
        return Written(written, watch.sizes[1], seconds, watch.first - start, len(watch.widths), sum(watch.widths[1:]) - len(watch.widths[1:]))

    def _speculation(self, contender: str) -> dict[str, Any]:
        if contender in self.assistants:
            self.draft.generation_config = self.assistants[contender]
            return {"assistant_model": self.draft}
        return {PLAIN: {}, LOOKUP: {"prompt_lookup_num_tokens": GUESSES}}[contender]


def drawing(temperature: float) -> dict[str, Any]:
    """The same law of the next token as ours, whatever the model's own generation config prefers."""
    if temperature == 0:
        return {"do_sample": False, "repetition_penalty": 1.0}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}


@contextmanager
def silent() -> Any:
    """Advice of transformers stays off while it writes."""
    before = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(before)
