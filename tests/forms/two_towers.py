"""A task whose samples have two named inputs of different lengths and no targets: two encoders, learnt by contrast."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import shoestring as ss

WORDS = 50


class Pairs(Dataset):
    """Pairs of texts of which the second is a function of the first; lengths differ from sample to sample."""

    def __init__(self, samples: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(4, 9, (samples,), generator=draw).tolist()
        self.texts = [torch.randint(1, WORDS, (length,), generator=draw) for length in self.lengths]
        self.fingerprint = f"{samples} {seed}"

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"text": self.texts[index], "clip": (self.texts[index] * 7 + 3) % WORDS}


def pairs() -> tuple[Pairs, Pairs]:
    return Pairs(64, 0), Pairs(11, 1)


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: pad_sequence([sample[name] for sample in samples], True, WORDS) for name in ("text", "clip")}


class Towers(nn.Module):
    """Two bags of embeddings, each followed by a layer that can be pruned."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(WORDS + 1, 32, padding_idx=WORDS) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor([0.07]).log())

    def forward(self, text: Tensor, clip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = [
            F.normalize(layer(bag(ids)), dim=-1)
            for bag, layer, ids in zip(self.bags, self.layers, (text, clip), strict=True)
        ]
        return rows[0], rows[1], self.temperature.exp().squeeze()


def towers() -> Towers:
    return Towers()


def forward(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return model(batch["text"], batch["clip"])


def distance(output: tuple[Tensor, Tensor, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """A loss of each pair alone."""
    text, clip, temperature = output
    return ((text - clip).square().sum(-1) / temperature).sum(), len(text)


@ss.whole_batch
def matched(output: tuple[Tensor, Tensor, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """A loss in which the other pairs of the whole batch are negatives."""
    text, clip, temperature = output
    own = torch.arange(len(text))
    return F.cross_entropy(text @ clip.T / temperature, own, reduction="sum"), len(text)


RUN = {
    "model": f"{__name__}:towers",
    "data": f"{__name__}:pairs",
    "forward": f"{__name__}:forward",
    "collate": f"{__name__}:padded",
    "loss": f"{__name__}:distance",
    "steps": 4,
    "batch": 8,
}
"""The table [run]."""
