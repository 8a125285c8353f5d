"""Linear layers in 4-bit integers: the rounding, both layouts, the product, the model and the drafter made of them."""

import logging

import numpy as np
import packages
import pytest
import torch
import torch.nn.functional as F
import zoo
from contracts import check_scores, recompute
from packages import layers
from tiny import tiny_folder
from torch import nn

import outrider
from outrider.core.errors import OutriderError
from outrider.models import attention, builder, load
from outrider.models.four_bits import BLOCK, GROUP, MARK, four_bits
from outrider.models.load import load_module, wrap
from outrider.models.package import INDEPENDENT
from outrider.models.quantised import FourBits, QuantisedLinear, _by_output, _in_blocks, _of_blocks, quantised

cache = packages.cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("four") / "target", jitter=0.02, hidden=64, head=32, rows=320)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_is_off_by_half_a_unit_of_its_group_at_most(dtype: torch.dtype) -> None:
    """But for what a scale and a zero are rounded themselves; and by less in the mean than where scales are of the largest and the least alone."""
    torch.manual_seed(1)
    linear = nn.Linear(256, 304, bias=False).to(dtype)
    with torch.no_grad():
        linear.weight.normal_()
        linear.weight *= torch.logspace(-3, 2, 304)[:, None].to(dtype)
        linear.weight[7], linear.weight[8], linear.weight[9] = 0, 3, linear.weight[9] + 20
    layer = FourBits(linear)
    assert layer.weight.dtype == dtype and layer.scales.shape == (8, 304, 2)
    numbers, groups = _of_blocks(layer.blocks).unflatten(1, (-1, GROUP)).double(), linear.weight.detach().double().unflatten(1, (-1, GROUP))
    scale, zero = layer.packed_scales.transpose(0, 1).double().split(1, -1)
    off = ((numbers - 8) * scale + zero - groups).abs()
    assert bool((off[7:9] == 0).all()), "equal weights are kept"
    inside = (numbers > 0) & (numbers < 15)
    assert bool((off <= scale.abs() * 0.5001)[inside].all()) and float(inside.double().mean()) > 0.8
    simple = (groups.amax(-1) - groups.amin(-1)) / 15
    assert float((off.square().mean(-1).sqrt() / simple)[20:].mean()) < 0.264, "0.279 without a fit, 0.266 with one, 0.261 with two"
    assert torch.allclose(layer.weight.double(), ((numbers - 8) * scale + zero).flatten(1), rtol=2.0**-8, atol=2.0**-14)


@pytest.mark.parametrize("symmetric", [True, False])
def test_what_a_file_in_4_bits_rounded_is_found_again(symmetric: bool) -> None:
    """Groups of 32 with a scale (as Q4_0 has them), or with a scale and a least (as Q4_K): but for the bits of bfloat16's scales."""
    torch.manual_seed(4)
    groups = torch.randn(64, 8, 32)
    most, low, high = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)), groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale, zero = (most / -8, 0 * low) if symmetric else ((high - low) / 15, low + (high - low) * (8 / 15))
    stored = ((groups - zero) / scale).round().clamp(-8, 7) * scale + zero
    linear = nn.Linear(256, 64, bias=False)
    with torch.no_grad():
        linear.weight.copy_(stored.flatten(1))
    off = (FourBits(linear).weight - linear.weight).detach().norm() / linear.weight.detach().norm()
    assert float(off) < 2.0**-8, "a new rounding would be off by 0.05"


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (48, 64), (512, 352)])
def test_numbers_are_found_again_in_their_blocks(outputs: int, inputs: int) -> None:
    torch.manual_seed(2)
    numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    blocks = _in_blocks(numbers)
    assert blocks.shape == (outputs, inputs // 2) and torch.equal(_of_blocks(blocks), numbers)
    first = blocks.flatten()[: BLOCK * GROUP // 2].view(
        GROUP // 4, BLOCK // 2, 4
    )  # as the kernel reads: by four inputs, eight outputs and the eight behind
    for quad, output, at in ((0, 0, 0), (3, 5, 2), (7, 7, 3)):
        byte = int(first[quad, output, at])
        assert (byte & 15, byte >> 4) == (int(numbers[output, 4 * quad + at]), int(numbers[output + 8, 4 * quad + at]))


def test_scales_lie_as_their_blocks_are_read() -> None:
    """Those of sixteen outputs one group after the other, scale and zero by turns; both ways hold the same."""
    torch.manual_seed(6)
    layer = FourBits(nn.Linear(96, 64, bias=False))
    by_group = layer.packed_scales
    assert layer.scales.shape == by_group.shape == (3, 64, 2) and layer.scales.is_contiguous()
    lines = layer.scales.detach().view(4, 3, BLOCK, 2)
    for block, group, output in ((0, 0, 0), (1, 2, 5), (3, 1, 15)):
        assert torch.equal(lines[block, group, output], by_group[group, BLOCK * block + output])
    assert torch.equal(_by_output(layer.scales.detach()), by_group.transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 5, 64), (0, 64)])
def test_the_product_is_that_of_the_rounded_weights(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    linear = nn.Linear(64, 48).to(dtype)
    layer, x = FourBits(linear), torch.randn(shape).to(dtype)
    got, want = layer(x), F.linear(x.double(), layer.weight.double(), linear.bias.detach().double())
    assert got.dtype == dtype and got.shape == (*shape[:-1], 48) and torch.allclose(got.double(), want, atol=0.02)


def test_what_torch_multiplies_never_passes_for_blocks() -> None:
    """Both are bytes of one shape."""
    layer = FourBits(nn.Linear(64, 32))
    layer.built = True
    with pytest.raises(RuntimeError):
        layer(torch.randn(1, 64))
    assert MARK not in (32, 64, 128, 256), "group sizes that torch knows"


def test_all_linear_layers_are_in_4_bits_but_the_head_and_what_makes_no_blocks(folder) -> None:
    module = load_module(folder, "float32")
    linear, table = layers(module, nn.Linear), module.get_input_embeddings().weight.clone()
    quantised(module, "m", "int4")
    assert layers(module, FourBits) == [name for name in linear if name != "lm_head"] and layers(module, QuantisedLinear) == ["lm_head"]
    assert torch.equal(module.get_input_embeddings().weight, table)
    odd = quantised(nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 48), nn.Linear(64, 24), nn.Linear(50, 3)), "m", "int4")
    assert [type(part) for part in odd] == [nn.Linear, FourBits, QuantisedLinear, nn.Linear]


def test_that_most_of_a_model_stays_whole_is_said(caplog) -> None:
    with caplog.at_level(logging.WARNING, "outrider"):
        quantised(zoo.module("gpt2"), "mine", "int4")
    assert "of the weights of mine" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_in_4_bits_keeps_the_contract(folder, dtype: str) -> None:
    model = wrap(load_module(folder, dtype, "int4"), "target", "tiny", rows=4, context=100, chunk=32)
    check_scores(model, recompute(model), np.random.default_rng(3), 300, 0.25)


def test_the_reference_target_passes_in_float32() -> None:
    """Its inputs are rounded there, too: what is off by a little may be off by a unit then."""
    assert outrider.load(None, [], quantise="int4", dtype="float32", compile="off", profile="off", rows=1).engine.target.spec.dtype == "float32"


def test_a_target_in_4_bits_writes_nearly_the_same(folder) -> None:
    whole, less = [outrider.load(folder, [], compile="off", profile="off", rows=1, quantise=q) for q in (None, "int4")]
    text = whole.tokenizer.encode("the quick brown fox")
    a, b = [rt.engine.target.module(torch.tensor([text])).logits.detach().double() for rt in (whole, less)]
    assert 0 < float((a - b).std()) < 0.25 * float(a.std())
    assert less.generate("the quick", max_tokens=12, ignore_eos=True).tokens


def test_its_own_copy_in_4_bits_drafts_and_leaves_the_text_alone(folder) -> None:
    plain = outrider.load(folder, [], compile="off", profile="off", rows=1)
    rt = outrider.load(folder, ["quantised:int4"], depth=4, compile="off", profile="off", rows=1)
    assert layers(rt.engine.drafters["quantised"].model.module, FourBits) and layers(rt.engine.target.module, nn.Linear)
    accepted = drafted = 0
    for temperature in (0.0, 1.0):
        how = {"max_tokens": 80, "temperature": temperature, "seed": 5, "ignore_eos": True}
        found = rt.generate("the quick brown fox", **how)
        assert found.tokens == plain.generate("the quick brown fox", **how).tokens
        accepted, drafted = accepted + found.stats["accepted"], drafted + found.stats["drafted"]
    assert accepted > 0.3 * drafted > 0, "where a guess by lot were right once in 300 times"


def test_a_copy_in_4_bits_drafts_for_a_target_in_8(folder) -> None:
    rt = outrider.load(folder, ["quantised:int4"], quantise="int8", depth=2, compile="off", profile="off", rows=1)
    assert layers(rt.engine.target.module, QuantisedLinear) and layers(rt.engine.drafters["quantised"].model.module, FourBits)
    with pytest.raises(OutriderError, match="is the target itself"):
        outrider.load(folder, ["quantised:int4"], quantise="int4", compile="off", profile="off")


def test_no_gpu_is_asked_for_4_bits(folder, monkeypatch) -> None:
    monkeypatch.setattr(load, "pick_device", lambda name: torch.device("cuda"))
    for asked in ({"drafters": [], "quantise": "int4"}, {"drafters": ["lookup", "quantised:int4"]}):
        with pytest.raises(OutriderError, match="on CPUs alone") as refused:
            outrider.load(folder, **asked, compile="off", profile="off")
        assert "int8" in str(refused.value)


def test_a_profile_of_a_copy_in_8_bits_is_none_of_one_in_4(folder, cache) -> None:
    """Both copies are of one folder, under one name."""
    marks = [outrider.load(folder, [f"quantised:{bits}"], compile="off", rows=1).keeper.mark for bits in ("int8", "int4", "int4")]
    assert marks[0] != marks[1] == marks[2]


@pytest.mark.skipif(not packages.OWN, reason="the house has no kernels for this CPU")
def test_only_the_house_s_product_is_given_blocks(tmp_path, monkeypatch) -> None:
    """Where its kernels are not asked, steps have torch's product. With tiles the head's columns are said to be nothing, which are of 8 bits."""
    model = packages.model_of(tiny_folder(tmp_path / "m", rows=packages.VOCAB + 20, head=64, hidden=64, layers=1), quantise="int4")
    asked: list[object] = []

    def compile_it(program, package_path, inductor_configs):
        products = [node.args for node in program.graph.nodes if "int4pack" in str(node.target)]
        assert len(products) == 7, "queries, keys, values, what goes back, and three"
        house = inductor_configs.get("max_autotune_gemm_backends") == "CPP"
        assert {args[2] for args in products} == {MARK if house else GROUP}
        assert not inductor_configs["cpp.enable_concat_linear"], "Inductor would join what it does not understand"
        assert not any(part.built for part in model.module.modules() if isinstance(part, FourBits)), "eager steps are torch's as ever"
        told = inductor_configs["aot_inductor.metadata"]
        asked.append(told if house else ("torch's", told.get("note", "")))
        if house and refused:
            raise RuntimeError("another Inductor")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_it)
    monkeypatch.setattr(builder, "complete", lambda file: True)
    monkeypatch.setattr(attention, "attention", lambda dtype, real=attention.attention: None if refused else real(dtype))
    for frozen, tiles, refused, want in (  # noqa: B007  (`refused` is asked for above)
        (True, False, False, [INDEPENDENT]), (True, True, False, [{}]), (False, False, False, [("torch's", "")]), (True, False, True, [{}, {}, ("torch's", "RuntimeError: another Inductor")]),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda tiles=tiles: tiles)
        asked.clear()
        with pytest.raises(FileNotFoundError):  # nothing was written
            builder.build(model.step, "any", frozen, tmp_path / "any.pt2")
        assert asked == want


@pytest.mark.skipif(not packages.OWN, reason="the house has no kernels for this CPU")
def test_inductor_takes_the_house_s_kernel_for_blocks_and_for_no_other(monkeypatch) -> None:
    from torch._inductor.codegen import cpp_micro_gemm as inductor
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    for dtype in (torch.bfloat16, torch.float32):
        kernel = four_bits(dtype)
        assert kernel is four_bits(dtype) and four_bits(torch.float16) is None

        def chosen(size: int, m: int = 4, n: int = 64, k: int = 64, dtype=dtype):
            kinds = {"input_dtype": dtype, "input2_dtype": torch.uint8, "output_dtype": torch.float, "compute_dtype": torch.float}
            made = inductor.create_micro_gemm("some", m, n, k, **kinds, num_threads=1, use_ref=False, q_group_size=size)
            return type(made)

        with V.set_graph_handler(GraphLowering(torch.fx.symbolic_trace(nn.Identity()))):
            assert chosen(MARK) is kernel and kernel not in (chosen(GROUP), chosen(MARK, n=24), chosen(MARK, k=48))
