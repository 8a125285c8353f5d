"""SYNTHETIC figures: steps of a large shape with random weights, and what an ASSUMED acceptance would make of them.

For shapes that are too large to download here. Times are measured; that drafts would be accepted is supposed, and every
table says so. Nothing here speaks of text.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.bench.report import provenance, save_as
from outrider.bench.run import read_bytes
from outrider.core.config import QUANTISED, nearest
from outrider.core.errors import OutriderError
from outrider.core.types import MAX_NODES
from outrider.measure import cost, machine
from outrider.models import load as models
from outrider.models.compiled import SHAPES as PACKAGES
from outrider.models.compiled import Compiled, Recipe, worth_freezing
from outrider.models.graphed import Graphs
from outrider.models.hf import HFModel
from outrider.models.kv import BUCKET, Block
from outrider.models.mapped import place_of
from outrider.models.quantised import quantised

LABEL = "SYNTHETIC: random weights, assumed acceptance"
ROUNDS = 5  # timed repeats of every width, widths taken in turn
ALONE = 3.0  # seconds of steps that are not timed: a builder was busy a moment ago, beside which steps have fewer threads
NOISE = 1 << 20  # random numbers drawn; weights repeat them


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool

    def config(self, context: int) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=self.ffn, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, max_position_embeddings=context, tie_word_embeddings=self.tied,
        )  # fmt: skip


SHAPES = {
    "tiny": Shape(64, 2, 4, 2, 128, 300, True),
    "100m": Shape(768, 12, 12, 4, 2048, 32_000, True),
    "1b": Shape(2048, 16, 32, 8, 8192, 128_256, True),
    "8b": Shape(4096, 32, 32, 8, 14_336, 128_256, False),
}


def steps(
    shape: str, widths: tuple[int, ...] = (1, 2, 4, 8, 16), contexts: tuple[int, ...] = (128, 2048, 8192), dtype: str = "bfloat16", *,
    alpha: float = 0.7, draft_cost: float = 0.05, compile: bool = False, device: str = "auto", quantise: str | None = None, progress: Callable[[str], None] = print,
) -> dict[str, Any]:  # fmt: skip
    """Seconds of a step by width and by tokens already in the cache, the rate at which it reads weights, and the speed-up
    of chains of width - 1 guesses. alpha: the rate at which each is ASSUMED to be accepted; draft_cost: seconds of one
    guess over a step of width 1, assumed too. Width 1 is always measured."""
    if shape not in SHAPES:
        raise nearest(shape, SHAPES, "shape")
    if dtype not in models.BYTES:
        raise nearest(dtype, models.BYTES, "dtype")
    if quantise not in (None, *QUANTISED):
        raise nearest(str(quantise), QUANTISED, "quantise")
    if not 0 <= alpha <= 1:
        raise OutriderError(f"alpha={alpha} is no rate of acceptance", "", "a number from 0 to 1")
    widths, where = tuple(sorted({1, *widths})), models.pick_device(device)
    models.refuse_bits({quantise}, where)
    progress(f"{LABEL}: building {shape}")
    model = build(SHAPES[shape], max(contexts) + max(widths), dtype, where, compile, quantise)
    weights, rows = read_bytes(model.module), []
    memory, alone = machine.bandwidth(where), time.perf_counter() + ALONE * compile
    while time.perf_counter() < alone:
        _time(model, contexts[0], widths)
    for used in contexts:
        progress(f"{LABEL}: {used} tokens in the cache")
        seconds, tiers = _time(model, used, widths)
        rows += [
            {"context": used, "width": w, "ms": 1e3 * s, "to_width_1": s / seconds[1], "weights_gb_s": weights / s / 1e9, "tier": tiers[w],
             "assumed": _assumed(alpha, draft_cost, w - 1, s / seconds[1])}
            for w, s in seconds.items()
        ]  # fmt: skip
    return {
        "label": LABEL, "where": provenance(), "shape": shape, "dtype": dtype, "device": str(where), "compile": compile, "quantise": quantise, "weight_bytes": weights,
        "memory_gb_s": memory / 1e9, "assumed_acceptance": alpha, "assumed_draft_cost": draft_cost, "rows": rows,
    }  # fmt: skip


def build(shape: Shape, context: int, dtype: str, device: torch.device, compile: bool = False, quantise: str | None = None) -> HFModel:
    """The model with one row, refused like any other where it does not fit."""
    config = shape.config(max(context, 256))  # the builder of compiled steps opens 256 tokens
    with torch.device("meta"):
        module: Any = LlamaForCausalLM(config).to(getattr(torch, dtype))
    weights = sum(int(p.nbytes) for p in module.parameters())
    cache = 2 * shape.layers * shape.kv_heads * (shape.hidden // shape.heads) * (context + MAX_NODES + 1) * models.BYTES[dtype]
    plan = models.MemoryPlan(weights, cache)
    models.refuse_too_large(plan, device, f"{LABEL}: the shape")
    module = module.to_empty(device=device)
    module.tie_weights()
    module.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    _fill(module)
    if not compile or device.type != "cpu":
        module = quantised(module, "synthetic", quantise) if quantise else module
        model = models.wrap(module, "synthetic", "", rows=1, context=context, plan=plan)
        if compile:
            model.compiled = Graphs(model.step)
            model.compiled.wait()
        return model
    with tempfile.TemporaryDirectory() as folder:
        return _compiled(module, plan, context, Path(folder), quantise)


@torch.no_grad()
def _fill(module: Any) -> None:
    """Random weights at the speed of copying: norms are one, the rest repeats some normal numbers."""
    noise = 0.02 * torch.randn(NOISE, generator=torch.Generator().manual_seed(0))
    for name, weight in module.named_parameters():
        if "norm" in name:
            weight.fill_(1.0)
            continue
        some = noise.to(weight.device, weight.dtype)
        for part in weight.view(-1).split(NOISE):
            part.copy_(some[: len(part)])


def _compiled(module: Any, plan: models.MemoryPlan, context: int, folder: Path, quantise: str | None) -> HFModel:
    """The model with its compiled steps, built as a loaded model's are; eager where the builder's copy would not fit."""
    free, disk, dtype = psutil.virtual_memory().available, shutil.disk_usage(folder).free, str(module.dtype).removeprefix("torch.")
    fits = free > 2 * plan.weights and disk > 2 * plan.weights
    if fits:
        module.save_pretrained(folder)
        module = models.load_module(folder, dtype, quantise) if quantise else module
    elif quantise:
        module = quantised(module, "synthetic", quantise)
    model = models.wrap(module, "synthetic", "", rows=1, context=context, plan=plan)
    if not fits:
        model.meter.tier = "eager:too-large-to-build"
        return model
    frozen = PACKAGES if quantise == "int4" else worth_freezing(plan.weights, max(free - plan.weights, 0))
    model.compiled = Compiled(Recipe(str(folder), dtype, torch.get_num_threads(), model.spec.vocab_size, frozen, quantise), model.step)
    model.compiled.wait()
    for made in (model.compiled.folder, *([place_of(folder, quantise, dtype)] if quantise else [])):
        shutil.rmtree(made)  # loaded by now, and of no use to anyone else
    return model


def block(model: HFModel, used: int, width: int) -> Block:
    """The forward of `width` tokens behind `used` of row 0, as `kv.Rows` would lay out a tail."""
    place = np.arange(used, used + width)
    table = np.stack([place % model.spec.vocab_size, place, place, place + 1, np.zeros(width, np.int64)], -1)
    return Block(0, table[None], min(-(-(used + width) // BUCKET) * BUCKET, model.rows.capacity))


@torch.inference_mode()
def _time(model: HFModel, used: int, widths: tuple[int, ...]) -> tuple[dict[int, float], dict[int, str]]:
    """Median seconds of a step by width, its best tokens on the host included, and what served it."""
    times: dict[int, list[float]] = {w: [] for w in widths}
    tiers: dict[int, str] = {}
    for _ in range(ROUNDS + 1):
        for w in widths:
            start = time.perf_counter()
            model._forward(block(model, used, w))[1].tolist()
            times[w].append(time.perf_counter() - start)
            tiers[w] = model.meter.tier
    return {w: median(t[1:]) for w, t in times.items()}, tiers


def _assumed(alpha: float, draft_cost: float, gamma: int, width_cost: float) -> dict[str, float]:
    """What gamma guesses a step would bring if each were accepted at rate alpha. width_cost: the measured step over that
    of width 1; `if_width_were_free` is the closed form of 2211.17192, which takes it for 1."""
    tokens = cost.expected_tokens(alpha, gamma)
    return {
        "tokens_per_step": tokens, "speedup": tokens / (width_cost + gamma * draft_cost), "if_width_were_free": cost.speedup(alpha, gamma, draft_cost),
    }  # fmt: skip


def _bits(result: dict[str, Any]) -> str:
    return f"{result['quantise']} and {result['dtype']}" if result["quantise"] else str(result["dtype"])


def table(result: dict[str, Any]) -> str:
    """The rows as Markdown under the label."""
    lines = [
        f"**{LABEL}.** Shape {result['shape']}, {_bits(result)} on {result['device']}, {result['weight_bytes'] / 1e9:.2f} GB of weights read a step; "
        f"a sum over memory: {result['memory_gb_s']:.1f} GB/s. Assumed: acceptance {result['assumed_acceptance']}, a guess costs {result['assumed_draft_cost']} of a plain step.",
        "", "| tokens in cache | width | ms a step | to width 1 | GB/s of weights | served by | assumed tokens a step | assumed speed-up | if width were free |",
        "|---" * 9 + "|",
    ]  # fmt: skip
    for r in result["rows"]:
        lines.append(
            f"| {r['context']} | {r['width']} | {r['ms']:.2f} | {r['to_width_1']:.2f} | {r['weights_gb_s']:.1f} | {r['tier']} "
            f"| {r['assumed']['tokens_per_step']:.2f} | {r['assumed']['speedup']:.2f}x | {r['assumed']['if_width_were_free']:.2f}x |"
        )
    return "\n".join(lines)


def save(result: dict[str, Any], folder: Path) -> None:
    """synthetic-SHAPE.json and .md below `folder`."""
    where = ", ".join(f"{k} {v}" for k, v in result["where"].items())
    name = "-".join(["synthetic", result["shape"], *([result["quantise"]] if result["quantise"] else [])])
    save_as(folder, name, json.dumps(result, indent=1), f"{where}\n\n{table(result)}")
