"""The nouns of the house: what flows from a request to a record.

Places. A *place* is somewhere in the forest where a next token is wanted: place `i >= 0` is draft node i, place
`~r` (that is -r-1) is the root of row r, the end of its committed text. A node's parent is a place, and models score
places. Knows nothing of text, models or devices beyond torch tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from mypy_extensions import mypyc_attr
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.errors import OutriderError

Ints = NDArray[np.int64]
Places = list[int]

POINT, SAMPLED, DISTINCT = 0, 1, 2  # how a node was proposed: chosen; drawn i.i.d. from q; drawn without replacement
TARGET = "target"
MAX_NODES = 64  # draft nodes of a row in one step; caches keep this much scratch
On = Callable[..., bool]  # what asks a controller's `on`: (score), or (score, free)
STAGES: Final[dict[str, str]] = {}  # by drafter
QUEUED = "depth:queued"  # why all of a draft is verified: it was under way before anybody knew what of it would do
AHEAD = 4  # tokens of a chain that are drafted on a device before the host waits for it


def stage(drafter: str) -> str:
    """The stage of a step that is a drafter's own: one string for all steps."""
    known = STAGES.get(drafter)
    if known is None:
        known = STAGES[drafter] = f"draft {drafter}"
    return known


@mypyc_attr(native_class=False)  # what users write is checked by `core.config`, not by its types
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Defaults are greedy. Checked by `core.config.check_sampling`.

    Order of work on the logits: bias, repetition penalty (prompt and output), presence and frequency penalty (output
    only), min_tokens, then temperature, top-k, top-p, min-p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int | None = None
    rule: str | None = None


Cut = Callable[[list[int], list[int]], int | None]


@mypyc_attr(native_class=False)
@dataclass(frozen=True, slots=True)
class Limits:
    """What a request asks of its own speculation. `most`: drafted tokens a step (None: no cap of its own); `least`: fewer
    are not verified at all; `floor`: a guess that its drafter gives a smaller probability ends the draft. Where guesses
    are drawn (rule `exact` with a draft model) nothing drawn may be left out: there `least` does not act, and `floor` ends
    the draft after that guess."""

    most: int | None = None
    least: int = 0
    floor: float = 0.0

    @property
    def nothing(self) -> bool:
        """Is nothing asked? (Machine code takes `==` of two dataclasses for `is`.)"""
        return self.most is None and self.least == 0 and self.floor == 0


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asked. `ends`: token ids that finish it. `cut(generated, new)`: how many of the new tokens stay if
    a stop string ends inside them, else None. `drafters`: names allowed, None for all. `limits`: of its drafts."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    rule: str
    ends: frozenset[int] = frozenset()
    cut: Cut | None = None
    drafters: frozenset[str] | None = None
    limits: Limits = Limits()


@dataclass(slots=True, eq=False)
class Sequence:
    """A running request. Every part keeps its own state in `slots` under its own name."""

    request: Request
    tokens: list[int]
    slots: dict[str, Any] = field(default_factory=dict)
    origins: list[str] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    records: list["StepRecord"] = field(default_factory=list)
    steps: int = 0
    read: float = 0.0  # seconds that the target took to read its prompt, and those of the batch that it read beside it
    finish_reason: str | None = None
    limit: int = 0  # tokens at which it ends at the latest, by its request
    most: int = MAX_NODES  # nodes of a draft that it asked for at most, likewise

    def __post_init__(self) -> None:
        self.limit = len(self.request.prompt) + self.request.sampling.max_tokens
        if self.request.limits.most is not None:
            self.most = self.request.limits.most

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def produced(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self.limit - len(self.tokens)

    @property
    def room(self) -> int:
        """Most nodes deep that its draft may be: no deeper than the text may still grow, nor than was asked for."""
        return min(self.left - 1, self.most)


@dataclass(slots=True)
class Draft:
    """A ragged forest for a batch of `rows` rows; no nodes is legal and common.

    Lists over nodes (a step has few, and plain lists are the quickest for few), parents before children, siblings in the
    order they are to be tried: token; parent (a place); row; depth (1 = follows the committed text); source (bit mask
    of drafters); kind (POINT, SAMPLED, DISTINCT); q_row (row of `q` it was drawn from, -1 for POINT); score (the
    estimate of the drafter that made the node that it is accepted given its parent). `again`: the estimates of those who
    said the same later, by node and mark; None: nobody did. Never changed in place.
    """

    rows: int
    token: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    q_row: list[int] = field(default_factory=list)
    score: list[float] = field(default_factory=list)
    q: Tensor | None = None
    again: dict[tuple[int, int], float] | None = None

    def __len__(self) -> int:
        return len(self.token)

    def said(self, n: int, mark: int) -> float:
        """The score that the drafter with this mark gave a node; where it gave none, that of who made it."""
        return self.score[n] if self.again is None else self.again.get((n, mark), self.score[n])

    def text(self, path: list[int]) -> list[int]:
        """The tokens of a path of nodes."""
        return [self.token[n] for n in path]


class Marks:
    """Who made a node, by its `source`. `bits`: the mark of each drafter."""

    def __init__(self, bits: Mapping[str, int]) -> None:
        self.bits = dict(bits)
        self.known: dict[int, list[str]] = {}
        self.words: dict[int, str] = {}

    def of(self, source: int) -> list[str]:
        """The names of those."""
        known = self.known.get(source)
        if known is None:
            known = self.known[source] = [name for name, bit in self.bits.items() if source & bit]
        return known

    def word(self, source: int) -> str:
        """The same in a word."""
        told = self.words.get(source)
        if told is None:
            told = self.words[source] = "+".join(self.of(source))
        return told


@dataclass(slots=True)
class Scores:
    """Logits of the asked places. `computed` [..., V] may hold others too: `at` are the asked ones' places in it, None:
    all, in order. `found` [..., 3], as long, is what the model's own step says of each: the best token (largest logit,
    ties to the lowest id), its logit (NaN if any is), the log of the sum of exponentials; `lies`: it lies in the host's memory in one piece, and is of so many places
    (0: that is not known). hidden [n, d] or None. `raced`: `found` says who won the race of each place, in place of the best token, and the chance of that.
    """

    computed: Tensor
    hidden: Tensor | None = None
    at: list[int] | None = None
    found: Tensor | None = None
    lies: int = 0
    raced: bool = False

    @property
    def logits(self) -> Tensor:
        """[places, V], in the order of the places asked for."""
        flat, at = self.computed.flatten(0, -2), self.at
        if at is None:
            return flat
        first, after = at[0], at[0] + len(at)
        return flat[first:after] if at == list(range(first, after)) else flat[at]  # a list of places would have to be brought to where they lie


@dataclass(slots=True)
class Outcome:
    """What a step decided. paths[r]: accepted nodes of row r, root to leaf; bonus[r]: the token after them, None when
    an end token or a limit cut the row; discarded[r]: tokens that were decided and then cut."""

    paths: list[list[int]]
    bonus: list[int | None]
    discarded: list[int]

    def renamed(self, names: list[int]) -> "Outcome":
        """The same outcome with node i called names[i]."""
        return Outcome([[names[n] for n in path] for path in self.paths], self.bonus, self.discarded)


@dataclass(frozen=True, slots=True)
class Plan:
    """How fast, never what: ((drafter, depth, width), ...) and a node budget per row (0 for none). () is plain decoding.

    A drafter is named once: asked twice for the same place it would repeat its noise, and siblings must be fresh.
    """

    drafters: tuple[tuple[str, int, int], ...] = ()
    budget: int = 0

    def __post_init__(self) -> None:
        names = [name for name, _, _ in self.drafters]
        if len(set(names)) < len(names):
            raise OutriderError(f"the plan {names} names a drafter twice", "its second guesses would not be fresh", "a larger width")


OFF = Plan()  # plain decoding; one for all, so that what was asked for last is found at once


@dataclass(frozen=True, slots=True)
class Can:
    """What a model declares it can do."""

    tree: bool = True
    rollback: bool = True
    hidden: bool = False
    view: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Declared, never guessed. `vocab`: a fingerprint of the tokenizer, or a name. Sizes in bytes."""

    name: str
    vocab: str
    vocab_size: int
    context: int
    layers: int
    weight_bytes: int
    cache_bytes: int
    device: str
    dtype: str
    can: Can = Can()


@dataclass(slots=True)
class Reading:
    """A measurement that says what it covers. An unknown joule is None."""

    seconds: float
    joules: float | None = None
    source: str = "none"
    covers: str = ""


@dataclass(slots=True)
class StepRecord:
    """Written once per step; everything that learns or reports reads this.

    Per row: request id, committed length before the step, nodes sent to verification, accepted nodes, emitted tokens,
    discarded tokens, nodes drafted and then left out (`trimmed`). `seconds`: per stage; `draft NAME` is one drafter's, `look` what
    drafters took to read what is new before they were asked.
    `reason`: a code for why the plan was what it was. By model: `forward`, the seconds its forwards took, which stages
    include; `tiers`, what served its last one (compiled, what it does without if anything, or eager and why; `step`: interpreted or generated code; `host`: native, or Python and why). `levels`: per drafter, the steps it
    took: how deep it was let go, less the levels that it found without one. `draft`: all that was drafted, without distributions; `kept`: which of its nodes were verified; `tokens`: what
    came out, per row.
    """

    plan: Plan
    requests: tuple[str, ...]
    context: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    discarded: tuple[int, ...]
    accepted_by: dict[tuple[str, int], int]
    seconds: dict[str, float]
    reading: Reading
    reason: str
    forward: dict[str, float] = field(default_factory=dict)
    tiers: dict[str, str] = field(default_factory=dict)
    trimmed: tuple[int, ...] = ()
    levels: dict[str, int] = field(default_factory=dict)
    draft: Draft | None = None
    kept: tuple[int, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()

    def right(self, name: str) -> int:
        """Accepted nodes that a drafter had guessed, by itself or with others, of all rows."""
        right = 0
        for (who, _), n in self.accepted_by.items():
            if who == name:
                right += n
        return right

    def nodes(self) -> int:
        """Nodes sent to verification of the row that has most."""
        most = 0
        for count in self.drafted:
            most = max(most, count)
        return most
