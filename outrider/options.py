"""Options that several commands share. Imports nothing heavy."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.core.config import nearest
from outrider.core.errors import OutriderError


def defaults(ctx: typer.Context, file: Path | None) -> Path | None:
    """Take the defaults of a command's options from a TOML file; an unknown key names the nearest."""
    if file is not None:
        given = toml(file)
        known = [p.name for p in ctx.command.params if p.name not in ("config", "prompt")]
        for key in given:
            if key not in known:
                raise nearest(key, known)
        ctx.default_map = {**(ctx.default_map or {}), **given}
    return file


def toml(file: Path) -> dict[str, Any]:
    import tomllib

    if not file.is_file():
        raise OutriderError(f"there is no file {file}", "", "a TOML file")
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as bad:
        raise OutriderError(f"{file} is not TOML", str(bad), "mending the line it names") from bad


def there(folder: Path) -> Path:
    """Make a folder for results, or refuse it before anything is measured: minutes would be lost."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutriderError(f"nothing can be written into {folder}", "you may not", "--out with a folder of your own")
    return folder


def writable(file: Path | None) -> Path | None:
    """Make the folder of a file that is written at the end, and refuse a place where it could not be, before anything is loaded."""
    if file is None:
        return None
    if file.is_dir():
        raise OutriderError(f"{file} cannot be written", "it is a folder", f"the name of a file, e.g. {file / 'FILE'}")
    file.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(file.parent, os.W_OK | os.X_OK) or (file.exists() and not os.access(file, os.W_OK)):
        raise OutriderError(f"{file} cannot be written", "you may not", "a file in a folder of your own")
    return file


def stem(name: str) -> str:
    """Refuse a name that results could not have, before anything is loaded."""
    if Path(name).name != name or name[:1] in ("", "."):
        raise OutriderError(f"--name {name!r} is no name of a file", "", "--name speed, and --out for the folder")
    return name


Target = Annotated[str | None, typer.Option(help="Folder, GGUF file or hub id of the target; default: the embedded reference pair.")]
Draft = Annotated[str | None, typer.Option(help="Folder, GGUF file or hub id of a draft model.")]
Drafters = Annotated[str | None, typer.Option(help='Comma-separated drafters, e.g. "lookup,model:PATH"; "off" for plain decoding.')]
Depth = Annotated[int, typer.Option(help="Tokens drafted ahead.")]
Ahead = Annotated[int | None, typer.Option("--depth", help="Tokens drafted ahead at every step; default: decided at each.")]
Profile = Annotated[str, typer.Option(help="auto (kept in the cache folder), off, or a file.")]
Slowdown = Annotated[float, typer.Option(help="How much slower than plain decoding a request may become.")]
Width = Annotated[int, typer.Option(help="Children of each draft node, with --depth.")]
Budget = Annotated[int, typer.Option(help="Most draft nodes a step (0: no limit), with --depth.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
DType = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Compile = Annotated[str, typer.Option("--compile", help="auto: compiled steps are built meanwhile; wait for them; or off.")]
Program = Annotated[Path | None, typer.Option(help="A pipeline of your own, as text (docs/ir.md); it runs for requests of its rule.")]
Strict = Annotated[bool, typer.Option("--strict", help="The same bits with and without drafting; slower.")]
Threads = Annotated[int | None, typer.Option(help="Threads of torch; default: its own choice.")]
Context = Annotated[int | None, typer.Option(help="Tokens a text can hold; default: 4,096 or the model's limit, whichever is less.")]
Quantise = Annotated[str | None, typer.Option(help="int8 or int4: the weights of the target's linear layers in integers of so many bits.")]
Tokens = Annotated[int, typer.Option(help="Most tokens to write.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="0 is off.")]
TopP = Annotated[float, typer.Option(help="1 is off.")]
MinP = Annotated[float, typer.Option(help="0 is off.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text, whoever drafts.")]
RuleName = Annotated[str | None, typer.Option("--rule", help="exact or coupled; default: coupled with a seed, exact without.")]
Stop = Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")]
Config = Annotated[Path | None, typer.Option(is_eager=True, callback=defaults, help="A TOML file of these options; flags win.")]
AsJson = Annotated[bool, typer.Option("--json", help="The last line of the output is one JSON document.")]
Out = Annotated[Path, typer.Option(callback=there, help="Folder for the results, as JSON and as a table.")]
