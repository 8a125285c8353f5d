"""Compiled steps: a package built from a folder scores as the eager step does, and is used only where that holds."""

import os
import shutil
import threading
import time

import numpy as np
import packages
import pytest
import torch
from contracts import check_scores, opened, plain, random_draft, recompute, request, run
from packages import CLOSE, DTYPE, OWN, PROMPT, TWIN, VOCAB, model_of, recipe_of, texts_and_tiers, twin_folder

import outrider
from outrider.control.fixed import fixed
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.sampling import decided
from outrider.core.types import MAX_NODES, Draft, Plan, Scores
from outrider.drafters.lookup import Lookup
from outrider.models import compiled, package
from outrider.models.compiled import DIFFERS, SHAPES, Compiled, apart, example
from outrider.models.hf import HFModel
from outrider.models.kv import Block
from outrider.runtime.engine import Engine

even, folder, builder, built = packages.even, packages.folder, packages.builder, packages.built
serve, served, fresh = packages.serve, packages.served, packages.fresh
cache, started, alive = packages.cache, packages.started, packages.alive


# --- a package serves as the eager step does


def filled(model: HFModel, seed: int) -> None:
    """Random keys and values in every slot, so that what is seen matters."""
    torch.manual_seed(seed)
    with torch.inference_mode():
        for x in model.store.rows(0, len(model.rows.all)):
            x.normal_()


def both_ways(model: HFModel, block: Block) -> tuple[tuple, list, tuple, list, list]:
    """(eager's answers, its rows after, the package's answers, its rows after, rows before) of one forward."""
    table, read, rows = model._inputs(block)
    one, other = [x.clone() for x in rows], [x.clone() for x in rows]
    with torch.inference_mode():
        want = model.step(table, read, one)
    package = model.compiled.get(*block.table.shape[:2])
    shape = "one" if block.table.shape[:2] == (1, 1) and model.compiled.singles > model.compiled.steady else "any"
    assert package is model.compiled.packages[shape]
    found = package(table, read, other)
    assert found[1].is_contiguous() and found[1].dtype == torch.float64, "it is read where it lies (`Scores.lies`)"
    return want, one, found, other, [x.clone() for x in rows]


@pytest.mark.parametrize("shape", ["plain", "chain", "tree"])
@pytest.mark.parametrize("lengths", [[1], [3], [70], [150], [120, 4, 64], [2, 2]], ids=str)
def test_a_package_scores_and_writes_as_the_eager_step(served, lengths, shape):
    """Ragged rows, short and long contexts, tails, chains and trees up to a whole step; over caches of random numbers."""
    rng = np.random.default_rng(sum(lengths))
    filled(served, 1)
    tail = 1 if min(lengths) < 3 else 3
    seqs = opened(served.rows, lengths, tail)
    for seq in seqs:
        seq.tokens[:] = rng.integers(0, VOCAB, len(seq.tokens)).tolist()
    for nodes in [0] if shape == "plain" else [1, 7, 16, 30]:
        draft = random_draft(rng, len(seqs), VOCAB, nodes if shape == "tree" else 0)
        for i in range(nodes if shape == "chain" else 0):
            draft = tree.grow(draft, [~i if i < len(seqs) else i - len(seqs)], [i], 1)
        (block,) = served.rows.layout(seqs, draft, tree.all_places(draft)).blocks
        want, one, got, other, before = both_ways(served, block)
        logits, found = got
        assert logits.shape == (*block.table.shape[:2], VOCAB) and logits.dtype == want[0].dtype and found.dtype == torch.float64
        spread = float(want[0].float().std())
        assert float((logits.float() - want[0].float()).abs().max()) < CLOSE * spread
        for a, b, old in zip(one, other, before, strict=True):
            changed = torch.zeros_like(old, dtype=torch.bool)
            for r, slots in enumerate(block.table[..., 2]):
                changed[r, :, sorted(set(slots) - {served.store.capacity - 1})] = True
            spare = torch.zeros_like(changed)
            spare[:, :, -1] = True  # padding columns write there, any of them last
            assert torch.equal(b[~changed & ~spare], old[~changed & ~spare]), "only the slots of the table are written"
            assert not torch.equal(b[changed], old[changed])
            assert float((a[changed].float() - b[changed].float()).abs().max()) < CLOSE * float(a[changed].float().std())


def test_a_package_reads_up_to_the_last_slot_of_a_row(served):
    """A text that nearly fills its context: all slots are read, which are no multiple of 64."""
    filled(served, 1)
    draft, seqs = Draft(rows=1), opened(served.rows, [199])
    for i in range(MAX_NODES - 1):
        draft = tree.grow(draft, [i - 1], [i], 1)
    (block,) = served.rows.layout(seqs, draft, tree.all_places(draft)).blocks
    assert served.store.capacity == 265 and block.read > 256
    want, _, got, *_ = both_ways(served, block)
    assert float((got[0].float() - want[0].float()).abs().max()) < CLOSE * float(want[0].float().std())


def test_found_is_what_the_package_s_own_logits_say(served):
    """Every largest logit is there twice (and in bfloat16 more often): the lowest id wins, and the mass is theirs."""
    filled(served, 2)
    seqs = opened(served.rows, [90, 11, 40])
    draft = random_draft(np.random.default_rng(3), 3, VOCAB, 40)
    ties = 0
    for block in (served.rows.layout(seqs, draft, tree.all_places(draft)).blocks[0], served.rows.layout(seqs[:1], Draft(1), [~0]).blocks[0]):
        logits, found = both_ways(served, block)[2]
        for line, (token, value, mass) in zip(logits.float().flatten(0, 1), found.flatten(0, 1).tolist(), strict=True):
            best = (line == line.max()).nonzero()[:, 0].tolist()
            ties += len(best) > 1
            assert token == best[0] and token < TWIN and value == float(line.max())
            assert mass == pytest.approx(float(line.double().logsumexp(-1)), rel=1e-5)
    assert ties > 40, "this is about ties"


def test_a_nan_in_the_logits_is_found(served):
    filled(served, 3)
    seqs = opened(served.rows, [20, 20])
    block = served.rows.layout(seqs, Draft(2), tree.roots(2)).blocks[0]
    with torch.inference_mode():
        for x in served.store.rows(1, 1):
            x[0, :, 4] = torch.nan
    logits, found = both_ways(served, block)[2]
    assert logits[1].isnan().all() and bool(found[1, 0, 1].isnan()) and not found[0].isnan().any()
    with pytest.raises(OutriderError, match="NaN"):
        decided(Scores(logits, found=found))


@pytest.mark.parametrize("shape, width", [("one", 1), ("any", 2)])
def test_what_a_package_gave_stays_as_it_was(served, shape, width):
    """What lies between kernels is on the stack or in room that is kept, and what a step gives is not: that would lie where the next one writes."""
    filled(served, 4)
    seqs = opened(served.rows, [30], tail=width)
    taken, told = served.compiled.packages[shape], []
    with torch.inference_mode():
        for token in (3, 9):
            seqs[0].tokens[-1] = token
            inputs = served._inputs(served.rows.layout(seqs, Draft(1), [~0]).blocks[0])
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
                told.append(taken(*inputs))
            told[-1] += tuple(x.clone() for x in told[-1])
    made = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]" and event.nbytes() > 0]
    assert len(made) < 10, "what attention gives in each of two layers, logits, and what is found in them"
    (logits, found, *kept), (other, *_) = told
    assert torch.equal(logits, kept[0]) and torch.equal(found, kept[1]) and not torch.equal(logits, other)


def test_a_step_that_needs_more_room_than_is_kept_finds_it(served):
    """And leaves the next one, of a few columns, its own: the same bits as ever."""
    wide, kinds, told = served.compiled.packages["any"], len(served.step.windows), []
    with torch.inference_mode():
        for count, width in ((1, 3), (48, 64), (1, 3), (2, 64), (1, 3)):
            columns, read = example(count, width, kinds, after=8), torch.arange(128)
            rows = [torch.randn(count, *x.shape[1:], generator=torch.Generator().manual_seed(3)).to(x.dtype) for x in served.step.store.rows(0, 1)]
            assert apart(served.step, wide, columns, read, rows) <= CLOSE
            told.append(wide(columns, read, rows)[0])
    assert torch.equal(told[0], told[2]) and torch.equal(told[0], told[4])


def test_the_contract_holds_when_packages_serve(served):
    """Caches stay exact over random steps, commits, rows that leave and come."""
    check_scores(served, recompute(served), np.random.default_rng(4), VOCAB, CLOSE)
    assert served.meter.tier == "compiled"


def same_or_nearly_tied(model: HFModel, prompt: list[int], a: list[int], b: list[int]) -> None:
    """Two greedy texts are equal, or where they part the model can hardly tell the two tokens apart."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
    if at is not None:
        logits = recompute(model)([*prompt, *a[:at]]).float()
        assert float(logits.max() - torch.minimum(logits[a[at]], logits[b[at]])) < CLOSE * float(logits.std()), f"token {at} is no near-tie"


def test_greedy_texts_are_those_of_eager_steps(served, folder):
    asked = [request(PROMPT[:n] * 2, f"g{n}", max_tokens=40) for n in (2, 7, 5)]
    eager = model_of(folder)
    want = plain(eager, asked)
    for plan in (Plan(), Plan((("lookup", 4, 1),)), Plan((("lookup", 3, 2),))):
        for rows in (1, 3):
            seqs = run(Engine(served, {"lookup": Lookup(floor=0.0)}, fixed(plan), rows), asked)
            for r, seq, text in zip(asked, seqs, want, strict=True):
                same_or_nearly_tied(eager, list(r.prompt), text, seq.generated)
                assert {record.tiers["target"] for record in seq.records} == {"compiled"}
    assert sum(sum(record.drafted) for seq in seqs for record in seq.records) > 0


def test_a_step_wider_than_a_package_is_eager(served):
    assert served.compiled.get(1, MAX_NODES) and served.compiled.get(4, 2) and not served.compiled.get(1, MAX_NODES + 1)


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("context", [600, 200])
def test_strict_steps_of_packages_are_the_same_bits_with_and_without_a_draft(serve, context, narrow):
    """At every width from 1 to 9 and every place in the step; one package for all of it."""
    served = serve(context)
    filled(served, 5)
    assert served.compiled.independent == OWN, "steps are then as wide as they need be"
    served.compiled.packages["any"].independent &= narrow
    served.pin()
    assert set(served.compiled.packages) == {"any"}
    seq = opened(served.rows, [77])[0]
    tokens = np.random.default_rng(6).integers(0, VOCAB, 9).tolist()
    seen: dict[int, bytes] = {}
    for start in range(9):
        for width in range(1, 10 - start):
            seq.tokens[:] = [1] * 76 + tokens[: start + 1]
            row = served.rows.of(seq)
            row.text = seq.tokens[:-1]
            draft = Draft(rows=1)
            for token in tokens[start + 1 : start + width]:
                draft = tree.grow(draft, [len(draft) - 1], [token], 1)
            logits = served.score([seq], draft, tree.all_places(draft)).logits
            assert served.meter.tier == "compiled"
            for at, line in enumerate(logits, start):
                bits = line.view(torch.uint8).numpy().tobytes()
                assert seen.setdefault(at, bits) == bits, f"token {at} in a step of {width} from {start}"
    assert len(set(seen.values())) == 9


# --- when they come, and which are used


@pytest.mark.parametrize(
    ("shares", "one", "any_", "singles"),
    [
        (False, 0.75, 1.0, 2), (False, 0.96, 1.0, 8), (False, 1.0, 1.0, 8), (False, 1.05, 1.0, 8), (False, 1.2, 1.0, None),
        (True, 0.75, 1.0, 0), (True, 1.05, 1.0, 0), (True, 1.2, 1.0, None),
    ],
)  # fmt: skip
def test_the_narrow_package_serves_when_it_makes_up_for_going_over(served, monkeypatch, shares, one, any_, singles):
    """Half a step is lost by changing to other weights: after so many single tokens in a row; at once where they are the same; never only where it is
    clearly slower."""
    weighed, took = served.compiled, {"one": one, "any": any_}
    weighed.packages["one"].shares = shares
    name = {id(package): shape for shape, package in weighed.packages.items()}
    monkeypatch.setattr(compiled, "seconds_of_each", lambda calls: [took[name[id(call.func)]] for call in calls])
    weighed._weigh()
    weighed.get(1, 4)
    used = [name[id(weighed.get(1, 1))] for _ in range(40)]
    assert used == ["any"] * 40 if singles is None else used == ["any"] * singles + ["one"] * (40 - singles)


def test_loading_finds_what_is_on_disk(built, folder, builder, started, monkeypatch):
    """The second start of a process: packages serve from the first step on, nobody builds, bytes are counted."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(builder[0]))
    before = {f.name: (f.stat().st_size, f.stat().st_mtime_ns) for f in built.glob("*.pt2")}
    monkeypatch.setattr(package.Package, "keep", lambda *_: None)  # what is noted beside it is no use of it
    os.utime(built, (0, yesterday := time.time() - 86_400))
    how = {"dtype": DTYPE, "context": 120, "rows": 2, "depth": 3}
    rt, off = outrider.load(folder, ["lookup"], **how), outrider.load(folder, ["lookup"], compile="off", **how)
    prompt = rt.tokenizer("she sells sea shells")["input_ids"]
    (tokens, again), tiers = texts_and_tiers(rt)
    assert set(tiers) == {"compiled"} and started == [] and tokens == again
    same_or_nearly_tied(off.engine.target, prompt, *(x.generate("she sells sea shells", max_tokens=20, ignore_eos=True).tokens for x in (off, rt)))
    assert {f.name: (f.stat().st_size, f.stat().st_mtime_ns) for f in built.glob("*.pt2")} == before
    assert not {"lock", "failed"} & {f.name for f in built.iterdir()}
    assert built.stat().st_mtime > yesterday + 1, "in use: not to be removed"
    assert rt.engine.target.compiled.bytes == rt.engine.target.held_bytes() - off.engine.target.held_bytes()


def test_waiting_takes_up_what_a_living_builder_puts_there(built, folder, cache, started, alive):
    recipe = recipe_of(folder)
    place = recipe.place()
    place.mkdir(parents=True)
    (place / "lock").write_text(str(alive))
    found = Compiled(recipe, model_of(folder).step)

    def finish() -> None:
        for shape in SHAPES:
            shutil.copy(built / f"{shape}.pt2", place / f"{shape}.tmp")
            (place / f"{shape}.tmp").replace(place / f"{shape}.pt2")

    late = threading.Timer(0.3, finish)
    late.start()
    found.wait()
    late.join()
    assert set(found.packages) == set(SHAPES) and found.reason == "eager:building" and started == []


def test_running_text_changes_over_when_the_package_comes(built, folder, cache, started, monkeypatch):
    """Eager steps serve until then; the wide package alone serves every shape until the narrow one is there."""
    monkeypatch.setattr(compiled, "POLL", 0.0)
    monkeypatch.setattr(Compiled, "_weigh", lambda self: None)  # by the even clock the narrow one saves nothing
    model = model_of(folder)
    model.compiled = Compiled(recipe_of(folder), model.step)
    engine = Engine(model, {}, fixed(Plan()), 1)
    seq = engine.submit(request(PROMPT, max_tokens=9))
    for shape in (None, "any", "one"):
        if shape:
            shutil.copy(built / f"{shape}.pt2", model.compiled.folder)
        for _ in range(3):
            engine.step()
        if shape == "any":
            assert model.compiled.get(1, 1) is model.compiled.packages["any"] and "one" not in model.compiled.packages
    assert [record.tiers["target"] for record in seq.records] == ["eager:building"] * 3 + ["compiled"] * 6
    assert model.compiled.get(1, 1) is model.compiled.packages["one"]
    same_or_nearly_tied(model, PROMPT, plain(model_of(folder), [request(PROMPT, max_tokens=9)])[0], seq.generated)


@pytest.mark.parametrize("trouble", ["failed", "no compiler"])
def test_one_package_serves_though_the_other_cannot_be_built(built, folder, cache, started, monkeypatch, trouble):
    recipe = recipe_of(folder)
    place = recipe.place()
    place.mkdir(parents=True)
    shutil.copy(built / "any.pt2", place)
    if trouble == "failed":
        (place / "failed").write_text("eager:not-compiled\nthe disk is full")
    else:
        monkeypatch.setattr(compiled.shutil, "which", lambda *_: None)
    assert Compiled(recipe, model_of(folder).step).get(3, 4) is not None


def test_a_package_that_is_slower_than_eager_steps_is_not_used(fresh, monkeypatch):
    """It must be faster at the step that it is for: refused one by one, and said; and tried again at the next start, for the machine may have been busy."""
    times = iter([1.0, 3.0, 3.0, 1.0, 3.0, 1.0])  # the wide one 1 s and eager 3 s; the others 3 s and eager 1 s
    monkeypatch.setattr(compiled, "seconds_of_each", lambda calls, **_: [next(times) for _ in calls])
    again = fresh().compiled
    assert set(again.packages) == {"any"} and again.reason == "eager:package-slower" and next(times, None) is None
    assert again.get(1, 1) is again.packages["any"] and again.bytes == again.packages["any"].bytes
    times = iter([1.0] * 10)
    assert set(fresh().compiled.packages) == set(SHAPES) and next(times, None) is None, (
        "two packages are timed beside eager steps, two beside each other, and twice reading in one step and in two forwards"
    )


def test_a_package_that_is_not_built_as_it_should_be_says_why(serve, monkeypatch, caplog):
    served, made = serve(100), package.Package.__init__

    def noted(self: package.Package, *how: object) -> None:
        made(self, *how)
        self.note = "RuntimeError: another Inductor"

    monkeypatch.setattr(package.Package, "__init__", noted)
    again = Compiled(served.compiled.recipe, served.step)
    assert set(again.packages) == set(SHAPES), "it serves all the same"
    assert caplog.text.count("torch's kernels, which are slower") == 1 and "another Inductor" in caplog.text
    served.compiled = again
    seq = run(Engine(served, {}, fixed(Plan()), 1), [request(PROMPT, max_tokens=3)])[0]
    assert {record.tiers["target"] for record in seq.records} == {"compiled:without-own-kernels"}


def test_a_package_that_differs_from_the_model_is_not_used(built, tmp_path, cache, started, caplog):
    """Packages of other weights, put in place: the first one that is tried is refused, and texts are the eager ones."""
    other = twin_folder(tmp_path / "other", seed=5)
    place = recipe_of(other).place()
    place.mkdir(parents=True)
    for shape in SHAPES:
        shutil.copy(built / f"{shape}.pt2", place)
    rt = outrider.load(other, [], dtype=DTYPE, compile="auto")
    assert rt.engine.target.compiled.folder == place
    texts, tiers = texts_and_tiers(rt)
    assert set(tiers) == {"eager:package-differs"} and rt.engine.target.compiled.packages == {}
    assert texts == texts_and_tiers(outrider.load(other, [], dtype=DTYPE, compile="off"))[0]
    assert any("differs" in r.getMessage() for r in caplog.records)


def test_a_package_with_other_attention_is_not_used(built, folder, builder, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(builder[0]))
    model = model_of(folder)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.module.named_parameters():
            if "self_attn" in name:
                weight.normal_(0, 0.3)
    found = Compiled(recipe_of(folder), model.step)
    found.look()
    assert not found.packages and found.reason == "eager:package-differs"


def test_what_rounds_its_inputs_is_judged_by_the_whole_of_its_logits() -> None:
    """The largest of many logits is off by four times as much as they are in the mean. Other logits, other keys and halved ones are too far in any case."""
    torch.manual_seed(1)
    logits, noise, keys, table = torch.randn(8, 5000), torch.randn(8, 5000), torch.randn(1, 2, 20, 64), example(1, 8, 1)

    def off(other: torch.Tensor, rounded: bool) -> float:
        return apart(lambda *_: (logits,), lambda *_: (other,), table, torch.arange(8), [], rounded=rounded)

    def off_in_keys(other: torch.Tensor, rounded: bool) -> float:
        def writes(what: torch.Tensor):
            return lambda table, read, rows: (rows[0].copy_(what), ())[1]

        return apart(writes(keys), writes(other), table, torch.arange(8), [keys], rounded=rounded)

    for far, some in ((off, logits + 0.2 * noise), (off_in_keys, keys + 0.3 * torch.randn_like(keys))):
        assert far(some, False) > DIFFERS > far(some, True) > 0
        for other in (some.roll(1, -1), some * 0.3):
            assert far(other, True) > DIFFERS
