"""A network that scores images without a reference: a backbone, modules added to it, and a head that weights places."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from shoestring.core.errors import ConfigError, nearest
from shoestring.models.loading import load_model
from shoestring_recipes.quality.layers import Bottleneck, HalvingResidual, LocalContrast, LocalGlobalGate, plain

BACKBONES = {"plain": (plain, (32, 48, 80)), "residual": (HalvingResidual, (24, 40, 64))}
"""Maps a backbone's name to the function that builds a stage, and the stages' numbers of channels."""
ADDED = {"module": LocalGlobalGate, "plain": Bottleneck, "nothing": lambda channels: nn.Identity()}
"""Maps names to functions that build the module after a stage, given the stage's number of channels."""
LAST = 2
"""Number of stages, counted from the end, that are followed by an added module."""


class Quality(nn.Module):
    """Scores the quality of grey images; a higher score is better.

    The stages may be any modules that return feature maps (N, C, H, W); the modules `added` follow the last stages. The
    head computes a score and a weight for each place of the last feature map.

    Args:
        backbone: a name in `BACKBONES`.
        added: a name in `ADDED`, for the modules that follow the last stages.
        kinds: number of outputs: 1 for scores; to train features by classification, the number of kinds of distortion.
        start: folder of a run from which the stages' weights are loaded; empty for random weights.
        frozen: whether the stages are not trained.
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
        """Compute the last feature map, (N, C, H / 16, W / 16), of images (N, H, W)."""
        for number, stage in enumerate(self.stages, LAST - len(self.stages)):
            x = stage(x)
            x = self.added[number](x) if number >= 0 else x
        return x

    def forward(self, pictures: Tensor) -> Tensor:
        """Compute scores, (N,) or (N, kinds), of grey images, uint8 (N, H, W)."""
        features = self.features(pictures)
        weights = self.weight(features).flatten(2).softmax(-1)
        return (self.score(features).flatten(2) * weights).sum(-1).squeeze(1)
