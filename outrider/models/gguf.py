"""GGUF files, which llama.cpp reads: written once as a folder like any other, which the cache keeps.

Weights that a file holds in fewer bits are written whole, in bfloat16: the model is the file's, its size is not. Where a file says anything of its
model that is not known here, it is refused: another model's text would be the worse answer. Invariant: a folder that is there is complete.
Source: the tables of names and the order of rotary dims, gguf-py and llama.cpp's convert_hf_to_gguf.py.
"""

import json
import logging
import math
import re
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from outrider.core.cache import cache_folder, contents, used
from outrider.core.errors import OutriderError
from outrider.models.files import INDEX

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
}  # fmt: skip
LLAMA3 = ("llama3", "llama-v3", "llama-bpe")  # there a word that is a token is that token, whatever the merges say
SPLITS = {"llama": ("default",), "gpt2": ("default", "gpt-2", "qwen2", "deepseek-r1-qwen", *LLAMA3)}  # ways to cut texts that transformers knows
LISTS = {f"tokenizer.ggml.{of}" for of in ("tokens", "scores", "token_type", "merges")}  # the tokenizer's alone
PART = re.compile(r"-\d{5}-of-\d{5}$")
ELSEWHERE = "the same model's folder or hub id with *.safetensors"
log = logging.getLogger("outrider")


def fetched(path: str) -> Path:
    """The file OWNER/NAME/FILE.gguf of the hub, downloaded by transformers' own client."""
    from huggingface_hub import hf_hub_download

    owner, name, *inside = path.split("/")
    try:
        return Path(hf_hub_download(f"{owner}/{name}", "/".join(inside)))
    except Exception as failed:
        why = str(failed).split("\n")[0]
        raise OutriderError(
            f"there is no file {path}, and from the hub it could not be fetched", why, "a local file, or OWNER/NAME/FILE.gguf"
        ) from failed


def folder_of(file: Path) -> Path:
    """The folder that a file was written as, now if not before. Raises OutriderError where it cannot be read exactly, or what it takes is not there."""
    if PART.search(file.stem):
        raise OutriderError(f"{file} is a part of a model", "only whole files are read", "llama-gguf-split --merge, or " + ELSEWHERE)
    try:
        place = cache_folder() / "gguf" / f"{VERSION}-{contents(file).hex()[:24]}" / file.stem
    except OSError as bad:
        raise OutriderError(f"{file} cannot be read", bad.strerror or str(bad), "a file that you may read") from bad
    if not place.is_dir():
        _written(Stored(file), place)
    used(place)
    return place


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
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError) as bad:
            raise OutriderError(f"{file} is damaged, or no GGUF file", f"{type(bad).__name__}: {bad}", "copying or downloading it again") from bad
        kinds = {t.tensor_type.name for t in self.tensors.values() if len(t.shape) > 1}  # norms are float32 in every file
        self.dtype = WHOLE[kinds.pop()] if len(kinds) == 1 and kinds <= WHOLE.keys() else torch.bfloat16

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
        prefix, model, split = f"{self.family}.", self.about.get("tokenizer.ggml.model"), self.about.get("tokenizer.ggml.pre", "default")
        scaled = self._of("rope.scaling.type", "none") == "none"
        keys = [k for k, v in self.about.items() if k.startswith(prefix) and v and (k.removeprefix(prefix) not in KNOWN or isinstance(v, list))]
        why = (
            f"its architecture is {self.family}, and {', '.join(FAMILIES)} are read" if self.family not in FAMILIES
            else f"{odd[0]} is not known here" if (odd := [key for key in keys if not (scaled and key.startswith(f"{prefix}rope.scaling."))])
            else f"its weights {odd[0]} are not known here" if (odd := [name for name in held if name != TURNED and self._named(name) is None])
            else f"its tokenizer ({model}, {split}) is not known here" if split not in SPLITS.get(str(model), ())
            else None
        )  # fmt: skip
        if why:
            raise OutriderError(f"{self.file.name} cannot be read exactly", why, ELSEWHERE)

    def _config(self, held: dict[str, Any], turned: Tensor | None) -> Any:
        heads, hidden = int(self._of("attention.head_count")), int(self._of("embedding_length"))
        wide = int(self._of("attention.key_length") or self._of("rope.dimension_count") or hidden // heads)
        if {int(self._of(key, wide)) for key in ("attention.value_length", "rope.dimension_count")} != {wide}:
            raise OutriderError(f"{self.file.name} cannot be read exactly", f"its heads of {wide} dims are not turned as a whole", ELSEWHERE)
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(self._of("rope.freq_base", 10_000.0))}
        ids = {
            f"{kind}_token_id": self.about.get(f"tokenizer.ggml.{key}_token_id") for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        }
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
    if size > (free := shutil.disk_usage(cache_folder()).free):
        why, remedy = f"it is written as {place}, in {str(held.dtype)[6:]}", f"OUTRIDER_CACHE=FOLDER on a larger disk, or {ELSEWHERE}"
        raise OutriderError(f"{held.file.name} needs {size / 1e9:.2f} GB on disk, and {free / 1e9:.2f} GB are free", why, remedy)
    log.warning("%s is written as %s, once: %.2f GB in %s", held.file.name, place, size / 1e9, str(held.dtype)[6:])
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=place.parent, prefix="."))
    try:
        _write(held, draft, size)
        draft.rename(place)
    except OSError as bad:
        if not place.is_dir():  # which another process has written meanwhile
            raise OutriderError(
                f"{held.file.name} cannot be written as {place}", bad.strerror or str(bad), f"OUTRIDER_CACHE=FOLDER, or {ELSEWHERE}"
            ) from bad
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(held: Stored, folder: Path, size: int) -> None:
    """Tokenizer, config, and weights, a layer at a time."""
    from outrider.models.load import quiet  # which asks for this

    with quiet():
        _write_tokenizer(held, folder)
    held.config.dtype = held.dtype
    held.config.save_pretrained(folder)
    ends = [i for key in ("eos", "eot") if (i := held.about.get(f"tokenizer.ggml.{key}_token_id")) is not None]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), "utf-8")
    layers = defaultdict[str, list[str]](list)
    for name in held.tensors:
        layers[name.split(".")[2] if name.startswith("model.layers.") else "top"].append(name)
    kept = dict[str, str]()
    for layer, names in layers.items():
        kept |= dict.fromkeys(names, f"model-{layer}.safetensors")
        save_file({name: held.weight(name) for name in names}, folder / f"model-{layer}.safetensors", {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": kept}), "utf-8")


def _write_tokenizer(held: Stored, folder: Path) -> None:
    """As transformers reads it, less tokens that it adds of its own, which the model has no embedding of."""
    (alone := folder / held.file.name).symlink_to(held.file.absolute())  # what lies beside the file is none of its
    try:
        AutoTokenizer.from_pretrained(folder, gguf_file=alone.name).save_pretrained(folder)
        told = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        told["added_tokens"] = [token for token in told["added_tokens"] if token["id"] < held.config.vocab_size]
        told["model"] |= {"ignore_merges": True} if held.about.get("tokenizer.ggml.pre") in LLAMA3 else {}
        if held.about["tokenizer.ggml.model"] == "llama":
            _space(told, before=held.about.get("tokenizer.ggml.add_space_prefix", True))
        (folder / "tokenizer.json").write_text(json.dumps(told, ensure_ascii=False), "utf-8")
    except Exception as bad:  # whatever a tokenizer that is none leads to
        raise OutriderError(f"the tokenizer of {held.file} cannot be read", f"{type(bad).__name__}: {bad}", ELSEWHERE) from bad
    alone.unlink()


def _space(told: dict[str, Any], *, before: bool) -> None:
    """Put a space before a text and behind each marker, as llama.cpp does, even where one is there; nowhere, if not `before`."""
    spaces = [{"type": "Prepend", "prepend": "▁"}] * before + [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    told |= {"normalizer": {"type": "Sequence", "normalizers": spaces}, "pre_tokenizer": None}
    if not before:
        told["decoder"]["decoders"] = [step for step in told["decoder"]["decoders"] if step["type"] != "Strip"]
