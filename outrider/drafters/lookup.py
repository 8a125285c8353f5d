"""Lookup drafting: what followed the same words earlier in this text (prompt included). Needs no second model.

Prompt lookup, n-gram and input copy are this one drafter over one index. Every proposal is a point: the drafter is
certain of what it proposes and samples nothing.
"""

from dataclasses import dataclass, field

from mypy_extensions import mypyc_attr

from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.noise import RowNoise
from outrider.core.sampling import Settings
from outrider.core.types import Draft, On, Outcome, Places, Sequence
from outrider.drafters.suffix import INDEX, Cursor, SuffixIndex


@dataclass(slots=True)
class _State:
    index: SuffixIndex
    floor: float
    cursors: dict[tuple[int, int], Cursor] = field(default_factory=dict)  # (parent, token) of a node -> where its continuation stands
    cursor: Cursor | None = None  # where the text's own end stood before, if that says enough
    first: float = 0.0  # the chance of what followed there
    read: int = 0  # tokens of the text that this was found in

    def chance(self, tokens: list[int]) -> float:
        """Read what is new in the text. How likely is the first token of a guess? 0: there is none."""
        if len(tokens) > self.read:
            self.read = len(tokens)
            self.index.read(tokens)
            self.cursor = self.index.match()
            self.first = self.index.first(self.cursor) if self.cursor else 0.0
            if self.first < self.floor:
                self.cursor, self.first = None, 0.0
        return self.first


@mypyc_attr(allow_interpreted_subclasses=True)
class Lookup:
    """A Drafter over an index per request. `least`: shortest match that may be worth a guess; `cap`: longest looked for; `floor`: chance
    of its first token below which there is no guess. The score of a proposal is its chance, by the index.

    Raises OutriderError for a match of no token, one longer than the cap, and a chance outside 0..1.
    """

    draws = False
    saved = 0

    def __init__(self, name: str = "lookup", *, least: int = 1, cap: int = 24, floor: float = 0.5) -> None:
        if not (1 <= least <= cap and 0 <= floor <= 1):
            raise OutriderError(
                f"Lookup(least={least}, cap={cap}, floor={floor})",
                "a match has at least one token, a chance lies in 0..1",
                "1 <= least <= cap, 0 <= floor <= 1",
            )
        self.name, self.least, self.cap, self.floor = name, least, cap, floor

    def begin(self, seq: Sequence) -> None:
        index = SuffixIndex(self.cap, self.least)
        seq.slots.setdefault(INDEX, index)
        seq.slots[self.name] = _State(index, self.floor)

    def end(self, seq: Sequence) -> None:
        seq.slots.pop(self.name, None)
        seq.slots.pop(INDEX, None)

    def observe(self, seqs: list[Sequence], draft: Draft, outcome: Outcome) -> None:
        """Nothing to record: the text itself is the record, indexed at the next use."""

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
        frontier = tree.open_at(seqs, draft, frontier)
        if width == 1:
            for place in frontier:
                draft = self._run(seqs, draft, place, source, levels)
            return draft
        parents: list[int] = []
        tokens: list[int] = []
        scores: list[float] = []
        for place in frontier:
            state, cursor = self._at(seqs, draft, place)
            for token, chance, after in state.index.next(cursor, width) if cursor else ():
                parents.append(place)
                tokens.append(token)
                scores.append(chance)
                state.cursors[place, token] = after
        return tree.grow(draft, parents, tokens, source, score=scores) if tokens else draft

    def _at(self, seqs: list[Sequence], draft: Draft, place: int) -> tuple[_State, Cursor | None]:
        seq = seqs[~place if place < 0 else draft.row[place]]
        state: _State = seq.slots[self.name]
        return state, self._start(seq, state) if place < 0 else state.cursors.get((draft.parent[place], draft.token[place]))

    def _run(self, seqs: list[Sequence], draft: Draft, place: int, source: int, levels: int) -> Draft:
        """A chain of up to `levels` nodes below a place."""
        state, cursor = self._at(seqs, draft, place)
        if cursor is None:
            return draft
        tokens, chances, last = state.index.follow(cursor, levels)
        tokens = tree.ended(tokens, seqs[tree.row_at(draft, place)].request.ends)
        all_new = len(draft) + len(tokens)
        draft = tree.run(draft, place, tokens, source, chances[: len(tokens)])
        if tokens:
            end = all_new - 1 if len(draft) == all_new else tree.below(draft, place, tokens)[-1]
            state.cursors[draft.parent[end], tokens[-1]] = last
        return draft

    def _start(self, seq: Sequence, state: _State) -> Cursor | None:
        """Index what is new in the text and find the match a draft starts from."""
        state.cursors.clear()
        state.chance(seq.tokens)
        return state.cursor
