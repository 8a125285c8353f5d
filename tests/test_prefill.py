"""The package that reads text: what it writes into the cache is what the eager forward writes, and it is used only where that holds."""

import shutil

import packages
import pytest
import torch
from contracts import plain, recompute, request, sequence
from packages import CLOSE, DTYPE, PROMPT, VOCAB, model_of, recipe_of, texts_and_tiers, twin_folder

import outrider
from outrider.core.types import Draft
from outrider.models import compiled, package
from outrider.models.compiled import DIFFERS, PREFILL, SHAPES, STEPS, apart
from outrider.models.hf import HFModel

even, folder, builder, built = packages.even, packages.folder, packages.builder, packages.built
serve, served, fresh = packages.serve, packages.served, packages.fresh
cache, started = packages.cache, packages.started


def read(model: HFModel, tokens: list[int], before: int = 0) -> list[torch.Tensor]:
    """The cache after `tokens` were read by the last of three rows, behind `before` that were read eagerly; elsewhere it is random."""
    torch.manual_seed(1)
    with torch.inference_mode():
        for x in model.store.rows(0, len(model.rows.all)):
            x.normal_()
    seqs = [sequence([*tokens[:before], 1], f"r{n}") for n in range(3)]
    for seq in seqs:
        model.open(seq)
    package, model.compiled = model.compiled, None
    model.prefill(seqs[2:])
    model.compiled = package
    seqs[2].tokens[:] = [*tokens, 1]
    model.prefill(seqs[2:])
    assert (row := model.rows.of(seqs[2])).text == tokens and row.index == 2
    return [x.clone() for x in model.store.rows(0, len(model.rows.all))]


@pytest.mark.parametrize(("length", "before"), [(1, 0), (2, 0), (9, 8), (31, 0), (32, 0), (33, 0), (100, 0), (100, 40), (199, 150)])
def test_what_it_writes_is_what_the_eager_forward_writes(served, folder, length, before):
    """Chunks of 32 tokens, borders crossed; nothing else is written."""
    tokens = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    calls, whole = [], served.compiled.packages[PREFILL]
    served.compiled.packages[PREFILL] = lambda *given: calls.append(given[0].shape[1]) or whole(*given)
    want, got = read(model_of(folder), tokens, before), read(served, tokens, before)
    fresh = length - before
    assert calls == [min(32, fresh - start) for start in range(0, fresh, 32)]
    for a, b in zip(want, got, strict=True):
        lengths = a[2, :, :length].float().norm(dim=-1)
        assert float(((a - b)[2, :, :length].float().norm(dim=-1) / lengths).max()) < CLOSE
        a[2, :, :length] = b[2, :, :length] = 0
        assert torch.equal(a, b), "only the slots of the text are written"


def test_a_text_read_by_it_goes_on_as_one_read_eagerly(served, folder):
    """Token after token behind a prompt of three chunks: each is the likeliest, or nearly, of a model that reads eagerly."""
    asked = request((PROMPT * 12)[:80], max_tokens=30)
    text = plain(served, [asked])[0]
    afresh = recompute(model_of(folder))
    for at, token in enumerate(text):
        logits = afresh([*asked.prompt, *text[:at]]).float()
        assert float(logits.max() - logits[token]) < CLOSE * float(logits.std())
    assert len(text) == 30


@pytest.mark.parametrize("part", ["keys", "none", "nan"])
def test_apart_sees_one_wrong_key(served, part):
    """A single head's key of a single token, among all; a cache left as it was; no number."""
    given = served.compiled._given(compiled.COLUMNS[PREFILL])
    eager = compiled.Prefill(served.step)

    def wrong(table: torch.Tensor, slots: torch.Tensor, rows: list[torch.Tensor]) -> tuple:
        if part != "none":
            eager(table, slots, rows)
            line = rows[2][0, 1, int(table[0, 5, 2])]
            line[:] = torch.nan if part == "nan" else line.flip(0)
        return ()

    with torch.inference_mode():
        assert apart(eager, eager, *given) == 0
        assert not apart(eager, wrong, *given) <= DIFFERS


def test_one_of_other_weights_is_not_used(built, tmp_path, cache, started, caplog):
    """Steps are served eagerly or compiled as before; what reads is refused alone, and it is said."""
    other = twin_folder(tmp_path / "other", seed=5)
    place = recipe_of(other).place()
    place.mkdir(parents=True)
    shutil.copy(built / f"{PREFILL}.pt2", place)
    (place / "failed").write_text("eager:not-compiled\nthe disk is full")
    rt = outrider.load(other, [], dtype=DTYPE, compile="auto")
    assert rt.engine.target.compiled.packages == {} and any("differs" in r.getMessage() for r in caplog.records)
    assert texts_and_tiers(rt)[0] == texts_and_tiers(outrider.load(other, [], dtype=DTYPE, compile="off"))[0]


def test_one_that_is_slower_than_eager_reading_is_not_used_and_steps_are(fresh, monkeypatch, caplog):
    compiled._say_once.cache_clear()
    times = iter([1.0, 3.0, 1.0, 3.0, 3.0, 1.0, 1.0, 1.0])  # by turns what a package takes and what eager forwards do; then both steps' packages
    monkeypatch.setattr(compiled, "seconds_of_each", lambda calls, **_: [next(times) for _ in calls])
    served = fresh()
    again = served.compiled
    assert tuple(again.packages) == STEPS and again.reason == "eager:package-slower" and next(times, None) is None
    assert caplog.text.count("are read eagerly (eager:package-slower)") == 1
    assert len(plain(served, [request(PROMPT * 10, max_tokens=4)])[0]) == 4 and served.meter.tier == "compiled"


@pytest.mark.parametrize(("took", "least"), [([1, 2], 32), ([2, 1, 1, 2], 16), ([2, 1, 2, 1], 8), ([1, 1, 1, 1], 8)])
def test_how_many_unread_tokens_are_worth_a_forward_is_measured_and_kept(fresh, monkeypatch, took, least):
    """In one step and in two forwards, of sixteen tokens and then of eight; a later start knows, and whoever rests asks again."""
    first = fresh().compiled
    times, widths = iter(took), []

    def timed(calls, **_):
        for call in calls:
            call()
        return [next(times) for _ in calls]

    with monkeypatch.context() as clock:
        clock.setattr(compiled, "seconds_of_each", timed)
        clock.setattr(package.Package, "place", lambda *_, **__: None)
        clock.setattr(compiled.Compiled, "_weigh", lambda self: None)
        clock.setattr(package.Package, "__call__", lambda self, table, *_: widths.append(table.shape[1]))
        first.placed = -1e9
        first.rest()
    assert next(times, None) is None and widths == [16, 15, 1, 8, 7, 1][: 3 * len(took) // 2]
    assert fresh().compiled.least == first.least == least


@pytest.mark.parametrize("least", [8, 32])
def test_so_many_unread_tokens_are_read_before_a_step(served, folder, monkeypatch, least):
    """One fewer are columns of the step itself, of which each has logits that nobody asked for."""
    served.compiled.packages[PREFILL].least = least
    calls, run, text, afresh = [], package.Package.__call__, (PROMPT * 12)[:60], recompute(model_of(folder))
    monkeypatch.setattr(package.Package, "__call__", lambda self, *given: calls.append((self.file.stem, given[0].shape[1])) or run(self, *given))
    for unread in (least - 1, least):
        seq = sequence(text[:20], f"r{unread}")
        served.open(seq)
        served.prefill([seq])
        calls.clear()
        seq.tokens[:] = text[: 19 + unread]
        logits, want = served.score([seq], Draft(rows=1), [-1]).logits[0].float(), afresh(seq.tokens).float()
        assert float((logits - want).abs().max()) < CLOSE * float(want.std())
        assert [width for shape, width in calls if shape == PREFILL] == [unread - 1] * (unread == least)
        assert [width for shape, width in calls if shape != PREFILL] == [1 if unread == least else unread]
        served.close(seq)


def test_strict_texts_are_read_eagerly(served):
    """A package that is there in one process and not yet in another would change bits."""
    served.pin()
    assert set(served.compiled.packages) == {"any"}
    assert len(plain(served, [request(PROMPT * 10, max_tokens=4)])[0]) == 4 and served.meter.tier == "compiled"


@pytest.mark.parametrize("context", [1, 20, 63, 64, 130])
def test_it_is_tried_on_what_fits_into_a_short_context(serve, context):
    """A row has 65 slots more than its context; the text that a package is tried on may be longer than both. Ids and positions are those that the smallest
    models have."""
    model = serve(context)
    table, slots, _ = model.compiled._given(compiled.COLUMNS[PREFILL])
    assert int(table[..., 2].max()) < model.store.capacity - 1 and len(slots) <= model.store.capacity - 1
    assert int(table[..., 0].max()) <= 20 and int(table[..., 1].max()) < max(context, compiled.BEHIND + compiled.WIDE)
    assert set(model.compiled.packages) == set(SHAPES)
