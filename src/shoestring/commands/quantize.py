"""`shoestring quantize`: a trained model with weights of 8 or 4 bits, in a new folder or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from torch import nn

from shoestring.commands.converting import change_of_size, check_new, described, open_source
from shoestring.core.errors import ConfigError
from shoestring.models import gguf, packed24, quantized
from shoestring.models.rounding import Bits
from shoestring.models.saving import save_like


def quantize(
    model: str, out: Path, bits: Literal[8, 4, 16, 32], form: Literal["safetensors", "gguf"] = "safetensors"
) -> Iterator[str]:
    """Round the weights of the model that a user names, write it to `out`, and say what became of it, line by line.

    Embeddings and the head have 8 bits at least.

    Args:
        bits: 16 and 32 are floating point, in GGUF only.

    Raises:
        ConfigError: no layer can be quantised, `out` is not empty, or the format cannot hold the model.
        CheckpointError: there is no model.
    """
    check_new(out)
    source, built, tokenizer = open_source(model)
    if form == "gguf":
        gguf.save(built, tokenizer, out, gguf.KINDS[bits])
        yield f"weights of the type {gguf.KINDS[bits]}" + ("" if tokenizer else ", without a tokenizer")
    elif bits in (8, 4):
        yield from _rounded(model, built, bits)
        save_like(built, source, out)
    else:
        raise ConfigError(f"--bits {bits} is of --format gguf only", hint="give 8 or 4")
    yield change_of_size(source, out)
    yield f"written to {out}"


def _rounded(name: str, model: nn.Module, bits: Bits) -> Iterator[str]:
    """Round the weights of a model in place, of those that are 2:4 the values alone; say which."""
    packed24.pack_layers(model)
    chosen, left = quantized.choose(model, bits)
    if not chosen:
        raise ConfigError(f"no layer of `{name}` can be quantised", hint="its inputs must be multiples of 32")
    quantized.replace(model, chosen, rounded=True)
    for width in (4, 8):
        names = [layer for layer, its in chosen.items() if its == width]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield f"{width} bits: {names[0]}{more}"
    if sparse := quantized.packed(model):
        more = f" and {len(sparse) - 1} more" if len(sparse) > 1 else ""
        yield f"2:4, of which the values alone are kept: {sparse[0]}{more}"
    yield from described("left as they are", left)
