"""`shoestring prune`: a trained model made 2:4 at once, in a new folder."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from torch import Tensor

from shoestring import sparse
from shoestring.commands.converting import change_of_size, check_new, described, open_source, sample_text
from shoestring.core.world import own_device
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
    source, built, _ = open_source(model)
    batches: list[dict[str, Tensor]] = []
    if metric == "wanda":
        device = own_device(0)
        built.to(device)
        inputs = sample_text(model, source, built, data, samples, sequence)
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
