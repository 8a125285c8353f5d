"""GGUF files: what is written of one is the model that it was made of, and what would be lost is refused."""

import os
import shutil
import subprocess
import time

import gguf
import pytest
import torch
from gguf.quants import quantize
from ggufs import KIND, LLAMA3, TEXT, source, written
from safetensors import SafetensorError
from test_bad_input import refused
from tiny import tiny_tokenizer
from transformers import AutoModelForCausalLM

import outrider
from outrider.core.cache import UNUSED
from outrider.models import gguf as ours
from outrider.models import load
from outrider.models.files import INDEX
from outrider.models.vocab import fingerprint


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


def test_how_a_model_in_fewer_bits_becomes_small_again_is_said(tmp_path, cache, folder, caplog):
    for kind in (KIND.F16, KIND.Q8_0):
        load.locate(written(folder, tmp_path / f"{kind.name}.gguf", kind))
    whole, fewer = caplog.messages
    assert "once: 0.00 GB in float16" in whole and "quantise" not in whole and "once: 0.00 GB in bfloat16; quantise='int4' or 'int8'" in fewer


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


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", INDEX, "model-1.safetensors"])
@pytest.mark.parametrize("left", [None, 0, 100])
def test_a_folder_that_was_damaged_is_written_anew_and_that_is_said(tmp_path, cache, folder, caplog, name, left):
    file = written(folder, tmp_path / "own.gguf")
    place = load.locate(file)
    whole = (place / name).read_bytes()
    caplog.clear()
    if left is None:
        (place / name).unlink()
    else:
        (place / name).write_bytes(whole[: min(left, len(whole) - 2)])
    again = load.locate(file)
    assert again == place and (place / name).read_bytes() == whole
    assert f"{place} is damaged" in caplog.messages[0] and name in caplog.messages[0] and "is written as" in caplog.messages[1]
    caplog.clear()
    assert load.locate(file) == place and not caplog.messages


def test_a_damaged_folder_of_somebody_else_is_named_by_who_loads_it(tmp_path, cache, folder, monkeypatch):
    place = load.locate(file := written(folder, tmp_path / "own.gguf"))
    (place / "model-0.safetensors").unlink()

    def not_ours(folder):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(ours, "remove", not_ours)
    refused(lambda: outrider.load(file, []), "lacks weights", "model-0.safetensors")


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
        ({"extra": "blk.2.attn_norm.weight"}, "its weights blk.2.attn_norm.weight are not known here"),
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


def test_a_part_under_any_name(tmp_path, cache, folder):
    refused(lambda: load.locate(written(folder, tmp_path / "own.gguf", keys={"split.count": 2})), "own.gguf is a part of a model", "--merge")
    assert load.locate(written(folder, tmp_path / "one.gguf", keys={"split.count": 1})).is_dir()


def test_a_disk_too_small_is_said_before_anything_is_written(tmp_path, cache, folder, monkeypatch):
    file = written(folder, tmp_path / "own.gguf")
    monkeypatch.setattr(ours.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    refused(lambda: load.locate(file), "own.gguf needs 0.00 GB on disk", "OUTRIDER_CACHE")


def test_a_model_that_no_memory_holds_is_not_written(tmp_path, cache, folder, monkeypatch):
    file = written(folder, tmp_path / "own.gguf")
    numbers, free = sum(int(t.n_elements) for t in ours.Stored(file).tensors.values()), [0]
    monkeypatch.setattr(ours.psutil, "virtual_memory", lambda: type("Memory", (), {"available": free[0]}))
    free[0] = numbers * 5 // 8 - 1
    refused(lambda: load.locate(file), "own.gguf needs 0.00 GB of memory in float32", "with quantise='int4' 0.00", "a smaller model")
    assert not (cache / "gguf").exists()
    free[0] += 1
    assert load.locate(file).is_dir(), "whoever wants it whole is told when it is loaded"


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
