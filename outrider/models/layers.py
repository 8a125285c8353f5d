"""What a transformers module is made of: the kinds of its layers, where they are, and copies of it that run fewer of them.

Asks the config and the module's own children; knows nothing of caches or steps.
"""

import copy
from typing import Any

from torch import nn

from outrider.core.errors import OutriderError


def windows(config: Any) -> dict[str, int | None]:
    """Layer type -> how many positions it sees (None: all). One entry for a model of one kind of layer."""
    config = config.get_text_config()
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if types is None:
        return {"sliding_attention": window} if window else {"full_attention": None}
    return {t: window if t == "sliding_attention" else None for t in dict.fromkeys(types)}


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
