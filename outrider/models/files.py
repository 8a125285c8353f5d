"""The files of a model's folder that hold its weights, and what their headers say. Other weights may lie beside them: Mistral's folders hold them a
second time, under the names of another library.

Reads no weights. Invariant: these files are the ones that transformers loads.
"""

import json
import struct
from pathlib import Path

from outrider.core.errors import OutriderError

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NOT_READ = ["consolidated*.safetensors", "original/*"]  # of a folder on the hub


def weight_files(folder: Path) -> list[Path]:
    """One file, or those that the index names; where there is neither, all. Raises OutriderError for an index that is damaged, or names what is not
    there."""
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    index = folder / INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        named = sorted({folder / name for name in json.loads(index.read_text("utf-8"))["weight_map"].values()})
    except OSError as bad:
        raise OutriderError(f"{index} cannot be read", bad.strerror or str(bad), "a file that you may read") from bad
    except (ValueError, KeyError, TypeError, AttributeError) as bad:
        raise OutriderError(f"{index} is damaged", str(bad), "copying or downloading it again") from bad
    if missing := [file.name for file in named if not file.is_file()]:
        raise OutriderError(f"{folder} lacks weights", f"its index names {missing[0]}", "copying or downloading it again")
    return named


def tensors(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Name -> (dtype, shape) of all weights, from the safetensors headers; a truncated file is an error."""
    files = weight_files(folder)
    if not files:
        raise OutriderError(f"{folder} holds no *.safetensors", "", "a folder saved by save_pretrained(..., safe_serialization=True)")
    found: dict[str, tuple[str, list[int]]] = {}
    for file in files:
        try:
            size = file.stat().st_size
            with open(file, "rb") as f:
                (length,) = struct.unpack("<Q", f.read(8))
                header = json.loads(f.read(length))
            end = 8 + length + max((t["data_offsets"][1] for n, t in header.items() if n != "__metadata__"), default=0)
            if end != size:
                raise ValueError(f"it has {size} bytes and its header promises {end}")
        except OSError as bad:
            raise OutriderError(f"{file} cannot be read", bad.strerror or str(bad), "a file that you may read") from bad
        except (ValueError, struct.error, KeyError, TypeError, AttributeError, MemoryError, OverflowError) as bad:
            raise OutriderError(f"{file} is damaged", str(bad), "copying or downloading it again") from bad
        found |= {n: (t["dtype"], t["shape"]) for n, t in header.items() if n != "__metadata__"}
    return found
