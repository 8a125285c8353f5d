"""Puts known bugs back into a copy of the package, one at a time, and checks that the test which guards it fails.

`make mutants` runs all; arguments pick pitfalls by their code: `python tests/mutants.py A5 B2`. Each entry of
tests/mutants/*.toml names a pitfall, a file, the right text, the bug and the guarding test; `needs`: what the processor must have for that test to
see it. Exit code 1 if a bug lives.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).parent
HAS = ["avx512_bf16"] if torch.cpu._is_avx512_bf16_supported() else []


def survives(mutant: dict[str, str]) -> str | None:
    """None if the test failed as it should, else what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copytree(HERE.parent / "outrider", root / "outrider", ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
        shutil.copytree(HERE, root / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        file = root / mutant["file"]
        text = file.read_text()
        if text.count(mutant["old"]) != 1:
            return f"'{mutant['old'][:50]}' occurs {text.count(mutant['old'])} times in {mutant['file']}"
        file.write_text(text.replace(mutant["old"], mutant["new"]))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "", mutant["test"]]
        done = subprocess.run(
            command, cwd=root, env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
        return None if done.returncode == 1 else f"{mutant['test']} exited with {done.returncode}: {done.stdout.strip()[-200:]}"


def main(picks: list[str]) -> int:
    mutants = [m for f in sorted((HERE / "mutants").glob("*.toml")) for m in tomllib.loads(f.read_text())["mutant"]]
    if unknown := sorted(set(picks) - {m["pitfall"] for m in mutants}):
        sys.exit(f"there are no bugs of {', '.join(unknown)}: the codes stand in {HERE / 'mutants'}/*.toml")
    mutants = [m for m in mutants if not picks or m["pitfall"] in picks]
    for mutant in [m for m in mutants if m.get("needs") not in (None, *HAS)]:
        print(f"{mutant['pitfall']:4} left    {mutant['about']}: this processor has no {mutant['needs']}")
        mutants.remove(mutant)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(survives, mutants))
    for mutant, problem in zip(mutants, found, strict=True):
        print(f"{mutant['pitfall']:4} {'caught' if problem is None else 'LIVES'}  {mutant['about']}{'' if problem is None else ': ' + problem}")
    lives = sum(p is not None for p in found)
    print(f"{len(mutants) - lives} of {len(mutants)} bugs caught")
    return int(lives > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
