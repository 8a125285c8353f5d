"""Refusals: what cannot be run is named together with the remedy, before anything large is read, and nothing breaks."""

import json
import shutil
import struct
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from contracts import refused
from tiny import tiny_folder, tiny_folders

import outrider
from outrider.core import cache
from outrider.core.errors import OutriderError
from outrider.core.types import SamplingParams
from outrider.models import load as loading
from outrider.models.step import Step

NAN = float("nan")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def rt(folders):
    return outrider.load(folders["target"], ["lookup", f"model:{folders['draft']}"])


@pytest.fixture
def copy(folders, tmp_path):
    """A copy of the target's folder that a test may damage."""
    return shutil.copytree(folders["target"], tmp_path / "copy")


# --- files


def test_a_folder_that_is_not_there(tmp_path):
    refused(lambda: outrider.load(tmp_path / "nowhere", []), "no folder", "nowhere", "config.json")


def test_a_file_instead_of_a_folder(copy):
    error = refused(lambda: outrider.load(copy / "config.json", []), "is a file", "config.json and *.safetensors")
    assert error.try_this == str(copy)


def test_a_folder_without_config_is_not_the_remedy_for_a_file(tmp_path, monkeypatch):
    (tmp_path / "weights.bin").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    error = refused(lambda: outrider.load("weights.bin", []), "weights.bin is a file")
    assert error.try_this == "the path of a folder with config.json and *.safetensors"


def test_a_folder_without_config(copy):
    (copy / "config.json").unlink()
    refused(lambda: outrider.load(copy, []), "holds no config.json", "save_pretrained")


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"model_type": "unheard_of"}'])
def test_a_config_that_says_nothing(copy, text):
    (copy / "config.json").write_text(text)
    refused(lambda: outrider.load(copy, []), "config", "is damaged" if text in ("", "{") else "cannot be read")


@pytest.mark.parametrize(
    "stored, kind",
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"), ({"quant_method": "awq", "bits": 4}, "awq"), ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"), ({"load_in_4bit": True}, "bitsandbytes, 4 bits"), ({}, "of an unnamed kind"),
    ],
    ids=str,
)  # fmt: skip
def test_weights_that_are_quantised_already(folders, copy, monkeypatch, stored, kind):
    monkeypatch.setattr(hf.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights were read"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    words = (f"copy is quantised already ({kind})", "unquantised checkpoint", "quantise='int8'")
    for dtype in ("auto", "bfloat16"):
        refused(lambda dtype=dtype: outrider.load(copy, [], dtype=dtype), *words)
    refused(lambda: outrider.load(folders["target"], [f"model:{copy}"]), *words)


@pytest.mark.parametrize(
    "missing, words",
    [
        (ModuleNotFoundError("No module named 'einops.layers'", name="einops.layers"), ("No module named 'einops.layers'", "pip install einops")),
        (ImportError("\nTinyModel requires the causal-conv1d library\nbut it was not found"), ("TinyModel requires the causal-conv1d library",)),
    ],
    ids=["named", "told"],
)
def test_a_package_that_a_model_needs_and_that_is_not_here(copy, monkeypatch, missing, words):
    def absent(*_, **__):
        raise missing

    monkeypatch.setattr(hf.AutoModelForCausalLM, "from_pretrained", absent)
    error = refused(lambda: outrider.load(copy, []), f"{copy} needs a package", *words)
    assert "\n" not in str(error)


def test_a_folder_without_weights(copy):
    (copy / "model.safetensors").unlink()
    refused(lambda: outrider.load(copy, []), "holds no *.safetensors", "save_pretrained")


def test_a_folder_without_tokenizer(copy):
    for file in copy.glob("tokenizer*"):
        file.unlink()
    refused(lambda: outrider.load(copy, []), "tokenizer", "tokenizer.json")


@pytest.mark.parametrize("size", [-1, -1000, 100, 9, 8, 3, 0])
def test_truncated_weights(copy, size):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    refused(lambda: outrider.load(copy, []), "model.safetensors is damaged", "downloading it again")


def header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "start",
    [header(b"{not json"), struct.pack("<Q", 1 << 62), header(b"\xff\xfe\xfa\xfb"), header(b'{"w": {}}'), header(b"[1, 2]"), header(b'{"w": 3}')],
    ids=["json", "length", "bytes", "fields", "list", "number"],
)
def test_a_damaged_header(copy, start):
    (copy / "model.safetensors").write_bytes(start)
    refused(lambda: outrider.load(copy, []), "model.safetensors is damaged", "downloading it again")


def test_weights_with_a_tensor_left_out(copy):
    from safetensors.torch import load_file, save_file

    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    refused(lambda: outrider.load(copy, []), "model.layers.1.mlp.up_proj.weight")


def test_a_draft_that_is_damaged_is_refused_before_the_target_is_read(folders, copy, monkeypatch):
    monkeypatch.setattr(loading, "load_model", lambda *a, **k: pytest.fail("the target was read"))
    (copy / "config.json").unlink()
    refused(lambda: outrider.load(folders["target"], [f"model:{copy}"]), "holds no config.json")


def test_a_cache_that_nobody_has_a_home_for(monkeypatch):
    monkeypatch.delenv("OUTRIDER_CACHE")
    monkeypatch.setattr(cache.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory.")))
    for asked in (cache.cache_folder, cache.cache_place):
        refused(asked, "there is no cache folder. Could not determine home directory. Try: OUTRIDER_CACHE=FOLDER")


# --- pairs


def test_a_draft_with_another_tokenizer(folders):
    error = refused(lambda: outrider.load(folders["target"], [f"model:{folders['other']}"]), "tokenizers differ", "300 and 290", "lookup")
    assert str(folders["other"]) in error.what and str(folders["target"]) in error.what


@pytest.mark.parametrize("way", [{}, {"temperature": 1.5}, {"temperature": 1.5, "seed": 3}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("pair", [("target", "padded"), ("padded", "target")], ids=" drafted by ".join)
def test_padded_rows_are_no_other_tokenizer(folders, pair, way):
    """Padded rows win every race here if they are let: the text must be that of plain decoding, with all ids real."""
    target, draft = (folders[name] for name in pair)
    how = {"max_tokens": 24, "ignore_eos": True, **way}
    out = outrider.load(target, [f"model:{draft}"], depth=4).generate("the quick fox", **how)
    assert len(out.tokens) == 24 and max(out.tokens) < 300
    assert out.stats["drafted"] > 0
    if way.get("temperature", 0) == 0 or "seed" in way:
        assert out.tokens == outrider.load(target, []).generate("the quick fox", **how).tokens


# --- names and settings of load


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"dept": 3}, ["unknown setting 'dept'", "'depth'"]), ({"contxt": 64}, ["'context'"]), ({"zzzzzz": 1}, ["one of", "budget", "rows"]),
        ({"dtype": "int3"}, ["dtype='int3'", "bfloat16"]), ({"device": "tpu9"}, ["device 'tpu9'", "cpu"]),
        ({"rule": "exat"}, ["unknown rule 'exat'", "'exact'"]), ({"rows": 0}, ["rows=0"]), ({"depth": -1}, ["depth=-1"]),
        ({"width": 0}, ["width=0"]), ({"width": 2}, ["width=2", "without a depth", "depth=4"]), ({"budget": 4}, ["budget=4", "without a depth"]), ({"rows": 1.5}, ["rows=1.5"]), ({"context": 1}, ["context=1"]), ({"context": 300}, ["context=300", "256"]),
        ({"depth": True}, ["depth=True"]), ({"rows": True}, ["rows=True"]), ({"context": "96"}, ["context='96'"]),
        ({"slowdown_limit": True}, ["slowdown_limit=True"]), ({"rule": 3}, ["unknown rule '3'", "exact"]),
        ({"predictor": None}, ["unknown predictor 'None'", "logistic"]), ({"predictor": 3}, ["unknown predictor '3'"]), ({"predictor": [3]}, ["unknown predictor '[3]'"]), ({"program": 3}, ["program=3 is no file"]),
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_load(folders, settings, words):
    refused(lambda: outrider.load(folders["target"], [], **settings), *words)


def test_a_device_that_is_not_there(folders, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(lambda: outrider.load(folders["target"], [], device="cuda"), "device 'cuda' is not there", "device='cpu'")


@pytest.mark.parametrize(("asked", "current"), [("cuda:1", 0), ("cuda:2", 2), ("cuda", 1)])
def test_a_device_that_threads_do_not_begin_with(folders, monkeypatch, asked, current):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    refused(lambda: outrider.load(folders["target"], [], device=asked), f"device '{asked}' is not the first", "CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    "drafter, words", [("lokup", ["unknown drafter 'lokup'", "'lookup'"]), ("modle:x", ["'model'"]), ("model", ["needs a model", "model:PATH"])]
)
def test_drafters_that_are_not_known(folders, drafter, words):
    refused(lambda: outrider.load(folders["target"], [drafter]), *words)


@pytest.mark.parametrize(
    "drafter, remedy",
    [
        ("lookup:4", "--drafters lookup and --depth 4 (in Python: drafters=['lookup'], depth=4)"), ("lookup:", "'lookup'"), ("lookup:x", "'lookup'"),
        ("staged:lookup:4>model:x", "--drafters lookup and --depth 4 (in Python: drafters=['lookup'], depth=4)"),
    ],
)  # fmt: skip
def test_a_drafter_that_takes_nothing_behind_its_name(folders, drafter, remedy):
    assert refused(lambda: outrider.load(folders["target"], [drafter]), "'lookup' takes nothing behind ':'").try_this == remedy


@pytest.mark.parametrize("count", ["²", "0x2", ""])
def test_layers_of_an_early_exit_are_a_number(folders, count):
    refused(lambda: outrider.load(folders["target"], [f"early-exit:{count}"]), "needs a number of layers", "early-exit:2")


# --- memory and classes


def test_too_little_memory_is_said_in_numbers(folders, monkeypatch):
    monkeypatch.setattr(loading.psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000_000))
    monkeypatch.setattr(hf.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights were read"))
    plan = loading.memory_plan(folders["target"], "float32", 400, 256)
    error = refused(lambda: outrider.load(folders["target"], [], rows=400), f"{plan.total / 1e9:.2f} GB", "0.01 GB free", "fewer rows")
    assert f"cache {plan.cache / 1e9:.2f}" in error.why


def test_target_and_draft_must_fit_together(folders, monkeypatch):
    one = loading.memory_plan(folders["target"], "float32", 4, 256).total
    monkeypatch.setattr(loading.psutil, "virtual_memory", lambda: SimpleNamespace(available=one * 3 // 2))
    assert len(outrider.load(folders["target"], []).generate("sea", max_tokens=2, ignore_eos=True).tokens) == 2
    refused(lambda: outrider.load(folders["target"], [f"model:{folders['draft']}"]), "the pipeline", "free")


def test_the_plan_is_what_is_held(folders):
    model, _, plan = loading.load_model(folders["target"], rows=3)
    assert plan.cache == model.store.bytes
    assert plan.weights == sum(p.numel() * 4 for p in model.module.parameters())


UNFIT = [
    (hf.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4), "mamba", "rolled back"),
    (hf.BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2), "bloom", "ALiBi"),
]


@pytest.mark.parametrize("config, name, reason", UNFIT, ids=["mamba", "bloom"])
def test_classes_that_cannot_run_are_refused_by_name(config, name, reason, folders, tmp_path):
    module = hf.AutoModelForCausalLM.from_config(config)
    refused(lambda: loading.wrap(module, "odd one", "v"), "odd one", name, reason)
    for dtype in (torch.float32, torch.bfloat16):
        module.to(dtype).save_pretrained(tmp_path)
        refused(lambda: outrider.load(tmp_path, []), name, reason)
        refused(lambda: outrider.load(folders["target"], [f"model:{tmp_path}"]), name, reason)


def test_a_model_with_a_broken_mask_fails_the_load_time_check(folders, monkeypatch):
    honest = Step._masks
    monkeypatch.setattr(Step, "_masks", lambda self, *numbers: torch.zeros_like(honest(self, *numbers)))
    refused(lambda: outrider.load(folders["target"], []), "fails the load-time check", "LlamaForCausalLM", "differs from recomputation")


def test_half_precision_passes_the_check(folders):
    out = outrider.load(folders["target"], [f"model:{folders['draft']}"], dtype="bfloat16").generate("sea", max_tokens=4, ignore_eos=True)
    assert len(out.tokens) == 4


def test_every_refusal_names_the_thing_and_the_remedy():
    error = OutriderError("it is so", "because", "that")
    assert str(error) == "it is so. because. Try: that" and str(OutriderError("it is so")) == "it is so"


def test_a_saved_folder_is_loaded_as_it_was_made(tmp_path):
    folder = tiny_folder(tmp_path / "m", seed=3)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 300
    assert outrider.load(folder, []).engine.target.spec.context == 256


def test_local_attention_is_refused_by_name():
    config = hf.GPTNeoConfig(
        vocab_size=50, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]], bos_token_id=0, eos_token_id=1
    )
    refused(lambda: loading.wrap(hf.GPTNeoForCausalLM(config), "neo", "v"), "neo", "local attention")


@pytest.mark.parametrize("prompt", [None, 7, "caf\udce9"])
def test_a_prompt_that_is_no_text(rt, prompt):
    refused(lambda: rt.stream(prompt) if isinstance(prompt, str) else rt._encode(prompt), "prompt", "text")


@pytest.mark.parametrize(
    "messages",
    [[{"content": "hi"}], [{"role": 3, "content": "hi"}], [{"role": "caf\udce9", "content": "hi"}], [{"role": "user", "content": None}], ["hi"]],
)
def test_messages_that_are_none(rt, messages):
    with pytest.raises(OutriderError, match=r"message|a role is"):
        rt.chat(messages)


REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}{{ messages[0].content }}"


def test_a_chat_template_that_refuses_a_conversation(rt, monkeypatch):
    monkeypatch.setattr(rt.tokenizer, "chat_template", REFUSING)
    system = [{"role": "system", "content": "be kind"}]
    refused(lambda: rt.chat(system), "the chat template refuses this conversation", "no system role here", "other roles")
    refused(lambda: rt.stream(system), "the chat template refuses this conversation")
    assert rt.chat([{"role": "user", "content": "sea"}], max_tokens=3, ignore_eos=True).usage["completion_tokens"] == 3


def test_a_chat_template_that_cannot_be_read(rt, monkeypatch):
    monkeypatch.setattr(rt.tokenizer, "chat_template", "{{ messages }}\n{% if broken %")
    refused(lambda: rt.chat([{"role": "user", "content": "sea"}]), "chat template cannot be read", "line 2")


@pytest.mark.parametrize("knobs", [{"logit_bias": {"a": 1}}, {"stop_token_ids": ["a"]}, {"temperature": 1e-40}])
def test_settings_of_the_wrong_kind(rt, knobs):
    refused(lambda: rt.generate("the fox", **knobs), next(iter(knobs)))
    refused(lambda: rt.generate("the fox", SamplingParams(**knobs)), next(iter(knobs)))


def test_a_drafter_cannot_take_the_name_of_the_target(folders):
    refused(lambda: outrider.load(folders["target"], [SimpleNamespace(name="target")]), "target")


def test_a_drafter_that_cannot_be_asked_is_refused_before_anything_is_read():
    class Old:
        name = "old"

        def extend(self, seqs, draft, frontier, width, source, settings, noise, levels=1):
            return draft

    class Loose(Old):
        def extend(self, *how, **more):
            return more["draft"]

    gone = "/nowhere/at/all"
    refused(lambda: outrider.load(gone, [Old()]), "cannot be asked for guesses", "'on'", "levels=1, on=None", "docs/extend.md")
    refused(lambda: outrider.load(gone, [object()]), "is no drafter", "it has no `extend`")
    refused(lambda: outrider.load(gone, 3), "3 is no drafter", "it has no `extend`")
    refused(lambda: outrider.load(gone, [Loose()]), gone)
    refused(lambda: outrider.load(gone, Loose()), gone)
    words = ("my drafter", 'lo"ok', "look's", "back\\slash", "two\nlines", "", None, 7)  # of plans and programs, and of the code made of those
    for name in words:
        Loose.name = name
        refused(lambda: outrider.load(gone, [Loose()]), f"cannot be named {name!r}", "without spaces")
    Loose.name = "näher:2.5x{0}"
    refused(lambda: outrider.load(gone, [Loose()]), gone)
