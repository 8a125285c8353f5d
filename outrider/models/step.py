"""One forward as a function of tensors alone: numbers in, logits and their best token out.

The same module runs eagerly, is exported and compiled, or is captured as a CUDA graph: all tiers compute this. Knows
nothing of sequences; `kv.Block` says what the numbers mean.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.core.errors import OutriderError
from outrider.models.layers import mentions
from outrider.models.slots import SlotCache

ATTENTION = "outrider"


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """torch's attention with the query heads that share a key head laid below one another, so that keys are not copied.

    query [b, h, w, d], key and value [b, kv, c, d], mask [b, 1, w, c] -> [b, w, h, d].
    """
    if attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    if attention_mask.shape[1] != 1:
        raise OutriderError(f"{type(module).__name__} masks every head by itself", "what is cached is masked for all heads alike", "another model")
    b, h, w, d = query.shape
    share = h // key.shape[1]
    folded = query.clone(memory_format=torch.contiguous_format).view(b, key.shape[1], share * w, d)
    mask = attention_mask if share == 1 else attention_mask.repeat(1, 1, share, 1)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.clone(memory_format=torch.contiguous_format).view(b, h, w, -1).transpose(1, 2).contiguous(), None


@contextmanager
def attending(function: Callable[..., tuple[Tensor, None]]) -> Iterator[None]:
    """Another attention in the place of `grouped_attention`, in the whole process, as long as this lasts: for who exports, compiles or captures a
    step."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, function)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, grouped_attention)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, grouped_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)


class Step(nn.Module):
    """A causal LM on a slot cache. `windows`: layer type -> window or None; `vocab`: logits kept."""

    def __init__(self, module: Any, store: SlotCache, windows: dict[str, int | None], vocab: int) -> None:
        super().__init__()
        self.module, self.store, self.windows, self.vocab = module, store, windows, vocab
        self.one_logit = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(module.forward).parameters else {}
        if module.config._attn_implementation == "sdpa" and mentions(module, "ALL_ATTENTION_FUNCTIONS"):  # Falcon asks for "sdpa" by name
            module.config._attn_implementation = ATTENTION

    def forward(
        self, table: Tensor, read: Tensor, rows: list[Tensor], nodes: bool = True, hidden: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """table int64 [b, w, 4 + kinds] and rows as `kv.Block` and `SlotCache.rows` say; read: the slot numbers 0 .. c-1.

        `nodes`: whether any column sees scratch; `hidden` [b, w, d]: what enters the first layer, in place of the tokens. Returns logits [b, w, V]
        and float64 [b, w, 3]: the best token (largest, ties to the lowest id), its logit (NaN if any is) and the log of the sum of exponentials.
        """
        self.store.use(rows, table[..., 2], read.shape[0])
        text = {"input_ids": table[..., 0].contiguous()} if hidden is None else {"inputs_embeds": hidden}
        out = self.module(
            **text, position_ids=table[..., 1].contiguous(), attention_mask=self._masks(table, read, nodes),
            past_key_values=self.store.cache, use_cache=True, **options,
        )  # fmt: skip
        logits = out.logits[..., : self.vocab]  # padding rows of the head are no tokens
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return logits, torch.stack([wide.argmax(-1).double(), wide.amax(-1).double(), wide.logsumexp(-1).double()], -1)

    def _masks(self, table: Tensor, read: Tensor, nodes: bool) -> Tensor | dict[str, Tensor]:
        """Additive masks [b, 1, w, c]; a dict by layer type where a model mixes them."""
        position, upto = table[..., 1, None], table[..., 3, None]
        masks = {}
        for i, (kind, window) in enumerate(self.windows.items()):
            seen = read < upto if window is None else (read < upto) & (read > position - window)
            if nodes:
                ahead = read - upto
                bit = (table[..., 4 + i, None] >> ahead.clamp(0, 63)) & 1
                seen = seen | ((ahead >= 0) & (ahead < 64) & (bit == 1))
            masks[kind] = torch.where(seen, 0.0, torch.finfo(self.module.dtype).min).to(self.module.dtype)[:, None]
        return next(iter(masks.values())) if len(masks) == 1 else masks


class Prefill(nn.Module):
    """The same forward for the keys and values that it writes, of columns that are text. Eagerly the head sees one of them; compiled, what only
    logits hang on is left out, the last layer's attention and feed-forward included."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def forward(self, table: Tensor, read: Tensor, rows: list[Tensor]) -> tuple[()]:
        self.step(table, read, rows, nodes=False, **self.step.one_logit)
        return ()
