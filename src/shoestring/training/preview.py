"""Check the data of a run for `shoestring check`: prepare the data if it is small, otherwise read only some of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from shoestring.data import Data, chats, preferences
from shoestring.data.corpus import check_tokens, prepare_source
from shoestring.data.mixture import prepare_mixture
from shoestring.data.piped import is_piped
from shoestring.data.sources import StandardLibrary, TextFiles, local_size, look_at_huggingface, open_source
from shoestring.data.tokenizer import load_tokenizer
from shoestring.run import Run
from shoestring.storage.compressed import COMPRESSIONS
from shoestring.training.data_loading import (
    DataSets,
    check_form,
    check_teachers,
    model_arguments,
    own_data,
    tokenizer_of,
    with_lengths,
)
from shoestring.training.packing import faults_of_layouts, laid_out
from shoestring.training.user_code import model_of

QUICK = 1 << 20
"""Maximum size, in bytes, of a source that the check prepares completely."""
_EXPANSION = 8
"""Assumed ratio of the size of text to its compressed size."""
MOST = 1 << 28
"""Maximum number of characters that the check reads of a larger source; reading them takes seconds."""
CHATS = 1 << 18
"""The same maximum for a source of chats, which is lower because chats must be rendered and encoded."""


@dataclass(frozen=True)
class DataPreview:
    """The data sets (None if preparing them takes long), and the arguments of the model that follow from the data."""

    data: DataSets | None
    model_arguments: dict[str, object]


def preview(run: Run, folder: Path, ranks: int = 1) -> DataPreview:
    """Check the data of a run without downloading anything.

    The check writes only to `folder`, and to the cache of the `datasets` library for a small data set of that library.

    Args:
        folder: an empty folder, which may be deleted once the data sets are not used any more.
        ranks: number of ranks; if each has a data set of its own, the check opens these one after another.

    Raises:
        ConfigError, DataError: `open_data` would refuse the data. Faults in data that is not read go unnoticed.
    """
    check_form(run)
    if run.has_own_data:
        data = own_data(run, 0, ranks)
        if run.data.per_rank:
            others = (own_data(run, rank, ranks) for rank in range(1, ranks))
            data = with_lengths(data, [data.lengths, *(other.lengths for other in others)])
        return DataPreview(data, data.model_arguments)
    settings = replace(run.data, tokenizer=tokenizer_of(run))
    if all(map(_is_quick, run.sources)):
        if isinstance(run.settings.data, str):
            corpus = prepare_source(run.sources[0], settings, folder)
        else:
            settings.check_weights(len(run.sources))
            corpus = prepare_mixture(run.sources, settings, folder)
        check_teachers(run, corpus.tokenizer)
        if "run.model" not in run.unread:
            faults = faults_of_layouts(model_of(run), corpus, own_forward=bool(run.settings.forward))
            corpus = laid_out(corpus, faults)
        data = DataSets(corpus.train, corpus.held_out, corpus)
        return DataPreview(data, data.model_arguments)
    arguments = model_arguments(run)
    for source in run.sources:
        _read_beginning(source, settings)
    return DataPreview(None, arguments)


def _is_quick(source: str) -> bool:
    """Whether a source is small enough to prepare. A missing source counts as small, so that opening it fails."""
    if is_piped(source):
        return False
    if source.endswith(".tokens"):
        return Path(source).is_file() and Path(source).stat().st_size <= QUICK
    if source.startswith("hf:"):
        size = local_size(source.removeprefix("hf:"))
        return size is not None and size <= QUICK
    reader = open_source(source, "text")
    return isinstance(reader, TextFiles) and sum(map(_text_size, reader.paths)) <= QUICK


def _text_size(path: Path) -> int:
    """Bytes of text in a file; an estimate if the file is compressed."""
    return path.stat().st_size * (_EXPANSION if path.suffix.lower() in COMPRESSIONS else 1)


def _read_beginning(source: str, settings: Data) -> None:
    """Read the first `MOST` characters of a source as training does; skip a pipe, which can be read only once."""
    if is_piped(source):
        return
    if source.startswith("hf:"):
        look_at_huggingface(source.removeprefix("hf:"))
        return
    if source.endswith(".tokens"):
        check_tokens(Path(source), settings)
        return
    reader = open_source(source, settings.record_field)
    if settings.form != "text":
        check_records = (chats if settings.form == "chat" else preferences).check_records
        check_records(reader, load_tokenizer(Path(settings.tokenizer)), settings, CHATS)
        return
    if isinstance(reader, StandardLibrary):  # never refuses a file, because it skips files that are not text
        return
    left = MOST
    for document in reader.documents():
        left -= len(document.text)
        if left <= 0:
            return
