"""The scheduler live: every fixed plan, others' rules and ours, interleaved, in one process; and its guarantee under bad drafters.

Every prompt is written by every contender before the next, in rotating order, `rounds` times; a contender's time on a prompt
is its median, from after the target's prefill to the end, a drafter's own prefill included. Plain is a runtime with no
drafter loaded, and is written twice: its ratio to itself is the noise.
"""

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from statistics import geometric_mean, mean, median
from typing import Any

import outrider
from outrider import reference
from outrider.bench import policies, prompts, replay
from outrider.bench.oracle import hindsight, informed
from outrider.bench.report import provenance, save_as
from outrider.control.fixed import fixed
from outrider.control.guard import GRANT, READING
from outrider.control.tables import Tables
from outrider.core.sockets import Controller
from outrider.core.types import Draft, Sequence
from outrider.drafters.model import ModelDrafter
from outrider.measure.cost import Costs
from outrider.measure.profile import merged
from outrider.models import load as models
from outrider.runtime import profiler
from outrider.runtime.door import Runtime

PLAIN, AGAIN, ADAPTIVE, OFF = "plain", "plain again", "adaptive", "loaded, off"
LOOKING, MEAN = "looking", "adaptive, mean"
ALONE = "adaptive, model alone"  # a runtime with the draft model and nothing else
FIXED = (2, 4, 8)
REPLAYED = ("dynamic:{d}", "average:{d}")
CALIBRATED = ("plain", "lookup:4", "lookup:8", "model:2")  # policies whose replays are compared with live runs
SLOWER = 20
MEASURED = 10  # prompts after which it is measured again what steps cost: on a machine with neighbours that changes within minutes


class Writer:
    """Writes prompts with one runtime under one controller."""

    def __init__(self, rt: Runtime, controller: Controller | None = None, speculation: Any = "auto") -> None:
        self.rt, self.controller, self.speculation = rt, controller or rt.engine.controller, speculation
        for model in (rt.engine.target, *(getattr(part, "model", None) for part in rt.engine.drafters.values())):
            if rows := getattr(model, "rows", None):
                rows.reuse = False

    def __call__(self, prompt: prompts.Prompt, max_tokens: int) -> Sequence:
        engine = self.rt.engine
        before, engine.controller = engine.controller, self.controller
        try:
            request = self.rt.request(
                prompt.encode(self.rt.tokenizer), max_tokens=max_tokens, temperature=prompt.temperature, seed=1, speculation=self.speculation
            )
            seq = engine.submit(request)
            while seq.finish_reason is None:
                engine.advance([seq])
            return seq
        finally:
            engine.controller = before


def seconds_per_token(seq: Sequence) -> float:
    """Of all steps, without the target's prefill."""
    return sum(r.reading.seconds - r.seconds.get("prefill", 0.0) for r in seq.records) / max(seq.produced, 1)


def schedule(
    count: int = 5, max_tokens: int = 256, rounds: int = 3, progress: Callable[[str], None] = print, *, target: str | None = None,
    draft: str | None = None, trace: Path | None = None, **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """The live table, and the same policies replayed on a trace recorded with the same runtime."""
    settings = {"compile": "wait", "dtype": "bfloat16", **settings, "rows": 1}
    folders = (target or reference.target(), draft or reference.draft())
    plain = outrider.load(folders[0], [], **settings)
    alone, fast = (outrider.load(folders[0], [*some, f"model:{folders[1]}"], **settings, profile="off") for some in ([], ["lookup"]))
    tables = fast.keeper.tables  # type: ignore[union-attr]
    asked = prompts.readable(fast, count)
    progress("measuring costs")
    _measure(fast, tables, repeats=20)
    _measure(alone, alone.keeper.tables)  # type: ignore[union-attr]
    progress("recording a trace")
    taped = replay.record(fast, asked, max_tokens, tables.costs, lambda at: progress(f"recording {at}"))
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
    times, why, think = _interleaved(
        contenders, asked, max_tokens, rounds, progress, lambda: found.append(_rested([plain, alone, fast], Tables(tables.bits, Costs({}))))
    )
    taped = replace(taped, costs=reduce(lambda some, more: merged(some, more, {}), found))  # what steps cost while they were timed
    if trace:
        taped.save(trace)
    rows = [{"prompt": p.id, "category": p.category, **{name: times[name][p.id] for name in contenders}} for p in asked]
    return {
        "where": provenance(), "settings": {"prompts": count, "max_tokens": max_tokens, "rounds": rounds, "target": _name(target), "draft": _name(draft), **settings},
        "live": _table(rows, [p.category for p in asked], list(contenders)), "replayed": replayed(taped, None, known),
        "calibration": _calibration(taped, rows), "reasons": dict(why), "microseconds": think, "rows": rows,
        "ledger": {"stalls": fast.engine.controller.ledger.stalls, "debts": fast.engine.controller.ledger.debts},  # type: ignore[attr-defined]
    }  # fmt: skip


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
) -> tuple[dict[str, dict[str, float]], Counter[str], dict[str, float]]:
    """Median seconds per token by contender and prompt; reasons of the adaptive steps; microseconds a step of deciding. `measure` is called before
    each round, and in it after so many prompts (MEASURED)."""
    names, found, why = list(contenders), {name: {p.id: list[float]() for p in asked} for name in contenders}, Counter[str]()
    deciding: dict[str, list[float]] = {PLAIN: [], ADAPTIVE: [], LOOKING: []}
    for turn in range(rounds):
        for i, prompt in enumerate(asked):
            if i % MEASURED == 0:
                measure()
            progress(f"round {turn + 1} of {rounds}: {prompt.id}")
            for name in (names + names)[(i + turn) % len(names) :][: len(names)]:
                seq = contenders[name](prompt, max_tokens)
                found[name][prompt.id].append(seconds_per_token(seq))
                if name == ADAPTIVE:
                    why.update(r.reason for r in seq.records)
                if name in deciding:
                    deciding[name] += [r.seconds["choose"] + r.seconds["draft"] for r in seq.records]
                    deciding[LOOKING] += [r.seconds["look"] for r in seq.records if "look" in r.seconds]
    return (
        {name: {p: median(times) for p, times in by.items()} for name, by in found.items()},
        why,
        {name: 1e6 * median(x or [0.0]) for name, x in deciding.items()} | {MEAN: 1e6 * mean(deciding[ADAPTIVE])},
    )


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


def replayed(taped: replay.Trace, names: list[str] | None = None, state: dict[str, Any] | None = None) -> dict[str, dict[str, float]]:
    """Policies and oracles on the trace, times as fast as plain."""
    tier = replay.tier_of(taped)
    fixed_plans = [f"{d}:{k}" for d in policies.singly_and_together(taped.drafters) for k in FIXED]
    usual = [*fixed_plans, *(r.format(d=d) for d in taped.drafters for r in REPLAYED), "ucb1", ADAPTIVE]
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


def _calibration(taped: replay.Trace, rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Replayed over live time per token of fixed policies, by their ratio to plain: the machine's pace cancels."""
    tier, out = replay.tier_of(taped), {}
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


class Slow:
    """A drafter that takes SLOWER times as long as another, which it is otherwise."""

    queues = False  # it is drafting alone that takes longer

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def extend(self, *how: Any, **more: Any) -> Draft:
        start = time.perf_counter()
        out: Draft = self.drafter.extend(*how, **more)
        end = time.perf_counter() + (SLOWER - 1) * (time.perf_counter() - start)
        while time.perf_counter() < end:
            pass
        return out


def guarantee(count: int = 1, max_tokens: int = 256, rounds: int = 7, progress: Callable[[str], None] = print, **settings: Any) -> dict[str, Any]:
    """Total decode times beside plain's, paired, with drafters that cannot help: random weights, SLOWER times slower, open-ended text at T = 1. The
    promise is (1 + limit) x plain + GRANT plain steps, and for a drafter that reads the prompt READING of what the target took to."""
    settings = {"compile": "wait", "dtype": "bfloat16", **settings, "rows": 1}
    target, rows = reference.target(), []
    with tempfile.TemporaryDirectory() as folder:
        random = _random_weights(Path(folder))
        plain, usual = (
            outrider.load(target, [], **settings),
            outrider.load(target, ["lookup", f"model:{reference.draft()}"], **settings, profile="off"),
        )
        spec = usual.engine.target.spec
        blind, _, _ = models.load_model(
            random, name="random", device=spec.device, dtype=spec.dtype, rows=1, chunk=512, compile="off", context=spec.context, clip=True
        )
        useless = outrider.load(target, [ModelDrafter(blind, "random", spec.vocab_size)], **settings, profile="off")
        slow_part = usual.engine.drafters["model"]
        slow = outrider.load(target, [Slow(ModelDrafter(slow_part.model, "slow", spec.vocab_size))], **settings, profile="off")  # type: ignore[attr-defined]
        cases = {"random weights": (useless, 0), f"{SLOWER}x slower": (slow, 0), "open-ended, T = 1": (usual, 1)}
        for case, (rt, open_ended) in cases.items():
            for sampled in (False, True):  # as `outrider.load` does when nobody waits
                profiler.sweep(rt.engine, rt.keeper.tables, patience=4, sampled=sampled)  # type: ignore[union-attr]
            asked = prompts.load("open_ended")[: 3 * count] if open_ended else [p for c in prompts.CATEGORIES[:4] for p in prompts.load(c)[:count]]
            for prompt in asked:
                progress(f"{case}: {prompt.id}")
                rows.append({"case": case, "prompt": prompt.id, **_paired(Writer(plain), rt, prompt, max_tokens, rounds)})
                ledger = rt.engine.controller.ledger  # type: ignore[attr-defined]
                rows[-1] |= {"stalls": ledger.stalls, "debts": ledger.debts}
    return {"where": provenance(), "settings": {"rounds": rounds, "max_tokens": max_tokens, **settings}, "rows": rows}


def _random_weights(folder: Path) -> Path:
    """The draft's shape with weights that know nothing."""
    module = models.load_module(models.locate(reference.draft()), "float32")
    for p in module.parameters():
        if p.ndim > 1:
            p.data.normal_(0, 0.02)
    module.save_pretrained(folder)
    for file in Path(reference.draft()).glob("token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def _paired(plain: Writer, rt: Runtime, prompt: prompts.Prompt, max_tokens: int, rounds: int) -> dict[str, float]:
    """Medians over rounds of guarded / plain and of plain / plain, per token, and what was promised. `off`: of the guarded runtime, told not to
    speculate: one whose weights lie elsewhere in memory is not as fast as another, and that is not what the guard can see."""
    ratios, same, promise, off = [], [], [], []
    guarded, still = Writer(rt), Writer(rt, speculation="off")
    for _ in range(rounds):
        a, b, d, c = plain(prompt, max_tokens), guarded(prompt, max_tokens), still(prompt, max_tokens), plain(prompt, max_tokens)
        base = (seconds_per_token(a) + seconds_per_token(c)) / 2
        ratios.append(seconds_per_token(b) / base)
        off.append(seconds_per_token(d) / base)
        same.append(seconds_per_token(c) / seconds_per_token(a))
        reading = READING * b.records[0].seconds.get("prefill", 0.0) / base
        promise.append(1.05 + (GRANT + reading) / max(b.produced, 1))
    return {
        "ratio": median(ratios),
        "promised": median(promise),
        "off": median(off),
        "same": median(same),
        "same_low": min(same),
        "same_high": max(same),
    }


def markdown(result: dict[str, Any]) -> str:
    """Live and replayed tables, calibration, reasons."""
    parts = [lines("live, times as fast as plain", result["live"]), lines("replayed", result["replayed"])]
    parts.append("| policy | replayed / plain | live / plain | error |\n|---|---|---|---|\n" + "\n".join(
        f"| {name} | {c['replayed']:.3f} | {c['live']:.3f} | {c['error']:+.1%} |" for name, c in result["calibration"].items()))  # fmt: skip
    parts.append("Reasons of adaptive steps: " + ", ".join(f"{why} {n}" for why, n in sorted(result["reasons"].items(), key=lambda kv: -kv[1])) + ".")
    think, ledger = result["microseconds"], result["ledger"]
    parts.append(f"Deciding (and trimming), median of a step: {think[ADAPTIVE]:.0f} us (mean {think[MEAN]:.0f}: it is learned some steps at a time), of which {think[PLAIN]:.0f} are there without a controller; "
                 f"lookup's reading of what is new in the text, where it was asked, {think[LOOKING]:.0f} us beside. "
                 f"Stalls {ledger['stalls']}, debts {ledger['debts']}.")  # fmt: skip
    return "\n\n".join(parts)


def lines(title: str, table: dict[str, dict[str, float]]) -> str:
    columns = list(next(iter(table.values())))
    out = [f"| {title} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in table.items():
        out.append(f"| {name} | {' | '.join(f'{row[c]:.2f}' if row[c] < 100 else f'{row[c]:.0f}' for c in columns)} |")
    return "\n".join(out)


def guarantee_markdown(result: dict[str, Any]) -> str:
    lines = ["| case | prompt | time / plain | promised | off / plain | plain / plain | its spread | debts |", "|---|---|---|---|---|---|---|---|"]
    for r in result["rows"]:
        spread = f"{r['same_low']:.2f}..{r['same_high']:.2f}"
        lines.append(
            f"| {r['case']} | {r['prompt']} | {r['ratio']:.3f} | {r['promised']:.3f} | {r['off']:.3f} | {r['same']:.3f} | {spread} | {r['debts']} |"
        )
    return "\n".join(lines)


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
