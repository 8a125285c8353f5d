"""Corpora to token streams: reads sources, trains the tokenizer, writes one stream of ids per domain and split.

A *domain* is a named stream with a sampling weight in the recipe. Held-out documents are chosen by a hash of their
position and never enter training. Knows nothing of models.
"""

import errno
import gzip
import hashlib
import importlib.util
import json
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from outrider.core.errors import OutriderError
from outrider.models.load import load_tokenizer
from outrider.reference import tasks

ID = np.uint32  # of a token in a stream
SPECIAL = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "<|begin|>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def render(messages: Iterable[tasks.Message]) -> str:
    """A conversation as training text: CHAT_TEMPLATE without its leading <|begin|>."""
    return "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages)


def _chat(question: str, context: str, answer: str) -> str:
    user = f"{question}\n{context}" if context else question
    return render([{"role": "user", "content": user}, {"role": "assistant", "content": answer}])


def _plain(text: str) -> str:
    return text.replace("\r\n", "\n").strip() + "<|end|>"


def books(data: Path) -> Iterator[str]:
    for part in sorted((data / "corpus/classic_books").glob("*.jsonl.gz")):
        with gzip.open(part, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield _plain(re.sub(r"\n{3,}", "\n\n", json.loads(line)["text"].replace("\r\n", "\n")))


def stories(data: Path) -> Iterator[str]:
    """TinyStories: the cased sample, then what the lower-cased file has beyond it, with its capitals restored."""
    folder = data / "corpus/tinystories"
    cased = (folder / "tinystories_sample_2mb.txt").read_text("utf-8", errors="ignore").split("<|endoftext|>")[:-1]
    yield from map(_plain, cased)
    lower = (folder / "tinystories_lower_4mb.txt").read_text("utf-8")
    last = cased[-1].strip().lower()[:60]
    rest = lower[lower.find(last) :] if last in lower else lower[len(lower) // 2 :]
    forms = Counter(re.findall(r"(?<=[a-z,] )\w+", " ".join(cased)))
    best = {w.lower(): w for w, n in forms.items() if n > forms[w.lower()]}
    for story in re.split(r"\n(?=once upon a time|one day, )", rest)[1:]:
        named = re.sub(r"\w+", lambda m: best.get(m[0], m[0]), story)
        named = re.sub(r"\bi\b", "I", named)
        yield _plain(re.sub(r'(^|[.!?]"?\s+"?|\n"?|, ")([a-z])', lambda m: m[1] + m[2].upper(), named))


def shakespeare(data: Path) -> Iterator[str]:
    text = (data / "corpus/tinyshakespeare/input.txt").read_text("utf-8")
    speeches = text.split("\n\n")
    yield from (_plain("\n\n".join(speeches[i : i + 40])) for i in range(0, len(speeches), 40))


def maths(data: Path) -> Iterator[str]:
    with open(data / "corpus/gsm8k/train.jsonl", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield _chat(row["question"], "", re.sub(r"<<.*?>>", "", row["answer"]))


def instructions(data: Path) -> Iterator[str]:
    for name in ("codegen-instruct", "roleplay-simple-deduped-roleplay-instruct", "toolformer-dedupe-only-dataset"):
        for row in json.loads((data / f"corpus/gpteacher/{name}.json").read_text("utf-8")):
            yield _chat(row["instruction"], row["input"], row["response"])


def manuals(data: Path) -> Iterator[str]:
    with gzip.open(data / "corpus/tldr/tldr_en.jsonl.gz", "rt", encoding="utf-8") as lines:
        yield from (_plain(json.loads(line)["text"]) for line in lines)


def python(data: Path) -> Iterator[str]:
    """The standard library of the running interpreter, without its tests and tables."""
    return _modules(Path(sysconfig.get_paths()["stdlib"]))


def packages(data: Path) -> Iterator[str]:
    """Installed packages that this one needs, under BSD and Apache licences, without their tests."""
    for name in ("torch", "transformers", "numpy", "sympy"):
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(errno.ENOENT, "not installed", f"the package {name}")
        yield from _modules(Path(spec.submodule_search_locations[0]))


def _modules(root: Path) -> Iterator[str]:
    skip = {"site-packages", "test", "tests", "testing", "encodings", "pydoc_data", "idlelib", "lib2to3", "__pycache__"}
    for file in sorted(root.rglob("*.py")):
        if not skip & set(file.relative_to(root).parts):
            text = file.read_text("utf-8", errors="ignore")
            if len(text) > 200:
                yield _plain(text)


def task_domain(data: Path) -> Iterator[str]:
    yield from (render(t.messages) for t in tasks.mixture(0, 70_000))


SOURCES: dict[str, Callable[[Path], Iterator[str]]] = {
    "books": books, "stories": stories, "shakespeare": shakespeare, "maths": maths,
    "instructions": instructions, "manuals": manuals, "python": python, "packages": packages,
    "tasks": task_domain,
}  # fmt: skip


def read(name: str, data: Path, max_chars: int) -> tuple[list[str], list[str]]:
    """Documents of a domain as (training, held-out), shuffled, at most `max_chars` characters in all."""
    try:
        documents = list(SOURCES[name](data))
    except FileNotFoundError as missing:
        raise OutriderError(
            f"the corpus '{name}' is not there",
            f"{missing.filename} does not exist",
            "point --data at a folder that holds corpus/, or set the domain's weight to 0 in the recipe",
        ) from missing
    random.Random(name).shuffle(documents)
    kept: list[str] = []
    for text in documents:
        if max_chars <= 0:
            break
        kept.append(text[:max_chars])
        max_chars -= len(text)
    out = max(1, len(kept) // 50)
    return kept[out:], kept[:out]


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Byte-level BPE with single digits, the chat markers as special tokens and <|begin|> put first on encoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write the tokenizer in the layout that transformers loads."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|pad|>", model_max_length=context
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def build(domains: dict[str, dict[str, float]], data: Path, folder: Path, vocab: int, context: int, progress: Callable[[str], None]) -> None:
    """Write tokenizer/, {domain}.train.ids and {domain}.held.ids below `folder`, and at last chars.json. What is already there, a tokenizer say, is
    kept; where all is, `data` is not looked at."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {n: d for n, d in domains.items() if d["weight"] > 0}
    if (folder / "chars.json").exists() and all((folder / f"{n}.{s}.ids").exists() for n in wanted for s in ("train", "held")):
        return
    texts = {n: read(n, data, int(d.get("max_chars", 1e12))) for n, d in wanted.items()}
    saved = folder / "tokenizer" / "tokenizer.json"
    if not saved.exists():
        progress("training the tokenizer")
        sample = (t[:20_000] for n in texts for t in _take(texts[n][0], 3_000_000))
        save_tokenizer(train_tokenizer(sample, vocab), saved.parent, context)
    tokenizer = load_tokenizer(saved.parent)
    adapt = _dialect(tokenizer)
    for name, splits in texts.items():
        for split, documents in zip(("train", "held"), splits, strict=True):
            target = folder / f"{name}.{split}.ids"
            if not target.exists():
                progress(f"tokenising {name} ({split})")
                _write(tokenizer.backend_tokenizer, [adapt(d) for d in documents], target)
    chars = {f"{n}.{s}": sum(map(len, t)) for n, p in texts.items() for s, t in zip(("train", "held"), p, strict=True)}
    (folder / "chars.json").write_text(json.dumps(chars, indent=1))
    digest = hashlib.sha256("".join(sorted(chars)).encode()).hexdigest()[:12]
    progress(f"corpus ready: {sum(chars.values()) / 1e6:.1f} M characters, domains {digest}")


def _take(documents: list[str], chars: int) -> Iterator[str]:
    for text in documents:
        if chars <= 0:
            return
        chars -= min(len(text), 20_000)
        yield text


def _dialect(tokenizer: Any) -> Callable[[str], str]:
    """How a document is put for a tokenizer of another house: a paragraph for a marker that it lacks, and its end token
    between documents if it does not put a token before them."""
    if not (lacking := [m for m in SPECIAL if m not in tokenizer.get_vocab()]):
        return str
    markers = re.compile("|".join(map(re.escape, lacking)))
    end = "" if tokenizer("")["input_ids"] else tokenizer.eos_token or "\n\n"
    return lambda text: markers.sub("\n", text).strip() + end


def _write(tokenizer: Tokenizer, documents: list[str], target: Path) -> None:
    part = target.with_suffix(".part")
    with open(part, "wb") as out:
        for i in range(0, len(documents), 256):
            for encoding in tokenizer.encode_batch(documents[i : i + 256]):
                out.write(np.asarray(encoding.ids, dtype=ID).tobytes())
    part.rename(target)


@dataclass(frozen=True, slots=True)
class Marks:
    """Ids by which a stream shows its parts, one or none of each: what a document begins with, what an answer follows."""

    begin: list[int]
    assistant: list[int]

    @classmethod
    def of(cls, folder: Path) -> "Marks":
        """Those of the tokenizer that wrote the streams of `folder`."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))
        answer = tokenizer.token_to_id("<|assistant|>")
        return cls(tokenizer.encode("").ids[:1], [] if answer is None else [answer])


class Streams:
    """Random windows of the token streams of a folder, domains in the proportion of their weights."""

    def __init__(self, folder: Path, weights: dict[str, float], split: str, seed: int) -> None:
        self.streams = {n: np.memmap(folder / f"{n}.{split}.ids", dtype=ID, mode="r") for n, w in weights.items() if w > 0}
        total = sum(weights[n] for n in self.streams)
        self.names = list(self.streams)
        self.shares = [weights[n] / total for n in self.names]
        self.rng = np.random.default_rng(seed)

    def batch(self, rows: int, length: int) -> np.ndarray:
        """Token ids [rows, length], int64. A stream shorter than `length` repeats itself."""
        return np.stack([self.window(self.names[i], length) for i in self.rng.choice(len(self.names), rows, p=self.shares)])

    def window(self, name: str, length: int) -> np.ndarray:
        stream = self.streams[name]
        start = int(self.rng.integers(0, max(1, len(stream) - length)))
        return np.resize(stream[start : start + length], length).astype(np.int64)
