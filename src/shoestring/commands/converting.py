"""What verbs that make a new model of a trained one have in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import nn

from shoestring.core.errors import CheckpointError, ConfigError
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
