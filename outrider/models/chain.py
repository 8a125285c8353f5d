"""A chain of guesses in the making: what a model's forwards say of the next tokens, and whether one more is wanted.

Each forward reads the last token and what is foreseen after it: as far as that is what the model says, one finds several.
"""

import math
from dataclasses import dataclass, field

from torch import Tensor

from outrider.core.noise import races
from outrider.core.sampling import Race, decided, not_a_number
from outrider.core.types import On, Scores

MORE, FORESEEN = 1, 2  # what `races.guessed` says


@dataclass(slots=True)
class Chain:
    """What a draft model says below a place, one token after the other."""

    most: int  # tokens
    ends: frozenset[int]  # one of these is the last
    on: On | None = None  # asked of each whether one more is wanted: its chance, and True where the next is known by then
    race: Race | None = None  # who is picked in place of the likeliest
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)  # how likely each is
    scored: int = 0  # of how many a forward has computed the keys

    def read(self, logits: Tensor, found: Tensor, places: int, at: list[int] | None, hints: list[int]) -> bool:
        """Take in what a forward over the last token and `hints` says: logits [..., V] of its `places`, and what it found there. `at`: which places
        are the last token's and each hint's, None: these, in order. Is one more wanted?

        Raises OutriderError where the chain comes to logits that are no numbers.
        """
        race = self.race.asked(logits) if self.race and races is not None else None
        if races is None or (self.race and race is None):
            return self._read(logits, found, places, at, hints)
        address = 0 if race else found.data_ptr()
        told = races.guessed(address, race, places, at, hints, self.tokens, self.chances, self.most, self.ends, self.on)
        if told < 0:
            raise not_a_number()
        self.scored = len(self.tokens) - (told != FORESEEN)
        return told == MORE

    def _read(self, logits: Tensor, found: Tensor, places: int, at: list[int] | None, hints: list[int]) -> bool:
        for i in range(len(hints) + 1):
            token, chance = self._next(logits, found, places, i if at is None else at[i])
            self.tokens.append(token)
            self.chances.append(chance)
            known = i < len(hints) and hints[i] == token
            more = len(self.tokens) < self.most and token not in self.ends
            if more and self.on is not None:
                more = self.on(chance, True) if known else self.on(chance)
            if not (more and known):
                break
        self.scored = len(self.tokens) - (more or not known)
        return more

    def _next(self, logits: Tensor, found: Tensor, places: int, line: int) -> tuple[int, float]:
        """The token after one of the places, and how likely it is."""
        if self.race:
            return self.race.won(logits, line, len(self.tokens))
        (token,), (chance,) = decided(Scores(logits, at=[line], found=found, lies=places))
        return token, math.exp(chance)
