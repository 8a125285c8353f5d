"""The decode loop. There is one; plain decoding is a draft without nodes.

A step reads aloud: choose a plan, prefill, propose, score, accept, cut, commit, record. Everything before commit
writes scratch only, so a step that fails or is interrupted loses nothing.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from outrider.core import tree
from outrider.core.noise import RowNoise
from outrider.core.sampling import Settings, decided, process, top_logprobs, warp
from outrider.core.sockets import Controller, Drafter, Model
from outrider.core.types import MAX_NODES, POINT, TARGET, Draft, Outcome, Places, Plan, Reading, Request, Scores, Sequence, StepRecord
from outrider.runtime.batcher import Batcher
from outrider.runtime.ending import cut
from outrider.verify.exact import RULES, walk

RING = 4096  # records of the last steps that are at hand
SILENCE = RowNoise(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))  # greedy rows ask for no noise


@dataclass(slots=True)
class Clock:
    """Seconds per stage of one step."""

    read: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=dict)
    last: float = 0.0

    def __post_init__(self) -> None:
        self.last = self.read()

    def mark(self, stage: str) -> None:
        now = self.read()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self.last
        self.last = now


class Engine:
    """Runs requests to their end, many at a time, every row at its own speed."""

    def __init__(self, target: Model, drafters: Mapping[str, Drafter], controller: Controller, rows: int, strict: bool = False) -> None:
        self.target, self.drafters, self.controller, self.strict = target, drafters, controller, strict
        self.bits = {name: 1 << i for i, name in enumerate(drafters)}
        self.batcher = Batcher(rows, alone=strict)
        self.settings: Settings | None = None
        self.ring: deque[StepRecord] = deque(maxlen=RING)
        self.now = time.perf_counter  # a replay has a clock of its own
        timed: dict[str, Any] = {TARGET: target, **{name: getattr(part, "model", None) for name, part in drafters.items()}}
        self.meters = {name: model.meter for name, model in timed.items() if hasattr(model, "meter")}

    def submit(self, request: Request) -> Sequence:
        """Queue a request; it runs as `step` is called."""
        return self.batcher.submit(request)

    def cancel(self, seq: Sequence) -> None:
        """End a request now, whatever it was doing, and free its row; harmless when it has ended."""
        if self.batcher.drop(seq):
            self._close(seq)
        seq.finish_reason = seq.finish_reason or "cancelled"

    def step(self) -> list[Sequence]:
        """Advance every running request by one step or more tokens. Returns those that moved; [] when all is done."""
        self.batcher.admit(self._open)
        moved: list[Sequence] = []
        try:
            for group in self.batcher.groups():
                self._step(group)
                moved += group
        finally:
            for seq in moved:
                if seq.finish_reason:
                    self.cancel(seq)
        return moved

    def _open(self, seq: Sequence) -> None:
        self.target.open(seq)
        begun: list[Drafter] = []
        try:
            for drafter in self.drafters.values():
                drafter.begin(seq)
                begun.append(drafter)
        except BaseException:
            for drafter in begun:
                drafter.end(seq)
            self.target.close(seq)
            raise

    def _close(self, seq: Sequence) -> None:
        for drafter in self.drafters.values():
            drafter.end(seq)
        self.target.close(seq)
        self.controller.end(seq)
        assert not seq.slots, f"{list(seq.slots)} left behind"

    def _step(self, seqs: list[Sequence]) -> None:
        clock = Clock(self.now)
        plan, reason = self.controller.choose(seqs)
        if plan.drafters and not any(_allowed(s, name) for s in seqs for name, _, _ in plan.drafters):
            plan, reason = Plan(), "off:request"
        settings = self._settings(seqs)
        noise = SILENCE if settings.all_greedy else _noise(seqs)
        clock.mark("choose")
        self.target.prefill(seqs)
        clock.mark("prefill")
        full, levels = self._propose(seqs, plan, settings, noise, clock)
        draft, names, reason = self._trim(seqs, full, plan, reason)
        clock.mark("draft")
        scores = self.target.score(seqs, full, [*tree.roots(len(seqs)), *names])
        clock.mark("score")
        outcome, reasons = cut(seqs, draft, _accept(draft, scores, settings, noise))
        clock.mark("accept")
        emitted = self._write(seqs, draft, outcome, scores)
        for seq, why in zip(seqs, reasons, strict=True):
            seq.finish_reason = why
        self._commit(seqs, full, outcome if draft is full else outcome.renamed(names))
        clock.mark("commit")
        self._record(seqs, plan, reason, draft, outcome, emitted, clock, (full, tuple(names), levels))

    def _settings(self, seqs: list[Sequence]) -> Settings:
        """Those of the batch: made anew only when its members change."""
        if self.settings is None or self.settings.seqs != seqs:
            self.settings = Settings.of(list(seqs))
        return self.settings

    def _propose(self, seqs: list[Sequence], plan: Plan, settings: Settings, noise: RowNoise, clock: Clock) -> tuple[Draft, dict[str, int]]:
        """Every drafter of the plan grows the forest, for as long as the controller lets it; how deep each was let go."""
        draft, levels = Draft(rows=len(seqs)), {}
        room = _room(seqs)
        caps = _caps(seqs, plan, settings)
        for name, most, width in plan.drafters:
            bit, across = self.bits[name], min(width, max(caps))
            frontier, level = [~r for r, s in enumerate(seqs) if _allowed(s, name)], 0
            while level < most and (frontier := [p for p in frontier if p < 0 or draft.score[p] >= seqs[draft.row[p]].request.limits.floor]):
                frontier = _fitting(draft, self.controller.more(seqs, name, draft, frontier), across, level, room, caps)
                if not frontier:
                    break
                ahead = _ahead(draft, frontier, most - level, level, room, caps) if across == 1 else 1
                draft = self.drafters[name].extend(seqs, draft, frontier, across, bit, settings, noise, levels=ahead)
                found = [depth for n, depth in enumerate(draft.depth) if depth > level and draft.source[n] & bit]
                level = levels[name] = max(found, default=level + 1)
                frontier = [n for n, depth in enumerate(draft.depth) if depth == level and draft.source[n] & bit]
            if level:
                clock.mark(f"draft {name}")
        return draft, levels

    def _trim(self, seqs: list[Sequence], draft: Draft, plan: Plan, reason: str) -> tuple[Draft, list[int], str]:
        """(what of the draft is verified, the old names of its nodes, why). A sampled node under `exact` is never
        forgotten. A strict step scores one chain a row: siblings would lie in slots that are not their positions."""
        everything = list(range(len(draft)))
        chosen, reason = self.controller.fill(seqs, draft, reason)
        if not draft.token or any(kind != POINT for kind in draft.kind):
            return draft, everything, reason
        keep = everything if chosen is None else chosen
        if self.strict:
            allowed = set(tree.chain(draft))
            keep = [n for n in keep if n in allowed]
        budgets = _budgets(seqs, plan)
        if len(keep) > min(budgets):
            keep = [keep[n] for n in tree.heaviest(tree.select(draft, keep), budgets)]
        keep, reason = _asked_for(seqs, draft, keep, reason)
        return (draft, everything, reason) if len(keep) == len(draft) else (tree.select(draft, keep), keep, reason)

    def _write(self, seqs: list[Sequence], draft: Draft, outcome: Outcome, scores: Scores) -> list[list[int]]:
        """Add what was decided to the texts, each token with its origin. Returns the new tokens of each row."""
        emitted = []
        for r, (seq, path, bonus) in enumerate(zip(seqs, outcome.paths, outcome.bonus, strict=True)):
            new = draft.text(path) + ([] if bonus is None else [bonus])
            if (count := seq.request.sampling.logprobs) is not None:
                decided_at, logits = [~r, *path][: len(new)], scores.logits
                seq.logprobs += [top_logprobs(logits[tree.index_of(p, draft.rows)], t, count) for p, t in zip(decided_at, new, strict=True)]
            seq.origins += [self._names(draft.source[n]) for n in path] + ([] if bonus is None else [TARGET])
            seq.tokens += new
            seq.steps += 1
            emitted.append(new)
        return emitted

    def _commit(self, seqs: list[Sequence], draft: Draft, outcome: Outcome) -> None:
        """The one effect on caches: accepted nodes stay, and every drafter hears what came out."""
        self.target.commit(seqs, draft, outcome)
        for drafter in self.drafters.values():
            drafter.observe(seqs, draft, outcome)

    def _names(self, source: int) -> str:
        return "+".join(name for name, bit in self.bits.items() if source & bit)

    def _record(
        self, seqs: list[Sequence], plan: Plan, reason: str, draft: Draft, outcome: Outcome, emitted: list[list[int]], clock: Clock,
        drafted: tuple[Draft, tuple[int, ...], dict[str, int]],
    ) -> None:  # fmt: skip
        full, kept, levels = drafted
        credit: Counter[tuple[str, int]] = Counter()
        for path in outcome.paths:
            for n in path:
                credit.update((name, draft.depth[n]) for name, bit in self.bits.items() if draft.source[n] & bit)
        record = StepRecord(
            plan=plan,
            requests=tuple(s.request.id for s in seqs),
            context=tuple(len(s.tokens) - len(new) for s, new in zip(seqs, emitted, strict=True)),
            drafted=tuple(draft.row.count(r) for r in range(len(seqs))),
            accepted=tuple(map(len, outcome.paths)),
            emitted=tuple(map(len, emitted)),
            discarded=tuple(outcome.discarded),
            accepted_by=dict(credit),
            seconds=clock.seconds,
            reading=Reading(sum(clock.seconds.values()), None, "none", "wall clock of the step"),
            reason=reason,
            forward={name: meter.take() for name, meter in self.meters.items()},
            tiers={name: meter.tier for name, meter in self.meters.items()},
            trimmed=tuple(full.row.count(r) - draft.row.count(r) for r in range(len(seqs))),
            levels=levels,
            draft=full if full.q is None else replace(full, q=None),
            kept=kept,
            tokens=tuple(tuple(new) for new in emitted),
        )
        self.ring.append(record)
        for seq in seqs:
            seq.records.append(record)
        self.controller.learn(seqs, record)


def _allowed(seq: Sequence, drafter: str) -> bool:
    """May this drafter guess for this request?"""
    return seq.request.drafters is None or drafter in seq.request.drafters


def _noise(seqs: list[Sequence]) -> RowNoise:
    seed, step, length = np.array([(s.request.seed, s.steps, len(s.tokens)) for s in seqs], np.int64).T
    return RowNoise(seed, step, length)


def _room(seqs: list[Sequence]) -> list[int]:
    """Most nodes deep that each row's draft may be: no deeper than its text may still grow, nor than it asked for."""
    return [
        min(s.request.sampling.max_tokens - s.produced - 1, MAX_NODES if (most := s.request.limits.most) is None else most) for s in seqs
    ]  # fmt: skip


def _ahead(draft: Draft, frontier: Places, most: int, level: int, room: list[int], caps: list[int]) -> int:
    """Levels that a drafter may add by itself, a node each, below every place of the frontier."""
    rows = [~p if p < 0 else draft.row[p] for p in frontier]
    return min(most, *(min(room[r] - level, (caps[r] - draft.row.count(r)) // rows.count(r)) for r in rows))


def _budgets(seqs: list[Sequence], plan: Plan) -> list[int]:
    """Nodes of each row that may be verified: by the plan, and by what its request asked for."""
    budget = plan.budget or MAX_NODES
    return [min(budget, MAX_NODES if (most := s.request.limits.most) is None else most) for s in seqs]


def _asked_for(seqs: list[Sequence], draft: Draft, keep: list[int], reason: str) -> tuple[list[int], str]:
    """What of the nodes to be verified its requests want: none that its drafter thinks less likely than `floor`, nor what
    is below one; and none of a row that has fewer than `least`."""
    if not keep or all(s.request.limits.floor == 0 and s.request.limits.least == 0 for s in seqs):
        return keep, reason
    fine: set[int] = set()
    for n in keep:
        if draft.score[n] >= seqs[draft.row[n]].request.limits.floor and (draft.parent[n] < 0 or draft.parent[n] in fine):
            fine.add(n)
    few = {r for r, s in enumerate(seqs) if s.request.limits.least > sum(draft.row[n] == r for n in fine)}
    return [n for n in keep if n in fine and draft.row[n] not in few], reason if len(few) < len(seqs) else "off:least"


def _caps(seqs: list[Sequence], plan: Plan, settings: Settings) -> list[int]:
    """Nodes each row may grow to. A budget binds while drawing where nothing may be pruned afterwards."""
    lawful = bool((settings.greedy | settings.coupled).all())
    return [MAX_NODES] * len(seqs) if lawful else [min(budget, MAX_NODES) for budget in _budgets(seqs, plan)]


def _fitting(draft: Draft, frontier: Places, width: int, level: int, room: list[int], caps: list[int]) -> Places:
    """The places that may grow: their row needs more tokens than that, and its next level fits under the cap."""
    rows = [~p if p < 0 else draft.row[p] for p in frontier]
    if len(draft) + width * len(rows) <= min(caps):  # far from any cap
        return [p for p, r in zip(frontier, rows, strict=True) if room[r] > level]
    return [p for p, r in zip(frontier, rows, strict=True) if room[r] > level and draft.row.count(r) + width * rows.count(r) <= caps[r]]


def _accept(draft: Draft, scores: Scores, settings: Settings, noise: RowNoise) -> Outcome:
    if settings.raw:
        return walk(draft, decided(scores)[0])
    places = tree.all_places(draft)
    if settings.all_greedy:
        return RULES["greedy"]().accept(draft, process(scores.logits, places, draft, settings), noise)
    rule = next(s.request.rule for s, greedy in zip(settings.seqs, settings.greedy, strict=True) if not greedy)
    return RULES[rule]().accept(draft, warp(scores.logits, places, draft, settings), noise)
