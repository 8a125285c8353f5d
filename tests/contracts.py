"""Contract suites: what every Model and every Drafter must do, whichever it is (laws 6, 7 and 8)."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from outrider.control.fixed import fixed
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.types import Draft, Outcome, Plan, Request, SamplingParams, Sequence
from outrider.models.hf import HFModel
from outrider.models.kv import Rows
from outrider.runtime.engine import Engine


def always(n: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of a test: `n` of them always, the others in the slow suite. A tuple is several arguments."""
    return [
        value if i < n else pytest.param(*(value if isinstance(value, tuple) else [value]), marks=pytest.mark.slow) for i, value in enumerate(values)
    ]


def refused(do: Callable[[], Any], *words: str) -> OutriderError:
    """The refusal, which must say all the words and name a remedy."""
    with pytest.raises(OutriderError) as found:
        do()
    error = found.value
    assert error.what and error.try_this, str(error)
    for word in words:
        assert word in str(error), f"{word!r} is not in {error}"
    return error


def sequence(tokens: list[int], name: str = "r", **sampling: object) -> Sequence:
    return Sequence(request(tokens, name, **sampling), list(tokens))


def request(
    tokens: list[int], name: str = "r", *, seed: int = 0, rule: str = "coupled", ends: frozenset[int] = frozenset(), **sampling: object
) -> Request:
    drafters = sampling.pop("drafters", None)
    return Request(name, tuple(tokens), SamplingParams(**{"max_tokens": 32, **sampling}), seed, rule, ends, drafters=drafters)


def run(engine: Engine, requests: list[Request]) -> list[Sequence]:
    """All requests to their end."""
    seqs = [engine.submit(r) for r in requests]
    while any(s.finish_reason is None for s in seqs):
        engine.step()
    return seqs


def plain(model: object, requests: list[Request]) -> list[list[int]]:
    """The texts without drafting, one request at a time."""
    return [run(Engine(model, {}, fixed(Plan()), 1), [r])[0].generated for r in requests]


def random_draft(rng: np.random.Generator, rows: int, vocab: int, nodes: int) -> Draft:
    """A forest of points of random shape."""
    draft = Draft(rows=rows)
    for _ in range(nodes):
        parent = int(rng.integers(-rows, len(draft)))
        draft = tree.grow(draft, np.array([parent]), rng.integers(0, vocab, 1), 1)
    return draft


def random_outcome(rng: np.random.Generator, draft: Draft, vocab: int) -> Outcome:
    """Any path from each root, and any bonus."""
    table, paths = tree.children(draft), []
    for row in range(draft.rows):
        place, path = ~row, []
        while (down := table.get(place)) and rng.random() < 0.8:
            place = int(rng.choice(down))
            path.append(place)
        paths.append(path)
    return Outcome(paths, rng.integers(0, vocab, draft.rows).tolist(), [0] * draft.rows)


def check_scores(
    model: object, reference: object, rng: np.random.Generator, vocab: int, tolerance: float, steps: int = 12, outliers: float = 0.0
) -> None:
    """Ragged rows take random steps (plain, chains, trees, partial scoring); every score equals `reference(tokens)`.

    So every cache was exact after every commit, for every kind of step that came before. `outliers`: the share of
    scores that may be off, for routed models in half precision only (rounding can flip the choice of an expert).
    """
    errors = []
    seqs = [sequence(rng.integers(0, vocab, n).tolist(), f"r{n}") for n in (3, 9, 5)]
    for seq in seqs:
        model.open(seq)
    model.prefill(seqs)
    for step in range(steps):
        draft = random_draft(rng, len(seqs), vocab, 0 if step % 3 == 2 else int(rng.integers(1, 9)))
        places = tree.all_places(draft)
        cut = int(rng.integers(0, len(draft) + 1))  # scored in two calls, as a drafter does
        first, second = places[: len(seqs) + cut], places[len(seqs) + cut :]
        logits = [model.score(seqs, draft, part).logits for part in (first, second) if len(part)]
        for place, got in zip(places, (row for part in logits for row in part), strict=True):
            row = ~place if place < 0 else draft.row[place]
            want = reference(seqs[row].tokens + draft.text(tree.ancestors(draft, place)))
            spread = float(want.float().std())
            errors.append(float((got.float() - want.float()).abs().max()) / spread)
            assert outliers or errors[-1] <= tolerance, f"step {step}, place {place}: off by {errors[-1]} of the spread"
        outcome = random_outcome(rng, draft, vocab)
        for seq, path, bonus in zip(seqs, outcome.paths, outcome.bonus, strict=True):
            seq.tokens += [*draft.text(path), bonus]
        model.commit(seqs, draft, outcome)
        for seq in seqs:
            row = model.rows.of(seq)
            assert row.text == seq.tokens[:-1], "the cache does not hold the committed text"
        if step == steps // 2:  # a row leaves, another joins: indices move
            model.close(seqs.pop(0))
            seqs.append(sequence([*seqs[0].tokens[:4], 1, 2], "late"))
            model.open(seqs[-1])
    for seq in seqs:
        model.close(seq)
        assert not seq.slots
    assert np.mean(np.array(errors) > tolerance) <= outliers


def check_drafter(make: object, target: object, rng: np.random.Generator, vocab: int) -> None:
    """Never more than asked; survives others' commits and pauses; leaves nothing behind; the text stays plain's."""
    drafter = make()
    engine = Engine(target, {drafter.name: drafter}, fixed(Plan()), 3)
    requests = [request(rng.integers(0, vocab, n).tolist() * 2, f"d{n}", max_tokens=40) for n in (2, 5, 3)]
    want = plain(target, requests)
    seqs = [engine.submit(r) for r in requests]
    while any(s.finish_reason is None for s in seqs):
        depth, width = int(rng.integers(0, 5)), int(rng.integers(1, 3))
        engine.controller = fixed(Plan(((drafter.name, depth, width),) if depth else ()))
        moved = engine.step()
        most = sum(width**k for k in range(1, depth + 1))
        assert all(d <= most for d in moved[0].records[-1].drafted)
    assert [s.generated for s in seqs] == want
    assert all(not s.slots for s in seqs)


def opened(rows: Rows, lengths: list[int], tail: int = 1) -> list[Sequence]:
    """Sequences with all but `tail` tokens cached, as far as the bookkeeping knows."""
    seqs = [sequence([1 + r] * n, f"s{r}") for r, n in enumerate(lengths)]
    for seq in seqs:
        rows.open(seq)
        rows.appended(seq, seq.tokens[: len(seq.tokens) - tail])
    return seqs


def recompute(model: HFModel):
    def logits(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model.module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1, : model.spec.vocab_size]

    return logits
