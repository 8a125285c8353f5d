"""The host's part in machine code: found only if built from these very sources, built by one process at a time, used only if it agrees with Python."""

import ast
import dataclasses
import inspect
import json
import os
import shutil
import subprocess
import sys
import time
import types
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from outrider.core import cache
from outrider.runtime import native, native_builder
from outrider.runtime.native import Finder, Host

TESTS = Path(__file__).parent
SUFFIX = EXTENSION_SUFFIXES[0]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """The folder that these sources have in a cache of this test's own; nothing is there, and nothing was said of it in the environment."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(native.SWITCH)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return native.place()


@pytest.fixture
def started(monkeypatch) -> list[Path]:
    """The folders that builders were started for; none is."""
    folders: list[Path] = []
    monkeypatch.setattr(cache, "start", lambda builder, *given, folder: folders.append(folder))
    return folders


def fill(folder: Path) -> Path:
    """Something that looks like a build, of which the library is Python that this process has already."""
    for file in [*native.sources(), native.HERE / "core" / "races.c"]:
        (made := folder / file.relative_to(native.HERE.parent)).parent.mkdir(parents=True, exist_ok=True)
        made.with_name(file.stem + SUFFIX).write_bytes(b"")
    (folder / f"0__mypyc{SUFFIX}").write_bytes(b"of another machine")
    return folder


@pytest.fixture
def loadable(monkeypatch) -> None:
    """The libraries of `fill` are in this process."""
    monkeypatch.setitem(sys.modules, "0__mypyc", sys)
    monkeypatch.setitem(sys.modules, native.RACES, sys)


def asked() -> str:
    """The tier of a process that looks, and asks for what it does not find."""
    host = Host()
    host.find()
    host.ask()
    return host.tier


def test_a_changed_source_has_another_place(place, tmp_path):
    """Whatever module is edited, or one beside it: what was built before is not found."""
    copy = tmp_path / "copy"
    shutil.copytree(native.HERE, copy, ignore=lambda _, names: [n for n in names if "." in n and not n.endswith(native.KINDS)])
    assert native.place(copy) == place
    for file in [*native.sources(), native.HERE / "models" / "graphed.py", native.HERE / "core" / "races.c"]:
        copied = copy / file.relative_to(native.HERE)
        before = copied.read_bytes()
        copied.write_bytes(before + b"\n")
        assert native.place(copy) != place, file
        copied.write_bytes(before)


def test_modules_are_found_where_they_were_built_and_nowhere_else(place, loadable):
    file = fill(place / "built") / "outrider" / "core" / f"tree{SUFFIX}"
    finder = Finder(place / "built")
    spec = finder.find_spec("outrider.core.tree")
    assert spec is not None and spec.origin == str(file)
    assert finder.find_spec("outrider.core.cache") is None and finder.find_spec("tree") is None
    host = Host()
    host.find()
    assert host.tier == "native" and isinstance(sys.meta_path[0], Finder)


@pytest.mark.parametrize("gone", [f"outrider/core/tree{SUFFIX}", f"outrider/core/races{SUFFIX}", f"0__mypyc{SUFFIX}"])
def test_what_is_not_whole_is_not_used(place, loadable, started, caplog, gone):
    """A module in Python among those in machine code is not what these take it for."""
    (fill(place / "built") / gone).unlink()
    before = list(sys.meta_path)
    assert asked() == "python:not-loadable" and sys.meta_path == before and "not whole" in caplog.text


def test_what_cannot_be_loaded_leaves_python(place, started, caplog):
    """Built on another system that shares this home, say."""
    fill(place / "built")
    before = list(sys.meta_path)
    assert asked() == "python:not-loadable" and sys.meta_path == before and started == []
    assert str(place / "built") in caplog.text


def test_what_is_in_use_is_not_the_oldest(place, loadable):
    fill(place / "built")
    os.utime(place, (1000, 1000))
    assert asked() == "native" and place.stat().st_mtime > 1000


def test_who_has_no_home_has_python(place, started, monkeypatch):
    monkeypatch.delenv("OUTRIDER_CACHE")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert asked() == "python:no-cache" and started == []


def test_a_cache_of_no_use_costs_nobody_the_model(place, started, monkeypatch, caplog):
    """Loading goes on, in Python, and says why."""
    (blocked := place.parents[1]).write_text("a file where the folder should be")
    assert asked() == "python:no-cache" and started == [] and str(blocked) in caplog.text
    monkeypatch.setenv(native.SWITCH, str(blocked / "nothing"))
    assert asked() == "python:no-such-folder" and f"{native.SWITCH}={blocked}" in caplog.text


def test_python_can_be_asked_for(place, started, monkeypatch):
    (place / "built").mkdir(parents=True)
    monkeypatch.setenv(native.SWITCH, "python")
    assert asked() == "python:off" and started == [] and not isinstance(sys.meta_path[0], Finder)


def test_what_is_not_there_is_built_by_one_process(place, started, monkeypatch):
    assert asked() == "python:building" and started == [place]
    monkeypatch.setattr(cache, "held", lambda builder, folder: folder == place)
    assert asked() == "python:building" and started == [place]
    (place / "built").mkdir()
    host = Host()  # it looked before that was there
    host.ask()
    assert host.tier == "python:until-next-start" and started == [place]


def test_without_a_compiler_nothing_is_begun(place, started, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert asked() == "python:no-compiler" and started == []


def test_what_failed_is_said_and_tried_again_after_an_hour(place, started, caplog):
    place.mkdir(parents=True)
    (place / "failed").write_text("gcc has no mood")
    assert asked() == "python:not-compiled" and started == []
    assert "gcc has no mood" in caplog.text and str(place / "log") in caplog.text
    long_ago = time.time() - native.AGAIN - 1
    os.utime(place / "failed", (long_ago, long_ago))
    assert asked() == "python:building" and started == [place]


@pytest.mark.parametrize("wrong", ["build", "import", "texts", "unused"])
def test_what_cannot_be_built_or_differs_is_not_kept(place, monkeypatch, wrong):
    def run(command: list[str], environment: dict[str, str], cwd: Path | None = None) -> str:
        if cwd:
            (cwd / "built").mkdir()
        native_now = environment.get(native.SWITCH, "python") != "python"
        if (wrong == "build" and cwd) or (wrong == "import" and native_now):
            raise RuntimeError("it fell over")
        tier = "native" if native_now and wrong != "unused" else "python:not-loadable"
        return f"{tier}\n{[[1]] if wrong == 'texts' and native_now else [[2]]}"

    monkeypatch.setattr(native_builder, "_run", run)
    with pytest.raises(RuntimeError):
        native_builder.main(place)
    assert [file.name for file in place.iterdir()] == ["failed"]
    said = {"texts": "other texts", "unused": "python:not-loadable"}.get(wrong, "it fell over")
    assert said in (place / "failed").read_text()


def test_what_agrees_is_kept_and_the_oldest_builds_go(place, monkeypatch):
    for age, name in enumerate("abcd"):
        (place.parent / name / "built").mkdir(parents=True)
        os.utime(place.parent / name, (1000 - age, 1000 - age))
    (place.parent / "failed").mkdir()  # not a build
    monkeypatch.setattr(native_builder, "_run", lambda command, environment, cwd=None: (cwd / "built").mkdir() if cwd else "native\n[[2]]")
    native_builder.main(place)
    assert [file.name for file in place.iterdir()] == ["built"]
    assert {folder.name for folder in place.parent.iterdir()} == {place.name, "a", "b", "failed"}


@pytest.mark.parametrize("says", ["gcc 12\nCopyright (C) 2022 Free Software Foundation, Inc.", "Apple clang version 17"])
def test_code_is_laid_out_by_what_a_first_build_counted_where_the_compiler_counts(place, monkeypatch, says):
    ran = []

    def run(command: list[str], environment: dict[str, str], cwd: Path | None = None) -> str:
        if command[-1] == "--version":
            return says
        if cwd:
            (cwd / command[3]).mkdir()
            ran.append((command[3], command[4]))
        elif command[-1] == "practise":
            assert Path(environment[native.SWITCH]).is_dir()
            ran.append((Path(environment[native.SWITCH]).name, "practise"))
        return "native\n[[2]]"

    monkeypatch.setattr(native_builder, "_run", run)
    native_builder.main(place)
    counted = [("counted", native_builder.COUNT), ("counted", "practise"), ("built", native_builder.COUNTED)]
    assert ran == (counted if "Free" in says else [("built", "")])


def test_practice_is_plain_and_drafted_alone_and_together(monkeypatch):
    """Who is not practised is laid out of the way: both drafters, plain steps, drawn texts and several rows at a time must be among its steps."""
    seqs, load = [], native_builder.load

    def watched(**how):
        rt = load(**how)
        submit = rt.engine.submit
        rt.engine.submit = lambda request: seqs.append(submit(request)) or seqs[-1]
        return rt

    monkeypatch.setattr(native_builder, "load", watched)
    monkeypatch.setattr(native_builder, "TEXTS", 5)
    native_builder.practise()
    records = [record for seq in seqs for record in seq.records]
    assert {"lookup", "model"} <= {name for record in records for name in record.levels}
    assert any(not record.levels for record in records) and any(sum(record.accepted) for record in records)
    assert any(record.reason.startswith("depth") and "model" in record.levels for record in records), "by the scheduler's own choice"
    assert {seq.request.sampling.temperature for seq in seqs} == {0.0, 1.0} and {len(record.context) for record in records} >= {1, 3}


def test_what_killed_builders_left_behind_goes_and_what_is_being_built_stays(place, monkeypatch):
    for name in ("dead", "alive"):
        (place.parent / name / "work.1" / "build").mkdir(parents=True)
    monkeypatch.setattr(cache, "held", lambda builder, folder: folder.name == "alive")
    monkeypatch.setattr(native_builder, "_run", lambda command, environment, cwd=None: (cwd / "built").mkdir() if cwd else "native\n[[2]]")
    native_builder.main(place)
    assert {str(work.relative_to(place.parent)) for work in place.parent.glob("*/*")} == {f"{place.name}/built", "alive/work.1"}


def test_one_process_builds_and_what_was_edited_meanwhile_is_not_kept(place, monkeypatch):
    monkeypatch.setattr(cache, "held", lambda builder, folder: True)
    place.mkdir(parents=True)
    (place / "lock").write_text("1")
    native_builder.main(place, later=3600.0)
    assert [file.name for file in place.iterdir()] == ["lock"]
    monkeypatch.setattr(cache, "held", lambda builder, folder: False)
    with pytest.raises(RuntimeError, match="edited meanwhile"):
        native_builder.main(place.with_name("of other sources"))


def test_a_process_that_fails_is_told_by_its_last_words():
    with pytest.raises(RuntimeError, match="^cc1: no$"):
        native_builder._run([sys.executable, "-c", "import sys; print('much'); sys.exit('cc1: no\\n')"], {})
    with pytest.raises(RuntimeError, match="ended with 3"):
        native_builder._run([sys.executable, "-c", "raise SystemExit(3)"], {})


def test_the_witness_hangs_on_rule_and_seed():
    greedy, coupled, exact = (native_builder.witness()[i : i + 3] for i in (0, 3, 6))
    *raced, guessed = native_builder.witness()[9:]
    assert native_builder.witness() == [*greedy, *coupled, *exact, *raced, guessed]
    assert len(raced) == 3 and all(len(set(winners)) > 10 for winners in raced)
    assert len(guessed) > 4 * 40 and {0, 1, 2, 3, 4} <= set(guessed), "chains of more than one token"
    assert greedy != coupled != exact and len({tuple(text) for text in coupled}) == 3


DECIDES = """
import json, sys
import outrider.core.tree
from written import adaptive, costs, drive, linear, trace
out = []
for seed in range(6):
    of = trace(seed, costs(linear(0.05), {"lookup": linear(0.0, 0.05), "model": linear(0.2, 0.1)}),
               {"lookup": lambda t, d: 0.8 if t // 40 % 2 else 0.1, "model": lambda t, d: 0.7 ** d}, texts=3, length=300)
    for records in drive(of, adaptive(of)):
        out += [(r.reason, [list(one) for one in r.plan.drafters], list(r.drafted), list(r.kept)) for r in records]
print(json.dumps([outrider.core.tree.__file__, out]))
"""
TEXTS = """
import json, sys
import numpy as np
import outrider
from outrider import OutriderError, reference
rt = outrider.load(reference.target(), ["lookup", f"model:{reference.draft()}"], compile="off", dtype="float32", rows=2, profile="off")
hows = [{}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 4, "logprobs": 2}, {"repetition_penalty": 1.2}]
out = [rt.generate("Once there was a fox", max_tokens=60, **how).tokens for how in hows]
wrong = [{"temperature": "hot"}, {"top_k": 1.5}, {"stop": [1]}, {"max_tokens": 0}, {"seed": "x"}, {"speculation": {"n_max": "many"}}]
for how in wrong:
    try:
        rt.generate("Once", **how)
        out.append("taken")
    except OutriderError as error:
        out.append([error.what, error.try_this])
print(json.dumps([outrider.core.tree.__file__, out]))
"""


@pytest.mark.slow
def test_machine_code_decides_writes_and_refuses_as_python_does(tmp_path):
    """Built for good: every decision of the controller on written traces, texts of the reference pair, and what it says of bad input."""
    environment = {k: v for k, v in os.environ.items() if k != native.SWITCH} | {"OUTRIDER_CACHE": str(tmp_path), "PYTHONPATH": str(TESTS)}
    subprocess.run([sys.executable, "-m", native.BUILDER], env=environment, check=True)
    for script in (DECIDES, TEXTS):
        told = {
            host: json.loads(subprocess.run([sys.executable, "-c", script], env=environment | {native.SWITCH: host}, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
            for host in ("python", "")
        }  # fmt: skip
        assert told["python"][0].endswith("tree.py") and told[""][0].startswith(str(tmp_path))
        assert len(told["python"][1]) >= 10 and told[""][1] == told["python"][1]


def flat(text: str) -> list[str]:
    """Its statements, one binding each, whether said to be final or not; of numbers and strings, what they are."""
    out, known = [], dict[str, object]()

    def bound(one: ast.expr, said: ast.expr) -> str:
        try:
            known[ast.unparse(one)] = value = eval(ast.unparse(said), {"__builtins__": {}}, known)
            return f"{ast.unparse(one)} = {value if isinstance(value, (int, float, str)) else ast.unparse(said)!r}"
        except (NameError, AttributeError, TypeError):
            return f"{ast.unparse(one)} = {ast.unparse(said)!r}"

    for made in ast.parse(text).body:
        if isinstance(made, ast.Assign) and isinstance(made.targets[0], ast.Tuple) and isinstance(made.value, ast.Tuple):
            out += [bound(one, said) for one, said in zip(made.targets[0].elts, made.value.elts, strict=True)]
        elif isinstance(made, ast.Assign) or (isinstance(made, ast.AnnAssign) and ast.unparse(made.annotation) == "_Final"):
            out.append(bound(made.targets[0] if isinstance(made, ast.Assign) else made.target, made.value))
        elif ast.unparse(made) != "from typing import Final as _Final":
            out.append(ast.unparse(made))
    return out


@pytest.mark.parametrize("file", native.sources(), ids=lambda file: file.stem)
def test_constants_that_are_said_to_be_final_are_the_same_ones(file):
    """Every statement as it was, every line where it was, and what stands behind it, too."""
    text = file.read_text("utf-8")
    told = native_builder.settled(text)
    assert flat(told) == flat(text)
    changed = [(a, b) for a, b in zip(text.split("\n"), told.split("\n"), strict=True) if a != b]
    assert all(b.startswith("from typing import Final as _Final; ") and a.partition("#")[2] == b.partition("#")[2] for a, b in changed)
    constants = [made for made in ast.parse(text).body if isinstance(made, ast.Assign) and isinstance(made.value, ast.Constant)]
    assert len(constants) <= len(changed), "one that is a number stayed a name"


def test_what_is_no_number_and_no_string_is_not_said_to_be_final():
    """Small names, several targets, types of their own, several lines, what is not bound by a tuple of as many, what hangs on more than constants, other kinds."""
    text = "\n".join(["a = 1", "A = B = 2", "C: float = 3", "D = (", "    4", ")", "E, F = range(2)", "G, h = 1, 2", "def f():", "    I = 1", "x.J = 2", "K[0] = 3",
                      "L = N + 1", "O = (1, 2)", "P, Q = 1, [2]", "R = 1e999", "S = max(1, 2)"])  # fmt: skip
    assert native_builder.settled(text) == text
    told = native_builder.settled("T, _U = 'ä', -2  # ö\nV = 1 << _U + 4\n")
    assert told == "from typing import Final as _Final; T: _Final = 'ä'; _U: _Final = -2  # ö\nfrom typing import Final as _Final; V: _Final = 4\n"


def classes(text: str, monkeypatch) -> dict[str, type]:
    """The dataclasses of a source."""
    module = types.ModuleType("written")
    monkeypatch.setitem(sys.modules, "written", module)
    exec(compile(text, "written", "exec"), vars(module))
    return {
        name: made
        for name, made in vars(module).items()
        if isinstance(made, type) and dataclasses.is_dataclass(made) and made.__module__ == "written"
    }


def takes(made: type) -> list[tuple[str, bool]]:
    """What a constructor takes: the names, in order, and which may be left out."""
    return [(name, given.default is not given.empty) for name, given in inspect.signature(made).parameters.items()]


@pytest.mark.parametrize("file", native.sources(), ids=lambda file: file.stem)
def test_constructors_that_are_written_out_are_those_of_dataclasses(file, monkeypatch):
    """The same signature and the same values, and every other line where it was."""
    text = file.read_text("utf-8")
    written = native_builder.constructed(text)
    changed = [(a, b) for a, b in zip(text.split("\n"), written.split("\n"), strict=True) if a != b]
    assert all(not a and b.startswith("    def __init__(self") for a, b in changed)
    own, made = classes(text, monkeypatch), classes(written, monkeypatch)
    assert own.keys() == made.keys() and len(changed) <= len(own)
    for name in own:
        assert takes(own[name]) == takes(made[name]), name
        given = [1.0 for _, optional in takes(own[name]) if not optional]
        given = [lambda: 7.0] if name == "Clock" else given
        given = [1.0, {}, {}, 1.0] if name == "Parts" else given
        given = [own["Request"]("", (1, 2), own["SamplingParams"](), 0, ""), [1, 2]] if name == "Sequence" else given
        assert repr(own[name](*given)) == repr(made[name](*given)), name


def test_written_constructors_share_nothing_and_call_what_comes_after(monkeypatch):
    """A factory makes each its own; `__post_init__` is called; what is frozen, derived or has a constructor stays."""
    made = classes(native_builder.constructed(SOURCE), monkeypatch)
    first, second = made["Plain"](3), made["Plain"](3, seen=[1])
    assert (first.seen, second.seen, first.late) == ([3], [1, 3], 4) and made["Plain"](5).seen == [5]
    assert first == made["Plain"](3) and "__init__(self" in native_builder.constructed(SOURCE).split("\n")[10]
    assert native_builder.constructed(SOURCE).count("def __init__") == SOURCE.count("def __init__") + 1


SOURCE = """
from dataclasses import dataclass, field
@dataclass(slots=True)
class Plain:
    size: int
    seen: list["int"] = field(default_factory=list, compare=False)
    late: int = field(default=1, repr=False)
    def __post_init__(self) -> None:
        self.seen.append(self.size)
        self.late += self.size

@dataclass(frozen=True)
class Still:
    size: int

@dataclass
class Derived(Plain):
    more: int = 0

@dataclass
class Own:
    size: int
    def __init__(self) -> None:
        self.size = 1
"""


def test_what_the_scheduler_thinks_with_is_machine_code():
    """A new module of its room, left out of the list, would be Python in the midst of it: right, and five times as slow."""
    listed = native.MODULES["control"].split()
    for name in listed:
        for node in ast.walk(ast.parse((native.HERE / "control" / f"{name}.py").read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outrider.control."):
                assert node.module.split(".")[2] in listed, f"{name} calls {node.module}"
