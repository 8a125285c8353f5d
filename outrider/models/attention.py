"""Attention of few columns over many slots on a CPU: torch's own takes three to eight times as long for the rows of a verification where a CPU
multiplies pairs of bfloat16, and its sums hang on what stands beside. A template of Inductor's (`attend`), around the same kernel that multiplies
weights: the house's (`microkernel`), or Inductor's own where the processor has tiles (AMX). A row's result depends neither on how many rows there are
nor on hidden slots behind its own.

Builds on Inductor's internal interface: where that has changed, `attention` is None and torch's serves.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outrider.models.attend import FLOATS, PAIRS
from outrider.models.microkernel import few_rows, multiplies_pairs
from outrider.models.step import grouped_attention

BLOCK = 64  # slots of a tile, and dims of a product
WIDEST = 256  # dims of a head: tiles lie on the stack


def attention(dtype: torch.dtype) -> Callable[..., tuple[Tensor, None]] | None:
    """An attention function for transformers that packages of this dtype may be built with; None where this CPU or this torch cannot."""
    return own_attention if dtype in _dtypes() and None not in map(few_rows, _dtypes()) and _taught() else None


def _dtypes() -> tuple[torch.dtype, ...]:
    """What there is attention for; in float32 where bfloat16 is multiplied in it, too: elsewhere it was not tried."""
    return (torch.bfloat16,) if multiplies_pairs() else (torch.bfloat16, torch.float32)


@functools.cache
def _taught() -> bool:
    """Does Inductor make code of `attend` from now on?"""
    try:
        _teach(_operator())
    except (ImportError, AttributeError, TypeError):
        return False
    return True


def own_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """As `step.grouped_attention`, which serves what this does not: other dtypes, heads of other than 64, 128, 192 or 256 dims, none masked."""
    b, h, w, d = query.shape
    known = attention_mask is not None and attention_mask.dtype == query.dtype and query.dtype in _dtypes() and value.shape[-1] == d
    if not known or d % BLOCK or d > WIDEST:
        return grouped_attention(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    folded = query.clone(memory_format=torch.contiguous_format).view(b, key.shape[1], h // key.shape[1] * w, d)
    return torch.ops.outrider.attend(folded, key, value, attention_mask, d**-0.5 if scaling is None else scaling), None


def _operator() -> Any:
    """`attend`: query [b, kv, share * w, d] with the heads that share a key head below one another, key and value [b, kv, c, d], mask [b, 1, w, c]
    -> [b, w, kv * share, d]. A name and a shape: what it does stands in `attend` alone."""
    torch.library.define("outrider::attend", "(Tensor query, Tensor key, Tensor value, Tensor mask, float scale) -> Tensor")

    def shape(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        (b, kv, many, d), w = query.shape, mask.shape[2]
        return query.new_empty(b, w, kv * (many // w), d)

    torch.library.register_fake("outrider::attend", shape)
    return torch.ops.outrider.attend.default


def _teach(operator: Any) -> None:
    """Teach Inductor to make code of `attend`."""
    from torch._inductor import ir
    from torch._inductor.codegen.cpp_micro_gemm import CppMicroGemmAMX
    from torch._inductor.codegen.cpp_template import CppTemplate
    from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP, GemmBlocking
    from torch._inductor.lowering import register_lowering

    def _inside(dtype: torch.dtype) -> tuple[str, Any, torch.dtype, Any]:
        """Its template; the kernel that multiplies there, in which dtype, and its blocks."""
        if dtype == torch.float32 or not multiplies_pairs():
            return FLOATS, few_rows(torch.float32), torch.float32, GemmBlocking(8, few_rows(torch.float32).block, 1)
        tiles = torch.cpu._is_amx_tile_supported()
        return PAIRS, CppMicroGemmAMX if tiles else few_rows(dtype), dtype, GemmBlocking(16, 32, 32) if tiles else GemmBlocking(8, BLOCK, 2)

    class Attend(CppTemplate):
        def __init__(self, inputs: list[Any], layout: Any, scale: float) -> None:
            super().__init__("attend", inputs, layout, num_threads=1)
            self.scale = scale

        def render(self, kernel: Any, template_buffer_node: Any = None, epilogue_nodes: Any = None, **more: Any) -> str:  # type: ignore[override]
            if epilogue_nodes:
                raise TypeError("attend has no loop that what follows it could join")  # the builder then takes torch's attention
            query, key, value, mask = self.input_nodes
            dtype, (source, taken, inside, blocks) = query.get_dtype(), _inside(query.get_dtype())
            bits = 512 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 256
            product: Any = taken(f"{kernel.kernel_name}_product", inside, inside, torch.float, torch.float, blocks)
            product.ahead = 0  # what it reads is near
            text: str = self._template_from_string(source).render(
                template=self, kernel=kernel, name=kernel.kernel_name, product=product, state="".join(product.get_kernel_extra_args()),
                query=query, key=key, value=value, mask=mask, out=template_buffer_node or self.output_node, scale=float(self.scale),
                dims=int(query.get_size()[-1]), block=BLOCK, columns=blocks.block_n, type=DTYPE_TO_CPP[dtype], halves=dtype == torch.bfloat16, bits=bits,
            )  # fmt: skip
            return text

    @register_lowering(operator, type_promotion_kind=None)
    def lower(query: Any, key: Any, value: Any, mask: Any, scale: float) -> Any:
        inputs = [
            ir.ExternKernel.require_contiguous(query),
            *map(ir.ExternKernel.realize_input, (key, value)),
            ir.ExternKernel.require_contiguous(mask),
        ]
        b, kv, many, d = query.get_size()
        w = mask.get_size()[2]
        size = [b, w, kv * (many // w), d]
        layout = ir.FixedLayout(query.get_device(), query.get_dtype(), size)
        return Attend(inputs, layout, scale).generate().output_node()
