"""The tokenizer of a GGUF file, as a folder holds it: what transformers reads of it, put right where llama.cpp reads otherwise.

Invariant: every marker of the file is one token, its own, and no token lies beyond the file's. Source: llama.cpp's llama-vocab.cpp.
"""

import json
import re
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from outrider.core.errors import OutriderError

# Where a word that is a token is that token, whatever the merges say, and texts begin with <bos>.
WORDS = ("llama3", "llama-v3", "llama-bpe", "tekken")
SMOL = "smollm"  # digits are cut from one another, then as GPT-2 cuts
SPLITS = {"llama": ("default",), "gpt2": ("gpt-2", "qwen2", "deepseek-r1-qwen", SMOL, *WORDS)}  # ways to cut texts that are known here
UNKNOWN, CONTROL, GIVEN, UNUSED = 2, 3, 4, 5  # kinds of tokens that are no pieces of words
MARKS = ("bos", "eos", "unknown", "padding")
USUAL = {"bos": 1, "eos": 2, "unknown": 0}  # ids of sentencepiece where a file names none
ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
    "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
PAD = re.compile(r"\[PAD\d+\]")
AT = "tokenizer.ggml."


def odd(about: dict[str, Any]) -> str | None:
    """Why the tokenizer of these keys would be read as another, or None."""
    model, split = about.get(f"{AT}model"), about.get(f"{AT}pre", "default")
    return None if split in SPLITS.get(str(model), ()) else f"its tokenizer ({model}, {split}) is not known here"


def marks(about: dict[str, Any]) -> dict[str, int]:
    """The ids of MARKS, those that there are."""
    count, usual = len(about[f"{AT}tokens"]), USUAL if about[f"{AT}model"] == "llama" else {}
    ids = {name: about.get(f"{AT}{name}_token_id", usual.get(name)) for name in MARKS}
    return {name: int(i) for name, i in ids.items() if i is not None and 0 <= i < count}


def ends(about: dict[str, Any]) -> list[int]:
    """The ids with which a text ends: those that the file names, and those that are called so."""
    tokens = about[f"{AT}tokens"]
    named = [marks(about).get("eos"), *[about.get(f"{AT}{name}_token_id") for name in ("eot", "eom")]]
    return sorted({i for i in named if i is not None} | {i for i, token in enumerate(tokens) if token in ENDS})


def write(file: Path, about: dict[str, Any], folder: Path) -> None:
    """Write it into a folder that holds nothing yet."""
    (alone := folder / file.name).symlink_to(file.absolute())  # what lies beside the file is none of its
    try:
        AutoTokenizer.from_pretrained(folder, gguf_file=alone.name).save_pretrained(folder)
        alone.unlink()
        place, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
        told, ids = json.loads(place.read_text("utf-8")), marks(about)
        _mark(told, about)
        _begin(told, about, ids)
        _cut(told, about)
        place.write_text(json.dumps(told, ensure_ascii=False), "utf-8")
        named = {f"{name[:3]}_token": about[f"{AT}tokens"][ids[name]] if name in ids else None for name in MARKS}
        settings.write_text(json.dumps(json.loads(settings.read_text("utf-8")) | named, ensure_ascii=False), "utf-8")
        _check(folder, told)
    except OSError:
        raise
    except Exception as bad:  # whatever a tokenizer that is none leads to
        raise OutriderError(
            f"the tokenizer of {file} cannot be read", f"{type(bad).__name__}: {bad}", "the original model's folder or hub id"
        ) from bad


def _mark(told: dict[str, Any], about: dict[str, Any]) -> None:
    """Markers as the file spells them, each with its id; no token of transformers' own, and none that only fills the embedding up."""
    tokens, vocab = about[f"{AT}tokens"], {i: token for token, i in told["model"]["vocab"].items()}
    kinds = dict(enumerate(about.get(f"{AT}token_type", [])))
    told["added_tokens"] = []
    for i, token in enumerate(tokens):
        if kinds.get(i) in (UNKNOWN, CONTROL, GIVEN):
            vocab[i] = token
            how = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            told["added_tokens"].append({"id": i, "content": token, **how, "special": kinds[i] != GIVEN})
    count = len(tokens)
    while count and kinds.get(count - 1) == UNUSED and PAD.fullmatch(tokens[count - 1]):
        count -= 1
    told["model"]["vocab"] = {vocab[i]: i for i in sorted(vocab) if i < count}


def _begin(told: dict[str, Any], about: dict[str, Any], ids: dict[str, int]) -> None:
    """What is put before a text and behind it."""
    first = about.get(f"{AT}add_bos_token", about[f"{AT}model"] == "llama" or about.get(f"{AT}pre") in WORDS)
    around = {
        name: about[f"{AT}tokens"][ids[name]] for name, there in (("bos", first), ("eos", about.get(f"{AT}add_eos_token"))) if there and name in ids
    }
    pieces = [[{"SpecialToken": {"id": around[name], "type_id": 0}}] if name in around else [] for name in ("bos", "eos")]
    told["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*pieces[0], {"Sequence": {"id": "A", "type_id": 0}}, *pieces[1]],
        "pair": [*pieces[0], {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}, *pieces[1]],
        "special_tokens": {token: {"id": token, "ids": [ids[name]], "tokens": [token]} for name, token in around.items()},
    } if around else None  # fmt: skip


def _cut(told: dict[str, Any], about: dict[str, Any]) -> None:
    """How texts are cut into what merges then join."""
    split = about.get(f"{AT}pre")
    if split in WORDS:
        told["model"]["ignore_merges"] = True
    if split == SMOL:
        told["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, told["pre_tokenizer"]]}
    if about[f"{AT}model"] != "llama":
        return
    before = about.get(f"{AT}add_space_prefix", True)  # a text and what is behind a marker, even where a space is there
    spaces = [{"type": "Prepend", "prepend": "▁"}] * before + [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    told |= {"normalizer": {"type": "Sequence", "normalizers": spaces}, "pre_tokenizer": None}
    if not before:
        told["decoder"]["decoders"] = [step for step in told["decoder"]["decoders"] if step["type"] != "Strip"]


def _check(folder: Path, told: dict[str, Any]) -> None:
    """Raise ValueError unless what is loaded of this folder keeps to it."""
    made = AutoTokenizer.from_pretrained(folder)
    if len(made) != len(told["model"]["vocab"]):
        raise ValueError(f"{len(made)} tokens come of {len(told['model']['vocab'])}")
    for token in told["added_tokens"]:
        if made.encode(token["content"], add_special_tokens=False) != [token["id"]]:
            raise ValueError(f"the marker {token['content']!r} is not read as one")
