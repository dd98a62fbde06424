"""`shoestring prune`: a trained model made 2:4 at once, in a new folder."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from torch import Tensor, nn

from shoestring import run as runs
from shoestring import sparse
from shoestring.commands.converting import change_of_size, check_new, described, open_source
from shoestring.core.errors import ConfigError
from shoestring.core.world import World, own_device
from shoestring.data import Data
from shoestring.data.together import prepare
from shoestring.models.saving import save_like, save_packed
from shoestring.sparse.oneshot import PruningResult

BATCH = 8  # samples that are measured at a time


def prune(
    model: str,
    out: Path,
    *,
    metric: Literal["magnitude", "wanda"] = "magnitude",
    form: Literal["dense", "packed"] = "dense",
    layers: Sequence[str] = (),
    data: str = "",
    samples: int = 128,
    sequence: int = 512,
) -> Iterator[str]:
    """Prune the model that a user names, write it to `out`, and say what became of it, line by line.

    Raises:
        ConfigError: nothing can be pruned, there is no text to measure inputs on, or `out` is not empty.
        CheckpointError: there is no model.
    """
    check_new(out)
    if samples < 1 or sequence < 1:
        raise ConfigError(f"{samples} samples of {sequence} tokens measure nothing", hint="give at least 1 of each")
    source, built, _ = open_source(model)
    batches: list[dict[str, Tensor]] = []
    if metric == "wanda":
        device = own_device(0)
        built.to(device)
        inputs = _calibration(model, source, built, data, samples, sequence)
        batches = [{"inputs": batch} for batch in inputs.to(device).split(BATCH)]
    result = sparse.prune(built, layers, metric=metric, batches=batches)
    built.cpu()
    yield from _described(result, metric, "no pattern matches" if layers else "outside of the blocks")
    if form == "packed":
        packed = save_packed(built, source, out)
        yield f"packed: {len(packed)} layers, the others as they are"
    else:
        save_like(built, source, out)
    yield change_of_size(source, out)
    yield f"written to {out}; fine-tuning wins back loss: run.model = '{model}' and [sparse.ast]"


def _calibration(model: str, source: Path, built: nn.Module, data: str, samples: int, sequence: int) -> Tensor:
    """Samples of the given text, or of the data of the run whose folder the model is in; int64 (samples, length)."""
    tokenizer = source / "tokenizer.json"
    if not tokenizer.is_file():
        raise ConfigError(f"`{model}` has no tokenizer.json", hint="copy the model's tokenizer.json there")
    settings, text = Data(), data or ()
    if not data and (Path(model) / "run.toml").is_file():
        run = runs.load(model)
        settings, text = run.data, run.settings.data
    if not text:
        raise ConfigError("there is no text to measure inputs on", hint="name some by --data")
    config = getattr(built, "config", None)
    limits = [getattr(config, name, None) for name in ("context", "max_position_embeddings")]
    length = min([sequence, *(limit for limit in limits if isinstance(limit, int))])
    settings = replace(settings, tokenizer=str(tokenizer), sequence=length)
    with TemporaryDirectory() as folder:
        corpus = prepare(text, folder, settings, world=World())
        spread = range(0, len(corpus.train), max(1, len(corpus.train) // samples))[:samples]
        return torch.stack([corpus.train[number]["inputs"] for number in spread])


def _described(result: PruningResult, metric: str, why_others: str) -> Iterator[str]:
    """What became sparse and what that keeps, by kinds of layers; and what stays dense, by reasons."""
    count = len(result.kept_energy)
    yield f"2:4 by {metric}: {count} layers, {result.share:.0%} of the weights of all linear layers"
    kinds: dict[str, list[float]] = defaultdict(list)
    for name, kept in result.kept_energy.items():
        kinds[re.sub(r"\.\d+\.", ".*.", name)].append(kept)
    for kind, kept in kinds.items():
        spread = f"{min(kept):.3f} to {max(kept):.3f}" if len(kept) > 1 else f"{kept[0]:.3f}"
        yield f"  {kind}: {len(kept)} layers, kept energy {spread}"
    yield from described("dense", result.dense | dict.fromkeys(result.others, why_others))
