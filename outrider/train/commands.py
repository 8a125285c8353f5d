"""`outrider train ...`. Every command imports what it needs when it runs."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.core.errors import OutriderError
from outrider.options import Device, toml

train = typer.Typer(no_args_is_help=True, help="Train a target and its draft from a recipe (resumes where it stopped).")

Recipe = Annotated[Path, typer.Option(help="A TOML file such as recipes/reference-cpu.toml.")]
Data = Annotated[Path, typer.Option(help="Folder that holds corpus/ and the recipe's target.path.")]
Piece = Annotated[float, typer.Option(help="Stop after that many minutes; the same command goes on later.")]
Work = Annotated[Path | None, typer.Option(help="Where streams, checkpoints and results go; default .train/RECIPE.")]


def _training(recipe: Path, work: Path | None) -> tuple[dict[str, Any], Path]:
    settings = toml(recipe)
    target = settings.get("target")
    for name in ("corpus", "target", *(["shared"] if isinstance(target, dict) and "path" not in target else [])):
        if not isinstance(settings.get(name), dict):
            raise OutriderError(f"{recipe} has no table [{name}]", "so it is no recipe", "recipes/reference-cpu.toml as a pattern")
    return settings, work or Path(".train") / recipe.stem


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
