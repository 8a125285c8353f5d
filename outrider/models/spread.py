"""Attention of few columns over many slots, for GPUs: parts of the slots side by side, and one sum of what they found.

A fused kernel gives each head's queries one block of threads, which walks through all slots; of one row's few columns that is a handful of blocks, and
most processors have nothing to do. Here every part of the slots is a batch entry of its own. Source: FlashDecoding (Dao et al. 2023), by torch's own kernels.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.step import Step, attending, grouped_attention

PART = 512  # slots
FEW = 64  # blocks (of 64 queries of a key head) from which on the processors have enough to do
HIDDEN = -1e30  # added to what is not seen: a part of which nothing is seen has finite scores, and weighs nothing beside one that is
ALIGNED = 8  # slots of a mask that kernels load at once


def spread_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """As `step.grouped_attention`, which serves what would gain nothing: several rows, many columns, few slots."""
    (b, h, w, d), kv, slots = query.shape, key.shape[1], key.shape[2]
    share = h // kv
    if attention_mask is None or b > 1 or slots < 2 * PART or kv * -(-share * w // 64) >= FEW:
        return grouped_attention(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    folded = query.clone(memory_format=torch.contiguous_format).view(1, kv, share * w, d)
    mask = F.pad(attention_mask.clamp(min=max(HIDDEN, torch.finfo(query.dtype).min)), (0, -slots % ALIGNED)).repeat(1, 1, share, 1)
    found, whole = [], slots // PART * PART
    for first, last, size in [(0, whole, PART), (whole, slots, slots - whole)][: 1 + (whole < slots)]:
        keys, values = (x[0, :, first:last].unflatten(1, (-1, size)).transpose(0, 1) for x in (key, value))
        bias = mask[0, 0, :, first:last].unflatten(1, (-1, size)).transpose(0, 1)[:, None]
        found.append(_part(folded, keys, values, bias, scaling))
    out, log_sum = (torch.cat(x) for x in zip(*found, strict=True))
    weight = (log_sum - log_sum.logsumexp(0)).exp()
    mixed = (weight[..., None] * out).sum(0).to(value.dtype)
    return mixed.view(1, h, w, -1).transpose(1, 2).contiguous(), None


def spread(step: Step) -> Callable[[Tensor, Tensor, list[Tensor]], tuple[Tensor, Tensor]]:
    """The step with this attention."""

    def run(table: Tensor, read: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        with attending(spread_attention):
            out: tuple[Tensor, Tensor] = step(table, read, rows)
        return out

    return run


def _part(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float | None) -> tuple[Tensor, Tensor]:
    """query [1, kv, m, d], key and value [n, kv, c, d], bias [n, 1, m, c] -> [n, kv, m, d], and the logs [n, kv, m] of sums of exponentials."""
    (n, kv, _, _), m = key.shape, query.shape[2]
    query, bias = query.expand(n, -1, -1, -1), bias.expand(-1, kv, -1, -1)
    if query.device.type == "cuda":
        out, log_sum, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, scale=scaling)
    else:
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=bias, scale=scaling)
    return out, log_sum[:, :, :m]
