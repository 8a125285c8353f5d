"""Reading ahead: where the words stood before, what the steps of a drafter that does it cost, and what a text says of its drafters."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest
import zoo
from contracts import always, plain, request, run
from test_controller import seconds, told
from test_device import KINDS, LOOP, blind, pair, records, sequence_of  # noqa: F401 (a fixture)
from written import adaptive, costs, drive, linear, trace

from outrider.bench import oracle
from outrider.bench.recording import Text, Trace, record
from outrider.control.controller import Adaptive
from outrider.control.fixed import fixed
from outrider.control.predict import MOST, Bias
from outrider.control.step import Step
from outrider.control.tables import LOOKED, Tables, steps_of
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.noise import RowNoise
from outrider.core.sampling import Settings
from outrider.core.types import Plan, Sequence, StepRecord
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.drafters.suffix import FORESEEN, INDEX, SuffixIndex, index_of
from outrider.measure.cost import Costs
from outrider.models.load import wrap
from outrider.runtime.engine import Engine

# --- where words stood before


@pytest.mark.parametrize("seed", range(30))
def test_a_trail_goes_where_the_words_stood_before(seed: int) -> None:
    """What it foresees followed, somewhere in the text, as many of the last tokens as it says; where it foresees nothing, the last token stood nowhere before."""
    rng = random.Random(seed)
    text = [rng.randrange(5 + seed) for _ in range(rng.randint(1, 60))]
    index = SuffixIndex()
    index.extend(text)
    trail, said = index.trail(), list[int]()
    for _ in range(20):
        whole, found = text + said, trail.foreseen(rng.randint(1, 9))
        if found:
            end = trail.at
            assert found == text[end : end + len(found)] and len(found) <= min(2 * trail.evidence + 1, FORESEEN)
            assert text[end - min(trail.evidence, end) : end] == whole[-trail.evidence :][-end:]
        else:
            assert whole[-1] not in text[: len(text) - 1] or trail.at == len(text)
        said.append(rng.choice(found) if found and rng.random() < 0.7 else rng.randrange(5 + seed))
        trail.went(said[-1])


def test_all_drafters_of_a_request_read_one_index() -> None:
    """Whoever drafts first reads what is new; lookup finds what it would have found, and nothing stays when the request ends."""
    draft = wrap(zoo.module("llama", noise=0.1), "draft", "zoo", context=200)
    both, alone, model = Lookup(), Lookup(), ModelDrafter(draft, "model")
    seq, other = (Sequence(request([3, 1, 4, 1, 5] * 3), [3, 1, 4, 1, 5] * 3) for _ in range(2))
    both.begin(seq)
    model.begin(seq)
    alone.begin(other)
    for token in (9, 2, 3, 1, 4, 7, 3, 1):
        for one in (seq, other):
            one.tokens.append(token)
        assert index_of(seq) is seq.slots["lookup"].index and index_of(seq).text == seq.tokens
        assert seq.slots["lookup"].chance(seq.tokens) == other.slots["lookup"].chance(other.tokens)
    both.end(seq)
    model.end(seq)
    assert not seq.slots and INDEX not in seq.slots


# --- the same guesses


@pytest.mark.parametrize("name", always(1, KINDS))
@pytest.mark.parametrize("asked", [{}, {"rule": "coupled", "seed": 5, "temperature": 0.8}], ids=["greedy", "coupled"])
@pytest.mark.parametrize("noise", always(1, [0.3, 0.05]))
def test_who_reads_ahead_guesses_the_same_in_fewer_steps(name, asked, noise, request):
    """What followed the same words before is read along, and kept as far as it is what the model says: token for token over a whole text, which repeats
    itself. `levels` tells the steps; caches hold nothing of what was read in vain, or later guesses would differ."""
    plans = [Plan((("lookup", 3, 1), ("model", 7, 1))), Plan((("model", 12, 1),)), Plan((("model", 2, 1),))]
    asked = asked | {"layers": 2 if name == "llama" else 4}  # with two the others do not repeat themselves
    ahead = [records(name, plan, noise, **asked) for plan in plans]
    request.getfixturevalue("blind")
    for plan, (drafts, text, forwards), (wanted, same, single) in zip(
        plans, ahead, [records(name, plan, noise, **asked) for plan in plans], strict=True
    ):
        assert text == same and len(drafts) == len(wanted)
        for (tokens, parents, sources, scores, levels, accepted), other in zip(drafts, wanted, strict=True):
            assert (tokens, parents, sources, accepted) == (other[0], other[1], other[2], other[5])
            assert scores == pytest.approx(other[3], rel=1e-3) and levels.get("model", 0) <= other[4].get("model", 0)
        assert forwards < single if plan.drafters[-1][1] > 2 else forwards <= single, f"{plan}: {forwards} steps in place of {single}"
        assert sum(o[4].get("model", 0) - d[4].get("model", 0) for d, o in zip(drafts, wanted, strict=True)) == single - forwards


def test_what_is_read_ahead_never_leaves_the_context():
    """Nor are more tokens found than are wanted: the last of a chain may be foreseen, none beyond it is."""
    target, _ = pair()
    draft = wrap(zoo.module("llama"), "draft", "zoo", context=len(LOOP) + 9)
    widths, forward = [], draft.rows.onward
    draft.rows.onward = lambda seq, node, parent, tokens: widths.append(node + len(tokens)) or forward(seq, node, parent, tokens)
    seq = run(Engine(target, {"model": ModelDrafter(draft, "model")}, fixed(Plan((("model", 8, 1),))), 1), [request(LOOP, max_tokens=20)])[0]
    assert seq.generated == plain(target, [request(LOOP, max_tokens=20)])[0] and max(widths, default=0) < 8
    assert [r.drafted[0] for r in seq.records[:1]] == [8]


@pytest.mark.parametrize("likely", [1, 2, 4, 0])
def test_nothing_is_read_beyond_the_levels_that_are_likely(likely: int) -> None:
    """The guesses are the same; where nothing is said of how deep they will be used it reads on, and what was said holds for one call."""
    target, _ = pair()
    drafter, seq, hints = ModelDrafter(target, "model"), Sequence(request(LOOP), list(LOOP)), list[int]()
    drafter.begin(seq)
    target.prefill([seq])
    foreseen = drafter._foreseen

    def seen(seqs, draft, place, upto):
        ahead = foreseen(seqs, draft, place, upto)
        return lambda found, most: (told := ahead(found, most), hints.append(len(told)))[0]

    drafter._foreseen = seen
    how = Settings.of([seq]), RowNoise((), (), ())
    drafter.likely = likely
    draft = drafter.extend([seq], tree.empty(1), [-1], 1, 1, *how, levels=8)
    assert draft.token == target.chain([seq], tree.empty(1), -1, 8)[0] and len(draft) == 8
    assert drafter.likely == 0 and (max(hints) <= likely - 1 if likely else max(hints) > 3)


def test_the_scheduler_says_how_deep_a_drafter_will_go() -> None:
    """As deep as guesses as likely as its own in this text are best made, which is less than it may."""
    target, draft = pair()
    drafter, heard = ModelDrafter(draft, "model"), list[tuple[int, int]]()
    extend = drafter.extend
    drafter.extend = lambda *how, **more: heard.append((drafter.likely, more["levels"])) or extend(*how, **more)
    engine = Engine(target, {"model": drafter}, Adaptive(Tables({"model": 1}, Costs({"model": 0.1})), lambda: ""), 1)
    engine.now = itertools.count().__next__
    run(engine, [request(LOOP, max_tokens=60)])
    assert len(heard) > 5 and all(1 <= likely <= LOOKED for likely, _ in heard) and any(likely < most for likely, most in heard)


@pytest.mark.parametrize("stop", range(1, 7))
def test_a_chain_that_stops_keeps_only_what_it_found(stop):
    """Wherever it is stopped, and however much of what was foreseen is right: nothing else is scratch, and the next chain finds the same."""
    target, _ = pair()
    seq, nothing = sequence_of(target), tree.empty(1)
    right, _, single = target.chain([seq], nothing, -1, 6)
    assert single == 6
    for true in range(7):
        told, says = itertools.count(1), [*right[:true], *[token + 1 for token in right[true:]]]
        found, chances, steps = target.chain(
            [seq], nothing, -1, 6, lambda chance, free=False, told=told: next(told) < stop, None, lambda had, most, says=says: says[len(had) :][:most]
        )
        assert found == right[:stop] and len(chances) == stop and steps <= stop
        assert list(target.rows.of(seq).scratch) in (list(range(stop - 1)), list(range(stop))), "the last may have been foreseen"
    assert target.chain([seq], nothing, -1, 6)[0] == right


def test_what_was_read_in_vain_gives_its_slots_back():
    target, _ = pair()
    seq = sequence_of(target)
    rows, row = target.rows, target.rows.of(seq)
    start = tree.empty(1)
    layout = rows.begin([seq], start, -1, [4, 4, 4])
    assert len(row.scratch) == 3 and layout.at is None and len(layout.blocks[0].table[0]) == 4, "all of it is asked"
    rows.undo(seq, [1, 2])
    assert list(row.scratch) == [0]
    block = rows.onward(seq, 1, 0, [7, 8])
    assert block.table[0, :, 2].tolist() == [row.base + 1, row.base + 2] and list(row.scratch) == [0, 1, 2]


# --- its steps are what is paid


def reading(of: Trace, every: int, name: str = "model") -> Trace:
    """The same trace, where a step of a drafter finds so many of its levels."""
    return replace(of, texts=[replace(t, steps={name: [list(range(every, 40, every)) for _ in t.tokens]}) for t in of.texts])


def test_levels_take_steps() -> None:
    text = Text("p", "c", False, 1, [1] * 3, {"a": [([1] * 9, [0.5] * 9)] * 3}, steps={"a": [[3, 4], [], [1, 2, 3]]})
    assert [text.taken("a", 0, k) for k in range(7)] == [0, 1, 1, 1, 2, 3, 3]
    assert [text.taken("a", 1, k) for k in (0, 1, 9)] == [0, 1, 1] and text.taken("b", 0, 5) == 5
    assert [steps_of(k, 0.3) for k in range(1, 8)] == [1, 1, 1, 2, 2, 2, 3] and steps_of(6, 1.0) == 6


def inside(record: StepRecord, of: Trace) -> bool:
    """Was there a draft, which did not end only because the text does?"""
    ends = of.texts[0].length + len(of.texts[0].tokens)
    return record.draft is not None and 0 < len(record.draft.token) < ends - record.context[0] - 1


@pytest.mark.parametrize("steps", [{"model": []}, {"model": [["x"]] * 20}, {"model": [[0]] * 20}, {"model": [[3, 2]] * 20}, [1]], ids=str)
def test_a_trace_whose_steps_are_no_steps_is_refused_by_name(steps: object, tmp_path: Path) -> None:
    of = trace(1, costs(linear(0.1), {"model": linear(0.2, 0.0)}), {"model": lambda t, d: 0.5}, length=20)
    reading(of, 3).save(file := tmp_path / "trace.jsonl")
    assert Trace.load(file).texts[0].steps == reading(of, 3).texts[0].steps
    head, text = file.read_text().splitlines()
    file.write_text(f"{head}\n{json.dumps(json.loads(text) | {'steps': steps})}\n")
    with pytest.raises(OutriderError, match="trace.jsonl is no trace"):
        Trace.load(file)


@pytest.mark.parametrize("asked", ["model:8", "adaptive"])
def test_a_replay_charges_steps(asked: str) -> None:
    """Of three levels each, and a record tells so many."""
    of = reading(trace(2, costs(linear(0.02), {"model": linear(0.2, 0.0)}), {"model": lambda t, d: 0.9}, depth=32), 3)
    records = (told(of, asked) if asked != "adaptive" else drive(of, adaptive(of))[0])[1:]  # the first one reads
    drafts = [r for r in records if inside(r, of)]
    assert len(drafts) > 20
    for r in drafts:
        steps = -(-len(r.draft.token) // 3)
        assert r.levels["model"] == steps and r.seconds["draft model"] == pytest.approx(0.2 * steps)


def test_the_scheduler_pays_for_steps_and_goes_deeper_where_levels_are_free() -> None:
    """It is charged what the drafter took, learns its price by steps, and what a text showed says how many levels one brings."""
    of = trace(3, costs(linear(0.02), {"model": linear(0.3, 0.0)}), {"model": lambda t, d: 0.93}, texts=3, length=200, depth=32)
    found = {}
    for every in (1, 4):
        controller = adaptive(own := reading(of, every))
        spent, best = [], controller._most
        controller._most = lambda draft, best=best, spent=spent, controller=controller: spent.append(controller.step.spent) or best(draft)
        records = [r for text in drive(own, controller) for r in text]
        drafts = [r for r in records if r.draft is not None and r.draft.token]
        paid = [(took, r.seconds["draft model"]) for took, r in zip(spent, drafts, strict=True) if inside(r, of) and r.context[0] > 8]
        assert [took for took, _ in paid] == pytest.approx([seen for _, seen in paid], rel=0.05, abs=0.02), "in plain steps of one second"
        line = controller.tables.costs.drafting("model", controller.page.at).drawn().line
        assert line[2] - line[1] == pytest.approx(0.3, rel=0.1), "whatever it finds in one"
        found[every] = mean(len(r.draft.token) for r in records if r.draft is not None and r.draft.token), seconds(records)
        assert controller.tables.next.cells["model steps"][1] == pytest.approx(1 / every, abs=0.12)
    assert found[4][0] > 1.5 * found[1][0] and found[4][1] < 0.75 * found[1][1]


def test_what_could_have_been_reached_pays_for_steps_as_well() -> None:
    of = trace(3, costs(linear(0.02), {"model": linear(0.3, 0.0)}), {"model": lambda t, d: 0.93}, length=200)
    for reached in (oracle.hindsight, oracle.informed):
        slow, fast = (reached(reading(of, every), reading(of, every).texts[0]) for every in (1, 4))
        assert slow == pytest.approx(reached(of, of.texts[0])) and fast < 0.75 * slow


def along(of: Trace, every: int, read: int, name: str = "model") -> Trace:
    """`reading`, where each step read so many tokens along."""
    of = reading(of, every, name)
    return replace(of, texts=[replace(t, along={name: [[read] * (len(own) + 1) for own in t.steps[name]]}) for t in of.texts])


def test_steps_read_along_what_there_is_room_for() -> None:
    text = Text("p", "c", False, 1, [1] * 2, {"a": [([1] * 9, [0.5] * 9)] * 2}, steps={"a": [[3, 4], []]}, along={"a": [[2, 0, 7], [5]]})
    assert [text.foreseen("a", 0, 0, levels) for levels in (0, 1, 2, 3, 9)] == [0, 0, 1, 2, 2]
    assert [text.foreseen("a", 0, 2, levels) for levels in (3, 5, 7, 12, 32)] == [0, 0, 2, 7, 7], "four levels are behind it"
    assert [text.foreseen("a", 0, step, 32) for step in (1, 3)] == [0, 0] and text.foreseen("a", 1, 0, 32) == 5
    assert text.foreseen("b", 0, 0, 32) == 0


@pytest.mark.parametrize(("asked", "levels"), [("model:8", 8), ("model:3", 3), ("model:1", 1)])
def test_a_replay_charges_what_was_read_along(asked: str, levels: int) -> None:
    """Six tokens in each step of three levels, as far as there is room for what they foresee, at the price of tokens that it reads to catch up."""
    prices = costs(linear(0.02), {"model": linear(0.2, 0.0)})
    prices["catch_up"] = {"model @ 3": [1, 0.01]}
    of = trace(2, prices, {"model": lambda t, d: 0.9}, depth=32)
    records = [r for r in told(along(of, 3, 6), asked)[1:] if inside(r, of)]
    assert len(records) > 3
    for r in records:
        steps = -(-levels // 3)
        read = sum(min(6, levels - 3 * step - 1) for step in range(steps))
        assert r.seconds["draft model"] == pytest.approx(0.2 * steps + 0.01 * read)


def test_a_replay_reads_nothing_along_beyond_what_is_likely() -> None:
    """As the draft model itself is told by whoever decides."""
    prices = costs(linear(0.02), {"model": linear(0.2, 0.0)})
    prices["catch_up"] = {"model @ 3": [1, 0.01]}
    own = along(trace(2, prices, {"model": lambda t, d: 0.9}, depth=32), 3, 6)
    controller, asked = adaptive(own), []
    controller.likely = lambda name: asked.append(name) or 2
    records = [r for r in drive(own, controller)[0][1:] if inside(r, own)]
    assert asked and len(records) > 20
    for r in records:
        steps = r.levels["model"]
        assert r.seconds["draft model"] == pytest.approx((0.2 + 0.01) * steps)


def test_what_could_have_been_reached_pays_for_what_was_read_along() -> None:
    prices = costs(linear(0.02), {"model": linear(0.3, 0.0)})
    prices["catch_up"] = {"model @ 3": [1, 0.05]}
    of = trace(3, prices, {"model": lambda t, d: 0.93}, length=200)
    for reached in (oracle.hindsight, oracle.informed):
        none, some = (reached(own, own.texts[0]) for own in (along(of, 4, 0), along(of, 4, 3)))
        assert none == pytest.approx(reached(reading(of, 4), reading(of, 4).texts[0])) and 1.05 * none < some < 1.8 * none


@pytest.mark.parametrize("wrong", [{"model": []}, {"model": [["x"] * 14] * 20}, {"model": [[-1] * 14] * 20}, {"model": [[0]] * 20}, {"b": []}, [1]])
def test_a_trace_that_read_along_no_numbers_is_refused_by_name(wrong: object, tmp_path: Path) -> None:
    of = along(trace(1, costs(linear(0.1), {"model": linear(0.2, 0.0)}), {"model": lambda t, d: 0.5}, length=20), 3, 2)
    of.save(file := tmp_path / "trace.jsonl")
    assert Trace.load(file).texts[0].along == of.texts[0].along and len(of.texts[0].along["model"][0]) == 14
    head, text = file.read_text().splitlines()
    file.write_text(f"{head}\n{json.dumps(json.loads(text) | {'along': wrong})}\n")
    with pytest.raises(OutriderError, match="trace.jsonl is no trace"):
        Trace.load(file)


def test_a_recording_tells_the_steps() -> None:
    """Of a real drafter: as many as the forwards it took, and all that they read."""
    target, draft = (wrap(zoo.module("llama", noise=n), name, "zoo", context=200) for n, name in ((0.0, "target"), (0.1, "draft")))
    engine = Engine(target, {"model": ModelDrafter(draft, "model")}, fixed(Plan()), 1)
    prompt = SimpleNamespace(id="p", category="c", temperature=0.0, encode=lambda tokenizer: [3, 1, 4, 1, 5, 9, 2, 6] * 3)
    rt = SimpleNamespace(engine=engine, tokenizer=None, request=lambda tokens, **how: request(tokens, max_tokens=how["max_tokens"]))
    before, read = draft.forwards, draft.computed
    of = record(rt, [prompt], 24, Costs({}), lambda at: None)
    (text,) = of.texts
    taken = sum(text.taken("model", t, len(text.guesses["model"][t][0])) for t in range(len(text.tokens)))
    assert taken == draft.forwards - before and taken < sum(len(tokens) for tokens, _ in text.guesses["model"])
    foreseen = sum(map(sum, text.along["model"]))
    assert len(prompt.encode(None)) - 1 + taken + foreseen == draft.computed - read and foreseen > 0


# --- one text


def test_a_text_says_how_likely_guesses_are_in_it() -> None:
    """Less than in all where they fail, more where they come true, by no more than MOST; what lies long back counts little."""
    poor, fine, turned = Bias(), Bias(), Bias()
    for i in range(40):
        for bias, right in ((poor, False), (fine, True), (turned, i >= 20)):
            p = bias.of(0.7)
            bias.learn(right - p, p * (1 - p))
    assert poor.of(0.7) < 0.4 and fine.of(0.7) > 0.8 and turned.of(0.7) > 0.7
    assert all(abs(b.of(0.5) / (1 - b.of(0.5))) <= 2.72**MOST for b in (poor, fine)) and Bias().of(0.3) == pytest.approx(0.3)
    rng, even = random.Random(1), Bias()
    seen = []
    for _ in range(400):
        p = even.of(0.7)
        even.learn((rng.random() < 0.7) - p, p * (1 - p))
        seen.append(even.of(0.7))
    assert mean(seen) == pytest.approx(0.7, abs=0.03), "right as often as in all texts: no bias but for chance"


def test_texts_differ_in_who_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same scores mean much in every other text, and little in the rest: who learns that in each writes them sooner."""
    priced = costs(linear(0.12), {"lookup": linear(0.0, 0.01)})
    some, rest = (
        trace(seed, priced, {"lookup": lambda t, d, p=p: p}, texts=8, length=150, score=lambda p: 0.7) for seed, p in ((1, 0.95), (2, 0.45))
    )
    of = replace(some, texts=[t for two in zip(some.texts, rest.texts, strict=True) for t in two])
    took = []
    for learns in (True, False):
        with monkeypatch.context() as without:
            if not learns:
                without.setattr(Step, "judged", lambda self, record: None)
            took.append(sum(seconds(records) for records in drive(of, adaptive(of))[4:]))
    assert took[0] < 0.97 * took[1]
