"""The process that builds compiled steps: `python -m outrider.models.builder RECIPE FOLDER`, of low priority, started by `compiled`."""

import contextlib
import functools
import importlib
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from outrider.core.cache import cache_place, held, remove_unused, step_back
from outrider.core.errors import OutriderError
from outrider.core.types import MAX_NODES
from outrider.models import attention, load, room
from outrider.models.compiled import BUILDER, LONG, NOT_COMPILED, PREFILL, SHAPES, STEPS, Recipe, example
from outrider.models.four_bits import four_bits
from outrider.models.layers import turning
from outrider.models.microkernel import BLOCK, DEEP, few_rows
from outrider.models.package import INDEPENDENT, complete, leave_out, weights_of
from outrider.models.quantised import FourBits, QuantisedLinear, house_products, inexact
from outrider.models.step import Prefill, Step, attending, grouped_attention

INSIDE, APART = "aot_inductor.package_constants_in_so", "aot_inductor.package_constants_on_disk_format"
BESIDE, IN_CODE = {INSIDE: False, APART: "pickle_weights"}, {INSIDE: True, APART: None}  # weights beside the code can be shared
TUNED = [{"max_autotune": True, **BESIDE, "max_autotune_gemm_backends": some} for some in ("CPP", "CPP,ATEN")]  # Gemma-2 has products that need ATEN
STACK = "aot_inductor.allow_stack_allocation"  # what lies between kernels is not made and freed tensor by tensor, which takes a twentieth of a step
STACKED = TUNED[0] | {STACK: True}
EXAMPLE = {"any": (3, 8), "one": (1, 1), PREFILL: (1, LONG)}  # rows and columns that a shape is exported and tuned with
ROOM = 256  # tokens of the row that they are exported with; how many there are is a symbol
WEIGHED = ("linear", "_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu")  # ways to multiply by a layer's weights
TURNS = {"cos", "sin"}  # of positions: what is worked out once for all heads and layers that read it
PRODUCTS = ("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d")  # ways to multiply that are not `linear`


def build(step: Step, shape: str, frozen: bool, file: Path) -> None:
    """Export and compile one shape of a step, and put it in place when it is whole. What cannot be compiled in one way is tried in the next."""
    fast = _has_kernels(step.module)
    joins = frozen and not inexact(step.module)  # Inductor would join them as what torch packs
    how: dict[str, Any] = {"freezing": frozen, INSIDE: frozen, "cpp.enable_concat_linear": joins}
    ways = (
        [*[STACKED] * (shape in STEPS), *TUNED, {}] if frozen and (fast or shape == "one") else [{}]
    )  # Inductor's products, at one row the faster in any dtype; then oneDNN's
    attends = [own, grouped_attention] if fast and (own := attention.attention(step.module.dtype)) else [grouped_attention]
    tries, draft, failed = list(itertools.product(attends, ways)), file.with_suffix(f".{os.getpid()}.pt2"), ""
    while tries:
        attend, way = tries.pop(0)
        try:
            slower = attend is not attends[0] or not way or (inexact(step.module) and not _of_the_house(way))  # than it might be
            note = {"note": failed} if failed and slower else {}
            _compile(step, shape, how | way, draft, attend, note)
            if not complete(draft):  # Inductor leaves some out that it made itself: seen with GPT-2
                _compile(step, shape, how | way | IN_CODE, draft, attend, note)
            break
        except Exception as error:
            traceback.print_exc()  # into the log beside the packages
            failed = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
            tries = [t for t in tries if not (isinstance(error, OutriderError) and t[0] is attend)]  # no way helps where the forward breaks the graph
            if not tries:
                raise
    with contextlib.suppress(OSError):  # no room for two: then it carries them
        leave_out(draft, weights_of(Prefill(step) if shape == PREFILL else step))
    draft.replace(file)


def _has_kernels(module: Any) -> bool:
    """Are there the house's kernels for all linear layers? They are known to Inductor from now on."""
    kinds, dtype = {type(part) for part in module.modules()}, module.dtype
    kernels = [few_rows(dtype), *[few_rows(dtype, torch.int8)] * (QuantisedLinear in kinds), *[four_bits(dtype)] * (FourBits in kinds)]
    return None not in kernels


def _of_the_house(way: dict[str, Any]) -> bool:
    """Are all products of the kernels that Inductor makes, or knows from here?"""
    return way.get("max_autotune_gemm_backends") == "CPP"


def _compile(step: Step, shape: str, how: dict[str, Any], file: Path, attend: Callable[..., Any], note: dict[str, str]) -> None:
    """note: what the package says of itself. Raises OutriderError where the model's forward breaks the graph, and whatever Inductor raises."""
    count, width = EXAMPLE[shape]
    rows = [torch.zeros(count, *x.shape[1:], dtype=x.dtype) for x in step.store.rows(0, 1)]
    inputs, house = (example(count, width, len(step.windows)), torch.arange(max(128, width)), rows), _of_the_house(how)
    try:
        with torch.no_grad(), attending(attend), house_products(step.module, house):
            program = torch.export.export(
                Prefill(step) if shape == PREFILL else step, inputs, dynamic_shapes=_symbols(shape, len(rows)), strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )  # fmt: skip
    except Exception as broken:
        raise OutriderError("eager:graph-break", f"{type(broken).__name__}: {broken}") from broken
    if house and _independent(program):
        note = note | INDEPENDENT
    with torch.no_grad(), room.kept(bool(how.get(STACK))), _named(), _parsed(), _turned_once():
        torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs={**how, "aot_inductor.metadata": note})


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """What Inductor makes of weights gets a name of its own. It counts those that there are, from which it takes some away meanwhile: of two with the
    same name a package has one. In each build the same, so that packages share what is the same. Where Inductor names them otherwise, nothing is done."""
    graph: Any = importlib.import_module("torch._inductor.graph").GraphLowering
    usual, made = getattr(graph, "allocate_non_dup_const_name", None), itertools.count()
    if usual is None:
        yield
        return
    graph.allocate_non_dup_const_name = lambda self, name, data: usual(self, name or f"made{next(made)}", data)
    try:
        yield
    finally:
        graph.allocate_non_dup_const_name = usual


@contextlib.contextmanager
def _parsed() -> Iterator[None]:
    """Inductor parses its templates, and the indices in them, anew for each product of each layer: a quarter of what it takes to write a deep model's
    code. Here each is parsed once; what is written is the same. Where Inductor has them otherwise, nothing is done."""
    importlib.import_module("torch._inductor.graph")  # and with it all others
    common, kernel = (sys.modules.get(f"torch._inductor.codegen.{name}") for name in ("common", "cpp_template_kernel"))
    places: list[tuple[Any, str]] = [(getattr(common, "KernelTemplate", None), "_template_from_string"), (kernel, "parse_expr")]
    usual = [(place, name, vars(place)[name]) for place, name in places if name in getattr(place, "__dict__", ())]
    for place, name, _ in usual:
        once = functools.cache(getattr(place, name))
        setattr(place, name, staticmethod(once) if isinstance(place, type) else once)
    try:
        yield
    finally:
        for place, name, was in usual:
            setattr(place, name, was)


@contextlib.contextmanager
def _turned_once() -> Iterator[None]:
    """Cosines and sines of positions are what all heads of all layers turn by. Inductor counts exponentials among what is not worked out anew by each
    who reads it, but not these. Where it decides that otherwise, nothing is done."""
    box: Any = getattr(importlib.import_module("torch._inductor.ir"), "StorageBox", None)
    usual = getattr(box, "should_realize_on_reuse", None)
    if usual is None:
        yield
        return

    def heavy(self: Any, users: int, **how: Any) -> bool:
        return bool(usual(self, users, **how)) or (users > 1 and not TURNS.isdisjoint(_operations(self.data)))

    box.should_realize_on_reuse = heavy
    try:
        yield
    finally:
        box.should_realize_on_reuse = usual


def _operations(data: Any) -> set[str]:
    """Those of a buffer of Inductor's that is not made yet."""
    counted = getattr(data, "inner_fn_opcount", None)
    return set(counted().used_ops) if counted is not None else set()


def _symbols(shape: str, tensors: int) -> tuple[Any, ...]:
    """What of the inputs of a step may have any size: as many `tensors` as hold a row's keys and values."""
    dim = torch.export.Dim
    b, w, c, capacity = dim("b", min=1, max=64), dim("w", min=1, max=MAX_NODES), dim("c", min=1, max=2**20), dim("capacity", min=2, max=2**20)
    table = {"any": {0: b, 1: w}, "one": {}, PREFILL: {1: dim("text", min=1, max=2**20)}}
    row: dict[int, Any] = {0: b, 2: capacity} if shape == "any" else {2: capacity}
    return table[shape], {0: c}, [row] * tensors


def _independent(program: torch.export.ExportedProgram) -> bool:
    """Are all products and all attention of kernels whose rows hang on no other row and on no hidden slot? The house's own are such, and Inductor's
    of tiles (AMX), which it takes where the processor has them: each row is summed in one order. Where there is less than a block for each thread,
    sums are split. Of tiles and weights in 8 bits nobody has seen it. Products over one element are no sums."""
    tiles = torch.cpu._is_amx_tile_supported()
    called = [(str(node.target).split("."), node.args) for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    names = [name for (_, name, *_), _ in called]
    if "attend" not in names or any("scaled_dot" in name for name in names):
        return False
    for (_, name, *_), args in called:
        if name in WEIGHED:
            n, k = args[1].meta["val"].shape
            k *= 2 if name == "_weight_int4pack_mm_for_cpu" else 1  # two in a byte
            if n % BLOCK or k % DEEP or n < BLOCK * torch.get_num_threads() or (tiles and name == "_weight_int8pack_mm"):
                return False
        elif name in PRODUCTS and args[0].meta["val"].shape[-1] != 1:
            return False
    return True


def main(spec: str, folder: str) -> None:
    """The builder's process."""
    given = json.loads(spec)
    recipe = Recipe(**{**given, "frozen": tuple(given["frozen"])})
    step_back()
    torch.set_num_threads(recipe.threads)
    try:
        module = load.load_module(Path(recipe.folder), recipe.dtype, recipe.quantise)
        end, _ = turning(module.config) or (ROOM, "")
        step = load.wrap(module, "built", "", rows=1, context=min(ROOM, end), tokens=recipe.vocab).step
        for shape in SHAPES:
            if not (Path(folder) / f"{shape}.pt2").exists():
                build(step, shape, shape in recipe.frozen, Path(folder) / f"{shape}.pt2")
    except Exception as failed:
        reason = failed.what if isinstance(failed, OutriderError) else NOT_COMPILED
        Path(folder, "failed").write_text(f"{reason}\n{failed}", "utf-8")
        raise
    finally:
        for left in (Path(folder, "lock"), *Path(folder).glob(f"*.{os.getpid()}.pt2")):
            left.unlink(missing_ok=True)
    _clean(Path(folder))


def _clean(folder: Path) -> None:
    """Remove the packages beside these that nobody takes up: they carry a model's weights."""
    if folder.parent != cache_place() / "steps":
        return
    remove_unused(other for other in folder.parent.iterdir() if other != folder and other.is_dir() and not held(BUILDER, other))


if __name__ == "__main__":
    main(*sys.argv[1:])
