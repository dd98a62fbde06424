"""Common parts of the verbs that convert a trained model: prune, quantize and skip."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sized
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
from torch import Tensor, nn

from shoestring import figures
from shoestring import run as runs
from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.core.task import Batch, Forward
from shoestring.core.world import World
from shoestring.data import Data
from shoestring.data.loader import stacked
from shoestring.data.together import prepare
from shoestring.data.tokenizer import Tokenizer
from shoestring.models import gguf, hf
from shoestring.models.loading import load_model
from shoestring.models.saving import source_folder
from shoestring.models.tokenizer_files import require_tokenizer
from shoestring.training.data_loading import own_data, to_device
from shoestring.training.user_code import import_user_code
from shoestring.verbs.settings import SampleText


def check_new(out: Path) -> None:
    """Raise ConfigError if `out` exists and is not an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"`{out}` is not empty", hint="name a new folder")


def open_source(model: str) -> tuple[Path, nn.Module, Tokenizer | None]:
    """Open a model by the name that a user gives. Returns its folder or .gguf file, the model, and its tokenizer (None
    if it has none).

    Raises:
        CheckpointError: there is no such model.
    """
    source = Path(model) if gguf.is_file(model) else source_folder(model)
    if source is None:
        hint = "name a run folder, a model folder, a .gguf file or hf:NAME"
        raise CheckpointError(f"`{model}` holds no model", hint=hint)
    return source, *load_model(model)


def sample_text(model: str, source: Path, built: nn.Module, text: SampleText) -> Tensor:
    """Sample the text that `text` names, or by default the run's own data, as token ids (samples, length) in int64."""
    samples, sequence = text.samples, text.sequence
    if samples < 1 or sequence < 1:
        raise ConfigError(f"{samples} samples of {sequence} tokens measure nothing", hint="give at least 1 of each")
    tokenizer = require_tokenizer(model)
    settings, data = Data(), text.data or ()
    if not text.data and (Path(model) / "run.toml").is_file():
        run = runs.look(model)
        settings, data = run.data, run.settings.data
    if not data:
        raise ConfigError("there is no text to measure on", hint="name a text with --data")
    config = getattr(built, "config", None)
    limit = hf.context_of(config) if hf.is_pretrained(built) else getattr(config, "context", None)
    length = min(sequence, limit) if isinstance(limit, int) else sequence
    settings = replace(settings, tokenizer=str(tokenizer), sequence=length)
    with TemporaryDirectory() as folder:
        corpus = prepare(data, folder, settings, world=World())
        spread = range(0, len(corpus.train), max(1, len(corpus.train) // samples))[:samples]
        return torch.stack([corpus.train[number]["inputs"] for number in spread])


def own_batches(model: str, samples: int, batch: int, device: torch.device) -> tuple[list[Batch], Forward] | None:
    """Batches of the training data of a run whose data set is the user's own, and the run's forward pass. None if
    `model` is not a run folder, or the run's data is text.

    Args:
        samples: number of samples, taken at equal distances from the data set. batch: number of samples in a batch.

    Raises:
        TrustError: the run folder names code that the user has not declared as trusted.
    """
    if not (Path(model) / "run.toml").is_file() or not runs.look(model).has_own_data:
        return None
    run = runs.load(model, trusted=False)
    code, data = import_user_code(run, skip=("run.evaluate", "run.sinks")), own_data(run).train
    length = len(cast(Sized, data))  # torch leaves `__len__` out of Dataset
    spread = range(0, length, max(1, length // samples))[:samples]
    parts = [[data[index] for index in spread[start : start + batch]] for start in range(0, len(spread), batch)]
    return [to_device((code.collate or stacked)(part), device) for part in parts], code.forward


def change_of_size(source: Path, out: Path) -> str:
    """Format a line with the size of the weights before and after the conversion."""

    def weight_bytes(path: Path) -> int:
        return sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*.safetensors")))

    before, after = weight_bytes(source), weight_bytes(out)
    return f"weights: {figures.size(before)} before, {figures.size(after)} after ({figures.percent(after / before)})"


def described(what: str, reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each reason: the first layer that it applies to, the number of other layers, and the reason."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, why in reasons.items():
        names[why].append(name)
    for why, layers in names.items():
        more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
        yield f"{what}: {layers[0]}{more} ({why})"
