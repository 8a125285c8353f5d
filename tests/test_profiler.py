"""Sweeps and keepers: what is measured at rest leaves nothing behind, and what a process learned is where the next begins."""

import atexit
import itertools
import json
import logging

import pytest
from contracts import always, plain, request, run
from tiny import tiny_folders

import outrider
from outrider.control.fixed import fixed
from outrider.control.tables import Tables
from outrider.core.errors import OutriderError
from outrider.core.types import Plan
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.measure import profile
from outrider.measure.cost import CALM, DEEPEST, Costs, situation
from outrider.models.toy import ToyModel
from outrider.runtime import profiler
from outrider.runtime.engine import Engine
from outrider.runtime.profiler import BETWEEN, NODES, QUIET, SWEEPS, WARM, sweep

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


# --- sweeps


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
    sweep(engine, tables, context=100, patience=1e9, repeats=2)
    assert set(tables.costs.catch_up["model"]) == {n.bit_length() for n in (CALM + QUIET + 1, 4 * 9 + 1, 100)}, "lookup wrote nine each time"


def test_a_sweep_runs_the_passes_that_texts_run(monkeypatch):
    """Where the target is compiled, early exits are not inlined: a sweep that did would time eager steps as compiled ones."""
    engine, tables = toys()
    engine.jit.front, real, ran = ("merge-tries",), Engine.step, set()
    monkeypatch.setattr(Engine, "step", lambda self: ran.add(tuple(self.jit.front)) or real(self))
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
    assert tables.costs.verify[at].seen[0][0] == 11 * (1 + BETWEEN * len(NODES) + CALM), "each repetition counts, but the one that warms up"
    assert {n: count for n, (count, _) in tables.costs.verify[at].seen.items() if n} == {n: 11 for n in NODES if n}


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
        assert set(NODES) <= set(curve.seen) and curve.seen[8][0] == max(repeats - 1, 1)
        wide = [i for i, r in enumerate(seen) if max(r.drafted) and profiler.FILLER in r.levels]
        before = [sum(any(r.drafted) for r in seen[i - BETWEEN : i]) for i in wide]
        assert before[len(NODES) - 1 :] == [0] * (len(NODES) - 1) * (repeats - 1) and sum(before[: len(NODES) - 1]) > 0


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


# --- keepers


def test_a_drafter_that_was_never_measured_is_swept_in_the_next_process(folders, tmp_path, monkeypatch):
    """A sweep that ended early, and what use told of sizes, is not all: else nobody would ever ask the draft model in short lives."""
    file, at, swept = tmp_path / "p.json", situation("eager:off", 1, profiler.CONTEXT, False), []
    monkeypatch.setattr(profiler, "PATIENCE", 1e9)
    monkeypatch.setattr(profiler, "SWEEPS", 1)
    monkeypatch.setattr(profiler, "sweep", lambda engine, tables, **how: swept.append(engine) or sweep(engine, tables, **how))
    for n in range(3):
        runtime = pair(folders, profile=file)
        runtime.generate(TEXT, speculation="off", **HOW)
        costs = runtime.keeper.tables.costs
        assert costs.draft["model", at].seen and len(costs.verify[at].seen) >= len(NODES) // 2
        if n == 0:
            costs.draft["model", at].seen.clear()
        runtime.keeper.save()
        assert len(swept) == min(n + 1, 2), "and what was measured is not measured again"


def test_an_idle_keeper_sweeps_a_few_times_and_not_while_someone_waits(folders, monkeypatch):
    monkeypatch.setattr(profiler, "PATIENCE", 1e9)
    swept = []
    monkeypatch.setattr(profiler, "sweep", lambda engine, tables, **how: swept.append(how) or sweep(engine, tables, **{**how, "repeats": 1}))
    runtime = pair(folders)
    before, seq = parts(runtime.engine), runtime.engine.submit(runtime.request([5, 6, 7], max_tokens=8))
    runtime.keeper.idle(runtime.engine)
    assert not swept
    runtime.engine.cancel(seq)
    curves, at, seen = runtime.keeper.tables.costs.verify, situation("eager:off", 1, profiler.CONTEXT, False), []
    for _ in range(SWEEPS + 2):
        runtime.keeper.idle(runtime.engine)
        seen.append(curves[at].seen[4][0])
    assert len(swept) == SWEEPS and parts(runtime.engine) == before and at_rest(runtime.engine)
    assert not runtime.engine.ring, "these are steps of no request"
    assert seen[1] < seen[2] == seen[3] == seen[4], "what one sweep finds is added to what those before found"
    assert len(curves[at].seen) >= len(NODES) // 2
    assert runtime.generate(TEXT, **HOW).tokens == runtime.generate(TEXT, speculation="off", **HOW).tokens
    assert len(swept) == SWEEPS


def test_no_sweep_where_a_profile_says_what_steps_cost(folders, monkeypatch, tmp_path):
    monkeypatch.setattr(profiler, "PATIENCE", 1e9)
    swept = []
    monkeypatch.setattr(
        profiler, "sweep", lambda engine, tables, **how: swept.append(how) or sweep(engine, tables, **{**how, "repeats": 1, "patience": 1e9})
    )
    for _ in range(2):
        runtime = pair(folders, profile=tmp_path / "p.json")
        runtime.generate(TEXT, **HOW)
        runtime.keeper.save()
        assert len(swept) == 1


def test_a_second_load_begins_where_the_first_ended(folders, tmp_path):
    file = tmp_path / "p.json"
    first = pair(folders, profile=file)
    text = first.generate(TEXT, **HOW).tokens
    first.keeper.save()
    learned = first.keeper.tables.state()
    assert learned["costs"]["verify"] and learned["predictors"]["logistic"]["weights"] and learned["drafts"] > 0
    second = pair(folders, profile=str(file))
    assert second.keeper.tables.state() == json.loads(json.dumps(learned))
    assert second.generate(TEXT, **HOW).tokens == text
    assert profile.load(file, second.keeper.mark) == json.loads(json.dumps(learned)), "what is learned now does not leak into the base"


def test_two_runtimes_add_what_they_learned(folders, tmp_path):
    file = tmp_path / "p.json"
    pairs = [pair(folders, profile=file) for _ in range(2)]
    for runtime in pairs:
        runtime.generate(TEXT, **HOW)
    for runtime in [*pairs, *pairs]:
        runtime.keeper.save()
    both, (one, other) = profile.load(file, pairs[0].keeper.mark), (r.keeper.tables.state() for r in pairs)
    assert both["drafts"] == one["drafts"] + other["drafts"]
    name = next(iter(one["costs"]["verify"]))
    seen = [x["costs"]["verify"][name]["seen"]["0"][0] for x in (one, other, both)]
    assert seen[0] + seen[1] == seen[2] > 0


@pytest.mark.parametrize(
    ("change", "keys"),
    [({"dtype": "bfloat16"}, ["dtype"]), ({"dtype": "bfloat16", "strict": True}, ["dtype", "strict"]), ({"draft": "twin"}, ["model 1"])],
    ids=str,
)
def test_the_profile_of_another_pair_is_refused_with_what_differs(folders, tmp_path, change, keys):
    file, change = tmp_path / "p.json", dict(change)
    pair(folders, profile=file).keeper.save()
    other = {**folders, "draft": folders[change.pop("draft", "draft")]}
    with pytest.raises(OutriderError, match="profile of something else") as refused:
        pair(other, profile=file, **change)
    assert [part.split(": ")[0] for part in str(refused.value).split("; ")][1:] == keys[1:]
    assert f"{keys[0]}: " in str(refused.value)


def test_what_is_learned_of_a_pair_serves_however_many_rows_there_are(folders, tmp_path):
    """Costs are kept by how many requests run together, which is no more than may: `outrider profile` has one row, and `load` four."""
    file = tmp_path / "p.json"
    one = pair(folders, profile=str(file), rows=1)
    one.generate(TEXT, **HOW)
    one.keeper.save()
    assert pair(folders, profile=str(file), rows=3).keeper.tables.state() == json.loads(json.dumps(one.keeper.tables.state()))


def test_who_learned_nothing_overwrites_nothing(folders, tmp_path):
    """A file that two have written says some things another way than a process that reads it; what a third learned since stays."""
    file = tmp_path / "p.json"
    both = [pair(folders, profile=file) for _ in range(2)]
    for n, runtime in enumerate(both):
        runtime.generate(TEXT, **HOW)
        costs = runtime.keeper.tables.costs
        costs.catch_up = {"model": {8: 0.003 * (1 + n)}}
        costs.steady = {at: seconds * (1 + n) for at, seconds in costs.steady.items()}
        runtime.keeper.save()
    third, fourth = pair(folders, profile=file), pair(folders, profile=file)
    third.keeper.tables.costs.catch_up["model"][8] = 0.03
    third.keeper.save()
    learned = profile.load(file, third.keeper.mark)
    fourth.keeper.save()
    assert profile.load(file, third.keeper.mark) == learned and learned["costs"]["catch_up"]["model @ 8"][1] > 0.01


def test_profile_off_writes_nothing_and_auto_writes_in_the_cache_folder(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    off = pair(folders, profile="off")
    off.generate(TEXT, **HOW)
    off.keeper.save()
    assert off.keeper.file is None and not list(tmp_path.rglob("*"))
    auto = pair(folders, profile="auto")
    auto.keeper.save()
    assert list(tmp_path.rglob("*.json")) == [auto.keeper.file] == [profile.place(auto.keeper.mark)]


def test_a_keeper_writes_now_and_then(folders, tmp_path, monkeypatch):
    runtime = pair(folders, profile=tmp_path / "p.json")
    runtime.generate(TEXT, **HOW)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(profiler, "EVERY", -1.0)
    runtime.generate(TEXT, **HOW)
    assert profile.load(tmp_path / "p.json", runtime.keeper.mark)["drafts"] == runtime.keeper.tables.drafts


@pytest.mark.parametrize("obstacle", ["a file where the folder should be", "another pair's profile"])
def test_a_profile_that_cannot_be_written_costs_a_warning_and_no_text(folders, tmp_path, monkeypatch, caplog, obstacle):
    monkeypatch.setattr(profiler, "EVERY", -1.0)
    runtime = pair(folders, profile=tmp_path / "down" / "p.json")
    if obstacle.startswith("a file"):
        (tmp_path / "down").write_text("in the way")
    else:
        profile.save(tmp_path / "down" / "p.json", {"dtype": "other"}, {}, {})
    with caplog.at_level(logging.WARNING, "outrider"):
        text = runtime.generate(TEXT, **HOW).tokens
    assert "was not written" in caplog.text and text == runtime.generate(TEXT, speculation="off", **HOW).tokens


def curve(**cells: list[float]) -> dict:
    return {"costs": {"verify": {"- rows 1 context 512 greedy": {"start": 1e-3, "slope": 0.0, "spread": 1.5, "seen": cells}}}}


@pytest.mark.parametrize(
    "nonsense",
    always(
        6,
        [
            {"costs": {"verify": {"no situation": 1}}},
            {"predictors": {"logistic": 3}},
            {"hedge": {"weights": {"a": 1}}},
            {"predictors": {"logistic": {"weights": {"lookup": []}, "squares": {"lookup": []}}}},
            {"next": {"lookup ?": [1]}},
            {"next": {"lookup ?": {"a": 1}}},
            {"next": {"lookup t3": [5, 9.0]}},
            {"next": {"lookup t3": [-1, 0.5]}},
            curve(**{"0": []}),
            curve(**{"0": [1, 0.0]}),
            curve(**{"0": [1, -1.0]}),
            curve(**{"-1": [1, 1e-3]}),
            {"drafts": [1]},
        ],
    ),
    ids=str,
)
def test_a_whole_profile_with_nonsense_in_it_is_set_aside(folders, tmp_path, nonsense):
    """At load, not in the middle of a text, and once: the next start finds a good one."""
    file = tmp_path / "pair.json"
    pair(folders, profile=str(file)).keeper.save()
    whole = json.loads(file.read_text())
    file.write_text(json.dumps({**whole, "data": {**whole["data"], **nonsense}}))
    runtime = pair(folders, profile=str(file))
    assert not file.exists() and len(list(tmp_path.glob("pair.json.damaged-*"))) == 1
    assert runtime.generate(TEXT, **HOW).tokens == pair(folders).generate(TEXT, **HOW).tokens


def test_a_sweep_that_fails_at_rest_loses_no_text(folders, monkeypatch, caplog):
    runtime, want = pair(folders), pair(folders).generate(TEXT, **HOW).tokens
    monkeypatch.setattr(profiler, "PATIENCE", 1.0)
    monkeypatch.setattr(profiler, "_sweep", lambda *how: 1 / 0)
    with caplog.at_level(logging.WARNING, "outrider"):
        assert runtime.generate(TEXT, **HOW).tokens == want
    assert "costs were not measured" in caplog.text and at_rest(runtime.engine)
