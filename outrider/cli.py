"""The command line. Every command imports what it needs when it runs."""

import errno
import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.core.config import nearest
from outrider.core.errors import OutriderError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Speculative text generation: the same text, sooner."
)
train = typer.Typer(no_args_is_help=True, help="Train a target and its draft from a recipe (resumes where it stopped).")
app.add_typer(train, name="train")
bench = typer.Typer(no_args_is_help=True, help="Measure on this machine, baselines beside it, in one run.")
app.add_typer(bench, name="bench")


def _defaults(ctx: typer.Context, file: Path | None) -> Path | None:
    """Take the defaults of a command's options from a TOML file; an unknown key names the nearest."""
    if file is not None:
        given = _toml(file)
        known = [p.name for p in ctx.command.params if p.name not in ("config", "prompt")]
        for key in given:
            if key not in known:
                raise nearest(key, known)
        ctx.default_map = {**(ctx.default_map or {}), **given}
    return file


def _toml(file: Path) -> dict[str, Any]:
    import tomllib

    if not file.is_file():
        raise OutriderError(f"there is no file {file}", "", "a TOML file")
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as bad:
        raise OutriderError(f"{file} is not TOML", str(bad), "mending the line it names") from bad


Target = Annotated[str | None, typer.Option(help="Folder or hub id of the target; default: the embedded reference pair.")]
Draft = Annotated[str | None, typer.Option(help="Folder or hub id of a draft model.")]
Drafters = Annotated[str | None, typer.Option(help='Comma-separated drafters, e.g. "lookup,model:PATH"; "off" for plain decoding.')]
Depth = Annotated[int, typer.Option(help="Tokens drafted ahead.")]
Ahead = Annotated[int | None, typer.Option("--depth", help="Tokens drafted ahead at every step; default: decided at each.")]
Profile = Annotated[str, typer.Option(help="auto (kept in the cache folder), off, or a file.")]
Slowdown = Annotated[float, typer.Option(help="How much slower than plain decoding a request may become.")]
Width = Annotated[int, typer.Option(help="Children of each draft node.")]
Budget = Annotated[int, typer.Option(help="Most draft nodes a step (0: no limit).")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
DType = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Compile = Annotated[str, typer.Option("--compile", help="auto: compiled steps are built meanwhile; wait for them; or off.")]
Strict = Annotated[bool, typer.Option("--strict", help="The same bits with and without drafting; slower.")]
Threads = Annotated[int | None, typer.Option(help="Threads of torch; default: its own choice.")]
Context = Annotated[int | None, typer.Option(help="Tokens a text can hold.")]
Tokens = Annotated[int, typer.Option(help="Most tokens to write.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="0 is off.")]
TopP = Annotated[float, typer.Option(help="1 is off.")]
MinP = Annotated[float, typer.Option(help="0 is off.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text, whoever drafts.")]
RuleName = Annotated[str | None, typer.Option("--rule", help="exact or coupled; default: coupled with a seed, exact without.")]
Stop = Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")]
Config = Annotated[Path | None, typer.Option(is_eager=True, callback=_defaults, help="A TOML file of these options; flags win.")]
AsJson = Annotated[bool, typer.Option("--json", help="The last line of the output is one JSON document.")]


def _load(target: str | None, draft: str | None, drafters: str | None, **settings: Any) -> Any:
    """The runtime, with a sign of life while it loads."""
    from rich.console import Console

    import outrider

    names = None if drafters is None else [] if drafters == "off" else [d for d in drafters.split(",") if d]
    if draft:
        names = [*(names or []), f"model:{draft}"]
    first = " (compiling takes a minute or two, once)" if settings.get("compile") == "wait" else ""
    with Console(stderr=True).status(f"loading{first}"):
        return outrider.load(target, names, **settings)


def _prompt(given: str) -> str:
    """The text itself, the content of a file, or standard input for '-'."""
    if given != "-" and not _is_file(given):
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
    max_tokens: Tokens = 128, depth: Depth = 4, rounds: Annotated[int, typer.Option(help="Timed repeats.")] = 3, device: Device = "auto",
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


Out = Annotated[Path, typer.Option(help="Folder for the results, as JSON and as a table.")]


@bench.command()
def speed(
    count: Annotated[int, typer.Option("--prompts", min=1, help="Prompts of each category.")] = 5, max_tokens: Tokens = 256, depth: Depth = 4,
    target: Target = None, draft: Draft = None, device: Device = "auto", dtype: DType = "bfloat16", threads: Threads = None,
    compile: Compile = "wait", out: Out = Path("docs/results"),
) -> None:  # fmt: skip
    """Stock transformers (plain, assisted, prompt lookup) against ours, interleaved, over the six categories."""
    from rich.console import Console

    from outrider.bench import run as peers

    how: dict[str, Any] = {"device": device, "dtype": dtype, "compile": compile, **({"threads": threads} if threads else {})}
    with Console(stderr=True).status("loading (compiling takes a minute or two, once)") as status:
        result = peers.speed(count, max_tokens, depth, lambda at: status.update(f"writing {at}"), target=target, draft=draft, **how)
    peers.save(result, out, "speed")
    print(peers.markdown(result))


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
    strict.save(result, out)
    print(strict.markdown(result))


@bench.command()
def start(out: Out = Path("docs/results")) -> None:
    """Seconds to the first token of a fresh process: eager, with an empty cache of compiled steps, with a full one."""
    from rich.console import Console

    from outrider.bench import start as fresh

    with Console(stderr=True).status("starting") as status:
        result = fresh.start(progress=status.update)
    fresh.save(result, out)
    print(fresh.markdown(result))


@bench.command()
def synthetic(
    shape: Annotated[str, typer.Option(help="tiny, 100m, 1b or 8b.")] = "1b", alpha: Annotated[float, typer.Option(help="Assumed acceptance rate.")] = 0.7,
    contexts: Annotated[str, typer.Option(help="Used context lengths.")] = "128,2048", dtype: DType = "bfloat16", device: Device = "auto",
    compile: Annotated[bool, typer.Option(help="Compile its steps first.")] = False, out: Out = Path("docs/results"),
) -> None:  # fmt: skip
    """SYNTHETIC: step times of a big shape with random weights, and what an assumed acceptance would make of them."""
    from rich.console import Console

    from outrider.bench import synthetic as made_up

    with Console(stderr=True).status("building") as status:
        if not all(c.strip().isdigit() and int(c) > 0 for c in contexts.split(",")):
            raise OutriderError(f"contexts={contexts!r} is no list of token counts", "", "128,2048")
        used = tuple(int(c) for c in contexts.split(","))
        result = made_up.steps(shape, contexts=used, dtype=dtype, alpha=alpha, compile=compile, device=device, progress=status.update)
    made_up.save(result, out)
    print(made_up.table(result))


@app.command()
def run(
    prompt: Annotated[str, typer.Argument(help="Text, a file, or - for standard input.")],
    target: Target = None, draft: Draft = None, drafters: Drafters = None, depth: Ahead = None, width: Width = 1, budget: Budget = 0,
    max_tokens: Tokens = 256, temperature: Temperature = 0.0, top_k: TopK = 0, top_p: TopP = 1.0, min_p: MinP = 0.0,
    seed: Seed = None, rule: RuleName = None, stop: Stop = None, device: Device = "auto", dtype: DType = "auto", context: Context = None,
    logprobs: Annotated[int | None, typer.Option(help="Log-probabilities of that many tokens beside the chosen one.")] = None,
    compile: Compile = "auto", strict: Strict = False, threads: Threads = None, profile: Profile = "auto", slowdown_limit: Slowdown = 0.05,
    explain: Annotated[bool, typer.Option("--explain-divergence", help="Write it without drafting too; say where the two part, and why.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message.")] = False,
    as_json: AsJson = False, config: Config = None,
) -> None:  # fmt: skip
    """Write a continuation of PROMPT."""
    text = _prompt(prompt)
    rt = _load(
        target, draft, drafters, depth=depth, width=width, budget=budget, device=device, dtype=dtype, context=context, rows=1, compile=compile,
        strict=strict, threads=threads, profile=profile, slowdown_limit=slowdown_limit,
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
    for chunk in rt.stream(asked, **knobs):
        print(chunk.text, end="", flush=True)
    print()


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
    temperature: Temperature = 0.0, seed: Seed = None, device: Device = "auto", dtype: DType = "auto",
    compile: Compile = "auto", strict: Strict = False, threads: Threads = None,
    system: Annotated[str | None, typer.Option(help="What the assistant is told first.")] = None,
) -> None:  # fmt: skip
    """Talk with the target. Earlier turns are not computed again. An empty line or Ctrl-D ends it."""
    rt = _load(target, draft, drafters, depth=depth, device=device, dtype=dtype, rows=1, compile=compile, strict=strict, threads=threads)
    messages = [{"role": "system", "content": system}] if system else []
    while line := _ask():
        messages.append({"role": "user", "content": line})
        said = ""
        for chunk in rt.stream(messages, max_tokens=max_tokens, temperature=temperature, seed=seed):
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


Recipe = Annotated[Path, typer.Option(help="A TOML file such as recipes/reference-cpu.toml.")]
Data = Annotated[Path, typer.Option(help="Folder that holds corpus/ and the recipe's target.path.")]
Piece = Annotated[float, typer.Option(help="Stop after that many minutes; the same command goes on later.")]
Work = Annotated[Path | None, typer.Option(help="Where streams, checkpoints and results go; default .train/RECIPE.")]


def _training(recipe: Path, work: Path | None) -> tuple[dict[str, Any], Path]:
    return _toml(recipe), work or Path(".train") / recipe.stem


def _say(line: str) -> None:
    print(line, flush=True)


@train.command()
def pretrain(recipe: Recipe, data: Data, work: Work = None, device: Device = "auto", piece: Piece = math.inf) -> None:
    """Tokenizer, token streams and the target; of a target that exists (target.path), only its token streams."""
    from outrider.models.load import pick_device
    from outrider.train import corpus
    from outrider.train.adopt import adopt
    from outrider.train.pretrain import pretrain as job

    settings, folder = _training(recipe, work)
    existing = settings["target"].get("path")
    shared = adopt(data / existing, folder) if existing else settings["shared"]
    corpus.build(settings["corpus"], data, folder / "corpus", shared["vocab_size"], shared["max_position_embeddings"], _say)
    if not existing:
        job(settings, folder, str(pick_device(device)), _say, piece)


def _stage(recipe: Path, work: Path | None) -> tuple[dict[str, Any], Path]:
    settings, folder = _training(recipe, work)
    if not (folder / "corpus/chars.json").exists() or not any((folder / "target").glob("*.safetensors")):
        raise OutriderError(f"{folder} holds no target and token streams yet", "", f"outrider train pretrain --recipe {recipe} first")
    return settings, folder


@train.command()
def collect(recipe: Recipe, work: Work = None, device: Device = "auto", piece: Piece = math.inf) -> None:
    """Let the target write: its own text is what a draft learns from."""
    from outrider.models.load import pick_device
    from outrider.train.collect import collect as job

    job(*_stage(recipe, work), str(pick_device(device)), _say, piece)


@train.command()
def distill(recipe: Recipe, work: Work = None, device: Device = "auto", piece: Piece = math.inf) -> None:
    """Distil the draft from the target."""
    from outrider.models.load import pick_device
    from outrider.train.fit import distill as job

    job(*_stage(recipe, work), str(pick_device(device)), _say, piece)


@train.command()
def judge(recipe: Recipe, work: Work = None, device: Device = "auto") -> None:
    """Measure how well draft and target agree, by category."""
    from outrider.models.load import pick_device
    from outrider.train.judge import judge as job

    job(*_stage(recipe, work), str(pick_device(device)), _say)


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
        if broken.errno != errno.ENOSPC:
            raise
        print(f"outrider: the disk is full ({broken.filename}). Try: free some space; the same command goes on", file=sys.stderr)
        code = 2
    except Exception as usage:
        if not hasattr(usage, "show"):  # not one of the parser's own errors
            raise
        usage.show()
        code = 2
    if code == 130:
        print("\noutrider: interrupted; nothing was lost", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
