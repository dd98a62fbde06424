"""Several sources as one corpus under one tokenizer, mixed by weight for training; each keeps its held-out part."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shoestring.core.errors import DataError
from shoestring.data import Data
from shoestring.data.corpus import SAMPLE, Corpus, Survey, prepare_source, recipe_of
from shoestring.data.joined import Joined
from shoestring.data.sources import open_source
from shoestring.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe
from shoestring.storage.whole import write_atomic


def prepare_mixture(sources: Sequence[str], settings: Data, folder: Path) -> Corpus:
    """As `prepare_source` for each source, in a folder of its own in `folder/data`, with one tokenizer for all.

    A `bpe` tokenizer is trained on equally much text of each source. Documents are held out, and duplicates left out,
    within each source.

    Raises:
        ConfigError: a setting is out of range. DataError: as `prepare_source` does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    _tokenizer(sources, settings, folder).save(path)
    each = replace(settings, tokenizer=str(path), weights=())
    parts = {name: prepare_source(source, each, folder / "data" / name) for name, source in names(sources).items()}
    train = Joined([part.train for part in parts.values()], settings.weights)
    held_out = Joined([part.held_out for part in parts.values()])
    return Corpus(train, held_out, load_tokenizer(path), parts)


def names(sources: Sequence[str]) -> dict[str, str]:
    """Each source under a short name that can be part of a metric's: the stem of its path, numbered where it is not
    the only one.
    """
    stems = ["".join(c if c.isalnum() else "-" for c in Path(source).stem).strip("-") or "source" for source in sources]
    numbered = [f"{stem}-{number}" for number, stem in enumerate(stems, 1)]
    unique = [a if stems.count(a) == 1 and a not in numbered else b for a, b in zip(stems, numbered, strict=True)]
    return dict(zip(unique, sources, strict=True))


def _tokenizer(sources: Sequence[str], settings: Data, folder: Path) -> Tokenizer:
    if settings.tokenizer == "bytes":
        return byte_tokenizer()
    if settings.tokenizer != "bpe":
        return load_tokenizer(Path(settings.tokenizer))
    if found := [source for source in sources if source.endswith(".tokens")]:
        raise DataError(
            f"`{found[0]}` holds tokens already, so no tokenizer can be trained on it",
            hint="set data.tokenizer to the tokenizer.json that wrote it",
        )
    readers = [open_source(source, settings.record_field) for source in sources]
    recipe = hashlib.sha256("".join(recipe_of(reader, settings) for reader in readers).encode()).hexdigest()
    mark, path = folder / "tokenizer.recipe", folder / "tokenizer.json"
    if mark.is_file() and path.is_file() and mark.read_text().split() == [recipe, load_tokenizer(path).hash]:
        return load_tokenizer(path)
    share = SAMPLE // len(sources)
    trained = train_bpe(
        (text for each in readers for text in Survey(each, settings, share).sample), settings.vocabulary
    )
    write_atomic(mark, f"{recipe} {trained.hash}".encode())
    return trained
