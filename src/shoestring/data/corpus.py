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
from shoestring.data import Data, chats
from shoestring.data.joined import Tokens
from shoestring.data.sources import Document, Source, open_source
from shoestring.data.tokenizer import COMPANIONS, Tokenizer, byte_tokenizer, load_tokenizer, single_threaded, train_bpe
from shoestring.data.tokens import Header, TokenDataset, TokenWriter, read_header, verify

SAMPLE = 8 << 20
"""Characters of training text that a tokenizer is trained on."""
_BATCH = 1 << 19
"""Characters encoded at a time."""
_VERIFIED = 1 << 30
"""Largest file whose content hash is checked before it is used again, in bytes."""
_SEPARATOR = "\0"


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: training tokens, held-out tokens, and their tokenizer."""

    train: Tokens
    held_out: Tokens
    """Covers every held-out token: its last sample is padded."""
    tokenizer: Tokenizer
    parts: Mapping[str, Corpus] = field(default_factory=dict)
    """The corpus of each source by its name, of a mixture; empty where there is one source."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 that is equal if and only if the tokens of both parts are."""
        parts = [self.train.content, self.held_out.content]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def documents(self) -> int:
        """Documents in both parts."""
        return self.train.documents + self.held_out.documents

    def train_texts(self) -> bytes:
        """The training documents in UTF-8, joined by zero bytes; all in memory."""
        return _texts(self.tokenizer, self.train)

    def held_out_texts(self) -> bytes:
        """The held-out documents in UTF-8, joined by zero bytes; all in memory."""
        return _texts(self.tokenizer, self.held_out)

    @property
    def bytes(self) -> int:
        """Bytes of text in both parts, separators not counted."""
        return self.train.bytes + self.held_out.bytes

    @property
    def skipped(self) -> int:
        """Files left out because they are not UTF-8."""
        return self.train.skipped

    @property
    def duplicates(self) -> int:
        """Documents left out because an earlier one has the same text."""
        return self.train.duplicates


def _texts(tokenizer: Tokenizer, part: Tokens) -> bytes:
    return _SEPARATOR.join(tokenizer.decode_documents(part.ids)).encode()


def prepare_source(source: str, settings: Data, folder: Path) -> Corpus:
    """Read `source`, train or load its tokenizer, split it by document, and write its tokens to `folder`.

    `source` is `python-stdlib`, paths or globs of text, .jsonl and .parquet files with commas between them, a .tokens
    file, or `hf:NAME[@CONFIG][:SPLIT]`. The files tokenizer.json, train.tokens and held_out.tokens appear complete or
    not at all, and are used again while the source's files and the settings stay as they were. A document is held out
    by a hash of its name (of its text, for records), whatever the order; documents with the text of an earlier one are
    left out. A .tokens file is used where it is.

    Raises:
        ConfigError: a setting is out of range.
        DataError: the source is missing, empty, too short, or is not text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if source.endswith(".tokens"):
        return _from_tokens(Path(source), settings, folder)
    reader = open_source(source, settings.record_field)
    recipe = recipe_of(reader, settings)
    if settings.form == "chat":
        return _prepare_chats(reader, settings, folder, recipe)
    if not _usable(folder, recipe):
        _write(reader, settings, folder, recipe)
    return _open(folder, settings)


def begin_with(folder: Path, other: Path) -> None:
    """Let a new run folder begin with what was prepared in another one, as links: what fits is used again."""
    names = ("tokenizer.json", "tokenizer.recipe", "train.tokens", "held_out.tokens", *COMPANIONS, *chats.FILES)
    for path in (*map(other.joinpath, names), *(other / "data").rglob("*")):
        place = folder / path.relative_to(other)
        if path.is_file() and not place.exists():
            with suppress(OSError):  # a file system without links, or a file that was replaced meanwhile
                place.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, place)


def _prepare_chats(reader: Source, settings: Data, folder: Path, recipe: str) -> Corpus:
    if settings.tokenizer == "bpe":
        raise DataError("chats need the tokenizer of a model", hint='set data.tokenizer = "model"')
    tokenizer = chats.with_template(_tokenizer(settings, []), settings)
    if not chats.usable(folder, recipe):
        chats.write(reader, tokenizer, settings, folder, recipe)
        tokenizer.save(folder / "tokenizer.json")
    train, held_out = (chats.ChatDataset(folder / name, settings.sequence) for name in chats.FILES)
    return Corpus(train, held_out, tokenizer)


def _open(folder: Path, settings: Data) -> Corpus:
    train = TokenDataset(folder / "train.tokens", settings.sequence)
    held_out = TokenDataset(folder / "held_out.tokens", settings.sequence, pad_last=True)
    return Corpus(train, held_out, load_tokenizer(folder / "tokenizer.json"))


def recipe_of(reader: Source, settings: Data) -> str:
    """Hash everything that the token files depend on."""
    relevant = {
        name: value for name, value in asdict(settings).items() if name not in ("sequence", "workers", "weights")
    }
    path = Path(settings.tokenizer)
    files = [each for each in (path, *map(path.with_name, COMPANIONS)) if path.is_file() and each.is_file()]
    files += [Path(settings.template)] if settings.template and Path(settings.template).is_file() else []
    content = hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest() if files else ""
    table = [relevant, content, SAMPLE, reader.identity()]
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def _usable(folder: Path, recipe: str) -> bool:
    """Whether `folder` holds undamaged files of this recipe."""
    try:
        headers = [_check_header(folder / name) for name in ("train.tokens", "held_out.tokens")]
        tokenizer = load_tokenizer(folder / "tokenizer.json").hash
    except DataError:
        return False
    return all(header.recipe == recipe and header.tokenizer == tokenizer for header in headers)


def _check_header(path: Path) -> Header:
    header = read_header(path)
    return verify(path) if path.stat().st_size <= _VERIFIED else header


# ---- writing the files -----------------------------------------------------------------------------------------------


class Survey:
    """One pass over the documents: which sides of the split exist, and a sample to train a tokenizer on."""

    def __init__(self, reader: Source, settings: Data, sample: int) -> None:
        self.duplicates = 0
        share = int(settings.held_out * 2**64)
        least, most = 2**64, -1
        heap: list[tuple[int, str]] = []  # the documents of largest key, smallest first: sure to be training text
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
        """`documents` without those whose text came before; counts the others in `duplicates`."""
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
    return load_tokenizer(Path(settings.tokenizer))


def _encode(tokenizer: Tokenizer, documents: Iterable[Document]) -> Iterator[tuple[list[Document], list[np.ndarray]]]:
    """Batches of documents and their tokens, in order; encoded on every core, with a bounded number in memory."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
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


# ---- token files written elsewhere -----------------------------------------------------------------------------------


def _from_tokens(path: Path, settings: Data, folder: Path) -> Corpus:
    """The corpus in a token file: with the held_out.tokens beside it, or with its last documents held out."""
    header = _check_header(path)
    named = settings.tokenizer not in ("bpe", "bytes")
    tokenizer = load_tokenizer(Path(settings.tokenizer) if named else path.parent / "tokenizer.json")
    beside = path.with_name("held_out.tokens")
    split = beside != path and beside.is_file()
    for file, its_header in [(path, header)] + ([(beside, _check_header(beside))] if split else []):
        _check_tokenizer(file, its_header, tokenizer)
    tokenizer.save(folder / "tokenizer.json")
    if split:
        train = TokenDataset(path, settings.sequence)
        return Corpus(train, TokenDataset(beside, settings.sequence, pad_last=True), tokenizer)
    return _hold_out_tail(path, header, tokenizer, settings)


def _check_tokenizer(path: Path, header: Header, tokenizer: Tokenizer) -> None:
    if header.vocab_size != tokenizer.vocab_size or header.tokenizer != tokenizer.hash:
        raise DataError(
            f"{path} was written by another tokenizer, of {header.vocab_size} tokens, not {tokenizer.vocab_size}",
            hint="set data.tokenizer to the tokenizer.json that wrote it",
        )


def _hold_out_tail(path: Path, header: Header, tokenizer: Tokenizer, settings: Data) -> Corpus:
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
