"""May a drafter start? One that costs little is asked first and judged by its guess; one that costs much, or must read first, must promise more than
what is there, save what its reading takes, and leave the others their credit. What it promises is known by how sure it was of its last guesses in
this text; of a text in which it made none, by what it was in texts before, each as a chance of its own: one that is right nearly always in a third of
them is worth asking in all. What came of earlier promises to save is remembered, and who brings less than asking it takes, beside what others have
guessed, is asked beside them ever more rarely.

What does not seem to pay is tried anyway now and then, ever more rarely, within a budget: what a try brings it has not cost.
"""

from outrider.control.guard import Ledger
from outrider.control.rows import DEAR, PATIENCE, WORST, Row
from outrider.control.step import PROBED, Step
from outrider.control.tables import BATCH, WARM, Tables
from outrider.core import tree
from outrider.core.types import Draft, Sequence, StepRecord
from outrider.measure.cost import DEEPEST, FAR

RISK = 0.05  # what a plan must promise more, to start a drafter that costs something
BESIDE = 0.7  # of what others' guesses promise: what one that reads ahead must be worth by itself, to be asked beside them
HOPED = 0.2  # plain steps that a drafter is thought to bring beside others' guesses before it was asked so
BROUGHT = 0.1  # weight of what it brought each time: rare gains outweigh many small losses
APART, SELDOM = 3, 16  # steps until one is asked beside others' guesses again that brought less there than it took, at first and at most
PROBE, RARELY = 32, 1024  # steps between tries of a drafter that does not seem to pay, at first and, for each plain step that a try costs, at last
EXPLORE, GIFT = 0.003, 10.0  # share of all steps that such tries may cost, and plain steps for a drafter that nothing is known of
SAMPLE = 8  # steps, of one of which all is learned, and nobody is left out for what another is worth
BEGUN = 4  # levels that must be affordable to start with
RESERVE = 2.0  # plain steps of credit that starting a dear drafter must leave for others
UNSURE = 0.5  # of its reading, more that must be left: what that takes is known least, and a debt keeps all away
UNMEASURED = 512  # steps after which nobody is waited for who would measure drafters: a server may never rest
LONG_READ = 2.0  # plain steps of reading before a drafter can begin, from which on that is weighed however cheap its levels are
RATED = 8  # steps between two looks at a request's rate
LIKE = 8  # tokens that a request is trusted to have had, at the pace of plain decoding, before any were written
FIRST, LATELY = 0.7, 0.5  # weight of a text's first step, and of each later one, in how sure a drafter is there
FADED = 0.2  # what each refusal takes of that: who is not asked shows nothing more
TAIL, LONG = 64, 256  # tokens of a text's end that a drafter may begin with; unread ones (`kv.SPARES` times as many) from which on it may
AHEAD = 64  # tokens more than were written so far that a request is trusted to go on for


class Starts:
    """`cautious`: a drafter that costs something and was never measured does not start in the first UNMEASURED steps. `tails`: drafters that can
    begin with a text's end."""

    def __init__(self, tables: Tables, ledger: Ledger, cautious: bool, tails: frozenset[str] = frozenset()) -> None:
        self.tables, self.ledger, self.cautious, self.tails = tables, ledger, cautious, tails
        self.explored = 0.0  # plain steps that tries have cost
        self.pause = dict.fromkeys(tables.bits, PROBE)  # steps between tries
        self.due = dict.fromkeys(tables.bits, 0)  # the step from which on the next may be
        self.rates: dict[str, tuple[tuple[str, int, int], float]] = {}  # by drafter: of what request, rows and steps the last one is, and that

    def may(self, step: Step, seqs: list[Sequence], name: str, draft: Draft, cheap: bool) -> bool:
        """A cheap one with little to read is asked before anything is weighed, unless others have guessed."""
        if self.cautious and step.number < UNMEASURED and step.page.prices[name] > DEAR and not self.tables.measured(name, step.page.at):
            return _later(step, name)
        if name in self.tails and len(seqs) == 1 and self._begins_anew(step, seqs[0], name):
            return True
        wait = 0.0
        for r, seq in enumerate(seqs):
            if step.asks(name, r):
                wait += self._waiting(step, seq, step.rows[r], name)
        if not cheap or wait > LONG_READ:
            return self._pays(step, seqs, name, draft, wait)
        if not draft.token and self._left(step, name):
            return False
        if draft.token and not step.deeper(name, draft, tree.roots(draft.rows)) and not self._outdoes(step, name, draft):
            return False
        step.refused = wait > 0 and step.spent + wait + step.page.drafting[name][1] + step.page.seconds[1] > step.room
        step.reads |= wait > 0
        return not step.refused or _later(step, name)

    def _pays(self, step: Step, seqs: list[Sequence], name: str, draft: Draft, wait: float) -> bool:
        """Is a drafter that costs something, `wait` plain steps to begin with, worth starting, beside what is drafted?"""
        have = max(step.best(draft)[1], 1 / step.plain) if draft.token else 1 / step.plain
        pays = self._promise(step, name, have) * self._tilt(name, draft) >= have * (1 + RISK)
        if not pays and step.number < self.due[name]:
            return not draft.token and self._unpaid(step, name)
        if self._too_much(step, name, wait, self.ledger.reading(seqs)):
            step.refused = True
            if not (pays or self._new(name)):
                self.due[name] = step.number + PROBE  # a try of one that is known can wait
            return _later(step, name)
        saves = self._saves(step, seqs, name) if wait else 0.0
        if pays and 2 * wait <= saves * self.tables.next.share(f"{name} saved", 1.0):
            if all(name in row.sure for row in step.of(name)):
                self.pause[name] = PROBE
        elif not self._try_anyway(step, name, wait):
            return not draft.token and self._unpaid(step, name)
        step.reads |= wait > 0
        if wait > LONG_READ:
            for row in step.of(name):
                row.owing.setdefault(name, [max(saves, 2 * wait), 0.0])
        return True

    def _outdoes(self, step: Step, name: str, draft: Draft) -> bool:
        """Is a drafter worth more in these texts by itself than what is drafted already, to which it would add too little? One that reads ahead tells
        in few steps how much of that is right, and goes on where it is not: it need not be worth as much, and is heard once in a text in which it was
        not asked yet."""
        nodes, have = step.best(draft)
        ahead = len(step.rows) == 1 and self._ahead(step.rows[0], name)
        if ahead and step.number < step.rows[0].beside.get(name, (0.0, 0, APART))[1]:
            return False
        if not (ahead or all(name in row.sure for row in step.of(name))):
            return False
        if step.spent + step.page.drafting[name][1] + step.page.seconds[max(nodes, 1)] > step.room:  # what is there would have to be left
            return False
        pays = self._promise(step, name, have) * self._tilt(name, draft) >= have * (BESIDE if ahead else 1 + RISK)
        if pays and ahead:
            step.beside = name, nodes, step.spent, have
        return pays

    def _left(self, step: Step, name: str) -> bool:
        """Is the step left to another, which reads ahead and so says the same where it is right? To one that is worth as much by itself in this text
        as the look at this one promises. Now and then both are heard all the same."""
        row, page, tables = step.rows[0], step.page, self.tables
        if len(step.rows) > 1 or name not in row.said or step.number % SAMPLE == 0:
            return False
        own = max(tables.score(page, name, step.chance(row, name, 1, row.said[name]), 1.0), 1 / step.plain)
        return any(other in row.sure and row.steps[other] < 1 and self._promise(step, other, own) >= own for other in step.names)

    def _ahead(self, row: Row, name: str) -> bool:
        """Does a drafter read ahead in this text, or in others, if nothing was asked of it here? Who was, and said nothing, does not."""
        if name in row.sure:
            return row.steps[name] < 1
        return name not in row.read and self.tables.next.share(f"{name} steps", 1.0) < 1

    def _promise(self, step: Step, name: str, have: float) -> float:
        """Tokens for the time of a plain step by this drafter, where there are `have` without it: in a text of which nothing is known, one that turns
        out to bring less is left."""
        told, page, rows = 0.0, step.page, step.of(name)
        for row in rows:
            if name in row.sure:
                told += self.tables.score(page, name, row.sure[name], row.steps[name])
            else:
                told += sum([share * max(have, score) for share, score in self.tables.kinds(page, name)])
        return told / len(rows)

    def _unpaid(self, step: Step, name: str) -> bool:
        """No, for what it showed in these texts, which says less and less of them."""
        for row in step.of(name):
            if name in row.sure:
                row.sure[name] += FADED * (self.tables.usual(name) - row.sure[name])
        return _later(step, name)

    def _too_much(self, step: Step, name: str, wait: float, credit: float) -> bool:
        """Would it leave less credit than the guard wants, or than others need? Reading has some of its own, `credit` in seconds."""
        page = step.page
        beside = len(self.tables.bits) > 1 and page.prices[name] > DEAR
        unsure = (1 + UNSURE) * wait
        own = credit / (page.plain * page.spread) if wait else 0.0
        reading = min(max(unsure - own, 0.0), unsure if beside else wait)
        spare = RESERVE if beside else 0.0
        return step.spent + reading + page.drafting[name][BEGUN] + page.seconds[BEGUN] + spare > step.room

    def _saves(self, step: Step, seqs: list[Sequence], name: str) -> float:
        """Plain steps that a drafter would save from here on: of what the request takes at its pace without it, in the texts in which that is
        slower."""
        rate, worth, rows = self._rate(seqs, step.page.plain, name), 0.0, step.of(name)
        for row in rows:
            kinds = (
                [(1.0, self.tables.score(step.page, name, row.sure[name], row.steps[name]))]
                if name in row.sure
                else self.tables.kinds(step.page, name)
            )
            worth += sum([share * max(1 / rate - 1 / score, 0.0) for share, score in kinds])
        return worth / len(rows) * min([_to_come(s) for r, s in enumerate(seqs) if step.asks(name, r)])

    def _rate(self, seqs: list[Sequence], plain: float, name: str) -> float:
        """Tokens of a request for the time of a plain step, of late, in steps in which this drafter made no guess: asked anew in its first steps, and
        then every RATED ones."""
        done = seqs[0].steps
        at = seqs[0].request.id, len(seqs), done if done <= RATED else done // RATED * RATED
        if self.rates.get(name, (None,))[0] != at:
            steps = [r for s in seqs for r in s.records[-AHEAD:] if not r.levels.get(name)]
            took = sum([(r.reading.seconds - r.seconds.get("prefill", 0.0)) * len(r.requests) for r in steps])
            self.rates[name] = at, sum([sum(r.emitted) for r in steps], LIKE) / (LIKE + took / plain)
        return self.rates[name][1]

    def _try_anyway(self, step: Step, name: str, wait: float) -> bool:
        """Is it time to see whether a drafter that does not seem to pay would?"""
        cost = wait + step.page.drafting[name][PROBED]
        gift = GIFT if self._new(name) else 0.0
        if step.number >= self.due[name] and self.explored + cost <= gift + EXPLORE * step.number:
            self.explored += cost
            self.due[name], self.pause[name] = step.number + self.pause[name], min(2 * self.pause[name], int(RARELY * max(cost, 1.0)))
            step.trial = name, cost
        return step.trial is not None

    def _new(self, name: str) -> bool:
        """Is hardly anything known of a drafter?"""
        return self.tables.next.cells.get(f"{name} ?", [0])[0] < WARM

    def _tilt(self, name: str, draft: Draft) -> float:
        """Drafters that were worth more lately than those that have guessed are believed a little more."""
        others = [n for n, bit in self.tables.bits.items() if n != name and any(s & bit for s in draft.source)]
        return 0.9 + 0.2 * self.tables.hedge.shares([name, *others])[name] if others else 1.0

    def _waiting(self, step: Step, seq: Sequence, row: Row, name: str) -> float:
        """Plain steps that pass before a drafter has caught up with a text."""
        behind = step.unread(row, name, len(seq.tokens))
        return self._reading(step, name, behind) if behind > FAR else 0.0

    def _reading(self, step: Step, name: str, behind: int) -> float:
        """Plain steps that it takes a drafter to read so many tokens."""
        costs = self.tables.costs
        return costs.catching_up(name, step.page.at, behind) * costs.pace / step.page.plain

    def _begins_anew(self, step: Step, seq: Sequence, name: str) -> bool:
        """Where a drafter begins that has a long text to read: with its end, where what that spares is worth more than what it takes to find out that
        it is not enough, by how often it was; now and then in any case. Where it says too little it reads all: True, that is begun in this step."""
        row, length = step.rows[0], len(seq.tokens)
        unread = length - row.read.get(name, 0)
        if unread > LONG and row.tail.get(name) != 0:
            first, enough = self._reading(step, name, TAIL), self.tables.next.share(f"{name} tail", 1.0)
            spares = self._reading(step, name, unread) - first
            tries = spares > 1 and (enough * spares > (1 - enough) * (1 + first) or step.number % SAMPLE == 0)
            step.tails[name] = row.tail[name] = TAIL if tries else 0
            return False
        if not row.tail.get(name) or name not in row.sure or not self._misses(step, seq, name):
            return False
        step.tails[name] = row.tail[name] = row.read[name] = 0
        self.tables.next.count(f"{name} tail", False)
        del row.sure[name], row.steps[name]
        row.bias.pop(name, None)
        step.reads = True
        return True

    def _misses(self, step: Step, seq: Sequence, name: str) -> bool:
        """Would a drafter that read a text's end alone, and is as sure of its guesses as it was there, save twice what it takes to read all, if it
        were then what it is in the mean of texts? Where others do as well without it, it would save nothing."""
        row, page = step.rows[0], step.page
        wait = self._reading(step, name, len(seq.tokens))
        now = max(self.tables.score(page, name, row.sure[name], row.steps[name]), 1 / step.plain, self._rate([seq], page.plain, name))
        then = sum([share * max(1 / step.plain, score) for share, score in self.tables.kinds(page, name)])
        return 2 * wait <= (1 / now - 1 / then) * _to_come(seq) and not self._too_much(step, name, wait, self.ledger.reading([seq]))

    def tried(self, step: Step, record: StepRecord) -> None:
        """What a try brought it has not cost, and what it took beyond what was believed it has: who is seldom asked finds all cold. Where all of it was
        right, the next one is soon."""
        assert step.trial is not None
        (name, cost), page, came = step.trial, step.page, record.right(step.trial[0]) / len(record.requests)
        took = (record.reading.seconds - record.seconds.get("prefill", 0.0) - record.seconds.get("jit", 0.0)) / page.plain
        believed = cost - page.drafting[name][PROBED] + step.spent + page.seconds[min(record.nodes(), DEEPEST)]
        self.explored += min(max(took - believed, 0.0), WORST) - min(came, cost)
        if came >= PROBED:
            self.pause[name], self.due[name] = PROBE, step.number + PATIENCE

    def used(self, step: Step, seqs: list[Sequence], record: StepRecord) -> None:
        """How sure drafters were of their guesses, and what those that had to read for long save in a step; what came of asking one beside others."""
        if step.beside is not None and record.draft is not None and record.levels.get(step.beside[0]):
            name, row = step.beside[0], step.rows[0]
            worth, _, pause = row.beside.get(name, (HOPED, 0, APART))
            worth += BROUGHT * (step.brought(*step.beside, record) - worth)
            row.beside[name] = (worth, 0, APART) if worth >= 0 else (worth, step.number + pause, min(2 * pause, SELDOM))
        for name, levels in record.levels.items():
            if not levels or step.page.prices[name] <= DEAR or record.draft is None:
                continue
            own, sure = step.sure(name, record.draft)
            rows = step.of(name)
            for row in rows:
                if own:
                    self._surer(row, name, sure, min(levels * len(rows) / own, 1.0))
                if name in row.owing:
                    row.owing[name][1] += self._saved(step, seqs, record, name)

    def _surer(self, row: Row, name: str, sure: float, share: float) -> None:
        """A drafter was so sure of its guesses in a text, each of which took such a share of a step of its own."""
        known, steps, weight = row.sure.get(name), row.steps.get(name, 1.0), LATELY
        if known is None:
            known, weight = self.tables.usual(name), FIRST
        row.sure[name] = known + weight * (sure - known)
        row.steps[name] = steps + weight * (share - steps)

    def _saved(self, step: Step, seqs: list[Sequence], record: StepRecord, name: str) -> float:
        """Plain steps that a drafter saved in a step: what its tokens would have taken without it, less what drafting and verifying them took."""
        page, nodes = step.page, min(record.nodes(), DEEPEST)
        own = sum([record.draft.source[n] & self.tables.bits[name] > 0 for n in record.kept]) // len(seqs) if record.draft else 0
        came = record.right(name) / len(seqs)
        took = page.drafting[name][min(record.levels[name], DEEPEST)] + page.verify[nodes] - page.verify[max(nodes - own, 0)]
        return came / self._rate(seqs, page.plain, name) - took

    def ended(self, row: Row) -> None:
        """How sure drafters were in a request is what they may be in the next ones, and what came of promises to save is what those are worth."""
        for name, sure in row.sure.items():
            self.tables.ended(name, sure, row.steps[name])
            if row.tail.get(name):
                self.tables.next.count(f"{name} tail", True)
        for name, (promised, saved) in row.owing.items():
            self.tables.next.count(f"{name} saved", min(max(saved / promised, 0.0), 1.0))


def _to_come(seq: Sequence) -> int:
    """Tokens that a request is trusted to go on for."""
    return min(seq.left, seq.produced + AHEAD)


def _later(step: Step, name: str, steps: int = BATCH) -> bool:
    """No, and nothing will change that before the tables are looked at again."""
    for row in step.of(name):
        row.rest[name] = steps
    return False
