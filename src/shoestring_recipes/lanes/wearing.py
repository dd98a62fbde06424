"""Degrades images during training: removes paint along the detected lanes, changes the light, and adds noise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def spoilt(images: Tensor, lanes: Tensor) -> Tensor:
    """Degrade each image of a batch at random.

    Args:
        images: the images, uint8 (N, 1, H, W).
        lanes: columns of the lanes, (N, lanes, H); NaN in rows without a lane.

    Returns:
        The degraded images, float32 (N, 1, H, W), with grey levels from 0 to 255.
    """
    worn = images.float() + _wear(images.float(), lanes)
    count, device = len(images), images.device
    gain, dim, noise = torch.rand(3, count, 1, 1, 1, device=device)
    light = F.interpolate(torch.randn(count, 1, 3, 5, device=device), worn.shape[2:], mode="bicubic")
    lit = worn * (0.25 + 0.85 * gain) + 25 * dim * light + 60 * (1 - gain)
    return (lit + 12 * noise * torch.randn_like(worn)).clamp(0, 255)


def _wear(images: Tensor, lanes: Tensor) -> Tensor:
    """Return the change to the images that makes runs of rows of each lane look like the road beside the lane."""
    count, number, height = lanes.shape
    device, width = images.device, images.shape[-1]
    surface = F.avg_pool1d(torch.randn(count, number, height, device=device), 9, 1, 4)
    order = surface.argsort(-1).argsort(-1) / height  # rank of each row's random value, from 0 to 1
    gone = order < torch.rand(count, number, 1, device=device)
    t = torch.linspace(-0.7, 1, height, device=device).clamp(min=0)
    reach = 3 + 4 * t  # a little more than half the width of paint
    columns = torch.arange(width, device=device)
    near = (columns - lanes[..., None]).abs() < reach[:, None]  # (N, lanes, H, W); False for NaN
    covered = (near & gone[..., None]).any(1, keepdim=True)
    step = (2.5 * reach[:, None]).round().long()
    aside = torch.where(columns + step < width, columns + step, columns - step)
    road = images.gather(-1, aside.expand(count, 1, height, width))
    share = 0.8 + 0.2 * torch.rand(count, 1, 1, 1, device=device)
    return covered * share * (road - images)
