"""Small models that need no download: random Llama folders with a byte-level tokenizer, and a model that follows a rule.

Test modules make their own fixtures of these functions.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.control.fixed import fixed
from outrider.core.types import Plan
from outrider.drafters.model import ModelDrafter
from outrider.models.toy import ToyModel
from outrider.runtime.door import Runtime
from outrider.runtime.engine import Engine

BOS, EOS = "<s>", "</s>"
CORPUS = [
    "the quick brown fox jumps over the lazy dog while the other foxes sleep",
    "def add(first, second): return first + second  # the sum of two numbers",
    "she sells sea shells on the sea shore and the shells she sells are sea shells",
]
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"


def tiny_tokenizer(vocab: int = 300, *, bos: bool = True, chat: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE with `vocab` tokens; <s> is id 0 and </s> is id 1. `bos`: <s> is put before every text."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=vocab, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == vocab
    if bos:
        tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, **({"bos_token": BOS} if bos else {}))
    if chat:
        fast.chat_template = TEMPLATE
    return fast


def tiny_folder(
    path: Path, seed: int = 0, vocab: int = 300, bos: bool = True, *, rows: int | None = None, chat: bool = True, jitter: float = 0.0,
    head: int = 8, hidden: int = 32, layers: int = 2,
) -> Path:  # fmt: skip
    """A saved Llama. `rows`: embedding rows (padding beyond the tokenizer); `jitter`: noise added to the
    weights of the seed, which makes drafts that agree more or less; `head`, `hidden`: dims. Padding rows do not change the others."""
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False, head_dim=head,
    )  # fmt: skip
    noise, more = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1000)
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(0, 0.2 * (32 / hidden) ** 0.5, generator=noise).add_(
                    torch.empty_like(weight).normal_(0, 1, generator=more), alpha=jitter
                )
    if rows:
        model.resize_token_embeddings(rows, mean_resizing=False)
        for table in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            table.data[vocab:].normal_(0, 1, generator=more)  # large: padding that would win if it were let
    model.save_pretrained(path)
    tiny_tokenizer(vocab, bos=bos, chat=chat).save_pretrained(path)
    return path


class Ruled(ToyModel):
    """A toy whose next token is `rule(text)`; everything else about it is the toy's."""

    def __init__(self, vocab: int, rule: Callable[[list[int]], int], *, rows: int = 4, name: str = "toy") -> None:
        super().__init__(vocab, 0, rows=rows, name=name)
        self.rule = rule

    def logits(self, text: list[int]) -> np.ndarray:
        out = np.zeros(self.vocab)
        out[self.rule(text)] = 20.0
        return out


def spelling(
    text: str, *, prompt: str = "x", depth: int = 4, rows: int = 2, tokenizer: PreTrainedTokenizerFast | None = None
) -> Runtime:  # fmt: skip
    """A runtime whose target writes `text` after `prompt`, then </s>, with a draft that knows it too."""
    tokenizer = tokenizer or tiny_tokenizer()
    vocab = len(tokenizer)
    start, script = len(tokenizer(prompt)["input_ids"]), tokenizer(text)["input_ids"][1:]

    def rule(seen: list[int]) -> int:
        at = len(seen) - start
        return script[at] if 0 <= at < len(script) else tokenizer.eos_token_id

    draft = ModelDrafter(Ruled(vocab, rule, rows=rows, name="draft"))
    plan = Plan((("model", depth, 1),))
    return Runtime(Engine(Ruled(vocab, rule, rows=rows), {"model": draft}, fixed(plan), rows), tokenizer, {})


def tiny_folders(root: Path) -> dict[str, Path]:
    """target; draft: agrees often; twin: the target again; padded: the twin with 20 more embedding rows; other: another
    tokenizer; bare: no BOS and no chat template."""
    return {
        "target": tiny_folder(root / "target"),
        "draft": tiny_folder(root / "draft", jitter=0.03),
        "twin": tiny_folder(root / "twin"),
        "padded": tiny_folder(root / "padded", rows=320),
        "other": tiny_folder(root / "other", vocab=290),
        "bare": tiny_folder(root / "bare", bos=False, chat=False),
    }
