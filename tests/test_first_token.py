"""What a first token does not wait for: weights are read once, to find what was built of them, and not before it."""

import os
from pathlib import Path

import packages
import pytest
from packages import DTYPE, model_of, recipe_of
from test_building import insist

import outrider
from outrider.core import cache as kept
from outrider.models import compiled
from outrider.models.compiled import Compiled

even, folder, builder = packages.even, packages.folder, packages.builder
cache, started = packages.cache, packages.started


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Names of files whose contents were hashed."""
    names: list[str] = []
    whole = kept.hashlib.file_digest

    def digest(file, kind):
        names.append(Path(file.name).name)
        return whole(file, kind)

    monkeypatch.setattr(kept.hashlib, "file_digest", digest)
    return names


def test_a_model_never_seen_is_read_after_its_first_token(folder, cache, started, monkeypatch, reads):
    """To find its packages takes reading all its weights: whoever waits for a first token does not wait for that."""
    monkeypatch.setattr(compiled, "POLL", 0.0)
    model = model_of(folder)
    found = Compiled(recipe_of(folder), model.step)
    assert reads == [] and found.building and found.reason == "eager:building"
    assert found.get(1, 1) is None
    insist(found)
    assert sorted(reads) == ["config.json", "model.safetensors"] and len(started) == 1
    again = Compiled(recipe_of(folder), model.step)
    assert len(reads) == 2 and again.found is not None, "a file that was read is not read again, and its packages are looked for at once"


def test_the_first_token_does_not_wait_for_weights_to_be_read(folder, cache, started, reads):
    rt = outrider.load(folder, [], dtype=DTYPE)
    seq = rt.engine.submit(rt.request([1, 2, 3], max_tokens=4))
    rt.engine.step()
    assert len(seq.tokens) == 4 and "model.safetensors" not in reads


def test_the_hash_of_a_file_is_kept_until_the_file_is_another(tmp_path, cache, reads):
    file = tmp_path / "weights"
    file.write_bytes(b"abc")
    first = kept.contents(file)
    assert kept.contents(file) == first and reads == ["weights"] and kept.read_before(file)
    (note,) = (cache / "contents").iterdir()
    for damaged in ("", "no number", "abcd"):
        note.write_text(damaged)
        assert kept.contents(file) == first
    assert kept.contents(file) == first and len(reads) == 4, "what was damaged is mended"
    file.write_bytes(b"abd")
    os.utime(file, ns=(1, 1))
    assert not kept.read_before(file) and kept.contents(file) != first
