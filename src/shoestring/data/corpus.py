"""Prepares a corpus: turns a source of text into token files, once, and reuses them."""

from __future__ import annotations

import hashlib
import heapq
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from shoestring.core.errors import DataError
from shoestring.data import Data, chats, preferences
from shoestring.data.built_in_templates import with_template
from shoestring.data.joined import Tokens
from shoestring.data.piped import spool
from shoestring.data.sources import Document, Source, open_source
from shoestring.data.tokenizer import COMPANIONS, Tokenizer, byte_tokenizer, load_tokenizer, single_threaded, train_bpe
from shoestring.data.tokens import Header, TokenDataset, TokenWriter, read_header, verify
from shoestring.processors import processors
from shoestring.storage import foreign

SAMPLE = 8 << 20
"""Number of characters of training text that a `bpe` tokenizer is trained on."""
_BATCH = 1 << 19
"""Number of characters that are encoded in one batch."""
_VERIFIED = 1 << 30
"""Maximum size in bytes of a file whose content hash is checked before the file is reused."""
_SEPARATOR = "\0"


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: training tokens, held-out tokens, and their tokenizer."""

    train: Tokens
    held_out: Tokens
    """The held-out tokens; the last sample is padded, so that every token is evaluated."""
    tokenizer: Tokenizer
    parts: Mapping[str, Corpus] = field(default_factory=dict)
    """The corpus of each source of a mixture, by name; empty if there is only one source."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the training and the held-out tokens."""
        parts = [self.train.content, self.held_out.content]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def documents(self) -> int:
        """Number of documents, training and held-out."""
        return self.train.documents + self.held_out.documents

    def train_texts(self) -> bytes:
        """The training documents in UTF-8, joined by zero bytes; all in memory."""
        return _texts(self.tokenizer, self.train)

    def held_out_texts(self) -> bytes:
        """The held-out documents in UTF-8, joined by zero bytes; all in memory."""
        return _texts(self.tokenizer, self.held_out)

    @property
    def bytes(self) -> int:
        """Bytes of training and held-out text, without separators."""
        return self.train.bytes + self.held_out.bytes

    @property
    def skipped(self) -> int:
        """Number of files left out because they are not UTF-8."""
        return self.train.skipped

    @property
    def duplicates(self) -> int:
        """Number of documents left out because an earlier document has the same text."""
        return self.train.duplicates


def _texts(tokenizer: Tokenizer, part: Tokens) -> bytes:
    """The documents of one part (training or held-out) in UTF-8, joined by zero bytes."""
    return _SEPARATOR.join(tokenizer.decode_documents(part.ids)).encode()


def prepare_source(source: str, settings: Data, folder: Path) -> Corpus:
    """Read the text of `source`, train or load a tokenizer, split the text by document into training and held-out text,
    and write the tokens to `folder`.

    `source` is `python-stdlib`, comma-separated paths or globs of files of text or records, a .tokens file,
    `hf:NAME[@CONFIG][:SPLIT]`, or a pipe, which is copied to `folder`. The files tokenizer.json, train.tokens and
    held_out.tokens are written atomically, and reused as long as the source's files and the settings are unchanged. A
    hash of a document's name (of its text, for records) decides whether the document is held out, so the order of the
    documents does not matter. Duplicate documents are left out. A .tokens file is used where it is, without a copy.

    Raises:
        ConfigError: a setting is out of range.
        DataError: the source is missing, empty, too short, or not text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if source.endswith(".tokens"):
        # Held-out text is held_out.tokens in the same folder, or else the last documents of the file.
        path = Path(source)
        header, tokenizer, beside = check_tokens(path, settings)
        tokenizer.save(folder / "tokenizer.json")
        if beside is not None:
            train = TokenDataset(path, settings.sequence)
            return Corpus(train, TokenDataset(beside, settings.sequence, pad_last=True), tokenizer)
        return _hold_out_tail(path, header, tokenizer, settings)
    reader = open_source(spool(source, folder), settings.record_field)
    recipe = recipe_of(reader, settings)
    if settings.form != "text":
        if settings.tokenizer == "bpe":
            raise DataError("chats need the tokenizer of a model", hint='set data.tokenizer = "model"')
        tokenizer = with_template(_tokenizer(settings, []), settings.template)
        if not chats.usable(folder, recipe):
            (chats if settings.form == "chat" else preferences).write(reader, tokenizer, settings, folder, recipe)
            tokenizer.save(folder / "tokenizer.json")
        kind = chats.ChatDataset if settings.form == "chat" else preferences.PreferenceDataset
        train, held_out = (kind(folder / name, settings.sequence) for name in chats.FILES)
        return Corpus(train, held_out, tokenizer)
    if not _usable(folder, recipe):
        _write(reader, settings, folder, recipe)
    train = TokenDataset(folder / "train.tokens", settings.sequence)
    held_out = TokenDataset(folder / "held_out.tokens", settings.sequence, pad_last=True)
    return Corpus(train, held_out, load_tokenizer(folder / "tokenizer.json"))


def begin_with(folder: Path, prepared: Path) -> None:
    """Link the files that were prepared in another run folder into a new run folder, so that files with the same recipe
    are reused."""
    names = ("tokenizer.json", "tokenizer.recipe", "train.tokens", "held_out.tokens", *COMPANIONS, *chats.FILES)
    for path in (*map(prepared.joinpath, names), *(prepared / "data").rglob("*")):
        place = folder / path.relative_to(prepared)
        if path.is_file() and not place.exists():
            with suppress(OSError):  # a file system without links, or a file that was replaced meanwhile
                place.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, place)


def recipe_of(reader: Source, settings: Data) -> str:
    """Hash of everything that the token files depend on: settings, tokenizer, template and the source's files."""
    relevant = {
        name: value for name, value in asdict(settings).items() if name not in ("sequence", "workers", "weights")
    }
    path = Path(settings.tokenizer)
    files = [file for file in (path, *map(path.with_name, COMPANIONS)) if path.is_file() and file.is_file()]
    files += [Path(settings.template)] if settings.template and Path(settings.template).is_file() else []
    try:
        content = hashlib.sha256(b"".join(foreign.read_bytes(file, foreign.TOKENIZER_LIMIT) for file in files))
    except OSError as error:
        raise DataError(f"cannot read `{error.filename}`: {error.strerror}") from error
    table = [relevant, content.hexdigest() if files else "", SAMPLE, reader.identity()]
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def _usable(folder: Path, recipe: str) -> bool:
    """Whether `folder` holds undamaged files that were prepared by this recipe."""
    try:
        headers = [_check_header(folder / name) for name in ("train.tokens", "held_out.tokens")]
        tokenizer = load_tokenizer(folder / "tokenizer.json").hash
    except DataError:
        return False
    return all(header.recipe == recipe and header.tokenizer == tokenizer for header in headers)


def _check_header(path: Path) -> Header:
    header = read_header(path)
    return verify(path) if path.stat().st_size <= _VERIFIED else header


# -- writing the files -------------------------------------------------------------------------------------------------


class Survey:
    """One pass over the documents; finds the threshold of the split, and collects text to train a tokenizer on.

    A document with a key below `cut` is held out. The threshold `cut` lies between the smallest and the largest key, so
    that neither the training nor the held-out text is empty.
    """

    def __init__(self, reader: Source, settings: Data, sample: int) -> None:
        self.duplicates = 0
        share = int(settings.held_out * 2**64)
        least, most = 2**64, -1
        # The documents with the largest keys, which are training text for any value of `cut`.
        heap: list[tuple[int, str]] = []
        size = 0
        for document in self.unique(reader.documents()):
            least, most = min(least, document.key), max(most, document.key)
            if sample:
                heapq.heappush(heap, (document.key, document.text))
                size += len(document.text)
                while size - len(heap[0][1]) >= sample:
                    size -= len(heapq.heappop(heap)[1])
        if most < 0:
            raise DataError("the corpus is empty", hint="check the pattern and that the files hold text")
        if least == most:
            raise DataError("the corpus is one document, so none can be held out", hint="give more documents or text")
        self.cut = min(max(share, least + 1), most)
        self.sample = [text[:sample] for key, text in sorted(heap) if key >= self.cut]

    def unique(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Iterate over `documents` without duplicates; the number of duplicates is added to `duplicates`."""
        self.duplicates = 0
        seen: set[bytes] = set()
        for document in documents:
            digest = hashlib.blake2b(document.text.encode(), digest_size=12).digest()
            if digest in seen:
                self.duplicates += 1
                continue
            seen.add(digest)
            yield document


def _write(reader: Source, settings: Data, folder: Path, recipe: str) -> None:
    """Write the tokenizer and both token files; the documents are read twice instead of being held in memory."""
    survey = Survey(reader, settings, SAMPLE if settings.tokenizer == "bpe" else 0)
    tokenizer = _tokenizer(settings, survey.sample)
    tokenizer.save(folder / "tokenizer.json")
    with (
        TokenWriter(folder / "train.tokens", tokenizer.vocab_size) as train,
        TokenWriter(folder / "held_out.tokens", tokenizer.vocab_size) as held_out,
    ):
        for documents, encoded in _encode(tokenizer, survey.unique(reader.documents())):
            for document, tokens in zip(documents, encoded, strict=True):
                writer = held_out if document.key < survey.cut else train
                writer.append(np.concatenate([[tokenizer.end_of_text], tokens]), size=len(document.text.encode()))
        _check_length(train.tokens, "training", settings)
        _check_length(held_out.tokens, "held-out", settings)
        train.finish(tokenizer=tokenizer.hash, recipe=recipe, skipped=reader.skipped, duplicates=survey.duplicates)
        held_out.finish(tokenizer=tokenizer.hash, recipe=recipe)


def _check_length(tokens: int, name: str, settings: Data) -> None:
    if tokens <= settings.sequence:
        raise DataError(
            f"the {name} part of the corpus is {tokens} tokens, fewer than one sample of {settings.sequence}",
            hint="give more text, a smaller data.sequence or another data.held_out",
        )


def _tokenizer(settings: Data, sample: list[str]) -> Tokenizer:
    if settings.tokenizer == "bytes":
        return byte_tokenizer()
    if settings.tokenizer == "bpe":
        return train_bpe(sample, settings.vocabulary)
    tokenizer = load_tokenizer(Path(settings.tokenizer))
    if settings.form != "chat":
        tokenizer.check_corpus()
    return tokenizer


def _encode(tokenizer: Tokenizer, documents: Iterable[Document]) -> Iterator[tuple[list[Document], list[np.ndarray]]]:
    """Iterate over batches of documents with their tokens, in order; batches are encoded on all processors, with a
    bounded number in memory."""
    threads = processors()
    pending: deque[tuple[list[Document], Future[list[np.ndarray]]]] = deque()
    with single_threaded(), ThreadPoolExecutor(threads) as pool:
        for batch in _batches(documents):
            pending.append((batch, pool.submit(tokenizer.encode_batch, [document.text for document in batch])))
            while len(pending) > 2 * threads:
                ready, future = pending.popleft()
                yield ready, future.result()
        for ready, future in pending:
            yield ready, future.result()


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# -- token files written elsewhere -------------------------------------------------------------------------------------


def check_tokens(path: Path, settings: Data) -> tuple[Header, Tokenizer, Path | None]:
    """Check a token file; returns its header, its tokenizer, and the path of held_out.tokens in the same folder, or
    None.

    Raises:
        DataError: a file is damaged, or was written by another tokenizer.
    """
    header = _check_header(path)
    named = settings.tokenizer not in ("bpe", "bytes")
    tokenizer = load_tokenizer(Path(settings.tokenizer) if named else path.parent / "tokenizer.json")
    tokenizer.check_corpus()
    beside = path.with_name("held_out.tokens")
    split = beside != path and beside.is_file()
    for file, file_header in [(path, header)] + ([(beside, _check_header(beside))] if split else []):
        if file_header.vocab_size != tokenizer.vocab_size or file_header.tokenizer != tokenizer.hash:
            raise DataError(
                f"{file} was written by another tokenizer: it knew {file_header.vocab_size} tokens, and the one in use"
                f" knows {tokenizer.vocab_size}",
                hint="set data.tokenizer to the tokenizer.json that wrote it",
            )
    return header, tokenizer, beside if split else None


def _hold_out_tail(path: Path, header: Header, tokenizer: Tokenizer, settings: Data) -> Corpus:
    """The corpus of one token file, split at the document boundary that is closest to the configured held-out
    fraction."""
    whole = TokenDataset(path, settings.sequence)
    starts = np.flatnonzero(whole.ids == tokenizer.end_of_text)
    wanted = (1 - settings.held_out) * header.tokens
    cut = int(starts[np.abs(starts - wanted).argmin()]) if len(starts) else 0
    _check_length(cut, "training", settings)
    _check_length(header.tokens - cut, "held-out", settings)
    after = whole.ids[cut:]
    documents = int((starts >= cut).sum())
    size = sum(len(text.encode()) for text in tokenizer.decode_documents(after))
    train = TokenDataset(
        path, settings.sequence, stop=cut, size=header.bytes - size, documents=header.documents - documents
    )
    held_out = TokenDataset(path, settings.sequence, pad_last=True, start=cut, size=size, documents=documents)
    return Corpus(train, held_out, tokenizer)
