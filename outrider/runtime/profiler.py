"""Measures what steps cost before they are needed, and keeps what is known of a pair between processes.

A sweep writes a text of its own while the engine is idle, at every number of drafted tokens in turn, and takes the medians:
cliffs stay where they are. Beside it small trees are drafted on real texts, to count how often the k-th likeliest guess is right. What is
learned afterwards, step by step, is merged into the same profile.
"""

import atexit
import itertools
import logging
import random
import time
from collections import deque
from pathlib import Path
from statistics import median, median_low
from typing import Any

from outrider.control.fixed import Told, fixed
from outrider.control.rows import WHOLE
from outrider.control.tables import Tables
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.types import Draft, Outcome, Places, Plan, Request, SamplingParams, Sequence, StepRecord, stage
from outrider.drafters.model import ModelDrafter
from outrider.measure import profile
from outrider.measure.cost import CALM, DEEPEST, FAR, WIDEST, Costs, Curve, Situation, situation
from outrider.measure.trace import verdicts
from outrider.runtime.engine import Engine

PATIENCE = 0.4  # seconds that a sweep may take when nobody asked for one
SWEEPS = 3  # moments in which nobody waits that such a sweep is spread over: one of them may be a busy one
EVERY = 30.0  # seconds between two writings of what was learned
NODES = (*range(17), 20, 24, 32)
LEVELS = tuple(range(1, 9))
CONTEXT, REPEATS, WARM = 192, 5, 3
ASKED = 4  # times in a row that a drafter without a model is asked: one that is asked now and then is slower than one asked at every step
UNCOUNTED = 2  # first steps of a model in a text that find its weights cold, or read what it had read
BETWEEN = 2  # plain steps between those that verify: one after the other they are quicker than in a text, where caches have seen other work meanwhile
QUIET = 8  # plain steps among plain ones that are timed
CATCH = 256  # unread tokens for which the table shows what reading them costs
TREE = (2, 4)  # depth and width of the trees in which guesses are counted by rank
FILLER = "filler"
TEXTS = itertools.count()  # no two sweeps of a process write the same text: a model would not read again what its rows still hold
log = logging.getLogger("outrider")


class Filler:
    """A Drafter of arbitrary tokens: only their number matters."""

    name = FILLER

    def __init__(self, vocab: int) -> None:
        self.draw, self.vocab = random.Random(next(TEXTS)), vocab

    def begin(self, seq: Sequence) -> None: ...

    def end(self, seq: Sequence) -> None: ...

    def observe(self, seqs: list[Sequence], draft: Draft, outcome: Outcome) -> None: ...

    def extend(
        self, seqs: list[Sequence], draft: Draft, frontier: Places, width: int, source: int, *how: Any, levels: int = 1, on: Any = None
    ) -> Draft:
        for place in frontier:
            tokens = [self.draw.randrange(self.vocab) for _ in range(levels)]
            draft = tree.run(draft, place, tokens, source, [0.0] * levels)
        return draft


def situations(context: int, rows: int) -> list[tuple[int, int, bool]]:
    """(tokens, rows, sampled) that `outrider profile` measures: short and long texts, one row and all, greedy and sampled."""
    used = [CONTEXT, *(n for n in (768, 3072, 12288) if n < context - 600)]
    return [(min(n, context // 2), r, sampled) for n in used for r in sorted({1, rows}) for sampled in (False, True)]


def unmeasured(engine: Engine, costs: Costs) -> list[str]:
    """What no sweep has timed: steps that verify, drafters that have a model. (Others may have had nothing to say.)"""
    seen = {name for (name, _), curve in costs.draft.items() if curve.seen}
    models = [name for name, part in engine.drafters.items() if hasattr(part, "model") and name not in seen]
    return [*([] if costs.verify else ["steps that verify"]), *models]


def table(costs: Costs) -> str:
    """What was measured, in milliseconds, by situation."""
    shown = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    lines = [f"| a step that verifies, ms | {' | '.join(map(str, shown))} | plain steps alone |", "|---" * (len(shown) + 2) + "|"]
    for at, curve in sorted(costs.verify.items()):
        line = curve.drawn().line
        lines.append(f"| {at.name()} | {' | '.join(f'{1e3 * line[n]:.2f}' for n in shown)} | {1e3 * costs.plainly(at):.2f} |")
    lines += ["", f"| drafting levels, ms | {' | '.join(map(str, shown[1:]))} | reading {CATCH} tokens, us each |", "|---" * (len(shown) + 1) + "|"]
    for (name, at), curve in sorted(costs.draft.items()):
        line, each = curve.drawn().line, 1e6 * costs.catching_up(name, at, CATCH) / CATCH
        lines.append(f"| {name}, {at.name()} | {' | '.join(f'{1e3 * line[n]:.2f}' for n in shown[1:])} | {each:.1f} |")
    return "\n".join(lines)


def sweep(
    engine: Engine, tables: Tables, *, context: int = CONTEXT, rows: int = 1, sampled: bool = False, patience: float = PATIENCE, repeats: int = REPEATS,
    found: "Found | None" = None,
) -> int:  # fmt: skip
    """Measure steps of `rows` rows at `context` tokens for up to `patience` seconds, beside what was `found` in a sweep before; returns how many were
    taken in all.

    Raises OutriderError when requests are running: they would be timed too.
    """
    _alone(engine)
    filler = Filler(engine.target.spec.vocab_size)
    before = engine.controller, engine.drafters, engine.bits, engine.jit, engine.ring
    engine.ring = deque(maxlen=0)  # these are nobody's steps
    engine.equip({**engine.drafters, FILLER: filler}, hot=0, front=engine.jit.front)
    seers = [part for part in before[1].values() if isinstance(part, ModelDrafter) and part.foresees]  # greedy texts of random words go in circles
    for part in seers:
        part.foresees = False
    try:
        return _sweep(engine, tables, filler, context, rows, sampled, patience, repeats, found or Found())
    finally:
        engine.controller, engine.drafters, engine.bits, engine.jit, engine.ring = before
        for part in seers:
            part.foresees = True


def _alone(engine: Engine) -> None:
    if engine.batcher.running or engine.batcher.waiting:
        raise OutriderError("a profile cannot be taken while requests run", "their steps would be timed with it", "waiting for them")


def rank(engine: Engine, tables: Tables, requests: list[Request], *, patience: float = PATIENCE) -> int:
    """Write `requests`, one after the other, with trees of each drafter that has a model, and count how often its k-th likeliest guess is
    right; each has its share of `patience` seconds. Returns the steps taken. Every step counts at once: whoever interrupts this
    loses none. Ranks alone are learned: what a tree costs, and its lesser guesses, say nothing of the chains that all else is about.

    Raises OutriderError when requests are running: their steps would be told these plans.
    """
    _alone(engine)
    plans = [Plan(((name, *TREE),)) for name, part in engine.drafters.items() if hasattr(part, "model")]
    before, taken = (engine.controller, engine.bits, engine.jit), 0
    engine.equip(engine.drafters, hot=0, front=engine.jit.front)  # the usual program, whatever a user's own would fix
    try:
        for request in requests:
            for plan in plans:
                engine.controller = fixed(plan)
                taken += _ranked(engine, tables, request, patience / (len(requests) * len(plans)))
    finally:
        engine.controller, engine.bits, engine.jit = before
    return taken


def _ranked(engine: Engine, tables: Tables, request: Request, patience: float) -> int:
    seq, end = engine.submit(request), time.perf_counter() + patience
    try:
        while seq.finish_reason is None:
            engine.advance([seq])
            record = seq.records[-1]
            if record.draft is not None:
                tables.ranked(record.draft, list(verdicts(record)))
            if time.perf_counter() > end:
                break
    finally:
        engine.cancel(seq)
    return seq.steps


def _sweep(
    engine: Engine, tables: Tables, filler: Filler, context: int, rows: int, sampled: bool, patience: float, repeats: int, found: "Found"
) -> int:  # fmt: skip
    found.views = tables.costs.views
    models = found.models = [name for name, part in engine.drafters.items() if hasattr(part, "model")]
    others = [name for name in engine.drafters if name not in [*models, FILLER]]
    asked, end = _requests(engine, filler, context, rows, sampled), time.perf_counter() + patience
    # The same texts each time, which stay as long as they are said to be; their prompts are still in the rows.
    for turn in range(found.texts, found.texts + repeats):
        seqs = [engine.submit(request) for request in asked]
        found.begin()
        try:
            for plan in _plans(models, others, BETWEEN if turn else 0):
                engine.controller = Told(lambda _, plan=plan: (plan, "sweep"))  # type: ignore[misc]
                engine.advance(seqs, together=True)
                found.add(seqs[0].records[-1], rows)
                if any(s.finish_reason for s in seqs) or (turn != 1 and found.enough(end)):
                    break
        finally:
            for seq in seqs:
                engine.cancel(seq)
        if found.enough(end if turn else end - patience / 2):
            break
    found.tell(tables.costs, situation(found.tier, rows, context, sampled))
    return found.taken


def _requests(engine: Engine, filler: Filler, context: int, rows: int, sampled: bool) -> list[Request]:
    spec = engine.target.spec
    params = SamplingParams(temperature=1.0 if sampled else 0.0, max_tokens=spec.context - context, ignore_eos=True, seed=1)
    return [Request(f"sweep-{r}", tuple(filler.draw.randrange(spec.vocab_size) for _ in range(context)), params, 1, "coupled") for r in range(rows)]


def _plans(models: list[str], others: list[str], between: int) -> list[Plan]:
    """Warm up, then every size in turn, the coarse ones first and `between` plain steps before each, then levels, then plain steps in a row. Of a
    model that has just read the prompt the first levels find its weights cold: they are not counted, and then levels are many, where that weighs
    least. Before each stands a plain step: where all of a draft came true its last token is read beside the next one. What it takes to read a few
    tokens is seen behind what others wrote, and behind plain steps."""
    sizes = [Plan(((FILLER, n, 1),) if n else ()) for n in sorted(NODES, key=lambda n: (n & (n - 1) != 0, n))]
    levels = [plan for name in models for n in (1, LEVELS[-1], *reversed(LEVELS)) for plan in (Plan(), Plan(((name, n, 1),)))]
    asked = [Plan(((name, WHOLE, 1),)) for name in others for _ in range(ASKED)]
    behind = [Plan(((name, 1, 1),)) for name in models]
    return (
        [Plan()] * WARM
        + [plan for size in sizes for plan in (*[Plan()] * between, size)]
        + levels
        + asked
        + behind
        + [Plan()] * (CALM + QUIET)
        + behind
    )


class Found:
    """Times by what was done. `models`: drafters whose rows still hold a prompt that is written a second time; all others read it anew, but for `views`,
    which read none."""

    def __init__(self) -> None:
        self.models, self.sweeps, self.views = list[str](), 0, frozenset[str]()
        self.verify: dict[int, list[float]] = {}
        self.draft: dict[str, dict[int, list[float]]] = {}
        self.far: dict[str, list[tuple[int, float]]] = {}
        self.read: dict[str, int] = {}
        self.asked: dict[str, int] = {}  # times that each was, in this text
        self.steady: list[float] = []
        self.taken, self.seen, self.plain, self.tier, self.texts = 0, 0, 0, "", 0
        self.told = 0  # plain steps of which it was said how the machine held them up

    def begin(self) -> None:
        """Another text, or the same once more: its first steps warm up, and so do those in which drafters find or read what they had read. All
        of the first text did no more, if there is time for a second, but for what models read."""
        if self.texts == 1:
            self.verify, self.draft, self.steady, self.told = {}, {}, [], 0
            self.far = {name: readings for name, readings in self.far.items() if name in self.models}
        self.seen, self.plain, self.texts = 0, 0, self.texts + 1
        self.read.clear()
        self.asked.clear()

    def add(self, record: StepRecord, rows: int) -> None:
        self.taken, self.seen, self.tier, drafting = self.taken + 1, self.seen + 1, record.tiers.get("target", ""), 0.0
        usual = True  # was nothing read, that takes the weights' place in the caches?
        for name, levels in record.levels.items():
            took = record.seconds.get(stage(name), 0.0)
            drafting += took
            behind, self.asked[name] = 0 if name in self.views else record.context[0] - self.read.get(name, 0), self.asked.get(name, 0) + 1
            self.read[name] = record.context[0] + record.right(name) // rows
            usual = usual and (name == FILLER or (name in self.models and behind <= FAR))
            if name in self.models and self.texts > 1 and self.asked[name] <= UNCOUNTED:
                continue
            if behind > FAR:
                self.far.setdefault(name, []).append((behind, took))
            elif name != FILLER:
                self.draft.setdefault(name, {}).setdefault(levels, []).append(took)
        own = record.reading.seconds - record.seconds.get("prefill", 0.0) - record.seconds.get("jit", 0.0) - drafting
        self.plain = 0 if record.levels else self.plain + 1
        if self.plain > CALM:
            self.steady.append(own)
        elif self.seen > WARM and usual:
            self.verify.setdefault(max(record.drafted), []).append(own)

    def enough(self, end: float) -> bool:
        """Is the time up, and something measured all the same?"""
        return time.perf_counter() > end and self.taken > len(NODES) // 2

    def tell(self, costs: Costs, at: Situation) -> None:
        """Medians become what the tables expect; how far single steps lay above them becomes the spread."""
        middle = {n: median(times) for n, times in self.verify.items() if n <= DEEPEST}
        if 0 not in middle:
            return
        over = sorted(x for n, times in self.verify.items() if n in middle for t in times if (x := t / middle[n]) <= WIDEST)  # but for hold-ups
        spread = max(over[int(0.99 * (len(over) - 1))], 1.05)
        slope = (middle[max(middle)] - middle[0]) / (max(middle) or 1)
        costs.pace = 1.0
        costs.verify[at] = Curve(middle[0], max(slope, 0.0), {n: [float(len(self.verify[n])), t] for n, t in middle.items()}, spread)
        costs.plains[at] = max(costs.plains.get(at, 0), len(self.verify[0]))
        for took in self.verify[0][self.told :]:
            costs.holdups.see(took / (middle[0] * costs.verify[at].spread))
        self.told = len(self.verify[0])
        if self.steady:
            costs.steady[at] = median(self.steady)
        for name, times in self.draft.items():
            seen = {n: [float(len(ts)), median(ts)] for n, ts in times.items() if n <= DEEPEST}
            each = seen[max(seen)][1] / max(seen) if len(seen) > 2 else 0.1 * seen[min(seen)][1]  # who goes on in one call
            costs.draft[name, at] = Curve(0.0, each, seen, nested=True)
            if name in self.far:
                for size in {behind.bit_length() for behind, _ in self.far[name]}:
                    some = [max(took - seen[min(seen)][1], 0.0) / behind for behind, took in self.far[name] if behind.bit_length() == size]
                    costs.catch_up.setdefault(name, {})[size] = median_low(some)  # the very first reading of a process is its slowest


class Keeper:
    """Keeps the tables of a runtime: loads them, sweeps what was never measured, writes what was learned."""

    def __init__(self, tables: Tables, mark: dict[str, str], file: Path | None, base: dict[str, Any]) -> None:
        self.tables, self.mark, self.file, self.base = tables, mark, file, base
        self.saved, self.found = time.monotonic(), dict[str, Found | None]()  # by tier; None: it was measured before
        if file is not None:
            atexit.register(self.save)

    def idle(self, engine: Engine) -> None:
        """Nobody waits: measure a tier that was never measured, and write now and then."""
        if engine.batcher.running or engine.batcher.waiting:
            return
        tier = engine.controller.tier() if hasattr(engine.controller, "tier") else None
        if tier is not None and PATIENCE:
            if tier not in self.found:
                self.found[tier] = None if self._measured(engine, situation(tier, 1, CONTEXT, False)) else Found()
            if (found := self.found[tier]) is not None and found.sweeps < SWEEPS:
                self._sweep(engine, found)
        if time.monotonic() - self.saved > EVERY:
            self.save()

    def _measured(self, engine: Engine, at: Situation) -> bool:
        """Was all of a situation measured? A sweep may have ended early, because steps were loaded in the midst of it, and use tells many sizes, but nothing
        of a model that is not tried before it was measured. (Others may have said nothing in a sweep.)"""
        costs = self.tables.costs
        known, drafts = costs.verify.get(at), [costs.draft.get((name, at)) for name, part in engine.drafters.items() if hasattr(part, "model")]
        return known is not None and len(known.seen) >= len(NODES) // 2 and all(curve is not None and curve.seen for curve in drafts)

    def _sweep(self, engine: Engine, found: Found) -> None:
        """A measurement that nobody asked for may fail, and the text that was just written is not lost with it."""
        found.sweeps += 1
        try:
            sweep(engine, self.tables, context=min(CONTEXT, engine.target.spec.context // 2), found=found)
        except Exception as failed:  # whatever a model raises
            log.warning("costs were not measured (%s: %s): they are learned step by step", type(failed).__name__, failed)

    def save(self) -> bool:
        """Write what was learned, and say whether it was written; a disk that refuses costs nothing but the profile."""
        if self.file is None:
            return False
        self.saved = time.monotonic()
        try:
            self.base = profile.save(self.file, self.mark, self.tables.state(), self.base)
        except (OSError, OutriderError) as unable:
            log.warning("the profile %s was not written: %s", self.file, unable)
            return False
        return True
