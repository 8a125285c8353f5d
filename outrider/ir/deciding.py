"""Operations that decide: who answers, what is scored, what stays. `commit` is the one effect."""

from decimal import Decimal

from xdsl.dialects.builtin import FloatAttr, IntegerAttr, StringAttr, SymbolNameConstraint, UnitAttr, f64, i64
from xdsl.ir import Attribute, Operation, Region, SSAValue
from xdsl.irdl import IRDLOperation, irdl_op_definition, operand_def, opt_prop_def, prop_def, region_def, result_def, traits_def
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.traits import IsTerminator, MemoryWriteEffect, NoTerminator, Pure
from xdsl.utils.exceptions import VerifyException

from outrider.ir.types import LOSSY, RULES, ContextType, DraftType, OutcomeType, ScoresType, draft_operand, operand, shown


def must_be_approximate(op: Operation, why: str) -> None:
    program = op.parent_op()
    if isinstance(program, ProgramOp) and program.approximate is None:
        raise VerifyException(f"{why}: the program must say 'approximate' behind its name")


@irdl_op_definition
class DeferOp(IRDLOperation):
    """The drafter's own words stand where it is at least so sure; the rest is put to the target (2401.10480, 2405.19261). A
    program that defers is approximate."""

    name = "outrider.defer"
    at = operand_def(DraftType)
    out = result_def(DraftType)
    sure = prop_def(FloatAttr)
    traits = traits_def(Pure())

    def __init__(self, at: SSAValue, sure: float) -> None:
        super().__init__(operands=[at], result_types=[at.type], properties={"sure": FloatAttr(sure, f64)})

    @classmethod
    def parse(cls, parser: Parser) -> "DeferOp":
        at = draft_operand(parser)
        parser.parse_keyword("unless")
        parser.parse_keyword("sure")
        return cls(at, float(parser.parse_number()))

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        printer.print_ssa_value(self.at)
        printer.print_string(f" unless sure {Decimal(repr(self.sure.value.data)):f}")  # without an exponent: that would not be read

    def verify_(self) -> None:
        if not 0 < self.sure.value.data <= 1:
            raise VerifyException(f"{self.sure.value.data} is no probability to be sure by: more than 0, at most 1")
        must_be_approximate(self, "it lets a drafter answer alone")


@irdl_op_definition
class ScoreOp(IRDLOperation):
    """One forward of the scoring model over what each text committed last and the draft's nodes. `reusing N layers`: a draft by its
    own first N layers left their states, and it goes on from there."""

    name = "outrider.score"
    at = operand_def(DraftType)
    context = operand_def(ContextType)
    out = result_def(ScoresType)
    model = prop_def(StringAttr)
    reusing = opt_prop_def(IntegerAttr)
    traits = traits_def(Pure())

    def __init__(self, at: SSAValue, context: SSAValue, model: str = "target", reusing: int | None = None) -> None:
        properties: dict[str, Attribute] = {"model": StringAttr(model)}
        if reusing:
            properties["reusing"] = IntegerAttr(reusing, i64)
        super().__init__(operands=[at, context], result_types=[ScoresType()], properties=properties)

    @classmethod
    def parse(cls, parser: Parser) -> "ScoreOp":
        at = draft_operand(parser)
        parser.parse_keyword("on")
        context = operand(parser)
        parser.parse_keyword("by")
        model, reusing = parser.parse_str_literal(), None
        if parser.parse_optional_keyword("reusing"):
            reusing = parser.parse_integer(allow_boolean=False, allow_negative=False)
            parser.parse_keyword("layers")
        return cls(at, context, model, reusing)

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        printer.print_ssa_value(self.at)
        printer.print_string(" on ")
        printer.print_ssa_value(self.context)
        printer.print_string(f" by {self.model}" + (f" reusing {shown(self.reusing)} layers" if self.reusing is not None else ""))


@irdl_op_definition
class AcceptOp(IRDLOperation):
    """What of a draft stays, and the token after it, by a rule; at temperature 0 any rule is `greedy`."""

    name = "outrider.accept"
    at = operand_def(DraftType)
    scores = operand_def(ScoresType)
    out = result_def(OutcomeType)
    rule = prop_def(StringAttr)
    cold = opt_prop_def(UnitAttr)
    traits = traits_def(Pure())

    def __init__(self, at: SSAValue, scores: SSAValue, rule: str, *, cold: bool = False) -> None:
        properties: dict[str, Attribute] = {"rule": StringAttr(rule)}
        if cold:
            properties["cold"] = UnitAttr()
        super().__init__(operands=[at, scores], result_types=[OutcomeType()], properties=properties)

    @classmethod
    def parse(cls, parser: Parser) -> "AcceptOp":
        at = draft_operand(parser)
        parser.parse_punctuation(",")
        scores = operand(parser)
        parser.parse_keyword("by")
        rule, cold = parser.parse_str_literal("a rule, in quotes"), False
        if parser.parse_optional_keyword("at"):
            parser.parse_keyword("temperature")
            start, cold = parser.pos, True
            if float(parser.parse_number()) != 0:
                parser.raise_error("temperature 0 is the only one that a program says: others are their requests' own", start, parser.pos)
        return cls(at, scores, rule, cold=cold)

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        printer.print_list([self.at, self.scores], printer.print_ssa_value)
        printer.print_string(f" by {self.rule}" + " at temperature 0" * (self.cold is not None))

    def verify_(self) -> None:
        if self.rule.data not in RULES:
            raise VerifyException(f"'{self.rule.data}' is no rule: {', '.join(RULES)}")
        if self.rule.data in LOSSY:
            must_be_approximate(self, f"the rule '{self.rule.data}' is not lossless")
        score = self.scores.owner
        if isinstance(score, ScoreOp) and score.at != self.at:
            raise VerifyException("the scores are of another draft than the one that is accepted from")


@irdl_op_definition
class CommitOp(IRDLOperation):
    """The one effect: texts grow, caches of accepted nodes stay, every drafter hears of it."""

    name = "outrider.commit"
    outcome = operand_def(OutcomeType)
    traits = traits_def(MemoryWriteEffect(), IsTerminator())

    def __init__(self, outcome: SSAValue) -> None:
        super().__init__(operands=[outcome])

    @classmethod
    def parse(cls, parser: Parser) -> "CommitOp":
        return cls(operand(parser))

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        printer.print_ssa_value(self.outcome)


@irdl_op_definition
class ProgramOp(IRDLOperation):
    """One step of a pipeline. `approximate`: its text is not the target's own, and its user said so."""

    name = "outrider.program"
    sym_name = prop_def(SymbolNameConstraint())
    approximate = opt_prop_def(UnitAttr)
    body = region_def("single_block")
    traits = traits_def(NoTerminator())

    def __init__(self, name: str, body: Region, *, approximate: bool = False) -> None:
        properties: dict[str, Attribute] = {"sym_name": StringAttr(name)}
        if approximate:
            properties["approximate"] = UnitAttr()
        super().__init__(regions=[body], properties=properties)

    @classmethod
    def parse(cls, parser: Parser) -> "ProgramOp":
        name = parser.parse_symbol_name()
        approximate = parser.parse_optional_keyword("approximate") is not None
        return cls(name.data, parser.parse_region(), approximate=approximate)

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        printer.print_symbol_name(self.sym_name.data)  # type: ignore[attr-defined]
        printer.print_string(" approximate " if self.approximate is not None else " ")
        printer.print_region(self.body)

    def verify_(self) -> None:
        last = self.body.block.last_op
        if not isinstance(last, CommitOp) or sum(isinstance(op, CommitOp) for op in self.body.block.ops) > 1:
            raise VerifyException("a program ends with its one commit")
        accepts = [op for op in self.body.block.ops if isinstance(op, AcceptOp)]  # what is lawful hangs on its rule
        if [op.out for op in accepts] != [last.outcome]:
            raise VerifyException(f"a program accepts once, and commits that: this one has {len(accepts)} accepts")
