"""What of adapters leaves a run: the model with them merged into its weights, and the adapters in PEFT's format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoestring.core.job import Job
from shoestring.memory.adapters.layers import parameters_of
from shoestring.models import adapter_folder, nf4
from shoestring.models.adapters import MAGNITUDE, A, B, adapters_in
from shoestring.models.rounding import dequantize


@torch.no_grad()
def merged(weights: Mapping[str, Tensor], record: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a plain model that computes the same.

    Args:
        weights: of the model with its adapters, as they were trained.
        record: the state of `attached.AdapterRecord`.
    """
    ours = {f"{layer}.{name}" for layer in record["scales"] for name in (A, B, MAGNITUDE)}
    plain = {name: value for name, value in weights.items() if name not in ours}
    dtype = next((each.dtype for each in plain.values() if each.is_floating_point()), torch.float32)
    for layer, count in record["rows"].items():
        weight, scales, coarse = (plain.pop(f"{layer}.{part}", None) for part in ("weight", "scales", "coarse"))
        if coarse is None:
            dense = dequantize(weight, scales, count, dtype)
        else:
            dense = nf4.dequantize(weight, scales, coarse, count, dtype)
        plain[f"{layer}.weight"] = dense.T if layer in record["transposed"] else dense
    for layer, adapter in adapters_in(weights, record["scales"]).items():
        weight, turned = plain[f"{layer}.weight"], layer in record["transposed"]
        plain[f"{layer}.weight"] = adapter.merged(weight.T).T.contiguous() if turned else adapter.merged(weight)
    return plain


def save_adapters(job: Job, feature: str, folder: Path, base: str, dropout: float) -> None:
    """Write the adapters of a job to `folder` in PEFT's format; a collective, in which the first rank writes.

    Args:
        feature: the name of the feature that put them there.
        base: what opens the model without adapters; may be empty.
    """
    record: Any = job.kept[feature].state
    names = [f"{layer}.{name}" for layer in record.scales for name in (A, B, MAGNITUDE)]
    names += [name for each in parameters_of(job.module, record.modules).values() for name in each]
    state = job.weights()
    values = {name: state[name] for name in names if name in state}
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values.items()}
    if job.world.first:
        adapters, fingerprint = adapters_in(whole, record.scales), record.fingerprint
        added = {f"{layer}.{name}" for layer in record.scales for name in (A, B, MAGNITUDE)}
        trained = {name: value for name, value in whole.items() if name not in added}
        adapter_folder.write(
            folder, job.module, adapters, base=base, fingerprint=fingerprint, dropout=dropout, trained=trained
        )
