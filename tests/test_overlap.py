"""Drafting while the target verifies: what it saves, by the formula and on a simulated clock; where it is chosen; that it is never
run, for no step uses a second device yet."""

import random
from statistics import mean, stdev

import pytest
from programs import written

from outrider.compiler.jit import Jit
from outrider.compiler.opt import opt
from outrider.compiler.pipeline import BACK, FRONT
from outrider.core.errors import OutriderError
from outrider.core.types import Plan
from outrider.ir.text import parse, show
from outrider.measure.cost import overlapped

STEPS, MARGIN = 20_000, 0.05


@pytest.mark.parametrize(
    ("alpha", "gamma", "draft", "verify", "sync", "own", "step"),
    [
        (1.0, 4, 0.4, 1.0, 0.0, 0.0, 1.0),  # all of the drafting is hidden
        (1.0, 4, 3.0, 1.0, 0.0, 0.0, 3.0),  # all of the verification
        (1.0, 4, 0.4, 1.0, 0.1, 0.0, 1.1),
        (0.0, 4, 0.4, 1.0, 0.1, 0.0, 1.5),  # a miss costs nothing but meeting
        (0.5, 1, 0.4, 1.0, 0.0, 0.0, 1.3),  # two tokens are right one time in four
        (0.5, 0, 0.4, 1.0, 0.0, 0.0, 1.2),
        (0.8, 2, 2.0, 1.0, 0.05, 0.0, 3.05 - 0.512),
        (1.0, 4, 0.4, 1.0, 0.0, 0.1, 1.0),  # its own next token fits before the verification ends
        (1.0, 4, 0.4, 0.5, 0.0, 0.2, 0.6),  # or takes of the time that is hidden
        (1.0, 4, 0.4, 0.5, 0.0, 0.7, 0.9),  # or all of it
    ],
)
def test_what_a_step_is_expected_to_take(alpha: float, gamma: int, draft: float, verify: float, sync: float, own: float, step: float) -> None:
    assert overlapped(alpha, gamma, draft=draft, verify=verify, sync=sync, own=own) == pytest.approx(step)


# --- a simulated clock ---


def simulated(rng: random.Random, alpha: float, gamma: int, *, draft: float, verify: float, sync: float, own: float) -> list[float]:
    """What each of many steps takes on two devices, from verification to verification. As the target begins one, the drafter begins
    its own next token, then the next draft; it is stopped when a guess, or that token, was wrong."""
    took, start = [], draft
    for _ in range(STEPS):
        verified = start + verify
        right = all(rng.random() < alpha for _ in range(gamma + 1))
        anew, gone_on = verified + draft, max(verified, start + own + draft)
        then = sync + (min(anew, gone_on) if right else anew)
        took.append(then - start)
        start = then
    return took


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("alpha", [0.3, 0.8, 0.95])
@pytest.mark.parametrize(("draft", "verify", "own"), [(0.4, 1.0, 0.0), (0.4, 1.0, 0.1), (2.0, 1.0, 0.0), (2.0, 1.0, 0.5), (0.4, 0.3, 0.1)])
def test_the_formula_is_the_mean_of_a_simulated_clock(draft: float, verify: float, own: float, alpha: float, seed: int) -> None:
    how = {"draft": draft, "verify": verify, "sync": 0.02, "own": own}
    took = simulated(random.Random(seed), alpha, 4, **how)
    assert mean(took) == pytest.approx(overlapped(alpha, 4, **how), abs=4 * stdev(took) / STEPS**0.5 + 1e-9)


# --- the choice ---

FLAT = [1 + 0.01 * n for n in range(17)]  # by nodes verified, in plain steps
STEEP = [1.0 + n for n in range(17)]
CHEAP, DEAR = [0.1 * n for n in range(17)], [0.4 * n for n in range(17)]  # by levels drafted
WORLDS = {
    "flat": (FLAT, CHEAP, 0.9, 4, 0.02, True),
    "steep": (STEEP, CHEAP, 0.9, 4, 0.02, False),  # what is hidden is a small share of a step
    "low acceptance": (FLAT, CHEAP, 0.4, 4, 0.02, False),
    "deep": (FLAT, CHEAP, 0.8, 12, 0.02, False),  # thirteen are hardly ever all right
    "as deep, and nearly sure": (FLAT, CHEAP, 0.97, 12, 0.02, True),
    "dear": (FLAT, DEAR, 0.9, 4, 0.02, True),
    "slow to meet": (FLAT, CHEAP, 0.9, 4, 0.3, False),
}
PROGRAM = """outrider.program @overlap {
  %text = outrider.context
  %draft = outrider.propose "model" on %text depth ? width ? : point
  %scores = outrider.score %draft on %text by "target"
  %outcome = outrider.accept %draft, %scores by "coupled"
  outrider.commit %outcome
}
"""


def scheduled(words: str, text: str = PROGRAM, depth: int = 4) -> str:
    return opt(text, "overlap", f'specialize{{plan="model:{depth}"}},schedule{{{words}}}')


@pytest.mark.parametrize("world", WORLDS)
def test_it_is_chosen_where_a_simulated_clock_gains_by_it(world: str) -> None:
    """From tables of costs, flat and steep."""
    verify, drafting, alpha, depth, sync, pays = WORLDS[world]
    v, d = verify[depth], drafting[depth]
    took = mean(simulated(random.Random(world), alpha, depth, draft=d, verify=v, sync=sync, own=d / depth))
    assert (took < (1 - MARGIN) * (d + v)) == pays
    words = f'costs="target:{v:.2f} model:{d:.2f}" devices="model:cuda-1" acceptance="model:{alpha}" sync={sync} margin={MARGIN}'
    assert (": point overlapped\n" in scheduled(words, depth=depth)) == pays


GOOD = 'costs="target:1 model:0.4" acceptance="model:0.9" devices="DEVICES"'


@pytest.mark.parametrize(
    ("devices", "chosen"),
    [("model:cuda-1", True), ("target:cuda-0 model:cuda-1", True), ("", False), ("target:cuda-0 model:cuda-0", False), ("weak:cuda-1", False)],
)
def test_only_who_has_a_device_of_its_own(devices: str, chosen: bool) -> None:
    assert ("overlapped" in scheduled(GOOD.replace("DEVICES", devices))) == chosen


def test_two_on_one_device_are_not_overlapped_nor_an_early_exit() -> None:
    both = PROGRAM.replace("  %draft", '  %w = outrider.propose "weak" on %text depth 4 width 1 : point\n  %m', 1)
    both = both.replace("  %scores", "  %draft = outrider.union %w, %m\n  %scores", 1)
    words = 'costs="target:1 model:0.4 weak:0.4" acceptance="model:0.9 weak:0.9"'
    for second, marks in (("cuda-2", 2), ("cuda-1", 0)):
        where = f'devices="model:cuda-1 weak:{second}"'
        assert opt(both, "both", f'specialize{{plan="weak:4 model:4"}},schedule{{{words} {where}}}').count("overlapped") == marks
    exits = GOOD.replace("DEVICES", "model:cuda-1").replace("model", "early-exit:2")
    assert "overlapped" not in opt(PROGRAM.replace("model", "early-exit:2"), "exit", f'specialize{{plan="early-exit:2:4"}},schedule{{{exits}}}')


AFTER = '  %more = outrider.propose "lookup" after %draft depth 2 width 1 : point\n  %scores'


def test_only_a_chain_from_which_the_drafter_itself_goes_on() -> None:
    words = GOOD.replace("DEVICES", "model:cuda-1")
    assert "overlapped" in scheduled(words)
    below = PROGRAM.replace("  %scores", AFTER, 1).replace("score %draft", "score %more").replace("accept %draft", "accept %more")
    assert "overlapped" not in opt(below, "below", f'specialize{{plan="model:4 lookup:2"}},schedule{{{words}}}')
    assert "overlapped" not in scheduled(words, PROGRAM.replace("width ?", "width 2"))
    assert "overlapped" not in scheduled(words + ' trees="model:0.6,0.3" nodes=5')
    assert "overlapped" not in opt(PROGRAM, "holes", f"schedule{{{words}}}"), "nobody knows yet how far it guesses"


MARKED = PROGRAM.replace("depth ? width ? : point", 'depth 4 width 1 device "cuda-1" : point overlapped')


def test_a_mark_is_decided_anew_or_stays() -> None:
    """Other drafters grow beside a draft that is overlapped, it never beside them."""
    words = GOOD.replace("DEVICES", "model:cuda-1")
    assert "overlapped" not in opt(MARKED, "marked", f"schedule{{{words.replace('0.9', '0.2')}}}")
    assert opt(MARKED, "marked", f"schedule{{{words}}}") == MARKED
    union = MARKED.replace("  %draft", '  %l = outrider.propose "lookup" on %text depth 2 width 1 : point\n  %m', 1)
    union = union.replace("  %scores", "  %draft = outrider.union %l, %m\n  %scores", 1)
    merged = opt(union, "union", 'merge-tries,schedule{costs="lookup:0.01 model:0.4"}')
    assert "overlapped" in merged and 'propose "lookup" on %text beside %m' in merged


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('device "cuda-1" ', "", "shares the target's device"),
        ("width 1", "width 2", "drafts no chain"),
        ("depth 4 width 1", 'depth 4 width 1 shape "-1 -1"', "drafts no chain"),
        ("on %text depth 4", "on %text beside %none depth 4", "waits for other guesses"),
        ("on %text depth 4", "after %none depth 4", "waits for other guesses"),
    ],
)
def test_a_mark_that_cannot_be_is_refused(old: str, new: str, sentence: str) -> None:
    text = MARKED.replace("  %draft", "  %none = outrider.empty\n  %draft", 1)
    assert "overlapped" in show(parse(text))
    with pytest.raises(OutriderError, match=f"overlap:4:3: 'model' is overlapped with verification, and {sentence}"):
        parse(text.replace(old, new), "overlap")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ('acceptance="model:1.5"', "'model:1.5' is no acceptance rate"),
        ('acceptance="model:high"', "'model:high' is not understood"),
        ('acceptance="model:0.9" devices="model:cuda-1"', "what 'target' costs is not said"),
        ('acceptance="model:0.9" devices="model:cuda-1" costs="target:1"', "what 'model' costs is not said"),
        ('acceptance="model:0.9" sync=-1', "neither can be negative"),
    ],
)
def test_what_cannot_be_weighed_is_said(words: str, sentence: str) -> None:
    with pytest.raises(OutriderError) as refused:
        scheduled(words)
    assert sentence in str(refused.value)


# --- execution ---


@pytest.mark.parametrize("hot", [None, 0])
def test_no_step_is_made_of_a_program_that_carries_the_mark(hot: int | None) -> None:
    """It is refused with what to do, and not run without the overlap."""
    with pytest.raises(OutriderError, match="no step uses a second device yet") as refused:
        written(lambda rule: parse(MARKED), lambda: Plan((("model", 4, 1),)), "greedy", hot=hot)
    assert "without 'overlapped'" in str(refused.value)
    with pytest.raises(OutriderError, match="no step uses a second device yet"):
        opt(MARKED, "marked", "lower")


@pytest.mark.parametrize("rule", ["greedy", "coupled", "exact"])
def test_the_usual_passes_never_choose_it(rule: str) -> None:
    jit = Jit([["lookup"], ["model"]], {"lookup": False, "model": True}, {"lookup": 1, "model": 2})
    assert jit.front == FRONT and jit.back == BACK
    assert "overlapped" not in show(jit.planned(rule, Plan((("lookup", 4, 1), ("model", 4, 1))), BACK))
