"""What is trained: the model, the text, and the steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shoestring.data import Data
from shoestring.data.corpus import prepare_source
from shoestring.data.loader import Loader
from shoestring.data.tokens import TokenDataset
from shoestring.models.gpt import GPT, GPTConfig

RANKS = 4


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One training problem, equal for all methods; the model has 5.3 M parameters."""

    dim: int = 256
    layers: int = 6
    heads: int = 4
    hidden: int = 704
    vocabulary: int = 2048
    sequence: int = 128
    batch: int = 24
    """Sequences of a step, over all ranks."""
    held_out: int = 64
    """Sequences that the held-out loss is over, spread over the whole held-out text."""

    def model(self, seed: int) -> GPT:
        """The model with the seed's first weights."""
        torch.manual_seed(seed)
        shape = {"dim": self.dim, "layers": self.layers, "heads": self.heads, "kv_heads": self.heads}
        sizes = {"hidden": self.hidden, "vocab_size": self.vocabulary, "context": self.sequence, "init_std": 0.04}
        return GPT(GPTConfig(**shape, **sizes))

    def corpus(self, folder: Path) -> None:
        """Write the token files, once."""
        prepare_source("python-stdlib", Data(vocabulary=self.vocabulary, sequence=self.sequence), folder)

    def batches(self, folder: Path, rank: int, size: int, seed: int) -> Iterator[dict[str, Tensor]]:
        """This rank's part of each step's batch, without end."""
        dataset = TokenDataset(folder / "train.tokens", self.sequence)
        loader = Loader(dataset, batch=self.batch, rank=rank, size=size, seed=seed)
        return (micro for (micro,) in loader)

    def examples(self, folder: Path, rank: int, size: int) -> dict[str, Tensor]:
        """This rank's part of the held-out sequences: inputs and targets, (held_out / size, T) each."""
        dataset = TokenDataset(folder / "held_out.tokens", self.sequence)
        every = torch.linspace(0, len(dataset) - 1, self.held_out).long().tolist()
        samples = dataset.__getitems__(every[rank::size])
        return {name: torch.stack([sample[name] for sample in samples]) for name in ("inputs", "targets")}
