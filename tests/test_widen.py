"""A model inside a larger shape writes the same text, and its new weights are there to be read."""

import pytest
import torch
import zoo
from tiny import tiny_folder
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import outrider
from outrider.bench.widen import widen
from outrider.cli import app
from outrider.core.errors import OutriderError

PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("small") / "model", seed=3)


@pytest.mark.parametrize(("width", "layers"), [(1, 5), (4, 0), (4, 3), (16, 2)])
def test_it_writes_what_the_model_in_it_writes(small, tmp_path, width, layers):
    told = widen(small, tmp_path / "wide", width, layers)
    assert (told["hidden_size"], told["num_hidden_layers"], told["num_attention_heads"]) == (32 * width, layers or 2, 4 * width)
    before, after = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (small, tmp_path / "wide"))
    ids = torch.arange(5, 65)[None]
    with torch.no_grad():
        torch.testing.assert_close(after(input_ids=ids).logits, before(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    texts = [
        outrider.load(folder, drafters=[], dtype="float32", compile="off", device="cpu").generate(PROMPT, max_tokens=40).tokens
        for folder in (small, tmp_path / "wide")
    ]
    assert texts[0] == texts[1]


def test_what_is_new_has_to_be_read_and_multiplied(small, tmp_path):
    """Nothing that a compiler could fold, and no denormal that a processor would trip over."""
    told = widen(small, tmp_path / "wide", 4, 3)
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float32)
    assert told["parameters"] == sum(p.numel() for p in wide.parameters())
    for name, weight in wide.named_parameters():
        if weight.ndim == 2:
            assert (weight == 0).float().mean() < 1e-3 and weight.abs().median() > 1e-14, name
            assert (weight[0] != weight[1]).any() and (weight[:, 0] != weight[:, -1]).any(), name


def test_it_keeps_its_dtype_and_tokenizer(small, tmp_path):
    from outrider.models.load import load_config, load_tokenizer

    AutoModelForCausalLM.from_pretrained(small, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    load_tokenizer(small).save_pretrained(tmp_path / "half")
    widen(tmp_path / "half", tmp_path / "wide")
    assert load_config(tmp_path / "wide").dtype == torch.bfloat16
    rt = outrider.load(tmp_path / "wide", ["lookup", f"model:{small}"], compile="off", device="cpu")
    assert rt.generate(PROMPT, max_tokens=8).tokens


@pytest.mark.parametrize(("how", "named"), [({"width": 2}, "width=2"), ({"layers": 1}, "layers=1"), ({"width": 0}, "width=0")])
def test_shapes_that_cannot_be_are_refused(small, tmp_path, how, named):
    with pytest.raises(OutriderError, match=named):
        widen(small, tmp_path / "wide", **how)
    assert not (tmp_path / "wide").exists()


def test_other_models_and_folders_that_are_there_are_refused(small, tmp_path):
    with pytest.raises(OutriderError, match="only Llamas"):
        zoo.module("gpt2").save_pretrained(tmp_path / "gpt2")
        widen(tmp_path / "gpt2", tmp_path / "wide")
    with pytest.raises(OutriderError, match="there already"):
        widen(small, small)


def test_the_command_says_what_it_made(small, tmp_path):
    done = CliRunner().invoke(app, ["bench", "widen", str(tmp_path / "wide"), "--target", str(small), "--layers", "3"])
    assert done.exit_code == 0, done.output
    assert "3 layers x 128" in done.output and (tmp_path / "wide" / "config.json").exists()
