"""Law: what a forward says of a chain is read in machine code as Python reads it: the same guesses, asked about alike, and as many of them kept."""

# ruff: noqa: F811 (fixtures of the races)

import random

import pytest
import torch
from test_races import TYPES, made, sequence  # noqa: F401

from outrider.core import sampling as sampling_module
from outrider.core import tree
from outrider.core.errors import OutriderError
from outrider.core.noise import RowNoise
from outrider.core.sampling import Race, Settings
from outrider.models import chain as chain_module
from outrider.models.chain import Chain


@pytest.fixture
def machine(made, monkeypatch) -> list[tuple]:
    """What is asked of it, where `either` says so."""
    asked = []

    class Told:
        won, decided = made.won, made.decided

        @staticmethod
        def guessed(*given):
            asked.append(given)
            return made.guessed(*given)

    def either(module) -> None:
        for user in (chain_module, sampling_module):
            monkeypatch.setattr(user, "races", module)

    asked.append((either, Told))
    return asked


def race(seed: int, temperature: float = 1.0, **settings) -> Race:
    draft = tree.run(tree.empty(1), -1, [5, 6], 1, [0.5] * 2)
    return Race(draft, 1, Settings.of([sequence(seed, temperature=temperature, **settings)]), RowNoise((seed,), (0,), (9,)))


def guesses(seed: int, dtype: torch.dtype, drawn: bool) -> tuple:
    """A chain of a few forwards over few ids, so that hints are right; who is asked, and what becomes of it."""
    rng, generator, told, heard = random.Random(seed), torch.Generator().manual_seed(seed), [], []

    def on(chance: float, free: bool = False) -> bool:
        heard.append((chance, free))
        return rng.random() < 0.9

    chain = Chain(rng.randint(1, 12), frozenset({3} if rng.random() < 0.3 else ()), on if seed % 3 else None, race(seed, 0.8) if drawn else None)
    for _ in range(8):
        places = rng.randint(1, 9)
        at = None if rng.random() < 0.5 else [rng.randrange(places) for _ in range(rng.randint(1, 6))]
        logits = torch.randn(1, places, 4, generator=generator).to(dtype)
        found = torch.randn(1, places, 3, generator=generator, dtype=torch.float64)
        found[..., 0] = logits.argmax(-1)
        hints = [
            rng.randrange(4) if rng.random() < 0.3 else int(found[0, i if at is None else at[i], 0]) for i in range(len(at or range(places)) - 1)
        ]
        before = len(chain.tokens)
        more = chain.read(logits, found, places, at, hints)
        assert before < len(chain.tokens) == len(chain.chances) <= before + len(hints) + 1 and len(chain.tokens) - chain.scored in (0, 1)
        told.append((list(chain.tokens), list(chain.chances), chain.scored, more))
        if not more:
            break
    return told, heard


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_chain_is_read_as_python_reads_it(machine, dtype, drawn):
    (either, told), ends, lengths = machine.pop(), set(), set()
    for seed in range(300):
        either(None)
        wanted = guesses(seed, dtype, drawn)
        either(told)
        found = guesses(seed, dtype, drawn)
        assert [(t, s, m) for t, _, s, m in found[0]] == [(t, s, m) for t, _, s, m in wanted[0]] and [f for _, f in found[1]] == [
            f for _, f in wanted[1]
        ]
        assert found[0][-1][1] == (pytest.approx(wanted[0][-1][1], rel=1e-9) if drawn else wanted[0][-1][1]), (
            "chances, to the bit where nothing is drawn"
        )
        ends.add((len(wanted[0][-1][0]) - wanted[0][-1][2], wanted[0][-1][3]))
        lengths.add(len(wanted[0][-1][0]))
    assert ends >= {(0, False), (1, False)} and max(lengths) > 5 and len(machine) > 300


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize("here", [False, True], ids=["python", "machine"])
def test_what_is_no_number_ends_a_chain_that_comes_to_it(machine, here, drawn):
    """And only that: behind a hint which is wrong nobody looks."""
    either, told = machine.pop()
    either(told if here else None)
    logits, found = torch.zeros(1, 3, 40), torch.zeros(1, 3, 3, dtype=torch.float64)
    logits[0, 0, 7], found[0, 0, 0] = 60.0, 7
    logits[0, 1], found[0, 1, 1] = torch.nan, torch.nan
    assert Chain(9, frozenset(), race=race(1) if drawn else None).read(logits, found, 3, None, [8, 9])
    with pytest.raises(OutriderError, match="NaN"):
        Chain(9, frozenset(), race=race(1) if drawn else None).read(logits, found, 3, None, [7, 9])


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_races_that_machine_code_does_not_know_are_pythons(machine, settings):
    either, told = machine.pop()
    either(told)
    logits = torch.randn(1, 1, 300, generator=torch.Generator().manual_seed(1))
    chains = [Chain(4, frozenset(), race=race(3, 0.9, **settings)) for _ in range(2)]
    assert chains[0].read(logits, torch.zeros(1, 1, 3, dtype=torch.float64), 1, None, []) and not machine
    either(None)
    assert chains[1].read(logits, torch.zeros(1, 1, 3, dtype=torch.float64), 1, None, [])
    assert (chains[0].tokens, chains[0].chances) == (chains[1].tokens, chains[1].chances)


def test_logits_with_gaps_are_pythons_whatever_those_before_were(machine):
    """A step that is not compiled yet may leave ids out of what it computed."""
    (either, told), tokens = machine.pop(), []
    for module in (told, None):
        either(module)
        chain, found = Chain(9, frozenset(), race=race(4)), torch.zeros(1, 2, 3, dtype=torch.float64)
        for seed, width in enumerate((200, 300, 200)):
            logits = torch.randn(1, 2, width, generator=torch.Generator().manual_seed(seed))[..., :200]
            assert chain.read(logits, found, 2, [1], [])
        tokens.append(chain.tokens)
    assert tokens[0] == tokens[1] and len(machine) == 2


def test_who_is_asked_may_take_hints_away(made):
    found, hints = torch.zeros(1, 3, 3, dtype=torch.float64), [0, 0]
    assert made.guessed(found.data_ptr(), None, 3, None, hints, [], [], 9, frozenset(), lambda chance, free=False: not hints.clear()) == 1


def test_who_is_asked_may_fail(made):
    found, tokens, chances = torch.zeros(1, 1, 3, dtype=torch.float64), [1], [0.5]
    with pytest.raises(ZeroDivisionError):
        made.guessed(found.data_ptr(), None, 1, None, [], tokens, chances, 5, frozenset(), lambda chance: 1 // 0)


@pytest.mark.parametrize(
    "wrong", [{1: (1, 2)}, {1: [1] * 8}, {2: 0}, {3: [9]}, {3: [-1]}, {3: []}, {3: (0,)}, {4: None}, {5: ()}, {6: ()}, {7: "x"}, {8: [1]}, {9: 3}, {4: ["x"]}], ids=str
)  # fmt: skip
def test_a_chain_reads_no_place_that_is_none(made, wrong):
    found = torch.zeros(1, 1, 3, dtype=torch.float64)
    given = [found.data_ptr(), None, 1, None, [], [], [], 5, frozenset(), None]
    assert made.guessed(*given) == 1 and given[5:7] == [[0], [1.0]]
    with pytest.raises((TypeError, IndexError)):
        made.guessed(*[wrong.get(i, x) for i, x in enumerate(given)])
    with pytest.raises(TypeError):
        made.guessed(*given[:-1])
