"""The key/value cache of decoding.

Each row of a batch has its own length. New tokens are padded on the right: a query attends to the positions up to its
own, so entries that padding writes beyond a row's length are never attended to and are overwritten later. Lowering a
length therefore removes tokens (a rejected draft) at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoestring.core.errors import ConfigError

if TYPE_CHECKING:
    from shoestring.models.adapters_by_row import LoadedAdapter


@dataclass(frozen=True)
class CachePlace:
    """The places in a cache where a forward pass stores its tokens: T tokens in each of B rows."""

    rows: slice
    """The B rows of the cache."""
    positions: Tensor
    """Positions of the tokens, int64: (1, T) if all rows have the same positions, else (B, T)."""
    end: int
    """Number S of cache positions that are attended to, counted from the first position."""
    aligned: bool
    """Whether all rows have the same positions and no padding."""

    def mask(self, window: int | None = None) -> Tensor:
        """Boolean attention mask (B or 1, 1, T, S): each token attends to the positions up to its own.

        Args:
            window: maximum number of positions that a token attends to, including its own (sliding-window attention);
                None for no limit.
        """
        seen, own = torch.arange(self.end, device=self.positions.device), self.positions[:, None, :, None]
        mask = seen <= own
        return mask if window is None else mask & (seen > own - window)


class KVCache:
    """Keys and values of `rows` sequences of at most `length` tokens; a layer's memory is allocated on first use.

    `lengths` holds the number of valid tokens in each row; lowering a row's number removes its last tokens.
    """

    def __init__(self, rows: int, length: int) -> None:
        self.rows, self.length = rows, length
        self.lengths = [0] * rows
        self.adapters: list[LoadedAdapter | None] = [None] * rows
        """Low-rank adapter that is used for each row; None for rows without an adapter."""
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def place(
        self, count: int, device: torch.device, *, rows: slice | None = None, counts: Sequence[int] | None = None
    ) -> CachePlace:
        """Choose the places where the next `count` tokens of each row are stored.

        Args:
            rows: rows of the cache; defaults to all.
            counts: for each of these rows, how many of the `count` tokens are not padding; defaults to all of them.

        Raises:
            ConfigError: the cache has no room for these tokens.
        """
        rows = slice(0, self.rows) if rows is None else rows
        starts = self.lengths[rows]
        # A row without tokens in this pass has no queries, so its length does not affect S.
        ends = [start + n for start, n in zip(starts, counts, strict=True) if n] if counts else [max(starts) + count]
        if (end := max(ends, default=1)) > self.length:
            raise ConfigError(
                f"{end} tokens exceed the {self.length} that the cache has room for", hint="shorten the sequence"
            )
        aligned = all(start == starts[0] for start in starts) and (counts is None or min(counts) == count)
        first = torch.tensor(starts[:1] if aligned else starts, device=device)
        # Padding of a full row goes to the extra position `length`, which is never attended to.
        positions = (first[:, None] + torch.arange(count, device=device)).clamp_(max=self.length)
        return CachePlace(rows, positions, end, aligned)

    def allocate(
        self, layer: int, heads: int, width: int, dtype: torch.dtype, device: torch.device, width_of_values: int = 0
    ) -> None:
        """Allocate the keys and values (rows, heads, length + 1, width) of a layer if this has not been done yet."""
        if layer not in self.layers:
            with torch.inference_mode(False):  # `copy` could not change tensors that were made in inference mode
                keys, values = (
                    torch.zeros(self.rows, heads, self.length + 1, own, dtype=dtype, device=device)
                    for own in (width, width_of_values or width)
                )
            self.layers[layer] = (keys, values)

    def append(self, layer: int, keys: Tensor, values: Tensor, place: CachePlace) -> tuple[Tensor, Tensor]:
        """Store the `keys` and `values` (B, K, T, D) of new tokens; returns the keys and values of all S positions in
        these rows."""
        self.allocate(layer, keys.shape[1], keys.shape[3], keys.dtype, keys.device, values.shape[3])
        stored = tuple(tensor[place.rows] for tensor in self.layers[layer])
        for held, new in zip(stored, (keys, values), strict=True):
            if place.aligned:
                held[:, :, place.end - new.shape[2] : place.end] = new
            else:
                row = torch.arange(len(held), device=held.device)[:, None]
                held[row, :, place.positions] = new.transpose(1, 2)
        return stored[0][:, :, : place.end], stored[1][:, :, : place.end]

    def lengthen(self, count: int, place: CachePlace, counts: Sequence[int] | None = None) -> None:
        """Add the tokens of a pass to `lengths`; called after every layer has appended its keys and values."""
        for row, more in zip(range(self.rows)[place.rows], counts or [count] * self.rows, strict=False):
            self.lengths[row] += more

    def copy(self, source: int, target: int, length: int) -> None:
        """Replace row `target` by the first `length` tokens of row `source`."""
        for pair in self.layers.values():
            for held in pair:
                held[target, :, :length] = held[source, :, :length]
        self.lengths[target] = length

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        return sum(tensor.nbytes for pair in self.layers.values() for tensor in pair)
