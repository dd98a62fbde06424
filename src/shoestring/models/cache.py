"""Keys and values of the tokens that a model has read, so that each new token is read once.

Rows of a batch have lengths of their own. New tokens are padded on the right: a query sees the positions up to its own,
so what padding writes behind a row's length is never seen and is later overwritten. Lowering a length therefore forgets
tokens (a rejected draft), at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.core.errors import ConfigError


@dataclass(frozen=True)
class CachePlace:
    """Where the tokens of a pass, T for each of B rows, go in a cache."""

    rows: slice
    """The B rows of the cache."""
    positions: Tensor
    """Of the tokens, int64: (1, T) where all rows have the same, (B, T) otherwise."""
    end: int
    """Positions of the cache that are attended to (S)."""
    aligned: bool
    """All rows have the same positions, and no padding."""

    def mask(self, window: int | None = None) -> Tensor:
        """Which of the S positions each token sees, (B or 1, 1, T, S): those up to its own.

        Args:
            window: only so many of them, the token's own included (sliding-window attention).
        """
        seen, own = torch.arange(self.end, device=self.positions.device), self.positions[:, None, :, None]
        mask = seen <= own
        return mask if window is None else mask & (seen > own - window)


class KVCache:
    """For `rows` sequences of at most `length` tokens. A layer's memory is taken when it is first written to.

    `lengths` are the tokens that are valid in each row; lower one to forget the last tokens.
    """

    def __init__(self, rows: int, length: int) -> None:
        self.rows, self.length = rows, length
        self.lengths = [0] * rows
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def place(
        self, count: int, device: torch.device, *, rows: slice | None = None, counts: Sequence[int] | None = None
    ) -> CachePlace:
        """Where the next `count` tokens of each row go.

        Args:
            rows: of the cache; default all.
            counts: how many of the tokens of each of these rows are real, the rest being padding; default all.

        Raises:
            ConfigError: the cache has no room for them.
        """
        rows = slice(0, self.rows) if rows is None else rows
        starts = self.lengths[rows]
        # A row without tokens in this pass is not attended to at all, however long it is.
        ends = [start + n for start, n in zip(starts, counts, strict=True) if n] if counts else [max(starts) + count]
        if (end := max(ends, default=1)) > self.length:
            raise ConfigError(
                f"{end} tokens exceed the {self.length} that the cache has room for", hint="shorten the sequence"
            )
        aligned = all(start == starts[0] for start in starts) and (counts is None or min(counts) == count)
        first = torch.tensor(starts[:1] if aligned else starts, device=device)
        # Padding of a full row goes to one more position, which is never attended to.
        positions = (first[:, None] + torch.arange(count, device=device)).clamp_(max=self.length)
        return CachePlace(rows, positions, end, aligned)

    def append(self, layer: int, keys: Tensor, values: Tensor, place: CachePlace) -> tuple[Tensor, Tensor]:
        """Store the (B, K, T, D) `keys` and `values` of new tokens; return those of all S positions of their rows."""
        if layer not in self.layers:
            shape = (self.rows, keys.shape[1], self.length + 1)
            with torch.inference_mode(False):  # so that rows can be copied outside a pass
                first, second = (
                    torch.zeros(*shape, new.shape[3], dtype=new.dtype, device=new.device) for new in (keys, values)
                )
            self.layers[layer] = (first, second)
        stored = tuple(tensor[place.rows] for tensor in self.layers[layer])
        for held, new in zip(stored, (keys, values), strict=True):
            if place.aligned:
                held[:, :, place.end - new.shape[2] : place.end] = new
            else:
                row = torch.arange(len(held), device=held.device)[:, None]
                held[row, :, place.positions] = new.transpose(1, 2)
        return stored[0][:, :, : place.end], stored[1][:, :, : place.end]

    def lengthen(self, count: int, place: CachePlace, counts: Sequence[int] | None = None) -> None:
        """Count the tokens of a pass, which every layer has appended, as read."""
        for row, more in zip(range(self.rows)[place.rows], counts or [count] * self.rows, strict=False):
            self.lengths[row] += more

    def copy(self, source: int, target: int, length: int) -> None:
        """Have row `target` begin with the first `length` tokens of row `source`, and end there."""
        for pair in self.layers.values():
            for held in pair:
                held[target, :, :length] = held[source, :, :length]
        self.lengths[target] = length

    @property
    def nbytes(self) -> int:
        """The memory taken so far."""
        return sum(tensor.nbytes for pair in self.layers.values() for tensor in pair)
