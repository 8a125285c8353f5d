"""From logits to the distribution a token is drawn from, at any place of the forest, and the one argmax rule.

`warp` treats a draft node exactly as plain decoding would treat the same text: penalties see the node's ancestors,
min_tokens sees its depth. Drafters warp their own logits with the same settings, so q is what was sampled from.
"""

from dataclasses import dataclass
from math import inf, isinf, isnan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.noise import NEAR, Races, RowNoise, races
from outrider.core.types import Draft, Ints, Places, SamplingParams, Scores, Sequence

HOST = ("cpu",)  # devices whose logits lie in this memory
FEW = 6  # places whose logits are brought over from another: that is one wait, the vectorised rules wait at every question
READ = torch.bfloat16, torch.float32, torch.float64  # what machine code reads as it lies
SWALLOWING = 1e3  # of a bias or a penalty: beside it float32 would lose what a token's own logit says
BARS = (-8.0, -inf)  # how far behind the largest logit those lie that are sorted, if the ones before are not enough


def argmax(logits: Tensor) -> Tensor:
    """[n, V] -> [n]: the largest in (at least) float32, ties to the lowest id. NaN is an error, never a token."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    best = x.argmax(-1)  # documented: the first of equal maxima
    if bool(x.gather(-1, best[:, None]).isnan().any()):
        raise not_a_number()
    return best


def decided(scores: Scores) -> tuple[list[int], list[float]]:
    """The most likely token of each asked place by its raw logits, and its log-probability: what the model's own step
    found, where it looked."""
    if scores.found is None:
        token = argmax(scores.logits)
        logp = torch.log_softmax(scores.logits if scores.logits.dtype == torch.float64 else scores.logits.float(), -1)
        return token.tolist(), logp.gather(-1, token[:, None])[:, 0].tolist()
    if races is not None and scores.lies:
        read = races.decided(scores.found.data_ptr(), scores.lies, scores.at)
        if read is None:
            raise not_a_number()
        return read
    lines = scores.found.tolist()
    if len(lines) == len(lines[0]) == 1 and not isnan(lines[0][0][1]):  # one place
        ((token, value, mass),) = lines[0]
        return [int(token)], [value - mass]
    found = lines[0] if len(lines) == 1 else [triple for line in lines for triple in line]
    asked = found if scores.at is None else [found[i] for i in scores.at]
    chosen = [value - mass for _, value, mass in asked]
    if isnan(sum(chosen)) and any(isnan(value) for _, value, _ in asked):
        raise not_a_number()
    return [int(token) for token, _, _ in asked], chosen


def not_a_number() -> OutriderError:
    return OutriderError("the model returned NaN logits", "its weights or its dtype overflow", "load it with dtype=float32")


def top_logprobs(logits: Tensor, token: int, count: int) -> dict[int, float]:
    """Log-softmax of raw logits [V] for the emitted token and the `count` most likely ones."""
    logp = torch.log_softmax(logits.float(), -1)
    best = logp.topk(min(count, len(logp))).indices.tolist() if count else []
    return {t: float(logp[t]) for t in dict.fromkeys([token, *best])}


def needs_history(s: SamplingParams) -> bool:
    return s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class Settings:
    """The sampling settings of a batch, as vectors over rows, and the sequences whose history they look at."""

    seqs: list[Sequence]
    params: list[SamplingParams]
    greedy: np.ndarray
    coupled: np.ndarray
    bare: bool  # nothing is added, penalised or held back
    all_greedy: bool
    raw: bool  # bare, and all greedy

    @classmethod
    def of(cls, seqs: list[Sequence]) -> "Settings":
        params = [s.request.sampling for s in seqs]
        greedy = np.array([p.temperature == 0 for p in params], bool)
        bare = not any(p.logit_bias or p.min_tokens or needs_history(p) for p in params)
        cold = bool(greedy.all())
        return cls(seqs, params, greedy, np.array([s.request.rule == "coupled" for s in seqs], bool), bare, cold, bare and cold)

    def column(self, name: str, rows: Ints, like: Tensor) -> Tensor:
        """One setting for each of `rows`, as a column [n, 1]."""
        values = [getattr(self.params[r], name) for r in rows.tolist()]
        if values.count(values[0]) == len(values):
            return like.new_full((len(values), 1), values[0])  # a device is told that without a wait
        return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]

    def any(self, name: str, default: float) -> bool:
        return any(getattr(p, name) != default for p in self.params)


def process(logits: Tensor, places: Places, draft: Draft, settings: Settings) -> Tensor:
    """Bias, penalties and min_tokens. logits [places, V] -> the same, float32 or wider."""
    x = logits.double() if logits.dtype == torch.float64 or any(map(_swallows, settings.params)) else logits.float()
    rows = tree.row_of(places, draft)
    if any(p.logit_bias for p in settings.params):
        x = x + _bias(x, rows, settings)
    if any(needs_history(p) for p in settings.params):
        x = _penalise(x, places, rows, draft, settings)
    if any(p.min_tokens for p in settings.params):
        x = _hold_ends(x, places, rows, draft, settings)
    return x


def _bias(x: Tensor, rows: Ints, settings: Settings) -> Tensor:
    bias = torch.zeros_like(x)
    for i, row in enumerate(rows.tolist()):
        for token, value in settings.params[row].logit_bias:
            bias[i, token] += value
    return bias


def _swallows(p: SamplingParams) -> bool:
    return any(abs(value) > SWALLOWING for value in (p.presence_penalty, p.frequency_penalty, *[bias for _, bias in p.logit_bias]))


def _penalise(x: Tensor, places: Places, rows: Ints, draft: Draft, settings: Settings) -> Tensor:
    vocab = x.shape[-1]
    seen, written = np.zeros((2, len(places), vocab), np.float64)
    for i, (place, row) in enumerate(zip(places, rows.tolist(), strict=True)):
        seq, path = settings.seqs[row], draft.text(tree.ancestors(draft, place))
        if needs_history(settings.params[row]):
            written[i] = np.bincount(np.array([*seq.generated, *path], np.int64), minlength=vocab)[:vocab]
            seen[i] = written[i] + np.bincount(np.array(seq.request.prompt, np.int64), minlength=vocab)[:vocab]
    count, there = torch.from_numpy(written).to(x), torch.from_numpy(seen > 0).to(x.device)
    strength = settings.column("repetition_penalty", rows, x)
    x = torch.where(there, torch.where(x > 0, x / strength, x * strength), x)
    x = x - settings.column("presence_penalty", rows, x) * (count > 0)
    return x - settings.column("frequency_penalty", rows, x) * count


def _hold_ends(x: Tensor, places: Places, rows: Ints, draft: Draft, settings: Settings) -> Tensor:
    x, depth = x.clone(), tree.depth_of(places, draft)
    for i, row in enumerate(rows.tolist()):
        seq = settings.seqs[row]
        ends = [t for t in seq.request.ends if t < x.shape[-1]]
        if ends and seq.produced + depth[i] < settings.params[row].min_tokens:
            x[i, ends] = -torch.inf
    return x


def _truncate(x: Tensor, rows: Ints, settings: Settings) -> Tensor:
    """Top-k, then top-p of what is left, then min-p of what is left."""
    if settings.any("top_k", 0) or settings.any("top_p", 1.0):
        values, order = x.sort(dim=-1, descending=True, stable=True)
        k = settings.column("top_k", rows, x)
        rank = torch.arange(x.shape[-1], device=x.device)
        values = values.masked_fill((rank >= k) & (k > 0), -torch.inf)
        p = values.softmax(-1)
        mass = settings.column("top_p", rows, x)
        values = values.masked_fill((p.cumsum(-1) - p >= mass) & (mass < 1), -torch.inf)  # 1 keeps all: sums round
        x = torch.empty_like(x).scatter_(-1, order, values)
    if settings.any("min_p", 0.0):
        p = x.softmax(-1)
        x = x.masked_fill(p < settings.column("min_p", rows, x) * p.amax(-1, keepdim=True), -torch.inf)
    return x


def warp(logits: Tensor, places: Places, draft: Draft, settings: Settings) -> Tensor:
    """Log-probabilities [places, V] of the next token at each place. Greedy rows get the one-hot limit."""
    x = process(logits, places, draft, settings)
    rows = tree.row_of(places, draft)
    out = torch.log_softmax(_truncate(x / _warmth(rows, settings, x), rows, settings), -1)
    if not settings.greedy.any():
        if isnan(out.amax().item()):  # the largest of numbers among which there is none is none
            raise not_a_number()
        return out
    greedy = torch.from_numpy(settings.greedy[rows]).to(x.device)
    if bool((out.isnan().any(-1) & ~greedy).any()):
        raise not_a_number()
    hot = torch.full_like(out, -torch.inf).scatter_(-1, argmax(x)[:, None], 0.0)
    return torch.where(greedy[:, None], hot, out)


def _warmth(rows: Ints, settings: Settings, like: Tensor) -> Tensor | float:
    """The temperature of each of `rows`, [n, 1], or of all; 1 where it is greedy."""
    known = [p.temperature or 1.0 for p in settings.params]
    if known.count(known[0]) == len(known):
        return known[0]
    return torch.tensor([[known[r]] for r in rows.tolist()], dtype=like.dtype, device=like.device)


def raced_there(logits: Tensor, rows: Ints, depth: Ints, settings: Settings, noise: RowNoise) -> Tensor:
    """The races of places on a device, float64 [n, V]: whoever ends first has won, as `raced` says of one place on the host. logits [n, V], of which
    `rows` and how many tokens behind their texts (`depth`); for settings that are `bare`, of rows that all sample. The host waits for nothing, unless
    rows differ in their settings. Sums of top-p are those of one place alone, however many there are."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    x = (x - x.amax(-1, keepdim=True)) / _warmth(rows, settings, x)
    if settings.any("top_p", 1.0):
        x = torch.cat([_truncate(x[i : i + 1], rows[i : i + 1], settings) for i in range(len(rows))])
    else:
        x = _truncate(x, rows, settings)
    return noise.race(x.double(), rows, depth)


def winners(races: Tensor) -> Tensor:
    """Who won each of `raced_there`, and how sure that is: float64 [n, 3], as `Scores.found` has the likeliest."""
    best = races.amax(-1, keepdim=True)  # NaN if any is
    behind = races - best
    mass = torch.where(behind >= -NEAR, behind.exp(), 0.0).sum(-1).log()
    return torch.stack([races.argmax(-1).double(), (best - best)[:, 0], mass], -1)


# The same of one place, on the host.


def near(device: str) -> bool:
    """Does what a device of this name computes lie in the host's memory?"""
    return device in HOST or device.partition(":")[0] in HOST


def within(tensor: Tensor) -> bool:
    """The same of what lies there: is it in the host's memory?"""
    return tensor.is_cpu and "cpu" in HOST


def hosted(logits: Tensor) -> bool:
    """Are these [..., V] looked at on the host, a place at a time?"""
    return within(logits) or logits.shape[:-1].numel() <= FEW


def on_host(logits: Tensor) -> NDArray[Any]:
    """[..., V] -> [n, V], without a copy where they lie there; of bfloat16 the bits."""
    return seen(logits.cpu())


def seen(logits: Tensor) -> NDArray[Any]:
    """The same of some that were brought there."""
    x = logits.view(torch.int16) if logits.dtype == torch.bfloat16 else logits
    return x.numpy().reshape(-1, x.shape[-1])


def line(raw: NDArray[Any], place: int, draft: Draft, settings: Settings) -> tuple[NDArray[Any], int]:
    """From what `on_host` gave of a place: its processed logits [V] over its row's temperature, less the largest, in float32
    or wider, and where that is."""
    x = (raw.astype(np.uint32) << 16).view(np.float32) if raw.dtype == np.int16 else raw if raw.dtype == np.float64 else raw.astype(np.float32)
    if not settings.bare:
        x = process(torch.from_numpy(x)[None], [place], draft, settings)[0].numpy()
    best, warmth = int(x.argmax()), settings.params[tree.row_at(draft, place)].temperature
    if isnan(top := x[best]) or (warmth and isinf(top)):  # the first that is no number, if any is
        raise not_a_number()
    return (x - top) / float(warmth) if warmth not in (0.0, 1.0) else x - top, best


def raced(logits: Tensor, at: int, place: int, draft: Draft, settings: Settings, noise: RowNoise, below: int = 0) -> tuple[int, float]:
    """Who wins the race at a place whose logits are the `at`-th of [..., V] in the host's memory, and its share among those that come near it.
    `below`: so many nodes after that place, which the draft does not hold yet; for settings that are `bare`."""
    row = tree.row_at(draft, place)
    s, depth, vocab = settings.params[row], tree.depth_at(draft, place) + 1 + below, logits.shape[-1]
    if races is not None and _readable(logits, s, settings):
        size = logits.element_size()
        won = races.won(*noise.races_at(logits.data_ptr() + at * vocab * size, size, vocab, s.temperature, row, depth))
        if won[0] < 0:
            raise not_a_number()
        return won
    x, _ = line(seen(logits)[at], place, draft, settings)
    return noise.won(x, row, depth, kept(x, s))


@dataclass(slots=True)
class Race:
    """Those at a place and at the nodes of a chain below it, which the draft does not hold yet; for settings that are `bare`."""

    draft: Draft
    place: int
    settings: Settings
    noise: RowNoise
    known: tuple[int, int, float, float, int, int, int] | None = None  # what machine code asks beside an address: the same for all logits of a model

    def won(self, logits: Tensor, at: int, below: int) -> tuple[int, float]:
        """`raced` after so many nodes."""
        return raced(logits, at, self.place, self.draft, self.settings, self.noise, below)

    def there(self, logits: Tensor, below: list[int]) -> Tensor:
        """`raced_there` of logits [n, V], each of which stands after so many nodes."""
        return raced_there(logits, *self._at(below), self.settings, self.noise)

    def foresee(self, below: int, like: Tensor) -> None:
        """Look up at once what the races after 0, 1, ... and so many nodes will ask for, one by one, over logits `like` these."""
        self.noise.lookup(*self._at(list(range(below + 1))), like.shape[-1], like.device, torch.float64)

    def _at(self, below: list[int]) -> tuple[Ints, Ints]:
        return np.full(len(below), tree.row_at(self.draft, self.place)), np.array(below) + tree.depth_at(self.draft, self.place) + 1

    def asked(self, logits: Tensor) -> Races | None:
        """What machine code asks of those over some lines of a model's logits; None: it does not know how they are run."""
        if self.known is None:
            row = tree.row_at(self.draft, self.place)
            s = self.settings.params[row]
            if not _readable(logits, s, self.settings):
                return None
            depth = tree.depth_at(self.draft, self.place) + 1
            self.known = self.noise.races_at(0, logits.element_size(), logits.shape[-1], s.temperature, row, depth)[1:]
        return (logits.data_ptr(), *self.known) if logits.is_contiguous() else None


def walked(scores: Scores, draft: Draft, settings: Settings, noise: RowNoise) -> tuple[list[int], int] | None:
    """The nodes of one row's draft that win the races at their parents, from the text's end on, and who wins after the last. None: `raced` is to be
    asked, place by place."""
    logits, s = scores.computed, settings.params[0]
    if races is None or draft.rows > 1 or s.temperature == 0 or not _readable(logits, s, settings):
        return None
    vocab = logits.shape[-1]
    given = noise.races_at(logits.data_ptr(), logits.element_size(), vocab, s.temperature, 0, 1)
    told = races.walked(given, logits.numel() // vocab, scores.at, draft.parent, draft.token)
    if told[1] < 0:
        raise not_a_number()
    return told


def _readable(logits: Tensor, s: SamplingParams, settings: Settings) -> bool:
    """Does machine code know how they lie, and all that is done to them?"""
    return settings.bare and logits.dtype in READ and not bounded(s) and logits.is_contiguous()


def bounded(s: SamplingParams) -> bool:
    """Are ids left out?"""
    return bool(s.top_k) or s.top_p < 1 or s.min_p > 0


def kept(x: NDArray[Any], s: SamplingParams) -> NDArray[np.int64] | None:
    """The ids, ascending, that are left of a `line` by top-k, then top-p of these, then min-p of these; None: all."""
    if not bounded(s):
        return None
    ids = _foremost(x, s) if s.top_k or s.top_p < 1 else np.arange(len(x))
    if s.min_p:
        ids = ids[np.exp(x[ids]) >= s.min_p]
    return ids


def _foremost(x: NDArray[Any], s: SamplingParams) -> NDArray[np.int64]:
    """Top-k, then top-p: the least of what they leave is found by sorting the likeliest. Ties go to the lowest id."""
    whole = 0.0 if s.top_k else float(np.exp(x).sum(dtype=np.float64))
    for bar in BARS:
        ranked = np.sort(x[x >= bar])[::-1][: s.top_k or None]
        if len(ranked) < s.top_k and bar > BARS[-1]:
            continue
        p = np.exp(ranked, dtype=np.float64)
        inside = len(p) if s.top_p >= 1 else int((p.cumsum() - p < s.top_p * (whole or p.sum())).sum())  # 1 keeps all: sums round
        if s.top_k or inside < len(p):
            break
    ids = np.flatnonzero(x >= ranked[inside - 1])
    if len(ids) > inside:
        ids = np.delete(ids, np.flatnonzero(x[ids] == ranked[inside - 1])[inside - len(ids) :])
    return ids


def weights(x: NDArray[Any], s: SamplingParams) -> NDArray[Any]:
    """Of a `line`: what each id [V] is drawn by, not normalised; 0 where nothing is left of it."""
    shares: NDArray[Any] = np.exp(x)
    ids = kept(x, s)
    if ids is None:
        return shares
    left: NDArray[Any] = np.zeros_like(shares)
    left[ids] = shares[ids]
    return left
