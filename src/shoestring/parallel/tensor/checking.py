"""Checks, before anything is allocated, whether a model's layers can be split beside other features."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Seam
from shoestring.models.blocks import is_transposed
from shoestring.parallel.beside import check_beside
from shoestring.parallel.tensor.names import TENSOR
from shoestring.parallel.tensor.plan import Cut, dim_of, plan_of

if TYPE_CHECKING:
    from shoestring.parallel.settings import Tensor


def check(attachments: Attachments, settings: Tensor) -> None:
    """Raise ConfigError if the model cannot be split as the settings say, ConflictError if a feature does not fit."""
    ranks = attachments.world.ranks_over([TENSOR])
    if ranks == 1:
        return
    check_beside(attachments, settings, partial(_refused, settings))
    model = attachments.module
    plan = plan_of(model, settings, settings.splits_vocabulary(attachments.features))
    for path, number in plan.divided.items():
        if number % ranks:
            message = f"{ranks} ranks cannot share the {number} of `{path}` equally"
            raise ConfigError(message, hint=f"set {settings.name}.ways to a divisor of this number")
    for name, cut in plan.layers.items():
        for reason in _faults(model, name, cut, ranks):
            raise ConfigError(f"`{name}` {reason}", hint=f"set {settings.name}.ways, or remove [{settings.name}]")
    # With `columns` but no `rows`, or the reverse, results would never be summed.
    ways = {cut.way for cut in plan.layers.values()}
    if not {"columns", "rows"} <= ways:
        message = f"`{settings.name}` splits no layer by its {'rows' if 'columns' in ways else 'columns'}"
        hint = "each layer in `columns` needs a layer in `rows` that reads its outputs"
        raise ConfigError(message, hint=hint)


def _refused(settings: Tensor, feature: Feature) -> str:
    """Why a feature does not work with split layers; empty if it does."""
    if Seam.GRAPH in feature.seams:
        return "compiles the model, which exchanges activations between its layers"
    if feature.divided:
        return f"shards the {feature.divided} of whole layers, but a rank holds only a part of each layer"
    if Seam.LOSS in feature.seams and (settings.vocabulary_layers == "split" or settings.gathered):
        return "computes a loss in the output layer, but a rank holds only a part of that layer"
    return ""


def _faults(model: nn.Module, name: str, cut: Cut, ranks: int) -> Iterator[str]:
    module: Any = model.get_submodule(name)
    kind = type(module)
    if not (kind.forward in (nn.Linear.forward, nn.Embedding.forward) or is_transposed(module) or _is_scaled(module)):
        yield f"is a {kind.__name__}, whose forward pass is not that of a linear layer or an embedding"
    elif (cut.way == "vocabulary") != isinstance(module, nn.Embedding):
        yield f"is a {kind.__name__}, which has no {cut.way} to split"
    elif not module.weight.requires_grad:
        yield "is frozen, and only trained weights are split"
    elif isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        yield "is an embedding with `max_norm` or sparse gradients"
    size = module.weight.shape[dim_of(module, cut.way)]
    if cut.way in ("vocabulary", "gathered"):
        if size < ranks:
            yield f"has {size} entries, fewer than the {ranks} ranks"
        return
    for extent in cut.sections or (size,):
        if extent % ranks:
            what = "inputs" if cut.way == "rows" else "outputs"
            yield f"has {extent} {what}, which {ranks} ranks cannot share equally"


def _is_scaled(module: nn.Module) -> bool:
    """Whether a module computes an embedding times a constant, as in Gemma; this is tested on a few entries."""
    if not isinstance(module, nn.Embedding) or module.weight.is_meta:
        return False
    entries = torch.arange(min(8, module.num_embeddings), device=module.weight.device)
    with torch.no_grad():
        output, weight = module(entries).double(), module.weight[entries].double()
        scale = (output * weight).sum() / weight.square().sum().clamp(min=1e-30)
        return torch.allclose(output, weight * scale, rtol=1e-2, atol=1e-6)
