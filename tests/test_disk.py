"""Packages on a disk that is full, may not be written to, or holds what is damaged: they cost their own steps, and no text."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import packages
import pytest
from contracts import plain, request
from packages import PROMPT, model_of, recipe_of, texts_and_tiers

import outrider
from outrider.core.cache import start
from outrider.core.errors import OutriderError
from outrider.models import compiled
from outrider.models.compiled import SHAPES, Compiled

even, folder, builder = packages.even, packages.folder, packages.builder
cache, started = packages.cache, packages.started
FULL = OSError(errno.ENOSPC, "No space left on device")


def full(*_: object, **__: object) -> None:
    raise FULL


def test_a_damaged_package_is_not_used(folder, cache, started):
    recipe, model = recipe_of(folder), model_of(folder)
    model.compiled = Compiled(recipe, model.step)
    model.compiled.folder.mkdir(parents=True)
    for shape in SHAPES:
        (model.compiled.folder / f"{shape}.pt2").write_bytes(b"PK damaged")
    assert len(plain(model, [request(PROMPT, max_tokens=3)])[0]) == 3 and model.meter.tier.startswith("eager:")


@pytest.mark.parametrize("where", ["folder", "log", "hash", "weights", "note"])
def test_a_full_disk_keeps_no_text_from_being_written(folder, cache, started, monkeypatch, caplog, where):
    """Building is a matter of the house's; who asked for a text gets it, and is told why it comes slowly."""
    want = texts_and_tiers(outrider.load(folder, [], compile="off", dtype="float32"))[0]
    compiled._say_once.cache_clear()
    monkeypatch.setattr(compiled, "POLL", 0.0)
    rt = outrider.load(folder, [], dtype="float32")
    found = rt.engine.target.compiled
    with monkeypatch.context() as patch, caplog.at_level("WARNING", "outrider"):
        if where == "folder":
            patch.setattr(Path, "mkdir", full)
        elif where == "log":
            patch.setattr(compiled, "start_builder", full)
        elif where == "hash":
            patch.setattr(compiled, "cache_folder", lambda: (_ for _ in ()).throw(OutriderError("the cache folder is of no use", "full", "another")))
        elif where == "weights":
            found.found = None
            patch.setattr(compiled, "contents", full)
        else:
            found.folder.mkdir(parents=True)
            (found.folder / "failed").write_text("eager:not-compiled\nthe disk is full")
            os.utime(found.folder / "failed", (0, 0))
            patch.setattr(Path, "unlink", full)
        texts, tiers = texts_and_tiers(rt)
        found.wait()
    assert texts == want and "eager:no-cache" in tiers and not set(tiers) - {"eager:no-cache", "eager:building"} and not started
    assert caplog.text.count("nothing can be kept") == 1


def test_a_damaged_package_that_stays_is_not_used_either(folder, cache, started, monkeypatch, caplog):
    model = model_of(folder)
    model.compiled = Compiled(recipe_of(folder), model.step)
    model.compiled.folder.mkdir(parents=True)
    (model.compiled.folder / "any.pt2").write_bytes(b"PK damaged")
    monkeypatch.setattr(Path, "unlink", full)
    monkeypatch.setattr(compiled, "POLL", 0.0)
    with caplog.at_level("WARNING", "outrider"):
        assert len(plain(model, [request(PROMPT, max_tokens=5)])[0]) == 5
    assert model.meter.tier == "eager:package-damaged" and caplog.text.count("cannot be used") == 1


def test_a_builder_whose_number_cannot_be_written_down_does_not_stay(tmp_path, monkeypatch):
    """Another start would not see it, and build beside it."""
    begun, popen = [], subprocess.Popen

    def child(*_: object, **how: object) -> subprocess.Popen:
        begun.append(popen([sys.executable, "-c", "import time; time.sleep(600)"], **how))
        return begun[0]

    monkeypatch.setattr(subprocess, "Popen", child)
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        start(compiled.BUILDER, folder=tmp_path)
    try:
        assert len(begun) == 1 and begun[0].poll() is not None
    finally:
        begun[0].kill()
