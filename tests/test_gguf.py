"""GGUF files: what is written of one is the model that it was made of, and what would be lost is refused."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from safetensors import SafetensorError
from test_bad_input import refused
from tiny import BOS, CORPUS, EOS, TEMPLATE, tiny_tokenizer
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import outrider
from outrider.core.cache import UNUSED
from outrider.models import gguf as ours
from outrider.models import load
from outrider.models.vocab import fingerprint

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


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return source(tmp_path_factory.mktemp("gguf") / "llama", "llama")


@pytest.mark.parametrize(
    "family, more", [("llama", {}), ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 500_000.0}}), ("qwen2", {}), ("qwen3", {})]
)
def test_a_file_writes_what_the_folder_writes_that_it_was_made_of(tmp_path, cache, family, more):
    """To the bit: the same weights, config and tokenizer."""
    own = source(tmp_path / "own", family, **more)
    file = written(own, tmp_path / "own.gguf")
    theirs, mine = (outrider.load(path, [], dtype="float32") for path in (own, file))
    tokens = theirs.tokenizer.encode(TEXT)
    assert mine.tokenizer.encode(TEXT) == tokens and mine.tokenizer.decode(tokens) == theirs.tokenizer.decode(tokens)
    assert fingerprint(mine.tokenizer) == fingerprint(tiny_tokenizer()), "no token more"
    turn = [{"role": "user", "content": "hello"}]
    assert mine.tokenizer.apply_chat_template(turn, tokenize=False) == theirs.tokenizer.apply_chat_template(turn, tokenize=False)
    known, found = (rt.engine.target.module.state_dict() for rt in (theirs, mine))
    assert known.keys() == found.keys() and all(torch.equal(known[name], found[name]) for name in known)
    assert mine.generate(TEXT, max_tokens=40).tokens == theirs.generate(TEXT, max_tokens=40).tokens
    with torch.inference_mode():
        ids = torch.tensor([tokens * 3])
        assert torch.equal(*(rt.engine.target.module(input_ids=ids).logits for rt in (theirs, mine)))
    assert load.locate(file).name == "own"


def test_weights_in_fewer_bits_are_written_whole(tmp_path, cache, folder):
    file = written(folder, tmp_path / "own.gguf", KIND.Q8_0)
    found, place = outrider.load(file, [], dtype="float32").engine.target.module.state_dict(), load.locate(file)
    assert load.load_config(place).dtype == torch.bfloat16
    for name, weight in AutoModelForCausalLM.from_pretrained(folder).state_dict().items():
        want = weight
        if weight.ndim > 1:  # 32 weights share a scale, by which the largest is 127; then eight bits are left of each
            want = torch.from_numpy(gguf.dequantize(quantize(weight.numpy(), KIND.Q8_0), KIND.Q8_0))
            assert (want - weight).abs().max() <= weight.abs().max() / 127
            assert "q_proj" in name or "k_proj" in name or torch.equal(found[name], want.bfloat16().float())
        assert (found[name] - want).abs().max() <= want.abs().max() / 60, name


@pytest.mark.parametrize("kind, dtype", [(KIND.F16, torch.float16), (KIND.BF16, torch.bfloat16), (KIND.F32, torch.float32)])
def test_whole_weights_keep_their_dtype(tmp_path, cache, folder, kind, dtype):
    assert load.load_config(load.locate(written(folder, tmp_path / "own.gguf", kind))).dtype == dtype


def test_a_tokenizer_that_lies_beside_a_file_is_not_the_file_s(tmp_path, cache, folder):
    file = written(folder, tmp_path / "own.gguf")
    tiny_tokenizer(280).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert len(load.load_tokenizer(load.locate(file))) == 300


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("text", [TEXT, " begins with a space", "  two", "", "né <0x41>", f"the{EOS}quick{EOS} fox", "a\n\n b", "日本 🙂"])
def test_spaces_are_put_where_llama_cpp_puts_them(tmp_path, cache, before, text):
    own = spaced(tmp_path / "own", before)
    theirs, mine = (load.load_tokenizer(folder) for folder in (own, load.locate(written(own, tmp_path / "own.gguf", pre=before))))
    tokens = theirs.encode(text)
    assert mine.encode(text) == tokens and mine.decode(tokens) == theirs.decode(tokens) and fingerprint(mine) == fingerprint(theirs)


@pytest.mark.parametrize("pre, pieces", [("llama-bpe", 1), ("tekken", 1), ("gpt-2", 2), ("qwen2", 2)])
def test_a_word_that_is_a_token_is_that_token_where_the_model_says_so(tmp_path, cache, folder, pre, pieces):
    """Whatever its merges say: here the file names none of the last token."""
    file = written(folder, tmp_path / "own.gguf", pre=pre, keys={"tokenizer.ggml.merges": merges(folder)[:-1]})
    tokenizer = load.load_tokenizer(load.locate(file))
    word = tokenizer.decode([299])
    assert len(tokenizer.encode(word, add_special_tokens=False)) == pieces, word


@pytest.mark.parametrize("pre, together", [("smollm", False), ("gpt-2", True)])
def test_digits_are_cut_from_one_another_for_smollm(tmp_path, cache, folder, pre, together):
    file = renamed(
        folder, tmp_path / "own.gguf", {"19": 1}, 299, **{"tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": ["1 9", *merges(folder)[:-1]]}
    )
    tokenizer = load.load_tokenizer(load.locate(file))
    found = tokenizer.encode("in 1984, a19")
    assert found.count(299) == 2 * together and tokenizer.decode(found, skip_special_tokens=True) == "in 1984, a19"


@pytest.mark.parametrize(
    "pre, key, begins",
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", None, False), ("gpt-2", True, True), ("tekken", None, True)],
)
def test_texts_begin_as_llama_cpp_begins_them(tmp_path, cache, folder, pre, key, begins):
    """Files seldom say so: with <bos>, if the model is a Llama 3."""
    keys = {"tokenizer.ggml.add_bos_token": key, "tokenizer.ggml.add_eos_token": key}
    tokenizer = load.load_tokenizer(load.locate(written(folder, tmp_path / "own.gguf", pre=pre, keys=keys)))
    found, own = tokenizer.encode("hello"), tokenizer.encode("hello", add_special_tokens=False)
    assert found == [0] * begins + own + [1] * bool(key)


def test_sentencepiece_s_own_ids_hold_where_a_file_names_none(tmp_path, cache):
    own = spaced(tmp_path / "own", True)
    keys = {f"tokenizer.ggml.{name}_token_id": None for name in ("bos", "eos", "unknown")}
    place = load.locate(written(own, tmp_path / "own.gguf", pre=True, keys=keys))
    tokenizer = load.load_tokenizer(place)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2) and tokenizer.encode("hello")[0] == 1
    assert json.loads((place / "generation_config.json").read_text()) == {"eos_token_id": [2]}


MARKS = ["<\uff5cUser\uff5c>", "<think>", "<|im_end|>", "<|eot_id|>", "[PAD296]", "[PAD297]", "[PAD298]", "[PAD299]"]


def renamed(folder: Path, file: Path, last: dict[str, int], real: int, **more) -> Path:
    """A file of so many of the folder's tokens, and these, of such kinds."""
    tokens = [*list(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])[:real], *last]
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 3, *[1] * (real - 2), *last.values()]}
    keys["tokenizer.ggml.merges"] = [m for m in merges(folder) if m.replace(" ", "") in tokens]
    return written(folder, file, keys=keys | more)


def merges(folder: Path) -> list[str]:
    return [" ".join(pair) for pair in json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]]


def test_markers_are_one_token_each_and_ends_are_known_by_their_names(tmp_path, cache, folder):
    """Also those of letters that no byte stands for, one of which begins texts; what fills the embedding up is no token."""
    file = renamed(
        folder, tmp_path / "own.gguf", dict(zip(MARKS, [3, 4, 3, 3, 5, 5, 5, 5], strict=True)), 292, **{"tokenizer.ggml.bos_token_id": 292}
    )
    place = load.locate(file)
    tokenizer = load.load_tokenizer(place)
    assert len(tokenizer) == 296 and tokenizer.bos_token_id == 292
    for i, mark in enumerate(MARKS[:4], 292):
        assert tokenizer.encode(f"{mark}fox", add_special_tokens=False) == [i, *tokenizer.encode("fox", add_special_tokens=False)], mark
    assert tokenizer.encode("fox")[0] == 292
    assert tokenizer.decode([293, 292], skip_special_tokens=True) == "<think>", "which is said, the other is not"
    assert json.loads((place / "generation_config.json").read_text()) == {"eos_token_id": [1, 294, 295]}


def test_markers_that_cannot_be_told_apart(tmp_path, cache, folder):
    file = renamed(folder, tmp_path / "own.gguf", {EOS: 3}, 299)  # which is token 1, too
    refused(lambda: load.locate(file), "the tokenizer of", "own.gguf cannot be read")


def test_padding_keeps_nobody_from_drafting(tmp_path, cache, folder):
    """Converters fill the vocabulary up to the rows of the embedding, of which two models of a family may have different ones."""
    full = renamed(folder, tmp_path / "own.gguf", dict.fromkeys(MARKS[4:], 5), 296)
    small = renamed(source(tmp_path / "small", "llama", vocab_size=298), tmp_path / "small.gguf", dict.fromkeys(MARKS[4:6], 5), 296)
    rt = outrider.load(full, [f"model:{small}"], depth=2, dtype="float32")
    assert len(rt.tokenizer) == 296 and rt.generate(TEXT, max_tokens=8).stats["drafted"] > 0


def test_weights_of_a_kind_that_nobody_can_read(tmp_path, cache, folder, monkeypatch):
    def unknown(data, kind):
        raise NotImplementedError(f"Dequantization for {kind.name} is not yet implemented")

    file = written(folder, tmp_path / "own.gguf")
    monkeypatch.setattr(gguf, "dequantize", unknown)
    refused(lambda: load.locate(file), "own.gguf cannot be read", "F32 is not yet implemented", "a newer gguf package")
    assert not list(cache.rglob("config.json"))


def test_whole_weights_of_two_kinds_lose_no_bit(tmp_path, cache, folder):
    file = written(folder, tmp_path / "own.gguf", KIND.F16, kinds={"lm_head.weight": KIND.F32})
    found = outrider.load(file, [], dtype="float32").engine.target.module.state_dict()
    assert torch.equal(found["lm_head.weight"], AutoModelForCausalLM.from_pretrained(folder).state_dict()["lm_head.weight"])


def test_what_says_no_or_nothing_is_read_as_nothing(tmp_path, cache, folder):
    keys = {
        "llama.expert_count": 0,
        "llama.attention.causal": True,
        "llama.rope.scaling.factor": 1.0,
        "llama.tensor_data_layout": "Meta AI original pth",
    }
    assert load.load_config(load.locate(written(folder, tmp_path / "own.gguf", keys=keys))).model_type == "llama"
    keys = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}
    assert load.load_config(load.locate(written(folder, tmp_path / "other.gguf", keys=keys))).rope_parameters["rope_type"] == "default"


def test_a_file_is_written_once_and_again_where_it_is_another(tmp_path, cache, folder, monkeypatch):
    file, write, times = written(folder, tmp_path / "own.gguf"), ours._write, []
    monkeypatch.setattr(ours, "_write", lambda *how: (times.append(1), write(*how)))
    place = load.locate(file)
    assert load.locate(file) == place and place.is_relative_to(cache) and times == [1]
    file.rename(tmp_path / "elsewhere.gguf")
    written(folder, file, KIND.F16)
    assert (other := load.locate(file)) != place and times == [1, 1]
    monkeypatch.setattr(ours, "VERSION", ours.VERSION + 1)
    assert load.locate(file) != other and times == [1, 1, 1], "what is written of a file has changed"


def test_a_folder_that_was_begun_is_not_taken_for_one(tmp_path, cache, folder, monkeypatch):
    file, save = written(folder, tmp_path / "own.gguf"), ours.save_file

    def full(*_):
        raise OSError(28, "No space left on device")

    def fuller(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    for failing in (full, fuller):
        monkeypatch.setattr(ours, "save_file", failing)
        refused(lambda: load.locate(file), "cannot be written as", "No space left", "OUTRIDER_CACHE")
        assert not [p for p in cache.rglob("*") if p.is_file() and "contents" not in p.parts]
    monkeypatch.setattr(ours, "save_file", save)
    assert (load.locate(file) / "config.json").is_file()


def test_a_cache_that_cannot_be_written_to(tmp_path, cache, folder):
    file = written(folder, tmp_path / "own.gguf")
    cache.mkdir()
    (cache / "gguf").touch()
    refused(lambda: load.locate(file), "own.gguf cannot be written as", "Not a directory", "OUTRIDER_CACHE")


def test_what_killed_processes_left_is_removed_and_what_nobody_took_up_for_long(tmp_path, cache, folder):
    file = written(folder, tmp_path / "own.gguf")
    place = load.locate(file)
    other = load.locate(written(folder, tmp_path / "other.gguf", KIND.F16))
    gone = subprocess.Popen(["true"])
    gone.wait()
    for name in (f".{gone.pid}-1", f".{os.getpid()}-1", ".theirs"):
        (place.parent / name).mkdir()
    os.utime(other, (0, time.time() - 1.1 * UNUSED))
    shutil.rmtree(place)
    assert load.locate(file) == place and not other.exists()
    assert {p.name for p in place.parent.iterdir()} == {"own", f".{os.getpid()}-1", ".theirs"}


def test_another_process_that_was_first_is_taken_at_its_word(tmp_path, cache, folder, monkeypatch):
    file, write = written(folder, tmp_path / "own.gguf"), ours._write

    def overtaken(held, draft, size):
        write(held, draft, size)
        place = draft.parent / file.stem
        place.mkdir()
        (place / "theirs").touch()

    monkeypatch.setattr(ours, "_write", overtaken)
    assert [p.name for p in load.locate(file).iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    "how, why",
    [
        ({"keys": {"llama.expert_count": 8}}, "llama.expert_count is not known here"),
        ({"keys": {"llama.attention.sliding_window": 4096}}, "llama.attention.sliding_window is not known here"),
        ({"keys": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4}}, "llama.rope.scaling"),
        ({"keys": {"llama.attention.head_count_kv": [1, 2]}}, "llama.attention.head_count_kv is not known here"),
        ({"extra": "blk.0.attn_sinks.weight"}, "its weights blk.0.attn_sinks.weight are not known here"),
        ({"extra": "blk.0.attn_q.bias"}, "its weights blk.0.attn_q.bias are not known here"),
        ({"extra": ours.TURNED}, "are not those of Llama 3"),
        ({"keys": {"llama.rope.scaling.factor": 4.0}}, "llama.rope.scaling.factor is not known here"),
        ({"keys": {"llama.attention.causal": False}}, "llama.attention.causal is not known here"),
        ({"pre": "unheard-of"}, "its tokenizer (gpt2, unheard-of) is not known here"),
        ({"pre": "default"}, "its tokenizer (gpt2, default) is not known here"),
        ({"keys": {"tokenizer.ggml.pre": None}}, "its tokenizer (gpt2, default) is not known here"),
    ],
)  # fmt: skip
def test_what_would_be_lost_is_refused(tmp_path, cache, folder, how, why):
    file = written(folder, tmp_path / "own.gguf", **how)
    refused(lambda: load.locate(file), "own.gguf cannot be read exactly", why, "*.safetensors")
    assert not (cache / "gguf").exists()


def test_an_architecture_that_is_not_known(tmp_path, cache):
    out = gguf.GGUFWriter(file := tmp_path / "m.gguf", "mamba")
    out.add_context_length(8)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.close()
    refused(lambda: load.locate(file), "cannot be read exactly", "its architecture is mamba, and llama, qwen2, qwen3 are read")


def test_weights_that_are_not_there(tmp_path, cache, folder):
    refused(lambda: outrider.load(written(folder, tmp_path / "own.gguf", leave="up_proj"), []), "lacks weights", "2 of them")


@pytest.mark.parametrize("at", [0, 4, 40, 400, 4000, -1])
def test_a_file_that_is_cut_short(tmp_path, cache, folder, at):
    whole = written(folder, tmp_path / "own.gguf").read_bytes()
    (file := tmp_path / "cut.gguf").write_bytes(whole[:at])
    refused(lambda: load.locate(file), "cut.gguf is damaged, or no GGUF file", "downloading it again")


def test_heads_that_do_not_fit(tmp_path, cache, folder):
    refused(lambda: load.locate(written(folder, tmp_path / "own.gguf", keys={"llama.attention.head_count": 5})), "own.gguf is damaged")
    refused(lambda: load.locate(written(folder, tmp_path / "one.gguf", keys={"llama.attention.head_count_kv": 3})), "one.gguf is damaged")


def test_a_part_of_a_file_names_how_to_join_them(tmp_path, cache):
    (file := tmp_path / "m-00001-of-00002.gguf").write_bytes(b"GGUF")
    for path in (file, "owner/name/m-00001-of-00002.gguf"):
        refused(lambda path=path: load.locate(path), "is a part of a model", "llama-gguf-split --merge")


def test_a_disk_too_small_is_said_before_anything_is_written(tmp_path, cache, folder, monkeypatch):
    file = written(folder, tmp_path / "own.gguf")
    monkeypatch.setattr(ours.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    refused(lambda: load.locate(file), "own.gguf needs 0.00 GB on disk", "OUTRIDER_CACHE")


def test_the_package_that_reads_them_is_named_where_it_is_not_here(tmp_path, cache, folder, monkeypatch):
    file = written(folder, tmp_path / "own.gguf")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    refused(lambda: load.locate(file), "needs a package that is not here", "pip install '.[gguf]'")


def test_a_file_of_the_hub_is_fetched_by_its_name(tmp_path, cache, folder, monkeypatch):
    import huggingface_hub

    file, asked = written(folder, tmp_path / "own.gguf"), []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *what: (asked.append(what), str(file))[1])
    assert (load.locate("owner/name/sub/own.gguf") / "config.json").is_file() and asked == [("owner/name", "sub/own.gguf")]
    for path in ("./nowhere.gguf", "/a/b/nowhere.gguf", "models/nowhere.gguf", "nowhere.GGUF"):
        refused(lambda path=path: load.locate(path), f"there is no file {path}", "OWNER/NAME/FILE.gguf")
    assert len(asked) == 1, "what is meant as a place here is not asked for"

    def offline(*_):
        raise ConnectionError("no way there")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    refused(lambda: load.locate("owner/name/own.gguf"), "from the hub it could not be fetched. no way there")
    assert (load.locate(file.rename(tmp_path / "OWN.GGUF")) / "config.json").is_file()


def test_two_files_of_one_tokenizer_are_a_pair(tmp_path, cache, folder):
    target, draft = written(folder, tmp_path / "own.gguf"), written(folder, tmp_path / "small.gguf", KIND.Q8_0)
    rt = outrider.load(target, [f"model:{draft}"], depth=3, dtype="float32")
    out = rt.generate(TEXT, max_tokens=24)
    assert out.stats["drafted"] > 0 and out.tokens == rt.generate(TEXT, max_tokens=24, speculation="off").tokens
