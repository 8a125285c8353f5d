"""The target's own text, for drafters to learn from: prompts cut from the training streams, continued by the target.

transformers' own `generate` writes many rows at a time, greedy and sampled in turn; every batch is appended to one stream
when it is done, so that an interrupted run loses little and the next one goes on.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.bench.peers import drawing, silent
from outrider.models.load import context_of, load_config, load_module
from outrider.train.corpus import ID, Marks, Streams

LONGEST = 256  # tokens of a chat prompt


def prompts(streams: Streams, length: int, marks: Marks) -> Iterator[list[int]]:
    """Beginnings of training documents: up to an <|assistant|> of a chat, else `length` tokens."""
    starts = {n: np.flatnonzero(np.isin(s[:-LONGEST], marks.begin)) for n, s in streams.streams.items()}
    while True:
        name = streams.names[int(streams.rng.choice(len(streams.names), p=streams.shares))]
        at = int(streams.rng.choice(starts[name])) if len(starts[name]) > 1 else 0
        text = streams.streams[name][at : at + LONGEST].astype(np.int64)
        if name == "books" or not marks.begin:  # few documents, or none that show where they begin: start anywhere
            at = int(streams.rng.integers(0, max(1, len(streams.streams[name]) - LONGEST)))
            text = np.array([*marks.begin, *streams.streams[name][at : at + LONGEST]], np.int64)
        asks = np.flatnonzero(np.isin(text, marks.assistant))
        turn = int(streams.rng.integers(0, len(asks))) if len(asks) else 0
        yield text[: asks[turn] + 1 if len(asks) else length].tolist()


def collect(recipe: dict[str, Any], work: Path, device: str, progress: Callable[[str], None], piece: float = math.inf) -> None:
    """Append the target's texts to work/corpus/own.train.ids until the recipe's minutes are spent, `piece` of them now. OutriderError for texts
    that would be longer than the target's context."""
    section = recipe["collect"]
    file, seconds = work / "corpus/own.train.ids", section["minutes"] * 60
    meter = work / "collect.seconds"
    spent = float(meter.read_text()) if meter.exists() else 0.0
    seed = recipe["seed"] + (file.stat().st_size if file.exists() else 0)
    weights = {n: d["weight"] for n, d in recipe["corpus"].items()}
    marks = Marks.of(work / "corpus")
    context_of(load_config(work / "target"), (LONGEST if marks.assistant else section["prompt"]) + section["length"])
    source = prompts(Streams(work / "corpus", weights, "train", seed), section["prompt"], marks)
    target, temperatures = load_module(work / "target", "bfloat16").to(device).eval(), itertools.cycle(section["temperatures"])
    torch.manual_seed(seed)
    count, stop = 0, spent + piece * 60
    with open(file, "ab") as out:
        while spent < min(seconds, stop):
            began = time.monotonic()
            asked = [next(source) for _ in range(section["rows"])]
            for prompt, text in zip(asked, continued(target, asked, section["length"], next(temperatures)), strict=True):
                out.write(np.array(prompt + text, ID).tobytes())
                count += len(text)
            out.flush()
            spent += time.monotonic() - began
            meter.write_text(str(spent))
            progress(f"{spent / 60:.1f} min  {count / 1e6:.2f} M tokens written by the target")


@torch.inference_mode()
def continued(target: Any, asked: list[list[int]], length: int, temperature: float) -> list[list[int]]:
    """What a transformers model writes after each of `asked`: at most `length` tokens, up to its end token, that included."""
    longest = max(map(len, asked))
    ids = torch.tensor([[0] * (longest - len(a)) + a for a in asked], device=target.device)
    seen = torch.tensor([[0] * (longest - len(a)) + [1] * len(a) for a in asked], device=target.device)
    named = target.generation_config.eos_token_id
    ends = set(named if isinstance(named, list) else [named]) - {None}
    with silent():
        out = target.generate(input_ids=ids, attention_mask=seen, max_new_tokens=length, pad_token_id=0, **drawing(temperature))
    texts = out[:, longest:].tolist()
    return [text[: next((i for i, token in enumerate(text, 1) if token in ends), len(text))] for text in texts]
