"""The embedded pair and a real third-party model: texts that are known, written plainly and speculatively."""

import re
from pathlib import Path

import pytest
from contracts import always
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider
from outrider import reference
from outrider.bench import prompts

DATA = Path(__file__).parents[2] / "shared/data/weights"
STORIES = DATA / "stories260K-hf"


@pytest.mark.skipif(not STORIES.is_dir(), reason="the third-party model is not beside the checkout")
@pytest.mark.parametrize("drafters", [[], ["lookup"], [f"model:{STORIES}"], ["lookup", f"model:{STORIES}"]], ids=["plain", "lookup", "self", "both"])
def test_stories260k_writes_its_published_text(drafters):
    page = (DATA / "stories260K/stories260K.md").read_text()
    published = re.search(r"-t 0\.0\n(.*?)```", page, re.DOTALL)[1].strip()
    rt = outrider.load(STORIES, drafters, depth=5, rows=1)
    out = rt.generate("", max_tokens=257)
    assert out.text.strip().startswith(published)
    if drafters == [f"model:{STORIES}"]:
        assert out.stats["draft_acceptance_rate"] == 1.0


@pytest.fixture(scope="module")
def pair():
    plain = outrider.load(reference.target(), drafters=[], rows=2, context=1024)
    return plain, outrider.load(drafters=["lookup", f"model:{reference.draft()}"], rows=2, context=1024)


@pytest.mark.parametrize("category", always(2, prompts.CATEGORIES))
def test_reference_pair_writes_the_same_text_in_every_category(pair, category):
    prompt = prompts.load(category)[0]
    texts = []
    for rt in pair:
        seq = rt.engine.submit(rt.request(prompt.encode(rt.tokenizer), max_tokens=40, temperature=prompt.temperature, seed=5))
        while seq.finish_reason is None:
            rt.engine.step()
        texts.append((seq.generated, seq.finish_reason))
    assert texts[0] == texts[1]


def test_plain_transformers_loads_both():
    sizes = {}
    for part, folder in (("target", reference.target()), ("draft", reference.draft())):
        sizes[part] = AutoModelForCausalLM.from_pretrained(folder).num_parameters()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|begin|><|user|>hi<|end|>"
    assert sizes["target"] > 5 * sizes["draft"]


def test_prompts_are_ours_and_enough():
    every = [p for c in prompts.CATEGORIES for p in prompts.load(c)]
    assert all(len(prompts.load(c)) >= 8 for c in prompts.CATEGORIES)
    assert len({p.id for p in every}) == len({(p.text, str(p.messages)) for p in every}) == len(every)
    assert all(p.temperature == (1.0 if p.category == "open_ended" else 0.0) for p in every)
