"""Compiled steps that need builds of their own: without weights, of other classes, in float32, in fresh and killed processes."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import packages
import pytest
import torch
import zoo
from contracts import check_scores, recompute, request, run
from packages import DTYPE, VOCAB, model_of, recipe_of
from torch._inductor import cpu_vec_isa
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.control.fixed import fixed
from outrider.core.types import MAX_NODES, Plan
from outrider.drafters.lookup import Lookup
from outrider.models import attention, builder, compiled, microkernel
from outrider.models.compiled import PREFILL, SHAPES, Compiled, Recipe, example, start_builder
from outrider.models.four_bits import four_bits
from outrider.models.quantised import FourBits, QuantisedLinear, _of_blocks
from outrider.models.step import Step
from outrider.runtime.engine import Engine

even, folder, cache, started = packages.even, packages.folder, packages.cache, packages.started
WAYS = "pairs", "tiles", "widened", "float32"


@pytest.fixture(autouse=True)
def found_anew():
    """Inductor finds out once a process what there is to multiply with, which some of these tests change."""
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    yield
    cpu_vec_isa.valid_vec_isa_list.cache_clear()


def kernels_of(way: str, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """The dtype of a way to multiply, which is the one taken from now on: pairs as they are or widened, tiles, float32. Skips where the processor has none."""
    dtype = torch.float32 if way == "float32" else torch.bfloat16
    if (
        not microkernel.has_kernels(dtype)
        or (way == "pairs" and not microkernel.multiplies_pairs())
        or (way == "tiles" and not torch.cpu._is_amx_tile_supported())
    ):
        pytest.skip("this CPU has no such kernel")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: way == "tiles")
    for module in (microkernel, attention):
        monkeypatch.setattr(module, "multiplies_pairs", lambda: way in ("pairs", "tiles"))
    return dtype


def build_wide(recipe: Recipe, step: Step, *more: str) -> Compiled:
    """Its wide package, and more, built here."""
    place = recipe.place()
    place.mkdir(parents=True)
    for shape in ("any", *more):
        builder.build(step, shape, shape in recipe.frozen, place / f"{shape}.pt2")
    found = Compiled(recipe, step)
    found.look()
    assert set(found.packages) == {"any", *more}, found.reason
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_package_without_weights_borrows_the_model_s(folder, cache, started, dtype):
    recipe = recipe_of(folder, frozen=(), dtype=dtype)
    model = model_of(folder, dtype=dtype)
    model.compiled = build_wide(recipe, model.step)
    assert model.compiled.bytes == 0
    check_scores(model, recompute(model), np.random.default_rng(7), VOCAB, 0.02 if dtype == "float32" else 0.25)
    assert model.meter.tier == "compiled"
    with torch.no_grad():  # weights that change are seen: they were not copied
        model.module.model.layers[1].mlp.down_proj.weight.normal_(0, 0.4)
    check_scores(model, recompute(model), np.random.default_rng(8), VOCAB, 0.02 if dtype == "float32" else 0.25)


@pytest.mark.slow
@pytest.mark.skipif(microkernel.few_rows(torch.bfloat16) is None, reason="this CPU has no such kernel")
def test_threads_serve_a_whole_call_and_however_many_give_the_same_bits(folder, cache, started):
    """Where all kernels are ours (`crew`)."""
    model, recipe = model_of(folder), recipe_of(folder)
    found = build_wide(recipe, model.step, "one")
    for shape, columns in (("any", 8), ("one", 1)):
        with zipfile.ZipFile(recipe.place() / f"{shape}.pt2") as package:
            (calls,) = [name for name in package.namelist() if name.endswith(".wrapper.cpp")]
            assert b"Crew crew;" in package.read(calls)
        table, rows, given = example(1, columns, len(model.step.windows), after=20), [torch.randn_like(x) for x in model.step.store.rows(0, 1)], []
        for threads in (1, 2, 3):
            found.packages[shape].threads = threads
            with torch.inference_mode():
                given.append(found.packages[shape](table, torch.arange(128), rows)[0].clone())
        assert torch.equal(given[0], given[1]) and torch.equal(given[0], given[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gpt2", "float32"), ("gpt2", "bfloat16"), ("gemma2", "float32"), ("gemma2", "bfloat16"), ("gemma3", "float32")],
)
def test_other_classes_compile_and_agree(name, dtype, tmp_path, cache, started):
    """Windows of two kinds, learned positions, tied heads."""
    zoo.module(name).save_pretrained(tmp_path / name)
    model = model_of(tmp_path / name, dtype=dtype, tokens=zoo.VOCAB)
    model.compiled = build_wide(recipe_of(tmp_path / name, dtype=dtype, vocab=zoo.VOCAB), model.step, PREFILL)
    check_scores(model, recompute(model), np.random.default_rng(9), zoo.VOCAB, 0.02 if dtype == "float32" else 0.25)
    assert model.meter.tier == "compiled"


@pytest.mark.slow
def test_the_float32_package_agrees_closely(folder, cache, started):
    model = model_of(folder, dtype="float32")
    model.compiled = build_wide(recipe_of(folder, dtype="float32"), model.step)
    check_scores(model, recompute(model), np.random.default_rng(10), VOCAB, 1e-3, steps=30)
    package = model.compiled.packages["any"]
    assert package.independent == (microkernel.has_kernels(torch.float32) and not microkernel.multiplies_pairs())
    table, rows = example(1, 7, len(model.step.windows), after=20), [torch.randn_like(x) for x in model.step.store.rows(0, 1)]
    with torch.inference_mode():
        among = package(table, torch.arange(100), rows)[0]
        alone = [package(table[:, i : i + 1].contiguous(), torch.arange(100 - 10 * i), rows)[0][:, 0] for i in range(7)]
    assert not package.independent or all(torch.equal(x, among[:, i]) for i, x in enumerate(alone))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_matrix_that_is_no_weight_is_read_as_it_lies(way, tmp_path, monkeypatch):
    """Batched products, as of experts that were picked: nothing was packed."""
    dtype = kernels_of(way, monkeypatch)
    assert microkernel.few_rows(dtype) is not None
    torch.manual_seed(1)
    x, w = torch.randn(3, 5, 64).to(dtype), torch.randn(4, 64, 96).to(dtype)

    class Picked(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
            return torch.bmm(x, w[which])

    which = torch.tensor([2, 0, 3])
    with torch.no_grad():
        program = torch.export.export(Picked(), (x, w, which), strict=False)
        how = {"max_autotune": True, "max_autotune_gemm_backends": "CPP"}
        product = torch._inductor.aoti_load_package(
            torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "bmm.pt2"), inductor_configs=how)
        )
    want, got = x.double() @ w[which].double(), product(x, w, which).double()
    assert bool(((got - want).abs() <= 2.0**-7 * want.abs() + 2.0**-10).all())


@pytest.mark.slow
def test_the_text_at_8000_tokens_is_the_eager_one(tmp_path, cache, started):
    """Compiled steps, plain and drafting, read as far as eager ones do; no near-tie decides."""
    torch.manual_seed(3)
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    module = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2, max_position_embeddings=8400, bos_token_id=0, eos_token_id=1))
    for p in module.parameters():
        if p.ndim > 1:
            p.data.normal_(0, 0.25)
    module.save_pretrained(tmp_path / "long")
    pattern = np.random.default_rng(3).integers(2, VOCAB, 90).tolist()
    asked = [request((pattern * 91)[:8100], "long", max_tokens=48)]
    texts = {}
    for how in ("eager", "compiled"):
        model = model_of(tmp_path / "long", rows=1, context=8300, dtype="float32")
        if how == "compiled":
            model.compiled = build_wide(recipe_of(tmp_path / "long", dtype="float32"), model.step)
        for name, plan in (("plain", Plan()), ("drafting", Plan((("lookup", 6, 2),)))):
            seq = run(Engine(model, {"lookup": Lookup()}, fixed(plan), 1), asked)[0]
            texts[how, name] = seq.generated
            assert all(r.tiers["target"].startswith(how) for r in seq.records)
    assert len(set(map(tuple, texts.values()))) == 1
    with torch.inference_mode():
        logits = model.module(input_ids=torch.tensor([[*asked[0].prompt, *texts["eager", "plain"]]])).logits[0, -49:-1, :VOCAB]
    best = logits.topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 1e-4, "a near-tie: choose another seed"


START = """
import json, sys, outrider
rt = outrider.load(sys.argv[1], ["lookup"], dtype=sys.argv[2], threads=1, compile="wait")
out = rt.generate("the quick brown fox", max_tokens=24, ignore_eos=True)
print(json.dumps([out.tokens, out.stats["tiers"]]))
"""


@pytest.mark.slow
def test_the_second_start_is_served_from_disk(folder, tmp_path):
    def start() -> list:
        env = {**os.environ, "OUTRIDER_CACHE": str(tmp_path / "cache")}
        done = subprocess.run([sys.executable, "-c", START, str(folder), DTYPE], env=env, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    def files() -> dict[str, tuple[int, int]]:
        return {str(f): (f.stat().st_size, f.stat().st_mtime_ns) for f in (tmp_path / "cache" / "steps").rglob("*") if f.is_file()}

    first = start()
    there = files()
    notes = ["any.json", "one.json", "prefill.json"]  # renewed where threads are chosen again
    assert sorted(Path(f).name for f in there) == sorted([*notes, "any.pt2", "log", "one.pt2", "prefill.pt2"])
    assert set(first[1]["target"]) == {"compiled"}
    assert start() == first and files().keys() == there.keys()
    assert {f: at for f, at in files().items() if Path(f).name not in notes} == {f: at for f, at in there.items() if Path(f).name not in notes}


@pytest.mark.slow
def test_a_builder_that_is_killed_is_replaced_by_who_waits(folder, cache, monkeypatch):
    """Nothing half made is in place, the dead builder's lock does not count, and another one builds."""
    monkeypatch.setattr(compiled, "start_builder", start_builder)
    recipe, model = recipe_of(folder), model_of(folder)
    found = Compiled(recipe, model.step)
    found._start()  # as the first looks in vain do
    victim = int((found.folder / "lock").read_text())
    time.sleep(4)
    os.kill(victim, signal.SIGKILL)
    time.sleep(0.5)
    assert not any(found._file(shape).exists() for shape in SHAPES)
    found._start()
    assert int((found.folder / "lock").read_text()) != victim
    found.wait()
    assert set(found.packages) == set(SHAPES)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("k", "n"), [(2, 64), (30, 64), (172, 64), (64, 192), (384, 96), (336, 320), (4096, 128), (80, 4096)])
def test_products_of_few_rows_are_right_at_every_width(k, n, way, tmp_path, monkeypatch):
    """The kernel alone, as the builder asks for it, against float64: 1 to 40 rows, odd and even ones, and 500, of which a cache holds a part; sums in several blocks.
    And a row's result is the same bits whoever its neighbours are. With tiles, where the processor has them, Inductor's own."""
    dtype, tiles = kernels_of(way, monkeypatch), way == "tiles"
    kernel = microkernel.few_rows(dtype)
    from torch._inductor.codegen import cpp_micro_gemm

    if not tiles:
        monkeypatch.setitem(cpp_micro_gemm.micro_gemm_configs, cpp_micro_gemm.CppMicroGemmAMX, [])
    assert kernel is microkernel.few_rows(dtype)
    torch.manual_seed(k)
    linear = torch.nn.Linear(k, n, bias=False).to(dtype)
    x = torch.randn(500, k).to(dtype)
    how = {"freezing": True, "aot_inductor.package_constants_in_so": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP"}
    with torch.no_grad():
        program = torch.export.export(linear, (x[:9],), dynamic_shapes=({0: torch.export.Dim("w", min=1, max=len(x))},), strict=False)
        file = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "linear.pt2"), inductor_configs=how)
    with zipfile.ZipFile(file) as package:
        code = b"".join([package.read(name) for name in package.namelist() if name.endswith(".cpp")])
    most = b"_rows<12, accum>" if torch.backends.cpu.get_cpu_capability() == "AVX512" else b"_rows<6, accum>"
    assert (most in code, b"_tile_dpbf16ps" in code, b"_mm512_dpbf16_ps" in code) == (not tiles, tiles, way == "pairs"), "another kernel was chosen"
    product = torch._inductor.aoti_load_package(file)
    want = x.double() @ linear.weight.detach().double().T
    sums, rounded = (2.0**-16, 2.0**-8) if dtype == torch.bfloat16 else (2.0**-19, 0.0)
    error = (x.double().abs() @ linear.weight.detach().double().abs().T) * sums + want.abs() * rounded
    alone = [product(x[i : i + 1])[0] for i in range(len(x))]
    for rows in (*range(1, 41), len(x)):
        got = product(x[:rows])
        assert bool(((got.double() - want[:rows]).abs() <= error[:rows]).all()), f"{rows} rows"
        assert all(torch.equal(got[i], alone[i]) for i in range(rows)), f"{rows} rows"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "n", "dtype"), [(64, 192, torch.bfloat16), (352, 96, torch.bfloat16), (4096, 128, torch.bfloat16), (352, 192, torch.float32)]
)
def test_products_of_weights_in_8_bits_are_right_at_every_width(k, n, dtype, tmp_path, monkeypatch):
    """The same of a layer in 8 bits: 1 to 40 rows and 500 of them, with a bias, and a row's bits hang on no other."""
    if microkernel.few_rows(dtype, torch.int8) is None:
        pytest.skip("this CPU has no such kernel")
    from torch._inductor.codegen import cpp_micro_gemm

    monkeypatch.setitem(cpp_micro_gemm.micro_gemm_configs, cpp_micro_gemm.CppMicroGemmAMX, [])
    torch.manual_seed(k)
    layer, x, rows = QuantisedLinear(torch.nn.Linear(k, n).to(dtype)), torch.randn(500, k).to(dtype), torch.export.Dim("w", min=1, max=500)
    how = {"freezing": True, "aot_inductor.package_constants_in_so": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP"}
    with torch.no_grad():
        most = b"_rows<12, accum>" if torch.backends.cpu.get_cpu_capability() == "AVX512" else b"_rows<6, accum>"
        one, some = [torch.export.export(layer, (x[:m],), dynamic_shapes=how_many, strict=False) for m, how_many in ((1, None), (9, ({0: rows},)))]
        files = [
            torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / f"{i}.pt2"), inductor_configs=how)
            for i, program in enumerate((one, some))
        ]
    for file in files:
        with zipfile.ZipFile(file) as package:
            code = b"".join([package.read(name) for name in package.namelist() if name.endswith(".cpp")])
        assert most in code and b"convert_to_int32<int8_t>" in code, "another kernel was chosen"
    (single, product), weight = map(torch._inductor.aoti_load_package, files), layer.turned.t().double() * layer.scale.double()[:, None]
    want = x.double() @ weight.T + layer.bias.detach().double()
    sums, rounded = (2.0**-16, 2.0**-7) if dtype == torch.bfloat16 else (2.0**-19, 2.0**-22)
    error = (x.double().abs() @ weight.abs().T) * sums + (want.abs() + layer.bias.detach().double().abs()) * rounded
    alone = [product(x[i : i + 1])[0] for i in range(len(x))]
    assert all(torch.equal(single(x[i : i + 1])[0], alone[i]) for i in range(20))
    for count in (*range(1, 41), len(x)):
        got = product(x[:count])
        assert bool(((got.double() - want[:count]).abs() <= error[:count]).all()), f"{count} rows"
        assert all(torch.equal(got[i], alone[i]) for i in range(count)), f"{count} rows"


def rounded(x: torch.Tensor) -> torch.Tensor:
    """As the house's product of weights in 4 bits reads rows: 32 inputs at a time in 8 bits."""
    groups = x.float().unflatten(-1, (-1, 32))
    most = groups.abs().amax(-1, keepdim=True)
    return ((groups * (torch.full_like(most, 127) / most)).round().double() * (most.double() / 127)).flatten(-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "n", "dtype", "threads"),
    [
        (64, 192, torch.bfloat16, 2),
        (352, 96, torch.bfloat16, 2),
        (8192, 48, torch.bfloat16, 1),
        (352, 192, torch.float32, 2),
        (2048, 16, torch.float32, 2),
    ],
)
def test_products_of_weights_in_4_bits_are_right_at_every_width(k, n, dtype, threads, tmp_path, monkeypatch):
    """The same of a layer in 4 bits, whose rows are rounded, too; with inputs that a cache does not hold, and where two threads share an output's sum
    (its bits then hang on the rows beside it)."""
    if four_bits(dtype) is None:
        pytest.skip("this CPU has no such kernel")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(k)
    layer, x, rows = FourBits(torch.nn.Linear(k, n).to(dtype)), torch.randn(500, k).to(dtype), torch.export.Dim("w", min=1, max=500)
    layer.built, x[3], whole = True, x[3] * 1000, n >= 16 * threads
    how = {"freezing": True, "aot_inductor.package_constants_in_so": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP"}
    how |= {} if whole else {"cpp.gemm_max_k_slices": 0}  # as many as there are threads
    with torch.no_grad():
        one, some = [torch.export.export(layer, (x[:m],), dynamic_shapes=how_many, strict=False) for m, how_many in ((1, None), (9, ({0: rows},)))]
        single, product = [
            torch._inductor.aoti_load_package(
                torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / f"{i}.pt2"), inductor_configs=how)
            )
            for i, program in enumerate((one, some))
        ]
    weight, bias = exact(layer), layer.bias.detach().double()
    want = rounded(x) @ weight.T + bias
    sums, kept = (2.0**-16, 2.0**-7) if dtype == torch.bfloat16 else (2.0**-19, 2.0**-22)
    error = (x.double().abs() @ weight.abs().T) * sums + (want.abs() + bias.abs()) * kept
    alone = [product(x[i : i + 1])[0] for i in range(len(x))]
    ones = torch.cat([single(x[i : i + 1]) for i in range(20)])
    assert torch.equal(ones, torch.stack(alone[:20])) if whole else bool(((ones.double() - want[:20]).abs() <= error[:20]).all())
    for count in (*range(1, 41), len(x)):
        got = product(x[:count])
        assert bool(((got.double() - want[:count]).abs() <= error[:count]).all()), f"{count} rows"
        assert not whole or all(torch.equal(got[i], alone[i]) for i in range(count)), f"{count} rows"
    x[2, 5], x[4, 40] = torch.nan, torch.inf
    assert [bool(row.isfinite().all()) for row in product(x[:6])] == [True, True, False, True, False, True]


def exact(layer: FourBits) -> torch.Tensor:
    """Its weights, unrounded."""
    scale, zero = layer.packed_scales.transpose(0, 1).double().split(1, -1)
    return ((_of_blocks(layer.blocks).unflatten(1, (-1, 32)).double() - 8) * scale + zero).flatten(1)


@pytest.mark.slow
def test_a_package_of_weights_in_4_bits_agrees_and_shares_them(folder, cache, started):
    model, recipe = model_of(folder, quantise="int4"), recipe_of(folder, quantise="int4")
    model.compiled = build_wide(recipe, model.step, PREFILL)
    check_scores(model, recompute(model), np.random.default_rng(11), VOCAB, packages.CLOSE)
    assert model.meter.tier == "compiled"
    own = {name: weight for name, weight in model.step.named_parameters() if weight.dtype == torch.uint8}
    for package in model.compiled.packages.values():
        blocks = {name.removeprefix("step."): w for name, w in package.weights.items() if w.dtype == torch.uint8}
        assert len(blocks) == len(own) == 14 and all(w.data_ptr() == own[name].data_ptr() for name, w in blocks.items())
    assert model.compiled.packages["any"].independent == (packages.OWN and not torch.cpu._is_amx_tile_supported())


@pytest.mark.slow
def test_a_package_of_weights_in_8_bits_agrees_and_carries_them_so(folder, cache, started):
    model, recipe = model_of(folder, quantise="int8"), recipe_of(folder, quantise="int8")
    model.compiled = build_wide(recipe, model.step, PREFILL)
    check_scores(model, recompute(model), np.random.default_rng(11), VOCAB, packages.CLOSE)
    assert model.meter.tier == "compiled"
    for package in model.compiled.packages.values():
        packed = [w for w in package.weights.values() if w.ndim == 3]
        assert packed and all(w.dtype == torch.int8 for w in packed)
        assert not any(w.dtype == torch.int8 for w in package.weights.values() if w.ndim == 2), "and not as they were, too"
    assert model.compiled.packages["any"].independent == (packages.OWN and not torch.cpu._is_amx_tile_supported())


@pytest.mark.slow
@pytest.mark.parametrize(("dims", "rows", "heads", "share"), [(64, 1, 2, 3), (128, 3, 2, 1), (192, 2, 1, 5), (256, 1, 1, 2)])
@pytest.mark.parametrize("way", WAYS)
def test_attention_is_right_whatever_stands_beside(way, dims, rows, heads, share, tmp_path, monkeypatch):
    """The kernel alone, as the builder asks for it, against float64: 1 to 33 columns, slots that fill no tile, rows far apart in memory, scores that grow
    and fall. A column's result is the same bits alone, among others, and with more slots behind that it does not see; NaN stays NaN."""
    dtype = kernels_of(way, monkeypatch)
    own = attention.attention(dtype)
    # A score's products are 100 in all, which sums in float32 keep to 2^-19 of it: 2^-12 of a value, and what is told is rounded; weights are, too, where pairs are multiplied.
    exact, rounded = (2.0**-12, 2.0**-8 if way == "widened" else 0.0) if way in ("widened", "float32") else (0.04, 0.0)

    def given(width: int, slots: int, capacity: int = 320) -> tuple[torch.Tensor, ...]:
        random = torch.Generator().manual_seed(width * slots)
        query = 3 * torch.randn(rows, heads * share, width, dims, generator=random)
        key, value = (torch.randn(rows, heads, capacity, dims, generator=random) for _ in range(2))
        seen = torch.rand(rows, 1, width, slots, generator=random) < 0.8
        seen[..., 0] = True
        return query.to(dtype), key.to(dtype), value.to(dtype), torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)

    class Layer(torch.nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return own(self, query, key[:, :, : mask.shape[3]], value[:, :, : mask.shape[3]], mask, scaling=0.2)[0]

    w, c = torch.export.Dim("w", min=1, max=MAX_NODES), torch.export.Dim("c", min=1, max=300)
    with torch.no_grad():
        program = torch.export.export(
            Layer(), given(8, 128), dynamic_shapes=({2: w}, {}, {}, {2: w, 3: c}), strict=False, prefer_deferred_runtime_asserts_over_guards=True
        )
        run_it = torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2")))
    for width in (1, 2, 5, 9, 33):
        for slots in (1, 15, 64, 100, 257, 300):
            query, key, value, mask = given(width, slots)
            q, k, v = query.double(), key.double()[:, :, :slots].repeat_interleave(share, 1), value.double()[:, :, :slots].repeat_interleave(share, 1)
            want = ((q @ k.mT * 0.2 + mask.double()).softmax(-1) @ v).transpose(1, 2)
            got = run_it(query, key, value, mask)
            assert got.shape == want.shape and bool(((got.double() - want).abs() <= exact + rounded * want.abs()).all())
            for i in range(width):
                assert torch.equal(run_it(query[:, :, i : i + 1].contiguous(), key, value, mask[:, :, i : i + 1].contiguous())[:, 0], got[:, i])
            more = torch.full((rows, 1, width, 300 - slots), torch.finfo(dtype).min, dtype=dtype)
            assert torch.equal(run_it(query, key, value, torch.cat([mask, more], 3)), got)
    query, key, value, mask = given(3, 100)
    key[0, 0, 0] = float("nan")
    assert run_it(query, key, value, mask)[0, :, :share].isnan().all() and not run_it(query, key, value, mask)[:, :, share:].isnan().any()
