"""Outrider: a compiler and adaptive runtime for speculative text generation.

rt = outrider.load()                      # the embedded reference pair
out = rt.generate("def fib(n):", max_tokens=64)
"""

from typing import TYPE_CHECKING, Any

from outrider.core.errors import OutriderError
from outrider.runtime.native import host

if TYPE_CHECKING:
    from outrider import reference
    from outrider.core.config import LoadSettings
    from outrider.core.types import SamplingParams
    from outrider.runtime.assemble import load
    from outrider.runtime.door import Chunk, Generation, Runtime

host.find()

__version__ = "0.1.0"
__all__ = ["Chunk", "Generation", "LoadSettings", "OutriderError", "Runtime", "SamplingParams", "load", "reference"]
_LAZY = {
    "load": "outrider.runtime.assemble",
    "Runtime": "outrider.runtime.door",
    "Generation": "outrider.runtime.door",
    "Chunk": "outrider.runtime.door",
    "LoadSettings": "outrider.core.config",
    "SamplingParams": "outrider.core.types",
}


def __getattr__(name: str) -> Any:
    """torch and transformers are imported when they are first needed."""
    import importlib

    if name == "reference":
        return importlib.import_module("outrider.reference")
    if name not in _LAZY:
        raise AttributeError(f"module 'outrider' has no attribute '{name}'")
    return getattr(importlib.import_module(_LAZY[name]), name)
