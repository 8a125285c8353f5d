"""Programs as text, both ways. What is wrong is told with its line and column."""

from io import StringIO

from xdsl.context import Context
from xdsl.dialects.builtin import Builtin, FileLineColLoc, IntAttr, ModuleOp, StringAttr
from xdsl.ir import Operation, SSAValue
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.utils.exceptions import DiagnosticException, ParseError, UnregisteredConstructException, VerifyException

from outrider.core.errors import OutriderError
from outrider.ir.deciding import ProgramOp
from outrider.ir.dialect import Outrider

HELP = "docs/ir.md"


def context() -> Context:
    """An xDSL context that knows the dialect."""
    ctx = Context()
    ctx.load_dialect(Builtin)
    ctx.load_dialect(Outrider)
    return ctx


class _Placed(Parser):
    """A parser that notes where each operation begins: xDSL leaves it unknown."""

    def parse_operation(self) -> Operation:
        start = self._current_token.span.start
        op = super().parse_operation()
        line, column = _place(self.lexer.input.content, start)
        op.location = FileLineColLoc(StringAttr(self.lexer.input.name), IntAttr(line), IntAttr(column))
        return op


def _place(text: str, at: int) -> tuple[int, int]:
    before = text[:at]
    return before.count("\n") + 1, at - (before.rfind("\n") + 1) + 1


def parse(text: str, name: str = "program") -> ModuleOp:
    """A verified module of programs. Raises OutriderError with FILE:LINE:COLUMN."""
    if "outrider.program" not in text:
        raise OutriderError(f"{name} holds no program", "", "outrider.program @name { ... }, as in docs/ir.md")
    parser = _Placed(context(), text, name)
    try:
        module = parser.parse_module()
    except ParseError as bad:
        line, column = _place(text, bad.span.start)
        raise OutriderError(f"{name}:{line}:{column}: {bad.msg}", _line(text, line), HELP) from bad
    except (UnregisteredConstructException, DiagnosticException, ValueError) as bad:
        line, column = _place(text, parser._current_token.span.start)
        raise OutriderError(f"{name}:{line}:{column}: {bad}", _line(text, line), HELP) from bad
    except RecursionError as bad:
        raise OutriderError(f"{name} is nested too deeply to be read", "programs stand beside one another", HELP) from bad
    verify(module, text)
    return module


def _line(text: str, line: int) -> str:
    lines = text.splitlines()
    return lines[line - 1].strip() if line <= len(lines) else ""


def verify(module: ModuleOp, text: str | None = None) -> None:
    """Check every operation. Raises OutriderError that says which, and where it stood in a text."""
    seen: set[SSAValue] = set()
    for op in module.walk():
        try:
            if not seen.issuperset(op.operands):
                raise VerifyException(f"'{op.name}' stands before what it uses")
            seen.update(op.results)
            op.verify(verify_nested_ops=False)
        except VerifyException as bad:
            at, where = op.location, ""
            if isinstance(at, FileLineColLoc):
                where = f"{at.filename.data}:{at.line.data}:{at.column.data}: "
            said = _line(text, at.line.data) if text and isinstance(at, FileLineColLoc) else str(op)
            raise OutriderError(f"{where}{_sentence(bad)}", said, HELP) from bad


def _sentence(bad: BaseException) -> str:
    """What our verifiers say, without what xDSL wraps around it."""
    while isinstance(bad.__cause__, VerifyException):
        bad = bad.__cause__
    return str(bad).removeprefix("Operation does not verify: ").strip()


def show(module: ModuleOp) -> str:
    """The text of a module."""
    out = StringIO()
    printer = Printer(stream=out)
    for op in module.ops:
        printer.print_op(op)
        out.write("\n")
    return out.getvalue()


def programs(module: ModuleOp) -> list[ProgramOp]:
    return [op for op in module.ops if isinstance(op, ProgramOp)]
