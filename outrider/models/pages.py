"""Weights on huge pages. A step reads all of them from end to end: on pages of 4 KB that is a page walk for each 4 KB, and on a virtual machine two
in one. Many Linux systems give huge pages to those who ask, and to nobody else.
"""

import contextlib
import mmap
from collections.abc import Mapping

import torch
from torch import Tensor

HUGE, LINE = 2 << 20, 64  # bytes of a huge page, and of a cache line, to which tensors are aligned


def together(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that lie one behind the other on huge pages, by name; what is one tensor under two names stays one. Those on a device, those with gaps,
    and all where the system knows no such pages or has no room, are given back as they are. The memory is freed with the last of the copies."""
    once = {_where(t): t for t in tensors.values() if t.device.type == "cpu" and t.is_contiguous() and t.nbytes}
    if not once or not hasattr(mmap, "MADV_HUGEPAGE"):
        return dict(tensors)
    try:
        arena = mmap.mmap(-1, sum([_lines(t) for t in once.values()]) + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no room for copies
        return dict(tensors)
    with contextlib.suppress(OSError):  # a kernel built without them: ordinary pages
        arena.madvise(mmap.MADV_HUGEPAGE)
    at, moved = -torch.frombuffer(arena, dtype=torch.uint8).data_ptr() % HUGE, {}
    for where, tensor in once.items():
        moved[where] = torch.frombuffer(arena, dtype=tensor.dtype, count=tensor.numel(), offset=at).view(tensor.shape).copy_(tensor)
        at += _lines(tensor)
    return {n: moved.get(_where(t), t) for n, t in tensors.items()}


def _where(tensor: Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _lines(tensor: Tensor) -> int:
    """Bytes of the cache lines that it fills."""
    return -(-tensor.nbytes // LINE) * LINE
