"""Law: a race run in machine code has the winner and the share that Python's has, and is run only where it reads what Python would."""

import importlib.util
import random
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import zoo
from contracts import request, run

from outrider.control.fixed import fixed
from outrider.core import noise as noise_module
from outrider.core import sampling as sampling_module
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.noise import NEAR, POSITION, RowNoise
from outrider.core.sampling import Settings, decided, kept, line, on_host, raced
from outrider.core.types import MAX_NODES, POINT, Draft, Plan, Request, SamplingParams, Scores, Sequence
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.models import hf as hf_module
from outrider.models import kv as kv_module
from outrider.models import slots as slots_module
from outrider.models.chain import Chain
from outrider.models.exits import EarlyExit
from outrider.models.kv import Rows, slots_for
from outrider.models.load import wrap
from outrider.models.slots import SlotCache
from outrider.models.toy import TokenStore
from outrider.runtime.engine import Engine
from outrider.runtime.native import HERE, RACES
from outrider.runtime.native_builder import MAKE
from outrider.verify.host import Walk

TYPES = [torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> ModuleType:
    """races.c as the builder of machine code makes it."""
    work = tmp_path_factory.mktemp("races")
    (work / "outrider" / "core").mkdir(parents=True)
    for name in ("races.c", "race.h"):
        shutil.copy(HERE / "core" / name, work / "outrider" / "core")
    subprocess.run([sys.executable, "-c", MAKE, "built", "", RACES], cwd=work, check=True, capture_output=True)
    spec = importlib.util.spec_from_file_location(RACES, work / "built" / "outrider" / "core" / f"races{EXTENSION_SUFFIXES[0]}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def races(made, monkeypatch) -> list[tuple]:
    """What is asked of it from now on."""
    asked = []

    class Told:
        @staticmethod
        def won(*given):
            asked.append(given)
            return made.won(*given)

        @staticmethod
        def walked(*given):
            asked.append(given)
            return made.walked(*given)

    monkeypatch.setattr(sampling_module, "races", Told)
    return asked


def sequence(seed: int, rule: str = "coupled", **settings) -> Sequence:
    return Sequence(Request(str(seed), (1, 2), SamplingParams(**settings), seed, rule), [1, 2])


def python(logits, at, place, draft, settings, noise) -> tuple[int, float]:
    x, _ = line(on_host(logits)[at], place, draft, settings)
    row = tree.row_at(draft, place)
    return noise.won(x, row, tree.depth_at(draft, place) + 1, kept(x, settings.params[row]))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 40.0])
def test_winners_and_shares_are_those_of_python(made, dtype, scale):
    rng = np.random.default_rng(int(10 * scale))
    for step in range(150):
        vocab, warmth = int(rng.choice([1, 2, 255, 256, 257, 700, 5000])), float(rng.choice([1.0, 0.05, 0.7, 3.3]))
        x = torch.from_numpy(scale * rng.standard_normal(vocab)).to(dtype)
        x[torch.from_numpy(rng.random(vocab) < 0.1)] = -torch.inf
        x[int(rng.integers(vocab))] = float(scale * rng.standard_normal())
        noise, seq = RowNoise((step,), (0,), (7,)), sequence(step, temperature=warmth)
        token, share = made.won(x.data_ptr(), x.element_size(), vocab, warmth, NEAR, step, 7 + 1, POSITION)
        wanted = python(x[None], 0, -1, Draft(rows=1), Settings.of([seq]), noise)
        assert token == wanted[0] and share == pytest.approx(wanted[1], rel=1e-9)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("near", [2.0, 5.5, 9.0])
def test_however_many_are_near_all_of_them_count(made, monkeypatch, dtype, near):
    """Flat logits, among which up to eight thousand come that near: more than are kept."""
    monkeypatch.setattr(noise_module, "REACH", noise_module.REACH + near - NEAR)
    monkeypatch.setattr(noise_module, "NEAR", near)
    for step in range(20):
        x, seq = torch.zeros(9000, dtype=dtype), sequence(step, temperature=1.0)
        token, share = made.won(x.data_ptr(), x.element_size(), 9000, 1.0, near, step, 7 + 1, POSITION)
        wanted = python(x[None], 0, -1, Draft(rows=1), Settings.of([seq]), RowNoise((step,), (0,), (7,)))
        assert token == wanted[0] and share == pytest.approx(wanted[1], rel=1e-9)


@pytest.mark.parametrize("seed", [0, 1, -3, 2**63 + 5, 2**64 - 1, 2**70 + 5])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_place_has_its_own_logits_and_noise(races, dtype, seed):
    """Two rows and a branch: whose temperature, which line of the logits, how far from the text."""
    draft = tree.grow(tree.grow(tree.empty(2), [-1, -2], [3, 4], 1, POINT, [0.5, 0.5]), [0, 0, 1], [5, 6, 7], 1, POINT, [0.5] * 3)
    settings, noise = Settings.of([sequence(0, temperature=0.7), sequence(1, temperature=1.6)]), RowNoise((seed, 1), (0, 0), (2, 9))
    logits = torch.randn(1, 7, 300, generator=torch.Generator().manual_seed(seed % 1000)).to(dtype)
    places = tree.all_places(draft)
    mine = [raced(logits, at, place, draft, settings, noise) for at, place in enumerate(places)]
    assert len(races) == len(places)
    wanted = [python(logits, at, place, draft, settings, noise) for at, place in enumerate(places)]
    assert [m[0] for m in mine] == [w[0] for w in wanted] and [m[1] for m in mine] == pytest.approx([w[1] for w in wanted])
    assert len({m[0] for m in mine}) > 3


CHANGES = {"none": lambda x: x, "half": lambda x: x.half(), "with holes": lambda x: x[..., :200]}
OTHERS = [
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"logit_bias": ((3, 5.0),)},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.0},
    {"min_tokens": 4},
]


@pytest.mark.parametrize(("settings", "change"), [*((some, "none") for some in OTHERS), ({}, "half"), ({}, "with holes")], ids=str)
def test_what_it_does_not_know_is_pythons(races, settings, change):
    seq = sequence(3, temperature=0.9, **settings)
    logits, noise = CHANGES[change](torch.randn(2, 300, generator=torch.Generator().manual_seed(1))), RowNoise((3,), (0,), (2,))
    asked = logits, 1, -1, Draft(rows=1), Settings.of([seq]), noise
    assert raced(*asked) == python(*asked) and not races


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("where", [7, 49])
def test_what_is_no_number_is_an_error(races, dtype, bad, where):
    logits = torch.zeros(2, 50, dtype=dtype)
    logits[1, where] = bad
    settings, noise = Settings.of([sequence(3, temperature=1.0)]), RowNoise((3,), (0,), (2,))
    assert raced(logits, 0, -1, Draft(rows=1), settings, noise)[0] >= 0
    with pytest.raises(OutriderError, match="NaN"):
        raced(logits, 1, -1, Draft(rows=1), settings, noise)
    assert len(races) == 2


@pytest.mark.parametrize("at", [None, [0], [6], [3, 1, 5]], ids=str)
@pytest.mark.parametrize("lines", [1, 7])
def test_what_a_step_found_is_read_as_python_reads_it(made, monkeypatch, lines, at):
    """Tokens beyond float32's whole numbers, and log-probabilities to the bit; of places that are none, not a thing is read."""
    if at and max(at) >= lines:
        with pytest.raises(IndexError):
            made.decided(torch.zeros(3 * lines, dtype=torch.float64).data_ptr(), lines, at)
        return
    generator = torch.Generator().manual_seed(lines)
    found = torch.randn(1, lines, 3, generator=generator, dtype=torch.float64)
    found[..., 0] = torch.randint(1 << 40, (1, lines), generator=generator)
    scores = Scores(torch.zeros(1, lines, 5), at=at, found=found, lies=lines)
    wanted = decided(scores)
    asked = []
    monkeypatch.setattr(sampling_module, "races", SimpleNamespace(decided=lambda *given: asked.append(given) or made.decided(*given)))
    assert decided(scores) == wanted and len(asked) == 1 and all(type(token) is int for token in decided(scores)[0])
    found[0, at[-1] if at else -1, 1] = torch.nan
    for races in (None, made):
        monkeypatch.setattr(sampling_module, "races", races)
        with pytest.raises(OutriderError, match="NaN"):
            decided(scores)


@pytest.mark.parametrize(("prompts", "far", "lies"), [(1, False, True), (2, False, False), (1, True, False)], ids=["one", "many", "far"])
def test_only_what_lies_in_one_piece_is_read_where_it_lies(monkeypatch, prompts, far, lies):
    """Rows of different lengths are padded, or forwards of their own; what another device found is brought over. What is read is what Python reads."""
    seen = []
    monkeypatch.setattr(sampling_module, "HOST", () if far else ("cpu",))
    monkeypatch.setattr(hf_module, "Scores", lambda *given, **named: seen.append(Scores(*given, **named)) or seen[-1])
    target = wrap(zoo.module("llama"), "target", "zoo", rows=2, context=100)
    engine = Engine(target, {"lookup": Lookup(floor=0.0)}, fixed(Plan((("lookup", 3, 1),))), 2)
    run(engine, [request([3, 1, 4, 1, 5, 9, 2, 6] * 3 + [3] * n, f"r{n}", max_tokens=12) for n in range(prompts)])
    for scores in seen:
        assert (scores.lies > 0) >= lies and (scores.lies == 0 or (not far and scores.found.is_contiguous()))
        assert scores.lies in (0, scores.found.numel() // 3) and (scores.at is None or max(scores.at) < scores.found.numel() // 3)
        assert scores.found.dtype == torch.float64
    assert len(seen) > 3 and (prompts == 1 or any(scores.lies == 0 for scores in seen))


@pytest.mark.parametrize("kind", ["strict", "early exit", "draft model"])
def test_whoever_computed_it_what_is_read_lies_in_one_piece(monkeypatch, kind):
    """Parts of a strict step, what goes on from first layers, and the forwards of a chain."""
    seen, read = [], Chain.read
    monkeypatch.setattr(hf_module, "Scores", lambda *given, **named: seen.append(Scores(*given, **named)) or seen[-1])
    monkeypatch.setattr(
        Chain, "read", lambda self, x, found, places, *given: seen.append(Scores(x, found=found, lies=places)) or read(self, x, found, places, *given)
    )
    target = wrap(zoo.module("llama"), "target", "zoo", context=100)
    small = EarlyExit(target, 1) if kind == "early exit" else wrap(zoo.module("llama", noise=0.1), "draft", "zoo", context=100)
    name = "early-exit:1" if kind == "early exit" else "model"
    engine = Engine(target, {name: ModelDrafter(small, name)}, fixed(Plan(((name, 3, 1),))), 1, kind == "strict")
    if kind == "strict":
        target.pin()
    run(engine, [request([3, 1, 4, 1, 5, 9, 2, 6] * 3, max_tokens=16)])
    assert len(seen) > 8 and all(s.lies == s.found.numel() // 3 for s in seen) and {s.lies for s in seen} > {1}
    assert all(s.found.is_contiguous() and s.found.dtype == torch.float64 for s in seen)


@pytest.mark.parametrize("asked", [(), (1, 2), (0, 1, (0,)), (0, 1, None, 4)], ids=str)
def test_what_cannot_be_read_is_an_error(made, asked):
    with pytest.raises(TypeError):
        made.decided(*asked)


def test_drafter_and_verdict_race_alike(races, monkeypatch):
    """Who drafts with the target's own logits is right at every place; both were asked in machine code, and Python says the same."""
    logits = torch.randn(1, 4, 300, generator=torch.Generator().manual_seed(4))
    settings = Settings.of([sequence(3, temperature=1.0)])

    def outcome():
        noise = RowNoise((3,), (0,), (2,))
        draft, place = tree.empty(1), -1
        for at in range(3):
            token, score, q = ModelDrafter._one(logits[:, at], 0, place, draft, 1, settings, noise)
            draft, place = tree.grow(draft, [place], [token], 1, POINT, [score]), len(draft)
            assert 0 < score <= 1 and q is None
        return draft.token, Walk(draft, Scores(logits), settings, noise, "coupled").outcome()

    tokens, verdict = outcome()
    assert verdict.paths == [[0, 1, 2]] and len(races) == 4, "one for each guess, and one for all verdicts"
    monkeypatch.setattr(sampling_module, "races", None)
    assert outcome() == (tokens, verdict) and len(races) == 4


@pytest.mark.parametrize("windows", [(None,), (None, 70, None), (9,)], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_a_tree_is_laid_out_as_python_lays_it_out(made, monkeypatch, seed, windows):
    """Tails of one token and more, from no node to as many as a step may have, row after row into the same tables; what does not fit, or sees not all, is Python's."""
    rng = np.random.default_rng(seed)
    asked, found = [], []
    counts, tails = rng.integers(0, 12, 6).tolist() + [MAX_NODES], rng.integers(1, 5, 7).tolist()
    text = rng.integers(0, 1 << 40, 200).tolist()
    for module in (None, SimpleNamespace(laid=lambda *given: asked.append(given) or made.laid(*given))):
        monkeypatch.setattr(kv_module, "races", module)
        rows, told, shape = Rows("m", 2, 50, TokenStore(2, slots_for(50)), windows), [], random.Random(seed)
        seqs = [Sequence(Request(str(r), tuple(text[r : r + 20]), SamplingParams(), 0, "greedy"), text[r : r + 20]) for r in range(2)]
        for seq in seqs:
            rows.open(seq).skipped = 5 * (seed % 2)  # a text without its beginning
        for count, tail in zip(counts, tails, strict=True):
            for seq in seqs:
                rows.of(seq).text = seq.tokens[5 * (seed % 2) : len(seq.tokens) - tail]
                draft = Draft(rows=1)
                for n in range(count):  # chains, bushes, and what lies between
                    draft = tree.grow(draft, [n - 1 if seed % 3 == 0 else shape.randrange(-1, n)], [text[100 + n]], 1)
                layout = rows.layout([seq], draft, tree.all_places(draft))
                (block,), row = layout.blocks, rows.of(seq)
                told.append((block.first, block.table.tolist(), block.read, block.kept, layout.at, row.base, dict(row.scratch), row.resumed))
                rows.drop([seq])
                seq.tokens += seq.tokens[:2]
        found.append(told)
    assert found[0] == found[1]
    assert len(asked) == sum(all(w is None or w > count for w in windows) for count in counts) * 2


@pytest.mark.parametrize("windows", [(None,), (None, 70, None), (9,)], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_a_chain_is_laid_out_as_python_lays_it_out(made, monkeypatch, seed, windows):
    """From a root or below a node of a draft, a few nodes at a time, some of which are taken back: nodes, slots and what sees what; what a row has no slots for is refused."""
    asked, found = [], []
    text = np.random.default_rng(seed).integers(0, 1 << 40, 200).tolist()
    machine = SimpleNamespace(laid=made.laid, chained=lambda *given: asked.append(given) or made.chained(*given))
    for module in (None, machine):
        monkeypatch.setattr(kv_module, "races", module)
        rows, rng, told = Rows("m", 1, 60, TokenStore(1, slots_for(60)), windows), random.Random(seed), []
        seq = Sequence(Request("r", tuple(text[:20]), SamplingParams(), 0, "greedy"), text[:20])
        rows.open(seq)
        row, draft = rows.of(seq), tree.run(tree.run(Draft(1), -1, text[50:52], 1, [0.5] * 2), -1, text[52:54], 1, [0.5] * 2)
        for _ in range(12):
            row.text = seq.tokens[: len(seq.tokens) - rng.randint(1, 3)]
            place = rng.choice([-1, -1, 1, 3])
            ahead = text[60 : 60 + rng.randint(0, 5)]
            if place >= 0 and rng.random() < 0.5:  # what others have said was scored before
                rows.layout([seq], draft, tree.all_places(draft))
            layout = rows.begin([seq], draft, place, ahead)
            width = len(layout.blocks[0].table[0])
            assert (layout.at or list(range(width))) == list(range(width - len(ahead) - 1, width))
            blocks, node, last = [*layout.blocks], len(draft) + len(ahead), len(draft) + len(ahead) - 1 if ahead else place
            for _ in range(rng.randint(0, 4)):
                told.append(([b.table.tolist() for b in blocks], [(b.first, b.read, b.kept) for b in blocks], layout.at, row.base, dict(row.scratch)))
                gone = rng.randint(0, min(2, node - len(draft)))
                rows.undo(seq, list(range(node - gone, node)))
                node = node - gone
                last = node - 1 if node > len(draft) else place
                more = text[80 : 80 + rng.randint(1, 6)]
                blocks, node, last = [rows.onward(seq, node, last, more)], node + len(more), node + len(more) - 1
            told.append(([b.table.tolist() for b in blocks], dict(row.scratch)))
            rows.drop([seq])
        with pytest.raises(OutriderError, match="slots a row"):
            rows.begin([seq], draft, -1, [])
            rows.onward(seq, 4, -1, text[: 60 + MAX_NODES])
        found.append(told)
    assert found[0] == found[1]
    assert asked or windows == (9,)


SHAPES = [(2, 3, 3), (1, 5, 5), (2, 3, 5), (4, 1, 2)]  # heads, and entries of keys and of values, by layer: alike in nothing, in part, in all


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("seed", range(6))
@torch.inference_mode()
def test_a_cache_is_moved_copied_and_exchanged_in_all_layers(made, monkeypatch, seed, dtype):
    """Against each tensor by itself, in machine code and without; layers of one shape share a block, which nobody sees."""
    rng, found = random.Random(seed), []
    shapes = [rng.choice(SHAPES) for _ in range(5)]

    def probe(layers: list) -> None:
        for layer, (heads, key, value) in zip(layers, shapes, strict=True):
            layer.update(torch.ones(1, heads, 1, key, dtype=dtype), torch.ones(1, heads, 1, value, dtype=dtype))

    goals = range(20, 20 + rng.randint(1, 6))
    sources = sorted(rng.sample(range(20, 40), len(goals)))
    for module in (None, SimpleNamespace(moved=lambda *given: found.append(given) or made.moved(*given))):
        monkeypatch.setattr(slots_module, "races", module)
        cache = SlotCache(5, 3, 50)
        cache.allocate(torch.device("cpu"), lambda _, layers=cache.layers: probe(layers))
        rows = cache.rows(0, 3)
        wanted = [(3, heads, cache.capacity, d) for heads, *both in shapes for d in both]
        assert [tuple(x.shape) for x in rows] == wanted and not any(map(torch.any, rows)), "each layer its own shape, and nothing of the probe"
        assert cache.bytes == sum(x.nbytes for x in rows) and len(cache.blocks) == len({x.shape for x in rows})
        held = [x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(i))).clone() for i, x in enumerate(rows)]
        cache.move(1, sources, goals[0])
        cache.copy(1, 2, 3, 21)
        cache.swap(0, 2, 30)
        for x in held:
            x[1, :, list(goals)] = x[1, :, sources]
            x[2, :, 3:21] = x[1, :, 3:21]
            x[[0, 2], :, :30] = x[[2, 0], :, :30]
        assert all(map(torch.equal, held, rows))
        assert all(layer.keys.data_ptr() == x.data_ptr() for layer, x in zip(cache.layers, rows[::2], strict=True))
    assert len(found) == len(cache.blocks)


def test_slots_are_moved_only_where_none_is_written_before_it_is_read(made):
    table = np.arange(20, dtype=np.int64)
    before = table.copy()
    for sources, start in (([3], 4), ([5, 5], 4), ([6, 5], 4), ([4], -1), (list(range(65)), 0)):
        with pytest.raises(ValueError):
            made.moved(table.ctypes.data, 1, 0, 1, 0, 8, sources, start)
    for given in ((1, 0, 1, 0, 8, (4,), 4), (1, 0, 1, 0, 8, [4]), (1, 0, 1, 0, 8, ["x"], 4)):
        with pytest.raises(TypeError):
            made.moved(table.ctypes.data, *given)
    assert (table == before).all()
    made.moved(table.ctypes.data, 1, 0, 1, 0, 8, [4, 6, 7], 4)
    assert table.tolist() == [*range(5), 6, 7, *range(7, 20)]


def test_a_chain_lies_in_the_slots_of_a_step(made):
    table = np.zeros((80, 5), np.int64)
    for slot, upto in ((-1, -1), (4, 5), (69, 5)):
        with pytest.raises(IndexError):
            made.chained(table.ctypes.data, 1, [1, 2], 7, slot, upto, 0)
    for given in (([1], 7, 5, 5), ((1,), 7, 5, 5, 0), ([1], "x", 5, 5, 0), ([1], 7, 5, 5, None)):
        with pytest.raises(TypeError):
            made.chained(table.ctypes.data, 1, *given)
    assert not table.any()
    with pytest.raises(TypeError):
        made.chained(table.ctypes.data, 1, ["x"], 7, 5, 5, 0)
    made.chained(table.ctypes.data, 1, [8, 9], 7, 67, 5, 1)
    assert table[:2].tolist() == [[8, 7, 67, 5, 1 + (1 << 62)], [9, 8, 68, 5, 1 + (1 << 62) - (1 << 63)]]


def test_only_tokens_that_are_there_are_laid_out(made):
    """Nothing is read beyond a list, nor written for what is no number."""
    table = np.zeros((80, 5), np.int64)
    for start, count in ((-1, 0), (4, 0), (0, -1), (0, 3), (0, MAX_NODES + 1)):
        with pytest.raises(IndexError):
            made.laid(table.ctypes.data, 1, [1, 2, 3], start, [4, 5], [-1, 0], count)
    with pytest.raises(IndexError):
        made.laid(table.ctypes.data, 1, [1], 0, [0] * (MAX_NODES + 1), list(range(-1, MAX_NODES)), MAX_NODES + 1)
    for parents in ([-1], [-1, 1], [0, -1]):  # too few, or not before their children
        with pytest.raises(IndexError):
            made.laid(table.ctypes.data, 1, [1], 0, [4, 5], parents, 2)
    for given in (((1, 2), 0, [], [], 0), ([1], 0, [], (), 0), ([1], 0), ([1], 0, [2], ["x"], 1)):
        with pytest.raises(TypeError):
            made.laid(table.ctypes.data, 1, *given)
    assert not table.any()
    with pytest.raises(TypeError):
        made.laid(table.ctypes.data, 1, ["x"], 0, [], [], 0)
    for skipped in (-1, 2):
        with pytest.raises(IndexError):
            made.laid(table.ctypes.data, 1, [1], 0, [], [], 0, skipped)
