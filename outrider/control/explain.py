"""What the controller knows, in numbers for people: what each drafter alone would cost and bring, and what steps of that kind took."""

from collections.abc import Iterable
from typing import Any

from outrider.control.controller import Adaptive
from outrider.control.tables import LOOKED, MARGIN, Tables
from outrider.core.types import StepRecord
from outrider.measure.cost import Situation, situation

DEPTHS = (1, 2, 4, 8, 16)


def candidates(controller: Any, records: Iterable[StepRecord] = ()) -> dict[str, Any]:
    """By situation that was met: plain decoding, and every drafter alone at some depths, each with its cost in milliseconds and plain steps, the
    tokens expected of it, and of `records` those in which that was verified, with what they took in the mean; the one with the best score, and why. A
    step decides by what it has before it, and may ask several: these are means."""
    if not isinstance(controller, Adaptive):
        plan, reason = controller.choose([])
        return {"controller": "fixed", "plan": plan.drafters, "reason": reason}
    tables, seen = controller.tables, list(records)
    found = [_situation(tables, at, [r for r in seen if _at(r) == (at.tier, at.rows, at.context)]) for at in tables.costs.verify]
    return {"controller": "adaptive", "predictor": tables.kind, "slowdown_limit": controller.ledger.allowance, "situations": [x for x in found if x]}


def _at(record: StepRecord) -> tuple[str, int, int]:
    """Where a step was, but for whether it was sampled, which no record says."""
    tier, rows, context, _ = situation(record.tiers.get("target", ""), len(record.requests), max(record.context), False)
    return tier, rows, context


def _situation(tables: Tables, at: Situation, records: list[StepRecord]) -> dict[str, Any] | None:
    page = tables.page(at)
    if page is None:
        return None
    rows = [{"plan": "plain", "tokens": 1.0, "ms": 1e3 * page.plain, "cost": 1.0, "score": 1.0, **_observed(records, "", 0)}]
    for name in tables.bits:
        first = tables.ever(name)
        for depth in DEPTHS:
            gained = sum(first * page.after[name] ** k for k in range(depth))
            cost = page.drafting[name][depth] + page.verify[depth]
            rows.append({
                "plan": f"{name} {depth}", "tokens": 1 + gained, "ms": 1e3 * page.plain * cost, "cost": cost, "score": (1 + gained) / cost,
                **_observed(records, name, depth),
            })  # fmt: skip
    best, why = max(rows, key=lambda r: r["score"]), f"the most tokens for its cost, up to {max(DEPTHS[-1], LOOKED)} deep"
    if best["score"] < 1 + MARGIN:
        best, why = rows[0], f"nothing brings {MARGIN:.0%} more"
    measured = int(sum(count for count, _ in tables.costs.verify[at].seen.values()))
    return {"situation": at.name(), "measured": measured, "plans": rows, "best": best["plan"], "why": why}


def _observed(records: list[StepRecord], name: str, nodes: int) -> dict[str, Any]:
    """Steps in which this drafter alone was asked and so many nodes of it were verified ("" and 0: nobody was), and milliseconds that they took in
    the mean."""
    took = [
        r.reading.seconds - r.seconds.get("prefill", 0.0) - r.seconds.get("jit", 0.0)
        for r in records
        if r.nodes() == nodes and list(r.levels) == [name] * bool(name)
    ]
    return {"steps": len(took), "observed_ms": 1e3 * sum(took) / len(took) if took else None}


def text(found: dict[str, Any]) -> str:
    """The same for people."""
    if found["controller"] == "fixed":
        return f"fixed: {found['plan'] or 'plain decoding'} at every step ({found['reason']})"
    parts = [f"adaptive, predictor {found['predictor']}, at most {found['slowdown_limit']:.0%} slower than plain decoding"]
    shown = sorted(found["situations"], key=lambda at: (-sum(row["steps"] for row in at["plans"]), -at["measured"]))[:2]
    for at in shown:
        lines = [f"\n{at['situation']}", f"{'in the mean':14}{'tokens':>8}{'ms':>8}{'cost':>7}{'score':>7}{'observed ms':>13}{'steps':>7}"]
        for row in at["plans"]:
            mark = "  <- best: " + at["why"] if row["plan"] == at["best"] else ""
            took = "-" if row["observed_ms"] is None else f"{row['observed_ms']:.3f}"
            told = f"{row['tokens']:8.2f}{row['ms']:8.3f}{row['cost']:7.2f}{row['score']:7.2f}{took:>13}{row['steps']:7d}"
            lines.append(f"{row['plan']:14}{told}{mark}")
        parts.append("\n".join(lines))
    if not found["situations"]:
        parts.append("nothing was measured yet: `outrider profile` does, and so does use")
    if len(shown) < len(found["situations"]):
        parts.append(f"\n{len(found['situations']) - len(shown)} situations less often met: --json")
    if found["reasons"]:
        parts.append("\nsteps: " + ", ".join(f"{why} {n}" for why, n in sorted(found["reasons"].items(), key=lambda kv: -kv[1])))
    return "\n".join(parts)
