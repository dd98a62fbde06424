"""A network that scores pictures without a reference: a backbone, what is added to it, and a head with weights."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from shoestring.core.errors import ConfigError, nearest
from shoestring.models.loading import load_model
from shoestring_recipes.quality.layers import Bottleneck, HalvingResidual, LocalContrast, LocalGlobalGate, plain

BACKBONES = {"plain": (plain, (32, 48, 80)), "residual": (HalvingResidual, (24, 40, 64))}
"""The stages of each backbone and their channels."""
ADDED = {"module": LocalGlobalGate, "plain": Bottleneck, "nothing": lambda channels: nn.Identity()}
"""What may follow a stage, given its channels."""
LAST = 2
"""Number of feature maps, from the last on, that something is added to."""


class Quality(nn.Module):
    """Scores grey pictures, higher is better.

    The stages are a list of any modules that return feature maps (N, C, H, W); `added` follows the last ones. The head
    scores each place of the last feature map, and weighs it.

    Args:
        backbone: a name in `BACKBONES`.
        added: a name in `ADDED`: what follows the last stages.
        kinds: number of outputs; 1 for scores, that of distortions to learn features by naming them.
        start: folder of a run whose stages are taken; empty for random ones.
        frozen: whether the stages stay as they are.
    """

    def __init__(
        self, backbone: str = "residual", added: str = "module", kinds: int = 1, start: str = "", frozen: bool = False
    ) -> None:
        super().__init__()
        for name, choices in ((backbone, BACKBONES), (added, ADDED)):
            if name not in choices:
                raise ConfigError(f"[model] names `{name}`", hint=nearest(name, choices))
        stage, widths = BACKBONES[backbone]
        pairs = zip((16, *widths), widths, strict=False)
        stem = nn.Sequential(LocalContrast(), nn.Conv2d(3, 16, 5, 2, 2), nn.ReLU())
        self.stages = nn.ModuleList([stem, *(stage(inputs, outputs) for inputs, outputs in pairs)])
        if start:
            taught = cast(Quality, load_model(start)[0])
            self.stages.load_state_dict(taught.stages.state_dict())
        self.stages.requires_grad_(not frozen)
        self.added = nn.ModuleList([ADDED[added](width) for width in widths[-LAST:]])
        self.score, self.weight = nn.Conv2d(widths[-1], kinds, 1), nn.Conv2d(widths[-1], 1, 1)

    def features(self, x: Tensor) -> Tensor:
        """The last feature map (N, C, H / 16, W / 16) of pictures (N, H, W)."""
        for number, stage in enumerate(self.stages, LAST - len(self.stages)):
            x = stage(x)
            x = self.added[number](x) if number >= 0 else x
        return x

    def forward(self, pictures: Tensor) -> Tensor:
        """Scores (N,), or (N, kinds), of grey pictures: uint8 (N, H, W)."""
        features = self.features(pictures)
        weights = self.weight(features).flatten(2).softmax(-1)
        return (self.score(features).flatten(2) * weights).sum(-1).squeeze(1)
