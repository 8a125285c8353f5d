"""The step under way, and the ratio rule: what its draft is worth, and whether more of it would be.

A plan's score is (1 + F) / C: tokens expected over what the step costs in plain steps. F sums the survivals of the nodes that
are verified. Prices and chances come from the tables' page; nothing is learned here.
"""

from dataclasses import dataclass, field

from outrider.control.predict import LEVELS
from outrider.control.rows import Row
from outrider.control.tables import MARGIN, SEEN, Page, Tables
from outrider.core import tree
from outrider.core.types import Draft, Places
from outrider.measure.cost import DEEPEST

PROBED = 2  # levels of a drafter that is tried


@dataclass(slots=True)
class Step:
    """`number`: of all steps; `expected`: tokens of the best number of nodes. In plain steps: `room`, what the guard lets it cost; `plain`, what not to
    draft would cost; `spent`, by drafters so far. `levels`: by drafter. `survival`: of the draft's nodes. `known`: (nodes the draft had, nodes a row that
    were best, the score of that)."""

    tables: Tables
    page: Page
    rows: list[Row]
    number: int
    room: float
    plain: float
    spent: float = 0.0
    levels: dict[str, int] = field(default_factory=dict)
    survival: list[float] = field(default_factory=list)
    known: tuple[int, int, float] = (0, 0, 1.0)
    expected: float = 1.0
    going: str = ""  # the drafter that was asked for last
    stopped: str = ""  # one that went on by itself, until it no longer paid
    refused: bool = False  # did the guard keep a drafter from starting?
    reads: bool = False  # does a drafter read before it begins?
    trial: tuple[str, float] | None = None  # a drafter that is tried though it does not seem to pay, and what that costs

    def deeper(self, name: str, draft: Draft, frontier: Places) -> Places:
        """Does any number of levels more pay? Looking one ahead would stop in front of every step and cliff of the costs."""
        rows = len(self.rows)
        if not frontier or (self.trial and self.levels[name] >= PROBED):
            return []
        survival = self.survivals(draft)
        have, nodes = sum(survival, float(rows)), max([draft.row.count(r) for r in range(rows)])
        left, reach, further = self._left(draft, survival, frontier), 0.0, 0.0
        for p in frontier:
            chance, after = self._next(name, draft, p)
            reach += left[p] * chance
            further += left[p] * chance * after
        return frontier if self._deepens(name, nodes, have, reach, further / (reach or 1.0)) else []

    def on(self, score: float) -> bool:
        """`deeper` of a chain that a drafter makes by itself where there was no node before."""
        name, survival, tables = self.going, self.survival, self.tables
        level, history = self.levels[name], self.rows[0].history
        chance = tables.chance(name, level, score, history)
        survival.append((survival[-1] if survival else 1.0) * chance)
        if (self.trial and level >= PROBED) or not self._deepens(name, level, sum(survival, 1.0), survival[-1] * chance, chance):
            self.stopped = name
            return False
        self.levels[name], drafting = level + 1, self.page.drafting[name]
        self.spent += drafting[level + 1] - drafting[level]
        return True

    def _next(self, name: str, draft: Draft, place: int) -> tuple[float, float]:
        """Chances of a guess that is not yet made and of those below it. Who is sure goes on to be: they are as likely as the guess before."""
        if place < 0:
            return self.tables.first(name, self.rows[~place].history), self.page.after[name]
        chance = self.tables.chance(name, draft.depth[place], draft.score[place], self.rows[draft.row[place]].history)
        return chance, chance

    def _deepens(self, name: str, nodes: int, have: float, reach: float, after: float) -> bool:
        """`nodes`: a row has; `have`: tokens expected; `reach`: of one more level; `after`: chance of each that follows."""
        page, level = self.page, self.levels[name]
        cost, drafting, gained = self.spent + page.verify[min(nodes, DEEPEST)], page.drafting[name], 0.0
        for m in range(1, min(8, DEEPEST - max(level, nodes)) + 1):
            gained += reach
            reach *= after
            then = self.spent + drafting[level + m] - drafting[level] + page.verify[nodes + m]
            if gained * cost > (then - cost) * have and then <= self.room:
                return True
        return False

    def gone(self, name: str, draft: Draft, frontier: Places) -> int:
        """Levels that a drafter has gone by now, which may be more than it was let: some draft a few at a time."""
        level = self.levels[name]
        if frontier and frontier[0] >= 0 and draft.depth[frontier[0]] > level:
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
        out, tables, p = self.survival, self.tables, 0.0
        before, known = 0, -1.0  # deep nodes of one source and one score are as likely as each other
        for n in range(len(out), len(draft)):
            depth, score, source = draft.depth[n], draft.score[n], draft.source[n]
            if depth <= LEVELS or source != before or score != known:
                history, p = self.rows[draft.row[n]].history, 0.0
                for name in tables.marked(source):
                    p = max(p, tables.chance(name, depth, score, history))
                before, known = source, score
            out.append(p * out[parent] if (parent := draft.parent[n]) >= 0 else p)
        return out

    def sure(self, name: str, draft: Draft) -> float | None:
        """The mean chance of a drafter's guesses; None: it made none."""
        survival, bit, total, own = self.survivals(draft), self.tables.bits[name], 0.0, 0
        for n, source in enumerate(draft.source):
            if source & bit:
                parent = draft.parent[n]
                total += survival[n] / (survival[parent] if parent >= 0 else 1.0)
                own += 1
        return total / own if own else None

    def best(self, draft: Draft) -> tuple[int, float]:
        """(nodes a row that are best verified, the score of that)."""
        if self.known[0] == len(draft):
            return self.known[1:]
        if tree.straight(draft):
            if len(self.survival) == len(draft):  # each was looked at when it was made, and no two such chains are alike
                found = self._best_of_chain(draft)
            else:
                key = self.rows[0].history & SEEN, self.spent, self.plain, tuple(draft.source), tuple(draft.score)
                found = self.page.chains.get(key) or self.page.chains.setdefault(key, self._best_of_chain(draft))
            self.known = len(draft), *found
            return found
        rows, survival, verify = draft.rows, self.survivals(draft), self.page.verify
        lines = [sorted([s for s, r in zip(survival, draft.row, strict=True) if r == row], reverse=True) for row in range(rows)]
        gained, best, at = float(rows), 1 / (self.spent + self.plain), 0
        least = best * (1 + MARGIN)
        for n in range(1, min(max(map(len, lines)), DEEPEST) + 1):
            for line in lines:
                if len(line) >= n:
                    gained += line[n - 1]
            score = gained / rows / (self.spent + verify[n])
            if score > best and score >= least:
                best, at = score, n
        self.known = len(draft), at, best
        return at, best

    def _best_of_chain(self, draft: Draft) -> tuple[int, float]:
        """The same of a chain of one row, which is what most steps ask."""
        verify, spent, gained, at = self.page.verify, self.spent, 1.0, 0
        plain = best = 1 / (spent + self.plain)
        for n, survival in enumerate(self.survivals(draft)[:DEEPEST], 1):
            gained += survival
            worth = gained / (spent + verify[n])
            if worth > best:
                best, at = worth, n
        return (at, best) if best >= plain * (1 + MARGIN) else (0, plain)
