"""What the controller would do, in numbers for people: the candidate plans, what each is expected to cost and to bring."""

from typing import Any

from outrider.control.controller import Adaptive
from outrider.control.tables import LOOKED, MARGIN, Tables
from outrider.measure.cost import Situation

DEPTHS = (1, 2, 4, 8, 16)


def candidates(controller: Any) -> dict[str, Any]:
    """By situation that was met: every plan with its cost in milliseconds and plain steps, the tokens expected of it, how often
    its size was observed, the one with the best score, and why."""
    if not isinstance(controller, Adaptive):
        plan, reason = controller.choose([])
        return {"controller": "fixed", "plan": plan.drafters, "reason": reason}
    tables = controller.tables
    found = [_situation(tables, at) for at in tables.costs.verify]
    return {"controller": "adaptive", "predictor": tables.kind, "slowdown_limit": controller.ledger.allowance, "situations": [x for x in found if x]}


def _situation(tables: Tables, at: Situation) -> dict[str, Any] | None:
    page = tables.page(at)
    if page is None:
        return None
    seen = tables.costs.verify[at].seen
    rows: list[dict[str, Any]] = [
        {"plan": "plain", "tokens": 1.0, "ms": 1e3 * page.plain, "cost": 1.0, "score": 1.0, "observed": int(seen.get(0, [0])[0])}
    ]
    for name in tables.bits:
        first = tables.ever(name)
        for depth in DEPTHS:
            gained = sum(first * page.after[name] ** k for k in range(depth))
            cost = page.drafting[name][depth] + page.verify[depth]
            rows.append({
                "plan": f"{name} {depth}", "tokens": 1 + gained, "ms": 1e3 * page.plain * cost, "cost": cost, "score": (1 + gained) / cost,
                "observed": int(seen.get(depth, [0])[0]),
            })  # fmt: skip
    best = max(rows, key=lambda r: r["score"])
    why = (
        "nothing scores above plain decoding" if best["score"] < 1 + MARGIN else f"the most tokens for its cost, up to {max(DEPTHS[-1], LOOKED)} deep"
    )
    return {"situation": at.name(), "plans": rows, "best": best["plan"], "why": why}


def text(found: dict[str, Any]) -> str:
    """The same for people."""
    if found["controller"] == "fixed":
        return f"fixed: {found['plan'] or 'plain decoding'} at every step ({found['reason']})"
    parts = [f"adaptive, predictor {found['predictor']}, at most {found['slowdown_limit']:.0%} slower than plain decoding"]
    shown = sorted(found["situations"], key=lambda at: -sum(row["observed"] for row in at["plans"]))[:2]
    for at in shown:
        lines = [f"\n{at['situation']}", f"{'plan':14}{'tokens':>8}{'ms':>8}{'cost':>7}{'score':>7}{'observed':>10}"]
        for row in at["plans"]:
            mark = "  <- chosen: " + at["why"] if row["plan"] == at["best"] else ""
            lines.append(f"{row['plan']:14}{row['tokens']:8.2f}{row['ms']:8.3f}{row['cost']:7.2f}{row['score']:7.2f}{row['observed']:10d}{mark}")
        parts.append("\n".join(lines))
    if not found["situations"]:
        parts.append("nothing was measured yet: `outrider profile` does, and so does use")
    if len(shown) < len(found["situations"]):
        parts.append(f"\n{len(found['situations']) - len(shown)} situations less often met: --json")
    if found["reasons"]:
        parts.append("\nsteps: " + ", ".join(f"{why} {n}" for why, n in sorted(found["reasons"].items(), key=lambda kv: -kv[1])))
    return "\n".join(parts)
