"""The profile of a pair on a machine: what was measured and learned, kept between processes as a JSON file to be read by people.

A profile belongs to the models, the machine, the settings and the libraries that its `fingerprint` names; any other is
refused with the names of what differs. Writers take turns and merge: what one learned is added to what others wrote
meanwhile. A damaged profile is set aside, never overwritten; any other file that somebody named is refused and left
alone. Knows nothing of what the numbers mean.
"""

import fcntl
import hashlib
import json
import logging
import math
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from outrider.core.cache import cache_folder, cache_place
from outrider.core.errors import OutriderError
from outrider.measure.machine import processor

VERSION = 1  # of the file's layout
HEAD = re.compile(rb'\s*\{\s*"version"')  # how a profile begins, whatever became of the rest
SAMPLE, SAMPLES = 1 << 14, 16  # bytes, and places of a weight file from its beginning to its end, that tell models apart
log = logging.getLogger("outrider")

Json = dict[str, Any]


def fingerprint(models: dict[str, Path | None], **settings: Any) -> dict[str, str]:
    """What a profile hangs on. models: name -> folder, None for a drafter without one."""
    return {
        **{f"model {name}": _digest(folder) if folder else "-" for name, folder in models.items()},
        "processor": f"{platform.machine()} {processor()} {torch.backends.cpu.get_cpu_capability()}",
        "cores": str(os.cpu_count()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "-",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{key: str(value) for key, value in settings.items()},
    }


def _digest(folder: Path) -> str:
    """A model by its config and by samples of its weights."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")]):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as f:
            for n in range(SAMPLES):
                f.seek(max(0, size - SAMPLE) * n // (SAMPLES - 1))
                digest.update(f.read(SAMPLE))
    return digest.hexdigest()


def place(mark: dict[str, str]) -> Path:
    """Where the profile of a fingerprint lies."""
    name = hashlib.blake2b(json.dumps([VERSION, mark], sort_keys=True).encode(), digest_size=10).hexdigest()
    return cache_folder() / "profiles" / f"{name}.json"


def load(file: Path, mark: dict[str, str]) -> Json | None:
    """What a profile holds; None if there is none, or if it could not be read and was set aside.

    Raises OutriderError for a profile of something else, with the keys that differ.
    """
    try:
        found = _read(file)
    except _Damaged:
        with _mending(file):
            found = _whole(file)
    return _own(file, mark, found)


def _own(file: Path, mark: dict[str, str], found: Json | None) -> Json | None:
    """What a file holds, if it is the profile of that."""
    if found is None:
        return None
    other, mark = {**found["fingerprint"], "version": str(found["version"])}, {**mark, "version": str(VERSION)}
    differing = sorted(key for key in {*other, *mark} if other.get(key) != mark.get(key))
    if differing:
        told = "; ".join(f"{key}: {other.get(key)!r} there, {mark.get(key)!r} here" for key in differing)
        raise OutriderError(f"{file} is the profile of something else", told, "profile='auto', or a new one by `outrider profile`")
    data: Json = found["data"]
    return data


class _Damaged(Exception):
    """It was a profile."""


def _read(file: Path) -> Json | None:
    raw = b""
    try:
        raw = file.read_bytes()
        found = json.loads(raw.decode())
        if all(isinstance(found[key], kind) for key, kind in (("version", int), ("fingerprint", dict), ("data", dict))) and _numbers(found["data"]):
            whole: Json = found
            return whole
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass
    except OSError as unreadable:
        raise OutriderError(f"{file} cannot be read", str(unreadable), "another file, or profile='off'") from unreadable
    if raw and not HEAD.match(raw) and not file.absolute().is_relative_to(cache_place()):
        raise OutriderError(f"{file} is no profile", "it is left as it is", "another file, or profile='auto'")
    raise _Damaged


def _numbers(data: Any) -> bool:
    """Is all that it holds a finite number, by name or in lists?"""
    if isinstance(data, dict | list):
        return all(map(_numbers, data.values() if isinstance(data, dict) else data))
    return isinstance(data, int | float) and math.isfinite(data)


def _whole(file: Path) -> Json | None:
    """What a file holds in this process's turn: one that another has mended meanwhile is read, one that is damaged set aside."""
    try:
        return _read(file)
    except _Damaged:
        _rename(file)
        return None


def set_aside(file: Path, data: Json) -> None:
    """Keep what holds nonsense, `data`, under another name; not what another process has written in its place."""
    with _mending(file):
        found = _whole(file)
        if found is not None and found["data"] == data:
            _rename(file)


def _rename(file: Path) -> None:
    """Keep what cannot be read under another name, and say so."""
    aside = file.with_name(f"{file.name}.damaged-{time.time_ns():x}")
    try:
        file.rename(aside)
    except FileNotFoundError:
        return  # another process was quicker
    log.warning("%s is no whole profile: it was set aside as %s and is made anew", file, aside.name)


def save(file: Path, mark: dict[str, str], data: Json, base: Json) -> Json:
    """Write what is known now. `base`: what this writer knew when it last read or wrote; what it learned since is added to
    what the file holds by now. Returns a copy of `data`, the next base."""
    file.parent.mkdir(parents=True, exist_ok=True)
    own: Json = json.loads(json.dumps(data))
    with _turn(file):
        there = _own(file, mark, _whole(file))
        whole = own if there is None or there == base else merged(there, own, base)
        draft = file.with_name(f"{file.name}.new")  # of one name: what a writer left that was killed is overwritten
        try:
            draft.write_text(json.dumps({"version": VERSION, "fingerprint": mark, "data": whole}, indent=1), "utf-8")
            draft.replace(file)
        except BaseException:  # a full disk is no fuller for it
            draft.unlink(missing_ok=True)
            raise
    return own


@contextmanager
def _turn(file: Path) -> Iterator[None]:
    """One writer at a time."""
    with file.with_name(f"{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _mending(file: Path) -> Iterator[None]:
    """A turn of one who only reads."""
    try:
        with _turn(file):
            yield
    except OSError as unable:
        raise OutriderError(f"{file} is damaged and cannot be set aside", str(unable), "another file, or profile='off'") from unable


def merged(theirs: Any, mine: Any, base: Any) -> Any:
    """`theirs` and what `mine` added to `base`. A whole number is a count. A list is numbers that begin with how many
    observations they stand for; what `mine` added to their sum is added to that of `theirs`. The mean lies between the two: counts may have a most, and
    means forget, so sums do not tell all. What counts less than before was measured anew, and stands."""
    if mine == base:
        return theirs
    if isinstance(mine, dict):
        theirs, base = (x if isinstance(x, dict) else {} for x in (theirs, base))
        return {key: merged(theirs[key], mine[key], base.get(key)) if key in theirs and key in mine else theirs.get(key, mine.get(key))
                for key in {**theirs, **mine}}  # fmt: skip
    if (
        isinstance(mine, list)
        and isinstance(theirs, list)
        and len(mine) == len(theirs)
        and all(isinstance(x, (int, float)) for x in [*mine, *theirs])
    ):
        old = base if isinstance(base, list) and len(base) == len(mine) else [0] * len(mine)
        added = mine[0] - old[0]
        total = theirs[0] + added
        if theirs == base or added < 0 or total <= 0:
            return mine
        sums = [(theirs[0] * a + mine[0] * b - old[0] * c) / total for a, b, c in zip(theirs, mine, old, strict=True)][1:]
        return [total, *(min(max(x, min(a, b)), max(a, b)) for x, a, b in zip(sums, theirs[1:], mine[1:], strict=True))]
    if type(mine) is type(theirs) is int:  # a bare count
        return theirs + max(mine - (base if type(base) is int else 0), 0)
    return mine
