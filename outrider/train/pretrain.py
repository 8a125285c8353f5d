"""The training loop, and language-model pre-training on it.

Weights compute in bfloat16; the optimiser steps on float32 masters: Muon (torch.optim) for the hidden matrices, AdamW
for embeddings and norms. Progress is the share of the recipe's minutes that was spent training, so a recipe ends on
time on any machine, and a checkpoint resumes where it stopped. Interrupted or out of disk, the last one stands.
"""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.core.errors import OutriderError
from outrider.models.layers import windows
from outrider.train.corpus import Streams

SAVE_EVERY = 150.0  # seconds
ATTENTION = "outrider-whole-texts"
ALL_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *_, **__: None)
Loss = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A recipe's training section. `phases`: rows and length of a batch up to a share of the minutes; `decay`: of Muon's weights."""

    minutes: float
    phases: tuple[dict[str, float], ...]
    muon: float
    adamw: float
    warmup: float
    cooldown: float
    decay: float = 0.01

    @classmethod
    def of(cls, section: dict[str, Any]) -> "Schedule":
        return cls(**{k: v for k, v in section.items() if k in cls.__slots__ and k != "phases"}, phases=tuple(section["phases"]))

    def shape(self, done: float) -> tuple[int, int]:
        phase = next((p for p in self.phases if done < p["until"]), self.phases[-1])
        return int(phase["rows"]), int(phase["length"])

    def rate(self, done: float) -> float:
        """Trapezoid: linear warm-up, flat, linear to zero."""
        return max(0.0, min(1.0, (done + 1e-3) / self.warmup, (1 - done) / self.cooldown))


def new_model(shape: dict[str, Any], shared: dict[str, Any], seed: int) -> Any:
    """A Llama with tied embeddings and random weights; unless `shared` says otherwise, ids 0, 1 and 6 are begin, end and padding."""
    torch.manual_seed(seed)
    ours = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 6}
    return whole(LlamaForCausalLM(LlamaConfig(**{**ours, **shape, **shared}, tie_word_embeddings=True)))


def whole(model: Any) -> Any:
    """The model, which will only see whole texts without padding: where its layers see all that precedes, torch's causal attention needs no mask, and
    a compiled transformers module would write one of length x length out."""
    if windows(model) == {"full_attention": None}:
        model.config._attn_implementation = ATTENTION
    return model


def common(config: Any) -> dict[str, Any]:
    """What a draft has in common with the target of this config: its vocabulary, context and ids of begin, end and padding."""
    names = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(config.get_text_config(), name, None) for name in names}


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean cross-entropy in nats of ids[:, 1:] given what precedes. ids [rows, length]."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


class Masters:
    """Float32 copies of a model's parameters and the two optimisers that step on them."""

    def __init__(self, model: nn.Module, schedule: Schedule) -> None:
        self.live = list(model.parameters())
        self.copies = [p.detach().float().clone() for p in self.live]
        hidden = [c for (n, p), c in zip(model.named_parameters(), self.copies, strict=True) if p.ndim == 2 and "embed" not in n]
        others = [c for c in self.copies if all(c is not h for h in hidden)]
        self.optimisers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(hidden, lr=schedule.muon, weight_decay=schedule.decay), schedule.muon),
            (torch.optim.AdamW(others, lr=schedule.adamw, betas=(0.9, 0.95), weight_decay=0.0), schedule.adamw),
        ]

    def step(self, rate: float) -> None:
        for copy, live in zip(self.copies, self.live, strict=True):
            copy.grad = live.grad.float() if live.grad is not None else None
            live.grad = None
        nn.utils.clip_grad_norm_(self.copies, 1.0)
        for optimiser, base in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = base * rate
            optimiser.step()
        with torch.no_grad():
            for copy, live in zip(self.copies, self.live, strict=True):
                live.copy_(copy)

    def state(self) -> dict[str, Any]:
        return {"copies": self.copies, "optimisers": [o.state_dict() for o, _ in self.optimisers]}

    def load(self, state: dict[str, Any]) -> None:
        for copy, live, saved in zip(self.copies, self.live, state["copies"], strict=True):
            copy.copy_(saved)
            live.data.copy_(saved)
        for (optimiser, _), saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)


def save_checkpoint(file: Path, state: dict[str, Any]) -> None:
    """Write beside, then rename: a full disk or a crash leaves the last checkpoint whole."""
    part = file.with_suffix(".part")
    try:
        torch.save(state, part)
        os.replace(part, file)
    except (OSError, RuntimeError) as broken:
        part.unlink(missing_ok=True)
        raise OutriderError(
            f"the checkpoint {file} could not be written",
            str(broken),
            f"free some space; the last checkpoint is kept and the same command resumes from it ({file})",
        ) from broken


def train(
    model: nn.Module, schedule: Schedule, streams: Streams, loss_of: Loss, file: Path, progress: Callable[[str], None], piece: float = math.inf
) -> bool:
    """Train in place until the minutes are spent, or `piece` minutes of them now; resumes from `file` where it exists.

    Returns whether the schedule is complete.
    """
    device = next(model.parameters()).device
    masters, spent, steps, tokens = Masters(model, schedule), 0.0, 0, 0
    if file.exists():
        state = torch.load(file, map_location=device, weights_only=False)
        masters.load(state["masters"])
        spent, steps, tokens = state["spent"], state["steps"], state["tokens"]
        streams.rng.bit_generator.state = state["rng"]
        progress(f"resumed at step {steps}, {spent / 60:.1f} minutes")

    def save() -> None:
        rng = streams.rng.bit_generator.state
        save_checkpoint(file, {"masters": masters.state(), "spent": spent, "steps": steps, "tokens": tokens, "rng": rng})

    saved, mean, stop = spent, math.nan, spent + piece * 60
    while spent < min(schedule.minutes * 60, stop):
        began, done = time.monotonic(), spent / (schedule.minutes * 60)
        batch = torch.from_numpy(streams.batch(*schedule.shape(done))).to(device)
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        masters.step(schedule.rate(done))
        value = loss.item()
        mean = value if math.isnan(mean) else 0.95 * mean + 0.05 * value
        steps, tokens, spent = steps + 1, tokens + batch.numel(), spent + time.monotonic() - began
        if steps % 20 == 0:
            progress(f"step {steps}  {spent / 60:.1f} min  {tokens / 1e6:.2f} M tokens  loss {mean:.3f}  {tokens / spent:.0f} tokens/s")
        if spent - saved > SAVE_EVERY:
            save()
            saved = spent
    save()
    return spent >= schedule.minutes * 60


@torch.inference_mode()
def held_out(model: Any, streams: Streams, chars: dict[str, int], windows: int = 12, length: int = 1024) -> dict[str, dict[str, float]]:
    """Loss in nats a token and bits a character for every domain's held-out stream, and their weighted mean."""
    device, table = next(model.parameters()).device, {}
    length = min(length, model.config.max_position_embeddings)
    for name, stream in streams.streams.items():
        ids = torch.from_numpy(torch.stack([torch.from_numpy(streams.window(name, length)) for _ in range(windows)]).numpy()).to(device)
        nats = sum(float(next_token_loss(model, row[None])) for row in ids) / windows
        table[name] = {"nats": nats, "bits_per_char": nats / math.log(2) * len(stream) / chars[f"{name}.held"]}
    shares = dict(zip(streams.names, streams.shares, strict=True))
    table["all"] = {k: sum(shares[n] * table[n][k] for n in shares) for k in ("nats", "bits_per_char")}
    return table


def export(model: Any, tokenizer: Path, folder: Path, facts: dict[str, Any]) -> None:
    """A folder that plain transformers loads: bfloat16 safetensors, tokenizer, and training.json with the facts."""
    import shutil

    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in tokenizer.iterdir():
        shutil.copy(file, folder)
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


def pretrain(recipe: dict[str, Any], work: Path, device: str, progress: Callable[[str], None], piece: float = math.inf) -> None:
    """Train the recipe's target on work/corpus, `piece` minutes at most now; when it is done, export it to work/target."""
    model = new_model(recipe["target"], recipe["shared"], recipe["seed"]).to(device, torch.bfloat16)
    weights = {n: d["weight"] for n, d in recipe["corpus"].items()}
    loss_of = torch.compile(next_token_loss, dynamic=False)
    streams = Streams(work / "corpus", weights, "train", recipe["seed"])
    if not train(model, Schedule.of(recipe["pretrain"]), streams, loss_of, work / "target.ckpt", progress, piece):
        return
    chars = json.loads((work / "corpus/chars.json").read_text())
    table = held_out(model, Streams(work / "corpus", weights, "held", 0), chars)
    progress(f"held-out loss {table['all']['nats']:.3f} nats, {table['all']['bits_per_char']:.3f} bits a character")
    export(model, work / "corpus/tokenizer", work / "target", {"held_out": table, "recipe": recipe})
