"""What a transformers module is made of: the kinds of its layers, where they are, and copies of it that run fewer of them.

Asks the config, the module's own children and what its class is written in; knows nothing of caches or steps.
"""

import copy
import functools
import inspect
import sys
from typing import Any

from torch import nn

from outrider.core.errors import OutriderError


def windows(module: nn.Module) -> dict[str, int | None]:
    """Layer type -> how many positions it sees (None: all). One entry for a model of one kind of layer. A config may name a window, or types, of which
    the class takes no notice: any key that a folder's config.json holds is kept."""
    config: Any = module.config.get_text_config()  # type: ignore[operator, union-attr]
    types = getattr(config, "layer_types", None) if mentions(module, "layer_types") else None
    window = getattr(config, "sliding_window", None) if mentions(module, "create_sliding_window_causal_mask") else None
    if types is None:
        return {"sliding_attention": window} if window else {"full_attention": None}
    return {t: window if t == "sliding_attention" else None for t in dict.fromkeys(types)}


def ignored(module: nn.Module) -> int | None:
    """The window that the config names and the class takes no notice of; None: there is none such."""
    config: Any = module.config.get_text_config()  # type: ignore[operator, union-attr]
    return None if mentions(module, "create_sliding_window_causal_mask") else getattr(config, "sliding_window", None)


def mentions(module: nn.Module, word: str) -> bool:
    """Does the word stand in the modelling code of any part?"""
    return any(word in _code(name) for name in {type(part).__module__ for part in module.modules()} if name.startswith("transformers.models."))


@functools.cache
def _code(name: str) -> str:
    return inspect.getsource(sys.modules[name])


def cached(config: Any) -> int:
    """Numbers that one token's keys and values take in all layers: of latent attention (DeepSeek's) one latent and the dims that are turned, for all
    heads; layers that read the keys of others (Gemma 3n's) hold none."""
    text = config.get_text_config()
    layers = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0)
    if latent := getattr(text, "kv_lora_rank", None):
        return int(layers * (latent + text.qk_rope_head_dim))
    one = getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False)  # Falcon, StarCoder
    heads = 1 if one else getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(layers * 2 * heads * width)


def turning(config: Any) -> tuple[int, str] | None:
    """Up to how many positions the rotary frequencies stay what they are, and their kind, where a longer text has others: a step chooses them for all
    of its rows by the largest position, and keys are cached as they were turned. None: they are the same for all texts."""
    config = config.get_text_config()
    given = getattr(config, "rope_parameters", None) or {}
    found = list[tuple[int, str]]()
    for one in (given, *[part for part in given.values() if isinstance(part, dict)]):  # some models have them by the kind of layer
        kind = str(one.get("rope_type", "default"))
        if kind == "longrope":
            found.append((int(one.get("original_max_position_embeddings") or config.max_position_embeddings), kind))
        elif "dynamic" in kind:
            found.append((int(config.max_position_embeddings), kind))
    return min(found, default=None)


def routed(config: Any) -> bool:
    """Does the model choose experts?"""
    return any(getattr(config.get_text_config(), k, None) for k in ("num_local_experts", "num_experts", "n_routed_experts"))


def decoder_layers(module: nn.Module) -> tuple[nn.Module, str]:
    """The submodule that owns the stack of layers, and the attribute it is in."""
    for owner in module.modules():
        for name, child in owner.named_children():
            if isinstance(child, nn.ModuleList) and name in ("layers", "h", "blocks"):
                return owner, name
    raise OutriderError(f"{type(module).__name__} has no stack of layers that a view could shorten", "", "a draft model instead")


def with_layers(module: nn.Module, layers: tuple[int, ...]) -> nn.Module:
    """A copy that shares all parameters and runs only `layers`."""
    owner, name = decoder_layers(module)

    def rebuild(old: nn.Module) -> nn.Module:
        new = copy.copy(old)
        new._modules = dict(old._modules)
        if old is owner:
            stack = old._modules[name]
            assert isinstance(stack, nn.ModuleList)
            new._modules[name] = nn.ModuleList([stack[i] for i in layers])
            config: Any = copy.copy(old.config)
            if getattr(config, "layer_types", None):
                config.layer_types = [config.layer_types[i] for i in layers]
            config.num_hidden_layers = len(layers)
            new.config = config
            return new
        for key, child in old._modules.items():
            if child is not None and any(m is owner for m in child.modules()):
                new._modules[key] = rebuild(child)
        return new

    return rebuild(module)


def shared(module: nn.Module, other: nn.Module) -> nn.Module:
    """The module, with the other's parameters where both have one of that name, shape and dtype: those of one checkpoint."""
    for name, given in other.named_parameters():
        path, _, leaf = name.rpartition(".")
        try:
            part = module.get_submodule(path)
        except AttributeError:  # it has no such part
            continue
        own = part._parameters.get(leaf)
        if own is not None and (own.shape, own.dtype) == (given.shape, given.dtype):
            part._parameters[leaf] = given
    return module
