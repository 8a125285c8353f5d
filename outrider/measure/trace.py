"""Readers of StepRecords. The names of the figures are those of the field (vLLM's per-request JSON).

*mean acceptance length*: emitted tokens per scoring step of a row, bonus included, discarded tail excluded.
*acceptance rate*: accepted / drafted.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.core.types import POINT, Draft, StepRecord

RANKS = 8  # siblings told apart by rank


def verdicts(record: StepRecord) -> Iterator[tuple[int, bool]]:
    """(node, was it what came out) for all that was drafted, verified or not, where its parent came out and the text
    went on: so a step also grades who was not asked to be right."""
    draft = record.draft
    if draft is None:
        return
    right = [False] * len(draft)
    for n, (parent, depth) in enumerate(zip(draft.parent, draft.depth, strict=True)):
        out = record.tokens[draft.row[n]]
        if depth <= len(out) and (parent < 0 or right[parent]):
            right[n] = draft.token[n] == out[depth - 1]
            yield n, right[n]


def by_rank(draft: Draft, graded: list[tuple[int, bool]], bit: int) -> Iterator[tuple[int, bool]]:
    """(rank, verdict) of what the drafter marked `bit` chose at places for which it had several tokens: rank 0 is its likeliest by score,
    ties to the first, up to RANKS. A place with one token tells nothing of the others, and drawn tokens are not the likeliest: neither counts."""
    siblings: dict[int, list[tuple[float, int, bool]]] = {}
    for n, verdict in graded:
        if draft.source[n] & bit and draft.kind[n] == POINT:
            siblings.setdefault(draft.parent[n], []).append((-draft.said(n, bit), n, verdict))
    for some in siblings.values():
        if len(some) > 1:
            yield from ((rank, verdict) for rank, (_, _, verdict) in enumerate(sorted(some)[:RANKS]))


def stats(records: list[StepRecord], request: str) -> dict[str, Any]:
    """The figures of one request. `seconds` are those of the steps it took part in; an unknown joule is None."""
    at = [(r, r.requests.index(request)) for r in records]
    drafted, accepted, emitted, discarded = ([getattr(r, f)[i] for r, i in at] for f in ("drafted", "accepted", "emitted", "discarded"))
    known = [r.reading.joules for r, _ in at if r.reading.joules is not None]
    seconds: Counter[str] = Counter()
    forward: Counter[str] = Counter()
    tiers: dict[str, Counter[str]] = {}
    for r, _ in at:
        seconds.update(r.seconds)
        forward.update(r.forward)
        for model, tier in r.tiers.items():
            tiers.setdefault(model, Counter())[tier] += 1
    return {
        "steps": len(at),
        "target_calls": len(at),
        "drafted": sum(drafted),
        "accepted": sum(accepted),
        "discarded": sum(discarded),
        "mean_acceptance_length": sum(emitted) / len(at) if at else None,
        "draft_acceptance_rate": sum(accepted) / sum(drafted) if sum(drafted) else None,
        "acceptance_histogram": dict(sorted(Counter(accepted).items())),
        "num_spec_steps": sum(d > 0 for d in drafted),
        "num_draft_tokens": sum(drafted),
        "num_accepted_draft_tokens": sum(accepted),
        "per_step_accepted": accepted,
        "per_step_drafted": drafted,
        "seconds": sum(r.reading.seconds for r, _ in at),
        "seconds_by_stage": dict(seconds),
        "forward_seconds": dict(forward),
        "tiers": {model: dict(count) for model, count in tiers.items()},
        "joules": sum(known) if at and len(known) == len(at) else None,
        "meter": at[0][0].reading.source if at else "none",
        "reasons": dict(Counter(r.reason for r, _ in at)),
    }


def repetition(texts: list[list[int]], n: int = 8) -> float:
    """Share of the n-grams of generated texts that occurred before in the same text. A loop is near 1."""
    seen = total = 0
    for text in texts:
        grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        seen, total = seen + len(grams) - len(set(grams)), total + len(grams)
    return seen / total if total else 0.0


def line(record: StepRecord) -> dict[str, Any]:
    """A record as JSON can hold it."""
    plain = asdict(record)
    plain["accepted_by"] = {f"{name} {depth}": n for (name, depth), n in record.accepted_by.items()}
    if plain["draft"]:
        plain["draft"].pop("q")
        plain["draft"]["again"] = [[*pair, score] for pair, score in (plain["draft"]["again"] or {}).items()]
    return plain


def timeline(records: list[StepRecord]) -> dict[str, Any]:
    """Chrome's trace format, which Perfetto opens: a track of steps, and below each its stages, microseconds."""
    events, at = [], 0.0
    for record in records:
        took = 1e6 * sum(record.seconds.values())
        told = {"reason": record.reason, "drafted": record.drafted, "accepted": record.accepted, "emitted": record.emitted, "tiers": record.tiers}
        events.append({"name": record.reason, "ph": "X", "ts": at, "dur": took, "pid": 1, "tid": 1, "args": told})
        inner = at
        for stage, seconds in record.seconds.items():
            events.append({"name": stage, "ph": "X", "ts": inner, "dur": 1e6 * seconds, "pid": 1, "tid": 2})
            inner += 1e6 * seconds
        at += took
    names = [{"name": "thread_name", "ph": "M", "pid": 1, "tid": n, "args": {"name": name}} for n, name in ((1, "steps"), (2, "stages"))]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


def write(records: list[StepRecord], file: Path) -> None:
    """Records as lines of JSON (*.jsonl), or as a timeline."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(line(r)) + "\n" for r in records), "utf-8")
    else:
        file.write_text(json.dumps(timeline(records)), "utf-8")
