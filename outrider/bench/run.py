"""Paired speed runs over the six categories: stock transformers and ours, plain and speculative, in one process.

Every prompt is written once by every contender before the next prompt, in rotating order; ratios are taken per prompt
and averaged geometrically. What is compared is the time of decoding per token emitted: all that came with the first
token, prefill included, is left out and told as the time to it. Texts may differ: in half precision near-ties flip, and
stock samples with other noise. Ours plain is written twice: the ratio of the two is the noise of everything else.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch

import outrider
from outrider import reference
from outrider.bench import peers, prompts
from outrider.bench.report import provenance, save_as
from outrider.bench.table import markdown
from outrider.core.config import QUANTISED, nearest
from outrider.core.errors import OutriderError
from outrider.core.types import TARGET
from outrider.measure import machine
from outrider.measure.device import DeviceMeter, waits
from outrider.measure.trace import repetition, stats
from outrider.models.load import pick_device
from outrider.runtime.door import Runtime

Folder = str | os.PathLike[str] | None
STOCK, OURS, AGAIN = f"stock {peers.PLAIN}", "ours plain", "ours plain again"
OWN = {f"ours own {bits} copy": bits for bits in QUANTISED}  # the target drafted by itself in fewer bits
FEWER = {f"ours plain {bits}": bits for bits in QUANTISED}  # a target in fewer bits, whose text is its own
DRAFTED: dict[str, tuple[str, ...]] = {
    OURS: (), "ours lookup": ("lookup",), "ours model": ("model",), "ours lookup+model": ("lookup", "model"),
    **dict.fromkeys(OWN, ("quantised",)), **dict.fromkeys(FEWER, ()), AGAIN: (),
}  # fmt: skip
CONTENDERS = (*(f"stock {name}" for name in peers.SETTINGS), *DRAFTED)
BUSY = "import os; of = os.getppid()\nwhile os.getppid() == of: sum(range(10000))"  # until who asked for it is gone
WARM = prompts.Prompt("warm", "story", "Warm up the caches", None, 0.0)


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt written by one contender."""

    prompt: str
    category: str
    contender: str
    tokens: list[int]
    first_tokens: int  # those that came with the first one
    seconds: float  # from the request to its end
    first_token_seconds: float
    # Of what followed the first: calls of the target, guesses, and seconds of the models' forwards alone (on a CPU: a GPU's run on after they were asked for).
    calls: int
    drafted: int
    accepted: int
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    tiers: dict[str, int] = field(default_factory=dict)
    joules: float | None = None  # of all

    @property
    def later(self) -> int:
        return len(self.tokens) - self.first_tokens

    @property
    def decode_seconds(self) -> float:
        return self.seconds - self.first_token_seconds


def speed(
    count: int = 5, max_tokens: int = 256, depth: int = 4, progress: Callable[[str], None] = print, *, target: Folder = None, draft: Folder = None,
    contenders: tuple[str, ...] | None = None, beside: int = 0, **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """Rows, a summary by category and contender, and where it was measured. `count`: prompts of each category; `beside`: other processes that
    compute meanwhile; `settings`: of outrider.load, where the CPU's default is bfloat16 and to wait for compiled steps."""
    where = pick_device(settings.get("device", "auto"))
    names = _known(contenders, where.type)
    if beside < 0:
        raise OutriderError(f"beside={beside} is no number of processes", "", "0 or more")
    settings = {"compile": "wait", "dtype": "bfloat16" if where.type == "cpu" else "auto", **settings, "rows": 1, "depth": depth}
    folders = (target or reference.target(), draft or reference.draft())
    write = Writers(names, *folders, settings)
    for name in names:
        write(name, WARM, 16)
    rows: list[Row] = []
    asked = prompts.readable(write.plain, count)
    with busy(beside):
        for i, prompt in enumerate(asked):
            progress(f"{prompt.category}: {i + 1} of {len(asked)} prompts")
            write.rest()
            rows += [write(name, prompt, max_tokens) for name in (names + names)[i % len(names) :][: len(names)]]
    told = {"target": _called(target), "draft": _called(draft), "prompts": count, "max_tokens": max_tokens, "beside": beside, "prefix_reuse": False}
    told |= settings
    waited = {name: waits_of(write, name, where) for name in names if name in DRAFTED} if where.type == "cuda" else {}
    return {
        "where": provenance(), "settings": told, "tiers": _tiers(rows), "summary": (table := summary(rows, waited)),
        "energy": write.energy, "roofline": roofline(table, write.weights, where),
        "rows": [{**asdict(row), "tokens": len(row.tokens), "text": _digest(row.tokens)} for row in rows],
    }  # fmt: skip


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many other processes compute as long as this lasts, each in a session of its own, as another program would."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) for _ in range(processes)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def _called(folder: Folder) -> str:
    """The name of a model in a report: the reference pair, or the last part of its path."""
    return "reference" if folder is None else Path(folder).name


def _known(contenders: tuple[str, ...] | None, device: str) -> tuple[str, ...]:
    """Those that are asked for, or all that can be there."""
    there = [name for name in CONTENDERS if device == "cpu" or "int4" not in name]
    for name in contenders or ():
        if name not in CONTENDERS:
            raise nearest(name, CONTENDERS, "contender")
        if name not in there:
            raise OutriderError(f"'{name}' cannot be measured here", "weights in 4 bits are multiplied on CPUs alone", "device='cpu', or others")
    return tuple(name for name in there if contenders is None or name in contenders)


class Writers:
    """What the contenders need, loaded once. Call it to have one of them write a prompt."""

    def __init__(self, names: tuple[str, ...], target: Folder, draft: Folder, settings: dict[str, Any]) -> None:
        self.plain = fresh(outrider.load(target, drafters=[], **settings))
        model: Any = self.plain.engine.target
        spec, self.weights, settings = model.spec, read_bytes(model.module), {**settings, "dtype": model.spec.dtype}
        self.meter, self.energy = DeviceMeter(model.device), ""
        self.ours = dict.fromkeys(DRAFTED, self.plain)
        for name in names:
            if name in OWN:
                self.ours[name] = fresh(outrider.load(target, drafters=[f"quantised:{OWN[name]}"], **settings))
            if name in FEWER:
                self.ours[name] = fresh(outrider.load(target, drafters=[], **{**settings, "quantise": FEWER[name]}))
        if some := [name for name in names if DRAFTED.get(name) and name not in OWN]:
            self.ours |= dict.fromkeys(some, fresh(outrider.load(target, drafters=["lookup", f"model:{draft}"], **settings)))
        if any(name not in DRAFTED for name in names):
            self.stock = peers.Stock(target or "", draft or "", spec.dtype, device=spec.device)

    def __call__(self, name: str, prompt: prompts.Prompt, max_tokens: int) -> Row:
        with self.meter.window() as read:
            row = self._written(name, prompt, max_tokens)
        self.energy = read[0].source
        return replace(row, joules=read[0].joules)

    def rest(self) -> None:
        """What loading measured in a busy moment is measured again."""
        for rt in set(self.ours.values()):
            rt.engine.rest()

    def _written(self, name: str, prompt: prompts.Prompt, max_tokens: int) -> Row:
        tokens = prompt.encode(self.plain.tokenizer)
        max_tokens = min(max_tokens, self.plain.engine.target.spec.context - len(tokens))  # for stock, too
        if name in DRAFTED:
            return _ours(self.ours[name], name, prompt, tokens, max_tokens)
        ends = set(self.plain.request(tokens).ends)
        w = self.stock.write(name.removeprefix("stock "), tokens, max_tokens, prompt.temperature, ends)
        calls, later = w.target_calls - 1, len(w.tokens) - w.first_tokens
        return Row(prompt.id, prompt.category, name, w.tokens, w.first_tokens, w.seconds, w.first_token_seconds, calls, w.drafted, later - calls)


def fresh(rt: Runtime) -> Runtime:
    """No prompt finds its cache filled by the contender before: stock has no such memory."""
    for model in (rt.engine.target, *(getattr(part, "model", None) for part in rt.engine.drafters.values())):
        if rows := getattr(model, "rows", None):
            rows.reuse = False
    return rt


def _ours(rt: Runtime, name: str, prompt: prompts.Prompt, tokens: list[int], max_tokens: int) -> Row:
    allowed, start = list(DRAFTED[name]) or "off", time.perf_counter()
    request = rt.request(tokens, max_tokens=max_tokens, temperature=prompt.temperature, seed=1, speculation=allowed)
    seq = rt.engine.submit(request)
    while not seq.produced:
        rt.engine.advance([seq])
    first, first_tokens = time.perf_counter(), seq.produced
    while seq.finish_reason is None:
        rt.engine.advance([seq])
    end, told = time.perf_counter(), stats(seq.records[1:], request.id)
    forward, known = told["forward_seconds"], pick_device(rt.engine.target.spec.device).type == "cpu"
    verify = forward.get(TARGET, 0.0)  # nothing, of a text that ended in its first step
    return Row(
        prompt.id, prompt.category, name, seq.generated, first_tokens, end - start, first - start, told["target_calls"], told["drafted"],
        told["accepted"], sum(forward.values()) - verify if known else None, verify if known else None,
        {f"{model} {tier}": n for model, count in told.get("tiers", {}).items() for tier, n in count.items()},
    )  # fmt: skip


def waits_of(write: Writers, name: str, device: torch.device) -> float:
    """How often a step of a contender of ours waits for the device, on average over a short text, the reading of its prompt included."""
    with waits(device) as found:
        row = write(name, WARM, 32)
    return len(found) / (row.calls + 1)


def summary(rows: list[Row], waited: dict[str, float] | None = None) -> list[dict[str, Any]]:
    """Figures per category and contender, and over all. waited: what `waits_of` says of contenders."""
    texts = {base: {r.prompt: r for r in rows if r.contender == base} for base in (STOCK, OURS)}
    names = [name for name in CONTENDERS if any(r.contender == name for r in rows)]
    out = []
    for category in (*prompts.CATEGORIES, "all"):
        for name in names:
            own = [r for r in rows if r.contender == name and category in (r.category, "all")]
            if own:
                told = {"waits_per_step": (waited or {}).get(name)}
                out.append({"category": category, "contender": name, "prompts": len(own), **_compared(own, texts), **_figures(own), **told})
    return out


def _compared(own: list[Row], texts: dict[str, dict[str, Row]]) -> dict[str, Any]:
    """Ratios of decode time per token and identical texts, against stock plain and ours plain."""
    out: dict[str, Any] = {}
    for base, label in ((STOCK, "stock_plain"), (OURS, "ours_plain")):
        pairs = [(texts[base][r.prompt], r) for r in own if r.prompt in texts[base]]
        ratios = sorted((_rate(r) / _rate(b), r.prompt) for b, r in pairs if b.later and r.later)
        out[f"against_{label}"] = {
            "ratio": geometric_mean([x for x, _ in ratios]), "worst": ratios[0][0], "worst_prompt": ratios[0][1], "best": ratios[-1][0],
            "best_prompt": ratios[-1][1], "pairs": len(ratios),
        } if ratios else None  # fmt: skip
        out[f"identical_to_{label}"] = sum(b.tokens == r.tokens for b, r in pairs) if pairs else None
    return out


def _rate(row: Row) -> float:
    """Tokens a second, after the first."""
    return row.later / row.decode_seconds


def _figures(own: list[Row]) -> dict[str, Any]:
    """What explains the ratios. Shares and milliseconds a step are of the sums over prompts."""
    calls, drafted, seconds = sum(r.calls for r in own), sum(r.drafted for r in own), sum(r.decode_seconds for r in own)
    split: dict[str, float] = {}
    if calls:
        split = {"step": 1e3 * seconds / calls}
        parts = {stage: [getattr(r, f"{stage}_seconds") for r in own] for stage in ("draft", "verify")}
        if None not in (*parts["draft"], *parts["verify"]):
            split |= {stage: 1e3 * sum(part) / calls for stage, part in parts.items()}
            split["host"] = split["step"] - split["draft"] - split["verify"]
    rates, joules = [_rate(r) for r in own if r.later], [r.joules for r in own]
    return {
        "tokens_per_second": geometric_mean(rates) if rates else None, "first_token_ms": 1e3 * median(r.first_token_seconds for r in own),
        "ms_per_step": split, "tokens_per_call": sum(r.later for r in own) / calls if calls else None,
        "acceptance_rate": sum(r.accepted for r in own) / drafted if drafted else None, "repetition": repetition([r.tokens for r in own]),
        "joules_per_token": None if None in joules else sum(x for x in joules if x) / sum(len(r.tokens) for r in own),
    }  # fmt: skip


def _digest(tokens: list[int]) -> str:
    return hashlib.blake2b(repr(tokens).encode(), digest_size=8).hexdigest()


def _tiers(rows: list[Row]) -> dict[str, dict[str, int]]:
    """By contender: what served the models' forwards, and how many steps."""
    ours = [name for name in DRAFTED if any(r.contender == name for r in rows)]
    return {name: dict(sum((Counter(r.tiers) for r in rows if r.contender == name), Counter())) for name in ours}


def read_bytes(module: Any) -> int:
    """Bytes of weights that one step of a module reads: all, but of an embedding that is not also the head only a row."""
    table, head = module.get_input_embeddings().weight, module.get_output_embeddings()
    return sum(int(p.nbytes) for p in module.parameters()) - (0 if any(table is p for p in head.parameters()) else int(table.nbytes))


def roofline(table: list[dict[str, Any]], weights: int, device: torch.device) -> dict[str, float] | None:
    """The rate at which a plain step of ours reads the weights, beside that of the device's memory; more than that is the cache's doing."""
    steps = [r["ms_per_step"].get("step") for r in table if (r["category"], r["contender"]) == ("all", OURS)]
    if not steps or not steps[0]:
        return None
    memory = machine.bandwidth(device) / 1e9
    return {"weight_bytes": weights, "plain_step_ms": steps[0], "weights_gb_s": weights / steps[0] / 1e6, "memory_gb_s": memory}


def save(result: dict[str, Any], folder: Path, name: str) -> None:
    """name.json (a line per row) and name.md below `folder`."""
    head = json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1)
    rows = ",\n  ".join(json.dumps(row) for row in result["rows"])
    where = ", ".join(f"{k} {v}" for k, v in {**result["where"], **result["settings"], "tiers": json.dumps(result["tiers"])}.items())
    save_as(folder, name, f'{head[:-2]},\n "rows": [\n  {rows}\n ]\n}}', f"{where}\n\n{markdown(result)}")
