"""Built of races.c."""

def laid(address: int, kinds: int, text: list[int], start: int, nodes: list[int], parents: list[int], count: int, /) -> None:
    """Write the columns of one row's forward (int64 each: token, position, slot, upto, and what is seen, for so many `kinds` of windows; `kv.Block`) to a memory address that
    has room for them: the text from `start` on, and the first `count` nodes of a tree below its end (a parent below 0: the end itself), each of which sees all on its path."""

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
