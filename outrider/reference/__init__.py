"""The embedded pair: a small target and its distilled draft, trained by this project (see MODEL_CARD.md).

The folders load with plain transformers; `tasks` generates the checkable tasks that both were trained on.
"""

from pathlib import Path

HOME = Path(__file__).parent


def target() -> Path:
    """Folder of the reference target."""
    return HOME / "target"


def draft() -> Path:
    """Folder of the reference draft."""
    return HOME / "draft"
