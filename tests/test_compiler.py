"""Laws 3 and 4: generated code equals the interpreter, and no pass changes what a program writes. What passes save, counted."""

import ast
import json
import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from contracts import always, request
from enumeration import Enumerator, completed, distance, law
from enumeration import plain as plain_law
from programs import NAMES, Contrary, Picky, random_plan, random_program, scheduler, written
from test_exact_enumeration import PROMPT, Bench
from xdsl.dialects.builtin import ModuleOp

import outrider
from outrider.compiler import jit as jit_module
from outrider.compiler.opt import PLAIN, step_of
from outrider.compiler.pipeline import BACK, FRONT, PASSES, Pipeline, passes
from outrider.control.fixed import Told, fixed
from outrider.core.errors import OutriderError
from outrider.core.types import MAX_NODES, Limits, Plan, Request, SamplingParams
from outrider.drafters.lookup import Lookup
from outrider.drafters.model import ModelDrafter
from outrider.ir.text import parse, programs, show
from outrider.measure.cost import best_tree
from outrider.models.toy import ToyModel
from outrider.runtime import engine as engine_module
from outrider.runtime.engine import Engine

RULES = ("greedy", "coupled", "exact")


def told(records: list[Any]) -> list[Any]:
    """All that a step decided."""
    return [
        (
            r.plan,
            r.context,
            r.drafted,
            r.accepted,
            r.emitted,
            r.tokens,
            r.kept,
            r.levels,
            r.reason,
            r.trimmed,
            r.draft.token,
            r.draft.parent,
            r.draft.source,
        )
        for r in records
    ]


@pytest.mark.parametrize("control", always(1, [Picky, Told]))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("first", always(1, range(0, 108, 12)))
def test_generated_code_equals_the_interpreter(first: int, rule: str, control: type[Told]) -> None:
    """Law 3, token for token and node for node, 12 random programs at a time, a random plan at every step."""
    drafted = 0
    for seed in range(first, first + 12):
        rng = random.Random(f"{seed} {rule}")
        module, rows = random_program(rng, rule), rng.choice([1, 1, 3])
        found = []
        for hot in (None, 0):
            plans = random.Random(seed)
            texts, records, _engine = written(
                lambda rule, m=module: m.clone(), lambda p=plans: random_plan(p), rule, rows=rows, control=control, front=(), hot=hot
            )
            assert {r.tiers["step"] for r in records} == {"interpreted" if hot is None else "generated"}
            found.append((texts, told(records)))
            drafted += sum(sum(r.drafted) for r in records)
        assert found[0] == found[1], f"seed {seed}\n{show(module)}"
    assert drafted > 50


def test_whoever_decides_now_is_asked() -> None:
    """Two controllers in turn, in the middle of one text: one that lets drafters guess, and one that is asked and lets nobody."""

    class Never(Told):
        def more(self, seqs: Any, name: str, draft: Any, frontier: list[int]) -> list[int]:
            return []

    guess = lambda seqs: (Plan((("lookup", 3, 1),)), "told")  # noqa: E731
    engine = Engine(ToyModel(6, 5, rows=1), {"lookup": Lookup(floor=0.0)}, (free := Told(guess)), 1, hot=0)
    held = Never(guess)
    engine.submit(request([1, 2, 1, 2, 1, 2], max_tokens=60))
    for n in range(12):
        engine.controller = held if n % 2 else free
        engine.step()
    assert any(r.drafted[0] for r in engine.ring) and not any(r.drafted[0] for r in [*engine.ring][1::2])


@pytest.mark.parametrize("control", [Told, Picky, scheduler])
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_code_of_usual_steps_equals_the_interpreter(rule: str, control: Any) -> None:
    """One row, the default program, no budgets: what nearly all steps are keeps no forest, and drafts, leaves out and records the same."""
    for seed in range(6):
        found = []
        for hot in (None, 0):
            rng = random.Random(seed)
            plans = lambda rng=rng: Plan(tuple((name, rng.randint(1, 5), 1) for name in NAMES if rng.random() < 0.7))  # noqa: E731
            texts, records, engine = written(lambda rule: None, plans, rule, rows=1, control=control, tokens=24, hot=hot)
            found.append((texts, told(records)))
        code = [entry.run.source for entry in engine.jit.known.values() if entry.plan.drafters]
        lean = ["usual(" in text and "Forest" not in text for text in code]
        assert found[0] == found[1] and any(lean)
        assert control is scheduler or all(lean), "three drafters that may each go as deep as there is could fill a row"
        assert control is Told or any(", True)  # ask, weigh" in text for text in code)
    assert control is not Picky or any(sum(trimmed) for *_, trimmed, _, _, _ in found[0][1])


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("seed", always(6, range(40)))
def test_passes_change_no_text(rule: str, seed: int) -> None:
    """Law 4: each pass alone, and some in a random order, on a program that is run."""
    rng = random.Random(f"{seed} {rule}")
    module = random_program(rng, rule)
    plain, _, _ = written(lambda rule: module.clone(), Plan, rule, front=(), hot=None)
    order = rng.sample(FRONT, len(FRONT))
    for front in [(name,) for name in FRONT] + [tuple(order[: rng.randint(2, len(order))]), FRONT]:
        plans = random.Random(seed)
        text, _, _ = written(lambda rule: module.clone(), lambda p=plans: random_plan(p), rule, front=front, hot=rng.choice([None, 0]))
        assert text == plain, f"{front}\n{show(Pipeline(passes(front)).run(module.clone()))}"


@pytest.mark.parametrize("rule", always(1, ["coupled", "greedy"]))
@pytest.mark.parametrize("first", always(1, range(0, 80, 20)))
def test_any_program_runs_under_the_scheduler(first: int, rule: str) -> None:
    """Whoever is asked first about nodes, twice about roots, or about roots after nodes: it answers, and the text stays."""
    drafted = 0
    for seed in range(first, first + 20):
        rng = random.Random(f"{seed} {rule}")
        module, rows, hot = random_program(rng, rule), rng.choice([1, 2, 3]), rng.choice([None, 0])
        plain, _, _ = written(lambda rule, m=module: m.clone(), Plan, rule, rows=rows, front=(), hot=None, tokens=40)
        texts, records, _ = written(lambda rule, m=module: m.clone(), Plan, rule, rows=rows, control=scheduler, hot=hot, tokens=40)
        assert texts == plain, f"seed {seed}\n{show(module)}"
        drafted += sum(sum(r.drafted) for r in records)
    assert drafted > 100


def test_every_pass_is_run_somewhere() -> None:
    assert set(FRONT) | set(BACK) == set(PASSES)


TWICE = """outrider.program @twice {
  %text = outrider.context
  %a = outrider.propose "model" on %text depth 3 width 1 : point
  %b = outrider.propose "model" on %text depth 3 width 1 : point
  %c = outrider.propose "weak" on %text depth 3 width 1 : point
  %draft = outrider.union %a, %b
  %scores = outrider.score %draft on %text by "target"
  %outcome = outrider.accept %draft, %scores by "greedy"
  outrider.commit %outcome
}
"""
ALL = Plan(tuple((n, 3, 1) for n in NAMES))


def forwards(text: str, front: tuple[str, ...], back: tuple[str, ...] = ("specialize", "lower")) -> tuple[list[list[int]], Counter[str], int]:
    """(texts, forwards of each model a step, nodes scored a step)."""
    texts, records, engine = written(lambda rule: parse(text), lambda: ALL, "greedy", rows=1, front=front, back=back, hot=0)
    count = Counter({name: engine.drafters[name].model.forwards for name in ("model", "weak")})  # type: ignore[attr-defined]
    return texts, count, sum(sum(r.drafted) for r in records)


def test_cse_and_dce_save_calls_of_models() -> None:
    texts, all_of_it, nodes = forwards(TWICE, ())
    same, once, fewer = forwards(TWICE, ("cse",))
    again, alive, as_many = forwards(TWICE, ("dce",))
    assert texts == same == again
    assert once["model"] * 2 == all_of_it["model"] > 0 and fewer * 2 == nodes
    assert alive["model"] == all_of_it["model"] and as_many == nodes and alive["weak"] == 0 < all_of_it["weak"]


def test_independent_draws_are_never_one() -> None:
    text = TWICE.replace("width 1 : point\n  %b", "width 1 sample 0 : sampled\n  %b").replace(
        "3 width 1 : point\n  %c", "3 width 1 sample 1 : sampled\n  %c"
    )
    text = text.replace('"greedy"', '"k_seq"')
    module = Pipeline(passes("canonicalize,cse,dce")).run(parse(text))
    assert show(module).count('propose "model"') == 2
    cold = Pipeline(passes("canonicalize,cse,dce")).run(parse(text.replace('"k_seq"', '"k_seq" at temperature 0')))
    assert show(cold).count('propose "model"') == 1, "at temperature 0 they are the same guess"


def test_merged_tries_score_fewer_nodes() -> None:
    text = TWICE.replace("%a, %b", "%a, %c, %l").replace(
        '  %draft', '  %l = outrider.propose "lookup" on %text depth 3 width 1 : point\n  %draft'
    )  # fmt: skip
    texts, _calls, apart = forwards(text, ("cse", "dce"))
    same, _fewer_calls, merged = forwards(text, ("cse", "merge-tries", "dce"))
    assert texts == same and merged < apart


def test_a_relay_asks_the_small_model_less() -> None:
    """What the lookup guessed right the small model reads in one forward."""
    staged = TWICE.replace('%a = outrider.propose "model" on %text depth 3 width 1 : point', '%l = outrider.propose "lookup" on %text depth 3 width 1 : point\n'
                           '  %a = outrider.relay "model" over %l depth 1 : point').replace("%a, %b", "%a")  # fmt: skip
    texts, calls, _ = forwards(staged, ("dce",))
    flat, same, _ = forwards(staged, ("flatten-relay", "dce"))
    assert texts == flat and calls == same
    alone, per_token, _ = forwards(TWICE.replace("%a, %b", "%a"), ("dce",))
    assert texts == alone and calls["model"] < per_token["model"]


def test_a_plan_becomes_code_when_it_is_hot_and_starts_anew_with_the_batch() -> None:
    _, records, _engine = written(lambda rule: parse(TWICE), lambda: ALL, "greedy", rows=2, tokens=25)
    tiers = [(len(r.requests), r.tiers["step"]) for r in records]
    alike = [tier for rows, tier in tiers if rows == 2]
    assert alike[: jit_module.HOT] == ["interpreted"] * jit_module.HOT and set(alike[jit_module.HOT :]) <= {"generated"}
    lone = [tier for rows, tier in tiers if rows == 1]
    assert lone[0] == "interpreted" and "generated" in lone, "other facts, a tier lower"


@pytest.mark.parametrize("hot", [None, 0])
def test_who_is_made_of_a_controller_that_only_tells_is_asked(hot: int | None) -> None:
    pruned = TWICE.replace("  %scores", "  %kept = outrider.prune %draft budget ?\n  %scores", 1)
    pruned = pruned.replace("score %draft", "score %kept").replace("accept %draft", "accept %kept")
    for control, reason in ((Picky, "picked"), (Told, "random")):
        _, records, _ = written(lambda rule: parse(pruned), lambda: ALL, "greedy", control=control, hot=hot)
        assert {r.reason for r in records if any(r.drafted) or any(r.trimmed)} == {reason}


OWN = (
    TWICE.replace('"model" on %text depth 3', '"small" on %text depth 2', 1)
    .replace('"model"', '"lookup"')
    .replace('  %c = outrider.propose "weak" on %text depth 3 width 1 : point\n', "")
)


@pytest.mark.parametrize("hot", [None, 0])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "wishes", [[{"lookup"}], [{"small"}], [set()], [None], [{"lookup"}, None], [{"small"}, {"lookup"}], [set(), {"small"}]], ids=str
)
def test_nobody_drafts_for_who_does_not_want_it(wishes: list[set[str] | None], own: bool, hot: int | None) -> None:
    """One request that names its drafters is served by plans that name no others, and its steps are usual ones; so is one's own program."""
    texts = []
    for plan in (Plan(), Plan((("lookup", 3, 1), ("small", 2, 1)))):
        target, small = (ToyModel(13, 2, name=name, blend=(2, share)) for name, share in (("target", 0.0), ("small", 0.4)))
        parts = {"lookup": Lookup(floor=0.0), "small": ModelDrafter(small, "small", 13)}
        engine = Engine(target, parts, fixed(plan), 2, hot=hot, source=(lambda rule: parse(OWN)) if own and plan.drafters else None)
        seqs = [
            engine.submit(
                Request(str(n), (1, 2, 3, 1 + n, 2), SamplingParams(max_tokens=40), n, "greedy", drafters=None if w is None else frozenset(w))
            )
            for n, w in enumerate(wishes)
        ]
        while engine.step():
            pass
        texts.append([seq.tokens for seq in seqs])
    assert texts[0] == texts[1]
    for seq, wish in zip(seqs, wishes, strict=True):
        at = {(r.draft.source[n], r.draft.row[n] == r.requests.index(seq.request.id)) for r in seq.records for n in range(len(r.draft))}
        drafted = {name for name, bit in engine.bits.items() if any(source & bit and its for source, its in at)}
        assert drafted == (set(engine.bits) if wish is None else wish)
    if len(wishes) == 1 and not own:
        names = {"lookup", "small"} if wishes[0] is None else wishes[0]
        assert engine.facts[0].free and all({name for name, _, _ in r.plan.drafters} == names for r in seqs[0].records)
        assert {r.reason for r in seqs[0].records} == {"fixed" if names else "off:request"}


def test_who_follows_wants_others() -> None:
    """One request after the other, under one plan: what is left of it is each one's own."""
    target, small = (ToyModel(13, 1, name=name, blend=(2, share)) for name, share in (("target", 0.0), ("small", 0.4)))
    parts = {"lookup": Lookup(floor=0.0), "small": ModelDrafter(small, "small", 13)}
    engine = Engine(target, parts, fixed(Plan((("lookup", 3, 1), ("small", 2, 1)))), 1, hot=0)
    for name in ("lookup", "small", "lookup"):
        seq = engine.submit(Request(name, (1, 2, 3, 1, 2), SamplingParams(max_tokens=20), 1, "greedy", drafters=frozenset({name})))
        while engine.step():
            pass
        assert {source for r in seq.records for source in r.draft.source} == {engine.bits[name]}


def test_a_loaded_runtime_has_the_code_of_its_plans() -> None:
    """No step of a request waits for a plan's passes."""
    runtime = outrider.load(compile="off", profile="off")
    before = set(runtime.engine.jit.known)
    for how in ({}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0}):
        out = runtime.generate("Once upon a time", max_tokens=40, **how)
        assert set(out.stats["tiers"]["step"]) == {"generated"}
    assert set(runtime.engine.jit.known) == before and len(before) > 20


def test_the_cache_forgets_the_oldest_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_module, "MOST", 3)
    rng = random.Random(0)
    _, _, engine = written(lambda rule: parse(TWICE), lambda: random_plan(rng), "greedy", tokens=40)
    assert len(engine.jit.known) <= 3


def test_facts_rule_out_what_code_leaves_out() -> None:
    """Nothing is asked of a controller that only tells, and no limit is looked for where there is none."""
    lowered = Pipeline(passes(["flatten-relay", "dce", "lower"])).run(parse(TWICE))
    sure = step_of(programs(lowered)[0])
    wary = step_of(programs(lowered)[0], PLAIN._replace(told=False, free=False, one=False, raw=False))
    assert "controller" not in sure and "decided(scores)" in sure and "[-1" in sure
    assert "forest.grow" in wary and "accept(" in wary and "len(seqs)" in wary


def test_code_names_a_drafter_as_its_program_does() -> None:
    for name in ("näher:2.5x{0}", 'lo"ok', "back\\slash"):
        lowered = Pipeline(passes(["dce", "lower"])).run(parse(TWICE.replace('"model"', json.dumps(name, ensure_ascii=False))))
        for free in (True, False):
            tree = ast.parse(step_of(programs(lowered)[0], PLAIN._replace(free=free)))
            assert name in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def test_a_program_of_ones_own_is_run(tmp_path: Any) -> None:
    module: ModuleOp = parse(TWICE)
    texts, records, _engine = written(lambda rule: module.clone(), lambda: ALL, "greedy", rows=1)
    assert texts and all(r.levels.get("lookup") is None for r in records), "it asks no lookup"


ALONE = TWICE.replace("depth 3 width 1", "depth ? width ?")
PARTS = ALONE.replace(
    "%draft = outrider.union %a, %b",
    """%p = outrider.prune %b budget ?
  %q = outrider.prune %c budget ?
  %draft = outrider.union %p, %q""",
)


@pytest.mark.parametrize("hot", [None, 0])
@pytest.mark.parametrize("text", [ALONE, PARTS], ids=["no prune", "a prune for each part"])
def test_limits_a_budget_and_the_scheduler_act_on_every_program(tmp_path: Any, text: str, hot: int | None) -> None:
    """What is verified is what one last prune leaves, whether the file has it or not."""
    (file := tmp_path / "mine.mlir").write_text(text)
    source = jit_module.of_file(file, dict.fromkeys(NAMES, SimpleNamespace(draws=True)))
    for budget, limits in ((3, Limits()), (0, Limits(most=2)), (0, Limits(least=8)), (0, Limits(floor=0.4))):
        plan = Plan(tuple((name, 4, 2) for name in NAMES), budget)
        _, records, _ = written(source, lambda p=plan: p, "greedy", rows=1, hot=hot, limits=limits)
        drafted = [r.drafted[0] for r in records]
        assert 0 < max(drafted) <= (budget or limits.most or MAX_NODES) and all(n == 0 or n >= limits.least for n in drafted)
        assert min(r.draft.score[n] for r in records for n in r.kept) >= limits.floor
    _, records, _ = written(source, Plan, "greedy", control=scheduler, hot=hot, tokens=40)
    assert any(any(r.drafted) for r in records) and not any(any(r.drafted) and r.reason.startswith("off") for r in records)


OVER = TWICE.replace('"model" on %text depth 3 width 1', '"lookup" on %text depth ? width ?', 1).replace(
    '"model" on %text depth 3 width 1', '"model" over %a'
)
EMPTY = OVER.replace('propose "lookup" on %text depth ? width ? : point', "empty")


@pytest.mark.parametrize("hot", [None, 0])
@pytest.mark.parametrize("back", [BACK, ("specialize", "lower")], ids=["folded", "as it stands"])
@pytest.mark.parametrize("front", [(), FRONT], ids=["read", "rewritten"])
def test_who_guesses_over_a_draft_heeds_the_plan(front: tuple[str, ...], back: tuple[str, ...], hot: int | None) -> None:
    """One level where the plan has it, whatever its depth and width there; none where the plan leaves it out, alone or with all others."""
    beside = OVER.replace("  %b", "  %none = outrider.empty\n  %b").replace("over %a", "over %a beside %none, %a")
    for text in (OVER, beside, EMPTY):
        for named in ({"model": 2}, {"lookup": 2}, {"lookup": 2, "model": 3}, {}):
            plan = Plan(tuple((name, depth, 2) for name, depth in named.items()))
            _, records, _ = written(lambda rule, t=text: parse(t), lambda p=plan: p, "greedy", rows=1, front=front, back=back, hot=hot)
            assert {name for r in records for name in r.levels} == set(named) - ({"lookup"} if text is EMPTY else set())
            assert {r.levels["model"] for r in records if "model" in r.levels} <= {1}
            assert text is not EMPTY or all(sum(r.drafted) <= 1 for r in records)


def test_who_guesses_over_a_draft_does_so_under_the_scheduler() -> None:
    _, records, _ = written(lambda rule: parse(OVER), Plan, "greedy", control=scheduler, hot=0, tokens=40)
    assert any("model" in r.levels for r in records) and any(not r.plan.drafters and not any(r.drafted) for r in records)


LAWFUL = {
    "a fixed tree": '%d = outrider.propose "model" on %text depth 2 width 2 shape "-1 -1 0" : sampled',
    "out of order": '%d = outrider.propose "model" on %text depth 3 width 2 order "best-first" : sampled',
    "points pruned before the union": '%l = outrider.propose "lookup" on %text depth 2 width 2 : point\n%p = outrider.prune %l budget 1\n'
    '%m = outrider.propose "model" on %text depth 2 width 1 : sampled\n%d = outrider.union %p, %m',
    "drawn below points": '%l = outrider.propose "lookup" on %text depth 1 width 1 : point\n%d = outrider.propose "model" after %l depth 1 width 2 : sampled',
    "two that draw": '%m = outrider.propose "model" on %text depth 1 width 1 : sampled\n%o = outrider.propose "other" on %text depth 2 width 1 : sampled\n'
    '%d = outrider.union %o, %m',
}  # fmt: skip


@pytest.mark.parametrize(("made", "control", "hot"), [
    *((made, Told, hot) for made in LAWFUL for hot in (None, 0) if made != "out of order"),
    ("out of order", Told, None), ("out of order", Contrary, 0),
    pytest.param("out of order", Told, 0, marks=pytest.mark.slow), pytest.param("out of order", Contrary, None, marks=pytest.mark.slow),
])  # fmt: skip
def test_exact_text_of_lawful_programs(monkeypatch: pytest.MonkeyPatch, made: str, control: type[Told], hot: int | None) -> None:
    """Every way that a step can go, by enumeration: the target's distribution."""
    text = f"""outrider.program @lawful {{
      %text = outrider.context
      {LAWFUL[made]}
      %s = outrider.score %d on %text by "target"
      %o1 = outrider.accept %d, %s by "exact"
      outrider.commit %o1
    }}"""
    bench, sampling, drafted = Bench(monkeypatch, 3), SamplingParams(temperature=1.0, max_tokens=3), [0]

    plan = Plan(tuple((name, 3, 2) for name in bench.drafters))
    engine = Engine(bench.target, bench.drafters, control(lambda seqs: (plan, "told")), 1, source=lambda rule: parse(text), hot=hot)

    def once(noise: Enumerator) -> tuple[int, ...]:
        monkeypatch.setattr(engine_module, "_noise", lambda seqs: noise.fresh())
        seq = engine.submit(Request("r", PROMPT, sampling, seed=0, rule="exact"))
        engine.step()
        engine.cancel(seq)
        drafted[0] = max(drafted[0], *seq.records[0].drafted)
        return tuple(seq.generated)

    p = plain_law(bench.target, PROMPT, sampling)
    assert distance(completed(law(once), p, 3), completed({(): 1.0}, p, 3)) < 1e-9 and drafted[0] >= (1 if "points" in made else 2)


def test_the_best_tree_is_the_best_of_all() -> None:
    """Against every tree of up to six nodes."""

    def trees(nodes: int) -> list[list[int]]:
        found = [[-1]]
        for _ in range(nodes - 1):
            found = [[*t, parent] for t in found for parent in range(t[-1], len(t))]
        return found

    def worth(parents: list[int], ranks: list[float]) -> float:
        chance: list[float] = []
        for i, parent in enumerate(parents):
            rank = parents[:i].count(parent)
            chance.append((ranks[rank] if rank < len(ranks) else 0.0) * (1.0 if parent < 0 else chance[parent]))
        return sum(chance)

    for ranks in ([0.6, 0.3, 0.1], [0.9, 0.05], [0.34, 0.33, 0.33], [0.5]):
        for nodes in range(1, 7):
            mine = best_tree(ranks, nodes, 6)
            assert worth(mine, ranks) == pytest.approx(max(worth(t, ranks) for t in trees(nodes)))
        assert max(sum(1 for _ in _path(best_tree(ranks, 8, 2), n)) for n in range(len(best_tree(ranks, 8, 2)))) <= 2
    for wrong in ([], [0.2, 0.5], [1.2], [0.0]):
        with pytest.raises(OutriderError, match="no chances by rank"):
            best_tree(wrong, 4, 4)


def _path(parents: list[int], node: int) -> Iterator[int]:
    while node >= 0:
        yield node
        node = parents[node]
