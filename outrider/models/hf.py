"""Any transformers causal LM, its modelling code unmodified, on our slot cache.

Knows nothing of drafting or acceptance. What varies between architectures is asked of the config (windows) or of the
signature (logits_to_keep). `models.load` refuses by name what it knows to be different, and checks a short tree step.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from mypy_extensions import mypyc_attr
from torch import Tensor

from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.noise import brought
from outrider.core.sampling import Race, decided, near, winners
from outrider.core.types import MAX_NODES, Draft, Ints, ModelSpec, On, Outcome, Places, Scores, Sequence
from outrider.models.chain import Chain
from outrider.models.compiled import PREFILL, Compiled
from outrider.models.contention import Usual, contention
from outrider.models.graphed import Graphs
from outrider.models.kv import Block, Layout, Rows
from outrider.models.layers import routed, windows, with_layers
from outrider.models.package import MANY
from outrider.models.queued import Lap, Queued, unknown
from outrider.models.slots import SlotCache
from outrider.models.step import Step

STRICT_WIDTH = 8  # columns of every strict step; where they are independent, the most
Guessed = tuple[list[int], list[float], int]  # tokens, how likely they are, and the forwards that found them
Ahead = Callable[[list[int], int], list[int]]  # after these tokens, at most so many that may be found next
Behind = Callable[[Tensor], Queued | None]  # what is to run behind a chain, whose tokens [n] are on the device
SHARED = "chunk store rows device dtype far numbers reads tables pinned".split()  # of a model and its views
STRICT_READ = 512  # slots are read by as many as torch's attention blocks


@dataclass(slots=True)
class Meter:
    """Seconds a model's forwards took since they were last taken, and what served the last one: `compiled`, `compiled:without-` what
    could not be had of it, or `eager` and why. On a GPU forwards run on after they were asked for; there it is the time of asking."""

    tier: str = "eager:off"
    seconds: float = 0.0

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def served(self) -> str:
        """`tier`, for who holds no more than this."""
        return self.tier


@mypyc_attr(allow_interpreted_subclasses=True)
class HFModel:
    """A Model over a loaded transformers module, with `rows` rows of spec.context tokens. `queued`: the forward over the draft at hand that was asked
    for before its tokens were known."""

    own = True  # is its cache nobody else's?

    def __init__(self, module: Any, spec: ModelSpec, rows: int, chunk: int = 512) -> None:
        self.module, self.spec, self.chunk = module.eval(), spec, chunk
        kinds = windows(module)
        self.store = SlotCache(spec.layers, rows, spec.context)
        self.rows = Rows(spec.name, rows, spec.context, self.store, tuple(kinds.values()))
        self.device, self.dtype = module.device, module.dtype
        self.far = self.device.type != "cpu"
        self.step = Step(module, self.store, kinds, spec.vocab_size)
        self.compiled: Compiled | Graphs | None = None
        self.meter = Meter()
        self.numbers = torch.arange(self.store.capacity, device=self.device)
        self.reads: dict[int, Tensor] = {}
        self.tables: dict[tuple[int, int], tuple[Ints, Tensor, list[Tensor]]] = {}  # that are kept, as tensors and with their row, by row and width
        self.forwards, self.computed, self.pinned = 0, 0, False
        self.queued: Queued | None = None
        self.usual = Usual()  # of eager steps
        self.store.allocate(self.device, self._probe)

    def _probe(self, zero: Tensor) -> None:
        mask = zero.to(self.dtype)[None, None]
        masks = dict.fromkeys(self.step.windows, mask) if len(self.step.windows) > 1 else mask
        self.module(input_ids=zero, position_ids=zero, attention_mask=masks, past_key_values=self.store.cache, use_cache=True)

    def held_bytes(self) -> int:
        """Bytes of the storages that weights, buffers, its own cache and compiled steps hold now."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        storages: dict[int, int] = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values()) + (self.store.bytes if self.own else 0) + (self.compiled.bytes if self.compiled else 0)

    def open(self, seq: Sequence) -> None:
        self.rows.open(seq)

    def close(self, seq: Sequence) -> None:
        self.rows.close(seq)

    def commit(self, seqs: list[Sequence], draft: Draft, outcome: Outcome) -> None:
        self.rows.commit(seqs, draft, outcome)

    def drop(self, seqs: list[Sequence]) -> None:
        self.queued = None
        self.rows.drop(seqs)

    def begin_at(self, seq: Sequence, tail: int) -> None:
        """As `Rows` says."""
        self.rows.begin_at(seq, tail)

    def prefill(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            if self.rows.behind(seq) <= 1:
                continue
            tail = self.rows.tail(seq)[:-1]
            for start in range(0, len(tail), self.chunk):
                part = tail[start : start + self.chunk]
                self._read(self.rows.append(seq, part))
                self.rows.appended(seq, part)

    def _read(self, block: Block) -> None:
        """One chunk of text into the cache."""
        package = self.compiled.packages.get(PREFILL) if isinstance(self.compiled, Compiled) else None
        if package is None:
            self._eager(block, None, nodes=False, **self.step.one_logit)
            return
        start = time.perf_counter()
        package(*self._inputs(block))
        self.meter.seconds += time.perf_counter() - start

    def score(self, seqs: list[Sequence], draft: Draft, places: Places, reusing: Any = None) -> Scores:
        """As the socket says. reusing: a view of the first layers (models.exits); what it computed in this step is not computed again."""
        queued, self.queued = self.queued, None
        if queued is not None and (known := queued.scores(places)) is not None:
            return known
        self._catch_up(seqs, places)
        if reusing is not None:
            reusing.forget([row.index for s in seqs if (row := self.rows.of(s)).base < 0])  # of a step that was dropped
        layout = self.rows.layout(seqs, draft, places, resume=reusing is not None)
        several, outs = len(layout.blocks) > 1, []
        for block in layout.blocks:
            out = self._forward(block) if reusing is None else reusing.finish(block)
            outs.append(tuple([x.clone() for x in out]) if several and self.far else out)  # where one graph has written, the next may write
        if several:
            logits, found = [torch.cat([x.flatten(0, 1) for x in part])[None] for part in zip(*outs, strict=True)]
            return Scores(logits, at=layout.at, found=found)
        logits, found = outs[0]
        return Scores(logits, at=layout.at, found=found, lies=_lies(layout.blocks[0]) if near(self.spec.device) else 0)

    def queue(self, seqs: list[Sequence], draft: Draft, place: int, tokens: Tensor, race: Race | None = None) -> Queued | None:
        """Ask for the scores of one row's root, draft, and a chain below one of its places whose `tokens` [n] are on this device, as nodes
        len(draft), len(draft) + 1, ... The host does not wait. `score` has them then, if the nodes are `rename`d as they came out; with who won the
        `race`s of their positions, if there are such. None: that cannot be had here."""
        if self.pinned or tokens.device != self.device or len(draft) + len(tokens) > MAX_NODES:
            return None
        self._catch_up(seqs, [-1])
        whole = unknown(draft, place, len(tokens))
        layout = self.rows.layout(seqs, whole, [-1, *range(len(whole))])
        (block,), root = layout.blocks, layout.at[0] if layout.at else 0
        lap = Lap(self.device)
        logits, found = self._serve(block, tokens)
        if race is not None:
            before = tree.depth_at(draft, place)
            found = winners(race.there(logits[0], [0] * root + [depth - before for depth in (0, *whole.depth)]))[None]
        lap.stop()
        self.queued = Queued(self.rows.of(seqs[0]), root, logits, found, lap, race is not None)
        return self.queued

    def chain(
        self, seqs: list[Sequence], draft: Draft, place: int, levels: int, on: On | None = None, race: Race | None = None, ahead: Ahead | None = None,
        behind: Behind | None = None,
    ) -> Guessed:  # fmt: skip
        """What is likeliest after a place of one row, after that, and so on: at most `levels` tokens, their probabilities, and the forwards it took.
        The guesses are this step's scratch, as nodes len(draft), len(draft) + 1, ..., until `rename` says what became of them; the last may not be
        scored. Where the host sees each of them, `on` says whether one more is wanted, an end token is the last, and what `ahead` foresees is read in
        the same forward: as far as it is right, more than one token is found in each, and the same ones. Elsewhere what is `behind` the chain is
        asked for before the host waits for both. Who wins the `race` is taken in place of the likeliest."""
        self._catch_up(seqs, [place])
        seq = seqs[tree.row_at(draft, place)]
        if near(self.spec.device):
            return self._seen(seqs, draft, place, Chain(levels, seq.request.ends, on, race), ahead)
        return self._unseen(seq, self.rows.layout(seqs, draft, [place]), len(draft), place, levels, race, behind)

    def _seen(self, seqs: list[Sequence], draft: Draft, place: int, chain: Chain, ahead: Ahead | None) -> Guessed:
        """The host reads each token, asks, and lays out the next forward: nothing else."""
        seq, node, forwards = seqs[tree.row_at(draft, place)], len(draft), 0
        hints = ahead(chain.tokens, chain.most - 1) if ahead else []
        layout = self.rows.begin(seqs, draft, place, hints)
        block, at = layout.blocks[0], layout.at
        while True:
            logits, told = self._serve(block)
            forwards += 1
            laid = len(chain.tokens) + len(hints)
            more = chain.read(logits, told, _lies(block), at, hints)
            if chain.scored < laid:
                self.rows.undo(seq, tree.span(node + chain.scored, node + laid))
            if not more:
                return chain.tokens, chain.chances, forwards
            hints, at = ahead(chain.tokens, chain.most - len(chain.tokens) - 1) if ahead else [], None
            last = node + chain.scored  # the token that was found last, which is not scored
            block = self.rows.onward(seq, last, last - 1 if chain.scored else place, [chain.tokens[-1], *hints])

    def _unseen(self, seq: Sequence, layout: Layout, node: int, place: int, levels: int, race: Race | None, behind: Behind | None) -> Guessed:
        """Tokens go from forward to forward on the device; the host waits once, at the end."""
        (block,), left = layout.blocks, levels - 1
        out = self._serve(block)
        if race is not None:
            race.foresee(levels, out[0])
        token, seen = _picked(out, race, 0)
        told = [seen]
        if left:  # laid out, and brought over, at once
            block = self.rows.onward(seq, node, place, [0] * left)
            table = brought(torch.from_numpy(block.table), self.device)
            for n in range(left):
                one = Block(block.first, block.table[:, n : n + 1], block.read)
                token, seen = _picked(self._serve(one, token, table[:, n : n + 1]), race, n + 1)
                told.append(seen)
        found = torch.stack(told) if race is None else winners(torch.stack(told))
        tokens, logp = decided(Scores(found, found=_waited(found[None], behind)))
        return tokens, [math.exp(x) for x in logp], len(told)

    def rename(self, seq: Sequence, names: dict[int, int]) -> None:
        """Nodes that are called otherwise now."""
        self.rows.rename(seq, names)

    def _catch_up(self, seqs: list[Sequence], places: Places) -> None:
        """Rows that are asked for and have much to read do so first, so that the head runs on asked places only."""
        least = self.compiled.least if isinstance(self.compiled, Compiled) else MANY
        if long := [seqs[~p] for p in places if p < 0 and self.rows.behind(seqs[~p]) >= least]:
            self.prefill(long)

    def pin(self) -> None:
        """From now on every step runs in one tier, at one width (or narrower, where a package gives every column the bits it has alone), over slots
        that are positions, and no row inherits what another computed: a token's logits are then the same bits whatever was drafted. Source: the
        house's strict mode.

        Raises OutriderError for a routed model: the sums of its experts depend on which tokens share a step.
        """
        if routed(self.module.config):
            raise OutriderError(f"{self.spec.name} cannot be strict", "its experts' sums depend on the tokens that share a step", "strict=False")
        self.pinned, self.rows.reuse = True, False
        if self.compiled is not None:
            self.compiled.settle()

    def rest(self) -> None:
        """A moment when nobody waits."""
        if isinstance(self.compiled, Compiled):
            self.compiled.rest()

    def _forward(self, block: Block) -> tuple[Tensor, Tensor]:
        if not self.pinned:
            return self._serve(block)
        rows, width, kinds = block.table.shape
        assert rows == 1, "strict rows step alone"
        table, read = block.table, block.read
        if not (self.compiled and self.compiled.independent):
            table = np.zeros((1, -(-width // STRICT_WIDTH) * STRICT_WIDTH, kinds), np.int64)
            table[..., 2:4] = self.store.capacity - 1, 1  # padding
            table[:, :width] = block.table
            read = min(-(-block.read // STRICT_READ) * STRICT_READ, self.store.capacity - 1)
        starts = range(0, table.shape[1], STRICT_WIDTH)
        parts = [
            [x.clone() for x in self._serve(Block(block.first, table[:, i : i + STRICT_WIDTH].copy(), read))] for i in starts
        ]  # graphs overwrite
        logits, found = [torch.cat(list(part), 1)[:, :width] for part in zip(*parts, strict=True)]
        return logits, found

    def _serve(self, block: Block, last: Tensor | None = None, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """last: tokens [n] of the last columns, where only the device knows them; table: the block's, if it lies there already."""
        if self.compiled is None:
            return self._eager(block, last, table)
        rows, width = _size(block)
        package = self.compiled.get(rows, width)
        self.meter.tier = self.compiled.tier if package else self.compiled.reason
        if package is None:
            return self._eager(block, last, table)
        start = time.perf_counter()
        numbers, read, held = self._inputs(block, last, table)
        out = package(numbers, read, held)
        self.meter.seconds += time.perf_counter() - start
        return out[0], out[1]

    @torch.inference_mode()
    def _eager(self, block: Block, last: Tensor | None = None, table: Tensor | None = None, /, **options: Any) -> tuple[Tensor, Tensor]:
        start = time.perf_counter()
        inputs, threads = [*self._inputs(block, last, table)], torch.get_num_threads()

        def step(given: list[Any]) -> tuple[Tensor, Tensor]:
            out: tuple[Tensor, Tensor] = self.step(*given, **options)
            return out

        watched = threads > 1 and not (self.far or self.pinned)  # sums differ with the threads that make them
        out = contention.call(self.usual, threads, inputs, step) if watched else step(inputs)
        self.meter.seconds += time.perf_counter() - start
        return out

    def _inputs(self, block: Block, last: Tensor | None = None, table: Tensor | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
        self.forwards += 1
        rows, width = _size(block)
        self.computed += rows * width
        read = self.reads.get(block.read)
        if read is None:
            read = self.reads[block.read] = self.numbers[: block.read]
        if table is None and block.kept and not self.far:
            table, held = self._kept(block)
        else:
            table, held = brought(torch.from_numpy(block.table), self.device) if table is None else table, self.store.rows(block.first, rows)
        if last is not None:
            table[0, -len(last) :, 0] = last
        return table, read, held

    def _kept(self, block: Block) -> tuple[Tensor, list[Tensor]]:
        at = block.first, block.kept
        known = self.tables.get(at)
        if known is None or known[0] is not block.table:
            with torch.inference_mode(False):  # whoever asked first
                known = self.tables[at] = block.table, torch.from_numpy(block.table), self.store.rows(block.first, 1)
        return known[1], known[2]

    def view(self, layers: tuple[int, ...]) -> "HFView":
        """This model made of `layers` (ascending), final norm and head included, on the same cache."""
        return HFView(self, *shortened(self, layers), layers=len(layers))


@mypyc_attr(allow_interpreted_subclasses=True)
class HFView(HFModel):
    """A module that keeps a model's keys and values as the model itself does, as a drafter's model: some of its layers, or its weights in fewer bits.
    Reads the owner's cache, and reads no text into it; what it writes is scratch, which the owner overwrites when it scores."""

    own = False

    def __init__(self, owner: HFModel, module: Any, name: str, *, layers: int | None = None, weight_bytes: int = 0, tier: str = "eager:view") -> None:
        """layers: how many it has, if not as many as the owner; weight_bytes: of weights that are its own."""
        for shared in SHARED:
            setattr(self, shared, getattr(owner, shared))
        self.owner, self.module = owner, module.eval()
        self.step = Step(module, owner.store, owner.step.windows, owner.spec.vocab_size)
        self.spec = replace(owner.spec, name=name, weight_bytes=weight_bytes, layers=layers or owner.spec.layers)
        self.forwards, self.computed = 0, 0
        self.compiled, self.queued, self.meter, self.usual = None, None, Meter(tier), Usual()

    def open(self, seq: Sequence) -> None:
        """The owner's row serves."""

    def close(self, seq: Sequence) -> None: ...

    def commit(self, seqs: list[Sequence], draft: Draft, outcome: Outcome) -> None: ...

    def begin_at(self, seq: Sequence, tail: int) -> None:
        """A text is read as its owner has it."""

    def prefill(self, seqs: list[Sequence]) -> None:
        """Text is the owner's to read."""
        self.owner.prefill(seqs)

    def _serve(self, block: Block, last: Tensor | None = None, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
        for row in self.rows.all[block.first : block.first + _size(block)[0]]:
            row.writer = self
        return super()._serve(block, last, table)


def shortened(owner: HFModel, layers: tuple[int, ...]) -> tuple[Any, str]:
    """A model's module with these of its layers alone, and a name for it."""
    if not layers or list(layers) != sorted(set(layers)) or layers[-1] >= owner.spec.layers:
        raise OutriderError(
            f"layers {layers} are no view of {owner.spec.name}", f"it has layers 0..{owner.spec.layers - 1}", "ascending layer numbers"
        )
    return with_layers(owner.module, layers), f"{owner.spec.name}[{layers[0]}..{layers[-1]}]"


def _picked(out: tuple[Tensor, Tensor], race: Race | None, below: int) -> tuple[Tensor, Tensor]:
    """Of what a forward put out, the last column's token [1], and what tells how likely that is: what was found there, or the race so many nodes
    below the place. What a graph found lives until its next step."""
    logits, found = out
    if race is None:
        told = found[0, -1].clone()
        return told[:1], told
    ends = race.there(logits[0, -1:], [below])
    return ends.argmax(-1), ends[0]


def _waited(found: Tensor, behind: Behind | None) -> Tensor:
    """What a chain's forwards found, [1, n, 3], in the host's memory if it has to wait for what runs behind them, too: once for both."""
    queued = behind(found[0, :, 0]) if behind else None
    if queued is None:
        return found
    both = torch.cat([found, queued.found], 1).cpu()
    queued.found = both[:, found.shape[1] :]
    return both[:, : found.shape[1]]


def _lies(block: Block) -> int:
    """Places of what a forward found, which lies in one piece: of one row, whatever of its columns was computed together."""
    rows, width = _size(block)
    return width if rows == 1 else 0


def _size(block: Block) -> tuple[int, int]:
    """Its rows, and the columns of each."""
    if block.kept:
        return 1, block.kept
    rows, width, _ = block.table.shape
    return rows, width
