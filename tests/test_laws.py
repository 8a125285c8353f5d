"""Laws 1 and 2: no Plan changes the text, and no neighbour does. On toy models and on every real class."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import zoo
from contracts import always, plain, request, run
from transformers import DynamicCache

from outrider.control.fixed import Told, fixed
from outrider.core.errors import OutriderError
from outrider.core.types import Plan
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.models.toy import ToyModel
from outrider.runtime.engine import Engine

VOCAB = 6
SETTINGS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 4, "repetition_penalty": 1.3},
    {"temperature": 1.3, "top_p": 0.8, "presence_penalty": 0.5, "min_tokens": 6},
    {"temperature": 1.0, "min_p": 0.1, "frequency_penalty": 0.4, "logit_bias": ((2, 1.5), (3, -4.0))},
]


def toy_engine(rows: int = 4) -> Engine:
    target = ToyModel(VOCAB, 5, rows=rows, scale=1.5)
    drafters = {
        "model": ModelDrafter(ToyModel(VOCAB, 5, rows=rows, scale=1.5, blend=(8, 0.4), name="draft"), "model"),
        "lookup": Lookup(floor=0.2),
        "weak": ModelDrafter(ToyModel(VOCAB, 77, rows=rows, name="weak draft"), "weak"),
    }
    return Engine(target, drafters, fixed(Plan()), rows)


def random_plan(rng: np.random.Generator) -> Plan:
    names = [n for n in ("lookup", "model", "weak") if rng.random() < 0.5]
    return Plan(tuple((n, int(rng.integers(1, 6)), int(rng.integers(1, 4))) for n in names), int(rng.choice([0, 0, 3, 8])))


def requests(ends: frozenset[int] = frozenset({0})) -> list:
    return [request([1 + i, 2, 3, 1, 2], f"q{i}", seed=40 + i, rule="coupled", ends=ends, max_tokens=24, **s) for i, s in enumerate(SETTINGS)]


@pytest.mark.parametrize("runs", always(1, [100, 200, 1000]))
def test_coupled_text_is_the_same_for_random_plan_sequences(runs):
    """Law 1 for sampled text (D4, D6): plans change at every step, rows share steps or wait for a place."""
    want = plain(ToyModel(VOCAB, 5, scale=1.5), requests())
    rng = np.random.default_rng(runs)
    for _ in range(runs):
        engine = toy_engine(rows=int(rng.integers(1, 5)))
        engine.controller = Told(lambda seqs: (random_plan(rng), "random"))
        assert [s.generated for s in run(engine, requests())] == want


@pytest.mark.parametrize("seed", range(20))
def test_greedy_text_is_the_same_for_random_plans_and_arrivals(seed):
    rng = np.random.default_rng(seed)
    asked = [request(rng.integers(0, VOCAB, n).tolist(), f"g{n}", max_tokens=int(rng.integers(1, 40)), ends=frozenset({4})) for n in (1, 2, 7, 4, 3)]
    want = plain(ToyModel(VOCAB, 5, scale=1.5), asked)
    engine, seqs = toy_engine(rows=3), []
    engine.controller = Told(lambda seqs: (random_plan(rng), "random"))
    while len(seqs) < len(asked) or any(s.finish_reason is None for s in seqs):
        if len(seqs) < len(asked) and rng.random() < 0.4:
            seqs.append(engine.submit(asked[len(seqs)]))
        engine.step()
    assert [s.generated for s in seqs] == want


def test_exact_and_coupled_and_greedy_rows_share_an_engine():
    """Rows of different rules step in groups; seeded and greedy ones keep their text, whoever is beside them."""
    fixed_rows = requests()[:3]
    want = plain(ToyModel(VOCAB, 5, scale=1.5), fixed_rows)
    engine = toy_engine(rows=4)
    engine.controller = fixed(Plan((("lookup", 3, 1), ("model", 3, 2))))
    free = [request([3, 3, 1], f"free{i}", seed=1000 + i, rule="exact", temperature=1.0) for i in range(3)]
    seqs = run(engine, [fixed_rows[0], free[0], fixed_rows[1], free[1], fixed_rows[2], free[2]])
    assert [seqs[i].generated for i in (0, 2, 4)] == want


@pytest.mark.parametrize("rule", ["exact", "coupled"])
def test_a_neighbour_never_changes_the_text(rule):
    """Law 2, under a fixed plan: alone or in a ragged batch, the same tokens (also under `exact`)."""
    asked = [request([1 + i] * (2 * i + 1), f"n{i}", seed=9 + i, rule=rule, **SETTINGS[i]) for i in range(4)]
    plan = fixed(Plan((("lookup", 2, 1), ("model", 3, 2))))
    alone = []
    for r in asked:
        engine = toy_engine(rows=1)
        engine.controller = plan
        alone += run(engine, [r])
    engine = toy_engine(rows=4)
    engine.controller = plan
    assert [s.generated for s in run(engine, asked)] == [s.generated for s in alone]


@pytest.mark.parametrize("name", zoo.CLASSES)
@pytest.mark.parametrize("depths", always(1, [[1, 8], [2, 4]]), ids=str)
def test_greedy_equals_plain_for_every_class(name, depths):
    """Every class, both drafters and their union, depth 1, 2, 4, 8, chain and tree, alone and in a ragged batch of 4.

    The twin is perturbed so that some drafts are rejected. Seeds are free of near-ties (checked on the plain run).
    """
    target = zoo.model(name, label="target", chunk=8)
    drafters = {"lookup": Lookup(floor=0.0), "model": ModelDrafter(zoo.model(name, label="draft", noise=0.15, chunk=8), "model")}
    asked = [request([3, 1, 4, 1, 5, 9, 2, 6][:n] * 2, f"z{n}", max_tokens=20) for n in (2, 8, 5, 3)]
    want = plain(target, asked)
    for r, text in zip(asked, want, strict=True):
        with torch.inference_mode():
            logits = target.module(input_ids=torch.tensor([[*r.prompt, *text]]), use_cache=False).logits[0, len(r.prompt) - 1 : -1]
        best = logits.topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > 1e-4, "a near-tie: choose another seed"
    accepted = drafted = 0
    for depth in depths:
        for plan in ((("model", depth, 1),), (("lookup", depth, 1),), (("lookup", depth, 1), ("model", min(depth, 3), 2))):
            batch = run(Engine(target, drafters, fixed(Plan(plan)), 4), asked)
            assert [s.generated for s in batch] == want, f"{plan} in a batch"
            lone = run(Engine(target, drafters, fixed(Plan(plan)), 1), asked[:1])
            assert lone[0].generated == want[0], f"{plan} alone"
            records = {id(r): r for s in batch for r in s.records}.values()
            accepted, drafted = accepted + sum(sum(r.accepted) for r in records), drafted + sum(sum(r.drafted) for r in records)
    assert 0 < accepted < drafted, "a test of rejections needs some, and of acceptance too"


def cache_error(model: zoo.HFModel, seq) -> float:
    """Largest difference between a row's cached keys and values and those of a fresh forward over the same tokens."""
    row = model.rows.of(seq)
    if not row.cached:
        return 0.0
    fresh = DynamicCache()
    with torch.inference_mode():
        model.module(input_ids=torch.tensor([row.text]), past_key_values=fresh, use_cache=True)
    pairs = [(ours.keys, theirs.keys) for ours, theirs in zip(model.store.layers, fresh.layers, strict=True)]
    pairs += [(ours.values, theirs.values) for ours, theirs in zip(model.store.layers, fresh.layers, strict=True)]
    return max(float((a[row.index, :, : row.cached] - b[0]).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "mixtral"])
def test_every_cache_equals_a_recomputed_one_after_every_step(name):
    """Law 8 (B1, B5, B6, B7): target and draft, random plans, pauses, rows that come and go."""
    rng = np.random.default_rng(2)
    target, twin = zoo.model(name, label="target"), zoo.model(name, label="draft", noise=0.15)
    engine = Engine(target, {"lookup": Lookup(floor=0.0), "model": ModelDrafter(twin, "model")}, fixed(Plan()), 3)
    seqs = [engine.submit(request(rng.integers(0, zoo.VOCAB, n).tolist(), f"c{n}", max_tokens=16 + n)) for n in (3, 6, 2, 5)]
    compared = 0
    while any(s.finish_reason is None for s in seqs):
        names = [n for n in ("lookup", "model") if rng.random() < 0.6]
        plan = Plan(tuple((n, int(rng.integers(1, 5)), int(rng.integers(1, 3))) for n in names), int(rng.choice([0, 5])))
        engine.controller = fixed(plan)
        for seq in engine.step():
            if seq.slots:
                compared += 1
                assert target.rows.of(seq).text == seq.tokens[:-1]
                assert twin.rows.of(seq).text == seq.tokens[: twin.rows.of(seq).cached]
                assert cache_error(target, seq) < 1e-3 and cache_error(twin, seq) < 1e-3
    assert compared > 30


def test_a_plan_names_a_drafter_once():
    with pytest.raises(OutriderError, match="names a drafter twice"):
        Plan((("model", 1, 1), ("lookup", 2, 1), ("model", 1, 1)))


@pytest.mark.parametrize("seed", range(2))
def test_who_wants_no_drafters_may_come_and_go_beside_who_does(seed: int) -> None:
    """Drafters hear nothing of batches that want none of them: every text is still the one that plain decoding writes alone."""
    rng, drafters = random.Random(seed), {"lookup": Lookup(floor=0.0), "model": ModelDrafter(zoo.model("llama", label="draft", noise=0.15), "model")}
    mixed = Engine(zoo.model("llama", label="target"), drafters, fixed(Plan((("lookup", 2, 1), ("model", 3, 1)))), 3)
    alone, wishes = Engine(zoo.model("llama", label="target"), {}, fixed(Plan()), 1), [None, *map(frozenset, ([], ["lookup"], ["model"]))]
    asked = [
        replace(request([1, 2, 3 + i], f"r{i}", max_tokens=rng.randrange(3, 25), temperature=rng.choice([0.0, 1.0]), seed=i), rule="coupled")
        for i in range(10)
    ]
    waiting, written = list(asked), []
    while waiting or any(s.finish_reason is None for s in written):
        if waiting and rng.random() < 0.4:
            written.append(mixed.submit(replace(waiting.pop(0), drafters=rng.choice(wishes))))
        mixed.step()
    assert [s.generated for s in written] == [run(alone, [r])[0].generated for r in asked]
