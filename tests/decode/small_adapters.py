"""Folders of adapters over a small model, with unlike ranks, scales and layers."""

from pathlib import Path

import torch

from shoestring.data.tokenizer import Tokenizer
from shoestring.models import adapter_folder
from shoestring.models.adapters import LowRank, shape_of
from shoestring.models.adapters_by_row import adaptable_layers
from shoestring.models.saving import save_model

RANKS = (2, 3, 4, 6, 8, 11, 16, 16)


def save_base(model: torch.nn.Module, tokenizer: Tokenizer | None, folder: Path) -> Path:
    save_model(model, tokenizer, folder, {"model": "-", "arguments": {}, "offered": {"context": 256}})
    return folder


def drawn(model: torch.nn.Module, number: int) -> dict[str, LowRank]:
    """Adapters of every layer but those of the number modulo 3; strong enough to change most tokens."""
    with torch.inference_mode():
        layers = adaptable_layers(model, model)
    generator, rank = torch.Generator().manual_seed(number), RANKS[number % len(RANKS)]
    adapters = {}
    for index, (name, site) in enumerate(layers.items()):
        if index % 3 != number % 3:
            rows, columns = shape_of(site.layer)
            a, b = torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator)
            adapters[name] = LowRank(a, b * 0.3, 0.5 / rank**0.5)
    return adapters


def save_adapter(model: torch.nn.Module, folder: Path, base: Path, number: int, fingerprint: str = "") -> Path:
    adapter_folder.write(folder, model, drawn(model, number), base=str(base), fingerprint=fingerprint)
    return folder
