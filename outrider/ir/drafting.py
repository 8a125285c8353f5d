"""Operations that make drafts. All are pure; `propose` and `prune` have holes, depth, width and budget, that only a Plan fills."""

from collections.abc import Sequence
from typing import Any, ClassVar

from xdsl.dialects.builtin import IntegerAttr, StringAttr, UnitAttr, i64
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import IRDLOperation, irdl_op_definition, operand_def, opt_prop_def, prop_def, result_def, traits_def, var_operand_def
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from outrider.ir.types import (
    AFTER,
    ON,
    OVER,
    POINT,
    SAMPLED,
    ContextType,
    DraftType,
    apart,
    draft,
    draft_operand,
    hole,
    joined,
    kind_of,
    lawful,
    number,
    operand,
    parents_of,
    shown,
    value_of,
)


@irdl_op_definition
class ContextOp(IRDLOperation):
    """The texts that this step continues."""

    name = "outrider.context"
    out = result_def(ContextType)
    traits = traits_def(Pure())

    def __init__(self) -> None:
        super().__init__(result_types=[ContextType()])

    @classmethod
    def parse(cls, parser: Parser) -> "ContextOp":
        return cls()

    def print(self, printer: Printer) -> None: ...


@irdl_op_definition
class EmptyOp(IRDLOperation):
    """A draft without nodes: what plain decoding verifies."""

    name = "outrider.empty"
    out = result_def(DraftType)
    traits = traits_def(Pure())

    def __init__(self, kind: str = POINT) -> None:
        super().__init__(result_types=[draft(kind)])

    @classmethod
    def parse(cls, parser: Parser) -> "EmptyOp":
        return cls()

    def print(self, printer: Printer) -> None: ...


@irdl_op_definition
class ProposeOp(IRDLOperation):
    """A drafter guesses, level by level: `on` a context, from its roots; `over` a draft, one level below each of its places, at once; `after` a
    draft, below its leaves. With `beside`, what is guessed again is found there and not drafted twice. `sample`: which of several independent draws
    this is; `shape`: the parents of a fixed tree's nodes. The result holds what is new, and the drafts it was made after or beside. `overlapped`: its
    drafter goes on while the target verifies. `blind`, `bounded`: see compiler/passes/lower.py."""

    name = "outrider.propose"
    at = operand_def(ContextType | DraftType)
    beside = var_operand_def(DraftType)
    out = result_def(DraftType)
    drafter = prop_def(StringAttr)
    how = prop_def(StringAttr)
    own = prop_def(StringAttr)
    depth = opt_prop_def(IntegerAttr)
    width = opt_prop_def(IntegerAttr)
    sample = opt_prop_def(IntegerAttr)
    order = opt_prop_def(StringAttr)
    shape = opt_prop_def(StringAttr)
    device = opt_prop_def(StringAttr)
    blind = opt_prop_def(UnitAttr)
    bounded = opt_prop_def(UnitAttr)
    overlapped = opt_prop_def(UnitAttr)
    traits = traits_def(Pure())

    ORDERS: ClassVar = ("level", "best-first")
    MARKS: ClassVar = ("blind", "bounded", "overlapped")

    def __init__(
        self, drafter: str, at: SSAValue, kind: str, *, how: str = ON, beside: Sequence[SSAValue] = (), depth: int | None = None,
        width: int | None = None, sample: int | None = None, order: str | None = None, shape: str | None = None, device: str | None = None,
    ) -> None:  # fmt: skip
        held = [kind_of(d) for d in beside] + ([kind_of(at)] if how != ON else [])
        text = {"drafter": drafter, "how": how, "own": kind, "order": order, "shape": shape, "device": device}
        super().__init__(
            operands=[at, list(beside)],
            result_types=[draft(joined([kind, *held]))],
            properties={
                **{k: StringAttr(v) for k, v in text.items() if v is not None},
                **{k: n for k, v in {"depth": depth, "width": width, "sample": sample}.items() if (n := number(v)) is not None},
            },
        )

    @property
    def name_of(self) -> str:
        return self.drafter.data

    @classmethod
    def parse(cls, parser: Parser) -> "ProposeOp":
        drafter = parser.parse_str_literal("who drafts, in quotes")
        start = parser.pos
        how = parser.parse_optional_identifier()
        if how not in (ON, OVER, AFTER):
            parser.raise_error(f"where it drafts is wanted: {ON} a context, {OVER} or {AFTER} a draft", start, parser.pos)
        at = operand(parser) if how == ON else draft_operand(parser)
        beside = []
        if parser.parse_optional_keyword("beside"):
            beside = parser.parse_comma_separated_list(parser.Delimiter.NONE, lambda: draft_operand(parser))
        given: dict[str, Any] = {word: value_of(hole(parser, word)) for word in ("depth", "width", "sample")}
        given |= {word: parser.parse_str_literal() for word in ("order", "shape", "device") if parser.parse_optional_keyword(word)}
        parser.parse_punctuation(":")
        start, kind = parser.pos, parser.parse_identifier(context_msg=": a kind")
        if kind not in (POINT, SAMPLED):
            parser.raise_error(f"a drafter proposes {POINT} or {SAMPLED} drafts, not '{kind}'", start, parser.pos)
        op = cls(drafter, at, kind, how=how, beside=beside, **given)
        for mark in cls.MARKS:
            if parser.parse_optional_keyword(mark):
                op.properties[mark] = UnitAttr()
        return op

    def print(self, printer: Printer) -> None:
        printer.print_string(f" {self.drafter} {self.how.data} ")
        printer.print_ssa_value(self.at)
        if self.beside:
            printer.print_string(" beside ")
            printer.print_list(self.beside, printer.print_ssa_value)
        fixed = " depth 0" * (self.depth is not None) if self.how.data == OVER else f" depth {shown(self.depth)} width {shown(self.width)}"
        printer.print_string(fixed + (f" sample {shown(self.sample)}" if self.sample is not None else ""))
        for word, value in (("order", self.order), ("shape", self.shape), ("device", self.device)):
            if value is not None:
                printer.print_string(f" {word} {value}")
        printer.print_string(f" : {self.own.data}" + "".join(f" {mark}" for mark in self.MARKS if mark in self.properties))

    def verify_(self) -> None:
        if isinstance(self.at.type, ContextType) != (self.how.data == ON):
            raise VerifyException(f"'{ON}' takes a context, '{OVER}' and '{AFTER}' a draft")
        if (width := value_of(self.width)) is not None and width < 1:
            raise VerifyException(f"'{self.name_of}' at width {width} would guess nothing; depth 0 says so")
        if self.order is not None and self.order.data not in self.ORDERS:
            raise VerifyException(f"'{self.order.data}' is no order of growth: {', '.join(self.ORDERS)}")
        if self.shape is not None:
            parents_of(self.shape.data)
        if self.beside:
            lawful(self, [self.own.data, *map(kind_of, self.beside)], f"'{self.name_of}' beside other guesses makes one node of two that are equal")
        if self.how.data == OVER:
            if value_of(self.depth) or {"width", "order", "shape"}.intersection(self.properties):
                raise VerifyException(f"'{OVER}' guesses one token below every place of a draft: it takes no depth (but 0), width, order or shape")
            lawful(self, [self.own.data], "guesses over a draft are dropped where they differ from it")
        if self.overlapped is not None:
            apart(self, self.name_of, waits=self.how.data != ON or bool(self.beside))


@irdl_op_definition
class RelayOp(IRDLOperation):
    """A drafter takes over a draft: it goes on from as much of it as it would have written itself, which it reads at once
    where alone it would need a step for every token (staged drafting, 2308.04623)."""

    name = "outrider.relay"
    at = operand_def(DraftType)
    out = result_def(DraftType)
    drafter = prop_def(StringAttr)
    own = prop_def(StringAttr)
    depth = opt_prop_def(IntegerAttr)
    traits = traits_def(Pure())

    def __init__(self, drafter: str, at: SSAValue, kind: str, depth: int | None = None) -> None:
        properties: dict[str, Attribute] = {"drafter": StringAttr(drafter), "own": StringAttr(kind)}
        if depth is not None:
            properties["depth"] = IntegerAttr(depth, i64)
        super().__init__(operands=[at], result_types=[draft(joined([kind, kind_of(at)]))], properties=properties)

    @classmethod
    def parse(cls, parser: Parser) -> "RelayOp":
        drafter = parser.parse_str_literal("who takes over, in quotes")
        parser.parse_keyword("over")
        at, depth = draft_operand(parser), value_of(hole(parser, "depth"))
        parser.parse_punctuation(":")
        return cls(drafter, at, parser.parse_identifier(context_msg=": a kind"), depth)

    def print(self, printer: Printer) -> None:
        printer.print_string(f" {self.drafter} over ")
        printer.print_ssa_value(self.at)
        printer.print_string(f" depth {shown(self.depth)} : {self.own.data}")

    def verify_(self) -> None:
        if self.own.data not in (POINT, SAMPLED):
            raise VerifyException(f"a drafter proposes {POINT} or {SAMPLED} drafts, not '{self.own.data}'")
        lawful(self, [self.own.data, kind_of(self.at)], f"'{self.drafter.data}' drops what it would not have written")


@irdl_op_definition
class AgreeOp(IRDLOperation):
    """Of a draft, the path from each root that `drafter` would have written itself."""

    name = "outrider.agree"
    at = operand_def(DraftType)
    out = result_def(DraftType)
    drafter = prop_def(StringAttr)
    traits = traits_def(Pure())

    def __init__(self, at: SSAValue, drafter: str) -> None:
        super().__init__(operands=[at], result_types=[at.type], properties={"drafter": StringAttr(drafter)})

    @classmethod
    def parse(cls, parser: Parser) -> "AgreeOp":
        at = draft_operand(parser)
        parser.parse_keyword("by")
        return cls(at, parser.parse_str_literal())

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        printer.print_ssa_value(self.at)
        printer.print_string(f" by {self.drafter}")

    def verify_(self) -> None:
        lawful(self, [kind_of(self.at)], "what the drafter would not have written is dropped")


@irdl_op_definition
class UnionOp(IRDLOperation):
    """All nodes of several drafts."""

    name = "outrider.union"
    arms = var_operand_def(DraftType)
    out = result_def(DraftType)
    traits = traits_def(Pure())

    def __init__(self, arms: Sequence[SSAValue]) -> None:
        super().__init__(operands=[list(arms)], result_types=[draft(joined([kind_of(a) for a in arms]))])

    @classmethod
    def parse(cls, parser: Parser) -> "UnionOp":
        return cls(parser.parse_comma_separated_list(parser.Delimiter.NONE, lambda: draft_operand(parser)))

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        printer.print_list(self.arms, printer.print_ssa_value)


@irdl_op_definition
class PruneOp(IRDLOperation):
    """The nodes that are worth verifying, at most `budget` a row; `chain`: of each row one path; `unless sampled`: all, where
    any was drawn."""

    name = "outrider.prune"
    at = operand_def(DraftType)
    out = result_def(DraftType)
    budget = opt_prop_def(IntegerAttr)
    chain = opt_prop_def(UnitAttr)
    unless_sampled = opt_prop_def(UnitAttr)
    traits = traits_def(Pure())

    def __init__(self, at: SSAValue, budget: int | None = None, *, chain: bool = False, unless_sampled: bool = False) -> None:
        flags = {"chain": chain, "unless_sampled": unless_sampled}
        properties: dict[str, Attribute] = {k: UnitAttr() for k, on in flags.items() if on}
        if budget is not None:
            properties["budget"] = IntegerAttr(budget, i64)
        super().__init__(operands=[at], result_types=[at.type], properties=properties)

    @classmethod
    def parse(cls, parser: Parser) -> "PruneOp":
        at, budget = draft_operand(parser), value_of(hole(parser, "budget"))
        chain = parser.parse_optional_keyword("chain") is not None
        if unless := parser.parse_optional_keyword("unless") is not None:
            parser.parse_keyword("sampled")
        return cls(at, budget, chain=chain, unless_sampled=unless)

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        printer.print_ssa_value(self.at)
        printer.print_string(
            f" budget {shown(self.budget)}{' chain' * (self.chain is not None)}{' unless sampled' * (self.unless_sampled is not None)}"
        )

    def verify_(self) -> None:
        if self.unless_sampled is None:
            lawful(self, [kind_of(self.at)], f"this prune would drop nodes of a {kind_of(self.at)} draft")
