"""Strict: with and without drafting, alone or among others, a text is computed by the same kernels at the same shapes, so its
logits are the same bits and its tokens the same tokens. Eager steps here; `test_compiled` has those of packages.

Random weights in bfloat16 tie or nearly tie at many places: bits that differ do not stay unseen.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import zoo
from contracts import always, random_draft, request
from programs import TREE
from tiny import tiny_folder, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import outrider
from outrider.control.fixed import Told, fixed
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.types import DISTINCT, Draft, Plan, Sequence
from outrider.models.hf import STRICT_WIDTH, HFModel
from outrider.models.kv import Block
from outrider.runtime.engine import Engine
from outrider.runtime.explain import Divergence, compare

PROMPTS = ["she sells sea shells on the sea shore and the shells she sells", "a", "def add(first, second): return first", "the fox", "b b b b b b"]
HOW = {"max_tokens": 16, "ignore_eos": True}
WAYS = [{}, {"temperature": 1.0, "seed": 7}, {"presence_penalty": 0.7, "temperature": 0.8, "top_k": 30, "seed": 3}]
PLANS = [
    *(Plan((("model", depth, 1),)) for depth in range(1, 9)),
    *(Plan((("lookup", depth, 1),)) for depth in (1, 3, 8)),
    Plan((("model", 3, 2),)),
    Plan((("lookup", 4, 2), ("model", 4, 2))),
    Plan((("lookup", 8, 1), ("model", 8, 1))),
    Plan((("model", 6, 1),), budget=3),
    Plan((("lookup", 5, 2), ("model", 3, 2)), budget=5),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("strict")
    return {"target": tiny_folder(root / "target"), "draft": tiny_folder(root / "draft", jitter=0.02)}


@pytest.fixture(scope="module", params=always(1, ["bfloat16", "float32"]))
def rt(request, folders) -> outrider.Runtime:
    """A strict runtime with both drafters; tests choose the plan."""
    made = outrider.load(folders["target"], ["lookup", f"model:{folders['draft']}"], strict=True, dtype=request.param, compile="off", rows=3)
    made.engine.drafters["lookup"].least = 1
    return made


@contextmanager
def recorded(model: HFModel) -> Iterator[dict[tuple[str, tuple[int, ...]], set[bytes]]]:
    """(request, text up to and with a place) -> the bits of all logits that the model computed for that place."""
    bits: dict[tuple[str, tuple[int, ...]], set[bytes]] = {}
    forward = model._forward

    def watched(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        logits, found = forward(block)
        for r, columns in enumerate(block.table):
            seq = model.rows.all[block.first + r].owner
            for c, (_, position, *_) in enumerate(columns):
                text = (*seq.tokens[: int(columns[0, 1])], *columns[: c + 1, 0].tolist())
                assert len(text) == position + 1, "strict steps score one chain"
                bits.setdefault((seq.request.id, text), set()).add(logits[r, c].view(torch.uint8).numpy().tobytes())
        return logits, found

    model._forward = watched
    try:
        yield bits
    finally:
        del model._forward


def of_text(bits: dict[tuple[str, tuple[int, ...]], set[bytes]], seq: Sequence) -> list[set[bytes]]:
    """The bits at each place that decided a token of the text."""
    start = len(seq.request.prompt)
    return [bits[seq.request.id, tuple(seq.tokens[: start + i])] for i in range(seq.produced)]


def requests(rt: outrider.Runtime, way: dict, prompts: list[str] = PROMPTS) -> list:
    return [request(rt.tokenizer(p)["input_ids"], f"s{i}", rule="coupled", **{"max_tokens": 24 - 3 * i, **way}) for i, p in enumerate(prompts)]


def run_with(
    rt: outrider.Runtime, plan: Plan | Callable, asked: list, arrivals: np.random.Generator | None = None
) -> tuple[list[Sequence], list[list[set[bytes]]]]:
    """The texts and their bits; requests come one after the other at random steps if `arrivals` is given."""
    rt.engine.controller = fixed(plan) if isinstance(plan, Plan) else Told(plan)
    seqs: list[Sequence] = [] if arrivals else [rt.engine.submit(r) for r in asked]
    with recorded(rt.engine.target) as bits:
        while len(seqs) < len(asked) or any(s.finish_reason is None for s in seqs):
            if arrivals and len(seqs) < len(asked) and arrivals.random() < 0.3:
                seqs.append(rt.engine.submit(asked[len(seqs)]))
            rt.engine.step()
    return seqs, [of_text(bits, s) for s in seqs]


def check(rt: outrider.Runtime, asked: list, plans: list[Plan], alone: list) -> tuple[int, int]:
    """(accepted, drafted) under each plan; `alone`: what plain decoding gave for each request by itself."""
    accepted = drafted = 0
    for plan in plans:
        seqs, bits = run_with(rt, plan, asked)
        for seq, got, ([lone], [want]) in zip(seqs, bits, alone, strict=True):
            assert seq.generated == lone.generated, f"{plan} {seq.request.id}"
            assert got == want and all(len(b) == 1 for b in got), f"{plan} {seq.request.id}"
            accepted += sum(r.accepted[0] for r in seq.records)
            drafted += sum(r.drafted[0] for r in seq.records)
            assert all(len(r.requests) == 1 for r in seq.records), "a strict step is of one request"
            assert all(r.drafted[0] <= (plan.budget or 8) for r in seq.records), "a chain within the budget"
    return accepted, drafted


def test_greedy_texts_and_bits_are_those_of_plain_decoding(rt):
    """Every drafter, depth 1 to 8, trees and budgets; three ragged requests at once, and each alone."""
    asked = requests(rt, {"max_tokens": 16}, PROMPTS[:3])
    accepted, drafted = check(rt, asked, PLANS, [run_with(rt, Plan(), [r]) for r in asked])
    assert 0 < accepted < drafted, "this is about drafts that are taken and drafts that are not"


@pytest.mark.parametrize(
    "text", [TREE, TREE.replace("  %kept = outrider.prune %draft budget ?\n", "").replace("%kept", "%draft")], ids=["pruned", "whole"]
)
def test_ones_own_program_verifies_one_path_too(folders, tmp_path, text):
    (file := tmp_path / "mine.mlir").write_text(text)
    how = {"strict": True, "dtype": "bfloat16", "compile": "off", "profile": "off", "program": file}
    rt = outrider.load(folders["target"], [f"model:{folders['draft']}"], **how)
    asked = requests(rt, {"max_tokens": 16}, PROMPTS[:2])
    _, drafted = check(rt, asked, [Plan((("model", 3, 2),)), Plan((("model", 4, 3),), budget=3)], [run_with(rt, Plan(), [r]) for r in asked])
    assert drafted and "@tree" in rt.program()["program"]


@pytest.mark.parametrize("way", WAYS[1:], ids=["sampled", "penalised"])
def test_sampled_texts_and_bits_are_those_of_plain_decoding(rt, way):
    asked = requests(rt, {**way, "max_tokens": 16}, PROMPTS[:3])
    accepted, drafted = check(rt, asked, PLANS[3::3], [run_with(rt, Plan(), [r]) for r in asked])
    assert 0 < accepted < drafted


@pytest.mark.parametrize("seed", range(2))
def test_arrivals_do_not_change_a_bit(rt, seed):
    """Five requests on three rows, in any order: rows change places as others come and go; a plan is drawn at every step."""
    rng = np.random.default_rng(seed)
    asked = requests(rt, WAYS[seed % 2])
    plain = [run_with(rt, Plan(), [r]) for r in asked]
    order = rng.permutation(len(asked)).tolist()
    seqs, bits = run_with(rt, lambda _: (PLANS[int(rng.integers(len(PLANS)))], "random"), [asked[i] for i in order], rng)
    for i, seq, got in zip(order, seqs, bits, strict=True):
        ([lone], [want]) = plain[i]
        assert seq.generated == lone.generated and got == want


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_kept_where_the_slots_that_are_read_grow(tmp_path, dtype):
    """Reading goes up by 512 slots: a draft crosses that line some tokens before plain decoding does, and the end of the row too."""
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=2048, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, 0, 0.2)
    model.save_pretrained(tmp_path / "long")
    tiny_tokenizer(300).save_pretrained(tmp_path / "long")
    rt = outrider.load(tmp_path / "long", ["lookup", f"model:{tmp_path / 'long'}"], strict=True, dtype=dtype, context=1100, compile="off")
    rng = np.random.default_rng(0)
    for length in (500, 1012):
        asked = [request(rng.integers(2, 300, length).tolist(), "far", max_tokens=24)]
        ([lone], [want]) = run_with(rt, Plan(), asked)
        for depth in (3, 8):
            ([seq], [got]) = run_with(rt, Plan((("model", depth, 1),)), asked)
            assert seq.generated == lone.generated and got == want
            assert sum(r.accepted[0] for r in seq.records) > 12


def test_texts_from_the_door_are_the_plain_ones(rt):
    """What a user writes: `compare` finds nothing, for greedy and sampled requests, one by one and all at once."""
    rt.engine.controller = fixed(Plan((("lookup", 8, 2), ("model", 5, 2))))
    for way in WAYS[:2]:
        found, difference = compare(rt, PROMPTS[0], **HOW, **way)
        assert difference is None and len(found.tokens) == 16 and found.stats["drafted"] > 0
        together = rt.generate(PROMPTS, **HOW, **way)
        apart = [rt.generate(p, speculation="off", **HOW, **way) for p in PROMPTS]
        assert [g.tokens for g in together] == [g.tokens for g in apart]


def test_every_strict_forward_has_one_row_and_one_width(rt, monkeypatch):
    """Plain, drafted, wide or narrow: the step always sees the same shape."""
    target, shapes = rt.engine.target, set()
    serve = target._serve
    monkeypatch.setattr(target, "_serve", lambda block: shapes.add((block.table.shape[:2], block.read)) or serve(block))
    for plan in (Plan(), Plan((("model", 8, 1), ("lookup", 8, 1))), Plan((("model", 3, 3),))):
        run_with(rt, plan, requests(rt, {}, PROMPTS[:2]))
    ((shape, read),) = shapes
    assert shape == (1, STRICT_WIDTH) and read >= target.store.capacity - 1


def test_a_strict_row_inherits_nothing(rt):
    """No prefix of another request is taken over, running or done: it was computed at other places."""
    target = rt.engine.target
    before = target.rows.reused
    first = rt.generate(PROMPTS[0], **HOW)
    again = rt.generate([PROMPTS[0], PROMPTS[0] + " and"], **HOW)
    assert target.rows.reused == before == 0 and again[0].tokens == first.tokens
    seq = Sequence(requests(rt, {})[0], list(requests(rt, {})[0].prompt))
    target.open(seq)
    assert target.rows.of(seq).cached == 0
    target.close(seq)


def test_without_strict_a_prefix_is_taken_over(folders):
    """The same, the other way: the test above would see it."""
    rt = outrider.load(folders["target"], [], dtype="float32", compile="off")
    for _ in range(2):
        rt.generate(PROMPTS[0], **HOW)
    assert rt.engine.target.rows.reused > 0


def test_a_strict_step_scores_one_chain_a_row(rt, monkeypatch):
    """Of a tree only the likeliest path goes to the target, and it lies in slots that are positions."""
    target, lines = rt.engine.target, []
    make = target.rows._block
    monkeypatch.setattr(target.rows, "_block", lambda held, columns: lines.append((made := make(held, columns)).table) or made)
    run_with(rt, Plan((("model", 3, 3), ("lookup", 4, 2))), requests(rt, {}, PROMPTS[:3]))
    widths = [table.shape[1] for table in lines]
    assert max(widths) > 3
    for table in lines:
        (columns,) = table
        assert (columns[:, 1] == columns[:, 2]).all(), "slot == position"
        assert (np.diff(columns[:, 1]) == 1).all(), "each follows the one before"


def test_exact_sampling_cannot_be_strict(rt):
    with pytest.raises(OutriderError, match="rule='exact' cannot be strict"):
        rt.generate("a", temperature=0.7, rule="exact")
    assert rt.generate("a", temperature=0.7, max_tokens=4).stats["steps"], "without a rule it is the coupled one, also unseeded"
    assert rt.generate("a", rule="exact", max_tokens=4, ignore_eos=True).tokens == rt.generate("a", max_tokens=4, ignore_eos=True).tokens


def test_a_routed_model_cannot_be_strict():
    model = zoo.model("mixtral", label="mix")
    with pytest.raises(OutriderError, match="mix cannot be strict") as refused:
        model.pin()
    assert "experts" in refused.value.why and "strict=False" in str(refused.value) and model.rows.reuse


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_other_classes_keep_their_bits_too(name, dtype):
    """Windows of 6 positions that texts outgrow; drafts are of the model itself, so long ones are taken."""
    from outrider.drafters.lookup import Lookup
    from outrider.drafters.model import ModelDrafter

    target, twin = zoo.model(name, dtype=dtype, label="target"), zoo.model(name, dtype=dtype, label="draft", noise=0.05)
    target.pin()
    drafters = {"lookup": Lookup(floor=0.0), "model": ModelDrafter(twin, "model")}
    rt = SimpleNamespace(engine=Engine(target, drafters, fixed(Plan()), 2, strict=True))
    asked = [request([3, 1, 4, 1, 5, 9, 2, 6][:n], f"c{n}", max_tokens=20) for n in (8, 2, 5)]
    plain = [run_with(rt, Plan(), [r]) for r in asked]
    for plan in (Plan((("model", 7, 1),)), Plan((("lookup", 3, 2), ("model", 4, 2)))):
        seqs, bits = run_with(rt, plan, asked)
        for seq, got, ([lone], [want]) in zip(seqs, bits, plain, strict=True):
            assert seq.generated == lone.generated and got == want


# --- tree.chain


def test_a_chain_follows_the_likeliest_child_ties_to_the_first():
    draft = tree.grow(Draft(rows=3), [~0, ~0, ~0, ~2], [1, 2, 3, 4], 1, score=[0.2, 0.5, 0.5, 0.1])
    draft = tree.grow(draft, [0, 1, 1, 2], [5, 6, 7, 8], 1, score=[0.9, 0.3, 0.4, 1.0])
    draft = tree.grow(draft, [6, 6], [9, 10], 1, score=[0.7, 0.7])
    assert tree.chain(draft) == [1, 3, 6, 8]  # row 0: node 1 before its equal 2, then 6, then 8 before its equal 9; row 2: node 3
    assert tree.chain(Draft(rows=2)) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_is_one_path_a_row(seed):
    """Random forests and scores, with ties: closed under parents, one node a depth, none likelier beside it, as far as it goes."""
    rng = np.random.default_rng(seed)
    shape = random_draft(rng, 3, 50, 24)
    draft = Draft(rows=3)
    for parent, token in zip(shape.parent, shape.token, strict=True):
        draft = tree.grow(draft, [parent], [token], 1, score=float(rng.choice([0.1, 0.3, 0.3, 0.6])))
    kept = tree.chain(draft)
    assert kept == sorted(kept)
    table = tree.children(draft)
    for row in range(3):
        path = [n for n in kept if draft.row[n] == row]
        for parent, node in zip([~row, *path], path, strict=False):
            assert draft.parent[node] == parent
            assert (draft.score[node], -node) == max((draft.score[n], -n) for n in table[parent])
        assert not table.get(path[-1] if path else ~row), "it ends at a leaf"
    short = tree.select(draft, kept)
    assert [short.text(tree.ancestors(short, n))[-1] for n in range(len(short))] == draft.text(kept)


def test_a_chain_takes_the_likeliest_whatever_order_children_are_tried_in():
    """Sampled nodes are tried before points; a chain goes by the score alone."""
    draft = tree.grow(Draft(rows=1), [~0], [1], 1, score=0.9)
    draft = tree.grow(draft, [~0, ~0], [2, 3], 1, DISTINCT, [0.4, 0.2], torch.full((1, 5), 0.2), [0, 0])
    assert tree.children(draft)[~0] == [1, 2, 0] and tree.chain(draft) == [0]


# --- why texts differ


@pytest.fixture
def loose(folders) -> outrider.Runtime:
    """Not strict, in float32."""
    return outrider.load(folders["target"], [f"model:{folders['draft']}"], dtype="float32", compile="off", depth=3)


def raw_logits(model: HFModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model.module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


def disturb(model: HFModel, strength: float) -> None:
    """Steps that are wider than one column answer wrongly from now on."""
    forward, noise = model._forward, torch.Generator().manual_seed(3)

    def wrong(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        logits, found = forward(block)
        if block.table.shape[1] == 1:
            return logits, found
        logits = logits + strength * torch.empty_like(logits).normal_(generator=noise)
        return logits, torch.stack([logits.argmax(-1).double(), logits.amax(-1).double(), logits.logsumexp(-1).double()], -1)

    model._forward = wrong


@pytest.mark.parametrize("way", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "sampled"])
def test_compare_names_where_texts_part_and_by_how_much(loose, way):
    """The target is disturbed when it verifies: the first place, both tokens and the gap of the plain logits are told."""
    target = loose.engine.target
    plain = loose.generate(PROMPTS[0], speculation="off", **HOW, **way)
    assert compare(loose, PROMPTS[0], **HOW, **way)[1] is None
    disturb(target, 4.0)
    found, difference = compare(loose, PROMPTS[0], **HOW, **way)
    assert difference is not None and found.tokens != plain.tokens
    at = difference.position
    assert found.tokens[:at] == plain.tokens[:at]
    assert (difference.plain, difference.drafted) == (plain.tokens[at], found.tokens[at]) and difference.plain != difference.drafted
    logits = raw_logits(target, [*plain.prompt_tokens, *plain.tokens[:at]])
    rank = {t: int((logits > logits[t]).sum()) for t in (difference.plain, difference.drafted)}
    if max(rank.values()) >= 100:
        assert difference.gap is None
    else:
        assert difference.gap == pytest.approx(float(logits[difference.plain] - logits[difference.drafted]), abs=1e-3)
    assert way or difference.gap is None or difference.gap > 0, "the plain greedy token is the larger one"
    said = str(difference)
    assert f"token {at} is {difference.plain} without drafting and {difference.drafted} with it" in said
    assert (f"{difference.gap:.4f}" if difference.gap is not None else "unknown") in said


def speaking(plain: list[int], drafted: list[int], logprobs: dict[int, float]) -> SimpleNamespace:
    """A runtime that says these; its raw log-probabilities are `logprobs` everywhere."""
    asked: list[tuple] = []

    def generate(prompt: str, params: object = None, **knobs: object) -> SimpleNamespace:
        return SimpleNamespace(tokens=plain if knobs.get("speculation") == "off" else drafted, prompt_tokens=[0])

    def write(prompts: list[list[int]], params: object, knobs: dict[str, object]) -> list[SimpleNamespace]:
        asked.append((prompts, knobs))
        return [SimpleNamespace(logprobs=[logprobs])]

    return SimpleNamespace(generate=generate, write=write, asked=asked)


@pytest.mark.parametrize(
    ("plain", "drafted", "want"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 4, 3], Divergence(1, 2, 4, 0.75)),
        ([2, 2], [4, 2], Divergence(0, 2, 4, 0.75)),
        ([1, 2, 3, 4], [1, 2], Divergence(2, 3, None, None)),
        ([1], [1, 2], Divergence(1, None, 2, None)),
        ([], [2], Divergence(0, None, 2, None)),
        ([1, 2], [1, 9], Divergence(1, 2, 9, None)),
    ],
)
def test_divergences(plain, drafted, want):
    """One text may end before the other; a token may be unlikely beyond what is listed."""
    rt = speaking(plain, drafted, {2: -0.5, 4: -1.25})
    found, difference = compare(rt, "x", max_tokens=3)
    assert found.tokens == drafted and difference == want
    if want is not None and want.plain is not None and want.drafted is not None:
        ((tokens,), knobs) = rt.asked[0]
        assert tokens == [0, *plain[: want.position]] and knobs["speculation"] == "off"
