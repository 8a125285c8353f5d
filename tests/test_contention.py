"""Threads while other processes want the processors: fewer where calls come late and that is quicker, all of them again when it is over."""

import itertools
import os
import random
import time

import packages
import pytest
import torch
from contracts import opened
from test_pages import linux

from outrider.bench import run
from outrider.core.types import Draft
from outrider.models import contention, hf, package
from outrider.models.contention import ALL, Contention
from outrider.models.load import load_model

even, folder, builder, built = packages.even, packages.folder, packages.builder, packages.built
serve, served = packages.serve, packages.served
STEP, SLICE = 1e-3, 12e-3


@pytest.fixture(autouse=True)
def switched(monkeypatch):
    """How often somebody else had a processor: never, unless a test says otherwise."""
    count = [0]
    monkeypatch.setattr(contention, "switches", lambda: count[0])
    return count


class World:
    """Calls of a package on a clock of its own: `busy` says whether somebody else runs at a time, `cost` what a call takes of the usual, by threads."""

    def __init__(self, wanted=2, busy=lambda now: False, cost=lambda threads, busy: SLICE if busy and threads > 1 else (1 + (threads == 1)) * STEP):
        self.of, self.known, self.now, self.wanted, self.busy, self.cost, self.had = Contention(), {}, 0.0, wanted, busy, cost, []

    def call(self, shape=(1, 9)):
        self.had.append(self.of.threads(self.wanted, self.now))
        took = self.cost(self.had[-1], self.busy(self.now))
        self.now += took
        self.of.see(self.known, shape, took, self.wanted, self.now)
        return took

    def until(self, when):
        """Calls, and the seconds that they took beyond those of nobody beside."""
        before = len(self.had)
        while self.now < when:
            self.call()
        return self.had[before:]


def test_nobody_beside_takes_no_thread_away():
    draw = random.Random(1)
    world = World(cost=lambda threads, busy: STEP * draw.choice((0.9, 1.0, 1.1, 1.8, 2.9)))
    assert set(world.until(20.0)) == {2} and world.of.taken == 0


def test_a_single_stall_takes_no_thread_away():
    """Nor do two close together, however long, and two more after a while: the system does other things, too."""
    world = World()
    world.until(0.1)
    for _ in range(5):
        for _ in range(2):
            world.of.see(world.known, (1, 9), 60.0, 2, world.now)
        assert set(world.until(world.now + 0.05)) == {2}


def test_beside_a_busy_process_calls_have_one_thread_within_a_few(caplog):
    world = World(busy=lambda now: now > 0.1)
    world.until(0.1)
    had = world.until(30.0)
    assert had.index(1) <= 4, "each of them takes a slice of the system's time"
    assert set(had[had.index(1) : had.index(1) + 400]) == {1}
    assert sum(threads == 2 for threads in had) * SLICE < 0.03 * 30.0, "all are asked again, ever more seldom"
    assert len(caplog.records) == 1 and "fewer threads (1)" in caplog.text, "said once"
    assert world.of.taken == sum(a == 2 and b == 1 for a, b in itertools.pairwise(had))


def test_all_threads_are_there_again_when_it_is_over():
    world = World(busy=lambda now: 0.1 < now < 20.0)
    world.until(20.0)
    had = world.until(60.0)
    assert had.index(2) * 2 * STEP <= contention.SELDOM + STEP and set(had[had.index(2) :]) == {2}


def test_asking_again_begins_anew_after_a_calm_while():
    """A neighbour that comes now and then is met as the first time: for a second."""
    world = World(busy=lambda now: now % 30 > 29.5)
    for turn in range(3):
        world.until(30.0 * turn + 29.0)
        world.until(30.0 * turn + 29.6)
        assert world.had[-1] == 1
        assert world.until(30.0 * turn + 31.5)[-1] == 2


def test_what_is_dearer_for_itself_keeps_its_threads():
    """A text grew a hundredfold at once: one thread is no quicker, and a trial or two are all that it costs."""
    long = [1.0]
    world = World(cost=lambda threads, busy: long[0] * STEP * (3 - threads))
    world.until(0.1)
    long[0] = 100.0
    had = world.until(100.0)
    assert 0 < sum(threads == 1 for threads in had) <= 2 * contention.TRIED and world.of.taken == 0
    assert set(had[-100:]) == {2}


def test_fewer_threads_are_given_the_time_to_be_quicker():
    """The system first makes up to others for what more threads had, and its slices come in turn."""
    world = World(busy=lambda now: now > 0.1)

    def cost(threads: int, busy: bool) -> float:
        unsettled = world.now < 0.24 or 0.3 < world.now < 0.31
        return (12 if busy and threads == 1 and unsettled else 10 if busy and threads > 1 else 3 - threads) * STEP

    world.cost = cost
    world.until(0.1)
    had = world.until(1.0)
    assert set(had[had.index(1) :]) == {1}


def test_who_comes_when_others_are_there_has_fewer_threads_too(switched):
    """All calls take long from the first on, so none is late; but somebody else had the processors again and again."""
    world = World(busy=lambda now: True)
    while world.now < 10.0:
        switched[0] += 3 * (world.call() == SLICE)
    assert world.had.index(1) * SLICE < 0.3
    assert sum(threads == 2 for threads in world.had) * SLICE < 0.15 * 10.0, "and again whenever all were asked"


def test_switches_that_cost_nothing_take_no_thread_away(switched):
    """Python threads that do something else meanwhile, for one: it is tried ever more seldom."""
    world = World()
    while world.now < 60.0:
        switched[0] += 1
        world.call()
    assert world.of.taken == 0 and sum(threads == 1 for threads in world.had) * STEP < 0.03 * 60.0


def test_where_fewer_threads_are_as_quick_nobody_is_to_blame(switched, caplog):
    """Eager steps of a small model: one thread or two, the clock says now this, now that."""
    draw = random.Random(2)
    world = World(cost=lambda threads, busy: STEP * draw.choice((0.9, 1.0, 1.1)) * (0.98 if threads == 1 else 1.0))
    while world.now < 60.0:
        switched[0] += 1
        world.call()
    assert 1 in world.had and world.of.taken == 0 and not caplog.records


def test_a_trial_in_which_nothing_comes_that_is_known_is_given_up(switched):
    """A text in which every size is new, right after a start in which other processes had the processors: it would have one thread to its end."""
    world = World()
    world.until(0.15)
    switched[0] += 100
    world.until(0.25)
    assert world.had[-1] == 1, "a trial"
    before = len(world.had)
    for size in range(400):
        world.call((2 + size, 9))
    had = world.had[before:]
    assert had.index(2) <= contention.STRANGERS and set(had[had.index(2) :]) == {2} and world.of.taken == 0


@linux
def test_a_process_counts_how_often_another_has_its_processor(monkeypatch):
    """Both on one, where they must take turns."""
    monkeypatch.undo()
    may, before = os.sched_getaffinity(0), contention.switches()
    os.sched_setaffinity(0, {min(may)})
    try:
        with run.busy(1):
            end = time.monotonic() + 60.0
            while contention.switches() == before and time.monotonic() < end:
                sum(range(10000))
    finally:
        os.sched_setaffinity(0, may)
    assert contention.switches() > before


def test_shapes_are_late_each_by_its_own_measure():
    """A text of five hundred columns is no late token, and tokens are late though texts come between."""
    sizes = {(1, 9): 1.0, (500, 9): 200.0}
    asked = [(1, 9)]
    world = World(cost=lambda threads, busy: sizes[asked[0]] * STEP * (3 - threads))
    for turn in range(300):
        asked[0] = (500, 9) if turn % 10 == 9 else (1, 9)
        world.call(asked[0])
    assert set(world.had) == {2} and world.of.taken == 0


@pytest.mark.parametrize("threads, rungs", [(16, [16, 12, 9, 7]), (8, [8, 6]), (3, [3, 2, 1])])
def test_many_threads_are_taken_away_a_quarter_at_a_time(threads, rungs):
    """Until those that are left run undisturbed."""
    world = World(
        wanted=threads, cost=lambda had, busy: SLICE * had / threads if busy and had > rungs[-1] else STEP * threads / had, busy=lambda now: now > 0.1
    )
    world.until(0.1)
    seen = list(dict.fromkeys(world.until(0.9)))
    assert seen == rungs


def test_a_text_that_grows_is_not_late():
    grown = [1.0]
    world = World(cost=lambda threads, busy: grown[0] * STEP * (3 - threads))
    for _ in range(2000):
        grown[0] *= 1.003
        world.call()
    assert grown[0] > 100 and set(world.had) == {2}


@pytest.fixture
def calm(monkeypatch):
    mine = Contention()
    for who in (package, hf):
        monkeypatch.setattr(who, "contention", mine)
    return mine


@pytest.fixture
def threads():
    """Sets torch's."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def block_of(model):
    return model.rows.layout(opened(model.rows, [5]), Draft(1), [~0]).blocks[0]


@pytest.mark.parametrize("own, pinned, want", [(2, False, 1), (2, True, 2), (1, False, 1)])
def test_a_package_asks_how_many_it_may_have(served, calm, threads, own, pinned, want):
    """A strict one does not; what one thread takes is nobody's fault."""
    threads(2)
    wide, ran = served.compiled.packages["any"], []
    wide.threads, wide.pinned, calm.most, calm.again = own, pinned, 1, float("inf")
    wide.run = lambda _: ran.append(torch.get_num_threads()) or []
    wide(*served._inputs(block_of(served)))
    assert ran == [want] and torch.get_num_threads() == 2
    assert not wide.usual, "learned with fewer threads than are usual"


@pytest.mark.parametrize("pinned", [False, True])
def test_eager_steps_ask_too(folder, calm, threads, pinned):
    """Until packages are there; not where the text must stay what it is to the bit."""
    model, ran = load_model(folder, device="cpu", compile="off")[0], []
    threads(2)
    block = block_of(model)
    calm.most, calm.again, model.pinned = 1, float("inf"), pinned
    step, model.step = model.step, lambda *given, **how: ran.append(torch.get_num_threads()) or step(*given, **how)
    model._eager(block)
    assert ran == [2 if pinned else 1] and torch.get_num_threads() == 2
    calm.most = ALL
    model._eager(block)
    assert len(model.usual) == (not pinned)


def test_packages_tell_how_long_their_calls_took(served, calm, threads, monkeypatch):
    threads(2)
    wide, clock, late = served.compiled.packages["any"], [0.0], []
    monkeypatch.setattr(contention.time, "perf_counter", lambda: clock[0])
    wide.run = lambda _: clock.__setitem__(0, clock[0] + (SLICE if late and torch.get_num_threads() > 1 else STEP)) or []
    given, wide.threads = served._inputs(block_of(served)), 2
    wide(*given)
    assert list(wide.usual.values()) == pytest.approx([STEP]) and calm.most == ALL
    late.append(1)
    for _ in range(300):  # a fifth of a second with one thread
        wide(*given)
    assert calm.most == 1 and calm.taken == 1


@pytest.mark.parametrize("independent, told, pinned", [(True, (1.0, 1.0), False), (True, (1.0, 1.5), True), (False, (1.0, 1.0), True)])
def test_strict_packages_keep_their_threads_unless_those_change_no_bit(served, threads, independent, told, pinned):
    """Which is tried on the package that serves, at one column and at several, and not only said by it."""
    threads(2)
    wide, asked = served.compiled.packages["any"], []

    def run(given):
        asked.append((given[0].shape[1], torch.get_num_threads()))
        return [torch.full((3,), told[torch.get_num_threads() == 1 and given[0].shape[1] > 1])]

    wide.threads, wide.independent, wide.run = 2, independent, run
    served.compiled.settle()
    assert wide.pinned == pinned and asked == ([(1, 2), (1, 1), (package.WIDE, 2), (package.WIDE, 1)] if independent else [])


def test_a_strict_step_gives_the_same_bits_while_others_want_the_processors(served, calm, threads):
    threads(2)
    served.compiled.packages["any"].threads = 2
    served.pin()
    given, told = served._inputs(block_of(served)), []
    for calm.most in (ALL, 1):
        calm.again = float("inf")
        told.append(served.compiled.packages["any"](*given)[0].clone())
    assert torch.equal(*told)


def test_threads_are_not_chosen_while_others_want_the_processors(served, monkeypatch):
    placed = []
    monkeypatch.setattr(package.Package, "place", lambda self, *_, **__: placed.append(self.file.stem))
    served.compiled.placed = -1e9
    monkeypatch.setattr(contention.contention, "most", 1)
    served.compiled.rest()
    assert placed == []
    monkeypatch.setattr(contention.contention, "most", ALL)
    served.compiled.rest()
    assert placed
