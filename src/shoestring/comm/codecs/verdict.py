"""Whether an exchange succeeds, as a number on the device that the host never reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class ExchangeVerdict:
    """Whether all answers so far are finite and can be decoded, equal on all ranks.

    Where a driver does not wait for the device, it sets `fine` before the codec gets each answer.
    """

    fine: Tensor | None = None
    """A Boolean without dimensions; None where the driver closes the generator of an exchange that has failed."""

    def flag(self, device: torch.device) -> Tensor:
        """As a kernel reads it: (1,) in uint8."""
        if self.fine is None:
            return torch.ones(1, dtype=torch.uint8, device=device)
        return self.fine.view(1).to(torch.uint8)

    def poison(self, tensor: Tensor) -> Tensor:
        """The tensor; NaN where the exchange has failed."""
        return tensor if self.fine is None else torch.where(self.fine, tensor, torch.nan)

    def spoil(self, flat: Tensor) -> None:
        """Make a contiguous tensor NaN where the exchange has failed, by a kernel that otherwise does nothing."""
        if self.fine is not None and flat.numel():
            from shoestring.comm.codecs.spoil_kernel import BLOCK, spoil

            spoil[(-(-flat.numel() // BLOCK),)](flat, self.flag(flat.device), flat.numel())


ALWAYS = ExchangeVerdict()
"""Of a driver that closes generators; nobody sets it."""
