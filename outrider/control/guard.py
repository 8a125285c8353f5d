"""The guarantee: never slower than plain decoding by more than a stated share.

A ledger per request. Every token earns what plain decoding would have taken for it and a little more (`allowance`); every
step spends what it took; where nothing was verified, no more than such steps take, since plain decoding would have been
held up as well. A step may speculate only if its bad case leaves no debt. So at every token, decode time is at most
(1 + allowance) x plain + the grant of GRANT plain steps + one stall: what a step took beyond its bad case.
"""

from dataclasses import dataclass, field

GRANT = 8.0  # plain steps that a request begins with: from nothing drafting could hardly ever start


@dataclass(slots=True)
class Ledger:
    """Credit in seconds by request. `stalls`: speculative steps that took longer than the bad case they were admitted
    with; `debts`: those that left a debt; `worst`: the largest one, in seconds."""

    allowance: float = 0.05
    credit: dict[str, float] = field(default_factory=dict)
    stalls: int = 0
    debts: int = 0
    worst: float = 0.0

    def left(self, requests: list[str], plain: float) -> float:
        """What the most frugal of the rows may spend on one step more than nothing: its credit and what a token earns."""
        return min(self.credit.setdefault(r, GRANT * plain) for r in requests) + (1 + self.allowance) * plain

    def charge(self, request: str, plain: float, tokens: int, seconds: float, admitted: float | None) -> None:
        """A step gave `tokens` for `seconds`; `admitted`: the bad case of a speculative one, None for a plain one."""
        now = self.credit.setdefault(request, GRANT * plain) + (1 + self.allowance) * plain * tokens - seconds
        self.credit[request] = now
        if admitted is not None and seconds > admitted:
            self.stalls += 1
            self.debts += now < 0
        self.worst = max(self.worst, -now)

    def end(self, request: str) -> None:
        self.credit.pop(request, None)
