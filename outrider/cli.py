"""The command line. Every command imports what it needs when it runs."""

import errno
import json
import sys
from collections import deque
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.bench.commands import bench
from outrider.core.errors import OutriderError
from outrider.options import (
    Ahead,
    AsJson,
    Budget,
    Compile,
    Config,
    Context,
    Depth,
    Device,
    Draft,
    Drafters,
    DType,
    MinP,
    Profile,
    Program,
    Quantise,
    RuleName,
    Seed,
    Slowdown,
    Stop,
    Strict,
    Target,
    Temperature,
    Threads,
    Tokens,
    TopK,
    TopP,
    Width,
    writable,
)
from outrider.train.commands import train

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Speculative text generation: the same text, sooner."
)
app.add_typer(train, name="train")
app.add_typer(bench, name="bench")


TEXTS = (".txt", ".md", ".json", ".jsonl", ".py", ".toml", ".html")  # names that are probably files


def _load(target: str | None, draft: str | None, drafters: str | None, *, rows: int = 1, **settings: Any) -> Any:
    """The runtime, with a sign of life while it loads."""
    from rich.console import Console

    import outrider

    names = _named(draft, drafters)
    first = " (compiling takes a minute or two, once)" if settings.get("compile") == "wait" else ""
    with Console(stderr=True).status(f"loading{first}"):
        return outrider.load(target, names, rows=rows, **settings)


def _named(draft: str | None, drafters: str | None) -> list[str] | None:
    """Who drafts, by the options; None: nobody said."""
    if draft and drafters == "off":
        raise OutriderError(f"--drafters off and --draft {draft}", "one says that nobody drafts, and one who does", "one of the two")
    names = None if drafters is None else [] if drafters == "off" else [d for d in drafters.split(",") if d]
    return [*(names or []), f"model:{draft}"] if draft else names


def _prompt(given: str) -> str:
    """The text itself, the content of a file, or standard input for '-'."""
    if given != "-" and not _is_file(given):
        if " " not in given.strip() and Path(given).suffix in TEXTS:
            print(f"outrider: there is no file {given}: these words are continued themselves", file=sys.stderr)
        return given
    raw = sys.stdin.buffer.read() if given == "-" else Path(given).read_bytes()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as bad:
        where = "standard input" if given == "-" else given
        raise OutriderError(f"{where} is not UTF-8 text", f"byte {bad.start} is {raw[bad.start]:#04x}", "converting it, e.g. iconv -t utf-8") from bad


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


@app.command()
def demo(
    max_tokens: Tokens = 128, depth: Depth = 4, rounds: Annotated[int, typer.Option(min=1, help="Timed repeats.")] = 3, device: Device = "auto",
    compile: Compile = "wait",
    svg: Annotated[Path | None, typer.Option(help="Also save the output as a picture.")] = None,
) -> None:  # fmt: skip
    """A story, a piece of code and a dialogue, plain and speculative, by the reference pair."""
    from rich.console import Console

    from outrider.bench import demo as show

    console = Console(record=svg is not None, width=118 if svg else None)
    results = show.run(max_tokens, rounds, console, depth=depth, device=device, compile=compile)
    if svg:
        console.save_svg(str(svg), title="outrider demo")
    if not all(r.identical for r in results):
        raise OutriderError("a speculative text differs from the plain one under strict", "this is a bug", "reporting it with the output above")


@app.command()
def run(
    prompt: Annotated[str, typer.Argument(help="Text, a file, or - for standard input.")],
    target: Target = None, draft: Draft = None, drafters: Drafters = None, depth: Ahead = None, width: Width = 1, budget: Budget = 0,
    max_tokens: Tokens = 256, temperature: Temperature = 0.0, top_k: TopK = 0, top_p: TopP = 1.0, min_p: MinP = 0.0,
    seed: Seed = None, rule: RuleName = None, stop: Stop = None, device: Device = "auto", dtype: DType = "auto", context: Context = None,
    logprobs: Annotated[int | None, typer.Option(help="Log-probabilities of that many tokens beside the chosen one.")] = None,
    compile: Compile = "auto", strict: Strict = False, threads: Threads = None, profile: Profile = "auto", slowdown_limit: Slowdown = 0.05,
    quantise: Quantise = None,
    explain: Annotated[bool, typer.Option("--explain-divergence", help="Write it without drafting too; say where the two part, and why.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message.")] = False,
    program: Program = None, as_json: AsJson = False, config: Config = None,
) -> None:  # fmt: skip
    """Write a continuation of PROMPT."""
    if explain and as_json:
        raise OutriderError("--explain-divergence and --json", "what parts two texts is told in words", "one of the two")
    if explain and temperature > 0 and (seed is None or rule == "exact"):
        raise OutriderError(
            "--explain-divergence of a text that is drawn anew each time", "its tokens differ by chance", "--seed 1, and no --rule exact"
        )
    if logprobs is not None and not as_json:
        raise OutriderError(f"--logprobs {logprobs} without --json", "they stand beside tokens, which only that shows", "--json")
    text = _prompt(prompt)
    rt = _load(
        target, draft, drafters, depth=depth, width=width, budget=budget, device=device, dtype=dtype, context=context, compile=compile,
        strict=strict, threads=threads, profile=profile, slowdown_limit=slowdown_limit, quantise=quantise, program=program,
    )  # fmt: skip
    knobs = {
        "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed, "rule": rule,
        "stop": tuple(stop or ()), "logprobs": logprobs,
    }  # fmt: skip
    asked = [{"role": "user", "content": text}] if chat else text
    if explain:
        _explain(rt, asked, knobs)
        return
    if as_json:
        _print_json(_watched(rt.stream(asked, **knobs), max_tokens))
        return
    wrote = 0
    for chunk in rt.stream(asked, **knobs):
        print(chunk.text, end="", flush=True)
        wrote += len(chunk.tokens)
    print()
    if chunk.finish_reason == "length" and wrote < max_tokens:
        print(f"outrider: the context of {rt.engine.target.spec.context} tokens is full", file=sys.stderr)


def _explain(rt: Any, asked: Any, knobs: dict[str, Any]) -> None:
    from outrider.runtime.explain import compare

    out, found = compare(rt, asked, **knobs)
    print(out.text)
    print(f"the same without drafting: {'yes, all ' + str(len(out.tokens)) + ' tokens' if found is None else f'no: {found}'}", file=sys.stderr)


def _watched(chunks: Any, total: int) -> Any:
    """The result of a stream, with a progress bar on standard error meanwhile."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task, last = bar.add_task("writing", total=total), None
        for last in chunks:
            bar.advance(task, len(last.tokens))
    return last.result if last else None


def _print_json(out: Any) -> None:
    fields = ("text", "tokens", "prompt_tokens", "origins", "finish_reason", "lossless", "usage", "logprobs", "stats")
    print(json.dumps({f: getattr(out, f) for f in fields}, ensure_ascii=False))


@app.command()
def chat(
    target: Target = None, draft: Draft = None, drafters: Drafters = None, depth: Ahead = None, max_tokens: Tokens = 256,
    temperature: Temperature = 0.0, top_k: TopK = 0, top_p: TopP = 1.0, min_p: MinP = 0.0, seed: Seed = None, rule: RuleName = None,
    device: Device = "auto", dtype: DType = "auto", context: Context = None, compile: Compile = "auto", strict: Strict = False,
    threads: Threads = None, profile: Profile = "auto", quantise: Quantise = None, program: Program = None,
    system: Annotated[str | None, typer.Option(help="What the assistant is told first.")] = None, config: Config = None,
) -> None:  # fmt: skip
    """Talk with the target, by its tokenizer's chat template. Earlier turns are not computed again. An empty line or Ctrl-D ends it."""
    rt = _load(
        target, draft, drafters, depth=depth, device=device, dtype=dtype, context=context, compile=compile, strict=strict, threads=threads,
        profile=profile, quantise=quantise, program=program,
    )  # fmt: skip
    messages = [{"role": "system", "content": system}] if system else []
    how = {
        "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed, "rule": rule,
    }  # fmt: skip
    rt.stream([*messages, {"role": "user", "content": "?"}], **how).close()  # what cannot be is refused before anybody types
    while line := _ask():
        messages.append({"role": "user", "content": line})
        said = ""
        for chunk in rt.stream(messages, **how):
            print(chunk.text, end="", flush=True)
            said += chunk.text
        print()
        messages.append({"role": "assistant", "content": said})


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
    except UnicodeDecodeError as bad:
        raise OutriderError("standard input is not UTF-8 text", str(bad), "converting it, e.g. iconv -t utf-8") from bad


@app.command()
def profile(
    target: Target = None, draft: Draft = None, drafters: Drafters = None, device: Device = "auto", dtype: DType = "auto", context: Context = None,
    compile: Compile = "wait", threads: Threads = None, rows: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = 1,
    patience: Annotated[float, typer.Option(min=0.1, help="Seconds for each situation.")] = 4.0,
    file: Annotated[str, typer.Option(help="Where it is kept: auto (in the cache folder), or a file.")] = "auto", quantise: Quantise = None,
) -> None:  # fmt: skip
    """Measure what steps cost here, at every number of drafted tokens, and how often guesses are right by rank; keep it for every later start."""
    from rich.console import Console

    from outrider.bench.prompts import few
    from outrider.runtime import profiler

    if _named(draft, drafters) == []:
        raise OutriderError("there is nothing to profile without drafters", "plain decoding decides nothing", "--drafters lookup")
    if file == "off":
        raise OutriderError("--file off keeps nothing", "a profile is measured to be kept", "--file with the name of a file, or leaving it out")
    writable(None if file == "auto" else Path(file))
    rt = _load(
        target, draft, drafters, device=device, dtype=dtype, context=context, compile=compile, threads=threads, rows=rows, profile=file,
        quantise=quantise,
    )  # fmt: skip
    with Console(stderr=True).status("measuring") as status:
        for used, together, sampled in profiler.situations(rt.engine.target.spec.context, rows):
            status.update(f"measuring {together} rows at {used} tokens, {'sampled' if sampled else 'greedy'}")
            profiler.sweep(rt.engine, rt.keeper.tables, context=used, rows=together, sampled=sampled, patience=patience, repeats=20)
        status.update("counting how often guesses are right, by rank")
        profiler.rank(rt.engine, rt.keeper.tables, few(rt), patience=patience)
    print(profiler.table(rt.keeper.tables.costs))
    if not rt.keeper.save():
        raise OutriderError(f"the profile {rt.keeper.file} was not written", "the warning above says why", "--file with a file of your own")
    if missing := profiler.unmeasured(rt.engine, rt.keeper.tables.costs):
        why = (
            f"{rt.engine.target.spec.context} tokens are too short a text for it, or {patience:g} s too short a time; all else is in {rt.keeper.file}"
        )
        raise OutriderError(f"{' and '.join(missing)} could not be measured", why, "a larger --context or --patience")
    print(f"kept in {rt.keeper.file}")


@app.command()
def plan(
    target: Target = None, draft: Draft = None, drafters: Drafters = None, depth: Ahead = None, device: Device = "auto", dtype: DType = "auto",
    compile: Compile = "auto", threads: Threads = None, profile: Profile = "auto", quantise: Quantise = None, program: Program = None,
    prompt: Annotated[str | None, typer.Option(help="Write a continuation of this first, and say why each step was what it was.")] = None,
    max_tokens: Tokens = 128,
    trace: Annotated[Path | None, typer.Option(callback=writable, help="Where that run's timeline goes (Perfetto, or steps as *.jsonl).")] = None,
    as_json: AsJson = False,
    code: Annotated[bool, typer.Option("--code", help="Also the program, and the step that is generated for the plan that is chosen now.")] = False,
) -> None:  # fmt: skip
    """What drafting by each drafter alone is expected to cost and bring in the mean; with --prompt, also what steps took, and why each was what it was."""
    from outrider.control.explain import text
    from outrider.measure.trace import write

    if trace and prompt is None:
        raise OutriderError(f"--trace {trace} cannot be written", "nothing is run without --prompt", "--prompt TEXT --trace FILE")
    rt = _load(
        target, draft, drafters, depth=depth, device=device, dtype=dtype, compile=compile, threads=threads, profile=profile, quantise=quantise,
        program=program,
    )  # fmt: skip
    reasons: dict[str, int] = {}
    if prompt is not None:
        rt.engine.ring = deque()  # all of its steps, however many
        out = rt.generate(_prompt(prompt), max_tokens=max_tokens)
        reasons = out.stats["reasons"]
        if trace:
            write(list(rt.engine.ring), trace)
    found = {**rt.plan(), "reasons": reasons}
    if code:
        found |= rt.program()
    print(json.dumps(found) if as_json else text(found) + (f"\n\n{found['program']}\n{found['code']}" if code else ""))


@app.command()
def opt(
    file: Annotated[Path, typer.Argument(help="A program as text; - reads it from standard input.")],
    passes: Annotated[str, typer.Option(help='Passes to run in a row, as in cse,specialize{plan="lookup:8" budget=4}. "all": the usual ones.')] = "",
    print_after_all: Annotated[bool, typer.Option("--print-after-all", help="The program after each pass, with the time it took, on standard error.")] = False,
    code: Annotated[bool, typer.Option("--code", help="The step that is generated from it, in place of the program.")] = False,
) -> None:  # fmt: skip
    """Read, check and rewrite a program, and print it."""
    from outrider.compiler.opt import opt as run

    text, name = (sys.stdin.buffer.read().decode("utf-8", "replace"), "<stdin>") if str(file) == "-" else (_read(file), str(file))
    sys.stdout.write(run(text, name, passes, code=code, seen=(lambda line: print(line, file=sys.stderr)) if print_after_all else None))


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as bad:
        raise OutriderError(f"{file} cannot be read", str(bad), "the name of a text file") from bad


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="A trace kept by `outrider bench schedule --trace`.")],
    policy: Annotated[list[str] | None, typer.Option(help="plain, DRAFTER:K, dynamic:DRAFTER, average:DRAFTER, ucb1, adaptive[:PREDICTOR].")] = None,
) -> None:
    """Any policy on a recorded trace, beside plain decoding and the optima in hindsight and informed."""
    from outrider.bench.recording import Trace
    from outrider.bench.schedule import lines, replayed

    print(lines("times as fast as plain, by the trace's costs", replayed(Trace.load(trace), policy)))


def main() -> None:
    """Exit codes: 0 done, 2 refused (with what, why and what to try), 130 interrupted."""
    code = 0
    try:
        code = app(standalone_mode=False) or 0  # the parser turns Ctrl-C into 130
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except OutriderError as refused:
        print(f"outrider: {refused}", file=sys.stderr)
        code = 2
    except OSError as broken:
        if broken.filename is None and broken.errno != errno.ENOSPC:
            raise
        full = broken.errno == errno.ENOSPC
        remedy = "free some space; the same command goes on" if full else "a file or folder that is there and that you may use"
        print(f"outrider: {broken.filename or 'a file'}: {broken.strerror}. Try: {remedy}", file=sys.stderr)
        code = 2
    except Exception as usage:
        if not hasattr(usage, "show"):  # not one of the parser's own errors
            raise
        usage.show()
        code = 2
    if code == 130:
        print("\noutrider: interrupted", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
