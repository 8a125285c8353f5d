"""Where a text ends: at its first end token, stop string or limit. Knows nothing of models."""

from outrider.core.types import Draft, Outcome, Sequence


def cut(seqs: list[Sequence], draft: Draft, outcome: Outcome) -> tuple[Outcome, list[str | None]]:
    """End each row at its first end token, stop string or limit, whichever comes first; why it ended, or None, by row.

    Cache, history, noise position and records all see only what is left.
    """
    if len(seqs) == 1 and _goes_on(seqs[0], draft, outcome):  # nearly every step
        return outcome, [None]
    paths, bonuses, discarded, reasons = [], [], [], []
    for seq, path, bonus in zip(seqs, outcome.paths, outcome.bonus, strict=True):
        assert bonus is not None
        new = [*draft.text(path), bonus]
        keep, why = _end(seq, new)
        reasons.append(why)
        paths.append(path[:keep])
        bonuses.append(bonus if keep == len(new) else None)
        discarded.append(len(new) - keep)
    return Outcome(paths, bonuses, discarded), reasons


def _goes_on(seq: Sequence, draft: Draft, outcome: Outcome) -> bool:
    """Is it plain to see that nothing ends here?"""
    request, path, bonus = seq.request, outcome.paths[0], outcome.bonus[0]
    if request.cut is not None or bonus in request.ends or len(path) + 1 >= seq.left:
        return False
    return not any(draft.token[n] in request.ends for n in path)


def _end(seq: Sequence, new: list[int]) -> tuple[int, str | None]:
    """(how many of the new tokens stay, why the text ends there or None)."""
    sampling, request = seq.request.sampling, seq.request
    limit = seq.left
    keep, reason = (limit, "length") if len(new) >= limit else (len(new), None)
    first = max(0, sampling.min_tokens - seq.produced)
    some = () if request.ends.isdisjoint(new) else enumerate(new[:keep])
    end = next((i + 1 for i, t in some if t in request.ends and i >= first), None)
    if end is not None:
        keep, reason = end, "stop"
    if request.cut and first < keep and (found := request.cut([*seq.generated, *new[:first]], new[first:keep])) is not None:
        keep, reason = first + found, "stop"
    return keep, reason
