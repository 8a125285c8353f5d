"""The target's own text, for drafters to learn from: prompts cut from the training streams, continued by the target.

It runs on the project's own runtime, plain, many rows at a time, greedy and sampled; finished texts are appended to one
stream, so that an interrupted run loses little and the next one goes on.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from outrider.core.types import SamplingParams
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
    """Append the target's texts to work/corpus/own.train.ids until the recipe's minutes are spent, `piece` of them now."""
    import outrider

    section = recipe["collect"]
    file, seconds = work / "corpus/own.train.ids", section["minutes"] * 60
    meter = work / "collect.seconds"
    spent = float(meter.read_text()) if meter.exists() else 0.0
    seed = recipe["seed"] + (file.stat().st_size if file.exists() else 0)
    weights = {n: d["weight"] for n, d in recipe["corpus"].items()}
    marks = Marks.of(work / "corpus")
    source = prompts(Streams(work / "corpus", weights, "train", seed), section["prompt"], marks)
    context = (LONGEST if marks.assistant else section["prompt"]) + section["length"] + 1
    rt = outrider.load(work / "target", drafters=[], device=device, dtype="bfloat16", rows=section["rows"], context=context)
    temperatures = itertools.cycle(section["temperatures"])
    batch, count, stop, told = rt.engine.batcher, 0, spent + piece * 60, spent
    with open(file, "ab") as out:
        while spent < min(seconds, stop):
            began = time.monotonic()
            while len(batch.waiting) + len(batch.running) < section["rows"]:
                rt.engine.submit(rt.request(next(source), SamplingParams(temperature=float(next(temperatures)), max_tokens=section["length"])))
            done = [s for s in rt.engine.step() if s.finish_reason]
            out.write(b"".join(np.array(s.tokens, ID).tobytes() for s in done))
            count += sum(s.produced for s in done)
            spent += time.monotonic() - began
            if spent - told > 20:
                out.flush()
                meter.write_text(str(spent))
                progress(f"{spent / 60:.1f} min  {count / 1e6:.2f} M tokens written by the target")
                told = spent
    meter.write_text(str(spent))
