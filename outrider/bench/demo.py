"""The main job, shown: three texts, each written plainly and speculatively, and what came of it.

The plain runtime has no drafter loaded. The runs of a text alternate; times are medians. Whether texts are identical is
asked of a strict pair of runtimes, plain and speculative, by token ids and finish reason; what strict costs is shown.
"""

from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

import outrider
from outrider import reference
from outrider.measure.trace import repetition
from outrider.runtime.door import Generation, Runtime

COLOURS = {"target": "white", "model": "green", "lookup": "cyan", "lookup+model": "yellow"}

STORY = "Once upon a time, a little owl named Odo was afraid of the dark. Every night he asked his mother to keep the moon on."
CODE = '''import re

__all__ = ["count_words", "first_line"]


def count_words(text):
    """Return a dictionary that maps each word of the text to its count."""
    counts = {}
    for word in re.findall(r"\\w+", text):
        counts[word] = counts.get(word, 0) + 1
    return counts


def first_line(path):
    """Return the first line of a file, or None if the file is empty."""
'''
DIALOGUE = [
    {"role": "system", "content": 'You can call these tools:\n{"name": "find_flight", "arguments": ["origin", "city", "day"]}'},
    {"role": "user", "content": "Find me a flight from Oslo to Porto on day 21."},
    {"role": "assistant", "content": '{"name": "find_flight", "arguments": {"origin": "Oslo", "city": "Porto", "day": 21}}'},
    {"role": "tool", "content": '{"flight": "BEKO417", "price": 3150}'},
    {"role": "assistant", "content": "Flight BEKO417 from Oslo to Porto on day 21 costs 3150 coins."},
    {
        "role": "user",
        "content": "Copy the following text word for word:\nNils packed the orange kettle in Oslo. On day 21, Nils carried 14 bottles. "
        "The mirror of Olga costs 318 coins in Porto. Nils wrote the word zenkolipa on a green ticket. Olga measured the brown bridge in Oslo. "
        "On day 34, Olga described 6 ladders. The basket of Nils costs 77 coins in Porto. Olga wrote the word lormatisu on a white camera.",
    },
]


@dataclass(frozen=True, slots=True)
class Scene:
    """A text to write and who may draft it."""

    name: str
    title: str
    prompt: Any
    drafters: tuple[str, ...]


SCENES = (
    Scene("story", "a story", STORY, ("lookup", "model")),
    Scene("code", "a piece of code", CODE, ("lookup",)),
    Scene("copying", "a dialogue with copying", DIALOGUE, ("lookup",)),
)


@dataclass(frozen=True, slots=True)
class Result:
    """What each runtime wrote of a scene last, and its seconds, medians over the rounds, by name: plain, fast, strict
    plain, strict fast."""

    scene: Scene
    texts: dict[str, Generation]
    seconds: dict[str, float]

    @property
    def identical(self) -> bool:
        plain, fast = self.texts["strict plain"], self.texts["strict fast"]
        return (plain.tokens, plain.finish_reason) == (fast.tokens, fast.finish_reason)

    def speed(self, name: str) -> float:
        """Tokens a second of decoding."""
        return len(self.texts[name].tokens) / self.seconds[name]


def run(max_tokens: int = 128, rounds: int = 3, console: Console | None = None, **settings: Any) -> list[Result]:
    """Write every scene plainly and speculatively, print it all, and return the results."""
    console = console or Console()
    runtimes = {}
    with console.status("loading the reference pair (the first time its steps are compiled, which takes a minute or two)"):
        for name, drafters in (("plain", []), ("fast", ["lookup", f"model:{reference.draft()}"])):
            for label, strict in ((name, False), (f"strict {name}", True)):
                runtimes[label] = outrider.load(reference.target(), drafters=drafters, rows=1, strict=strict, **{"depth": 4, **settings})
                runtimes[label].generate("Warm up", max_tokens=8)
    results = []
    for scene in SCENES:
        with console.status(f"writing {scene.title}"):
            results.append(_play(runtimes, scene, max_tokens, rounds))
        _show(results[-1], runtimes["fast"].tokenizer, console)
    console.print(legend())
    console.print(table(results))
    return results


def _play(runtimes: dict[str, Runtime], scene: Scene, max_tokens: int, rounds: int) -> Result:
    texts: dict[str, Generation] = {}
    seconds: dict[str, list[float]] = {name: [] for name in runtimes}
    for _ in range(rounds):
        for name, rt in runtimes.items():
            out = texts[name] = _write(rt, scene, max_tokens, list(scene.drafters) if name.endswith("fast") else "off")
            seconds[name].append(out.stats["seconds"] - out.stats["seconds_by_stage"].get("prefill", 0.0))
    return Result(scene, texts, {name: median(times) for name, times in seconds.items()})


def _write(rt: Runtime, scene: Scene, max_tokens: int, speculation: Any) -> Generation:
    ask = rt.generate if isinstance(scene.prompt, str) else rt.chat
    out: Generation = ask(scene.prompt, max_tokens=max_tokens, speculation=speculation)
    return out


def coloured(out: Generation, tokenizer: Any) -> Text:
    """The generated text, each token in the colour of its origin."""
    text, told = Text(), ""
    for i, origin in enumerate(out.origins, 1):
        whole = tokenizer.decode(out.tokens[:i], skip_special_tokens=True, clean_up_tokenization_spaces=False).rstrip("\ufffd")
        text.append(whole[len(told) :], style=COLOURS.get(origin, "magenta"))
        told = whole
    return text


def legend() -> Text:
    """Which colour is whose."""
    names = {"target": "the target itself", "model": "draft model", "lookup": "lookup in the text", "lookup+model": "both"}
    return Text("tokens by origin: ").append(Text("  ").join(Text(f"\u25a0 {label}", style=COLOURS[n]) for n, label in names.items()))


def _show(result: Result, tokenizer: Any, console: Console) -> None:
    console.rule(f"[bold]{result.scene.title}[/bold], {len(result.texts['fast'].tokens)} tokens, drafted by {' + '.join(result.scene.drafters)}")
    prompt = result.scene.prompt
    console.print(Text(prompt if isinstance(prompt, str) else prompt[-1]["content"], style="dim"))
    console.print(coloured(result.texts["fast"], tokenizer))


def table(results: list[Result]) -> Table:
    """The figures of all scenes. Greedy, decoding only, medians; repeated: 8-grams that occurred before."""
    out = Table("text", title="plain against speculative", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in (
        "tokens/s\nplain",
        "tokens/s\nspec.",
        "ratio",
        "tokens/s\nspec. strict",
        "tokens\nper call",
        "accepted",
        "repeated",
        "identical\n(strict)",
    ):
        out.add_column(head, justify="right")
    for r in results:
        fast = r.texts["fast"]
        rate = fast.stats["draft_acceptance_rate"]
        out.add_row(
            r.scene.name, f"{r.speed('plain'):.0f}", f"{r.speed('fast'):.0f}", f"{r.speed('fast') / r.speed('plain'):.2f}x", f"{r.speed('strict fast'):.0f}",
            f"{fast.stats['mean_acceptance_length']:.2f}", "-" if rate is None else f"{rate:.0%}", f"{repetition([fast.tokens]):.0%}",
            "yes" if r.identical else "NO",
        )  # fmt: skip
    return out
