"""The training pipeline end to end on a tiny recipe: it resumes, it survives a full disk, and plain transformers loads what it made."""

import json
import sys
from collections import Counter

import numpy as np
import pytest
import torch
import zoo
from tiny import tiny_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider
from outrider import cli
from outrider.bench import prompts
from outrider.core.errors import OutriderError
from outrider.reference import tasks
from outrider.train import adopt, collect, corpus, fit, judge, pretrain

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
SECTION = {"minutes": 0.02, "muon": 0.02, "adamw": 0.004, "warmup": 0.1, "cooldown": 0.4, "phases": [{"until": 1.0, "rows": 2, "length": 64}]}
RECIPE = {
    "seed": 1,
    "corpus": {"python": {"weight": 0.5, "max_chars": 150_000}, "tasks": {"weight": 0.5, "max_chars": 150_000}, "books": {"weight": 0.0}},
    "target": SHAPE,
    "draft": {**SHAPE, "num_hidden_layers": 1},
    "shared": {"vocab_size": 400, "max_position_embeddings": 4096},
    "pretrain": SECTION,
    "collect": {"minutes": 0.02, "rows": 4, "prompt": 16, "length": 24, "temperatures": [0.0, 1.0]},
    "distill": {**SECTION, "own": 0.5},
}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder, mixture = tmp_path_factory.mktemp("train"), corpus.tasks.mixture
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus.tasks, "mixture", lambda seed, count: mixture(seed, count // 20))  # of 70,000, which would be cut to so many characters
        corpus.build(RECIPE["corpus"], folder, folder / "corpus", 400, 4096, print)
    return folder


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f=None, **_: f if f else lambda g: g)


def test_whole_pipeline(work, monkeypatch):
    load, lines = prompts.load, []
    monkeypatch.setattr(prompts, "load", lambda category: load(category)[:3])
    pretrain.pretrain(RECIPE, work, "cpu", lines.append, piece=0.01)
    assert not (work / "target").exists(), "a piece is not the whole"
    pretrain.pretrain(RECIPE, work, "cpu", lines.append)
    assert any("resumed at step" in line for line in lines)
    collect.collect(RECIPE, work, "cpu", lines.append)
    fit.distill(RECIPE, work, "cpu", lines.append)
    judge.judge(RECIPE, work, "cpu", lines.append)
    table = json.loads((work / "judged.json").read_text())
    assert 0 <= table["mean of 6 categories"]["agreement"] <= 1
    for part in ("target", "draft"):
        module = AutoModelForCausalLM.from_pretrained(work / part)
        tokenizer = AutoTokenizer.from_pretrained(work / part)
        assert module.dtype == torch.bfloat16 and len(tokenizer) == 400
        facts = json.loads((work / part / "training.json").read_text())
        assert facts["held_out"]["all"]["bits_per_char"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("marked", [True, False], ids=["begin and chat template", "neither"])
def test_a_draft_for_a_target_that_exists(tmp_path, monkeypatch, marked):
    """It has the target's vocabulary, marker ids and context, and drafts for it. The target's folder is read only."""
    target, work = tiny_folder(tmp_path / "theirs", bos=marked, chat=marked), tmp_path / "work"
    before = {f.name: f.read_bytes() for f in target.iterdir()}
    shared = adopt.adopt(target, work)
    corpus.build(RECIPE["corpus"], tmp_path, work / "corpus", shared["vocab_size"], shared["max_position_embeddings"], print)
    theirs = AutoTokenizer.from_pretrained(target)
    text = theirs.decode(np.fromfile(work / "corpus/tasks.held.ids", corpus.ID))
    assert "<|" not in text and ("<s>" in text, "</s>" in text) == (marked, not marked)
    recipe = {k: v for k, v in RECIPE.items() if k not in ("shared", "pretrain")} | {"target": {"path": "theirs"}}
    collect.collect(recipe, work, "cpu", print)
    fit.distill(recipe, work, "cpu", print)
    monkeypatch.setattr(prompts, "CATEGORIES", ("story", "tool_dialogue"))
    judge.judge(recipe, work, "cpu", print)
    assert ("tool_dialogue" in json.loads((work / "judged.json").read_text())) == marked
    assert pretrain.common(AutoModelForCausalLM.from_pretrained(work / "draft").config) == shared
    rt = outrider.load(target, [f"model:{work / 'draft'}"], depth=3)
    out = rt.generate("the quick", max_tokens=24)
    assert out.stats["drafted"] > 0 and out.tokens == rt.generate("the quick", max_tokens=24, speculation="off").tokens
    assert {f.name: f.read_bytes() for f in target.iterdir()} == before


def test_a_target_that_does_not_exist_or_is_another_one_is_refused(tmp_path, monkeypatch, capsys):
    recipe, work = tmp_path / "r.toml", tmp_path / "work"
    recipe.write_text('corpus = {}\n[target]\npath = "weights/nobody"\n')
    monkeypatch.setattr(sys, "argv", ["outrider", "train", "pretrain", "--recipe", str(recipe), "--data", str(tmp_path), "--work", str(work)])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    told = capsys.readouterr().err
    assert f"there is no folder {tmp_path / 'weights/nobody'}" in told and "--data" in told
    assert not work.exists()
    adopt.adopt(tiny_folder(tmp_path / "one"), work)
    adopt.adopt(tmp_path / "one", work)
    with pytest.raises(OutriderError, match="begun with another target.*--work"):
        adopt.adopt(tiny_folder(tmp_path / "two"), work)


def test_distillation_beyond_the_targets_context_is_refused(tmp_path):
    shared = adopt.adopt(tiny_folder(tmp_path / "theirs"), tmp_path / "work")
    phases = [{"until": 1.0, "rows": 2, "length": shared["max_position_embeddings"] + 1}]
    with pytest.raises(OutriderError, match="length = 257 .* context is 256"):
        fit.distill({**RECIPE, "distill": {**SECTION, "phases": phases}}, tmp_path / "work", "cpu", print)


def test_tokenizer_is_lossless_and_the_template_is_what_was_trained_on(work):
    tokenizer = AutoTokenizer.from_pretrained(work / "corpus/tokenizer")
    text = "def f(x):\n\treturn x + 1.5  # caf\u00e9 \u4f60\u597d\n"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == 0
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    messages = list(tasks.make("tool_dialogue", 3).messages)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|begin|>" + corpus.render(messages)


def test_full_disk_keeps_the_last_checkpoint(work, monkeypatch, tmp_path):
    file = tmp_path / "model.ckpt"
    pretrain.save_checkpoint(file, {"step": 1})

    def full(*_):
        file.with_suffix(".part").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OutriderError, match=r"No space left.*free some space"):
        pretrain.save_checkpoint(file, {"step": 2})
    monkeypatch.undo()
    assert torch.load(file) == {"step": 1}
    assert not file.with_suffix(".part").exists()


def test_resuming_gives_the_state_that_was_saved(work, tmp_path):
    """Masters, both optimisers and the stream's random state come back bit for bit."""
    file = tmp_path / "a.ckpt"
    weights = {"python": 0.5, "tasks": 0.5}
    model = pretrain.new_model(SHAPE, RECIPE["shared"], 1).to(torch.bfloat16)
    schedule = pretrain.Schedule.of(SECTION)
    streams = corpus.Streams(work / "corpus", weights, "train", 1)
    pretrain.train(model, schedule, streams, pretrain.next_token_loss, file, print)
    other = pretrain.new_model(SHAPE, RECIPE["shared"], 9).to(torch.bfloat16)
    again = corpus.Streams(work / "corpus", weights, "train", 99)
    assert pretrain.train(other, schedule, again, pretrain.next_token_loss, file, print)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert np.array_equal(streams.batch(2, 8), again.batch(2, 8))


def test_missing_corpus_is_named_with_the_remedy(tmp_path):
    with pytest.raises(OutriderError, match=r"maths.*--data"):
        corpus.read("maths", tmp_path, 1000)


def test_tasks_are_a_function_of_kind_and_seed_and_grade_their_answer():
    for kind in tasks.KINDS:
        task = tasks.make(kind, tasks.HELD_OUT + 5)
        assert task == tasks.make(kind, tasks.HELD_OUT + 5)
        assert task.grade(task.answer + "\n") and not task.grade(task.answer + " x")
        assert task.prompt[-1]["role"] in ("user", "tool")
    kinds = Counter(t.kind for t in tasks.mixture(0, 2000))
    assert set(kinds) == set(tasks.KINDS)


def test_copying_tasks_copy():
    task = tasks.make("copy", 1)
    assert task.answer in task.prompt[0]["content"]
    task = tasks.make("quote", 2)
    assert all(s.strip(".") in task.prompt[0]["content"] for s in task.answer.split(". "))


def test_models_in_training_need_no_mask():
    """Logits are those of transformers' own attention; a model whose layers see a window keeps it."""
    ids = torch.randint(0, 400, (2, 40))
    model = pretrain.new_model(SHAPE, RECIPE["shared"], 1)
    assert model.config._attn_implementation == pretrain.ATTENTION
    got = model(input_ids=ids, use_cache=False).logits
    model.config._attn_implementation = "sdpa"
    torch.testing.assert_close(got, model(input_ids=ids, use_cache=False).logits)
    windowed = zoo.module("mistral")
    before = windowed.config._attn_implementation
    assert pretrain.whole(windowed).config._attn_implementation == before


def test_texts_of_many_rows_are_those_of_one(tmp_path):
    """Prompts of several lengths are padded on the left, and what follows the end of a text is cut."""
    target = zoo.module("llama").float()
    asked = [[3, 1, 4, 1, 5, 9, 2, 6], [3, 1], [8, 3, 5, 7]]
    together = collect.continued(target, asked, 12, 0.0)
    assert together == [collect.continued(target, [a], 12, 0.0)[0] for a in asked]
    with torch.inference_mode():
        text = list(asked[1])
        for _ in together[1]:
            text.append(int(target(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
    assert text == asked[1] + together[1] and together[0] != together[1]
    end = together[0][5]
    target.generation_config.eos_token_id = [end]
    assert collect.continued(target, asked, 12, 0.0)[0] == together[0][: together[0].index(end) + 1]


def test_texts_beyond_the_targets_context_are_refused(tmp_path):
    target = tmp_path / "theirs"
    adopt.adopt(tiny_folder(target), tmp_path / "work")
    section = {**RECIPE["collect"], "length": 300}
    with pytest.raises(OutriderError, match="more than the model's 256"):
        collect.collect({**RECIPE, "collect": section}, tmp_path / "work", "cpu", print)
