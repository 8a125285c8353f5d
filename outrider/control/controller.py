"""The scheduler: at every step whether, by whom and how far to speculate, by one rule.

Maximise (1 + F) / C: the tokens expected over what the step costs; plain decoding scores 1. F sums the survivals of the
nodes that are verified; C counts drafting, verification and host, in plain steps, from measured tables. The rule is used
before a drafter that costs something starts, while it goes on, and before verification, which takes the best nodes.
Sees records and drafts, never logits; what it returns cannot change a text.
"""

from collections.abc import Callable
from typing import ClassVar

from outrider.control.accounts import Accounts, Held
from outrider.control.guard import Ledger
from outrider.control.plans import Plans
from outrider.control.rows import GUESSES, LOST, RESTS, SHARE, UNPAID, WHOLE, Row, awake, remember, soonest
from outrider.control.sleep import EARN, GUARD, RESTING, SOUND, Sleep
from outrider.control.starts import SAMPLE, Starts
from outrider.control.step import PROBED, Step
from outrider.control.tables import BATCH, LOOK, WARM, Lesson, Page, Tables
from outrider.core import tree
from outrider.core.types import AHEAD, OFF, POINT, QUEUED, Draft, Places, Plan, Sequence, StepRecord
from outrider.measure.cost import CALM, COLD, DEEPEST, Situation, situation

REMEASURE, FIRST = 256, 2  # steps after which a plain one is taken, to measure what it costs now; plain steps before all else
AMPLE = 16.0  # plain steps of credit with which no plan hangs on how long plain decoding takes just now
YOUNG = 256  # steps that are all learned from; of later ones, one in SAMPLE


class Adaptive:
    """A Controller that learns from every step. `tables`: of its drafters, the cheapest first; `tier()`: what serves the target now; `slowdown`: how
    much slower than plain decoding a request may become; `cautious`: somebody measures drafters while nobody waits, so one that costs something and
    was never measured is not tried in a request; `tails`: drafters that can begin with a text's end."""

    asks: ClassVar[bool] = True

    def __init__(
        self, tables: Tables, tier: Callable[[], str], slowdown: float = 0.05, *, cautious: bool = False, tails: frozenset[str] = frozenset()
    ) -> None:
        self.tables, self.tier, self.ledger = tables, tier, Ledger(slowdown, holdups=tables.costs.holdups)
        self.starts = Starts(tables, self.ledger, cautious, tails)
        self.accounts = Accounts(tables, self.ledger)
        self.rows: dict[str, Row] = {}
        self.plans = Plans(list(tables.bits))
        self.step: Step | None = None
        self.known: tuple[list[Sequence], Situation] | None = None
        self.page: Page | None = None
        self.last: tuple[list[Sequence], StepRecord] | None = None
        self.looked: tuple[str, ...] = ()  # drafters that were looked at in this step
        self.looking = 0.0  # seconds that they took to read what is new in the texts
        self.sleep, self.silent = Sleep(), False
        self.lessons: list[Lesson] = []
        self.steps, self.since_plain, self.calm = 0, 0, 0

    # Before drafting.

    def choose(self, seqs: list[Sequence]) -> tuple[Plan, str]:
        """A plain step, where that is known already; else who may be asked, at most, and the reason if none of them says anything: what they say is
        weighed as it comes (`more`, `fill`)."""
        self.looking, sleep = 0.0, self.sleep
        sleep.sound = sleep.left > SOUND and sleep.why == RESTING and self.known is not None and seqs == self.known[0]
        self._note_last()
        if sleep.sound:
            self.calm += 1
            return OFF, sleep.passes(self.page.owed if self.page else 0.0)
        self.step, self.silent, self.looked = None, False, ()
        self.steps += 1
        if sleep.left > 0:
            if self.known is not None and seqs == self.known[0]:
                sleep.left -= 1
                self.silent = sleep.why == RESTING  # what was earned for the guard is settled on waking
                return OFF, sleep.why
            self._woken()
        if sleep.slept:
            self._rested()
        rows, page = self._rows(seqs), self._page(self._situation(seqs))
        room = self._room(seqs, page) if page and not page.outdated and self.ledger.short(seqs, page.owed) else None
        if page and room is not None and page.cheapest > room:
            return OFF, self._earn(page.cheapest - room, page)  # nobody could be paid: what they would say is not looked at
        names, self.looked, unpaid = self._look(seqs, rows)
        if self.looked:
            self.tables.past.last = self.steps
        if not names:
            self.silent = bool(self.looked)
            return OFF, self._silence(unpaid) if self.silent else sleep.rest(rows, soonest(seqs, rows, self.tables.bits))
        if page is None or self.tables.costs.plains.get(page.at, FIRST) < FIRST or (_age(seqs) >= COLD and self._asks(seqs, page)):
            return OFF, "probe:plain"  # first steps of a text tell it worst
        room = self._room(seqs, page) if room is None else room
        if page.cheapest > room:
            return OFF, self._earn(page.cheapest - room, page)
        if (missing := page.seconds[1] + page.drafting[names[0]][1] - room) > 0:
            return OFF, self._let_rest(rows, names) if len(self.looked) > len(names) else self._earn(missing, page)
        self.step = Step(self.tables, page, rows, self.steps, room, page.steady if self.calm >= CALM else 1.0, names=names)
        deep = 0
        for row in rows:
            deep = max(deep, min(row.reach, page.deepest))
        return self.plans.get(page, names, deep), "off:no-guess"

    def _look(self, seqs: list[Sequence], rows: list[Row]) -> tuple[list[str], tuple[str, ...], bool]:
        """Those who may have a guess worth asking for; all who were looked at; had anybody one that is not?"""
        names, looked, unpaid = list[str](), list[str](), False
        for name in self.tables.bits:
            if (said := awake(seqs, rows, name, self._least)) != RESTS:
                looked.append(name)
                unpaid = unpaid or said == UNPAID
                if said == GUESSES:
                    names.append(name)
        for row in rows:
            self.looking, row.looking = self.looking + row.looking, 0.0
        return names, tuple(looked), unpaid

    def _asks(self, seqs: list[Sequence], page: Page) -> bool:
        """Is it time to ask what plain decoding takes now? That is what credit is counted by, of which those who have AMPLE need not know."""
        return self.since_plain >= REMEASURE or (page.outdated and self._room(seqs, page) < AMPLE)

    def _room(self, seqs: list[Sequence], page: Page) -> float:
        """Plain steps that this one may take."""
        whose = (seqs[0].request.id,) if len(seqs) == 1 else tuple([s.request.id for s in seqs])
        if self.accounts.of_others(whose):  # what others earned is not for these to spend
            self._settle()
        unit, unsettled = page.plain * page.spread, self.accounts.beyond(page)
        room = (self.ledger.left(whose, page.owed) - unsettled) / unit
        if unsettled <= 0 or room >= page.seconds[DEEPEST]:
            return room
        self._settle()  # nobody is refused for what may not be charged
        return self.ledger.left(whose, page.owed) / unit

    def _teaches(self) -> bool:
        """Is this step learned from? Then whatever its drafters say is asked for, and what is learned hangs on nothing that was believed."""
        return self.steps <= YOUNG or self.steps % SAMPLE == 0

    def _least(self, name: str, history: int) -> float:
        """The least chance of a first token that is worth a thought, after such verdicts."""
        page = self.page
        return (
            0.0 if page is None or not page.plain or self._teaches() else self.tables.least(page, name, history, self.accounts.thinking / page.plain)
        )

    def _silence(self, unpaid: bool) -> str:
        """Nobody has anything to say, or nothing that could pay: a plain step, and nothing to think about."""
        self.sleep.why = "off:unpaid" if unpaid else "off:no-guess"
        return self.sleep.why

    def _rested(self) -> None:
        """Steps that nobody noted were plain decoding, which earns its share of what such steps take: by the lower of what they took before and take
        now."""
        self._settle()
        slept, self.sleep.slept = self.sleep.slept, 0
        self.steps += slept
        if slept and self.known and self.page:
            self.accounts.rested(self.known[0], slept, min(self.sleep.lull, self.page.owed))

    def _woken(self) -> None:
        """Those that slept are no longer the batch."""
        self.sleep.broken([row for s in self.known[0] if (row := self.rows.get(s.request.id))] if self.known else [])

    def _let_rest(self, rows: list[Row], names: list[str]) -> str:
        """Those who would have a guess cost more than there is, and are asked again when there can be some more; one that costs less has none now,
        and may have one in the next step."""
        self.silent = True
        for row in rows:
            row.rest |= dict.fromkeys(names, EARN)
        return GUARD

    def _earn(self, missing: float, page: Page) -> str:
        """So many plain steps of credit first."""
        return self.sleep.earn(missing * page.plain * page.spread, self.ledger.allowance * page.owed, self.accounts.thinking)

    def _rows(self, seqs: list[Sequence]) -> list[Row]:
        return [self._row(s) for s in seqs]

    def _row(self, seq: Sequence) -> Row:
        row = self.rows.get(seq.request.id)
        if row is None:
            past = self.tables.past
            row = self.rows[seq.request.id] = past.row()
            if rest := past.rest(row, self._reads(seq) if row.worth < 0 else 0, self.steps):
                row.rest |= dict.fromkeys(self.tables.bits, rest)
        return row

    def _reads(self, seq: Sequence) -> int:
        """Plain steps before a first look that loses takes its share of the time with what is read for it: nearly all of the text."""
        page, costs = self.page, self.tables.costs
        if page is None or not page.plain:
            return 0
        cheap = [name for name, line in page.drafting.items() if line[1] <= LOOK]
        read = min([costs.catching_up(name, page.at, len(seq.tokens)) for name in cheap], default=0.0)
        return int(LOST * read * costs.pace / page.plain / SHARE)

    def _situation(self, seqs: list[Sequence]) -> Situation:
        """Looked at anew when the batch, the tier or the bucket of its longest text changes."""
        tier, longest, known = self.tier(), 0, self.known
        for seq in seqs:
            longest = max(longest, len(seq.tokens))
        if known is None or known[0] != seqs or known[1].tier != tier or longest > known[1].context:
            sampled = any(s.request.sampling.temperature > 0 for s in seqs)
            known = self.known = (list(seqs), situation(tier, len(seqs), longest, sampled))
        return known[1]

    def _page(self, at: Situation) -> Page | None:
        page = self.page
        if page is None or (page.at is not at and page.at != at):
            self._settle()  # what was taken at the old page's prices
            self._digest()
            page = self.page = self.tables.page(at)
        elif page.at is not at:
            page.at = at  # found to be the same at a glance from now on
        return page

    # While drafting.

    def more(self, seqs: list[Sequence], name: str, draft: Draft, frontier: Places) -> Places:
        step = self.step
        if step is None:
            return frontier
        drafting, level, cheap = step.page.drafting[name], step.levels.get(name), step.page.drafting[name][1] <= LOOK
        if level is None:
            level = step.levels[name] = 0
            going = [p for p in frontier if not step.rows[~p if p < 0 else draft.row[p]].rest.get(name)]
            if len(step.rows) > 1:
                step.asked[name] = list(dict.fromkeys([tree.row_at(draft, p) for p in going]))
            if going and not self.starts.may(step, seqs, name, draft, cheap):
                going = []
        elif step.stopped == name or (
            cheap and not step.heard and frontier and frontier[0] >= 0 and 0 < draft.depth[frontier[0]] - level != AHEAD - 1
        ):
            going = []  # it went on by itself, and has said all it had to say; but a chain on a device comes back after AHEAD nodes, to be asked
        else:
            level, frontier = step.gone(name, draft, frontier), tree.open_at(seqs, draft, frontier)
            going = step.deeper(name, draft, frontier)
        if step.going != name:
            step.begins(name, draft)
        if going:
            step.levels[name] = level + 1
            step.spent += drafting[level + 1] - drafting[level]
        return going

    def on(self, score: float, free: bool = False) -> bool:
        return self.step is None or self.step.on(score, free)

    def likely(self, name: str) -> int:
        """Levels that a drafter will probably go in these texts."""
        return self.step.deep(name) if self.step is not None else DEEPEST

    def tail(self, name: str) -> int | None:
        """With how many tokens of the text's end a drafter begins in this step; 0: with all; None: as it began."""
        return self.step.tails.get(name) if self.step is not None and self.step.tails else None

    def blind(self, name: str) -> int:
        """Levels that a drafter is best let go without being asked between them; 0: too many for that."""
        if self.step is None:
            return AHEAD
        levels = self.likely(name)
        return levels if levels <= AHEAD else 0

    def went(self, name: str, draft: Draft, frontier: Places) -> None:
        """So it did, down to these nodes, and all of the draft is being verified."""
        if self.step is not None:
            self.step.gone(name, draft, frontier)
            self.step.queued = True

    def survivals(self, seqs: list[Sequence], draft: Draft) -> list[float]:
        """By what was learned of the drafters; by their own scores where nothing is decided."""
        return tree.survival(draft) if self.step is None else list(self.step.survivals(draft))

    # Before verification.

    def fill(self, seqs: list[Sequence], draft: Draft, reason: str) -> tuple[list[int] | None, str]:
        step = self.step
        if step is None:
            return None, reason
        if not draft.token:
            return None, reason if all(step.levels.values()) else GUARD if step.refused else "off:unpaid"
        if draft.kind.count(POINT) < len(draft.token):
            return None, "depth:drawn"
        if step.queued:
            step.renew(draft)
            step.expected = sum(step.apart(draft), 1.0)
            return None, QUEUED
        most, why = self._most(draft)
        if most >= tree.longest(draft):
            return tree.span(0, len(draft.token)), why
        return (tree.span(0, most) if tree.straight(draft) else step.surest(draft, most)), why

    def _most(self, draft: Draft) -> tuple[int, str]:
        """Nodes a row to verify, and why."""
        step = self.step
        assert step is not None
        most, score = step.best(draft)
        step.expected = score * (step.spent + step.page.verify[most])
        longest = tree.longest(draft)
        why = "off:unpaid" if most == 0 else "depth:all" if most >= longest else "depth:trimmed"
        if step.trial and most < PROBED:
            most, why = PROBED, "probe:drafter"
        elif self.tables.drafts < WARM and most < min(longest, WHOLE):
            most, why = WHOLE, "probe:whole"
        most = min(most, DEEPEST if longest > DEEPEST else longest)
        while most and step.spent + step.page.seconds[most] > step.room:
            most, why = most - 1, "depth:guard" if most > 1 else GUARD
        if why == GUARD:
            self._earn(step.spent + step.page.seconds[1] - step.room, step.page)
        return most, why

    # After the step.

    def learn(self, seqs: list[Sequence], record: StepRecord) -> None:
        """Only kept: it is looked at in the next step, whose time counts it."""
        if not self.sleep.sound:
            self.last = (seqs, record)

    def end(self, seq: Sequence) -> None:
        self._note_last()
        self._rested()
        if self.page is not None and seq.records:
            row = self._row(seq)
            self.starts.ended(row)
            if seq.request.drafters is None or seq.request.drafters:  # who wants none says nothing of looks
                self.tables.past.ended(row, seq.produced)
        if self.lessons and self.page is not None:  # what a text taught is known when it ends
            self._digest()
            self.page = self.tables.page(self.page.at)
        self.rows.pop(seq.request.id, None)
        self.ledger.end(seq.request.id)
        if self.known is not None and seq in self.known[0]:  # a text that is over is not kept: some later step would take the time to clear it away
            self._woken()
            self.known = self.step = None

    def _note_last(self) -> None:
        if (last := self.last) is not None:
            seqs, record = last
            self._note(seqs, record)

    def _note(self, seqs: list[Sequence], record: StepRecord) -> None:
        """Pay for the last step, and remember what the next choice needs; the tables learn BATCH steps at a time."""
        self.last, step, drafted = None, self.step, record.nodes() > 0
        if (self.sleep.left or self.silent) and not record.levels and self.page is not None:
            if self.accounts.hold(Held(seqs, record, None, self.looked, self.calm >= CALM, _age(seqs) - 1)):
                self._settle()
            self.calm, self.since_plain = self.calm + 1, 0
            return
        rows = step.rows if step else self._rows(seqs)
        calm, self.calm = self.calm >= CALM and not drafted, 0 if drafted else self.calm + 1
        self.since_plain = self.since_plain + 1 if record.levels else 0
        held = Held(seqs, record, step, self.looked, calm, _age(seqs) - 1)
        if self._teaches() or _rare(record, step) or (self.tables.drafts < WARM and record.levels):
            at = step.page.at if step else self._situation(seqs)
            behind = {name: self._behind(step, name, record) for name in record.levels} if step else {}
            pace = self.tables.costs.pace * self.tables.costs.chill(held.age)
            self.lessons.append(Lesson(record, at, [row.history for row in rows], behind, calm, pace, held.age < COLD))
            if self.page is None or len(self.lessons) >= BATCH:
                self._settle()
                self._digest()
                self.page = self.tables.page(at)
        if step is None:  # what a plain step tells is asked for at once
            self._settle()
            if self.page is not None:
                self.accounts.charge(self.page, rows, held)
        elif self.accounts.hold(held) or any(row.worth < 0 for row in rows):
            self._settle()  # at once where looks lose, and what this one brought says who rests
        if record.levels:
            self._remember(seqs, rows, record, step)

    def _behind(self, step: Step, name: str, record: StepRecord) -> int:
        """Tokens that a drafter had to read of the text of which it had read least."""
        return max(
            [step.unread(row, name, n) for r, (n, row) in enumerate(zip(record.context, step.rows, strict=True)) if step.asks(name, r)], default=0
        )

    def _remember(self, seqs: list[Sequence], rows: list[Row], record: StepRecord, step: Step | None) -> None:
        """Verdicts, and how far it was worth looking, of each row."""
        if step and step.trial:
            self.starts.tried(step, record)
        if step:
            self.starts.used(step, seqs, record)
            if record.draft is not None and record.draft.token:
                step.judged(record)
        remember(rows, record, step.page.prices if step else {}, step.asked if step else {})

    def _settle(self) -> None:
        if self.accounts.held:
            self.accounts.settle(self.page, self._rows, guarded=self.sleep.why == GUARD)

    def _digest(self) -> None:
        self.tables.take_in(self.lessons)
        self.lessons = []


def _age(seqs: list[Sequence]) -> int:
    """Steps of the oldest of these texts."""
    most = 0
    for seq in seqs:
        most = max(most, seq.steps)
    return most


def _rare(record: StepRecord, step: Step | None) -> bool:
    """Is this a guess of a drafter that is tried, or a plain step that was asked for? Decided by what was before, not by the verdict; and not by
    how many guesses were in vain before: those that follow would be learned from more often than they come."""
    if step is None:
        return record.reason in (GUARD, "probe:plain")  # if the machine has become slow, it is now that this must be seen
    return step.trial is not None
