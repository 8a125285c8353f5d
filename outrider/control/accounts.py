"""What steps took, held against what plain decoding would have taken: the accounts behind the guarantee, what plain steps cost now, and
what looking at drafters is worth.

Where nothing was verified, plain decoding would have taken as long, but for thinking, drafting and caches that wider steps left cold: the step's
own clock says what was owed for it, whatever the machine's pace is now.
"""

import math
from collections.abc import Callable

from outrider.control.guard import Ledger
from outrider.control.rows import Row, looked
from outrider.control.step import Step
from outrider.control.tables import WARM, Page, Tables
from outrider.core.types import Sequence, StepRecord
from outrider.measure.cost import CALM, DEEPEST

WEIGHED = ("depth:all", "depth:trimmed")  # reasons of drafts as long as seemed best
FADED = 0.05  # weight of the latest step in what thinking takes
LONG, SETTLED = 64, 8  # steps without a thought after which they are settled all the same; most of them that are looked at


class Accounts:
    """`slept`: steps without a thought that are not settled yet, with the drafters looked at in them; `thinking`: seconds of it, in steps in which somebody
    was asked; `quickest`: seconds before drafting, of a step in which hardly anything was weighed."""

    def __init__(self, tables: Tables, ledger: Ledger) -> None:
        self.tables, self.ledger = tables, ledger
        self.slept: list[tuple[list[Sequence], StepRecord, tuple[str, ...]]] = []
        self.thinking, self.quickest = 0.0, math.inf

    def sleep(self, seqs: list[Sequence], record: StepRecord, names: tuple[str, ...]) -> bool:
        """A step went by without a thought. Is it time to settle?"""
        self.slept.append((seqs, record, names))
        return len(self.slept) >= LONG

    def settle(self, page: Page | None, rows: Callable[[list[Sequence]], list[Row]], calm: int, *, guarded: bool) -> None:
        """Charge what was slept through: some steps, each for those behind it as well, for what is owed for them is what they took; what was thought
        in any of them is counted as it was. `calm`: plain steps in a row by now; `guarded`: it is these steps that must show whether the machine
        has become slow."""
        slept, every = self.slept, -(-len(self.slept) // SETTLED)
        taken = [(slept[i : i + every], calm - len(slept) + i >= CALM) for i in range(0, len(slept), max(every, 1))]
        self.slept = []
        if page is None or not slept:
            return
        for (first, *behind), quiet in taken:
            looks = [names for _, _, names in (first, *behind) if names]
            others = [record for _, record, _ in behind]
            self.charge(page, first[0], rows(first[0]), first[1], None, quiet, looks[0] if looks else (), others, len(looks))
        for ((_, record, _), *_), quiet in taken if guarded else taken[-1:]:
            self.tables.costs.verified(page.at, 0, _own(record) / self.tables.costs.pace, quiet)
        page.plain = self.tables.costs.verify[page.at].line[0] * self.tables.costs.pace

    def charge(
        self, page: Page, seqs: list[Sequence], rows: list[Row], record: StepRecord, step: Step | None, calm: bool, names: tuple[str, ...],
        others: list[StepRecord] | None = None, looks: int = 1,
    ) -> None:  # fmt: skip
        """What a step gave and took. `others`: plain steps like it, but for what was thought in them; `names`: who was looked at in `looks` of them."""
        took, owed, bad_case, nodes = _own(record), page.owed, None, min(max(record.drafted), DEEPEST)
        spent, own, beside = took, took - drafting_of(record) - record.seconds.get("jit", 0.0), self.beside(record)
        thought, times = beside + sum([self.beside(other) for other in others or ()]), 1 + len(others or ())
        worth = -thought / max(looks, 1) / page.plain if page.plain else 0.0
        if not nodes:
            bare = self.ledger.plainly(took - beside, owed * page.spread)
            spent, owed = bare + thought / times, bare * (1.0 if calm else min(page.steady, 1.0))
            page.owed, page.outdated = self.tables.costs.owe(page.at, owed), self.tables.costs.outdated(page.at)
        elif step is not None:
            bad_case = step.room * page.plain * page.spread
            spent = self.ledger.fairly(took, (step.spent + page.seconds[nodes]) * page.plain * page.spread)
            worth += step.expected * min(page.steady, 1.0) - page.seconds[nodes]
        for seq, tokens in zip(seqs, record.emitted, strict=True):
            self.ledger.charge(seq.request.id, owed, tokens * times, spent * times, bad_case)
        if names and self.tables.drafts >= WARM and (record.reason in WEIGHED if nodes else record.reason != "probe:plain"):
            looked(rows, names, worth, looks)
        if expected := page.plain * (page.seconds[nodes] if nodes else page.steady if calm else 1.0):
            page.plain *= self.tables.costs.felt(own / expected)

    def beside(self, record: StepRecord) -> float:
        """Seconds of thinking and drafting: what a step in which nothing was verified would not have taken in plain decoding."""
        choosing = record.seconds.get("choose", 0.0)
        self.quickest = min(choosing, 1.001 * self.quickest)
        thinking = choosing - self.quickest
        if record.levels:
            thinking += record.seconds.get("draft", 0.0)
            self.thinking += FADED * (min(thinking, 2 * self.thinking or thinking) - self.thinking)
            thinking += record.seconds.get("jit", 0.0)  # a plan's first code, too
        return drafting_of(record) + thinking


def _own(record: StepRecord) -> float:
    """Seconds of a step, without what it read of a prompt."""
    return record.reading.seconds - record.seconds.get("prefill", 0.0)


def drafting_of(record: StepRecord) -> float:
    """Seconds of its drafters."""
    return sum([record.seconds.get(f"draft {name}", 0.0) for name in record.levels])
