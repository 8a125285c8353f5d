"""What every report of a measurement has: where its figures come from, and two files, for machines and for people."""

import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

import outrider
from outrider.core.cache import draft_name
from outrider.measure.machine import processor
from outrider.runtime.native import host


def commit(file: Path) -> str | None:
    """That of the checkout which a file of the package belongs to, `-dirty` where anything but docs was edited since, or a file of the package is not in
    it: one table is no edit for the next. None: there is no checkout (it may be installed below another's), or no git."""

    def git(*asked: str) -> str:
        return subprocess.run(["git", *asked], cwd=file.parent, capture_output=True, text=True, check=False).stdout.strip()

    try:
        if not git("ls-files", "--", file.name):
            return None
        edited = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs")
        more = git("ls-files", "--others", "--exclude-standard", "--", "..")
        return git("describe", "--always") + ("-dirty" if edited or more else "")
    except FileNotFoundError:
        return None


RUN = commit(Path(__file__))  # what runs is what was there when it was imported


def provenance() -> dict[str, Any]:
    """Where a figure comes from."""
    command = [Path(sys.argv[0]).name, *(Path(a).name if a.startswith("/") else a for a in sys.argv[1:])]
    return {
        "commit": RUN, "command": " ".join(command), "machine": processor(), "system": platform.platform(),
        "threads": torch.get_num_threads(), "host": host.tier, "torch": torch.__version__, "transformers": transformers.__version__,
        "outrider": outrider.__version__,
        "scikit-learn": find_spec("sklearn") is not None,  # with it, stock's dynamic setting adapts its threshold
    }  # fmt: skip


def save_as(folder: Path, name: str, data: str, text: str) -> None:
    """name.json and name.md below `folder`: whole, or as they were."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, content in (("json", data), ("md", text)):
        draft = folder / f"{draft_name()}.{kind}"
        try:
            draft.write_text(content + "\n", "utf-8")
            draft.replace(folder / f"{name}.{kind}")
        finally:
            draft.unlink(missing_ok=True)
