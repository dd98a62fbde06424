"""`shoestring generate`: text from a trained model, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shoestring.core.errors import ConfigError
from shoestring.decode.engine import generate
from shoestring.decode.settings import Sampling
from shoestring.models.loading import load_model


def stream(path: Path, prompt: str, tokens: int, sampling: Sampling) -> Iterator[str]:
    """Yield the continuation in pieces; a character of several tokens is yielded once it is complete.

    Raises:
        CheckpointError: `path` holds no model. ConfigError: no tokenizer with it, or an argument out of range.
    """
    model, tokenizer = load_model(path)
    if tokenizer is None:
        raise ConfigError(f"`{path}` has no tokenizer.json", hint="copy the model's tokenizer.json there")
    start, text = tokenizer.encode(prompt) or [tokenizer.end_of_text], tokenizer.stream()
    for token in generate(model, start, max_new=tokens, sampling=sampling, stop=[tokenizer.end_of_text]):
        yield text.add(token)
    yield text.rest()
