"""What is kept on disk between processes, and the processes of low priority that build it. Imported before anything else: what takes long to
import is imported where it is needed."""

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from outrider.core.errors import OutriderError

UNUSED = 60 * 86_400.0  # seconds after which what carries a model's weights, and nobody took up, is removed
REMEDY = "OUTRIDER_CACHE=FOLDER, of one that can be written to"


def cache_place() -> Path:
    """Where what was built and measured is kept between processes: OUTRIDER_CACHE, or ~/.cache/outrider. Raises OutriderError where nobody's home
    is known and no other place is named."""
    try:
        return Path(os.environ.get("OUTRIDER_CACHE") or Path.home() / ".cache" / "outrider").absolute()
    except RuntimeError as homeless:
        raise OutriderError("there is no cache folder", str(homeless).rstrip("."), REMEDY) from homeless


def cache_folder() -> Path:
    """The same, and it is there. Raises OutriderError where nothing can be kept."""
    folder, why = cache_place(), "it cannot be written to"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except OSError as bad:
        why = bad.strerror or str(bad)
    raise OutriderError(f"the cache folder {folder} is of no use", why, REMEDY)


def contents(file: Path) -> bytes:
    """The hash of what is in a file, which is read once: its hash is kept for as long as its place, its size and its times stay what they are."""
    kept = _kept(file)
    with contextlib.suppress(OSError, ValueError):
        if len(found := bytes.fromhex(kept.read_text("ascii"))) == hashlib.blake2b().digest_size:
            return found
    with open(file, "rb") as f:
        made = hashlib.file_digest(f, "blake2b").digest()
    with contextlib.suppress(OSError):  # then it is read again
        kept.parent.mkdir(exist_ok=True)
        draft = kept.with_suffix(f".{os.getpid()}")
        draft.write_text(made.hex(), "ascii")
        draft.replace(kept)
    return made


def read_before(file: Path) -> bool:
    """Is the hash of its contents kept?"""
    return _kept(file).is_file()


def _kept(file: Path) -> Path:
    about = file.stat()
    mark = repr((str(file.absolute()), about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino))
    return cache_folder() / "contents" / hashlib.blake2b(mark.encode(), digest_size=12).hexdigest()


def used(folder: Path) -> None:
    """Note that what was built there is in use: what is not is removed one day."""
    with contextlib.suppress(OSError):  # somebody else's
        os.utime(folder)


def draft_name() -> str:
    """A name, in this process, of what is not whole yet."""
    return f".{os.getpid()}-{time.monotonic_ns()}"


def settle(file: Path) -> None:
    """What was written to it is on the disk, whatever becomes of the machine: a new name may be there before what it names."""
    with open(file, "r+b") as f:
        os.fsync(f.fileno())


def remove_left(folder: Path) -> None:
    """Remove what processes that were killed have left there under such names."""
    import shutil

    import psutil

    for draft in folder.glob(".*"):
        if (process := draft.name[1:].partition("-")[0]).isdecimal() and not psutil.pid_exists(int(process)):
            with contextlib.suppress(OSError):  # another process cleans, too
                shutil.rmtree(draft) if draft.is_dir() else draft.unlink()


def remove_unused(folders: Iterable[Path]) -> None:
    """Remove those that nobody has taken up for so long (UNUSED)."""
    for folder in folders:
        with contextlib.suppress(OSError):  # somebody else's, or gone
            if time.time() - folder.stat().st_mtime > UNUSED:
                remove(folder)


def remove(folder: Path) -> None:
    """Remove what was built; what another process finds is whole or not there. Raises OSError where it is somebody else's, or gone."""
    import shutil

    shutil.rmtree(folder.rename(folder.with_suffix(".gone")), ignore_errors=True)


def start(builder: str, *given: str, folder: Path) -> None:
    """Run the module `builder` in another process, which outlives this one. Its number stands in `lock`, what it says in `log`. Raises OSError where
    they cannot be written, and then there is no such process."""
    import subprocess

    with open(folder / "log", "ab") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", builder, *given], stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
        )  # fmt: skip
    try:
        (folder / "lock").write_text(str(child.pid))
    except BaseException:  # the next look would start another beside it
        child.kill()
        child.wait()
        raise


def held(builder: str, folder: Path) -> bool:
    """Is a living process building, of the number that stands in `lock`?"""
    import psutil

    try:
        process = psutil.Process(int((folder / "lock").read_text()))
        return builder in process.cmdline()  # numbers are given again, and one that has ended and is not forgotten has none
    except (OSError, ValueError, psutil.Error):
        return False


def step_back() -> None:
    """Run only when nobody else wants to, as far as the system lets a process say so."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux, or not allowed
        os.nice(19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        Path("/proc/self/autogroup").write_text("19")  # a session of its own would else weigh as much as any other
