"""What a forward of several columns costs: ours, compiled, beside stock's eager one on the same weights and the same number of tokens in the
cache, and the draft model's.

All are timed in turn, each in calls one after the other of which the first are not counted: a forward among others of its width, as in a text that
is written so. Ratios are those of one round, for between minutes a machine differs by more. Arbitrary tokens, the same for all: what a forward takes
does not hang on them.
"""

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import torch
from transformers import DynamicCache

import outrider
from outrider import reference
from outrider.bench import peers
from outrider.bench.report import provenance, save_as
from outrider.bench.synthetic import block
from outrider.core.errors import OutriderError
from outrider.measure import machine
from outrider.models.hf import HFModel

WIDTHS, STOCK_WIDTHS, USED = (1, 2, 4, 8, 16), (1, 8), (64, 192, 448)
COLD, CALLS = 8, 8  # calls one after the other that find the caches as others left them; and that are timed
SIDE = 1024  # of the matrices whose product tells how much the machine multiplies
CHAIN = 4  # forwards of the draft model after one of the target
DRAFT = "draft"
Folder = str | os.PathLike[str] | None
Step = Callable[[], object]


def widths(
    rounds: int = 20, progress: Callable[[str], None] = print, *, target: Folder = None, draft: Folder = None, **settings: Any
) -> dict[str, Any]:
    """Seconds of a forward by tokens in the cache and columns, of every round, and what served ours; `settings`: of outrider.load.

    Raises OutriderError where the models' context holds none of USED.
    """
    settings = {"compile": "wait", "dtype": "bfloat16", **settings, "rows": 1}
    folders = (target or reference.target(), draft or reference.draft())
    rt = outrider.load(folders[0], [f"model:{folders[1]}"], **settings, profile="off")
    ours: Any = rt.engine.target
    small: Any = rt.engine.drafters["model"].model  # type: ignore[attr-defined]
    stock = peers.Stock(*folders, ours.spec.dtype, device=ours.spec.device).target
    most = min(ours.spec.context, small.spec.context) - max(WIDTHS)
    if most < min(USED):
        raise OutriderError(
            f"a context of {most + max(WIDTHS)} tokens is too short", f"{min(USED)} and {max(WIDTHS)} columns are timed", "other models"
        )
    rows, tiers, bound = list[dict[str, Any]](), set[str](), limits(ours)
    for used in [used for used in USED if used <= most]:
        kinds = _kinds(ours, small, stock, used, tiers)
        rows.append({"used": used, "seconds": _in_turn(kinds, rounds, f"{used} tokens in the cache", progress)})
    where = {**provenance(), "settings": {k: str(v) for k, v in settings.items()}}
    left = [used for used in USED if used > most]
    rows = [{**row, "ratios": ratios(row["seconds"])} for row in rows]
    return {
        "where": where,
        "served_by": sorted(tiers),
        "left_out": left,
        "limits": bound,
        "multiplying": {w: multiplying(bound, w) for w in WIDTHS},
        "rows": rows,
    }


def limits(model: HFModel) -> dict[str, float]:
    """What a forward has to do, as of a dense model: the bytes of its weights and the multiply-adds of a column, and how many of each this machine
    reads and does in a second (of two square matrices, in the model's dtype or float32, whichever is quicker)."""
    module: Any = model.module
    weights, table, head = list(module.parameters()), module.get_input_embeddings().weight, module.get_output_embeddings()
    looked_up = 0 if head is not None and head.weight is table else table.numel()  # of this one line is read, and nothing multiplied
    return {
        "bytes": float(sum(w.nbytes for w in weights) - looked_up * table.element_size()),
        "column": float(sum(w.numel() for w in weights) - looked_up),
        "bytes_a_second": machine.bandwidth(table.device),
        "products_a_second": max(_products(dtype, table.device) for dtype in {table.dtype, torch.float32}),
    }


def _products(dtype: torch.dtype, device: torch.device) -> float:
    """Multiply-adds a second."""
    x = torch.ones(SIDE, SIDE, dtype=dtype, device=device)

    def product() -> object:
        return torch.mm(x, x)[0, 0].item()  # which waits for it

    return float(SIDE**3 / min(_times(product, COLD)))


def multiplying(bound: dict[str, float], columns: int) -> float:
    """Seconds of a forward that does nothing but multiply, and that as fast as square matrices are multiplied. (What is read is no such bound: caches keep
    some.)"""
    return columns * bound["column"] / bound["products_a_second"]


def _kinds(ours: HFModel, small: HFModel, stock: Any, used: int, tiers: set[str]) -> dict[str, Callable[[], float]]:
    """What is timed behind `used` tokens, by name; what serves ours is added to `tiers`."""
    for model in (ours, small):
        _times(partial(model._forward, block(model, 0, used)), 1)
    eager = _Eager(stock, used)
    kinds = {f"ours {w}": _mean_of(_ours(ours, used, w, tiers)) for w in WIDTHS} | {f"stock {w}": _mean_of(partial(eager, w)) for w in STOCK_WIDTHS}
    return kinds | {DRAFT: _chain(_ours(ours, used, 1, tiers), _ours(small, used, 1, tiers))}


def _in_turn(kinds: dict[str, Callable[[], float]], rounds: int, about: str, progress: Callable[[str], None]) -> dict[str, list[float]]:
    """Seconds by kind, of each round, in rotating order; the first round warms up."""
    found, names = {name: list[float]() for name in kinds}, list(kinds)
    for turn in range(rounds + 1):
        progress(f"{about}: round {turn} of {rounds}")
        for name in (names + names)[turn % len(names) :][: len(names)]:
            took = kinds[name]()
            if turn:
                found[name].append(took)
    return found


def _ours(model: HFModel, used: int, width: int, tiers: set[str]) -> Step:
    """A forward of ours, to the best tokens on the host."""
    given = block(model, used, width)

    def step() -> object:
        found = model._forward(given)[1].tolist()
        tiers.add(model.meter.tier)
        return found

    return step


class _Eager:
    """Forwards of stock transformers behind `used` tokens, to the best tokens on the host."""

    def __init__(self, module: Any, used: int) -> None:
        self.module, self.cache = module, DynamicCache()
        ids = torch.arange(used + max(STOCK_WIDTHS), device=module.device)[None] % module.config.vocab_size
        self.more = ids[:, used:]
        self._forward(ids[:, :used])

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.module(input_ids=ids, past_key_values=self.cache, use_cache=True).logits
        return out

    def __call__(self, width: int) -> list[int]:
        found: list[int] = self._forward(self.more[:, :width])[0].argmax(-1).tolist()
        self.cache.crop(-width)
        return found


@torch.inference_mode()
def _times(step: Step, calls: int) -> list[float]:
    """Seconds of so many calls."""
    took = list[float]()
    for _ in range(calls):
        start = time.perf_counter()
        step()
        took.append(time.perf_counter() - start)
    return took


def _mean_of(step: Step) -> Callable[[], float]:
    """The mean of CALLS calls, after COLD that are not counted."""
    return lambda: mean(_times(step, COLD + CALLS)[COLD:])


def _chain(target: Step, draft: Step) -> Callable[[], float]:
    """One of CHAIN forwards of the draft model, after one of the target, which drove its weights out of the caches."""

    def timed() -> float:
        _times(target, 1)
        return mean(_times(draft, CHAIN))

    return timed


def ratios(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Lower quartile, median and upper quartile over rounds, by name: "to one N", N columns of ours over one; "stock N", stock's over ours; and a draft
    model's forward over the target's."""
    one = seconds["ours 1"]
    over = {f"to one {w}": (seconds[f"ours {w}"], one) for w in WIDTHS}
    over |= {f"stock {w}": (seconds[f"stock {w}"], seconds[f"ours {w}"]) for w in STOCK_WIDTHS}
    over[DRAFT] = (seconds[DRAFT], one)
    return {name: quantiles([a / b for a, b in zip(*pair, strict=True)], n=4, method="inclusive") for name, pair in over.items()}


def markdown(result: dict[str, Any]) -> str:
    lines = [
        "| tokens in the cache | columns | ours, ms | multiplying alone, ms | to one column | quartiles | stock, eager, ms | stock / ours | quartiles |",
        "|---" * 9 + "|",
    ]
    drafts = list[str]()
    for row in result["rows"]:
        for w in WIDTHS:
            low, middle, high = row["ratios"][f"to one {w}"]
            beside = " - | - | - |"
            if w in STOCK_WIDTHS:
                least, times, most = row["ratios"][f"stock {w}"]
                beside = f" {1e3 * median(row['seconds'][f'stock {w}']):.2f} | {times:.2f} | {least:.2f}..{most:.2f} |"
            ms = 1e3 * median(row["seconds"][f"ours {w}"])
            lines.append(f"| {row['used']} | {w} | {ms:.2f} | {1e3 * result['multiplying'][w]:.2f} | {middle:.2f} | {low:.2f}..{high:.2f} |{beside}")
        low, middle, high = row["ratios"][DRAFT]
        drafts.append(f"{middle:.3f} ({low:.3f} to {high:.3f}) behind {row['used']} tokens")
    told = f"Ours served by: {', '.join(result['served_by'])}. A forward of the draft model, one of {CHAIN} in a row, takes of one of the target: {', '.join(drafts)}."
    short = f" Not timed behind {', '.join(map(str, result['left_out']))} tokens, which the context does not hold." if result["left_out"] else ""
    return "\n".join([*lines, "", told + short, "", _bounds(result["limits"])])


def _bounds(limits: dict[str, float]) -> str:
    return (
        f"A forward reads {limits['bytes'] / 1e6:.0f} MB of weights; a sum over memory reads {limits['bytes_a_second'] / 1e9:.1f} GB/s here, and caches "
        f"keep some. A column is {limits['column'] / 1e6:.1f} M multiply-adds, of which a product of two square matrices does "
        f"{limits['products_a_second'] / 1e9:.0f} G/s: what multiplying alone takes. Reading, attention, norms and waiting come on top."
    )


def save(result: dict[str, Any], folder: Path) -> None:
    """widths.json and .md below `folder`."""
    save_as(folder, "widths", json.dumps(result, indent=1), markdown(result))
