"""The host's part of a step in machine code: the modules that run between two forwards, made C extensions of by mypyc.

Another process builds them, of low priority, from the sources that are imported otherwise, and keeps them on disk under the hash of these; from the
next start on, importing outrider finds them there first. So nothing stale is ever run: who edits a module has Python again until it is built.
Standard library only: this is imported before anything else.
"""

import hashlib
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

MODULES = {
    "core": "noise sampling tree types",
    "control": "accounts controller explain guard hedge predict rows starts step tables",
    "measure": "cost trace",
    "verify": "host",
    "drafters": "lookup model suffix",
    "models": "exits hf kv",
    "compiler": "forest jit step",
    "runtime": "batcher ending engine",
}
HERE = Path(__file__).parents[1]
BUILDER = "outrider.runtime.native_builder"
SWITCH = "OUTRIDER_HOST"  # python: whatever was built; a folder: what lies there
AGAIN = 3600.0  # seconds after which what failed is tried again
log = logging.getLogger("outrider")


def sources() -> list[Path]:
    """Files of the modules that are built."""
    return [HERE / room / f"{name}.py" for room, names in MODULES.items() for name in names.split()]


def place() -> Path:
    """The folder of what is built of these sources for this interpreter: a hash of both."""
    digest = hashlib.blake2b(f"{EXTENSION_SUFFIXES} {sys.version}".encode(), digest_size=12)
    for file in [Path(__file__), *sources()]:
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


class Host:
    """What runs the host's part in this process. `tier`: native, or why it is Python."""

    def __init__(self) -> None:
        self.tier = "python:not-built"

    def find(self) -> None:
        """Import from what was built, from now on, if it is there. To be called before the first of the modules is imported."""
        given = os.environ.get(SWITCH, "")
        folder = place() / "built" if given in ("", "python") else Path(given)
        if given == "python":
            self.tier = "python:off"
        elif folder.is_dir():
            sys.meta_path.insert(0, Finder(folder))  # type: ignore[arg-type]
            self.tier = "native"

    def ask(self) -> None:
        """See to it that they are being built, for the next start. Who cannot have them is told why, once."""
        if self.tier != "python:not-built":
            return
        folder = place()
        if (folder / "built").is_dir():
            self.tier = "python:until-next-start"
        elif shutil.which(os.environ.get("CC", "cc")) is None:
            self.tier = "python:no-compiler"
        elif _failed(folder):
            self.tier = "python:not-compiled"
        else:
            self.tier = "python:building"
            if not cache.held(BUILDER, folder):
                cache.cache_folder()
                folder.mkdir(parents=True, exist_ok=True)
                cache.start(BUILDER, folder=folder)


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
