"""CUDA graphs of steps, shown without a GPU: the same contracts, fixed addresses, and joined kernels where these serve.

A graph is played by what runs the captured step again (`Again`).
"""

import itertools
import weakref
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
import zoo
from contracts import check_scores, plain, recompute, request, run, sequence
from test_device import KINDS, LOOP, far, pair, sequence_of  # noqa: F401

from outrider.control.fixed import fixed
from outrider.core import tree
from outrider.core.types import Plan
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.models import graphed, joined
from outrider.models.compiled import example
from outrider.models.joined import two_products
from outrider.models.load import wrap
from outrider.models.step import grouped_attention
from outrider.runtime.engine import Engine


class Again:
    """Plays a CUDA graph: a replay runs what was captured again, from the same tensors into the same tensors."""

    recording: "Again | None" = None

    def note(self, step, given, out) -> None:
        self.step, self.given, self.out = step, given, out

    def replay(self) -> None:
        for held, new in zip(self.out, self.step(*self.given), strict=True):
            held.copy_(new)


@pytest.fixture
def graphs(monkeypatch):
    """`Graphs` on this machine. Call it with a model to serve its steps so."""

    pools: dict[object, weakref.WeakSet] = {}

    @contextmanager
    def capture(graph, pool=None):
        assert pool not in pools or len(pools[pool]), "memory goes with the last graph that it was of"
        pools.setdefault(pool, weakref.WeakSet()).add(graph)
        Again.recording = graph
        yield
        Again.recording = None

    def noted(step):
        def call(*given):
            out = step(*given)
            if Again.recording is not None:
                Again.recording.note(step, given, out)
            return out

        call.store, call.windows, call.vocab, call.parameters = step.store, step.windows, step.vocab, step.parameters
        return call

    def serve(model):
        model.compiled = graphed.Graphs(noted(model.step))
        return model

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Again)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(graphed, "join", lambda step, rows: step)
    return serve


@pytest.mark.parametrize("name", KINDS)
def test_graphs_give_what_eager_steps_give(name, graphs):
    """Ragged rows, chains and trees: padded columns and slots change nothing, and no output is overwritten before it is read."""
    model = graphs(wrap(zoo.module(name), "target", "zoo", context=200, rows=3, chunk=4))
    check_scores(model, recompute(model), np.random.default_rng(1), zoo.VOCAB, 2e-3, steps=24)
    assert model.compiled.graphs and model.compiled.reason == "eager:first-use" and model.meter.tier == "compiled"


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.usefixtures("far")
def test_texts_and_drafts_of_graphs_are_those_of_eager_steps(strict, graphs):
    plan, written = Plan((("lookup", 6, 1), ("model", 6, 1))), []
    for serve in (lambda model: model, graphs):
        target, draft = map(serve, pair())
        if strict:
            target.pin()
        engine = Engine(target, {"lookup": Lookup(floor=0.0), "model": ModelDrafter(draft, "model")}, fixed(plan), 1, strict=strict)
        seq = run(engine, [request(LOOP, max_tokens=40)])[0]
        written.append((seq.generated, [r.draft.token for r in seq.records]))
    assert written[0] == written[1] and written[0][0] == plain(pair()[0], [request(LOOP, max_tokens=40)])[0]
    assert {key[2] for key in target.compiled.graphs} <= set(graphed.WIDTHS) and draft.compiled.graphs


def test_a_strict_step_of_two_parts_keeps_both(graphs):
    """The second part's replay writes where the first part's logits lay."""
    model = graphs(wrap(zoo.module("llama"), "target", "zoo", context=200))
    model.pin()
    check_scores_of_chain(model)
    check_scores_of_chain(model)


def check_scores_of_chain(model) -> None:
    seq = sequence_of(model)
    draft = tree.run(tree.empty(1), -1, list(range(20, 32)), 1, [1.0] * 12)
    got = model.score([seq], draft, tree.all_places(draft)).logits
    for i, line in enumerate(got):
        torch.testing.assert_close(line, recompute(model)(seq.tokens + draft.token[:i]), rtol=0, atol=1e-4)
    model.close(seq)


def test_few_graphs_are_kept(graphs, monkeypatch):
    monkeypatch.setattr(graphed, "MOST", 2)
    model = graphs(wrap(zoo.module("llama"), "target", "zoo", context=200))
    for _ in range(2):
        for width in (1, 2, 4, 8):
            table = torch.zeros(1, width, 5, dtype=torch.int64)
            table[..., 3] = 1
            for _ in range(2):
                model.compiled(table, torch.arange(64), model.store.rows(0, 1))
    assert [key[2] for key in model.compiled.graphs] == [4, 8], "the least used are dropped"


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_graphs_that_were_waited_for_are_all_that_a_text_uses(name, graphs):
    """None is captured while it is written, plainly or drafted, however long it grows; its text is the eager one."""
    eager, model = (wrap(zoo.module(name), "target", "zoo", context=600) for _ in range(2))
    graphs(model).compiled.wait()
    held = list(model.compiled.graphs)
    assert {key[2] for key in held} == set(graphed.WIDTHS) and {key[3] for key in held} == {256, 512, 664} == set(graphed.sizes(665))
    asked = request(LOOP * 20, max_tokens=110)
    seq = run(Engine(model, {"lookup": Lookup(floor=0.0)}, fixed(Plan((("lookup", 5, 1),))), 1), [asked])[0]
    assert seq.generated == plain(eager, [asked])[0] and sorted(model.compiled.graphs) == sorted(held)
    assert {r.tiers["target"] for r in seq.records} == {"compiled"} and model.compiled.reason == "eager:first-use"


class Joins:
    """Plays joined kernels, of a step, that serve or fail in some way. `made`: how often; `widths`: of the tables they were called with."""

    def __init__(self, how: str) -> None:
        self.how, self.made, self.widths = how, 0, []

    def __call__(self, step, rows):
        self.made += 1
        if self.how == "not exported":
            raise ValueError("a graph break")
        self.step = step
        return self.run

    def failing(self, step):
        self.step = step
        return self.run

    def run(self, table, read, rows):
        self.widths.append(table.shape[1])
        if self.how == "no code" or (self.how == "not captured" and Again.recording is not None):
            raise NotImplementedError("no Triton")
        if self.how == "sees all":
            table = table.clone()
            table[..., 3] = len(read)
        return self.step(table, read, rows)


@pytest.mark.parametrize("how", ["serves", "strict", "large", "deep", "not exported", "no code", "not captured", "sees all"])
def test_graphs_are_of_joined_kernels_where_these_serve(how, graphs, monkeypatch, caplog):
    """Where they do not, of the step's own, and the user is told once."""
    monkeypatch.setattr(graphed, "join", joins := Joins(how))
    model = graphs(wrap(zoo.module("llama"), "target", "zoo", context=300))
    if how in ("large", "deep"):
        most = sum(p.nbytes for p in model.module.parameters()) if how == "large" else model.spec.layers
        monkeypatch.setattr(joined, how.upper(), most - 1)
    model.compiled.wait(strict=how == "strict")
    held, asked = len(model.compiled.graphs), how not in ("strict", "large", "deep")
    assert held == len(graphed.WIDTHS) * len(graphed.sizes(365)) and joins.made == asked
    assert len(joins.widths) == {"serves": 2 * held, "no code": 1, "not captured": 2, "sees all": 2}.get(how, 0)
    assert all((graph.run == joins.run) == (how == "serves") for graph in model.compiled.graphs.values())
    assert caplog.text.count("does without joined kernels") == (asked and how != "serves")
    told = request(LOOP, max_tokens=30)
    seq = run(Engine(model, {}, fixed(Plan()), 1), [told])[0]
    assert seq.generated == plain(wrap(zoo.module("llama"), "target", "zoo", context=300), [told])[0]
    assert {r.tiers["target"] for r in seq.records} == {"compiled:without-joined-kernels" if asked and how != "serves" else "compiled"}


def test_all_that_graphs_do_without_is_told(graphs, monkeypatch, caplog):
    """Neither joined kernels nor two products, which fail one after the other."""
    monkeypatch.setattr(graphed, "multiplied", Joins("not captured").failing)
    monkeypatch.setattr(graphed, "join", Joins("not exported"))
    model = graphs(wrap(zoo.module("llama"), "target", "zoo", context=300))
    model.compiled.wait()
    seq = run(Engine(model, {}, fixed(Plan()), 1), [request(LOOP, max_tokens=30)])[0]
    assert {r.tiers["target"] for r in seq.records} == {"compiled:without-joined-kernels+attention-as-two-products"}
    assert caplog.text.count("does without") == 2


def test_waiting_again_changes_nothing(graphs, monkeypatch):
    """Neither graphs nor what a row holds; and who becomes strict later has no joined kernels."""
    monkeypatch.setattr(graphed, "join", joins := Joins("serves"))
    model = graphs(wrap(zoo.module("llama"), "target", "zoo", context=300))
    model.compiled.wait()
    assert all(float(x.abs().max()) == 0.0 for x in model.store.rows(0, 1)), "a row begins empty"
    sequence_of(model)
    held, text = dict(model.compiled.graphs), [x.clone() for x in model.store.rows(0, 1)]
    model.compiled.wait()
    assert joins.made == 1 and model.compiled.graphs == held
    assert all(map(torch.equal, text, model.store.rows(0, 1)))
    model.pin()
    assert not model.compiled.graphs and not model.compiled.better


def test_a_trial_shows_what_is_seen():
    """Columns see text, and of one another what stands before them; else wrong masks would pass."""
    model = wrap(zoo.module("llama").requires_grad_(False), "target", "zoo", context=300)
    rows = [torch.randn_like(x) for x in model.store.rows(0, 1)]
    table = graphed.trial(model.step, model.store.capacity, 8)
    chain = table.clone()
    chain[..., 3], chain[..., 4:] = chain[..., 2] + 1, 0
    less, lone = chain.clone(), table.clone()
    less[..., 3], lone[:, 1:, 4:] = 1, 0
    want, same, *others = (model.step(x, torch.arange(300), rows)[0] for x in (table, chain, less, lone))
    torch.testing.assert_close(same, want)
    assert all(float((x - want).abs().max()) > 0.25 * float(want.std()) for x in others)


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2), (torch.float32, 1e-5)], ids=["float16", "bfloat16", "float32"]
)
def test_attention_of_two_products_is_attention(dtype, most):
    """Of heads that share keys; and where float16 would not hold a product of keys and queries, it is a number."""
    made = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, n, 64, generator=made).to(dtype) for heads, n in ((6, 5), (2, 90), (2, 90)))
    hidden = torch.arange(90) >= torch.arange(60, 65)[:, None]
    mask = torch.zeros(1, 1, 5, 90, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    got, want = (attend(None, query, key, value, mask)[0] for attend in (joined.two_products, grouped_attention))
    torch.testing.assert_close(got, want, rtol=0, atol=most)
    assert bool(joined.two_products(None, 100 * query, 100 * key, value, mask)[0].isfinite().all())


@pytest.mark.parametrize("slots", [512, 1024, 1100])
def test_attention_over_many_slots_is_two_products(slots, monkeypatch):
    called, model = [], wrap(zoo.module("llama").requires_grad_(False), "target", "zoo", context=1100)
    monkeypatch.setattr(joined, "two_products", lambda *given, **named: called.append(1) or two_products(*given, **named))
    rows, table = model.store.rows(0, 1), graphed.trial(model.step, model.store.capacity, 8)
    with torch.inference_mode():
        for x in rows:
            x.normal_()
        got, want = (run(table, torch.arange(slots), rows)[0] for run in (joined.multiplied(model.step), model.step))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert len(called) == (model.spec.layers if slots >= 1024 else 0)


def test_one_wrong_column_is_seen(graphs):
    """Of as many as there are; what rounding does to a few logits is not taken for it."""
    model = graphs(wrap(zoo.module("llama").requires_grad_(False), "target", "zoo", context=300))
    model.compiled.wait(strict=True)
    rows, table = model.store.rows(0, 1), graphed.trial(model.step, model.store.capacity, 64)
    with torch.inference_mode():
        for x in rows:
            x[:, :, :256].normal_()
        want = model.step(table, torch.arange(256), rows)[0]
        for column, noise, seen in ((None, 0.1, False), (40, 0.0, True)):
            given = want + noise * want.std() * torch.randn(want.shape, generator=torch.Generator().manual_seed(0))
            if column is not None:
                given[:, column] = want[:, column].roll(1, -1)
            with pytest.raises(RuntimeError, match="differ") if seen else nullcontext():
                model.compiled._graph(model.compiled.step, table, torch.arange(256), rows, given)


def test_views_of_one_block_are_written_as_tensors_apart():
    """AOTAutograd fails on views of one storage that are written to; what is written apart lies in the cache all the same."""
    rows = wrap(zoo.module("llama"), "target", "zoo", context=300).store.rows(0, 1)
    lone = joined.apart(rows)
    assert len({x.untyped_storage().data_ptr() for x in rows}) == 1 < len({x.untyped_storage()._cdata for x in lone}) == len(rows)
    for n, x in enumerate(lone):
        x.fill_(n)
    assert all(bool((x == n).all()) for n, x in enumerate(rows))


def test_joined_kernels_are_in_one_piece_and_one_code_serves_all_widths_and_slots(monkeypatch):
    """What Dynamo cannot read parts a graph in two, and a size that was taken for a constant is code made again: both are slow, and to be seen in no result."""
    pieces: list[int] = []
    compile = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda form, options=None, **how: compile(form, backend=lambda graph, _: pieces.append(len(graph.graph.nodes)) or graph.forward, **how),
    )
    model = wrap(zoo.module("llama", dtype=torch.bfloat16), "target", "zoo", context=300)
    rows = joined.apart(model.store.rows(0, 1))
    with torch.inference_mode():
        made = joined.join(model.step, rows)
        for slots, width in itertools.product(graphed.sizes(model.store.capacity), graphed.WIDTHS[::-1]):
            table = graphed.trial(model.step, model.store.capacity, width)
            want, got = (run(table, torch.arange(slots), rows)[0].float() for run in (model.step, made))
            assert float((got - want).square().mean().sqrt()) <= 0.05 * float(want.std())
    assert len(pieces) == 2, "one column, and any number"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("gemma2", "float32")])
def test_joined_kernels_give_what_the_step_gives(name, dtype):
    """By Inductor for this machine, in a row of the cache itself, at every width and number of slots that graphs have; chains of nodes, and of a text."""
    model = wrap(zoo.module(name).to(getattr(torch, dtype)), "target", "zoo", context=600)
    rows, most = joined.apart(model.store.rows(0, 1)), 1e-5 if dtype == "float32" else 0.05
    with torch.inference_mode():
        for x in rows:
            x.normal_()
        made = joined.join(model.step, rows)
        for slots, width in itertools.product(graphed.sizes(model.store.capacity), graphed.WIDTHS):
            text = example(1, width, len(model.step.windows), after=slots - width - 1)
            text[..., 0] %= zoo.VOCAB
            for table in (text, graphed.trial(model.step, model.store.capacity, width)):
                want, got = (run(table, torch.arange(slots), rows)[0].float() for run in (model.step, made))
                assert float((got - want).square().mean().sqrt()) <= most * float(want.std())


def test_rows_together_have_graphs_of_the_steps_own_kernels(graphs):
    model, joins = graphs(wrap(zoo.module("llama"), "target", "zoo", context=200, rows=2)), Joins("serves")
    model.compiled.better = {"joined kernels": joins(model.compiled.step, [])}
    table = torch.zeros(2, 1, 5, dtype=torch.int64)
    table[..., 3] = 1
    for _ in range(2):
        model.compiled(table, torch.arange(64), model.store.rows(0, 2))
    assert len(model.compiled.graphs) == 1 and not joins.widths


def test_numbers_that_graphs_read_stay_where_they_are(graphs):
    """A graph holds an address: what it read must not be freed when a longer text comes."""
    model = graphs(wrap(zoo.module("llama"), "target", "zoo", context=5000))
    table = torch.zeros(1, 1, 5, dtype=torch.int64)
    table[..., 3] = 1
    model.compiled(table, torch.arange(64), model.store.rows(0, 1))
    first = model.compiled.numbers
    model.compiled(table, torch.arange(5000), model.store.rows(0, 1))
    assert model.compiled.numbers is first and len(first) == model.store.capacity


@pytest.mark.parametrize("how", ["raises", "differs"])
def test_a_capture_that_fails_leaves_the_model_eager(how, graphs, monkeypatch):
    def spoil(self):
        if how == "raises":
            raise RuntimeError("operation not permitted when stream is capturing")
        self.out[0].add_(100 * torch.randn_like(self.out[0]))

    monkeypatch.setattr(Again, "replay", spoil)
    target = graphs(pair()[0])
    asked = request(LOOP, max_tokens=12)
    seq = run(Engine(target, {}, fixed(Plan()), 1), [asked])[0]
    assert seq.generated == plain(pair()[0], [asked])[0]
    assert target.compiled.reason == "eager:capture-failed" == seq.records[-1].tiers["target"] and not target.compiled.graphs


def test_a_capture_that_fails_leaves_the_usual_stream(graphs, monkeypatch):
    """torch ends a capture before it leaves its stream: one that cannot be ended is left there."""
    current = ["usual"]

    @contextmanager
    def capture(graph, pool=None):
        current.append("of the capture")
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    @contextmanager
    def stream(asked):
        before = current.copy()
        try:
            yield
        finally:
            current[:] = before

    model = graphs(pair()[0])
    for name, played in (("graph", capture), ("stream", stream), ("current_stream", lambda: current[-1])):
        monkeypatch.setattr(torch.cuda, name, played)
    asked = request(LOOP, max_tokens=6)
    seq = run(Engine(model, {}, fixed(Plan()), 1), [asked])[0]
    assert model.compiled.reason == "eager:capture-failed" and current == ["usual"]
    assert seq.generated == plain(pair()[0], [asked])[0]


def test_rows_that_cannot_be_told_apart_leave_the_model_its_own_kernels(graphs, monkeypatch):
    def refuses(rows):
        raise BufferError("Can't export tensors on a different CUDA device index")

    model = graphs(pair()[0])
    monkeypatch.setattr(graphed, "apart", refuses)
    asked = request(LOOP, max_tokens=6)
    assert run(Engine(model, {}, fixed(Plan()), 1), [asked])[0].generated == plain(pair()[0], [asked])[0]
    assert model.compiled.graphs and not model.compiled.better


def test_what_one_graph_has_written_outlives_the_next(monkeypatch):
    """Rows of a step that lie apart are two forwards. On a GPU the second may write where the first one's logits lie."""
    model = zoo.model("llama", rows=3)
    seqs = [sequence([3, 1, 4, n], f"r{n}") for n in range(3)]
    for seq in seqs:
        model.open(seq)
    model.prefill(seqs)
    apart, draft, forward, held = [seqs[0], seqs[2]], tree.empty(2), model._forward, []
    want = model.score(apart, draft, [-1, -2]).logits.clone()
    model.drop(apart)

    def shared(block):
        held.append(tuple(x.clone() for x in forward(block))) if not held else [
            old.copy_(new) for old, new in zip(held[0], forward(block), strict=True)
        ]
        return held[0]

    monkeypatch.setattr(model, "_forward", shared)
    monkeypatch.setattr(model, "far", True)
    assert torch.equal(model.score(apart, draft, [-1, -2]).logits, want) and not torch.equal(want[0], want[1])
