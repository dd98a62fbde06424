"""Mixtures of several sources with one tokenizer: training text is mixed by weight, and text is held out from each
source separately."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from shoestring.core.errors import DataError
from shoestring.data import Data
from shoestring.data.corpus import SAMPLE, Corpus, Survey, prepare_source, recipe_of
from shoestring.data.joined import Joined
from shoestring.data.piped import spool
from shoestring.data.sources import open_source
from shoestring.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe
from shoestring.storage import foreign
from shoestring.storage.whole import write_atomic


def prepare_mixture(sources: Sequence[str], settings: Data, folder: Path) -> Corpus:
    """Prepare each source as `prepare_source` does, in its own folder under `folder/data`, with one tokenizer for all.

    A `bpe` tokenizer is trained on the same amount of text from each source. Held-out documents are chosen, and
    duplicate documents left out, separately within each source.

    Raises:
        ConfigError: a setting is out of range. DataError: as for `prepare_source`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    sources = [spool(source, folder) for source in sources]
    _tokenizer(sources, settings, folder).save(path)
    shared = replace(settings, tokenizer=str(path), weights=())
    parts = {name: prepare_source(source, shared, folder / "data" / name) for name, source in names(sources).items()}
    train = Joined([part.train for part in parts.values()], settings.weights)
    held_out = Joined([part.held_out for part in parts.values()])
    return Corpus(train, held_out, load_tokenizer(path), parts)


def names(sources: Sequence[str]) -> dict[str, str]:
    """Maps short names, which can be part of a metric's name, to the sources. A source's name is the stem of its path,
    with a number if several sources have the same stem.
    """
    stems = ["".join(c if c.isalnum() else "-" for c in Path(source).stem).strip("-") or "source" for source in sources]
    numbered = [f"{stem}-{number}" for number, stem in enumerate(stems, 1)]
    unique = [a if stems.count(a) == 1 and a not in numbered else b for a, b in zip(stems, numbered, strict=True)]
    return dict(zip(unique, sources, strict=True))


def _tokenizer(sources: Sequence[str], settings: Data, folder: Path) -> Tokenizer:
    """The tokenizer of all sources; a `bpe` tokenizer that an earlier start of the run trained on the same sources is
    reused."""
    if settings.tokenizer == "bytes":
        return byte_tokenizer()
    if settings.tokenizer != "bpe":
        return load_tokenizer(Path(settings.tokenizer))
    if tokens := [source for source in sources if source.endswith(".tokens")]:
        raise DataError(
            f"`{tokens[0]}` holds tokens already, so no tokenizer can be trained on it",
            hint="set data.tokenizer to the tokenizer.json that wrote it",
        )
    readers = [open_source(source, settings.record_field) for source in sources]
    recipe = hashlib.sha256("".join(recipe_of(reader, settings) for reader in readers).encode()).hexdigest()
    mark, path = folder / "tokenizer.recipe", folder / "tokenizer.json"
    with suppress(OSError, ValueError, DataError):  # absent or damaged: train again
        if foreign.read_text(mark).split() == [recipe, load_tokenizer(path).hash]:
            return load_tokenizer(path)
    share = SAMPLE // len(sources)
    trained = train_bpe(
        (text for reader in readers for text in Survey(reader, settings, share).sample), settings.vocabulary
    )
    write_atomic(mark, f"{recipe} {trained.hash}".encode())
    return trained
