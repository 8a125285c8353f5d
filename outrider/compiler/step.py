"""What a step is made of: the parts that it runs on, what is known of the batch, what it returns, and its verdict."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.core import tree
from outrider.core.noise import RowNoise
from outrider.core.sampling import Settings, decided, hosted, process, raced_there, warp, winners, within
from outrider.core.sockets import Controller, Drafter, Model
from outrider.core.types import Draft, Outcome, Scores, Sequence
from outrider.verify.exact import RULES, walk
from outrider.verify.host import KNOWN, Walk


@dataclass(slots=True)
class Clock:
    """Seconds per stage of one step."""

    read: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=dict)
    start: float = 0.0
    last: float = 0.0

    def __post_init__(self) -> None:
        self.start = self.last = self.read()

    def mark(self, stage: str) -> None:
        now, seconds = self.read(), self.seconds
        seconds[stage] = seconds.get(stage, 0.0) + now - self.last
        self.last = now

    def part(self, stage: str, whole: str, took: float) -> None:
        """Of another stage so much was this one, by a clock that may be another."""
        if took:
            self.seconds[stage] = took = min(took, self.seconds[whole])
            self.seconds[whole] -= took


@dataclass(slots=True)
class Parts:
    """What every step of an engine runs on."""

    target: Model
    drafters: Mapping[str, Drafter]
    bits: Mapping[str, int]  # the mark of each drafter
    controller: Controller
    told: frozenset[str] = frozenset()  # drafters that are told how far they will probably go
    behind: frozenset[str] = frozenset()  # those behind whose guesses the target's verdict may be asked for
    tells: bool = False  # does the controller say with what of a text they begin?
    foreign: frozenset[str] = frozenset()  # drafters that are none of the house's: what they give is looked at
    blind: bool = False  # does it know of verdicts that are asked for so?

    def __post_init__(self) -> None:
        some = self.drafters if hasattr(self.controller, "likely") else ()
        self.told = frozenset([name for name in some if hasattr(self.drafters[name], "likely")])
        some = self.drafters if hasattr(self.target, "queue") else ()
        self.behind = frozenset([name for name in some if getattr(self.drafters[name], "queues", False)])
        self.foreign = frozenset([name for name, part in self.drafters.items() if not type(part).__module__.startswith("outrider.")])
        self.tells, self.blind = hasattr(self.controller, "tail"), hasattr(self.controller, "blind")


class Facts(NamedTuple):
    """What generated code may take for granted: one row; no row asks for anything of its own speculation; a controller that only
    tells plans; and logits that are used as they are."""

    one: bool
    free: bool
    told: bool
    raw: bool


@dataclass(slots=True)
class Now:
    """The step under way."""

    seqs: list[Sequence]
    settings: Settings
    noise: RowNoise
    clock: Clock
    reason: str


@dataclass(slots=True)
class Done:
    """What a step returns."""

    full: Draft  # all that was drafted
    kept: list[int]  # the names in it of what was verified
    draft: Draft  # that, by new names
    levels: dict[str, int]  # how deep each drafter was let go
    reason: str
    scores: Scores
    outcome: Outcome


def accept(draft: Draft, scores: Scores, settings: Settings, noise: RowNoise, rule: str) -> Outcome:
    """A rule's verdict on scores of all places of a draft."""
    if settings.raw or scores.raced:
        return walk(draft, decided(scores)[0])
    if not within(scores.computed) and rule == "coupled" and settings.bare and not settings.greedy.any():
        places = tree.all_places(draft)
        found = winners(raced_there(scores.logits, tree.row_of(places, draft), tree.depth_of(places, draft) + 1, settings, noise))
        return walk(draft, decided(Scores(scores.computed, found=found[None]))[0])
    if hosted(scores.computed) and rule in KNOWN:
        return Walk(draft, scores, settings, noise, rule).outcome()
    places = tree.all_places(draft)
    seen = process(scores.logits, places, draft, settings) if rule == "greedy" else warp(scores.logits, places, draft, settings)
    return RULES[rule]().accept(draft, seen, noise)
