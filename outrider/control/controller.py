"""The scheduler: at every step whether, by whom and how far to speculate, by one rule.

Maximise (1 + F) / C: the tokens expected over what the step costs; plain decoding scores 1. F sums the survivals of the
nodes that are verified; C counts drafting, verification and host, in plain steps, from measured tables. The rule is used
before a drafter that costs something starts, while it goes on, and before verification, which takes the best nodes.
Sees records and drafts, never logits; what it returns cannot change a text.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.control.guard import Ledger
from outrider.control.hedge import Hedge
from outrider.control.predict import Counters, bucket, predictor
from outrider.core.types import POINT, Draft, Places, Plan, Sequence, StepRecord
from outrider.measure.cost import DEEPEST, FAR, Costs, Curve, Situation, situation
from outrider.measure.trace import verdicts

MARGIN = 0.03  # a plan must promise that much more than plain decoding
LOOK = 0.25  # a drafter whose level costs less of a plain step is asked before anything is weighed
PATIENCE, REST = 8, 8  # vain guesses after which a drafter begins to rest, a step longer each PATIENCE; most steps
PROBE, RARELY, PROBED = 32, 1024, 2  # steps between tries of a drafter that does not seem to pay, at first and at last; its levels
REMEASURE, FIRST = 256, 2  # steps after which a plain one is taken, to measure what it costs now; plain steps before all else
WARM, WHOLE = 32, 8  # the first drafts of a new pair are verified whole, to this depth
UNSEEN = 0.6  # acceptance of a drafter of which nothing is known
LESSONS, REFRESH, SEEN = 3, 16, 15  # graded nodes a step that are learned from; steps between looks at the tables; verdicts told apart meanwhile
AHEAD = 64  # tokens more than were written so far that a request is trusted to go on for


@dataclass(slots=True)
class Row:
    """What is remembered of one request: its last verdicts; by drafter, the steps that it still rests, its guesses in
    vain, and the length of the text when it last read it; how deep drafts are worth looking at (`reach`)."""

    history: int = 0
    rest: dict[str, int] = field(default_factory=dict)
    rested: dict[str, int] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    reach: int = WHOLE


@dataclass(slots=True)
class Step:
    """The step under way. In plain steps: `verify`, what verification costs by nodes; `room`, what the guard lets it all
    cost; `spent`, by drafters so far. `levels`: by drafter. `survival`: of the draft's nodes. `read`: texts' lengths."""

    at: Situation
    plain: float
    verify: list[float]
    room: float
    spent: float = 0.0
    levels: dict[str, int] = field(default_factory=dict)
    survival: list[float] = field(default_factory=list)
    probing: bool = False
    bad_case: float = 0.0


class Adaptive:
    """A Controller that learns from every step. `bits`: its drafters and their marks, the cheapest first; `tier()`: what
    serves the target now; `energy`: a second table, of joules, that counts by `objective` (0 latency .. 1 energy)."""

    def __init__(
        self, bits: Mapping[str, int], costs: Costs, tier: Callable[[], str], *, slowdown: float = 0.05, kind: str = "tage",
        objective: float = 0.0, energy: Costs | None = None, state: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        state = state or {}
        self.bits, self.costs, self.tier, self.objective, self.energy = dict(bits), costs, tier, objective, energy
        self.kind, self.predictor = kind, predictor(kind, state.get(kind))
        self.next = Counters(state.get("next"))  # verdicts of nodes not yet seen, by drafter and the score of the node before
        self.hedge, self.ledger = Hedge(state.get("hedge")), Ledger(slowdown)
        self.drafts = int(state.get("drafts", 0))
        self.rows: dict[str, Row] = {}
        self.plans: dict[tuple[tuple[str, ...], int], Plan] = {}
        self.memo: dict[tuple[str, int, float, int], float] = {}  # predictions since the tables last changed much
        self.step: Step | None = None
        self.known: tuple[list[Sequence], Situation] | None = None
        self.pending: tuple[list[Sequence], StepRecord, Step | None] | None = None
        self.steps, self.since_plain = 0, 0
        self.pause, self.due = dict.fromkeys(bits, PROBE), dict.fromkeys(bits, 0)

    def state(self) -> dict[str, Any]:
        """What a later process starts from."""
        return {self.kind: self.predictor.state(), "next": self.next.cells, "hedge": self.hedge.state(), "drafts": self.drafts}

    # Before drafting.

    def choose(self, seqs: list[Sequence]) -> tuple[Plan, str]:
        if self.pending:
            self.digest()
        self.steps += 1
        self.step = None
        names = [name for name in self.bits if self._awake(seqs, name)]
        if not names:
            return Plan(), "off:request" if all(s.request.drafters == frozenset() for s in seqs) else "off:unpaid"
        at = self._situation(seqs)
        curve = self.costs.verifying(at)
        if curve is None or self.costs.plains.get(at, FIRST) < FIRST or self.since_plain >= REMEASURE:
            return Plan(), "probe:plain"
        plain = curve.line[0] * self.costs.pace
        room = self.ledger.left([s.request.id for s in seqs], plain) / plain / curve.spread
        self.step = Step(at, plain, self._prices(at, curve), room)
        if room < curve.shape[1] + self._drafting(at, names[0], 1):
            self.step = None
            return Plan(), "off:guard"
        return self._plan(tuple(names), max([self._row(s).reach for s in seqs])), "off:no-guess"

    def _situation(self, seqs: list[Sequence]) -> Situation:
        """Looked at anew when the batch, the tier or the bucket of its longest text changes."""
        tier, longest = self.tier(), max([len(s.tokens) for s in seqs])
        known = self.known
        if known is None or known[0] != seqs or known[1].tier != tier or longest > known[1].context:
            sampled = any(s.request.sampling.temperature > 0 for s in seqs)
            known = self.known = (list(seqs), situation(tier, len(seqs), longest, sampled))
        return known[1]

    def _plan(self, names: tuple[str, ...], reach: int) -> Plan:
        if (names, reach) not in self.plans:
            self.plans[names, reach] = Plan(tuple((name, reach, 1) for name in names))
        return self.plans[names, reach]

    def _awake(self, seqs: list[Sequence], name: str) -> bool:
        """Does any row let this drafter guess now? Those that rest come a step nearer to waking."""
        awake = False
        for seq in seqs:
            if seq.request.drafters is None or name in seq.request.drafters:
                row = self._row(seq)
                if left := row.rest.get(name, 0):
                    row.rest[name] = left - 1
                else:
                    awake = True
        return awake

    def _row(self, seq: Sequence) -> Row:
        row = self.rows.get(seq.request.id)
        if row is None:
            row = self.rows[seq.request.id] = Row()
        return row

    # What things cost, in plain steps.

    def _prices(self, at: Situation, curve: Curve) -> list[float]:
        """Verification by nodes, by the objective."""
        joules = self.energy.verifying(at) if self.energy is not None and self.objective else None
        if joules is None:
            return curve.shape
        return [(1 - self.objective) * t + self.objective * e for t, e in zip(curve.shape, joules.shape, strict=True)]

    def _drafting(self, at: Situation, name: str, levels: int) -> float:
        """So many levels of a drafter, by the objective."""
        price = self.costs.drafting_share(name, at, levels)
        if self.energy is None or not self.objective:
            return price
        return (1 - self.objective) * price + self.objective * self.energy.drafting_share(name, at, levels)

    # While drafting.

    def more(self, seqs: list[Sequence], name: str, draft: Draft, frontier: Places) -> Places:
        step = self.step
        if step is None:
            return frontier
        if name not in step.levels:
            step.levels[name] = 0
            asked = [p for p in frontier if not self._row(seqs[~p]).rest.get(name)]
            if self._drafting(step.at, name, 1) > LOOK:
                asked = asked if self._pays(seqs, name, draft) else []
            going = asked
        elif self._drafting(step.at, name, 1) <= LOOK and not step.probing:
            going = []  # it has said all it had to say in one call
        else:
            going = self._deeper(seqs, name, draft, frontier)
        if going:
            level = step.levels[name]
            step.levels[name] = level + 1
            step.spent += self._drafting(step.at, name, level + 1) - self._drafting(step.at, name, level)
        return going

    def _pays(self, seqs: list[Sequence], name: str, draft: Draft) -> bool:
        """Is a drafter that costs something worth starting, beside what is drafted already? Now and then it is tried anyway."""
        step = self.step
        assert step is not None
        rows, have = len(seqs), self._best(seqs, draft)[1]
        first = sum([self.next.share(f"{name} s {self._row(s).history & 3}", UNSEEN) for s in seqs])
        after = self.next.share(f"{name} ?", UNSEEN)
        best, most, gained = 0.0, 0, 0.0
        for k in range(1, 9):
            gained += first * after ** (k - 1)
            score = (rows + gained) / rows / (step.spent + self._drafting(step.at, name, k) + step.verify[k])
            if score > best:
                best, most = score, k
        wait = sum([self._waiting(s, name) for s in seqs])
        bad = step.spent + wait + self._drafting(step.at, name, most) + step.verify[most]
        if bad > step.room:
            return False
        best *= self._tilt(name, draft)
        ahead = min([min(s.request.sampling.max_tokens - s.produced, s.produced + AHEAD) for s in seqs])
        worth = best >= max(have, 1.0) * (1 + MARGIN) and 2 * wait <= ahead * (1 / max(have, 1.0) - 1 / best)
        if worth:
            self.pause[name] = PROBE
        elif self.steps >= self.due[name] and 2 * wait <= PROBED:
            self.due[name] = self.steps + self.pause[name]
            self.pause[name] = min(2 * self.pause[name], RARELY)
            worth = step.probing = True
        return worth

    def _tilt(self, name: str, draft: Draft) -> float:
        """Drafters that were worth more lately than those that have guessed are believed a little more."""
        others = [n for n, bit in self.bits.items() if n != name and any(s & bit for s in draft.source)]
        if not others:
            return 1.0
        return 1.0 + 0.1 * (2 * self.hedge.shares([name, *others])[name] - 1)

    def _waiting(self, seq: Sequence, name: str) -> float:
        """Plain steps that pass before a drafter has caught up with a text."""
        step = self.step
        assert step is not None
        behind = len(seq.tokens) - self._row(seq).read.get(name, 0)
        return self.costs.catching_up(name, step.at, behind) * self.costs.pace / step.plain if behind > FAR else 0.0

    def _deeper(self, seqs: list[Sequence], name: str, draft: Draft, frontier: Places) -> Places:
        """Does any number of levels more pay? Looking one ahead would stop in front of every step and cliff of the costs."""
        step = self.step
        assert step is not None
        frontier = [n for n in frontier if draft.score[n] >= seqs[draft.row[n]].request.limits.floor]
        level = step.levels[name]
        if not frontier or (step.probing and level >= PROBED) or level >= DEEPEST:
            return []
        survival, rows = self._survivals(seqs, draft), len(seqs)
        have = rows + sum(survival)
        nodes = max([draft.row.count(r) for r in range(rows)])
        cost = step.spent + step.verify[min(nodes, DEEPEST)]
        after, gained = self.next.share(f"{name} ?", UNSEEN), 0.0
        reach = [survival[n] * self.next.share(f"{name} {bucket(draft.score[n])}", draft.score[n]) for n in frontier]
        base = self._drafting(step.at, name, level)
        for m in range(1, min(9, DEEPEST + 1 - max(level, nodes))):
            gained += sum(reach) * after ** (m - 1)
            then = step.spent + self._drafting(step.at, name, level + m) - base + step.verify[nodes + m]
            if gained * cost > (then - cost) * have and then <= step.room:
                return frontier
        return []

    # Before verification.

    def _survivals(self, seqs: list[Sequence], draft: Draft) -> list[float]:
        """Per node: that it and all before it are accepted. Nodes once seen are not looked at again in the same step."""
        step = self.step
        assert step is not None
        out = step.survival
        for n in range(len(out), len(draft)):
            depth, score, history, source = draft.depth[n], draft.score[n], self._row(seqs[draft.row[n]]).history, draft.source[n]
            p = max([self._predict(name, depth, score, history) for name, bit in self.bits.items() if source & bit])
            out.append(p * out[parent] if (parent := draft.parent[n]) >= 0 else p)
        return out

    def _predict(self, name: str, depth: int, score: float, history: int) -> float:
        key = (name, depth, score, history & SEEN)
        p = self.memo.get(key)
        if p is None:
            p = self.memo[key] = self.predictor.predict(name, depth, score, history)
        return p

    def _best(self, seqs: list[Sequence], draft: Draft) -> tuple[int, float]:
        """(nodes a row that are best verified, the score of that)."""
        step = self.step
        assert step is not None
        rows = len(seqs)
        if not draft.token:
            return 0, 1 / (step.spent + 1)
        survival = self._survivals(seqs, draft)
        lines = [sorted([s for s, r in zip(survival, draft.row, strict=True) if r == row], reverse=True) for row in range(rows)]
        gained, best, at = 0.0, 1 / (step.spent + 1), 0
        least = best * (1 + MARGIN)
        for n in range(1, min(max(map(len, lines)), DEEPEST) + 1):
            gained += sum([line[n - 1] for line in lines if len(line) >= n])
            cost = step.spent + step.verify[n]
            if cost > step.room:
                break
            score = (rows + gained) / rows / cost
            if score > best and score >= least:
                best, at = score, n
        return at, best

    def fill(self, seqs: list[Sequence], draft: Draft, reason: str) -> tuple[list[int] | None, str]:
        step = self.step
        if step is None or not draft.token:
            return None, "off:unpaid" if step is not None and self._declined() else reason
        if any(kind != POINT for kind in draft.kind):
            return None, "depth:drawn"
        most, _score = self._best(seqs, draft)
        longest = max([draft.row.count(r) for r in range(len(seqs))])
        if step.probing and most < PROBED:
            most, why = PROBED, "probe:drafter"
        elif self.drafts < WARM and most < min(longest, WHOLE):
            most, why = WHOLE, "probe:whole"
        elif most == 0:
            return [], "off:unpaid" if step.spent + step.verify[1] <= step.room else "off:guard"
        else:
            why = "depth:all" if most >= longest else "depth:trimmed"
        while most and step.spent + step.verify[min(most, DEEPEST)] > step.room:
            most, why = most - 1, "depth:guard"
        if most >= longest:
            return self._asked_for(seqs, draft, None, why)
        weight, left, kept = step.survival, [most] * len(seqs), []
        for n in sorted(range(len(draft)), key=lambda n: -weight[n]):
            if left[draft.row[n]]:
                left[draft.row[n]] -= 1
                kept.append(n)
        return self._asked_for(seqs, draft, sorted(kept), why)

    @staticmethod
    def _asked_for(seqs: list[Sequence], draft: Draft, kept: list[int] | None, why: str) -> tuple[list[int] | None, str]:
        """Rows that would verify fewer nodes than their request wants verify none."""
        if not any(s.request.limits.least for s in seqs):
            return kept, why
        kept = list(range(len(draft))) if kept is None else kept
        few = {r for r, s in enumerate(seqs) if sum([draft.row[n] == r for n in kept]) < s.request.limits.least}
        return [n for n in kept if draft.row[n] not in few], "off:least" if len(few) == len(seqs) else why

    def _declined(self) -> bool:
        """Did a drafter that could have guessed not start?"""
        return self.step is not None and not all(self.step.levels.values())

    # After the step.

    def learn(self, seqs: list[Sequence], record: StepRecord) -> None:
        """Only noted: it is taken in at the next step, whose time counts it."""
        self.pending = (list(seqs), record, self.step)

    def end(self, seq: Sequence) -> None:
        self.digest()
        self.rows.pop(seq.request.id, None)
        self.ledger.end(seq.request.id)

    def digest(self) -> None:
        """Take in the last step: what it cost, who was right, what is left to spend."""
        if self.pending is None:
            return
        (seqs, record, step), self.pending = self.pending, None
        at = step.at if step else self._situation(seqs)
        self._learn_costs(seqs, record, at)
        curve = self.costs.verifying(at)
        assert curve is not None
        plain, spent = curve.line[0] * self.costs.pace, record.reading.seconds - record.seconds.get("prefill", 0.0)
        bad_case = step.room * plain * curve.spread if step and any(record.drafted) else None
        for seq, tokens in zip(seqs, record.emitted, strict=True):
            self.ledger.charge(seq.request.id, plain, tokens, spent, bad_case)
        self.since_plain = 0 if not record.levels else self.since_plain + 1
        if record.draft is not None and record.levels:
            self._learn_verdicts(seqs, record, step)

    def _learn_costs(self, seqs: list[Sequence], record: StepRecord, at: Situation) -> None:
        drafting = 0.0
        for name, levels in record.levels.items():
            took = record.seconds.get(f"draft {name}", 0.0)
            drafting += took
            rows = [self._row(s) for s in seqs]
            behind = max([c - r.read.get(name, 0) for c, r in zip(record.context, rows, strict=True)])
            for seq, row in zip(seqs, rows, strict=True):
                row.read[name] = len(seq.tokens)
            if at in self.costs.verify:
                self.costs.drafted(name, at, min(levels, DEEPEST), took, behind if len(seqs) == 1 else 0)
        nodes = min(max(record.drafted), DEEPEST)
        self.costs.verified(at, nodes, record.reading.seconds - record.seconds.get("prefill", 0.0) - drafting)

    def _learn_verdicts(self, seqs: list[Sequence], record: StepRecord, step: Step | None) -> None:
        draft = record.draft
        assert draft is not None
        self.drafts += bool(draft.token)
        graded = list(verdicts(record))
        stride = -(-len(graded) // LESSONS)
        if self.steps % REFRESH == 0:
            self.memo.clear()
        right = dict.fromkeys(record.levels, 0)
        for i, (n, verdict) in enumerate(graded):
            row = self._row(seqs[draft.row[n]])
            for name, bit in self.bits.items():
                if draft.source[n] & bit:
                    right[name] = right.get(name, 0) + verdict
                    if (i + self.steps) % stride == 0:
                        self._lesson(name, draft, n, row.history, verdict, stride)
            row.history = (row.history << 1 | verdict) & 0xFFFF
        for r, seq in enumerate(seqs):
            row, kept = self._row(seq), record.drafted[r]
            row.reach = min(2 * row.reach, DEEPEST) if kept and kept == record.accepted[r] else max(min(row.reach, kept + WHOLE), WHOLE)
        if step is None:
            return
        gains = {}
        for name in record.levels:
            found = [draft.row[n] for n in range(len(draft)) if draft.source[n] & self.bits[name]]
            width = max([found.count(r) for r in set(found)], default=0)
            if width:
                cost = self._drafting(step.at, name, step.levels.get(name, 1)) + step.verify[min(width, DEEPEST)]
                gains[name] = (1 + right[name] / len(seqs)) / cost - 1
            self._rest(seqs, name, bool(width and any(record.drafted)))
        self.hedge.grade(gains)

    def _lesson(self, name: str, draft: Draft, n: int, history: int, verdict: bool, weight: int) -> None:
        """One graded node, standing for `weight` of them."""
        parent = draft.parent[n]
        self.predictor.update(name, draft.depth[n], draft.score[n], history, verdict, weight)
        if parent < 0:
            self.next.count(f"{name} s {history & 3}", verdict, weight)
        else:
            self.next.count(f"{name} {bucket(draft.score[parent])}", verdict, weight)
            self.next.count(f"{name} ?", verdict, weight)

    def _rest(self, seqs: list[Sequence], name: str, paid: bool) -> None:
        """A drafter that found nothing that paid rests a little, longer each time; one that did is awake at once."""
        for seq in seqs:
            row = self._row(seq)
            vain = row.rested[name] = 0 if paid else row.rested.get(name, 0) + 1
            if vain >= PATIENCE:
                row.rest[name] = min(vain // PATIENCE, REST)
