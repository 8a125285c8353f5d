"""Distillation: a small draft learns the target's distribution (Kullback-Leibler, every position, no temperature).

A share of what it reads is the target's own text, because that is what it will have to guess.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from outrider.core.errors import OutriderError
from outrider.train.corpus import ID, Streams
from outrider.train.pretrain import Schedule, common, export, held_out, new_model, train, whole


class Mixed(Streams):
    """Windows from the corpora, and with probability `own` from the target's own text."""

    def __init__(self, folder: Path, weights: dict[str, float], own: float, seed: int) -> None:
        super().__init__(folder, weights, "train", seed)
        self.own = own
        self.written = np.memmap(folder / "own.train.ids", dtype=ID, mode="r")

    def window(self, name: str, length: int) -> np.ndarray:
        if self.rng.random() >= self.own:
            return super().window(name, length)
        start = int(self.rng.integers(0, max(1, len(self.written) - length)))
        return np.resize(self.written[start : start + length], length).astype(np.int64)


def distil_loss(teacher: nn.Module) -> Callable[[nn.Module, Tensor], Tensor]:
    """Mean KL(teacher || student) in nats a position."""

    @torch.compile(dynamic=False)
    def known(ids: Tensor) -> Tensor:
        logits: Tensor = teacher(input_ids=ids, use_cache=False).logits
        return logits.log_softmax(-1)

    @torch.compile(dynamic=False)
    def loss(model: nn.Module, ids: Tensor, truth: Tensor) -> Tensor:
        guess = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        return F.kl_div(guess.flatten(0, 1), truth.flatten(0, 1).float(), log_target=True, reduction="batchmean")

    def both(model: nn.Module, ids: Tensor) -> Tensor:
        with torch.no_grad():
            truth = known(ids)
        return loss(model, ids, truth)

    return both


def distill(recipe: dict[str, Any], work: Path, device: str, progress: Callable[[str], None], piece: float = math.inf) -> None:
    """Train the recipe's draft against work/target, `piece` minutes at most now; when it is done, export it to work/draft."""
    teacher: Any = AutoModelForCausalLM.from_pretrained(work / "target", dtype=torch.bfloat16)
    teacher = whole(teacher).to(device).eval().requires_grad_(False)
    shared, longest = common(teacher.config), max(p["length"] for p in recipe["distill"]["phases"])
    if longest > (limit := shared["max_position_embeddings"] or longest):
        raise OutriderError(f"distill.phases has length = {longest} and the target's context is {limit}", "", f"length = {limit} or less")
    student = new_model(recipe["draft"], shared, recipe["seed"] + 1).to(device, torch.bfloat16)
    weights = {n: d["weight"] for n, d in recipe["corpus"].items()}
    streams = Mixed(work / "corpus", weights, recipe["distill"]["own"], recipe["seed"] + 1)
    if not train(student, Schedule.of(recipe["distill"]), streams, distil_loss(teacher), work / "draft.ckpt", progress, piece):
        return
    chars = json.loads((work / "corpus/chars.json").read_text())
    table = held_out(student, Streams(work / "corpus", weights, "held", 0), chars)
    progress(f"held-out loss {table['all']['nats']:.3f} nats, {table['all']['bits_per_char']:.3f} bits a character")
    export(student, work / "corpus/tokenizer", work / "draft", {"held_out": table, "recipe": recipe})
