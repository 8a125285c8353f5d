"""What the scheduler remembers of each request: how its guesses ended, who rests, how far it is worth looking, and how sure a
drafter was of its guesses. Knows nothing of costs beyond what asking a drafter costs.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from outrider.control.predict import Bias
from outrider.core import tree
from outrider.core.types import Sequence, StepRecord
from outrider.measure.cost import DEEPEST
from outrider.measure.trace import verdicts

PATIENCE, REST = 8, 16  # vain guesses after which a drafter begins to rest, a step longer each PATIENCE; most steps
DEAR = 0.05  # plain steps that asking may cost before rests grow in proportion
GUESSES, UNPAID, SILENT, RESTS = 0, 1, 2, 3  # what a drafter may do in a step; of the rows of a batch the least counts
WHOLE, NEAR = 8, 16  # nodes deep that a new pair's drafts are verified; and that every draft is looked at
SHARE, LOOKS, RARE = 0.02, 16, 512  # of the time that looks may take which do not pay; looks whose worth is averaged; most steps between two
LOST = 8  # times as seldom, where they did not pay in the requests before either
WORST = 8.0  # plain steps that a look is held to lose at most: what is seldom done finds all cold, and more than that is the machine's doing
BEFORE = 4  # looks that those in the requests before count for
EARLY, LATE = 16, 128  # unread tokens that a drafter which can tell reads in passing, before it has begun and then


@dataclass(slots=True)
class Row:
    """What is remembered of one request. Where it is by drafter, those of whom there is nothing to remember are left out."""

    history: int = 0  # its last verdicts, the latest in the lowest bit
    rest: dict[str, int] = field(default_factory=dict)  # by drafter: steps that it still rests
    vain: dict[str, int] = field(default_factory=dict)  # guesses in vain, since one was verified
    read: dict[str, int] = field(default_factory=dict)  # tokens of the text when it last read it
    reach: int = NEAR  # nodes deep that drafts are worth looking at
    # By drafter that costs something: how likely its guesses were of late, as was believed when they were made; and steps of its own that each took,
    # less than one where it reads ahead.
    sure: dict[str, float] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    owing: dict[str, list[float]] = field(default_factory=dict)  # that had to read for long: plain steps that it was to save, and that it did
    bias: dict[str, Bias] = field(default_factory=dict)  # how much likelier its guesses are here than in all texts
    tail: dict[str, int] = field(default_factory=dict)  # with how many tokens of the text's end it began; 0: with all
    # That was asked beside others' guesses: plain steps that this brought of late, the step before which it is not asked so again, and for how many
    # steps it will not be the next time.
    beside: dict[str, tuple[float, int, int]] = field(default_factory=dict)
    worth: float = 0.0  # plain steps that a look at drafters brings
    looked: int = 0  # so often
    brought: float = 0.0  # plain steps that all of them brought
    seldom: int = 1  # LOST, or 1
    # How it is asked for the chance of its first token; None: it cannot tell.
    looks: dict[str, Callable[[list[int]], float] | None] = field(default_factory=dict)
    said: dict[str, float] = field(default_factory=dict)  # what it told last
    looking: float = 0.0  # seconds that those took to read what is new, in the step under way


def looked(rows: list[Row], names: tuple[str, ...], worth: float, times: int = 1, luck: float = 0.0) -> None:
    """`times` looks at these drafters were each worth so many plain steps, less what thinking took, by what was expected of their guesses; `luck`: what
    came was worth so much more. Where looks lose, they are so rare that they take SHARE of the time."""
    for row in rows:
        row.looked, row.brought = row.looked + times, row.brought + times * max(worth + luck, -WORST)
        row.worth += (max(worth, -WORST) - row.worth) * min(times / min(BEFORE + row.looked, LOOKS), 1.0)
        if rest := pause(row.worth, row.seldom):
            row.rest |= {name: max(row.rest.get(name, 0), rest) for name in names}


def pause(worth: float, seldom: int) -> int:
    """Steps between looks that are each worth so many plain steps, `seldom` times as many as usual."""
    return seldom * min(int(max(-worth, 0.0) / SHARE), RARE)


def awake(seqs: list[Sequence], rows: list[Row], name: str, least: Callable[[str, int], float]) -> int:
    """What the likeliest row lets this drafter do now: GUESSES; UNPAID, what it has to say is less likely than the least
    that pays (`least`, of a drafter and a row's last verdicts); SILENT, it has nothing to say; RESTS. Those that rest come a step nearer to
    waking."""
    found = RESTS
    for r, seq in enumerate(seqs):
        row = rows[r]
        if seq.request.drafters is None or name in seq.request.drafters:
            if left := row.rest.get(name, 0):
                row.rest[name] = left - 1
            else:
                found = min(found, said := _said(seq, row, name, least))
                if said != GUESSES:
                    _vain(row, name)
    return found


def soonest(seqs: list[Sequence], rows: list[Row], names: Iterable[str]) -> int:
    """Steps that go by before the first of these drafters is looked at again, all of which were found resting."""
    rests = list[int]()
    for r, seq in enumerate(seqs):
        wanted = seq.request.drafters
        rests += [rows[r].rest.get(name, 0) for name in names if wanted is None or name in wanted]
    return min(rests, default=0)


def _said(seq: Sequence, row: Row, name: str, least: Callable[[str, int], float]) -> int:
    """May a drafter have a guess worth asking for? What it keeps with a request can tell, if it has `chance`, once it has read the text. Who is
    looked at seldom, because it rests, is asked whatever it says: what became of it would never be seen."""
    if name not in row.looks:
        row.looks[name] = getattr(seq.slots.get(name), "chance", None)
    look = row.looks[name]
    read = row.read.get(name, 0)
    if name in row.said:
        del row.said[name]
    if look is None or len(seq.tokens) - read > (LATE if read else EARLY):
        return GUESSES  # who must read much first is not looked at in passing: `Starts` weighs that
    row.read[name] = len(seq.tokens)
    start = time.perf_counter()
    chance = row.said[name] = look(seq.tokens)
    row.looking += time.perf_counter() - start
    return SILENT if chance <= 0 else GUESSES if row.vain.get(name, 0) >= PATIENCE or chance >= least(name, row.history) else UNPAID


def _judged(rows: list[Row], record: StepRecord) -> None:
    """Take in the verdicts."""
    draft = record.draft
    assert draft is not None
    if tree.straight(draft):  # right up to the first that is not
        guessed, came, right = draft.token, record.tokens[0], 0
        while right < len(guessed) and right < len(came) and guessed[right] == came[right]:
            right += 1
        wrong = right < min(len(guessed), len(came))
        rows[0].history = ((((rows[0].history + 1) << right) - 1) << wrong) & 0xFFFF  # a 1 for each that is right, a 0 for the one that is not
        return
    for n, verdict in verdicts(record):
        row = rows[draft.row[n]]
        row.history = (row.history << 1 | verdict) & 0xFFFF


def remember(rows: list[Row], record: StepRecord, prices: dict[str, float], asked: dict[str, list[int]]) -> None:
    """Take in a step in which drafters were asked. prices: what asking costs, in plain steps; asked: for which rows, where that was not all."""
    if record.kept:
        _judged(rows, record)
    for r, row in enumerate(rows):
        kept = record.drafted[r]
        row.reach = min(2 * row.reach, DEEPEST) if kept and kept == record.accepted[r] else NEAR
        for name in record.levels:
            if name in asked and r not in asked[name]:
                continue  # where it rests, it was not asked in vain
            row.read[name] = record.context[r] + min(record.right(name) // len(rows), record.accepted[r])  # what others have found it has not read
            if kept:
                row.vain[name] = 0
            elif record.reason != "off:guard":
                _vain(row, name, prices.get(name, 0.0))


def _vain(row: Row, name: str, price: float = 0.0) -> None:
    """A drafter was looked at in vain: from PATIENCE times on it rests, the longer the dearer it is to ask."""
    vain = row.vain[name] = row.vain.get(name, 0) + 1
    if vain >= PATIENCE:
        row.rest[name] = max(row.rest.get(name, 0), min(vain // PATIENCE * (1 + int(price / DEAR)), REST))
