"""What is written down of texts, for policies to be tried on: the target's tokens, and at every position each drafter's own continuation.

A trace holds the costs that were measured with them, too. How it is replayed: `replay`.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from outrider.bench import prompts
from outrider.bench.report import provenance
from outrider.control.fixed import Told
from outrider.control.tables import Tables
from outrider.core.errors import OutriderError
from outrider.core.types import Draft, Places, Plan, Sequence, StepRecord
from outrider.measure.cost import Costs
from outrider.runtime.door import Runtime
from outrider.runtime.engine import Engine

AT_ONCE = frozenset({"lookup"})  # drafters that say all in one call, and read all of a text; others go level by level, and may begin with its end
DEPTH = 32  # of the continuations that are written down
RECORD = "recording it: outrider bench schedule --trace FILE"
MOST = 1 << 53  # whole numbers are less, which JSON's readers tell apart
VERSION = 2  # 1: without what was read along


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
    along: dict[str, list[list[int]]] = field(default_factory=dict)  # likewise: tokens that were foreseen, and read along, in each of these steps

    def taken(self, name: str, t: int, levels: int) -> int:
        """Steps of a drafter that so many levels take after t tokens."""
        return levels if name not in self.steps else bisect_left(self.steps[name][t], levels) + 1 if levels else 0

    def foreseen(self, name: str, t: int, step: int, levels: int) -> int:
        """Tokens that a drafter reads along in a step, if it goes so many levels in all."""
        known = self.along[name][t] if name in self.along else []
        if step >= len(known):
            return 0
        return max(min(known[step], levels - (self.steps[name][t][step - 1] if step else 0) - 1), 0)


@dataclass(frozen=True, slots=True)
class Trace:
    """Texts, the drafters' marks in their order, and the costs measured with them (a Costs' state)."""

    drafters: list[str]
    costs: dict[str, Any]
    texts: list[Text]

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        head = json.dumps({"version": VERSION, "where": provenance(), "drafters": self.drafters, "costs": self.costs, "texts": len(self.texts)})
        file.write_text("\n".join([head, *(json.dumps(asdict(t)) for t in self.texts)]) + "\n", "utf-8")

    @classmethod
    def load(cls, file: Path) -> "Trace":
        try:
            head, *lines = file.read_text("utf-8").splitlines()
            about = json.loads(head)
            if about["version"] != VERSION:
                raise OutriderError(f"{file} is a trace of version {about['version']}", f"this is version {VERSION}", RECORD)
            if about.get("texts", len(lines)) != len(lines):
                raise OutriderError(f"{file} holds {len(lines)} texts of {about['texts']}", "it was cut", RECORD)
            if not lines:
                raise OutriderError(f"{file} holds no text", "its recording was ended before the first", RECORD)
            found = cls(about["drafters"], about["costs"], [Text(**json.loads(line)) for line in lines])
            found._check()
            return found
        except FileNotFoundError as absent:
            raise OutriderError(f"there is no trace {file}", "", RECORD) from absent
        except OSError as unreadable:
            raise OutriderError(f"{file} cannot be read", unreadable.strerror or str(unreadable), RECORD) from unreadable
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as damaged:
            raise OutriderError(f"{file} is no trace", f"{type(damaged).__name__}: {damaged}", RECORD) from damaged

    def _check(self) -> None:
        """Raise ValueError, or what reading it raises, unless costs are costs and every text holds a guess of every drafter at every step."""
        costs = Costs({})
        costs.take(self.costs)
        if not costs.verify or costs.plains.keys() - costs.verify.keys() or _no_counts([list(self.costs["plains"].values())], 0):
            raise ValueError("it says nothing of what steps cost")
        Tables({name: 1 << i for i, name in enumerate(self.drafters)}, Costs({}), state={"costs": self.costs}).tried()
        for text in self.texts:
            self._check_text(text)

    def _check_text(self, text: Text) -> None:
        if [type(x) for x in (text.prompt, text.category, text.sampled)] != [str, str, bool] or _no_counts([[text.length]], 1):
            raise ValueError(f"{text.prompt!r} of {text.length!r} tokens, {text.category!r}, sampled {text.sampled!r} is no prompt")
        if not text.tokens:
            raise ValueError(f"{text.prompt}: no token came of it")
        for name in self.drafters:
            if len(text.guesses[name]) != len(text.tokens) or any(len(said) != len(scores) for said, scores in text.guesses[name]):
                raise ValueError(f"{text.prompt}: the guesses of '{name}' are not one for each token")
            if _no_counts((said for said, _ in text.guesses[name]), 0) or not all(_chances(scores) for _, scores in text.guesses[name]):
                raise ValueError(f"{text.prompt}: the guesses of '{name}' are no tokens, or their scores do not lie in 0..1")
        for name, steps in text.steps.items():
            if len(steps) != len(text.tokens) or _no_counts(steps, 1) or any(own != sorted(own) for own in steps):
                raise ValueError(f"{text.prompt}: the steps of '{name}' are not one list of rising numbers for each token")
        for name, along in text.along.items():
            if [len(own) for own in along] != [len(own) + 1 for own in text.steps[name]] or _no_counts(along, 0):
                raise ValueError(f"{text.prompt}: what '{name}' read along is not a number for each of its steps")
        if not 0 <= text.prefill < math.inf:
            raise ValueError(f"{text.prompt}: its prefill takes {text.prefill} s")
        if type(text.asked) is not int or text.asked < 0:
            raise ValueError(f"{text.prompt}: {text.asked} tokens were asked for")
        if _no_counts([text.tokens], 0):
            raise ValueError(f"{text.prompt}: its tokens are no ids")


@dataclass(frozen=True, slots=True)
class _Silent(Told):
    """Lets every drafter guess and verifies nothing: the text is plain decoding's. `told`: of each step, by drafter, which of its levels
    the next one followed without a step of its own; `read`: tokens that its model had read before and after each step of its own; `models`: by
    drafter."""

    told: list[dict[str, list[bool]]] = field(default_factory=list)
    read: list[dict[str, list[int]]] = field(default_factory=list)
    models: dict[str, Any] = field(default_factory=dict)

    def choose(self, seqs: list[Sequence]) -> tuple[Plan, str]:
        self.told.append({})
        self.read.append({})
        return self.say(seqs)

    def more(self, seqs: list[Sequence], name: str, draft: Draft, frontier: Places) -> Places:
        if name not in self.told[-1]:
            self.told[-1][name], self.read[-1][name] = [], [self._computed(name)]
        return frontier

    def on(self, score: float, free: bool = False) -> bool:
        name = list(self.told[-1])[-1]
        self.told[-1][name].append(free)
        if not free:
            self.read[-1][name].append(self._computed(name))
        return True

    def fill(self, seqs: list[Sequence], draft: Draft, reason: str) -> tuple[list[int] | None, str]:
        for name, read in self.read[-1].items():
            read.append(self._computed(name))
        return [], reason

    def _computed(self, name: str) -> int:
        return getattr(self.models.get(name), "computed", 0)


def record(rt: Runtime, asked: Iterable[prompts.Prompt], max_tokens: int, costs: Costs, progress: Callable[[str], None] = print) -> Trace:
    """Write down what `rt`'s target writes, and what its drafters would have guessed at every position."""
    engine, texts = rt.engine, []
    before, models = engine.controller, {name: getattr(part, "model", None) for name, part in engine.drafters.items()}
    engine.controller = silent = _Silent(lambda seqs: (Plan(tuple((name, DEPTH, 1) for name in engine.drafters)), "record"), models=models)
    try:
        for prompt in asked:
            progress(prompt.id)
            request = rt.request(prompt.encode(rt.tokenizer), max_tokens=max_tokens, temperature=prompt.temperature, seed=1, rule="coupled")
            seq = engine.submit(request)
            while seq.finish_reason is None:
                engine.advance([seq])
            texts.append(_written(engine, silent, prompt, seq, max_tokens))
    finally:
        engine.controller = before
    return Trace(list(engine.drafters), costs.state(), texts)


def _written(engine: Engine, silent: _Silent, prompt: prompts.Prompt, seq: Sequence, max_tokens: int) -> Text:
    """What came of one prompt, and was told since the last."""
    guesses = {name: [_own(r, bit) for r in seq.records] for name, bit in engine.bits.items()}
    steps = {name: [_began(told.get(name, [])) for told in silent.told] for name in engine.drafters}
    unread = [len(seq.request.prompt), *[1] * len(seq.records)]
    along = {name: [_along(read.get(name, []), unread[t]) for t, read in enumerate(silent.read)] for name in engine.drafters}
    ahead = [name for name in engine.drafters if any(map(any, along[name])) or any(any(told.get(name, [])) for told in silent.told)]
    silent.told.clear()
    silent.read.clear()
    return Text(
        prompt.id, prompt.category, prompt.temperature > 0, len(seq.request.prompt), seq.generated, guesses, seq.records[0].seconds["prefill"],
        max_tokens, {name: steps[name] for name in ahead}, {name: along[name] for name in ahead},
    )  # fmt: skip


def _began(free: list[bool]) -> list[int]:
    """After how many levels a step of a drafter began."""
    return [level for level, went in enumerate(free, 1) if not went]


def _along(read: list[int], unread: int) -> list[int]:
    """Tokens that it read in each step beside the last one it had; of the first, beside what was unread of the text."""
    own = [unread, *[1] * len(read)]
    return [max(after - before - own[n], 0) for n, (before, after) in enumerate(pairwise(read))] or [0]


def _no_counts(lists: Iterable[list[int]], least: int) -> bool:
    return any(type(n) is not int or not least <= n < MOST for own in lists for n in own)


def _chances(scores: list[float]) -> bool:
    return all(type(p) in (int, float) and 0 <= p <= 1 for p in scores)


def _own(record: StepRecord, bit: int) -> tuple[list[int], list[float]]:
    """The chain of one drafter."""
    draft = record.draft
    assert draft is not None
    nodes = [n for n, source in enumerate(draft.source) if source & bit]
    return draft.text(nodes), [round(draft.said(n, bit), 5) for n in nodes]


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
