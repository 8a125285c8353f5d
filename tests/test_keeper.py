"""Keepers: what a process learned is where the next begins, and nothing is measured while somebody waits."""

import json
import logging

import pytest
from contracts import always
from test_profiler import HOW, TEXT, at_rest, pair, parts
from tiny import tiny_folders

from outrider.core.errors import OutriderError
from outrider.measure import profile
from outrider.measure.cost import situation
from outrider.runtime import profiler
from outrider.runtime.profiler import NODES, SWEEPS, sweep


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders(tmp_path_factory.mktemp("keeper"))


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


def test_whether_a_profile_was_written_is_said(folders, tmp_path, caplog):
    (in_the_way := tmp_path / "file").write_text("")
    assert pair(folders, profile=tmp_path / "p.json").keeper.save() and not pair(folders, profile="off").keeper.save()
    keeper = pair(folders, profile=tmp_path / "q.json").keeper
    keeper.file = in_the_way / "q.json"
    assert not keeper.save() and "q.json was not written" in caplog.text


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


def curve(start: float = 1e-3, spread: float = 1.5, **cells: list[float]) -> dict:
    return {"costs": {"verify": {"- rows 1 context 512 greedy": {"start": start, "slope": 0.0, "spread": spread, "seen": cells}}}}


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
            curve(spread=0.0, **{"0": [1, 1e-3]}),
            curve(start=-1.0, **{"0": [1, 1e-3]}),
            curve(**{"0": [1, 1e308]}),
            {"drafts": [1]},
            {"past": 3},
            {"past": {"looks": [4]}},
            {"past": {"requests": [4, None]}},
            {"past": {"looks": [-4, 0.5]}},
            {"past": {"looks": [5, -1e308], "requests": [5, 0.0]}},
            {"hedge": {"weights": {"lookup": [5, 800.0]}}},
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
