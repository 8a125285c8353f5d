"""Refusals of requests: what cannot be asked is named together with the remedy, and the runtime goes on."""

import numpy as np
import pytest
import test_bad_input
import torch
from contracts import refused

import outrider
from outrider.core.config import load_settings
from outrider.core.types import SamplingParams

NAN = test_bad_input.NAN
folders, rt = test_bad_input.folders, test_bad_input.rt

BAD = [
    ({"max_tokens": 0}, ["max_tokens=0"]), ({"temperature": -0.1}, ["temperature=-0.1", "negative"]), ({"top_p": 0}, ["top_p=0"]),
    ({"top_p": 1.1}, ["top_p=1.1", "(0, 1]"]), ({"top_k": -1}, ["top_k=-1"]), ({"min_p": 2}, ["min_p=2"]), ({"repetition_penalty": 0}, ["repetition_penalty=0"]),
    ({"min_tokens": 9, "max_tokens": 8}, ["min_tokens=9"]), ({"max_tokens": 2.5}, ["max_tokens=2.5", "whole"]), ({"temperature": "hot"}, ["temperature='hot'"]),
    ({"temperature": NAN}, ["temperature=nan"]), ({"top_p": NAN}, ["top_p=nan"]), ({"min_p": NAN}, ["min_p=nan"]),
    ({"repetition_penalty": NAN}, ["repetition_penalty=nan"]), ({"presence_penalty": NAN}, ["presence_penalty=nan"]),
    ({"frequency_penalty": NAN}, ["frequency_penalty=nan"]), ({"logit_bias": {5: NAN}}, ["logit_bias"]),
    ({"temperature": float("inf")}, ["temperature=inf"]), ({"presence_penalty": float("inf")}, ["presence_penalty=inf"]),
    ({"logprobs": -1}, ["logprobs=-1"]), ({"logprobs": 101}, ["logprobs=101"]), ({"logprobs": "two"}, ["logprobs"]),
    ({"seed": "x"}, ["seed"]), ({"seed": 1 << 70}, ["seed"]),
    ({"stop": ""}, ["empty stop string"]), ({"stop": [3]}, ["stop"]), ({"stop_token_ids": [300]}, ["300"]), ({"logit_bias": {999: 1.0}}, ["999"]),
    ({"temprature": 1}, ["unknown setting 'temprature'", "'temperature'"]), ({"max_token": 1}, ["'max_tokens'"]),
    ({"rule": "couplet"}, ["unknown rule 'couplet'", "'coupled'"]), ({"speculation": "on"}, ["speculation='on'", "auto, off"]),
    ({"speculation": ["lookup", "mode"]}, ["'mode'", "model"]),
    ({"frequency_penalty": 1e39}, ["frequency_penalty=1e+39", "-1e9..1e9"]), ({"presence_penalty": -1e10}, ["presence_penalty", "-1e9..1e9"]),
    ({"repetition_penalty": 1e-40}, ["repetition_penalty=1e-40", "0.001..1000"]), ({"repetition_penalty": 1e4}, ["0.001..1000"]),
    ({"logit_bias": {5: 1e39}}, ["logit_bias={5: 1e+39}", "-1e9..1e9"]), ({"logit_bias": {5: -2e9}}, ["logit_bias", "-1e9..1e9"]),
    ({"stop": 3.5}, ["stop=(3.5,)", "no text"]), ({"stop": "\ud800"}, ["stop string", "UTF-8"]), ({"stop_token_ids": 3.5}, ["stop_token_ids=(3.5,)", "no id"]),
    ({"stop_token_ids": [True]}, ["stop_token_ids=(True,)"]), ({"logit_bias": {5.7: 1.0}}, ["logit_bias={5.7: 1.0}"]), ({"logit_bias": {5: 10**400}}, ["logit_bias"]),
    ({"params": {"temperature": 1}}, ["{'temperature': 1} is no SamplingParams", "keywords"]), ({"rule": 3}, ["unknown rule '3'"]),
    ({"ignore_eos": "no"}, ["ignore_eos='no'", "True or False"]), ({"max_tokens": True}, ["max_tokens=True"]), ({"presence_penalty": 10**400}, ["-1e9..1e9"]),
    ({"temperature": 1e300}, ["temperature=1e+300", "1000"]), ({"top_p": 1e-50}, ["top_p=1e-50"]), ({"top_k": 10**20}, ["top_k=1", "vocabulary"]),
]  # fmt: skip


@pytest.mark.parametrize("settings, words", BAD, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_settings_of_a_request_and_the_runtime_goes_on(rt, settings, words):
    refused(lambda: rt.generate("sea", **{"max_tokens": 8, **settings}), *words)
    refused(lambda: list(rt.stream("sea", **{"max_tokens": 8, **settings})), *words)
    assert len(rt.generate("sea", max_tokens=3, ignore_eos=True).tokens) == 3
    assert not rt.engine.batcher.waiting and rt.engine.target.rows.active == 0


EXTREME = [
    {"presence_penalty": 1e9, "frequency_penalty": 1e9, "repetition_penalty": 1e3, "logit_bias": {5: -1e9, 6: 1e9}},
    {"presence_penalty": -1e9, "frequency_penalty": -1e9, "repetition_penalty": 1e-3, "logit_bias": {5: 1e9}, "top_k": 2**31 - 1},
    {"top_p": 1e-9, "min_p": 1.0, "logit_bias": {5: -1e9}},
]


@pytest.mark.parametrize("settings", EXTREME, ids=["penalised", "rewarded", "the likeliest alone"])
@pytest.mark.parametrize("warmth", [{}, {"temperature": 1e-3}, {"temperature": 1e3, "seed": 3}, {"temperature": 1e3, "min_tokens": 20}], ids=str)
def test_the_largest_numbers_that_are_let_in_fail_nobody(rt, settings, warmth):
    alone = rt.generate("sea", max_tokens=20, ignore_eos=True).tokens
    asked = [rt.request("sea", max_tokens=20, **how) for how in ({"ignore_eos": True}, {**settings, **warmth, "stop_token_ids": [9]})]
    seqs = [rt.engine.submit(request) for request in asked]
    while any(s.finish_reason is None for s in seqs):
        rt.engine.advance(seqs)
    assert seqs[0].generated == alone and {s.finish_reason for s in seqs} <= {"stop", "length"}


def test_an_object_of_settings_is_checked_too(rt):
    refused(lambda: rt.generate("sea", SamplingParams(top_p=2.0)), "top_p=2.0")
    refused(lambda: rt.generate("sea", SamplingParams(), top_q=2.0), "top_q", "'top_p'")


def test_numbers_of_other_libraries_are_numbers(rt):
    plain = {"max_tokens": 9, "temperature": 0.5, "seed": 3, "stop_token_ids": (3, 4), "logit_bias": {5: 2.0}, "most": 2, "top_k": 50}
    theirs = {
        "max_tokens": np.int64(9), "temperature": np.float32(0.5), "seed": torch.tensor(3), "stop_token_ids": np.array([3, 4]),
        "logit_bias": {np.int32(5): np.float32(2.0)}, "most": np.int64(2), "top_k": np.uint8(50),
    }  # fmt: skip
    mine, same = rt.request("sea", **plain), rt.request("sea", **theirs)
    assert repr(same.sampling) == repr(mine.sampling) and repr(same.limits) == repr(mine.limits) and same.ends == mine.ends
    assert repr(rt.request("sea", SamplingParams(max_tokens=np.int64(9))).sampling) == repr(rt.request("sea", max_tokens=9).sampling)
    assert rt.request("sea", stop_token_ids=np.int64(3)).sampling.stop_token_ids == (3,)
    assert repr(load_settings(depth=np.int64(3), rows=torch.tensor(2))) == repr(load_settings(depth=3, rows=2))


def test_a_prompt_that_does_not_fit(rt):
    error = refused(lambda: rt.generate("x" * 300), "301 tokens", "256", "shorter prompt")
    assert "at least one must be left" in error.why
    refused(lambda: rt.generate("x" * 255), "256 tokens")
    out = rt.generate("x" * 254, ignore_eos=True)
    assert len(out.tokens) == 1 and out.finish_reason == "length"


def test_one_bad_prompt_of_many_leaves_nothing_waiting(rt):
    refused(lambda: rt.generate(["sea", "x" * 300]), "301 tokens")
    assert not rt.engine.batcher.waiting
    assert len(rt.generate("sea", max_tokens=3, ignore_eos=True).tokens) == 3


def test_an_empty_prompt_is_legal_only_after_a_begin_of_text(rt, folders):
    assert len(rt.generate("", max_tokens=3, ignore_eos=True).tokens) == 3
    bare = outrider.load(folders["bare"], [])
    refused(lambda: bare.generate(""), "prompt is empty", "begin-of-text")
    assert len(bare.generate("a", max_tokens=3, ignore_eos=True).tokens) == 3


def test_a_model_that_returns_nan_is_refused_and_not_sampled(folders):
    broken = outrider.load(folders["target"], [])
    weight = broken.engine.target.module.lm_head.weight
    kept = weight.data.clone()
    for way in ({}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 1}):
        weight.data.fill_(NAN)
        refused(lambda way=way: broken.generate("sea", **way), "NaN", "float32")
        weight.data.copy_(kept)
        assert len(broken.generate("sea", max_tokens=3, ignore_eos=True, **way).tokens) == 3


# --- prompts as token ids


def test_ids_that_are_none_of_the_models(rt):
    vocab = rt.engine.target.spec.vocab_size
    refused(lambda: rt.request([1, vocab, 2]), f"token {vocab}", f"0..{vocab - 1}")
    refused(lambda: rt.request([1, -1]), "token -1")
    refused(lambda: rt.request([]), "empty")
    refused(lambda: rt.request([1, 2.5]), "no prompt", "float")
    refused(lambda: rt.request(7), "no prompt", "int")


def test_a_request_takes_text_and_numbers_of_any_kind(rt):
    text = "hello there"
    ids = rt.tokenizer(text)["input_ids"]
    assert rt.request(text).prompt == rt.request(torch.tensor(ids)).prompt == tuple(ids)
    assert {type(token) for token in rt.request(torch.tensor(ids)).prompt} == {int}
