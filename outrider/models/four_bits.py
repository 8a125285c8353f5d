"""A product of few rows by weights in 4 bits (`quantised.FourBits`), in integers: rows are rounded to 8 bits, 32 inputs at a time, and multiplied by what
weights are as they are read, so that nothing is widened (as llama.cpp does, after Dettmers et al. 2022, 2208.07339). Sums of 32 are exact, those over
them in float32, in one order: a row's result does not depend on how many there are.

Registered with Inductor as `microkernel` is, which tells why; in place of Inductor's own kernels for such weights, which want them laid out otherwise.
"""

import functools
from typing import Any

import torch

from outrider.models.microkernel import AHEAD, LINE, has_kernels, stand_back

BLOCK, GROUP = 16, 32  # columns of a block; inputs that share a scale
MARK = 16  # said to be the inputs that share a scale: torch's own product refuses it, and so nothing but the house's ever reads blocks as its own
MOST = 4  # rows whose sums stay in registers

SOURCE = r"""
#ifndef OUTRIDER_ROUNDED
#define OUTRIDER_ROUNDED
// {{group}} inputs of a row in 8 bits
struct alignas(8) Group {
    int8_t of[{{group}}];
    float scale, sum;  // the latter of what they stand for
};
// Rows of a product, rounded once for all blocks of columns; of their inputs as many as were asked for so far. What holds them is kept from product to product
template <typename T>
struct Rounded {
    const T* of = nullptr;
    Group* to = nullptr;  // of all rows, one group of inputs after the other
    int64_t rows = 0, made = 0;  // inputs of a row that are made
    const Group* operator()(const T* A, int64_t M, int64_t K, int64_t lda) {
        if (M != rows || A < of || A + K > of + made) make(A, M, K, lda);
        return to + (A - of) / {{group}} * M;
    }
    static __m256 load(const float* x) { return _mm256_loadu_ps(x); }
    static __m256 load(const at::BFloat16* x) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)x)), 16));
    }
    static void round(const T* x, Group* to) {
        const __m256 a = load(x), b = load(x + 8), c = load(x + 16), d = load(x + 24);
        const auto size = [](__m256 v) { return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff)); };
        const __m256i both = _mm256_max_epi32(_mm256_max_epi32(size(a), size(b)), _mm256_max_epi32(size(c), size(d)));  // in bits NaN is the largest
        __m128i top = _mm_max_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
        top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0x4e));
        const float most = _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(top, _mm_shuffle_epi32(top, 0xb1))));
        const __m256 by = _mm256_set1_ps(most > 1e-30f ? 127.f / most : 0.f);
        const auto whole = [by](__m256 v) { return _mm256_cvtps_epi32(_mm256_mul_ps(v, by)); };
        const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(whole(a), whole(b)), _mm256_packs_epi32(whole(c), whole(d)));
        const __m256i bytes = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256((__m256i*)to->of, bytes);
        const __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
        __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
        to->scale = most / 127.f;
        to->sum = to->scale * (float)_mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
    }
    __attribute__((noinline)) void make(const T* A, int64_t M, int64_t K, int64_t lda) {
        static thread_local std::vector<Group> held;
        if (M != rows || A < of || A > of + made) of = A, rows = M, made = 0;  // other rows, or far ahead: of a single one no stride says how long it is
        const int64_t all = A - of + K;
        if ((int64_t)held.size() < all / {{group}} * M) held.resize(all / {{group}} * M);
        to = held.data();
        for (; made < all; made += {{group}})
            for (int64_t m = 0; m < M; ++m) round(of + m * lda + made, to + made / {{group}} * M + m);
    }
};
#endif

template <int ROWS, bool accum>
__attribute__((noinline)) void {{kernel_name}}_rows(
    const Group* {{restrict_keyword}} A, int64_t rows, const uint8_t* {{restrict_keyword}} B, const at::BFloat16* {{restrict_keyword}} S, float* {{restrict_keyword}} C,
    int64_t K, int64_t ldc, bool ahead
) {
    const __m256i low = _mm256_set1_epi8(15);
    alignas(32) float sums[2 * ROWS][8];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < 2; ++c) _mm256_store_ps(sums[2 * r + c], accum ? _mm256_loadu_ps(C + r * ldc + 8 * c) : _mm256_setzero_ps());
    for (int64_t k = 0; k < K; k += {{group}}, A += rows, B += {{block * group // 2}}, S += {{2 * block}}) {
        if (ahead) {
            _Pragma("GCC unroll 4") for (int at = 0; at < {{block * group // 2}}; at += {{line}}) _mm_prefetch((const char*)B + {{ahead}} + at, _MM_HINT_T1);
            _mm_prefetch((const char*)S + {{ahead // 4}}, _MM_HINT_T1);
        }
        __m256i dot[ROWS][2];  // sums of sixteen numbers of 16 bits: eight times two products of 15 and 128 fit
        _Pragma("GCC unroll 8") for (int q = 0; q < {{group // 4}}; ++q) {
            const __m256i both = _mm256_loadu_si256((const __m256i*)(B + 32 * q));
            const __m256i b[2] = {_mm256_and_si256(both, low), _mm256_and_si256(_mm256_srli_epi16(both, 4), low)};
            _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; ++r) {
                int32_t four;
                std::memcpy(&four, A[r].of + 4 * q, sizeof(four));
                const __m256i a = _mm256_set1_epi32(four);
                _Pragma("GCC unroll 2") for (int c = 0; c < 2; ++c) {
                    const __m256i two = _mm256_maddubs_epi16(b[c], a);
                    dot[r][c] = q ? _mm256_add_epi16(dot[r][c], two) : two;
                    asm("" : "+x"(dot[r][c]));  // added up at once: GCC would keep products in memory and add them later
                }
            }
        }
        _Pragma("GCC unroll 2") for (int c = 0; c < 2; ++c) {
            const __m256i pair = _mm256_loadu_si256((const __m256i*)(S + 16 * c));
            const __m256 scale = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)), zero = _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32(0xffff0000)));
            const __m256 less = _mm256_fnmadd_ps(scale, _mm256_set1_ps(8.f), zero);  // what a weight of 0 stands for
            _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; ++r) {
                const __m256 whole = _mm256_cvtepi32_ps(_mm256_madd_epi16(dot[r][c], _mm256_set1_epi16(1)));
                __m256 sum = _mm256_load_ps(sums[2 * r + c]);
                sum = _mm256_fmadd_ps(less, _mm256_set1_ps(A[r].sum), sum);
                sum = _mm256_fmadd_ps(_mm256_mul_ps(scale, _mm256_set1_ps(A[r].scale)), whole, sum);
                _mm256_store_ps(sums[2 * r + c], sum);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < 2; ++c) _mm256_storeu_ps(C + r * ldc + 8 * c, _mm256_load_ps(sums[2 * r + c]));
}
{{declare_kernel}} {
    // From where they are by their shape to where they lie: those of a block of columns one behind the other
    scales += block * (2 * ldb - {{2 * block}}) + start - start / {{mark}} * lds;
    const Group* {{restrict_keyword}} groups = rounded(A, M, K, lda);
    const int64_t turns = std::max<int64_t>((M + {{most - 1}}) / {{most}}, 1);
    for (int64_t m = 0, left = turns; left > 0; --left) {
        const int64_t rows = (M - m + left - 1) / left;  // whose sums stay in registers
        switch (rows) {
{%- for rows in range(1, most + 1) %}
            case {{rows}}: {{kernel_name}}_rows<{{rows}}, accum>(groups + m, M, B, scales, C + m * ldc, K, ldc, m == 0); break;
{%- endfor %}
        }
        m += rows;
    }
}
"""


@functools.cache
def four_bits(dtype: torch.dtype) -> Any:
    """The kernel of rows of a dtype as Inductor knows them, registered there; None where there is none, as in `microkernel.few_rows`."""
    if not has_kernels(dtype):
        return None
    try:
        from torch._inductor import compile_fx, cpu_vec_isa, select_algorithm  # noqa: F401  (in this order: the next import is circular)
        from torch._inductor.codegen import cpp_micro_gemm

        return _registered(cpp_micro_gemm, cpu_vec_isa, dtype)
    except (ImportError, AttributeError, TypeError):
        return None


def _registered(inductor: Any, isa: Any, dtype: torch.dtype) -> Any:
    def fits(config: Any, m: Any, n: int, k: int, alpha: float, threads: int, q_group_size: int | None = None, **more: Any) -> bool:
        return q_group_size == MARK and k % GROUP == 0 and n % BLOCK == 0 and alpha == 1

    class FewRowsInFourBits(inductor.CppMicroGemm):  # type: ignore[misc]
        def codegen_define(self, kernel: Any) -> str:
            names = {
                "block": BLOCK,
                "group": GROUP,
                "mark": MARK,
                "most": MOST,
                "ahead": AHEAD,
                "line": LINE,
                "declare_kernel": self.get_kernel_declaration(),
            }
            text: str = inductor.KernelTemplate._template_from_string(SOURCE).render(**names, **self.get_common_options())
            return text

        def codegen_init(self, kernel: Any) -> str:
            return f"Rounded<{inductor.DTYPE_TO_CPP[self.input_dtype]}> rounded;"

        def get_kernel_extra_args_declare(self) -> str:
            return f"Rounded<{inductor.DTYPE_TO_CPP[self.input_dtype]}>& rounded, const at::BFloat16* __restrict__ scales, int64_t lds, int64_t block, int64_t start,"

        def get_kernel_extra_args(self, *, kernel: Any, qscale_and_zeros: Any, **more: Any) -> list[str]:
            return ["rounded,", f"&({kernel.index(qscale_and_zeros, [0, 0, 0])}),", "2 * N,", "nci,", "k_start,"]

        def is_woq_int4(self) -> bool:
            return True

    vectors = isa.VecAVX512 if torch.backends.cpu.get_cpu_capability() == "AVX512" else isa.VecAVX2
    shape = inductor.generate_gemm_config(
        vectors, [(8, BLOCK, GROUP)], dtype, torch.uint8, output_dtype=torch.float, compute_dtype=torch.float, extra_check=fits
    )
    stand_back(inductor.micro_gemm_configs[inductor.CppMicroGemmWoQInt4Amx], shape[0])  # which asks for no size
    inductor.register_micro_gemm(*shape)(FewRowsInFourBits)
    return FewRowsInFourBits
