"""Our own prompts, six categories, none of them in the training data of the reference pair."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOM = 64  # tokens that a context must hold behind a prompt
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


def readable(rt: Any, count: int) -> list[Prompt]:
    """The first `count` prompts of each category that the target of a runtime can read, and write some tokens behind: no chats for a model without a
    template."""
    spec, chat = rt.engine.target.spec, bool(getattr(rt.tokenizer, "chat_template", None))
    found = [p for category in CATEGORIES for p in load(category) if chat or p.messages is None]
    found = [p for p in found if len(p.encode(rt.tokenizer)) + ROOM < spec.context]
    return [p for category in CATEGORIES for p in [q for q in found if q.category == category][:count]]


def few(rt: Any, tokens: int = 64) -> list[Any]:
    """Greedy requests of a runtime, one of each category: the last prompt, cut where it would fill more than half of the context. No
    chats for a model without a template."""
    asked = [p for p in (load(category)[-1] for category in CATEGORIES) if p.messages is None or rt.tokenizer.chat_template]
    return [rt.request(p.encode(rt.tokenizer)[: rt.engine.target.spec.context // 2], max_tokens=tokens) for p in asked]
