"""Outrider: a compiler and adaptive runtime for speculative text generation.

rt = outrider.load()                      # the embedded reference pair
out = rt.generate("def fib(n):", max_tokens=64)
"""

from typing import TYPE_CHECKING, Any

from outrider.core.errors import OutriderError
from outrider.core.types import SamplingParams

if TYPE_CHECKING:
    from outrider.runtime.assemble import load
    from outrider.runtime.door import Chunk, Generation, Runtime

__version__ = "0.1.0"
__all__ = ["Chunk", "Generation", "OutriderError", "Runtime", "SamplingParams", "load"]
_LAZY = {"load": "assemble", "Runtime": "door", "Generation": "door", "Chunk": "door"}


def __getattr__(name: str) -> Any:
    """torch and transformers are imported when they are first needed."""
    if name not in _LAZY:
        raise AttributeError(f"module 'outrider' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f"outrider.runtime.{_LAZY[name]}"), name)
