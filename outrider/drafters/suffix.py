"""An index of a growing text: where did its last words stand before, and what followed them there?

Every place of the text knows the one before it that stands behind the same two tokens, and the same one; a match is lengthened by comparing
backwards, as far as `cap`. Filing a token costs a microsecond, so a prompt is read at once, and looking costs what there are places. Counts over
them make continuations frequency-weighted (as in SuffixDecoding, 2411.04975). Knows nothing of models or drafts.
"""

from dataclasses import dataclass

from outrider.core.types import Sequence

INDEX = "suffix index"  # the slot of a request's own: whoever drafts for it reads the same
ID = 31  # bits of a token
RECENT = 64  # places that are looked at, the latest: more say no more, and text that repeats itself has no end of them
DOUBT, CERTAIN = 2.4, 22  # squared evidence for which a continuation is an even bet; evidence from which on none is left to doubt
FORESEEN = 7  # tokens that are foreseen at most: more are seldom right, and each is computed
SURE = [x * x / (x * x + DOUBT) for x in range(CERTAIN + 1)]  # by evidence: tokens that match, times places that go on alike


@dataclass(slots=True)
class Cursor:
    """Where a continuation stands: the places it may go on from, each the index after an occurrence of the last `depth` tokens, and the
    tokens that it has said since."""

    places: list[int]
    depth: int
    said: list[int]


@dataclass(slots=True)
class Trail:
    """A text that somebody else goes on with, followed where the same words stood before."""

    index: "SuffixIndex"
    at: int  # the place after the last token there; -1: they stood nowhere
    evidence: int  # tokens in a row that agree
    last: int  # the last token

    def foreseen(self, most: int) -> list[int]:
        """What may follow, at most so many tokens: the more have agreed, the more of them."""
        return self.index.text[self.at : self.at + min(2 * self.evidence + 1, FORESEEN, most)] if self.at >= 0 else []

    def went(self, token: int) -> None:
        """It went on with this token."""
        text, before = self.index.text, self.last
        self.last = token
        if 0 <= self.at < len(text) and text[self.at] == token:
            self.at, self.evidence = self.at + 1, self.evidence + 1
        else:
            self.at, self.evidence = self.index.latest_of(before, token)


class SuffixIndex:
    """The index of one text. `extend` grows it; `match`, `next` and `follow` read it.

    The chance of a continuation is its share of the places, less what doubt remains: one place after one matching token says
    little, and each token that came true makes the match longer. (Fitted to greedy texts of the reference pair; who uses the
    chances learns what they are worth.)
    """

    def __init__(self, cap: int = 24, least: int = 1) -> None:
        self.cap, self.least = cap, least
        self.text: list[int] = []
        self.latest: tuple[dict[int, int], dict[int, int]] = ({}, {})  # the last place behind two tokens, by both; behind one
        self.pair, self.one = [-1], [-1]  # by place, the one before it that is behind the same two tokens; the same one; -1: none

    def extend(self, tokens: list[int]) -> None:
        """Add tokens to the text."""
        text, (pairs, ones), end = self.text, self.latest, len(self.text)
        text += tokens
        while end < len(text):
            token, both = text[end], text[end - 1] << ID | text[end] if end else -1
            end += 1
            self.pair.append(pairs.get(both, -1))
            self.one.append(ones.get(token, -1))
            pairs[both] = ones[token] = end

    def read(self, tokens: list[int]) -> None:
        """Add what is new in the text, if nobody has."""
        if len(tokens) > len(self.text):
            self.extend(tokens[len(self.text) :])

    def trail(self) -> Trail:
        """From the end of the text on, which has a token at least."""
        found, last = self.match(), self.text[-1]
        return Trail(self, *((found.places[-1], found.depth) if found else self.latest_of(-1, last)), last)

    def latest_of(self, before: int, token: int) -> tuple[int, int]:
        """The last place behind these two tokens, or behind the second, that something follows, and how many of them stand there; -1: none."""
        pairs, ones = self.latest
        if (place := self._before(pairs.get(before << ID | token, -1), self.pair)) >= 0:
            return place, 2
        place = self._before(ones.get(token, -1), self.one)
        return place, 1 if place >= 0 else 0

    def _before(self, place: int, chain: list[int]) -> int:
        """A place, or where that is the text's end the one before it in its chain."""
        return chain[place] if place == len(self.text) else place

    def match(self) -> Cursor | None:
        """Where the longest suffix ends that stood in the text before; None below `least` tokens."""
        text, end, depth, places = self.text, len(self.text), 2, _chain(self.pair)
        if not places:
            depth, places = 1, _chain(self.one)
        most = min(self.cap, end)
        while len(places) > 1 and depth < most:
            token = text[end - 1 - depth]
            longer = [p for p in places if p > depth and text[p - 1 - depth] == token]
            if not longer:
                break
            places, depth = longer, depth + 1
        if len(places) == 1:  # in a text that copies, most of the way
            place = places[0]
            most = min(most, place)
            while depth < most and text[place - 1 - depth] == text[end - 1 - depth]:
                depth += 1
        return Cursor(places, depth, []) if places and depth >= self.least else None

    def first(self, cursor: Cursor) -> float:
        """The chance of the most frequent continuation of a match, as `follow` has it."""
        places, depth = cursor.places, cursor.depth
        if len(places) == 1:
            return sure(depth)
        counts, most = dict[int, int](), 0
        for p in places:
            token = self.text[p]
            counts[token] = count = counts.get(token, 0) + 1
            most = max(most, count)
        return most / len(places) * sure(depth * most)

    def next(self, cursor: Cursor, width: int) -> list[tuple[int, float, Cursor]]:
        """Up to `width` continuations (token, its chance, cursor), most frequent first, ties to the latest."""
        depth, said = cursor.depth, cursor.said
        branches = self._branches(cursor.places, depth, said)
        total, matched = sum(map(len, branches.values())), depth + len(said)
        best = sorted(branches.items(), key=_weight, reverse=True)[:width]
        return [(t, len(places) / total * sure(matched * len(places)), Cursor(places, depth, [*said, t])) for t, places in best]

    def follow(self, cursor: Cursor, levels: int) -> tuple[list[int], list[float], Cursor]:
        """The most frequent continuation, up to `levels` tokens: (tokens, their chances, where it ends)."""
        places, depth, before = cursor.places, cursor.depth, cursor.said
        said, chances, end = list(before), list[float](), len(self.text)
        while len(chances) < levels:
            at, matched = places[0] + len(said) if len(places) == 1 else end, depth + len(said)
            if rest := self.text[at : at + levels - len(chances)]:
                said += rest
                chances += [sure(matched + i) for i in range(len(rest))]
            elif branches := self._branches(places, depth, said):
                total = sum(map(len, branches.values()))
                token, places = max(branches.items(), key=_weight)
                said.append(token)
                chances.append(len(places) / total * sure(matched * len(places)))
            else:
                break
        return said[len(before) :], chances, Cursor(places, depth, said)

    def _branches(self, places: list[int], depth: int, said: list[int]) -> dict[int, list[int]]:
        """The places by the token that comes next there. Where the text ends it goes on with what was said if it is in a loop: if the
        match is at least as long as what was said since the place."""
        text, end, done, out = self.text, len(self.text), len(said), dict[int, list[int]]()
        for p in places:
            if p + done < end:
                out.setdefault(text[p + done], []).append(p)
            elif end - p <= depth:
                out.setdefault(said[p + done - end], []).append(p)
        return out


def index_of(seq: Sequence) -> SuffixIndex:
    """That of a request, to the end of its text."""
    index: SuffixIndex | None = seq.slots.get(INDEX)
    if index is None:
        index = seq.slots[INDEX] = SuffixIndex()
    index.read(seq.tokens)
    return index


def _chain(before: list[int]) -> list[int]:
    """The latest places that are behind the same as the end of the text, in their order."""
    place, places = before[-1], list[int]()
    while place >= 0 and len(places) < RECENT:
        places.append(place)
        place = before[place]
    places.reverse()
    return places


def sure(evidence: int) -> float:
    """What `evidence` (tokens that match, times places that go on alike) leaves of a share."""
    return SURE[min(evidence, CERTAIN)]


def _weight(branch: tuple[int, list[int]]) -> tuple[int, int]:
    return len(branch[1]), branch[1][-1]
