"""A package on disk and in memory: its threads, its weights, and what the clock said of it."""

import io
import json
import os
import zipfile

import packages
import pytest
import torch
from contracts import opened
from packages import OWN
from test_pages import flags_of, linux

from outrider.core.types import Draft
from outrider.models import compiled, package
from outrider.models.compiled import SHAPES
from outrider.models.contention import Contention
from outrider.models.step import Prefill

even, folder, builder, built = packages.even, packages.folder, packages.builder, packages.built
serve, served, fresh = packages.serve, packages.served, packages.fresh
cache, started, alive = packages.cache, packages.started, packages.alive


def test_a_package_runs_on_its_own_threads_and_gives_them_back(served):
    package = served.compiled.packages["any"]
    run, during = package.run, []
    package.run = lambda x: during.append(torch.get_num_threads()) or run(x)
    block = served.rows.layout(opened(served.rows, [5]), Draft(1), [~0]).blocks[0]
    for threads in (1, 2):
        package.threads = threads
        package(*served._inputs(block))
    assert during == [1, 2] and torch.get_num_threads() == 1


@pytest.mark.parametrize(("one", "two", "want"), [(1.0, 2.0, 1), (1.0, 1.0, 1), (2.0, 1.0, 2), (1e-3, 23.1e-3, 2), (1e-5, 1e-3, 1)])
def test_a_package_takes_the_fewer_threads_where_that_is_no_slower(served, monkeypatch, one, two, want):
    """Not where it is because others want the processors: that is not for good."""
    wide = served.compiled.packages["any"]
    wide.threads = 2
    monkeypatch.setattr(package, "seconds_of_each", lambda calls, **_: [{1: one, 2: two}[call.args[0]] for call in calls])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    wide.place(*served._inputs(served.rows.layout(opened(served.rows, [5]), Draft(1), [~0]).blocks[0]))
    assert wide.threads == want


def test_threads_are_chosen_the_way_a_package_runs_in_a_step(served, monkeypatch):
    """Some forwards in a row after another model's, which leaves nothing in the caches: two threads fetch weights sooner, though one would do once they are there."""
    monkeypatch.undo()
    wide, clock, cold, woken = served.compiled.packages["any"], [0.0], [False], []

    def run(self: package.Package, threads: int, *_: object) -> None:
        clock[0] += (4e-3 if threads == 1 else 2e-3) if cold[0] else (1e-3 if threads == 1 else 1.1e-3)
        cold[0] = False

    monkeypatch.setattr(package.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(
        torch.Tensor, "sum", lambda wake: (woken.append(wake.nbytes), clock.__setitem__(0, clock[0] + 1.0), cold.__setitem__(0, True))
    )
    monkeypatch.setattr(package.Package, "on", run)
    wide.place(torch.empty(1, 8, 5), torch.empty(0), [])
    assert wide.threads == 2 and len(woken) >= 6 and set(woken) == {package.WAKE}
    monkeypatch.setattr(package, "seconds_of_each", lambda calls, **_: [(call(), 1.0)[1] for call in calls])
    for columns, forwards in ((8, 3), (128, 1)):
        ran = []
        monkeypatch.setattr(package.Package, "on", lambda self, threads, *_, ran=ran: ran.append(threads))
        wide.place(torch.empty(1, columns, 5), torch.empty(0), [])
        assert ran == [1] * forwards + [2] * forwards, "a text is read once"


def test_a_package_asks_the_system_for_the_processor_s_tiles(built, served, monkeypatch):
    """By itself: nobody need have multiplied in this process before."""
    asked: list[int] = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(1))
    package.Package(built / "any.pt2", package.weights_of(served.step), True)
    assert asked


def test_weights_that_are_packed_alike_are_held_once(served, built):
    """Where Inductor packs for both packages, the narrow one has none of its own; what packages hold beside the model's weights is counted."""
    model = {w.data_ptr() for w in (*served.module.parameters(), *served.module.buffers())}
    wide, narrow = (served.compiled.packages[shape].weights for shape in ("any", "one"))
    assert {n for n in wide if n not in narrow} == set() or not OWN
    assert all(w.data_ptr() == wide[n].data_ptr() for n, w in narrow.items() if n in wide and torch.equal(w, wide[n]))
    assert served.compiled.packages["one"].shares == all(n in wide or w.data_ptr() in model for n, w in narrow.items())
    assert served.compiled.packages["one"].shares or not OWN
    named = dict(served.step.named_parameters(remove_duplicate=False))
    for one in served.compiled.packages.values():  # of whoever reads texts alone, too, in which they have longer names
        there = {n.removeprefix("step."): w for n, w in one.weights.items() if n.removeprefix("step.") in named}
        assert len(there) > 4 and all(w.data_ptr() == named[n].data_ptr() for n, w in there.items())
    held = {w.data_ptr(): w.nbytes for own in served.compiled.packages.values() for w in own.weights.values() if w.data_ptr() not in model}
    files = sum((built / f"{shape}.pt2").stat().st_size for shape in SHAPES)
    carried = sum(w.nbytes for shape in SHAPES for w in package._carried(built / f"{shape}.pt2").values())
    assert served.compiled.bytes == files - carried + sum(held.values())


@pytest.mark.parametrize("other", [False, True], ids=["alone", "beside another"])
def test_what_a_package_was_given_is_let_go_when_it_is_gone(served, other):
    """Its own weights and those that it was lent; what is held by others stays, and is read on."""
    first = served.compiled.packages["any"]
    known = package.weights_of(served.step)
    several = [package.Package(first.file, known, True) for _ in range(1 + other)]
    uses = {n: torch._C._storage_Use_Count(w.untyped_storage()._cdata) for n, w in known.items()}
    inputs = served._inputs(served.rows.layout(opened(served.rows, [5]), Draft(1), [~0]).blocks[0])
    want = [x.clone() for x in several[-1](*inputs)]
    own = {n: w for n, w in several[0].weights.items() if n not in known}
    assert own and any(n in known for n in several[0].weights)
    before = {n: torch._C._storage_Use_Count(w.untyped_storage()._cdata) for n, w in own.items()}
    del several[0]
    assert all(torch._C._storage_Use_Count(w.untyped_storage()._cdata) < before[n] for n, w in own.items())
    gone = [n for n, w in known.items() if torch._C._storage_Use_Count(w.untyped_storage()._cdata) < uses[n]]
    assert {first.weights[n].data_ptr() for n in gone} == {known[n].data_ptr() for n in first.weights if n in known}
    assert all(len(w.untyped_storage()) > 0 for w in known.values())
    if other:
        assert all(torch.equal(a, b) for a, b in zip(several[0](*inputs), want, strict=True))
    assert all(torch.isfinite(x).all() for x in first(*inputs))


def test_packages_carry_no_weights_that_the_model_has(served, built):
    """A model in 4 bits would lie in each of three: on the disk, and in memory while it is loaded."""
    for shape, eager in (("any", served.step), ("one", served.step), ("prefill", Prefill(served.step))):
        known, carried = package.weights_of(eager), package._carried(built / f"{shape}.pt2")
        asked = served.compiled.packages[shape].loader.get_constant_fqns()
        assert carried is not None and {*known} & {*asked}, "embedding and norms"
        assert not {name for name in carried if name in known and torch.equal(carried[name], known[name])}


def test_positions_are_turned_once_for_all_heads_and_layers(built):
    """And not by whoever reads their cosines."""
    for shape in SHAPES:
        with zipfile.ZipFile(built / f"{shape}.pt2") as archive:
            (code,) = [archive.read(name).decode() for name in archive.namelist() if name.endswith(".kernel.cpp")]
        assert [sum(f"{turn}(" in kernel for kernel in code.split('extern "C"')) for turn in ("cos", "sin")] == [1, 1], shape


def test_what_a_package_leaves_out_is_the_same_to_the_bit_and_laid_out_alike(tmp_path):
    file, known = tmp_path / "a.pt2", {"same": torch.ones(3, 4), "other": torch.ones(5), "turned": torch.eye(3), "dtype": torch.ones(2)}
    parts = {"same": torch.ones(3, 4), "other": torch.ones(5) * 2, "turned": torch.eye(3), "dtype": torch.ones(2).double(), "made": torch.ones(7)}
    places = {n: [f"weight_{i}", list(w.shape), list(w.stride()[::-1] if n == "turned" else w.stride()), 0] for i, (n, w) in enumerate(parts.items())}
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data/aotinductor/model/weights_config.json", json.dumps(places))
        archive.writestr("a/data/aotinductor/model/code.so", b"code")
        for name, weight in parts.items():
            torch.save(weight, held := io.BytesIO())
            archive.writestr(f"a/data/weights/{places[name][0]}", held.getvalue())
    package.leave_out(file, known)
    left = package._carried(file)
    assert (
        left is not None
        and {*left} == {"other", "turned", "dtype", "made"}
        and all(torch.equal(left[n], parts[n].T if n == "turned" else parts[n]) for n in left)
    )
    with zipfile.ZipFile(file) as archive:
        assert archive.read("a/data/aotinductor/model/code.so") == b"code" and not [n for n in archive.namelist() if n.endswith("weight_0")]
    assert [f.name for f in tmp_path.iterdir()] == ["a.pt2"]
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data/aotinductor/model/code.so", b"code")
    package.leave_out(file, known)
    assert package._carried(file) is None, "its weights are part of its code"


@linux
def test_packed_weights_lie_on_huge_pages(served):
    model = {w.data_ptr() for w in (*served.module.parameters(), *served.module.buffers())}
    packed = [w for own in served.compiled.packages.values() for w in own.weights.values() if w.data_ptr() not in model and w.is_contiguous()]
    assert packed and all("hg" in flags_of(w.data_ptr()).split() for w in packed)


def test_seconds_are_those_of_the_lower_quartile(monkeypatch):
    monkeypatch.undo()
    calls = []
    (took,) = package.seconds_of_each([lambda: calls.append(1)])
    assert 0 <= took < 1 and 3 <= len(calls) <= 50
    calls.clear()
    assert package.seconds_of_each([lambda: calls.append(1)], patience=0.0)[0] >= 0 and len(calls) == 3
    clock = [0.0]
    monkeypatch.setattr(package.time, "perf_counter", lambda: clock[0])
    assert package.seconds_of_each([int], between=lambda: clock.__setitem__(0, clock[0] + 1.0)) == [0.0], "what is done between is not timed"


def test_what_is_compared_is_timed_in_turn(monkeypatch):
    """A machine that is slow for a while is slow for all: the dearer one does not look cheaper for having been timed before or after that."""
    monkeypatch.undo()
    clock = [0.0]
    monkeypatch.setattr(package.time, "perf_counter", lambda: clock[0])

    def work(seconds: float) -> None:
        clock[0] += seconds * (3.0 if clock[0] > 0.06 else 1.0)

    dear, cheap = package.seconds_of_each([lambda: work(2e-3), lambda: work(1e-3)])
    assert dear == pytest.approx(2 * cheap)


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr(package, "contention", Contention())  # a busy machine would leave the process with fewer
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_a_package_that_was_faster_before_is_not_timed_again(fresh, monkeypatch, two_threads):
    """What the clock said is kept beside it, threads as they were chosen last; that it agrees is seen at every start. Fewer threads than there are may be a busy
    moment's choice: they are chosen again."""
    first, placed, compared = fresh().compiled, [], []
    for own in first.packages.values():
        own.threads = 2
        own.keep()
    monkeypatch.setattr(package.Package, "place", lambda self, *_, **__: placed.append(self.file.stem))
    monkeypatch.setattr(compiled, "apart", lambda eager, own, *_, **__: compared.append(own.file.stem) or 0.0)
    assert {own.threads for own in fresh().compiled.packages.values()} == {2} and placed == [] and compared == list(SHAPES)
    first.packages["any"].threads, first.placed = 1, -1e9
    first.rest()
    assert placed == list(SHAPES)
    placed.clear()
    assert [own.threads for own in fresh().compiled.packages.values()] == [1, 2, 2] and placed == ["any"]
    placed.clear()
    torch.set_num_threads(1)
    assert {own.threads for own in fresh().compiled.packages.values()} == {1} and placed == ["one", "prefill"], "more threads than there are"


def test_a_text_has_no_fewer_threads_than_a_step(fresh, monkeypatch, two_threads):
    """A moment in which one thread read a text as quickly as two would be believed at every start: its columns are more than a step's."""
    first, asked = fresh().compiled, []
    monkeypatch.setattr(compiled.Compiled, "_share", lambda self, reader: asked.append(reader.threads))
    monkeypatch.setattr(package.Package, "place", lambda self, *_, **__: setattr(self, "threads", 1 if self.file.stem == "prefill" else 2))
    for shape, threads in (("any", 2), ("one", 2), ("prefill", 1)):
        first.packages[shape].threads = threads
        first.packages[shape].keep()
    for found in (fresh().compiled, fresh().compiled):
        assert [own.threads for own in found.packages.values()] == [2, 2, 2] and asked == [2], "asked once, and kept"
    found.placed = -1e9
    found.rest()
    assert [own.threads for own in found.packages.values()] == [2, 2, 2] and asked == [2, 2]
    found.packages["any"].threads = 1
    found.packages["any"].keep()
    monkeypatch.setattr(package.Package, "place", lambda self, *_, **__: setattr(self, "threads", 1))
    assert [own.threads for own in fresh().compiled.packages.values()] == [1, 2, 2], "it may have more"


@pytest.mark.parametrize("end", ["all are built", "its builder is gone"])
@pytest.mark.parametrize("begun", [0, 2])
def test_what_was_chosen_beside_a_builder_is_chosen_again(fresh, folder, cache, monkeypatch, two_threads, begun: int, end: str):
    """One thread is as quick as two there, which also says how texts are read and who serves single tokens; some were built before the wait, and a builder
    may die before the last. A start that finds all has chosen once already."""
    place, done, aside = packages.recipe_of(folder).place(), [], cache / "aside"
    aside.mkdir()
    for shape in SHAPES[begun:]:
        (place / f"{shape}.pt2").rename(aside / f"{shape}.pt2")
    last, weigh = 1 if end == "its builder is gone" else 0, compiled.Compiled._weigh

    def choose(own: package.Package, *given: object, **more: object) -> None:
        own.threads = 2 if own.file.stem in done else 1
        done.append(own.file.stem)

    def build(_: float) -> None:
        for file in sorted(aside.iterdir())[:1]:
            file.rename(place / file.name)

    monkeypatch.setattr(package.Package, "place", choose)
    monkeypatch.setattr(compiled, "held", lambda *_: len([*aside.iterdir()]) > last)
    monkeypatch.setattr(compiled.Compiled, "_start", lambda self: None)
    monkeypatch.setattr(compiled.Compiled, "_weigh", lambda self: done.append("weighed") or weigh(self))
    monkeypatch.setattr(compiled.time, "sleep", build)
    found = fresh().compiled
    found.wait()
    shapes = list(found.packages)
    assert len(shapes) == len(SHAPES) - last and {own.threads for own in found.packages.values()} == {2}
    assert done[-len(shapes) - 1 :] == [*shapes, "weighed"] and len(done) == 2 * len(shapes) + 2
    if not last:
        found.packages["any"].threads = 1
        found.packages["any"].keep()
        done.clear()
        fresh().compiled.wait()
        assert done == ["any", "weighed"]


@pytest.mark.parametrize("trouble", ["rebuilt", "another processor", "damaged", "of another kind", "never", "always"])
def test_what_was_said_of_another_package_is_not_believed(fresh, monkeypatch, trouble):
    wide = fresh().compiled.packages["any"]
    note = wide.file.with_suffix(".json")
    assert wide.recalled()
    if trouble == "rebuilt":
        os.utime(wide.file, (1, 1))
    elif trouble == "another processor":
        monkeypatch.setattr(package.processor, "name", lambda: "another")
    elif trouble in ("never", "always"):
        note.write_text(json.dumps(json.loads(note.read_text()) | {"least": 10**9 if trouble == "never" else 1}))
    else:
        note.write_text(note.read_text()[:-1] if trouble == "damaged" else '["of", "threads"]')
    later = package.Package(wide.file, wide.weights, True)
    assert not later.recalled()
    later.keep()
    assert later.recalled() and [file.name for file in sorted(note.parent.glob("*.json"))] == ["any.json", "one.json", "prefill.json"]
