"""How a step's draft grows and is pruned: the forest that all its proposals share, how far each row may grow, and what of it is
verified. The interpreter and generated code use the same pieces."""

from collections.abc import Set
from dataclasses import replace
from numbers import Integral
from typing import Any

from outrider.compiler.step import Done, Now, Parts, accept
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.types import MAX_NODES, POINT, QUEUED, Draft, Places, Sequence, stage

VEILED = -1  # no token


def allowed(seq: Sequence, drafter: str) -> bool:
    """May this drafter guess for this request?"""
    return seq.request.drafters is None or drafter in seq.request.drafters


def rooms(seqs: list[Sequence]) -> list[int]:
    """Most nodes deep that each row's draft may be."""
    return [s.room for s in seqs]


def budgets(seqs: list[Sequence], budget: int) -> list[int]:
    """Nodes of each row that may be verified: by the plan, and by what its request asked for."""
    budget = budget or MAX_NODES
    return [min(budget, s.most) for s in seqs]


def caps(seqs: list[Sequence], budget: int, *, free: bool) -> list[int]:
    """Nodes each row may grow to. A budget binds while drawing where nothing may be pruned afterwards."""
    return [MAX_NODES] * len(seqs) if free else [min(most, MAX_NODES) for most in budgets(seqs, budget)]


def likely(seqs: list[Sequence], draft: Draft, places: Places) -> Places:
    """Without the guesses that their requests think too unlikely to go on from."""
    return [p for p in places if p < 0 or draft.score[p] >= seqs[draft.row[p]].request.limits.floor]


def fitting(draft: Draft, places: Places, width: int, room: list[int], most: list[int]) -> Places:
    """The places that may grow: their row needs more tokens than that, and its next level fits under the cap."""
    rows = [tree.row_at(draft, p) for p in places]
    fits = [p for p, r in zip(places, rows, strict=True) if room[r] > tree.depth_at(draft, p)]
    if len(draft) + width * len(rows) <= min(most):  # far from any cap
        return fits
    return [p for p in fits if draft.row.count(r := tree.row_at(draft, p)) + width * rows.count(r) <= most[r]]


def ahead(draft: Draft, places: Places, levels: int, room: list[int], most: list[int]) -> int:
    """Levels that a drafter may add by itself, a node each, below every one of the places."""
    rows = [tree.row_at(draft, p) for p in places]
    return min(
        levels, *(min(room[r] - tree.depth_at(draft, p), (most[r] - draft.row.count(r)) // rows.count(r)) for p, r in zip(places, rows, strict=True))
    )


def ends(draft: Draft, starts: Places, bit: int, hidden: set[int]) -> tuple[int, Places]:
    """(levels that a drafter has grown below `starts`, its nodes at the last of them)."""
    below = dict.fromkeys(starts, 0)
    for n, parent in enumerate(draft.parent):
        if parent in below and draft.source[n] & bit and n not in hidden:
            below[n] = below[parent] + 1
    level = max(below.values())
    return level, [n for n, depth in below.items() if depth == level] if level else []


def leaves(draft: Draft, nodes: list[int]) -> Places:
    """Of each row, the nodes that have none of `nodes` below them; its root where it has none."""
    inner = {draft.parent[n] for n in nodes}
    found = {draft.row[n] for n in nodes}
    return [~r for r in range(draft.rows) if r not in found] + [n for n in nodes if n not in inner]


def agreed(draft: Draft, nodes: list[int], bit: int) -> list[int]:
    """Of `nodes`, the path from each root that the drafter of a bit has marked; all, in rows of which it said nothing."""
    spoken = {draft.row[n] for n in nodes if draft.source[n] & bit}
    path: list[int] = []
    on = set(tree.roots(draft.rows))
    for n in nodes:
        if draft.row[n] not in spoken:
            path.append(n)
        elif draft.parent[n] in on and draft.source[n] & bit:
            on.discard(draft.parent[n])  # one child of a place
            on.add(n)
            path.append(n)
    return path


def best(draft: Draft, places: Places, count: int, weight: list[float]) -> Places:
    """Of each row the `count` places that are most likely to survive, by the `weight` of every node, shallow ones first where
    they are alike."""
    ranked = sorted(places, key=lambda p: (-weight[p] if p >= 0 else -1.0, tree.depth_at(draft, p), p))
    left, out = [count] * draft.rows, []
    for p in ranked:
        if left[r := tree.row_at(draft, p)]:
            left[r] -= 1
            out.append(p)
    return sorted(out, key=lambda p: tree.depth_at(draft, p))


def usual(parts: Parts, now: Now, asked: tuple[tuple[str, int, int], ...], rule: str, ask: bool, weigh: bool) -> Done:
    """What nearly all steps are: one row, which asks for nothing; drafters (name, depth, width) in turn from its root; what is verified of all that
    they said. `ask`: the controller, before every level; `weigh`: it leaves out nodes."""
    full, levels, reason, left = tree.empty(1), dict[str, int](), now.reason, len(asked)
    for name, depth, width in asked:
        left -= 1
        full = down(parts, now, full, levels, name, depth, width, ask, left == 0)
    nodes = tree.span(0, len(full.token))
    if weigh:
        nodes, reason = weighed(parts, now, full, nodes)
        if len(nodes) < len(full.token) and _queued(parts):
            nodes, reason = tree.span(0, len(full.token)), QUEUED
    draft = full if len(nodes) == len(full.token) else tree.select(full, nodes)
    now.clock.mark("draft")
    scores = parts.target.score(now.seqs, full, [-1, *nodes])
    now.clock.mark("score")
    return Done(full, nodes, draft, levels, reason, scores, accept(draft, scores, now.settings, now.noise, rule))


def down(parts: Parts, now: Now, full: Draft, levels: dict[str, int], name: str, depth: int, width: int, ask: bool, last: bool = False) -> Draft:
    """The draft of one row, which asks for nothing, grown by a drafter from its root: what `Forest.grow` does there. `ask`: the controller, before
    every level; `levels` takes how deep it went, less what took no step of its own. The `last` drafter's guesses may be on their way to the target
    before the host knows them; nothing is added to those."""
    seqs, bit, drafter, room = now.seqs, parts.bits[name], parts.drafters[name], now.seqs[0].room
    frontier, level, saved, queues = [-1] if room > 0 else [], 0, 0, last and width == 1 and _queues(parts, name, ask)
    while level < depth and frontier and not (queues and _queued(parts)):
        frontier = parts.controller.more(seqs, name, full, frontier) if ask else frontier
        if not frontier or room <= level:
            break
        ahead = min(depth, room) - level if width == 1 else 1
        if queues and (blind := parts.controller.blind(name) if ask else ahead):
            full = extended(parts, now, name, full, frontier, width, min(ahead, blind), ask, target=parts.target)
        else:
            full = extended(parts, now, name, full, frontier, width, ahead, ask)
        saved += getattr(drafter, "saved", 0)
        level, frontier = _lowest(full, bit, level)
    if level:
        levels[name] = max(level - saved, 1)
        now.clock.mark(stage(name))
    if queues and (queued := _queued(parts)):
        now.clock.part("score", stage(name), queued.lap.seconds)
        if ask:
            parts.controller.went(name, full, frontier)
    return full


def extended(
    parts: Parts, now: Now, name: str, draft: Draft, frontier: Places, width: int, levels: int, ask: bool, target: Any = None
) -> Draft:  # fmt: skip
    """One call of a drafter. `ask`: the controller, while it drafts; `target`: who scores what it proposes before the host knows its tokens."""
    drafter: Any = parts.drafters[name]
    seqs, bit, settings, noise = now.seqs, parts.bits[name], now.settings, now.noise
    made: Any
    if ask:
        _tell(parts, name, drafter)
    if target is not None:
        made = drafter.extend(
            seqs, draft, frontier, width, bit, settings, noise, levels=levels, on=parts.controller.on if ask else None, target=target
        )
    elif ask:
        made = drafter.extend(seqs, draft, frontier, width, bit, settings, noise, levels=levels, on=parts.controller.on)
    else:
        made = drafter.extend(seqs, draft, frontier, width, bit, settings, noise, levels=levels)
    if name in parts.foreign:
        _look_at(made, draft, name, len(frontier) * width * levels, parts.target.spec.vocab_size)
    grown: Draft = made
    return grown


def _look_at(made: Any, draft: Draft, name: str, most: int, vocab: int) -> None:
    """Refuse by its name what a drafter gave that no step could go on with."""
    if not isinstance(made, Draft) or len(made.token) < len(draft.token):
        raise OutriderError(f"drafter '{name}' gave {made!r:.80}", "it is no continuation of the draft", "the draft as it was, where it has no guess")
    guessed: list[Any] = made.token[len(draft.token) :]
    if len(guessed) > most:
        raise OutriderError(
            f"drafter '{name}' guessed {len(guessed)} tokens", f"it was asked for {most} at most", "`width` below a place, `levels` down"
        )
    for token in guessed:
        if not isinstance(token, Integral) or not 0 <= int(token) < vocab:
            raise OutriderError(f"drafter '{name}' guessed token {token!r}", f"the target's ids are 0..{vocab - 1}", "ids of the target's tokenizer")


def _tell(parts: Parts, name: str, drafter: Any) -> None:
    """What a drafter is told before a call by a controller that decides while it drafts."""
    controller: Any = parts.controller
    if name in parts.told:
        drafter.likely = controller.likely(name)
    if parts.tells and (tail := controller.tail(name)) is not None:
        drafter.tail = tail


def _queues(parts: Parts, name: str, ask: bool) -> bool:
    """May the target's verdict be asked for behind a drafter's guesses?"""
    target: Any = parts.target
    return name in parts.behind and not target.pinned and (not ask or parts.blind)


def _queued(parts: Parts) -> Any:
    """What the target was asked for before the host knew the draft's last tokens, and has scored of it by now; None: nothing."""
    return getattr(parts.target, "queued", None)


def _lowest(full: Draft, bit: int, level: int) -> tuple[int, Places]:
    """How deep a drafter's nodes go, if that is below `level`, and those of them that are as deep; else the next level, and none."""
    deepest = level
    for n, depth in enumerate(full.depth):
        if depth > deepest and full.source[n] & bit:
            deepest = depth
    return (deepest, [n for n, depth in enumerate(full.depth) if depth == deepest and full.source[n] & bit]) if deepest > level else (level + 1, [])


def weighed(parts: Parts, now: Now, full: Draft, nodes: list[int]) -> tuple[list[int], str]:
    """Of one row's nodes those to verify, and why: what `Forest.prune` has where nothing else bounds them."""
    chosen, reason = parts.controller.fill(now.seqs, full, now.reason)
    keep = among(full, nodes, chosen)
    return keep if len(keep) <= MAX_NODES else [keep[n] for n in tree.heaviest(tree.select(full, keep), [MAX_NODES])], reason


def among(full: Draft, nodes: list[int], chosen: list[int] | None) -> list[int]:
    """Of `nodes` those that the controller has chosen of all that is drafted; None: all."""
    return nodes if chosen is None or not nodes else chosen if len(nodes) == len(full) else sorted(set(nodes).intersection(chosen))


class Forest:
    """What is drafted in one step, and how far it may grow. `free`: the text does not hang on it."""

    def __init__(self, parts: Parts, now: Now, budget: int, *, free: bool) -> None:
        self.parts, self.now, self.reason = parts, now, now.reason
        self.full = tree.empty(len(now.seqs))
        self.room, self.caps = rooms(now.seqs), caps(now.seqs, budget, free=free)
        self.levels: dict[str, int] = {}
        self.saved = 0  # levels of the drafter under way that took no step of their own

    def starts(self, how: str, nodes: list[int], name: str, *, own: bool = False) -> Places:
        """Where a drafter begins: at the roots; at the roots and all of `nodes`; below the leaves of `nodes` (`own`: its own)."""
        full, bit = self.full, self.parts.bits[name]
        places = tree.roots(full.rows) if how == "on" else [*tree.roots(full.rows), *nodes] if how == "over" else leaves(full, nodes)
        if own:
            places = [p for p in places if p >= 0 and full.source[p] & bit]
        return [p for p in places if allowed(self.now.seqs[tree.row_at(full, p)], name)]

    def grow(self, name: str, starts: Places, seen: list[int], depth: int, width: int) -> list[int]:
        """Level by level below `starts`, for as long as the controller lets it. `seen`: nodes that it may find. The nodes
        that it made or found."""
        before, hidden, bit = len(self.full), set(range(len(self.full))).difference(seen), self.parts.bits[name]
        across = min(width, max(self.caps))
        frontier, level = self.fitting(starts, across), 0  # nobody is asked where nothing may be drafted
        while level < depth and (frontier := likely(self.now.seqs, self.full, frontier)):
            frontier = self.fitting(self.parts.controller.more(self.now.seqs, name, self.full, frontier), across)
            if not frontier:
                break
            levels = 1 if across > 1 else self.ahead(frontier, depth - level)
            self.extend(name, frontier, across, hidden, levels)
            reached, frontier = ends(self.full, starts, bit, hidden)
            level, frontier = (reached, frontier) if reached > level else (level + 1, [])
        return self._grown(name, level, before, seen)

    def over(self, name: str, starts: Places, seen: list[int]) -> list[int]:
        """One node below every one of `starts` of the rows that the controller lets it begin, in one call."""
        before, hidden = len(self.full), set(range(len(self.full))).difference(seen)
        roots = self.parts.controller.more(self.now.seqs, name, self.full, [p for p in starts if p < 0])
        rows = {~p for p in roots}
        frontier = self.fitting([p for p in starts if tree.row_at(self.full, p) in rows], 1)
        if frontier:
            self.extend(name, frontier, 1, hidden, 1)
        return self._grown(name, int(bool(frontier)), before, seen)

    def best_first(self, name: str, starts: Places, seen: list[int], depth: int, width: int) -> list[int]:
        """Out of order: always below the places that the controller thinks likeliest to survive, whatever their depth. `depth`
        times."""
        before, hidden, waiting, rounds = len(self.full), set(range(len(self.full))).difference(seen), list(starts), 0
        across, controller = min(width, max(self.caps)), self.parts.controller
        while rounds < depth and (waiting := likely(self.now.seqs, self.full, waiting)):
            asked = best(self.full, waiting, width, controller.survivals(self.now.seqs, self.full))
            frontier = self.fitting(controller.more(self.now.seqs, name, self.full, asked), across)
            if not frontier:
                break
            first = len(self.full)
            self.extend(name, frontier, across, hidden, 1)
            waiting = [p for p in waiting if p not in asked] + list(range(first, len(self.full)))  # what was refused, or did not fit, stays so
            rounds += 1
        return self._grown(name, rounds, before, seen)

    def shaped(self, name: str, starts: Places, seen: list[int], parents: list[int]) -> list[int]:
        """A fixed tree below every start: each node gets as many children as the shape has, its likeliest first."""
        before, hidden, bit, level = len(self.full), set(range(len(self.full))).difference(seen), self.parts.bits[name], 0
        frontier = [(p, -1) for p in starts]  # place, and which node of the shape it is
        while frontier:
            wanted = {at: [n for n, parent in enumerate(parents) if parent == at] for _, at in frontier}
            inner = likely(self.now.seqs, self.full, [p for p, at in frontier if wanted[at]])
            asked = self.parts.controller.more(self.now.seqs, name, self.full, inner) if inner else []
            below: list[tuple[int, int]] = []
            for count in sorted({len(wanted[at]) for p, at in frontier if p in asked}):
                some = self.fitting([p for p, at in frontier if p in asked and len(wanted[at]) == count], count)
                if some:
                    self.extend(name, some, count, hidden, 1)
                for place, at in [(p, at) for p, at in frontier if p in some]:
                    made = [n for n, parent in enumerate(self.full.parent) if parent == place and self.full.source[n] & bit and n not in hidden]
                    below += zip(sorted(made, key=lambda n: (-self.full.score[n], n)), wanted[at], strict=False)
            level, frontier = level + bool(below), below
        return self._grown(name, level, before, seen)

    def fitting(self, places: Places, width: int) -> Places:
        return fitting(self.full, places, width, self.room, self.caps)

    def ahead(self, places: Places, levels: int) -> int:
        return ahead(self.full, places, levels, self.room, self.caps)

    def extend(self, name: str, frontier: Places, width: int, hidden: set[int], levels: int) -> None:
        """One call of a drafter. Tokens of nodes that it may not find are veiled from it."""
        full = self.full
        veiled = replace(full, token=[VEILED if n in hidden else t for n, t in enumerate(full.token)]) if hidden else full
        made = extended(self.parts, self.now, name, veiled, frontier, width, levels, getattr(self.parts.controller, "asks", True))
        self.full = replace(made, token=full.token + made.token[len(full) :]) if hidden else made
        self.saved += getattr(self.parts.drafters[name], "saved", 0)

    def _grown(self, name: str, levels: int, before: int, seen: list[int]) -> list[int]:
        saved, self.saved = self.saved, 0
        if levels:
            self.levels[name] = self.levels.get(name, 0) + max(levels - saved, 1)
            self.now.clock.mark(stage(name))
        return [*seen, *range(before, len(self.full))]

    def prune(self, nodes: list[int], budget: int, *, chain: bool = False, unless_sampled: bool = False) -> list[int]:
        """The nodes to verify: what the controller wants of them, one path a row if `chain`, no more than the budget, and what
        the requests asked for."""
        full, seqs = self.full, self.now.seqs
        chosen, self.reason = self.parts.controller.fill(seqs, full, self.reason)
        whole = {full.row[n] for n in nodes if full.kind[n] != POINT} if unless_sampled else set[int]()
        if not nodes or whole:  # nothing drawn is left out; what other rows asked for holds all the same
            keep, self.reason = asked_for(seqs, full, nodes, self.reason, whole)
            return keep
        keep = among(full, nodes, chosen)
        if chain:
            keep = [keep[n] for n in tree.chain(tree.select(full, keep))]
        most = budgets(seqs, budget)
        if len(keep) > min(most):
            keep = [keep[n] for n in tree.heaviest(tree.select(full, keep), most)]
        keep, self.reason = asked_for(seqs, full, keep, self.reason)
        return keep


def asked_for(seqs: list[Sequence], draft: Draft, keep: list[int], reason: str, whole: Set[int] = frozenset()) -> tuple[list[int], str]:
    """What of the nodes to be verified its requests want, but for rows that stay `whole`: none that its drafter thinks less likely than `floor`, nor
    what is below one; and none of a row that has fewer than `least`."""
    if not keep or all(s.request.limits.floor == 0 and s.request.limits.least == 0 for s in seqs):
        return keep, reason
    fine: set[int] = set()
    for n in keep:
        row, above = draft.row[n], draft.parent[n]
        if row in whole or (draft.score[n] >= seqs[row].request.limits.floor and (above < 0 or above in fine)):
            fine.add(n)
    few = {r for r, s in enumerate(seqs) if s.request.limits.least > sum(draft.row[n] == r for n in fine) and r not in whole}
    kept = [n for n in keep if n in fine and draft.row[n] not in few]
    return kept, reason if kept else "off:least" if fine else "off:floor"
