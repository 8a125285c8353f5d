"""What steps gave and took is settled several steps at a time, and known nearly before."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from written import adaptive, costs, drive, linear, trace

from outrider.control.accounts import THOUGHTS, Accounts, Held
from outrider.control.controller import Adaptive
from outrider.control.guard import Ledger
from outrider.measure.cost import COLD, Costs, situation
from outrider.runtime.profiler import Found

ALLOWANCE = 0.05


def test_what_is_not_settled_yet_is_known_nearly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are settled several at a time; what may be spent meanwhile is what settling them at once would leave. A machine that goes at one pace."""
    of = trace(6, costs(linear(0.05), {"lookup": linear(0.0, 0.05)}), {"lookup": lambda t, d: 0.7 if t // 30 % 2 else 0.0}, length=3000)
    controller, rooms, late, turns = adaptive(of), list[tuple[float, float]](), Adaptive._room, itertools.cycle(range(4))

    def room(self: Adaptive, seqs: list[Any], page: Any) -> float:
        before = late(self, seqs, page)
        if next(turns) == 0:
            self._settle()
            rooms.append((before, late(self, seqs, page)))
        return before

    drive(of, controller)
    held: list[int] = []
    settle = Accounts.settle
    monkeypatch.setattr(Accounts, "settle", lambda self, *how, **more: held.append(self.thoughts) or settle(self, *how, **more))
    drive(of, controller)
    assert max(held) == THOUGHTS, "several at a time"
    monkeypatch.setattr(Adaptive, "_room", room)
    drive(of, controller)
    assert len(rooms) > 100 and all(abs(before - after) < 0.2 for before, after in rooms)


def test_what_one_request_has_earned_is_not_for_another_to_spend() -> None:
    of = trace(6, costs(linear(0.05), {"lookup": linear(0.0, 0.05)}), {"lookup": lambda t, d: 0.0}, length=60)
    (records,) = drive(of, controller := adaptive(of))
    rich, poor = ([SimpleNamespace(request=SimpleNamespace(id=name))] for name in ("rich", "poor"))
    plain = next(r for r in records if not r.levels)
    controller.accounts.held = []
    for who in (rich, poor):
        controller.accounts.hold(Held(who, replace(plain, requests=(who[0].request.id,)), None, (), True, COLD))
    controller.accounts.unsettled, controller.ledger.credit["poor"] = -30.0, 0.0
    page = controller.page
    assert controller._room(poor, page) == pytest.approx((1 + 2 * ALLOWANCE) * page.owed / (page.plain * page.spread), rel=0.01)
    assert not controller.accounts.held and controller.ledger.credit["rich"] > 0


def test_a_hold_up_that_is_not_charged_refuses_nobody() -> None:
    """A step that was thought about and verified nothing takes twenty times as long: plain decoding would have, too."""
    of = trace(6, costs(linear(0.05), {"lookup": linear(0.0, 0.05)}), {"lookup": lambda t, d: 0.05}, length=60)
    (records,) = drive(of, controller := adaptive(of))
    asked = next(r for r in records if r.levels and not any(r.drafted))
    slow = replace(asked, reading=replace(asked.reading, seconds=asked.reading.seconds + 20.0), seconds={**asked.seconds, "score": 21.0})
    seqs = [SimpleNamespace(request=SimpleNamespace(id="z"))]
    before = controller._room(seqs, page := controller.page)
    controller.accounts.hold(Held(seqs, replace(slow, requests=("z",)), controller.step, (), True, COLD))
    assert controller._room(seqs, page) == pytest.approx(before, abs=0.2)


@pytest.mark.parametrize("count", [1, 5, 30])
def test_steps_settled_together_earn_what_they_earn_one_by_one(count: int) -> None:
    """Two requests that nobody has settled before, slow steps and quick ones among theirs: each has the grant of one request and what its own tokens earned."""
    of = trace(6, costs(linear(0.05), {"lookup": linear(0.0, 0.05)}), {"lookup": lambda t, d: 0.0}, length=60)
    credits = []
    for together in (True, False):
        (records,) = drive(of, controller := adaptive(of))
        seqs = [SimpleNamespace(request=SimpleNamespace(id=name)) for name in ("y", "z")]
        for i in range(count):
            took = replace(records[-1].reading, seconds=1.0 + i % 3)
            controller.accounts.hold(
                Held(seqs, replace(records[-1], requests=("y", "z"), emitted=(1, 1 - i % 2), reading=took), None, (), True, COLD)
            )
            if not together:
                controller._settle()
        controller._settle()
        credits.append([controller.ledger.credit[name] for name in ("y", "z")])
    assert credits[0] == pytest.approx(credits[1], abs=0.3)


def test_a_first_step_that_is_held_up_makes_nobody_rich() -> None:
    """The grant is eight plain steps such as they are believed to be, not eight of the one that happened to be first."""
    of = trace(6, costs(linear(0.05), {"lookup": linear(0.0, 0.05)}), {"lookup": lambda t, d: 0.0}, length=60)
    (records,) = drive(of, controller := adaptive(of))
    seqs = [SimpleNamespace(request=SimpleNamespace(id="z"))]
    slow = replace(records[-1], requests=("z",), reading=replace(records[-1].reading, seconds=20.0), seconds={})
    controller.accounts.charge(controller.page, [], Held(seqs, slow, None, (), True, COLD))
    assert controller.ledger.credit["z"] == pytest.approx(8 + ALLOWANCE * 20, abs=0.1)


def test_a_sweep_tells_how_the_machine_holds_plain_steps_up() -> None:
    """Once, whatever sweeps follow; a profile keeps it, and speculative steps are spared as much from the first request on."""
    found, costs, at = Found(), Costs({}), situation("-", 1, 192, False)
    found.verify = {0: [1.0] * 98 + [21.0, 31.0], 4: [1.2] * 20}
    for _ in range(3):
        found.tell(costs, at)
    spread = costs.verify[at].spread
    assert costs.holdups.held == pytest.approx(52 / spread - 2, rel=0.02)
    kept = Costs({})
    kept.take(json.loads(json.dumps(costs.state())))
    share = costs.holdups.held / costs.holdups.met
    assert kept.holdups.held / kept.holdups.met == pytest.approx(share) and share > 0.1
    ledger = Ledger(holdups=kept.holdups)
    assert sum(ledger.fairly(1.0, 1.0) for _ in range(20)) == 20.0
    assert ledger.fairly(3.0, 1.0) == pytest.approx(3 - min(23 * share, 2.0)), "what twenty steps have saved up, and its own"


@pytest.mark.parametrize("cell", [[0.0, 0.1], [300.0, 1.5], [300.0, -0.1]])
def test_hold_ups_that_cannot_be_are_refused(cell: list[float]) -> None:
    with pytest.raises(ValueError, match="held up"):
        Costs({}).take({"holdups": cell})
