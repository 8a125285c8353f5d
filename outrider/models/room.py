"""Where a package keeps what lies between its kernels: on the stack where sizes are fixed, else in room that is kept from call to call.

Inductor makes a tensor of each and frees it. Its own writer of calls with buffers on the stack is derived from here: it also takes sizes that are
known only when the package runs. Builds on Inductor's internal interface, as `microkernel` does. What a package gives is never kept: it would lie
where its next call writes. It writes down, too, whose threads serve a call (`crew`).
"""

import contextlib
import importlib
import re
from collections.abc import Iterator
from typing import Any

from outrider.models.crew import CREW

ROOM = """
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>
namespace {
constexpr size_t KEPT = 4 << 20, LINE = 64;  // bytes
thread_local struct Kept {
    char* const at = static_cast<char*>(std::aligned_alloc(LINE, KEPT));
    ~Kept() { std::free(at); }
} kept;
// Room for one call. What does not fit into what is kept lies elsewhere until the call is over.
class Room {
    size_t used = 0;
    std::vector<void*> more;

public:
    template <typename T>
    T* take(int64_t numbers) {
        const size_t bytes = (numbers * sizeof(T) + LINE - 1) / LINE * LINE;
        if (kept.at && used + bytes <= KEPT) return reinterpret_cast<T*>(kept.at + std::exchange(used, used + bytes));
        void* const some = std::aligned_alloc(LINE, bytes);
        if (!some) throw std::bad_alloc();
        more.push_back(some);
        return static_cast<T*>(some);
    }
    ~Room() {
        for (void* some : more) std::free(some);
    }
};
}  // namespace
"""

MAKES = {"aoti_torch_empty_strided"}  # what is called of torch between kernels that computes nothing


@contextlib.contextmanager
def kept(on: bool) -> Iterator[None]:
    """Who writes a package's calls is chosen by its configuration, too, but once a process."""
    if not on:
        yield
        return
    inductor: Any = importlib.import_module("torch._inductor.codegen.common")
    inductor.init_backend_registration()
    cpu = inductor.device_codegens["cpu"]
    before, cpu.cpp_wrapper_codegen = cpu.cpp_wrapper_codegen, writer()
    try:
        yield
    finally:
        cpu.cpp_wrapper_codegen = before


def writer() -> Any:
    """Inductor's class that writes calls with buffers on the stack, for these buffers."""
    written: Any = importlib.import_module("torch._inductor.codegen.cpp_wrapper_cpu_array_ref")
    graph: Any = importlib.import_module("torch._inductor.virtualized").V
    contiguous: Any = importlib.import_module("torch._inductor.ir").is_contiguous_strides_for_shape

    class Writer(written.CppWrapperCpuArrayRef):  # type: ignore[misc]
        declared = False  # is there room in the call that is being written?

        @staticmethod
        def create(*_: Any, **__: Any) -> "Writer":
            return Writer()

        def write_header(self) -> None:
            super().write_header()
            self.header.splice(ROOM)

        def can_stack_allocate_buffer(self, buffer: Any) -> bool:
            on_cpu = self.allow_stack_allocation and buffer.get_device().type == "cpu"
            return on_cpu and buffer.get_name() not in graph.graph.get_output_names() and contiguous(buffer.get_stride(), buffer.get_size())

        def make_allocation(self, name: str, device: Any, dtype: Any, shape: Any, stride: Any, buffer: Any = None, *more: Any) -> str:
            if buffer is None or self.can_prove_buffer_has_static_shape(buffer):
                return str(super().make_allocation(name, device, dtype, shape, stride, buffer, *more))
            write = self.wrapper_call.writeline
            if not self.declared:
                write("Room room;")
            self.declared = True
            self.stack_allocated_buffers[name] = buffer
            kind, numbers = written.DTYPE_TO_CPP[dtype], self.codegen_sizevar(buffer.get_numel())
            sizes, strides = (
                self.codegen_int_array_var(self.codegen_shape_tuple(x), write, graph=self.get_codegened_graph()) for x in (shape, stride)
            )
            lies = f"MiniArrayRef<{kind}>(room.take<{kind}>({numbers}), {numbers})"
            return f"ArrayRefTensor<{kind}> {name}({lies}, {sizes}, {strides}, {self.codegen_device(device)});"

        def generate_return(self, output_refs: list[str]) -> None:
            if shared := set(graph.graph.get_output_names()) & set(self.stack_allocated_buffers):
                raise RuntimeError(f"{sorted(shared)} would be given from the stack")  # in memory used a second time
            if not set(re.findall(r"aoti_torch_\w+(?=\()", self.wrapper_call.getvalue())) - MAKES:
                self.header.splice(CREW)
                self.prefix.writeline("Crew crew;")
            super().generate_return(output_refs)

    return Writer
