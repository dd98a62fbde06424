"""The verbs that make a trained model smaller, in a new folder; importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclass(frozen=True)
class PruneModel:
    """Make a trained model 2:4 sparse at once, without training, and write it to a new folder."""

    model: Positional[str]
    """Run folder, model folder, or hf:NAME."""
    out: Path
    """Folder to write the pruned model to, which must be new or empty."""
    method: Literal["magnitude", "wanda"] = "magnitude"
    """Score by which two of four weights are kept: their magnitude, or that times the norm of their inputs (wanda),
    which is measured on text and keeps more of what the model computes."""
    format: Literal["dense", "packed"] = "dense"
    """Format of the weights: dense with zeros, which any program reads, or packed, which takes a little over half the
    bytes and only shoestring reads."""
    layers: tuple[str, ...] = ()
    """Patterns of the names of the linear layers to prune; by default all those of the blocks, and neither embeddings
    nor the head."""
    data: str = ""
    """Text on which wanda measures inputs, as run.data names it; defaults to the data of the run that the model is
    from."""
    samples: int = 128
    """Number of samples of text that wanda measures inputs on; more are slower and more exact."""
    sequence: int = 512
    """Tokens in each of these samples, at most the context of the model."""

    def __call__(self, overrides: Sequence[str]) -> int:
        from shoestring.commands.prune import prune

        for line in prune(
            self.model,
            self.out,
            metric=self.method,
            form=self.format,
            layers=self.layers,
            data=self.data,
            samples=self.samples,
            sequence=self.sequence,
        ):
            print(line, flush=True)
        return 0


@dataclass(frozen=True)
class QuantizeModel:
    """Round the weights of a trained model to 8 or 4 bits, without training, and write it to a new folder."""

    model: Positional[str]
    """Run folder, model folder, or hf:NAME."""
    out: Path
    """Folder to write the quantised model to, which must be new or empty; with --format gguf, the file."""
    bits: Literal[8, 4, 16, 32] = 8
    """Bits of a weight, with a scale of 16 bits for every 32 weights. 8 changes the loss hardly at all; 4 halves the
    bytes again and costs some loss. Embeddings and the head have 8 bits in either case. 16 and 32 are floating point,
    in GGUF only."""
    format: Literal["safetensors", "gguf"] = "safetensors"
    """Format to write: a folder with safetensors, which shoestring reads, or a GGUF file, which llama.cpp and its
    relatives read as well (Llama models only)."""

    def __call__(self, overrides: Sequence[str]) -> int:
        from shoestring.commands.quantize import quantize

        for line in quantize(self.model, self.out, self.bits, self.format):
            print(line, flush=True)
        return 0
