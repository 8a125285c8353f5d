"""Verification that is asked for before the host knows the draft, as on a GPU: the same drafts, verdicts and caches, and one wait."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import zoo
from contracts import always, plain, request, run

from outrider.control.accounts import WEIGHED
from outrider.control.controller import Adaptive
from outrider.control.fixed import Told, fixed
from outrider.control.rows import Row
from outrider.control.step import Step
from outrider.control.tables import Tables
from outrider.core import sampling, tree
from outrider.core.errors import OutriderError
from outrider.core.noise import RowNoise
from outrider.core.types import AHEAD, MAX_NODES, Plan, Scores
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.measure.cost import Costs
from outrider.models import queued
from outrider.models.exits import EarlyExit
from outrider.models.hf import HFModel
from outrider.models.load import wrap
from outrider.runtime.engine import Engine

LOOP = [3, 1, 4, 1, 5, 9, 2, 6] * 3
PLANS = [
    Plan(), Plan((("lookup", 4, 1),)), Plan((("model", 1, 1),)), Plan((("model", 5, 1),)), Plan((("lookup", 3, 1), ("model", 4, 1))),
    Plan((("lookup", 2, 2), ("model", 7, 1))), Plan((("model", 3, 1), ("lookup", 3, 1))), Plan((("model", 2, 2),)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def far(monkeypatch):
    """What the CPU computes lies elsewhere."""
    monkeypatch.setattr(sampling, "HOST", ())


@pytest.fixture
def asked(monkeypatch) -> Counter:
    """How often forwards were queued, and how often that was refused."""
    seen: Counter = Counter()
    queue = HFModel.queue

    def counted(self, *how):
        out = queue(self, *how)
        seen["refused" if out is None else "queued"] += 1
        return out

    monkeypatch.setattr(HFModel, "queue", counted)
    return seen


def engine(controller, name="llama", noise=0.2, **how):
    target, draft = (wrap(zoo.module(name, noise=n), label, "zoo", context=200) for n, label in ((0.0, "target"), (noise, "draft")))
    return Engine(target, {"lookup": Lookup(floor=0.0), "model": ModelDrafter(draft, "model")}, controller, 1, hot=0, **how)


def random_plans(seed: int) -> Told:
    dice = torch.Generator().manual_seed(seed)
    return Told(lambda seqs: (PLANS[int(torch.randint(len(PLANS), (), generator=dice))], "dice"))


def rounded(found):
    """Chances of drafted tokens are computed in another order elsewhere."""
    records, text = found
    return [(*r[:3], [pytest.approx(score, rel=1e-4) for score in r[3]], *r[4:]) for r in records], text


def told(seq):
    return [(r.draft.token, r.draft.parent, r.draft.source, r.draft.score, r.levels, r.accepted, r.kept) for r in seq.records], seq.generated


@pytest.mark.parametrize(
    "how", [{}, {"rule": "coupled", "temperature": 0.8}, {"rule": "coupled", "temperature": 1.1, "top_p": 0.9, "top_k": 20}], ids=str
)
@pytest.mark.parametrize("name", always(1, ["llama", "gpt2", "gemma2"]))
@pytest.mark.parametrize("seed", always(1, range(2)))
def test_any_sequence_of_plans_writes_what_it_writes_level_by_level(name, seed, how, asked, monkeypatch):
    wanted = request(LOOP, "r", max_tokens=70, **how)
    found = told(run(engine(random_plans(seed), name), [wanted])[0])
    assert asked["queued"] > 5 and not asked["refused"]
    monkeypatch.setattr(ModelDrafter, "queues", False)
    assert told(run(engine(random_plans(seed), name), [wanted])[0]) == rounded(found)
    monkeypatch.setattr(ModelDrafter, "_ahead", lambda *asked, **more: 0)
    assert told(run(engine(random_plans(seed), name), [wanted])[0]) == rounded(found)
    monkeypatch.setattr(sampling, "HOST", ("cpu",))
    assert told(run(engine(random_plans(seed), name), [wanted])[0]) == rounded(found), "as the host decides"
    assert found[1] == plain(engine(fixed(Plan()), name).target, [wanted])[0]


@pytest.mark.parametrize(
    "how", [{"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.8}, {"temperature": 1.3, "top_k": 5}, {"temperature": 0.8, "min_p": 0.1}], ids=str
)
def test_races_on_a_device_are_those_on_the_host(how, monkeypatch):
    """Who wins, and how sure that is; a place that holds no number is an error, wherever it lies."""
    seq = type("Seq", (), {"request": request(LOOP, rule="coupled", **how)})()
    settings, noise = sampling.Settings.of([seq]), RowNoise((5,), (0,), (24,))
    logits = 3 * torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    draft = tree.run(tree.empty(1), -1, [1, 2, 3], 1, [0.5] * 3)
    race = sampling.Race(draft, 1, settings, noise)
    race.foresee(3, logits)
    found = sampling.winners(race.there(logits, list(range(6))))
    tokens, logp = sampling.decided(Scores(logits, found=found[None]))
    monkeypatch.setattr(sampling, "HOST", ("cpu",))
    for below in range(6):
        token, share = race.won(logits, below, below)
        assert tokens[below] == token and math.exp(logp[below]) == pytest.approx(share, rel=1e-5)
    logits[2, 7] = torch.nan
    with pytest.raises(OutriderError, match="NaN"):
        sampling.decided(Scores(logits, found=sampling.winners(race.there(logits, list(range(6))))[None]))


def test_a_step_takes_one_forward_of_the_target():
    at = engine(fixed(PLANS[4]))
    seq = run(at, [request(LOOP, max_tokens=40)])[0]
    assert at.target.forwards == len(seq.records) + 1, "and one that read the prompt"
    assert any(source == 3 for r in seq.records for source in r.draft.source), "some guesses were both drafters'"


def test_what_runs_behind_a_chain_is_verification_and_not_drafting(monkeypatch):
    """By the clock of the device."""
    monkeypatch.setattr(queued.Lap, "seconds", 0.25)
    at = engine(fixed(Plan((("model", 3, 1),))))
    at.now = itertools.count().__next__
    for r in run(at, [request(LOOP, max_tokens=12)])[0].records[:-1]:
        assert r.seconds["draft model"] % 1 == 0.75 and r.seconds["score"] % 1 == 0.25


@pytest.mark.parametrize("chance, most", [(0.5, AHEAD), (0.97, 0)])
def test_the_scheduler_lets_go_unseen_what_is_best_short(chance, most, asked, monkeypatch):
    """It counts, and pays for, the levels that went; all of them are verified, and no more of the device is asked. What is best deep is looked at on the way."""
    tables = Tables({"model": 1}, Costs({"model": 0.1}))
    controller = Adaptive(tables, lambda: "", slowdown=10.0)
    at = engine(controller, noise=0.1)
    del at.drafters["lookup"]
    at.equip({"model": at.drafters["model"]}, hot=0)
    at.now = itertools.count().__next__
    page = tables.page
    monkeypatch.setattr(tables, "_drafting", lambda name, at: [0.1 * n for n in range(33)])
    monkeypatch.setattr(tables, "page", lambda at: replace(found, verify=[1.0] * 33) if (found := page(at)) else None)
    monkeypatch.setattr(tables, "chance", lambda *_: chance)
    monkeypatch.setattr(tables, "usual", lambda name: chance)
    monkeypatch.setattr("outrider.control.step.Step.judged", lambda *_: None)
    seq = at.submit(wanted := request(LOOP, max_tokens=60))
    blind = 0
    while seq.finish_reason is None:
        before = asked["queued"]
        at.step()
        if (step := controller.step) is not None and (levels := seq.records[-1].levels.get("model")):
            assert step.spent == pytest.approx(0.1 * step.levels["model"])
            if asked["queued"] > before:
                blind += 1
                assert step.levels["model"] == levels <= most and sum(seq.records[-1].trimmed) == 0
                draft = seq.records[-1].draft
                assert seq.records[-1].reason == "depth:queued" in WEIGHED and step.expected == pytest.approx(1 + sum(step.survivals(draft)))
    assert blind > 3 if most else blind == 0
    assert seq.generated == plain(engine(fixed(Plan())).target, [wanted])[0]


def test_no_more_goes_unseen_than_there_is_room_for(asked, monkeypatch):
    """The guard bounds what is drafted and verified before anybody looks."""
    tables = Tables({"model": 1}, Costs({"model": 0.1}))
    page = SimpleNamespace(drafting={"model": [0.5 * n for n in range(33)]}, seconds=[1 + 0.1 * n for n in range(33)])
    monkeypatch.setattr(tables, "usual", lambda name: 0.9)
    monkeypatch.setattr(tables, "depth", lambda *how: (2.0, 4))
    for room, levels in ((9.0, 4), (3.41, 4), (3.3, 3), (2.0, 1), (0.1, 1)):
        step = Step(tables, page, [Row()], 1, room, 1.0, spent=0.5)  # what the first level takes
        assert step.deep("model") == levels


def test_all_that_was_queued_is_verified_whatever_would_have_been_left_out(asked):
    """And the step says so."""

    class Mean(Told):
        def blind(self, name):
            return 3

        def fill(self, seqs, draft, reason):
            return [], "picked"

    plan = Plan((("model", 3, 1),))
    seq = run(engine(Mean(lambda seqs: (plan, "told"))), [request(LOOP, max_tokens=30)])[0]
    assert asked["queued"] and {r.reason for r in seq.records if sum(r.drafted)} == {"depth:queued"} and sum(sum(r.accepted) for r in seq.records)


def test_a_step_that_fails_leaves_nothing_queued(asked):
    """Neither in the caches: the next step goes on as if it had not been."""
    clean = told(run(engine(fixed(PLANS[4])), [request(LOOP, max_tokens=40)])[0])
    at, calls = engine(fixed(PLANS[4])), itertools.count()
    score = at.target.score
    at.target.score = lambda *how, **more: (_ for _ in ()).throw(KeyboardInterrupt) if next(calls) % 3 == 1 else score(*how, **more)
    seq = at.submit(request(LOOP, max_tokens=40))
    failed = 0
    while seq.finish_reason is None:
        try:
            at.step()
        except KeyboardInterrupt:
            failed += 1
            assert at.target.queued is None
    assert failed > 2 and told(seq) == clean


def test_steps_of_one_width_are_not_queued(asked):
    at = engine(fixed(PLANS[4]))
    at.target.pin()
    wanted = request(LOOP, max_tokens=30)
    assert run(at, [wanted])[0].generated == plain(engine(fixed(Plan())).target, [wanted])[0]
    assert not asked and at.target.queue(*[None] * 4) is None, "nor would they be"


def test_more_nodes_than_a_step_has_are_not_queued():
    target = engine(fixed(Plan())).target
    seq = Engine(target, {}, fixed(Plan()), 1).submit(request(LOOP))
    target.open(seq)
    draft = tree.run(tree.empty(1), -1, [1] * (MAX_NODES - 2), 1, [0.5] * (MAX_NODES - 2))
    assert target.queue([seq], draft, -1, torch.zeros(3)) is None and target.queued is None
    assert target.queue([seq], draft, -1, torch.zeros(2)) is target.queued is not None


@pytest.mark.parametrize("view", [lambda target: EarlyExit(target, 1), lambda target: target.view((0,))], ids=["exit", "layers"])
def test_a_view_of_the_target_is_not_what_its_verdict_is_queued_behind(view, asked):
    """They write to the same cache."""
    target, wanted = wrap(zoo.module("llama"), "target", "zoo", context=200), request(LOOP, max_tokens=30)
    at = Engine(target, {"exit": ModelDrafter(view(target), "exit")}, fixed(Plan((("exit", 3, 1),))), 1, hot=0)
    seq = run(at, [wanted])[0]
    assert seq.generated == plain(wrap(zoo.module("llama"), "target", "zoo", context=200), [wanted])[0]
    assert any(sum(r.drafted) for r in seq.records) and not asked
