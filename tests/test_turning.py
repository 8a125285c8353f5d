"""Models whose rotary frequencies depend on the length of the text: none is longer than what leaves them as they are, and it is said."""

import dataclasses
import json

import pytest
import torch
from tiny import tiny_folder, tiny_tokenizer
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config, Phi3ForCausalLM

import outrider
from outrider.core.errors import OutriderError
from outrider.models import builder
from outrider.models.compiled import SHAPES, Recipe
from outrider.models.kv import slots_for
from outrider.models.layers import turning
from outrider.models.load import context_of, wrap

SHAPE = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0}
SHORT = 32


def phi3() -> Phi3ForCausalLM:
    torch.manual_seed(0)
    made = Phi3ForCausalLM(Phi3Config(**SHAPE, original_max_position_embeddings=SHORT, rope_scaling=dict(LONG))).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.25)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("long") / "phi3"
    phi3().save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


def test_a_longer_text_is_the_one_of_the_model_or_none_at_all(folder, caplog):
    """Up to its end, in one batch with others, and after another in the same row."""
    with caplog.at_level("WARNING", "outrider"):
        rt = outrider.load(folder, ["lookup"], depth=4, compile="off")
    assert rt.engine.target.spec.context == SHORT and "holds 32 tokens" in caplog.text and "longrope" in caplog.text
    prompts = [list(range(40, 40 + n)) for n in (SHORT - 8, 4, SHORT - 20)]
    seqs = [rt.engine.submit(rt.request(prompt, max_tokens=100, ignore_eos=True)) for prompt in prompts]
    while any(seq.finish_reason is None for seq in seqs):
        rt.engine.step()
    module = rt.engine.target.module
    for seq, prompt in zip(seqs, prompts, strict=True):
        want = list(prompt)
        while len(want) < SHORT:
            with torch.inference_mode():
                want.append(int(module(input_ids=torch.tensor([want]), use_cache=False).logits[0, -1].argmax()))
        assert seq.tokens == want
    with pytest.raises(OutriderError, match=f"the context holds {SHORT}"):
        rt.generate("x" * SHORT)


def test_more_than_that_is_refused_by_name(folder):
    for asked in (SHORT + 1, 200, 300):
        with pytest.raises(OutriderError, match=f"context={asked} .*longrope.*Try: context={SHORT}"):
            outrider.load(folder, [], context=asked)
        with pytest.raises(OutriderError, match="longrope"):
            wrap(phi3(), "phi3", "v", context=asked)
    assert outrider.load(folder, [], context=SHORT, compile="off").engine.target.spec.context == SHORT


def test_a_draft_model_falls_silent_there_and_says_so(folder, tmp_path, caplog):
    target = tiny_folder(tmp_path / "target")
    with caplog.at_level("WARNING", "outrider"):
        rt = outrider.load(target, [f"model:{folder}"], depth=3, compile="off")
    assert rt.engine.target.spec.context == 256 and rt.engine.drafters["model"].model.spec.context == SHORT
    assert "model holds 32 tokens" in caplog.text
    how = {"max_tokens": 60, "ignore_eos": True}
    assert rt.generate("the quick", **how).tokens == outrider.load(target, [], compile="off").generate("the quick", **how).tokens


def test_its_steps_are_built_all_the_same(folder, tmp_path, monkeypatch):
    seen = list[int]()
    monkeypatch.setattr(builder, "step_back", lambda: None)
    monkeypatch.setattr(builder, "build", lambda step, *_: seen.append(step.store.capacity))
    builder.main(json.dumps(dataclasses.asdict(Recipe(str(folder), "float32", torch.get_num_threads(), 300))), str(tmp_path))
    assert seen == [slots_for(SHORT)] * len(SHAPES)


KINDS = [
    (LlamaConfig(**SHAPE), None),
    (LlamaConfig(**SHAPE, rope_scaling={"rope_type": "dynamic", "factor": 2.0}), (256, "dynamic")),
    (LlamaConfig(**SHAPE, rope_scaling={"rope_type": "linear", "factor": 2.0}), None),
    (Phi3Config(**SHAPE, original_max_position_embeddings=SHORT, rope_scaling=dict(LONG)), (SHORT, "longrope")),
    (
        Gemma3TextConfig(
            **SHAPE, layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {**LONG, "original_max_position_embeddings": 64, "factor": 4.0},
            },
        ),
        (64, "longrope"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("config, end", KINDS, ids=["none", "dynamic", "linear", "longrope", "by kind of layer"])
def test_what_a_config_says(config, end):
    assert turning(config) == end
    assert context_of(config, None) == (end[0] if end else 256)
    assert context_of(config, 1000, clip=True) == (end[0] if end else 256)
