"""How adapters hang in a job: the model frozen, its layers patched, and what must survive."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from shoestring.core.errors import CheckpointError
from shoestring.core.job import Job
from shoestring.memory.adapters.layers import choose, parameters_of, trained_modules
from shoestring.memory.zero.placement import is_half
from shoestring.models import adapter_folder, quantized
from shoestring.models.adapters import Adapted, LowRank, fresh, matrix, row_norms, take_off
from shoestring.models.blocks import is_in_block, is_transposed
from shoestring.models.nf4 import NF4Linear
from shoestring.models.rounding import wide

if TYPE_CHECKING:
    from shoestring.memory.settings.lora import LoRA

log = logging.getLogger("shoestring")


def attach(job: Job, settings: LoRA, *, copies: bool) -> None:
    """Freeze the job's model, round the weights of its blocks where that is asked for, and put adapters beside its
    layers until the job is closed.

    Args:
        copies: whether the optimizer steps copies in float32 of weights that have 16 bits.
    """
    model = job.module
    adapters, modules = _chosen(model, settings)
    whole = parameters_of(model, modules)
    adapters = {name: _placed(each, model.get_submodule(name), job.world.device) for name, each in adapters.items()}
    fingerprint = adapter_folder.fingerprint_of(model, adapters)
    trained = sum(model.get_parameter(names[0]).numel() for names in whole.values())
    frozen = sum(parameter.numel() for parameter in model.parameters()) - trained
    turned = [name for name, layer in model.named_modules() if is_transposed(layer)]
    if settings.base_bits == 16:
        for parameter in model.parameters():  # buffers stay: angles of positions would lose too much
            parameter.data = parameter.data.to(torch.bfloat16)
    rounded = _round(model, settings, whole, job.world.device) if settings.base_bits in (8, 4) else {}
    model.to(job.world.device)
    _freeze(job, whole)
    if not copies:
        _warn_of_lost_steps(model, settings.name, whole)
    for name, adapter in adapters.items():
        layer = model.get_submodule(name)
        job.exits.callback(take_off, layer)
        job.patch(layer, Adapted(layer, layer.forward, adapter, settings.dropout))
    record = AdapterRecord({name: each.scale for name, each in adapters.items()}, rounded, turned, fingerprint, modules)
    job.keep(settings.name, record)
    trained += sum(tensor.numel() for each in adapters.values() for tensor in each.tensors)
    job.trace.facts |= {"adapted_layers": len(adapters), "adapter_parameters": trained, "frozen_parameters": frozen}


class AdapterRecord:
    """What is kept beside the adapters' own tensors: their scales, the rows of layers that were rounded, the names of
    those that hold their weight transposed, a hash of the weights that adapters belong to, and the names of modules
    whose own weights are trained."""

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
            raise CheckpointError("the checkpoint holds adapters of other layers, scales or weights", hint=hint)


def _warn_of_lost_steps(model: nn.Module, name: str, whole: Mapping[int, Sequence[str]]) -> None:
    """Of weights that are trained in 16 bits, where most of a small step is less than the distance of two numbers."""
    halves = [names[0] for names in whole.values() if is_half(model.get_parameter(names[0]))]
    if halves:
        dtype = str(model.get_parameter(halves[0]).dtype).removeprefix("torch.")
        log.warning("%s: `%s` is trained in %s, where small steps are lost; [memory.zero] steps copies in float32",
                    name, halves[0], dtype)  # fmt: skip


def _chosen(model: nn.Module, settings: LoRA) -> tuple[dict[str, LowRank], list[str]]:
    """The adapters by layer, and the modules whose own weights are trained, which have the values of an adapter that is
    trained further."""
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


def _placed(adapter: LowRank, layer: nn.Module, device: torch.device) -> LowRank:
    """On the device, in single precision at least."""
    return adapter.to(device, wide(matrix(layer).dtype))


def _round(model: nn.Module, settings: LoRA, whole: Container[int], device: torch.device) -> dict[str, int]:
    """Put quantised layers on the device in the place of the linear layers of the blocks, one by one, so that at no
    time there is more than one in both forms; their names with their rows. Those whose weights are trained stay."""
    bits: Literal[8, 4] = 8 if settings.base_bits == 8 else 4
    chosen, _ = quantized.choose(model, bits)
    rows = {}
    for name in chosen:
        layer = model.get_submodule(name)
        if is_in_block(name) and not isinstance(layer, nn.Embedding) and id(layer.weight) not in whole:
            rows[name] = len(matrix(layer))
            layer.to(device)
            if settings.base_type == "nf4":
                model.set_submodule(name, NF4Linear(layer))
            else:
                quantized.replace(model, {name: bits}, rounded=True)
    return rows


def _freeze(job: Job, whole: Container[int]) -> None:
    """Take gradients from every parameter but these; checkpoints hold a hash of what modules with parameters hold."""
    model = job.module
    own = [
        module
        for module in model.modules()
        if [*module.parameters(False), *module.buffers(False)]
        and module is not model
        and not any(id(parameter) in whole for parameter in module.parameters())
    ]
    job.frozen("base", nn.ModuleList(own), "the model that the run began with")
    for parameter in model.parameters():  # of what holds others that are trained, such as the model itself
        if parameter.requires_grad and id(parameter) not in whole:
            job.exits.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(False)
