"""CUDA graphs of a step: one launch in place of hundreds, at fixed addresses.

Widths and slots read are rounded up to buckets, so that few graphs serve; each is captured at its second use, or before the first text if that may
wait, and the least used is dropped when there are too many. The table of numbers goes up and what the step found comes down: nothing else waits for
the host. Who waits for them gets graphs of few large kernels (`joined`); others, where many slots are read, attention that keeps the processors busy.
Same interface as `compiled.Compiled`. Invariant: a graph is used only after it has agreed with the eager step; a capture that fails leaves the model
eager, with its reason.
"""

import functools
import itertools
import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core.types import MAX_NODES
from outrider.models.compiled import COMPILED, WITHOUT, example
from outrider.models.joined import Form, apart, join, multiplied, worth_joining
from outrider.models.step import Step

WIDTHS = (1, 2, 4, 8, 16, 32, MAX_NODES)
READ = 256  # slots read are rounded up to this, its double, the double of that, ...
MOST = 96  # graphs kept
DIFFERS = 0.15  # root mean square by which a graph's logits may differ from the eager step's, over their spread: one wrong column of 64 is 0.18
log = logging.getLogger("outrider")


@dataclass(slots=True)
class Graph:
    """A captured step: write `table`, replay, read `out`. `run`: what was captured, which lives as long."""

    graph: "torch.cuda.CUDAGraph"
    table: Tensor
    out: tuple[Tensor, Tensor]
    run: Form


@functools.cache
def sizes(capacity: int) -> list[int]:
    """How many slots graphs read: doubles of READ, and at last all but the one that padding writes to."""
    return [READ << n for n in range(64) if READ << n < capacity - 1] + [capacity - 1]


class Graphs:
    """The graphs of one model's steps. `tier`: what records say, of those without a better form from the moment on at which that did not serve."""

    bytes, independent = 0, False

    def __init__(self, step: Step) -> None:
        self.step, self.reason, self.tier = step, "eager:first-use", COMPILED
        self.graphs: OrderedDict[tuple[int, ...], Graph] = OrderedDict()
        self.seen: Counter[tuple[int, ...]] = Counter()
        self.numbers: Tensor | None = None
        self.pool: Any = None  # of memory that all graphs share, since they run in turn
        self.better: dict[str, Form] = {
            "attention as two products": multiplied(step)
        }  # what graphs of one row are made of before the step itself, the best first

    def get(self, rows: int, width: int) -> "Graphs | None":
        """Itself, for widths that have a bucket, unless a capture failed."""
        return self if width <= MAX_NODES and self.reason == "eager:first-use" else None

    def settle(self) -> None:
        """Every shape is its own bucket already; but sums of products hang on how many slots are read."""
        if self.better:
            self.better = {}
            self.graphs.clear()

    @torch.inference_mode()
    def wait(self, strict: bool = False) -> None:
        """Captures all that the first row will use when it steps alone, the largest first. `strict`: of the step's own kernels."""
        rows = self.step.store.rows(0, 1)
        if strict:
            self.settle()
        elif not worth_joining(self.step):
            log.info("a step of so many weights or layers keeps its own kernels: joining them would take long and bring little")
        elif not self.graphs:
            try:
                self.better = {"joined kernels": join(self.step, apart(rows))} | self.better
            except Exception as failed:  # export and Inductor have many kinds
                self._without("joined kernels", failed)
        capacity, seen = rows[0].shape[2], [x[:, :, :READ] for x in rows]
        before = [x.clone() for x in seen]
        for x in seen:
            x.normal_()  # something to attend to
        try:
            for slots, width in itertools.product(sizes(capacity)[::-1], WIDTHS[::-1]):
                key = (rows[0].data_ptr(), 1, width, slots)
                self.seen[key] += 1
                if key not in self.graphs and self._capture(key, trial(self.step, capacity, width), self._read(rows, slots), rows) is None:
                    return
        finally:
            for x, old in zip(seen, before, strict=True):
                x.copy_(old)

    @torch.inference_mode()  # else what a capture made may not be written to
    def __call__(self, table: Tensor, read: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        """table on the host or the device; outputs live until the next step of the same shape."""
        width = table.shape[1]
        full, slots = (next(n for n in buckets if n >= asked) for buckets, asked in ((WIDTHS, width), (sizes(rows[0].shape[2]), len(read))))
        key = (rows[0].data_ptr(), len(table), full, slots)
        padded = self._padded(table, full, rows[0].shape[2] - 1)
        held = self.graphs.get(key) or self._capture(key, padded, self._read(rows, slots), rows)
        if held is None:
            logits, found = self.step(padded.to(rows[0].device), self._read(rows, slots), rows)
        else:
            self.graphs.move_to_end(key)
            held.table.copy_(padded, non_blocking=True)
            held.graph.replay()
            logits, found = held.out
        return logits[:, :width], found[:, :width]

    def _padded(self, table: Tensor, width: int, nowhere: int) -> Tensor:
        """The table with columns that write to the slot which nothing reads."""
        if table.shape[1] == width:
            return table
        out = torch.zeros(len(table), width, table.shape[2], dtype=torch.int64, device=table.device)
        out[..., 2], out[..., 3] = nowhere, 1
        out[:, : table.shape[1]] = table
        return out

    def _read(self, rows: list[Tensor], slots: int) -> Tensor:
        """The first slots' numbers, of one tensor for good: graphs read where it lies."""
        if self.numbers is None:
            self.numbers = torch.arange(rows[0].shape[2], device=rows[0].device)
        return self.numbers[:slots]

    def _capture(self, key: tuple[int, ...], table: Tensor, read: Tensor, rows: list[Tensor]) -> Graph | None:
        """A graph of this shape, from its second use on; None leaves the step at hand to the eager tier."""
        self.seen[key] += 1
        if self.seen[key] < 2:
            return None
        try:
            static = table.to(rows[0].device, copy=True)
            want = self.step(static, read, rows)[0].clone()  # also warms up what allocates at first use
            made = self._better(static, read, rows, want) if len(table) == 1 else None
            made = made or self._graph(self.step, static, read, rows, want)
        except RuntimeError as failed:
            self.reason = "eager:capture-failed"
            log.warning("no CUDA graph could be made of a step, which stays eager: %s", str(failed).split("\n")[0])
            return None
        self.graphs[key] = made
        if len(self.graphs) > MOST:
            self.graphs.popitem(last=False)
        return made

    def _graph(self, run: Form, table: Tensor, read: Tensor, rows: list[Tensor], want: Tensor) -> Graph:
        """What `run` does at these addresses. Raises RuntimeError where it cannot be captured, or gives other logits than `want`."""
        if not self.graphs:  # memory goes with the last graph that it was of, and one that failed was such a one
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        usual = torch.cuda.stream(torch.cuda.current_stream())  # a capture that fails leaves its own stream current
        with usual, torch.cuda.graph(graph, pool=self.pool):
            out = run(table, read, rows)
        graph.replay()
        off = float((out[0].float() - want.float()).square().mean().sqrt())
        if not off <= DIFFERS * float(want.float().std()):
            raise RuntimeError("the graph's logits differ from the eager step's")
        return Graph(graph, table, out, run)

    def _better(self, table: Tensor, read: Tensor, rows: list[Tensor], want: Tensor) -> Graph | None:
        """The graph of a better form than the step; None, and that form never again, where none serves."""
        for name, run in list(self.better.items()):
            try:
                rows = apart(rows)
                run(table, read, rows)  # code is made outside of the capture
                return self._graph(run, table, read, rows, want)
            except Exception as failed:  # Inductor's and Triton's have many kinds
                self._without(name, failed)
        return None

    def _without(self, name: str, why: Exception) -> None:
        """From now on graphs are of other kernels, and records say so."""
        self.better.pop(name, None)
        self.tier = (WITHOUT if self.tier == COMPILED else f"{self.tier}+") + name.replace(" ", "-")
        log.warning("a step does without %s, and its CUDA graphs are slower for it: %s", name, (str(why) or repr(why)).split("\n")[0])


def trial(step: Step, capacity: int, width: int) -> Tensor:
    """A table of a chain of `width` nodes behind the text of a row of so many slots, within the first READ: by it graphs are compared with eager
    steps."""
    context = capacity - MAX_NODES - 1
    table = example(1, width, len(step.windows), after=min(READ, capacity - 1) - width)
    table[..., 0] %= step.vocab
    table[..., 1].clamp_(max=context - 1)
    table[:, 1:, 3] = table[0, 0, 2]
    table[:, 1:, 4:] = torch.tensor([(2 << k) - 1 if k < 63 else -1 for k in range(1, width)], dtype=torch.int64)[:, None]
    return table
