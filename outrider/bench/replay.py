"""Record once, replay any policy: the same engine and controllers over texts and guesses that were written down, on a clock
that advances by a table of costs.

A trace holds, per prompt, the target's tokens and at every position each drafter's own continuation with its scores. Greedy
and seeded sampling replay exactly: what comes out hangs on nothing else. The time of the controllers' own thinking is
measured apart, live.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.bench import prompts
from outrider.bench.report import provenance
from outrider.control.fixed import Told
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.sampling import Settings
from outrider.core.sockets import Controller
from outrider.core.types import Draft, ModelSpec, Outcome, Places, Plan, Request, SamplingParams, Scores, Sequence, StepRecord
from outrider.measure.cost import CALM, DEEPEST, FAR, Costs, situation
from outrider.runtime.door import Runtime
from outrider.runtime.engine import Engine

AT_ONCE = frozenset({"lookup"})  # drafters that say all in one call, and read all of a text; others go level by level, and may begin with its end
DEPTH = 32  # of the continuations that are written down
RECORD = "recording it: outrider bench schedule --trace FILE"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Text:
    """One prompt, and what came of it."""

    prompt: str
    category: str
    sampled: bool
    length: int  # tokens of the prompt
    tokens: list[int]  # generated
    guesses: dict[str, list[tuple[list[int], list[float]]]]  # [name][t]: (tokens, scores) of a drafter's continuation after t generated tokens
    prefill: float = 0.0  # seconds that the target took to read the prompt, of which the guard gives drafters a part; 0: not written down
    asked: int = 0  # tokens that it might have had, for who decides does not know where a text ends; 0: likewise
    steps: dict[str, list[list[int]]] = field(default_factory=dict)  # likewise: after how many of these each step of it but the first began

    def taken(self, name: str, t: int, levels: int) -> int:
        """Steps of a drafter that so many levels take after t tokens."""
        return levels if name not in self.steps else bisect_left(self.steps[name][t], levels) + 1 if levels else 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Texts, the drafters' marks in their order, and the costs measured with them (a Costs' state)."""

    drafters: list[str]
    costs: dict[str, Any]
    texts: list[Text]

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        head = json.dumps({"version": VERSION, "where": provenance(), "drafters": self.drafters, "costs": self.costs})
        file.write_text("\n".join([head, *(json.dumps(asdict(t)) for t in self.texts)]) + "\n", "utf-8")

    @classmethod
    def load(cls, file: Path) -> "Trace":
        try:
            head, *lines = file.read_text("utf-8").splitlines()
            about = json.loads(head)
            if about["version"] != VERSION:
                raise OutriderError(f"{file} is a trace of version {about['version']}", f"this is version {VERSION}", RECORD)
            if not lines:
                raise OutriderError(f"{file} holds no text", "its recording was ended before the first", RECORD)
            found = cls(about["drafters"], about["costs"], [Text(**json.loads(line)) for line in lines])
            found._check()
            return found
        except FileNotFoundError as absent:
            raise OutriderError(f"there is no trace {file}", "", RECORD) from absent
        except OSError as unreadable:
            raise OutriderError(f"{file} cannot be read", unreadable.strerror or str(unreadable), RECORD) from unreadable
        except (ValueError, LookupError, TypeError, AttributeError) as damaged:
            raise OutriderError(f"{file} is no trace", f"{type(damaged).__name__}: {damaged}", RECORD) from damaged

    def _check(self) -> None:
        """Raise ValueError, or what reading it raises, unless costs are costs and every text holds a guess of every drafter at every step."""
        costs = Costs({})
        costs.take(self.costs)
        if not costs.verify or costs.plains.keys() - costs.verify.keys():
            raise ValueError("it says nothing of what steps cost")
        for text in self.texts:
            if not text.tokens:
                raise ValueError(f"{text.prompt}: no token came of it")
            for name in self.drafters:
                if len(text.guesses[name]) != len(text.tokens) or any(len(said) != len(scores) for said, scores in text.guesses[name]):
                    raise ValueError(f"{text.prompt}: the guesses of '{name}' are not one for each token")
            for name, steps in text.steps.items():
                if (
                    len(steps) != len(text.tokens)
                    or any(type(n) is not int or n < 1 for own in steps for n in own)
                    or any(own != sorted(own) for own in steps)
                ):
                    raise ValueError(f"{text.prompt}: the steps of '{name}' are not one list of rising numbers for each token")
            if not 0 <= text.prefill < math.inf:
                raise ValueError(f"{text.prompt}: its prefill takes {text.prefill} s")
            if type(text.asked) is not int or text.asked < 0:
                raise ValueError(f"{text.prompt}: {text.asked} tokens were asked for")
            if not all(type(token) is int for token in text.tokens):
                raise ValueError(f"{text.prompt}: its tokens are no ids")


@dataclass(frozen=True, slots=True)
class _Silent(Told):
    """Lets every drafter guess and verifies nothing: the text is plain decoding's. `told`: of each step, by drafter, which of its levels
    the next one followed without a step of its own."""

    told: list[dict[str, list[bool]]] = field(default_factory=list)

    def choose(self, seqs: list[Sequence]) -> tuple[Plan, str]:
        self.told.append({})
        return self.say(seqs)

    def more(self, seqs: list[Sequence], name: str, draft: Draft, frontier: Places) -> Places:
        self.told[-1].setdefault(name, [])
        return frontier

    def on(self, score: float, free: bool = False) -> bool:
        list(self.told[-1].values())[-1].append(free)
        return True

    def fill(self, seqs: list[Sequence], draft: Draft, reason: str) -> tuple[list[int] | None, str]:
        return [], reason


def record(rt: Runtime, asked: Iterable[prompts.Prompt], max_tokens: int, costs: Costs, progress: Callable[[str], None] = print) -> Trace:
    """Write down what `rt`'s target writes, and what its drafters would have guessed at every position."""
    engine, texts = rt.engine, []
    before = engine.controller
    engine.controller = silent = _Silent(lambda seqs: (Plan(tuple((name, DEPTH, 1) for name in engine.drafters)), "record"))
    try:
        for prompt in asked:
            progress(prompt.id)
            request = rt.request(prompt.encode(rt.tokenizer), max_tokens=max_tokens, temperature=prompt.temperature, seed=1, rule="coupled")
            seq = engine.submit(request)
            while seq.finish_reason is None:
                engine.advance([seq])
            guesses = {name: [_own(r, bit) for r in seq.records] for name, bit in engine.bits.items()}
            steps = {
                name: [_began(told.get(name, [])) for told in silent.told]
                for name in engine.drafters
                if any(any(t.get(name, [])) for t in silent.told)
            }
            silent.told.clear()
            read = seq.records[0].seconds["prefill"]
            texts.append(
                Text(prompt.id, prompt.category, prompt.temperature > 0, len(request.prompt), seq.generated, guesses, read, max_tokens, steps)
            )
    finally:
        engine.controller = before
    return Trace(list(engine.drafters), costs.state(), texts)


def _began(free: list[bool]) -> list[int]:
    """After how many levels a step of a drafter began."""
    return [level for level, went in enumerate(free, 1) if not went]


def _own(record: StepRecord, bit: int) -> tuple[list[int], list[float]]:
    """The chain of one drafter."""
    draft = record.draft
    assert draft is not None
    nodes = [n for n, source in enumerate(draft.source) if source & bit]
    return draft.text(nodes), [round(draft.said(n, bit), 5) for n in nodes]


class World:
    """The clock, the costs and the text of a replay."""

    def __init__(self, costs: Costs, tier: str) -> None:
        self.costs, self.tier, self.time = costs, tier, 0.0
        self.text: Text | None = None
        self.read: dict[str, int] = {}
        self.plain = 0

    def now(self) -> float:
        return self.time

    def at(self) -> Any:
        assert self.text is not None
        return situation(self.tier, 1, self.text.length + len(self.text.tokens), self.text.sampled)

    def verify(self, nodes: int) -> None:
        """A target's step of so many nodes."""
        self.plain = 0 if nodes else self.plain + 1
        curve = self.costs.verifying(self.at())
        assert curve is not None
        self.time += self.costs.plainly(self.at()) if self.plain > CALM else curve.drawn().line[min(nodes, DEEPEST)]

    def draft(self, name: str, levels: int, more: int, length: int, tail: int | None = None) -> None:
        """A drafter takes `more` steps; `tail`: with how many tokens of the text's end it begins, 0: with all, None: as it began. What it says is
        what it said when it had read all."""
        curve = self.costs.drafting(name, self.at())
        assert curve is not None
        line = curve.drawn().line
        if levels == 0:
            behind, self.read[name] = length if tail == 0 else length - self.read.get(name, 0), length
            behind = min(behind, tail or behind)
            self.time += self.costs.catching_up(name, self.at(), behind) if behind > FAR else 0.0
        self.time += line[min(levels + more, DEEPEST)] - (line[levels] if levels else 0.0)


class _Target:
    """A Model that writes the text of the trace."""

    class _Meter:
        def __init__(self, tier: str) -> None:
            self.tier = tier

        def take(self) -> float:
            return 0.0

    def __init__(self, world: World) -> None:
        self.world, self.meter = world, self._Meter(world.tier)
        self.spec = ModelSpec("replay", "-", 1 << 30, 1 << 30, 1, 1, "cpu", "float32")

    def open(self, seq: Sequence) -> None: ...

    def close(self, seq: Sequence) -> None: ...

    def prefill(self, seqs: list[Sequence]) -> None:
        assert self.world.text is not None
        self.world.time += 0.0 if seqs[0].steps else self.world.text.prefill

    def commit(self, seqs: list[Sequence], draft: Draft, outcome: Outcome) -> None: ...

    def drop(self, seqs: list[Sequence]) -> None: ...

    def view(self, layers: tuple[int, ...]) -> "_Target":
        raise OutriderError(f"layers {layers} are no view of a trace", "what was written down has no layers", "a live model")

    def score(self, seqs: list[Sequence], draft: Draft, places: Places, reusing: object = None) -> Scores:
        """What comes next is what came next; below a wrong guess, something that is no token."""
        assert self.world.text is not None
        tokens, done = self.world.text.tokens, seqs[0].produced
        found = []
        for place in places:
            path = draft.text(tree.ancestors(draft, place))
            right = path == tokens[done : done + len(path)] and done + len(path) < len(tokens)
            found.append([float(tokens[done + len(path)]) if right else -1.0, 0.0, 0.0])
        self.world.verify(len(places) - 1)
        return Scores(torch.empty(len(found), 0), found=torch.tensor([found], dtype=torch.float64))


@dataclass(frozen=True, slots=True)
class _Known:
    """Tells, as lookup's own state does, how likely its guess is."""

    all: list[tuple[list[int], list[float]]]
    prompt: int

    def chance(self, tokens: list[int]) -> float:
        scores = self.all[len(tokens) - self.prompt][1]
        return scores[0] if scores else 0.0


class _Guesser:
    """A Drafter that repeats what was written down; it goes a level at a time where the one it stands for did."""

    def __init__(self, name: str, world: World, at_once: bool) -> None:
        self.name, self.world, self.at_once, self.saved, self.bit = name, world, at_once, 0, 0
        self.tail: int | None = None

    def begin(self, seq: Sequence) -> None:
        self.world.read.pop(self.name, None)
        if self.at_once and self.world.text is not None:
            seq.slots[self.name] = _Known(self.world.text.guesses[self.name], len(seq.tokens))

    def end(self, seq: Sequence) -> None:
        seq.slots.pop(self.name, None)

    def observe(self, seqs: list[Sequence], draft: Draft, outcome: Outcome) -> None:
        if self.name in self.world.read:
            self.world.read[self.name] += sum([draft.source[n] & self.bit > 0 for n in outcome.paths[0]])

    def extend(
        self, seqs: list[Sequence], draft: Draft, frontier: Places, width: int, source: int, *how: Any, levels: int = 1, on: Any = None
    ) -> Draft:
        text, seq, place, self.bit = self.world.text, seqs[0], frontier[0], source
        assert text is not None
        tail, self.tail = self.tail, None
        tokens, scores = text.guesses[self.name][seq.produced]
        done, most = 0 if place < 0 else draft.depth[place], len(tokens)
        upto, taken = min(done + levels, most), partial(text.taken, self.name, seq.produced)
        if on is not None and not self.at_once:
            upto = next((n for n in range(done + 1, upto) if not on(scores[n - 1], taken(n + 1) == taken(n))), upto)
        steps = upto - done if self.at_once else taken(upto) - taken(done)
        self.saved = upto - done - steps
        if self.at_once:
            self.world.draft(self.name, done, max(steps, 1), len(seq.tokens))
        else:
            for step in range(max(steps, 1)):
                self.world.draft(self.name, taken(done) + step, 1, len(seq.tokens), tail)
        return tree.run(draft, place, tokens[done:upto], source, scores[done:upto]) if upto > done else draft


def _as_greedy(seqs: list[Sequence]) -> Settings:
    """Takes what was written down, however it was sampled: to the controller it was sampled, and costs what sampled steps do."""
    return replace(Settings.of(seqs), greedy=np.ones(len(seqs), bool), all_greedy=True, raw=True)


def engine_of(trace: Trace, world: World, controller: Controller, at_once: frozenset[str] = AT_ONCE) -> Engine:
    """The real engine over a trace."""
    engine = Engine(_Target(world), {name: _Guesser(name, world, name in at_once) for name in trace.drafters}, controller, 1)
    engine.now, engine.read = world.now, _as_greedy
    return engine


@dataclass(frozen=True, slots=True)
class Replayed:
    """One text under one policy: seconds after the target's prefill, steps, nodes drafted and accepted, and the records."""

    text: Text
    seconds: float
    steps: int
    drafted: int
    accepted: int
    records: list[StepRecord]


def replay(trace: Trace, controller: Controller) -> list[Replayed]:
    """Every text of the trace, one after the other, under one controller."""
    costs = Costs({})
    costs.take(trace.costs)
    world = World(costs, tier_of(trace))
    engine, out = engine_of(trace, world, controller), []
    for i, text in enumerate(trace.texts):
        world.text, start = text, world.time
        params = SamplingParams(max_tokens=max(text.asked, len(text.tokens)), temperature=float(text.sampled), ignore_eos=True)
        prompt = tuple([0] * text.length)
        seq = engine.submit(Request(f"replay-{i}", prompt, params, 0, "coupled"))
        while seq.finish_reason is None:
            engine.step()
            if seq.produced >= len(text.tokens):
                engine.cancel(seq)
        assert seq.generated[: len(text.tokens)] == text.tokens, "a replay wrote another text"
        drafted, accepted = sum(r.drafted[0] for r in seq.records), sum(r.accepted[0] for r in seq.records)
        out.append(Replayed(text, world.time - start - text.prefill, len(seq.records), drafted, accepted, seq.records))
    return out


def tier_of(trace: Trace) -> str:
    """The tier whose costs the trace holds: the one most observed."""
    plains: dict[str, int] = {}
    for name, count in trace.costs["plains"].items():
        tier = name.split(" ")[0]
        plains[tier] = plains.get(tier, 0) + count
    if not plains:
        raise OutriderError("the trace holds no costs", "nothing was measured when it was recorded", RECORD)
    best = max(plains, key=lambda tier: plains[tier])
    return "" if best == "-" else best
