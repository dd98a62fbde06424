"""Layers of the GAN: the encoder of a style, the generator, which a label map modulates (SPADE), and the
discriminator."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

CODE = 16
"""Length of the vector that encodes a style."""
HIDDEN = 16
"""Number of hidden channels between a guide and the scale and shift computed from it."""


class StyleCode(nn.Module):
    """Encodes textures as vectors (N, CODE) by means and deviations of features, which change little if the texture is
    shifted."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        first, second = nn.Conv2d(channels, 16, 4, 2, 1), nn.Conv2d(16, 32, 4, 2, 1)
        self.features = nn.Sequential(first, nn.LeakyReLU(0.2), second, nn.LeakyReLU(0.2))
        self.code = nn.Linear(64, CODE)

    def forward(self, textures: Tensor) -> Tensor:
        features = self.features(textures).flatten(2).float()
        return self.code(torch.cat([features.mean(-1), features.std(-1)], 1))


class Modulated(nn.Module):
    """Normalises features, then scales and shifts them by the style and, place by place, by a guide (SPADE, Park et
    al., 2019).

    Args:
        guide: number of channels of the guide.
        condition: `spade`, or `concatenated`, which only normalises the features and concatenates the guide to them.
    """

    def __init__(self, width: int, guide: int, condition: str) -> None:
        super().__init__()
        self.spade = condition == "spade"
        self.norm = nn.InstanceNorm2d(width) if self.spade else nn.BatchNorm2d(width)
        if self.spade:
            self.hidden = nn.Conv2d(guide, HIDDEN, 3, padding=1)
            self.places = nn.Conv2d(HIDDEN, 2 * width, 3, padding=1)
            self.style = nn.Linear(CODE, 2 * width)
            for layer in (self.places, self.style):  # the scale starts at 0: at first the features do not count
                for parameter in layer.parameters():
                    nn.init.zeros_(parameter[:width].detach())

    def forward(self, x: Tensor, guide: Tensor, code: Tensor) -> Tensor:
        if not self.spade:
            return torch.cat([F.leaky_relu(self.norm(x), 0.2), guide], 1)
        modulation = self.places(F.relu(self.hidden(guide))) + self.style(code)[..., None, None]
        scale, shift = modulation.chunk(2, 1)
        return F.leaky_relu(self.norm(x) * scale + shift, 0.2)


class Generator(nn.Module):
    """Generates images (N, C, S, S) with values from 0 to 1 from label maps (N, labels, S, S) and textures (N, C, S,
    S).

    The generator starts from 4 × 4 places, computed from the code of the texture, and doubles the size until it is S ×
    S. At each size, the guide is the map concatenated with the texture.
    """

    def __init__(self, labels: int, channels: int, size: int, width: int, condition: str) -> None:
        super().__init__()
        doublings = (size // 4).bit_length() - 1
        widths = [width, *(max(16, width // 2 ** max(0, number - 1)) for number in range(1, doublings + 1))]
        guide = labels + channels
        beside = 0 if condition == "spade" else guide
        self.code, self.seed = StyleCode(channels), nn.Linear(CODE, 16 * width)
        self.norms = nn.ModuleList(Modulated(one, guide, condition) for one in widths)
        outputs = zip(widths, [*widths[1:], channels], strict=True)
        self.convolutions = nn.ModuleList(nn.Conv2d(one + beside, other, 3, padding=1) for one, other in outputs)

    def forward(self, maps: Tensor, textures: Tensor) -> Tensor:
        guide, code = torch.cat([maps, textures], 1), self.code(textures)
        x = self.seed(code).unflatten(1, (-1, 4, 4))
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            if norm is not self.norms[0]:
                x = F.interpolate(x, scale_factor=2)
            x = convolution(norm(x, F.adaptive_avg_pool2d(guide, x.shape[2:]), code))
        return x.float().sigmoid()


class Discriminator(nn.Module):
    """Scores images (N, C, S, S), given their label maps (N, labels, S, S) and textures of their style (N, C, S, S).

    Returns scores (N, scores) of patches of two sizes. The dot product of the image's features and the style's features
    is added to all scores (Miyato and Koyama, 2018). Also returns the means of all layers' features in quarters of the
    image, (N, means), which depend on the texture but hardly on its offset.
    """

    def __init__(self, labels: int, channels: int, width: int) -> None:
        super().__init__()

        def layer(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(spectral_norm(nn.Conv2d(inputs, outputs, 4, 2, 1)), nn.LeakyReLU(0.2))

        widths = labels + channels, width // 2, width, width
        self.layers = nn.ModuleList(layer(*pair) for pair in pairwise(widths))
        self.style = nn.Sequential(layer(channels, 16), layer(16, 32))
        self.match = spectral_norm(nn.Linear(32, width))
        self.heads = nn.ModuleList(nn.Conv2d(width, 1, 3, padding=1) for _ in range(2))  # no spectral norm

    def forward(self, pictures: Tensor, maps: Tensor, textures: Tensor) -> tuple[Tensor, Tensor]:
        features = [torch.cat([pictures, maps], 1)]
        for layer in self.layers:
            features.append(layer(features[-1]))
        _, small, large = features[1:]
        scores = torch.cat([head(x).flatten(1) for head, x in zip(self.heads, (small, large), strict=True)], 1)
        style = self.match(self.style(textures).mean((2, 3)))
        scores = scores + (small.mean((2, 3)) * style).sum(1, keepdim=True)
        means = [F.adaptive_avg_pool2d(x, 2).flatten(1) for x in features[1:]]
        return scores.float(), torch.cat(means, 1).float()
