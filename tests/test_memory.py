"""Bytes are predicted from headers and config alone, and are what is then held, for every class and dtype."""

import pytest
import torch
import zoo
from tiny import tiny_folders

import outrider
from outrider.models.load import memory_plan, self_check, wrap


@pytest.mark.parametrize("name", zoo.CLASSES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prediction_is_within_five_percent_of_what_is_held(name, dtype, tmp_path):
    module = zoo.module(name, dtype=getattr(torch, dtype))
    module.save_pretrained(tmp_path)
    plan = memory_plan(tmp_path, dtype, rows=3, context=100)
    model = wrap(module, name, "zoo", rows=3, context=100)
    self_check(model)  # the cache is allocated at the first forward
    assert plan.total == pytest.approx(model.held_bytes(), rel=0.05)
    assert plan.cache == model.store.bytes


def test_a_runtime_reports_predicted_held_and_resident_bytes(tmp_path):
    folders = tiny_folders(tmp_path)
    rt = outrider.load(folders["target"], [f"model:{folders['draft']}"], rows=2, compile="off")
    for name in ("target", "model"):
        assert rt.memory[name]["held"] == pytest.approx(rt.memory[name]["predicted"], rel=0.05)
    assert rt.memory["rss"] > 0
