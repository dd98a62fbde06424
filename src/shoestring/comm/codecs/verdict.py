"""Tells codecs whether an exchange succeeds, by a flag that stays on the device and that the host never reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class ExchangeVerdict:
    """Whether all results of the exchange's collectives so far are finite and can be decoded; equal on all ranks.

    A caller that does not wait for the device sets `fine` before it sends the results of a stage to the codec's
    generator.
    """

    fine: Tensor | None = None
    """A 0-d bool tensor; None if the caller closes the generator of a failed exchange instead."""

    def flag(self, device: torch.device) -> Tensor:
        """The verdict as kernels read it: 1 for success, 0 for failure; (1,) in uint8."""
        if self.fine is None:
            return torch.ones(1, dtype=torch.uint8, device=device)
        return self.fine.view(1).to(torch.uint8)

    def poison(self, tensor: Tensor) -> Tensor:
        """Return the tensor, with all entries NaN if the exchange has failed."""
        return tensor if self.fine is None else torch.where(self.fine, tensor, torch.nan)

    def spoil(self, flat: Tensor) -> None:
        """Fill a contiguous tensor with NaN if the exchange has failed; the kernel reads the flag, so the host does not
        wait."""
        if self.fine is not None and flat.numel():
            from shoestring.comm.codecs.spoil_kernel import BLOCK, spoil

            spoil[(-(-flat.numel() // BLOCK),)](flat, self.flag(flat.device), flat.numel())


ALWAYS = ExchangeVerdict()
"""The verdict for callers that close the generator of a failed exchange: always success, never changed."""
