"""A product of few rows by a packed matrix, the sums of many rows in registers: in bfloat16 of pairs (AVX512-BF16), where Inductor's own kernels
widen to float32 first and take three times as long at eight rows, or, on processors without (AVX2, AVX512), of weights that are widened as they are
read and rows that are once for all of them, where oneDNN's are slower than eager ones; in float32 (AVX512, AVX2), where oneDNN's take half as long
again at one row, or twice, and Inductor's a third longer at nine; of weights in 8 bits, widened likewise (`quantised`). Registered with Inductor, which packs the weights, splits the work between threads
and fuses what follows; a row's result does not depend on how many there are. In bfloat16 on a processor with tiles (AMX) Inductor takes its own
kernel of them, of which the same is true.

Builds on Inductor's internal interface for such kernels: where that has changed there is none, and nothing is lost.
"""

import functools
from typing import Any

import torch

BLOCK = 32  # columns of a packed block where vectors have 16 numbers: two sums a row, for twelve rows at most; a block is then read once
NARROW = 16  # the same where they have eight, and half as many registers: for six rows
DEEP = 16  # inputs that a block is said to take in at once, where they divide: where there is one for each thread, Inductor takes the largest that divides the sizes
SUMS = {16: 24, 8: 12}  # that registers hold, by numbers in a vector
AHEAD = 1 << 15  # bytes of weights that are asked for before they are needed
# Rows from which on, by numbers in a vector and what weights are: fewer wait for memory alone, which then runs ahead by itself.
BUSY = {(16, torch.bfloat16): 5, (16, torch.float32): 5, (16, torch.int8): 5, (8, torch.bfloat16): 1, (8, torch.float32): 3, (8, torch.int8): 1}
LINE = 64  # bytes that memory gives at once

SOURCE = r"""
{%- if widened %}
#ifndef OUTRIDER_FLOATS
#define OUTRIDER_FLOATS
// Rows of a product in float32, made once for all blocks of columns; of their inputs as many as were asked for so far. What holds them is kept from product to product
struct Floats {
    const at::BFloat16* of = nullptr;
    float* to = nullptr;
    int64_t rows = 0, made = 0, step = 0;  // inputs of a row that are made; floats from row to row
    const float* operator()(const at::BFloat16* A, int64_t M, int64_t K, int64_t lda) {
        if (M != rows || A < of || A + K > of + made) make(A, M, K, lda);
        return to + (A - of);
    }
    __attribute__((noinline)) void make(const at::BFloat16* A, int64_t M, int64_t K, int64_t lda) {
        using V = at::vec::Vectorized<float>;
        static thread_local std::vector<float> held;
        if (M != rows || A < of || A > of + made) of = A, rows = M, made = 0;  // other rows, or far ahead: of a single one no stride says how long it is
        const int64_t all = A - of + K;
        step = std::max(lda, all);
        if ((int64_t)held.size() < M * step) held.resize(M * step);
        to = held.data();
        for (int64_t m = 0; m < M; ++m) {
            int64_t k = made;
            for (V x; k + V::size() <= all; k += V::size()) at::vec::load_fp32_from_bf16(of + m * lda + k, x), x.store(to + m * step + k);
            for (; k < all; ++k) to[m * step + k] = of[m * lda + k];
        }
        made = all;
    }
};
#endif
{%- endif %}

template <int ROWS, bool accum>
{{"inline" if bits == 512 else "__attribute__((noinline))"}} void {{kernel_name}}_rows(
    const {{"float" if widened else input_t}}* {{restrict_keyword}} A, const {{input2_t}}* {{restrict_keyword}} B, {{output_t}}* {{restrict_keyword}} C,
    int64_t K, int64_t lda, int64_t ldb, int64_t ldc, const char* next, int64_t pace
) {
    using V = at::vec::Vectorized<float>;
    constexpr int SIZE = V::size(), COLUMNS = {{block}} / SIZE;
    V sum[ROWS][COLUMNS];  // in registers: of sixteen they take so many that GCC, where this is a part of another function, keeps some in memory
    _Pragma("GCC unroll 12") for (int r = 0; r < ROWS; ++r)
        _Pragma("GCC unroll 4") for (int c = 0; c < COLUMNS; ++c)
            sum[r][c] = accum ? V::loadu(C + r * ldc + SIZE * c) : V(0.f);
{%- macro ask(bytes) %}
{%- if ahead %}
        if constexpr (ROWS >= {{busy}})
            _Pragma("GCC unroll 4") for (int at = 0; at < {{bytes}}; at += {{line}})
                _mm_prefetch(next + k * pace + at, _MM_HINT_T1);
{%- endif %}
{%- endmacro %}
{%- if bytes %}
    constexpr int DEEP = {{line // block}};  // inputs of a line
    for (int64_t k = 0; k < K; k += DEEP) {
        {{- ask(line)}}
        _Pragma("GCC unroll 4") for (int d = 0; d < DEEP; ++d) {
            V b[COLUMNS];
            _Pragma("GCC unroll 4") for (int c = 0; c < COLUMNS; ++c)
                b[c] = at::vec::convert<float>(at::vec::convert_to_int32<int8_t>(B + (k + d) * ldb + SIZE * c));
            _Pragma("GCC unroll 12") for (int r = 0; r < ROWS; ++r) {
                const V a(A[r * lda + k + d]);
                _Pragma("GCC unroll 4") for (int c = 0; c < COLUMNS; ++c) sum[r][c] = at::vec::fmadd(a, b[c], sum[r][c]);
            }
        }
    }
{%- elif widened %}
    using Pairs = __m{{bits}}i;  // the bits of two floats in each number, the second's above
    const auto low = [](Pairs x) { return V(_mm{{bits}}_castsi{{bits}}_ps(_mm{{bits}}_slli_epi32(x, 16))); };
    const auto high = [](Pairs x) { return V(_mm{{bits}}_castsi{{bits}}_ps(_mm{{bits}}_and_si{{bits}}(x, _mm{{bits}}_set1_epi32(0xffff0000)))); };
    for (int64_t k = 0; k < K; k += 2) {
        {{- ask(4 * block)}}
        const {{input2_t}}* both = B + k * ldb;
{%- for half in ("low", "high") %}
        {
            V b[COLUMNS];
            _Pragma("GCC unroll 4") for (int c = 0; c < COLUMNS; ++c) b[c] = {{half}}(_mm{{bits}}_loadu_si{{bits}}((const Pairs*)(both + 2 * SIZE * c)));
            _Pragma("GCC unroll 12") for (int r = 0; r < ROWS; ++r) {
                const V a(A[r * lda + k + {{loop.index0}}]);
                _Pragma("GCC unroll 4") for (int c = 0; c < COLUMNS; ++c) sum[r][c] = at::vec::fmadd(a, b[c], sum[r][c]);
            }
        }
{%- if loop.first %}
        asm("" : "+r"(both));  // read again, and not kept: the sums of six rows and what is added to them take all registers that there are
{%- endif %}
{%- endfor %}
    }
{%- elif pairs %}
    for (int64_t k = 0; k < K; k += 2) {
        {{- ask(4 * block)}}
        __m512bh b[COLUMNS];
        _Pragma("GCC unroll 4") for (int c = 0; c < COLUMNS; ++c)
            b[c] = (__m512bh)_mm512_loadu_si512((const void*)(B + k * ldb + 32 * c));
        _Pragma("GCC unroll 12") for (int r = 0; r < ROWS; ++r) {
            int32_t pair;
            std::memcpy(&pair, A + r * lda + k, sizeof(pair));
            const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
            _Pragma("GCC unroll 4") for (int c = 0; c < COLUMNS; ++c)
                sum[r][c] = _mm512_dpbf16_ps(sum[r][c], a, b[c]);
        }
    }
{%- else %}
    for (int64_t k = 0; k < K; ++k) {
        {{- ask(4 * block)}}
        V b[COLUMNS];
{%- if unpacked %}
        _Pragma("GCC unroll 4") for (int c = 0; c < COLUMNS; ++c) at::vec::load_fp32_from_bf16(B + k * ldb + SIZE * c, b[c]);
{%- else %}
        _Pragma("GCC unroll 4") for (int c = 0; c < COLUMNS; ++c) b[c] = V::loadu(B + k * ldb + SIZE * c);
{%- endif %}
        _Pragma("GCC unroll 12") for (int r = 0; r < ROWS; ++r) {
            const V a(static_cast<float>(A[r * lda + k]));
            _Pragma("GCC unroll 4") for (int c = 0; c < COLUMNS; ++c) sum[r][c] = at::vec::fmadd(a, b[c], sum[r][c]);
        }
    }
{%- endif %}
    _Pragma("GCC unroll 12") for (int r = 0; r < ROWS; ++r)
        _Pragma("GCC unroll 4") for (int c = 0; c < COLUMNS; ++c)
            sum[r][c].store(C + r * ldc + SIZE * c);
}
{{declare_kernel}} {
    const int64_t turns = std::max<int64_t>((M + {{most - 1}}) / {{most}}, 1), pace = ldb * sizeof(*B) / turns;  // each asks for its part of what comes next
    const char* next = (const char*)B + {{ahead}};
{%- if widened %}
    const float* {{restrict_keyword}} floats = widened(A, M, K, lda);
{%- endif %}
    for (int64_t m = 0, left = turns; left > 0; --left, next += K * pace) {
        const int64_t rows = (M - m + left - 1) / left;  // whose sums stay in registers
        switch (rows) {
{%- for rows in range(1, most + 1) %}
            case {{rows}}: {{kernel_name}}_rows<{{rows}}, accum>({{"floats + m * widened.step" if widened else "A + m * lda"}}, B, C + m * ldc, K, {{"widened.step" if widened else "lda"}}, ldb, ldc, next, pace); break;
{%- endfor %}
        }
        m += rows;
    }
}
"""


def has_kernels(dtype: torch.dtype) -> bool:
    """Are there kernels of a dtype for this CPU, as far as is known without Inductor?"""
    return dtype in (torch.bfloat16, torch.float32) and torch.backends.cpu.get_cpu_capability() in ("AVX512", "AVX2")


def multiplies_pairs() -> bool:
    """Has the processor an instruction for pairs of bfloat16 (AVX512-BF16)?"""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.cpu._is_avx512_bf16_supported()


@functools.cache
def few_rows(dtype: torch.dtype, weights: torch.dtype | None = None) -> Any:
    """The kernel of a dtype as Inductor knows them, registered there; None where there is none: other dtypes, this CPU, this torch. weights: theirs, if
    it is another: int8."""
    if not has_kernels(dtype):
        return None
    try:
        from torch._inductor import compile_fx, cpu_vec_isa, select_algorithm  # noqa: F401  (in this order: the next import is circular)
        from torch._inductor.codegen import cpp_micro_gemm

        return _registered(cpp_micro_gemm, cpu_vec_isa, dtype, weights or dtype)
    except (ImportError, AttributeError, TypeError):
        return None


def _registered(inductor: Any, isa: Any, dtype: torch.dtype, weights: torch.dtype) -> Any:
    pairs, whole, wide = dtype == torch.bfloat16, weights == dtype, torch.backends.cpu.get_cpu_capability() == "AVX512"
    size = 16 if wide else 8
    block, vectors = (BLOCK, isa.VecAVX512) if wide else (NARROW, isa.VecAVX2)

    def fits(config: Any, m: Any, n: int, k: int, alpha: float, threads: int, **more: Any) -> bool:
        return k % config.register_blocking.block_k == 0 and n % block == 0 and alpha == 1

    class FewRows(inductor.CppMicroGemm):  # type: ignore[misc]
        ahead = AHEAD
        block: int

        def codegen_define(self, kernel: Any) -> str:
            columns = self.register_blocking.block_n
            unpacked = pairs and whole and self.pack_vnni_B_locally  # a matrix that is no weight, as batched products may have
            names = {
                "declare_kernel": self.get_kernel_declaration(),
                "kernel": kernel,
                "bytes": not whole,
                "pairs": pairs and not unpacked,
                "unpacked": unpacked,
                "widened": self._widened(),
                "bits": 32 * size,
                "block": columns,
                "most": SUMS[size] * size // columns,
                "ahead": self.ahead,
                "busy": BUSY[size, weights],
                "line": LINE,
                **self.get_common_options(),
            }
            text: str = inductor.KernelTemplate._template_from_string(SOURCE).render(names)
            return text

        def _widened(self) -> bool:
            return pairs and not (whole and (self.pack_vnni_B_locally or multiplies_pairs()))

        def codegen_init(self, kernel: Any) -> str:
            return "Floats widened;" if self._widened() else ""

        def get_kernel_extra_args_declare(self) -> str:
            return "Floats& widened," if self._widened() else ""

        def get_kernel_extra_args(self, **more: Any) -> list[str]:
            return ["widened,"] if self._widened() else []

        def get_b_layout(self) -> Any:
            return inductor.LayoutType.VNNI2 if pairs and whole else inductor.LayoutType.NORMAL

    FewRows.block = block
    blocks, kinds = [(8, block, DEEP), *[(8, block, 2)] * whole], {"input_dtype": dtype, "input2_dtype": weights}
    shape = inductor.generate_gemm_config(vectors, blocks, **kinds, output_dtype=torch.float, compute_dtype=torch.float, extra_check=fits)
    if not whole:  # Inductor's of a single row would be taken for its larger blocks
        stand_back(inductor.micro_gemm_configs[inductor.CppMicroGemmFP32Vec], shape[0])
    inductor.register_micro_gemm(*shape)(FewRows)
    return FewRows


def stand_back(others: list[Any], ours: Any) -> None:
    """Of `others`, those for the same numbers serve only what `ours` does not fit."""

    def unless(check: Any, *of: Any, **more: Any) -> bool:
        return not ours.extra_check(ours, *of[1:], **more) and (check is None or bool(check(*of, **more)))

    for other in others:
        if (other.input_dtype, other.input2_dtype) == (ours.input_dtype, ours.input2_dtype):
            other.extra_check = functools.partial(unless, other.extra_check)
