"""From a folder, GGUF file or hub id to a Model that was checked: files whole, memory enough, cache exact.

Everything is predicted before the weights are read: a refusal costs nothing and names the numbers.
"""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.types import Draft, ModelSpec, Request, SamplingParams, Sequence
from outrider.models import gguf
from outrider.models.compiled import SHAPES, STEPS, Compiled, Recipe, worth_freezing
from outrider.models.files import NOT_READ, tensors
from outrider.models.graphed import Graphs
from outrider.models.hf import HFModel, HFView
from outrider.models.kv import slots_for
from outrider.models.layers import cached, ignored, routed, shared, turning
from outrider.models.mapped import Mapped, keepable
from outrider.models.quantised import held_bytes, inexact, kept_bytes, quantised
from outrider.models.vocab import fingerprint

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}  # as headers say it
ATTENTION = {"full_attention", "sliding_attention"}
log = logging.getLogger("outrider")
TOLERANCE = {torch.float32: 0.02, torch.float64: 0.001}  # of the logits' spread; 0.25 for half precision


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that loading a model will hold."""

    weights: int
    cache: int
    frozen: tuple[str, ...] = ()
    copy: int | None = None  # one that a package carries; None: as much as the weights

    @property
    def packed(self) -> int:
        """Copies of the weights that compiled steps carry."""
        return (self.weights if self.copy is None else self.copy) * len(self.frozen)

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.packed


def pick_device(name: str) -> torch.device:
    """auto is the first CUDA device where there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as bad:
        raise OutriderError(f"device '{name}' is not known", "", "auto, cpu or cuda") from bad
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OutriderError(f"device '{name}' is not there", "torch sees no CUDA GPU", "device='cpu', or a GPU build of torch")
    if device.type == "cuda" and (
        device.index or torch.cuda.current_device()
    ):  # CUDA graphs are of a thread's current one, and threads begin with the first
        raise OutriderError(f"device '{name}' is not the first that this process has", "", "CUDA_VISIBLE_DEVICES=1, or whichever, and device='cuda'")
    return device


def pick_dtype(config: Any, name: str, device: torch.device) -> str:
    """auto is float32 on a CPU and the checkpoint's own dtype on a GPU."""
    own = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    return name if name != "auto" else own if device.type == "cuda" and own in BYTES else "float32"


def locate(path: str | os.PathLike[str]) -> Path:
    """The local folder of a model; a hub id is downloaded by transformers' own client, and a GGUF file is written as a folder."""
    if not isinstance(path, (str, os.PathLike)):
        raise OutriderError(f"{path!r} is no model", "", "the path of a folder or GGUF file, or a hub id like owner/name")
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.suffix.lower() == ".gguf":
        return gguf.folder_of(str(path))
    if folder.exists():
        beside = (folder.parent / "config.json").is_file()
        remedy = f"{folder.parent.absolute()}" if beside else "the path of a folder with config.json and *.safetensors"
        raise OutriderError(f"{path} is a file", "a model is a folder with config.json and *.safetensors", remedy)
    if str(path).startswith((".", "/", "~")) or str(path).count("/") != 1:
        raise OutriderError(f"there is no folder {path}", "", "the path of a folder with config.json, or a hub id like owner/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"], ignore_patterns=NOT_READ))
    except Exception as failed:
        raise OutriderError(
            f"there is no folder {path}, and as a hub id it could not be fetched", str(failed).split("\n")[0], "a local folder"
        ) from failed


def load_config(folder: Path) -> Any:
    if not (folder / "config.json").exists():
        raise OutriderError(f"{folder} holds no config.json", "so it is no model folder", "the folder that save_pretrained wrote")
    try:
        json.loads((folder / "config.json").read_text("utf-8"))
    except OSError as bad:
        raise OutriderError(f"{folder / 'config.json'} cannot be read", bad.strerror or str(bad), "a folder that you may read") from bad
    except ValueError as bad:
        raise OutriderError(f"{folder / 'config.json'} is damaged", str(bad), "copying or downloading it again") from bad
    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as bad:
        raise OutriderError(f"the config of {folder} cannot be read", str(bad).split("\n")[0], "a model class that transformers knows") from bad


def refuse_unfit(config: Any, name: str) -> None:
    """Refuse by name what this cache cannot roll back or mask, and weights that were stored in fewer bits."""
    text = config.get_text_config()
    if (stored := getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)) is not None:
        raise OutriderError(
            f"{name} is quantised already ({_kind(stored)})", "only whole weights are read here",
            "the original, unquantised checkpoint, with quantise='int8' if memory is short",
        )  # fmt: skip
    odd = sorted(set(getattr(text, "layer_types", None) or []) - ATTENTION)
    recurrent = any(word in text.model_type for word in ("mamba", "rwkv", "jamba", "recurrent", "xlstm", "bamba"))
    alibi = text.model_type in ("bloom", "mpt") or bool(getattr(text, "alibi", False))
    reason = (
        f"its state ({', '.join(odd) or text.model_type}) cannot be rolled back yet" if odd or recurrent
        else "its ALiBi positions do not fit draft trees yet" if alibi
        else "its local attention is masked inside the layer" if "local" in (getattr(text, "attention_layers", None) or []) else None
    )  # fmt: skip
    if reason or getattr(config, "is_encoder_decoder", False):
        raise OutriderError(
            f"{name} ({text.model_type}) cannot run here", reason or "it is an encoder-decoder", "a decoder of full or sliding attention layers"
        )


def _kind(stored: Any) -> str:
    """The name of the format in which a checkpoint says that its weights are stored."""
    told: dict[str, Any] = stored if isinstance(stored, dict) else vars(stored)
    bits = next((f"bitsandbytes, {n} bits" for n in (4, 8) if told.get(f"load_in_{n}bit")), "of an unnamed kind")
    return str(told.get("quant_method") or bits)


def context_of(config: Any, asked: int | None, clip: bool = False) -> int:
    """Tokens a row holds: what is asked for, 4,096 without asking; beyond the model's limit, or beyond what leaves its rotary frequencies as they are,
    an error, or `clip`ped."""
    limit = positions_of(config)
    if turns := turning(config):
        if not clip:
            refuse_turning(config, asked or 0)
        limit = min(limit, turns[0])
    if asked is not None and asked > limit and not clip:
        raise OutriderError(f"context={asked} is more than the model's {limit}", "", f"context={limit}")
    return min(asked or 4096, limit)


def positions_of(config: Any) -> int:
    """Those that the model knows."""
    text = config.get_text_config()
    return next((int(v) for k in ("max_position_embeddings", "n_positions") if (v := getattr(text, k, None)) and v > 0), 4096)


def refuse_turning(config: Any, context: int) -> None:
    """Refuse texts in the midst of which the rotary frequencies would become others."""
    if (turns := turning(config)) and context > turns[0]:
        why = f"beyond them its rotary frequencies ({turns[1]}) are others, and what is cached was turned by those of before"
        raise OutriderError(f"context={context} is more than the model's {turns[0]} tokens", why, f"context={turns[0]}")


def tell_turning(config: Any, name: str, asked: int | None, room: int) -> None:
    """Say so where a model holds less than was asked for, or than is usual, for that reason."""
    if (turns := turning(config)) and room < min(asked or 4096, positions_of(config)):
        log.warning("%s holds %d tokens a text: beyond them its rotary frequencies (%s) would be others", name, room, turns[1])


def tell_ignored(model: HFModel) -> None:
    """Say so where the config names what the class does not have: transformers' own cache keeps no more than that window, its modules see all."""
    if window := ignored(model.module):
        kind = type(model.module).__name__
        log.warning("the config of %s names a window of %d positions, of which %s takes no notice: all are seen", model.spec.name, window, kind)


def memory_plan(folder: Path, dtype: str, rows: int, context: int, compile: str = "off", quantise: str | None = None) -> MemoryPlan:
    """What loading the model of `folder` will hold, from its headers and config alone. Compiled steps carry copies of
    the weights as far as they leave three quarters of the memory free; of those in 4 bits no more than the head, of which
    all do. Quantised weights count as what steps read of them, but whole where they pass through memory so: where the
    folder has them in another dtype, and on a GPU (where none is said, and products make them whole)."""
    whole, given = load_config(folder), tensors(folder)
    config, numbers = whole.get_text_config(), sum(int(np.prod(shape)) for _, shape in given.values())
    weights, copy = numbers * BYTES[dtype], {"int8": numbers, "int4": config.vocab_size * config.hidden_size}.get(quantise or "")
    if quantise and {kind for kind, shape in given.values() if len(shape) > 1} == {STORED[dtype]}:
        weights = min(weights, _quantised_bytes(folder, whole, quantise, dtype))
    cache = rows * slots_for(context) * cached(whole) * BYTES[dtype]
    free = psutil.virtual_memory().available - weights - cache
    frozen = SHAPES if quantise == "int4" else worth_freezing(weights if copy is None else copy, max(free, 0))
    return MemoryPlan(weights, cache, () if compile == "off" else frozen, copy)


def _quantised_bytes(folder: Path, config: Any, kind: str, dtype: str) -> int:
    """By the module without its weights. What cannot be built is refused when it is loaded, with what is wrong."""
    try:
        with torch.device("meta"), quiet():
            module = AutoModelForCausalLM.from_config(config)
    except Exception:
        return sys.maxsize
    return held_bytes(module, kind, BYTES[dtype], keepable(folder, kind, dtype, kept_bytes(module, kind)))


def refuse_too_large(plan: MemoryPlan, device: torch.device, name: str) -> None:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if plan.total > free:
        raise OutriderError(
            f"{name} needs {plan.total / 1e9:.2f} GB and {device} has {free / 1e9:.2f} GB free",
            f"weights {plan.weights / 1e9:.2f}, cache {plan.cache / 1e9:.2f}, packed copies {plan.packed / 1e9:.2f} GB",
            "fewer rows, a smaller context, dtype='bfloat16', quantise='int4' or a smaller model",
        )


def refuse_bits(kinds: Collection[str | None], device: torch.device) -> None:
    if "int4" in kinds and device.type != "cpu":
        raise OutriderError("weights in 4 bits are multiplied on CPUs alone", "", "int8 in their place, or device='cpu'")


def load_tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as bad:
        raise OutriderError(f"the tokenizer of {folder} cannot be read", str(bad).split("\n")[0], "a folder with tokenizer.json") from bad


def load_model(
    path: str | os.PathLike[str], *, device: str = "auto", dtype: str = "auto", rows: int = 4, context: int | None = None, chunk: int = 512,
    name: str | None = None, check: bool = True, clip: bool = False, compile: str = "off",
    quantise: str | None = None,
) -> tuple[HFModel, Any, MemoryPlan]:  # fmt: skip
    """(model, tokenizer, memory plan) from a folder, GGUF file or hub id.

    dtype auto is float32 on a CPU and the checkpoint's own on a GPU. Raises OutriderError for files that are missing
    or damaged, too little memory, and classes that cannot be run exactly.
    """
    folder, where = locate(path), pick_device(device)
    config = load_config(folder)
    name = name or folder.name
    refuse_unfit(config, name)
    dtype = pick_dtype(config, dtype, where)
    room = context_of(config, context, clip)
    tell_turning(config, name, context, room)
    with _told(name, config):
        plan = memory_plan(folder, dtype, rows, room, *((compile, quantise) if where.type == "cpu" else ()))
    refuse_too_large(plan, where, name)
    tokenizer = load_tokenizer(folder)
    module = load_module(folder, dtype, quantise)
    tokens = max(tokenizer.get_vocab().values()) + 1
    with _told(name, config):
        model = wrap(module.to(where), name, fingerprint(tokenizer), rows=rows, context=room, chunk=chunk, plan=plan, tokens=tokens)
        tell_ignored(model)
        if check:
            self_check(model)
    if compile != "off":
        model.compiled = Graphs(model.step) if where.type == "cuda" else _compiled(model, folder, plan, quantise)
    return model, tokenizer, plan


@contextlib.contextmanager
def _told(name: str, config: Any) -> Iterator[None]:
    """Whatever a class leads to that was never meant for this cache is said of it, by name."""
    try:
        yield
    except OutriderError:
        raise
    except Exception as bad:
        kind, why = "/".join(getattr(config, "architectures", None) or [config.model_type]), str(bad).split("\n")[0]
        raise OutriderError(f"{name} ({kind}) cannot run here", f"{type(bad).__name__}: {why}", "another model, or another config.json") from bad


def load_copy(owner: HFModel, path: str | os.PathLike[str], name: str, quantise: str, compile: str = "off") -> tuple[HFView, MemoryPlan]:
    """The weights of `path`, which are a model's own, in fewer bits, on the cache of that model: what the model has read, the copy need not read. What is
    whole in both is held once, though both plans count it. Raises OutriderError as `load_model` does."""
    folder, dtype = locate(path), owner.spec.dtype
    whole = memory_plan(folder, dtype, 0, owner.spec.context, compile, quantise)
    plan = replace(whole, frozen=tuple(shape for shape in whole.frozen if shape in STEPS))  # who reads no text needs no package for it
    refuse_too_large(plan, owner.device, name)
    view = HFView(owner, shared(load_module(folder, dtype, quantise), owner.module), name, weight_bytes=plan.weights, tier="eager:off")
    if compile != "off":
        view.compiled = _compiled(view, folder, whole, quantise, STEPS)
    return view, plan


def _compiled(model: HFModel, folder: Path, plan: MemoryPlan, quantise: str | None, shapes: tuple[str, ...] = SHAPES) -> Compiled:
    recipe = Recipe(str(folder), model.spec.dtype, torch.get_num_threads(), model.spec.vocab_size, plan.frozen, quantise)
    return Compiled(recipe, model.step, shapes)


def load_module(folder: Path, dtype: str, quantise: str | None = None) -> Any:
    """The transformers module of a folder, on the CPU, its weights quantised if asked; missing ones are an error."""
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), output_loading_info=True)
    except ImportError as absent:
        package = (absent.name or "").split(".")[0]
        why = next((line.strip() for line in str(absent).splitlines() if line.strip()), type(absent).__name__)
        remedy = f"pip install {package}, or another model" if package else "installing what it needs, or another model"
        raise OutriderError(f"{folder} needs a package that is not here or cannot be imported", why, remedy) from absent
    except (RuntimeError, ValueError, OSError) as bad:
        why = "their shapes do not fit its config.json" if "mismatch" in str(bad) else str(bad).split("\n")[0]
        raise OutriderError(f"the weights of {folder} cannot be loaded", why, "copying or downloading it again") from bad
    except Exception as bad:
        why = f"{type(bad).__name__}: {bad}"
        raise OutriderError(f"the model of {folder} cannot be built", why, "a config.json of transformers' own words") from bad
    module, told = loaded
    if missing := sorted(told["missing_keys"]):
        raise OutriderError(f"{folder} lacks weights", f"{len(missing)} of them, the first is {missing[0]}", "copying or downloading it again")
    if more := sorted(name for name in told["unexpected_keys"] if not name.endswith("rotary_emb.inv_freq")):  # old folders hold these
        log.warning("%s holds %d weights that %s has no place for, the first is %s", folder, len(more), type(module).__name__, more[0])
    return quantised(module, folder.name, quantise, Mapped(folder, quantise, dtype, kept_bytes(module, quantise))) if quantise else module


def wrap(
    module: Any, name: str, vocab: str, *, rows: int = 4, context: int = 1024, chunk: int = 512, plan: MemoryPlan | None = None, tokens: int | None = None
) -> HFModel:  # fmt: skip
    """A Model over a transformers module that is already loaded. `context`: tokens a row can hold; `tokens`: how many
    the tokenizer knows, where the embedding is padded beyond them."""
    plan = plan or MemoryPlan(0, 0)
    text = module.config.get_text_config()
    refuse_unfit(module.config, name)
    refuse_turning(module.config, context)
    head = module.get_output_embeddings()
    width = getattr(head, "out_features", None) or head.weight.shape[0]  # integers are made whole where somebody asks for a weight
    spec = ModelSpec(
        name, vocab, min(width, tokens or width), context, text.num_hidden_layers, plan.weights,
        str(module.device), str(module.dtype).removeprefix("torch."),
    )  # fmt: skip
    return HFModel(module, spec, rows, chunk)


@contextlib.contextmanager
def quiet() -> Any:
    """Progress bars and advice of transformers stay off while it loads."""
    before = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(before)


@torch.inference_mode()
def self_check(model: HFModel) -> None:
    """One ragged tree step against recomputation without a cache; OutriderError where they differ.

    Two rows (one if there is no more) of different length; one node has a sibling, one a child. A routed model in
    half precision may be off at a quarter of the places: rounding flips the choice of an expert. Of weights in 4 bits the
    inputs are rounded in any dtype.
    """
    most = 0.25 if inexact(model.module) else TOLERANCE.get(model.dtype, 0.25)
    count = min(2, len(model.rows.all))
    texts = [[(7 * i + 3 * r + 1) % model.spec.vocab_size for i in range(5 - 2 * r)] for r in range(count)]
    seqs = [Sequence(Request(f"check-{r}", tuple(t), SamplingParams(), 0, "exact"), list(t)) for r, t in enumerate(texts)]
    draft = Draft(rows=count)
    for parents, tokens in (([~0, ~0, ~(count - 1)], [2, 3, 4]), ([0, 1], [5, 6]), ([3], [1])):
        draft = tree.grow(draft, parents, [t % model.spec.vocab_size for t in tokens], 1)
    places = tree.all_places(draft)
    for seq in seqs:
        model.open(seq)
    try:
        model.prefill(seqs)
        found = model.score(seqs, draft, places).logits.float()
        errors = []
        for place, got in zip(places, found, strict=True):
            row = ~place if place < 0 else draft.row[place]
            text = texts[row] + draft.text(tree.ancestors(draft, place))
            want = model.module(input_ids=torch.tensor([text], device=model.device), use_cache=False).logits[0, -1, : model.spec.vocab_size].float()
            errors.append(float((got - want).abs().max() / want.std().clamp_min(1e-9)))
        spared = len(errors) // 4 if routed(model.module.config) and model.dtype not in TOLERANCE else 0
        if not sorted(errors)[len(errors) - 1 - spared] < most:
            raise OutriderError(
                f"{model.spec.name} ({type(model.module).__name__}) fails the load-time check",
                f"a tree step differs from recomputation by {max(errors):.2g} of the logits' spread",
                "another target or draft; this class needs its own cache support",
            )
    finally:
        for seq in seqs:
            model.close(seq)
        for held in model.rows.all:
            held.text = []
        model.forwards = model.computed = model.rows.reused = 0
