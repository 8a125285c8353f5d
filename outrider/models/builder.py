"""The process that builds compiled steps: `python -m outrider.models.builder RECIPE FOLDER`, of low priority, started by `compiled`."""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.core.errors import OutriderError
from outrider.core.types import MAX_NODES
from outrider.models import attention, load, microkernel
from outrider.models.compiled import SHAPES, Recipe, example
from outrider.models.package import INDEPENDENT, complete
from outrider.models.step import ATTENTION, Step, grouped_attention

IN_CODE = {"aot_inductor.package_constants_in_so": True, "aot_inductor.package_constants_on_disk_format": None}  # weights as a part of the code
PRODUCTS = ("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d")  # ways to multiply that are not `linear`


def build(step: Step, shape: str, frozen: bool, file: Path) -> None:
    """Export and compile one shape of a step, and put it in place when it is whole."""
    paired = microkernel.paired_rows() is not None and step.module.dtype == torch.bfloat16
    how: dict[str, Any] = {"freezing": frozen, "aot_inductor.package_constants_in_so": frozen, "cpp.enable_concat_linear": frozen}
    if frozen and (paired or shape == "one"):  # Inductor's own products, ours among them: at one row the faster in any dtype
        how |= {"max_autotune": True, "max_autotune_gemm_backends": "CPP"}
        how |= {"aot_inductor.package_constants_in_so": False, "aot_inductor.package_constants_on_disk_format": "pickle_weights"}  # to be shared
    draft = file.with_suffix(f".{os.getpid()}.pt2")
    own = attention.attention() if paired else None
    try:
        _compile(step, shape, how, draft, own or grouped_attention)
    except OutriderError:
        raise
    except Exception:
        if "max_autotune" not in how and own is None:
            raise
        how["max_autotune_gemm_backends"] = "CPP,ATEN"  # some product has no kernel of Inductor's own: seen with Gemma-2
        own = None
        _compile(step, shape, how, draft, grouped_attention)
    if not complete(draft):  # Inductor leaves some out that it made itself: seen with GPT-2
        _compile(step, shape, how | IN_CODE, draft, own or grouped_attention)
    draft.replace(file)


def _compile(step: Step, shape: str, how: dict[str, Any], file: Path, attend: Callable[..., Any]) -> None:
    """Raises OutriderError where the model's forward breaks the graph, and whatever Inductor raises."""
    dim = torch.export.Dim
    b, w, c, capacity = dim("b", min=1, max=64), dim("w", min=1, max=MAX_NODES), dim("c", min=1, max=2**20), dim("capacity", min=2, max=2**20)
    count, width = (1, 1) if shape == "one" else (3, 8)
    rows = [torch.zeros(count, *x.shape[1:], dtype=x.dtype) for x in step.store.rows(0, 1)]
    each: dict[int, Any] = {2: capacity} if shape == "one" else {0: b, 2: capacity}
    shapes = ({} if shape == "one" else {0: b, 1: w}, {0: c}, [each] * len(rows))
    inputs = (example(count, width, len(step.windows)), torch.arange(128), rows)
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    try:
        with torch.no_grad():
            program = torch.export.export(step, inputs, dynamic_shapes=shapes, strict=False, prefer_deferred_runtime_asserts_over_guards=True)
    except Exception as broken:
        raise OutriderError("eager:graph-break", f"{type(broken).__name__}: {broken}") from broken
    finally:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, grouped_attention)
    if "max_autotune" in how and _independent(program):
        how = how | {"aot_inductor.metadata": INDEPENDENT}
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs=how)


def _independent(program: torch.export.ExportedProgram) -> bool:
    """Are all products and all attention the house's own, whose rows hang on no other row and on no hidden slot? Products over one element are none."""
    called = [(str(node.target).split("."), node.args) for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    names = [name for (_, name, *_), _ in called]
    if "attend" not in names or any("scaled_dot" in name for name in names):
        return False
    for (_, name, *_), args in called:
        if name == "linear":
            n, k = args[1].meta["val"].shape
            if n % microkernel.BLOCK or k % 2:
                return False
        elif name in PRODUCTS and args[0].meta["val"].shape[-1] != 1:
            return False
    return True


def _step_back() -> None:
    """Run only when nobody else wants to, as far as the system lets a process say so."""
    os.nice(19)
    with contextlib.suppress(OSError, AttributeError):  # not Linux, or not allowed
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        Path("/proc/self/autogroup").write_text("19")  # a session of its own would else weigh as much as any other


def main(spec: str, folder: str) -> None:
    """The builder's process."""
    given = json.loads(spec)
    recipe = Recipe(**{**given, "frozen": tuple(given["frozen"])})
    _step_back()
    torch.set_num_threads(recipe.threads)
    try:
        step = load.wrap(load.load_module(Path(recipe.folder), recipe.dtype), "built", "", rows=1, context=256, tokens=recipe.vocab).step
        for shape in SHAPES:
            if not (Path(folder) / f"{shape}.pt2").exists():
                build(step, shape, shape in recipe.frozen, Path(folder) / f"{shape}.pt2")
    except Exception as failed:
        reason = failed.what if isinstance(failed, OutriderError) else "eager:not-compiled"
        Path(folder, "failed").write_text(f"{reason}\n{failed}", "utf-8")
        raise
    finally:
        Path(folder, "lock").unlink(missing_ok=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
