"""A request's limits of its own speculation: their names, their checks, that they bind, and that no text hangs on them."""

import itertools

import pytest
from contracts import always
from tiny import tiny_folders

import outrider
from outrider.control.fixed import fixed
from outrider.core.config import LIMITS, limits
from outrider.core.errors import OutriderError
from outrider.core.types import Limits, Plan, Request, SamplingParams
from outrider.drafters.model import ModelDrafter
from outrider.models.toy import ToyModel
from outrider.runtime.engine import Engine

TEXTS = ["she sells sea shells on the sea shore and the shells she sells", "the quick brown fox jumps over the quick brown"]
HOW = {"max_tokens": 64, "ignore_eos": True, "logit_bias": {40: 50.0, 41: 50.0, 42: 50.0, 43: 50.0}}  # a text that comes back to what it said
SEEDED = {"temperature": 0.8, "seed": 7}
DRAWN = {"temperature": 0.8, "seed": 7, "rule": "exact"}
NAMES = {
    "most": ("most", 3), "speculative.n_max": ("most", 3), "num_draft_tokens": ("most", 3), "num_speculative_tokens": ("most", 3),
    "num_assistant_tokens": ("most", 3), "prompt_lookup_num_tokens": ("most", 3), "least": ("least", 2), "speculative.n_min": ("least", 2),
    "floor": ("floor", 0.5), "speculative.p_min": ("floor", 0.5), "assistant_confidence_threshold": ("floor", 0.5),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders(tmp_path_factory.mktemp("speculation"))


def pair(folders, drafters=("lookup", "model"), **settings):
    """On a clock that ticks once a look, a level of the draft model is much cheaper than a step."""
    specs = [f"model:{folders['draft']}" if name == "model" else name for name in drafters]
    runtime = outrider.load(folders["target"], specs, **{"compile": "off", "profile": "off"} | settings)
    runtime.engine.now = itertools.count().__next__
    if runtime.keeper:
        runtime.keeper.tables.costs.assumed["model"] = 0.05
    return runtime


@pytest.fixture(scope="module")
def rt(folders):
    return pair(folders)


def spans(found) -> list[int]:
    return found.stats["per_step_drafted"]


@pytest.mark.parametrize("asked", [{}, {"speculation": "auto"}, {"speculation": {"most": None, "least": 0}}], ids=str)
def test_code_takes_for_granted_that_nothing_is_asked_where_it_is_not(folders, asked):
    """In machine code, too, where `==` of two dataclasses is `is`."""
    runtime = pair(folders, depth=3)
    runtime.generate(TEXTS[0], max_tokens=20, **asked)
    assert {facts.free for *_, facts in runtime.engine.jit.known} == {True}
    runtime.generate(TEXTS[0], max_tokens=20, speculation={"most": 2})
    assert {facts.free for *_, facts in runtime.engine.jit.known} == {True, False}


# --- names and checks


def test_every_known_name_is_tested():
    assert set(NAMES) == set(LIMITS)


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_by_any_name_as_a_keyword_or_in_the_table(rt, name):
    ours, value = NAMES[name]
    want = Limits(**{ours: value})
    assert limits({name: value}) == want
    assert rt.request([5], **{name: value}).limits == want
    asked = rt.request([5], speculation={name: value, "drafters": ["lookup"]})
    assert asked.limits == want and asked.drafters == {"lookup"}


def test_what_every_step_asks_for_is_there(rt):
    """To ask for an attribute that is not there takes microseconds; and an empty plan that is another object each time is looked up anew."""
    for controller in (rt.engine.controller, fixed(Plan())):
        assert hasattr(controller, "asks") and hasattr(controller, "looking")
    assert all(hasattr(drafter, "saved") for drafter in rt.engine.drafters.values())
    seq = rt.engine.submit(rt.request([1, 2, 3], max_tokens=8, speculation="off"))
    while seq.finish_reason is None:
        rt.engine.step()
    assert len({id(r.plan) for r in seq.records}) == 1 and rt.engine.jit.last[1] is seq.records[0].plan


def test_without_limits_there_are_none(rt):
    assert [rt.request([5], **{k: v}).limits for k, v in (("seed", 1), ("speculation", {}), ("speculation", "auto"))] == [Limits()] * 3
    assert rt.request([5], speculation={"most": 2}).drafters is None
    assert rt.request([5], speculation={"drafters": "off", "most": 2}).drafters == frozenset()
    assert rt.request([5], speculation="model", most=2).limits == Limits(most=2)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"speculation": {"mots": 3}}, ["unknown speculation setting 'mots'", "'most'"]),
        ({"speculation": {"draftors": []}}, ["'draftors'", "'drafters'"]),
        ({"speculation": {"num_draft_token": 3}}, ["'num_draft_tokens'"]),
        ({"speculation": {"speculative.n_maxx": 3}}, ["'speculative.n_max'"]),
        ({"num_draft_token": 3}, ["'num_draft_tokens'"]),
        ({"most": -1}, ["most=-1"]), ({"most": 2.5}, ["most=2.5", "whole"]), ({"most": True}, ["most=True"]), ({"most": "3"}, ["most='3'"]),
        ({"num_draft_tokens": -2}, ["most=-2"]), ({"least": -1}, ["least=-1"]), ({"least": None}, ["least=None"]), ({"least": 1.0}, ["least=1.0"]),
        ({"floor": 1.5}, ["floor=1.5"]), ({"floor": -0.1}, ["floor=-0.1"]), ({"floor": float("nan")}, ["floor=nan"]), ({"floor": None}, ["floor=None"]),
        ({"floor": True}, ["floor=True"]), ({"least": 3, "most": 2}, ["least=3", "most=2"]),
        ({"most": 2, "num_draft_tokens": 3}, ["num_draft_tokens=3", "one of the two"]),
        ({"speculation": {"most": 2, "speculative.n_max": 3}}, ["speculative.n_max=3"]),
        ({"most": 2, "speculation": {"most": 3}}, ["most=3", "one of the two"]),
        ({"num_draft_tokens": 2, "speculation": {"most": 3}}, ["most=3", "one of the two"]),
        ({"speculation": 5}, ["speculation=5", "auto, off"]), ({"speculation": ["lookup", 5]}, ["no drafter '5'"]),
        ({"speculation": {"drafters": 5}}, ["speculation=5"]), ({"speculation": {"drafters": ["mode"]}}, ["'mode'", "model"]),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)  # fmt: skip
def test_what_cannot_be_is_refused_and_the_runtime_goes_on(rt, knobs, words):
    with pytest.raises(OutriderError) as refused:
        rt.generate(TEXTS[0], max_tokens=4, **knobs)
    assert all(word in str(refused.value) for word in words), str(refused.value)
    assert len(rt.generate(TEXTS[0], max_tokens=3, ignore_eos=True).tokens) == 3


def test_two_names_that_say_the_same_are_no_contradiction(rt):
    assert rt.request([5], most=2, num_draft_tokens=2, speculation={"most": 2, "speculative.n_max": 2}).limits == Limits(most=2)


# --- what they do


@pytest.mark.parametrize("most", always(1, [2, 0, 1, 5]))
@pytest.mark.parametrize("way", [{}, SEEDED, DRAWN], ids=["greedy", "seeded", "drawn"])
@pytest.mark.parametrize(
    "plan", always(1, [Plan((("lookup", 8, 1), ("model", 8, 1))), Plan((("model", 3, 2), ("lookup", 8, 1)))]), ids=["chains", "trees"]
)
def test_most_caps_what_all_drafters_together_draft_in_a_step(folders, plan, way, most):
    runtime = pair(folders, depth=8)
    runtime.engine.controller = fixed(plan)
    free = spans(runtime.generate(TEXTS[0], **HOW, **way))
    capped = runtime.generate(TEXTS[0], **HOW, **way, most=most)
    assert max(free) > 8 and max(spans(capped)) == most
    if way is not DRAWN:
        assert capped.tokens == runtime.generate(TEXTS[0], **HOW, **way, speculation="off").tokens


def test_most_is_each_requests_own(folders):
    runtime = pair(folders, depth=8)
    asked = [(None, 0), (2, 0), (0, 0)]
    prompt = runtime.tokenizer(TEXTS[0])["input_ids"]
    seqs = [runtime.engine.submit(runtime.request(prompt, speculation={"most": most}, **HOW)) for most, _ in asked]
    while any(s.finish_reason is None for s in seqs):
        runtime.engine.step()
    drafted = [max(r.drafted[r.requests.index(s.request.id)] for r in s.records) for s in seqs]
    assert drafted[0] > 2 and drafted[1:] == [2, 0]
    assert seqs[0].generated == seqs[1].generated == seqs[2].generated


@pytest.mark.parametrize("drafters", [("lookup", "model"), *(pytest.param((n,), marks=pytest.mark.slow) for n in ("lookup", "model"))], ids="+".join)
def test_the_scheduler_keeps_within_limits_and_the_texts_are_plains(folders, drafters):
    runtime, asked = pair(folders, drafters), {"free": {}, "most": {"most": 2}, "least": {"least": 5}}
    for way in ({}, SEEDED):
        want = [runtime.generate(text, **HOW, **way, speculation="off").tokens for text in TEXTS]
        found = {name: runtime.generate(TEXTS, **HOW, **way, **limit) for name, limit in asked.items()}
        drafted = {name: [n for out in outs for n in spans(out) if n] for name, outs in found.items()}
        assert max(drafted["free"]) > 5 and min(drafted["free"]) < 5
        assert max(drafted["most"]) == 2
        assert min(drafted["least"]) >= 5, "and what is enough is verified"
        assert all([out.tokens for out in outs] == want for outs in found.values())


def test_a_request_without_drafts_does_not_stop_those_after_it(folders):
    runtime = pair(folders, ("model",))
    runtime.generate(TEXTS[0], **HOW)
    for text in TEXTS:
        assert not any(spans(runtime.generate(text, **HOW, speculation="off")))
        assert sum(n > 0 for n in spans(runtime.generate(text, **HOW))) > 5
        both = [runtime.engine.submit(runtime.request(runtime.tokenizer(text)["input_ids"], speculation=wish, **HOW)) for wish in ("off", "auto")]
        while any(s.finish_reason is None for s in both):
            runtime.engine.step()
        assert both[0].generated == both[1].generated and "model" in both[1].origins and "model" not in both[0].origins


def test_a_draft_model_that_costs_next_to_nothing_goes_deeper_than_one_token(folders):
    assert max(spans(pair(folders, ("model",)).generate(TEXTS[0], **HOW))) > 3


@pytest.mark.slow
def test_a_new_situation_costs_few_plain_steps_however_long_the_program_runs(folders):
    runtime = pair(folders, ("model",))
    plains = runtime.keeper.tables.costs.plains
    while runtime.engine.controller.steps < 300:
        runtime.generate(TEXTS[0], **HOW)
    plains.update(dict.fromkeys(plains, 1))  # as if a plain step had been seen once
    assert 0 < runtime.generate(TEXTS[0], **HOW).stats["reasons"]["probe:plain"] <= 8


def test_a_step_says_that_too_little_was_drafted(folders):
    runtime = pair(folders, ("model",))
    out = runtime.generate(TEXTS[0], **HOW, least=40)
    assert out.stats["drafted"] == 0 and out.stats["reasons"]["off:least"] > 0


@pytest.mark.parametrize("floor", [0.0, 0.3, 1.0])
def test_a_guess_below_the_floor_ends_a_draft(folders, floor):
    runtime = pair(folders, ("model",))
    prompt = runtime.tokenizer(TEXTS[0])["input_ids"]
    seq = runtime.engine.submit(runtime.request(prompt, speculation={"floor": floor}, **HOW))
    while seq.finish_reason is None:
        runtime.engine.step()
    drafts = [r.draft for r in seq.records if r.draft is not None and len(r.draft)]
    assert all(d.score[p] >= floor for d in drafts for p in d.parent if p >= 0)
    assert max(max(d.depth) for d in drafts) > 1 if floor < 1 else max(max(d.depth) for d in drafts) == 1
    assert seq.generated == runtime.generate(TEXTS[0], **HOW, speculation="off").tokens


@pytest.mark.parametrize("asked", [Limits(least=5), Limits(floor=0.99)], ids=["least", "floor"])
@pytest.mark.parametrize("rule", [None, "coupled", "exact"])
def test_what_a_request_asks_for_hangs_on_no_other(rule, asked):
    """Beside one whose guesses are drawn, of which none may be left out, as alone."""
    target, draft = ToyModel(24, 5, rows=2), ToyModel(24, 5, blend=(6, 0.2), rows=2, name="draft")
    engine = Engine(target, {"model": ModelDrafter(draft)}, fixed(Plan((("model", 4, 1),))), 2)
    seq = engine.submit(Request("a", (1, 2, 3), SamplingParams(max_tokens=30), 7, "coupled", limits=asked))
    if rule:
        engine.submit(Request("b", (4, 5), SamplingParams(max_tokens=200, temperature=1.0), 3, rule, limits=asked))
    while seq.finish_reason is None:
        engine.step()
    for record in seq.records:
        own = [n for n in record.kept if record.draft.row[n] == record.requests.index("a")]
        assert not own or len(own) >= asked.least
        assert all(record.draft.score[n] >= asked.floor for n in own)
        if rule == "exact" and "b" in record.requests and record.draft is not None:
            other = [n for n, row in enumerate(record.draft.row) if row == record.requests.index("b")]
            assert set(other) <= set(record.kept), "nothing drawn is left out"
        if not record.nodes():
            assert record.reason in ("off:least", "off:floor") or not record.draft


@pytest.mark.parametrize("drafters", [("lookup",), ("model",), ("lookup", "model")], ids="+".join)
def test_least_and_floor_act_under_a_fixed_plan_too(folders, drafters):
    """What a request says of its drafts holds whoever makes the plan; guesses below the floor are not verified."""
    runtime = pair(folders, drafters, depth=5)
    ask = {**HOW, "speculation": list(drafters)}
    want = runtime.generate(TEXTS[0], **HOW, speculation="off").tokens
    free = spans(runtime.generate(TEXTS[0], **ask))
    assert any(0 < n < 5 for n in free) or any(n >= 5 for n in free)
    few = runtime.generate(TEXTS[0], **ask, least=4)
    assert few.tokens == want and all(n == 0 or n >= 4 for n in spans(few))
    none = runtime.generate(TEXTS[0], **ask, least=60)
    assert none.tokens == want and not any(spans(none)) and none.stats["reasons"]["off:least"] > 0
    runtime.engine.ring.clear()
    sure = runtime.generate(TEXTS[0], **ask, floor=0.7)
    assert sure.tokens == want and sum(spans(sure)) < sum(free)
    for record in runtime.engine.ring:
        assert all(record.draft.score[n] >= 0.7 for n in record.kept)
