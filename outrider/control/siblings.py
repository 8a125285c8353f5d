"""What guesses beside one another are worth together: of the children of a node one at most comes true. Pure functions of a draft and of how likely
each of its nodes is."""

from outrider.core.types import Draft


def given(survival: list[float], n: int, parent: int) -> float:
    """The chance of a node if its parent, a place, is accepted."""
    return survival[n] / survival[parent] if parent >= 0 else survival[n]


def apart(draft: Draft, survival: list[float]) -> list[float]:
    """Survivals by node of which those of siblings sum to no more than their parent's: the surest leaves the others what is left; of equals, the
    first."""
    rows, parents, out = draft.rows, draft.parent, list[float]()
    last, before = [-1] * (rows + len(parents)), list[int]()  # of a place: its last child; of a node: the child of its parent before it
    for n, parent in enumerate(parents):
        before.append(last[rows + parent])
        last[rows + parent] = n
    for n, parent in enumerate(parents):  # parents stand before their children
        chance, left, beside = given(survival, n, parent), 1.0, last[rows + parent]
        while beside >= 0:
            other = given(survival, beside, parent) if beside != n else 0.0
            if other > chance or (other == chance and beside < n):
                left -= other
            beside = before[beside]
        out.append(max(min(chance, left), 0.0) * (out[parent] if parent >= 0 else 1.0))
    return out


def in_lines(draft: Draft, chances: list[float]) -> list[list[float]]:
    """Chances by row, the highest first."""
    if draft.rows == 1:
        return [sorted(chances, reverse=True)]
    lines: list[list[float]] = [[] for _ in range(draft.rows)]
    for n, row in enumerate(draft.row):
        lines[row].append(chances[n])
    return [sorted(line, reverse=True) for line in lines]


def surest(draft: Draft, chances: list[float], lines: list[list[float]], most: int) -> list[int]:
    """So many nodes of each row that are likeliest, ascending, of which `lines` are the chances in order. No child is likelier than its parent, and of
    equals the first stay, so all are there with their parents."""
    kept, least, equals = list[int](), list[float](), list[int]()
    if most == 0:
        return kept
    for line in lines:
        bound = line[most - 1] if len(line) > most else -1.0
        least.append(bound)
        equals.append(line[:most].count(bound))
    for n, row in enumerate(draft.row):
        if chances[n] == least[row] and equals[row]:
            equals[row] -= 1
            kept.append(n)
        elif chances[n] > least[row]:
            kept.append(n)
    return kept
