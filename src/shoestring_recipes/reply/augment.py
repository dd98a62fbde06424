"""Random augmentation of clips' frames."""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring_recipes.reply.clips import QUARTERS


def varied(frames: Tensor) -> Tensor:
    """Change frames (N, QUARTERS, 3, S, S) at random: all are shifted, colours are brighter or darker, a quarter of the
    frames is grey, and there is some noise. Otherwise the network memorises the clips."""
    shifts = torch.randint(-3, 4, (2,)).tolist()
    draws = torch.rand(2, len(frames), QUARTERS, 3, device=frames.device, dtype=frames.dtype)[..., None, None]
    colours, shown = 0.8 + 0.4 * draws[0, :, :1], draws[1, :, :, :1] < 0.75
    return torch.roll(frames, shifts, (-2, -1)) * colours * shown + 0.3 * torch.randn_like(frames)
