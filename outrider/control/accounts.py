"""What steps took, held against what plain decoding would have taken: the accounts behind the guarantee, what plain steps cost now, and
what looking at drafters is worth.

Where nothing was verified, plain decoding would have taken as long, but for thinking, drafting and caches that wider steps left cold: the step's
own clock says what was owed for it, whatever the machine's pace is now.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from outrider.control.guard import Ledger
from outrider.control.rows import Row, looked
from outrider.control.step import Step
from outrider.control.tables import WARM, Page, Tables
from outrider.core.types import QUEUED, Sequence, StepRecord, stage
from outrider.measure.cost import DEEPEST

WEIGHED = ("depth:all", "depth:trimmed", QUEUED)  # reasons of drafts as long as seemed best
FADED = 0.05  # weight of the latest step in what thinking takes
LONG, SETTLED = 32, 8  # steps without a thought after which they are settled all the same; most of them that are asked how long steps take now
MANY = 128  # looks after which a pair is new no longer, however little it drafted
CHILLED = 1.5  # times what thinking took that it leaves cold for the plain step behind it (by hand: 0.9 to 1.7, steps of a sixth of a millisecond)
THOUGHTS = 8  # steps with one that are settled together: what has just run runs several times faster


@dataclass(slots=True)
class Held:
    """A step that is not settled yet."""

    seqs: list[Sequence]
    record: StepRecord
    step: Step | None  # what was thought in it; None for a plain step of which nothing was
    names: tuple[str, ...]  # drafters that were looked at
    calm: bool  # had many plain steps gone before?
    age: int  # steps of these texts before it


class Accounts:
    """Of all requests of a controller; steps are held for a while and settled together."""

    def __init__(self, tables: Tables, ledger: Ledger) -> None:
        self.tables, self.ledger = tables, ledger
        self.held: list[Held] = []  # steps that are not settled yet, the first first
        self.whose, self.mixed = tuple[str, ...](), False  # of which requests the last one held is; are others held, too?
        self.thoughts = 0  # how many of them were thought about
        self.counted, self.unsettled = 0, 0.0  # seconds that the first so many took beyond what they earned, nearly
        self.thinking = 0.0  # seconds of it, in steps in which somebody was asked
        self.quickest = math.inf  # seconds before drafting, of a step in which hardly anything was weighed
        self.looks = 0  # at drafters, so far

    def hold(self, held: Held) -> bool:
        """A step went by that may be settled later. Is it time to?"""
        requests = held.record.requests
        self.mixed = bool(self.held) and (self.mixed or (self.whose is not requests and self.whose != requests))
        self.whose = requests
        self.held.append(held)
        self.thoughts += held.step is not None
        return self.thoughts >= THOUGHTS or len(self.held) >= LONG

    def of_others(self, requests: tuple[str, ...]) -> bool:
        """Is any of what is held of other requests than these?"""
        return bool(self.held) and (self.mixed or self.whose != requests)

    def beyond(self, page: Page) -> float:
        """Seconds that what is not settled yet took beyond what it earned, nearly: counted when somebody asks, for most steps go by without."""
        earns = (1 + self.ledger.allowance) * page.owed
        for i in range(self.counted, len(self.held)):
            held = self.held[i]
            record = held.record
            if record.nodes():
                self.unsettled += _own(record) - earns * self.tables.costs.chill(held.age) * _fewest(record.emitted)
            else:  # charged by its own clock, but for what was thought and drafted
                self.unsettled += page.owed + self._overhead(record, _drafting(record)) - earns * (1.0 if held.calm else min(page.steady, 1.0))
        self.counted = len(self.held)
        return self.unsettled

    def settle(self, page: Page | None, rows: Callable[[list[Sequence]], list[Row]], *, guarded: bool) -> None:
        """Charge what is held. `guarded`: it is the steps that were slept through that must show whether the machine has become slow."""
        held, self.held, self.thoughts, self.counted, self.unsettled = self.held, [], 0, 0, 0.0
        if page is None:
            return
        for (thought, _), some in groupby(held, key=lambda h: (h.step is not None, h.record.requests)):
            if thought:
                for h in some:
                    self.charge(page, rows(h.seqs), h)
            else:
                self._slept(page, list(some), rows, guarded)

    def _slept(self, page: Page, slept: list[Held], rows: Callable[[list[Sequence]], list[Row]], guarded: bool) -> None:
        """Plain steps of the same rows in which nothing was thought. Each earns a share of what it took itself; some of them tell what such steps
        take now. What they leave is known at their end: a debt that the later ones pay back is none."""
        owed, spent, lost, cold, looks = list[float](), 0.0, 0.0, 0.0, [h.names for h in slept if h.names]
        for h in slept:
            took, earned = self._plainly(page, h, self.overhead(h.record, _drafting(h.record)))
            owed.append(earned)
            spent += took
            lost += took - (earned if self.tables.past.pays else min(earned, page.owed)) if h.names else 0.0
            cold += self._chilled(h.record) if h.names else 0.0
        for r, seq in enumerate(slept[0].seqs):
            earned = sum([owe * h.record.emitted[r] for owe, h in zip(owed, slept, strict=True)], 0.0)
            self.ledger.begin(seq.request.id, page.owed)
            self.ledger.charge(seq.request.id, earned, 1, spent, None)
        if looks:
            self._looked(page, rows(slept[0].seqs), looks[0], -lost, len(looks), -cold / len(looks))
        every = -(-len(slept) // SETTLED)
        for h, took in list(zip(slept, owed, strict=True))[::every]:
            self._told(page, took, _own(h.record), 0, h)
        for h in slept[::every] if guarded else slept[-1:]:
            self.tables.costs.verified(page.at, 0, _own(h.record) / self.tables.costs.pace / self.tables.costs.chill(h.age), h.calm)
        page.plain = self.tables.costs.verify[page.at].line[0] * self.tables.costs.pace

    def rested(self, seqs: list[Sequence], steps: int, plain: float) -> None:
        """Steps of plain decoding went by, of `plain` seconds each, that nobody looked at."""
        for seq in seqs:
            if seq.request.id in self.ledger.credit:
                self.ledger.charge(seq.request.id, plain, steps, steps * plain, None)

    def charge(self, page: Page, rows: list[Row], held: Held) -> None:
        """What a step gave and took."""
        seqs, record, step, names, chill = held.seqs, held.record, held.step, held.names, self.tables.costs.chill(held.age)
        took, drafting, owed, bad_case, nodes = _own(record), _drafting(record), page.owed * chill, None, min(record.nodes(), DEEPEST)
        read = self.ledger.forgive(seqs, drafting - step.spent * page.plain) if step is not None and step.reads else 0.0
        overhead, jit, spent = self.overhead(record, drafting), record.seconds.get("jit", 0.0), took - read
        own, gained, luck, pays = took - drafting - jit, owed, 0.0, self.tables.past.pays
        if not nodes:
            spent, owed = self._plainly(page, held, overhead)
            spent, gained, luck = spent - read, owed if pays else min(owed, page.owed * chill), -self._chilled(record)
        elif step is not None:
            unit = page.plain * page.spread * chill
            bad_case = step.room * unit
            spent = self.ledger.fairly(spent, (step.spent + page.seconds[nodes]) * unit)
            token = min(page.steady, 1.0) * page.plain * chill
            gained, luck = step.expected * token + jit, (sum(record.emitted) / len(seqs) - step.expected) * token
        for r, seq in enumerate(seqs):
            self.ledger.begin(seq.request.id, page.owed)
            self.ledger.charge(seq.request.id, owed, record.emitted[r], spent, bad_case)
        if names and (record.reason in WEIGHED if nodes else record.reason != "probe:plain"):
            # By what it took: after many plain steps more than is believed. Where looks do not pay, with all that it read, too, and what it left cold.
            self._looked(page, rows, names, gained - spent - (0.0 if pays else read), 1, luck)
        self._told(page, owed, own, nodes, held)

    def _looked(self, page: Page, rows: list[Row], names: tuple[str, ...], gained: float, times: int, luck: float = 0.0) -> None:
        """`times` looks gained so many seconds, as was expected, and `luck` beyond. Of a new pair that says nothing yet; but one on which nothing pays
        hardly drafts, and is not new for ever."""
        self.looks += times
        if page.plain and (self.tables.drafts >= WARM or self.looks > MANY):
            unit = page.plain if self.tables.past.pays else page.owed or page.plain  # rests are of steps among plain ones
            looked(rows, names, gained / times / unit, times, luck / unit)

    def _chilled(self, record: StepRecord) -> float:
        """Seconds that a plain step took longer for what was thought before it, where its own clock is believed: where looks pay."""
        return CHILLED * self._thought(record) if self.tables.past.pays else 0.0

    def _plainly(self, page: Page, held: Held, overhead: float) -> tuple[float, float]:
        """Of a step in which nothing was verified: seconds that it is charged, and that plain decoding would have taken for it."""
        bare = self.ledger.plainly(_own(held.record) - overhead, page.owed * page.spread * self.tables.costs.chill(held.age))
        return bare + overhead, bare * (1.0 if held.calm else min(page.steady, 1.0))

    def _told(self, page: Page, owed: float, own: float, nodes: int, held: Held) -> None:
        """What a step says of the machine's pace, and a plain one of what plain decoding takes."""
        costs, chill = self.tables.costs, self.tables.costs.chill(held.age)
        if not nodes:
            page.owed, page.outdated = costs.owe(page.at, owed / chill), costs.outdated(page.at)
        if expected := page.plain * chill * (page.seconds[nodes] if nodes else page.steady if held.calm else 1.0):
            page.plain *= costs.felt(own / expected, held.age)

    def overhead(self, record: StepRecord, drafting: float) -> float:
        """Seconds of thinking and `drafting`: what a step in which nothing was verified would not have taken in plain decoding."""
        choosing = _choosing(record)
        self.quickest = min(choosing, 1.001 * self.quickest)
        if record.levels:
            thinking = choosing - self.quickest + record.seconds.get("draft", 0.0)
            self.thinking += FADED * (min(thinking, 2 * self.thinking or thinking) - self.thinking)
        return self._overhead(record, drafting)

    def _overhead(self, record: StepRecord, drafting: float) -> float:
        """The same, and nothing is learned of it."""
        return self._thought(record) + (record.seconds.get("jit", 0.0) + drafting if record.levels else 0.0)  # a plan's first code, too

    def _thought(self, record: StepRecord) -> float:
        return max(_choosing(record) - self.quickest, 0.0) + (record.seconds.get("draft", 0.0) if record.levels else 0.0)


def _fewest(counts: tuple[int, ...]) -> int:
    fewest = counts[0]
    for count in counts:
        fewest = min(fewest, count)
    return fewest


def _own(record: StepRecord) -> float:
    """Seconds of a step, without what it read of a prompt."""
    return record.reading.seconds - record.seconds.get("prefill", 0.0)


def _choosing(record: StepRecord) -> float:
    """Seconds before drafting, with what drafters took to look whether they have a guess."""
    return record.seconds.get("choose", 0.0) + record.seconds.get("look", 0.0)


def _drafting(record: StepRecord) -> float:
    """Seconds of its drafters."""
    took = 0.0
    for name in record.levels:
        took += record.seconds.get(stage(name), 0.0)
    return took
