"""Integers of quantised layers on disk: a layer is rounded once, and a file of it is mapped ever after. Pages that nobody reads, or that nobody has read
for long, take no memory that somebody else asks for, and processes share them.

A layer is read, rounded and written before the next, so a model in fewer bits is nowhere whole. Invariant: a file that is there is whole.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.core.cache import cache_folder, contents, remove_unused, used
from outrider.core.errors import OutriderError
from outrider.models.files import weight_files

VERSION = 1  # of the ways to round and to lay out: raise it when a file of before must not be read
SPARE = 1.1  # times what is written must be free on the disk
log = logging.getLogger("outrider")


def place_of(folder: Path, kind: str, dtype: str) -> Path:
    """Where those of a model's folder lie: a hash of all that they depend on. What torch packs, it packs for a processor. Raises OutriderError where
    nothing can be kept."""
    digest = hashlib.blake2b(repr((VERSION, torch.__version__, torch.backends.cpu.get_cpu_capability(), kind, dtype)).encode(), digest_size=12)
    for file in weight_files(folder):
        digest.update(contents(file))
    return cache_folder() / "integers" / digest.hexdigest()


class Mapped:
    """The integers of one model. Call it with a layer's name and what rounds it: they are found on disk, or written there and found."""

    def __init__(self, folder: Path, kind: str, dtype: str, size: int) -> None:
        """size: bytes of all of them. Where they cannot be kept every start rounds anew, and holds them; that is said."""
        self.place: Path | None = None
        try:
            place = place_of(folder, kind, dtype)
            place.mkdir(parents=True, exist_ok=True)
            used(place)
            missing = size - sum(file.stat().st_size for file in place.glob("*.safetensors"))
            if missing > size // 2:
                log.warning("%s is rounded (%s) and written as %s, once: %.2f GB", folder.name, kind, place, size / 1e9)
            if SPARE * missing > (free := shutil.disk_usage(place).free):
                raise OSError(f"{missing / 1e9:.2f} GB are to be written, and {free / 1e9:.2f} GB are free")
            remove_unused(place.parent.glob("*"))
            self.place = place
        except (OSError, OutriderError) as bad:
            self._give_up(bad)

    def __call__(self, name: str, rounded: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        if self.place is None:
            return rounded()
        file = self.place / f"{name}.safetensors"
        if file.exists():
            try:
                return _read(file)
            except (OSError, SafetensorError) as damaged:
                log.warning("%s is damaged (%s) and written anew", file, damaged)
        made = rounded()
        draft = file.with_suffix(f".{os.getpid()}")
        try:
            save_file(made, draft)
            del made
            draft.replace(file)
            _give_back()
            return _read(file)
        except (OSError, SafetensorError) as bad:
            draft.unlink(missing_ok=True)
            self._give_up(bad)
            return rounded()

    def _give_up(self, bad: Exception) -> None:
        self.place = None
        log.warning("integers of weights are not kept on disk, and rounded anew at every start: %s", str(bad).splitlines()[0])


def _read(file: Path) -> dict[str, Tensor]:
    with safe_open(file, "pt") as held:
        return {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118  (no mapping)


def _give_back() -> None:
    """What is freed goes back to the system: libc would keep twice the size of all layers."""
    with contextlib.suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)
