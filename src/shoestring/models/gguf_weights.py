"""Converts a model's weights to tensors of a GGUF file and back: names, order of rows, and types."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.models import llama, quantized
from shoestring.models.blocks import is_transposed
from shoestring.models.gguf_architectures import Architecture
from shoestring.models.gguf_file import StoredTensor
from shoestring.models.gguf_keys import normal
from shoestring.models.gpt import GPT
from shoestring.models.rounding import GROUP, ZERO, Bits, pack, quantize, unpack
from shoestring.naming import installed

log = logging.getLogger("shoestring")

Kind = Literal["f32", "f16", "q8_0", "q4_0"]
_WIDTHS: Mapping[str, Bits | None] = {"F32": None, "F16": None, "BF16": None, "F64": None, "Q8_0": 8, "Q4_0": 4}
"""Bits of the types that are read without rounding, by GGML's name of the type; None for floating-point types."""
_DENSE = ("position_embd",)
"""Names of matrices, without `.weight`, that llama.cpp requires in f32."""


def gguf_library() -> Any:
    if not installed("gguf"):
        raise ConfigError("GGUF files need the package gguf", hint="pip install shoestring[gguf]")
    return import_module("gguf")


# -- names -------------------------------------------------------------------------------------------------------------


class TensorRows(NamedTuple):
    """A range of rows of a module's weight that is stored as one tensor in the file."""

    module: str
    """Name of the module in our model."""
    stem: str
    """Name of the tensor in the file, without `.weight`."""
    kind: str
    """The name of the tensor with `{}` in place of the block's number."""
    start: int
    """First row."""
    rows: int


def parts_of(model: nn.Module, architecture: Architecture, config: Mapping[str, Any]) -> Iterator[TensorRows]:
    """Iterate over the tensors that a file has for the model's modules; the tensors of a fused module come in order of
    its rows.

    Raises:
        ConfigError: the architecture has no tensor for a module.
    """
    layers = normal(architecture, config)["num_hidden_layers"]
    stems = {
        module.format(block): (stem.format(block), stem)
        for stem, module in architecture.modules.items()
        for block in (range(layers) if "{}" in stem else range(1))
    }
    if isinstance(model, GPT):
        for ours, tensors in llama.layout(model.config):
            start = 0
            for tensor in tensors:
                stem, kind = stems[tensor.name.removesuffix(".weight")]
                yield TensorRows(ours.removesuffix(".weight"), stem, kind, start, tensor.shape[0])
                start += tensor.shape[0]
        return
    head = cast(Any, model).get_output_embeddings()
    tied = config.get("tie_word_embeddings") and not architecture.untied_head
    for name, module in model.named_modules():
        own = [parameter for parameter, _ in own_parameters(module)]
        if not (own or isinstance(module, quantized.Quantized)) or (tied and module is head):
            continue
        if module is head:
            stems[name] = ("output", "output")
        if name not in stems or (set(own) - {"weight", "bias"} and quantized.matrix(module) is None):
            raise ConfigError(f"llama.cpp's {architecture.name} has no tensor for `{name}` ({', '.join(own)})")
        if isinstance(module, quantized.Quantized):
            rows = module.rows
        else:
            matrix = quantized.matrix(module)
            rows = len(cast(Any, module).weight if matrix is None else matrix)
        yield TensorRows(name, *stems[name], 0, rows)


def own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The names and parameters that belong to a module itself and not to its submodules."""
    return list(module.named_parameters(recurse=False))


# -- reading -----------------------------------------------------------------------------------------------------------


class TensorSource(NamedTuple):
    """The tensors of a file, and what is needed to convert them to the model's weights."""

    tensors: Mapping[str, StoredTensor]
    architecture: Architecture
    entries: Mapping[str, Any]
    path: Path
    dense: bool = False
    """Whether all weights are read in floating point, including those stored in 8 or 4 bits."""

    def get(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Get a tensor by name and check its shape, which is given with the outermost dimension first."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path} lacks the tensor {name}")
        stored = tuple(int(size) for size in reversed(tensor.shape))
        if stored != shape:
            raise CheckpointError(f"{self.path}: {name} has shape {stored}, not {shape}")
        return tensor

    def our_rows(self, part: TensorRows) -> Tensor | slice:
        """The index that sorts the rows of a stored tensor into the order of the model's weight."""
        rows = self.architecture.rows.get(part.kind)
        return slice(None) if rows is None else rows(self.entries).argsort()


def state_of(model: nn.Module, parts: Sequence[TensorRows], stored: TensorSource) -> dict[str, Tensor]:
    """Read the weights of a model from a file; layers stored in 8 or 4 bits are replaced in the model by quantised
    layers."""
    state: dict[str, Tensor] = {}
    rounded: list[str] = []
    for name in dict.fromkeys(part.module for part in parts):
        module: Any = model.get_submodule(name)
        own = [part for part in parts if part.module == name]
        rows = [stored.our_rows(part) for part in own]
        for suffix, parameter in own_parameters(module):
            shape = parameter.shape[::-1] if is_transposed(module) else parameter.shape
            tensors = [stored.get(f"{part.stem}.{suffix}", (part.rows, *shape[1:])) for part in own]
            widths = {_WIDTHS.get(tensor.tensor_type.name, 8) for tensor in tensors}
            is_matrix = type(module) is nn.Linear or is_transposed(module) or isinstance(model, GPT)
            width: Bits | None = None  # bits of the layer in the model; None for floating point
            if suffix == "weight" and not stored.dense and widths != {None} and is_matrix:
                width = 4 if widths == {4} else 8
            if width is None:
                dense = _joined(tensors, rows, stored.path)
                if suffix == "weight" and own[0].kind in stored.architecture.plus_one:
                    dense -= 1
                state[f"{name}.{suffix}"] = dense.T.contiguous() if len(shape) == 2 and is_transposed(module) else dense
                continue
            if {_WIDTHS.get(tensor.tensor_type.name) for tensor in tensors} == {width}:
                blocks = [_blocks(tensor, row, width) for tensor, row in zip(tensors, rows, strict=True)]
                numbers, scales = (torch.cat(column) for column in zip(*blocks, strict=True))
            else:
                numbers, scales = quantize(_joined(tensors, rows, stored.path), width)
                rounded += [tensor.tensor_type.name for tensor in tensors]
            quantized.replace(model, {name: width})
            state[f"{name}.weight"], state[f"{name}.scales"] = pack(numbers, scales, width)
    if rounded:
        log.info("%d tensors of %s are rounded to 8 bits", len(rounded), ", ".join(sorted(set(rounded))))
    return state


def dense_of(tensor: StoredTensor, path: Path) -> Tensor:
    """The elements of a tensor, dequantised to float32."""
    try:
        values = gguf_library().quants.dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"{path}: {tensor.name} has the type {tensor.tensor_type.name}, which is not supported"
        ) from error
    return torch.from_numpy(np.array(values, np.float32))


def _joined(tensors: Sequence[StoredTensor], rows: Sequence[Tensor | slice], path: Path) -> Tensor:
    """Concatenate tensors in float32, each with its rows in the model's order."""
    return torch.cat([dense_of(tensor, path)[row] for tensor, row in zip(tensors, rows, strict=True)])


def _blocks(tensor: StoredTensor, rows: Tensor | slice, bits: Bits) -> tuple[Tensor, Tensor]:
    """Convert the file's blocks of one scale and 32 integers to codes and scales in the format of `rounding`."""
    count, size = int(tensor.shape[1]), 2 + GROUP * bits // 8
    blocks = torch.from_numpy(np.array(tensor.data)).view(torch.uint8).view(count, -1, size)[rows]
    scales, numbers = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1), blocks[..., 2:]
    if bits == 8:
        return numbers ^ 128, scales  # signed bytes to unsigned bytes with a zero point of 128
    return torch.cat((numbers & 15, numbers >> 4), -1), scales


# -- writing -----------------------------------------------------------------------------------------------------------


def tensors_of(
    model: nn.Module, part: TensorRows, architecture: Architecture, entries: Mapping[str, Any], kind: Kind
) -> Iterator[tuple[str, np.ndarray, str | None]]:
    """Iterate over the tensors of a part: suffix of the name, data and type; the type is None for floating-point
    data."""
    module: Any = model.get_submodule(part.module)
    rows = architecture.rows.get(part.kind)
    order = part.start + (torch.arange(part.rows) if rows is None else rows(entries))
    if (bias := getattr(module, "bias", None)) is not None:
        yield "bias", bias.detach().float().cpu()[order].numpy(), None
    outer, weight = "{}" not in part.kind, _weight(module).cpu()
    if weight.dim() == 1:
        yield "weight", (weight + 1 if part.kind in architecture.plus_one else weight).numpy(), None
    elif kind == "f32" or part.kind in _DENSE:
        yield "weight", weight[order].numpy(), None
    elif kind == "f16" or weight.shape[1] % GROUP:
        half = weight[order].half()
        if not half.isfinite().all():
            raise ConfigError(f"weights of `{part.module}` are too large for fp16", hint="write f32")
        yield "weight", half.numpy(), None
    else:
        bits: Bits = 8 if outer or kind == "q8_0" else 4
        yield "weight", as_blocks(module, order, bits), f"Q{bits}_0"


def _weight(module: Any) -> Tensor:
    """The weight of a layer in float32: a matrix (N, K) with N outputs and K inputs, or a vector."""
    if isinstance(module, quantized.Quantized):
        return module.dense()
    matrix = quantized.matrix(module)
    return (module.weight if matrix is None else matrix).detach().float()


def as_blocks(module: Any, order: Tensor, bits: Bits) -> np.ndarray:
    """The selected rows of a layer as bytes, in GGML's blocks of one scale and 32 integers."""
    if isinstance(module, quantized.Quantized) and module.bits == bits and module.places is None:
        numbers, scales = unpack(module.weight, module.scales, module.rows)
        numbers, scales = numbers[order], scales[order]
    else:
        numbers, scales = quantize(_weight(module)[order], bits)
    numbers = numbers ^ ZERO[8] if bits == 8 else numbers[..., :16] | numbers[..., 16:] << 4
    blocks = torch.cat((scales.contiguous().unsqueeze(-1).view(torch.uint8), numbers), -1)
    return blocks.flatten(1).cpu().numpy()
