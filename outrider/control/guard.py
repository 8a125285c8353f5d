"""The guarantee: never slower than plain decoding by more than a stated share.

A ledger per request. Every token earns what plain decoding would have taken for it and a little more (`allowance`); every step spends what it took;
where nothing was verified, no more than such steps take, since plain decoding would have been held up as well. A step may speculate only if its bad
case leaves no debt. So at every token, decode time is at most (1 + allowance) x plain + the grant of GRANT plain steps + one stall: what a step took
beyond its bad case. A drafter that must read the prompt before it begins may take READING of what the target took for that, and only for that,
beside. A machine that holds up plain steps now and then holds up others as well: as much of that as plain decoding would have met in the same time,
by what its steps met of late, in requests and while they were measured, is not charged.
"""

import math
from dataclasses import dataclass, field

from outrider.core.types import Sequence
from outrider.measure.cost import LONGEST, Holdups

GRANT = 8.0  # plain steps that a request begins with: from nothing drafting could hardly ever start
READING = 0.5  # of the time that the target took to read a prompt: what drafters may take for it


@dataclass(slots=True)
class Ledger:
    """What every request may still spend."""

    allowance: float = 0.05  # share of plain decoding's time that a token earns beside it
    credit: dict[str, float] = field(default_factory=dict)  # seconds, by request
    stalls: int = 0  # speculative steps that took longer than the bad case they were admitted with
    debts: int = 0  # those that left a debt
    worst: float = 0.0  # the largest one, in seconds
    holdups: Holdups = field(default_factory=Holdups)  # what plain steps met of late
    spared: float = 0.0  # seconds of holding up that speculative steps may still have, as plain ones would
    unread: dict[str, float] = field(default_factory=dict)  # by request: seconds that drafters may still take to read its prompt

    def begin(self, request: str, plain: float) -> float:
        """The credit of a request; where it was not heard of before, its grant."""
        return self.credit.setdefault(request, GRANT * plain)

    def left(self, requests: tuple[str, ...], plain: float) -> float:
        """What the most frugal of the rows may spend on one step more than nothing: its credit and what a token earns."""
        least = math.inf
        for request in requests:
            least = min(least, self.begin(request, plain))
        return least + (1 + self.allowance) * plain

    def short(self, seqs: list[Sequence], plain: float) -> bool:
        """Has any of the rows less than a plain step to spend? Seldom, and asked at every step."""
        return any(self.credit.get(s.request.id, plain) < plain for s in seqs)

    def reading(self, seqs: list[Sequence]) -> float:
        """Seconds that drafters may still take to read the prompts of all these; 0 before the target has read them."""
        return min([self._unread(s) for s in seqs])

    def _unread(self, seq: Sequence) -> float:
        known = self.unread.get(seq.request.id)
        return READING * seq.read if known is None else known

    def forgive(self, seqs: list[Sequence], seconds: float) -> float:
        """Drafters took `seconds` to read. Returns how much of that is not charged."""
        spared = min(max(seconds, 0.0), self.reading(seqs))
        for seq in seqs:
            self.unread[seq.request.id] = self._unread(seq) - spared
        return spared

    def charge(self, request: str, plain: float, tokens: int, seconds: float, admitted: float | None) -> None:
        """A step gave `tokens` for `seconds`; `admitted`: the bad case of a speculative one, None for a plain one."""
        now = self.begin(request, plain) + (1 + self.allowance) * plain * tokens - seconds
        self.credit[request] = now
        if admitted is not None and seconds > admitted:
            self.stalls += 1
            self.debts += now < 0
        self.worst = max(self.worst, -now)

    def plainly(self, seconds: float, usual: float) -> float:
        """A plain step took `seconds`, where no more than `usual` is nothing out of the ordinary. Returns how much of that counts: a machine that
        was suspended for an hour earns nobody an hour's share, and says nothing of the next hour."""
        if usual <= 0:  # a clock too coarse to tell
            return seconds
        return self.holdups.see(seconds / usual) * usual

    def fairly(self, seconds: float, usual: float) -> float:
        """What a speculative step is charged that took `seconds`."""
        counted = min(seconds, LONGEST * usual)
        self.spared = min(self.spared + counted * self.holdups.held / self.holdups.met, LONGEST * usual)
        off = min(max(counted - usual, 0.0), self.spared)
        self.spared -= off
        return seconds - off

    def end(self, request: str) -> None:
        self.credit.pop(request, None)
        self.unread.pop(request, None)
