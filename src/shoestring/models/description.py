"""Describes a model from its files and its tokenizer: end-of-text tokens, default sampling settings, special tokens.

Every command that generates text, and every export, uses this description.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from shoestring.core.errors import DataError
from shoestring.data.chat_template import template_source
from shoestring.data.tokenizer import Tokenizer
from shoestring.models import adapter_folder, gguf, hf
from shoestring.models.generation_config import GENERATION, ends_of, sampling_of
from shoestring.models.saving import model_folder, source_folder
from shoestring.storage import foreign

log = logging.getLogger("shoestring")


@dataclass(frozen=True, kw_only=True)
class Description:
    """Properties of a model that its files and its tokenizer state."""

    ends: tuple[int, ...] = ()
    """Ids of tokens that end a text; the tokenizer's end-of-text token comes first."""
    begin: tuple[int, ...] = ()
    """Ids of tokens that the tokenizer puts before a text."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling settings in the model's files; the temperature is 0 if the files turn sampling off."""
    special: Mapping[str, int] = field(default_factory=dict)
    """Maps the text of each special token to its id."""
    chat: bool = False
    """Whether the model has a chat template."""
    context: int | None = None
    """Maximum number of tokens in the model's context; None if unknown."""
    vocabulary: int | None = None
    """Number of tokens that the model has embeddings of; None if unknown."""
    ignored: tuple[str, ...] = ()
    """A sentence for each entry of the model's files that is not used, with the reason."""


def describe_model(
    source: str | Path, tokenizer: Tokenizer | None, model: nn.Module | None = None, *, warn: bool = True
) -> Description:
    """Describe the model that a user names; its weights are not read.

    Args:
        source: run folder, model folder, folder of an adapter, .gguf file, or hf:NAME.
        model: the opened model, which states the sizes of context and vocabulary; may be on the meta device. If None,
            these sizes are unknown.
        warn: whether to log the entries of the files that are not used.

    Raises:
        DataError: a file of the model is not a JSON object.
    """
    generation, config, folder = _files(str(source))
    context, vocabulary = sizes(model)
    known = vocabulary or (tokenizer.vocab_size if tokenizer is not None else None)
    notes: list[str] = []
    end = None if tokenizer is None else tokenizer.end
    added = {} if tokenizer is None else tokenizer.engine.get_added_tokens_decoder()
    try:
        has_template = tokenizer is not None and template_source(tokenizer) is not None
    except DataError:  # the code that renders the template reports the error
        has_template = True
    description = Description(
        ends=tuple(ends_of(generation, config, end, known, notes)),
        begin=() if tokenizer is None else tuple(tokenizer.prefix),
        sampling=sampling_of(generation, notes),
        special={token.content: number for number, token in sorted(added.items()) if token.special},
        chat=has_template,
        context=context,
        vocabulary=vocabulary,
        ignored=tuple(f"{folder}: {note}" for note in notes),
    )
    for note in description.ignored if warn else ():
        log.warning("%s", note)
    return description


# -- the files ---------------------------------------------------------------------------------------------------------


def _files(source: str) -> tuple[dict[str, Any], dict[str, Any], Path | str]:
    """Contents of generation_config.json and config.json, and the folder or file that they were read from."""
    if gguf.is_file(source):
        return {"eos_token_id": gguf.ends_of(Path(source))}, {}, source
    if source.startswith(hf.PREFIX):
        hf.file_of(source.removeprefix(hf.PREFIX), GENERATION)  # downloads the file if the model is not a folder
    folder = source_folder(source)
    if folder is None and (adapter := adapter_folder.find(source)) is not None:
        base = adapter_folder.base_of(adapter)
        own = _read(adapter / GENERATION)
        below = base if Path(base).is_dir() else f"{hf.PREFIX}{base}"
        # A base folder without a model holds another adapter; `loading` checks such chains of adapters.
        if own or not base or (Path(base).is_dir() and model_folder(base) is None):
            return own, {}, adapter
        return _files(below)
    if folder is None:
        return {}, {}, source
    return _read(folder / GENERATION), _read(folder / hf.CONFIG), folder


def _read(path: Path) -> dict[str, Any]:
    """The content of a JSON file of a model; empty if the file is missing.

    Raises:
        DataError: the file cannot be read, or is not a JSON object.
    """
    if not path.exists():
        return {}
    try:
        return foreign.read_json_object(path, within=path.parent)
    except OSError as error:
        raise DataError(f"cannot read `{path}`: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"`{path}` is not a JSON object: {error}", hint="correct or remove it") from error


def sizes(model: nn.Module | None) -> tuple[int | None, int | None]:
    """Context length and vocabulary size of a model, from its configuration; None for a size that is missing there."""
    config: Any = getattr(model, "config", None)
    if model is not None and hf.is_pretrained(model):
        vocabulary, context = getattr(config.get_text_config(), "vocab_size", None), hf.context_of(config)
    else:
        vocabulary, context = (getattr(config, name, None) for name in ("vocab_size", "context"))
    return (context if isinstance(context, int) else None), (vocabulary if isinstance(vocabulary, int) else None)
