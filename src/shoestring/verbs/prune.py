"""`shoestring prune`: prunes a trained model to 2:4 sparsity in one shot, into a new folder."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from shoestring import figures, sparse
from shoestring._torch import own_device
from shoestring.core.task import Batch, call_model
from shoestring.models.saving import save_like, save_packed
from shoestring.verbs.conversion import change_of_size, check_new, described, open_source, own_batches, sample_text
from shoestring.verbs.settings import OneShotPruning

BATCH = 8  # number of samples in a forward pass


def prune(model: str, out: Path, settings: OneShotPruning | None = None) -> list[str]:
    """Prune a trained model and write it to `out`.

    Returns:
        Lines with the pruned layers, the fraction of their weights' sum of squares that remains, and the size.

    Raises:
        ConfigError: nothing can be pruned, there is no text on which to measure inputs, or `out` is not empty.
        CheckpointError: `model` does not name a model.
    """
    settings = settings or OneShotPruning()
    check_new(out)
    source, built, _ = open_source(model)
    batches: list[Batch] = []
    forward = call_model
    if settings.method == "wanda":
        device = own_device(0)
        built.to(device)
        own = None if settings.text.data else own_batches(model, settings.text.samples, BATCH, device)
        if own is not None:
            batches, forward = own
        else:
            inputs = sample_text(model, source, built, settings.text)
            batches = [{"inputs": batch} for batch in inputs.to(device).split(BATCH)]
    result = sparse.prune(built, settings.layers, metric=settings.method, batches=batches, forward=forward)
    built.cpu()
    why_others = "no pattern matches" if settings.layers else "outside of the blocks"
    count, share = len(result.kept_energy), figures.percent(result.share)
    lines = [f"2:4 by {settings.method}: {count} layers, {share} of the weights of all linear layers"]
    kinds: dict[str, list[float]] = defaultdict(list)
    for name, energy in result.kept_energy.items():
        kinds[re.sub(r"\.\d+\.", ".*.", name)].append(energy)
    for kind, energies in kinds.items():
        spread = f"{min(energies):.3f} to {max(energies):.3f}" if len(energies) > 1 else f"{energies[0]:.3f}"
        lines.append(f"  {kind}: {len(energies)} layers, kept energy {spread}")
    lines += described("dense", result.dense | dict.fromkeys(result.others, why_others))
    if settings.format == "packed":
        packed = save_packed(built, source, out)
        lines.append(f"packed: {len(packed)} layers, the others as they are")
    else:
        save_like(built, source, out)
    lines.append(change_of_size(source, out))
    lines.append(f"written to {out}; fine-tuning wins back loss: run.model = '{model}' and [sparse.ast]")
    return lines
