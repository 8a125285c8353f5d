"""Which processor this is: what was compiled for one, or chosen by the clock of one, is not another's."""

import functools
import platform
import re
from pathlib import Path

LISTED = Path("/proc/cpuinfo")


@functools.cache
def name() -> str:
    """As its maker calls it, where the system tells."""
    return _told("model name") or platform.processor() or platform.machine()


@functools.cache
def instructions() -> str:
    """What it can do, by the system's words in alphabetical order. Compilers that are told to build for this machine use any of it."""
    told = _told("flags") or _told("Features")
    return " ".join(sorted(told.split())) or name()


def _told(key: str) -> str:
    found = re.search(rf"^{key}\s*: (.*)", LISTED.read_text("utf-8"), re.MULTILINE) if LISTED.exists() else None
    return found[1] if found else ""
