"""Classes that differ from most: in what they take notice of, in whom they ask for attention, in what they cache; and those that are refused."""

import json

import numpy as np
import pytest
import torch
import zoo
from contracts import check_scores, refused
from test_models import recompute
from tiny import tiny_folder, tiny_tokenizer
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    XLNetConfig,
    XLNetLMHeadModel,
)  # fmt: skip

import outrider
from outrider.core.errors import OutriderError
from outrider.models.load import load_module, memory_plan, self_check, wrap

WINDOW = zoo.WINDOW
_SHAPE = {
    "vocab_size": zoo.VOCAB, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "max_position_embeddings": 256,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_WIDE = {**_SHAPE, "intermediate_size": 48, "num_key_value_heads": 2}
_MIXED = ["sliding_attention", "full_attention"] * 2
CLASSES = {
    "a window of which it takes no notice": lambda: LlamaForCausalLM(LlamaConfig(**_WIDE, sliding_window=WINDOW)),
    "types of which it takes no notice": lambda: LlamaForCausalLM(LlamaConfig(**_WIDE, sliding_window=WINDOW, layer_types=_MIXED)),
    "a window that its attention is told, and its masks are not": lambda: OlmoeForCausalLM(
        OlmoeConfig(**_WIDE, sliding_window=WINDOW, num_experts=4, num_experts_per_tok=2)),
    "one head of keys": lambda: FalconForCausalLM(FalconConfig(**_SHAPE, multi_query=True, new_decoder_architecture=False, alibi=False)),
    "heads of keys for groups": lambda: FalconForCausalLM(FalconConfig(**_SHAPE, num_kv_heads=2, new_decoder_architecture=True, alibi=False)),
    "latent keys": lambda: DeepseekV2ForCausalLM(DeepseekV2Config(
        **{**_WIDE, "num_key_value_heads": 4}, kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1, n_group=1, topk_group=1)),
    "layers that read the keys of others": lambda: Gemma3nForCausalLM(Gemma3nTextConfig(
        **{**_WIDE, "intermediate_size": [48] * 4}, head_dim=8, vocab_size_per_layer_input=zoo.VOCAB, hidden_size_per_layer_input=8,
        num_kv_shared_layers=2, layer_types=_MIXED, sliding_window=WINDOW, laurel_rank=4, altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4)),
}  # fmt: skip


def made(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    module = CLASSES[kind]()
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.25)
    return module.float().eval()


@pytest.mark.parametrize("kind", CLASSES)
def test_it_is_what_the_module_is_without_a_cache(kind: str) -> None:
    model = wrap(made(kind), kind, "zoo", context=200, chunk=4)
    check_scores(model, recompute(model.module), np.random.default_rng(1), zoo.VOCAB, 1e-3)
    self_check(model)


@pytest.mark.parametrize("kind", CLASSES)
def test_what_it_will_hold_is_known_before(kind: str, tmp_path) -> None:
    module = made(kind)
    module.save_pretrained(tmp_path)
    model = wrap(module, kind, "zoo", rows=3, context=100)
    assert memory_plan(tmp_path, "float32", rows=3, context=100).cache == model.store.bytes


def test_a_window_of_which_a_class_takes_no_notice_is_said(tmp_path, caplog) -> None:
    folder = tiny_folder(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    outrider.load(folder, [], compile="off")
    assert "window" not in caplog.text
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 16}))
    outrider.load(folder, [], compile="off")
    assert "names a window of 16 positions, of which LlamaForCausalLM takes no notice: all are seen" in caplog.text


SMALL = {"vocab_size": 300, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256}


@pytest.mark.parametrize(
    "module, words",
    [
        (lambda: DogeForCausalLM(DogeConfig(**{**_WIDE, "vocab_size": 300})), "DogeAttention masks every head by itself"),
        (lambda: OpenAIGPTLMHeadModel(OpenAIGPTConfig(**SMALL)), "target (OpenAIGPTLMHeadModel) cannot run here. RuntimeError: "),
        (
            lambda: XLNetLMHeadModel(XLNetConfig(vocab_size=300, d_model=32, n_head=4, n_layer=2, d_inner=48)),
            "target (XLNetLMHeadModel) cannot run here",
        ),
    ],
    ids=["doge", "openai-gpt", "xlnet"],
)
def test_a_class_that_this_cache_does_not_fit_is_named(tmp_path, module, words: str) -> None:
    module().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    refused(lambda: outrider.load(tmp_path, [], compile="off", context=100), words, "another model")


@pytest.mark.parametrize("key, value", [("hidden_act", "unheard-of"), ("rope_parameters", {"rope_type": "unheard-of", "rope_theta": 1e4})])
def test_a_config_with_words_that_nobody_knows(tmp_path, key: str, value: object) -> None:
    folder = tiny_folder(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    refused(lambda: outrider.load(folder, [], compile="off"), "cannot be built", "unheard-of", "a config.json")


def test_weights_that_the_model_has_no_place_for_are_said(tmp_path, caplog) -> None:
    folder = tiny_folder(tmp_path / "m", layers=3)
    load_module(folder, "float32")
    assert not caplog.messages
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    load_module(folder, "float32")
    assert "holds 9 weights that LlamaForCausalLM has no place for, the first is model.layers.2." in caplog.text


def test_whatever_a_class_leads_to_is_one_error(tmp_path, monkeypatch) -> None:
    folder = tiny_folder(tmp_path / "m")
    monkeypatch.setattr("outrider.models.load.self_check", lambda model: {}["nowhere"])
    with pytest.raises(OutriderError, match="LlamaForCausalLM.*KeyError: 'nowhere'"):
        outrider.load(folder, [], compile="off")
