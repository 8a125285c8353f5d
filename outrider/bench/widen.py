"""A model inside a larger shape: the same text, but for rounding, at the cost of many more parameters.

What speculation brings hangs on the texts, on how well drafters guess them, and on what a step costs. The first two can be kept while the
third grows: layers are made wider and more, and what is new writes next to nothing into the residual stream. So a small pair tells how
a large one's steps would fare with the small one's agreement. Figures from such a model must say so.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from outrider.core.errors import OutriderError
from outrider.models import load as models

SOFT = 1e-12  # scale of what writes into the residual stream and is new: too little to be seen beside what stands there, and no denormal
NOISE = 0.02  # scale of all else that is new
WRITERS = ("embed_tokens", "o_proj", "down_proj", "lm_head")
WIDTHS = (1, 4, 16)  # squares of powers of two: a norm's scale changes by a power of two, and no bit by it


def widen(source: Path, folder: Path, width: int = 4, layers: int = 0) -> dict[str, Any]:
    """Write a folder with the Llama of `source` that has `width` times as many heads, hidden dims and neurons, and `layers` layers in all (0: as
    many as it has). Returns its config as a dict, and "parameters". Raises OutriderError for another architecture, a width not in WIDTHS, fewer
    layers, or a folder that is there."""
    if folder.exists():
        raise OutriderError(f"{folder} is there already", "", "the name of a new folder, or delete it")
    if width not in WIDTHS:
        raise OutriderError(f"width={width}", "norms keep their bits for squares of powers of two only", f"one of {list(WIDTHS)}")
    kept = models.load_config(source).dtype
    module: Any = models.load_module(source, "float32")
    if not isinstance(module, LlamaForCausalLM) or any("bias" in name for name, _ in module.named_parameters()):
        raise OutriderError(f"{source} is a {type(module).__name__}", "only Llamas without biases can be widened", "a folder of a LlamaForCausalLM")
    config, have = module.config, module.config.num_hidden_layers
    if layers and layers < have:
        raise OutriderError(f"layers={layers}, and the model has {have}", "layers are added, never taken", f"{have} or more")
    torch.manual_seed(0)
    wide: Any = LlamaForCausalLM(_config(config, width, layers or have))
    old = dict(module.named_parameters())
    with torch.no_grad():
        for name, weight in wide.named_parameters():
            _fill(name, weight, old.get(name), width)
    wide.generation_config = module.generation_config
    wide.to(torch.bfloat16 if kept == torch.float16 else kept or torch.float32).save_pretrained(folder)  # float16 has no numbers so small
    models.load_tokenizer(source).save_pretrained(folder)
    return {**json.loads((folder / "config.json").read_text()), "parameters": sum(p.numel() for p in wide.parameters())}


def _config(config: Any, width: int, layers: int) -> Any:
    told = config.to_dict()
    grown = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    told |= {name: told[name] * width for name in grown} | {"num_hidden_layers": layers, "rms_norm_eps": config.rms_norm_eps / width}
    return type(config)(**told)


def _fill(name: str, weight: Tensor, old: Tensor | None, width: int) -> None:
    """The old weights in their corner, noise around them. A norm sees `width` times as many numbers, of which the new ones are next to zero."""
    if weight.ndim == 1:
        weight.fill_(1.0)
        if old is not None:
            weight[: len(old)] = old / math.isqrt(width)
        return
    weight.normal_(std=SOFT if any(part in name for part in WRITERS) else NOISE)
    if old is not None:
        weight[: old.shape[0], : old.shape[1]] = old
