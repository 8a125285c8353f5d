"""Do two models speak the same tokens? Decided by what the tokenizers do, not by what they are called."""

import hashlib
import json
import logging
from typing import Any

from outrider.core.errors import OutriderError

log = logging.getLogger("outrider")


def fingerprint(tokenizer: Any) -> str:
    """A short hash of the token table (text -> id). Padded rows of an embedding matrix are no part of it."""
    table = sorted((i, t) for t, i in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()[:16]


def check_pair(target: Any, draft: Any, target_name: str, draft_name: str) -> None:
    """Raise an OutriderError unless both tokenizers give every text the same ids."""
    a, b = target.get_vocab(), draft.get_vocab()
    if a == b:
        return
    odd = next((t for t in a if b.get(t) != a[t]), None) or next(t for t in b if t not in a)
    raise OutriderError(
        f"{draft_name} cannot draft for {target_name}: their tokenizers differ",
        f"{len(a)} and {len(b)} tokens; {odd!r} is id {a.get(odd)} in one and {b.get(odd)} in the other",
        "a draft of the same model family, or drafters=['lookup'], which needs no second model",
    )


def tell_fewer(draft: int, target: int, name: str) -> None:
    """Say so where a draft's embedding has fewer ids than the target may write: it cannot read the others, though its tokenizer knows them."""
    if draft < target:
        log.warning("%s has %d of the target's %d ids: it guesses nothing in texts that hold others", name, draft, target)
