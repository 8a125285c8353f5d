"""The step under way, and the ratio rule: what its draft is worth, and whether more of it would be.

A plan's score is (1 + F) / C: tokens expected over what the step costs in plain steps. F sums the survivals of the nodes that
are verified. Prices and chances come from the tables' page; nothing is learned here.
"""

from dataclasses import dataclass, field

from outrider.control.predict import Bias
from outrider.control.rows import Row
from outrider.control.siblings import apart, given, in_lines, surest
from outrider.control.tables import ALIKE, MARGIN, Page, Tables, steps_of
from outrider.core import tree
from outrider.core.types import Draft, Places, StepRecord
from outrider.measure.cost import DEEPEST
from outrider.measure.trace import verdicts

PROBED = 2  # levels of a drafter that is tried


@dataclass(slots=True)
class Step:
    """What is thought of while it is drafted. Prices are in plain steps."""

    tables: Tables
    page: Page
    rows: list[Row]
    number: int  # of all steps
    room: float  # what the guard lets it cost
    plain: float  # what not to draft would cost
    spent: float = 0.0  # by drafters so far
    levels: dict[str, int] = field(default_factory=dict)  # that each drafter was let go
    survival: list[float] = field(default_factory=list)  # of the draft's nodes, as far as they were looked at
    known: tuple[Draft | None, int, float] = (None, 0, 1.0)  # the draft that was weighed last, nodes a row that were best, and the score of that
    lined: Draft | None = None  # the tree that was weighed last
    parted: list[float] = field(default_factory=list)  # `apart` of that
    lines: list[list[float]] = field(default_factory=list)  # the same by row, the highest first
    expected: float = 1.0  # tokens of so many
    going: str = ""  # the drafter that was asked for last
    own: list[float] = field(default_factory=list)  # survival of the chain that it makes by itself
    heard: bool = False  # does it tell of each node of that?
    stopped: str = ""  # one that went on by itself, until it no longer paid
    refused: bool = False  # did the guard keep a drafter from starting?
    queued: bool = False  # is all that is drafted being verified already?
    reads: bool = False  # does a drafter read before it begins?
    names: list[str] = field(default_factory=list)  # who may be asked
    asked: dict[str, list[int]] = field(
        default_factory=dict
    )  # of a batch: the rows that each drafter was let begin for; others do not want it, or it rests there
    tails: dict[str, int] = field(default_factory=dict)  # who is told where to begin: with how many tokens of the text's end; 0: with all
    # Who is asked beside others' guesses; without it: the nodes that were best, what was spent, and tokens for the time of a plain step.
    beside: tuple[str, int, float, float] | None = None
    trial: tuple[str, float] | None = None  # a drafter that is tried though it does not seem to pay, and what that costs

    def asks(self, name: str, row: int) -> bool:
        """Is a drafter asked for this row?"""
        asked = self.asked.get(name)
        return asked is None or row in asked

    def of(self, name: str) -> list[Row]:
        """The rows that it is asked for."""
        asked = self.asked.get(name)
        return self.rows if asked is None else [self.rows[r] for r in asked]

    def deeper(self, name: str, draft: Draft, frontier: Places) -> Places:
        """Does any number of levels more pay? Looking one ahead would stop in front of every step and cliff of the costs."""
        rows = len(self.rows)
        if not frontier or (self.trial and self.levels[name] >= PROBED):
            return []
        survival = self.survivals(draft)
        have, nodes = _sum(survival, float(rows)), tree.longest(draft)
        left, reach, further = self._left(draft, survival, frontier), 0.0, 0.0
        for p in frontier:
            chance, after = self._next(name, draft, p)
            reach += left[p] * chance
            further += left[p] * chance * after
        return frontier if self._deepens(name, nodes, have, reach, further / (reach or 1.0)) else []

    def deep(self, name: str) -> int:
        """Levels that a drafter, of which the first is paid, is best let go alone in these texts, by how likely its guesses were of late; in the mean
        of texts, where it made none yet. One that is tried goes no further than tries do, and none further than there is room for."""
        row, page = self.rows[0], self.page
        chance, drafting = row.sure[name] if name in row.sure else self.tables.usual(name), page.drafting[name]
        levels = PROBED if self.trial else self.tables.depth(page, name, chance, row.steps.get(name, 1.0))[1]
        while levels > 1 and self.spent + drafting[levels] - drafting[1] + page.seconds[levels] > self.room:
            levels -= 1
        return levels

    def unread(self, row: Row, name: str, length: int) -> int:
        """Tokens that a drafter has to read of a text of this length, from where it begins."""
        if name in self.tables.costs.views:
            return 0
        unread = length - row.read.get(name, 0)
        return min(unread, self.tails.get(name) or unread)

    def begins(self, name: str, draft: Draft) -> None:
        """A drafter is let go from the roots. What it says where there was no node before are the nodes."""
        self.going, self.own, self.heard = name, [] if draft.token else self.survival, False

    def on(self, score: float, free: bool) -> bool:
        """`deeper` of a chain that a drafter makes by itself. What others have said beside it is what it says, too, or as good as lost: it is weighed
        alone."""
        name, own, self.heard = self.going, self.own, True
        depth, level = len(own) + 1, self.levels[name]
        chance = self.chance(self.rows[0], name, depth, score)
        own.append((own[-1] if own else 1.0) * chance)
        if free:
            return True
        if (self.trial and depth >= PROBED) or not self._deepens(name, depth, _sum(own, 1.0), own[-1] * chance, chance):
            self.stopped = name
            return False
        self.levels[name], drafting = level + 1, self.page.drafting[name]
        self.spent += drafting[level + 1] - drafting[level]
        return True

    def _next(self, name: str, draft: Draft, place: int) -> tuple[float, float]:
        """Chances of a guess that is not yet made and of those below it. Who is sure goes on to be: they are as likely as the guess before."""
        if place < 0:
            return self.tables.first(name, self.rows[~place].history), self.page.after[name]
        chance = self.chance(self.rows[draft.row[place]], name, draft.depth[place], draft.said(place, self.tables.bits[name]))
        return chance, chance

    def chance(self, row: Row, name: str, depth: int, score: float) -> float:
        """That a node is accepted if its parent is, in this text."""
        chance, bias = self.tables.chance(name, depth, score, row.history), row.bias.get(name)
        return bias.of(chance) if bias is not None else chance

    def _deepens(self, name: str, nodes: int, have: float, reach: float, after: float) -> bool:
        """`nodes`: a row has; `have`: tokens expected; `reach`: of one more level; `after`: chance of each that follows."""
        page, level, share = self.page, self.levels[name], self.rows[0].steps.get(name, 1.0)
        cost, drafting, gained = self.spent + page.verify[min(nodes, DEEPEST)], page.drafting[name], 0.0
        for m in range(1, min(8, DEEPEST - max(level, nodes)) + 1):
            gained += reach
            reach *= after
            then = self.spent + drafting[level + steps_of(m, share)] - drafting[level] + page.verify[nodes + m]
            if gained * cost > (then - cost) * have and then <= self.room:
                return True
        return False

    def gone(self, name: str, draft: Draft, frontier: Places) -> int:
        """Levels that a drafter has gone by now, which may be more than it was let: some draft a few at a time."""
        level = self.levels[name]
        if not self.heard and frontier and frontier[0] >= 0 and draft.depth[frontier[0]] > level:
            own = [n for n in tree.ancestors(draft, frontier[0]) if draft.source[n] & self.tables.bits[name]]
            reached, line = min(max(len(own), level), DEEPEST), self.page.drafting[name]
            self.spent += line[reached] - line[level]
            self.levels[name] = level = reached
        return level

    def _left(self, draft: Draft, survival: list[float], frontier: Places) -> dict[int, float]:
        """Per place, the chance that the text comes by it and goes on with none of the nodes that others have put below."""
        left = {p: survival[p] if p >= 0 else 1.0 for p in frontier}
        for n, parent in enumerate(draft.parent):
            if parent in left:
                left[parent] = max(left[parent] - survival[n], 0.0)
        return left

    def survivals(self, draft: Draft) -> list[float]:
        """Per node: that it and all before it are accepted. Nodes once seen are not looked at again in the same step."""
        out, marks, bits, again, p = self.survival, self.tables.marks, self.tables.bits, draft.again is not None, 0.0
        before, known = 0, -1.0  # deep nodes of one source and one score are as likely as each other
        for n in range(len(out), len(draft)):
            depth, score, source = draft.depth[n], draft.score[n], draft.source[n]
            if depth <= ALIKE or source != before or score != known or (again and source & (source - 1)):
                row, p = self.rows[draft.row[n]], 0.0
                for name in marks.of(source):
                    p = max(p, self.chance(row, name, depth, draft.said(n, bits[name]) if again else score))
                before, known = source, score
            out.append(p * out[parent] if (parent := draft.parent[n]) >= 0 else p)
        return out

    def renew(self, draft: Draft) -> None:
        """What was said again may be likelier than when it was first seen."""
        if draft.again is not None:
            self.survival.clear()

    def apart(self, draft: Draft) -> list[float]:
        """`survivals` of a tree (`siblings.apart`), worked out once for a draft, as is their order."""
        if self.lined is not draft:
            self.lined, self.parted = draft, apart(draft, self.survivals(draft))
            self.lines = in_lines(draft, self.parted)
        return self.parted

    def sure(self, name: str, draft: Draft) -> tuple[int, float]:
        """How many guesses of a drafter there are, and their mean chance."""
        survival, bit, total, own = self.survivals(draft), self.tables.bits[name], 0.0, 0
        for n, source in enumerate(draft.source):
            if source & bit:
                total += given(survival, n, draft.parent[n])
                own += 1
        return own, total / own if own else 0.0

    def brought(self, name: str, nodes: int, spent: float, have: float, record: StepRecord) -> float:
        """Plain steps that a drafter saved which was asked beside others' guesses (`beside`): what the tokens that are its own would have taken at
        the pace that there was without it, and what it spared of wrong guesses, less what asking it took."""
        draft, bit, made, right = record.draft, self.tables.bits[name], min(record.nodes(), DEEPEST), 0
        assert draft is not None
        while right < len(record.kept) and draft.source[record.kept[right]] & ~bit:
            right += 1
        others = sum([source & ~bit > 0 for source in draft.source])
        nodes = min(nodes, made) if right == max(others, len(record.kept)) else nodes  # more of theirs may have been right
        verify = self.page.verify
        return (record.accepted[0] - min(right, nodes)) / have - (self.spent + verify[made] - spent - verify[nodes])

    def surest(self, draft: Draft, most: int) -> list[int]:
        """So many nodes of each row that are likeliest to be accepted, ascending."""
        return surest(draft, self.apart(draft), self.lines, most)

    def judged(self, record: StepRecord) -> None:
        """What the verdicts say of the drafters in these texts."""
        draft = record.draft
        assert draft is not None
        survival = self.survivals(draft)
        if tree.straight(draft) and draft.source.count(draft.source[0]) == len(draft.token):
            self._chain_judged(draft.token, record.tokens[0], survival, self.tables.marks.of(draft.source[0]))
            return
        seen = dict[tuple[int, str], tuple[float, float]]()
        for n, verdict in verdicts(record):
            p = given(survival, n, draft.parent[n])
            for name in self.tables.marks.of(draft.source[n]):
                excess, weight = seen.get((draft.row[n], name), (0.0, 0.0))
                seen[draft.row[n], name] = excess + verdict - p, weight + p * (1 - p)
        for (r, name), (excess, weight) in seen.items():
            self._learned(self.rows[r], name, excess, weight)

    def _chain_judged(self, said: list[int], came: tuple[int, ...], survival: list[float], names: list[str]) -> None:
        """The same of one row's chain that all these have made, which most drafts are: what came out ends with the first that is not right."""
        excess, weight, above = 0.0, 0.0, 1.0
        for n in range(min(len(said), len(came))):
            p, right = survival[n] / above, 1.0 if said[n] == came[n] else 0.0
            excess, weight, above = excess + right - p, weight + p * (1 - p), survival[n]
        for name in names:
            self._learned(self.rows[0], name, excess, weight)

    def _learned(self, row: Row, name: str, excess: float, weight: float) -> None:
        """`Bias.learn` of a drafter in one text."""
        bias = row.bias.get(name)
        if bias is None:
            bias = row.bias[name] = Bias()
        bias.learn(excess, weight)

    def best(self, draft: Draft) -> tuple[int, float]:
        """(nodes a row that are best verified, the score of that)."""
        if self.known[0] is draft:
            return self.known[1:]
        self.renew(draft)
        if tree.straight(draft):
            self.known = draft, *self._best_of_chain(draft)
            return self.known[1:]
        self.apart(draft)
        rows, lines, verify = draft.rows, self.lines, self.page.verify
        gained, best, at = float(rows), 1 / (self.spent + self.plain), 0
        least = best * (1 + MARGIN)
        for n in range(1, min(max(map(len, lines)), DEEPEST) + 1):
            for line in lines:
                if len(line) >= n:
                    gained += line[n - 1]
            score = gained / rows / (self.spent + verify[n])
            if score > best and score >= least:
                best, at = score, n
        self.known = draft, at, best
        return at, best

    def _best_of_chain(self, draft: Draft) -> tuple[int, float]:
        """The same of a chain of one row, which is what most steps ask."""
        verify, spent, gained, at = self.page.verify, self.spent, 1.0, 0
        plain = best = 1 / (spent + self.plain)
        survival = self.survivals(draft)
        for n in range(min(len(survival), DEEPEST)):
            gained += survival[n]
            worth = gained / (spent + verify[n + 1])
            if worth > best:
                best, at = worth, n + 1
        return (at, best) if best >= plain * (1 + MARGIN) else (0, plain)


def _sum(numbers: list[float], start: float) -> float:
    """Python's `sum`, in machine code."""
    for x in numbers:
        start += x
    return start
