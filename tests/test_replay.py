"""Law: a replay is what a live run would have been, the oracles are what they say, and figures are what they are by hand."""

import json
import random
from dataclasses import asdict
from dataclasses import replace as changed
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from contracts import run
from tiny import tiny_tokenizer
from written import AT, WRONG, costs, curve, linear, trace

from outrider.bench import championship, report
from outrider.bench.championship import Score, auc, contest, ece
from outrider.bench.oracle import accepted, hindsight, informed, prices
from outrider.bench.policies import Bandit, chain, of_others, policy
from outrider.bench.prompts import Prompt
from outrider.bench.recording import Text, Trace, record, tier_of
from outrider.bench.replay import replay
from outrider.control.fixed import fixed
from outrider.control.predict import LADDER
from outrider.core.errors import OutriderError
from outrider.core.types import Plan, Sequence
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.measure.cost import CALM, Costs, named, situation
from outrider.models.toy import ToyModel
from outrider.runtime.door import Runtime
from outrider.runtime.engine import Engine

PROMPTS = [Prompt("a", "x", "the fox and the fox and the fox", None, 0.0), Prompt("b", "y", "she sells she sells", None, 1.2)]
PLANS = [(), (("lookup", 4, 1),), (("model", 1, 1),), (("model", 5, 1),), (("lookup", 3, 1), ("model", 4, 1))]


def toys() -> Runtime:
    """A target with a drafter that is right now and then."""
    target = ToyModel(300, 3, order=1, scale=6.0, rows=1)
    draft = ModelDrafter(ToyModel(300, 3, order=1, scale=6.0, blend=(4, 0.25), rows=1, name="draft"))
    return Runtime(Engine(target, {"lookup": Lookup(), "model": draft}, fixed(Plan()), 1), tiny_tokenizer(), {})


@pytest.fixture(scope="module")
def recorded() -> Trace:
    known = Costs({"lookup": 0.01, "model": 0.2})
    for sampled in (False, True):
        known.verified(situation("", 1, 10, sampled), 0, 1.0)
        for name in ("lookup", "model"):
            known.drafted(name, situation("", 1, 10, sampled), 1, 0.1, 0)
    return record(toys(), PROMPTS, 60, known, progress=lambda line: None)


def live(plan: Plan) -> list[Sequence]:
    rt = toys()
    rt.engine.controller = fixed(plan)
    asked = [rt.request(p.encode(rt.tokenizer), max_tokens=60, temperature=p.temperature, seed=1, rule="coupled") for p in PROMPTS]
    return [run(rt.engine, [r])[0] for r in asked]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_replay_goes_as_the_live_run(recorded: Trace, plan: tuple) -> None:
    """The same text in the same steps, of which the same was drafted and accepted: greedy and seeded."""
    for seq, again in zip(live(Plan(plan)), replay(recorded, fixed(Plan(plan))), strict=True):
        assert again.text.tokens == seq.generated
        assert [(r.drafted, r.accepted, r.emitted) for r in again.records] == [(r.drafted, r.accepted, r.emitted) for r in seq.records]
        assert (again.steps, again.accepted) == (len(seq.records), sum(r.accepted[0] for r in seq.records))
        assert not plan or 0 < again.accepted < again.drafted


def test_what_the_target_read_counts_for_the_guard_and_not_as_decoding(recorded: Trace) -> None:
    """Seconds of reading the prompt stand in the first record of each text, and in no total."""
    slow = changed(recorded, texts=[changed(text, prefill=7.0 * n) for n, text in enumerate(recorded.texts, 1)])
    assert all(text.prefill > 0 for text in recorded.texts)
    unread = changed(recorded, texts=[changed(text, prefill=0.0) for text in recorded.texts])
    plan = fixed(Plan((("model", 3, 1),)))
    for again, other, text in zip(replay(slow, plan), replay(unread, plan), slow.texts, strict=True):
        assert again.seconds == pytest.approx(other.seconds) and other.records[0].seconds["prefill"] == 0
        assert [r.seconds["prefill"] for r in again.records] == [pytest.approx(text.prefill), *[0.0] * (again.steps - 1)]


def test_a_drafter_is_recorded_with_its_own_scores() -> None:
    """As if it were alone, also where another says the same."""
    known, same = Costs({}), 0
    known.verified(situation("", 1, 10, False), 0, 1.0)
    both = record(toys(), PROMPTS, 40, known, progress=lambda line: None)
    for name in ("lookup", "model"):
        rt = toys()
        rt.engine = Engine(rt.engine.target, {name: rt.engine.drafters[name]}, fixed(Plan()), 1)
        for text, alone in zip(both.texts, record(rt, PROMPTS, 40, known, progress=lambda line: None).texts, strict=True):
            assert text.tokens == alone.tokens and text.guesses[name] == alone.guesses[name]
            same += sum(a[:1] == b[:1] for (a, _), (b, _) in zip(*text.guesses.values(), strict=True) if a)
    assert same > 20, "both say the same now and then"


def test_recording_leaves_the_controller_as_it_was() -> None:
    rt, known = toys(), Costs({})
    known.verified(situation("", 1, 10, False), 0, 1.0)
    before = rt.engine.controller
    record(rt, PROMPTS[:1], 5, known, progress=lambda line: None)
    assert rt.engine.controller is before


def test_the_clock_of_a_replay() -> None:
    """By hand: a plain step takes 2 seconds, 1.5 after CALM others; two nodes 2.4; a drafter's two levels 0.6; reading 8
    tokens 0.024, of which the one that it had not guessed itself is no waiting in later steps."""
    priced = costs(linear(0.2, 2.0), {"model": linear(0.3, 0.0)})
    priced["steady"] = {AT: [1, 1.5]}
    of = trace(1, priced, {"model": lambda t, d: 1.0}, length=12)
    (plain,) = replay(of, policy("plain", ["model"], {}, ""))
    assert plain.seconds == pytest.approx(CALM * 2.0 + (12 - CALM) * 1.5) and plain.steps == 12
    (two,) = replay(of, policy("model:2", ["model"], {}, ""))
    assert two.steps == 4 and two.seconds == pytest.approx(4 * (2.4 + 0.6) + 0.024) and (two.drafted, two.accepted) == (8, 8)


def test_the_clock_of_a_replay_where_others_guess() -> None:
    """By hand: four of lookup's guesses come true at once, of the model's none, which has five tokens to read each time, and one where the four are its own. At first all read eight."""
    priced = costs(linear(0.2, 2.0), {"lookup": linear(0.0, 0.1), "model": linear(0.3, 0.0)}, catch_up=0.01)
    of = trace(1, priced, {"lookup": lambda t, d: 1.0, "model": lambda t, d: 1e-9}, length=15)
    (both,) = replay(of, policy("lookup+model:4", of.drafters, {}, ""))
    assert [r.accepted for r in both.records] == [(4,), (4,), (4,)]
    assert both.seconds == pytest.approx(3 * (2.0 + 8 * 0.2 + 0.1 + 4 * 0.3) + 2 * 0.08 + 2 * 0.05)
    of = trace(1, priced, {"lookup": lambda t, d: 0.0, "model": lambda t, d: 1.0}, length=15)
    (alone,) = replay(of, policy("model:4", of.drafters, {}, ""))
    assert alone.seconds == pytest.approx(3 * (2.0 + 4 * 0.2 + 4 * 0.3) + 0.08)


def test_to_the_controller_a_sampled_text_is_sampled() -> None:
    """Its steps cost what sampled steps do, and that is where they are filed."""
    priced = costs(linear(0.2, 1.0), {"lookup": linear(0.0, 0.01)})
    warm = AT.replace("greedy", "sampled")
    priced["verify"][warm], priced["steady"][warm], priced["plains"][warm] = curve(linear(0.4, 2.0)), [1, 2.0], 50
    of = trace(1, priced, {"lookup": lambda t, d: 0.5}, texts=4, length=60)
    of = changed(of, texts=[changed(text, sampled=bool(i % 2)) for i, text in enumerate(of.texts)])
    controller = policy("adaptive", of.drafters, of.costs, tier_of(of))
    replay(of, controller)
    found = controller.tables.costs
    for at, seconds in ((AT, 1.0), (warm, 2.0)):
        assert found.plainly(named(at)) * found.pace == pytest.approx(seconds) == found.verify[named(at)].drawn().line[0] * found.pace


def test_a_replay_does_not_say_where_its_text_ends() -> None:
    """Who decides knows how much was asked for, as in the live run; what is written is the text, and no more."""
    of = trace(2, costs(linear(0.1), {"lookup": linear(0.0, 0.01)}), {"lookup": lambda t, d: 0.9}, length=37)
    of, seen = changed(of, texts=[changed(of.texts[0], asked=256)]), []
    controller = policy("adaptive", of.drafters, of.costs, tier_of(of), {"drafts": 1000})
    choose = controller.choose
    controller.choose = lambda seqs: (seen.append(seqs[0].request.sampling.max_tokens), choose(seqs))[1]
    (told,) = replay(of, controller)
    assert set(seen) == {256} and sum(r.emitted[0] for r in told.records) >= 37 and told.records[-1].context[0] < of.texts[0].length + 37


def test_a_trace_survives_the_disk(recorded: Trace, tmp_path: Path) -> None:
    recorded.save(tmp_path / "deep" / "a.jsonl")
    assert json.loads((tmp_path / "deep" / "a.jsonl").read_text().splitlines()[0])["where"] == report.provenance(), "where it comes from"
    again = Trace.load(tmp_path / "deep" / "a.jsonl")
    assert json.dumps(asdict(again)) == json.dumps(asdict(recorded))
    a, b = (replay(t, policy("adaptive", t.drafters, t.costs, tier_of(t))) for t in (recorded, again))
    assert [(x.seconds, x.steps) for x in a] == [(x.seconds, x.steps) for x in b]


ODD = {
    "a length": {"length": 8.5}, "no length": {"length": 0}, "sampled": {"sampled": "yes"}, "no category": {"category": None}, "an id": {"tokens": [1 << 60]},
}  # fmt: skip


def mended(whole: str, damage: str) -> str:
    """The same file, each of whose lines is JSON."""
    head, text, *rest = map(json.loads, whole.splitlines())
    name = head["drafters"][0]
    if damage == "no costs":
        head["costs"] = {}
    elif damage == "more drafters":
        head["drafters"].append("zz")
    elif damage == "fewer guesses":
        text["guesses"][name].pop()
    elif damage == "no guesses":
        text["guesses"] = {}
    elif damage == "no tokens":
        text["tokens"] = []
        text |= {kind: {n: [] for n in text[kind]} for kind in ("guesses", "steps", "along")}
    elif damage in ODD:
        text |= ODD[damage]
    elif damage == "a score":
        text["guesses"][name][0] = [[1], [7.5]]
    elif damage == "a guess":
        text["guesses"][name][0] = [[[1]], [0.5]]
    elif damage == "a count":
        head["costs"]["plains"] = dict.fromkeys(head["costs"]["plains"], "x")
    elif damage == "steps that take nothing":
        head["costs"]["verify"] = {at: {**curve, "start": 0.0, "seen": {}} for at, curve in head["costs"]["verify"].items()}
    elif damage.startswith("prefill"):
        text["prefill"] = {"prefill -1": -1.0, "prefill x": "x", "prefill NaN": float("nan")}[damage]
    else:
        text["tokens"] = "a" * len(text["tokens"])
    return "\n".join(map(json.dumps, [head, text, *rest]))


@pytest.mark.parametrize(
    "damage",
    ["no costs", "more drafters", "fewer guesses", "no guesses", "no tokens", "letters", "prefill -1", "prefill x", "prefill NaN", *ODD, "a score", "a guess",
     "a count", "steps that take nothing"],
)  # fmt: skip
def test_a_trace_that_contradicts_itself_is_refused(recorded: Trace, tmp_path: Path, damage: str) -> None:
    recorded.save(file := tmp_path / "a.jsonl")
    file.write_text(mended(file.read_text(), damage))
    with pytest.raises(OutriderError, match="a.jsonl is no trace"):
        Trace.load(file)


@pytest.mark.parametrize("damage", ["cut", "version", "empty", "no text", "bytes", "list", "field", "absent"])
def test_a_damaged_trace_is_refused(recorded: Trace, tmp_path: Path, damage: str) -> None:
    file = tmp_path / "a.jsonl"
    recorded.save(file)
    whole = file.read_text()
    file.write_bytes({
        "cut": whole[: len(whole) * 2 // 3].encode(), "version": whole.replace('"version": 2', '"version": 1', 1).encode(), "empty": b"", "no text": whole.splitlines(keepends=True)[0].encode(),
        "bytes": b"\xff\xfe\x00", "list": b"[]\n", "field": whole.replace('"category"', '"kind"', 1).encode(), "absent": b"",
    }[damage])  # fmt: skip
    if damage == "absent":
        file.unlink()
    with pytest.raises(OutriderError, match="a.jsonl") as refused:
        Trace.load(file)
    assert "outrider bench schedule --trace" in str(refused.value), "a command that exists"


def test_a_trace_that_was_cut_between_texts_is_refused(recorded: Trace, tmp_path: Path) -> None:
    recorded.save(file := tmp_path / "a.jsonl")
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(OutriderError, match=rf"a.jsonl holds {len(recorded.texts) - 1} texts of {len(recorded.texts)}"):
        Trace.load(file)


def test_a_trace_without_costs_is_refused(recorded: Trace) -> None:
    with pytest.raises(OutriderError, match="no costs"):
        tier_of(Trace(recorded.drafters, {"plains": {}}, recorded.texts))


# --- oracles ---


def small(seed: int, length: int = 12, depth: int = 4) -> Trace:
    rng = random.Random(seed)
    priced = costs(linear(rng.uniform(0, 0.5)), {"lookup": linear(0.0, 0.05), "model": linear(rng.uniform(0.05, 0.4), 0.0)}, catch_up=0.02)
    priced["steady"] = {AT: [1, rng.uniform(0.7, 1.0)]}
    chances = {"lookup": lambda t, d: rng.choice([0, 0.5, 0.9]), "model": lambda t, d: rng.choice([0.4, 0.8])}
    return trace(seed, priced, chances, length=length, depth=depth)


def brute(of: Trace, text: Text) -> float:
    """The cheapest way through a text, by trying every plan at every position, wrong guesses too; a first use costs reading."""
    price, total = prices(of, text), len(text.tokens)

    @cache
    def best(t: int, calm: int, met: frozenset[str]) -> float:
        if t >= total:
            return 0.0
        ways = [(price.steady if calm >= CALM else price.verify[0]) + best(t + 1, min(calm + 1, CALM), met)]
        for name in of.drafters:
            said, reading = text.guesses[name][t][0], 0.0 if name in met else price.first[name]
            for depth in range(1, min(len(said), total - t - 1) + 1):
                right = next((i for i in range(depth) if said[i] != text.tokens[t + i]), depth)
                ways.append(price.verify[depth] + price.draft[name][depth] + reading + best(t + 1 + right, 0, met | {name}))
        return min(ways)

    return best(0, CALM, frozenset())


@pytest.mark.parametrize("seed", range(12))
def test_hindsight_is_the_best_of_all_ways(seed: int) -> None:
    of = small(seed)
    if seed % 2:  # a prompt that is long to read
        of.texts[0] = Text("p", "c", False, 90, of.texts[0].tokens, of.texts[0].guesses)
    assert hindsight(of, of.texts[0]) == pytest.approx(brute(of, of.texts[0]))


def test_hindsight_drafts_in_vain_where_that_is_cheaper() -> None:
    """Costs are measured: a step that verifies two wrong guesses may take less than one that verifies none, or one."""
    of = small(3)
    of.costs["verify"][AT]["seen"] |= {"0": [50, 3.0], "1": [50, 2.5], "2": [50, 1.0]}
    of.costs["steady"][AT] = [1, 3.0]
    text = changed(
        of.texts[0], guesses={name: [([WRONG] * len(said), scores) for said, scores in all_] for name, all_ in of.texts[0].guesses.items()}
    )
    assert hindsight(of, text) == pytest.approx(brute(of, text)) and hindsight(of, text) < 0.9 * prices(of, text).verify[0] * len(text.tokens)


@pytest.mark.parametrize("seed", range(6))
def test_nobody_beats_hindsight(seed: int) -> None:
    of = small(seed, length=120, depth=16)
    text, best = of.texts[0], hindsight(of, of.texts[0])
    names = ["plain", "ucb1", "adaptive", "adaptive:tage", "lookup:2", "model:4", "model:16", "lookup+model:4", "dynamic:model", "average:lookup"]
    for name in names:
        assert replay(of, policy(name, of.drafters, of.costs, "replay"))[0].seconds >= best - 1e-9, name
    assert best <= informed(of, text) + 1e-9
    assert informed(of, text) <= 1.02 * replay(of, policy("plain", of.drafters, of.costs, "replay"))[0].seconds


def test_the_informed_may_have_two_guess_at_once() -> None:
    """Two who are right at different places bring more together, where verifying is nearly free; and no more than is theirs where they agree."""
    priced = costs(linear(0.01), {"lookup": linear(0.0, 0.01), "model": linear(0.01, 0.0)}, catch_up=0.0)
    apart = trace(5, priced, {"lookup": lambda t, d: 0.6, "model": lambda t, d: 0.6}, length=200)
    (text,) = apart.texts
    differently = [([token + (token == WRONG) for token in said], scores) for said, scores in text.guesses["model"]]
    text = changed(text, guesses=text.guesses | {"model": differently})
    alone = [informed(changed(apart, drafters=[name]), text) for name in apart.drafters]
    assert informed(apart, text) < 0.9 * min(alone)
    alike = changed(text, guesses=dict.fromkeys(apart.drafters, text.guesses["model"]))
    assert informed(apart, alike) == pytest.approx(informed(changed(apart, drafters=["lookup"]), alike))


def test_accepted_by_hand() -> None:
    text = Text("p", "c", False, 1, [1, 2, 3], {"a": [([1, 2, 9], [0.5] * 3), ([WRONG], [0.5]), ([3, 4], [0.5] * 2)]})
    assert [accepted(text, "a", t) for t in range(3)] == [2, 0, 1]


# --- policies and figures ---


@pytest.mark.parametrize("name", ["plain", "ucb1", "adaptive", "adaptive:gshare", "lookup:3", "lookup+model:3", "dynamic:model", "average:model"])
def test_every_policy_replays(recorded: Trace, name: str) -> None:
    for one in replay(recorded, policy(name, recorded.drafters, recorded.costs, "")):
        assert one.seconds > 0 and sum(r.emitted[0] for r in one.records) == len(one.text.tokens)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("adaptiv", "adaptive"),
        ("lookup:four", "lookup:4"),
        ("lookup:²", "lookup:4"),
        ("lookup:" + "9" * 5000, "unknown policy"),
        ("average:modle", "average:model"),
        ("ucb", "ucb1"),
        ("lookup+lookup:4", "lookup:4"),
        ("dynamic:lookup", "dynamic:model"),
    ],
)
def test_an_unknown_policy_names_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(OutriderError, match=meant):
        policy(name, ["lookup", "model"], {}, "")


def test_others_policies_do_what_their_rules_say() -> None:
    assert [of_others(d) for d in ("lookup", "model")] == [("lookup:10", "average:lookup"), ("dynamic:model", "average:model")]
    priced = costs(linear(0.01), {"model": linear(0.01, 0.0)})
    unsure = trace(1, priced, {"model": lambda t, d: 0.9 if d < 3 else 0.3}, length=60)
    assert max(r.drafted[0] for r in replay(unsure, policy("dynamic:model", ["model"], {}, ""))[0].records) == 3
    sure = trace(1, priced, {"model": lambda t, d: 1.0}, length=300)
    depths = [r.drafted[0] for r in replay(sure, policy("average:model", ["model"], {}, ""))[0].records]
    assert depths[0] == 4 and max(depths) > 9, "as deep as of late, and one more"
    bandit = Bandit([Plan(), chain("model", 8)])
    replay(trace(1, priced, {"model": lambda t, d: 0.95}, length=900), bandit)
    assert bandit.pulls[1] > 3 * bandit.pulls[0]


def test_the_bandit_is_not_charged_for_prompts() -> None:
    """Nor is it told that the slowest step was the best there is, for being the first."""
    bandit = Bandit([Plan(), chain("model", 8)])
    for seconds, prefill in ((0.31, 0.3), (0.012, 0.0), (0.31, 0.3)):
        plan, _ = bandit.choose([])
        took = {"prefill": prefill}
        bandit.learn([], SimpleNamespace(emitted=(1 + bool(plan.drafters),), reading=SimpleNamespace(seconds=seconds), seconds=took))
    assert bandit.pulls == [1, 2] and bandit.means == pytest.approx([100.0, (2 / 0.012 + 2 / 0.01) / 2])


def test_auc_and_calibration_by_hand() -> None:
    assert auc([0.1, 0.4, 0.35, 0.8], [False, False, True, True]) == 0.75
    assert auc([0.5, 0.5, 0.9], [True, False, True]) == 0.75
    assert auc([0.3, 0.4], [True, True]) == 0.5
    assert ece([0.15, 0.15, 0.85, 0.85], [False, True, True, True]) == pytest.approx((0.7 + 0.3) / 4)
    assert ece([1.0, 0.0], [True, False]) == 0.0
    figures = Score([0.8, 0.4], [True, True], [0.8, 0.32], [True, True], tokens=10, rejected=1, stopped=2, wasted=0.004).figures()
    assert figures["brier"] == pytest.approx((0.04 + 0.36) / 2)
    assert (figures["misspeculations"], figures["rejected"], figures["stopped"]) == (300, 100, 200)
    assert figures["wasted_ms"] == pytest.approx(400) and figures["product_ece"] == pytest.approx((0.2 + 0.68) / 2)


def test_misspeculations_by_hand() -> None:
    """A node costs 0.5: a guess of .6 is verified, one below it (.36) is not. Five tokens: two right (stopped after one),
    then a miss (verified), then one right with nothing after it."""
    tokens = [1, 2, 3, 4, 5]
    said = {0: [1, 2, WRONG], 3: [WRONG], 4: [5]}
    guesses = [(said.get(t, []), [0.6] * len(said.get(t, []))) for t in range(5)]
    of = Trace(["a"], costs(linear(0.5), {"a": linear(0.0, 0.01)}), [Text("p", "c", False, 1, tokens, {"a": guesses})])
    score = championship._pass(of, championship.predictor("static"), None)
    assert (score.tokens, score.rejected, score.stopped) == (5, 1, 1)
    assert score.came == [True, True, False, False, True] and score.wasted == pytest.approx(0.5)
    assert score.products == pytest.approx([0.6, 0.36, 0.216, 0.6, 0.6]) and score.whole == [True, True, False, False, True]


def test_what_was_verified_after_a_wrong_guess_was_wasted_too() -> None:
    """By hand: four sure guesses of which the first is wrong. And where a drafter knows its chances, products of them are what comes, deep nodes
    included: those that are reached alone would say that they come far more often."""
    guesses = [([WRONG] * 4, [0.95] * 4), *(([], []) for _ in range(5))]
    of = Trace(["a"], costs(linear(0.1), {"a": linear(0.0, 0.01)}), [Text("p", "c", False, 1, [1] * 6, {"a": guesses})])
    score = championship._pass(of, championship.predictor("static"), None)
    assert (score.rejected, score.stopped, score.wasted) == (1, 0, pytest.approx(0.4)) and score.whole == [False] * 4 and score.came == [False]
    of = trace(1, costs(linear(0.1), {"a": linear(0.0, 0.01)}), {"a": lambda t, d: 0.8 if d % 2 else 0.7}, texts=8, length=600)
    assert championship._pass(of, championship.predictor("static"), None).figures()["product_ece"] < 0.03


def test_a_contest_has_all_and_the_warm_are_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Than the cold in the mean of some traces: one may flatter them."""
    traces = [
        trace(seed, costs(linear(0.1), {"a": linear(0.0, 0.01)}), {"a": lambda t, d: 0.9 if t // 3 % 2 else 0.2}, texts=3, length=200)
        for seed in range(1, 13)
    ]
    found = contest(traces[0], 100)
    monkeypatch.setattr(championship, "LADDER", ("logistic",))
    contests = [found, *(contest(of, 100) for of in traces[1:])]
    assert list(found) == list(LADDER) and found["static"]["cold"]["auc"] > 0.7
    assert found["logistic"]["warm"]["brier"] < found["logistic"]["cold"]["brier"] + 0.02
    cold, warm = ([own["logistic"][how]["speed"] for own in contests] for how in ("cold", "warm"))
    assert min(warm) > 1.2 and sum(warm) > sum(cold)
    assert len(championship.markdown(found).splitlines()) == 2 + 2 * len(LADDER)
