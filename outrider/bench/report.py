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


def provenance() -> dict[str, Any]:
    """Where a figure comes from."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip() or None, "command": " ".join([Path(sys.argv[0]).name, *(Path(a).name if a.startswith("/") else a for a in sys.argv[1:])]), "machine": processor(), "system": platform.platform(),
        "threads": torch.get_num_threads(), "host": host.tier, "torch": torch.__version__, "transformers": transformers.__version__, "outrider": outrider.__version__,
        "scikit-learn": find_spec("sklearn") is not None,  # with it, stock's dynamic setting adapts its threshold
    }  # fmt: skip


def save_as(folder: Path, name: str, data: str, text: str) -> None:
    """name.json and name.md below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(data + "\n")
    (folder / f"{name}.md").write_text(text + "\n")
