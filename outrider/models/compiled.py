"""Compiled steps: what serves a model's forwards once another process has built it, from then on and at every later start.

A model gets at most three packages: `any`, whose rows, width and context are symbols, so that one serves every shape; `one`, for a single row of a
single token, which is a little faster; and `prefill`, which reads the text of a row and leaves out what only logits hang on. They are built by a
low-priority process and kept on disk, so eager forwards serve at once and nobody waits. Weights are frozen into a package where memory allows it
(packed and joined: measured at 1.7 times the speed on small models); else packages borrow the model's own. Invariant: a package is used only after it
has agreed with the eager step on this very model.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from outrider.core import processor
from outrider.core.cache import cache_folder, contents, held, read_before, start, used
from outrider.core.errors import OutriderError
from outrider.core.types import MAX_NODES
from outrider.models.contention import ALL, contention, fewer
from outrider.models.files import weight_files
from outrider.models.kv import slots_for
from outrider.models.package import MANY, WIDE, Package, another, seconds_of_each, weights_of
from outrider.models.quantised import inexact
from outrider.models.step import Prefill, Step

VERSION = 22  # of what is built here: raise it when a package of before must not be used
COMPILED = "compiled"  # the tier that records say
WITHOUT = f"{COMPILED}:without-"  # the same, and what of it is slower than it might be
PREFILL = "prefill"
STEPS, SHAPES = ("any", "one"), ("any", "one", PREFILL)  # those that tell logits; all, in the order in which they are built
BUILDER = "outrider.models.builder"  # the module that a process runs to build them
HOT = 3  # looks in vain, each POLL apart, after which building begins: the first tokens of a process come undisturbed
POLL = 0.2  # seconds between looks at the disk while another process builds
NOT_COMPILED, AGAIN = "eager:not-compiled", 3600.0  # what may be otherwise next time; seconds after which it is tried again
WAIT = 1800  # seconds after which `wait` gives up
COLD = 0.5  # of a step: what it is assumed to cost to go from one copy of the weights to the other, and back
# Seconds until threads are chosen again, twice as many each time up to so many, and what that may take, by package and choice.
SOON, SELDOM, BRIEF = 2.0, 600.0, 0.02
LATEST, WORSE = 8.0, 1.1  # single tokens in a row after which `one` serves, however little it seems to save, unless it takes so many times as long
LONG = 128  # columns by which `prefill` is tried, and its threads chosen
FEWER = (16, 8)  # unread tokens that may be worth a forward of their own already, by which that is asked
BEHIND = 8  # tokens of the text that they are tried on
COLUMNS = {"any": WIDE, "one": 1, PREFILL: LONG}
DIFFERS = 0.25  # `apart`: another model, or another attention, is further away
ROUNDED = 2.0  # times as far a package may be, and in the mean, whose inputs are rounded to 8 bits: of any difference that makes units in deep models
log = logging.getLogger("outrider")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a package is built from. frozen: the shapes that carry the weights; vocab: logits kept; quantise: `LoadSettings.quantise`."""

    folder: str
    dtype: str
    threads: int
    vocab: int
    frozen: tuple[str, ...] = SHAPES
    quantise: str | None = None

    def place(self) -> Path:
        """The folder of its packages: a hash of all that they depend on, contents of files included."""
        digest = hashlib.blake2b(digest_size=12)
        about = (
            VERSION,
            torch.__version__,
            transformers.__version__,
            torch.backends.cpu.get_cpu_capability(),  # which a user may have lowered
            processor.instructions(),
            dataclasses.astuple(self)[1:],
        )
        digest.update(repr(about).encode())
        for file in self._files():
            digest.update(contents(file))
        return cache_folder() / "steps" / digest.hexdigest()

    def quick(self) -> bool:
        """Is its place found without reading the weights?"""
        return all(map(read_before, self._files()))

    def _files(self) -> list[Path]:
        """All that packages carry a part of."""
        folder = Path(self.folder)
        return [*sorted(folder.glob("config.json")), *(weight_files(folder) if self.frozen else [])]


def worth_freezing(weights: int, free: int) -> tuple[str, ...]:
    """The shapes whose packages may carry a copy of `weights` bytes when `free` bytes are: all may take a quarter."""
    return SHAPES[: min(len(SHAPES), free // 4 // max(weights, 1))]


def has_compiler() -> bool:
    """Is there a C++ compiler to build packages with?"""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


class Compiled:
    """The packages of one model, found on disk or awaited. `reason` says why there is none, as `eager:...`; `tier`, what serves where one is: one for
    all of its steps, for costs are kept by it."""

    def __init__(self, recipe: Recipe, step: Step, shapes: tuple[str, ...] = SHAPES) -> None:
        """shapes: those that are wanted of what is built."""
        self.recipe, self.step, self.shapes = recipe, step, shapes
        self.new = not recipe.quick()  # never seen here: to look for its packages takes reading its weights, and can wait for its first token
        self.found: Path | None = None
        self.packages: dict[str, Package] = {}
        self.reason, self.tier, self.looked = "eager:building", COMPILED, 0.0
        self.misses, self.singles, self.steady = 0, 1 << 30, 0.0
        self.placed, self.trusted = time.monotonic(), SOON
        if not self.new:
            self.look()
        if self.reason == "eager:building" and not has_compiler() and not self._whole():
            self.reason = "eager:no-compiler"
            _say_once("no C++ compiler (g++) was found: model steps run eagerly, several times slower than compiled ones")

    @property
    def folder(self) -> Path:
        """Where its packages are, or will be."""
        if self.found is None:
            self.found = self.recipe.place()
        return self.found

    @property
    def bytes(self) -> int:
        """Held by packages that carry weights, those that they share counted once."""
        return sum(package.bytes for shape, package in self.packages.items() if shape in self.recipe.frozen)

    @property
    def independent(self) -> bool:
        """Does the wide package give every column the bits that it has alone? (`Package`)"""
        return "any" in self.packages and self.packages["any"].independent

    @property
    def least(self) -> int:
        """Unread tokens from which on `prefill` reads them, and a step only the last."""
        return self.packages[PREFILL].least if PREFILL in self.packages else MANY

    def _file(self, shape: str) -> Path:
        return self.folder / f"{shape}.pt2"

    @property
    def building(self) -> bool:
        """Are packages still to be built?"""
        return self.reason == "eager:building" and (self.new or not self._whole())

    def _whole(self) -> bool:
        return all(self._file(shape).exists() for shape in self.shapes)

    def _start(self) -> None:
        """See to it that the packages are being built, if they can be: somebody waits for a text, not for them."""
        self.misses = HOT
        try:
            if self._whole() or self.reason != "eager:building":
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._failed() and not held(BUILDER, self.folder):
                start_builder(self.recipe, self.folder)
        except (OSError, OutriderError) as bad:
            self._give_up(bad)

    def _give_up(self, bad: Exception) -> None:
        """Nothing can be kept on disk: a full one, or one that may not be written to."""
        self.reason = "eager:no-cache"
        _say_once(f"model steps run eagerly ({self.reason}): nothing can be kept: {str(bad).splitlines()[0]}")

    def _failed(self) -> bool:
        """Did building them fail? What may have been the machine's fault, a full disk or a broken compiler, is tried again after a while."""
        file = self.folder / "failed"
        if not file.exists():
            return False
        reason, _, why = file.read_text("utf-8").partition("\n")
        self.reason = reason or NOT_COMPILED
        again = self.reason == NOT_COMPILED
        if again and time.time() - file.stat().st_mtime > AGAIN:
            file.unlink(missing_ok=True)
            self.reason = "eager:building"
            return False
        told = (why.strip() or "nothing could be written").splitlines()[0]
        _say_once(
            f"model steps run eagerly ({self.reason}): compiled ones could not be built: {told[:200]}. More in {self.folder / 'log'}"
            + (f"; tried again in an hour, or at once without {file}" if again else "")
        )
        return True

    def get(self, rows: int, width: int) -> Package | None:
        """The package for a forward of this shape, if it is there by now."""
        if self.new:
            self.new, self.looked = False, time.monotonic()
        if len(self.packages) < len(self.shapes) and self.reason == "eager:building" and time.monotonic() - self.looked > POLL:
            self.look()
            self.misses += 1
            if self.misses == HOT:
                self._start()
        self.singles = self.singles + 1 if rows == width == 1 else 0
        if self.singles and "one" in self.packages and (self.singles > self.steady or "any" not in self.packages):
            return self.packages["one"]
        return self.packages.get("any") if width <= MAX_NODES else None

    def look(self) -> None:
        """Take up what has been built since the last look."""
        self.new = False
        try:
            self._take_up()
        except (OSError, OutriderError) as bad:
            self._give_up(bad)
        self.looked = time.monotonic()

    def _take_up(self) -> None:
        before = set(self.packages)
        for shape in self.shapes:
            if shape not in self.packages and self._file(shape).exists():
                try:
                    self._admit(shape)
                except (RuntimeError, KeyError, OSError) as damaged:
                    self.reason = "eager:package-damaged"
                    log.warning("%s cannot be used and is removed: %s", self._file(shape), str(damaged).split("\n")[0])
                    with contextlib.suppress(OSError):  # somebody else's
                        self._file(shape).unlink(missing_ok=True)  # the next start builds it anew
        if len(self.packages) < len(self.shapes):
            self._failed()
        if self.packages.keys() > before:
            used(self.folder)
        if not before.issuperset(STEPS) and self.packages.keys() >= set(STEPS):
            self._weigh()

    @torch.inference_mode()
    def _weigh(self) -> None:
        """After how many single tokens in a row `one` serves them (`steady`): at once where both read the same weights, else when they make up for
        going over to its copy. On a machine with neighbours a tenth is noise: a wrong `never` would cost plain decoding more than going over for
        nothing does."""
        given = self._given(1)
        taken = dict(zip(STEPS, seconds_of_each([functools.partial(self.packages[shape], *given) for shape in STEPS]), strict=True))
        gained = taken["any"] - taken["one"]
        if taken["one"] >= WORSE * taken["any"]:
            self.steady = math.inf
        elif self.packages["one"].shares:
            self.steady = 0.0
        else:
            self.steady = min(COLD * taken["any"] / gained, LATEST) if gained > 0 else LATEST

    def _known(self, eager: nn.Module) -> dict[str, Tensor]:
        """Weights that are in memory already, by the names that they have in what was built: the model's own, and those of packages."""
        return weights_of(eager) | {n: w for package in self.packages.values() for n, w in package.weights.items()}

    @torch.inference_mode()
    def _admit(self, shape: str) -> None:
        """Take up a package after it has agreed with the eager step and been faster, which is not timed again at every start; its threads are chosen
        on the way, and a step's again at every start where they are fewer than there are."""
        eager = Prefill(self.step) if shape == PREFILL else self.step
        package = Package(self._file(shape), self._known(eager), shape in self.recipe.frozen)
        given = self._given(COLUMNS[shape])
        if not apart(eager, package, *given, rounded=inexact(self.step.module)) <= DIFFERS:
            self.reason = "eager:package-differs"
            log.warning("a compiled step of %s differs from the eager one: it is not used", self.recipe.folder)
            return
        if not package.recalled():
            package.place(*given)
            own, others = seconds_of_each([lambda: package(*given), lambda: eager(*given)])  # in turn: a builder may be at work beside
            if own > others:
                self.reason = "eager:package-slower"  # seen where weights are borrowed: products of unpacked matrices
                if shape == PREFILL:  # no step's tier tells it
                    _say_once(f"prompts of {self.recipe.folder} are read eagerly ({self.reason})")
                return
            self._keep(shape, package)
        elif shape == PREFILL:
            if "any" in self.packages and package.threads < self.packages["any"].threads:
                self._keep(shape, package)
        elif package.threads < torch.get_num_threads():  # a moment in which the machine was busy would be believed at every start
            package.place(*given)
            package.keep()
        if package.note:
            if shape in STEPS:
                self.tier = f"{WITHOUT}own-kernels"
            _say_once(
                f"compiled steps of {self.recipe.folder} have torch's kernels, which are slower: the house's could not be built ({package.note})"
            )
        self.packages[shape] = package

    def _given(self, width: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        """So many columns, or what fits, of a text that a package may be tried on, with something to attend to."""
        context = self.step.store.capacity - slots_for(0)
        width = min(width, max(context - BEHIND, WIDE))
        table, read = example(1, width, len(self.step.windows), after=BEHIND), torch.arange(max(64, BEHIND + width))
        table[..., 0] %= self.step.vocab
        table[..., 1].clamp_(max=context - 1)  # positions that the model has
        rows = [torch.empty_like(x) for x in self.step.store.rows(0, 1)]
        for x in rows:
            x[:, :, : len(read)].normal_()
        return table, read, rows

    def _keep(self, shape: str, package: Package) -> None:
        """Its threads were chosen: what hangs on them is found out, and kept. A text has no fewer than a step, whose columns are fewer: that it was
        quicker with them was the moment."""
        if shape == PREFILL and "any" in self.packages:
            package.threads = max(package.threads, self.packages["any"].threads)
            self._share(package)
        package.keep()

    def _share(self, reader: Package) -> None:
        """How many unread tokens are worth a forward of their own (`least`): a step works out the logits of all that it reads, of which the last ones
        alone are asked for."""
        reader.least = MANY
        for unread in FEWER:
            at_once, in_two = seconds_of_each(self._ways(reader, unread), patience=BRIEF, between=another())
            if in_two > at_once:
                break
            reader.least = unread

    def _ways(self, reader: Package, unread: int) -> tuple[Callable[[], object], Callable[[], object]]:
        """Of so many tokens to the logits of the last: in one step, and in two forwards."""
        wide, (whole, most, last) = self.packages["any"], [self._given(width) for width in (unread, unread - 1, 1)]
        return lambda: wide(*whole), lambda: (reader(*most), wide(*last))

    def rest(self) -> None:
        """Nobody waits: how many threads serve best is asked again now and then, ever more seldom, but not while others want the processors. A machine
        that was busy for a moment at load would be served by one thread for good."""
        if self.packages and time.monotonic() - self.placed >= self.trusted and contention.most == ALL:
            self._place()
            self.trusted = min(2 * self.trusted, SELDOM)

    @torch.inference_mode()
    def _place(self) -> None:
        """Choose how many threads serve each, and what hangs on that."""
        for shape, package in self.packages.items():
            package.place(*self._given(COLUMNS[shape]), patience=BRIEF)
            self._keep(shape, package)
        if self.packages.keys() >= set(STEPS):
            self._weigh()
        self.placed = time.monotonic()

    def settle(self) -> None:
        """Stay for good with what is there now, for every shape the same: the wide package, or eager steps. Texts are read eagerly. Threads stay, too,
        where sums hang on them."""
        self.look()
        self._start()  # for the next start
        self.packages = {"any": self.packages["any"]} if "any" in self.packages else {}
        self.trusted = math.inf  # threads are not chosen anew: it is these that are tried here
        for package in self.packages.values():
            package.pinned = not (package.independent and self._steady(package))
        self.reason = "eager:strict-pinned" if self.reason == "eager:building" else self.reason

    @torch.inference_mode()
    def _steady(self, package: Package) -> bool:
        """Does it give the same bits on however many threads it may come to have (`Contention`)?"""
        for width in (1, WIDE):
            given, threads, told = self._given(width), package.threads, list[Tensor]()
            while threads:
                told.append(package.on(threads, *given)[0].clone())
                threads = fewer(threads)
            if not all(torch.equal(told[0], other) for other in told):
                return False
        return True

    def wait(self, strict: bool = False) -> None:
        """Come back when all packages are there, or it is clear that they will not be. Where there was anything to wait for, what was found out beside a
        builder is found out again. `strict` is the same here: `settle` chooses among them."""
        end = time.monotonic() + WAIT
        self.look()
        self._start()
        beside = False
        while len(self.packages) < len(self.shapes) and self.reason == "eager:building":
            if time.monotonic() > end:
                raise OutriderError(f"steps of {self.recipe.folder} are not built after {WAIT} s", str(self.folder), "compile='off'")
            beside = True
            if not held(BUILDER, self.folder):  # its builder is gone: what is there now is all there will be
                self.look()
                if len(self.packages) < len(self.shapes) and self.reason == "eager:building":
                    self.reason = "eager:builder-died"
                break
            time.sleep(POLL)
            self.look()
        if beside:
            self._place()


@functools.cache
def _say_once(line: str) -> None:
    log.warning(line)


def start_builder(recipe: Recipe, folder: Path) -> None:
    """Build the packages in another process of low priority, which outlives this one."""
    start(BUILDER, json.dumps(dataclasses.asdict(recipe)), str(folder), folder=folder)


def apart(eager: nn.Module, package: Package, table: Tensor, read: Tensor, rows: list[Tensor], rounded: bool = False) -> float:
    """How far a package is from the eager step: in a logit, over their spread; where it tells none, in a head's key or value of a token, over its
    length. Of one that is `rounded`, in all logits together, and by ROUNDED less."""
    one, other = ([x.clone() for x in rows] for _ in range(2))
    want, got = eager(table, read, one), package(table, read, other)
    if want:
        off = (want[0].float() - got[0].float()) / want[0].float().std().clamp_min(1e-6)
        return float(off.square().mean().sqrt()) / ROUNDED if rounded else float(off.abs().max())
    wrote = [(a[0, :, table[0, :, 2]].float(), b[0, :, table[0, :, 2]].float()) for a, b in zip(one, other, strict=True)]
    most = float(torch.stack([((a - b).norm(dim=-1) / a.norm(dim=-1).clamp_min(1e-6)).max() for a, b in wrote]).max())
    return most / ROUNDED if rounded else most


def example(rows: int, width: int, kinds: int, after: int = 0) -> Tensor:
    """A table of some text of `width` tokens behind `after` others."""
    table = torch.zeros(rows, width, 4 + kinds, dtype=torch.int64)
    place = torch.arange(after, after + width)
    for column, value in enumerate((5 + place % 16, place, place, place + 1)):  # ids that nearly every vocabulary has
        table[..., column] = value
    return table
