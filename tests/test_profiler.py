"""Sweeps: what is measured at rest leaves nothing behind."""

import atexit
import itertools

import pytest
from contracts import plain, request, run
from tiny import tiny_folders

import outrider
from outrider.control.fixed import fixed
from outrider.control.tables import Tables
from outrider.core.errors import OutriderError
from outrider.core.types import Plan
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.measure.cost import CALM, DEEPEST, Costs, situation
from outrider.models.toy import ToyModel
from outrider.runtime import profiler
from outrider.runtime.engine import Engine
from outrider.runtime.profiler import BETWEEN, NODES, QUIET, WARM, sweep

TEXT = "she sells sea shells on the sea shore and the shells she sells"
HOW = {"max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders(tmp_path_factory.mktemp("profiler"))


def pair(folders, **settings):
    """The tiny pair under the controller, on a clock that ticks once a look: what is learned does not hang on the machine."""
    settings = {"compile": "off", "profile": "off"} | settings
    runtime = outrider.load(folders["target"], ["lookup", f"model:{folders['draft']}"], **settings)
    runtime.engine.now = itertools.count().__next__
    atexit.unregister(runtime.keeper.save)
    return runtime


def toys(rows: int = 3) -> tuple[Engine, Tables]:
    draft = ModelDrafter(ToyModel(12, 5, rows=rows, blend=(8, 0.3), name="draft", context=1024))
    engine = Engine(ToyModel(12, 5, rows=rows, context=1024), {"model": draft, "lookup": Lookup()}, fixed(Plan((("model", 3, 1),))), rows)
    engine.now = itertools.count().__next__
    return engine, Tables(engine.bits, Costs({"model": 0.5, "lookup": 0.05}))


def parts(engine: Engine) -> tuple:
    return engine.controller, engine.drafters, dict(engine.bits)


def at_rest(engine: Engine) -> bool:
    models = [engine.target, *(d.model for d in engine.drafters.values() if hasattr(d, "model"))]
    return not engine.batcher.running and not engine.batcher.waiting and all(m.rows.active == 0 for m in models)


def test_levels_that_find_weights_cold_are_many() -> None:
    """Whatever finds them cold takes the same time longer: of one level, which decides whether a model is asked at all, that would be its double. After two steps
    that are not counted, the one that reads the prompt and the next, levels are measured from many to few; then behind the others' steps, and behind plain ones."""
    asked = [plan.drafters[0][1] for plan in profiler._plans(["model"], ["lookup"], BETWEEN) if plan.drafters and plan.drafters[0][0] == "model"]
    assert asked == [1, *[8] * (profiler.UNCOUNTED - 1), *range(8, 0, -1), 1, 1] and set(asked) == set(profiler.LEVELS)


def test_a_sweep_measures_every_number_of_nodes_and_every_drafter():
    engine, tables = toys()
    taken = sweep(engine, tables, context=100, patience=1e9, repeats=1)
    at = situation("", 1, 100, False)
    assert taken > WARM + len(NODES)
    assert set(tables.costs.verify[at].seen) == {n for n in NODES if n <= DEEPEST}
    assert set(tables.costs.draft) == {("model", at), ("lookup", at)}
    assert set(tables.costs.draft["model", at].seen) == set(profiler.LEVELS)
    assert tables.costs.plains[at] == tables.costs.verify[at].seen[0][0] > 0 and at in tables.costs.steady
    assert min(tables.costs.catch_up["model"].values()) >= 0


def test_what_a_drafter_foresees_in_a_sweep_is_no_level(folders):
    """Greedy texts of arbitrary words go in circles, of which a model foresees so much that none would take it several steps."""
    runtime = pair({**folders, "draft": folders["target"]})
    engine, tables = runtime.engine, Tables(runtime.engine.bits, Costs({}))
    sweep(engine, tables, context=100, patience=1e9, repeats=3)
    ((_, curve),) = [(name, curve) for (name, _), curve in tables.costs.draft.items() if name == "model"]
    assert set(curve.seen) == set(profiler.LEVELS) and engine.drafters["model"].foresees


def test_a_sweep_measures_what_it_takes_to_read_a_few_tokens():
    engine, tables = toys()
    sweep(engine, tables, context=90, patience=1e9, repeats=2)
    assert set(tables.costs.catch_up["model"]) == {n.bit_length() for n in (CALM + QUIET + 1, 4 * 9 + 1, 90)}, "lookup wrote nine each time"


def test_a_sweep_runs_the_passes_that_texts_run(monkeypatch):
    """Where the target is compiled, early exits are not inlined: a sweep that did would time eager steps as compiled ones."""
    engine, tables = toys()
    engine.jit.front, real, ran = ("merge-tries",), Engine.step, set()
    monkeypatch.setattr(Engine, "step", lambda self, **how: ran.add(tuple(self.jit.front)) or real(self, **how))
    sweep(engine, tables, context=100, patience=1e9, repeats=1)
    assert ran == {("merge-tries",)}


def test_every_sweep_makes_drafters_read_anew(monkeypatch):
    """A second sweep over the first's text would find it in the draft model's rows, and reading would seem to cost nothing."""
    engine, tables = toys()
    asked = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda request: asked.append(request.prompt) or submit(request))
    for sampled in (False, True):
        sweep(engine, tables, context=100, patience=0.0, repeats=1, sampled=sampled)
    assert len(asked) == 2 and asked[0][:20] != asked[1][:20]


def test_a_sweep_stays_at_the_length_that_it_is_filed_under(monkeypatch):
    """However often it measures: a text that grew would show what steps cost at another length."""
    engine, tables = toys()
    seen, add = [], profiler.Found.add
    monkeypatch.setattr(profiler.Found, "add", lambda self, record, rows: seen.append(record.context[0]) or add(self, record, rows))
    sweep(engine, tables, context=300, patience=1e9, repeats=12)
    (at,) = tables.costs.verify
    assert at.context == 512 and min(seen) >= 300 and max(seen) < 512 and len(seen) > 12 * len(NODES)
    behind = len(profiler.LEVELS) + 2  # plain steps, one before each of the model's
    assert tables.costs.verify[at].seen[0][0] == 11 * (1 + BETWEEN * len(NODES) + behind + CALM), "each repetition counts, but the one that warms up"
    counts = {n: count for n, (count, _) in tables.costs.verify[at].seen.items() if n}
    assert counts == {n: 11 * (1 + (n in profiler.LEVELS) + (n == profiler.LEVELS[-1])) for n in NODES if n}, (
        "what the model drafted, too, but for the first, which read"
    )


def ticking(engine):
    """The engine's time, in a list: a millisecond a look, and what a test adds."""
    clock = [0.0]

    def now():
        clock[0] += 1e-3
        return clock[0]

    engine.now = now
    return clock


@pytest.mark.parametrize("reuse", [True, False])
def test_reading_is_measured_where_it_happens(monkeypatch, reuse):
    """A draft model reads the prompt at its first turn in the first text. What it does at its first turns in later ones, finding the prompt in
    its rows or reading it once more, is neither cheap reading nor dear drafting."""
    engine, tables = toys()
    model = engine.drafters["model"].model
    model.rows.reuse = engine.target.rows.reuse = reuse
    clock, read, score = ticking(engine), {}, model.score

    def reading(seqs, *how):
        clock[0] += len(seqs[0].tokens) - read.get(id(seqs[0]), 0 if reuse is False or not read else 300)
        read[id(seqs[0])] = len(seqs[0].tokens)
        return score(seqs, *how)

    monkeypatch.setattr(model, "score", reading)
    sweep(engine, tables, context=300, patience=1e9, repeats=6)
    (at,) = tables.costs.verify
    assert tables.costs.catching_up("model", at, 300) == pytest.approx(300, rel=0.1)
    assert max(tables.costs.draft["model", at].drawn().line[1:9]) < 30


def test_the_first_reading_of_a_process_is_not_what_reading_costs(monkeypatch):
    """Lookup reads each text anew: of many readings the first, whose code is cold, does not count for more than another."""
    engine, tables = toys()
    clock, readings, lookup = ticking(engine), [], engine.drafters["lookup"]
    extend = lookup.extend

    def reading(seqs, draft, frontier, *how, **more):
        if seqs[0].produced and not seqs[0].slots["lookup"].index.text:
            readings.append(seqs[0])
            clock[0] += 50.0 if len(readings) == 1 else 0.5
        return extend(seqs, draft, frontier, *how, **more)

    monkeypatch.setattr(lookup, "extend", reading)
    sweep(engine, tables, context=192, patience=1e9, repeats=4)
    (at,) = tables.costs.verify
    assert len(readings) == 4 and all(0.2 < tables.costs.catching_up("lookup", at, n) < 0.8 for n in (200, 300)), (
        "neither for short nor for long texts"
    )


def test_steps_that_verify_are_timed_after_plain_ones(monkeypatch):
    """As in texts; and where one repetition took all the time, after each other rather than not at all."""
    seen, add = [], profiler.Found.add
    monkeypatch.setattr(profiler.Found, "add", lambda self, record, rows: seen.append(record) or add(self, record, rows))
    for repeats in (3, 1):
        seen.clear()
        engine, tables = toys()
        sweep(engine, tables, patience=1e9, repeats=repeats)
        (curve,) = tables.costs.verify.values()
        assert set(NODES) <= set(curve.seen) and curve.seen[16][0] == max(repeats - 1, 1)
        wide = [i for i, r in enumerate(seen) if max(r.drafted) and profiler.FILLER in r.levels]
        before = [sum(any(r.drafted) for r in seen[i - BETWEEN : i]) for i in wide]
        assert before[len(NODES) - 1 :] == [0] * (len(NODES) - 1) * (repeats - 1) and sum(before[: len(NODES) - 1]) > 0
        drafts = [i for i, r in enumerate(seen) if r.levels.get("model")]
        asked = [i for n, i in enumerate(drafts) if n % (len(profiler.LEVELS) + 4) < len(profiler.LEVELS) + 2]
        assert not any(seen[i - 1].levels for i in asked), "a draft that all came true leaves two tokens to read"


def test_a_sweep_out_of_time_still_measures_plain_steps():
    engine, tables = toys()
    taken = sweep(engine, tables, context=100, patience=0.0, repeats=1)
    assert len(NODES) // 2 < taken < WARM + len(NODES) and 0 in tables.costs.verify[situation("", 1, 100, False)].seen


@pytest.mark.parametrize(("rows", "sampled"), [(2, False), (1, True), (3, True)])
def test_a_sweep_of_rows_or_of_sampled_text_is_filed_as_such(rows, sampled):
    engine, tables = toys()
    sweep(engine, tables, context=60, rows=rows, sampled=sampled, patience=1e9, repeats=1)
    assert list(tables.costs.verify) == [situation("", rows, 60, sampled)]


def test_a_sweep_leaves_nothing_behind_and_later_texts_are_plains():
    engine, tables = toys()
    before, requests = parts(engine), [request([1, 2, 3, 1, 2], f"r{n}", max_tokens=30, seed=n) for n in range(4)]
    want = plain(ToyModel(12, 5), requests)
    for rows in (1, 3):
        sweep(engine, tables, context=80, rows=rows, patience=1e9, repeats=1)
        assert parts(engine) == before and at_rest(engine)
        seqs = run(engine, requests)
        assert [s.generated for s in seqs] == want and all(set(r.levels) <= {"model"} for s in seqs for r in s.records)


@pytest.mark.parametrize("late", [0, 1, 20])
def test_a_step_that_raises_in_a_sweep_leaves_everything_as_it_was(monkeypatch, late):
    engine, tables = toys()
    before, score, calls = parts(engine), engine.target.score, itertools.count()

    def fail(*args):
        if next(calls) == late:
            raise RuntimeError("out of memory")
        return score(*args)

    monkeypatch.setattr(engine.target, "score", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        sweep(engine, tables, context=80, rows=2, patience=1e9, repeats=1)
    assert parts(engine) == before and at_rest(engine) and not tables.costs.verify
    assert run(engine, [request([1, 2, 3])])[0].generated == plain(ToyModel(12, 5), [request([1, 2, 3])])[0]


@pytest.mark.parametrize("started", [False, True])
def test_a_sweep_is_refused_while_requests_run_or_wait(started):
    engine, tables = toys()
    before, seq = parts(engine), engine.submit(request([1, 2, 3]))
    if started:
        engine.step()
    with pytest.raises(OutriderError, match="while requests run"):
        sweep(engine, tables, patience=1e9)
    assert parts(engine) == before and not tables.costs.verify and seq.finish_reason is None
    assert run(engine, []) == []
    engine.cancel(seq)
    assert sweep(engine, tables, context=60, patience=1e9, repeats=1) > 0


def test_a_short_context_ends_a_sweep_and_not_the_program():
    engine = Engine(ToyModel(12, 5, context=90), {"lookup": Lookup()}, fixed(Plan()), 1)
    tables = Tables(engine.bits, Costs({}))
    assert sweep(engine, tables, context=45, patience=1e9) > 0
    assert tables.costs.verify and at_rest(engine)
