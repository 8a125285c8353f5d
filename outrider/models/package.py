"""A built step on disk, and how it is run: its code, the weights it reads, its threads.

Weights that lie beside the code and are in memory already (the model's own, another package's) are read there: two copies of a small
model drive each other out of the caches at every change from one package to the other.
"""

import contextlib
import functools
import io
import json
import os
import time
import weakref
import zipfile
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core import processor
from outrider.models import pages
from outrider.models.contention import HELD, LATE, Usual, contention, on

INDEPENDENT = {"rows": "independent"}  # said in a package's metadata
WAKE = 48 << 20  # bytes that another model's forward reads in between: a draft's first forward of a step finds nothing of its own in the caches
WIDE = 8  # columns that a step is tried with, and its threads chosen: wide steps lose most by a wrong choice; more are a text's
IN_A_ROW = 3  # forwards of a step after another model's: the later ones of a chain find what the first has read
MANY = 32  # unread tokens that are worth a forward of their own until somebody has measured it


class Package:
    """A built step. Call it as a Step. `known`: weights that are in memory, by name; `frozen`: it has its own, packed. `bytes`: what it holds beside
    `known`; `shares`: all its weights are known ones; `independent`: up to eight columns of a row get the same bits alone and together, whatever
    hidden slots are read; `note`: why it is not built as it should be, if it is not; `least`: of one that reads text, the unread tokens from which on
    it is asked; `threads`: that it has, unless others want the processors, which counts for nothing where it is `pinned`.

    Raises OSError or RuntimeError for a damaged file, KeyError for one of another model.
    """

    def __init__(self, file: Path, known: dict[str, Tensor], frozen: bool) -> None:
        about = file.stat()
        torch.cpu._init_amx()  # Linux lends a processor's tiles to a process that asks; without, code that has them would end it
        self.loader: Any = torch._C._aoti.AOTIModelPackageLoader(str(file), "model", True, 1, -1)
        self.run: Callable[[list[Any]], list[Tensor]] = self.loader.boxed_run  # asked for once
        self.threads = torch.get_num_threads()
        carried = _carried(file) if frozen else {}
        asked = [] if carried is None else self.loader.get_constant_fqns()
        carried = carried or {}
        found = {n: known[n] for n in asked if n not in carried} | {n: _same(w, known.get(n)) for n, w in carried.items()}
        self.weights = found | pages.together({n: w for n, w in found.items() if w is not known.get(n)})
        if self.weights:  # else they are part of its code
            lent = {n: _lent(w) for n, w in self.weights.items()}
            self.loader.load_constants(lent, False, True, True)
            weakref.finalize(self.loader, _let_go, list(lent.values())).atexit = False
        own = sum([w.nbytes for n, w in self.weights.items() if w is not known.get(n)])
        self.bytes = about.st_size - sum([w.nbytes for w in carried.values()]) + own
        self.shares = bool(self.weights) and own == 0
        self.pinned, self.usual = False, Usual()
        self.file, self.of, self.kept, self.least = file, [about.st_size, about.st_mtime_ns, processor.name()], (0, 0), MANY
        told = self.loader.get_metadata()
        self.independent, self.note = INDEPENDENT.items() <= told.items(), told.get("note", "")

    def __call__(self, table: Tensor, read: Tensor, rows: list[Tensor]) -> tuple[Tensor, ...]:
        if self.pinned or self.threads == 1:
            return self.on(self.threads, table, read, rows)
        return tuple(contention.call(self.usual, self.threads, [table, read, *rows], self.run))

    def on(self, threads: int, table: Tensor, read: Tensor, rows: list[Tensor]) -> tuple[Tensor, ...]:
        """The same, on so many threads."""
        return tuple(on(threads, self.run, [table, read, *rows]))

    def place(self, table: Tensor, read: Tensor, rows: list[Tensor], patience: float = 0.06) -> None:
        """Choose how many threads run it, the fewer where that is no slower: a small step waits more for its threads than they bring, but not where
        it has to fetch its weights. Measured here, the way it runs in a step: some forwards in a row after another model's."""
        counts = sorted({1, torch.get_num_threads()})

        def step(threads: int) -> None:
            for _ in range(IN_A_ROW if table.shape[1] <= WIDE else 1):  # a text is read once
                self.on(threads, table, read, rows)

        cost = seconds_of_each([functools.partial(step, n) for n in counts], patience=patience, between=another())
        if cost[-1] <= LATE * cost[0] + HELD:  # else others want the processors, which is not for good
            self.threads = counts[cost.index(min(cost))]

    def recalled(self) -> bool:
        """Was this very file found worth having on this very processor before? Then its threads are what they were, and what else was found."""
        try:
            found = json.loads(self._beside().read_text("utf-8"))
            if found["of"] == self.of and 1 <= found["threads"] <= self.threads and 1 < found["least"] <= MANY:
                self.threads, self.least = self.kept = int(found["threads"]), int(found["least"])
                return True
        except (OSError, ValueError, KeyError, TypeError):
            pass  # absent or damaged: found out anew
        return False

    def keep(self) -> None:
        """Say so beside it, for later starts. Where nothing can be written they find out anew."""
        if (self.threads, self.least) != self.kept:
            draft = self._beside().with_suffix(f".{os.getpid()}.json")
            with contextlib.suppress(OSError):
                draft.write_text(json.dumps({"of": self.of, "threads": self.threads, "least": self.least}), "utf-8")
                draft.replace(self._beside())
                self.kept = self.threads, self.least

    def _beside(self) -> Path:
        return self.file.with_suffix(".json")


def _lent(weight: Tensor) -> Tensor:
    """The same memory, as another tensor."""
    with torch.inference_mode():
        return weight.new_empty(0).set_(weight.untyped_storage(), weight.storage_offset(), weight.shape, weight.stride())


def _let_go(lent: list[Tensor]) -> None:
    """A package never lets go of tensors that it was given (torch 2.13: `MaybeOwningAtenTensorHandle` makes a handle of each, and frees none of them), so
    their memory is taken from them when nobody can run it any more."""
    with torch.inference_mode():
        for tensor in lent:
            tensor.set_()  # type: ignore[call-overload]


def another() -> Callable[[], object]:
    """What another model's forward does to the caches."""
    return torch.ones(WAKE // 4).sum


def seconds_of_each(calls: ListOf[Callable[[], object]], patience: float = 0.06, between: Callable[[], object] = int) -> list[float]:
    """The lower quartile of 3 to 50 calls of each, as many as fit into `patience` seconds a piece, made in turn: what else the machine does meanwhile
    meets all of them. What is done `between` them is not timed."""
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + patience * len(calls)
    while len(times[0]) < 3 or (len(times[0]) < 50 and time.perf_counter() < end):
        for call, taken in zip(calls, times, strict=True):
            between()
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return [sorted(taken)[len(taken) // 4] for taken in times]


def weights_of(step: nn.Module) -> dict[str, Tensor]:
    """Those of a model, by the names that they have in what is built of it."""
    own = [*step.named_parameters(remove_duplicate=False), *step.named_buffers(remove_duplicate=False)]
    return {name: weight.detach() for name, weight in own}


def _places(archive: zipfile.ZipFile) -> tuple[str, dict[str, Any]]:
    """What says where the weights beside the code lie, and by name: the file, shape, stride and offset of each. Nothing where they are part of the code."""
    told = next((name for name in archive.namelist() if name.endswith("weights_config.json")), "")
    return told, json.loads(archive.read(told)) if told else {}


def _part(archive: zipfile.ZipFile, told: str, part: str) -> Tensor:
    found: Tensor = torch.load(io.BytesIO(archive.read(_beside_code(told, part))), weights_only=True)
    return found


def _beside_code(told: str, part: str) -> str:
    return f"{told.partition('/')[0]}/data/weights/{part}"


def _carried(file: Path) -> dict[str, Tensor] | None:
    """The weights that lie in a package beside its code, by name; None where they are part of the code."""
    try:
        with zipfile.ZipFile(file) as archive:
            told, places = _places(archive)
            whole = {part: _part(archive, told, part) for part in {place[0] for place in places.values()}}
    except Exception as broken:  # zip, JSON, pickle and torch each have errors of their own
        raise OSError(f"its weights cannot be read ({broken})") from broken
    return {name: whole[part].as_strided(shape, stride, offset) for name, (part, shape, stride, offset) in places.items()} if told else None


def complete(file: Path) -> bool:
    """Do all weights that its code asks for lie beside it, if any do?"""
    if carried := _carried(file):
        try:
            torch._C._aoti.AOTIModelPackageLoader(str(file), "model", True, 1, -1).load_constants(carried, False, True, True)
        except RuntimeError:
            return False
    return True


def leave_out(file: Path, known: dict[str, Tensor]) -> None:
    """Take from a package the weights that the model has, by their names: there they are read."""
    draft = file.with_name(f"less-{file.name}")
    with zipfile.ZipFile(file) as archive, zipfile.ZipFile(draft, "w") as less:
        told, places = _places(archive)
        kept = {
            name: place
            for name, place in places.items()
            if name not in known or not _alike(_part(archive, told, place[0]).as_strided(*place[1:]), known[name])
        }
        gone = {_beside_code(told, place[0]) for place in places.values()} - {_beside_code(told, place[0]) for place in kept.values()}
        for item in archive.infolist():
            if item.filename not in gone:
                less.writestr(item, json.dumps(kept) if item.filename == told else archive.read(item))
    draft.replace(file)


def _alike(weight: Tensor, other: Tensor) -> bool:
    """To the bit, and laid out likewise?"""
    about = [(x.shape, x.stride(), x.dtype) for x in (weight, other)]
    return about[0] == about[1] and torch.equal(weight, other)


def _same(weight: Tensor, known: Tensor | None) -> Tensor:
    """The known one, if it is the same."""
    return weight if known is None or not _alike(weight, known) else known
