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
from outrider.measure.machine import processor
from outrider.runtime.native import host


def commit(folder: Path) -> str | None:
    """That of a checkout, `-dirty` where anything but docs was edited since: one table is no edit for the next. None: there is no checkout, or no git."""

    def git(*asked: str) -> str:
        return subprocess.run(["git", *asked], cwd=folder, capture_output=True, text=True, check=False).stdout.strip()

    try:
        name, edited = git("describe", "--always"), git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs")
    except FileNotFoundError:
        return None
    return name + ("-dirty" if edited else "") if name else None


RUN = commit(Path(__file__).parent)  # what runs is what was there when it was imported


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
    """name.json and name.md below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(data + "\n")
    (folder / f"{name}.md").write_text(text + "\n")
