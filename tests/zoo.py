"""Tiny random models of every class that is promised to work, windows included."""

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)  # fmt: skip

from outrider.models.hf import HFModel
from outrider.models.load import wrap

VOCAB, WINDOW = 61, 6
_SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_GROUPED = {**_SHAPE, "num_key_value_heads": 2}
_MIXED = ["sliding_attention", "full_attention"] * 2
_ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}

CLASSES = {
    "llama": lambda n: LlamaForCausalLM(LlamaConfig(**_GROUPED, num_hidden_layers=n)),
    "qwen2": lambda n: Qwen2ForCausalLM(Qwen2Config(**_GROUPED, num_hidden_layers=n)),
    "qwen2-window": lambda n: Qwen2ForCausalLM(Qwen2Config(**_GROUPED, num_hidden_layers=n, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=n // 2)),
    "qwen3": lambda n: Qwen3ForCausalLM(Qwen3Config(**_GROUPED, num_hidden_layers=n, head_dim=8)),
    "mistral": lambda n: MistralForCausalLM(MistralConfig(**_GROUPED, num_hidden_layers=n, sliding_window=WINDOW)),
    "gemma2": lambda n: Gemma2ForCausalLM(Gemma2Config(**_GROUPED, num_hidden_layers=n, head_dim=8, sliding_window=WINDOW)),
    "gemma3": lambda n: Gemma3ForCausalLM(Gemma3TextConfig(**_GROUPED, num_hidden_layers=n, head_dim=8, sliding_window=WINDOW, layer_types=_MIXED[:n])),
    "gpt2": lambda n: GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=n, n_head=4, n_positions=256, **_ENDS)),
    "gpt-neox": lambda n: GPTNeoXForCausalLM(GPTNeoXConfig(**_SHAPE, num_hidden_layers=n)),
    "opt": lambda n: OPTForCausalLM(OPTConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=n, num_attention_heads=4, ffn_dim=48, max_position_embeddings=256,
        word_embed_proj_dim=32, **_ENDS)),
    "phi": lambda n: PhiForCausalLM(PhiConfig(**_SHAPE, num_hidden_layers=n)),
    "mixtral": lambda n: MixtralForCausalLM(MixtralConfig(**_GROUPED, num_hidden_layers=n, num_local_experts=4)),
}  # fmt: skip


def module(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, noise: float = 0.0, layers: int = 2) -> torch.nn.Module:
    """A random model of the class. `noise` > 0 perturbs it: a drafter that agrees often, not always."""
    torch.manual_seed(seed)
    made = CLASSES[name](layers)
    with torch.no_grad():
        for p in made.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.25)
        if noise:
            torch.manual_seed(seed + 1)
            for p in made.parameters():
                p.add_(torch.randn_like(p) * noise * p.std().nan_to_num(0.0))
    return made.to(dtype).eval()


def model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, noise: float = 0.0, layers: int = 2, **how: object) -> HFModel:
    """The same, as a Model of ours."""
    return wrap(module(name, seed, dtype, noise, layers), how.pop("label", f"{name}-{seed}-{noise}"), "zoo", **{"context": 200, **how})
