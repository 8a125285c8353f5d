"""What tests of compiled steps share: a folder to build from, its packages, and places to look for some.

One set of packages is built for all modules, by the real builder. The head of the model has every row twice, so that every
largest logit is an exact tie; the vocabulary is padded. A test module names the fixtures it uses (`served = packages.served`).
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_folder

import outrider
from outrider.models import compiled, package
from outrider.models.compiled import SHAPES, Compiled, Recipe
from outrider.models.hf import HFModel
from outrider.models.load import load_module, wrap

OWN = torch.backends.cpu.get_cpu_capability() in ("AVX512", "AVX2")  # has the house kernels for this CPU?
DTYPE = "bfloat16" if OWN else "float32"
CLOSE = 0.25 if OWN else 0.02  # of the logits' spread, as at load time
VOCAB, TWIN = 300, 150  # tokens; token t and token t + TWIN have the same row in the head
HURRIED = "import sys; from outrider.models import builder; builder.step_back = lambda: None; builder.main(*sys.argv[1:])"  # tests will wait for it
PROMPT = [5, 9, 2, 7, 5, 9, 2]


def twin_folder(path: Path, seed: int = 0) -> Path:
    """A tiny Llama whose logits tie exactly, with 20 rows of padding that would win if they were let, and dims that the house's own kernels serve."""
    file = tiny_folder(path, seed, rows=VOCAB + 20, head=64, hidden=64) / "model.safetensors"
    weights = load_file(file)
    head = weights["lm_head.weight"]
    weights["lm_head.weight"] = torch.cat([head[:TWIN], head[:TWIN], head[VOCAB:]]).contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    return path


def model_of(folder: Path, rows: int = 4, context: int = 200, dtype: str = DTYPE, tokens: int = VOCAB, quantise: str | None = None) -> HFModel:
    return wrap(load_module(folder, dtype, quantise), "target", "tiny", rows=rows, context=context, chunk=32, tokens=tokens)


def recipe_of(folder: Path, **changes: object) -> Recipe:
    return Recipe(**{"folder": str(folder), "dtype": DTYPE, "threads": 1, "vocab": VOCAB, **changes})


def layers(module: torch.nn.Module, kind: type) -> list[str]:
    """The names of its parts of a kind."""
    return [name for name, part in module.named_modules() if type(part) is kind]


@pytest.fixture(autouse=True)
def even(monkeypatch) -> None:
    """All steps take a second: whether a package is used must not hang on a clock here."""
    for module in (compiled, package):
        monkeypatch.setattr(module, "seconds_of_each", lambda calls, **_: [(call(), 1.0)[1] for call in calls])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return twin_folder(tmp_path_factory.mktemp("compiled") / "target")


@pytest.fixture(scope="module", autouse=True)
def builder(request, tmp_path_factory, folder) -> tuple[Path, Path]:
    """(the cache, the folder in it) where packages are being built while the first tests run, once for all."""
    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "packages"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(cache))
        place = recipe_of(folder).place()
    if any("built" in item.fixturenames for item in request.session.items):
        try:
            place.mkdir(parents=True)
        except FileExistsError:
            return cache, place  # another worker or module was first
        with open(place / "log", "wb") as log:
            subprocess.Popen([sys.executable, "-c", HURRIED, json.dumps(asdict(recipe_of(folder))), str(place)], stdout=log, stderr=log)
    return cache, place


@pytest.fixture(scope="module")
def built(builder) -> Path:
    """The folder with all packages."""
    place = builder[1]
    end = time.monotonic() + 600
    while not all((place / f"{shape}.pt2").exists() for shape in SHAPES):
        assert not (place / "failed").exists(), (place / "failed").read_text()
        assert time.monotonic() < end, (place / "log").read_text()
        time.sleep(0.2)
    return place


@pytest.fixture
def serve(built, folder, builder, monkeypatch):
    """Makes a model that the packages serve, with a context of its own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(builder[0]))

    def make(context: int) -> HFModel:
        model = model_of(folder, context=context)
        model.compiled = Compiled(recipe_of(folder), model.step)
        model.compiled.look()
        assert set(model.compiled.packages) == set(SHAPES), model.compiled.reason
        model.compiled.steady = 4.0  # by the even clock the narrow one would never serve
        return model

    return make


@pytest.fixture
def served(serve) -> HFModel:
    return serve(200)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fresh(built, folder, cache):
    """Makes a model that finds the packages in a cache of this test's own, where nothing was said of them."""
    place = recipe_of(folder).place()
    place.mkdir(parents=True)
    for shape in SHAPES:
        shutil.copy(built / f"{shape}.pt2", place)

    def make() -> HFModel:
        model = model_of(folder, context=100)
        model.compiled = Compiled(recipe_of(folder), model.step)
        return model

    return make


@pytest.fixture
def started(monkeypatch) -> list[Path]:
    """The folders that builders were started for; none is."""
    calls: list[Path] = []
    monkeypatch.setattr(compiled, "start_builder", lambda recipe, place: calls.append(place))
    return calls


@pytest.fixture
def dead() -> Iterator[int]:
    """The number of a process that has ended and is not yet forgotten."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    yield child.pid
    child.wait()


@pytest.fixture
def alive() -> Iterator[int]:
    """The number of a process that runs, and is a builder by what it was started as."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", compiled.BUILDER])
    yield child.pid
    child.kill()
    child.wait()


def texts_and_tiers(rt: outrider.Runtime, count: int = 2) -> tuple[list[list[int]], dict[str, int]]:
    made = [rt.generate("the quick fox", max_tokens=8, ignore_eos=True) for _ in range(count)]
    tiers: dict[str, int] = {}
    for g in made:
        assert sum(g.stats["tiers"]["target"].values()) == g.stats["steps"]
        for tier, n in g.stats["tiers"]["target"].items():
            tiers[tier] = tiers.get(tier, 0) + n
    return [g.tokens for g in made], tiers
