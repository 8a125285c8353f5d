"""What the scheduler says of itself: its figures are those of its tables and of the steps that were taken."""

import itertools
from statistics import mean

import pytest
from test_controller import FREE, told
from written import adaptive, costs, drive, linear, trace

from outrider.control.explain import candidates, text
from outrider.core.types import OFF


def test_what_was_observed_stands_beside_what_was_expected() -> None:
    """Of steps in which one drafter alone was asked: so many, and the mean of what they took; in a world that keeps to its costs the two are nearly alike."""
    of = trace(3, costs(linear(0.1), FREE | {"model": linear(0.2, 0.0)}), {"lookup": lambda t, d: 0.7, "model": lambda t, d: 0.5}, texts=3)
    controller = adaptive(of)
    records = [*itertools.chain(*drive(of, controller)), *itertools.chain(*[told(of, name) for name in ("plain", "lookup:2", "model:2")])]
    found = candidates(controller, records)["situations"]
    plans = {row["plan"]: row for row in found[0]["plans"]}
    assert len(found) == 1 and list(plans) == ["plain", *[f"{name} {depth}" for name in ("lookup", "model") for depth in (1, 2, 4, 8, 16)]]
    for name, row in plans.items():
        who, _, depth = name.partition(" ")
        took = [r.reading.seconds for r in records if r.nodes() == int(depth or 0) and list(r.levels) == ([who] if depth else [])]
        assert row["steps"] == len(took) and row["observed_ms"] == (pytest.approx(1e3 * mean(took)) if took else None)
    often = [row for row in plans.values() if row["steps"] > 10]
    assert len(often) >= 4 and all(row["observed_ms"] == pytest.approx(row["ms"], rel=0.1) for row in often)
    best = max(plans.values(), key=lambda row: row["score"])
    assert best["plan"] == found[0]["best"] != "plain"
    lines = text(candidates(controller, records) | {"reasons": {"depth:all": 7, "off:unpaid": 9}}).splitlines()
    assert [line.split("  <- best: ")[0].split()[:2] for line in lines if "<- best" in line] == [best["plan"].split()]
    assert lines[-1] == "steps: off:unpaid 9, depth:all 7"


def test_what_does_not_pay_is_not_the_best() -> None:
    """A guess that brings 2% more than plain decoding is none that is taken."""
    of = trace(3, costs(linear(0.1), {"lookup": linear(0.1, 0.0)}), {"lookup": lambda t, d: 0.2})
    controller = adaptive(of)
    controller.tables.next.cells |= {f"lookup s {k}": [1e9, 0.224] for k in range(4)} | {"lookup ?": [1e9, 0.0]}
    found = candidates(controller)["situations"][0]
    best = max(row["score"] for row in found["plans"])
    assert 1 < best < 1.03 and found["best"] == "plain" and "nothing brings 3% more" in found["why"]


def test_nothing_is_observed_where_no_step_was_taken() -> None:
    of = trace(3, costs(linear(0.1), FREE), {"lookup": lambda t, d: 0.7})
    assert all(row["steps"] == 0 and row["observed_ms"] is None for row in candidates(adaptive(of))["situations"][0]["plans"])


def test_a_plan_that_was_fixed_is_said_to_be() -> None:
    from outrider.control.fixed import fixed

    assert "fixed: plain decoding at every step" in text(candidates(fixed(OFF)) | {"reasons": {}})
