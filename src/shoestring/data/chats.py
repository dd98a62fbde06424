"""Chats: conversations as tokens, packed into samples of several chats; only the assistant's tokens are trained on.

A prepared file is a safetensors file with the tensors `tokens`, `trained` (one byte a token) and `starts` (the index of
each chat's first token, and the number of tokens). Its header holds the fields of `Summary`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import save
from torch import Tensor
from torch.utils.data import Dataset

from shoestring import figures
from shoestring.core.errors import ConfigError, DataError
from shoestring.core.task import IGNORED
from shoestring.data import Data
from shoestring.data.built_in_templates import with_template
from shoestring.data.chat_formats import ChatRecord, parse_chat
from shoestring.data.confined_template import ConfinedTemplate
from shoestring.data.sources import Source, key_of
from shoestring.data.tokenizer import Tokenizer
from shoestring.storage import foreign
from shoestring.storage.whole import write_atomic

log = logging.getLogger("shoestring.data")

FILES = ("train.chats", "held_out.chats")
VERSION = "2"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The fields in the header of a prepared file."""

    recipe: str
    """Hash of the source and settings that the file depends on."""
    content: str
    """SHA-256 of the tensors `tokens`, `trained` and `starts`."""
    bytes: str
    """Length in bytes (UTF-8) of the text that is trained on."""
    version: str = VERSION


@dataclass(frozen=True)
class Chat:
    """A conversation: its tokens, and flags of the tokens that are trained on."""

    key: int
    tokens: list[int]
    trained: list[bool]


# -- preparing ---------------------------------------------------------------------------------------------------------


def usable(folder: Path, recipe: str) -> bool:
    """Whether a folder holds files that were prepared by this recipe."""
    try:
        headers = [_header(folder / name) for name in FILES]
    except DataError:
        return False
    return all(header.get("recipe") == recipe and header.get("version") == VERSION for header in headers)


def write(reader: Source, tokenizer: Tokenizer, settings: Data, folder: Path, recipe: str) -> None:
    """Render and encode every record, and write the training and the held-out chats.

    A hash of a record's content decides whether the record is held out, so the order of the records does not matter.

    Raises:
        DataError: a record is not a chat, has no answer, or the template refuses it; the message names the record.
    """
    chats: list[Chat] = []
    muted = 0
    with closing(ConfinedTemplate(tokenizer)) as template:
        for where, record in parsed_chats(reader, settings.record_field):
            chats += samples_of(record, template, where)
            muted += not record.learnt
    if muted:
        log.warning("data: %d records have a weight of 0 and are left out", muted)
    chats.sort(key=lambda chat: chat.key)
    keys = sorted({chat.key for chat in chats})
    if not keys:
        raise DataError("the data has no chats to learn", hint="are the files empty?")
    if settings.held_out == 0:
        log.warning("data.held_out is 0: training uses all chats, so held-out losses are measured on training data")
        train = held_out = chats
    elif len(keys) > 1:
        bound = keys[min(max(1, round(settings.held_out * len(keys))), len(keys) - 1)]
        train, held_out = ([chat for chat in chats if (chat.key < bound) is side] for side in (False, True))
    else:
        hint = "give more chats, or set data.held_out = 0 to learn all"
        raise DataError("there are fewer than two different chats, so none can be held out", hint=hint)
    for name, part in zip(FILES, (train, held_out), strict=True):
        tokens = np.array([token for chat in part for token in chat.tokens], np.int32)
        trained = np.array([flag for chat in part for flag in chat.trained], np.uint8)
        starts = np.cumsum([0, *(len(chat.tokens) for chat in part)], dtype=np.int64)
        trained[starts[:-1]] = 0  # a first token has no context to be predicted from
        content = hashlib.sha256(tokens.tobytes() + trained.tobytes() + starts.tobytes()).hexdigest()
        text = tokenizer.engine.decode(tokens[trained > 0].tolist(), skip_special_tokens=True)
        summary = Summary(recipe=recipe, content=content, bytes=str(len(text.encode())))
        tensors = {"tokens": tokens, "trained": trained, "starts": starts}
        write_atomic(folder / name, save(tensors, asdict(summary)))


def check_records(reader: Source, tokenizer: Tokenizer, settings: Data, characters: int) -> None:
    """Render and encode the first records, about `characters` in all, and discard the result.

    Raises:
        DataError: as for `write`.
    """
    with closing(ConfinedTemplate(with_template(tokenizer, settings.template))) as template:
        for where, record in parsed_chats(reader, settings.record_field):
            for _ in samples_of(record, template, where):
                pass
            characters -= len(str(record.messages))
            if characters <= 0:
                return


def parsed_chats(reader: Source, field: str) -> Iterator[tuple[str, ChatRecord]]:
    """Iterate over the records of a source, parsed as conversations; each comes with its place for error messages.

    Raises:
        DataError: a record is not a chat, or has another format than the earlier records of its file.
    """
    first: dict[str, tuple[str, str]] = {}
    for where, values, file in reader.records(field):
        record = parse_chat(values, field, where)
        format_before, place = first.setdefault(file, (record.format, where))
        if record.format != format_before:
            hint = "give each format a file of its own"
            raise DataError(
                f"{where}: the record has the format {record.format}, but {place} has {format_before}", hint=hint
            )
        yield where, record


def samples_of(record: ChatRecord, template: ConfinedTemplate, where: str) -> Iterator[Chat]:
    """The samples of a record that contain tokens to train on; `where` is the record's place for error messages.

    Raises:
        DataError: the record has no answers, or the template refuses it.
    """
    if not record.learnt:
        return
    try:
        samples = template.samples(record.messages, record.arguments)
    except ConfigError as error:
        raise DataError(f"{where}: {error.parts()[1]}", hint="correct the record, or leave it out") from error
    key = key_of(json.dumps(record.messages, sort_keys=True))
    if not any(any(trained[1:]) for _, trained in samples):
        hint = 'there is nothing to learn without a message of the role "assistant"; leave the record out'
        roles = {str(message.get("role")) for message in record.messages}
        if close := get_close_matches("assistant", roles, n=1):
            hint = f"write the role `assistant` for `{close[0]}`"
        raise DataError(f"{where}: a chat without answers", hint=hint)
    yield from (Chat(key, tokens, trained) for tokens, trained in samples if any(trained[1:]))


def _header(path: Path) -> dict[str, str]:
    try:
        with foreign.open_safetensors(path, "numpy") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}", hint="delete it and prepare the chats again") from error


# -- samples -----------------------------------------------------------------------------------------------------------


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Pack items of the given `lengths` into samples of length at most `room`, by best fit, longest first; returns the
    item numbers of each sample."""
    packed: list[list[int]] = []
    left: dict[int, list[int]] = {}  # maps free room to the samples that have it
    rooms: list[int] = []  # the keys of `left`, sorted
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        place = bisect_left(rooms, lengths[item])  # the smallest free room that the item fits into
        if place == len(rooms):
            free, sample = room, len(packed)
            packed.append([])
        else:
            free = rooms[place]
            sample = left[free].pop()
            if not left[free]:
                del left[free], rooms[place]
        packed[sample].append(item)
        if rest := free - lengths[item]:
            if rest not in left:
                left[rest] = []
                insort(rooms, rest)
            left[rest].append(sample)
    return packed


class ChatDataset(Dataset[dict[str, Tensor]]):
    """Map-style data set of the chats in a prepared file, several in each sample of `sequence` tokens.

    A sample is {"input_ids", "labels", "position_ids"}, int64 (T,) each. Positions restart at 0 with each chat, which
    keeps models from attending across chats. A label is the token itself if the token is trained on, otherwise
    `IGNORED`. The end of a sample is filled with padding. A chat longer than a sample is truncated, or left out if its
    answers lie beyond the cut.

    Args:
        packed: whether chats are packed; False gives each chat its own sample, without `position_ids`, for models in
            which packed chats would attend to each other.

    Raises:
        DataError: the file is damaged, or no chat remains.
    """

    skipped = duplicates = 0
    draws = False
    """See `Loader`."""

    def __init__(self, path: Path, sequence: int, *, packed: bool = True) -> None:
        self.path, self.sequence, self.packed = path, sequence, packed
        header = self._read()
        self.content = header["content"]
        lengths = np.diff(self._starts).clip(max=sequence)
        answers = [self._trained[s : s + n].any() for s, n in zip(self._starts[:-1], lengths, strict=True)]
        with_answer = np.flatnonzero(answers)
        self.cut = int((np.diff(self._starts) > sequence).sum())
        self.left_out = len(lengths) - len(with_answer)
        if not len(with_answer):
            raise DataError(f"no chat has an answer within its first {sequence} tokens", hint="raise data.sequence")
        samples = pack(lengths[with_answer], sequence) if packed else [[item] for item in range(len(with_answer))]
        self._samples = [[int(with_answer[item]) for item in sample] for sample in samples]
        self.room = len(samples) * sequence
        """Number of tokens that the samples have room for."""
        self.documents = len(lengths)
        self.tokens = int(lengths[with_answer].sum())
        self.targets = sum(int(self._trained[s : s + n].sum()) for s, n in zip(self._starts[:-1], lengths, strict=True))
        begins = np.diff(self._trained, prepend=0) == 1
        per_chat = np.add.reduceat(begins, self._starts[:-1]) if len(begins) else begins
        self.single_answers = bool((per_chat[self._starts[:-1] < self._starts[1:]] <= 1).all())
        """Whether every chat has at most one answer, so that the model does not learn to answer follow-up messages."""
        self.bytes = int(header["bytes"])
        self.targets_per_byte = int(self._trained.sum()) / self.bytes if self.bytes else 0.0

    def _read(self) -> dict[str, str]:
        """Read the tensors of the file, and check them; returns its header."""
        header = _header(self.path)
        try:
            with foreign.open_safetensors(self.path, "numpy") as file:
                self._tokens, self._trained, self._starts = map(file.get_tensor, ("tokens", "trained", "starts"))
            ends = self._starts[[0, -1]].tolist()
            if ends != [0, len(self._tokens)] or self._trained.shape != self._tokens.shape or "content" not in header:
                raise ValueError("its tensors do not fit each other")
            if (np.diff(self._starts) < 0).any() or not header["bytes"].isdigit():
                raise ValueError("its chats overlap or are out of order")
        except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
            raise DataError(f"{self.path} is damaged: {error}", hint="delete it and prepare the chats again") from error
        return header

    @property
    def fingerprint(self) -> str:
        """Identifies the samples: two data sets have equal fingerprints if and only if their samples are equal."""
        return f"{self.content}:{self.sequence}" + ("" if self.packed else ":apart")

    @property
    def ids(self) -> np.ndarray:
        """All tokens of the file, (tokens,)."""
        return self._tokens

    @property
    def notes(self) -> Iterator[str]:
        """Sentences for the user about how chats were packed and truncated."""
        full = self.tokens / self.room
        samples = f"{len(self):,} samples of {self.sequence} tokens, which are {figures.percent(full)} full"
        yield f"{self.documents:,} chats in {samples}"
        if self.cut:
            without = f"; {self.left_out} are left out, because none of their answers remains" if self.left_out else ""
            yield f"{self.cut} chats are longer than data.sequence and are cut{without}"

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        inputs, positions = np.zeros(self.sequence, np.int64), np.arange(self.sequence)
        labels = np.full(self.sequence, IGNORED, np.int64)
        at = 0
        for chat in self._samples[index]:
            start = self._starts[chat]
            count = min(int(self._starts[chat + 1] - start), self.sequence)
            tokens = self._tokens[start : start + count]
            inputs[at : at + count], positions[at:] = tokens, np.arange(self.sequence - at)
            labels[at : at + count] = np.where(self._trained[start : start + count], tokens, IGNORED)
            at += count
        positions[at:] = np.arange(self.sequence - at)
        sample = {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
        return {**sample, "position_ids": torch.from_numpy(positions)} if self.packed else sample

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        return [self[index] for index in indices]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_tokens", "_trained", "_starts")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._read()
