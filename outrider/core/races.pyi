"""Built of races.c."""

from collections.abc import Callable

def laid(address: int, kinds: int, text: list[int], start: int, nodes: list[int], parents: list[int], count: int, skipped: int = 0, /) -> None:
    """Write the columns of one row's forward (int64 each: token, position, slot, upto, and what is seen, for so many `kinds` of windows; `kv.Block`) to a memory address that
    has room for them: the text from `start` on, and the first `count` nodes of a tree below its end (a parent below 0: the end itself), each of which sees all on its path. Of the text `skipped` tokens are left out: it begins behind them."""

def chained(address: int, kinds: int, tokens: list[int], position: int, slot: int, upto: int, sees: int, /) -> None:
    """The same of nodes one below the other, the first at that position and slot, whose parent sees the slots of the bits of `sees` behind `upto`."""

def moved(address: int, times: int, stride: int, heads: int, each: int, bytes: int, sources: list[int], start: int, /) -> None:
    """Move the slots `sources` (ascending, none below its goal, 64 at most), each of so many `bytes`, to start, start + 1, ...; in so many `heads`, `each` bytes apart, and
    that so many `times`, `stride` bytes apart, from a memory address on."""

def decided(address: int, places: int, at: list[int] | None, /) -> tuple[list[int], list[float]] | None:
    """The best token of some places, and its log-probability, by what a model's own step says of all `places` (`Scores.found`, float64) at a memory address. `at`: which,
    None: all. None where a value is no number."""

def won(address: int, size: int, vocab: int, warmth: float, near: float, /, *words: int) -> tuple[int, float]:
    """Who wins the race over the logits [vocab] at a memory address, each of `size` bytes (2: bfloat16, 4: float32, 8: float64), by the noise of the address that
    `words` make, and its share among those within `near` of it. (-1, 0.0) where the largest is no finite number."""

Races = tuple[int, int, int, float, float, int, int, int]

def walked(races: Races, places: int, at: list[int] | None, parents: list[int], tokens: list[int], /) -> tuple[list[int], int]:
    """From the end of one row's text down a tree of nodes that have these parents (-1: that end) and tokens: as long as a child is who wins the race at its parent, on to it.
    The nodes passed, and the winner after the last, -1 where its logits are no finite numbers. Logits of `places` lie one after the other; `at`: those of
    the end and of each node in turn, None: they lie in this order. `races`: what `won` takes, of the first line and the first place; the second word is one more at each further."""

def guessed(
    address: int, races: Races | None, places: int, at: list[int] | None, hints: list[int], tokens: list[int], chances: list[float], most: int, ends: frozenset[int],
    on: Callable[..., bool] | None, /,
) -> int:  # fmt: skip
    """The next tokens of a chain that has these tokens and chances, which they are added to: from a place on, as far as `hints`, which stand below it, are what the model says, and
    the first that is not. What it says: the best of each place, as for `decided`, or the winner of its race, as for `walked`. Fewer, where they are as many as `most`, one of `ends`, or
    `on`, which is asked of each (its chance; and True of a hint), wants no more. 1: more are wanted; 0: no more; 2: no more, and the last is a hint; -1: a value is no number."""
