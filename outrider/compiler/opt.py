"""`outrider opt`: a program as text goes in, and comes out as the passes leave it."""

import re
from collections.abc import Callable

from xdsl.dialects.builtin import ModuleOp

from outrider.compiler.codegen import source
from outrider.compiler.passes.lower import refuse
from outrider.compiler.pipeline import FRONT, Pipeline, passes
from outrider.compiler.step import Facts
from outrider.ir.text import parse, programs, show

ALL = re.compile(r"(?<![^,])all(?![^,])")  # the word that stands for the usual passes, wherever it stands
PLAIN = Facts(one=True, free=True, told=True, raw=True)  # one greedy row, a fixed plan


def opt(text: str, name: str = "program", names: str = "", *, code: bool = False, seen: Callable[[str], None] | None = None) -> str:
    """The text of a program after passes; its step as Python for one greedy row, if `code`. seen: is told the program after each pass.
    Raises OutriderError with the place of what is wrong."""

    def tell(after: str, module: ModuleOp, seconds: float) -> None:
        if seen:
            seen(f"// after {after}, {1e3 * seconds:.2f} ms\n{show(module)}")

    module = Pipeline(passes(ALL.sub(",".join(FRONT), names)), tell).run(parse(text, name))
    return "\n".join(step_of(program) for program in programs(module)) if code else show(module)


def step_of(program: object, facts: Facts = PLAIN, bits: dict[str, int] | None = None) -> str:
    """The generated step of a lowered program, for drafters in the order in which it names them."""
    from outrider.ir.deciding import ProgramOp
    from outrider.ir.drafting import ProposeOp

    assert isinstance(program, ProgramOp)
    refuse(program)
    names = dict.fromkeys(op.name_of for op in program.body.block.ops if isinstance(op, ProposeOp))
    return source(program, facts, bits or {drafter: 1 << i for i, drafter in enumerate(names)})
