"""Which files of a folder are a model's weights, where others lie beside them."""

import json
import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from tiny import tiny_folder

import outrider
from outrider.core.errors import OutriderError
from outrider.models.compiled import Recipe
from outrider.models.files import INDEX, WHOLE, weight_files
from outrider.models.load import load_module, locate, memory_plan

HALVES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def whole(tmp_path):
    return tiny_folder(tmp_path / "whole")


@pytest.fixture
def parted(whole, tmp_path):
    """The same model in two files and an index."""
    folder = shutil.copytree(whole, tmp_path / "parted")
    weights = load_file(folder / WHOLE)
    where = {name: HALVES[i % 2] for i, name in enumerate(sorted(weights))}
    for half in HALVES:
        save_file({name: w for name, w in weights.items() if where[name] == half}, folder / half, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / WHOLE).unlink()
    return folder


def beside(folder) -> None:
    """Put the weights there a second time, under other names, as Mistral does."""
    weights = {f"other.{name}": w for file in weight_files(folder) for name, w in load_file(file).items()}
    save_file(weights, folder / "consolidated.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["whole", "parted"])
def test_weights_that_lie_there_twice_are_counted_once(kind, request, whole, tmp_path, monkeypatch):
    folder = request.getfixturevalue(kind)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    given = sum(p.numel() * 4 for p in load_module(folder, "float32").parameters())
    recipe = Recipe(str(folder), "float32", 1, 300)
    place = recipe.place()
    beside(folder)
    plan = memory_plan(folder, "float32", 2, 64)
    assert plan.weights == given == memory_plan(whole, "float32", 2, 64).weights
    assert [file.name for file in weight_files(folder)] == ([WHOLE] if kind == "whole" else HALVES)
    assert recipe.place() == place, "packages carry nothing of it"
    (folder / "consolidated.safetensors").write_bytes(b"and may be anything")
    assert len(outrider.load(folder, [], compile="off").generate("sea", max_tokens=3, ignore_eos=True).tokens) == 3


def test_without_a_name_that_says_so_all_are_looked_at(parted):
    (parted / INDEX).unlink()
    assert [file.name for file in weight_files(parted)] == HALVES


def test_where_both_are_there_it_is_what_transformers_reads(whole, parted):
    shutil.copy(whole / WHOLE, parted)
    (parted / HALVES[1]).unlink()
    load_module(parted, "float32")
    assert weight_files(parted) == [parted / WHOLE]


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"weight_map": 3}', '{"weight_map": {"w": 3}}'])
def test_an_index_that_says_nothing_is_refused(parted, text):
    (parted / INDEX).write_text(text)
    with pytest.raises(OutriderError, match=f"{INDEX} is damaged"):
        outrider.load(parted, [])


def test_a_part_that_is_not_there_is_named(parted):
    (parted / HALVES[1]).unlink()
    with pytest.raises(OutriderError, match=f"lacks weights.*{HALVES[1]}"):
        outrider.load(parted, [])


def test_the_hub_is_asked_for_no_weights_that_nobody_reads(tmp_path, monkeypatch):
    there = [
        SimpleNamespace(name=name)
        for name in ("config.json", *HALVES, INDEX, "consolidated.safetensors", "original/model.safetensors", "tokenizer.json")
    ]
    got = list[str]()

    def download(path, allow_patterns, ignore_patterns):
        got.extend(x.name for x in filter_repo_objects(there, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns, key=lambda x: x.name))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("owner/name") == tmp_path
    assert got == ["config.json", *HALVES, INDEX, "tokenizer.json"]
