"""Several threads on one runtime: every text is what it is alone, and nobody is kept waiting for another's whole text."""

import sys
import threading
import time

import pytest
from tiny import spelling, tiny_tokenizer

from outrider.control.fixed import fixed
from outrider.core.types import Plan
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.models.toy import ToyModel
from outrider.runtime.door import Runtime
from outrider.runtime.engine import Engine
from outrider.runtime.turns import Turns

PROMPTS = ("the quick fox", "def add(", "she sells", "sea")


def runtime(rows: int = 2) -> Runtime:
    target, draft = ToyModel(300, 1, rows=rows), ToyModel(300, 1, rows=rows, name="draft", blend=(2, 0.2))
    return Runtime(Engine(target, {"model": ModelDrafter(draft)}, fixed(Plan((("model", 3, 1),))), rows), tiny_tokenizer(), {})


@pytest.fixture
def often():
    """Threads take turns as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_threads_share_a_runtime(often):
    """More of them than rows, some of which stream or leave early."""
    want, shared, found, failed = [runtime().generate(p, max_tokens=30, ignore_eos=True).tokens for p in PROMPTS], runtime(), {}, []

    def work(i: int) -> None:
        try:
            for turn in range(4):
                chunks = shared.stream(PROMPTS[i], max_tokens=30, ignore_eos=True)
                if (turn + i) % 4 == 0:
                    next(chunks)
                    chunks.close()
                elif (turn + i) % 2:
                    found[i, turn] = [t for chunk in chunks for t in chunk.tokens]
                else:
                    found[i, turn] = shared.generate(PROMPTS[i], max_tokens=30, ignore_eos=True).tokens
        except BaseException as wrong:
            failed.append(wrong)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(found) == 12
    assert all(tokens == want[i] for (i, _), tokens in found.items())
    assert not shared.engine.batcher.running and not shared.engine.batcher.waiting and shared.engine.target.rows.active == 0


def test_turns_come_in_the_order_in_which_they_were_asked_for():
    """Also to those who ask while others take one after the other; an owner may ask again."""
    turns, order = Turns(), []

    def waits(name: str) -> threading.Thread:
        count = len(turns.queue)

        def work() -> None:
            for _ in range(3):
                with turns, turns:
                    order.append(name)
                    while len(order) < 6 and not turns.queue:  # the other asks, before this one may ask again
                        time.sleep(0)

        thread = threading.Thread(target=work)
        thread.start()
        while len(turns.queue) == count:
            time.sleep(0)
        return thread

    with turns:
        threads = [waits("a"), waits("b")]
    for thread in threads:
        thread.join()
    assert order == ["a", "b"] * 3 and turns.owner == 0 and not turns.queue


@pytest.mark.parametrize("handed", [False, True])
def test_who_is_interrupted_while_it_waits_keeps_nobody_waiting(monkeypatch, handed):
    """Before its turn it leaves the queue; a turn that came meanwhile goes to the next."""
    turns, entered, release = Turns(), threading.Event(), threading.Event()

    class Gate:
        def acquire(self) -> None:
            self.asked = getattr(self, "asked", 0) + 1
            if self.asked == 2:
                if handed:
                    release.set()
                    while turns.owner != threading.get_ident():
                        time.sleep(0)
                raise KeyboardInterrupt

        def release(self) -> None: ...

    def holds() -> None:
        with turns:
            entered.set()
            release.wait()

    thread = threading.Thread(target=holds)
    thread.start()
    entered.wait()
    monkeypatch.setattr("outrider.runtime.turns.threading.Lock", Gate)
    with pytest.raises(KeyboardInterrupt), turns:
        raise AssertionError("it was not its turn")
    release.set()
    thread.join()
    assert turns.owner == 0 and not turns.queue and turns.depth == 0 and not turns.threads


def test_a_stream_that_ends_within_a_step_of_another_disturbs_nothing():
    """As where Python's collector finds it there: it is over when the step is."""
    streams, want = [], runtime().generate(PROMPTS[0], max_tokens=20, ignore_eos=True).tokens

    class Ending(Lookup):
        def extend(self, *step, **how):
            while streams:
                streams.pop().close()
            return super().extend(*step, **how)

    rt = runtime(rows=3)
    rt.engine.equip({"lookup": Ending()})
    rt.engine.controller = fixed(Plan((("lookup", 2, 1),)))
    others = [rt.stream(p, max_tokens=20, ignore_eos=True) for p in PROMPTS[1:3]]
    for other in others:
        next(other)
    streams += others
    del others, other
    tokens = [t for chunk in rt.stream(PROMPTS[0], max_tokens=20, ignore_eos=True) for t in chunk.tokens]
    assert tokens == want and not streams
    assert not rt.engine.batcher.running and rt.engine.target.rows.active == 0 and not rt.turns.threads


def test_nothing_is_measured_while_another_thread_waits(monkeypatch):
    rested = []
    rt = runtime()
    monkeypatch.setattr(rt.engine, "rest", lambda: rested.append(1))
    rt._rest()
    monkeypatch.setattr(rt.turns, "queue", [("another", None)])
    rt._rest()
    assert len(rested) == 1


def test_who_cannot_begin_is_told_and_nobody_else():
    """A stream goes on though the request of another one fails to begin in a step of its own; that one raises why."""

    class Picky(Lookup):
        def begin(self, seq):
            if seq.request.id == "request-3":
                raise RuntimeError("request-3 cannot begin")
            super().begin(seq)

    rt = spelling("hello world, this is a text", depth=2, rows=2)
    rt.engine.equip({"lookup": Picky()})
    rt.engine.controller = fixed(Plan())
    first, short, third = rt.stream("x", max_tokens=6), rt.stream("x", max_tokens=2), rt.stream("x", max_tokens=6)
    texts = [next(first).text]
    next(short)
    assert next(third).tokens == [], "there are two rows"
    texts += [chunk.text for chunk in first]
    with pytest.raises(RuntimeError, match="request-3 cannot begin"):
        next(third)
    assert "".join(texts) == rt.generate("x", max_tokens=6).text
    with pytest.raises(RuntimeError, match="begin"):
        rt.engine.drafters["lookup"].begin = lambda seq: (_ for _ in ()).throw(RuntimeError("nobody may begin"))
        rt.generate(["x", "x"])
    assert not rt.engine.batcher.running and not rt.engine.batcher.waiting
