"""`shoestring check --model`: describes a model by its files and its tokenizer, without reading its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from shoestring.data.tokenizer import Tokenizer, load_tokenizer
from shoestring.decode.settings.generation import SamplingOptions, SamplingRule
from shoestring.models import hf
from shoestring.models.behaviour import observe
from shoestring.models.description import Description, describe_model
from shoestring.models.gpt import GPT
from shoestring.models.loading import load_model, outline
from shoestring.models.tokenizer_files import find_tokenizer

LISTED = 12
"""Maximum number of tokens that a line lists."""


def describe(model: str) -> Iterator[str]:
    """Describe a model, line by line.

    Args:
        model: run folder, model folder, folder of an adapter, .gguf file, or hf:NAME.

    Raises:
        CheckpointError: the model does not exist, or its weights do not fit its configuration.
        DataError: a file of the model is not valid.
    """
    built, tokenizer = _open(model)
    description = describe_model(model, tokenizer, built, warn=False)
    rows = {**table(description, tokenizer), **behaviour_of(built)}
    width = max(map(len, rows))
    for name, text in rows.items():
        yield f"{name:<{width}}  {text}"
    for note in description.ignored:
        yield f"ignored: {note}"


def table(description: Description, tokenizer: Tokenizer | None) -> Mapping[str, str]:
    """Lines of a description: name of a property -> its value as text."""
    named = SamplingOptions().over(description.sampling, SamplingRule()).from_model
    sampling = ", ".join(f"{name} {value:g}" for name, value in named.items())
    rows = {
        "context": _count(description.context),
        "vocabulary": _count(description.vocabulary),
        "texts end by": _tokens(description.ends, tokenizer) or "nothing",
        "sampling": sampling or "not named: the defaults of generate and serve",
    }
    if tokenizer is None:
        return {**rows, "tokenizer": "none beside the model"}
    return {
        **rows,
        "tokenizer": _count(tokenizer.vocab_size),
        "texts begin by": _tokens(description.begin, tokenizer) or "no special token",
        "special tokens": _tokens(list(description.special.values()), tokenizer) or "none",
        "chat template": "yes" if description.chat else "none",
    }


def behaviour_of(built: nn.Module | None) -> Mapping[str, str]:
    """Properties of a model that generation and training rely on: name -> text. Empty if the model's class is unknown.

    For a model of transformers, the properties are observed once, on a small random copy of the model.
    """
    if isinstance(built, GPT):
        return {
            "cache": "shoestring's, of many texts at once",
            "packed texts": "do not see each other",
            "answers to a prompt": "share it in a sample",
        }
    if built is None or not hf.is_pretrained(built):
        return {}
    observed = observe(built)
    caches = {
        "ours": "shoestring's, of many texts at once",
        "its own": "the model's own, one text in each pass",
        "none": "none: the whole text is read for each token",
    }
    apart = "do not see each other" if observed.packing_isolates else f"see each other ({observed.packing_why})"
    return {
        "cache": caches[observed.cache] + (f" ({observed.why})" if observed.cache == "none" else ""),
        "texts of a batch": "are independent" if observed.rows_independent else "depend on each other: read one by one",
        "packed texts": apart if observed.packing_isolates else f"{apart}: each sample holds one",
        "answers to a prompt": "are read with it one by one" if observed.sharing_why else "share it in a sample",
        "windows": ", ".join(map(_count, observed.windows)) or "none",
    }


def _open(model: str) -> tuple[nn.Module | None, Tokenizer | None]:
    """Open the model, without its weights if possible, and its tokenizer."""
    if (built := outline(model)) is None:
        return load_model(model)
    path = find_tokenizer(model)
    return built, None if path is None else load_tokenizer(path)


def _count(tokens: int | None) -> str:
    return "unknown" if tokens is None else f"{tokens:,} tokens"


def _tokens(ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """List tokens and their texts in one line."""
    texts = [f"{token} {tokenizer.engine.id_to_token(token) if tokenizer else ''}".strip() for token in ids[:LISTED]]
    return ", ".join([*texts, *([f"and {len(ids) - LISTED} more"] if len(ids) > LISTED else [])])
