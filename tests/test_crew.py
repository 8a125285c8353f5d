"""Threads of a package: every part of a kernel is done once and by whom libgomp says, whoever waits for whom, and libgomp is asked once a call."""

import os
import subprocess
from types import SimpleNamespace

import pytest
import torch

from outrider.models import compiled, room
from outrider.models.crew import CREW

KERNELS = """
#include <chrono>
#include <omp.h>
#include <thread>
// Twice over n things; between the loops everybody looks at what the others did. Returns what was not as it should be.
int kernel(int n, int threads, int slow) {
    int done[1024] = {0}, seen[64] = {0}, ones = 0, wrong = 0, team = 0;
    #pragma omp parallel num_threads(threads)
    {
        const int id = omp_get_thread_num();
        if (id == slow) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        #pragma omp for
        for (int i = 0; i < n; i++) done[i] += 1;
        for (int i = 0; i < n; i++) seen[id] += done[i];
        #pragma omp single
        { ones++; team = omp_get_num_threads(); }
        #pragma omp for schedule(static, 1)
        for (int i = 0; i < n; i++) done[i] += 1;
    }
    for (int i = 0; i < n; i++) wrong += done[i] != 2;
    for (int id = 0; id < threads; id++) wrong += seen[id] < n;
    return wrong + (ones != 1) + (team != threads);
}
int usual(int n) {
    int ids = 0;
    #pragma omp parallel
    {
        #pragma omp atomic
        ids += 1 + 100 * omp_get_thread_num();
    }
    return ids;
}
int nested(int n) {
    int wrong = 0;
    #pragma omp parallel num_threads(2)
    {
        const int inside = kernel(n, 1, -1);
        #pragma omp atomic
        wrong += inside;
    }
    return wrong;
}
"""

CALLS = """
#include <atomic>
#include <cstdio>
#include <dlfcn.h>
#include <thread>
int kernel(int n, int threads, int slow), usual(int n), nested(int n);
std::atomic<int> asked{0};
extern "C" void GOMP_parallel_start(void (*task)(void*), void* data, unsigned threads) {
    asked++;
    reinterpret_cast<void (*)(void (*)(void*), void*, unsigned)>(dlsym(RTLD_NEXT, "GOMP_parallel_start"))(task, data, threads);
}
static int call(int kernels, int threads) {
    Crew crew;
    int wrong = 0;
    for (int k = 0; k < kernels; k++) wrong += kernel(k, threads, -1);
    return wrong;
}
static void say(const char* what, int found) {
    std::printf("%s %d of %d\\n", what, found, asked.exchange(0));
}
int main() {
    say("call", call(900, 2));
    say("calls", call(100, 3) + call(100, 1) + call(100, 4));
    { Crew crew; say("usual", usual(0)); }
    say("alone", kernel(100, 2, -1) + kernel(100, 3, -1));
    { Crew crew; say("change", kernel(50, 2, -1) + kernel(50, 3, -1) + kernel(50, 1, -1) + kernel(50, 2, -1)); }
    { Crew crew; say("slow", kernel(50, 2, 0) + kernel(50, 2, 1)); }
    { Crew crew; const int wrong = nested(50) + kernel(50, 2, -1); asked = 0; say("nested", wrong); }
    int both[2];
    std::thread other([&] { both[0] = call(500, 2); });
    both[1] = call(500, 2);
    other.join();
    say("two at once", both[0] + both[1]);
}
"""


def with_gcc() -> bool:
    """Is the compiler GCC? Others' runtimes are left as they are."""
    if not compiled.has_compiler():
        return False
    names = subprocess.run(
        [os.environ.get("CXX", "g++"), "-dM", "-E", "-x", "c++", "-"], input="", capture_output=True, text=True, check=False
    ).stdout
    return "__GNUC__" in names and "__clang__" not in names


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Kernels in a file of their own, as in a package."""
    at = tmp_path_factory.mktemp("crew")
    (at / "kernels.cpp").write_text(KERNELS)
    (at / "calls.cpp").write_text(CREW + CALLS)
    how = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-fPIC", "-fopenmp", "-o", "calls", "calls.cpp", "kernels.cpp", "-ldl"]
    subprocess.run(how, cwd=at, check=True)
    return at / "calls"


@pytest.mark.skipif(not with_gcc(), reason="no GCC")
@pytest.mark.parametrize("threads", ["1", "2", "5"])
def test_every_part_is_done_once_and_libgomp_is_asked_once_a_call(program, threads):
    """More threads than processors come to an end, too."""
    told = subprocess.run([program], env={**os.environ, "OMP_NUM_THREADS": threads}, capture_output=True, text=True, timeout=120, check=True).stdout
    found = {what: (int(got), int(times)) for what, got, _, times in [line.rsplit(" ", 3) for line in told.splitlines()]}
    n = int(threads)
    wrong = {"call": 0, "calls": 0, "usual": n + 100 * (n * (n - 1) // 2), "alone": 0, "change": 0, "slow": 0, "nested": 0, "two at once": 0}
    asked = {"call": 1, "calls": 3, "usual": 1, "alone": 2, "change": 4, "slow": 1, "nested": 0, "two at once": 2}
    assert found == {what: (wrong[what], asked[what]) for what in wrong}


@pytest.mark.parametrize("called, crew", [
    ("cpp_fused_mm_1(room.take<float>(8)); auto a = aoti_torch_empty_strided(2);", True),
    ("cpp_fused_mm_1(buf0); aoti_torch_cpu_mm_out(buf1, buf0, buf0);", False),
    ("aoti_torch_proxy_executor_call_function(proxy_executor, 0);", False),
])  # fmt: skip
def test_a_call_with_kernels_of_torch_has_no_crew(called, crew, monkeypatch):
    """They would have one thread."""
    writer = room.writer()
    writes, header, prefix = writer.__new__(writer), list[str](), list[str]()
    writes.stack_allocated_buffers, writes.wrapper_call = {}, SimpleNamespace(getvalue=lambda: called)
    writes.header, writes.prefix = SimpleNamespace(splice=header.append), SimpleNamespace(writeline=prefix.append)
    monkeypatch.setattr(writer.__mro__[1], "generate_return", lambda self, refs: None)
    with torch._inductor.virtualized.V.set_graph_handler(SimpleNamespace(get_output_names=lambda: ["buf1"])):
        writes.generate_return(["buf1"])
    assert (header, prefix) == (([CREW], ["Crew crew;"]) if crew else ([], []))
