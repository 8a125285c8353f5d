"""How many threads a model's steps have while other processes want the processors, too.

Threads of a kernel wait for one another, and one that lost its processor comes back after a slice of the system's time: milliseconds, in a step of
a hundred kernels of microseconds. Beside one busy process two threads on two processors take ten to a hundred times as long, and one thread hardly
longer than alone. So where calls come late, or others have the processors often, some threads are taken away, which stays so while it is clearly
quicker, and now and then all are asked again.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

ALL = 1 << 30
LATE = 3.0  # times what a call usually takes: beyond that it is late
HELD, LATES = 0.02, 3  # seconds, beside a late call's own, that calls are late in all until threads are taken away, and how many of them
TRIED, TRIAL = 8, 0.1  # calls with fewer, and seconds of them, that say whether that is quicker: others' slices come in turn
STRANGERS = 16  # calls of sizes that never came before, after which a trial is given up
QUICKER = 0.8  # of the time that calls took before, which they must take at most with fewer: where it is all the same, it is not for others
SETTLES = 0.1  # seconds before, in which the system is still making up to others for what more threads had
SLOWLY = 64  # calls in which what is usual follows a text that grows
WINDOW, SWITCHES = 0.1, 100.0  # seconds; times a second that somebody else had a processor instead, beyond which fewer threads are tried in any case
SOON, SELDOM = 1.0, 8.0  # seconds until all are asked again, twice as many each time in vain up to so many
Usual = dict[tuple[int, int], float]  # seconds of calls with all their threads, by columns and how many bits their slots take
Told = TypeVar("Told")
log = logging.getLogger("outrider")


class Contention:
    """What calls show of it. `most`: threads that one may have now; `taken`: times that some were taken away."""

    def __init__(self) -> None:
        self.one = threading.Lock()  # who counts: runtimes may step in threads of their own
        self.most, self.before, self.taken = ALL, ALL, 0
        self.late, self.lates, self.took, self.usual = 0.0, 0, 0.0, 0.0  # of calls since all was made up for, or since the trial began
        self.trial, self.was = 0, 0.0  # calls it still lasts; how many times as long as usual calls took before it
        self.strangers = 0  # calls in it of which it is not known what is usual
        self.again, self.patience, self.since = 0.0, SOON, -math.inf
        self.looked, self.switches = -math.inf, 0  # when it was counted how often somebody else had a processor, and how often
        self.lately, self.of = 0.0, 0.0  # seconds of calls since then, and what they take usually

    def call(self, usual: Usual, wanted: int, given: list[Any], step: Callable[[list[Any]], Told]) -> Told:
        """What a step gives of a table, the slots that are read, and what else it is given (a list that it may empty), on the threads that it wants or
        fewer. `usual`: its own, kept here."""
        (rows, width, _), (slots,), start = given[0].shape, given[1].shape, time.perf_counter()
        out = on(self.threads(wanted, start), step, given)
        end = time.perf_counter()
        self.see(usual, (rows * width, slots.bit_length()), end - start, wanted, end)
        return out

    def threads(self, wanted: int, now: float) -> int:
        """How many a call has of those that it wants."""
        if self.most >= wanted:
            return wanted
        with self.one:
            if self.most < wanted and not self.trial and now >= self.again:
                self._have(ALL, now, 0.0)
            return min(wanted, self.most)

    def see(self, usual: Usual, shape: tuple[int, int], took: float, wanted: int, now: float) -> None:
        """A call of this shape took so many seconds, until `now`, with `threads` of those that it wanted. Where nothing is late, which is nearly always,
        that is all: what two threads say at once may count once."""
        known = usual.get(shape, math.inf)
        if took <= LATE * known < math.inf and not (self.late or self.trial) and self.most >= wanted and now - self.looked < WINDOW:
            usual[shape] = _usually(known, took)
            self.lately, self.of = self.lately + took, self.of + known
            return
        with self.one:
            self._see(usual, shape, took, wanted, now)

    def _see(self, usual: Usual, shape: tuple[int, int], took: float, wanted: int, now: float) -> None:
        had, known = min(wanted, self.most), usual.get(shape, math.inf)
        if had == wanted and took <= LATE * known:
            usual[shape] = _usually(known, took)
        if known == math.inf or (self.trial and now - self.since < SETTLES):
            self._strange(known, now)
            return
        self.took, self.usual = self.took + took, self.usual + known
        if self.trial:
            self._try(usual, shape, now)
            return
        self.lately, self.of = self.lately + took, self.of + known
        bound = LATE * known * wanted / had
        self.late, self.lates = min(max(self.late + took - bound, 0.0), 2 * (HELD + bound)), self.lates + (took > bound)
        may = had > 1 and (had < wanted or now >= self.again)
        if not self.late:
            self._forget()
        elif may and self.late > HELD + bound and self.lates >= LATES:
            self._take(self.took / self.usual, had, now)
        if now - self.looked >= WINDOW:
            if self._crowded(now) and may and not self.trial:  # of who came when others were there it is not known what is usual
                self._take(self.lately / self.of, had, now)
            self.lately = self.of = 0.0

    def _crowded(self, now: float) -> bool:
        """Had somebody else a processor more often than nobody minds, since that was asked last?"""
        count, since, self.looked = switches(), self.looked, now
        before, self.switches = self.switches, count
        return count - before > SWITCHES * (now - since)

    def _have(self, threads: int, now: float, patience: float) -> None:
        self.most, self.since, self.again = threads, now, now + patience
        self._forget()

    def _forget(self) -> None:
        self.late, self.lates, self.took, self.usual = 0.0, 0, 0.0, 0.0

    def _take(self, was: float, had: int, now: float) -> None:
        """Calls took so many times as long as usual: fewer threads are tried."""
        if self.most == ALL:
            self.patience = min(2 * self.patience, SELDOM) if now - self.since < SELDOM else SOON
        self.was, self.before, self.trial, self.strangers = was, self.most, TRIED, 0
        self._have(fewer(had), now, self.patience)

    def _strange(self, known: float, now: float) -> None:
        """A call that tells a trial nothing. Where nobody knows what such calls take, and no others come, all threads are there again: a text may go on
        so for long."""
        self.strangers += self.trial > 0 and known == math.inf
        if self.strangers >= STRANGERS:
            self.trial = 0
            self._have(self.before, now, self.patience)

    def _try(self, usual: Usual, shape: tuple[int, int], now: float) -> None:
        self.trial = max(self.trial - 1, 0 if self.took >= TRIAL else 1)
        if self.trial:
            return
        if self.took < QUICKER * self.was * self.usual:
            self.taken += 1
            if self.taken == 1:
                log.warning("other processes want the processors: steps have fewer threads (%d) while that is quicker", self.most)
            self._have(self.most, now, self.patience)
        else:  # it is not for others that calls took so long
            usual[shape] *= self.was
            self._have(self.before, now, self.patience)


def _usually(known: float, took: float) -> float:
    return took if took < known else known + (took - known) / SLOWLY


def fewer(threads: int) -> int:
    """A quarter less: where there are many, most run undisturbed."""
    return threads - max(threads // 4, 1)


def switches() -> int:
    """Times so far that this process would have gone on and somebody else had the processor."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource else 0


def on(threads: int, step: Callable[[list[Any]], Told], given: list[Any]) -> Told:
    """What it gives, on so many threads of torch's."""
    before: int = torch.get_num_threads()
    if threads == before:
        return step(given)
    torch.set_num_threads(threads)
    try:
        return step(given)
    finally:
        torch.set_num_threads(before)


contention = Contention()  # of this process: what takes a processor away takes it from all of its steps
