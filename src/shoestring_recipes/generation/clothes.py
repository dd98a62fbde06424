"""Fashion-MNIST's images drawn in styles, with the maps of their edges."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.data.images import Images
from shoestring_recipes.generation.styles import SIDE, STYLES, dressed, edge_map, swatches, windows


class Clothes(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A data set of Fashion-MNIST's images, drawn in the styles in turn.

    A sample has `inputs`, the map of the image's edges; `swatch`, an image of the style's texture, uint8 (1, 2 SIDE, 2
    SIDE); `image` and `again`, the image with textures from two places of the swatch, uint8 (1, SIDE, SIDE); `targets`,
    the kind of clothes; and `style`, the index of the style in `STYLES`.

    Args:
        styles: names in `STYLES`.
        seed: seed of the textures.
    """

    draws = False
    styles = STYLES

    def __init__(self, images: Images, styles: Sequence[str], seed: int) -> None:
        self.images, self.turns, self.seed = images, [STYLES.index(style) for style in styles], seed
        self.fingerprint = f"{images.fingerprint} {styles} {seed}"

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        columns = self.columns(indices)
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def columns(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the samples with the given indices as a batch."""
        draws = [np.random.default_rng([self.seed, index]) for index in indices]
        kinds = [self.turns[index % len(self.turns)] for index in indices]
        corners = torch.from_numpy(np.array([one.integers(SIDE + 1, size=(2, 2)) for one in draws]).reshape(-1, 2, 2))
        swatch = torch.from_numpy(swatches(kinds, draws))[:, None]
        samples = [self.images[index] for index in indices]
        margin = (SIDE - self.images.images.shape[-1]) // 2
        plain = F.pad(torch.stack([sample["inputs"] for sample in samples]), [margin] * 4).float() / 255
        image, again = (_bytes(dressed(plain, windows(swatch, one, SIDE))) for one in corners.unbind(1))
        return {
            "inputs": edge_map(plain),
            "image": image,
            "again": again,
            "swatch": _bytes(swatch),
            "targets": torch.stack([sample["targets"] for sample in samples]),
            "style": torch.tensor(kinds),
        }


def _bytes(pictures: Tensor) -> Tensor:
    return (255 * pictures).round().to(torch.uint8)
