"""Integers of quantised layers on disk: a layer is rounded once, and a file of it is mapped ever after. Pages that nobody reads, or that nobody has read
for long, take no memory that somebody else asks for, and processes share them.

A layer is read, rounded and written before the next, so a model in fewer bits is nowhere whole. Invariants: a file that is there is whole; tensors begin
at multiples of 64 bytes, as torch lays out what it saves: its products of integers end the process where they do not (AVX512).
"""

import contextlib
import ctypes
import hashlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor

from outrider.core.cache import cache_folder, contents, draft_name, read_before, remove_left, remove_unused, settle, used
from outrider.core.errors import OutriderError
from outrider.models.files import weight_files

VERSION = 3  # of the ways to round and to lay out: raise it when a file of before must not be read
SPARE = 1.1  # times what is written must be free on the disk
log = logging.getLogger("outrider")


def place_of(folder: Path, kind: str, dtype: str) -> Path:
    """Where those of a model's folder lie: a hash of all that they depend on. What torch packs, it packs for a processor, and transformers may turn what
    it loads. Raises OutriderError where nothing can be kept."""
    about = (VERSION, torch.__version__, transformers.__version__, torch.backends.cpu.get_cpu_capability(), kind, dtype)
    digest = hashlib.blake2b(repr(about).encode(), digest_size=12)
    for file in _files(folder):
        digest.update(contents(file))
    return cache_folder() / "integers" / digest.hexdigest()


def keepable(folder: Path, kind: str, dtype: str, size: int) -> bool:
    """Are all of them, of so many bytes, on disk, or is there room for them? Where only reading the weights would tell, as if none were there."""
    try:
        place = place_of(folder, kind, dtype) if all(map(read_before, _files(folder))) else None
        return SPARE * (size - _size(place)) <= shutil.disk_usage(cache_folder()).free
    except (OSError, OutriderError):
        return False


def _files(folder: Path) -> list[Path]:
    return [folder / "config.json", *weight_files(folder)]


def _size(place: Path | None) -> int:
    return sum(file.stat().st_size for file in place.glob("*.pt")) if place else 0


class Mapped:
    """The integers of one model. Call it with a layer's name, what rounds it and what knows such integers: they are found on disk, or written there and
    found."""

    def __init__(self, folder: Path, kind: str, dtype: str, size: int) -> None:
        """size: bytes of all of them. What cannot be kept is rounded anew at every start, and held; that is said."""
        self.place: Path | None = None
        self.keeps = True
        try:
            place = place_of(folder, kind, dtype)
            place.mkdir(parents=True, exist_ok=True)
            used(place)
            remove_left(place)
            remove_unused(place.parent.iterdir())
            missing, self.place = size - _size(place), place
            if missing > size // 2:
                log.warning("%s is rounded (%s) and written as %s, once: %.2f GB", folder.name, kind, place, size / 1e9)
            if SPARE * missing > (free := shutil.disk_usage(place).free):
                raise OSError(f"{missing / 1e9:.2f} GB are to be written, and {free / 1e9:.2f} GB are free")
        except (OSError, OutriderError) as bad:
            self._give_up(bad)

    def __call__(self, name: str, rounded: Callable[[], dict[str, Tensor]], fit: Callable[[dict[str, Tensor]], bool]) -> dict[str, Tensor]:
        file = (self.place or Path()) / f"{name}.pt"
        if self.place:
            try:
                if fit(found := _read(file)):
                    return found
                raise OSError("it holds other numbers than belong there")
            except FileNotFoundError:
                pass
            except Exception as damaged:  # whatever is made of such bytes
                log.warning("%s is damaged, or cannot be read (%s), and is made anew", file, damaged)
        made = rounded()
        made = self._kept(file, made) if self.keeps else made
        _give_back()
        return made

    def _kept(self, file: Path, made: dict[str, Tensor]) -> dict[str, Tensor]:
        draft = file.with_name(draft_name())
        try:
            _write(made, draft)
            settle(draft)
            draft.replace(file)
            return _read(file)
        except (OSError, RuntimeError) as bad:
            self._give_up(bad)
            return made
        finally:
            draft.unlink(missing_ok=True)

    def _give_up(self, bad: Exception) -> None:
        self.keeps = False
        log.warning("integers of weights are not kept on disk, but held, and rounded anew at every start: %s", str(bad).splitlines()[0])


def _read(file: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(file, "cpu", weights_only=True, mmap=True)
    return found


def _write(made: dict[str, Tensor], file: Path) -> None:
    with file.open("wb") as out:  # told a path, torch would write its name, too
        torch.save(made, out)


def _give_back() -> None:
    """What is freed goes back to the system: libc would keep twice the size of all layers."""
    with contextlib.suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)
