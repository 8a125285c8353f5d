"""The host's part of a step in machine code: the modules that run between two forwards, made C extensions of by mypyc.

Another process builds them, of low priority, from the sources that are imported otherwise, and keeps them on disk under the hash of these; from the
next start on, importing outrider finds them there first. So nothing stale is ever run: who edits a module has Python again until it is built.
What means something else in machine code is not written there: `==` of two dataclasses is `is`.
Standard library only: this is imported before anything else.
"""

import hashlib
import importlib
import logging
import os
import shutil
import sys
import time
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

from outrider.core import cache
from outrider.core.errors import OutriderError

MODULES = {
    "core": "noise sampling tree types",
    "control": "accounts controller explain guard hedge past plans predict rows siblings sleep starts step tables",
    "measure": "cost trace",
    "verify": "exact host",
    "drafters": "lookup model suffix",
    "models": "chain compiled contention hf kv package",  # not exits: a torch module that passes on what it lacks (`__getattr__`, `super`) recurs without end there
    "compiler": "forest jit step",
    "runtime": "batcher ending engine",
}
RACES = "outrider.core.races"  # beside them: C, which nothing is the Python of
HERE = Path(__file__).parents[1]
KINDS = (".py", ".pyi", ".c", ".h")  # of sources
BUILDER = "outrider.runtime.native_builder"
SWITCH = "OUTRIDER_HOST"  # python: whatever was built; a folder: what lies there
LATER = "120"  # seconds after which a build begins that nobody waits for: what was loaded for a moment is not disturbed
AGAIN = 3600.0  # seconds after which what failed is tried again
log = logging.getLogger("outrider")


def sources() -> list[Path]:
    """Files of the modules that are built."""
    return [HERE / room / f"{name}.py" for room, names in MODULES.items() for name in names.split()]


def place(root: Path = HERE) -> Path:
    """The folder of what is built of the package at `root` for this interpreter: a hash of both, all modules of the rooms included, for what one says
    of its types is built into others."""
    digest = hashlib.blake2b(f"{EXTENSION_SUFFIXES} {sys.version}".encode(), digest_size=12)
    for room in MODULES:
        for file in sorted(file for file in (root / room).iterdir() if file.suffix in KINDS):
            digest.update(file.read_bytes())
    return cache.cache_place() / "host" / digest.hexdigest()


class Finder:
    """Finds modules in a folder where they were built. One of `sys.meta_path`."""

    def __init__(self, folder: Path) -> None:
        suffix = EXTENSION_SUFFIXES[0]
        self.files = {".".join(file.relative_to(folder).parts).removesuffix(suffix): file for file in folder.rglob(f"*{suffix}")}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder` says."""
        return spec_from_file_location(name, self.files[name]) if name in self.files else None

    def load(self) -> None:
        """The code of them all, which is in one library. Raises ImportError where it cannot be, or where a module is missing: one in Python among
        these would not be what the others take it for."""
        wanted = [f"outrider.{room}.{name}" for room, names in MODULES.items() for name in names.split()]
        missing = [name for name in (*wanted, RACES) if name not in self.files]
        libraries = [name for name in self.files if name.endswith("__mypyc")]
        if missing or len(libraries) != 1:
            raise ImportError(f"it is not whole: {len(libraries)} libraries, {missing} missing")
        importlib.import_module(libraries[0])
        importlib.import_module(RACES)


class Host:
    """What runs the host's part in this process. `tier`: native, or why it is Python."""

    def __init__(self) -> None:
        self.tier = "python:not-built"

    def find(self) -> None:
        """Import from what was built, from now on, if it is there and whole. To be called before the first of the modules is imported."""
        given = os.environ.get(SWITCH, "")
        if given == "python":
            self.tier = "python:off"
            return
        try:
            folder = Path(given) if given else place() / "built"
            if folder.is_dir():
                self._use(folder)
            elif given:
                self.tier = "python:no-such-folder"
                log.warning("%s=%s is no folder: the host's part of a step stays in Python. Try: python, or leaving it out", SWITCH, given)
        except (OSError, RuntimeError, OutriderError):  # sources in an archive; a home that is not to be read; nobody's home
            self.tier = "python:no-cache"

    def _use(self, folder: Path) -> None:
        finder: Any = Finder(folder)
        sys.meta_path.insert(0, finder)
        try:
            finder.load()
        except ImportError as broken:
            sys.meta_path.remove(finder)
            self.tier = "python:not-loadable"
            log.warning("the host's part of a step stays in Python: %s cannot be loaded (%s)", folder, broken)
            return
        self.tier = "native"
        if not os.environ.get(SWITCH):
            cache.used(folder.parent)  # so it is not the oldest

    def ask(self) -> None:
        """See to it that they are being built, for the next start. Who cannot have them is told why, once."""
        if self.tier != "python:not-built":
            return
        try:
            self.tier = _begun(place())
        except (OSError, OutriderError) as bad:
            self.tier = "python:no-cache"
            log.warning("the host's part of a step stays in Python: nothing can be kept (%s)", bad)


def _begun(folder: Path) -> str:
    """The tier until the next start, for which the modules are being built, if they can be."""
    if (folder / "built").is_dir():
        return "python:until-next-start"
    if shutil.which(os.environ.get("CC", "cc").split()[0]) is None:
        return "python:no-compiler"
    if _failed(folder):
        return "python:not-compiled"
    if not cache.held(BUILDER, folder):
        cache.cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        cache.start(BUILDER, LATER, folder=folder)
    return "python:building"


def _failed(folder: Path) -> bool:
    """Did building fail, less than an hour ago?"""
    file = folder / "failed"
    if not file.exists() or time.time() - file.stat().st_mtime > AGAIN:
        file.unlink(missing_ok=True)
        return False
    why = file.read_text("utf-8")[:200]
    log.warning("the host's part of a step stays in Python: it could not be built (%s). More in %s", why, folder / "log")
    return True


host = Host()
