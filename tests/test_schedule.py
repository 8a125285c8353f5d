"""The scheduler's benchmark: who is the best fixed plan, and what a run of it tells."""

import json
import math
from types import SimpleNamespace

import pytest
from tiny import tiny_folder

from outrider.bench import guarantee, prompts, schedule
from outrider.bench.prompts import Prompt
from outrider.control.guard import GRANT

KINDS = {"a": "story", "b": "code"}


def times(plain: list[float], two: list[float], adaptive: list[float]) -> dict[str, dict[str, list[float]]]:
    """Seconds per token of `a` in each round; of `b` all take a second."""
    made = {schedule.PLAIN: plain, "lookup:2": two, schedule.ADAPTIVE: adaptive, schedule.AGAIN: [0.1] * len(plain)}
    return {name: {"a": each, "b": [1.0] * len(plain)} for name, each in made.items()}


def test_adaptive_is_held_against_what_was_best_in_the_other_rounds():
    """Two plans that are lucky by turns: in each round one is twice as fast as adaptive, and it is never the one that was best in the other."""
    found = schedule.beside_best(times([1.0, 4.0], [4.0, 1.0], [2.0, 2.0]), KINDS)
    assert found["story"] == {
        "plan": "plain",
        "ratio": pytest.approx(1.25),
        "apart": pytest.approx(2.0),
        "low": pytest.approx(2.0),
        "high": pytest.approx(2.0),
    }
    assert found["code"]["apart"] == found["code"]["ratio"] == pytest.approx(1.0), "a category is judged by its own prompts"


def test_the_best_fixed_plan_is_the_quickest_over_the_prompts_asked_about():
    found = schedule.beside_best(times([2.0, 2.0, 2.0], [1.0, 1.0, 9.0], [1.0, 1.0, 4.0]), KINDS)
    assert found["story"]["plan"] == "lookup:2" and found["story"]["ratio"] == pytest.approx(1.0), "by medians, and plain again is no plan"
    assert found["story"]["apart"] == pytest.approx((2.0 * 2.0 * 9 / 4) ** (1 / 3)), "of 1 and 9 seconds, and 2 and 2, plain has the lower median"
    assert (found["story"]["low"], found["story"]["high"]) == (pytest.approx(2.0), pytest.approx(2.25))
    assert found["all"]["ratio"] == pytest.approx(1.0) and found["all"]["plan"] == "lookup:2"


def test_a_single_round_says_nothing_of_others():
    found = schedule.beside_best(times([2.0], [1.0], [4.0]), KINDS)
    assert found["story"] == {"plan": "lookup:2", "ratio": pytest.approx(0.25), "apart": None, "low": None, "high": None}
    assert "| story | lookup:2 | 0.250 | - | - |" in schedule.best_lines(found)


def test_a_run_tells_of_every_contender_and_who_was_best(tmp_path, monkeypatch):
    """The whole benchmark on a tiny model and its own copy, eagerly: two prompts, two rounds."""
    monkeypatch.setattr(
        prompts,
        "readable",
        lambda rt, count: [Prompt(f"{c}-1", c, "the quick brown fox jumps over the lazy dog", None, 0.0) for c in ("story", "code")],
    )
    sweep = schedule.profiler.sweep
    monkeypatch.setattr(
        schedule.profiler, "sweep", lambda engine, tables, **how: sweep(engine, tables, patience=0.3, repeats=1, sampled=how["sampled"])
    )
    target = tiny_folder(tmp_path / "target")
    result = schedule.schedule(1, 12, 2, lambda said: None, target=str(target), draft="quantised:int8", compile="off", dtype="float32", device="cpu")
    assert "lookup+quantised:8" in result["live"] and set(result["calibration"]) == {"lookup:4", "lookup:8", "quantised:2", "quantised:8"}
    assert [schedule.guessing(draft) for draft in ("quantised:int4", "some/folder")] == ["quantised:int4", "model:some/folder"]
    assert schedule.guessing(None).startswith("model:")
    assert set(result["live"]) == set(result["rows"][0]) - {"prompt", "category"}
    assert set(result["best"]) == {"story", "code", "all"}
    assert all(row["low"] <= row["apart"] <= row["high"] for row in result["best"].values())
    for kind, row in result["best"].items():
        assert math.isclose(row["ratio"], result["live"][schedule.ADAPTIVE][kind] / result["live"][row["plan"]][kind])
        assert result["live"][row["plan"]][kind] == max(
            result["live"][name][kind] for name in result["live"] if name.endswith(("plain", ":2", ":4", ":8"))
        )
    schedule.save(result, tmp_path, "schedule", schedule.markdown(result))
    assert "| adaptive beside | best fixed plan |" in (tmp_path / "schedule.md").read_text()
    assert (tmp_path / "schedule.svg").read_text().startswith("<svg")


def test_the_guarantee_is_held_against_plain_decoding_of_the_same_minute(tmp_path, monkeypatch):
    """The whole benchmark on a tiny pair, eagerly: its three cases, and of each text what was promised."""
    target, draft = tiny_folder(tmp_path / "target"), tiny_folder(tmp_path / "draft", jitter=0.03)
    monkeypatch.setattr(guarantee, "reference", SimpleNamespace(target=lambda: target, draft=lambda: draft))
    monkeypatch.setattr(
        prompts, "load", lambda c: [Prompt(f"{c}-{i}", c, "the quick brown fox"[i:], None, float(c == "open_ended")) for i in range(3)]
    )
    sweep = guarantee.profiler.sweep
    monkeypatch.setattr(
        guarantee.profiler, "sweep", lambda engine, tables, **how: sweep(engine, tables, patience=0.3, repeats=1, sampled=how["sampled"])
    )
    result = guarantee.guarantee(1, 4, 2, lambda said: None, compile="off", dtype="float32", device="cpu")
    assert [row["case"] for row in result["rows"]] == ["random weights"] * 4 + ["20x slower"] * 4 + ["open-ended, T = 1"] * 3
    assert all(
        row["promised"] >= 1.05 + GRANT / 4 and row["same_low"] <= row["same"] <= row["same_high"] and row["ratio"] > 0 for row in result["rows"]
    )
    guarantee.save(result, tmp_path)
    assert len((tmp_path / "guarantee.md").read_text().splitlines()) == 2 + len(result["rows"])
    assert json.loads((tmp_path / "guarantee.json").read_text())["rows"] == result["rows"]


class Slept:
    """A runtime whose texts of two tokens take two steps of a second each, three to read the prompt, and five at their end."""

    def __init__(self, monkeypatch):
        self.time, self.tokenizer, self.engine = 0.0, None, self
        self.target, self.drafters, self.controller = None, {}, SimpleNamespace(ledger=SimpleNamespace(stalls=0, debts=0))
        monkeypatch.setattr(schedule.time, "perf_counter", lambda: self.time)

    def request(self, tokens, **settings):
        return settings["max_tokens"]

    def submit(self, request):
        return SimpleNamespace(finish_reason=None, records=[], produced=0)

    def advance(self, seqs):
        (seq,) = seqs
        seq.records.append(
            SimpleNamespace(reading=SimpleNamespace(seconds=1.0 if seq.records else 4.0), seconds={"prefill": 0.0 if seq.records else 3.0})
        )
        self.time += seq.records[-1].reading.seconds
        seq.produced += 1
        if seq.produced == 2:
            seq.finish_reason, self.time = "length", self.time + 5.0


def test_what_is_done_at_a_text_s_end_counts(monkeypatch):
    """What was learned is looked at there, after the last record."""
    monkeypatch.setattr(Prompt, "encode", lambda self, tokenizer: [1])
    assert schedule.Writer(Slept(monkeypatch))(Prompt("a", "story", "text", None, 0.0), 2).pace == (2 * 1.0 + 5.0) / 2


def test_rounds_in_which_a_promise_was_broken_are_counted(monkeypatch):
    """By how much at most, and the debts of this text alone."""
    ledger, pace = SimpleNamespace(stalls=4, debts=3), iter([1.0, 9.0, 1.0] * 5)
    seq = SimpleNamespace(records=[SimpleNamespace(seconds={})], produced=8)

    class Guarded:
        def __init__(self, rt, speculation="auto"):
            self.takes = speculation == "auto"

        def __call__(self, prompt, max_tokens):
            ledger.debts += self.takes
            return schedule.Written(seq, next(pace) if self.takes else 1.0)

    monkeypatch.setattr(guarantee, "Writer", Guarded)
    rt = SimpleNamespace(engine=SimpleNamespace(controller=SimpleNamespace(ledger=ledger)))
    row = guarantee._paired(lambda *_: schedule.Written(seq, 1.0), rt, None, 8, 7)
    assert (row["beyond"], row["ratio"], row["stalls"], row["debts"]) == (2, 1.0, 0, 7)
    assert row["most"] == pytest.approx(9.0 - 1.05 - GRANT / 8)
