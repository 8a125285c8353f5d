"""Profiles: what is kept comes back, what is another pair's is refused by name, what is damaged is set aside, and writers
that take turns lose nothing."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_folder

from outrider.core.config import LoadSettings
from outrider.core.errors import OutriderError
from outrider.measure import profile
from outrider.runtime import assemble

MARK = {"model target": "a1", "threads": "1", "dtype": "float32"}
DATA = {"costs": {"seen": {"0": [3.0, 0.25]}, "slope": 0.125}, "drafts": 7}


def counted(n: float, mean: float = 1.0) -> dict[str, list[float]]:
    return {"cell": [n, mean]}


# --- one writer


def test_what_is_saved_comes_back(tmp_path):
    file = tmp_path / "deep" / "down" / "p.json"
    assert profile.load(file, MARK) is None
    base = profile.save(file, MARK, DATA, {})
    assert profile.load(file, MARK) == base == DATA and base is not DATA
    assert {f.name for f in file.parent.iterdir()} == {"p.json", "p.json.lock"}, "no half-written file stays"


def test_a_writer_alone_replaces_what_it_wrote(tmp_path):
    file = tmp_path / "p.json"
    base = profile.save(file, MARK, counted(4, 1.0), {})
    profile.save(file, MARK, counted(6, 2.0), base)
    assert profile.load(file, MARK) == counted(6, 2.0)


def test_a_copy_is_returned_so_that_learning_on_does_not_change_the_base(tmp_path):
    data = counted(4)
    base = profile.save(tmp_path / "p.json", MARK, data, {})
    data["cell"][0] = 9
    assert base == counted(4)


@pytest.mark.parametrize("change", [{"model target": "b2"}, {"threads": "2", "dtype": "bfloat16"}, {"model draft": "c3"}], ids=str)
def test_a_refusal_names_every_key_that_differs_and_no_other(tmp_path, change):
    file = tmp_path / "p.json"
    profile.save(file, MARK, DATA, {})
    with pytest.raises(OutriderError) as refused:
        profile.load(file, {**MARK, **change})
    text = str(refused.value)
    assert [key for key in {**MARK, **change, "version": ""} if f"{key}: " in text] == list(change)
    assert all(f"{key}: {MARK.get(key)!r} there, {value!r} here" in text for key, value in change.items())
    with pytest.raises(OutriderError):
        profile.load(file, {"threads": "1"})
    assert profile.load(file, MARK) == DATA, "a refused file stays as it is"


def test_a_profile_of_another_layout_is_refused_and_auto_looks_elsewhere(tmp_path, monkeypatch):
    file, place = tmp_path / "p.json", profile.place(MARK)
    profile.save(file, MARK, DATA, {})
    monkeypatch.setattr(profile, "VERSION", profile.VERSION + 1)
    with pytest.raises(OutriderError, match=f"version: '{profile.VERSION - 1}' there, '{profile.VERSION}' here"):
        profile.load(file, MARK)
    assert profile.place(MARK) != place


def test_saving_over_the_profile_of_something_else_is_refused(tmp_path):
    file = tmp_path / "p.json"
    profile.save(file, MARK, DATA, {})
    with pytest.raises(OutriderError, match="dtype"):
        profile.save(file, {**MARK, "dtype": "float16"}, counted(1), {})
    assert profile.load(file, MARK) == DATA


# --- damage

WHOLE = json.dumps({"version": profile.VERSION, "fingerprint": MARK, "data": DATA})
DAMAGED = {
    "empty": b"", "half": WHOLE[: len(WHOLE) // 2].encode(), "no text": b"\xff\xfe\x00\x80", "a list": b"[1, 2]", "a number": b"3", "null": b"null",
    "no data": json.dumps({"version": 1, "fingerprint": MARK}).encode(), "data is a list": WHOLE.replace(json.dumps(DATA), "[]").encode(),
    "not a number": WHOLE.replace(json.dumps(DATA), '{"a": [1, NaN]}').encode(), "null in it": WHOLE.replace(json.dumps(DATA), '{"a": {"b": null}}').encode(),
    "beyond floats": WHOLE.replace(json.dumps(DATA), '{"a": 1%s}' % ("0" * 400)).encode(), "deep": WHOLE.replace(json.dumps(DATA), '{"a": ' + "[" * 2000 + "1" + "]" * 2000 + "}").encode(),
    "version is text": WHOLE.replace('"version": 1', '"version": "1"').encode(), "mark is null": WHOLE.replace(json.dumps(MARK), "null").encode(),
}  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_file_of_ones_own_is_left_alone(tmp_path, content):
    """Whoever names it by mistake loses nothing; what begins as a profile does, or is empty, was one."""
    (file := tmp_path / "mine.json").write_bytes(content)
    if not content or content.startswith(b'{"version"'):
        assert profile.load(file, MARK) is None and not file.exists()
        return
    for touch in (lambda: profile.load(file, MARK), lambda: profile.save(file, MARK, DATA, {})):
        with pytest.raises(OutriderError, match="mine.json is no profile"):
            touch()
    assert file.read_bytes() == content and {f.name for f in tmp_path.iterdir()} <= {"mine.json", "mine.json.lock"}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_set_aside_and_made_anew(tmp_path, caplog, content, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    file = tmp_path / "p.json"
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING, "outrider"):
        assert profile.load(file, MARK) is None
    (aside,) = [f for f in tmp_path.iterdir() if f.name != "p.json.lock"]
    assert aside.read_bytes() == content and aside.name.startswith("p.json.damaged-")
    assert str(file) in caplog.text and aside.name in caplog.text
    profile.save(file, MARK, DATA, {})
    assert profile.load(file, MARK) == DATA and aside.read_bytes() == content


def test_damage_again_and_again_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    file = tmp_path / "p.json"
    for n in range(5):
        file.write_text(f"damage {n}")
        profile.save(file, MARK, counted(n), {"cell": [99, 0.0]})
        assert profile.load(file, MARK) == counted(n)
    assert sorted(f.read_text() for f in tmp_path.glob("*.damaged-*")) == [f"damage {n}" for n in range(5)]


@pytest.mark.parametrize("nonsense", [False, True], ids=["damaged", "nonsense"])
def test_what_another_process_has_mended_meanwhile_is_left_where_it_is(tmp_path, monkeypatch, nonsense):
    file, turn = tmp_path / "p.json", profile._turn

    def late(which: Path):
        monkeypatch.setattr(profile, "_turn", turn)
        file.unlink()
        profile.save(file, MARK, DATA, {})
        return turn(which)

    if nonsense:
        profile.save(file, MARK, counted(3), {})
    else:
        file.write_text('{"version": 1')
    monkeypatch.setattr(profile, "_turn", late)
    if nonsense:
        profile.set_aside(file, counted(3))
    assert profile.load(file, MARK) == DATA and not list(tmp_path.glob("*.damaged-*"))
    profile.set_aside(file, DATA)
    assert profile.load(file, MARK) is None and len(list(tmp_path.glob("*.damaged-*"))) == 1


def test_a_writing_that_fails_leaves_the_old_profile_and_nothing_else(tmp_path, monkeypatch):
    """On a disk that is full by then."""
    file, write = tmp_path / "p.json", Path.write_text

    def full(self: Path, text: str, *how: str) -> int:
        write(self, text[:20], *how)
        raise OSError(28, "No space left on device")

    profile.save(file, MARK, DATA, {})
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        profile.save(file, MARK, counted(3), DATA)
    assert {f.name for f in tmp_path.iterdir()} == {"p.json", "p.json.lock"} and profile.load(file, MARK) == DATA


@pytest.mark.parametrize(("error", "words"), [(PermissionError("no"), "cannot be set aside"), (FileNotFoundError("gone"), None)], ids=str)
def test_damage_in_a_folder_that_cannot_be_written_or_that_another_process_saw_first(tmp_path, monkeypatch, error, words):
    def rename(self: Path, goal: Path) -> Path:
        raise error

    (tmp_path / "p.json").write_text('{"version": 1')
    monkeypatch.setattr(Path, "rename", rename)
    if words is None:
        assert profile.load(tmp_path / "p.json", MARK) is None
        return
    with pytest.raises(OutriderError, match=words):
        profile.load(tmp_path / "p.json", MARK)


def test_what_cannot_be_read_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(OutriderError, match=r"cannot be read.*directory.*profile='off'"):
        profile.load(tmp_path, MARK)


# --- merging


@pytest.mark.parametrize(
    ("theirs", "mine", "base", "both"),
    [
        ([4, 1.0], [6, 3.0], [0, 0.0], [10, 2.2]),
        ([4, 1.0], [6, 4.0], [4, 1.0], [6, 4.0]),  # they learned nothing
        ([6, 1.0], [6, 4.0], [4, 1.0], [8, 3.25]),  # two observations of mine, of 10 each, beside six of theirs
        ([9, 1.0], [4, 1.0], [4, 1.0], [9, 1.0]),  # I learned nothing
        ([9, 1.0], [2, 5.0], [4, 1.0], [2, 5.0]),  # I measured anew
        ([1000, 1.0], [1000, 0.0], [1000, 1.0], [1000, 0.0]),  # I learned, and count no further
        ([1000, 0.9], [1000, 0.1], [1000, 1.0], [1000, 0.1]),  # so did they, the same way
        ([1000, 0.8], [1000, 0.3], [1000, 0.5], [1000, pytest.approx(0.6)]),  # and the other way
        ([10300, 2.0], [10002, 1.04], [10000, 1.0], [10302, 2.0]),  # a mean that forgets: theirs followed what changed, two of mine do not undo it
        ([3, 1.0], [105, 2.0], [100, 2.0], [8, pytest.approx(13 / 8)]),  # they measured anew
        ([1, 3.0], [1, 5.0], [1, 4.0], [1, 4.0]),
        ([0, 1.0], [0, 2.0], None, [0, 2.0]),
        ([4, 1.0, 8.0], [4, 3.0, 0.0], None, [8, 2.0, 4.0]),
        ({"a": [1, 1.0]}, {"b": [2, 2.0]}, {}, {"a": [1, 1.0], "b": [2, 2.0]}),
        ({"a": {"b": [3, 1.0]}}, {"a": {"b": [4, 4.0]}}, {"a": {"b": [2, 1.0]}}, {"a": {"b": [5, 3.4]}}),
        ({"n": 12}, {"n": 15}, {"n": 10}, {"n": 17}),
        ({"n": 12}, {"n": 15}, {}, {"n": 27}),
        ({"x": 0.25}, {"x": 0.5}, {"x": 0.5}, {"x": 0.25}),
        ({"x": 0.25}, {"x": 0.75}, {"x": 0.5}, {"x": 0.75}),
        ({"a": [1, 2.0]}, {"a": "text"}, {}, {"a": "text"}),
        ({"a": 3}, {"a": {"b": [1, 1.0]}}, {"a": 3}, {"a": {"b": [1, 1.0]}}),
    ],
)  # fmt: skip
def test_what_i_learned_is_added_to_what_they_know(theirs, mine, base, both):
    assert profile.merged(theirs, mine, base) == both


def test_what_one_unlearns_is_on_disk_though_another_wrote(tmp_path):
    """Counts have a most, so they stand still while shares move: the file follows in the end."""
    file = tmp_path / "p.json"
    mine = profile.save(file, MARK, {"cell": [1000, 1.0], "seen": [1, 0.5]}, {})
    profile.save(file, MARK, {"cell": [1000, 0.99], "seen": [1, 0.5]}, mine)
    for n in range(12):
        mine = profile.save(file, MARK, {"cell": [1000, 0.1 / 2**n], "seen": [1, 2.0]}, mine)
    there = profile.load(file, MARK)
    assert there["cell"][0] == 1000 and there["cell"][1] < 0.01 and there["seen"] == [1, 2.0]


def test_two_writers_of_means_that_forget_follow_what_changed_together(tmp_path):
    """A cost curve, a log-weight and a gradient's weights forget, and their counts have no most: what both have come to believe is in the file."""
    file, told = tmp_path / "p.json", []
    start = {"cell": [10_000, 1.0]}
    own = [profile.save(file, MARK, start, {}), json.loads(json.dumps(start))]
    for n in range(1, 21):
        for writer in range(2):
            own[writer] = profile.save(file, MARK, {"cell": [10_000 + 100 * n, 2.0 - 0.13**n]}, own[writer])
            told.append(profile.load(file, MARK)["cell"])
    assert told[-1] == [14_000, pytest.approx(2.0, abs=1e-6)] and all(1.8 < mean <= 2.0 for _, mean in told)


def test_means_of_two_who_began_with_nothing_are_those_of_all_they_saw(tmp_path):
    file = tmp_path / "p.json"
    profile.save(file, MARK, counted(30, 1.0), {})
    profile.save(file, MARK, counted(10, 5.0), {})
    assert profile.load(file, MARK) == counted(40, 2.0)


ROUNDS, EACH = 12, 3


def learn(file: Path, value: float) -> None:
    """A writer that counts EACH observations of `value`, and itself, ROUNDS times, as a Keeper does."""
    base, known = {}, {"cell": [0, value], "rounds": 0}
    for _ in range(ROUNDS):
        known["cell"][0] += EACH
        known["rounds"] += 1
        base = profile.save(file, MARK, known, base)


def learn_beside(file: Path) -> None:
    """Five writers one after the other, in step with another process that does the same."""
    (file.parent / f"{os.getpid()}.ready").touch()
    for _ in range(60000):
        if len(list(file.parent.glob("*.ready"))) == 2:
            break
        time.sleep(0.001)
    for _ in range(5):
        learn(file, 1.0)


def test_threads_that_write_at_once_lose_no_count(tmp_path):
    file = tmp_path / "p.json"
    writers = [threading.Thread(target=learn, args=(file, 1.0)) for _ in range(4)]
    for w in writers:
        w.start()
    for w in writers:
        w.join()
    assert profile.load(file, MARK) == {"cell": [4 * ROUNDS * EACH, pytest.approx(1.0)], "rounds": 4 * ROUNDS}


def test_processes_that_write_at_once_lose_no_count(tmp_path):
    file = tmp_path / "p.json"
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_profile as t; t.learn_beside(t.Path({str(file)!r}))"
    writers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [w.wait() for w in writers] == [0, 0]
    assert profile.load(file, MARK) == {"cell": [10 * ROUNDS * EACH, pytest.approx(1.0)], "rounds": 10 * ROUNDS}


# --- whose it is


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("profile") / "model")


def changed_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def changed_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))


def test_a_copy_of_a_model_is_that_model(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    assert profile.fingerprint({"target": folder}) == profile.fingerprint({"target": tmp_path / "copy"})


@pytest.mark.parametrize("change", [changed_weight, changed_config])
def test_changed_weights_or_a_changed_config_are_another_model(folder, tmp_path, change):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    change(copy)
    one, other = (profile.fingerprint({"target": f, "0": None}) for f in (folder, copy))
    assert [key for key in one if one[key] != other[key]] == ["model target"]
    assert profile.place(one) != profile.place(other)


def test_a_model_whose_middle_alone_was_trained_is_another(tmp_path):
    """Embeddings at the beginning and the head at the end may well be those of the model that it comes from."""
    marks = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        weights = torch.zeros(1 << 20)
        weights[1 << 19 : 3 << 18] = float(name == "other")
        save_file({"w": weights}, tmp_path / name / "model.safetensors")
        marks.append(profile.fingerprint({"target": tmp_path / name})["model target"])
    assert marks[0] != marks[1]


def test_settings_threads_and_models_are_all_in_the_fingerprint(folder):
    one = profile.fingerprint({"target": folder}, dtype="float32", strict=True)
    assert {"model target", "processor", "cores", "gpu", "threads", "torch", "transformers", "dtype", "strict"} == set(one)
    assert one["threads"] == str(torch.get_num_threads()) and one["strict"] == "True"
    assert profile.place(one) == profile.place(dict(reversed(one.items()))), "the order of keys does not matter"
    assert len({profile.place({**one, key: "other"}) for key in one} | {profile.place(one)}) == len(one) + 1


def test_what_other_packages_took_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that are built in another way take other times: their profile is another file. Who compiles nothing keeps his."""
    marks = {}
    for packages in (1, 2):
        monkeypatch.setattr(assemble, "PACKAGES", packages)
        for how in ("auto", "off"):
            settings = LoadSettings(compile=how, profile="off")
            marks[packages, how] = assemble._keeper({}, {}, 1, "cpu", settings).mark
    assert marks[1, "auto"] != marks[2, "auto"] != marks[1, "off"] == marks[2, "off"]
