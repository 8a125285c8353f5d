"""What this machine does in a second, measured once and kept: which dtype multiplies fastest, how fast memory is read.

Knows nothing of models. Figures hang on the processor, torch and its threads; another of these measures anew.
"""

import contextlib
import json
import logging
import math
import os
import platform
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from outrider.core.cache import cache_folder
from outrider.core.processor import name

SIDE, COUNT = 1024, 12  # the products timed: COUNT square matrices of SIDE, more than fits near one core
ROUNDS = 6  # times that every dtype is timed, in turn, so that what else the machine does meets all of them; the shortest counts
CPU = torch.device("cpu")
log = logging.getLogger("outrider")
VERSION = "2"  # of how it is measured


def fastest_dtype(candidates: tuple[str, ...]) -> str:
    """The dtype in which products of one and of eight rows take the least time in all; measured at the first call ever, and all of them anew
    where one was not measured yet."""
    known = _load()
    if not known["products"].keys() >= set(candidates):
        taken = {name: [math.inf, math.inf] for name in {**known["products"], **dict.fromkeys(candidates)}}
        for _ in range(ROUNDS):
            for name, least in taken.items():
                taken[name] = [min(before, _product_seconds(getattr(torch, name), rows)) for before, rows in zip(least, (1, 8), strict=True)]
        known["products"] = {name: sum(least) for name, least in taken.items()}
        _save(known)
    return min(candidates, key=lambda name: known["products"][name])


def bandwidth(device: torch.device = CPU, megabytes: int = 256) -> float:
    """Bytes a second that a sum over much more than the caches of a device reads; measured at every call."""
    x = torch.ones(megabytes << 18, device=device)  # 4 bytes each
    times = []
    for _ in range(5):
        start = time.perf_counter()
        x.sum().item()  # which waits for it
        times.append(time.perf_counter() - start)
    return x.nbytes / min(times)


def processor() -> str:
    """The GPU if there is one, else the processor, by its maker's name."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else name()


def _product_seconds(dtype: torch.dtype, rows: int) -> float:
    matrices = [torch.ones(SIDE, SIDE, dtype=dtype) for _ in range(COUNT)]
    x, times = torch.ones(rows, SIDE, dtype=dtype), []
    for _ in range(3):
        start = time.perf_counter()
        for matrix in matrices:
            F.linear(x, matrix)
        times.append(time.perf_counter() - start)
    return min(times)


def _where() -> Path:
    return cache_folder() / "machine.json"


def _key() -> dict[str, str]:
    return {
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} bfloat16 {torch.cpu._is_avx512_bf16_supported()}",
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "version": VERSION,
    }


def _load() -> dict[str, dict]:
    try:
        known: dict[str, dict] = json.loads(_where().read_text("utf-8"))
        if known["key"] == _key() and isinstance(known["products"], dict):
            return known
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent, of another machine or torch, or damaged: measured anew
    return {"key": _key(), "products": {}}


def _save(known: dict[str, dict]) -> None:
    draft = _where().with_suffix(f".{os.getpid()}")
    try:
        draft.write_text(json.dumps(known, indent=1), "utf-8")
        draft.replace(_where())
    except OSError as failed:
        log.warning("%s was not written (%s): it is measured anew at the next start", _where(), failed.strerror)
        with contextlib.suppress(OSError):
            draft.unlink()
