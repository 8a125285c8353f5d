"""What a GPU alone can tell: where the host waited for it, and the energy that it took. On a CPU both are unknown, never zero.

Knows nothing of models. Energy is the driver's own counter, of the whole device and all that runs on it.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from outrider.core.types import Reading

WAITED = "called a synchronizing CUDA operation"  # as torch's debug mode puts it; copies of pageable memory that the driver holds up escape it
COVERS = "the whole GPU, all that runs on it"
ABSENT = "none: its counter is read by nvidia-ml-py (pip install outrider[gpu])"


@contextmanager
def waits(device: torch.device) -> Iterator[list[str]]:
    """A list that holds, once this is left, a place in the code (`file:line`) for every time that the host waited for a CUDA device.

    Slow: each wait is a warning. For one thread at a time, since torch's debug mode and Python's warnings are the process's.
    """
    found: list[str] = []
    if device.type != "cuda":
        yield found
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
            found += [f"{w.filename}:{w.lineno}" for w in told if WAITED in str(w.message)]


class DeviceMeter:
    """A Meter of one device: seconds, and the joules that its driver counted (NVML; a tenth of a second fine, Volta and later). Where there is no
    such counter joules are None, and `source` of the reading says why."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @contextmanager
    def window(self) -> Iterator[list[Reading]]:
        count, source = _counter(self.device)
        readings: list[Reading] = []
        start, before = time.perf_counter(), count() if count else 0.0
        yield readings
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        joules = count() - before if count else None
        readings.append(Reading(time.perf_counter() - start, joules, source, COVERS if count else ""))


@cache
def _counter(device: torch.device) -> tuple[Callable[[], float] | None, str]:
    """What reads the joules of a device since its driver was loaded, and where from; or None, and why not."""
    if device.type != "cuda":
        return None, f"none: no counter of a {device.type}"
    try:
        import pynvml
    except ImportError:
        return None, ABSENT
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode())
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as missing:
        return None, f"none: {missing}"
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, "NVML"
