"""Measures how much each sublayer changes the residual stream from x to y: cos(x, y) and ‖y‖ / ‖x‖.

A sublayer with nearly parallel x and y can be skipped at little loss (He et al., AdaSkip, AAAI 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.models.blocks import repeated
from shoestring.models.sublayers import read, sublayers


@dataclass(frozen=True)
class Change:
    """The change that a sublayer or a block makes to the residual stream, averaged over tokens."""

    similarity: float
    """Mean of cos(x, y), where x and y are the residual stream before and after the sublayer or block."""
    ratio: float
    """Ratio of the norms ‖y‖ / ‖x‖, each taken over all tokens together."""


class Observer:
    """A context manager that observes how every pass of a model changes the residual stream; its running sums stay on
    the device.

    Args:
        leave_out: names of sublayers that are not observed, because they are skipped.
    """

    def __init__(self, model: nn.Module, *, leave_out: Collection[str] = ()) -> None:
        self.model = model
        self.names = [name for name in sublayers(model) if name not in leave_out]
        self.real: Tensor | None = None
        """Mask (B, T) of the tokens of a pass that count; None counts all tokens."""
        self.blocks = repeated(model)
        device = next(model.parameters()).device
        # Columns: the sums of cos(x, y), of x² and of y², and the number of tokens. Rows: one for each sublayer, then
        # one for each block.
        self._sums = torch.zeros(len(self.names) + len(self.blocks), 4, device=device)
        self._handles: list[Any] = []
        self._open: tuple[int, Tensor] | None = None

    def __enter__(self) -> Observer:
        for name, sublayer in sublayers(self.model).items():
            index = self.names.index(name) if name in self.names else None
            entry = self.model.get_submodule(sublayer.entry)
            self._handles.append(entry.register_forward_pre_hook(self._reader(index), with_kwargs=True))
        for index, block in enumerate(self.blocks, len(self.names)):
            self._handles.append(block.register_forward_hook(self._end(index), with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open = None

    def changes(self) -> Mapping[str, Change]:
        """The change that each sublayer makes, by the sublayer's name; empty before the first token. The call
        synchronizes with the device once."""
        return dict(zip(self.names, self._means(), strict=False))

    def block_changes(self) -> list[Change]:
        """The change that each block makes; empty before the first token."""
        return self._means()[len(self.names) :]

    def _means(self) -> list[Change]:
        rows = self._sums.double().cpu().tolist()
        return [Change(cosine / n, (after / before) ** 0.5) for cosine, before, after, n in rows if n]

    def _reader(self, index: int | None) -> Callable[..., None]:
        """Make a hook that records the residual stream before a sublayer, which is also the stream after the previous
        sublayer."""

        def hook(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            x = read(arguments, named)
            self._close(x)
            self._open = None if index is None else (index, x)

        return hook

    def _end(self, index: int) -> Callable[..., None]:
        """Make a hook that records the output of a block, which is also the residual stream after the block's last
        sublayer."""

        def hook(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], returned: Any) -> None:
            y = returned[0] if isinstance(returned, tuple) else returned
            self._close(y)
            self._add(index, read(arguments, named), y)

        return hook

    def _close(self, y: Tensor) -> None:
        """Record `y`, the residual stream after the sublayer that ran last."""
        if self._open is not None:
            (index, x), self._open = self._open, None
            self._add(index, x, y)

    @torch.no_grad()
    def _add(self, index: int, x: Tensor, y: Tensor) -> None:
        """Add the tokens of x and y, (B, T, C), to the sums of row `index`."""
        x, y = x.float(), y.float()
        rows = (F.cosine_similarity(x, y, dim=-1), x.square().sum(-1), y.square().sum(-1), torch.ones_like(x[..., 0]))
        new = torch.stack(rows, -1)  # shape (B, T, 4)
        self._sums[index] += (new if self.real is None else new * self.real[..., None]).sum((0, 1))
