"""The scheduler live: every fixed plan, others' rules and ours, interleaved, in one process.

Every prompt is written by every contender before the next, in rotating order, `rounds` times; a contender's time on a prompt
is its median, of all that is done for it but the target's prefill: a drafter's own is included, and what is learned at its end. Plain is a runtime with no
drafter loaded, and is written twice: its ratio to itself is the noise.
"""

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from statistics import geometric_mean, mean, median
from typing import Any, NamedTuple

import outrider
from outrider import reference
from outrider.bench import policies, prompts, recording, replay
from outrider.bench.oracle import hindsight, informed
from outrider.bench.report import provenance, save_as
from outrider.control.fixed import fixed
from outrider.control.tables import Tables
from outrider.core.sockets import Controller
from outrider.core.types import Sequence
from outrider.measure.cost import Costs
from outrider.measure.profile import merged
from outrider.runtime import profiler
from outrider.runtime.door import Runtime

PLAIN, AGAIN, ADAPTIVE, OFF = "plain", "plain again", "adaptive", "loaded, off"
LOOKING, MEAN = "looking", "adaptive, mean"
ALONE = "adaptive, model alone"  # a runtime with the draft model and nothing else
FIXED = (2, 4, 8)
CALIBRATED = ("plain", "lookup:4", "lookup:8", "model:2", "model:8", "quantised:2", "quantised:8")  # replays that are compared with live runs
MEASURED = 10  # prompts after which it is measured again what steps cost: on a machine with neighbours that changes within minutes


class Written(NamedTuple):
    """A text, and seconds a token of all that was done for it, from its submission to what was learned at its end, but for the target's prefill."""

    seq: Sequence
    pace: float


class Writer:
    """Writes prompts with one runtime under one controller."""

    def __init__(self, rt: Runtime, controller: Controller | None = None, speculation: Any = "auto") -> None:
        self.rt, self.controller, self.speculation = rt, controller or rt.engine.controller, speculation
        for model in (rt.engine.target, *(getattr(part, "model", None) for part in rt.engine.drafters.values())):
            if rows := getattr(model, "rows", None):
                rows.reuse = False

    def __call__(self, prompt: prompts.Prompt, max_tokens: int) -> Written:
        engine = self.rt.engine
        before, engine.controller = engine.controller, self.controller
        try:
            request = self.rt.request(
                prompt.encode(self.rt.tokenizer), max_tokens=max_tokens, temperature=prompt.temperature, seed=1, speculation=self.speculation
            )
            start = time.perf_counter()
            seq = engine.submit(request)
            while seq.finish_reason is None:
                engine.advance([seq])
            took = time.perf_counter() - start - sum(r.seconds.get("prefill", 0.0) for r in seq.records)
            return Written(seq, took / max(seq.produced, 1))
        finally:
            engine.controller = before


def schedule(
    count: int = 5, max_tokens: int = 256, rounds: int = 3, progress: Callable[[str], None] = print, *, target: str | None = None,
    draft: str | None = None, trace: Path | None = None, **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """The live table, and the same policies replayed on a trace recorded with the same runtime. draft: a model, or a copy of the target in fewer bits
    (quantised:int8)."""
    settings = {"compile": "wait", "dtype": "bfloat16", **settings, "rows": 1}
    plain = outrider.load(target or reference.target(), [], **settings)
    alone, fast = (outrider.load(target or reference.target(), [*some, guessing(draft)], **settings, profile="off") for some in ([], ["lookup"]))
    tables = fast.keeper.tables  # type: ignore[union-attr]
    asked = prompts.readable(fast, count)
    progress("measuring costs")
    _measure(fast, tables, repeats=20)
    _measure(alone, alone.keeper.tables)  # type: ignore[union-attr]
    progress("recording a trace")
    taped = recording.record(fast, asked, max_tokens, tables.costs, lambda at: progress(f"recording {at}"))
    contenders = {
        PLAIN: Writer(plain),
        **{f"{name}:{k}": Writer(fast, fixed(policies.chain(name, k))) for name in policies.singly_and_together(fast.engine.drafters) for k in FIXED},
    }
    contenders |= {ADAPTIVE: Writer(fast), ALONE: Writer(alone), OFF: Writer(fast, speculation="off"), AGAIN: Writer(plain)}
    for writer in contenders.values():
        writer(prompts.Prompt("warm", "story", "Warm up the caches", None, 0.0), 32)
    for prompt in [p for p in prompts.readable(fast, count + 1) if p not in asked]:
        for name in (ADAPTIVE, ALONE):
            contenders[name](prompt, max_tokens)  # what a first user of the pair would have left in the profile
    found: list[dict[str, Any]] = [taped.costs]
    known = json.loads(json.dumps(tables.state()))  # before these texts are written: a replay is no second reading
    rounds_of, why, think = _interleaved(
        contenders, asked, max_tokens, rounds, progress, lambda: found.append(_rested([plain, alone, fast], Tables(tables.bits, Costs({}))))
    )
    taped = replace(taped, costs=reduce(lambda some, more: merged(some, more, {}), found))  # what steps cost while they were timed
    if trace:
        taped.save(trace)
    kinds = {p.id: p.category for p in asked}
    rows = [{"prompt": p, "category": kind, **{name: median(rounds_of[name][p]) for name in contenders}} for p, kind in kinds.items()]
    return {
        "where": provenance(), "settings": {"prompts": count, "max_tokens": max_tokens, "rounds": rounds, "target": _name(target), "draft": _name(draft), **settings},
        "live": _table(rows, list(kinds.values()), list(contenders)), "best": beside_best(rounds_of, kinds), "replayed": replayed(taped, None, known),
        "calibration": _calibration(taped, rows), "reasons": dict(why), "microseconds": think, "rows": rows,
        "ledger": {"stalls": fast.engine.controller.ledger.stalls, "debts": fast.engine.controller.ledger.debts},  # type: ignore[attr-defined]
    }  # fmt: skip


def guessing(draft: str | None) -> str:
    """The drafter's name: a copy of the target's own, or a draft model's."""
    return draft if draft and draft.startswith("quantised:") else f"model:{draft or reference.draft()}"


def _measure(rt: Runtime, tables: Tables, repeats: int = 7) -> dict[str, Any]:
    """Sweep greedy and sampled steps into `tables`; returns the state of their costs."""
    for sampled in (False, True):
        profiler.sweep(rt.engine, tables, patience=10, repeats=repeats, sampled=sampled)
    return tables.costs.state()


def _name(folder: str | None) -> str:
    return "reference" if folder is None else Path(folder).name


def _interleaved(
    contenders: dict[str, Writer],
    asked: list[prompts.Prompt],
    max_tokens: int,
    rounds: int,
    progress: Callable[[str], None],
    measure: Callable[[], object],
) -> tuple[dict[str, dict[str, list[float]]], Counter[str], dict[str, float]]:
    """Seconds per token by contender, prompt and round; reasons of the adaptive steps; microseconds a step of deciding. `measure` is called before
    each round, and in it after so many prompts (MEASURED)."""
    names, found, why = list(contenders), {name: {p.id: list[float]() for p in asked} for name in contenders}, Counter[str]()
    deciding: dict[str, list[float]] = {PLAIN: [], ADAPTIVE: [], LOOKING: []}
    for turn in range(rounds):
        for i, prompt in enumerate(asked):
            if i % MEASURED == 0:
                measure()
            progress(f"round {turn + 1} of {rounds}: {prompt.id}")
            for name in (names + names)[(i + turn) % len(names) :][: len(names)]:
                seq, pace = contenders[name](prompt, max_tokens)
                found[name][prompt.id].append(pace)
                if name == ADAPTIVE:
                    why.update(r.reason for r in seq.records)
                if name in deciding:
                    deciding[name] += [r.seconds["choose"] + r.seconds["draft"] for r in seq.records]
                    deciding[LOOKING] += [r.seconds["look"] for r in seq.records if "look" in r.seconds]
    return found, why, {name: 1e6 * median(x or [0.0]) for name, x in deciding.items()} | {MEAN: 1e6 * mean(deciding[ADAPTIVE])}


def _rested(runtimes: list[Runtime], tables: Tables) -> dict[str, Any]:
    """What they were told in a busy moment is asked again; then what steps of the last one cost now."""
    for rt in runtimes:
        rt.engine.rest()
    return _measure(runtimes[-1], tables)


def _table(rows: list[dict[str, Any]], categories: list[str], names: list[str]) -> dict[str, dict[str, float]]:
    """Times as fast as plain, geometric means, by contender and category."""
    out: dict[str, dict[str, float]] = {}
    for name in names:
        ratios = [(row["category"], row[PLAIN] / row[name]) for row in rows]
        out[name] = {c: geometric_mean([x for k, x in ratios if k == c]) for c in dict.fromkeys(categories)}
        out[name] |= {"all": geometric_mean([x for _, x in ratios]), "worst": min(x for _, x in ratios)}
    return out


def beside_best(times: dict[str, dict[str, list[float]]], kinds: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Adaptive beside the best fixed plan, plain included, of each category: `times` is seconds per token by contender, prompt and round, `kinds` the
    category of each prompt. The quickest of ten plans in some rounds is partly the luckiest there. So beside `ratio`, by the medians of all rounds,
    stand those of single rounds (`apart`, their geometric mean; `low`, `high`) to the plan that was best in all others; None of a single round."""
    plans = [PLAIN, *(name for name in times if name.split(":")[-1] in map(str, FIXED))]
    rounds, out = len(next(iter(times[PLAIN].values()))), dict[str, dict[str, Any]]()

    def pace(name: str, some: list[str], which: list[int]) -> float:
        return geometric_mean([median([times[name][p][r] for r in which]) for p in some])

    def quickest(some: list[str], which: list[int]) -> str:
        return min(plans, key=lambda name: pace(name, some, which))

    for kind in (*dict.fromkeys(kinds.values()), "all"):
        some, every = [p for p, k in kinds.items() if kind in (k, "all")], list(range(rounds))
        best, apart = quickest(some, every), list[float]()
        for r in every if rounds > 1 else []:
            apart.append(pace(quickest(some, [n for n in every if n != r]), some, [r]) / pace(ADAPTIVE, some, [r]))
        out[kind] = {"plan": best, "ratio": pace(best, some, every) / pace(ADAPTIVE, some, every)}
        out[kind] |= {"apart": geometric_mean(apart), "low": min(apart), "high": max(apart)} if apart else dict.fromkeys(("apart", "low", "high"))
    return out


def replayed(taped: recording.Trace, names: list[str] | None = None, state: dict[str, Any] | None = None) -> dict[str, dict[str, float]]:
    """Policies and oracles on the trace, times as fast as plain."""
    tier = recording.tier_of(taped)
    fixed_plans = [f"{d}:{k}" for d in policies.singly_and_together(taped.drafters) for k in FIXED]
    usual = [*fixed_plans, *(rule for d in taped.drafters for rule in policies.of_others(d)), "ucb1", ADAPTIVE]
    names = list(dict.fromkeys([PLAIN, *(names or usual)]))
    seconds: dict[str, list[float]] = {}
    for name in names:
        controller = policies.policy(name, taped.drafters, taped.costs, tier, {k: v for k, v in (state or {}).items() if k != "costs"})
        seconds[name] = [r.seconds for r in replay.replay(taped, controller)]
    seconds |= {"informed": [informed(taped, t) for t in taped.texts], "hindsight": [hindsight(taped, t) for t in taped.texts]}
    rows = [{"category": t.category, **{name: seconds[name][i] for name in seconds}} for i, t in enumerate(taped.texts)]
    table = _table(rows, [t.category for t in taped.texts], list(seconds))
    tokens = sum(len(t.tokens) for t in taped.texts)
    for name in seconds:
        table[name]["regret_ms_per_1000"] = 1e6 * (sum(seconds[name]) - sum(seconds["hindsight"])) / tokens
    return table


def _calibration(taped: recording.Trace, rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Replayed over live time per token of fixed policies, by their ratio to plain: the machine's pace cancels."""
    tier, out = recording.tier_of(taped), {}
    plain = {r.text.prompt: r.seconds for r in replay.replay(taped, policies.policy(PLAIN, taped.drafters, taped.costs, tier))}
    for name in [n for n in CALIBRATED if n != PLAIN and n.split(":")[0] in taped.drafters]:
        told = {
            r.text.prompt: r.seconds / plain[r.text.prompt] for r in replay.replay(taped, policies.policy(name, taped.drafters, taped.costs, tier))
        }
        live = {row["prompt"]: row[name] / row[PLAIN] for row in rows}
        out[name] = {
            "replayed": geometric_mean(list(told.values())), "live": geometric_mean(list(live.values())),
            "error": geometric_mean(list(told.values())) / geometric_mean(list(live.values())) - 1,
        }  # fmt: skip
    return out


def markdown(result: dict[str, Any]) -> str:
    """Live and replayed tables, calibration, reasons."""
    parts = [lines("live, times as fast as plain", result["live"]), best_lines(result["best"]), lines("replayed", result["replayed"])]
    parts.append("| policy | replayed / plain | live / plain | error |\n|---|---|---|---|\n" + "\n".join(
        f"| {name} | {c['replayed']:.3f} | {c['live']:.3f} | {c['error']:+.1%} |" for name, c in result["calibration"].items()))  # fmt: skip
    parts.append("Reasons of adaptive steps: " + ", ".join(f"{why} {n}" for why, n in sorted(result["reasons"].items(), key=lambda kv: -kv[1])) + ".")
    think, ledger = result["microseconds"], result["ledger"]
    parts.append(f"Deciding (and trimming), median of a step: {think[ADAPTIVE]:.0f} us (mean {think[MEAN]:.0f}: it is learned some steps at a time), of which {think[PLAIN]:.0f} are there without a controller; "
                 f"lookup's reading of what is new in the text, where it was asked, {think[LOOKING]:.0f} us beside. "
                 f"Stalls {ledger['stalls']}, debts {ledger['debts']}.")  # fmt: skip
    return "\n\n".join(parts)


def best_lines(table: dict[str, dict[str, Any]]) -> str:
    out = ["| adaptive beside | best fixed plan | of the same rounds | of all other rounds | its spread |", "|---|---|---|---|---|"]
    for kind, row in table.items():
        apart = ["-", "-"] if row["apart"] is None else [f"{row['apart']:.3f}", f"{row['low']:.2f}..{row['high']:.2f}"]
        out.append(f"| {kind} | {' | '.join([row['plan'], format(row['ratio'], '.3f'), *apart])} |")
    return "\n".join(out)


def lines(title: str, table: dict[str, dict[str, float]]) -> str:
    columns = list(next(iter(table.values())))
    out = [f"| {title} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in table.items():
        out.append(f"| {name} | {' | '.join(f'{row[c]:.2f}' if row[c] < 100 else f'{row[c]:.0f}' for c in columns)} |")
    return "\n".join(out)


def save(result: dict[str, Any], folder: Path, name: str, text: str) -> None:
    save_as(folder, name, json.dumps(result, indent=1), text)
    if "replayed" in result:
        (folder / f"{name}.svg").write_text(chart(result["replayed"]), "utf-8")


SHOWN = ("lookup:4", "lookup:8", "model:4", ADAPTIVE, "informed", "hindsight")
COLOURS = ("#9ecae1", "#6baed6", "#bcbddc", "#e6550d", "#74c476", "#d9d9d9")


def chart(table: dict[str, dict[str, float]]) -> str:
    """Bars by category, times as fast as plain, as an SVG picture."""
    names = [name for name in SHOWN if name in table]
    groups = [c for c in next(iter(table.values())) if c not in ("worst", "regret_ms_per_1000")]
    top, bar, height = max(table[n][g] for n in names for g in groups), 14, 240
    wide = len(groups) * (len(names) + 1) * bar + 60
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{height + 70}" font-family="sans-serif" font-size="11">']
    for level in range(int(top) + 1):
        y = height - height * level / top
        parts.append(f'<line x1="40" x2="{wide}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/><text x="8" y="{y + 4:.0f}">{level}x</text>')
    for g, group in enumerate(groups):
        left = 50 + g * (len(names) + 1) * bar
        parts.append(f'<text x="{left}" y="{height + 16}">{group}</text>')
        for n, name in enumerate(names):
            tall = height * table[name][group] / top
            parts.append(f'<rect x="{left + n * bar}" y="{height - tall:.0f}" width="{bar - 2}" height="{tall:.0f}" fill="{COLOURS[n]}"/>')
    for n, name in enumerate(names):
        parts.append(f'<rect x="{50 + n * 110}" y="{height + 36}" width="10" height="10" fill="{COLOURS[n]}"/>')
        parts.append(f'<text x="{64 + n * 110}" y="{height + 45}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
