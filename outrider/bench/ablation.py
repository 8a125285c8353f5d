"""Which pass pays, by how much: a naive program, and the same with one pass more at a time, in one run, interleaved.

The program asks lookup twice, as pipelines put together from parts do, and the draft model once; the plan is fixed (lookup 8, model
4) until a profile fills it. Three settings: the six categories; long contexts; text that is drafted badly. Plain has no drafter
loaded. Also what making a step costs: a plan's passes and code, and finding it again; and, for contexts that the pair does not reach,
what wider steps of a larger random-weight shape cost (SYNTHETIC).
"""

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import outrider
from outrider import reference
from outrider.bench import prompts, synthetic
from outrider.bench.report import provenance, save_as
from outrider.bench.schedule import PLAIN, Writer, Written
from outrider.compiler.jit import Jit
from outrider.compiler.opt import PLAIN as FACTS
from outrider.compiler.passes.specialize import plan_of, profiled
from outrider.compiler.pipeline import FRONT
from outrider.control.fixed import fixed
from outrider.core.errors import OutriderError
from outrider.core.sockets import Controller
from outrider.core.types import Plan
from outrider.ir.text import parse
from outrider.runtime import profiler
from outrider.runtime.door import Runtime

NAIVE = """outrider.program @naive {
  %text = outrider.context
  %a = outrider.propose "lookup" on %text depth ? width ? : point
  %b = outrider.propose "model" on %text depth ? width ? : point
  %c = outrider.propose "lookup" on %text depth ? width ? : point
  %never = outrider.propose "model" on %text depth 1 width 2 : point
  %draft = outrider.union %b, %a, %c
  %kept = outrider.prune %draft budget ?
  %scores = outrider.score %kept on %text by "target"
  %outcome = outrider.accept %kept, %scores by "RULE"
  outrider.commit %outcome
}
"""
FIXED = "lookup:8 model:4"
EXIT = "early-exit:3"
WHOLE = tuple(name for name in FRONT if name != "inline-early-exit")
STEPS = ("canonicalize", "cse", "merge-tries", "dce")  # the program has no relay and no early exit
LONG = 3960  # tokens of a long prompt: with what is written after it nearly the pair's 4,096
BEYOND = ("100m", (4096, 8192, 16384))
ABROAD = (
    "Der alte Leuchtturmwärter zählte jeden Abend die Schiffe, die", "Le mardi, la boulangère pesait la farine en chantant et",
    "Spectral gap estimates for sparse random digraphs imply that", "WHEREAS the Lessee shall, upon thirty days' written notice,",
    "La temperatura del mosto no debe pasar de dieciocho grados porque", "Q3 revenue: 4.2m; churn: 1.9%; guidance withdrawn because",
)  # fmt: skip


class Stage(Writer):
    """A Writer whose engine runs steps of its own."""

    def __init__(self, rt: Runtime, controller: Controller, jit: Jit) -> None:
        super().__init__(rt, controller)
        self.jit = jit

    def __call__(self, prompt: prompts.Prompt, max_tokens: int) -> Written:
        engine = self.rt.engine
        before, engine.jit = engine.jit, self.jit
        try:
            return super().__call__(prompt, max_tokens)
        finally:
            engine.jit = before


def _jit(rt: Runtime, front: tuple[str, ...], hot: int | None = None, back: tuple[str, ...] = ("specialize",)) -> Jit:
    bits = rt.engine.bits
    draws = {name: getattr(part, "draws", True) for name, part in rt.engine.drafters.items()}
    return Jit([[n] for n in bits], draws, bits, front=front, back=back, hot=hot, source=lambda rule: parse(NAIVE.replace("RULE", rule)))


def contenders(rt: Runtime, chosen: Plan) -> dict[str, Writer]:
    """One pass more at a time; then the plan of a profile, the order of costs, generated code, and the scheduler."""
    plan, back = plan_of(FIXED), ("specialize", "canonicalize", "dce")
    out: dict[str, Writer] = {"no passes": Stage(rt, fixed(plan), _jit(rt, ()))}
    for i, name in enumerate(STEPS, 1):
        out[f"+ {name}"] = Stage(rt, fixed(plan), _jit(rt, STEPS[:i]))
    out["+ specialize{profile}"] = Stage(rt, fixed(chosen), _jit(rt, STEPS, back=back))
    out["+ schedule"] = Stage(rt, fixed(chosen), _jit(rt, STEPS, back=(*back, "schedule")))
    out["+ lower, codegen"] = Stage(rt, fixed(chosen), _jit(rt, STEPS, 0, (*back, "schedule", "lower")))
    out["all, adaptive"] = Writer(rt)
    return out


def settings(rt: Runtime, count: int, long: int) -> dict[str, list[prompts.Prompt]]:
    """Prompts by setting: the six categories; stories, code and texts to copy behind others of their kind, nearly `long` tokens in all; what the pair
    was never shown, at temperature 1."""
    mixed = [p for c in prompts.CATEGORIES for p in prompts.load(c)[:count]]
    far = [_behind(rt, prompt, long) for c in ("story", "code", "summarise_copy") for prompt in prompts.load(c)[:count]]
    low = [prompts.Prompt(f"abroad-{n}", "abroad", text, None, 1.0) for n, text in enumerate(ABROAD)]
    return {"mixed": mixed, "long": far, "low acceptance": low}


def _behind(rt: Runtime, prompt: prompts.Prompt, long: int) -> prompts.Prompt:
    """The same behind as many others of its kind, in turn, as `long` tokens hold: of a chat, in its last message. Raises OutriderError where that is
    less than half as long."""
    others, longer = [_said(p) for p in prompts.load(prompt.category) if p.id != prompt.id], prompt
    for text in itertools.cycle(filter(None, others)):
        said = f"{text}\n\n{_said(longer)}"
        before = prompt.messages and (*prompt.messages[:-1], {**prompt.messages[-1], "content": said})
        more = prompts.Prompt(f"{prompt.id} long", prompt.category, None if before else said, before, 0.0)
        if len(more.encode(rt.tokenizer)) > long:
            break
        longer = more
    if longer is prompt or 2 * len(longer.encode(rt.tokenizer)) < long:
        raise OutriderError(
            f"{prompt.id} cannot be made {long} tokens long", "it, or others of its kind, are too long, or these are empty", "a larger --long"
        )
    return longer


def _said(prompt: prompts.Prompt) -> str:
    """Its text; of a chat, its last message's."""
    return prompt.messages[-1]["content"] if prompt.messages else prompt.text or ""


def ablation(
    count: int = 2, max_tokens: int = 128, rounds: int = 3, long: int = LONG, progress: Callable[[str], None] = print,
    beyond: tuple[str, tuple[int, ...]] = BEYOND, **how: Any,
) -> dict[str, Any]:  # fmt: skip
    """Ratios to plain by setting and contender, of `rounds` rounds. beyond: a shape of bench.synthetic, and the contexts it is timed at."""
    how = {"compile": "wait", "dtype": "bfloat16", **how, "rows": 1}
    plain = outrider.load(reference.target(), [], **how)
    fast = outrider.load(reference.target(), ["lookup", f"model:{reference.draft()}"], **how, profile="off")
    tables = fast.keeper.tables  # type: ignore[union-attr]
    progress("measuring costs")
    for sampled in (False, True):
        profiler.sweep(fast.engine, tables, patience=10, repeats=20, sampled=sampled)
    asked = settings(fast, count, long)
    for prompt in prompts.load("story")[-2:] + prompts.load("code")[-2:]:  # what a first user would have left in the profile
        Writer(fast)(prompt, max_tokens)
    chosen = profiled(tables.state(), ["lookup", "model"])
    found: dict[str, Any] = {}
    for setting, some in asked.items():
        writers = {PLAIN: Writer(plain), **contenders(fast, chosen)}
        found[setting] = _run(writers, some, max_tokens, rounds, lambda at, s=setting: progress(f"{s}: {at}"))  # type: ignore[misc]
    return {"where": provenance(), "settings": {"prompts": count, "max_tokens": max_tokens, "rounds": rounds, "long": long, "plan": FIXED,
            "profiled": [list(d) for d in chosen.drafters], **how}, "table": found, "making": making(fast),
            "inlined": inlined(max(count // 2, 1), max_tokens, rounds, progress, how),
            "beyond": synthetic.steps(beyond[0], (1, 2, 4, 8), beyond[1], compile=how["compile"] != "off", progress=progress)}  # fmt: skip


def _run(writers: dict[str, Writer], asked: list[prompts.Prompt], max_tokens: int, rounds: int, progress: Callable[[str], None]) -> dict[str, Any]:
    names = list(writers)
    seconds: dict[str, dict[str, list[float]]] = {n: {p.id: [] for p in asked} for n in names}
    nodes: dict[str, list[float]] = {n: [] for n in names}
    accepted: dict[str, list[int]] = {n: [0, 0] for n in names}
    for turn in range(rounds):
        for i, prompt in enumerate(asked):
            progress(f"round {turn + 1} of {rounds}, {prompt.id}")
            for name in (names + names)[(i + turn) % len(names) :][: len(names)]:
                seq, pace = writers[name](prompt, max_tokens)
                seconds[name][prompt.id].append(pace)
                nodes[name].append(sum(sum(r.drafted) for r in seq.records) / len(seq.records))
                accepted[name][0] += sum(sum(r.accepted) for r in seq.records)
                accepted[name][1] += sum(sum(r.drafted) for r in seq.records)
    out = {}
    for name in names:
        by_round = [geometric_mean([seconds[PLAIN][p.id][t] / seconds[name][p.id][t] for p in asked]) for t in range(rounds)]
        whole = geometric_mean([median(seconds[PLAIN][p.id]) / median(seconds[name][p.id]) for p in asked])
        out[name] = {"ratio": whole, "low": min(by_round), "high": max(by_round), "nodes": sum(nodes[name]) / len(nodes[name]),
                     "acceptance": accepted[name][0] / max(accepted[name][1], 1)}  # fmt: skip
    return out


def inlined(count: int, max_tokens: int, rounds: int, progress: Callable[[str], None], how: dict[str, Any]) -> dict[str, Any]:
    """The two passes that inline, each on a pipeline that has what it inlines, by the six categories. Early exits run eagerly, beside eager
    plain steps: compiled steps are whole."""
    asked = [p for c in prompts.CATEGORIES for p in prompts.load(c)[:count]]
    eager = {**how, "compile": "off"}
    plain, exits = outrider.load(reference.target(), [], **eager), outrider.load(reference.target(), [EXIT], **eager, depth=2)
    staged = outrider.load(reference.target(), [f"staged:lookup>model:{reference.draft()}"], **how, depth=4)
    fast = outrider.load(reference.target(), [], **how)
    both = Plan((("lookup", 8, 1), ("model", 4, 1)))
    tables = {
        "eager, early exit": {
            PLAIN: Writer(plain), f"{EXIT}, two ahead": Stage(exits, fixed(Plan(((EXIT, 2, 1),))), _usual(exits, [[EXIT]], WHOLE)),
            "+ inline-early-exit": Stage(exits, fixed(Plan(((EXIT, 2, 1),))), _usual(exits, [[EXIT]], FRONT)),
        },
        "staged": {
            PLAIN: Writer(fast), "model, four ahead": Stage(staged, fixed(Plan((("model", 4, 1),))), _usual(staged, [["model"]], FRONT)),
            "lookup and model side by side": Stage(staged, fixed(both), _usual(staged, [["lookup"], ["model"]], FRONT)),
            "lookup relayed to model": Stage(staged, fixed(both), _usual(staged, [["lookup", "model"]], FRONT)),
        },
    }  # fmt: skip
    return {name: _run(writers, asked, max_tokens, rounds, lambda at, n=name: progress(f"{n}: {at}")) for name, writers in tables.items()}  # type: ignore[misc]


def _usual(rt: Runtime, stages: list[list[str]], front: tuple[str, ...]) -> Jit:
    draws = {name: getattr(part, "draws", True) for name, part in rt.engine.drafters.items()}
    return Jit(stages, draws, rt.engine.bits, front=front, hot=0)


def making(rt: Runtime, plans: int = 200, finds: int = 10_000) -> dict[str, float]:
    """Milliseconds from a plan to its generated step, passes included; microseconds to find it again. Medians."""
    engine = rt.engine
    jit = Jit([[n] for n in engine.bits], dict.fromkeys(engine.bits, True), engine.bits, hot=0)
    jit.module("greedy")
    took = []
    for n in range(plans):
        plan = Plan((("lookup", 1 + n % 16, 1 + n % 3), ("model", 1 + n // 16, 1)), n)
        start = time.perf_counter()
        jit.get("greedy", plan, FACTS)
        took.append(time.perf_counter() - start)
    found = []
    for _ in range(finds):
        start = time.perf_counter()
        jit.get("greedy", plan, FACTS)
        found.append(time.perf_counter() - start)
    return {"compile_ms": 1e3 * median(took), "worst_ms": 1e3 * max(took), "hit_us": 1e6 * median(found)}


def markdown(result: dict[str, Any]) -> str:
    table = result["table"]
    lines = [f"| times as fast as plain (low..high of rounds) | {' | '.join(table)} |", "|---" * (len(table) + 1) + "|"]
    for name in next(iter(table.values())):
        cells = [f"{t[name]['ratio']:.2f} ({t[name]['low']:.2f}..{t[name]['high']:.2f})" for t in table.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"| nodes verified a step, share accepted | {' | '.join(table)} |", "|---" * (len(table) + 1) + "|"]
    for name in next(iter(table.values())):
        cells = [f"{t[name]['nodes']:.1f}, {t[name]['acceptance']:.0%}" for t in table.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| pipelines to inline | times as fast as plain | nodes, share accepted |", "|---|---|---|"]
    for title, rows in result["inlined"].items():
        lines += [
            f"| {title}: {name} | {t['ratio']:.2f} ({t['low']:.2f}..{t['high']:.2f}) | {t['nodes']:.1f}, {t['acceptance']:.0%} |"
            for name, t in rows.items()
        ]
    made, plan = result["making"], " ".join(f"{n}:{d}" for n, d, _ in result["settings"]["profiled"]) or "plain"
    lines += ["", f"The profile's plan: {plan}. From a plan to its generated step {made['compile_ms']:.2f} ms (worst {made['worst_ms']:.1f}); found again "
              f"in {made['hit_us']:.2f} us."]  # fmt: skip
    lines += ["", synthetic.table(result["beyond"])]
    return "\n".join(lines)


def save(result: dict[str, Any], folder: Path) -> None:
    save_as(folder, "passes", json.dumps(result, indent=1), markdown(result))
