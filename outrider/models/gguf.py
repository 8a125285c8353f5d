"""GGUF files, which llama.cpp reads: written once as a folder like any other, which the cache keeps.

Weights that a file holds in fewer bits are written whole, in bfloat16: the model is the file's, its size is not. Where a file says anything of its
model that is not known here, it is refused: another model's text would be the worse answer. Invariant: a folder that is there is complete.
Source: the tables of names and the order of rotary dims, gguf-py and llama.cpp's convert_hf_to_gguf.py.
"""

import contextlib
import json
import logging
import math
import re
import shutil
from collections import defaultdict
from functools import reduce
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from outrider.core.cache import cache_folder, contents, draft_name, remove, remove_left, remove_unused, settle, used
from outrider.core.errors import OutriderError
from outrider.models import gguf_tokenizer
from outrider.models.files import INDEX, tensors

VERSION = 1  # of the folders: what another version wrote of a file is written anew
FAMILIES = ("llama", "qwen2", "qwen3")  # architectures, which have the names that transformers gives them
WHOLE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # kinds of weights that are kept as they are
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
BLOCK = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
BIASED = ("attn_q", "attn_k", "attn_v")  # of qwen2
TURNED = "rope_freqs.weight"  # by how much Llama 3 turns each pair of dims less
KNOWN = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "rope.freq_base", "rope.dimension_count",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "tensor_data_layout",
}  # fmt: skip
NEWS = {"attention.causal"}  # keys that say most where they say no
LISTS = {"tokenizer.ggml.scores", "tokenizer.ggml.merges"}  # long, and the tokenizer's alone
LEAST = 5 / 8  # bytes of memory that a weight takes in any case
PART = re.compile(r"-\d{5}-of-\d{5}$")
TOLD = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", INDEX)  # of a folder
ELSEWHERE = "the same model's folder or hub id with *.safetensors"
log = logging.getLogger("outrider")


def folder_of(path: str) -> Path:
    """The folder that a file, or OWNER/NAME/FILE.gguf of the hub, was written as, now if not before. Raises OutriderError where it cannot be read
    exactly, or what it takes is not there."""
    file = Path(path).expanduser()
    if PART.search(file.stem):
        raise _part(path)
    if not file.is_file():
        file = _fetched(path)
    try:
        place = cache_folder() / "gguf" / f"{VERSION}-{contents(file).hex()[:24]}" / file.stem
    except OSError as bad:
        raise OutriderError(f"{file} cannot be read", bad.strerror or str(bad), "a file that you may read") from bad
    if place.is_dir() and (why := _damage(place)):
        log.warning("%s is damaged (%s)", place, why)
        with contextlib.suppress(OSError):  # somebody else's: who loads it says what is wrong
            remove(place)
    if not place.is_dir():
        _written(Stored(file), place)
    used(place)
    return place


def _part(name: str) -> OutriderError:
    return OutriderError(f"{name} is a part of a model", "only whole files are read", "llama-gguf-split --merge, or " + ELSEWHERE)


def _damage(place: Path) -> str | None:
    """What is wrong with a folder that was whole once; None: nothing."""
    try:
        tensors(place)
        cut = [name for name in TOLD if not (place / name).read_bytes().rstrip().endswith(b"}")]
    except OSError as bad:
        return f"{Path(str(bad.filename)).name}: {bad.strerror}"
    except OutriderError as bad:
        return str(bad).splitlines()[0]
    return f"{cut[0]} is cut" if cut else None


def _fetched(path: str) -> Path:
    """A file of the hub, downloaded by transformers' own client."""
    from huggingface_hub import hf_hub_download

    owner, _, rest = path.partition("/")
    name, _, inside = rest.partition("/")
    if not inside or path.startswith((".", "/", "~")):
        raise OutriderError(f"there is no file {path}", "", "the path of a GGUF file, or OWNER/NAME/FILE.gguf of the hub")
    try:
        return Path(hf_hub_download(f"{owner}/{name}", inside))
    except Exception as failed:
        why = str(failed).split("\n")[0]
        remedy = "the path of a GGUF file, or OWNER/NAME/FILE.gguf of the hub"
        raise OutriderError(f"there is no file {path}, and from the hub it could not be fetched", why, remedy) from failed


class Stored:
    """What a file holds: `about`, its keys; `tensors`, by their names here. Raises OutriderError where it holds anything that is not known."""

    def __init__(self, file: Path) -> None:
        try:
            import gguf
        except ImportError as absent:
            raise OutriderError(f"{file} needs a package that is not here", str(absent), f"pip install '.[gguf]', or {ELSEWHERE}") from absent
        self.file, self.dequantised = file, gguf.dequantize
        try:
            reader = gguf.GGUFReader(file)
            self.about: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items() if key not in LISTS}
            held = {t.name: t for t in reader.tensors}
            self.family = str(self.about["general.architecture"])
            self._refuse(held)
            turned = held.pop(TURNED, None)
            self.tensors = {str(self._named(name)): t for name, t in held.items()}
            self.config = self._config(held, None if turned is None else self._whole(turned))
        except OutriderError:
            raise
        except Exception as bad:  # whatever numbers that are none lead to
            raise OutriderError(f"{file} is damaged, or no GGUF file", f"{type(bad).__name__}: {bad}", "copying or downloading it again") from bad
        kinds = {t.tensor_type.name for t in self.tensors.values() if len(t.shape) > 1}  # norms are float32 in every file
        self.fewer = bool(kinds - WHOLE.keys())
        self.dtype = reduce(torch.promote_types, map(WHOLE.__getitem__, kinds)) if kinds and kinds <= WHOLE.keys() else torch.bfloat16

    def _named(self, name: str) -> str | None:
        """A tensor's name in transformers."""
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if found and (inside := BLOCK.get(found[2])) and (found[3] == "weight" or (self.family == "qwen2" and found[2] in BIASED)):
            return f"model.layers.{found[1]}.{inside}.{found[3]}"
        return TOP.get(name)

    def _of(self, key: str, default: Any = None) -> Any:
        return self.about.get(f"{self.family}.{key}", default)

    def _refuse(self, held: dict[str, Any]) -> None:
        """Refuse by name what would be lost."""
        if int(self.about.get("split.count") or 1) > 1:
            raise _part(self.file.name)
        prefix, scale = f"{self.family}.", (self._of("rope.scaling.type", "linear"), self._of("rope.scaling.factor") or 1.0)
        lost = [k.removeprefix(prefix) for k, v in self.about.items() if k.startswith(prefix) and self._lost(k.removeprefix(prefix), v)]
        lost = [k for k in lost if not (k.startswith("rope.scaling.") and (scale[0] == "none" or scale == ("linear", 1.0)))]
        why = (
            f"its architecture is {self.family}, and {', '.join(FAMILIES)} are read" if self.family not in FAMILIES
            else f"{prefix}{lost[0]} is not known here" if lost
            else f"its weights {odd[0]} are not known here" if (odd := [name for name in held if name != TURNED and (self._named(name) is None or self._above(name))])
            else gguf_tokenizer.odd(self.about)
        )  # fmt: skip
        if why:
            raise OutriderError(f"{self.file.name} cannot be read exactly", why, ELSEWHERE)

    def _above(self, name: str) -> bool:
        """Is it of a layer that the model does not have?"""
        return name.startswith("blk.") and int(name.split(".")[1]) >= int(self._of("block_count"))

    def _lost(self, key: str, value: Any) -> bool:
        """Would what a key says be passed over? What says no is as if it were not there."""
        return (bool(value) != (key in NEWS)) and (key not in KNOWN or isinstance(value, list))

    def _config(self, held: dict[str, Any], turned: Tensor | None) -> Any:
        heads, hidden = int(self._of("attention.head_count")), int(self._of("embedding_length"))
        wide = int(self._of("attention.key_length") or self._of("rope.dimension_count") or hidden // heads)
        if {int(self._of(key, wide)) for key in ("attention.value_length", "rope.dimension_count")} != {wide}:
            raise OutriderError(f"{self.file.name} cannot be read exactly", f"its heads of {wide} dims are not turned as a whole", ELSEWHERE)
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(self._of("rope.freq_base", 10_000.0))}
        ids = {f"{name[:3]}_token_id": i for name, i in gguf_tokenizer.marks(self.about).items() if name != "unknown"}
        return AutoConfig.for_model(
            self.family, vocab_size=int(held["token_embd.weight"].shape[1]), hidden_size=hidden, head_dim=wide,
            intermediate_size=int(self._of("feed_forward_length")), num_hidden_layers=int(self._of("block_count")), num_attention_heads=heads,
            num_key_value_heads=int(self._of("attention.head_count_kv", heads)), rms_norm_eps=float(self._of("attention.layer_norm_rms_epsilon")),
            max_position_embeddings=int(self._of("context_length")), tie_word_embeddings="output.weight" not in held,
            rope_parameters=rope if turned is None else rope | self._less(turned, rope["rope_theta"]), **ids,
        )  # fmt: skip

    def _less(self, turned: Tensor, theta: float) -> dict[str, Any]:
        """Llama 3's way to turn long waves less, of which a file holds what comes of it."""
        factor, low, high, original = float(turned.max()), 1.0, 4.0, 8192
        waves = 2 * math.pi * theta ** (torch.arange(len(turned)) / len(turned))
        smooth = ((original / waves - low) / (high - low)).clamp(0, 1)
        if not torch.allclose(1 / ((1 - smooth) / factor + smooth), turned, rtol=1e-3):
            raise OutriderError(f"{self.file.name} cannot be read exactly", f"its {TURNED} are not those of Llama 3", ELSEWHERE)
        return {
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original,
        }  # fmt: skip

    def _whole(self, tensor: Any) -> Tensor:
        """A tensor in float32, as llama.cpp multiplies by it."""
        try:
            return torch.from_numpy(self.dequantised(tensor.data, tensor.tensor_type).copy())
        except NotImplementedError as unknown:
            raise OutriderError(
                f"{self.file.name} cannot be read", f"its {tensor.name}: {unknown}", f"a newer gguf package, or {ELSEWHERE}"
            ) from unknown

    def weight(self, name: str) -> Tensor:
        """A tensor as transformers has it: llama.cpp turns neighbouring dims of a Llama's heads, transformers the two halves."""
        found = self._whole(self.tensors[name])
        if self.family == "llama" and (turned := {"q_proj": "attention", "k_proj": "key_value"}.get(name.split(".")[-2])):
            heads = getattr(self.config, f"num_{turned}_heads")
            found = found.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return found.to(self.dtype).contiguous()


def _written(held: Stored, place: Path) -> None:
    """Write it beside, and put it in place when it is whole."""
    size = sum(int(t.n_elements) for t in held.tensors.values()) * held.dtype.itemsize
    _refuse_too_large(held, place, size)
    advice = "; quantise='int4' or 'int8' makes it small in memory again" if held.fewer else ""
    log.warning("%s is written as %s, once: %.2f GB in %s%s", held.file.name, place, size / 1e9, str(held.dtype)[6:], advice)
    draft = place.with_name(draft_name())
    try:
        remove_left(place.parent)
        remove_unused(place.parent.parent.glob("*/[!.]*"))
        draft.mkdir(parents=True)
        _write(held, draft, size)
        for file in draft.iterdir():
            settle(file)
        draft.rename(place)
    except (OSError, SafetensorError) as bad:
        if not place.is_dir():  # which another process has written meanwhile
            why = getattr(bad, "strerror", None) or str(bad)
            raise OutriderError(f"{held.file.name} cannot be written as {place}", why, f"OUTRIDER_CACHE=FOLDER, or {ELSEWHERE}") from bad
    except RuntimeError as bad:
        raise OutriderError(f"{held.file} is damaged", f"its weights do not fit its keys: {bad}", "copying or downloading it again") from bad
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _refuse_too_large(held: Stored, place: Path, size: int) -> None:
    """Refuse what would be written for nothing."""
    least, kind = LEAST * size / held.dtype.itemsize, str(held.dtype)[6:]
    needs = f"{held.file.name} needs {size / 1e9:.2f} GB"
    if least > (free := psutil.virtual_memory().available):
        why = f"with quantise='int4' {least / 1e9:.2f}, and {free / 1e9:.2f} GB are free"
        raise OutriderError(f"{needs} of memory in {kind}", why, "a smaller model")
    if size > (free := shutil.disk_usage(cache_folder()).free):
        remedy = f"OUTRIDER_CACHE=FOLDER on a larger disk, or {ELSEWHERE}"
        raise OutriderError(f"{needs} on disk, and {free / 1e9:.2f} GB are free", f"it is written as {place}, in {kind}", remedy)


def _write(held: Stored, folder: Path, size: int) -> None:
    """Tokenizer, config, and weights, a layer, or what stands before and behind them, at a time."""
    gguf_tokenizer.write(held.file, held.about, folder)
    held.config.dtype = held.dtype
    held.config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": gguf_tokenizer.ends(held.about)}), "utf-8")
    layers = defaultdict[str, list[str]](list)
    for name in held.tensors:
        layers[name.split(".")[2] if name.startswith("model.layers.") else name.split(".")[-2]].append(name)
    kept = dict[str, str]()
    for layer, names in layers.items():
        kept |= dict.fromkeys(names, f"model-{layer}.safetensors")
        save_file({name: held.weight(name) for name in names}, folder / f"model-{layer}.safetensors", {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": kept}), "utf-8")
