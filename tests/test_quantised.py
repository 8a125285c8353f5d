"""Linear layers in 8-bit integers: the rounding, the product, the model and the drafter made of them."""

import dataclasses
import json
import logging

import numpy as np
import packages
import pytest
import torch
import torch.nn.functional as F
import zoo
from contracts import check_scores, recompute
from packages import layers, recipe_of
from tiny import tiny_folder
from torch import nn

import outrider
from outrider.core.errors import OutriderError
from outrider.models import builder
from outrider.models import quantised as eight
from outrider.models.compiled import SHAPES
from outrider.models.load import load_module, wrap
from outrider.models.package import INDEPENDENT
from outrider.models.quantised import QuantisedLinear, quantised

cache = packages.cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("eight") / "target", jitter=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_is_off_by_half_a_unit_of_its_row_at_most(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(64, 50, bias=False).to(dtype)
    with torch.no_grad():
        linear.weight *= torch.logspace(-3, 3, 50)[:, None].to(dtype)  # scales that float16 has hardly bits for are among them
        linear.weight[7] = 0
    layer = QuantisedLinear(linear)
    assert layer.turned.dtype == torch.int8 and layer.scale.dtype == layer.weight.dtype == dtype
    off = layer.turned.t().double() * layer.scale.double()[:, None] - linear.weight.detach().double()
    assert bool((off.abs() <= layer.scale.double()[:, None] * 0.50001).all())
    assert bool((layer.scale > 0).all())
    used = layer.turned.t().int().abs().amax(1)[torch.arange(50) != 7]
    assert int(used.max()) == 127 and int(used.min()) >= (64 if dtype == torch.float16 else 126), "seven bits are used, and a sign"
    assert bool((layer(torch.ones(3, 64, dtype=dtype))[:, 7] == 0).all())


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 5, 64), (0, 64)])
def test_the_product_is_that_of_the_rounded_weights(near: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU and elsewhere, with a bias."""
    monkeypatch.setattr(eight, "near", lambda device: near)
    torch.manual_seed(2)
    linear = nn.Linear(64, 33)
    layer, x = QuantisedLinear(linear), torch.randn(shape)
    want = x.double() @ layer.weight.double().T + linear.bias.detach().double()
    got = layer(x)
    assert got.shape == (*shape[:-1], 33) and torch.allclose(got.double(), want, atol=1e-5)


def test_integers_lie_where_their_layer_lies() -> None:
    layer = QuantisedLinear(nn.Linear(64, 33, device="meta", dtype=torch.bfloat16))
    assert layer.turned.device == layer.scale.device == torch.device("meta")


def test_large_inputs_overflow_nowhere_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of weights before they are scaled would."""
    torch.manual_seed(3)
    linear, x = nn.Linear(1024, 32).half(), torch.randn(4, 1024).half() * 20
    for near in (True, False):
        monkeypatch.setattr(eight, "near", lambda device, near=near: near)
        assert torch.allclose(QuantisedLinear(linear)(x).float(), F.linear(x.float(), linear.weight.float(), linear.bias.float()), atol=0.5)


def test_who_reads_a_layer_s_weights_reads_what_they_stand_for() -> None:
    """As routers do that multiply in float32: integers without scales would be another model."""
    torch.manual_seed(4)
    linear = nn.Linear(64, 300, bias=False).bfloat16()
    layer = QuantisedLinear(linear)
    assert layer.weight.dtype == torch.bfloat16 and torch.allclose(layer.weight.float(), linear.weight.float(), atol=1e-3)
    assert sum(p.nbytes for p in layer.parameters()) == 300 * (64 + 2), "and what it holds is counted with the parameters"


def test_all_linear_layers_are_quantised_and_no_other(folder) -> None:
    module = load_module(folder, "float32")
    linear, table = layers(module, nn.Linear), module.get_input_embeddings().weight.clone()
    assert "lm_head" in linear
    assert layers(quantised(module, "m", "int8"), QuantisedLinear) == linear and not layers(module, nn.Linear)
    assert torch.equal(module.get_input_embeddings().weight, table)


def test_a_head_that_is_tied_leaves_the_embedding_whole(tmp_path) -> None:
    module = zoo.module("gemma2")
    assert module.get_output_embeddings().weight is module.get_input_embeddings().weight
    table = module.get_input_embeddings().weight.clone()
    quantised(module, "m", "int8")
    assert type(module.get_output_embeddings()) is QuantisedLinear and torch.equal(module.get_input_embeddings().weight, table)


def test_rows_that_torch_would_read_past_stay_whole() -> None:
    module = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 32), nn.Linear(32, 50), nn.Linear(50, 3))
    assert layers(quantised(module, "m", "int8"), nn.Linear) == ["0", "3"]


def test_that_most_of_a_model_stays_whole_is_said(caplog) -> None:
    with caplog.at_level(logging.WARNING, "outrider"):
        quantised(zoo.module("gpt2"), "mine", "int8")
    assert "of the weights of mine" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "outrider"):
        quantised(nn.Sequential(nn.Linear(64, 64)), "mine", "int8")
    assert not caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantised_model_keeps_the_contract(folder, dtype: str) -> None:
    model = wrap(load_module(folder, dtype, "int8"), "target", "tiny", rows=4, context=100, chunk=32)
    check_scores(model, recompute(model), np.random.default_rng(3), 300, 0.02 if dtype == "float32" else 0.25)


def test_a_target_in_8_bits_holds_less_and_writes_nearly_the_same(folder) -> None:
    whole, less = [outrider.load(folder, [], compile="off", profile="off", rows=1, quantise=q) for q in (None, "int8")]
    assert less.engine.target.held_bytes() < 0.8 * whole.engine.target.held_bytes()
    text = whole.tokenizer.encode("the quick brown fox")
    a, b = [rt.engine.target.module(torch.tensor([text])).logits.detach().double() for rt in (whole, less)]
    assert 0 < float((a - b).std()) < 0.05 * float(a.std())
    assert less.generate("the quick", max_tokens=12, ignore_eos=True).tokens


def test_its_own_copy_in_8_bits_drafts_and_leaves_the_text_alone(folder) -> None:
    """A drafter that needs no other model: nearly all that it guesses is right."""
    plain = outrider.load(folder, [], compile="off", profile="off", rows=1)
    rt = outrider.load(folder, ["quantised:int8"], depth=4, compile="off", profile="off", rows=1)
    drafter = rt.engine.drafters["quantised"]
    assert layers(drafter.model.module, QuantisedLinear) and layers(rt.engine.target.module, nn.Linear)
    for prompt in ("the quick brown fox", "def add(first, second)"):
        for temperature in (0.0, 1.0):
            how = {"max_tokens": 40, "temperature": temperature, "seed": 5, "ignore_eos": True}
            found = rt.generate(prompt, **how)
            assert found.tokens == plain.generate(prompt, **how).tokens
            assert found.stats["accepted"] > 0.8 * found.stats["drafted"] > 0


def test_a_copy_that_is_the_target_itself_is_refused(folder) -> None:
    with pytest.raises(OutriderError, match="is the target itself"):
        outrider.load(folder, ["quantised:int8"], quantise="int8", compile="off", profile="off")


def test_packages_of_whole_weights_and_of_quantised_ones_do_not_meet(folder, cache) -> None:
    """Either would pass for the other: they differ by less than two ways to compute one may."""
    recipe = recipe_of(folder)
    assert recipe.place() != dataclasses.replace(recipe, quantise="int8").place()
    rt = outrider.load(folder, ["quantised:int8"], profile="off", rows=1)
    asked = [model.compiled.recipe.quantise for model in (rt.engine.target, rt.engine.drafters["quantised"].model)]
    assert asked == [None, "int8"]
    assert outrider.load(folder, [], profile="off", rows=1, quantise="int8").engine.target.compiled.recipe.quantise == "int8"


def test_the_builder_quantises_what_the_recipe_says(folder, monkeypatch, tmp_path) -> None:
    asked = []
    monkeypatch.setattr(builder, "build", lambda step, *rest: asked.append(layers(step.module, QuantisedLinear)))
    monkeypatch.setattr(builder, "step_back", lambda: None)
    for quantise in (None, "int8"):
        builder.main(json.dumps(dataclasses.asdict(recipe_of(folder, quantise=quantise))), str(tmp_path))
    assert len(asked) == 2 * len(SHAPES) and not any(asked[: len(SHAPES)]) and all(asked[len(SHAPES) :])


@pytest.mark.skipif(not packages.OWN, reason="the house has no kernels for this CPU")
def test_with_tiles_nobody_says_that_columns_in_8_bits_are_independent(tmp_path, monkeypatch) -> None:
    """Inductor's kernel for them serves there, of which that was never seen."""
    model, asked = packages.model_of(tiny_folder(tmp_path / "m", rows=packages.VOCAB + 20, head=64, hidden=64, layers=1), quantise="int8"), []
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", lambda *_, inductor_configs, **__: asked.append(inductor_configs))
    monkeypatch.setattr(builder, "complete", lambda file: True)
    for tiles in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda tiles=tiles: tiles)
        with pytest.raises(FileNotFoundError):  # nothing was written
            builder.build(model.step, "any", True, tmp_path / "any.pt2")
    assert [how["aot_inductor.metadata"] for how in asked] == [{}, INDEPENDENT]


def test_where_inductor_names_weights_otherwise_packages_are_built_as_ever(monkeypatch) -> None:
    from torch._inductor.graph import GraphLowering

    with builder._named():
        assert GraphLowering.allocate_non_dup_const_name.__name__ == "<lambda>"
    usual = GraphLowering.allocate_non_dup_const_name
    assert usual.__name__ == "allocate_non_dup_const_name", "and it is put back"
    monkeypatch.delattr(GraphLowering, "allocate_non_dup_const_name")
    with builder._named():
        assert not hasattr(GraphLowering, "allocate_non_dup_const_name")


def test_inductor_s_templates_are_parsed_once_while_a_step_is_built(monkeypatch) -> None:
    from torch._inductor.codegen import common
    from torch._inductor.codegen import cpp_template_kernel as kernel

    def parsed(source: str = "{{x}} + 1"):
        return common.KernelTemplate._template_from_string(source)

    with builder._parsed():
        assert parsed() is parsed() and parsed().render(x=2) == "2 + 1" and parsed("{{x}}").render(x=2) == "2"
        assert kernel.parse_expr.cache_info().currsize == 0 and str(kernel.parse_expr("k + 32")) == "k + 32"
    assert parsed() is not parsed() and not hasattr(kernel.parse_expr, "cache_info"), "and as ever afterwards"
    monkeypatch.delattr(common.KernelTemplate, "_template_from_string")
    monkeypatch.delattr(kernel, "parse_expr")
    with builder._parsed():
        assert not hasattr(kernel, "parse_expr"), "where Inductor has them otherwise, nothing is done"
