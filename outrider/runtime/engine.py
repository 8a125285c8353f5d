"""The decode loop. There is one; plain decoding is a program whose draft has no nodes.

A step reads aloud: choose a plan, find its step, prefill, run it (propose, prune, score, accept), cut, commit, record.
Everything before commit writes scratch only, so a step that fails or is interrupted loses nothing.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from outrider.compiler.forest import allowed
from outrider.compiler.jit import Jit, Stages
from outrider.compiler.step import Clock, Done, Facts, Now, Parts
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.noise import RowNoise
from outrider.core.sampling import Settings, top_logprobs
from outrider.core.sockets import Controller, Drafter, Model
from outrider.core.types import OFF, TARGET, Draft, Marks, Outcome, Plan, Reading, Request, Scores, Sequence, StepRecord
from outrider.runtime.batcher import Batcher
from outrider.runtime.ending import cut
from outrider.runtime.native import host

RING = 1024  # records of the last steps that are at hand: what lives long is looked at by every full collection of Python's
log = logging.getLogger("outrider")
SILENCE = RowNoise((), (), ())  # greedy rows ask for no noise


class Engine:
    """Runs requests to their end, many at a time, every row at its own speed."""

    def __init__(
        self, target: Model, drafters: Mapping[str, Drafter], controller: Controller, rows: int, strict: bool = False,
        stages: Stages | None = None, **jit: Any,
    ) -> None:  # fmt: skip
        self.target, self.controller, self.strict = target, controller, strict
        self.parts: Parts | None = None  # what steps run on, for as long as it is the same
        self.equip(drafters, stages, **jit)
        self.batcher = Batcher(rows, alone=strict)
        self.settings: Settings | None = None
        self.rule, self.facts = "greedy", _facts(one=True, free=True, raw=True)
        self.requests, self.tiers = tuple[str, ...](), dict[str, str]()  # what records say of all steps of a batch
        self.picky = False  # does one of the batch not want all drafters?
        self.narrow: tuple[Plan, Plan] | None = None  # the last plan, and what is left of it then
        self.heard: list[Drafter] = []  # drafters that may guess for one of the batch
        self.off = False  # there are drafters, and the whole batch wants none: nothing is decided, learned or kept
        self.ring: deque[StepRecord] = deque(maxlen=RING)
        self.now, self.read = time.perf_counter, Settings.of  # a replay has a clock of its own, and takes what is sampled for greedy
        timed: dict[str, Any] = {TARGET: target, **{name: getattr(part, "model", None) for name, part in drafters.items()}}
        self.meters = {name: model.meter for name, model in timed.items() if hasattr(model, "meter")}

    def equip(self, drafters: Mapping[str, Drafter], stages: Stages | None = None, **jit: Any) -> None:
        """Take other drafters, between requests. stages: who guesses beside whom, and who takes over from whom; jit: fields of Jit."""
        self.drafters, self.bits = drafters, {name: 1 << i for i, name in enumerate(drafters)}
        self.models: list[Any] = [m for m in (self.target, *(getattr(part, "model", None) for part in drafters.values())) if hasattr(m, "drop")]
        self.marks, self.parts = Marks(self.bits), None
        draws = {name: getattr(part, "draws", True) for name, part in drafters.items()}
        self.jit = Jit([[name] for name in drafters] if stages is None else stages, draws, self.bits, chain=self.strict, **jit)

    def submit(self, request: Request) -> Sequence:
        """Queue a request; it runs as `step` is called."""
        return self.batcher.submit(request)

    def cancel(self, seq: Sequence) -> None:
        """End a request now, whatever it was doing, and free its row; harmless when it has ended."""
        seq.finish_reason = seq.finish_reason or "cancelled"
        try:
            if seq in self.batcher.running:
                self._close(seq)
        except Exception:
            self.batcher.drop(seq)  # what failed would fail again; what was interrupted is done by the next step
            raise
        self.batcher.drop(seq)

    def step(self, *, together: bool = False) -> list[Sequence]:
        """Advance every running request by one step or more tokens. Returns those that moved; [] when all is done. Where a step of several fails, each
        goes on by itself, and who fails alone ends as `failed`, with its `failure`; of the only request there is, and of those that go on `together` or
        not at all, that is raised, and they may go on."""
        self.batcher.admit(self._open)
        moved: list[Sequence] = []
        try:
            for group in self.batcher.groups():
                self._tried(group, together)
                moved += group
        finally:
            if ended := [s for s in self.batcher.running if s.finish_reason]:
                _all([partial(self.cancel, seq) for seq in ended])
        return moved

    def _tried(self, group: list[Sequence], together: bool) -> None:
        """A step of these, or of each, if it fails."""
        try:
            self._step(group)
            return
        except BaseException as why:
            for model in self.models:
                model.drop(group)
            if not isinstance(why, Exception) or together or self.batcher.lonely:
                raise
            if len(group) == 1:
                group[0].finish_reason, group[0].failure = group[0].finish_reason or "failed", why
                return
            log.warning("a step of %d requests failed (%s), and each goes on by itself", len(group), why)
        for seq in group:
            if seq.finish_reason is None:
                self._tried([seq], together)

    def advance(self, seqs: list[Sequence], *, together: bool = False) -> None:
        """A step of all that run, unless these have ended already. Raises why one of these could not begin, or go on."""
        if any(s.finish_reason is None for s in seqs):
            self.step(together=together)
        for seq in seqs:
            if seq.failure is not None:
                raise seq.failure

    def rest(self) -> None:
        """A moment when nobody waits, if nobody does: models may measure themselves again."""
        if not (self.batcher.running or self.batcher.waiting):
            for model in self.models:
                if hasattr(model, "rest"):
                    model.rest()

    def _open(self, seq: Sequence) -> None:
        begun: list[Drafter] = []
        try:
            self.target.open(seq)
            for drafter in self.drafters.values():
                begun.append(drafter)  # an interruption may come anywhere in what follows
                drafter.begin(seq)
        except BaseException:
            _all([*[partial(drafter.end, seq) for drafter in begun], partial(self.target.close, seq)])
            raise

    def _close(self, seq: Sequence) -> None:
        if self.settings is not None and seq in self.settings.seqs:  # nothing of a text that is over is kept
            self.settings = None
        _all([partial(part.end, seq) for part in self.drafters.values()] + [partial(self.target.close, seq), partial(self.controller.end, seq)])
        if left := list(seq.slots):
            raise OutriderError(f"'{left[0]}' left what it kept in the slots of {seq.request.id}", "the text has ended", "end(seq) that takes it out")

    def _step(self, seqs: list[Sequence]) -> None:
        clock = Clock(self.now)
        for meter in self.meters.values():
            meter.take()  # what was measured between steps, or loading, is none of this one's
        settings = self._settings(seqs)
        plan, reason = (OFF, "off:request") if self.off else self.controller.choose(seqs)
        if self.picky and plan.drafters:
            plan, reason = self._narrowed(seqs, plan, reason)
        noise = SILENCE if settings.all_greedy else _noise(seqs)
        clock.mark("choose")
        if not self.off:
            clock.part("look", "choose", getattr(self.controller, "looking", 0.0))
        step = self.jit.get(self.rule, plan, self.facts[1] if getattr(self.controller, "asks", True) else self.facts[0])
        clock.mark("jit")
        self.target.prefill(seqs)
        clock.mark("prefill")
        for seq in seqs:
            if not seq.steps:
                seq.read += clock.seconds["prefill"]
        done = step.run(self._parts(), Now(seqs, settings, noise, clock, reason))
        outcome, reasons = cut(seqs, done.draft, done.outcome)
        clock.mark("accept")
        emitted = self._write(seqs, done.draft, outcome, done.scores)
        for r, seq in enumerate(seqs):
            seq.finish_reason = reasons[r]
        try:
            self._commit(seqs, done.full, outcome if done.draft is done.full else outcome.renamed(done.kept))
        finally:  # what was written was written in this step, whatever follows
            clock.mark("commit")
            self._record(seqs, plan, done, outcome, emitted, clock, step.tier)

    def _parts(self) -> Parts:
        """Made anew with other drafters, or another controller."""
        if self.parts is None or self.parts.controller is not self.controller:
            self.parts = Parts(self.target, self.drafters, self.bits, self.controller)
        return self.parts

    def _settings(self, seqs: list[Sequence]) -> Settings:
        """Those of the batch, and what code may take for granted of it: looked at anew only when its members change."""
        if self.settings is None or self.settings.seqs != seqs:
            made, self.settings = self.read(list(seqs)), None
            drawn = [s.request.rule for s, greedy in zip(seqs, made.greedy, strict=True) if not greedy]
            self.rule, self.requests = drawn[0] if drawn else "greedy", tuple([s.request.id for s in seqs])
            one, self.picky, self.narrow = len(seqs) == 1, any(s.request.drafters is not None for s in seqs), None
            self.facts = _facts(one=one, free=(one or not self.picky) and all(s.request.limits.nothing for s in seqs), raw=made.raw)
            self.heard = [part for name, part in self.drafters.items() if any(allowed(s, name) for s in seqs)]
            self.off = bool(self.drafters) and not self.heard
            self.settings = made  # the last: what else is known of a batch is known where this is
        return self.settings

    def _narrowed(self, seqs: list[Sequence], plan: Plan, reason: str) -> tuple[Plan, str]:
        """A plan without the drafters that none of the batch wants."""
        if self.narrow is None or self.narrow[0] is not plan:
            wanted = tuple([one for one in plan.drafters if any(allowed(s, one[0]) for s in seqs)])
            self.narrow = plan, plan if len(wanted) == len(plan.drafters) else Plan(wanted, plan.budget if wanted else 0)
        left = self.narrow[1]
        return left, reason if left.drafters else "off:request"

    def _write(self, seqs: list[Sequence], draft: Draft, outcome: Outcome, scores: Scores) -> list[list[int]]:
        """Add what was decided to the texts, each token with its origin. Returns the new tokens of each row."""
        emitted = []
        for r, seq in enumerate(seqs):
            path, bonus = outcome.paths[r], outcome.bonus[r]
            new = draft.text(path)
            for n in path:
                seq.origins.append(self.marks.word(draft.source[n]))
            if bonus is not None:
                new.append(bonus)
                seq.origins.append(TARGET)
            if (count := seq.request.sampling.logprobs) is not None:
                decided_at, logits = [~r, *path][: len(new)], scores.logits
                seq.logprobs += [top_logprobs(logits[tree.index_of(p, draft.rows)], t, count) for p, t in zip(decided_at, new, strict=True)]
            seq.tokens += new
            seq.steps += 1
            emitted.append(new)
        return emitted

    def _commit(self, seqs: list[Sequence], draft: Draft, outcome: Outcome) -> None:
        """The one effect on caches: accepted nodes stay, and every drafter that may guess for one of these hears what came out."""
        self.target.commit(seqs, draft, outcome)
        for drafter in self.heard:
            drafter.observe(seqs, draft, outcome)

    def _record(self, seqs: list[Sequence], plan: Plan, done: Done, outcome: Outcome, emitted: list[list[int]], clock: Clock, tier: str) -> None:
        full, draft, none, right = done.full, done.draft, (0,) * len(seqs), dict[tuple[str, int], int]()
        for path in outcome.paths:
            for n in path:
                for name in self.marks.of(draft.source[n]):
                    at = name, draft.depth[n]
                    right[at] = right.get(at, 0) + 1
        record = StepRecord(
            plan=plan,
            requests=self.requests,
            context=tuple([len(s.tokens) - len(emitted[r]) for r, s in enumerate(seqs)]),
            drafted=tree.sizes(draft) if draft.token else none,
            accepted=tuple(len(path) for path in outcome.paths),
            emitted=tuple(len(new) for new in emitted),
            discarded=tuple(outcome.discarded),
            accepted_by=right,
            seconds=clock.seconds,
            reading=Reading(clock.last - clock.start, None, "none", "wall clock of the step"),
            reason=done.reason,
            forward={name: meter.take() for name, meter in self.meters.items()},
            tiers=self._tiers(tier),
            trimmed=none if draft is full else tuple([a - b for a, b in zip(tree.sizes(full), tree.sizes(draft), strict=True)]),
            levels=done.levels,
            draft=full if full.q is None else replace(full, q=None),
            kept=tuple(done.kept),
            tokens=tuple(tuple(new) for new in emitted),
        )
        self.ring.append(record)
        for seq in seqs:
            seq.records.append(record)
        if not self.off:
            self.controller.learn(seqs, record)

    def _tiers(self, step: str) -> dict[str, str]:
        """What serves now; the same object for as long as it is the same."""
        known = self.tiers
        if (
            known.get("step") is not step
            or known["host"] is not host.tier
            or any(known.get(name) is not meter.tier for name, meter in self.meters.items())
        ):
            self.tiers = {"host": host.tier, "step": step, **{name: meter.tier for name, meter in self.meters.items()}}
        return self.tiers


def _all(endings: Iterable[Callable[[], None]]) -> None:
    """Each of these, in turn, whatever becomes of those before it; an interruption, or the first that failed, is raised when all are done."""
    failed: list[BaseException] = []
    for end in endings:
        try:
            end()
        except BaseException as why:
            failed.append(why)
    if failed:
        raise next((why for why in failed if not isinstance(why, Exception)), failed[0])


def _facts(*, one: bool, free: bool, raw: bool) -> tuple[Facts, Facts]:
    """For a controller that only tells plans, and for one that is asked."""
    return Facts(one, free, told=True, raw=raw), Facts(one, free, told=False, raw=raw)


def _noise(seqs: list[Sequence]) -> RowNoise:
    return RowNoise(tuple([s.request.seed for s in seqs]), tuple([s.steps for s in seqs]), tuple([len(s.tokens) for s in seqs]))
