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
# A row of 4096 inputs in pieces, as Inductor's loop over blocks of columns gives them, without a stride, for there is one row; what it holds is changed
# meanwhile, which nobody may see before other rows were read, before it in memory or behind. Then pairs of rows, one pair behind the other.
MAIN = """
#include <cstdio>
struct { at::BFloat16 before[4096], gap[64], x[4096], more[64], behind[4096], pairs[4 * 64]; } m;
void fill(at::BFloat16* row, int64_t n, uint16_t bits) { for (int64_t i = 0; i < n; ++i) std::memcpy(row + i, &bits, 2); }
int main() {
    const uint16_t one = 0x3f80, two = 0x4000, three = 0x4040, four = 0x4080;
    {
        MADE made;
        const auto tell = [&](const at::BFloat16* row) {
            double sum = 0;
            for (int64_t k = 0; k < 4096; k += 1632) sum += SUM(made(row + k, 1, std::min<int64_t>(1632, 4096 - k), 0), std::min<int64_t>(1632, 4096 - k));
            std::printf("%.0f ", sum / 4096);
        };
        fill(m.x, 4096, one), tell(m.x);
        fill(m.x, 4096, two), tell(m.x), tell(m.x);
        for (auto other : {m.before, m.behind}) {
            fill(other, 4096, three), tell(other), tell(m.x);
            fill(other, 4096, four), tell(other), tell(m.x);
        }
    }
    {
        MADE made;
        for (int64_t r = 0; r < 4; ++r) fill(m.pairs + 64 * r, 64, two + 0x80 * r);  // 2, 4, 8, 16
        for (int64_t pair : {0, 1, 0})
            for (int64_t r = 0; r < 2; ++r) {
                double sum = 0;
                for (int64_t k : {0, 32}) sum += ROW(made(m.pairs + 128 * pair + k, 2, 32, 64), r);
                std::printf("%.0f ", sum / 64);
            }
    }
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
    """Nobody says how long a single row is: its second piece was taken for another row, and all was made anew for each block."""
    source, made, total, row = KINDS[kind]
    (tmp_path / "main.cpp").write_text(source + MAIN.replace("MADE", made).replace("SUM(", f"({total})(").replace("ROW(", f"({row})("))
    include = [f"-I{path}" for path in cpp_extension.include_paths()]
    how = ["-std=c++20", "-O1", "-mavx2", "-mfma", "-DCPU_CAPABILITY_AVX2", "-DCPU_CAPABILITY=AVX2", *include]
    subprocess.run(["g++", *how, "main.cpp", "-o", "main"], cwd=tmp_path, check=True)
    told = [int(x) for x in subprocess.run([tmp_path / "main"], check=True, capture_output=True, text=True).stdout.split()]
    assert told == [1, 1, 1, *[3, 2, 4, 2] * 2, 2, 4, 8, 16, 2, 4]
