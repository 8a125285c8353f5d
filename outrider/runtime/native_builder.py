"""The process that builds the host's part: `python -m outrider.runtime.native_builder [SECONDS TO WAIT]`, of low priority, started by `native`, or by
who does not want to wait for the start after the next.

Invariant: what was built is used only after it wrote the texts that Python writes (`witness`).
"""

import ast
import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

from outrider.control.fixed import fixed
from outrider.core import cache
from outrider.core.noise import RowNoise
from outrider.core.sampling import READ, Race, Settings, raced
from outrider.core.types import Draft, Plan, Request, SamplingParams, Sequence
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.models.chain import Chain
from outrider.models.toy import ToyModel
from outrider.reference import tasks
from outrider.runtime import profiler
from outrider.runtime.assemble import load
from outrider.runtime.engine import Engine
from outrider.runtime.native import BUILDER, HERE, KINDS, RACES, SWITCH, host, place, sources

KEPT = 3  # builds, the latest: sources are edited
TYPES = """[mypy]
ignore_missing_imports = True
follow_imports = silent
[mypy-torch.*,transformers.*]
follow_imports = skip
"""  # torch is called as Python calls it: nothing is to be gained by reading its types, and minutes to be lost
MAKE = """import os, sys
from mypyc.build import mypycify
from setuptools import Extension, setup
into, counts, races, *modules = sys.argv[1:]
made = mypycify(["--config-file=types.ini", *modules], opt_level="2", debug_level="0") if modules else []
direct = ["-fvisibility=hidden", "-fno-semantic-interposition", "-fno-plt"] if os.name == "posix" else []
for one in made:  # functions that call each other need not be found by name; the list that they have is one for all
    own = counts.split() if one.name.endswith("__mypyc") else []  # all of the code is in that one
    one.extra_compile_args, one.extra_link_args = [*one.extra_compile_args, *direct, *own], own
how = ["-O3", "-fopenmp-simd", "-fno-fast-math", "-ffp-contract=off"]  # whatever CFLAGS say
libraries = ["m"] if os.name == "posix" else []
made.append(Extension(races, [races.replace(".", "/") + ".c"], libraries=libraries, extra_compile_args=how))
setup(name="host", packages=[], script_args=["build_ext", "-b", into], ext_modules=made)
"""
COUNT, COUNTED = "-fprofile-generate -fprofile-update=single", "-fprofile-use"  # GCC's
TEXTS, VOCAB = 16, 13
PATIENCE = 10.0  # seconds to measure, that texts may be drafted at all
BUILD = [sys.executable, "-m", BUILDER]


def build(folder: Path) -> None:
    """Build all modules into folder/built, which is there when it is whole and agrees with Python. Raises RuntimeError where that is not so."""
    work = folder / f"work.{os.getpid()}"
    try:
        shutil.copytree(HERE, work / HERE.name, ignore=lambda _, names: [n for n in names if "." in n and not n.endswith(KINDS)])
        if place(work / HERE.name).name != folder.name:
            raise RuntimeError("the sources were edited meanwhile")
        (work / "types.ini").write_text(TYPES)
        for file in (work / file.relative_to(HERE.parent) for file in sources()):
            file.write_text(constructed(settled(file.read_text("utf-8"))), "utf-8")
        _make(work, [str(file.relative_to(HERE.parent)) for file in sources()])
        told = [_run([*BUILD, "witness"], {SWITCH: given}).split("\n", 1) for given in ("python", str(work / "built"))]
        if told[1][0] != "native":
            raise RuntimeError(f"what was built is not used: {told[1][0]}")
        if told[0][1:] != told[1][1:]:
            raise RuntimeError("what was built writes other texts than Python")
        if not (folder / "built").is_dir():  # by somebody who was not seen
            (work / "built").replace(folder / "built")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _make(work: Path, modules: list[str]) -> None:
    """Into work/built. Where the compiler is GCC, it is made twice: what the first one counts while it writes texts says to the second one what
    belongs together, and a step, which finds most of its code in memory, touches less of that."""

    def make(into: str, counts: str) -> None:
        _run([sys.executable, "-c", MAKE, into, counts, RACES, *modules], {}, work)

    cc = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
    if counting := "Free Software Foundation" in _run([*cc, "--version"], {}):
        make("counted", COUNT)
        _run([*BUILD, "practise"], {SWITCH: str(work / "counted")})
    make("built", COUNTED if counting else "")


def settled(text: str) -> str:
    """A source whose numbers and strings are said to be `Final`: machine code holds them then, and need not find each by its name in a module's
    dictionary. Left as they are: other constants, those on several lines, with a type of their own, or bound together by anything but a tuple of as
    many."""
    lines, known = text.encode().split(b"\n"), dict[str, Any]()
    for made in ast.parse(text).body:
        if isinstance(made, ast.Assign) and made.lineno == made.end_lineno and (said := _settled(made, known)):
            told = "; ".join([f"{name}: _Final = {value!r}" for name, value in said.items()])
            lines[made.lineno - 1] = f"from typing import Final as _Final; {told}".encode() + lines[made.lineno - 1][made.end_col_offset :]
            known |= said
    return b"\n".join(lines).decode()


def _settled(made: ast.Assign, known: dict[str, Any]) -> dict[str, Any]:
    """The numbers and strings that a statement binds to large names, by those `known` before; none, unless that is all it does."""
    name, value = made.targets[0], made.value
    pairs = [(name, value)]
    if isinstance(name, ast.Tuple) and isinstance(value, ast.Tuple) and len(name.elts) == len(value.elts):
        pairs = list(zip(name.elts, value.elts, strict=True))
    told = dict[str, Any]()
    for one, said in pairs:
        if isinstance(one, ast.Name) and one.id.isupper():
            with contextlib.suppress(NameError, AttributeError, TypeError):
                told[one.id] = eval(ast.unparse(said), {"__builtins__": {}}, known)
    plain = all(type(x) in (int, float, str) and repr(x) not in ("inf", "-inf", "nan") for x in told.values())
    return told if plain and len(told) == len(pairs) and len(made.targets) == 1 else {}


def constructed(text: str) -> str:
    """A source with the constructors of its dataclasses written out: those that `dataclasses` makes stay Python, and steps make a dozen objects. Each
    takes the place of a blank line, so that tracebacks tell true lines. Left as they are: classes that are frozen, not native, derived, or have one
    of their own."""
    lines = text.split("\n")
    for made in ast.parse(text).body:
        if isinstance(made, ast.ClassDef) and not made.bases and (line := _constructor(made)) and not lines[made.end_lineno or 0]:
            lines[made.end_lineno or 0] = line
    return "\n".join(lines)


def _constructor(made: ast.ClassDef) -> str | None:
    """`__init__` of a dataclass on one line; None where it is left to `dataclasses`."""
    how, own = " ".join(map(ast.unparse, made.decorator_list)), {part.name for part in made.body if isinstance(part, ast.FunctionDef)}
    fields = [part for part in made.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)]
    if "dataclass" not in how or "frozen" in how or "native_class" in how or "__init__" in own:
        return None
    takes, does = ["self"], list[str]()
    for field, name, kind in ((part.value, ast.unparse(part.target), ast.unparse(part.annotation)) for part in fields):
        told = {k.arg: ast.unparse(k.value) for k in field.keywords} if isinstance(field, ast.Call) and ast.unparse(field.func) == "field" else None
        if kind.startswith("ClassVar") or not {"default", "default_factory", "compare", "repr"}.issuperset(told or ()):
            return None
        if told and "default_factory" in told:
            takes.append(f"{name}: {f'{kind} | None'!r} = None")
            does.append(f"self.{name} = {told['default_factory']}() if {name} is None else {name}")
        else:
            default = told["default"] if told else ast.unparse(field) if field else ""
            takes.append(f"{name}: {kind}" + f" = {default}" * bool(default))
            does.append(f"self.{name} = {name}")
    does += ["self.__post_init__()"] * ("__post_init__" in own)
    return f"    def __init__({', '.join(takes)}) -> None: {'; '.join(does) or 'pass'}"


def _run(command: list[str], environment: dict[str, str], cwd: Path | None = None) -> str:
    """What a process says. Raises RuntimeError with its last words where it fails."""
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise RuntimeError(said[-1] if said else f"ended with {done.returncode}")
    return done.stdout


def practise() -> None:
    """Texts such as users have written, of the reference pair: greedy and drawn, plain and with drafters whose costs were measured, for else none would
    be asked; one and several at a time."""
    rt = load(device="cpu", compile="off", profile="off", dtype="float32", rows=3, context=1024)
    keeper: Any = rt.keeper
    for drawn in (False, True):
        profiler.sweep(rt.engine, keeper.tables, context=64, sampled=drawn, patience=PATIENCE, repeats=3)
    ways = itertools.cycle(itertools.product((0.0, 1.0), ("auto", "off", "auto", "lookup")))
    for n, (task, (temperature, drafters)) in enumerate(zip(tasks.mixture(0, TEXTS), ways, strict=False)):
        how: dict[str, Any] = {"temperature": temperature, "rule": "coupled", "speculation": drafters, "seed": n, "max_tokens": 64}
        how["ignore_eos"] = True  # short answers leave no time to draft
        rt.chat([*task.prompt], **how)
        rt.generate(task.prompt[-1]["content"], **how)
    rt.generate([task.prompt[-1]["content"] for task in tasks.mixture(TEXTS, 6)], max_tokens=64)


def witness() -> list[list[int]]:
    """Texts of a table model, greedy and by both rules, with both kinds of drafters, winners of races, and chains of guesses: the same, whoever runs
    them."""
    texts = []
    for rule, temperature, width in (("coupled", 0.0, 2), ("coupled", 0.8, 2), ("exact", 0.8, 1)):
        target, small = (ToyModel(VOCAB, 1, name=name, blend=(2, share)) for name, share in (("target", 0.0), ("small", 0.4)))
        told = fixed(Plan((("lookup", 3, 1), ("small", 2, width))))
        engine = Engine(target, {"lookup": Lookup(), "small": ModelDrafter(small, "small", VOCAB)}, told, 2)
        params = SamplingParams(temperature=temperature, max_tokens=40)
        seqs = [engine.submit(Request(str(n), (1, 2 + n, 3), params, n, rule)) for n in range(3)]
        while engine.step():
            pass
        texts += [seq.tokens for seq in seqs]
    return texts + [_raced(dtype) for dtype in READ] + [_guessed()]


def _raced(dtype: torch.dtype) -> list[int]:
    """Winners of races over random logits, few and many, flat and steep, cold and warm."""
    told = list[int]()
    for vocab, scale, warmth in itertools.product((1, 7, 300, 5000), (0.3, 8.0), (0.7, 1.0)):
        logits = scale * torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab))
        told += [raced(logits.to(dtype), at, -1, Draft(1), _drawn(warmth), RowNoise((at,), (0,), (2,)))[0] for at in range(3)]
    return told


def _guessed() -> list[int]:
    """Chains over random logits, of what is likeliest and of what is drawn, which they come to foresee; and what of them was computed."""
    told = list[int]()
    for seed, drawn in itertools.product(range(20), (False, True)):
        logits = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(seed))
        found = torch.stack([logits.argmax(-1), logits.amax(-1), logits.logsumexp(-1)], -1).double()
        chain = Chain(3, frozenset({4}), race=Race(Draft(1), -1, _drawn(0.7), RowNoise((seed,), (0,), (2,))) if drawn else None)
        more = chain.read(logits, found, 4, None, logits[0, :3].argmax(-1).tolist())
        told += [*chain.tokens, chain.scored, int(more)]
    return told


def _drawn(warmth: float) -> Settings:
    return Settings.of([Sequence(Request("", (1, 2), SamplingParams(temperature=warmth), 1, "coupled"), [1, 2])])


def main(folder: Path, later: float = 0.0) -> None:
    """Build what is not there yet: at once, or in so many seconds if nobody else does."""
    lock, own = folder / "lock", str(os.getpid())
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "built").is_dir() or (later and cache.held(BUILDER, folder) and lock.read_text() != own):
        return
    lock.write_text(own)
    try:
        time.sleep(later)
        if not (folder / "built").is_dir():
            build(folder)
        (folder / "failed").unlink(missing_ok=True)
    except Exception as failed:
        (folder / "failed").write_text(str(failed), "utf-8")
        raise
    finally:
        lock.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another process cleans, too
        _clean(folder)


def _clean(folder: Path) -> None:
    """Remove the oldest builds, all but the latest KEPT, and never this one. And what builders that were killed left behind: tens of megabytes each."""
    others = [f for f in folder.parent.iterdir() if f.is_dir()]
    made = sorted((f for f in others if f != folder and (f / "built").is_dir()), key=lambda f: f.stat().st_mtime)
    for old in made[: max(len(made) + 1 - KEPT, 0)]:
        cache.remove(old)
    for left in [work for f in others if not cache.held(BUILDER, f) for work in f.glob("work.*")]:
        shutil.rmtree(left, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["witness"]:
        print(host.tier, witness(), sep="\n")
    elif sys.argv[1:] == ["practise"]:
        practise()
    else:
        cache.step_back()
        main(place(), *map(float, sys.argv[1:]))
