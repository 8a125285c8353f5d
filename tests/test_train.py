"""The training pipeline end to end on a tiny recipe: it resumes, it survives a full disk, and plain transformers loads what it made."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.core.errors import OutriderError
from outrider.reference import tasks
from outrider.train import collect, corpus, fit, judge, pretrain

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
    folder = tmp_path_factory.mktemp("train")
    corpus.build(RECIPE["corpus"], folder, folder / "corpus", 400, 4096, print)
    return folder


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f=None, **_: f if f else lambda g: g)


def test_whole_pipeline(work):
    lines = []
    pretrain.pretrain(RECIPE, work, "cpu", lines.append, piece=0.01)
    assert not (work / "target").exists(), "a piece is not the whole"
    pretrain.pretrain(RECIPE, work, "cpu", lines.append)
    assert any("resumed at step" in line for line in lines)
    collect.collect(RECIPE, work, "cpu", lines.append)
    fit.distill(RECIPE, work, "cpu", lines.append)
    judge.judge(RECIPE, work, "cpu", lines.append)
    table = json.loads((work / "judged.json").read_text())
    assert 0 <= table["mean of six categories"]["agreement"] <= 1
    for part in ("target", "draft"):
        module = AutoModelForCausalLM.from_pretrained(work / part)
        tokenizer = AutoTokenizer.from_pretrained(work / part)
        assert module.dtype == torch.bfloat16 and len(tokenizer) == 400
        facts = json.loads((work / part / "training.json").read_text())
        assert facts["held_out"]["all"]["bits_per_char"] > 0


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
