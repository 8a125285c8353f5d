"""`outrider bench ...`. Every command imports what it needs when it runs, and says what it found before it writes it down."""

from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.core.config import whole
from outrider.core.errors import OutriderError
from outrider.options import (
    Compile,
    Depth,
    Device,
    Draft,
    DType,
    Out,
    Quantise,
    Target,
    Threads,
    stem,
    writable,
)

bench = typer.Typer(no_args_is_help=True, help="Measure on this machine, baselines beside it, in one run.")

Tokens = Annotated[int, typer.Option(min=1, help="Most tokens to write.")]
Name = Annotated[str, typer.Option(callback=stem, help="Name of the results.")]


@bench.command()
def speed(
    count: Annotated[int, typer.Option("--prompts", min=1, help="Prompts of each category.")] = 5, max_tokens: Tokens = 256, depth: Depth = 4,
    target: Target = None, draft: Draft = None, device: Device = "auto", dtype: DType = "bfloat16", threads: Threads = None,
    compile: Compile = "wait", name: Name = "speed", out: Out = Path("docs/results"),
    contenders: Annotated[str | None, typer.Option(help="Some of them, by comma; default all.")] = None,
    beside: Annotated[int, typer.Option(min=0, help="Other processes that compute meanwhile.")] = 0,
) -> None:  # fmt: skip
    """Stock transformers (plain, assisted, prompt lookup) against ours, interleaved, over the six categories."""
    from rich.console import Console

    from outrider.bench import run as peers
    from outrider.bench.table import markdown

    how: dict[str, Any] = {"device": device, "dtype": dtype, "compile": compile, **({} if threads is None else {"threads": threads})}
    some = tuple(name.strip() for name in contenders.split(",")) if contenders else None
    with Console(stderr=True).status("loading (compiling takes a minute or two, once)") as status:
        how |= {"target": target, "draft": draft, "contenders": some, "beside": beside}
        result = peers.speed(count, max_tokens, depth, lambda at: status.update(f"writing {at}"), **how)
    print(markdown(result))
    peers.save(result, out, name)


@bench.command("strict")
def strict_(
    count: Annotated[int, typer.Option("--prompts", min=1, help="Prompts of each category.")] = 5, max_tokens: Tokens = 256, depth: Depth = 4,
    dtype: DType = "bfloat16", compile: Compile = "wait", out: Out = Path("docs/results"),
) -> None:  # fmt: skip
    """Tokens that differ between plain and speculative texts, with strict and without, and what strict costs."""
    from rich.console import Console

    from outrider.bench import strict

    with Console(stderr=True).status("loading (compiling takes a minute or two, once)") as status:
        result = strict.strict(count, max_tokens, depth, status.update, dtype=dtype, compile=compile)
    print(strict.markdown(result))
    strict.save(result, out)


@bench.command("widths")
def widths_(
    rounds: Annotated[int, typer.Option(min=2, help="Times that all are timed in turn.")] = 20, target: Target = None, draft: Draft = None,
    device: Device = "auto", dtype: DType = "bfloat16", compile: Compile = "wait", out: Out = Path("docs/results"),
) -> None:  # fmt: skip
    """What a forward of one to sixteen columns takes, beside stock's eager one, and the draft model's."""
    from rich.console import Console

    from outrider.bench import widths

    with Console(stderr=True).status("loading (compiling takes a minute or two, once)") as status:
        result = widths.widths(rounds, status.update, target=target, draft=draft, device=device, dtype=dtype, compile=compile)
    print(widths.markdown(result))
    widths.save(result, out)


@bench.command()
def start(out: Out = Path("docs/results")) -> None:
    """Seconds to the first token of a fresh process: eager, with an empty cache of compiled steps, with a full one."""
    from rich.console import Console

    from outrider.bench import start as fresh

    with Console(stderr=True).status("starting") as status:
        result = fresh.start(progress=status.update)
    print(fresh.markdown(result))
    fresh.save(result, out)


@bench.command()
def synthetic(
    shape: Annotated[str, typer.Option(help="tiny, 100m, 1b or 8b.")] = "1b", alpha: Annotated[float, typer.Option(help="Assumed acceptance rate.")] = 0.7,
    contexts: Annotated[str, typer.Option(help="Used context lengths.")] = "128,2048", dtype: DType = "bfloat16", device: Device = "auto",
    compile: Annotated[bool, typer.Option(help="Compile its steps first.")] = False, quantise: Quantise = None, out: Out = Path("docs/results"),
) -> None:  # fmt: skip
    """SYNTHETIC: step times of a big shape with random weights, and what an assumed acceptance would make of them."""
    from rich.console import Console

    from outrider.bench import synthetic as made_up

    with Console(stderr=True).status("building") as status:
        used = tuple(whole(c.strip()) or 0 for c in contexts.split(","))
        if not all(used):
            raise OutriderError(f"contexts={contexts!r} is no list of token counts", "", "128,2048")
        result = made_up.steps(
            shape, contexts=used, dtype=dtype, alpha=alpha, compile=compile, device=device, quantise=quantise, progress=status.update
        )
    print(made_up.table(result))
    made_up.save(result, out)


@bench.command("widen")
def widen_(
    folder: Annotated[Path, typer.Argument(help="A new folder for the model.")], target: Target = None,
    width: Annotated[int, typer.Option(help="Times as many heads, hidden sizes and neurons: 1, 4 or 16.")] = 4,
    layers: Annotated[int, typer.Option(help="Layers in all; 0: as many as it has.")] = 0,
) -> None:  # fmt: skip
    """Put a Llama inside a larger shape: the same text at the cost of many more parameters, for the other benchmarks' --target."""
    from outrider import reference
    from outrider.bench import widen
    from outrider.models.load import locate

    made = widen.widen(locate(target or reference.target()), folder, width, layers)
    print(
        f"{folder}: {made['parameters'] / 1e6:.1f} M parameters, {made['num_hidden_layers']} layers x {made['hidden_size']}; it writes what the model in it writes, but for rounding"
    )


@bench.command()
def verdict(
    rule: Annotated[str, typer.Option(help="coupled or exact.")] = "coupled", rounds: Annotated[int, typer.Option(min=2, help="Verdicts of each kind.")] = 20,
    out: Out = Path("docs/results"),
) -> None:  # fmt: skip
    """What judging sampled tokens costs the host: a place at a time, beside the vectorised rules, on random logits."""
    from outrider.bench import verdict as timed
    from outrider.core.config import RULES, nearest

    if rule not in RULES:
        raise nearest(rule, RULES, "rule")
    result = timed.verdicts(rule, rounds)
    print(timed.markdown(result))
    timed.save(result, out)


Count = Annotated[int, typer.Option("--prompts", min=1, help="Prompts of each category.")]
Rounds = Annotated[int, typer.Option(min=1, help="Times that every contender writes every prompt.")]


@bench.command("schedule")
def schedule_(
    count: Count = 5, max_tokens: Tokens = 256, rounds: Rounds = 3, target: Target = None,
    draft: Annotated[str | None, typer.Option(help="A draft model, or quantised:int8 or quantised:int4: the target's own copy.")] = None,
    device: Device = "auto", dtype: DType = "bfloat16", compile: Compile = "wait", quantise: Quantise = None, name: Name = "schedule",
    trace: Annotated[Path | None, typer.Option(callback=writable, help="Also keep the recorded trace there.")] = None, out: Out = Path("docs/results"),
) -> None:  # fmt: skip
    """The adaptive scheduler against every fixed plan, live and replayed, with others' rules and two oracles."""
    from rich.console import Console

    from outrider.bench import schedule

    how: dict[str, Any] = {"device": device, "dtype": dtype, "compile": compile, **({"quantise": quantise} if quantise else {})}
    with Console(stderr=True).status("loading (compiling takes a minute or two, once)") as status:
        result = schedule.schedule(count, max_tokens, rounds, status.update, target=target, draft=draft, trace=trace, **how)
    text = schedule.markdown(result)
    print(text)
    schedule.save(result, out, name, text)


@bench.command("guarantee")
def guarantee_(count: Count = 1, max_tokens: Tokens = 256, rounds: Rounds = 7, out: Out = Path("docs/results")) -> None:
    """Decode times beside plain's with drafters that cannot help: random weights, twenty times slower, T = 1."""
    from rich.console import Console

    from outrider.bench import guarantee as promised

    with Console(stderr=True).status("loading (compiling takes a minute or two, once)") as status:
        result = promised.guarantee(count, max_tokens, rounds, status.update)
    print(promised.markdown(result))
    promised.save(result, out)


@bench.command()
def passes(
    count: Annotated[int, typer.Option("--prompts", min=1, help="Prompts of each category.")] = 2, max_tokens: Tokens = 128, rounds: Rounds = 3,
    long: Annotated[int, typer.Option(help="Tokens of the long prompts.")] = 3960, compile: Compile = "wait", out: Out = Path("docs/results"),
) -> None:  # fmt: skip
    """Speculation without passes, with one more at a time, and with all: mixed, long and badly drafted texts."""
    from rich.console import Console

    from outrider.bench import ablation

    with Console(stderr=True).status("loading (compiling takes a minute or two, once)") as status:
        result = ablation.ablation(count, max_tokens, rounds, long, status.update, compile=compile)
    print(ablation.markdown(result))
    ablation.save(result, out)


@bench.command()
def predictors(trace: Annotated[Path, typer.Argument(help="A trace kept by `outrider bench schedule --trace`.")]) -> None:
    """Predictors of acceptance side by side on a trace, cold and warm."""
    from outrider.bench import championship, recording

    print(championship.markdown(championship.contest(recording.Trace.load(trace))))
