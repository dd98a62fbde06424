"""What verbs that make a new model of a trained one have in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from shoestring import run as runs
from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.core.world import World
from shoestring.data import Data
from shoestring.data.together import prepare
from shoestring.data.tokenizer import Tokenizer
from shoestring.models.loading import load_model
from shoestring.models.saving import source_folder

MEGABYTE = 1e6


def check_new(out: Path) -> None:
    """ConfigError where there is something at `out` already."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"`{out}` is not empty", hint="name a new folder")


def open_source(model: str) -> tuple[Path, nn.Module, Tokenizer | None]:
    """The folder of the model that a user names, the model, and its tokenizer.

    Raises:
        CheckpointError: there is none.
    """
    source = source_folder(model)
    if source is None:
        raise CheckpointError(f"`{model}` holds no model", hint="name a run folder, a model folder or hf:NAME")
    return source, *load_model(model)


def sample_text(model: str, source: Path, built: nn.Module, data: str, samples: int, sequence: int) -> Tensor:
    """Samples of the given text, or of the data of the run whose folder the model is in; int64 (samples, length)."""
    if samples < 1 or sequence < 1:
        raise ConfigError(f"{samples} samples of {sequence} tokens measure nothing", hint="give at least 1 of each")
    tokenizer = source / "tokenizer.json"
    if not tokenizer.is_file():
        raise ConfigError(f"`{model}` has no tokenizer.json", hint="copy the model's tokenizer.json there")
    settings, text = Data(), data or ()
    if not data and (Path(model) / "run.toml").is_file():
        run = runs.load(model)
        settings, text = run.data, run.settings.data
    if not text:
        raise ConfigError("there is no text to measure on", hint="name some by --data")
    config = getattr(built, "config", None)
    limits = [getattr(config, name, None) for name in ("context", "max_position_embeddings")]
    length = min([sequence, *(limit for limit in limits if isinstance(limit, int))])
    settings = replace(settings, tokenizer=str(tokenizer), sequence=length)
    with TemporaryDirectory() as folder:
        corpus = prepare(text, folder, settings, world=World())
        spread = range(0, len(corpus.train), max(1, len(corpus.train) // samples))[:samples]
        return torch.stack([corpus.train[number]["inputs"] for number in spread])


def change_of_size(source: Path, out: Path) -> str:
    """The bytes of the weights before and after, as a line."""
    before, after = (_bytes(path) / MEGABYTE for path in (source, out))
    return f"weights: {before:.1f} MB before, {after:.1f} MB after ({after / before:.0%})"


def _bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def described(what: str, reasons: Mapping[str, str]) -> Iterator[str]:
    """A line for each reason, with the first layer that has it and how many more."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, why in reasons.items():
        names[why].append(name)
    for why, those in names.items():
        more = f" and {len(those) - 1} more" if len(those) > 1 else ""
        yield f"{what}: {those[0]}{more} ({why})"
