"""What only a CUDA device can show: the same contracts there, and noise that is the same on both devices."""

import numpy as np
import pytest
import torch
import zoo
from contracts import check_scores, plain, request, run

from outrider.control.fixed import fixed
from outrider.core.noise import address, gumbel
from outrider.core.types import Plan
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.models.load import wrap
from outrider.runtime.engine import Engine

pytestmark = pytest.mark.gpu


def on_gpu(name: str, label: str, noise: float = 0.0, dtype: torch.dtype = torch.float32):
    return wrap(zoo.module(name, dtype=dtype, noise=noise).cuda(), label, "zoo", context=200, chunk=4)


@pytest.mark.parametrize("name", zoo.CLASSES)
def test_contract_on_the_gpu(name):
    torch.backends.cuda.matmul.allow_tf32 = False
    model = on_gpu(name, "target")

    def recompute(tokens):
        with torch.inference_mode():
            return model.module(input_ids=torch.tensor([tokens]).cuda(), use_cache=False).logits[0, -1]

    check_scores(model, recompute, np.random.default_rng(1), zoo.VOCAB, 2e-3)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.9, "rule": "coupled"}], ids=["greedy", "coupled"])
def test_speculative_text_is_plain_text_on_the_gpu(sampling):
    target = on_gpu("llama", "target")
    drafters = {"lookup": Lookup(floor=0.0), "model": ModelDrafter(on_gpu("llama", "draft", noise=0.15), "model")}
    asked = [request([3, 1, 4, 1, 5][:n], f"g{n}", seed=n, max_tokens=24, **sampling) for n in (2, 5, 3)]
    plan = Plan((("lookup", 3, 1), ("model", 3, 2)))
    assert [s.generated for s in run(Engine(target, drafters, fixed(plan), 3), asked)] == plain(target, asked)


def test_noise_is_a_function_of_its_address_on_both_devices():
    key = address(np.arange(5), np.arange(5))
    here, there = (gumbel(key, 1000, torch.device(d), torch.float32) for d in ("cpu", "cuda"))
    torch.testing.assert_close(here, there.cpu(), rtol=1e-6, atol=1e-6)
