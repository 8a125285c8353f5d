"""A depth-capped suffix tree with counts over a growing text: what followed the longest suffix that was seen before?

Every substring up to `cap` tokens is a path from the root. A substring that occurred once is a *leaf*: a single
pointer into the text, split one token at a time when the text repeats it. So plain prose costs about one node a token,
and appending a token costs O(length of the current match) <= O(cap). Counts make continuations frequency-weighted
(SuffixDecoding, 2411.04975). Knows nothing of models or drafts.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Node:
    """`count`: occurrences; `last`: index just after the latest one, at the cap just after the first (it has the longest
    continuation in text that loops); children None for a leaf and at the cap: the text goes on at `last`."""

    count: int
    last: int
    depth: int
    children: "dict[int, Node] | None" = None


Cursor = tuple[Node | None, int]  # where a continuation stands: a node, or (None, index into the text)


class SuffixTree:
    """The index of one text. `append` grows it; `match` and `next` read it."""

    def __init__(self, cap: int = 24) -> None:
        self.cap = cap
        self.text: list[int] = []
        self.root = Node(0, 0, 0, {})
        self.live: list[Node] = []  # the suffixes of the text that occurred before, longest first

    def append(self, token: int) -> None:
        """Add one token to the text."""
        text, cap, grown = self.text, self.cap, list[Node]()
        text.append(token)
        end = len(text)
        for node in [*self.live, self.root]:
            child = node.children.get(token)  # type: ignore[union-attr]
            if child is None:
                node.children[token] = Node(1, end, node.depth + 1)  # type: ignore[index]
                continue
            child.count += 1
            if child.depth < cap:
                if child.children is None:  # a leaf: its single occurrence goes on with text[child.last]
                    child.children = {text[child.last]: Node(1, child.last + 1, child.depth + 1)}
                child.last = end
                grown.append(child)
        self.live = grown

    def match(self, least: int = 1) -> Cursor | None:
        """Where the longest suffix that was seen before, and went on, ends; None below `least` tokens."""
        for node in self.live:
            if node.depth < least:
                return None
            if node.children:
                return node, node.last
        return None

    def next(self, cursor: Cursor, width: int) -> list[tuple[int, float, Cursor]]:
        """Up to `width` continuations (token, share of occurrences, cursor), most frequent first, ties to the latest."""
        node, at = cursor
        if node is not None and node.children:
            total = sum(c.count for c in node.children.values())
            best = sorted(node.children.items(), key=_weight, reverse=True)[:width]
            return [(t, c.count / total, self._down(c)) for t, c in best]
        if at < len(self.text):
            return [(self.text[at], 1.0, (None, at + 1))]
        return []

    def follow(self, cursor: Cursor, levels: int) -> tuple[list[int], list[float], Cursor]:
        """The most frequent continuation, up to `levels` tokens: (tokens, shares of occurrences, where it ends)."""
        tokens: list[int] = []
        shares: list[float] = []
        node, at = cursor
        while node is not None and node.children and len(tokens) < levels:
            token, child = max(node.children.items(), key=_weight) if len(node.children) > 1 else next(iter(node.children.items()))
            tokens.append(token)
            shares.append(child.count / sum(c.count for c in node.children.values()))
            node, at = self._down(child)
        if len(tokens) < levels and not (node is not None and node.children):
            rest = self.text[at : at + levels - len(tokens)]
            tokens += rest
            shares += [1.0] * len(rest)
            if rest:
                node, at = None, at + len(rest)
        return tokens, shares, (node, at)

    def _down(self, child: Node) -> Cursor:
        return (child, child.last) if child.children else (None, child.last)


def _weight(branch: tuple[int, Node]) -> tuple[int, int]:
    return branch[1].count, branch[1].last
