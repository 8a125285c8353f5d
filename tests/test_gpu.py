"""What only a CUDA device can show: the same contracts there, and noise that is the same on both devices."""

import functools
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import zoo
from contracts import check_scores, plain, request, run

import outrider
from outrider import reference
from outrider.bench import prompts
from outrider.control.fixed import fixed
from outrider.core.noise import address, gumbel
from outrider.core.types import Plan
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.measure.device import DeviceMeter, waits
from outrider.models import joined
from outrider.models.graphed import Graphs
from outrider.models.load import wrap
from outrider.runtime.engine import Engine

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def on_gpu(name: str, label: str, noise: float = 0.0, dtype: torch.dtype = torch.float32):
    return wrap(zoo.module(name, dtype=dtype, noise=noise, layers=4).cuda(), label, "zoo", context=200, chunk=4)


def recompute(model, tokens):
    with torch.inference_mode():
        return model.module(input_ids=torch.tensor([tokens]).cuda(), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("name", zoo.CLASSES)
def test_contract_on_the_gpu(name):
    torch.backends.cuda.matmul.allow_tf32 = False
    model = on_gpu(name, "target")

    check_scores(model, functools.partial(recompute, model), np.random.default_rng(1), zoo.VOCAB, 2e-3)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.9, "rule": "coupled"}], ids=["greedy", "coupled"])
def test_speculative_text_is_plain_text_on_the_gpu(sampling):
    target = on_gpu("llama", "target")
    drafters = {"lookup": Lookup(floor=0.0), "model": ModelDrafter(on_gpu("llama", "draft", noise=0.15), "model")}
    asked = [request([3, 1, 4, 1, 5][:n], f"g{n}", seed=n, max_tokens=24, **sampling) for n in (2, 5, 3)]
    plan = Plan((("lookup", 3, 1), ("model", 3, 2)))
    assert [s.generated for s in run(Engine(target, drafters, fixed(plan), 3), asked)] == plain(target, asked)


def test_attention_over_many_slots_is_two_products(monkeypatch):
    """Of the step's own kernels, without waiting for others; and texts are those of eager steps."""
    monkeypatch.setattr(joined, "LONG", 1)
    eager, model = (on_gpu("llama", "target") for _ in range(2))
    model.compiled = Graphs(model.step)
    asked = [request([3, 1, 4, 1, 5], "g", max_tokens=60)]
    engine = Engine(model, {"lookup": Lookup(floor=0.0)}, fixed(Plan((("lookup", 3, 1),))), 1)
    assert [s.generated for s in run(engine, asked)] == plain(eager, asked)
    assert list(model.compiled.better) == ["attention as two products"] and model.compiled.graphs


def test_noise_is_a_function_of_its_address_on_both_devices():
    key = address(np.arange(5), np.arange(5))
    here, there = (gumbel(key, 1000, torch.device(d), torch.float32) for d in ("cpu", "cuda"))
    torch.testing.assert_close(here, there.cpu(), rtol=1e-6, atol=1e-6)


# --- the reference pair by CUDA graphs


@functools.cache  # joining kernels takes a minute
def served(**settings):
    drafters = ["lookup", f"model:{reference.draft()}"]
    return outrider.load(reference.target(), drafters=drafters, device=DEVICE, compile="wait", rows=1, context=1024, **settings)


@contextmanager
def planned(rt, *plan):
    """The same plan at every step, as long as this lasts."""
    before, rt.engine.controller = rt.engine.controller, fixed(Plan(plan))
    try:
        yield
    finally:
        rt.engine.controller = before


def write(rt, prompt: prompts.Prompt, **asked):
    """The sequence of one text, and how many steps it took."""
    seq = rt.engine.submit(rt.request(prompt.encode(rt.tokenizer), **{"max_tokens": 48, **asked}))
    steps = 0
    while seq.finish_reason is None:
        rt.engine.step()
        steps += 1
    return seq, steps


def texts(rt, **asked) -> list[list[int]]:
    return [write(rt, prompts.load(category)[0], **asked)[0].generated for category in prompts.CATEGORIES]


def test_graphs_write_what_eager_steps_write():
    """Float32: near-ties are too rare to show in these texts."""
    eager = outrider.load(reference.target(), drafters=[], device=DEVICE, dtype="float32", compile="off", rows=1, context=1024)
    want = texts(eager)
    rt = served(dtype="float32")
    with planned(rt, ("lookup", 4, 1), ("model", 4, 1)):
        assert texts(rt, speculation="off") == want and texts(rt) == want
    target = rt.engine.target
    assert target.compiled.graphs and target.compiled.reason == "eager:first-use", target.compiled.reason
    assert "joined kernels" in target.compiled.better, "its kernels stand apart"
    assert target.meter.tier == "compiled"


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "coupled"])
def test_strict_text_is_the_same_with_and_without_drafts(sampling):
    rt = served(dtype="bfloat16", strict=True, depth=4)
    assert texts(rt, **sampling) == texts(rt, speculation="off", **sampling)
    assert any(sum(r.drafted) for r in write(rt, prompts.load("code_edit")[0], **sampling)[0].records)
    assert rt.engine.target.compiled.graphs


@pytest.mark.parametrize(
    "plan, most",
    [((), 1), ((("lookup", 4, 1),), 1), ((("model", 4, 1),), 1), ((("lookup", 4, 1), ("model", 8, 1)), 1)],
    ids=["plain", "lookup", "model", "union"],
)
def test_a_step_waits_for_the_device_seldom(plan, most):
    rt, prompt = served(dtype="float32"), prompts.load("summarise_copy")[0]
    with planned(rt, *plan):
        write(rt, prompt)
        with waits(torch.device(DEVICE)) as found:
            _, steps = write(rt, prompt)
    assert 0 < len(found) <= most * steps + 2, Counter(found)


def test_the_drivers_counter_is_read():
    torch.ones(8, device=DEVICE)
    with DeviceMeter(torch.device(DEVICE, 0)).window() as read:
        x = torch.randn(4096, 4096, device=DEVICE)
        for _ in range(400):
            x = (x @ x).clamp(-1, 1)
    if read[0].joules is None:
        pytest.skip(read[0].source)
    assert read[0].source == "NVML" and 5 * read[0].seconds < read[0].joules < 3000 * read[0].seconds


def test_the_scheduler_writes_the_plain_text():
    """Adaptive, on its own profile of this device."""
    rt = served(dtype="float32")
    assert texts(rt) == texts(rt, speculation="off")
