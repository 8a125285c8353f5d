"""Law: whatever was drafted, and however, the text of the `exact` rule has the distribution of plain decoding.

Proved by enumeration, to 1e-9 in total variation: for the rule alone on hand-made drafts, and for the engine over
consecutive steps with real drafters and every processor at every position of a block; place by place on the host, and
vectorised, as where logits lie on a device.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from contracts import always
from enumeration import Enumerator, Law, Next, OnHost, Table, Text, completed, distance, law, plain

from outrider.control.fixed import fixed
from outrider.core import sampling as sampling_module
from outrider.core import tree
from outrider.core.noise import DRAFT
from outrider.core.types import DISTINCT, POINT, SAMPLED, Draft, Plan, Request, SamplingParams
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.runtime import engine as engine_module
from outrider.runtime.engine import Engine
from outrider.verify.exact import MultiRound

Levels = list[list[tuple[int, int]]]  # per depth: (kind, width) of the siblings below every place, in array order
WARM = SamplingParams(temperature=1.0)
EXACT = {"host": OnHost("exact"), "device": MultiRound()}


@pytest.fixture(autouse=True, params=EXACT)
def hand(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where verdicts are made."""
    monkeypatch.setattr(sampling_module, "HOST", ("cpu",) if request.param == "host" else ())
    monkeypatch.setattr(sampling_module, "FEW", 0)
    return request.param


# --- the rule alone, on drafts made here ---


def siblings(kind: int, width: int, text: Text, seen: list[int], q: list[float], first: int, noise: Enumerator) -> list[int]:
    """Tokens to try below a place: draws with or without replacement, or points, chosen with an eye on what is there."""
    if kind == POINT:
        return sorted(range(len(q)), key=lambda t: (t in seen, (t + sum(text) + len(text)) % len(q)))[:width]
    tokens: list[int] = []
    for i in range(width):
        left = [0.0 if kind == DISTINCT and t in tokens else w for t, w in enumerate(q)]
        if any(left):
            tokens += noise.draw(torch.tensor([left], dtype=torch.float64), np.array([0]), DRAFT, np.array([first + i])).tolist()
    return tokens


def propose(levels: Levels, q: Next, noise: Enumerator, goes_on: Callable[[Text], bool]) -> tuple[Draft, list[Text]]:
    """A draft of one row, and the text at every place of it. `goes_on(text)`: does the place get children?"""
    draft, texts, frontier = Draft(rows=1), [()], [-1]
    for level in levels:
        start = len(draft)
        for place in (f for f in frontier if goes_on(texts[f + 1])):
            text = texts[place + 1]
            for kind, width in level:
                seen = [t for t, p in zip(draft.token, draft.parent, strict=True) if p == place]
                tokens = siblings(kind, width, text, seen, q(text), len(draft), noise)
                how: dict[str, Any] = (
                    {} if kind == POINT else {"q": torch.tensor([q(text)], dtype=torch.float64), "q_row": np.zeros(len(tokens), int)}
                )
                size = len(draft)
                draft = tree.grow(draft, np.full(len(tokens), place), np.array(tokens), 1, kind, **how)
                texts += [(*text, t) for t in draft.token[size:]]
        frontier = list(range(start, len(draft)))
    return draft, texts


def _exact() -> OnHost | MultiRound:
    return EXACT["host" if sampling_module.HOST else "device"]


def rule_law(levels: Levels, p: Next, q: Next, goes_on: Callable[[Text], bool] = lambda text: True) -> Law:
    def run(noise: Enumerator) -> Text:
        draft, texts = propose(levels, q, noise, goes_on)
        logp = torch.tensor([p(t) for t in texts], dtype=torch.float64).log()
        outcome = _exact().accept(draft, logp, noise)
        return (*draft.text(outcome.paths[0]), outcome.bonus[0])

    return law(run)


def error(texts: Law, p: Next, length: int) -> float:
    """How far the texts, carried on by p, are from p's own."""
    return distance(completed(texts, p, length), completed({(): 1.0}, p, length))


def pair(vocab: int, seed: int, blend: float = 0.5) -> tuple[Next, Next]:
    """A target's and a drafter's laws, which agree more or less."""
    draft = Table(vocab, seed, order=None, scale=0.7, blend=(seed + 1, blend))
    return plain(Table(vocab, seed, order=None, scale=0.7), (), WARM), plain(draft, (), WARM)


CHAINS = [(2, 3), (3, 3), (4, 3), (6, 2)]
MIXED = (
    [(SAMPLED, 1), (POINT, 1)],
    [(POINT, 1), (SAMPLED, 1)],
    [(POINT, 1), (SAMPLED, 1), (POINT, 2)],
    [(DISTINCT, 2), (POINT, 1)],
    [(SAMPLED, 1), (DISTINCT, 2)],
)


@pytest.mark.parametrize(("vocab", "depth"), CHAINS)
@pytest.mark.parametrize("kind", [SAMPLED, POINT])
def test_chains(vocab: int, depth: int, kind: int) -> None:
    p, q = pair(vocab, seed=vocab)
    assert error(rule_law([[(kind, 1)]] * depth, p, q), p, depth + 1) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_chains_to_six_tokens_three_deep(seed: int) -> None:
    p, q = pair(6, seed)
    assert error(rule_law([[(SAMPLED, 1)]] * 3, p, q), p, 4) < 1e-9


@pytest.mark.parametrize("kind", [SAMPLED, DISTINCT, POINT])
@pytest.mark.parametrize(("vocab", "widths"), [(4, (2,)), (4, (3,)), (3, (2, 1)), (3, (1, 2)), (2, (2, 2))])
def test_trees(kind: int, vocab: int, widths: tuple[int, ...]) -> None:
    """i.i.d. siblings repeat themselves; without replacement two of two tokens use q up."""
    p, q = pair(vocab, seed=7)
    assert error(rule_law([[(kind, w)] for w in widths], p, q), p, len(widths) + 1) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SAMPLED, DISTINCT, POINT])
def test_trees_of_four_tokens_two_wide_two_deep(kind: int) -> None:
    p, q = pair(4, seed=8)
    assert error(rule_law([[(kind, 2)]] * 2, p, q), p, 3) < 1e-9


@pytest.mark.parametrize("level", MIXED)
@pytest.mark.parametrize("vocab", [2, 4])
def test_mixed_siblings(level: list[tuple[int, int]], vocab: int) -> None:
    p, q = pair(vocab, seed=9)
    assert error(rule_law([level], p, q), p, 2) < 1e-9


@pytest.mark.parametrize("level", MIXED[:2])
def test_mixed_siblings_two_deep(level: list[tuple[int, int]]) -> None:
    p, q = pair(3, seed=10)
    assert error(rule_law([level, level], p, q), p, 3) < 1e-9


HARD = [
    ([0.98, 0.01, 0.01], [0.01, 0.01, 0.98]),
    ([0.7, 0.3, 0.0], [0.0, 0.2, 0.8]),
    ([0.0, 1.0, 0.0], [0.5, 0.0, 0.5]),
    ([0.5, 0.5, 0.0], [0.0, 0.0, 1.0]),
    ([1 - 2e-12, 1e-12, 1e-12], [1e-12, 1e-12, 1 - 2e-12]),
    ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),
    ([0.0, 1.0, 0.0], [0.0, 1.0, 0.0]),
]


@pytest.mark.parametrize(("p", "q"), always(5, HARD))
@pytest.mark.parametrize("level", [[(SAMPLED, 1)], [(SAMPLED, 2)], [(DISTINCT, 3)], [(POINT, 3)], [(POINT, 2), (SAMPLED, 1)]])
def test_adversarial_drafters(p: list[float], q: list[float], level: list[tuple[int, int]]) -> None:
    assert error(rule_law([level, [(SAMPLED, 1)]], lambda text: p, lambda text: q), lambda text: p, 3) < 1e-9


def test_a_drafter_that_is_the_target_is_always_accepted() -> None:
    p, _ = pair(4, seed=11)
    texts = rule_law([[(SAMPLED, 1)]] * 2, p, p)
    assert sum(w for text, w in texts.items() if len(text) < 3) < 1e-12


# --- stop, never forget ---


def test_stopping_after_a_look_at_sampled_tokens_keeps_the_law() -> None:
    p, q = pair(3, seed=12)

    def surest(text: Text) -> bool:
        return all(q(text[:i])[t] >= 0.3 for i, t in enumerate(text))

    for width in (1, 2):
        assert error(rule_law([[(SAMPLED, width)], [(SAMPLED, 1)]], p, q, surest), p, 3) < 1e-9


def test_forgetting_a_sampled_token_changes_the_law() -> None:
    """The enumerator sees bias where there is some: tokens of low q are dropped, and P(0) is 0.55, not 0.5."""
    p, q = torch.tensor([[0.5, 0.5]] * 2, dtype=torch.float64), [0.9, 0.1]

    def run(noise: Enumerator) -> Text:
        draft, _ = propose([[(SAMPLED, 1)]], lambda text: q, noise, lambda text: True)
        draft = draft if q[draft.token[0]] >= 0.5 else Draft(rows=1)
        outcome = _exact().accept(draft, p[: 1 + len(draft)].log(), noise)
        return (*draft.text(outcome.paths[0]), outcome.bonus[0])

    first = sum(w for text, w in law(run).items() if text[0] == 0)
    assert first == pytest.approx(0.55)


# --- the engine: consecutive steps, real drafters, every processor ---

PROMPT = (0, 1, 0, 1)


class Bench:
    """An engine whose noise is an enumerator, over a small target and drafters of some likeness."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, vocab: int) -> None:
        self.target = Table(vocab, 1, order=None, scale=0.7, rows=1, context=16, name="target")
        draft = Table(vocab, 1, order=None, scale=0.7, blend=(2, 0.5), rows=1, context=16, name="model")
        other = Table(vocab, 3, order=1, scale=0.7, rows=1, context=16, name="other")
        self.drafters = {"lookup": Lookup(floor=0.0), "model": ModelDrafter(draft), "other": ModelDrafter(other, "other")}
        self.patch = monkeypatch

    def law(self, plan: Plan, sampling: SamplingParams, ends: frozenset[int], steps: int) -> Law:
        engine = Engine(self.target, self.drafters, fixed(plan), rows=1)

        def run(noise: Enumerator) -> Text:
            self.patch.setattr(engine_module, "_noise", lambda seqs: noise.fresh())
            seq = engine.submit(Request("r", PROMPT, sampling, seed=0, rule="exact", ends=ends))
            for _ in range(steps):
                engine.step()
            engine.cancel(seq)
            return tuple(seq.generated)

        return law(run)

    def error(self, plan: Plan, sampling: SamplingParams, ends: frozenset[int] = frozenset(), steps: int = 2) -> float:
        p, length = plain(self.target, PROMPT, sampling, ends), sampling.max_tokens
        found = completed(self.law(plan, sampling, ends, steps), p, length, ends)
        return distance(found, completed({(): 1.0}, p, length, ends))


JOINT = {
    "chain": (3, 4, Plan((("model", 2, 1),))),
    "tree": (3, 4, Plan((("model", 1, 2),))),
    "deep tree of two tokens": (2, 4, Plan((("model", 2, 2),))),
    "lookup": (3, 4, Plan((("lookup", 2, 2),))),
    "lookup, then model": (3, 3, Plan((("lookup", 2, 1), ("model", 1, 1)))),
    "model, then lookup": (3, 3, Plan((("model", 1, 1), ("lookup", 2, 2)))),
    "lookup and a tree": (3, 3, Plan((("lookup", 1, 1), ("model", 1, 2)))),
    "two models": (3, 3, Plan((("model", 1, 1), ("other", 1, 1)))),
    "budget": (3, 3, Plan((("model", 2, 1), ("lookup", 2, 1)), budget=3)),
    "nothing": (3, 3, Plan()),
}


@pytest.mark.parametrize("case", JOINT)
def test_joint_law_of_two_steps(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    vocab, length, plan = JOINT[case]
    assert Bench(monkeypatch, vocab).error(plan, SamplingParams(temperature=1.0, max_tokens=length)) < 1e-9


LARGE = [
    (Plan((("model", 2, 2),)), 1),
    (Plan((("model", 3, 1),)), 1),
    (Plan((("lookup", 2, 2), ("model", 2, 1), ("other", 1, 1))), 1),
    (Plan((("model", 2, 1),)), 3),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "steps"), LARGE)
def test_joint_law_of_larger_drafts(monkeypatch: pytest.MonkeyPatch, plan: Plan, steps: int) -> None:
    assert Bench(monkeypatch, 3).error(plan, SamplingParams(temperature=1.0, max_tokens=4), steps=steps) < 1e-9


PROCESSORS: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"temperature": 1.5},
    {"top_k": 2},
    {"top_p": 0.7},
    {"min_p": 0.4},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 0.9},
    {"frequency_penalty": 0.7},
    {"logit_bias": ((1, 1.5), (2, -0.5))},
    {"min_tokens": 2},
    {"temperature": 0.7, "top_k": 2, "top_p": 0.9, "min_p": 0.1, "frequency_penalty": 0.4, "min_tokens": 1},
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 3.0, "logit_bias": ((1, 1.5),)},
]  # fmt: skip


@pytest.mark.parametrize("knobs", PROCESSORS, ids=str)
def test_every_processor_at_every_position_of_a_chain(monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any]) -> None:
    """The first step drafts two tokens and adds a bonus: three positions, of which each token may be the end."""
    sampling = SamplingParams(**{"temperature": 1.0, "max_tokens": 3, **knobs})
    assert Bench(monkeypatch, 3).error(Plan((("model", 2, 1),)), sampling, ends=frozenset({2})) < 1e-9


@pytest.mark.parametrize("knobs", PROCESSORS, ids=str)
def test_every_processor_in_a_tree(monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any]) -> None:
    sampling = SamplingParams(**{"temperature": 1.0, "max_tokens": 3, **knobs})
    assert Bench(monkeypatch, 3).error(Plan((("model", 1, 2), ("lookup", 2, 1))), sampling, ends=frozenset({2})) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("knobs", PROCESSORS, ids=str)
def test_every_processor_in_a_deep_tree(monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any]) -> None:
    sampling = SamplingParams(**{"temperature": 1.0, "max_tokens": 3, **knobs})
    assert Bench(monkeypatch, 3).error(Plan((("model", 2, 2),)), sampling, ends=frozenset({2}), steps=1) < 1e-9


def test_places_with_less_support_than_width_keep_every_draw_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncation leaves some places one token where two were asked for; the next level must not reuse their noise."""
    sampling = SamplingParams(temperature=1.0, top_p=0.6, max_tokens=3)
    assert Bench(monkeypatch, 3).error(Plan((("model", 2, 2),)), sampling, steps=1) < 1e-9
