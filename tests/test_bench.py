"""The benchmark: paired ratios and geometric means, the stock contenders, every contender's rows, synthetic shapes."""

import json
import math
import os
import subprocess
from dataclasses import fields
from types import SimpleNamespace

import psutil
import pytest
import torch
from tiny import tiny_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider
from outrider import reference
from outrider.bench import ablation, peers, prompts, report, run, start, synthetic, verdict, widths
from outrider.bench.prompts import Prompt
from outrider.bench.run import AGAIN, CONTENDERS, DRAFTED, FEWER, OURS, STOCK, Row, summary
from outrider.bench.table import markdown
from outrider.core.errors import OutriderError
from outrider.models.load import wrap

ASKED = "the quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    return tiny_folder(root / "target"), tiny_folder(root / "draft", jitter=0.03)


@pytest.fixture(scope="module")
def stock(folders):
    return peers.Stock(*folders, "float32", device="cpu")


def short_prompts(category: str) -> list[Prompt]:
    chat = ({"role": "user", "content": "which fox"},) if category == "tool_dialogue" else None
    heat = 1.0 if category == "open_ended" else 0.0
    return [Prompt(f"{category}-{i}", category, None if chat else f"{ASKED} {i} {ASKED}", chat, heat) for i in range(2)]


@pytest.fixture(scope="module")
def result(folders):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "load", short_prompts)
        return run.speed(
            1, 8, 3, lambda category: None, target=folders[0], draft=folders[1], device="cpu", dtype="float32", compile="off",
        )  # fmt: skip


def rows(category: str, prompt: str, seconds: dict[str, float], other: str | None = None) -> list[Row]:
    """One prompt written by all, four tokens in that many seconds after the first; `other` writes another text."""
    return [
        Row(prompt, category, name, [1, 2, 3, 4, 5 if name != other else 6], 1, 1 + seconds.get(name, 1.0), 1.0, 2, 0 if name == OURS else 4, 2)
        for name in CONTENDERS
    ]


def test_ratios_are_paired_by_prompt_and_averaged_geometrically():
    made = [r for c in prompts.CATEGORIES for r in rows(c, f"{c}-a", {OURS: 4.0, STOCK: 8.0, "ours lookup": 1.0})]
    made += rows("story", "story-b", {OURS: 1.0, "ours lookup": 1.0}, other="ours model")
    table = {(r["category"], r["contender"]): r for r in summary(made)}
    story = table["story", "ours lookup"]["against_ours_plain"]
    assert story["ratio"] == pytest.approx(2.0) and story["pairs"] == 2
    assert (story["worst"], story["worst_prompt"], story["best"], story["best_prompt"]) == (1.0, "story-b", 4.0, "story-a")
    assert table["code", "ours lookup"]["against_stock_plain"]["ratio"] == pytest.approx(8.0)
    assert table["all", OURS]["against_ours_plain"]["ratio"] == 1.0 and table["all", OURS]["acceptance_rate"] is None
    assert table["story", "ours model"]["identical_to_ours_plain"] == 1 and table["all", "ours model"]["identical_to_ours_plain"] == 6
    assert table["story", "ours lookup"]["tokens_per_second"] == pytest.approx(4.0)
    assert table["story", "ours lookup"]["tokens_per_call"] == pytest.approx(2.0) and table["story", "ours model"]["acceptance_rate"] == 0.5
    tables = markdown({"summary": summary(made)}).split("\n\n")
    for lines in (part.splitlines() for part in tables if part.startswith("|")):
        assert len(lines) == len(CONTENDERS) + 2 and len({line.count("|") for line in lines}) == 1


def test_texts_of_other_lengths_are_compared_per_token():
    base = Row("p", "code", OURS, list(range(11)), 1, 6.0, 1.0, 10, 0, 0)
    shorter = Row("p", "code", "ours lookup", list(range(9)), 4, 3.0, 2.0, 2, 5, 3)
    told = next(r for r in summary([base, shorter]) if r["contender"] == "ours lookup")
    assert told["against_ours_plain"]["ratio"] == pytest.approx((5.0 / 10) / (1.0 / 5)) and told["against_stock_plain"] is None
    assert told["first_token_ms"] == 2000 and told["tokens_per_call"] == 2.5 and told["acceptance_rate"] == 0.6


def test_a_text_that_ends_with_its_first_tokens_has_no_ratio():
    made = [Row("p", "code", OURS, [1, 2, 3], 1, 2.0, 1.0, 2, 0, 0), Row("p", "code", STOCK, [1, 2, 3], 3, 1.0, 1.0, 0, 0, 0)]
    told = next(r for r in summary(made) if r["contender"] == STOCK)
    assert told["against_ours_plain"] is None and told["tokens_per_second"] is None and told["tokens_per_call"] is None
    assert told["identical_to_ours_plain"] == 1 and "| - |" in markdown({"summary": summary(made)})


def test_a_step_is_draft_and_score_and_host():
    row = Row("p", "code", OURS, list(range(11)), 1, 6.0, 1.0, 10, 0, 0, 1.0, 3.0)
    split = summary([row])[0]["ms_per_step"]
    assert split == {"step": 500.0, "draft": 100.0, "verify": 300.0, "host": pytest.approx(100.0)}


@pytest.mark.parametrize("contender", peers.SETTINGS)
def test_stock_writes_the_greedy_text_of_transformers(contender, folders, stock):
    prompt = [0, *range(70, 90), *range(70, 84)]
    module = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    want = module.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
    got = stock.write(contender, prompt, 20, 0.0, {1})
    assert got.tokens == want
    assert 0 < got.first_token_seconds <= got.seconds
    assert got.first_tokens + got.target_calls - 1 <= len(want)
    if contender == peers.PLAIN:
        assert (got.target_calls, got.first_tokens, got.drafted) == (len(want), 1, 0) and got.first_token_seconds < got.seconds
    assert got.drafted >= len(want) - got.first_tokens - (got.target_calls - 1), "accepted guesses are guesses"


def test_a_stock_assistant_guesses_as_it_is_set(stock):
    prompt = [0, *range(70, 90)]
    five, twenty = (stock.write(name, prompt, 24, 0.0, {1}) for name in (peers.CONSTANT, peers.DYNAMIC))
    assert 0 < five.drafted <= peers.GUESSES * (five.target_calls - 1)
    assert stock.assistants[peers.CONSTANT].num_assistant_tokens == 5 and stock.assistants[peers.DYNAMIC].num_assistant_tokens is None
    assert five.tokens == twenty.tokens and (five.target_calls, five.drafted) != (twenty.target_calls, twenty.drafted)


def test_stock_samples_the_same_text_again_and_stops_at_an_end(stock):
    one, two = (stock.write(peers.PLAIN, [0, 70, 71], 12, 1.0, {1}) for _ in range(2))
    greedy = stock.write(peers.PLAIN, [0, 70, 71], 12, 0.0, {1})
    assert one.tokens == two.tokens != greedy.tokens
    end = greedy.tokens[3]
    assert stock.write(peers.PLAIN, [0, 70, 71], 12, 0.0, {end}).tokens == greedy.tokens[: greedy.tokens.index(end) + 1]
    assert len(stock.write(peers.PLAIN, [0, 70, 71], 12, 0.0, set()).tokens) == 12
    assert not stock.target._forward_hooks, "the hooks are gone"


def test_every_contender_writes_every_prompt(result):
    table = {(r["category"], r["contender"]) for r in result["summary"]}
    assert table == {(c, n) for c in (*prompts.CATEGORIES, "all") for n in CONTENDERS} and AGAIN in CONTENDERS
    assert len(result["rows"]) == len(CONTENDERS) * len(prompts.CATEGORIES)
    order = [r["contender"] for r in result["rows"]]
    assert [order[i * len(CONTENDERS)] for i in range(3)] == list(CONTENDERS[:3]), "they take turns at being first"
    for row in result["rows"]:
        assert 1 <= row["tokens"] <= 8 and row["first_token_seconds"] <= row["seconds"] and row["accepted"] <= row["drafted"]
        assert (row["verify_seconds"] is not None) == (row["contender"] in DRAFTED)


def test_greedy_texts_are_the_same_for_all_in_float32(result):
    texts = {}
    for row in result["rows"]:
        if row["category"] != "open_ended" and row["contender"] not in FEWER:  # which is another model
            texts.setdefault(row["prompt"], set()).add(row["text"])
    assert {len(found) for found in texts.values()} == {1}
    again = [r for r in result["summary"] if r["contender"] == AGAIN and r["category"] == "all"]
    assert again[0]["identical_to_ours_plain"] == len(prompts.CATEGORIES)


def test_ratios_can_be_computed_again_from_the_rows(result):
    own = {(r["contender"], r["prompt"]): r for r in result["rows"]}

    def pace(name: str, prompt: str) -> float:
        r = own[name, prompt]
        return (r["tokens"] - r["first_tokens"]) / (r["seconds"] - r["first_token_seconds"])

    for told in (r for r in result["summary"] if r["category"] == "all"):
        both = [p for n, p in own if n == OURS and all(own[m, p]["tokens"] > own[m, p]["first_tokens"] for m in (OURS, told["contender"]))]
        logs = [math.log(pace(told["contender"], p) / pace(OURS, p)) for p in both]
        assert told["against_ours_plain"]["ratio"] == pytest.approx(math.exp(sum(logs) / len(logs)))
        assert told["against_ours_plain"]["pairs"] == len(both)


def test_a_result_is_saved_with_where_it_was_measured(result, tmp_path):
    run.save(result, tmp_path, "speed")
    read = json.loads((tmp_path / "speed.json").read_text())
    assert read == json.loads(json.dumps(result))
    assert {"commit", "machine", "threads", "torch", "transformers"} <= set(read["where"]) and read["settings"]["max_tokens"] == 8
    assert read["tiers"][OURS] and set(read["tiers"]) == set(DRAFTED)
    assert read["roofline"]["weight_bytes"] > 0 and read["roofline"]["memory_gb_s"] > 0
    text = (tmp_path / "speed.md").read_text()
    assert "Noise: ours plain against itself" in text and "GB/s" in text and all(f"| {name} |" in text for name in CONTENDERS)


def test_fewer_others_than_none_are_refused():
    with pytest.raises(OutriderError, match="beside=-1 is no number of processes.*0 or more"):
        run.speed(1, 8, beside=-1)


def test_others_that_compute_are_gone_when_it_is_over():
    own = psutil.Process()
    before = set(own.children())
    with pytest.raises(ZeroDivisionError), run.busy(2):
        others = set(own.children()) - before
        assert len(others) == 2
        assert {os.getsid(one.pid) for one in others} == {one.pid for one in others}, "as another program's would be"
        raise ZeroDivisionError
    assert not any(one.is_running() for one in others)


def test_the_commit_of_a_result_is_that_of_its_code(tmp_path, monkeypatch):
    """Edits are told, but for docs, where results are written one after the other, and files that are not in it; without a checkout, or git, there is
    none, and one that the package lies in by chance is none."""
    git = lambda *asked: subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *asked], cwd=tmp_path, check=True, capture_output=True)  # noqa: E731
    (tmp_path / "docs").mkdir()
    (tmp_path / "package" / "bench").mkdir(parents=True)
    (file := tmp_path / "package" / "bench" / "report.py").write_text("1")
    assert report.commit(file) is None
    (tmp_path / "code.py").write_text("1")
    (tmp_path / "docs" / "table.md").write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    name = report.commit(file)
    assert name and "dirty" not in name
    (tmp_path / "docs" / "table.md").write_text("2")
    (tmp_path / "notes.txt").write_text("2")
    assert report.commit(file) == name
    (tmp_path / "package" / "new.py").write_text("2")
    assert report.commit(file) == f"{name}-dirty"
    (tmp_path / "package" / "new.py").unlink()
    (tmp_path / "code.py").write_text("2")
    assert report.commit(file) == f"{name}-dirty"
    (other := tmp_path / "site" / "outrider" / "bench" / "report.py").parent.mkdir(parents=True)
    other.write_text("1")
    (tmp_path / ".gitignore").write_text("site")
    assert report.commit(other) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert report.commit(file) is None
    assert report.provenance()["commit"] == report.RUN, "what ran is what was there when it began"


def test_results_are_whole_or_as_they_were(tmp_path, monkeypatch):
    report.save_as(tmp_path, "some", "{}", "a table")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"some.json": "{}\n", "some.md": "a table\n"}
    monkeypatch.setattr(
        report.Path, "write_text", lambda self, *how: (self.touch(), (_ for _ in ()).throw(OSError(28, "No space left on device")))[1]
    )
    with pytest.raises(OSError, match="No space"):
        report.save_as(tmp_path, "some", "{1}", "another")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"some.json": "{}\n", "some.md": "a table\n"}


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan])
def test_a_rate_of_acceptance_is_one(alpha):
    with pytest.raises(OutriderError, match=f"alpha={alpha} is no rate"):
        synthetic.steps("tiny", alpha=alpha)


def test_a_text_that_ends_in_its_first_step_is_a_row_like_others(folders, monkeypatch):
    monkeypatch.setattr(prompts, "load", short_prompts)
    how = {"target": folders[0], "draft": folders[1], "device": "cpu", "dtype": "float32", "compile": "off"}
    found = run.speed(1, 1, 3, lambda category: None, contenders=(OURS, "ours lookup"), **how)
    assert [(r["calls"], r["draft_seconds"], r["verify_seconds"]) for r in found["rows"]] == [(0, 0.0, 0.0)] * 2 * len(prompts.CATEGORIES)


def test_what_a_target_cannot_read_is_not_asked(folders):
    """No chats without a template, and nothing that would fill the context; the first ones of what is left."""
    rt = outrider.load(folders[0], drafters=[], compile="off")
    some = {c: [p for p in prompts.load(c) if len(p.encode(rt.tokenizer)) + prompts.ROOM < rt.engine.target.spec.context] for c in prompts.CATEGORIES}
    assert prompts.readable(rt, 2) == [p for c in prompts.CATEGORIES for p in some[c][:2]]
    rt.tokenizer.chat_template = None
    assert prompts.readable(rt, 99) == [p for c in prompts.CATEGORIES for p in some[c] if p.messages is None] != []


def test_some_contenders_can_be_chosen_and_a_wrong_name_is_named(folders, monkeypatch):
    monkeypatch.setattr(prompts, "load", short_prompts)
    how = {"target": folders[0], "draft": folders[1], "device": "cpu", "dtype": "float32", "compile": "off"}
    told = run.speed(1, 4, 2, lambda category: None, contenders=("ours lookup", OURS), **how)
    assert {r["contender"] for r in told["rows"]} == {OURS, "ours lookup"} and told["summary"][0]["against_stock_plain"] is None
    assert "| - |" in markdown(told)
    with pytest.raises(OutriderError, match="ours lookup"):
        run.speed(1, 4, 2, lambda category: None, contenders=("our lookup",), **how)


def test_contenders_in_4_bits_are_no_gpu_s(monkeypatch):
    for device in ("cpu", "cuda"):
        assert run._known(None, device) == tuple(name for name in CONTENDERS if device == "cpu" or not name.endswith(("int4", "int4 copy")))
    monkeypatch.setattr(run, "pick_device", lambda name: torch.device("cuda"))
    with pytest.raises(OutriderError, match="'ours plain int4' cannot be measured here"):
        run.speed(1, 4, contenders=("ours plain int4",))


def test_bytes_read_leave_out_an_embedding_that_is_not_the_head(folders):
    module = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    everything = sum(p.nbytes for p in module.parameters())
    assert run.read_bytes(module) == everything - 300 * 32 * 4
    tied = synthetic.build(synthetic.SHAPES["tiny"], 64, "float32", torch.device("cpu")).module
    assert run.read_bytes(tied) == sum(p.nbytes for p in tied.parameters()) and tied.lm_head.weight is tied.model.embed_tokens.weight


def test_a_synthetic_block_scores_like_the_model_without_a_cache():
    model = synthetic.build(synthetic.SHAPES["tiny"], 200, "float32", torch.device("cpu"))
    with torch.inference_mode():
        model._forward(synthetic.block(model, 0, 62))
        got = model._forward(synthetic.block(model, 62, 4))[0]
        want = wrap(model.module, "again", "").module(input_ids=torch.arange(66)[None], use_cache=False).logits[:, -4:]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compile", [False, True])
def test_synthetic_figures_say_so_everywhere(compile, tmp_path):
    said: list[str] = []
    result = synthetic.steps("tiny", (2, 4), (16, 100), "float32", alpha=0.5, draft_cost=0.1, compile=compile, device="cpu", progress=said.append)
    assert result["label"] == synthetic.LABEL == "SYNTHETIC: random weights, assumed acceptance"
    assert all(synthetic.LABEL in text for text in (*said, synthetic.table(result), json.dumps(result)))
    assert [(r["context"], r["width"]) for r in result["rows"]] == [(c, w) for c in (16, 100) for w in (1, 2, 4)]
    assert {r["tier"] for r in result["rows"]} == {"eager:builder-died" if compile else "eager:off"}, "nothing is built in tests"
    one, _, four = result["rows"][:3]
    assert one["to_width_1"] == 1.0 and one["assumed"]["speedup"] == 1.0
    assert four["assumed"]["tokens_per_step"] == pytest.approx(1.875)
    assert four["assumed"]["speedup"] == pytest.approx(1.875 / (four["to_width_1"] + 0.3))
    synthetic.save(result, tmp_path)
    assert json.loads((tmp_path / "synthetic-tiny.json").read_text())["label"] in (tmp_path / "synthetic-tiny.md").read_text()


@pytest.mark.parametrize(("quantise", "compile"), [("int8", False), ("int4", True)])
def test_synthetic_weights_in_fewer_bits_leave_nothing_behind(compile, quantise, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    result = synthetic.steps("tiny", (2,), (16,), compile=compile, device="cpu", quantise=quantise, progress=lambda at: None)
    assert result["weight_bytes"] < 0.75 * synthetic.steps("tiny", (2,), (16,), device="cpu", progress=lambda at: None)["weight_bytes"]
    assert f"{quantise} and bfloat16 on cpu" in synthetic.table(result) and not [
        f for f in tmp_path.rglob("*") if f.suffix in (".safetensors", ".pt2")
    ]
    synthetic.save(result, tmp_path)
    assert (tmp_path / f"synthetic-tiny-{quantise}.md").is_file()
    with pytest.raises(OutriderError, match="unknown quantise"):
        synthetic.steps("tiny", quantise="int5")
    with pytest.raises(OutriderError, match="on CPUs alone"):
        monkeypatch.setattr(synthetic.models, "pick_device", lambda name: torch.device("cuda"))
        synthetic.steps("tiny", quantise="int4")


def test_known_shapes_have_the_sizes_of_their_names():
    assert {f.name for f in fields(synthetic.Shape)} == {"hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "tied"}
    with pytest.raises(OutriderError, match="8b"):
        synthetic.steps("8bb")


def test_long_prompts_are_behind_others_of_their_kind():
    """Of chats, too, and never behind themselves."""
    rt = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(reference.target()))
    far = ablation.settings(rt, 2, 3960)["long"]
    assert len(far) == 6
    for prompt in far:
        own = next(p for p in prompts.load(prompt.category) if f"{p.id} long" == prompt.id)
        said, size = ablation._said(prompt), len(prompt.encode(rt.tokenizer))
        assert 3300 < size <= 3960 and said.endswith(ablation._said(own)) and said.count(ablation._said(own)) == 1
        assert (prompt.messages is None) == (own.messages is None)


def test_a_prompt_that_cannot_be_made_long_is_named(monkeypatch):
    monkeypatch.setattr(
        prompts, "load", lambda category: [Prompt("short", category, "a tree", None, 0.0), Prompt("long", category, "a tree " * 99, None, 0.0)]
    )
    for long in (100, 1):
        with pytest.raises(OutriderError, match=f"short cannot be made {long} tokens long"):
            ablation.settings(SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(reference.target())), 1, long)


@pytest.mark.slow
def test_the_passes_are_set_beside_one_another(monkeypatch):
    """Every contender writes every prompt of every setting; what passes save in nodes is seen even in a few tokens."""
    monkeypatch.setattr(prompts, "CATEGORIES", ("story",))
    monkeypatch.setattr(ablation, "ABROAD", ablation.ABROAD[:1])
    sweep = ablation.profiler.sweep
    monkeypatch.setattr(ablation.profiler, "sweep", lambda *what, **how: sweep(*what, **{**how, "patience": 0.1, "repeats": 1}))
    found = ablation.ablation(1, 6, 1, 1000, lambda at: None, ("tiny", (64, 128)), compile="off", dtype="float32")
    assert set(found["table"]) == {"mixed", "long", "low acceptance"}
    for table in found["table"].values():
        assert next(iter(table)) == "plain" and table["plain"]["ratio"] == 1.0 and table["plain"]["nodes"] == 0.0
        assert table["+ cse"]["nodes"] <= table["no passes"]["nodes"] and len(table) == 10
    assert all("plain" in table for table in found["inlined"].values())
    text = ablation.markdown(found)
    assert "+ lower, codegen" in text and "found again" in text and "SYNTHETIC" in text and "| 128 | 8 |" in text


@pytest.mark.parametrize("rule", ["coupled", "exact"])
def test_verdicts_are_timed_in_pairs_on_the_same_steps(rule, tmp_path, monkeypatch):
    """Both hands judge the same draft by the same noise, and come to the same verdict."""
    judged: list = []
    hands = verdict._hands
    monkeypatch.setattr(verdict, "_hands", lambda *step: [lambda noise, call=call: judged.append(call(noise)) or judged[-1] for call in hands(*step)])
    result = verdict.verdicts(rule, 4, (50, 300))
    assert [(r["vocabulary"], r["guesses"], r["bounds"]) for r in result["rows"]] == [
        (v, g, b) for v in (50, 300) for g in (0, 4) for b in verdict.BOUNDS
    ]
    assert len(judged) == 2 * 5 * len(result["rows"]) and judged[::2] == judged[1::2] and any(o.paths[0] for o in judged)
    assert all(0 < r["least"] <= r["ratio"] <= r["most"] for r in result["rows"])
    verdict.save(result, tmp_path)
    assert json.loads((tmp_path / "verdict.json").read_text())["rule"] == rule and (tmp_path / "verdict.md").read_text().count("\n| ") == 8


def test_a_cold_start_is_held_against_the_eager_one_of_its_round() -> None:
    """Cold starts take a tenth of a second more, on a machine that becomes slower from round to round, and in two rounds between two starts: what the kinds take, each by itself or
    in order, tells that; the differences do not."""
    times = {"eager": [4.0, 8.0, 12.0, 16.0, 20.0], "cold": [4.1, 8.1, 30.0, 16.1, 2.0]}
    rows = {kind: [{"loaded": t, "first_token": t, "compiled": None} for t in own] for kind, own in times.items()}
    assert start.later(rows) == pytest.approx({"low": 0.1, "median": 0.1, "high": 0.1})
    table = {kind: {key: start._median([row[key] for row in given]) for key in given[0]} for kind, given in rows.items()}
    told = start.markdown({"seconds": table, "later": start.later(rows)})
    assert "| eager | 12.00 | 12.00 | - |" in told and "| cold | 8.10 | 8.10 | - |" in told
    assert "+0.10 s after the eager one's of its round (quartiles +0.10 to +0.10)" in told
    rows["cold"][0]["first_token"] = None
    with pytest.raises(AssertionError, match="without a token"):
        start.later(rows)


def test_columns_are_timed_in_turn_on_the_same_tokens_as_stock(folders, tmp_path, monkeypatch):
    """All kinds in every round, after one that warms up; ours and stock find the same, and stock's cache is as long each time."""
    found: dict[tuple[str, int], list] = {}
    ours, eager = widths._ours, widths._Eager.__call__

    def kept(key, step):
        return lambda: found.setdefault(key, []).append(step()) or found[key][-1]

    monkeypatch.setattr(widths, "USED", (16, 40, 10**6))
    monkeypatch.setattr(
        widths,
        "_ours",
        lambda model, used, width, tiers: kept(("target" if "target" in model.spec.name else "draft", width), ours(model, used, width, tiers)),
    )
    monkeypatch.setattr(widths._Eager, "__call__", lambda self, width: kept(("stock", width), lambda: eager(self, width))())
    result = widths.widths(3, lambda at: None, target=folders[0], draft=folders[1], device="cpu", dtype="float32", compile="off")
    assert [row["used"] for row in result["rows"]] == [16, 40] and result["left_out"] == [10**6], "no more than the context holds"
    for row in result["rows"]:
        assert len(row["seconds"]) == len(widths.WIDTHS) + len(widths.STOCK_WIDTHS) + 1 and {len(own) for own in row["seconds"].values()} == {3}
        low, middle, high = row["ratios"]["to one 8"]
        assert 0 < low <= middle <= high and row["ratios"]["to one 1"] == [1.0, 1.0, 1.0]
        assert middle == sorted(a / b for a, b in zip(row["seconds"]["ours 8"], row["seconds"]["ours 1"], strict=True))[1]
    calls = 4 * (widths.COLD + widths.CALLS)
    for w in widths.STOCK_WIDTHS:
        assert [len(found["stock", w]), len(found["stock", w][0])] == [2 * calls, w]
        for end in (0, -1):
            assert [int(best) for best, *_ in found["target", w][end][0]] == found["stock", w][end]
    widths.save(result, tmp_path)
    told = (tmp_path / "widths.md").read_text()
    assert (
        told.count("| 16 |") >= 5
        and "served by: eager:off" in told
        and "behind 1000000 tokens" in told
        and f"{result['limits']['bytes'] / 1e6:.0f} MB of weights" in told
        and json.loads((tmp_path / "widths.json").read_text())["rows"]
    )
    monkeypatch.setattr(widths, "USED", (10**6,))
    with pytest.raises(OutriderError, match="too short"):
        widths.widths(3, lambda at: None, target=folders[0], draft=folders[1], device="cpu", dtype="float32", compile="off")


def test_every_timed_forward_is_computed_anew():
    model = synthetic.build(synthetic.SHAPES["tiny"], 200, "float32", torch.device("cpu"))
    step = widths._ours(model, 16, 4, tiers := set())
    before = step()
    assert step() == before and tiers == {"eager:off"}
    model.module.lm_head.weight.data.mul_(-1)
    assert step() != before


@pytest.mark.parametrize("tied", [False, True])
def test_what_multiplying_alone_takes_counts_what_is_multiplied(tied, monkeypatch):
    monkeypatch.setattr(widths.machine, "bandwidth", lambda device: 1e9)
    monkeypatch.setattr(widths, "_products", lambda dtype, device: 1e9)
    model = synthetic.build(synthetic.SHAPES["tiny"], 200, "float32", torch.device("cpu"))
    table = model.module.model.embed_tokens.weight
    model.module.lm_head.weight = table if tied else torch.nn.Parameter(table.clone())
    everything = sum(w.numel() for w in model.module.parameters())
    bound = widths.limits(model)
    assert bound["column"] == everything - (0 if tied else table.numel())
    assert bound["bytes"] == 4 * bound["column"] and widths.multiplying(bound, 8) == pytest.approx(8e-9 * bound["column"])
