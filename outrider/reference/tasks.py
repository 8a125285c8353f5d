"""Checkable tasks: short instructions whose one right answer a program knows.

The reference pair is trained on them and later work grades models with them. A task is a function of (kind, seed)
alone: training uses seeds below `HELD_OUT`, evaluation uses seeds from there on. Made-up words keep copying honest:
the only way to write them is to read them from the prompt.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

HELD_OUT = 1_000_000_000  # seeds from here on are never trained on

Message = dict[str, str]

FIRST = "Ada Ben Cleo Dan Eva Finn Gita Hugo Ines Jon Kira Leo Mia Nils Olga Pia Quin Rosa Sam Tara Uma Vera Walt Yara Zoe".split()
CITIES = "Oslo Lima Cairo Kyoto Porto Quito Riga Turin Delhi Accra Bonn Perth Dover Minsk Sofia Tunis Leeds Basel".split()
THINGS = "lamp table ticket garden report engine bottle window camera pencil blanket bridge kettle ladder mirror basket".split()
COLOURS = "red blue green yellow black white orange purple brown grey".split()
VERBS = "opened moved painted repaired sold borrowed measured carried cleaned described copied packed".split()
SYLLABLES = "ba ke lo mi nu ra se ti vo da fe gi ho ju ka le mo ni pa ru sa to vi zen lor mar tis dun pel kor".split()


@dataclass(frozen=True, slots=True)
class Task:
    """One conversation whose last message is the assistant's right answer."""

    kind: str
    seed: int
    messages: tuple[Message, ...]

    @property
    def prompt(self) -> list[Message]:
        return list(self.messages[:-1])

    @property
    def answer(self) -> str:
        return self.messages[-1]["content"]

    def grade(self, text: str) -> bool:
        """True if `text` is the right answer, white space at the ends aside."""
        return text.strip() == self.answer.strip()


def made_up_word(rng: random.Random) -> str:
    return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 4)))


def _sentence(rng: random.Random) -> str:
    who = rng.choice([*FIRST, made_up_word(rng).capitalize()])
    where = rng.choice([*CITIES, made_up_word(rng).capitalize()])
    return rng.choice(
        [
            f"{who} {rng.choice(VERBS)} the {rng.choice(COLOURS)} {rng.choice(THINGS)} in {where}.",
            f"On day {rng.randint(2, 99)}, {who} {rng.choice(VERBS)} {rng.randint(2, 60)} {rng.choice(THINGS)}s.",
            f"The {rng.choice(THINGS)} of {who} costs {rng.randint(3, 999)} coins in {where}.",
            f"{who} wrote the word {made_up_word(rng)} on a {rng.choice(COLOURS)} {rng.choice(THINGS)}.",
        ]
    )


def _passage(rng: random.Random, low: int = 3, high: int = 8) -> list[str]:
    return [_sentence(rng) for _ in range(rng.randint(low, high))]


def _one_turn(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def arithmetic(rng: random.Random) -> list[Message]:
    sign = rng.choice("++--*")
    top = 12 if sign == "*" else rng.choice([20, 100, 1000])
    a, b = rng.randint(0, top), rng.randint(0, top)
    a, b = (max(a, b), min(a, b)) if sign == "-" else (a, b)
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    ask = rng.choice(["What is {}?", "Calculate {}.", "Work out {}.", "{} ="])
    return _one_turn(ask.format(f"{a} {sign} {b}"), f"{a} {sign} {b} = {value}")


def copy(rng: random.Random) -> list[Message]:
    text = " ".join(_passage(rng))
    ask = rng.choice(["Repeat this text exactly:", "Copy the following text word for word:", "Write this again, unchanged:"])
    return _one_turn(f"{ask}\n{text}", text)


def replace(rng: random.Random) -> list[Message]:
    lines = _passage(rng)
    words = sorted({w.strip(".,") for line in lines for w in line.split() if len(w) > 4})
    old, new = rng.choice(words), made_up_word(rng)
    text = " ".join(lines)
    return _one_turn(f"Replace the word {old} by {new} in this text:\n{text}", text.replace(old, new))


def _function(rng: random.Random, name: str, arg: str, local: str) -> str:
    n, m = rng.randint(1, 99), rng.randint(2, 99)
    bodies = [
        f"    {local} = {arg} + {n}\n    return {local} * {m}\n",
        f"    {local} = 0\n    for item in {arg}:\n        {local} += item * {n}\n    return {local}\n",
        f"    {local} = []\n    for item in {arg}:\n        if item > {n}:\n            {local}.append(item)\n    return {local}\n",
        f"    if {arg} > {n}:\n        {local} = {m}\n    else:\n        {local} = {arg}\n    return {local}\n",
        f'    """Return {local} of {arg}."""\n    {local} = {{}}\n    for key in {arg}:\n        {local}[key] = {n}\n    return {local}\n',
    ]
    return f"def {name}({arg}):\n{rng.choice(bodies)}"


def code_edit(rng: random.Random) -> list[Message]:
    names = [made_up_word(rng) for _ in range(3)]
    arg, local = rng.choice(["values", "data", "count", "width", names[0]]), rng.choice(["total", "result", "found", names[1]])
    code = "\n\n".join(_function(rng, made_up_word(rng), arg, local) for _ in range(rng.randint(1, 3))).rstrip()
    old, new = rng.choice([(arg, names[2]), (local, names[2])])
    return _one_turn(f"Rename {old} to {new} in this code:\n```python\n{code}\n```", f"```python\n{code.replace(old, new)}\n```")


def _records(rng: random.Random) -> list[dict[str, str | int]]:
    fields = rng.sample(["name", "city", "colour", "count", "code"], rng.randint(2, 4))
    makers: dict[str, Callable[[], str | int]] = {
        "name": lambda: rng.choice(FIRST),
        "city": lambda: rng.choice(CITIES),
        "colour": lambda: rng.choice(COLOURS),
        "count": lambda: rng.randint(1, 500),
        "code": lambda: made_up_word(rng),
    }
    return [{f: makers[f]() for f in fields} for _ in range(rng.randint(1, 5))]


def convert(rng: random.Random) -> list[Message]:
    records = _records(rng)
    fields = list(records[0])
    csv = "\n".join([",".join(fields), *(",".join(str(r[f]) for f in fields) for r in records)])
    as_json = "[" + ",\n ".join(json.dumps(r) for r in records) + "]"
    listing = "\n".join("- " + ", ".join(f"{f}: {r[f]}" for f in fields) for r in records)
    forms = {"CSV": csv, "JSON": as_json, "a list": listing}
    source, goal = rng.sample(sorted(forms), 2)
    return _one_turn(f"Convert this to {goal}:\n{forms[source]}", forms[goal])


def quote(rng: random.Random) -> list[Message]:
    lines = _passage(rng, 4, 9)
    words = sorted({w.strip(".,") for line in lines for w in line.split() if len(w) > 3 and w[0].isupper()})
    key = rng.choice(words) if words else lines[0].split()[0]
    hits = [line for line in lines if key in line]
    return _one_turn(f"{' '.join(lines)}\n\nQuote every sentence that mentions {key}.", " ".join(hits))


def order(rng: random.Random) -> list[Message]:
    words = rng.sample(sorted({*THINGS, *COLOURS, *(made_up_word(rng) for _ in range(6))}), rng.randint(3, 7))
    ways: list[tuple[str, Callable[[list[str]], list[str]]]] = [
        ("in alphabetical order", sorted),
        ("in reverse", lambda w: w[::-1]),
        ("in capitals", lambda w: [x.upper() for x in w]),
    ]
    how, key = rng.choice(ways)
    return _one_turn(f"Write these words {how}: {', '.join(words)}", ", ".join(key(words)))


TOOLS: dict[str, tuple[tuple[str, ...], str, str, str]] = {
    # name: (arguments, question, fields of the result, answer)
    "get_weather": (("city",), "What is the weather like in {city}?", "degrees wind", "In {city} it is {degrees} degrees with wind at {wind} km/h."),
    "find_flight": (
        ("origin", "city", "day"),
        "Find me a flight from {origin} to {city} on day {day}.",
        "flight price",
        "Flight {flight} from {origin} to {city} on day {day} costs {price} coins.",
    ),
    "order_item": (
        ("item", "count"),
        "Please order {count} {item}s.",
        "order total",
        "I ordered {count} {item}s. Your order number is {order} and the total is {total} coins.",
    ),
    "look_up_person": (("name",), "Where does {name} live?", "city phone", "{name} lives in {city}. The phone number is {phone}."),
    "book_room": (
        ("city", "day", "count"),
        "Book a room in {city} on day {day} for {count} nights.",
        "room price",
        "Room {room} in {city} is booked from day {day} for {count} nights. It costs {price} coins.",
    ),
    "set_reminder": (
        ("item", "day"),
        "Remind me about the {item} on day {day}.",
        "code",
        "Done. I will remind you about the {item} on day {day}. The code is {code}.",
    ),
}


def _value(field: str, rng: random.Random) -> str | int:
    pools = {"city": CITIES, "origin": CITIES, "name": FIRST, "item": THINGS}
    if field in pools:
        return rng.choice([*pools[field], made_up_word(rng).capitalize() if field != "item" else made_up_word(rng)])
    if field in ("flight", "order", "room", "code"):
        return made_up_word(rng).upper()[:4] + str(rng.randint(10, 999))
    return rng.randint(2, 40) if field in ("day", "count", "degrees", "wind") else rng.randint(50, 99999)


def tool_dialogue(rng: random.Random) -> list[Message]:
    """A system prompt with tools, then one to three rounds of question, call, result and answer."""
    names = rng.sample(sorted(TOOLS), rng.randint(1, 3))
    system = "You can call these tools:\n" + "\n".join(json.dumps({"name": n, "arguments": list(TOOLS[n][0])}) for n in names)
    messages = [{"role": "system", "content": system}]
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(names)
        arguments, question, fields, answer = TOOLS[name]
        given = {a: _value(a, rng) for a in arguments}
        result = {f: _value(f, rng) for f in fields.split()}
        messages += [
            {"role": "user", "content": question.format(**given)},
            {"role": "assistant", "content": json.dumps({"name": name, "arguments": given})},
            {"role": "tool", "content": json.dumps(result)},
            {"role": "assistant", "content": answer.format(**{**given, **result})},
        ]
    return messages


KINDS: dict[str, Callable[[random.Random], list[Message]]] = {
    "arithmetic": arithmetic, "copy": copy, "replace": replace, "code_edit": code_edit, "convert": convert,
    "quote": quote, "order": order, "tool_dialogue": tool_dialogue,
}  # fmt: skip
WEIGHTS = {"arithmetic": 1, "copy": 2, "replace": 2, "code_edit": 3, "convert": 2, "quote": 2, "order": 1, "tool_dialogue": 4}


def make(kind: str, seed: int) -> Task:
    """The task of this kind and seed; the same on every machine."""
    return Task(kind, seed, tuple(KINDS[kind](random.Random(f"{kind}:{seed}"))))


def mixture(first: int, count: int) -> list[Task]:
    """`count` tasks from seed `first` on, kinds in the proportion of WEIGHTS."""
    picks = random.Random(f"mixture:{first}").choices(list(WEIGHTS), list(WEIGHTS.values()), k=count)
    return [make(kind, first + i) for i, kind in enumerate(picks)]
