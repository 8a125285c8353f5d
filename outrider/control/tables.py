"""What the scheduler has learned of a pair: what steps cost, and who is right how often. Records go in, a page of prices
and chances for the present situation comes out.

Records are taken in a handful at a time: the work is the same, and code that has just run runs several times faster.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.control.hedge import Hedge
from outrider.control.past import Past
from outrider.control.predict import LEVELS, Counters, bucket, logit, predictor
from outrider.core.types import Draft, Marks, StepRecord, stage
from outrider.measure.cost import DEEPEST, FAR, FEW, Costs, Situation
from outrider.measure.trace import by_rank, verdicts

UNSEEN = 0.6  # acceptance of a drafter of which nothing is known
LESSONS = 3  # graded nodes a step that are learned from, standing for all of them
SURE = 0.98  # acceptance of guesses that could hardly be better
ALIKE = LEVELS + 1  # depth from which on nodes of one score are as likely as each other: no verdict that predictors tell apart was before the draft
LOOK = 0.35  # a drafter whose level costs less of a plain step is asked before anything is weighed: its scores say more than what it was elsewhere
TEXTS = (0.35, 0.5, 0.65, 0.75, 0.85, 0.92, 0.96, 0.985)  # texts are told apart by how likely the guesses of a drafter are in them
BATCH = 8  # steps that are learned from together
LOOKED = 16  # depths weighed before a drafter starts
CHANCES = [n / 20 for n in range(2, 20)]  # of first tokens, as drafters give them: from which on is it worth asking?
WARM = 32  # the first drafts of a new pair: of it nothing is known yet, and they are verified whole, to the depth WHOLE
MARGIN = 0.03  # what a plan must promise more than plain decoding
FINE = 128  # more than there are hundredths
SEEN = 3  # last verdicts that predictions tell apart between two pages


@dataclass(slots=True)
class Lesson:
    """A record to be learned from."""

    record: StepRecord
    at: Situation
    histories: list[int]  # each row's verdicts before it
    behind: dict[str, int]  # tokens that each drafter had not read
    calm: bool  # had many plain steps gone before?
    pace: float  # of the machine
    cold: bool = False  # is it one of the first of its text?


@dataclass(slots=True)
class Page:
    """Prices and chances of one situation. Prices are in plain steps: such as stand between wider ones, with what that does to caches."""

    at: Situation
    plain: float  # seconds of a plain step now
    owed: float  # seconds of a step of plain decoding, as plain steps alone tell: what the guarantee counts by
    outdated: bool  # is it time to ask them again?
    spread: float  # 99th percentile of what steps cost, over what is thought
    verify: list[float]  # by nodes, by the objective
    seconds: list[float]  # the same in time
    drafting: dict[str, list[float]]  # by drafter and levels
    prices: dict[str, float]  # by drafter: of one level
    after: dict[str, float]  # by drafter: chance of a node below the first
    steady: float  # what a step of plain decoding takes, among others of its kind: less than one, where caches stay warm
    deepest: int  # nodes beyond which not even sure guesses pay
    cheapest: float  # one node of the drafter whose level costs least
    # What is worked out once asked. By drafter, the chance of its guesses (in hundredths) and steps each (FINE times tenths): what it is worth by
    # itself, and at how many levels.
    scores: dict[str, dict[int, tuple[float, int]]] = field(default_factory=dict)
    kinds: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # by drafter: of each kind of text its share, and that
    least: dict[tuple[str, int], float] = field(default_factory=dict)  # by drafter and last verdicts: the least chance of a first token that pays


class Tables:
    """Costs, a predictor, what unseen nodes are worth, and Hedge. `bits`: marks of drafters. `energy`: a table of joules,
    which counts by `objective` (0 latency .. 1 energy)."""

    def __init__(
        self, bits: Mapping[str, int], costs: Costs, kind: str = "logistic", *, objective: float = 0.0, energy: Costs | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        state = state or {}
        self.marks = Marks(bits)
        self.bits, self.costs, self.objective, self.energy = dict(bits), costs, objective, energy
        self.costs.take(state.get("costs", {}))
        self.kind, self.predictor = kind, predictor(kind, state.get("predictors", {}).get(kind))
        # How often something was so, by "NAME KEY". KEY is a bucket of a score: the child of an accepted node with it was accepted; "?": any node below
        # the first was; "s H": the first was, after the last two verdicts H; "rK": the K-th likeliest sibling was; "tI": a text was of kind TEXTS[I];
        # "steps": its own steps a guess; "saved": how much of a promise to save came; "tail": a text's end was enough.
        self.next = Counters(state.get("next"))
        self.hedge = Hedge(state.get("hedge"))
        self.drafts, self.count, self.past = int(state.get("drafts", 0)), 0, Past(state.get("past"))

    def state(self) -> dict[str, Any]:
        """What a later process starts from."""
        return {
            "costs": self.costs.state(), "predictors": {self.kind: self.predictor.state()}, "next": self.next.cells, "hedge": self.hedge.state(),
            "drafts": self.drafts, "past": self.past.state(),
        }  # fmt: skip

    def tried(self) -> None:
        """Ask for all that a request may ask for, and learn as it would: nonsense that was read from a profile raises here. What was tried is of no
        more use."""
        if any(count < 0 or not 0 <= share <= 1 for count, share in self.next.cells.values()):
            raise ValueError("how often something was seen is no less than 0, and shares lie in 0..1")
        for at in list(self.costs.verify):
            page = self.page(at)
            assert page is not None
            for name in self.bits:
                self.kinds(page, name)
                self.score(page, name, self.usual(name), 1.0)
                self.ended(name, UNSEEN, 1.0)
                self.least(page, name, 0, 0.0)
                self._pays(page, name, UNSEEN, 0, 0.0)
                self.costs.drafted(name, at, 1, page.plain, 1)
            self.costs.verified(at, 0, page.plain, True)
        for name in self.bits:
            self.predictor.update(name, 1, UNSEEN, 0, True, 1)
            for cell in list(self.next.cells):
                self.next.count(cell, True)
            self.hedge.grade({name: 0.0})
        self.hedge.shares(list(self.bits))
        self.past.rest(self.past.row(), 0, 0)

    def page(self, at: Situation) -> Page | None:
        """What is believed of a situation now; None before anything was measured."""
        curve = self.costs.verifying(at)
        if curve is None:
            return None
        curve.drawn()
        drafting = {name: self._drafting(name, at) for name in self.bits}
        after = {name: self.next.share(f"{name} ?", UNSEEN) for name in self.bits}
        joules = self.energy.verifying(at) if self.energy is not None and self.objective else None
        verify = self._mixed(curve.shape, joules.drawn().shape) if joules else curve.shape
        return Page(
            at=at,
            plain=curve.line[0] * self.costs.pace,
            owed=self.costs.owed(at),
            outdated=self.costs.outdated(at),
            spread=curve.spread,
            verify=verify,
            seconds=curve.shape,
            drafting=drafting,
            prices={name: line[1] for name, line in drafting.items()},
            after=after,
            steady=self.costs.plainly(at) / curve.line[0],
            deepest=_deepest(verify),
            cheapest=curve.shape[1] + min([line[1] for line in drafting.values()], default=0.0),
        )

    def score(self, page: Page, name: str, chance: float, steps: float) -> float:
        """Tokens for the time of a plain step, by a drafter alone whose guesses are each right with this chance and take so many steps of its own, at
        the best depth; kept for the life of a page."""
        return self.depth(page, name, chance, steps)[0]

    def depth(self, page: Page, name: str, chance: float, steps: float) -> tuple[float, int]:
        """The same, and that depth."""
        scores, likely, tenths = page.scores.get(name), int(100 * chance + 0.5), int(10 * steps + 0.5)
        if scores is None:
            scores = page.scores[name] = {}
        known = scores.get(FINE * tenths + likely)
        if known is None:
            known = scores[FINE * tenths + likely] = self._weighed(page, page.drafting[name], likely / 100, tenths / 10)
        return known

    def _weighed(self, page: Page, drafting: list[float], chance: float, steps: float) -> tuple[float, int]:
        """`depth`, worked out."""
        verify, gained, more, best, at = page.verify, 1.0, 1.0, 0.0, 0
        for k in range(1, LOOKED + 1):
            more *= chance
            gained += more
            worth = gained / (drafting[steps_of(k, steps)] + verify[k])
            if worth > best:
                best, at = worth, k
        return best, at

    def kinds(self, page: Page, name: str) -> list[tuple[float, float]]:
        """(share, score): of how many texts a drafter is worth how much, by those before; kept for the life of a page."""
        if name not in page.kinds:
            page.kinds[name] = [(share, self.score(page, name, chance, self.next.share(f"{name} steps", 1.0))) for share, chance in self._texts(name)]
        return page.kinds[name]

    def _texts(self, name: str) -> list[tuple[float, float]]:
        """The same, how likely its guesses are."""
        return [(self.next.share(f"{name} t{i}", 1 / len(TEXTS)), chance) for i, chance in enumerate(TEXTS)]

    def usual(self, name: str) -> float:
        """How likely the guesses of a drafter are in the mean of texts."""
        usual = 0.0
        for share, chance in self._texts(name):
            usual += share * chance
        return usual

    def ended(self, name: str, chance: float, steps: float) -> None:
        """A text is over in which the guesses of a drafter were so likely of late, and each took so many steps of its own."""
        self.next.count(f"{name} steps", steps)
        kind = min(range(len(TEXTS)), key=lambda i: abs(logit(TEXTS[i]) - logit(chance)))
        for i in range(len(TEXTS)):
            self.next.count(f"{name} t{i}", i == kind)

    def measured(self, name: str, at: Situation) -> bool:
        """Is it known, and not only assumed, what a drafter costs there?"""
        curve = self.costs.drafting(name, at)
        return curve is not None and bool(curve.seen)

    def _drafting(self, name: str, at: Situation) -> list[float]:
        own, plain = self.costs.drafting(name, at), self.costs.verifying(at)
        assert own is not None and plain is not None
        shape = [0.0, *(x / plain.line[0] for x in own.drawn().line[1:])]  # who is not started costs nothing
        if self.energy is None or not self.objective:
            return shape
        own, plain = self.energy.drafting(name, at), self.energy.verifying(at)
        return self._mixed(shape, [x / plain.drawn().line[0] for x in own.drawn().line]) if own and plain else shape

    def _mixed(self, seconds: list[float], joules: list[float]) -> list[float]:
        return [(1 - self.objective) * t + self.objective * e for t, e in zip(seconds, joules, strict=True)]

    def least(self, page: Page, name: str, history: int, thinking: float) -> float:
        """The least chance of a first token, as its drafter gives it, with which some depth pays beside plain decoding, though deciding takes
        `thinking` plain steps; kept for the life of a page."""
        key = name, history & SEEN
        if key not in page.least:
            pays = bisect_left(CHANCES, True, key=lambda c: self._pays(page, name, c, history, thinking))
            page.least[key] = 0.0 if self.drafts < WARM else CHANCES[pays] if pays < len(CHANCES) else 1.0
        return page.least[key]

    def _pays(self, page: Page, name: str, score: float, history: int, thinking: float) -> bool:
        gained, then, drafting = 1.0, self.chance(name, 1, score, history), page.drafting[name]
        for k in range(1, LOOKED + 1):
            gained += then
            if gained * min(page.steady, 1.0) > (1 + MARGIN) * (thinking + drafting[k] + page.verify[k]):
                return True
            then *= self.below(name, score) if k == 1 else page.after[name]
        return False

    def chance(self, name: str, depth: int, score: float, history: int) -> float:
        """That a node is accepted if its parent is."""
        depth = min(depth, ALIKE)
        return self.predictor.predict(name, depth, score, past(history, depth))

    def below(self, name: str, score: float) -> float:
        """That the unseen child of an accepted node with this score is accepted."""
        return self.next.share(f"{name} {bucket(score)}", score)

    def first(self, name: str, history: int) -> float:
        """That a drafter's first guess, not yet made, is accepted after such verdicts."""
        return self.next.share(f"{name} s {history & 3}", UNSEEN)

    def ever(self, name: str) -> float:
        """The same whatever the verdicts before."""
        cells = [cell for last in range(4) if (cell := self.next.cells.get(f"{name} s {last}"))]
        return (sum([n * share for n, share in cells]) + 2 * UNSEEN) / (sum([n for n, _ in cells]) + 2)

    def take_in(self, lessons: list[Lesson]) -> None:
        """Learn from steps, oldest first."""
        for lesson in lessons:
            self.count += 1
            self._costs(lesson)
            if lesson.record.levels:
                self._verdicts(lesson)

    def _costs(self, lesson: Lesson) -> None:
        record, at, drafting = lesson.record, lesson.at, 0.0
        known = lesson.cold and self.costs.plains.get(at, 0) > FEW  # what first steps take is no news there, but for reading
        for name, levels in record.levels.items():
            took = record.seconds.get(stage(name), 0.0)
            drafting += took
            behind = lesson.behind.get(name, 0)
            if at in self.costs.verify and (behind > FAR or not known) and self._spoke(record, name):
                self.costs.drafted(name, at, min(levels, DEEPEST), took / lesson.pace, behind)
        nodes = min(record.nodes(), DEEPEST)
        once = record.seconds.get("prefill", 0.0) + record.seconds.get("jit", 0.0)
        if not known:
            self.costs.verified(at, nodes, (record.reading.seconds - once - drafting) / lesson.pace, lesson.calm)

    def _spoke(self, record: StepRecord, name: str) -> bool:
        """Did a drafter guess? What it takes to say nothing, as a model does beyond its context, is not what a level takes."""
        return record.draft is not None and any(source & self.bits[name] for source in record.draft.source)

    def _verdicts(self, lesson: Lesson) -> None:
        """Grade every drafter that had a guess, verified or not."""
        record, draft = lesson.record, lesson.record.draft
        assert draft is not None
        self.drafts += bool(draft.token)
        graded = list(verdicts(record))
        stride = -(-len(graded) // LESSONS)
        right: dict[str, int] = dict.fromkeys(record.levels, 0)
        for i, (n, verdict) in enumerate(graded):
            row = draft.row[n]
            for name, bit in self.bits.items():
                if draft.source[n] & bit:
                    right[name] = right.get(name, 0) + verdict
                    if (i + self.count) % stride == 0:  # whether a node is taken does not hang on any verdict
                        self._node(name, draft, n, lesson.histories[row], verdict, stride)
        self.ranked(draft, graded)
        self._hedge(lesson, draft, right)

    def ranked(self, draft: Draft, graded: list[tuple[int, bool]]) -> None:
        """Count, per drafter, how often the k-th likeliest of its tokens below an accepted place was right (cells `NAME rK`). Chains have none."""
        if len({draft.parent[n] for n, _ in graded}) < len(graded):
            for name, bit in self.bits.items():
                for rank, verdict in by_rank(draft, graded, bit):
                    self.next.count(f"{name} r{rank}", verdict)

    def _node(self, name: str, draft: Draft, n: int, history: int, verdict: bool, weight: int) -> None:
        """One graded node, standing for `weight` of them."""
        parent, bit = draft.parent[n], self.bits[name]
        self.predictor.update(name, draft.depth[n], draft.said(n, bit), past(history, draft.depth[n]), verdict, weight)
        if parent < 0:
            self.next.count(f"{name} s {history & 3}", verdict, weight)
        else:
            self.next.count(f"{name} {bucket(draft.said(parent, bit))}", verdict, weight)
            self.next.count(f"{name} ?", verdict, weight)

    def _hedge(self, lesson: Lesson, draft: Draft, right: dict[str, int]) -> None:
        verify, gains = self.costs.verifying(lesson.at), {}
        for name in lesson.record.levels:
            rows = [draft.row[n] for n, source in enumerate(draft.source) if source & self.bits[name]]
            if rows and verify:
                width = min(max(rows.count(r) for r in set(rows)), DEEPEST)
                cost = self.costs.drafting_share(name, lesson.at, min(lesson.record.levels[name], DEEPEST)) + verify.shape[width]
                gains[name] = (1 + right[name] / draft.rows) / cost - 1
        self.hedge.grade(gains)


def _deepest(verify: list[float]) -> int:
    """The best number of nodes where nearly every guess is right."""
    return max(range(1, len(verify)), key=lambda n: (1 - SURE ** (n + 1)) / (1 - SURE) / verify[n])


def steps_of(levels: int, share: float) -> int:
    """Steps of a drafter in which it makes so many levels, where each takes such a share of one."""
    return levels if share >= 1 else max(-int(-levels * share // 1), 1)


def past(history: int, depth: int) -> int:
    """The last verdicts when a node's turn comes: those before it in the draft were accepted, else it would not."""
    return history << (depth - 1) | ((1 << (depth - 1)) - 1)
