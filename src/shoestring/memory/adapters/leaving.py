"""Exports adapters: the model with the adapters merged into its weights, and the adapters in PEFT's format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoestring.core.attachments import Attachments
from shoestring.memory.adapters.layers import parameters_of
from shoestring.models import adapter_folder, nf4
from shoestring.models.adapters import MAGNITUDE, A, B, adapters_in
from shoestring.models.rounding import dequantize
from shoestring.sharded import is_sharded


@torch.no_grad()
def merged(weights: Mapping[str, Tensor], record: Mapping[str, Any]) -> dict[str, Tensor]:
    """Merge adapters into the weights, and return the weights of a plain model that computes the same function.

    Args:
        weights: the trained weights of the model with its adapters.
        record: the state dict of `attached.AdapterRecord`.
    """
    of_adapters = {f"{layer}.{name}" for layer in record["scales"] for name in (A, B, MAGNITUDE)}
    plain = {name: value for name, value in weights.items() if name not in of_adapters}
    dtype = next((value.dtype for value in plain.values() if value.is_floating_point()), torch.float32)
    for layer, count in record["rows"].items():
        weight, scales, coarse = (plain.pop(f"{layer}.{part}", None) for part in ("weight", "scales", "coarse"))
        if coarse is None:
            dense = dequantize(weight, scales, count, dtype)
        else:
            dense = nf4.dequantize(weight, scales, coarse, count, dtype)
        plain[f"{layer}.weight"] = dense.T if layer in record["transposed"] else dense
    for layer, adapter in adapters_in(weights, record["scales"]).items():
        weight, transposed = plain[f"{layer}.weight"], layer in record["transposed"]
        plain[f"{layer}.weight"] = adapter.merged(weight.T).T.contiguous() if transposed else adapter.merged(weight)
    return plain


def gather_adapters(attachments: Attachments, feature: str, base: str, dropout: float) -> Callable[[Path], None]:
    """Gather a job's adapters from all ranks (a collective), and return a function that writes them to a folder.

    Args:
        feature: name of the feature that attached the adapters.
        base: where the model without adapters comes from, for the adapter's config; may be empty.
    """
    record: Any = attachments.kept[feature].state
    names = [f"{layer}.{name}" for layer in record.scales for name in (A, B, MAGNITUDE)]
    names += [name for aliases in parameters_of(attachments.module, record.modules).values() for name in aliases]
    state = attachments.weights()
    values = {name: state[name] for name in names if name in state}
    whole = {name: value.full_tensor() if is_sharded(value) else value for name, value in values.items()}

    def write(folder: Path) -> None:
        adapters, fingerprint = adapters_in(whole, record.scales), record.fingerprint
        added = {f"{layer}.{name}" for layer in record.scales for name in (A, B, MAGNITUDE)}
        trained = {name: value for name, value in whole.items() if name not in added}
        adapter_folder.write(
            folder / adapter_folder.FOLDER,
            attachments.module,
            adapters,
            base=base,
            fingerprint=fingerprint,
            dropout=dropout,
            trained=trained,
        )

    return write
