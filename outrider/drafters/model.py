"""Drafting with a causal LM: a small model, or a view of the target's own layers. Chains and trees.

Greedy rows get its most likely tokens as points. Sampling rows get draws from its distribution under the row's own
settings: with replacement-free siblings under `exact` (q is kept for the verdict), and by the shared noise under
`coupled`. Its cache is caught up at the next use, however long it was left out.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mypy_extensions import mypyc_attr
from torch import Tensor

from outrider.core import tree
from outrider.core.noise import DRAFT, RowNoise
from outrider.core.sampling import Race, Settings, decided, hosted, line, near, process, raced, seen, warp, weights
from outrider.core.sockets import Model
from outrider.core.types import AHEAD, DISTINCT, POINT, SAMPLED, Draft, On, Outcome, Places, Sequence
from outrider.drafters.suffix import INDEX, index_of

MAX_PLACES = 1024  # more than the nodes of a row and the children of a place, so that addresses of noise never meet


@mypyc_attr(allow_interpreted_subclasses=True)
class ModelDrafter:
    """A Drafter over any Model. Rows that would outgrow the model's context get no proposal, nor do texts with an id that it lacks.

    vocab: the target's width of logits, where it differs from the model's: embedding tables are padded to different sizes. Ids beyond it are never
    proposed; ids the model lacks have probability 0, and it cannot read them. `foresees`: may it read what followed the same words before along with its own guesses? A chain
    takes fewer steps then than it has levels. `likely`: levels that the next call will probably go, by whoever decides; 0: all that it may. `tail`:
    with how many tokens of one text's end it begins in the next call, if far more are not read yet; 0: with all; None: as it began.
    """

    draws = True

    def __init__(self, model: Model, name: str = "model", vocab: int | None = None) -> None:
        self.model, self.name, self.vocab, self.saved, self.foresees = model, name, vocab or model.spec.vocab_size, 0, True
        self.likely = 0
        self.tail: int | None = None
        self.lacks, self.mark = self.model.spec.vocab_size < self.vocab, f"{name} reads"  # the slot that says how much of a text it can read

    @property
    def queues(self) -> bool:
        """Are its guesses made on a device, with a cache of their own, so that others may read them there?"""
        return not near(self.model.spec.device) and getattr(self.model, "own", False)

    def begin(self, seq: Sequence) -> None:
        self.model.open(seq)

    def end(self, seq: Sequence) -> None:
        self.model.close(seq)
        seq.slots.pop(INDEX, None)
        seq.slots.pop(self.mark, None)

    def observe(self, seqs: list[Sequence], draft: Draft, outcome: Outcome) -> None:
        self.model.commit(seqs, draft, outcome)

    def extend(
        self,
        seqs: list[Sequence],
        draft: Draft,
        frontier: Places,
        width: int,
        source: int,
        settings: Settings,
        noise: RowNoise,
        levels: int = 1,
        on: On | None = None,
        target: Model | None = None,
    ) -> Draft:
        self.saved, likely, self.likely = 0, self.likely, 0
        tail, self.tail = self.tail, None
        if tail is not None and hasattr(self.model, "begin_at"):
            self.model.begin_at(seqs[0], tail)
        frontier = [p for p in tree.open_at(seqs, draft, frontier) if self._end(seqs, draft, p) < self.model.spec.context]
        if self.lacks:
            frontier = [p for p in frontier if self._reads(seqs, draft, p)]
        if not frontier:
            return draft
        one = width == 1 and self.model.spec.vocab_size <= self.vocab
        simple = settings.raw and one
        asks = on is not None and target is None
        if one and settings.bare and (ahead := self._ahead(seqs, draft, frontier, levels, settings, asks)) > (target is None):
            return self._chain(seqs, draft, frontier[0], ahead, source, settings, noise, on, target, likely or ahead)
        scores = self.model.score(seqs, draft, frontier)
        if simple:
            tokens, logp = decided(scores)
            return tree.grow(draft, frontier, tokens, source, POINT, [math.exp(x) for x in logp])
        if near(self.model.spec.device):
            decided(scores)  # raises where the model overflows: a view would leave that to the target
        logits = self._fit(scores.logits)
        if width == 1 and not settings.all_greedy and hosted(logits):
            logits = logits.cpu()
            found = [self._one(logits, at, place, draft, source, settings, noise) for at, place in enumerate(frontier)]
            return _grown(draft, frontier, found, source)
        if settings.all_greedy:
            return self._points(draft, frontier, process(logits, frontier, draft, settings), width, source)
        rows = tree.row_of(frontier, draft)
        exact = ~settings.greedy[rows] & ~settings.coupled[rows]
        if exact.any() and not exact.all():  # both kinds in one batch: one after the other
            drawn, other = ([p for p, e in zip(frontier, exact, strict=True) if e == kind] for kind in (True, False))
            draft = self._sampled(draft, drawn, warp(logits[exact], drawn, draft, settings), width, source, noise)
            frontier, logits, exact = other, logits[~exact], exact[~exact]
        logq = warp(logits, frontier, draft, settings)
        if exact.all() and len(exact):
            return self._sampled(draft, frontier, logq, width, source, noise)
        raced = noise.race(logq, tree.row_of(frontier, draft), tree.depth_of(frontier, draft) + 1)
        return self._points(draft, frontier, raced, width, source)

    def _ahead(self, seqs: list[Sequence], draft: Draft, frontier: Places, levels: int, settings: Settings, asks: bool) -> int:
        """Levels that are drafted at once: if one `asks` between them, on a device for which the host would have to wait at each only a few; else
        all, if the request asks for no floor, which is looked at between calls. 0: whose guesses are drawn from what the verdict must know (`exact`)
        goes level by level."""
        if len(seqs) > 1 or len(frontier) > 1 or not hasattr(self.model, "chain") or not (settings.raw or settings.coupled[0]):
            return 0
        levels = min(levels, self.model.spec.context - self._end(seqs, draft, frontier[0]))
        if seqs[0].request.limits.floor:
            levels = 1
        if near(self.model.spec.device):
            return levels
        return min(levels, AHEAD) if asks else levels

    def _chain(
        self, seqs: list[Sequence], draft: Draft, place: int, levels: int, source: int, settings: Settings, noise: RowNoise,
        on: On | None, target: Model | None, likely: int,
    ) -> Draft:  # fmt: skip
        """Tokens below a place, found one after the other: the likeliest, or who wins the races there. The target's verdict on them is asked for
        before they are known, if one is given. Nothing is foreseen beyond the levels that are `likely`: it would be read for nothing."""
        race = None if settings.raw else Race(draft, place, settings, noise)
        ahead = self._foreseen(seqs, draft, place, likely) if self.foresees and levels > 1 and near(self.model.spec.device) else None
        behind = None if target is None else _behind(target, seqs, draft, place, race)
        found, scores, steps = self.model.chain(seqs, draft, place, levels, on, race, ahead, behind)  # type: ignore[attr-defined]
        self.saved = len(found) - steps
        tokens, first = tree.ended(found, seqs[0].request.ends), len(draft)
        made = tree.run(draft, place, tokens, source, scores[: len(tokens)])
        if len(made) == first + len(found):
            return made
        nodes = tree.below(made, place, tokens) if len(made) < first + len(tokens) else []
        names = dict(enumerate(nodes, first))  # others had guessed the same
        names |= {n: ~n for n in range(first + len(tokens), first + len(found))}  # past the end: computed, and no nodes
        for model in (self.model, target) if getattr(target, "queued", None) else (self.model,):
            model.rename(seqs[0], names)  # type: ignore[union-attr]
        return made

    @staticmethod
    def _foreseen(seqs: list[Sequence], draft: Draft, place: int, likely: int) -> Callable[[list[int], int], list[int]]:
        """What followed the same words earlier in the text, for the model to read along with its own guesses (staged speculative decoding,
        2308.04623: a cheaper drafter drafts for the drafter)."""
        trail = index_of(seqs[tree.row_at(draft, place)]).trail()
        for token in draft.text(tree.ancestors(draft, place)):
            trail.went(token)
        gone = 0

        def ahead(found: list[int], most: int) -> list[int]:
            nonlocal gone
            for token in found[gone:]:
                trail.went(token)
            gone = len(found)
            return trail.foreseen(min(most, likely - 1))

        return ahead

    @staticmethod
    def _one(logits: Tensor, at: int, place: int, draft: Draft, source: int, settings: Settings, noise: RowNoise) -> tuple[int, float, Tensor | None]:
        """A token below one place, on the host, by the settings of its row; its score; and what it was drawn from, if it was drawn."""
        row = tree.row_at(draft, place)
        if settings.coupled[row] and not settings.greedy[row]:
            return *raced(logits, at, place, draft, settings, noise), None
        sampling, (x, best) = settings.params[row], line(seen(logits)[at], place, draft, settings)
        if settings.greedy[row]:
            return best, 1 / float(np.exp(x).sum()), None
        q = weights(x, sampling)
        q /= q.sum()
        number = 0 if place < 0 else draft.row[:place].count(row) + 1  # a drafter extends a place once a step
        token = noise.draw_one(q, row, DRAFT, (source * MAX_PLACES + number) * MAX_PLACES)
        return token, float(q[token]), torch.from_numpy(q)

    def _reads(self, seqs: list[Sequence], draft: Draft, place: int) -> bool:
        """Does the model have all ids up to the place? What was looked at of a text is not looked at again: -1 where it lacks one."""
        size, seq = self.model.spec.vocab_size, seqs[tree.row_at(draft, place)]
        known: int = seq.slots.get(self.mark, 0)
        if 0 <= known < len(seq.tokens):
            known = seq.slots[self.mark] = len(seq.tokens) if max(seq.tokens[known:]) < size else -1
        return known >= 0 and all(token < size for token in draft.text(tree.ancestors(draft, place)))

    @staticmethod
    def _end(seqs: list[Sequence], draft: Draft, place: int) -> int:
        """Tokens of the text up to and with the place."""
        return len(seqs[~place].tokens) if place < 0 else len(seqs[draft.row[place]].tokens) + draft.depth[place]

    def _fit(self, logits: Tensor) -> Tensor:
        missing = self.vocab - logits.shape[-1]
        if missing == 0:
            return logits
        return logits[:, : self.vocab] if missing < 0 else torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)

    def _points(self, draft: Draft, frontier: Places, x: Tensor, width: int, source: int) -> Draft:
        """The `width` largest of x [n, V] below each place, ties to the lowest id."""
        values, ids = x.sort(dim=-1, descending=True, stable=True) if width > 1 else _first(x)
        share = torch.exp(values[:, :width] - torch.logsumexp(x, -1, keepdim=True))
        good = torch.isfinite(values[:, :width]).flatten().cpu().numpy()
        parents = np.repeat(frontier, width)[good] if width <= x.shape[-1] else np.repeat(frontier, x.shape[-1])[good]
        tokens = ids[:, :width].flatten().cpu().numpy()[good]
        return tree.grow(draft, parents, tokens, source, POINT, share.double().flatten().cpu().numpy()[good].tolist())

    def _sampled(self, draft: Draft, frontier: Places, logp: Tensor, width: int, source: int, noise: RowNoise) -> Draft:
        """`width` draws without replacement from q = exp(logp) [n, V] below each place."""
        q, rows = logp.exp(), tree.row_of(frontier, draft)
        number = np.array([-1 if p < 0 else draft.row[:p].count(draft.row[p]) for p in frontier])  # within its row
        address = source * MAX_PLACES + number + 1  # a drafter extends a place once a step
        left, tokens, alive = q.clone(), [], []
        for i in range(width):
            alive.append((left > 0).any(-1).cpu().numpy())
            token = noise.draw(torch.where((left > 0).any(-1, keepdim=True), left, q), rows, DRAFT, address * MAX_PLACES + i)
            tokens.append(token.cpu().numpy())
            left = left.scatter(-1, token[:, None], 0.0)
        keep = np.stack(alive, 1).flatten()
        chosen = np.stack(tokens, 1)
        score = q.gather(-1, torch.from_numpy(chosen).to(q.device)).double().cpu().numpy()
        q_row = np.repeat(np.arange(len(frontier)), width)[keep]
        kind = SAMPLED if width == 1 else DISTINCT
        parents = np.repeat(frontier, width)[keep]
        return tree.grow(draft, parents, chosen.flatten()[keep], source, kind, score.flatten()[keep].tolist(), q, q_row)


def _behind(target: Any, seqs: list[Sequence], draft: Draft, place: int, race: Race | None) -> Callable[[Tensor], Any]:
    """What asks for the target's verdict on tokens below a place."""
    return lambda tokens: target.queue(seqs, draft, place, tokens, race)


def _grown(draft: Draft, frontier: Places, found: list[tuple[int, float, Tensor | None]], source: int) -> Draft:
    """The draft with these tokens below its frontier: points, and what was drawn."""
    points = [(p, token, score) for p, (token, score, q) in zip(frontier, found, strict=True) if q is None]
    drawn = [(p, token, score, q) for p, (token, score, q) in zip(frontier, found, strict=True) if q is not None]
    if points:
        below, tokens, scores = map(list, zip(*points, strict=True))
        draft = tree.grow(draft, below, tokens, source, POINT, scores)
    if drawn:
        below, tokens, scores, q = map(list, zip(*drawn, strict=True))
        draft = tree.grow(draft, below, tokens, source, SAMPLED, scores, torch.stack(q), list(range(len(q))))
    return draft


def _first(x: Tensor) -> tuple[Tensor, Tensor]:
    best = x.argmax(-1, keepdim=True)
    return x.gather(-1, best), best
