"""The order of the passes, on one page. To add one: a file in `passes/`, a line here."""

import importlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass
from xdsl.utils.arg_spec import parse_pipeline
from xdsl.utils.exceptions import ArgSpecParseError, VerifyException

from outrider.core.config import nearest
from outrider.core.errors import OutriderError
from outrider.ir.text import verify

PASSES = {
    "canonicalize": "outrider.compiler.passes.canonicalize:Canonicalize",
    "cse": "xdsl.transforms.common_subexpression_elimination:CommonSubexpressionElimination",
    "merge-tries": "outrider.compiler.passes.merge_tries:MergeTries",
    "flatten-relay": "outrider.compiler.passes.flatten_relay:FlattenRelay",
    "inline-early-exit": "outrider.compiler.passes.inline_early_exit:InlineEarlyExit",
    "dce": "xdsl.transforms.dead_code_elimination:DeadCodeElimination",
    "specialize": "outrider.compiler.passes.specialize:Specialize",
    "schedule": "outrider.compiler.passes.schedule:Schedule",
    "lower": "outrider.compiler.passes.lower:Lower",
}
FRONT = ("canonicalize", "cse", "merge-tries", "inline-early-exit", "dce")  # once for a program
BACK = ("specialize", "canonicalize", "dce", "flatten-relay", "schedule", "lower")  # once for a program and a plan

Seen = Callable[[str, ModuleOp, float], None]  # after each pass: its name, the module, seconds


@dataclass
class Pipeline:
    """Passes in a row. The module is verified before the first and after each, or only after the last; `seen` is called after each."""

    passes: list[ModulePass]
    seen: Seen | None = None
    each: bool = True
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self, module: ModuleOp) -> ModuleOp:
        """Rewrite the module in place, and return it. Raises OutriderError that names the pass after which it was wrong."""
        if self.each:
            verify(module)
        for one in self.passes:
            start = time.perf_counter()
            try:
                one.apply(CONTEXT, module)
            except VerifyException as bad:  # a number that no program can hold
                raise OutriderError(f"the pass '{one.name}' cannot be run", str(bad), "docs/ir.md says what a program can hold") from bad
            took = time.perf_counter() - start
            self.seconds[one.name] = self.seconds.get(one.name, 0.0) + took
            try:
                if self.each or one is self.passes[-1]:
                    verify(module)
            except OutriderError as wrong:
                raise OutriderError(f"after the pass '{one.name}': {wrong.what}", wrong.why, wrong.try_this) from wrong
            if self.seen:
                self.seen(one.name, module, took)
        return module


CONTEXT = Context()


def find(name: str) -> type[ModulePass]:
    """The pass of a name."""
    if name not in PASSES:
        raise nearest(name, PASSES, "pass")
    module, attribute = PASSES[name].split(":")
    found: type[ModulePass] = getattr(importlib.import_module(module), attribute)
    return found


def passes(text: str | Iterable[str]) -> list[ModulePass]:
    """Passes from words like `cse,specialize{plan="lookup:8" budget=4}`."""
    try:
        specs = list(parse_pipeline(text if isinstance(text, str) else ",".join(text)))
    except ArgSpecParseError as bad:
        raise OutriderError(f"the passes '{text}' cannot be read", str(bad).splitlines()[-1].strip(), 'a,b{option=1 other="x"}') from bad
    made = []
    for spec in specs:
        kind = find(spec.name)
        try:
            made.append(kind.from_spec(spec))
        except Exception as bad:  # xDSL has no one class for a wrong option
            raise OutriderError(f"the options of the pass '{spec.name}' are wrong", str(bad), "docs/ir.md lists them") from bad
    return made
