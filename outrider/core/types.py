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
STAGES: Final[dict[str, str]] = {}  # by drafter: the name of its stage (`stage`)
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

    temperature: float = 0.0  # 0, or 0.001 to 1000
    top_k: int = 0
    top_p: float = 1.0  # 1e-9 to 1
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # 0.001 to 1000
    presence_penalty: float = 0.0  # -1e9 to 1e9, as the next two
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


Cut = Callable[[list[int], list[int]], int | None]  # of `Request.cut`


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
    """What a user asked."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    rule: str
    ends: frozenset[int] = frozenset()  # token ids that finish it
    cut: Cut | None = None  # (generated, new): how many of the new tokens stay if a stop string ends inside them, else None
    drafters: frozenset[str] | None = None  # names allowed; None: all
    limits: Limits = Limits()  # of its drafts


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
    failure: Exception | None = None  # why it could not begin, or go on
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
    order they are to be tried. Never changed in place.
    """

    rows: int
    token: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)  # a place
    row: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)  # 1: follows the committed text
    source: list[int] = field(default_factory=list)  # bit mask of drafters
    kind: list[int] = field(default_factory=list)  # POINT, SAMPLED, DISTINCT
    q_row: list[int] = field(default_factory=list)  # row of `q` it was drawn from, -1 for POINT
    score: list[float] = field(default_factory=list)  # what the drafter that made it thinks of its being accepted, given its parent
    q: Tensor | None = None  # [s, V]: the distributions that nodes were drawn from
    again: dict[tuple[int, int], float] | None = None  # scores of those who said the same later, by node and mark; None: nobody did

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
    """Logits of the asked places."""

    computed: Tensor  # [..., V]; may hold others, too
    hidden: Tensor | None = None  # [n, d]
    at: list[int] | None = None  # the asked ones' places in it; None: all, in order
    # [..., 3], as long: what the model's own step says of each: the best token (largest logit, ties to the lowest id), its logit (NaN if any is), and
    # the log of the sum of exponentials.
    found: Tensor | None = None
    lies: int = 0  # places of which `found` lies in the host's memory in one piece; 0: that is not known
    raced: bool = False  # `found` says who won the race of each place and the chance of that, in place of the best token and its logit

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
    """What a step decided, by row."""

    paths: list[list[int]]  # accepted nodes, root to leaf
    bonus: list[int | None]  # the token after them; None where an end token or a limit cut the row
    discarded: list[int]  # tokens that were decided and then cut

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
class ModelSpec:
    """Declared, never guessed. `vocab`: a fingerprint of the tokenizer, or a name. Sizes in bytes."""

    name: str
    vocab: str
    vocab_size: int
    context: int
    layers: int
    weight_bytes: int
    device: str
    dtype: str


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

    Tuples are by row.
    """

    plan: Plan
    requests: tuple[str, ...]  # ids
    context: tuple[int, ...]  # committed length before the step
    drafted: tuple[int, ...]  # nodes sent to verification
    accepted: tuple[int, ...]  # of those
    emitted: tuple[int, ...]  # tokens
    discarded: tuple[int, ...]  # tokens that were decided and then cut
    accepted_by: dict[tuple[str, int], int]  # by drafter and depth
    seconds: dict[str, float]  # by stage; `draft NAME`: one drafter's; `look`: what drafters took to read what is new before they were asked
    reading: Reading  # of all of the step
    reason: str  # a code for why the plan was what it was
    forward: dict[str, float] = field(default_factory=dict)  # by model: seconds of its forwards, which stages include
    # By model: what served its last forward (compiled, what it does without if anything, or eager and why); `step`: interpreted or generated code;
    # `host`: native, or Python and why.
    tiers: dict[str, str] = field(default_factory=dict)
    trimmed: tuple[int, ...] = ()  # nodes drafted and then left out
    levels: dict[str, int] = field(default_factory=dict)  # steps of each drafter: how deep it was let go, less what it found without one
    draft: Draft | None = None  # all that was drafted, without distributions
    kept: tuple[int, ...] = ()  # which of its nodes were verified
    tokens: tuple[tuple[int, ...], ...] = ()  # what came out

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
