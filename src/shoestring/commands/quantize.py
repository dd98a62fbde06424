"""`shoestring quantize`: a trained model with weights of 8 or 4 bits, in a new folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shoestring.commands.converting import change_of_size, check_new, described, open_source
from shoestring.core.errors import ConfigError
from shoestring.models import quantized
from shoestring.models.rounding import Bits
from shoestring.models.saving import save_like


def quantize(model: str, out: Path, bits: Bits) -> Iterator[str]:
    """Round the weights of the model that a user names, write it to `out`, and say what became of it, line by line.

    Embeddings and the head have 8 bits in any case.

    Raises:
        ConfigError: no layer can be quantised, or `out` is not empty.
        CheckpointError: there is no model.
    """
    check_new(out)
    source, built = open_source(model)
    chosen, left = quantized.choose(built, bits)
    if not chosen:
        raise ConfigError(f"no layer of `{model}` can be quantised", hint="its inputs must be multiples of 32")
    quantized.replace(built, chosen, rounded=True)
    save_like(built, source, out)
    for width in (4, 8):
        names = [name for name, its in chosen.items() if its == width]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield f"{width} bits: {names[0]}{more}"
    yield from described("left as they are", left)
    yield change_of_size(source, out)
    yield f"written to {out}"
