"""A target that exists already: a recipe names its folder, and the draft is trained as for one that was trained here.

The folder is linked, never written to. Its tokenizer goes where the streams are built, before they are.
"""

from pathlib import Path
from typing import Any

from outrider.core.errors import OutriderError
from outrider.models.files import tensors
from outrider.models.load import load_config, load_tokenizer, refuse_unfit
from outrider.train.pretrain import common


def adopt(target: Path, work: Path) -> dict[str, Any]:
    """Make `target` the target of `work`; returns what its draft will share with it (see `common`)."""
    if not target.is_dir():
        raise OutriderError(
            f"there is no folder {target}", "the recipe's target.path is looked for below --data", "a folder with config.json and *.safetensors"
        )
    config, tokenizer = load_config(target), load_tokenizer(target)
    refuse_unfit(config, target.name)
    tensors(target)
    if not tokenizer.is_fast:
        raise OutriderError(f"the tokenizer of {target} has no fast form", "streams are built with it", "a folder with tokenizer.json")
    _link(work / "target", target.resolve())
    tokenizer.save_pretrained(work / "corpus/tokenizer")
    return common(config)


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink() and not link.exists():
        link.symlink_to(target, target_is_directory=True)
    elif link.resolve() != target:
        raise OutriderError(
            f"{link.parent} was begun with another target", f"{link} is {link.resolve()}, the recipe's is {target}", "--work with an empty folder"
        )
