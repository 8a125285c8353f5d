"""Tokenizers of GGUF files: texts are cut, begun and ended as llama.cpp does."""

import json

import pytest
from ggufs import MARKS, TEXT, merges, renamed, source, spaced, written
from test_bad_input import refused
from tiny import EOS, tiny_tokenizer

import outrider
from outrider.models import load
from outrider.models.vocab import fingerprint


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return source(tmp_path_factory.mktemp("gguf") / "llama", "llama")


def test_a_tokenizer_that_lies_beside_a_file_is_not_the_file_s(tmp_path, cache, folder):
    file = written(folder, tmp_path / "own.gguf")
    tiny_tokenizer(280).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert len(load.load_tokenizer(load.locate(file))) == 300


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("text", [TEXT, " begins with a space", "  two", "", "né <0x41>", f"the{EOS}quick{EOS} fox", "a\n\n b", "日本 🙂"])
def test_spaces_are_put_where_llama_cpp_puts_them(tmp_path, cache, before, text):
    own = spaced(tmp_path / "own", before)
    theirs, mine = (load.load_tokenizer(folder) for folder in (own, load.locate(written(own, tmp_path / "own.gguf", pre=before))))
    tokens = theirs.encode(text)
    assert mine.encode(text) == tokens and mine.decode(tokens) == theirs.decode(tokens) and fingerprint(mine) == fingerprint(theirs)


@pytest.mark.parametrize("pre, pieces", [("llama-bpe", 1), ("tekken", 1), ("gpt-2", 2), ("qwen2", 2)])
def test_a_word_that_is_a_token_is_that_token_where_the_model_says_so(tmp_path, cache, folder, pre, pieces):
    """Whatever its merges say: here the file names none of the last token."""
    file = written(folder, tmp_path / "own.gguf", pre=pre, keys={"tokenizer.ggml.merges": merges(folder)[:-1]})
    tokenizer = load.load_tokenizer(load.locate(file))
    word = tokenizer.decode([299])
    assert len(tokenizer.encode(word, add_special_tokens=False)) == pieces, word


@pytest.mark.parametrize("pre, together", [("smollm", False), ("gpt-2", True)])
def test_digits_are_cut_from_one_another_for_smollm(tmp_path, cache, folder, pre, together):
    file = renamed(
        folder, tmp_path / "own.gguf", {"19": 1}, 299, **{"tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": ["1 9", *merges(folder)[:-1]]}
    )
    tokenizer = load.load_tokenizer(load.locate(file))
    found = tokenizer.encode("in 1984, a19")
    assert found.count(299) == 2 * together and tokenizer.decode(found, skip_special_tokens=True) == "in 1984, a19"


@pytest.mark.parametrize(
    "pre, key, begins",
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", None, False), ("gpt-2", True, True), ("tekken", None, True)],
)
def test_texts_begin_as_llama_cpp_begins_them(tmp_path, cache, folder, pre, key, begins):
    """Files seldom say so: with <bos>, if the model is a Llama 3."""
    keys = {"tokenizer.ggml.add_bos_token": key, "tokenizer.ggml.add_eos_token": key}
    tokenizer = load.load_tokenizer(load.locate(written(folder, tmp_path / "own.gguf", pre=pre, keys=keys)))
    found, own = tokenizer.encode("hello"), tokenizer.encode("hello", add_special_tokens=False)
    assert found == [0] * begins + own + [1] * bool(key)


def test_sentencepiece_s_own_ids_hold_where_a_file_names_none(tmp_path, cache):
    own = spaced(tmp_path / "own", True)
    keys = {f"tokenizer.ggml.{name}_token_id": None for name in ("bos", "eos", "unknown")}
    place = load.locate(written(own, tmp_path / "own.gguf", pre=True, keys=keys))
    tokenizer = load.load_tokenizer(place)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2) and tokenizer.encode("hello")[0] == 1
    assert json.loads((place / "generation_config.json").read_text()) == {"eos_token_id": [2]}


def test_markers_are_one_token_each_and_ends_are_known_by_their_names(tmp_path, cache, folder):
    """Also those of letters that no byte stands for, one of which begins texts; what fills the embedding up is no token."""
    file = renamed(
        folder, tmp_path / "own.gguf", dict(zip(MARKS, [3, 4, 3, 3, 5, 5, 5, 5], strict=True)), 292, **{"tokenizer.ggml.bos_token_id": 292}
    )
    place = load.locate(file)
    tokenizer = load.load_tokenizer(place)
    assert len(tokenizer) == 296 and tokenizer.bos_token_id == 292
    for i, mark in enumerate(MARKS[:4], 292):
        assert tokenizer.encode(f"{mark}fox", add_special_tokens=False) == [i, *tokenizer.encode("fox", add_special_tokens=False)], mark
    assert tokenizer.encode("fox")[0] == 292
    assert tokenizer.decode([293, 292], skip_special_tokens=True) == "<think>", "which is said, the other is not"
    assert json.loads((place / "generation_config.json").read_text()) == {"eos_token_id": [1, 294, 295]}


def test_markers_that_cannot_be_told_apart(tmp_path, cache, folder):
    file = renamed(folder, tmp_path / "own.gguf", {EOS: 3}, 299)  # which is token 1, too
    refused(lambda: load.locate(file), "the tokenizer of", "own.gguf cannot be read")


def test_padding_keeps_nobody_from_drafting(tmp_path, cache, folder):
    """Converters fill the vocabulary up to the rows of the embedding, of which two models of a family may have different ones."""
    full = renamed(folder, tmp_path / "own.gguf", dict.fromkeys(MARKS[4:], 5), 296)
    small = renamed(source(tmp_path / "small", "llama", vocab_size=298), tmp_path / "small.gguf", dict.fromkeys(MARKS[4:6], 5), 296)
    rt = outrider.load(full, [f"model:{small}"], depth=2, dtype="float32")
    assert len(rt.tokenizer) == 296 and rt.generate(TEXT, max_tokens=8).stats["drafted"] > 0
