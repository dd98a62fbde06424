"""Attaches low-rank adapters to a job: freezes the model, patches its layers, and registers the adapters' state."""

from __future__ import annotations

import logging
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoestring.core.attachments import Attachments
from shoestring.core.errors import CheckpointError
from shoestring.memory.adapters.layers import choose, layers_to_round, parameters_of, trained_modules
from shoestring.memory.zero.placement import is_half
from shoestring.models import adapter_folder, quantized
from shoestring.models.adapters import Adapted, LowRank, fresh, matrix, row_norms, take_off
from shoestring.models.blocks import is_transposed
from shoestring.models.nf4 import NF4Linear
from shoestring.models.rounding import wide

if TYPE_CHECKING:
    from shoestring.memory.settings.lora import LoRA

log = logging.getLogger("shoestring")


def attach(attachments: Attachments, settings: LoRA, *, copies: bool) -> None:
    """Freeze the job's model, quantise its weights to `base_bits` bits, and add adapters until the job is closed.

    Args:
        copies: whether the optimizer updates float32 copies of 16-bit weights.
    """
    model = attachments.module
    adapters, modules = _choose_adapters(model, settings)
    whole = parameters_of(model, modules)
    adapters = {
        name: adapter.to(attachments.world.device, wide(matrix(model.get_submodule(name)).dtype))
        for name, adapter in adapters.items()
    }
    fingerprint = adapter_folder.fingerprint_of(model, adapters)
    trained = sum(model.get_parameter(names[0]).numel() for names in whole.values())
    frozen = sum(parameter.numel() for parameter in model.parameters()) - trained
    modes = {name: model.get_submodule(name).training for name in adapters}
    transposed = [name for name, layer in model.named_modules() if is_transposed(layer)]
    if settings.base_bits == 16:
        for parameter in model.parameters():  # buffers stay as they are: rotary angles need precision
            parameter.data = parameter.data.to(torch.bfloat16)
    rounded = _round(model, settings, whole, attachments.world.device)
    model.to(attachments.world.device)
    _freeze(attachments, whole)
    if not copies:
        # In 16 bits, an update smaller than the spacing of the numbers is lost.
        halves = [names[0] for names in whole.values() if is_half(model.get_parameter(names[0]))]
        if halves:
            dtype = str(model.get_parameter(halves[0]).dtype).removeprefix("torch.")
            log.warning("%s: `%s` is trained in %s, where small updates are lost; [memory.zero] updates float32 copies",
                        settings.name, halves[0], dtype)  # fmt: skip
    for name, adapter in adapters.items():
        layer = model.get_submodule(name)
        # undo the evaluation mode that freezing set, because dropout depends on the layer's mode
        vars(layer).pop("train", None)
        layer.training = modes[name]
        attachments.exits.callback(take_off, layer)
        attachments.patch(layer, Adapted(layer, layer.forward, adapter, settings.dropout))
    record = AdapterRecord(
        {name: adapter.scale for name, adapter in adapters.items()}, rounded, transposed, fingerprint, modules
    )
    attachments.keep(settings.name, record, merged=True)
    trained += sum(tensor.numel() for adapter in adapters.values() for tensor in adapter.tensors)
    attachments.trace.facts |= {
        "adapted_layers": len(adapters),
        "adapter_parameters": trained,
        "frozen_parameters": frozen,
    }
    attachments.trace.facts |= {"rounded_parameters": quantized.rounded_parameters(model)}


class AdapterRecord:
    """The description of adapters in a checkpoint; the adapters' tensors are stored separately.

    Args:
        scales: scales of the adapters, by layer.
        rows: number of rows of each quantised layer, by layer.
        transposed: names of the layers that store the transpose of their weight.
        fingerprint: hash of the weights that the adapters belong to.
        modules: names of the modules whose own weights are trained.
    """

    def __init__(
        self,
        scales: dict[str, float],
        rows: dict[str, int],
        transposed: list[str],
        fingerprint: str,
        modules: list[str],
    ) -> None:
        self.scales, self.fingerprint, self.modules = scales, fingerprint, modules
        self._state: dict[str, Any] = {"scales": scales, "rows": rows, "transposed": transposed, "base": fingerprint}
        self._state |= {"modules": modules} if modules else {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict != self._state:
            hint = "resume with the model and the settings of [memory.lora] that the run began with"
            raise CheckpointError("the checkpoint's adapters have other layers, scales or weights", hint=hint)


def _choose_adapters(model: nn.Module, settings: LoRA) -> tuple[dict[str, LowRank], list[str]]:
    """Return the adapters by layer, new or from a folder, and the names of the modules whose own weights are trained.

    If the adapter's folder contains weights of such modules, these weights replace the model's.
    """
    if settings.adapter:
        adapter = adapter_folder.read(Path(settings.adapter), model)
        return adapter.layers, adapter_folder.fill(model, adapter.parameters)
    choice = choose(model, settings.layers, settings.modules_to_train)
    if choice.left:
        name, why = next(iter(choice.left.items()))
        more = f" and {len(choice.left) - 1} more get" if len(choice.left) > 1 else " gets"
        log.warning("memory.lora: `%s`%s no adapter: %s", name, more, why)
    adapters = {}
    for number, (name, layer) in enumerate(choice.adapted.items()):
        weight = matrix(layer).detach()
        a, b = fresh((weight.shape[0], weight.shape[1]), settings.rank, settings.seed * 2**20 + number)
        lengths = row_norms(weight, wide(weight.dtype)) if settings.dora else None
        adapters[name] = LowRank(a, b, settings.alpha / settings.rank, lengths)
    return adapters, trained_modules(model, settings.modules_to_train)


def _round(model: nn.Module, settings: LoRA, whole: Container[int], device: torch.device) -> dict[str, int]:
    """Replace the frozen linear layers of the blocks by quantised layers on the device.

    Layers are replaced one by one, so that at most one layer at a time exists both with its weights and quantised.

    Args:
        whole: ids of the parameters that are trained; their layers are not replaced.

    Returns:
        Number of rows of each replaced layer, by the layer's name.
    """
    rows = {}
    for name, bits in layers_to_round(model, settings.base_bits, whole).items():
        layer = model.get_submodule(name)
        rows[name] = len(matrix(layer))
        layer.to(device)
        if settings.base_type == "nf4":
            model.set_submodule(name, NF4Linear(layer))
        else:
            quantized.replace(model, {name: bits}, rounded=True)
    return rows


def _freeze(attachments: Attachments, whole: Container[int]) -> None:
    """Freeze parameters whose ids are not in `whole`; checkpoints store hashes instead of frozen modules' weights."""
    model = attachments.module
    own = [
        module
        for module in model.modules()
        if [*module.parameters(False), *module.buffers(False)]
        and module is not model
        and not any(id(parameter) in whole for parameter in module.parameters())
    ]
    attachments.frozen("base", nn.ModuleList(own), "the model that the run began with")
    for parameter in model.parameters():  # the remaining parameters, in modules that also contain trained parameters
        if parameter.requires_grad and id(parameter) not in whole:
            attachments.exits.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(False)
