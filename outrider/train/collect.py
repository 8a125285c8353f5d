"""The target's own text, for drafters to learn from: prompts cut from the training streams, continued by the target.

It runs on the project's own runtime, plain, many rows at a time, greedy and sampled; texts are appended to one uint16
stream, so that an interrupted run loses at most a batch and the next one goes on.
"""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.core.types import SamplingParams
from outrider.train.corpus import Streams

BEGIN, ASSISTANT = 0, 4  # ids of <|begin|> and <|assistant|>
LONGEST = 512  # tokens of a chat prompt


def prompts(streams: Streams, length: int) -> Iterator[list[int]]:
    """Beginnings of training documents: up to the first <|assistant|> of a chat, else `length` tokens."""
    starts = {n: np.flatnonzero(s[:-LONGEST] == BEGIN) for n, s in streams.streams.items()}
    while True:
        name = streams.names[int(streams.rng.choice(len(streams.names), p=streams.shares))]
        at = int(streams.rng.choice(starts[name])) if len(starts[name]) > 1 else 0
        text = streams.streams[name][at : at + LONGEST].astype(np.int64)
        if name == "books":  # few documents: start anywhere
            at = int(streams.rng.integers(0, len(streams.streams[name]) - LONGEST))
            text = np.concatenate([[BEGIN], streams.streams[name][at : at + LONGEST].astype(np.int64)])
        asks = np.flatnonzero(text == ASSISTANT)
        turn = int(streams.rng.integers(0, len(asks))) if len(asks) else 0
        yield text[: asks[turn] + 1 if len(asks) else length].tolist()


def collect(recipe: dict[str, Any], work: Path, device: str, progress: Callable[[str], None], piece: float = math.inf) -> None:
    """Append the target's texts to work/corpus/own.train.bin until the recipe's minutes are spent, `piece` of them now."""
    import outrider

    section = recipe["collect"]
    file, seconds = work / "corpus/own.train.bin", section["minutes"] * 60
    meter = work / "collect.seconds"
    spent = float(meter.read_text()) if meter.exists() else 0.0
    seed = recipe["seed"] + (file.stat().st_size if file.exists() else 0)
    weights = {n: d["weight"] for n, d in recipe["corpus"].items()}
    source = prompts(Streams(work / "corpus", weights, "train", seed), section["prompt"])
    context = LONGEST + section["length"] + 1
    rt = outrider.load(work / "target", drafters=[], device=device, dtype="bfloat16", rows=section["rows"], context=context)
    torch.manual_seed(seed)
    count, stop = 0, spent + piece * 60
    while spent < min(seconds, stop):
        began = time.monotonic()
        temperatures = np.resize(section["temperatures"], section["rows"])
        settings = [SamplingParams(temperature=float(t), max_tokens=section["length"]) for t in temperatures]
        seqs = [rt.engine.submit(rt.request(next(source), s)) for s in settings]
        while any(s.finish_reason is None for s in seqs):
            rt.engine.step()
        with open(file, "ab") as out:
            out.write(b"".join(np.array(s.tokens, np.uint16).tobytes() for s in seqs))
        count += sum(s.produced for s in seqs)
        spent += time.monotonic() - began
        meter.write_text(str(spent))
        progress(f"{spent / 60:.1f} min  {count / 1e6:.2f} M tokens written by the target")
