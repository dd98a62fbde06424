"""Several low-rank adapters on one model in one forward pass: each row of the batch may use another adapter.

A layer computes x Wᵀ for all rows at once, and adds (x Aᵀ) Bᵀ s with the factors of each row. Rows without an adapter
get exactly the output of the model alone. Sources: Punica (Chen et al., 2023), S-LoRA (Sheng et al., 2023).

On a CPU, in passes over few tokens, a native kernel computes the low-rank products and reads each adapter once. If the
layer's own product is native too, the same call computes it. In all other passes, rows whose adapters have equal ranks
share two batched products.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring import figures, native
from shoestring.core.errors import CheckpointError
from shoestring.models import adapter_folder, skinny
from shoestring.models.adapter_config import AdapterConfig
from shoestring.models.adapters import LowRank, shape_of
from shoestring.models.blocks import routers

TILE = 64
"""Number of outputs whose rows of B are stored together for the native kernel; as in lowrank_rows.c."""
FEW_TOKENS = 64
"""Maximum number of tokens in a pass for which the native kernel is used; torch's products are faster for more."""
SMALLEST_LIMIT = 64 << 20
"""Size in bytes that an adapter's file may always have, even if the model is smaller."""
_numbers = count()


@dataclass(frozen=True)
class AdaptableLayer:
    """A linear layer that computes the rows of a batch independently, so that each may have its own adapter."""

    layer: nn.Module
    dtype: torch.dtype
    """Data type of the layer's input and output."""
    device: torch.device


def adaptable_layers(
    model: nn.Module, read: Callable[[Tensor], object], rows: int = 3, tokens: int = 2
) -> dict[str, AdaptableLayer]:
    """Run one forward pass of a model to find the linear layers that process the rows of a batch separately.

    Layers that are not called, or that see tokens in another order (the experts of a mixture), are left out.

    Args:
        read: runs the model over tokens (B, T), in one forward pass.
        rows: number of rows B; 1 for a model that reads each row in a separate pass.
        tokens: number of tokens T in each row.

    Returns:
        A mapping from the names of these layers to the layers.
    """
    mixed = bool(routers(model))  # experts see their tokens in another order, even an expert that gets all tokens
    layers, spoilt, hooks = dict[str, AdaptableLayer](), set[str](), []

    def watch(name: str, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        match inputs, output:
            case (Tensor() as x, *_), Tensor() if x.dtype == output.dtype and x.shape[:-1] == output.shape[:-1]:
                by_row = x.shape[:-1] == (rows, tokens) or (x.shape[:-1] == (rows * tokens,) and not mixed)
                layers[name] = AdaptableLayer(layer, x.dtype, x.device)
            case _:
                by_row = False
        if not by_row:
            spoilt.add(name)

    for name in adapter_folder.parts_of(model):
        layer = model.get_submodule(name)
        hooks.append(layer.register_forward_hook(partial(watch, name)))
    try:
        read(torch.arange(rows * tokens).view(rows, tokens) % 2)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: layer for name, layer in layers.items() if name not in spoilt}


# -- adapters ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Factors:
    """The factors of one layer: `a` (r, K), and `b` (N, r) with the adapter's scale multiplied into it."""

    a: Tensor
    b: Tensor

    @cached_property
    def tiles(self) -> tuple[Tensor, Tensor]:
        """`b` in the order in which the native kernel reads it, and the table of its tiles.

        A tile consists of TILE rows of `b`, of which only the columns from the first to the last nonzero one are
        stored. Each row of the table (tiles, 3) holds the offset of a tile among the stored elements, its first column,
        and the column after its last.
        """
        rows, rank = self.b.shape
        padded = F.pad(self.b, (0, 0, 0, -rows % TILE)).view(-1, TILE, rank)
        parts, table, start = [], [], 0
        for tile, used in zip(padded, (padded != 0).any(1).tolist(), strict=True):
            columns = [column for column, nonzero in enumerate(used) if nonzero] or [0]
            first, end = columns[0], columns[-1] + 1 if any(used) else columns[0]
            parts.append(tile[:, first:end].T.flatten())
            table.append((start, first, end))
            start += parts[-1].numel()
        return torch.cat(parts), torch.tensor(table, dtype=torch.int64)

    def padded(self, rank: int) -> tuple[Tensor, Tensor]:
        """`a` and `b` with zeros up to a larger rank."""
        more = rank - len(self.a)
        return F.pad(self.a, (0, 0, 0, more)), F.pad(self.b, (0, more))


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter in memory, in the data types and on the devices of a model's layers."""

    factors: Mapping[str, Factors]
    """Factors by layer name."""
    number: int
    """Number that is unique in this process; an adapter that is loaded twice gets two numbers."""

    @property
    def nbytes(self) -> int:
        """Bytes of the factors."""
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.factors.values())


def place(adapters: Mapping[str, LowRank], layers: Mapping[str, AdaptableLayer], source: str) -> LoadedAdapter:
    """Convert the adapters of layers to the layers' data types and devices.

    Args:
        source: name of the adapters in error messages.

    Raises:
        CheckpointError: an adapter is a DoRA, is not finite, or belongs to a layer that cannot be adapted by row.
    """
    factors = {}
    for name, adapter in adapters.items():
        if adapter.magnitude is not None:
            raise CheckpointError(
                f"{source} is a DoRA (use_dora), which scales whole rows of a weight and cannot share a batch",
                hint="merge it into its base model, and serve that",
            )
        if (site := layers.get(name)) is None:
            raise CheckpointError(
                f"{source} adapts `{name}`, whose input does not keep the texts of a batch apart",
                hint="merge it into its base model, and serve that",
            )
        if not all(bool(tensor.isfinite().all()) for tensor in adapter.tensors):
            raise CheckpointError(f"{source} has factors of `{name}` that are not finite", hint="it is damaged")
        a, b = adapter.a, adapter.b.double() * adapter.scale
        factors[name] = Factors(a.to(site.device, site.dtype).contiguous(), b.to(site.device, site.dtype).contiguous())
        if _is_native(factors[name].a):
            _ = factors[name].tiles  # computed and cached now, so that no request has to wait for it
    return LoadedAdapter(factors, next(_numbers))


def load_adapter(folder: Path, model: nn.Module, layers: Mapping[str, AdaptableLayer]) -> LoadedAdapter:
    """Load the adapter in a folder for use with a model, without merging it into the model's weights.

    Raises:
        CheckpointError: the folder holds no adapter, or one that is of an unsupported kind, belongs to another model,
            or is larger than the model.
    """
    config = AdapterConfig.read(folder / adapter_folder.CONFIG)
    if config.modules_to_save:
        names = ", ".join(sorted(config.modules_to_save)[:5])
        raise CheckpointError(
            f"the adapter in `{folder}` has modules that were trained in full (modules_to_save: {names}), which "
            "cannot share a batch with other texts",
            hint="merge it into its base model, and serve that",
        )
    # Refuse a file that is larger than the model in float32, before any of it is read.
    file = folder / adapter_folder.WEIGHTS
    numbers = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    limit = max(4 * numbers, SMALLEST_LIMIT)
    if file.is_file() and (size := file.stat().st_size) > limit:
        raise CheckpointError(
            f"`{file}` has {figures.size(size)}, more than the limit of {figures.size(limit)} for this model",
            hint="the adapter belongs to another model",
        )
    return place(adapter_folder.read(folder, model).layers, layers, f"the adapter in `{folder}`")


# -- passes ------------------------------------------------------------------------------------------------------------


class AdaptedPass:
    """Context in which a model's layers compute each row of a batch with its own adapter.

    It may be entered many times, but only by one thread at a time.

    Args:
        layers: maps names to the layers that may be adapted.
        adapters: the adapter of each row of the batch; None for rows that use no adapter.
    """

    def __init__(self, layers: Mapping[str, AdaptableLayer], adapters: Sequence[LoadedAdapter | None]) -> None:
        rows: dict[LoadedAdapter, list[int]] = {}
        for row, adapter in enumerate(adapters):
            if adapter is not None:
                rows.setdefault(adapter, []).append(row)
        names = dict.fromkeys(name for adapter in rows for name in adapter.factors)
        self._products = [
            RowProduct(
                layers[name].layer,
                [(adapter.factors[name], own) for adapter, own in rows.items() if name in adapter.factors],
                len(adapters),
            )
            for name in names
        ]
        self._before: list[tuple[dict[str, Any], Any]] = []

    def __enter__(self) -> None:
        for product in self._products:
            before = product.names.get("forward")
            product.stand_in_for(before)
            product.names["forward"] = product
            self._before.append((product.names, before))

    def __exit__(self, *_: object) -> None:
        while self._before:
            names, before = self._before.pop()
            if before is None:
                del names["forward"]
            else:
                names["forward"] = before


class RowProduct:
    """The forward pass of a layer in which some rows of the batch have adapters.

    Args:
        groups: the factors of each adapter, with the indices of the rows that use this adapter.
        batch: number of rows of the batch.
    """

    def __init__(self, layer: nn.Module, groups: Sequence[tuple[Factors, Sequence[int]]], batch: int) -> None:
        self.layer, self.groups, self.batch = layer, groups, batch
        self.names = vars(layer)
        self.outputs, self.inputs = shape_of(layer)
        self.own = skinny.product_of(layer) or layer.forward
        """The layer's forward pass, used unless other code has replaced the layer's `forward`."""
        self.base: Callable[[Tensor], Tensor] = self.own
        self.weight: Tensor | None = None
        """The layer's weight if `base` only multiplies by it, so that the native kernel can compute this product as
        well."""
        self.dtype = groups[0][0].a.dtype
        self.native = _is_native(groups[0][0].a)
        self._workspace = torch.empty(0)

    def stand_in_for(self, forward: Callable[[Tensor], Tensor] | None) -> None:
        """Use `forward` as the pass to which the adapters' products are added; None stands for the layer's own pass."""
        self.base = forward or self.own
        self.weight = self.layer.weight if isinstance(self.layer, nn.Linear) and skinny.is_product(self.base) else None

    def is_plain(self) -> bool:
        """Whether nothing but the adapters changes the layer's output, and the native kernel can compute their
        products."""
        return self.native and self.base == self.own

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] % self.batch or (x.dim() != 2 and x.shape[0] != self.batch):
            raise RuntimeError(f"an input of shape {tuple(x.shape)} does not fit a batch of {self.batch} rows")
        tokens = x.numel() // (self.batch * self.inputs)
        few = self.native and self.batch * tokens <= FEW_TOKENS
        if few and self.weight is not None and skinny.fits(x, self.weight):
            y = x.new_empty((*x.shape[:-1], self.outputs))
            self._natively(x.contiguous(), y, tokens, self.weight)
            bias = self.layer.bias
            return y.add_(bias) if isinstance(bias, Tensor) else y
        y = self.base(x).contiguous()
        if few:
            self._natively(x.contiguous(), y, tokens)
            return y
        by_row, out = x.reshape(self.batch, -1, self.inputs), y.view(self.batch, -1, self.outputs)
        for rows, a, b in self._by_rank:
            low = (by_row[rows] @ a.mT) @ b.mT
            out[rows] += low
        return y

    @cached_property
    def _by_rank(self) -> list[tuple[Any, Tensor, Tensor]]:
        """Row indices and stacked factors for each rank, where ranks are rounded up to a power of two."""
        device = self.groups[0][0].a.device
        if len(self.groups) == 1:
            factors, rows = self.groups[0]
            every = len(rows) == self.batch
            return [(slice(None) if every else torch.tensor(rows, device=device), factors.a, factors.b)]
        alike: dict[int, list[tuple[int, Factors]]] = {}
        for factors, rows in self.groups:
            rank = 1 << (len(factors.a) - 1).bit_length()
            alike.setdefault(rank, []).extend((row, factors) for row in rows)
        stacked = []
        for rank, members in alike.items():
            a, b = zip(*(factors.padded(rank) for _, factors in members), strict=True)
            rows = torch.tensor([row for row, _ in members], device=device)
            stacked.append((rows, torch.stack(a), torch.stack(b)))
        return stacked

    @cached_property
    def table(self) -> tuple[int, int, int]:
        """Arguments of the native kernel: the number of groups, and the addresses of the table of groups and of the row
        indices."""
        groups, rows = self._tables
        return len(groups), groups.data_ptr(), rows.data_ptr()

    @cached_property
    def room(self) -> int:
        """Number of floats of workspace that the native kernel needs for each token."""
        return sum(len(factors.a) * len(own) for factors, own in self.groups)

    @cached_property
    def _tables(self) -> tuple[Tensor, Tensor]:
        table, rows = [], list[int]()
        for factors, own in self.groups:
            tiles, spans = factors.tiles
            pointers = (factors.a.data_ptr(), tiles.data_ptr(), spans.data_ptr())
            table.append((*pointers, len(factors.a), len(rows), len(own)))
            rows += own
        return torch.tensor(table, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64)

    def _natively(self, x: Tensor, y: Tensor, tokens: int, weight: Tensor | None = None) -> None:
        """Write x Wᵀ plus the adapters' products to y by the native kernel; without a `weight`, add only the products
        to y."""
        if len(self._workspace) < self.room * tokens:
            self._workspace = x.new_empty(self.room * tokens, dtype=torch.float32)
        kernel()(
            int(x.dtype is torch.bfloat16),
            *self.table,
            self.batch,
            tokens,
            self.inputs,
            self.outputs,
            None if weight is None else weight.data_ptr(),
            x.data_ptr(),
            y.data_ptr(),
            self._workspace.data_ptr(),
            torch.get_num_threads(),
        )


def _is_native(factor: Tensor) -> bool:
    """Whether the native kernel computes products with factors of this kind."""
    plain = factor.device.type == "cpu" and factor.dtype in (torch.float32, torch.bfloat16)
    return plain and type(factor) is Tensor and kernel() is not None


@cache
def kernel() -> Any:
    """The C function for low-rank products by row, or None if it cannot be compiled."""
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    types = [ctypes.c_int, size, pointer, pointer, *[size] * 4, *[pointer] * 4, ctypes.c_int]
    return native.function("lowrank_rows", types, "adapters take torch's products, which are slower than native ones")
