"""A step of few large kernels in place of several hundred small ones: exported, and compiled by Inductor for the GPU that it lies on.

What CUDA graphs are captured of (`graphed`), for rows that step alone. Two forms, as packages have: of one column, whose products are sums that
read weights at the memory's rate, and of any number of columns. Attention is two products: the few queries of one row keep few of the processors busy
in torch's fused kernels (eight columns over 2,048 slots: 0.54 ms a step in place of 0.67).
Its sums hang on how many slots are read, so strict steps are not made of these.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from outrider.core.types import MAX_NODES
from outrider.models.compiled import example
from outrider.models.step import Step, attending, grouped_attention

ANY = 8  # columns of the example of any number
TUNED: dict[str, Any] = {"coordinate_descent_tuning": True}  # how the form of one column is made
LONG = 1024  # slots read from which on two products are quicker than a fused kernel where each kernel stands alone
CODES = 64  # that Inductor may make of a form: sizes that divide well get code of their own
# Bytes of weights and layers beyond which kernels are not joined: large ones wait for memory more than for one another, and the time that
# making takes goes with the layers (eight: one to two minutes; 32 were not done in three).
LARGE, DEEP = 4 << 30, 24

Form = Callable[[Tensor, Tensor, list[Tensor]], tuple[Tensor, Tensor]]


def join(step: Step, rows: list[Tensor]) -> Form:
    """Called as the step is, with one row. Code is made at first calls, which takes seconds to a minute.

    Raises whatever torch.export or Inductor raise, now or then.
    """
    forms = {one: torch.compile(_exported(step, 1 if one else ANY, rows), fullgraph=True, options=TUNED if one else None) for one in (True, False)}

    def run(table: Tensor, read: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        # Columns and slots alone: where every size is a symbol, those that are alike by chance are taken for one.
        torch._dynamo.maybe_mark_dynamic(table, 1)
        torch._dynamo.maybe_mark_dynamic(read, 0)
        with torch._dynamo.config.patch(recompile_limit=CODES, fail_on_recompile_limit_hit=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what Inductor would advise its own developers
            out: tuple[Tensor, Tensor] = forms[table.shape[1] == 1](table, read, rows)
        return out

    return run


def apart(rows: list[Tensor]) -> list[Tensor]:
    """The same memory, as tensors that know nothing of one another: of views of one block that are written to AOTAutograd would make one tensor, and
    fails."""
    return [from_dlpack(x) for x in rows]


def multiplied(step: Step) -> Form:
    """The step's own kernels, but attention over many slots as two products."""

    def run(table: Tensor, read: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        with attending(two_products if len(read) >= LONG else grouped_attention):
            out: tuple[Tensor, Tensor] = step(table, read, rows)
        return out

    return run


def worth_joining(step: Step) -> bool:
    """Do its kernels wait for one another more than for memory, and are they made in bearable time?"""
    return sum([weight.nbytes for weight in step.parameters()]) <= LARGE and len(step.store.layers) <= DEEP


def _exported(step: Step, width: int, rows: list[Tensor]) -> nn.Module:
    """The step as a graph in which columns (but for one) and slots are symbols. Its attention is the process's for that time: one export after the
    other."""
    slots, device = rows[0].shape[2], rows[0].device
    inputs = example(1, width, len(step.windows)).to(device), torch.arange(min(128, slots - 1), device=device), rows
    dim = torch.export.Dim
    shapes: Any = ({} if width == 1 else {1: dim("w", min=2, max=MAX_NODES)}, {0: dim("c", min=2, max=slots - 1)}, [{}] * len(rows))
    with torch.no_grad(), attending(two_products):
        program = torch.export.export(step, inputs, dynamic_shapes=shapes, strict=False, prefer_deferred_runtime_asserts_over_guards=True)
    made: nn.Module = program.module(check_guards=False)
    return made


def two_products(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """As `step.grouped_attention`, with softmax over [b, kv, share, w, c] in float32 (or wider)."""
    if attention_mask is None:
        return grouped_attention(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    (b, h, w, d), kv = query.shape, key.shape[1]
    # Of `torch.promote_types` export makes an operation, at which Dynamo parts the graph.
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    small = query * (d**-0.5 if scaling is None else scaling)  # before the product, which float16 would not hold
    scores = torch.matmul(small.reshape(b, kv, h // kv * w, d), key.transpose(2, 3)).to(wide)
    scores = scores.view(b, kv, h // kv, w, -1) + attention_mask[:, :, None].to(wide)
    out = torch.matmul(scores.softmax(-1).to(value.dtype).view(b, kv, h // kv * w, -1), value)
    return out.view(b, h, w, -1).transpose(1, 2).contiguous(), None
