"""May a drafter start? One that costs little is asked first and judged by its guess; one that costs much, or must read first,
must promise more than what is there, save what its reading takes, and leave the others their credit. What came of earlier promises
to save is remembered.

What does not seem to pay is tried anyway now and then, ever more rarely, within a budget: what a try brings it has not cost.
"""

from outrider.control.guard import Ledger
from outrider.control.rows import PATIENCE, Row
from outrider.control.step import PROBED, Step
from outrider.control.tables import BATCH, LOOK, WARM, Tables
from outrider.core import tree
from outrider.core.types import Draft, Sequence, StepRecord
from outrider.measure.cost import DEEPEST, FAR

RISK = 0.05  # what a plan must promise more, to start a drafter that costs something
PROBE, RARELY = 32, 1024  # steps between tries of a drafter that does not seem to pay, at first and, for each plain step that a try costs, at last
EXPLORE, GIFT = 0.01, 10.0  # share of all steps that such tries may cost, and plain steps for a drafter that nothing is known of
RESERVE = 2.0  # plain steps of credit that starting a dear drafter must leave for others
UNSURE = 0.5  # of its reading, more that must be left: what that takes is known least, and a debt keeps all away
UNMEASURED = 512  # steps after which nobody is waited for who would measure drafters: a server may never rest
LONG_READ = 1.0  # plain steps of reading before a drafter can begin, from which on that is weighed however cheap its levels are
RATED = 8  # steps between two looks at a request's rate
LIKE = 8  # tokens, at the rate of earlier requests, that a request is trusted to have had before any were written
FRESH_RATE = 0.2  # weight of one request in the rate of those before
AHEAD = 64  # tokens more than were written so far that a request is trusted to go on for


class Starts:
    """`cautious`: a drafter that costs something and was never measured does not start in the first UNMEASURED steps. `explored`: plain steps that tries have cost; `pause` and
    `due`: by drafter, steps between its tries and the step from which on the next may be; `rate`: tokens of earlier requests for the time of
    a plain step, and `lately` those of the request, rows and steps `known`."""

    def __init__(self, tables: Tables, ledger: Ledger, cautious: bool) -> None:
        self.tables, self.ledger, self.cautious = tables, ledger, cautious
        self.explored, self.rate, self.lately = 0.0, 1.0, 1.0
        self.known: tuple[str, int, int] | None = None
        self.pause, self.due = dict.fromkeys(tables.bits, PROBE), dict.fromkeys(tables.bits, 0)

    def may(self, step: Step, seqs: list[Sequence], name: str, draft: Draft, cheap: bool) -> bool:
        """A cheap one with little to read is asked before anything is weighed, unless others have guessed."""
        wait = sum([self._waiting(step, s, row, name) for s, row in zip(seqs, step.rows, strict=True)])
        if not cheap or wait > LONG_READ:
            return self._pays(step, seqs, name, draft, wait)
        if draft.token and not step.deeper(name, draft, tree.roots(draft.rows)):
            return False
        step.refused = wait > 0 and step.spent + wait + step.page.drafting[name][1] + step.page.seconds[1] > step.room
        step.reads |= wait > 0
        return not step.refused or _later(step, name)

    def _pays(self, step: Step, seqs: list[Sequence], name: str, draft: Draft, wait: float) -> bool:
        """Is a drafter that costs something, `wait` plain steps to begin with, worth starting, beside what is drafted?"""
        alone = [self.tables.alone(step.page, name)[row.last(name)] for row in step.rows]
        gained = sum([promise.gained * row.luck(name) for promise, row in zip(alone, step.rows, strict=True)]) / len(alone)
        cost = max([promise.cost for promise in alone])
        best = (1 + gained) / cost
        if self.cautious and step.number < UNMEASURED and not self.tables.measured(name, step.page.at):
            return _later(step, name)
        if step.number < self.due[name]:
            if best * step.plain < 1 + RISK:
                return _unpaid(step, name)
            if draft.token and best < step.best(draft)[1]:
                return False
        if self._too_much(step, seqs, name, wait, max([promise.levels for promise in alone])):
            step.refused = True
            alone_at_first = len(self.tables.bits) == 1 and not seqs[0].records
            return _later(step, name, 0 if alone_at_first else BATCH)  # what reading may take is known once the target has read
        have = max(step.best(draft)[1], 1 / step.plain) if draft.token else 1 / step.plain
        saves = self._saves(step, seqs, draft, 1 + gained, cost) if wait else 0.0
        if best * self._tilt(name, draft) >= have * (1 + RISK) and 2 * wait <= saves * self.tables.next.share(f"{name} saved", 1.0):
            self.pause[name], step.promised[name] = PROBE, sum([promise.gained for promise in alone]) / len(alone)
        elif not self._try_anyway(step, name, wait):
            return not draft.token and _unpaid(step, name)
        step.reads |= wait > 0
        if wait > LONG_READ:
            for row in step.rows:
                row.owing.setdefault(name, [max(saves, 2 * wait), 0.0])
        return True

    def _too_much(self, step: Step, seqs: list[Sequence], name: str, wait: float, levels: int) -> bool:
        """Would it leave less credit than the guard wants, or than others need? Reading has some of its own."""
        page = step.page
        beside = len(self.tables.bits) > 1 and page.drafting[name][1] > LOOK
        unsure = (1 + UNSURE) * wait
        own = self.ledger.reading(seqs) / (page.plain * page.spread) if wait else 0.0
        reading = min(max(unsure - own, 0.0), unsure if beside else wait)
        spare = RESERVE if beside else 0.0
        return step.spent + reading + page.drafting[name][levels] + page.seconds[levels] + spare > step.room

    def _saves(self, step: Step, seqs: list[Sequence], draft: Draft, tokens: float, cost: float) -> float:
        """Plain steps that a drafter which brings `tokens` for `cost` would save from here on, were all steps like this one. What it brings beyond the
        step as it is saves the time that as many tokens take at the request's present rate: where others guess well, little."""
        nodes, score = step.best(draft) if draft.token else (0, 1 / step.plain)
        now = step.page.verify[nodes] if nodes else step.plain
        saved = (tokens - score * (now + (step.spent if draft.token else 0.0))) / self._rate(seqs, step.page.plain) - (cost - now)
        ahead = min([min(s.request.sampling.max_tokens - s.produced, s.produced + AHEAD) for s in seqs])
        return saved * ahead / tokens

    def _rate(self, seqs: list[Sequence], plain: float) -> float:
        """Tokens of a request for the time of a plain step, of late: asked anew in its first steps, and then every RATED ones."""
        done = seqs[0].steps
        known = seqs[0].request.id, len(seqs), done if done <= RATED else done // RATED * RATED
        if known != self.known:
            steps = [r for s in seqs for r in s.records[-AHEAD:]]
            took = sum([(r.reading.seconds - r.seconds.get("prefill", 0.0)) * len(r.requests) for r in steps])
            self.known, self.lately = known, (sum([sum(r.emitted) for r in steps], LIKE)) / (LIKE / self.rate + took / plain)
        return self.lately

    def _try_anyway(self, step: Step, name: str, wait: float) -> bool:
        """Is it time to see whether a drafter that does not seem to pay would?"""
        cost = wait + step.page.drafting[name][PROBED]
        gift = GIFT if self.tables.next.cells.get(f"{name} ?", [0])[0] < WARM else 0.0
        if step.number >= self.due[name] and self.explored + cost <= gift + EXPLORE * step.number:
            self.explored += cost
            self.due[name], self.pause[name] = step.number + self.pause[name], min(2 * self.pause[name], int(RARELY * max(cost, 1.0)))
            step.trial = name, cost
        return step.trial is not None

    def _tilt(self, name: str, draft: Draft) -> float:
        """Drafters that were worth more lately than those that have guessed are believed a little more."""
        others = [n for n, bit in self.tables.bits.items() if n != name and any(s & bit for s in draft.source)]
        return 0.9 + 0.2 * self.tables.hedge.shares([name, *others])[name] if others else 1.0

    def _waiting(self, step: Step, seq: Sequence, row: Row, name: str) -> float:
        """Plain steps that pass before a drafter has caught up with a text."""
        behind = len(seq.tokens) - row.read.get(name, 0)
        if behind <= FAR:
            return 0.0
        costs = self.tables.costs
        return costs.catching_up(name, step.page.at, behind) * costs.pace / step.page.plain

    def tried(self, name: str, cost: float, record: StepRecord, number: int) -> None:
        """What a try brought it has not cost; and where all of it was right, the next one is soon."""
        came = sum([n for (who, _), n in record.accepted_by.items() if who == name]) / len(record.requests)
        self.explored -= min(came, cost)
        if came >= PROBED:
            self.pause[name], self.due[name] = PROBE, number + PATIENCE

    def used(self, step: Step, seqs: list[Sequence], record: StepRecord) -> None:
        """What drafters that had to read for long save in a step."""
        for name, levels in record.levels.items():
            for row in step.rows if levels else ():
                if name in row.owing:
                    came = sum([n for (who, _), n in record.accepted_by.items() if who == name]) / len(seqs)
                    row.owing[name][1] += came / self._rate(seqs, step.page.plain) - step.page.drafting[name][min(levels, DEEPEST)]

    def ended(self, seq: Sequence, row: Row, plain: float) -> None:
        """A request's rate is where the next one begins, and what came of its promises to save is what the next ones are worth; `plain`: seconds of
        a plain step."""
        self.rate += FRESH_RATE * (self._rate([seq], plain) - self.rate)
        self.known = None
        for name, (promised, saved) in row.owing.items():
            self.tables.next.count(f"{name} saved", min(max(saved / promised, 0.0), 1.0))


def _unpaid(step: Step, name: str) -> bool:
    """No, for what it showed in these texts, which says less and less of them."""
    for row in step.rows:
        row.refuse(name)
    return _later(step, name)


def _later(step: Step, name: str, steps: int = BATCH) -> bool:
    """No, and nothing will change that before the tables are looked at again."""
    for row in step.rows:
        row.rest[name] = steps
    return False
