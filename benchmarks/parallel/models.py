"""Models and data of the pairs in `benchmarks.parallel.pairs`; run files name these functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Samples = list[dict[str, Tensor]]

_HELD_OUT = 8
_STEM, _GROUPS, _LAYERS_OUTSIDE = 16, 3, 4
_BOTTLENECK_STEM = 64


class WideBlock(nn.Module):
    """A residual block of a wide ResNet with pre-activation: (B, C, H, W) to (B, `width`, H / `stride`, …)."""

    def __init__(self, inputs: int, width: int, stride: int, norm_groups: int) -> None:
        super().__init__()
        self.first_norm = nn.GroupNorm(norm_groups, inputs)
        self.first = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(norm_groups, width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inputs, width, 1, stride, bias=False) if inputs != width else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.first_norm(x))
        skipped = x if self.shortcut is None else self.shortcut(active)
        return skipped + self.second(F.relu(self.second_norm(self.first(active))))


class WideResNet(nn.Module):
    """A wide ResNet for small images (Zagoruyko and Komodakis, 2016), with group norms in place of batch norms.

    The original's batch norms would make the result depend on how a batch is divided among ranks and micro-batches.
    """

    def __init__(self, depth: int, widen: int, classes: int, norm_groups: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, _STEM, 3, padding=1, bias=False)
        blocks, inputs = list[nn.Module](), _STEM
        for group in range(_GROUPS):
            width = _STEM * widen * 2**group
            for place in range((depth - _LAYERS_OUTSIDE) // (2 * _GROUPS)):
                blocks.append(WideBlock(inputs, width, 2 if group and not place else 1, norm_groups))
                inputs = width
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.GroupNorm(norm_groups, inputs)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(F.relu(self.norm(x)).mean((-2, -1)))


def wide_resnet(depth: int = 16, widen: int = 6, classes: int = 10, norm_groups: int = 8) -> WideResNet:
    """A wide ResNet of `depth` convolutions, 6 n + 4 for n blocks in each of the three groups."""
    return WideResNet(depth, widen, classes, norm_groups)


class BottleneckBlock(nn.Module):
    """A residual block with a bottleneck: (B, C, H, W) to (B, `outputs`, H / `stride`, W / `stride`)."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, norm_groups: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, width, 1, bias=False)
        self.first_norm = nn.GroupNorm(norm_groups, width)
        self.second = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(norm_groups, width)
        self.third = nn.Conv2d(width, outputs, 1, bias=False)
        self.third_norm = nn.GroupNorm(norm_groups, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.GroupNorm(norm_groups, outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.first_norm(self.first(x)))
        inner = F.relu(self.second_norm(self.second(inner)))
        return F.relu(self.shortcut(x) + self.third_norm(self.third(inner)))


class BottleneckResNet(nn.Module):
    """A ResNet of bottleneck blocks (He et al., 2015; Zagoruyko and Komodakis, 2016), with group norms.

    The original's batch norms would make the result depend on how a batch is divided among ranks and micro-batches.
    """

    def __init__(self, counts: Sequence[int], widen: int, classes: int, norm_groups: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, _BOTTLENECK_STEM, 7, 2, padding=3, bias=False)
        self.norm = nn.GroupNorm(norm_groups, _BOTTLENECK_STEM)
        blocks, inputs = list[nn.Module](), _BOTTLENECK_STEM
        for group, count in enumerate(counts):
            width = _BOTTLENECK_STEM * 2**group
            for place in range(count):
                stride = 2 if group and not place else 1
                blocks.append(BottleneckBlock(inputs, widen * width, 4 * width, stride, norm_groups))
                inputs = 4 * width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, padding=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((-2, -1)))


def resnet50(widen: int = 1, classes: int = 1000, norm_groups: int = 32) -> BottleneckResNet:
    """ResNet-50; `widen` multiplies the width of the 3x3 convolutions, and 2 gives Wide ResNet-50-2."""
    return BottleneckResNet((3, 4, 6, 3), widen, classes, norm_groups)


class RowsClassifier(nn.Module):
    """A classifier of sequences of entries of a large table, such as items that a customer has bought.

    Rows are narrow, and are projected to the width of the encoder, so that nearly all weights are those of the table.
    """

    def __init__(self, rows: int, row_width: int, width: int, layers: int, heads: int, classes: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, row_width)
        self.project = nn.Linear(row_width, width)
        settings: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, **settings) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, entries: Tensor) -> Tensor:
        x = self.project(self.table(entries))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def rows_classifier(
    rows: int = 250_000, row_width: int = 16, width: int = 128, layers: int = 4, heads: int = 4, classes: int = 100
) -> RowsClassifier:
    """A classifier with a table of 250,000 rows."""
    return RowsClassifier(rows, row_width, width, layers, heads, classes)


class MixerBlock(nn.Module):
    """A block of an MLP mixer: layers over the patches of each feature, then over the features of each patch."""

    def __init__(self, patches: int, width: int, token_hidden: int, channel_hidden: int) -> None:
        super().__init__()
        self.token_norm = nn.LayerNorm(width)
        self.token_up = nn.Linear(patches, token_hidden)
        self.token_down = nn.Linear(token_hidden, patches)
        self.channel_norm = nn.LayerNorm(width)
        self.channel_up = nn.Linear(width, channel_hidden)
        self.channel_down = nn.Linear(channel_hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        features = self.token_norm(x).transpose(1, 2)  # (B, width, patches)
        x = x + self.token_down(F.gelu(self.token_up(features))).transpose(1, 2)
        return x + self.channel_down(F.gelu(self.channel_up(self.channel_norm(x))))


class Mixer(nn.Module):
    """An MLP mixer (Tolstikhin et al., 2021), which mixes the patches of an image without attention."""

    def __init__(
        self, size: int, patch: int, width: int, layers: int, token_hidden: int, channel_hidden: int, classes: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        count = (size // patch) ** 2
        self.blocks = nn.ModuleList(MixerBlock(count, width, token_hidden, channel_hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)  # (B, patches, width)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def mixer(
    size: int = 64,
    patch: int = 8,
    width: int = 256,
    layers: int = 8,
    token_hidden: int = 128,
    channel_hidden: int = 1024,
    classes: int = 100,
) -> Mixer:
    """An MLP mixer for small images."""
    return Mixer(size, patch, width, layers, token_hidden, channel_hidden, classes)


class HugeLayer(nn.Module):
    """A net in the manner of AlexNet: the layer behind its few convolutions has nearly all weights, and little work.

    It has no repeated blocks that could be cut into stages.
    """

    def __init__(self, size: int, channels: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.third = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1)
        self.huge = nn.Linear(2 * channels * (size // 8) ** 2, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(images)), 2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        x = F.max_pool2d(F.relu(self.third(x)), 2)
        return self.head(F.relu(self.huge(x.flatten(1))))


def huge_layer(size: int = 64, channels: int = 64, hidden: int = 512, classes: int = 100) -> HugeLayer:
    """Three convolutions before a huge layer."""
    return HugeLayer(size, channels, hidden, classes)


def vit(
    size: int = 64, patch: int = 8, width: int = 192, layers: int = 6, heads: int = 4, classes: int = 100
) -> nn.Module:
    """The vision transformer of the library transformers, with random weights."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=size,
        patch_size=patch,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    config.num_labels = classes
    return ViTForImageClassification(config)


def token_data(samples: int = 136, length: int = 64, vocabulary: int = 2048) -> tuple[Samples, Samples]:
    """Texts of random tokens; the target of each token is the next one."""
    texts = torch.randint(vocabulary, (samples, length + 1), generator=torch.Generator().manual_seed(0))
    return _divided([{"inputs": text[:-1], "targets": text[1:]} for text in texts])


def row_data(samples: int = 136, length: int = 32, rows: int = 250_000, classes: int = 100) -> tuple[Samples, Samples]:
    """Sequences of random rows of a table, each with a class."""
    draw = torch.Generator().manual_seed(0)
    entries = torch.randint(rows, (samples, length), generator=draw)
    return _with_classes(entries, classes, draw)


def image_data(samples: int = 136, size: int = 32, classes: int = 10) -> tuple[Samples, Samples]:
    """Images of noise, each with a class."""
    draw = torch.Generator().manual_seed(0)
    return _with_classes(torch.randn(samples, 3, size, size, generator=draw), classes, draw)


def _with_classes(inputs: Tensor, classes: int, draw: torch.Generator) -> tuple[Samples, Samples]:
    targets = torch.randint(classes, (len(inputs),), generator=draw)
    return _divided([{"inputs": one, "targets": target} for one, target in zip(inputs, targets, strict=True)])


def _divided(samples: Samples) -> tuple[Samples, Samples]:
    """Samples to train on, and held-out samples."""
    return samples[_HELD_OUT:], samples[:_HELD_OUT]
