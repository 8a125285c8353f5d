"""GGUF files: what is written of one is the model that it was made of, and what would be lost is refused."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from test_bad_input import refused
from tiny import BOS, CORPUS, EOS, TEMPLATE, tiny_tokenizer
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import outrider
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
    folder: Path, file: Path, kind: KIND = KIND.F32, *, keys: dict | None = None, pre: str | bool = "gpt-2", extra: str = "", leave: str = ""
) -> Path:
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
    for key, value in (keys or {}).items():
        {str: out.add_string, int: out.add_uint32, list: out.add_array}[type(value)](key, value)
    (_spaced if isinstance(pre, bool) else _tokenizer)(out, folder, pre)
    for name, weight in model.state_dict().items():
        if weight is not None and not (leave and leave in name):
            _tensor(out, config, name, weight.numpy(), kind)
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
    out.add_token_merges([" ".join(pair) for pair in model["merges"][: -1 if pre == "llama-bpe" else None]])
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


@pytest.mark.parametrize("pre, pieces", [("llama-bpe", 1), ("gpt-2", 1), ("qwen2", 1)])
def test_a_word_that_is_a_token_is_that_token_in_llama_3(tmp_path, cache, folder, pre, pieces):
    """Whatever its merges say: of the last token here the file names none."""
    tokenizer = load.load_tokenizer(load.locate(written(folder, tmp_path / "own.gguf", pre=pre)))
    assert len(tokenizer.encode(tokenizer.decode([299]), add_special_tokens=False)) == pieces


def test_weights_of_a_kind_that_nobody_can_read(tmp_path, cache, folder, monkeypatch):
    def unknown(data, kind):
        raise NotImplementedError(f"Dequantization for {kind.name} is not yet implemented")

    file = written(folder, tmp_path / "own.gguf")
    monkeypatch.setattr(gguf, "dequantize", unknown)
    refused(lambda: load.locate(file), "own.gguf cannot be read", "F32 is not yet implemented", "a newer gguf package")
    assert not list(cache.rglob("config.json"))


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

    monkeypatch.setattr(ours, "save_file", full)
    refused(lambda: load.locate(file), "cannot be written as", "No space left", "OUTRIDER_CACHE")
    assert not [p for p in cache.rglob("*") if p.is_file() and "contents" not in p.parts]
    monkeypatch.setattr(ours, "save_file", save)
    assert (load.locate(file) / "config.json").is_file()


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
        ({"pre": "unheard-of"}, "its tokenizer (gpt2, unheard-of) is not known here"),
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


def test_a_part_of_a_file_names_how_to_join_them(tmp_path, cache):
    (file := tmp_path / "m-00001-of-00002.gguf").write_bytes(b"GGUF")
    refused(lambda: load.locate(file), "is a part of a model", "llama-gguf-split --merge")


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
    refused(lambda: load.locate("./nowhere.gguf"), "there is no folder ./nowhere.gguf")
    monkeypatch.undo()


def test_two_files_of_one_tokenizer_are_a_pair(tmp_path, cache, folder):
    target, draft = written(folder, tmp_path / "own.gguf"), written(folder, tmp_path / "small.gguf", KIND.Q8_0)
    rt = outrider.load(target, [f"model:{draft}"], depth=3, dtype="float32")
    out = rt.generate(TEXT, max_tokens=24)
    assert out.stats["drafted"] > 0 and out.tokens == rt.generate(TEXT, max_tokens=24, speculation="off").tokens
