"""Plain steps in a row in which nothing is thought about: while all drafters rest, or until credit is earned. Thinking costs what two or three such
steps earn.
"""

from dataclasses import dataclass

from outrider.control.rows import Row

RESTING, GUARD = "off:resting", "off:guard"  # reasons of such steps
SOUND = 8  # steps of a rest, from which on those before the last of them are neither noted nor settled one by one
SLEEP, EARN = 3, 32  # fewest and most steps in a row that earn credit
THOUGHT = 4.0  # times what thinking takes that is earned before it is thought again


@dataclass(slots=True)
class Sleep:
    """Of one batch; whoever asks sees to it that it is the same."""

    left: int = 0  # steps that are still to come
    why: str = ""  # why drafters were not asked last
    sound: bool = False  # is the step under way neither noted nor settled?
    slept: int = 0  # steps of which that was so, since the last that was settled
    lull: float = 0.0  # seconds of plain decoding's step before them

    def passes(self, owed: float) -> str:
        """A sound step; plain decoding takes `owed` seconds for one."""
        self.slept, self.lull = (self.slept + 1, self.lull) if self.slept else (1, owed)
        self.left -= 1
        return self.why

    def rest(self, rows: list[Row], steps: int) -> str:
        """Until the first drafter wakes, in so many steps, or the batch changes, nothing is looked at."""
        self.left, self.why = steps, RESTING
        for row in rows:
            row.rest = {name: left - min(left, self.left) for name, left in row.rest.items()}
        return self.why

    def earn(self, missing: float, earned: float, thinking: float) -> str:
        """Until there are `missing` seconds of credit more, of which a step earns `earned`; `thinking`: seconds that thinking takes. When it is over
        it is thought again, and that takes a part of what was earned: a small one."""
        self.left = min(max(int(max(missing + thinking, THOUGHT * thinking) / earned), SLEEP), EARN) if earned else EARN
        self.why = GUARD
        return self.why

    def broken(self, rows: list[Row]) -> None:
        """These slept, and are no longer the batch: their drafters have that much of their rest left."""
        if self.why == RESTING:
            for row in rows:
                row.rest = {name: left + self.left for name, left in row.rest.items()}
        self.left = 0
