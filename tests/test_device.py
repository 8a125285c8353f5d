"""What a GPU needs of the code, shown without one: few waits, chains that never leave the device, meters. Its graphs: `test_graphed`.

`HOST` without the CPU makes this machine's memory another device's.
"""

import itertools
import sys
import types
import warnings
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import zoo
from contracts import always, plain, request, run
from tiny import tiny_folder

from outrider.bench import prompts, table
from outrider.bench import run as bench
from outrider.control.controller import Adaptive
from outrider.control.fixed import fixed
from outrider.control.tables import LOOK, Tables
from outrider.core import sampling
from outrider.core.types import AHEAD, Limits, Plan
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.measure import device
from outrider.measure.cost import Costs
from outrider.models.hf import HFModel
from outrider.models.load import wrap
from outrider.runtime import engine as engines
from outrider.runtime.engine import Engine

CUDA = torch.device("cuda", 0)
LOOP = [3, 1, 4, 1, 5, 9, 2, 6] * 3
KINDS = ["llama", "gemma2", "gpt2"]


@pytest.fixture
def far(monkeypatch):
    """What the CPU computes lies elsewhere."""
    monkeypatch.setattr(sampling, "HOST", ())


@pytest.fixture
def waits(monkeypatch) -> list[str]:
    """Every time that Python asks what a tensor holds, but for one that was brought over."""
    seen: list[str] = []
    brought: dict[int, torch.Tensor] = {}

    def asked(tensor, real, name, *a, **k):
        here = tensor.untyped_storage().data_ptr() in brought
        if not here:
            seen.append(name)
        out = real(tensor, *a, **k)
        if name == "cpu" and not here:
            out = out.clone()
            brought[out.untyped_storage().data_ptr()] = out
        return out

    for name in ("tolist", "item", "cpu", "__bool__", "__int__", "__float__"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, *a, _real=real, _name=name, **k: asked(self, _real, _name, *a, **k))
    return seen


def pair(name: str = "llama", noise: float = 0.15, layers: int = 2):
    return tuple(wrap(zoo.module(name, noise=n, layers=layers), label, "zoo", context=200) for n, label in ((0.0, "target"), (noise, "draft")))


def records(name: str, plan: Plan, noise: float, layers: int = 2, **asked):
    """Drafts, depths and text of one request, lookup before the draft model."""
    target, draft = pair(name, noise, layers)
    engine = Engine(target, {"lookup": Lookup(floor=0.0), "model": ModelDrafter(draft, "model")}, fixed(plan), 1)
    seq = run(engine, [request(LOOP, "r", **{"max_tokens": 40, **asked})])[0]
    drafts = [(r.draft.token, r.draft.parent, r.draft.source, r.draft.score, r.levels, r.accepted) for r in seq.records]
    return drafts, seq.generated, draft.forwards


@pytest.fixture
def blind(monkeypatch):
    """Draft models read nothing ahead."""
    monkeypatch.setattr(ModelDrafter, "_foreseen", staticmethod(lambda *_: lambda found, most: []))


# --- chains on the device


@pytest.mark.parametrize("name", always(2, KINDS))
@pytest.mark.parametrize("depth", always(1, [7, 2, 4]))
@pytest.mark.parametrize("noise", [0.05, 0.4])
def test_a_chain_made_in_one_call_is_the_chain_of_single_levels(name, depth, noise, request, monkeypatch, blind):
    """Token for token and score for score, over a whole text, on the host and on the device: caches of nodes that others had guessed too are found again."""
    plans = [Plan((("lookup", 3, 1), ("model", depth, 1))), Plan((("model", depth, 1),))]
    with monkeypatch.context() as single:
        single.setattr(ModelDrafter, "_ahead", lambda *asked, **more: 0)
        wanted = [records(name, plan, noise) for plan in plans]
    assert [records(name, plan, noise) for plan in plans] == wanted
    request.getfixturevalue("far")
    assert [records(name, plan, noise) for plan in plans] == wanted
    assert any(sum(s == 3 for s in sources) for _, _, sources, *_ in wanted[0][0]), "some guesses were both drafters'"


SAMPLED = [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.3, "top_k": 5}, {"temperature": 0.8, "min_p": 0.1}]


@pytest.mark.parametrize("name", always(1, KINDS))
@pytest.mark.parametrize("settings", always(2, SAMPLED), ids=str)
def test_a_chain_of_races_made_in_one_call_is_the_chain_of_single_levels(name, settings, monkeypatch, blind):
    """Token for token and score for score: each guess runs the race of its own position, also below a tail that was read with it, and where it ends the text."""
    asked = {"rule": "coupled", "seed": 5, **settings}
    plans = [Plan((("lookup", 3, 1), ("model", 4, 1))), Plan((("model", 6, 1),))]
    with monkeypatch.context() as single:
        single.setattr(ModelDrafter, "_ahead", lambda *asked, **more: 0)
        end = records(name, plans[1], 0.2, **asked)[1][20]
        wanted = [records(name, plan, 0.2, **asked, **ends) for plan in plans for ends in ({}, {"ends": frozenset({end})})]
    calls, chain = [], HFModel.chain
    monkeypatch.setattr(HFModel, "chain", lambda *asked: calls.append(1) or chain(*asked))
    assert [records(name, plan, 0.2, **asked, **ends) for plan in plans for ends in ({}, {"ends": frozenset({end})})] == wanted
    assert len(calls) > 4 and any(accepted[0] > 1 for drafts, *_ in wanted for *_, accepted in drafts)


@pytest.mark.parametrize("asked", [{"rule": "exact"}, {"rule": "coupled", "repetition_penalty": 1.3}, {"rule": "coupled", "min_tokens": 9}], ids=str)
def test_no_chain_in_one_call_where_guesses_are_drawn_or_look_at_the_text(asked, monkeypatch):
    """`exact` keeps what each was drawn from, and penalties see the guesses before."""
    monkeypatch.setattr(HFModel, "chain", lambda *_: pytest.fail("it cannot know that"))
    assert records("llama", Plan((("model", 4, 1),)), 0.2, temperature=0.9, **asked)[1]


@pytest.mark.parametrize("name", always(1, KINDS))
def test_a_chain_that_ran_past_an_end_token_leaves_no_nodes_behind(name, far, monkeypatch):
    """On a device it is seen afterwards. What was computed there is no node: others get its number, and their keys are not taken for it."""
    cut = engines.cut
    monkeypatch.setattr(
        engines, "cut", lambda seqs, *how: cut([replace(s, request=replace(s.request, ends=frozenset())) for s in seqs], *how)
    )  # it goes on
    told = [Plan((("model", 4, 1), ("lookup", 3, 1))), Plan((("lookup", 3, 1), ("model", 4, 1)))]

    def nodes(plan: Plan, some: frozenset[int]):
        drafts, text, _ = records(name, plan, 0.2, ends=some)
        return [(token, parent, source, [round(x, 3) for x in score], accepted) for token, parent, source, score, _, accepted in drafts], text

    asked = [(plan, frozenset({end})) for plan in told for end in sorted(set(records(name, told[0], 0.2)[1]))[:2]]
    with monkeypatch.context() as single:
        single.setattr(ModelDrafter, "_ahead", lambda *asked, **more: 0)
        wanted = [nodes(*how) for how in asked]
    assert [nodes(*how) for how in asked] == wanted
    assert any(token in some for (drafts, _), (_, some) in zip(wanted, asked, strict=True) for tokens, *_ in drafts for token in tokens[:2])


def test_a_chain_goes_no_further_than_its_model(far):
    """The draft model's context ends within the chain; so does the text that is still wanted."""
    target, _ = pair()
    draft = wrap(zoo.module("llama", noise=0.1), "draft", "zoo", context=len(LOOP) + 6)
    seq = run(Engine(target, {"model": ModelDrafter(draft, "model")}, fixed(Plan((("model", 8, 1),))), 1), [request(LOOP, max_tokens=20)])[0]
    assert seq.generated == plain(target, [request(LOOP, max_tokens=20)])[0]
    assert [r.drafted[0] for r in seq.records[:2]] == [6, 5], "to the last token of its context"
    assert not any(sum(r.drafted) for r in seq.records if r.context[0] >= len(LOOP) + 6)


@pytest.mark.parametrize("level", [0.36, 0.1])
def test_the_scheduler_counts_levels_that_went_by_themselves(level, far, monkeypatch):
    """What it thinks was drafted, and paid for, is what was: it was asked before the first level of four. A cheap drafter goes on as a dear one does,
    and its last levels count for nothing."""
    target, draft = pair(noise=0.02)
    controller = Adaptive(Tables({"model": 1}, Costs({"model": level})), lambda: "", slowdown=10.0)
    engine = Engine(target, {"model": ModelDrafter(draft, "model")}, controller, 1)
    engine.now = itertools.count().__next__
    monkeypatch.setattr(controller.tables, "_drafting", lambda name, at: [level * n for n in range(33)])
    page = controller.tables.page
    monkeypatch.setattr(controller.tables, "page", lambda at: replace(found, verify=[1.0] * 33) if (found := page(at)) else None)  # nodes are free
    monkeypatch.setattr(controller.tables, "chance", lambda *_: 0.95)  # and guesses good
    seq = engine.submit(asked := request(LOOP, max_tokens=60))
    deepest = 0
    while seq.finish_reason is None:
        engine.step()
        if (step := controller.step) is not None and (levels := seq.records[-1].levels.get("model")):
            ahead = step.levels["model"] - levels  # one, where it was let and the text had no more room
            assert 0 <= ahead <= 1 if level > LOOK else -AHEAD < ahead <= 1
            assert step.spent == pytest.approx(level * step.levels["model"])
            deepest = max(deepest, levels)
    assert seq.generated == plain(pair()[0], [asked])[0] and deepest > AHEAD


@pytest.mark.parametrize("level", [0.2, 0.1, 0.02])
@pytest.mark.parametrize("steep", [0.0, 0.05, 0.2])
def test_a_chain_that_is_asked_between_guesses_ends_where_single_levels_do(level, steep, monkeypatch, blind):
    """The same drafts, levels, costs and reasons, over a whole text, where every guess is as likely as another; and fewer calls."""

    def told(single: bool):
        target, draft = pair(noise=0.05)
        controller = Adaptive(Tables({"model": 1}, Costs({"model": level})), lambda: "", slowdown=10.0)
        drafter = ModelDrafter(draft, "model")
        engine, calls, extend = Engine(target, {"model": drafter}, controller, 1), [], drafter.extend
        engine.now = itertools.count().__next__
        page = controller.tables.page
        verify = [1.0 + steep * n for n in range(33)]
        with monkeypatch.context() as fixed_costs:
            fixed_costs.setattr(controller.tables, "_drafting", lambda name, at: [level * n for n in range(33)])
            fixed_costs.setattr(controller.tables, "page", lambda at: replace(found, verify=verify) if (found := page(at)) else None)
            fixed_costs.setattr(controller.tables, "chance", lambda name, depth, score, history: 0.9 - 100 * score % 0.3)
            fixed_costs.setattr(drafter, "extend", lambda *asked, **more: calls.append(1) or extend(*asked, **more))
            if single:
                fixed_costs.setattr(ModelDrafter, "_ahead", lambda *asked, **more: 0)
            seq, spent = engine.submit(request(LOOP, max_tokens=60)), []
            while seq.finish_reason is None:
                engine.step()
                spent.append(controller.step and (controller.step.spent, controller.step.levels, controller.step.expected))
        return [(r.draft.token, r.draft.score, r.levels, r.kept, r.reason) for r in seq.records], spent, len(calls)

    one, many = told(True), told(False)
    assert one[:2] == many[:2] and one[2] > many[2]
    assert len({len(tokens) for tokens, *_ in one[0]}) > 1, "they do not all end alike"


def test_a_chain_beside_the_guesses_of_others_is_made_in_one_call(monkeypatch):
    """Always the same plan: a call a step. Where each guess is refused until it is asked for anew, it is a call a level."""
    extend, chain, plan = ModelDrafter.extend, HFModel.chain, Plan((("lookup", 3, 1), ("model", 4, 1)))
    calls: list[int] = []
    beside: list[int] = []
    monkeypatch.setattr(
        ModelDrafter, "extend", lambda self, seqs, draft, *how, **more: calls.append(len(draft)) or extend(self, seqs, draft, *how, **more)
    )
    monkeypatch.setattr(HFModel, "chain", lambda self, seqs, draft, *how: beside.append(len(draft)) or chain(self, seqs, draft, *how))
    drafts, _, _ = records("llama", plan, 0.2)
    assert len(calls) == sum(levels.get("model", 0) > 0 for *_, levels, _ in drafts) and any(calls) and any(beside)
    monkeypatch.setattr(type(fixed(plan)), "asks", True)
    calls.clear()
    again = records("llama", plan, 0.2)[0]
    assert [draft[:3] for draft in again] == [draft[:3] for draft in drafts]
    assert len(calls) > sum(levels.get("model", 0) > 0 for *_, levels, _ in drafts)


def test_a_drafter_waits_to_be_asked_where_guesses_have_a_floor():
    """Which is looked at between calls: none is made below a guess that falls under it."""
    target, draft = pair(noise=0.4)
    made = {}
    for floor in (0.0, 0.2):
        asked = replace(request(LOOP, max_tokens=40), limits=Limits(floor=floor))
        seq = run(Engine(target, {"model": ModelDrafter(draft, "model")}, fixed(Plan((("model", 6, 1),))), 1), [asked])[0]
        made[floor] = [(r.draft.score, r.kept) for r in seq.records]
    assert any(min(scores, default=1.0) < 0.2 for scores, _ in made[0.0])
    assert all(score >= 0.2 for scores, _ in made[0.2] for score in scores[:-1])


def test_scratch_takes_the_names_of_what_it_became():
    target, _ = pair()
    seq = sequence_of(target)
    row = target.rows.of(seq)
    row.base, row.scratch = 5, {0: 1, 3: 2, 4: 6, 5: 14}
    target.rename(seq, {3: 0, 4: 1, 5: 3})
    assert row.scratch == {0: 1, ~3: 2, 1: 6, 3: 14} and list(row.scratch) == [0, ~3, 1, 3], "slots stay in order; a name that is taken is not given"


def sequence_of(model):
    engine = Engine(model, {}, fixed(Plan()), 1)
    seq = engine.submit(request(LOOP))
    engine.step()
    return seq


# --- waits


@pytest.mark.parametrize(
    "plan, asked, most",
    [
        (Plan(), {}, 1),
        (Plan((("lookup", 5, 1),)), {}, 1),
        (Plan(), {"temperature": 1.0, "top_p": 0.9}, 1),
        (Plan((("lookup", 4, 1),)), {"temperature": 0.8, "top_k": 9, "rule": "exact"}, 1),
        (Plan((("lookup", 4, 1),)), {"temperature": 0.8, "top_k": 9, "rule": "coupled"}, 1),
        (Plan((("model", AHEAD, 1),)), {}, 1),
        (Plan((("lookup", 3, 1), ("model", 2 * AHEAD, 1))), {}, 1),
        (Plan((("model", 3, 1), ("lookup", 3, 1))), {}, 2),
        (Plan((("lookup", 9, 1),)), {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "rule": "coupled"}, 1),
        (Plan((("lookup", 3, 1), ("model", 5, 1))), {"temperature": 0.8, "rule": "coupled"}, 1),
    ],
    ids=["plain", "lookup", "sampled", "exact-lookup", "coupled-lookup", "model", "union", "union-model-first", "coupled-wide", "coupled-union"],
)
def test_a_step_asks_the_device_seldom(plan, asked, most, far, waits):
    """Once for the verdict, which a chain of the last drafter's waits for; once more where others guess after it."""
    target, draft = pair()
    engine = Engine(target, {"lookup": Lookup(floor=0.0), "model": ModelDrafter(draft, "model")}, fixed(plan), 1, hot=0)
    seq = engine.submit(request(LOOP, max_tokens=24, **asked))
    engine.step()
    while seq.finish_reason is None:
        waits.clear()
        engine.step()
        assert 1 <= len(waits) <= most, waits
    assert plan == Plan() or any(sum(r.drafted) for r in seq.records)


def test_many_rows_are_judged_where_they_are(far, waits, monkeypatch):
    """More places than are worth bringing over go by the vectorised rules."""
    monkeypatch.setattr(sampling, "FEW", 3)
    target = wrap(zoo.module("llama"), "target", "zoo", rows=4, context=200)
    asked = [request(LOOP[: 5 + i], f"r{i}", seed=i, max_tokens=6, temperature=1.0) for i in range(4)]
    engine = Engine(target, {}, fixed(Plan()), 4)
    seqs = [engine.submit(r) for r in asked]
    engine.step()
    waits.clear()
    engine.step()
    assert "cpu" not in waits
    while any(s.finish_reason is None for s in seqs):
        engine.step()
    assert [s.generated for s in seqs] == plain(target, asked)


def test_waits_are_counted_as_torch_tells_them(monkeypatch):
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: modes.append(mode))
    with device.waits(CUDA) as found:
        warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations", stacklevel=1)
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at here.)", stacklevel=1)
        assert found == []
    assert len(found) == 3 and all(place.startswith(__file__) for place in found) and modes == [0, "warn", 0]
    with device.waits(torch.device("cpu")) as found:
        torch.ones(1).item()
    assert found == [] and modes == [0, "warn", 0]


# --- energy


@pytest.fixture
def nvml(monkeypatch):
    """A driver whose counter goes up by 2.5 J a look."""
    looks = iter(range(0, 10**9, 2500))
    fake = types.SimpleNamespace(
        NVMLError=type("NVMLError", (Exception,), {}), nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(looks),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1-2-3"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    device._counter.cache_clear()
    yield fake
    device._counter.cache_clear()


def test_a_meter_reads_the_drivers_counter(nvml):
    with device.DeviceMeter(CUDA).window() as read:
        assert read == []
    assert (read[0].joules, read[0].source, read[0].covers) == (2.5, "NVML", device.COVERS) and read[0].seconds > 0


def test_a_meter_without_a_counter_says_why(nvml, monkeypatch):
    with device.DeviceMeter(torch.device("cpu")).window() as read:
        pass
    assert read[0].joules is None and read[0].source == "none: no counter of a cpu"

    def refuse():
        raise nvml.NVMLError("Driver Not Loaded")

    monkeypatch.setattr(nvml, "nvmlInit", refuse)
    with device.DeviceMeter(CUDA).window() as read:
        pass
    assert (read[0].joules, read[0].source) == (None, "none: Driver Not Loaded")
    device._counter.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with device.DeviceMeter(CUDA).window() as read:
        pass
    assert read[0].joules is None and "pip install outrider[gpu]" in read[0].source


# --- the benchmark's columns


def test_energy_and_waits_have_columns_where_they_are_known(tmp_path, monkeypatch):
    """Joules of each text over its tokens; a CPU, of which neither is known, has no such columns."""
    monkeypatch.setattr(prompts, "load", lambda category: [prompts.Prompt(category, category, "the quick brown fox jumps over", None, 0.0)])
    folders = tiny_folder(tmp_path / "target"), tiny_folder(tmp_path / "draft", jitter=0.03)
    result = bench.speed(
        1, 6, 3, lambda at: None, target=folders[0], draft=folders[1], device="cpu", dtype="float32", compile="off",
        contenders=("ours plain", "ours lookup"),
    )  # fmt: skip
    assert result["energy"] == "none: no counter of a cpu" and "J/token" not in table.markdown(result)
    rows = [
        bench.Row("p", "code", name, [1, 2, 3, 4], 1, 2.0, 1.0, 3, 0, 0, joules=joules)
        for name, joules in (("ours plain", 2.0), ("ours lookup", 1.0))
    ]
    summed = bench.summary(rows, {"ours plain": 1.0, "ours lookup": 1.5})
    lines = table.markdown({"summary": summed}).splitlines()
    head, plain_, lookup = [line.split(" | ") for line in lines if line.startswith(("| over all", "| ours"))][-3:]
    at = [head.index(name) for name in ("J/token", "host waits/step")]
    assert [[line[i] for i in at] for line in (plain_, lookup)] == [["0.500", "1.00"], ["0.250", "1.50"]]


def test_a_contenders_waits_are_those_of_its_steps(monkeypatch):
    @contextmanager
    def counted(where):
        found: list[str] = []
        yield found
        found += ["here"] * 12

    monkeypatch.setattr(bench, "waits", counted)
    row = bench.Row("p", "code", "ours plain", [1], 1, 1.0, 1.0, 5, 0, 0)
    assert bench.waits_of(lambda name, prompt, most: row, "ours plain", CUDA) == 2.0
