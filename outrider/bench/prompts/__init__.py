"""Our own prompts, six categories, none of them in the training data of the reference pair."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CATEGORIES = ("story", "code", "code_edit", "summarise_copy", "tool_dialogue", "open_ended")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Raw text to continue, or messages of a chat to answer."""

    id: str
    category: str
    text: str | None
    messages: tuple[dict[str, str], ...] | None
    temperature: float

    def encode(self, tokenizer: Any) -> list[int]:
        """Token ids as the runtime would make them."""
        if self.messages is None:
            ids: list[int] = tokenizer(self.text)["input_ids"]
            return ids
        return list(tokenizer.apply_chat_template(list(self.messages), add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"])


def load(category: str) -> list[Prompt]:
    """The prompts of one category."""
    lines = (Path(__file__).parent / f"{category}.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [Prompt(r["id"], r["category"], r.get("prompt"), tuple(r["messages"]) if "messages" in r else None, r["temperature"]) for r in rows]
