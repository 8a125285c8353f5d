"""GGUF files as llama.cpp's converter writes them, of small folders."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from tiny import BOS, CORPUS, EOS, TEMPLATE, tiny_tokenizer
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from outrider.models import gguf as ours

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
KIND = gguf.GGMLQuantizationType
TEXT = "the quick brown fox, she sells sea shells 42 times"


def source(path: Path, family: str, **more) -> Path:
    """A folder that transformers wrote. Its weights are large, so that no two dims do alike."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, tie_word_embeddings=False, head_dim=16, **{"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 1} | more,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def written(
    folder: Path, file: Path, kind: KIND = KIND.F32, *, keys: dict | None = None, pre: str | bool = "gpt-2", extra: str = "", leave: str = "",
    kinds: dict | None = None,
) -> Path:  # fmt: skip
    """The file that llama.cpp's converter writes of a folder."""
    model, config = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoConfig.from_pretrained(folder)
    out = gguf.GGUFWriter(file, config.model_type)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_key_length(config.head_dim)
    out.add_value_length(config.head_dim)
    out.add_rope_dimension_count(config.head_dim)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    (_spaced if isinstance(pre, bool) else _tokenizer)(out, folder, pre)
    for key, value in (keys or {}).items():
        out.kv_data[0].pop(key, None)
        if value is not None:
            {str: out.add_string, bool: out.add_bool, int: out.add_uint32, float: out.add_float32, list: out.add_array}[type(value)](key, value)
    for name, weight in model.state_dict().items():
        if weight is not None and not (leave and leave in name):
            _tensor(out, config, name, weight.numpy(), (kinds or {}).get(name, kind))
    if config.rope_parameters["rope_type"] == "llama3":
        out.add_tensor(ours.TURNED, _llama3(config))
    if extra:
        out.add_tensor(extra, np.arange(1, 9, dtype=np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return file


def _tokenizer(out: gguf.GGUFWriter, folder: Path, pre: str) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(list(model["vocab"]))
    out.add_token_types([3 if token in (BOS, EOS) else 1 for token in model["vocab"]])
    out.add_token_merges([" ".join(pair) for pair in model["merges"]])
    out.add_bos_token_id(0)
    out.add_eos_token_id(1)
    out.add_add_bos_token(True)
    out.add_chat_template(TEMPLATE)


def spaced(path: Path, before: bool) -> Path:
    """A folder whose tokenizer is as sentencepiece's are: spaces are letters, and bytes are tokens."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space] if before else [space])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *[decoders.Strip(" ", 1, 0)] * before]
    tokenizer.decoder = decoders.Sequence(steps)
    marks = ["<unk>", BOS, EOS, *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer.train_from_iterator(CORPUS, BpeTrainer(vocab_size=340, special_tokens=marks, show_progress=False))
    told = json.loads(tokenizer.to_str())
    told["added_tokens"] = told["added_tokens"][:3]  # bytes are no markers
    tokenizer = Tokenizer.from_str(json.dumps(told))
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    source(path, "llama", vocab_size=340, bos_token_id=1, eos_token_id=2)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, unk_token="<unk>").save_pretrained(path)
    return path


def _spaced(out: gguf.GGUFWriter, folder: Path, before: bool) -> None:
    """What sentencepiece writes: a score for each token, the first made the highest."""
    vocab = list(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    out.add_tokenizer_model("llama")
    out.add_token_list(vocab)
    out.add_token_scores([-float(i) for i in range(len(vocab))])
    out.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(vocab) - 259)])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_unk_token_id(0)
    if not before:
        out.add_add_space_prefix(False)


def _tensor(out: gguf.GGUFWriter, config, name: str, weight: np.ndarray, kind: KIND) -> None:
    """As it is named and turned there."""
    layer, inside = (name.split(".")[2], ".".join(name.split(".")[3:-1])) if name.startswith("model.layers.") else ("", name)
    there = {v: k for k, v in ours.TOP.items()}.get(
        name
    ) or f"blk.{layer}.{({v: k for k, v in ours.BLOCK.items()})[inside]}.{name.rsplit('.', maxsplit=1)[-1]}"
    if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        weight = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    if weight.ndim > 1 and kind != KIND.F32:
        out.add_tensor(there, quantize(weight, kind), raw_dtype=kind)
    else:
        out.add_tensor(there, np.ascontiguousarray(weight))


def _llama3(config) -> np.ndarray:
    """Term by term, as llama.cpp writes them."""
    turned, how = [], config.rope_parameters
    for i in range(0, config.head_dim, 2):
        wave = 2 * np.pi * how["rope_theta"] ** (i / config.head_dim)
        low, high = 8192 / how["low_freq_factor"], 8192 / how["high_freq_factor"]
        smooth = (8192 / wave - how["low_freq_factor"]) / (how["high_freq_factor"] - how["low_freq_factor"])
        turned.append(1.0 if wave < high else how["factor"] if wave > low else 1 / ((1 - smooth) / how["factor"] + smooth))
    return np.array(turned, np.float32)


MARKS = ["<\uff5cUser\uff5c>", "<think>", "<|im_end|>", "<|eot_id|>", "[PAD296]", "[PAD297]", "[PAD298]", "[PAD299]"]


def renamed(folder: Path, file: Path, last: dict[str, int], real: int, **more) -> Path:
    """A file of so many of the folder's tokens, and these, of such kinds."""
    tokens = [*list(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])[:real], *last]
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 3, *[1] * (real - 2), *last.values()]}
    keys["tokenizer.ggml.merges"] = [m for m in merges(folder) if m.replace(" ", "") in tokens]
    return written(folder, file, keys=keys | more)


def merges(folder: Path) -> list[str]:
    return [" ".join(pair) for pair in json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]]
