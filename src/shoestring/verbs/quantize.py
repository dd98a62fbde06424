"""`shoestring quantize`: rounds a trained model to 8 or 4 bits, into a new folder or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import nn

from shoestring.core.errors import ConfigError
from shoestring.models import gguf, packed24, quantized
from shoestring.models.description import describe_model
from shoestring.models.plain_layers import read_directly
from shoestring.models.rounding import Bits
from shoestring.models.saving import save_like
from shoestring.verbs.conversion import change_of_size, check_new, described, open_source
from shoestring.verbs.settings import Quantization


def quantize(model: str, out: Path, settings: Quantization | None = None) -> list[str]:
    """Round the weights of a trained model and write the model to `out`.

    Returns:
        Lines with the layers that were rounded, by number of bits, and the size of the weights.

    Raises:
        ConfigError: no layer can be quantised, `out` is not empty, or the format cannot hold the model.
        CheckpointError: `model` does not name a model.
    """
    settings = settings or Quantization()
    bits = settings.bits
    check_new(out)
    source, built, tokenizer = open_source(model)
    if settings.format == "gguf":
        gguf.save(built, tokenizer, out, gguf.KINDS[bits], describe_model(model, tokenizer, built).ends)
        lines = [f"weights of the type {gguf.KINDS[bits]}" + ("" if tokenizer else ", without a tokenizer")]
    elif bits in (16, 32) and source.is_file():
        built = gguf.load(source, dense=True)[0]
        save_like(built.half() if bits == 16 else built, source, out)
        lines = [f"weights of {bits} bits, in floating point"]
    elif bits in (8, 4):
        lines = [*_rounded(model, built, bits)]
        save_like(built, source, out)
    else:
        raise ConfigError(
            f"--bits {bits} is for GGUF only: give --format gguf or a .gguf file", hint="or give --bits 8 or 4"
        )
    return [*lines, change_of_size(source, out), f"written to {out}"]


def _rounded(name: str, model: nn.Module, bits: Bits) -> Iterator[str]:
    """Round the weights of a model in place, and yield lines on the rounded layers. In packed 2:4 weights, only the
    values are rounded, not the indices."""
    packed24.pack_layers(model)
    chosen, left = quantized.choose(model, bits)
    readings = read_directly(model)
    for layer in [name for name, module in model.named_modules() if module in readings and name in chosen]:
        left[layer] = "its weight is read without calling it"
        del chosen[layer]
    if not chosen:
        raise ConfigError(
            f"no layer of `{name}` can be quantised", hint="the number of a layer's inputs must be a multiple of 32"
        )
    quantized.replace(model, chosen, rounded=True)
    for width in (4, 8):
        names = [layer for layer, bits_of_layer in chosen.items() if bits_of_layer == width]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield f"{width} bits: {names[0]}{more}"
    if sparse := quantized.packed(model):
        more = f" and {len(sparse) - 1} more" if len(sparse) > 1 else ""
        yield f"2:4, of which the values alone are kept: {sparse[0]}{more}"
    yield from described("left as they are", left)
