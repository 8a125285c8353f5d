"""A product of few rows by a packed matrix in bfloat16, for CPUs that multiply pairs (AVX512-BF16): Inductor's own kernels
widen to float32 first and take three times as long at eight rows. Registered with Inductor, which packs the weights,
splits the work between threads and fuses what follows; a row's result does not depend on how many there are.

Builds on Inductor's internal interface for such kernels: where that has changed there is none, and nothing is lost.
"""

import functools
from typing import Any

import torch

BLOCK = 64  # columns of a packed block: four accumulators a row

SOURCE = r"""
template <int ROWS, bool accum>
inline void {{kernel_name}}_rows(
    const {{input_t}}* {{restrict_keyword}} A, const {{input2_t}}* {{restrict_keyword}} B, {{output_t}}* {{restrict_keyword}} C,
    int64_t K, int64_t lda, int64_t ldb, int64_t ldc
) {
    constexpr int COLUMNS = 4;
    __m512 sum[ROWS][COLUMNS];
    _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; ++r)
        _Pragma("GCC unroll 4") for (int c = 0; c < COLUMNS; ++c)
            sum[r][c] = accum ? _mm512_loadu_ps(C + r * ldc + 16 * c) : _mm512_setzero_ps();
    for (int64_t k = 0; k < K; k += 2) {
        __m512bh b[COLUMNS];
        _Pragma("GCC unroll 4") for (int c = 0; c < COLUMNS; ++c)
            b[c] = (__m512bh)_mm512_loadu_si512((const void*)(B + k * ldb + 32 * c));
        _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; ++r) {
            int32_t pair;
            std::memcpy(&pair, A + r * lda + k, sizeof(pair));
            const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
            _Pragma("GCC unroll 4") for (int c = 0; c < COLUMNS; ++c)
                sum[r][c] = _mm512_dpbf16_ps(sum[r][c], a, b[c]);
        }
    }
    _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; ++r)
        _Pragma("GCC unroll 4") for (int c = 0; c < COLUMNS; ++c)
            _mm512_storeu_ps(C + r * ldc + 16 * c, sum[r][c]);
}
{{declare_kernel}} {
    for (int64_t m = 0; m < M;) {
        const int64_t rows = M - m > 6 ? 4 : M - m;  // up to six rows keep their sums in registers
        switch (rows) {
{%- for rows in range(1, 7) %}
            case {{rows}}: {{kernel_name}}_rows<{{rows}}, accum>(A + m * lda, B, C + m * ldc, K, lda, ldb, ldc); break;
{%- endfor %}
        }
        m += rows;
    }
}
"""


@functools.cache
def paired_rows() -> Any:
    """The kernel as Inductor knows them, registered there; None where this CPU or this torch cannot use it."""
    if not torch.cpu._is_avx512_bf16_supported():
        return None
    try:
        from torch._inductor import compile_fx, select_algorithm  # noqa: F401  (in this order: the next import is circular)
        from torch._inductor.codegen import cpp_micro_gemm
        from torch._inductor.cpu_vec_isa import VecAVX512

        inductor: Any = cpp_micro_gemm

        def fits(config: Any, m: Any, n: int, k: int, alpha: float, threads: int, **more: Any) -> bool:
            return k % 2 == 0 and n % BLOCK == 0 and alpha == 1

        class PairedRows(cpp_micro_gemm.CppMicroGemm):
            def codegen_define(self, kernel: Any) -> str:
                names = {"declare_kernel": self.get_kernel_declaration(), "kernel": kernel, **self.get_common_options()}
                text: str = inductor.KernelTemplate._template_from_string(SOURCE).render(names)
                return text

            def get_b_layout(self) -> Any:
                return inductor.LayoutType.VNNI2

        shape = inductor.generate_gemm_config(VecAVX512, [(8, BLOCK, 2)], input_dtype=torch.bfloat16, output_dtype=torch.float, extra_check=fits)
        inductor.register_micro_gemm(*shape)(PairedRows)
    except (ImportError, AttributeError, TypeError):
        return None
    return PairedRows
