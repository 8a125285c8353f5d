"""How long a user waits for the first token of a fresh process: eager, with an empty cache of compiled steps, with a full one.

Each run is a process of its own, in rotating order, eager ones with a cache of their own as cold ones have; the clock starts before the library is
imported. `compiled` is when the first step was served by a package (None: it was not within the text). Starts of one round follow each other closely,
so a cold one is held against the eager one of its round: between minutes a machine differs by more.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from outrider.bench.report import provenance, save_as
from outrider.runtime.native import SWITCH, host, place

ASK = """
import json, sys, time
start = time.perf_counter()
import outrider
rt = outrider.load(compile=sys.argv[1], rows=1, dtype="bfloat16")
loaded = time.perf_counter() - start
seq = rt.engine.submit(rt.request(rt._encode("Once upon a time, a little owl"), max_tokens=64, ignore_eos=True))
first = served = None
while seq.finish_reason is None:
    rt.engine.advance([seq])
    first = first or time.perf_counter() - start
    if served is None and seq.records[-1].tiers["target"].startswith("compiled"):
        served = time.perf_counter() - start
print(json.dumps({"loaded": loaded, "first_token": first, "compiled": served}))
"""


def start(rounds: int = 9, progress: Callable[[str], None] = print) -> dict[str, Any]:
    """Seconds by kind of start, medians over rounds, with all rounds behind them."""
    rows: dict[str, list[dict[str, float | None]]] = {"eager": [], "cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as root:
        progress("filling a cache")
        _run("wait", Path(root) / "full")
        for i in range(rounds):
            kinds = (("eager", "off", f"none-{i}"), ("cold", "auto", f"cold-{i}"), ("warm", "auto", "full"))
            for kind, how, cache in (*kinds[i % 3 :], *kinds[: i % 3]):  # none always follows the same other
                progress(f"{kind} start, {i + 1} of {rounds}")
                rows[kind].append(_run(how, Path(root) / cache))
                _stop_builders(Path(root) / cache)
    table = {kind: {key: _median([row[key] for row in given]) for key in given[0]} for kind, given in rows.items()}
    return {"where": provenance(), "seconds": table, "later": later(rows), "rounds": rows}


def later(rows: dict[str, list[dict[str, float | None]]]) -> dict[str, float]:
    """Seconds by which the first token of a cold start comes later than that of the eager one of the same round: lower quartile, median, upper
    quartile."""
    low, middle, high = quantiles(
        [_first(cold) - _first(eager) for cold, eager in zip(rows["cold"], rows["eager"], strict=True)], n=4, method="inclusive"
    )
    return {"low": low, "median": middle, "high": high}


def _first(row: dict[str, float | None]) -> float:
    seconds = row["first_token"]
    assert seconds is not None, "a process ended without a token"
    return seconds


def _run(compile: str, cache: Path) -> dict[str, float | None]:
    built = str(place() / "built") if host.tier == "native" else "python"  # an empty cache holds none, and none is to be built meanwhile
    env = {**os.environ, "OUTRIDER_CACHE": str(cache), SWITCH: built}
    done = subprocess.run([sys.executable, "-c", ASK, compile], env=env, capture_output=True, text=True, check=True)
    found: dict[str, float | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def _stop_builders(cache: Path) -> None:
    """What a cold start leaves building would slow the next down."""
    for lock in cache.glob("steps/*/lock"):
        subprocess.run(["kill", "--", f"-{lock.read_text()}"], check=False, capture_output=True)


def _median(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return median(known) if len(known) == len(values) else None


def markdown(result: dict[str, Any]) -> str:
    lines = ["| start | loaded, s | first token, s | first compiled step, s |", "|---|---|---|---|"]
    for kind, row in result["seconds"].items():
        cells = [f"{row[key]:.2f}" if row[key] is not None else "-" for key in ("loaded", "first_token", "compiled")]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    late = result["later"]
    told = f"A cold start's first token comes {late['median']:+.2f} s after the eager one's of its round (quartiles {late['low']:+.2f} to {late['high']:+.2f})."
    return "\n".join([*lines, "", told])


def save(result: dict[str, Any], folder: Path) -> None:
    """start.json and start.md below `folder`."""
    save_as(folder, "start", json.dumps(result, indent=1), markdown(result))
