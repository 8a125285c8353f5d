"""Attention of few columns over many slots in bfloat16, for CPUs that multiply pairs: torch's own takes three to eight times as long for the rows
of a verification. A template of Inductor's, around the same kernel that multiplies weights: the house's (`microkernel`), or Inductor's own where the processor
has tiles (AMX).

Tiles of 64 slots are laid out for that kernel once for all rows that share a key head; each row keeps its greatest score and the sums
over it (Milakov & Gimelshein 2018, as in FlashAttention, 2205.14135). A row's result depends neither on how many rows there are nor on hidden slots
behind its own.

Builds on Inductor's internal interface: where that has changed, `attention` is None and torch's serves.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outrider.models.microkernel import few_rows
from outrider.models.step import grouped_attention

BLOCK = 64  # slots of a tile, and dims of a product
WIDEST = 256  # dims of a head: tiles lie on the stack

SOURCE = r"""
{{template.header().getvalue()}}
{{product.codegen_define(kernel)}}

// exp(x) of x <= 0: exactly 1 at 0, NaN of NaN, and exactly 0 where it would be no normal number, which processors take a hundred times as long to make
static inline __m512 {{name}}_exp(__m512 x) {
    const __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.f), _CMP_NLT_UQ);
    const __m512 t = _mm512_maskz_mul_ps(some, x, _mm512_set1_ps(1.44269504f));
    const __m512 n = _mm512_roundscale_ps(t, 0), f = _mm512_sub_ps(t, n);
    __m512 p = _mm512_set1_ps(0.0013333558f);
    for (float c : {0.0096181291f, 0.0555041087f, 0.2402265070f, 0.6931471806f, 1.f}) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
    return _mm512_maskz_scalef_ps(some, p, n);
}

// 32 dims of up to 16 keys: pairs of dims, by slot
static inline void {{name}}_turn(const at::BFloat16* k, int64_t stride, int64_t slots, at::BFloat16* out) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = i < slots ? _mm512_loadu_si512(k + i * stride) : _mm512_setzero_si512();
    _Pragma("GCC unroll 8") for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * 2 * {{block}}, r[i]);
}

// 32 dims of two slots' values (none: zeros): pairs of slots, by dim
static inline void {{name}}_pair(const at::BFloat16* a, const at::BFloat16* b, at::BFloat16* out) {
    const __m512i x = a ? _mm512_loadu_si512(a) : _mm512_setzero_si512(), y = b ? _mm512_loadu_si512(b) : _mm512_setzero_si512();
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i low = _mm512_add_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(0x00010001)), _mm512_set1_epi32(0x00200000));  // dim i of both
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(0x00100010));
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(x, low, y));
    _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi16(x, high, y));
}

// One row's scores of a tile: weights in place of scores, and the sums and values so far made smaller where the greatest score grew
static inline void {{name}}_weigh(const float* s, const at::BFloat16* mask, int64_t here, at::BFloat16* p, float* top, float* sum, float* o) {
    const __m512 none = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 x[{{block // 16}}], most = none, total = _mm512_setzero_ps();
    for (int64_t i = 0; i < {{block // 16}}; ++i) {
        const int64_t left = std::max<int64_t>(std::min<int64_t>(16, here - 16 * i), 0);
        const __mmask16 some = (__mmask16)((1u << left) - 1);
        const __m512 add = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, mask + 16 * i)), 16));
        x[i] = _mm512_mask_fmadd_ps(_mm512_loadu_ps(s + 16 * i), some, _mm512_set1_ps({{scale}}f), add);
        x[i] = _mm512_mask_blend_ps(some, none, x[i]);
        most = _mm512_max_ps(most, x[i]);
    }
    const float now = std::max(*top, _mm512_reduce_max_ps(most));
    for (int64_t i = 0; i < {{block // 16}}; ++i) {
        const __m512 e = {{name}}_exp(_mm512_sub_ps(x[i], _mm512_set1_ps(now)));
        total = _mm512_add_ps(total, e);
        _mm256_storeu_si256((__m256i*)(p + 16 * i), (__m256i)_mm512_cvtneps_pbh(e));
    }
    if (*top != now) {
        const float fade = _mm512_cvtss_f32({{name}}_exp(_mm512_set1_ps(*top - now)));
        *sum *= fade;
        for (int64_t d = 0; d < {{dims}}; d += 16) _mm512_storeu_ps(o + d, _mm512_mul_ps(_mm512_loadu_ps(o + d), _mm512_set1_ps(fade)));
    }
    *sum += _mm512_reduce_add_ps(total);
    *top = now;
}

extern "C" {{kernel.def_kernel(inputs={"query": query, "key": key, "value": value, "mask": mask}, outputs={"out": out})}} {
    constexpr int64_t D = {{dims}}, T = {{block}}, R = 16, N = {{columns}};  // dims, slots a tile, rows that share one, columns of a product
    const int64_t heads = {{kernel.size(query, 1)}}, rows = {{kernel.size(query, 2)}}, width = {{kernel.size(mask, 2)}}, slots = {{kernel.size(key, 2)}};
    const int64_t k_slot = {{kernel.stride(key, 2)}}, v_slot = {{kernel.stride(value, 2)}}, parts = (rows + R - 1) / R;
    #pragma omp parallel for
    for (int64_t part = 0; part < {{kernel.size(query, 0)}} * heads * parts; ++part) {
        const int64_t b = part / (heads * parts), h = part / parts % heads, first = part % parts * R, n = std::min(R, rows - first);
        const at::BFloat16 *q = &{{kernel.index(query, ["b", "h", "first", 0])}}, *k = &{{kernel.index(key, ["b", "h", 0, 0])}};
        const at::BFloat16* v = &{{kernel.index(value, ["b", "h", 0, 0])}};
        alignas(64) at::BFloat16 kt[D * T], vt[T * D], p[R * T];
        alignas(64) float s[R * T], o[R * D], top[R], sum[R];
        std::fill(top, top + n, -std::numeric_limits<float>::infinity());
        std::fill(sum, sum + n, 0.f);
        std::fill(o, o + n * D, 0.f);
        {{product.codegen_init(kernel)}}
        for (int64_t at = 0; at < slots; at += T) {
            const int64_t here = std::min(T, slots - at);
            for (int64_t g = 0; g < T; g += 16)
                for (int64_t d = 0; d < D; d += 32)
                    {{name}}_turn(k + (at + g) * k_slot + d, k_slot, std::max<int64_t>(std::min<int64_t>(16, here - g), 0), kt + d * T + 2 * g);
            for (int64_t j = 0; j < T; j += 2)
                for (int64_t d = 0; d < D; d += 32)
                    {{name}}_pair(j < here ? v + (at + j) * v_slot + d : nullptr, j + 1 < here ? v + (at + j + 1) * v_slot + d : nullptr,
                                  vt + d / T * T * T + j * T + 2 * (d % T));
            for (int64_t c = 0; c < T; c += N) {{name}}_product<false>({{state}}q, kt + 2 * c, s + c, n, N, D, D, T, T);
            for (int64_t r = 0; r < n; ++r)
                {{name}}_weigh(s + r * T, &{{kernel.index(mask, ["b", 0, "(first + r) % width", "at"])}}, here, p + r * T, top + r, sum + r, o + r * D);
            for (int64_t d = 0; d < D; d += N) {{name}}_product<true>({{state}}p, vt + d / T * T * T + 2 * (d % T), o + d, n, N, T, T, T, D);
        }
        {{product.codegen_finalize(kernel)}}
        for (int64_t r = 0; r < n; ++r)
            for (int64_t d = 0; d < D; d += 16)
                _mm256_storeu_si256(
                    (__m256i*)(out + ((b * width + (first + r) % width) * heads * (rows / width) + h * (rows / width) + (first + r) / width) * D + d),
                    (__m256i)_mm512_cvtneps_pbh(_mm512_div_ps(_mm512_loadu_ps(o + r * D + d), _mm512_set1_ps(sum[r]))));
    }
}
"""


@functools.cache
def attention() -> Callable[..., tuple[Tensor, None]] | None:
    """An attention function for transformers that packages may be built with; None where this CPU or this torch cannot."""
    rows = few_rows(torch.bfloat16)
    if rows is None:
        return None
    try:
        _teach(_operator(), rows)
    except (ImportError, AttributeError, TypeError):
        return None
    return paired_attention


def paired_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """As `step.grouped_attention`, which serves what this does not: other dtypes, heads of other than 64, 128, 192 or 256 dims, none masked."""
    b, h, w, d = query.shape
    known = attention_mask is not None and attention_mask.dtype == query.dtype == torch.bfloat16 and value.shape[-1] == d
    if not known or d % BLOCK or d > WIDEST:
        return grouped_attention(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    folded = query.clone(memory_format=torch.contiguous_format).view(b, key.shape[1], h // key.shape[1] * w, d)
    return torch.ops.outrider.attend(folded, key, value, attention_mask, d**-0.5 if scaling is None else scaling), None


def _operator() -> Any:
    """`attend`: query [b, kv, share * w, d] with the heads that share a key head below one another, key and value [b, kv, c, d], mask [b, 1, w, c]
    -> [b, w, kv * share, d]. A name and a shape: what it does stands in SOURCE alone."""
    torch.library.define("outrider::attend", "(Tensor query, Tensor key, Tensor value, Tensor mask, float scale) -> Tensor")

    def shape(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        (b, kv, many, d), w = query.shape, mask.shape[2]
        return query.new_empty(b, w, kv * (many // w), d)

    torch.library.register_fake("outrider::attend", shape)
    return torch.ops.outrider.attend.default


def _teach(operator: Any, rows: Any) -> None:
    """Teach Inductor to make code of `attend`."""
    from torch._inductor import ir
    from torch._inductor.codegen.cpp_micro_gemm import CppMicroGemmAMX
    from torch._inductor.codegen.cpp_template import CppTemplate
    from torch._inductor.codegen.cpp_utils import GemmBlocking
    from torch._inductor.lowering import register_lowering

    class Attend(CppTemplate):
        def __init__(self, inputs: list[Any], layout: Any, scale: float) -> None:
            super().__init__("attend", inputs, layout, num_threads=1)
            self.scale = scale

        def render(self, kernel: Any, template_buffer_node: Any = None, epilogue_nodes: Any = None, **more: Any) -> str:  # type: ignore[override]
            if epilogue_nodes:
                raise TypeError("attend has no loop that what follows it could join")  # the builder then takes torch's attention
            query, key, value, mask = self.input_nodes
            tiles = torch.cpu._is_amx_tile_supported()
            blocks, taken = GemmBlocking(16, 32, 32) if tiles else GemmBlocking(8, BLOCK, 2), CppMicroGemmAMX if tiles else rows
            product: Any = taken(f"{kernel.kernel_name}_product", torch.bfloat16, torch.bfloat16, torch.float, torch.float, blocks)
            product.ahead = 0  # what it reads is near
            text: str = self._template_from_string(SOURCE).render(
                template=self, kernel=kernel, name=kernel.kernel_name, product=product, state="".join(product.get_kernel_extra_args()),
                query=query, key=key, value=value, mask=mask, out=template_buffer_node or self.output_node, scale=float(self.scale),
                dims=int(query.get_size()[-1]), block=BLOCK, columns=blocks.block_n,
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
        layout = ir.FixedLayout(query.get_device(), torch.bfloat16, size)
        return Attend(inputs, layout, scale).generate().output_node()
