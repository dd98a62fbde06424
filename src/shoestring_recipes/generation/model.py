"""A generator and a discriminator as one model, which generates images from label maps in the style of a swatch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from shoestring.core.errors import ConfigError, nearest
from shoestring_recipes.generation.layers import Discriminator, Generator
from shoestring_recipes.generation.styles import windows

CONDITIONS = ("spade", "concatenated")
FAR = 48
"""Minimum difference, in any channel, by which a colour counts as different from a label's colour."""


class StyledGan(nn.Module):
    """A generator and a discriminator, which one optimizer updates in the same step.

    Args:
        colors: colour of each label in a map, in hexadecimal: one byte for maps with one channel, three bytes for
            coloured maps.
        channels: 1 for grey images, 3 for coloured images.
        size: height and width of images, a power of two.
        condition: how a map conditions the generator: `spade`, or `concatenated` to the features, as in a plain
            conditional GAN.
        width: number of channels of the generator at its first size, 4 × 4.
    """

    def __init__(
        self,
        colors: Sequence[str] = ("00", "55", "aa", "ff"),
        channels: int = 1,
        size: int = 32,
        condition: str = "spade",
        width: int = 48,
    ) -> None:
        super().__init__()
        if condition not in CONDITIONS:
            raise ConfigError(f"model.condition is `{condition}`", hint=nearest(condition, CONDITIONS))
        if size < 8 or size & (size - 1):
            raise ConfigError(f"model.size is {size}", hint="use a power of two, at least 8")
        try:
            table = torch.tensor([list(bytes.fromhex(color)) for color in colors], dtype=torch.float32)
        except ValueError as error:
            raise ConfigError(f"model.colors is {list(colors)}", hint='write colours as "00" or "0a1b2c"') from error
        if not table.numel():
            raise ConfigError("model.colors is empty", hint="name the colour of each label in a map")
        self.size = size
        self.colors: Tensor
        self.register_buffer("colors", table)
        self.generator = Generator(len(colors), channels, size, width, condition)
        self.discriminator = Discriminator(len(colors), channels, 64)

    def labels(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Encode maps one-hot by the label with the nearest colour, (N, labels, S, S); also return whether a map has a
        colour far from all labels, (N,).

        Args:
            maps: uint8 (N, C, H, W).
        """
        places = F.interpolate(maps.float(), (self.size, self.size), mode="nearest-exact")
        # On a CPU, `min` takes a ninth of the time of `argmin`
        distance, nearest_label = (places[:, None] - self.colors[..., None, None]).abs().amax(2).min(1)
        labels = F.one_hot(nearest_label, len(self.colors)).movedim(-1, 1)
        return labels.to(self.generator.seed.weight.dtype), distance.amax((1, 2)) >= FAR

    def forward(
        self, maps: Tensor, swatches: Tensor, corners: Tensor, images: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Generate images from maps in the styles of swatches; given real images, also return the terms of both
        networks' losses.

        Args:
            maps: uint8 (N, C, H, W). swatches: uint8 (N, C, 2 S, 2 S); swatches of another size are resized.
            corners: upper left corners of two windows of each swatch, (N, 2, 2), one for the generator and one for the
                discriminator. The row and column of a corner are fractions, from 0 to 1, of half the swatch's side.
            images: real pictures, uint8 (N, C, S, S).

        Returns:
            `made` (N, C, S, S) are the generated images; `unknown` (N,) tells whether a map has a colour that no label
            has. Given images, there are also the scores `real`, `fake` and `fooled`, (N, scores), and two mean
            differences of `made` and the images, (N,): `means`, the difference of the means of the discriminator's
            features (Salimans et al., 2016), and `light`, the difference of the brightness averaged over 8 × 8 pixels.
        """
        labels, unknown = self.labels(maps)
        if swatches.shape[-1] != 2 * self.size:
            swatches = F.interpolate(swatches.float(), (2 * self.size,) * 2, mode="bilinear", antialias=True)
        pixels = (corners * self.size).round().long().unbind(1)
        textures = [windows(swatches, one, self.size).to(labels.dtype) / 255 for one in pixels]
        made = self.generator(labels, textures[0])
        if images is None:
            return {"made": made, "unknown": unknown}
        real = images.to(labels.dtype) / 255
        both = torch.cat([real, made.detach()])
        scores, means = self.discriminator(both, *(torch.cat([one, one]) for one in (labels, textures[1])))
        still = {name: weight.detach() for name, weight in self.discriminator.named_parameters()}
        fooled, made_means = functional_call(self.discriminator, still, (made, labels, textures[1]))
        return {
            "made": made,
            "unknown": unknown,
            "real": scores[: len(real)],
            "fake": scores[len(real) :],
            "fooled": fooled,
            "means": (made_means - means[: len(real)].detach()).abs().mean(1),
            "light": F.avg_pool2d(made - real, 8, 4).abs().mean((1, 2, 3)),
        }
