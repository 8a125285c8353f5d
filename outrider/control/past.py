"""What looks at drafters brought in the requests before, and so how soon the next one is begun with.

Of a pair with which some requests go quicker, the next request is looked at as if the last ones had been of another kind, little by little. Of one
with which none does, a look is a loss wherever it is made: a rest that one has earned goes on in the next request, and nothing is forgotten.
"""

import math
from typing import Any

from outrider.control.rows import LOST, Row, pause

PAYS = 0.02  # plain steps a token that requests must gain by looks, so that those of a pair are worth making in each
HOPED = 0.25  # that they are thought to gain before any was seen: of texts of many kinds the first ones say little of the next
SOON, LATE = 1 / 8, 1 / 16  # weight of a request that gained more than those before, and of one that gained less
FRESH = 0.2  # weight of one request in what looks are worth, while they pay
MOST = 64  # looks and requests that count, where several processes have learned


class Past:
    """Of a pair: `state` is what an earlier process left."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        state = state or {}
        looks, requests = state.get("looks", (0, 0.0)), state.get("requests", (0, HOPED))
        self.looks, self.worth = int(looks[0]), float(looks[1])  # how many there were, and plain steps that one brings
        self.requests, self.gain = int(requests[0]), float(requests[1])  # that were looked at, and plain steps a token that they gained by it
        self.last = 0  # the step of the last look
        if not (self.looks >= 0 <= self.requests and math.isfinite(self.worth) and math.isfinite(self.gain)):
            raise ValueError("what looks brought is a number of plain steps, and how many there were no less than 0")

    def state(self) -> dict[str, Any]:
        """What a later process starts from: of a pair that pays, what its last requests were says nothing of the first ones there."""
        return {"looks": [self.looks, 0.0 if self.pays else self.worth], "requests": [self.requests, self.gain]}

    @property
    def pays(self) -> bool:
        """Are looks worth making in each request?"""
        return self.gain > PAYS

    def row(self) -> Row:
        """A request begins."""
        return Row(worth=self.worth, seldom=LOST if self.worth < 0 else 1)

    def rest(self, row: Row, reading: int, now: int) -> int:
        """Steps until a request that begins with step `now` is looked at; `reading`: of them, those that what is read for that asks for."""
        rest = pause(row.worth, row.seldom)
        return max(max(rest, reading) - (0 if self.pays else now - self.last), 0) if rest else 0

    def ended(self, row: Row, tokens: int) -> None:
        """A request of so many tokens is over."""
        if row.looked:
            self.looks, self.requests = min(self.looks + row.looked, MOST), min(self.requests + 1, MOST)
            gained = row.brought / max(tokens, 1)
            self.gain += (SOON if gained > self.gain else LATE) * (gained - self.gain)
        if self.pays:
            self.worth += FRESH * ((row.worth if row.read else 0.0) - self.worth)  # what nobody looked at is forgotten
        elif row.looked:
            self.worth = row.worth
