"""`shoestring generate`: text from a trained model, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shoestring.core.errors import ConfigError
from shoestring.models.loading import load_model
from shoestring.models.sampling import generate


def stream(
    path: Path, prompt: str, tokens: int, temperature: float, top_k: int, top_p: float, seed: int
) -> Iterator[str]:
    """Yield the continuation in pieces; a character of several tokens is yielded once it is complete.

    Raises:
        CheckpointError: `path` holds no model. ConfigError: no tokenizer with it, or an argument out of range.
    """
    if not 0 <= seed < 2**63:
        raise ConfigError(f"--seed must be at least 0 and below 2**63, got {seed}")
    model, tokenizer = load_model(path)
    if tokenizer is None:
        raise ConfigError(f"`{path}` has no tokenizer.json", hint="copy the model's tokenizer.json there")
    start = tokenizer.encode(prompt) or [tokenizer.end_of_text]
    drawn: list[int] = []
    shown = ""
    for token in generate(
        model,
        start,
        max_new=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=[tokenizer.end_of_text],
    ):
        drawn.append(token)
        text = tokenizer.decode(drawn)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(drawn)[len(shown) :]
