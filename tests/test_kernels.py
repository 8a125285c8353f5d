"""What a kernel makes of its rows, once for all blocks of columns, in C++ by itself."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from outrider.models import four_bits, microkernel

STUB = "#include <immintrin.h>\n#include <cstdint>\n#include <cstring>\n#include <vector>\n#include <algorithm>\nnamespace at { struct BFloat16 { uint16_t x; }; }\n"
TORCH = "#include <ATen/cpu/vec/vec.h>\n#include <vector>\n#include <algorithm>\n"
# A row of 4096 inputs in pieces, as Inductor's loop over blocks of columns gives them, without a stride, for there is one row; what it holds is changed meanwhile.
MAIN = """
#include <cstdio>
at::BFloat16 x[4096], y[4096], z[3 * 64];
void fill(at::BFloat16* row, int64_t n, uint16_t bits) { for (int64_t i = 0; i < n; ++i) std::memcpy(row + i, &bits, 2); }
int main() {
    MADE made;
    const auto tell = [&](const at::BFloat16* row) {
        double sum = 0;
        for (int64_t k = 0; k < 4096; k += 1632) sum += SUM(made(row + k, 1, std::min<int64_t>(1632, 4096 - k), 0), std::min<int64_t>(1632, 4096 - k));
        std::printf("%.0f ", sum);
    };
    fill(x, 4096, 0x3f80), fill(y, 4096, 0x4040);  // 1 and 3
    tell(x);
    fill(x, 4096, 0x4000);  // 2, which nobody may see before other rows were read
    tell(x), tell(x), tell(y), tell(x);
    for (int64_t m = 0; m < 3; ++m) fill(z + 64 * m, 64, 0x4000 + 0x80 * m);  // 2, 4, 8
    made(z, 3, 32, 64);
    double sum = 0;
    for (int64_t m = 0; m < 3; ++m) sum += ROW(made(z + 32, 3, 32, 64), m);
    std::printf("%.0f\\n", sum);
}
"""
KINDS = {
    "floats": (
        TORCH + microkernel.SOURCE.split("{%- if widened %}", 1)[1].split("{%- endif %}", 1)[0],
        "Floats", "[](const float* a, int64_t n) { double s = 0; for (int64_t i = 0; i < n; ++i) s += a[i]; return s; }",
        "[&](const float* a, int64_t m) { return 32.0 * a[m * made.step + 31]; }",
    ),
    "rounded": (
        STUB + four_bits.SOURCE.split("template <int ROWS", 1)[0].replace("{{group}}", str(four_bits.GROUP)),
        "Rounded<at::BFloat16>", "[](const Group* a, int64_t n) { double s = 0; for (int64_t i = 0; i < n / 32; ++i) s += a[i].sum; return s; }",
        "[](const Group* a, int64_t m) { return a[m].sum; }",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not microkernel.has_kernels(torch.bfloat16) or not shutil.which("g++"), reason="no such kernel, or no compiler")
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_in_pieces_is_made_once_for_all_blocks(kind: str, tmp_path: Path) -> None:
    """A single row was made anew for each block of columns: a step of a 1B shape took half as long again."""
    source, made, total, row = KINDS[kind]
    (tmp_path / "main.cpp").write_text(source + MAIN.replace("MADE", made).replace("SUM(", f"({total})(").replace("ROW(", f"({row})("))
    include = [f"-I{path}" for path in cpp_extension.include_paths()]
    how = ["-std=c++20", "-O1", "-mavx2", "-mfma", "-DCPU_CAPABILITY_AVX2", "-DCPU_CAPABILITY=AVX2", *include]
    subprocess.run(["g++", *how, "main.cpp", "-o", "main"], cwd=tmp_path, check=True)
    told = [int(x) for x in subprocess.run([tmp_path / "main"], check=True, capture_output=True, text=True).stdout.split()]
    assert told == [4096, 4096, 4096, 3 * 4096, 2 * 4096, 32 * (2 + 4 + 8)]
