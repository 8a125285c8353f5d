"""Addressed randomness: a number is looked up by its address, never drawn from a stream.

Two verbs: `flip` (accept?) and `draw` (which token?), of many addresses or, on the host, of one. An address is (seed, time,
purpose, index). Under `exact`, time is the row's step counter, so that every step is fresh; under `coupled`, a token's noise
hangs on its position in the text alone, and drafter and target share it. Any object with these verbs will do: tests pass an
enumerator.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.types import Ints

try:
    from outrider.core import races as races  # noqa: PLC0414
except ImportError:
    races = None  # type: ignore[assignment]  # races.c, where `runtime.native` has built it

Races = tuple[int, int, int, float, float, int, int, int]  # what machine code asks of some: see races.pyi
DRAFT, ACCEPT, BONUS, POSITION = 1, 2, 3, 4  # purposes

_GOLDEN = 0x9E3779B97F4A7C15
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROUNDS, _LAST = ((np.uint64(30), np.uint64(_M1)), (np.uint64(27), np.uint64(_M2))), np.uint64(31)
_ALL = (1 << 64) - 1
_KEPT = np.uint64(12)  # bits of an address that noise leaves aside
FEW = 8  # addresses that are hashed one by one
NEAR = 3.0  # how far behind the first of a race one is still looked at: further behind, it counts for less than a twentieth
REACH = NEAR + math.log(2.0**52) + 1e-3  # the same before the bits of noise are scaled; rounding leaves none out


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), in place."""
    for shift, factor in _ROUNDS:  # products of arrays wrap without a word
        x ^= x >> shift
        x *= factor
    x ^= x >> _LAST
    return x


def _mix_one(x: int) -> int:
    x = (x ^ (x >> 30)) * _M1 & _ALL
    x = (x ^ (x >> 27)) * _M2 & _ALL
    return x ^ (x >> 31)


def address(*words: Ints) -> NDArray[np.uint64]:
    """Hash integer words, each [n], to uint64 [n]. Order matters."""
    if np.shape(words[0]) and len(words[0]) <= FEW:
        return np.array([_address_of(line) for line in zip(*[np.asarray(word).tolist() for word in words], strict=True)], np.uint64)
    with np.errstate(over="ignore"):
        out = np.zeros(np.shape(words[0]), np.uint64)
        for word in words:
            out = _mix((out + np.uint64(_GOLDEN)) ^ _mix(np.asarray(word).astype(np.uint64) + np.uint64(_GOLDEN)))
        return out


def _address_of(words: Iterable[int]) -> int:
    """The same of one address, in plain integers: for a few of them many times as fast as arrays."""
    out = 0
    for word in words:
        out = _mix_one((out + _GOLDEN & _ALL) ^ _mix_one(word + _GOLDEN & _ALL))
    return out


def uniform(key: NDArray[np.uint64]) -> NDArray[np.float64]:
    """[n] addresses to [n] numbers in [0, 1), 53 bits."""
    return (key >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _shift(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)  # int64 shifts keep the sign: mask it away


def gumbel(key: NDArray[np.uint64], vocab: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise [n, vocab]: entry v is a function of (key, v) alone, on every device."""
    if device.type == "cpu":  # the same numbers, several times as fast
        bits = _mix(key[:, None] + _steps(vocab))
        bits >>= _KEPT
        return _gumbel(torch.from_numpy(bits.view(np.int64)), dtype)
    ids = torch.arange(1, vocab + 1, dtype=torch.int64, device=device)
    x = brought(torch.from_numpy(key.view(np.int64)), device)[:, None] + ids * _signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(_M1)
    x = (x ^ _shift(x, 27)) * _signed(_M2)
    return _gumbel(_shift(x ^ _shift(x, 31), 12), dtype)


def brought(x: Tensor, device: torch.device) -> Tensor:
    """The same of the host's memory where a device is, for which the host does not wait. What lies here may be written to at once."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


@lru_cache(8)
def _steps(vocab: int) -> NDArray[np.uint64]:
    """What is added to an address for each entry."""
    with np.errstate(over="ignore"):
        return np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(_GOLDEN)


def _gumbel(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """From 52 random bits each: the fewer they say, the larger."""
    w = bits.to(torch.float64).add_(0.5).mul_(-(2.0**-52))  # never 0 or -1
    return w.log1p_().neg_().log_().neg_().to(dtype)


@dataclass(slots=True)
class RowNoise:
    """The noise of a batch: per row its seed, its step counter and the length of its committed text, each [rows], as an array or as plain numbers,
    which are quicker for few.

    `known` and `bits`: what races of this step have looked up, for drafter and target look up the same.
    """

    seed: Ints | tuple[int, ...]
    step: Ints | tuple[int, ...]
    length: Ints | tuple[int, ...]
    known: dict[tuple[object, ...], Tensor] = field(default_factory=dict, compare=False)
    bits: dict[tuple[int, int, int], NDArray[np.uint64]] = field(default_factory=dict, compare=False)

    def flip(self, p: Tensor, row: Ints, index: Ints) -> Tensor:
        """True with probability p. p [n], row [n], index [n] (a node's number within its row) -> bool [n]."""
        u = uniform(address(*self._moment(row), np.full_like(row, ACCEPT), index))
        return torch.from_numpy(u).to(p.device) < p

    def draw(self, p: Tensor, row: Ints, purpose: int, index: Ints) -> Tensor:
        """A token from each row of p [n, V] (need not be normalised) -> int64 [n]."""
        u = uniform(address(*self._moment(row), np.full_like(row, purpose), index))
        total = p.double().cumsum(-1)
        at = torch.from_numpy(u).to(p.device)[:, None] * total[:, -1:]
        found = torch.searchsorted(total, at, right=True)[:, 0]
        last = p.shape[-1] - 1 - (p > 0).flip(-1).to(torch.int8).argmax(-1)  # rounding must not pass the support
        return torch.minimum(found, last)

    def race(self, logp: Tensor, row: Ints, depth: Ints) -> Tensor:
        """logp [n, V] plus the Gumbel noise of the position `depth` tokens after the committed text: its argmax is a
        sample, and the same noise serves drafter and target (2408.07978)."""
        return logp + torch.stack(self.lookup(row, depth, logp.shape[-1], logp.device, logp.dtype))

    def lookup(self, row: Ints, depth: Ints, vocab: int, *like: Any) -> list[Tensor]:
        """The noise of these positions, each [vocab], `like` a device and a dtype; kept for this step."""
        asked = [(r, d, vocab, *like) for r, d in zip(row.tolist(), depth.tolist(), strict=True)]
        missing = [i for i, name in enumerate(asked) if name not in self.known]
        if missing:
            some = row[missing]
            key = address(np.asarray(self.seed)[some], np.asarray(self.length)[some] + depth[missing], np.full(len(missing), POSITION))
            self.known.update(zip([asked[i] for i in missing], gumbel(key, vocab, *like), strict=True))
        return [self.known[name] for name in asked]

    def flip_one(self, p: float, row: int, index: int) -> bool:
        """`flip` of one row, in plain numbers."""
        return self._uniform(row, ACCEPT, index) < p

    def draw_one(self, weights: NDArray[Any], row: int, purpose: int, index: int) -> int:
        """`draw` of one row. weights [V], not all 0."""
        total = np.cumsum(weights, dtype=np.float64)
        found = int(np.searchsorted(total, self._uniform(row, purpose, index) * total[-1], "right"))
        return found if found < len(weights) else int(np.flatnonzero(weights)[-1])  # rounding must not pass the support

    def _moment(self, row: Ints) -> tuple[Ints, Ints]:
        """Seed and step of each of these rows."""
        return np.asarray(self.seed)[row], np.asarray(self.step)[row]

    def _uniform(self, row: int, purpose: int, index: int) -> float:
        return (_address_of((int(self.seed[row]), int(self.step[row]), purpose, index)) >> 11) * 2.0**-53

    def won(self, x: NDArray[Any], row: int, depth: int, among: NDArray[np.int64] | None = None) -> tuple[int, float]:
        """Of the race over x [V], or over its entries `among` alone: who wins it, and its share among all that end within NEAR of it."""
        ids, values = self.contenders(x, row, depth, among)
        first = int(values.argmax())
        behind = values - values[first]
        return int(ids[first]), 1 / float(np.exp(behind[behind >= -NEAR]).sum())

    def races_at(self, address: int, size: int, vocab: int, warmth: float, row: int, depth: int) -> Races:
        """What machine code asks of the same over logits as they lie in memory, `depth` tokens after the committed text: see races.pyi."""
        return address, size, vocab, warmth, NEAR, int(self.seed[row]), int(self.length[row]) + depth, POSITION

    def contenders(
        self, x: NDArray[Any], row: int, depth: int, among: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Of the race over x [V], or over its entries `among` alone, the first and all that end near it: their ids, ascending, and their x plus
        noise.

        Noise is -log(-log(1 - w)), which is less than -log(w): one rough logarithm each tells which few may be among them.
        """
        bits = self._bits(row, depth, len(x))
        if among is not None:
            x, bits = x[among], bits[among]
        most = x - np.log(bits.astype(x.dtype))
        lead = int(most.argmax())
        near = np.flatnonzero(most >= x[lead] - math.log(-math.log1p(-(float(bits[lead]) + 0.5) * 2.0**-52)) - REACH)
        values = x[near] - np.log(-np.log1p((bits[near] + 0.5) * -(2.0**-52)))
        return near if among is None else among[near], values

    def _bits(self, row: int, depth: int, vocab: int) -> NDArray[np.uint64]:
        """52 random bits for each entry of the position `depth` tokens after the committed text."""
        if (row, depth, vocab) not in self.bits:  # a draft model may know fewer ids
            key = _address_of((int(self.seed[row]), int(self.length[row]) + depth, POSITION))
            self.bits[row, depth, vocab] = _mix(_steps(vocab) + np.uint64(key)) >> _KEPT
        return self.bits[row, depth, vocab]
