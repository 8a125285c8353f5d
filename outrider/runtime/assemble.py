"""Puts a runtime together from what the user named. The one place that knows all kinds of parts."""

import copy
import gc
import importlib
import json
import os
import re
from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import psutil
import torch

from outrider.compiler.jit import of_file
from outrider.compiler.pipeline import FRONT
from outrider.control.controller import Adaptive
from outrider.control.fixed import fixed
from outrider.control.predict import LADDER
from outrider.control.tables import Tables
from outrider.core.config import QUANTISED, LoadSettings, load_settings, nearest, whole
from outrider.core.errors import OutriderError
from outrider.core.sampling import near
from outrider.core.sockets import Drafter
from outrider.core.types import TARGET, Plan
from outrider.drafters.model import ModelDrafter
from outrider.measure import machine
from outrider.measure import profile as profiles
from outrider.measure.cost import Costs
from outrider.models import load as models
from outrider.models.compiled import SHAPES, has_compiler
from outrider.models.compiled import VERSION as PACKAGES
from outrider.models.exits import EarlyExit, check
from outrider.models.microkernel import has_kernels
from outrider.models.vocab import check_pair, tell_fewer
from outrider.runtime import profiler
from outrider.runtime.door import Runtime
from outrider.runtime.engine import Engine
from outrider.runtime.native import host
from outrider.runtime.profiler import Keeper

DRAFTERS = {
    "lookup": "outrider.drafters.lookup:Lookup",
    "model": "outrider.drafters.model:ModelDrafter",
    "quantised": "outrider.drafters.model:ModelDrafter",  # the target itself with cheaper weights
    "early-exit": "outrider.drafters.model:ModelDrafter",  # the target's own first layers
}
ALONE = ("lookup",)  # kinds that take nothing behind their name
STAGED = "staged:"  # drafters of which each takes over from the one before


def load(target: str | os.PathLike[str] | None = None, drafters: ListOf[str | Drafter] | str | Drafter | None = None, **settings: Any) -> Runtime:
    """A Runtime for a target model and its drafters.

    target: a folder, GGUF file or hub id; None is the embedded reference pair. drafters: "lookup", "model:PATH" or Drafter
    objects, one or a list; None is lookup, and the reference draft for the reference target; [] is plain decoding.
    settings: fields of core.config.LoadSettings. Raises OutriderError before anything large is read.
    """
    s = load_settings(**settings)
    if target is None:
        from outrider import reference

        target = reference.target()
        drafters = ["lookup", f"model:{reference.draft()}"] if drafters is None else drafters
    groups = [_group(d) for d in _named(drafters)]
    specs: list[str | Drafter] = [spec for group in groups for spec in group]
    if s.threads:
        torch.set_num_threads(s.threads)
    _refuse_unknown(specs)
    _refuse_quantised(specs, s)
    if s.predictor not in list(LADDER):  # of any type
        raise nearest(s.predictor, LADDER, "predictor")
    s = replace(s, dtype=_dtype(target, s))
    how: dict[str, Any] = {"device": s.device, "dtype": s.dtype, "rows": s.rows, "chunk": s.chunk, "compile": s.compile}
    _refuse_too_large(target, specs, s)
    model, tokenizer, memory = models.load_model(target, context=s.context, name="target", quantise=s.quantise, **how)
    parts: dict[str, Drafter] = {}
    held = {"target": {"predicted": memory.total, "held": model.held_bytes()}}
    for spec in specs:
        part, plan = _drafter(spec, model, tokenizer, str(target), how, parts)
        if part.name in parts or part.name == TARGET:
            raise OutriderError(f"a drafter cannot be named '{part.name}'", "that name is taken", "another name for it")
        parts[part.name] = part
        if plan:
            held[part.name] = {"predicted": plan.total, "held": part.model.held_bytes()}  # type: ignore[attr-defined]
    names = iter(parts)
    stages = [[next(names) for _ in group] for group in groups]
    made: dict[str, Any] = {} if model.compiled is None else {"front": tuple(p for p in FRONT if p != "inline-early-exit")}  # those steps are whole
    if s.program is not None:
        made["source"] = of_file(Path(s.program), parts, chain=s.strict)
    if s.compile == "wait":
        _wait([model, *(part.model for part in parts.values() if isinstance(part, ModelDrafter))], s.strict)
    if s.compile != "off" and not getattr(model.compiled, "building", False):
        host.ask()  # after its steps, which gain more
    if s.strict:
        model.pin()
    sizes: dict[str, Any] = {**held, "rss": psutil.Process().memory_info().rss}
    _spare_the_collector()
    if s.depth is not None or not parts:
        told = fixed(Plan(tuple((name, s.depth, s.width) for name in parts) if s.depth else (), s.budget))
        return Runtime(Engine(model, parts, told, s.rows, s.strict, stages, **made), tokenizer, sizes, s.rule)
    folders = {
        "target": models.locate(target),
        **{  # of a copy, which has the target's own folder, in how many bits it is
            f"{n} {d}" if d.startswith("quantised") else str(n): models.locate(_source(d, target)[0])
            for n, d in enumerate(specs)
            if isinstance(d, str) and ":" in d and not d.startswith("early-exit")
        },
    }
    keeper = _keeper(parts, folders, max(model.spec.weight_bytes, 1), model.spec.device, s)
    tails = frozenset(name for name, part in parts.items() if hasattr(part, "tail")) - keeper.tables.costs.views
    controller = Adaptive(keeper.tables, model.meter.served, s.slowdown_limit, cautious=profiler.PATIENCE > 0, tails=tails)
    engine = Engine(model, parts, controller, s.rows, s.strict, stages, **made)
    engine.jit.prepare([Plan(), *controller.plans.made.values()], engine.facts[True])
    return Runtime(engine, tokenizer, sizes, s.rule, keeper)


def _named(drafters: ListOf[str | Drafter] | str | Drafter | None) -> list[str | Drafter]:
    """The drafters of which there may be one or many."""
    if drafters is None:
        return ["lookup"]
    return [drafters] if isinstance(drafters, str) or not isinstance(drafters, Iterable) else list(drafters)


def _group(spec: str | Drafter) -> list[str | Drafter]:
    """The drafters of which each takes over from the one before: for most specs one."""
    if not isinstance(spec, str) or not spec.startswith(STAGED):
        return [spec]
    stages: list[str | Drafter] = [*spec.removeprefix(STAGED).split(">")]
    if len(stages) < 2:
        raise OutriderError(f"'{spec}' has one stage", "there is nobody to take over", f"'{stages[0]}', or 'staged:lookup>model:PATH'")
    return stages


def _spare_the_collector() -> None:
    """What imported libraries and loaded models hold is never garbage, and a full collection that looks at it all (a quarter of a second
    for the libraries, some 40 ms for what the next loads leave behind) would stall some step: it is set apart at every load, less what has become garbage since the last."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _keeper(parts: dict[str, Drafter], folders: dict[str, Any], target_bytes: int, device: str, s: LoadSettings) -> Keeper:
    """The tables of a pair, as its profile left them."""
    assumed = {name: _assumed(part, target_bytes) for name, part in parts.items()}
    views = frozenset(name for name, part in parts.items() if not getattr(getattr(part, "model", None), "own", True))
    bits = {name: 1 << i for i, name in enumerate(parts)}
    cheapest = {name: bits[name] for name in sorted(parts, key=lambda name: assumed[name])}
    kinds = ",".join(f"{name} {type(part).__name__}" for name, part in sorted(parts.items()))
    mark = profiles.fingerprint(
        folders, drafters=kinds, device=device, dtype=s.dtype, strict=s.strict, quantise=s.quantise,
        compile=PACKAGES if s.compile != "off" else "off",
    )  # fmt: skip
    file = None if s.profile == "off" else profiles.place(mark) if s.profile == "auto" else Path(s.profile)
    known = (profiles.load(file, mark) if file else None) or {}
    objective = float({"latency": 0.0, "energy": 1.0}.get(str(s.objective), s.objective))
    try:
        Tables(cheapest, Costs(assumed, views), s.predictor, objective=objective, state=copy.deepcopy(known)).tried()
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError):  # a whole file, and nonsense in it
        assert file is not None
        profiles.set_aside(file, known)
        known = {}
    tables = Tables(cheapest, Costs(assumed, views), s.predictor, objective=objective, state=copy.deepcopy(known))
    return Keeper(tables, mark, file, json.loads(json.dumps(tables.state())) if known else {})  # some of what is there may be told another way


def _assumed(part: Drafter, target_bytes: int) -> float:
    """A level of a drafter over a plain step, until it is measured: by the weights that it reads."""
    model = getattr(part, "model", None)
    return 0.05 if model is None else 0.1 + float(model.spec.weight_bytes) / target_bytes


def _wait(made: list[Any], strict: bool) -> None:
    """Until their compiled steps are there, one model after the other. The first is the target, which is `strict` or not."""
    for i, model in enumerate(made):
        if getattr(model, "compiled", None) is not None:
            model.compiled.wait(strict=strict and i == 0)


def _dtype(target: str | os.PathLike[str], s: LoadSettings) -> str:
    """The dtype of target and drafts. auto, on a CPU: the target's own where its steps will be compiled with the house's kernels, for half the bytes
    are read, and where its weights become integers, for it need not be whole in memory then; else what torch multiplies fastest here, that or float32,
    which is never less exact; measured once and kept."""
    if s.dtype != "auto" or models.pick_device(s.device).type != "cpu":
        return s.dtype
    folder = models.locate(target)
    config = models.load_config(folder)
    models.refuse_unfit(config, folder.name)
    own = str(config.dtype or "float32").removeprefix("torch.")
    if own not in ("bfloat16", "float16"):
        return "float32"
    if s.quantise and own == "bfloat16":
        return own
    if s.compile != "off" and has_kernels(getattr(torch, own)) and has_compiler():
        plan = models.memory_plan(folder, own, s.rows, models.context_of(config, s.context), s.compile, s.quantise)
        if SHAPES[0] in plan.frozen:
            return own
    return machine.fastest_dtype(("float32", own))


def _refuse_unknown(specs: list[str | Drafter]) -> None:
    for spec in specs:
        if not isinstance(spec, str):
            _refuse_foreign(spec)
        if isinstance(spec, str):
            kind, colon, path = spec.partition(":")
            if kind not in DRAFTERS:
                raise nearest(kind, [*DRAFTERS, STAGED.rstrip(":")], "drafter")
            if kind in ALONE and colon:
                deep = f"--drafters {kind} and --depth {path} (in Python: drafters=['{kind}'], depth={path})"
                raise OutriderError(f"the drafter '{kind}' takes nothing behind ':'", "", f"'{kind}'" if whole(path) is None else deep)
            if kind == "model" and not path:
                raise OutriderError("the drafter 'model' needs a model", "", "model:PATH")
            if kind == "early-exit" and whole(path) is None:
                raise OutriderError(f"the drafter '{spec}' needs a number of layers", "", "early-exit:2")
            if kind == "quantised" and path not in QUANTISED:
                raise OutriderError(f"the drafter '{spec}' is not known", "", " or ".join(f"quantised:{bits}" for bits in QUANTISED))


def _refuse_quantised(specs: list[str | Drafter], s: LoadSettings) -> None:
    if f"quantised:{s.quantise}" in specs:
        raise OutriderError(f"'quantised:{s.quantise}' is the target itself", f"quantise={s.quantise!r} makes it so", "leaving out one of the two")
    models.refuse_bits({s.quantise, *[_source(d, "")[1] for d in specs if isinstance(d, str)]}, models.pick_device(s.device))


def _refuse_foreign(drafter: Any) -> None:
    """What cannot be asked as a drafter is."""
    remedy = "the name of one, or an object with its verbs (docs/extend.md)"
    if not hasattr(drafter, "extend"):
        raise OutriderError(f"{drafter!r} is no drafter", "it has no `extend`", remedy)
    name = getattr(drafter, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[^\s\"'\\]+", name):
        raise OutriderError(
            f"a drafter cannot be named {name!r}", "programs and plans write it as one word", "a name without spaces, quotes and backslashes"
        )
    try:
        signature(drafter.extend).bind(*[None] * 7, levels=1, on=None)
    except TypeError as other:
        asked = "extend(seqs, draft, frontier, width, source, settings, noise, levels=1, on=None)"
        raise OutriderError(f"{drafter!r} cannot be asked for guesses: {other}", f"it is asked by {asked}", remedy) from None
    except ValueError:  # made by a compiler that does not tell: it is tried
        return


def _refuse_too_large(target: str | os.PathLike[str], specs: list[str | Drafter], s: LoadSettings) -> None:
    """Target and drafts must fit together, before the first is read."""
    device, total, room = models.pick_device(s.device), [], 0
    drafts = [_source(d, target) for d in specs if isinstance(d, str) and ":" in d and not d.startswith("early-exit")]
    for i, (path, bits) in enumerate([(target, s.quantise), *drafts]):
        folder = models.locate(path)
        config = models.load_config(folder)
        models.refuse_unfit(config, folder.name)
        dtype = models.pick_dtype(config, s.dtype, device)
        room = models.context_of(config, s.context if i == 0 else room, clip=i > 0)
        rows = 0 if i and bits and near(str(device)) else s.rows  # a copy has the target's cache
        total.append(models.memory_plan(folder, dtype, rows, room, quantise=bits if near(str(device)) else None))
    models.refuse_too_large(models.MemoryPlan(sum(p.weights for p in total), sum(p.cache for p in total)), device, "the pipeline")


def _source(spec: str, target: str | os.PathLike[str]) -> tuple[str | os.PathLike[str], str | None]:
    """Where a drafter's weights are, and in what they are kept in place of a dtype."""
    kind, _, path = spec.partition(":")
    return (target, path) if kind == "quantised" else (path, None)


def _drafter(
    spec: str | Drafter, target: Any, tokenizer: Any, target_name: str, how: dict[str, Any], taken: dict[str, Drafter]
) -> tuple[Drafter, Any]:
    if not isinstance(spec, str):
        return spec, None
    kind, _, path = spec.partition(":")
    module, name = DRAFTERS[kind].split(":")
    make = getattr(importlib.import_module(module), name)
    if kind == "lookup":
        return make(), None
    if kind == "early-exit":
        view = EarlyExit(target, int(path))
        check(view)
        return make(view, spec, target.spec.vocab_size), None
    label = kind if kind not in taken else f"{kind}-{len(taken) + 1}"
    source, quantise = _source(spec, target_name)
    if quantise and near(target.spec.device):  # on a GPU its guesses are read where they are made, which takes a cache of its own
        less, plan = models.load_copy(target, source, label, quantise, how["compile"])
        return make(less, label, target.spec.vocab_size), plan
    model, own, plan = models.load_model(source, name=label, context=target.spec.context, clip=True, quantise=quantise, **how)
    check_pair(tokenizer, own, target_name, path)
    tell_fewer(model.spec.vocab_size, target.spec.vocab_size, label)
    return make(model, label, target.spec.vocab_size), plan
