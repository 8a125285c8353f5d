"""The sockets: what a part must offer to be plugged in. Models and drafters have contract suites in tests/contracts.py."""

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from outrider.core.noise import RowNoise
from outrider.core.sampling import Settings
from outrider.core.types import Draft, ModelSpec, On, Outcome, Places, Plan, Reading, Scores, Sequence, StepRecord


class Model(Protocol):
    """Scores places of a forest. All it writes before `commit` is scratch beyond the committed length."""

    spec: ModelSpec

    def open(self, seq: Sequence) -> None:
        """Find room; reuse cached state of a shared prefix. Raises OutriderError when all rows are taken."""

    def prefill(self, seqs: list[Sequence]) -> None:
        """Cache all but the last token of every sequence, in chunks."""

    def score(self, seqs: list[Sequence], draft: Draft, places: Places, reusing: object = None) -> Scores:
        """Logits at the places, in their order. A root scores what the row committed since this model last looked.
        Ancestors of a node that were not scored since its root was are scored with it; nothing else is scored twice.
        reusing: a view of this model's first layers (None: nothing): what an early exit of its own computed in this step is not computed again."""

    def commit(self, seqs: list[Sequence], draft: Draft, outcome: Outcome) -> None:
        """Keep the cache of accepted nodes that were scored, forget the rest."""

    def drop(self, seqs: list[Sequence]) -> None:
        """A step of these failed, wherever it was: forget what it scored, keep what was committed before."""

    def close(self, seq: Sequence) -> None:
        """Give the room back, if it has any; what is cached may serve a later prefix."""

    def view(self, layers: tuple[int, ...]) -> "Model":
        """This model made of some of its layers, on the same cache; its own writes are scratch."""


class Drafter(Protocol):
    """Guesses next tokens. It never decides its own depth. One whose `draws` is False never samples: all it proposes are points. If what
    it keeps in `seq.slots[name]` has `chance(tokens) -> float`, the scheduler looks there before it asks: how likely the first token is
    that `extend` would propose for this text, 0 if it would have nothing to say."""

    name: str

    def begin(self, seq: Sequence) -> None: ...

    def extend(
        self,
        seqs: list[Sequence],
        draft: Draft,
        frontier: Places,
        width: int,
        source: int,
        settings: Settings,
        noise: RowNoise,
        levels: int = 1,
        on: On | None = None,
    ) -> Draft:
        """The draft with up to `width` children below each frontier place, marked with the bit `source`. A place that it has no guess for gets none.
        Places of the same step come in growing depth. At width 1 it may go on down to `levels` levels by itself, where that is cheaper than being
        asked again; whoever waits for each of its guesses then calls `on(score)` after one, or `on(score, True)` where the next is found already, and
        stops where that is False. Of such levels `saved` of the drafter, if it has that, says how many took no step of their own in this call. One
        that has `likely` is told there, before a call, how many levels it will probably go: to read further ahead would be for nothing; one that has
        `tail`, with how many tokens of one text's end it may begin (0: with all; None: as it began). One whose `queues` is True also takes `target`,
        a model that may be asked (`HFModel.queue`) to score the whole draft and what is proposed before the host knows its tokens."""

    def observe(self, seqs: list[Sequence], draft: Draft, outcome: Outcome) -> None:
        """Called after every commit, also when others drafted or nobody did. Records, computes nothing."""

    def end(self, seq: Sequence) -> None:
        """A request ended. It may have ended before, or its `begin` have been interrupted: then there is less to forget."""


class Rule(Protocol):
    """Decides what is kept. `lossless`: the text keeps the target's distribution."""

    name: str
    lossless: bool

    def accept(self, draft: Draft, logp: Tensor, noise: RowNoise) -> Outcome:
        """logp [rows + nodes, V] in the order of tree.all_places."""


class Predictor(Protocol):
    """Guesses how likely a drafted node is to be accepted, given that its parent was. `history`: the last verdicts of
    the row, latest in the lowest bit."""

    def predict(self, drafter: str, depth: int, score: float, history: int) -> float: ...

    def update(self, drafter: str, depth: int, score: float, history: int, verdict: float, weight: float = 1.0) -> None: ...


class Controller(Protocol):
    """Decides at every step whether, by whom and how far to speculate. Nothing it returns can change the text. One whose
    `asks` is False only chooses: `more` and `fill` leave all as it is, `survivals` are the scores', and steps are made without
    the first two, `blind` and `went`."""

    def choose(self, seqs: list[Sequence]) -> tuple[Plan, str]:
        """The plan of the next step, at most, and why."""

    def more(self, seqs: list[Sequence], name: str, draft: Draft, frontier: Places) -> Places:
        """The places that drafter `name` is to extend now: roots before it starts, its latest nodes from then on."""

    def on(self, score: float, free: bool = False) -> bool:
        """The drafter that was let go last has put a node of this score below its latest, by itself: may it put another, which is `free` if it took
        no step to find? False: not before `more` was asked."""

    def blind(self, name: str) -> int:
        """Levels that the drafter that `more` has let go may go without being asked between them, and be verified as they are; 0: that is not
        known."""

    def went(self, name: str, draft: Draft, frontier: Places) -> None:
        """So it did; these are its deepest nodes, and all of the draft is being verified."""

    def survivals(self, seqs: list[Sequence], draft: Draft) -> list[float]:
        """Per node, the chance that it and all before it are accepted: what grows out of order grows where it is largest. The list
        is the caller's own. Who weighs nothing answers `tree.survival`, the drafters' own scores."""

    def fill(self, seqs: list[Sequence], draft: Draft, reason: str) -> tuple[list[int] | None, str]:
        """The nodes to verify (ascending, closed under parents; None: all), and why. Not heeded where pruning is unlawful."""

    def learn(self, seqs: list[Sequence], record: StepRecord) -> None:
        """Called after every step."""

    def end(self, seq: Sequence) -> None:
        """A request ended."""


class Meter(Protocol):
    """Measures seconds and, where a counter exists, joules."""

    def window(self) -> AbstractContextManager[list[Reading]]:
        """The list holds one Reading when the window has closed."""
