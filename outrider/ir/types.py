"""Types of the language, its rules of acceptance, and the law that its verifiers keep: stop, never forget."""

from collections.abc import Sequence

from xdsl.dialects.builtin import IntegerAttr, StringAttr, i64
from xdsl.ir import Attribute, Operation, ParametrizedAttribute, SSAValue, TypeAttribute
from xdsl.irdl import (
    irdl_attr_definition,
    param_def,
)
from xdsl.parser import AttrParser, Parser
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException

from outrider.core.config import whole

POINT, SAMPLED, MIXED = "point", "sampled", "mixed"
FREE = ("greedy", "coupled")  # rules under which the text does not hang on what was drafted
LAWFUL = ("exact", "k_seq", "block")  # lossless ones that owe every drawn node a verdict
LOSSY = ("typical", "lenience")
RULES = (*FREE, *LAWFUL, *LOSSY)
ON, OVER, AFTER = "on", "over", "after"
FORGET = (
    "a sampled token may be a reason to stop, never a reason to forget: {what}, and under '{rule}' every drawn node is owed a verdict; "
    "do so with point drafts before the union, or accept by 'coupled'"
)


def joined(kinds: Sequence[str]) -> str:
    """The kind of a draft that holds drafts of these kinds."""
    found = set(kinds)
    return found.pop() if len(found) == 1 else MIXED


@irdl_attr_definition
class ContextType(ParametrizedAttribute, TypeAttribute):
    """The texts of a batch, as they were committed."""

    name = "outrider.context"


@irdl_attr_definition
class DraftType(ParametrizedAttribute, TypeAttribute):
    """Nodes of the step's forest."""

    name = "outrider.draft"
    kind: StringAttr = param_def()  # type: ignore[assignment]

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            start = parser.pos
            kind = parser.parse_identifier(context_msg=": a kind")
            if kind not in (POINT, SAMPLED, MIXED):
                parser.raise_error(f"'{kind}' is no kind of draft: {POINT}, {SAMPLED} or {MIXED}", start, parser.pos)
            return [StringAttr(kind)]

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            printer.print_string(self.kind.data)


@irdl_attr_definition
class ScoresType(ParametrizedAttribute, TypeAttribute):
    """What the scoring model thinks at every root and node."""

    name = "outrider.scores"


@irdl_attr_definition
class OutcomeType(ParametrizedAttribute, TypeAttribute):
    """What is kept, and what comes after it."""

    name = "outrider.outcome"


def draft(kind: str) -> DraftType:
    return DraftType(StringAttr(kind))


def kind_of(value: SSAValue) -> str:
    assert isinstance(value.type, DraftType)
    return value.type.kind.data


def number(value: int | None) -> IntegerAttr | None:
    return None if value is None else IntegerAttr(value, i64)


def value_of(attr: Attribute | None) -> int | None:
    return attr.value.data if isinstance(attr, IntegerAttr) else None


def parents_of(shape: str) -> list[int]:
    """The nodes of a fixed tree, by their parents, which stand before them; -1 for the root. Siblings in the order of their rank."""
    words = shape.split()
    if not words or any(whole(w.removeprefix("-")) is None or not -1 <= int(w) < i for i, w in enumerate(words)):
        raise VerifyException(f"'{shape}' is no tree: each node's parent, -1 for the root, before it, as in '-1 -1 0 0 1'")
    return [int(w) for w in words]


def rule_of(op: Operation) -> str | None:
    """By which rule the program of an operation accepts."""
    block = op.parent
    found = [o.properties["rule"] for o in block.ops if o.name == "outrider.accept"] if block else []
    return found[0].data if found and isinstance(found[0], StringAttr) else None


def lawful(op: Operation, kinds: Sequence[str], what: str) -> None:
    """Law 5: ending a draft after a look at a token is lossless, dropping the token because its own q is low is not
    (p = (.5, .5), q = (.9, .1), drop where q(x) < .5 gives P(0) = .55)."""
    rule = rule_of(op)
    if rule in LAWFUL and any(kind != POINT for kind in kinds):
        raise VerifyException(FORGET.format(what=what, rule=rule))


def apart(op: Operation, name: str, *, waits: bool) -> None:
    """What may go on while the target verifies: a chain of a drafter `name` that has a device of its own and does not wait (`waits`)
    for other guesses."""
    what = f"'{name}' is overlapped with verification"
    if "device" not in op.properties:
        raise VerifyException(f'{what}, and shares the target\'s device: device "X" says which it has of its own')
    if waits:
        raise VerifyException(f"{what}, and waits for other guesses: '{ON}' a context and beside nothing it would not")
    if value_of(op.properties.get("width")) != 1 or "shape" in op.properties:
        raise VerifyException(f"{what}, and drafts no chain: below which leaf it goes on is only known at width 1")


def operand(parser: Parser) -> SSAValue:
    """A value that was defined above, of whatever type it was given."""
    name = parser.parse_unresolved_operand("a value")
    known = parser.ssa_values.get(name.operand_name)
    if known is None:
        parser.raise_error(f"%{name.operand_name} is used before it is defined", name.span)
    return known[name.index]


def draft_operand(parser: Parser) -> SSAValue:
    start = parser.pos
    value = operand(parser)
    if not isinstance(value.type, DraftType):
        parser.raise_error("a draft is wanted here", start, parser.pos)
    return value


def hole(parser: Parser, word: str) -> IntegerAttr | None:
    """`word N`, `word ?` or nothing."""
    if parser.parse_optional_keyword(word) is None or parser.parse_optional_punctuation("?") is not None:
        return None
    return number(parser.parse_integer(allow_boolean=False, allow_negative=False))


def shown(attr: Attribute | None) -> str:
    return "?" if attr is None else str(value_of(attr))
