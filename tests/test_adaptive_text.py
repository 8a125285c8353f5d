"""Law 1 with the controller on: it changes how fast, never what. Greedy and `coupled` texts are plain decoding's, `exact`
ones have its distribution, whatever the clock makes the controller believe."""

import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest
from contracts import plain, request, run
from enumeration import Enumerator, Law, Text, completed, distance, law
from enumeration import plain as plain_law
from test_exact_enumeration import PROMPT, Bench
from test_laws import SETTINGS, VOCAB, requests, toy_engine

from outrider.control.controller import Adaptive
from outrider.control.fixed import Told
from outrider.control.tables import Tables
from outrider.core.sockets import Controller
from outrider.core.types import SAMPLED, Draft, Places, Plan, Request, SamplingParams, Sequence
from outrider.measure.cost import Costs
from outrider.models.toy import ToyModel
from outrider.runtime import engine as engine_module
from outrider.runtime.engine import Engine

CHEAPEST = {"lookup": 2, "model": 1, "weak": 4}  # the marks of toy_engine's drafters


def adapting(rows: int, rng: np.random.Generator, kind: str = "logistic", costs: Costs | None = None) -> Engine:
    """A toy engine under the controller, on a clock that runs as fast as chance has it: every decision comes up."""
    engine = toy_engine(rows)
    tables = Tables(CHEAPEST, costs or Costs({"lookup": 0.01, "model": 0.4, "weak": 0.6}), kind)
    engine.controller = Adaptive(tables, lambda: "", slowdown=10.0)
    ticks = itertools.accumulate(rng.choice([0.01, 0.02, 0.5], 100_000))
    engine.now = lambda: float(next(ticks))
    return engine


@pytest.mark.parametrize("kind", ["static", "bimodal", "gshare", "logistic", "tage"])
def test_coupled_and_greedy_texts_in_a_batch(kind: str) -> None:
    want = plain(ToyModel(VOCAB, 5, scale=1.5), requests())
    rng, reasons, accepted = np.random.default_rng(1), set(), 0
    for i in range(12):
        seqs = run(engine := adapting(1 + i % 4, rng, kind), requests())
        assert [s.generated for s in seqs] == want
        reasons |= {r.reason for s in seqs for r in s.records}
        accepted += sum(sum(r.accepted) for s in seqs for r in s.records)
        assert not engine.controller.rows, "ended requests are forgotten"
    assert accepted and len(reasons) >= 4, "a test of decisions needs several"


@pytest.mark.parametrize("rows", [1, 3])
def test_a_text_that_is_over_is_held_by_nobody(rows: int) -> None:
    """Else some later step would take the time to clear away its records, which may be longer than the step."""
    engine = adapting(rows, np.random.default_rng(3))
    seqs, fresh = run(engine, requests()), Sequence(requests()[0], [])
    while seqs:
        over = seqs.pop()
        assert sys.getrefcount(over) == sys.getrefcount(fresh)


def test_what_rests_goes_on_resting_when_another_text_of_the_batch_ends() -> None:
    engine = adapting(2, np.random.default_rng(3))
    gone, stays = (engine.submit(request([n, 2, 3], f"r{n}", max_tokens=40)) for n in (4, 5))
    engine.step()
    rows, sleep = engine.controller.rows, engine.controller.sleep
    for seq, rest in ((gone, 30), (stays, 50)):
        rows[seq.request.id].rest = dict.fromkeys(CHEAPEST, rest)
    sleep.rest(list(rows.values()), 30)
    engine.step()
    engine.cancel(gone)
    assert sleep.left == 0 and rows[stays.request.id].rest == dict.fromkeys(CHEAPEST, 49)


@pytest.mark.parametrize("allowed, sleeps", [(None, 0), (frozenset({"model"}), 7), (frozenset({"model", "weak"}), 4)])
def test_nobody_is_kept_asleep_by_who_rests_longer(allowed: frozenset[str] | None, sleeps: int) -> None:
    """Who wakes in the next step is looked at there, whatever others have left of their rests; who is not wanted wakes nobody."""
    engine = adapting(1, np.random.default_rng(3))
    seq = engine.submit(replace(request([5, 2, 3], "r", max_tokens=40), drafters=allowed))
    engine.step()
    controller = engine.controller
    controller.rows[seq.request.id].rest = {"lookup": 1, "model": 8, "weak": 5}
    engine.step()
    assert controller.sleep.left == sleeps and seq.records[-1].reason == "off:resting"
    for _ in range(sleeps + 1):
        assert not controller.looked
        engine.step()
    assert controller.looked == (("lookup",) if allowed is None else ("weak",) if "weak" in allowed else ("model",))


@pytest.mark.parametrize("seed", range(8))
def test_greedy_texts_with_arrivals(seed: int) -> None:
    """The tables live on from request to request."""
    rng = np.random.default_rng(seed)
    asked = [request(rng.integers(0, VOCAB, n).tolist(), f"g{n}", max_tokens=int(rng.integers(1, 60)), ends=frozenset({4})) for n in (1, 2, 7, 4, 3)]
    want = plain(ToyModel(VOCAB, 5, scale=1.5), asked)
    engine, seqs = adapting(3, rng), []
    while len(seqs) < len(asked) or any(s.finish_reason is None for s in seqs):
        if len(seqs) < len(asked) and rng.random() < 0.4:
            seqs.append(engine.submit(asked[len(seqs)]))
        engine.step()
    assert [s.generated for s in seqs] == want


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_one_long_text_on_a_steady_clock(settings: dict) -> None:
    """Long enough for rests, plain steps, and tries: off and on again leave no hole in a drafter's cache."""
    asked = [request([1, 2, 3], "long", seed=3, max_tokens=220, **settings)]
    engine = toy_engine(1)
    engine.controller = Adaptive(Tables(CHEAPEST, Costs({"lookup": 0.01, "model": 0.4, "weak": 0.6})), lambda: "", slowdown=1.0)
    target, drafts = engine.target, [engine.drafters[n].model for n in ("model", "weak")]
    engine.now = lambda: target.forwards + 0.05 * target.computed + sum(0.2 * m.forwards for m in drafts)
    (seq,) = run(engine, asked)
    assert seq.generated == plain(ToyModel(VOCAB, 5, scale=1.5), asked)[0]
    used = [sum(r.drafted) > 0 for r in seq.records]
    assert any(used) and not all(used)


def test_a_cancelled_request_leaves_nothing_with_the_controller() -> None:
    engine = adapting(2, np.random.default_rng(0))
    seqs = [engine.submit(request([1, 2, 3], f"c{i}", max_tokens=60)) for i in range(2)]
    for _ in range(9):
        engine.step()
    engine.cancel(seqs[0])
    while seqs[1].finish_reason is None:
        engine.step()
    assert not engine.controller.rows and not engine.controller.ledger.credit
    assert seqs[1].generated == plain(ToyModel(VOCAB, 5, scale=1.5), [seqs[1].request])[0]


# --- exact ---


class Looking(Told):
    """Goes on only below tokens it likes, and would leave out what it does not: which is not heeded where it was drawn."""

    def more(self, seqs: list[Sequence], name: str, draft: Draft, frontier: Places) -> Places:
        return [p for p in frontier if p < 0 or (draft.token[p] != 0 and draft.score[p] > 0.2)]

    def fill(self, seqs: list[Sequence], draft: Draft, reason: str) -> tuple[list[int] | None, str]:
        return [n for n in range(len(draft)) if draft.depth[n] == 1 and draft.token[n] != 1], reason


class Forgetting(Told):
    """Would verify nothing."""

    def fill(self, seqs: list[Sequence], draft: Draft, reason: str) -> tuple[list[int] | None, str]:
        return [], reason


def error(patch: pytest.MonkeyPatch, make: object, sampling: SamplingParams, steps: int, vocab: int = 3) -> tuple[float, set[str]]:
    """Distance of the engine's law under a controller from plain decoding's, and the reasons that were given."""
    bench, reasons = Bench(patch, vocab), set()

    def once(noise: Enumerator) -> Text:
        patch.setattr(engine_module, "_noise", lambda seqs: noise.fresh())
        controller, clock = make()
        engine = Engine(bench.target, bench.drafters, controller, rows=1)
        engine.now = clock
        seq = engine.submit(Request("r", PROMPT, sampling, seed=0, rule="exact"))
        for _ in range(steps):
            engine.step()
        engine.cancel(seq)
        reasons.update(r.reason for r in seq.records)
        return tuple(seq.generated)

    p, length = plain_law(bench.target, PROMPT, sampling), sampling.max_tokens
    found: Law = completed(law(once), p, length)
    return distance(found, completed({(): 1.0}, p, length)), reasons


@pytest.mark.parametrize("plan", [(("model", 3, 1),), (("model", 2, 2),), (("lookup", 2, 1), ("model", 2, 1))], ids=str)
def test_exact_text_of_a_controller_that_looks_at_the_tokens(monkeypatch: pytest.MonkeyPatch, plan: tuple) -> None:
    def make() -> tuple[Controller, object]:
        return Looking(lambda seqs: (Plan(plan), "looking")), lambda: 0.0

    assert error(monkeypatch, make, SamplingParams(temperature=1.0, max_tokens=3), 1)[0] < 1e-9


@pytest.mark.parametrize("steep", [0.05, 0.6])
def test_exact_text_of_the_adaptive_controller(monkeypatch: pytest.MonkeyPatch, steep: float) -> None:
    """Every way that three steps can go, the controller learning in each."""
    at = "- rows 1 context 512 sampled"
    verify = {"start": 1.0, "slope": steep, "spread": 1.0, "seen": {str(n): [9.0, 1 + steep * n] for n in range(33)}}
    draft = {"start": 0.0, "slope": 0.01, "spread": 1.0, "seen": {str(n): [9.0, 0.01 * n] for n in range(1, 33)}}
    state = {"verify": {at: verify}, "draft": {f"{d} @ {at}": draft for d in ("lookup", "model", "other")}, "plains": {at: 9}}

    def make() -> tuple[Controller, object]:
        tables = Tables({"lookup": 1, "model": 2, "other": 4}, Costs({}), state={"costs": state, "drafts": 100})
        return Adaptive(tables, lambda: ""), itertools.count(0.0, 0.01).__next__  # a look takes a small part of a step

    off, reasons = error(monkeypatch, make, SamplingParams(temperature=1.0, max_tokens=3), 2)
    assert off < 1e-9 and "depth:drawn" in reasons


def test_drawn_nodes_are_never_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `fill` says of a draft with drawn nodes is ignored: here it would forget all of them."""
    bench = Bench(monkeypatch, 3)
    monkeypatch.setattr(engine_module, "_noise", lambda seqs: Enumerator([]).fresh())
    engine = Engine(bench.target, bench.drafters, Forgetting(lambda seqs: (Plan((("model", 1, 1),)), "told")), rows=1)
    seq = engine.submit(Request("r", PROMPT, SamplingParams(temperature=1.0, max_tokens=3), seed=0, rule="exact"))
    engine.step()
    (record,) = seq.records
    assert record.draft.kind == [SAMPLED] and record.drafted == (1,) and record.trimmed == (0,)
