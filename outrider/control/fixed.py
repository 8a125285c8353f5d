"""Controllers that weigh nothing: always the same plan, or whatever a function says."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from outrider.core import tree
from outrider.core.types import Draft, Places, Plan, Sequence, StepRecord


@dataclass(frozen=True, slots=True)
class Told:
    """A Controller that takes its plans from `say` and grows and verifies all of them."""

    asks: ClassVar[bool] = False
    looking: ClassVar[float] = 0.0  # it looks at nobody: said, for to ask for what is not there takes microseconds in every step
    say: Callable[[list[Sequence]], tuple[Plan, str]]

    def __init_subclass__(cls) -> None:
        """One that is made of this has a say of its own."""
        cls.asks = True

    def choose(self, seqs: list[Sequence]) -> tuple[Plan, str]:
        return self.say(seqs)

    def more(self, seqs: list[Sequence], name: str, draft: Draft, frontier: Places) -> Places:
        return frontier

    def on(self, score: float, free: bool = False) -> bool:
        return not self.asks  # who has a say is asked every time

    def blind(self, name: str) -> int:
        return 0

    def went(self, name: str, draft: Draft, frontier: Places) -> None: ...

    def survivals(self, seqs: list[Sequence], draft: Draft) -> list[float]:
        return tree.survival(draft)

    def fill(self, seqs: list[Sequence], draft: Draft, reason: str) -> tuple[list[int] | None, str]:
        return None, reason

    def learn(self, seqs: list[Sequence], record: StepRecord) -> None: ...

    def end(self, seq: Sequence) -> None: ...


def fixed(plan: Plan) -> Told:
    """Always this plan."""
    reason = "fixed" if plan.drafters else "off:user"
    return Told(lambda seqs: (plan, reason))
