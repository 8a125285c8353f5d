"""What a step costs: the closed forms of Leviathan et al. (2211.17192), and tables of what was measured here.

alpha: acceptance rate of one token; gamma: drafted tokens a step; c: time of a draft step over a target step.
A table has a *curve* per situation, seconds by number of nodes or levels. Curves are read relative to the machine's
present `pace`, so that a machine that is slow for a minute changes no decision. Knows nothing of models.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.core.errors import OutriderError

DEEPEST = 32  # nodes or levels that curves reach
SLOPE = 0.03  # of a plain step: what one more node is taken to cost until it is measured, low, so that it is tried
FEW = 4  # observations after which a number is believed whatever larger ones take
AGES = 1e6  # seconds that no step takes
WIDEST = 2.0  # times what was expected: a step that takes longer was held up by the machine, which plain steps are as well
CLIP = 3.0  # an observation counts for at most that many times what was expected: a stall is no news
PACE, JOLT = 0.2, 1.5  # weight of one step in the machine's present pace, and for how many times what was expected it counts at most
COLD = 4  # steps of a text that find caches cold: what was done before it, its prompt above all, has taken their place
STEADY = 0.01  # weight of one plain step in what such steps take at pace 1: the pace moves fast, the shape of the costs slowly
OWED = 0.1  # weight of one plain step in what plain decoding takes now
MOVED, FRESH = 1.25, 2  # change of the pace after which that must be asked anew, and of how many plain steps
TRUST, LEAST = 3.0, 0.02  # observations that an assumption is worth; the least weight of a new one
CHEAPEST = 0.1  # of a level: what reading is held to cost at least, be it as quick as the level alone was thought to be: no price rises from nothing
SOONER, LATER = 0.5, 0.2  # weight of a reading that took less than half of what was expected, and of others: what is cold only ever takes longer
LONGEST = 32.0  # usual steps that a hold-up counts at most
CALM_BEFORE, FADE = 256.0, 1 / 2048  # plain steps without hold-ups that are believed to have been before all others; weight of the latest
CALM = 10  # plain steps in a row after which they cost what plain decoding costs: those between wider ones may cost more
FAR = 4  # unread tokens beyond which a drafter's catching up is counted apart


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens a step emits, bonus included: (1 - alpha^(gamma+1)) / (1 - alpha)."""
    return float(gamma + 1) if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def speedup(alpha: float, gamma: int, c: float) -> float:
    """Wall-clock gain over plain decoding if scoring gamma + 1 tokens costs as much as one (Theorem 3.8)."""
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def operations(alpha: float, gamma: int, c_ops: float) -> float:
    """Growth of arithmetic over plain decoding; c_ops: operations of a draft step over a target step (Theorem 3.11)."""
    return (gamma * c_ops + gamma + 1) / expected_tokens(alpha, gamma)


def best_depth(alpha: float, c: float, limit: int = 64) -> int:
    """The gamma <= limit with the largest speed-up; 0 when drafting does not pay."""
    return max(range(limit + 1), key=lambda gamma: speedup(alpha, gamma, c))


def best_tree(ranks: Sequence[float], nodes: int, depth: int) -> list[int]:
    """Parents (-1: the root) of the tree of `nodes` nodes, at most `depth` deep, of which most are expected to be accepted, if the
    k-th likeliest child of an accepted node is with probability ranks[k], which do not rise (Sequoia, 2402.12374: where
    siblings are in that order its dynamic programme takes the most probable nodes)."""
    if not ranks or any(not 0 < p <= 1 for p in ranks) or list(ranks) != sorted(ranks, reverse=True):
        raise OutriderError(f"{list(ranks)} are no chances by rank", "", "probabilities that do not rise, as in 0.7, 0.2, 0.05")
    parents: list[int] = []
    open_ = [(-ranks[0], 1, -1, 0)]  # minus the chance of the whole path, depth, parent, rank
    while open_ and len(parents) < nodes:
        chance, level, parent, rank = heapq.heappop(open_)
        parents.append(parent)
        if rank + 1 < len(ranks):
            heapq.heappush(open_, (chance / ranks[rank] * ranks[rank + 1], level, parent, rank + 1))
        if level < depth:
            heapq.heappush(open_, (chance * ranks[0], level + 1, len(parents) - 1, 0))
    return parents


def overlapped(alpha: float, gamma: int, *, draft: float, verify: float, sync: float = 0.0, own: float = 0.0) -> float:
    """Expected time of a step, which is draft + verify where one waits for the other, if the drafter has a device of its own and
    drafts on while the target verifies (post-verify of PEARL, 2408.11850): below all gamma guesses and its own next token, which
    takes it `own`. With probability alpha^(gamma+1) all of that comes true, and what was drafted meanwhile of the next draft is
    not waited for; else it is dropped at once. Either way the devices meet, which takes `sync`. Times in one unit."""
    hidden = min(draft, max(verify - own, 0.0))
    return draft + verify - alpha ** (gamma + 1) * hidden + sync


def expected_accepted(parents: Sequence[int], ranks: Sequence[float]) -> float:
    """Nodes of a tree that come out on average, by the same chances; siblings stand in the order of their rank."""
    chance: list[float] = []
    for n, parent in enumerate(parents):
        chance.append(ranks[parents[:n].count(parent)] * (1.0 if parent < 0 else chance[parent]))
    return sum(chance)


class Situation(NamedTuple):
    """What a step's cost hangs on besides its draft: what serves the target, rows together (to a power of two), context
    (likewise, from 512 on), and whether any row is sampled."""

    tier: str
    rows: int
    context: int
    sampled: bool

    def name(self) -> str:
        return f"{self.tier or '-'} rows {self.rows} context {self.context} {'sampled' if self.sampled else 'greedy'}"


def named(text: str) -> Situation:
    """The situation of a name."""
    tier, _, rows, _, context, kind = text.rsplit(" ", 5)
    return Situation("" if tier == "-" else tier, int(rows), int(context), kind == "sampled")


def situation(tier: str, rows: int, context: int, sampled: bool) -> Situation:
    """The bucket that these belong to."""
    return Situation(tier, 1 << (rows - 1).bit_length(), max(512, 1 << (context - 1).bit_length()), sampled)


@dataclass(slots=True)
class Holdups:
    """How much of their time the machine holds plain steps up, of late, in steps such as are usual at worst."""

    met: float = CALM_BEFORE  # what they took
    held: float = 0.0  # what of it was more than usual

    def see(self, steps: float) -> float:
        """A plain step took as long as so many. Returns how many of them count."""
        counted = min(steps, LONGEST)
        self.met = (1 - FADE) * self.met + counted
        self.held = (1 - FADE) * self.held + max(counted - 1, 0.0)
        return counted


@dataclass(slots=True)
class Curve:
    """Seconds by whole number 0..DEEPEST. Measured numbers stand as they are (cliffs stay), but that one seen FEW times or less is not believed to take
    longer than a larger one: it was a busy moment; none is where the smaller are a part of the larger. Between them is a straight line."""

    start: float  # what was assumed of 0
    slope: float  # what is assumed beyond what was measured
    seen: dict[int, list[float]] = field(default_factory=dict)  # number -> [observations, mean]
    spread: float = 1.5  # of observations over expectations, 99th percentile; no more than WIDEST
    line: list[float] = field(default_factory=list)
    shape: list[float] = field(default_factory=list)  # the line over its value at 0
    stale: bool = False  # was anything seen since they were drawn?
    nested: bool = False  # are the smaller a part of the larger?

    def __post_init__(self) -> None:
        self.spread = min(self.spread, WIDEST)
        self.draw()

    def add(self, n: int, value: float) -> None:
        """Take in one observation."""
        count, mean = self.seen.get(n) or (0.0, self.line[n])
        if value <= WIDEST * mean:  # what is beyond that is nothing that such steps may cost
            self.spread = min(self.spread * (1 + 0.02 * (0.99 if value > self.spread * mean else -0.01)), WIDEST)
        clipped = min(max(value, mean / CLIP), mean * CLIP)
        self.seen[n] = [count + 1, mean + (clipped - mean) * max(1 / (count + 1 + TRUST * (count < TRUST)), LEAST)]
        self.stale = True

    def drawn(self) -> "Curve":
        """Itself, with its line through all that was seen."""
        if self.stale:
            self.draw()
        return self

    def draw(self) -> None:
        known = sorted(self.seen)
        points, least = [(0, self.start)] if not known else [], math.inf
        for n in reversed(known):
            count, mean = self.seen[n]
            least = min(mean, least) if self.nested or count <= FEW else mean
            points.insert(0, (n, least))
        first, last = points[0], points[-1]
        line = [max(first[1] - self.slope * (first[0] - k), 0.1 * first[1]) for k in range(first[0])]
        for (a, x), (b, y) in itertools.pairwise(points):
            line += [x + (y - x) * (k - a) / (b - a) for k in range(a, b)]
        line += [last[1] + self.slope * (k - last[0]) for k in range(last[0], DEEPEST + 1)]
        self.line, self.stale = line, False
        self.shape = [x / line[0] for x in line] if line[0] else line

    def state(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "slope": self.slope,
            "spread": self.spread,
            "seen": {str(n): list(cell) for n, cell in sorted(self.seen.items())},
        }

    @classmethod
    def of(cls, state: dict[str, Any], nested: bool = False) -> "Curve":
        if any(not 0 <= int(n) <= DEEPEST or count <= 0 or mean < 0 for n, (count, mean) in state["seen"].items()):
            raise ValueError("numbers of nodes, how often they were seen, and seconds are no less than 0")
        means = [mean for _, mean in state["seen"].values()]
        if state["spread"] <= 0 or min(state["start"], state["slope"]) < 0 or max(state["start"], state["slope"], *means) > AGES:
            raise ValueError("a spread is more than 0, and no step takes less than nothing or for weeks")
        return cls(state["start"], state["slope"], {int(n): list(cell) for n, cell in state["seen"].items()}, state["spread"], nested=nested)


class Costs:
    """Seconds of all that a step is made of, by situation: `verify`, all of a step but its drafting, by nodes verified
    a row; `draft`, by drafter and levels; `catch_up`, a drafter's seconds per token that it has not read yet,
    by how many those are (to a power of two: few share a forward that costs as much as many).

    All are kept at pace 1; `pace` says how slow the machine is now beside that. `assumed`: a drafter's level over a
    plain step until it is measured; `views`: drafters that read no text, for the target has read it.
    """

    def __init__(self, assumed: dict[str, float], views: frozenset[str] = frozenset()) -> None:
        self.assumed, self.views = assumed, views
        self.verify: dict[Situation, Curve] = {}
        self.draft: dict[tuple[str, Situation], Curve] = {}
        self.catch_up: dict[str, dict[int, float]] = {}
        self.pace, self.holdups = 1.0, Holdups()
        self.cold = [1.0] * COLD  # times as long as later ones that the first steps of a text take
        self.lately: dict[Situation, list[float]] = {}  # [observations, seconds, pace] of a step of plain decoding, when last seen
        self.told: tuple[float, float] | None = None  # what plain steps took last, over what they take at pace 1, and the pace then
        self.plains: dict[Situation, int] = {}
        self.steady: dict[Situation, float] = {}  # seconds of a plain step among plain steps

    def state(self) -> dict[str, Any]:
        """What a profile keeps: text, numbers, and no pace, which belongs to the moment."""
        return {
            "verify": {at.name(): curve.state() for at, curve in self.verify.items()},
            "draft": {f"{name} @ {at.name()}": curve.state() for (name, at), curve in self.draft.items()},
            "catch_up": {f"{name} @ {size}": [1, each] for name, sizes in self.catch_up.items() for size, each in sizes.items()}
            | {f"{name} @ 0": [1, 0.0] for name in sorted(self.views)},
            "steady": {at.name(): [1, seconds] for at, seconds in self.steady.items()},
            "plains": {at.name(): count for at, count in self.plains.items()},
            "holdups": [self.holdups.met, self.holdups.held / self.holdups.met],
        }

    def take(self, state: dict[str, Any]) -> None:
        """Begin with what a profile kept."""
        self.verify = {named(at): Curve.of(curve) for at, curve in state.get("verify", {}).items()}
        pairs = {tuple(key.rsplit(" @ ", 1)): curve for key, curve in state.get("draft", {}).items()}
        self.draft = {(name, named(at)): Curve.of(curve, nested=True) for (name, at), curve in pairs.items()}
        self.catch_up = {}
        for key, (_, each) in state.get("catch_up", {}).items():
            name, mark, size = key.rpartition(" @ ")
            if size == "0":
                self.views |= {name}
                continue
            self.catch_up.setdefault(name if mark else key, {})[int(size) if mark else 8] = each  # older files have one price for any number
        self.steady = {named(at): seconds for at, (_, seconds) in state.get("steady", {}).items()}
        self.plains = {named(at): count for at, count in state.get("plains", {}).items()}
        count, share = state.get("holdups", (CALM_BEFORE, 0.0))
        if count <= 0 or not 0 <= share <= 1:
            raise ValueError("what plain steps took is more than 0, and how much of it they were held up a share")
        self.holdups.met = min(count, 1 / FADE)
        self.holdups.held = share * self.holdups.met

    def verifying(self, at: Situation) -> Curve | None:
        """The curve of a situation; one never met begins as its nearest relative's; None where there is none."""
        if at not in self.verify:
            near = _nearest(at, [s for s in self.verify if s.tier == at.tier])
            if near is None:
                return None
            self.verify[at] = _copy(self.verify[near])
            if near in self.steady:
                self.steady.setdefault(at, self.steady[near])
            self.plains.setdefault(at, self.plains.get(near, 0))  # its relative's plain steps will do
        return self.verify[at]

    def drafting(self, name: str, at: Situation) -> Curve | None:
        key = (name, at)
        if key not in self.draft:
            near = _nearest(at, [s for n, s in self.draft if n == name and s.tier == at.tier])
            if near is not None:
                self.draft[key] = _copy(self.draft[name, near])
            elif (plain := self.verifying(at)) is not None:
                step = self.assumed.get(name, 0.2) * plain.line[0]
                self.draft[key] = Curve(0.0, step, nested=True)
            else:
                return None
        return self.draft[key]

    def drafting_share(self, name: str, at: Situation, levels: int) -> float:
        """So many levels of a drafter over a plain step."""
        curve, plain = self.drafting(name, at), self.verifying(at)
        return curve.line[levels] / plain.line[0] if curve and plain else self.assumed.get(name, 0.2) * levels

    def plainly(self, at: Situation) -> float:
        """Seconds of a step of plain decoding, at pace 1."""
        curve = self.verifying(at)
        return self.steady.get(at) or (curve.line[0] if curve else 0.0)

    def owed(self, at: Situation) -> float:
        """Seconds of a step of plain decoding now, as plain steps tell: a promise about plain decoding cannot grow with what speculation costs, as
        the pace does, which only bounds it. Where none was taken yet, what they told elsewhere last is true there too."""
        return self._bounded(at, self._plain(at))

    def _plain(self, at: Situation) -> float:
        """What plain steps alone tell."""
        if at not in self.lately and self.told:
            self.lately[at] = [TRUST, self.plainly(at) * self.told[0], self.told[1]]
        return self.lately[at][1] if at in self.lately else self.plainly(at)

    def _bounded(self, at: Situation, seconds: float) -> float:
        """Never more than all steps tell of the pace: where nearly all of them draft, the few plain ones stand between wide steps, or met a busy
        moment, and what they tell too much would be given away."""
        return min(seconds, self.plainly(at) * self.pace or seconds)

    def owe(self, at: Situation, seconds: float) -> float:
        """Plain decoding would have taken `seconds` for a step just now. Returns what is owed for one from now on."""
        mean = self._plain(at)
        count = 0.0 if self._moved(at) else self.lately[at][0] if at in self.lately else TRUST
        clipped = min(max(seconds, mean / CLIP), mean * CLIP)
        mean += (clipped - mean) * max(1 / (count + 1), OWED)
        self.lately[at] = [count + 1, mean, self.pace]
        self.told = (mean / (self.plainly(at) or mean), self.pace)
        return self._bounded(at, mean)

    def outdated(self, at: Situation) -> bool:
        """Has the machine changed its pace since plain steps told what plain decoding takes?"""
        return at in self.lately and (self.lately[at][0] < FRESH or self._moved(at))

    def _moved(self, at: Situation) -> bool:
        return at in self.lately and not 1 / MOVED < self.pace / self.lately[at][2] < MOVED

    def chill(self, age: int) -> float:
        """Times as long as a later one that the step of a text takes that has `age` before it."""
        return self.cold[age] if age < COLD else 1.0

    def felt(self, ratio: float, age: int = COLD) -> float:
        """A step took `ratio` times what was expected of it at the present pace, and so many steps into its text. Returns how many times slower the
        machine is now held to be: that of first steps it tells nothing."""
        change = 1 + PACE * (min(max(ratio, 1 / JOLT), JOLT) - 1)
        if age < COLD:
            self.cold[age] = max(self.cold[age] * change, 1.0)
            return 1.0
        self.pace *= change
        return change

    def verified(self, at: Situation, nodes: int, seconds: float, calm: bool = False) -> None:
        """A step that verified `nodes` (most of any row) took `seconds` at pace 1 without its drafting; `calm`: one of many plain ones."""
        curve = self.verifying(at)
        if curve is None:
            curve = self.verify[at] = Curve(seconds, SLOPE * seconds)
        if calm:
            expected = self.plainly(at)
            self.steady[at] = expected + STEADY * (min(max(seconds, expected / CLIP), expected * CLIP) - expected)
        else:
            curve.add(nodes, seconds)
        if nodes == 0:
            self.plains[at] = self.plains.get(at, 0) + 1

    def drafted(self, name: str, at: Situation, levels: int, seconds: float, behind: int) -> None:
        """A drafter went `levels` deep in `seconds` at pace 1, `behind` of its text unread before."""
        curve = self.drafting(name, at)
        if curve is None:
            return
        if behind <= FAR:
            curve.add(levels, seconds)
            return
        sizes, least = self.catch_up.setdefault(name, {}), CHEAPEST * curve.line[1] / behind
        each = max((seconds - curve.line[levels]) / behind, least)
        known = max(_like(sizes, behind), least) if sizes else each
        sizes[behind.bit_length()] = known + (SOONER if 2 * each < known else LATER) * (min(each, CLIP * known) - known)

    def catching_up(self, name: str, at: Situation, behind: int) -> float:
        """Seconds before a drafter can begin, at pace 1. A number of tokens never met costs each what the nearest one does."""
        if behind <= FAR or name in self.views:
            return 0.0
        if sizes := self.catch_up.get(name):
            return behind * _like(sizes, behind)
        curve = self.drafting(name, at)
        return behind * 0.1 * curve.line[1] if curve else 0.0


def _like(sizes: dict[int, float], behind: int) -> float:
    """The price of the number of tokens nearest to this one."""
    return sizes[min(sizes, key=lambda size: abs(size - behind.bit_length()))]


def _copy(curve: Curve) -> Curve:
    """A relative's curve as a first guess: what it saw counts as one observation."""
    return Curve(curve.start, curve.slope, {n: [1.0, mean] for n, (_, mean) in curve.seen.items()}, curve.spread, nested=curve.nested)


def _nearest(at: Situation, known: list[Situation]) -> Situation | None:
    """The most alike: the same kind of rows first, then the nearest context, then the nearest number of rows."""
    return min(known, key=lambda s: (s.sampled != at.sampled, s.rows != at.rows, abs(s.rows - at.rows), abs(s.context - at.context)), default=None)
