"""Chats: records of messages as tokens, of which the assistant's are trained, several chats in one sample.

A prepared file is safetensors: `tokens`, `trained` (one byte a token) and `starts` of the chats, one more than there
are; its header has what `Summary` lists.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor
from torch.utils.data import Dataset

from shoestring.core.errors import ConfigError, DataError, nearest
from shoestring.core.task import IGNORED
from shoestring.data import Data
from shoestring.data.chat_template import ChatTemplate, chat_template
from shoestring.data.sources import Source, key_of
from shoestring.data.tokenizer import Tokenizer
from shoestring.storage.whole import write_atomic

FILES = ("train.chats", "held_out.chats")
VERSION = "1"
_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What the header of a prepared file says."""

    recipe: str
    """Hash of what the file depends on."""
    content: str
    """SHA-256 of the tokens, and of which are trained."""
    bytes: str
    """Length in UTF-8 of the text that is trained."""
    version: str = VERSION


@dataclass(frozen=True)
class Chat:
    """A conversation: its tokens, and which of them are trained."""

    key: int
    tokens: list[int]
    trained: list[bool]


# -- preparing ---------------------------------------------------------------------------------------------------------


def with_template(tokenizer: Tokenizer, settings: Data) -> Tokenizer:
    """The tokenizer with the chat template that the settings name, which it keeps from now on."""
    if settings.template:
        try:
            tokenizer.companions[_TEMPLATE] = Path(settings.template).read_bytes()
        except OSError as error:
            raise DataError(f"cannot read the chat template `{settings.template}`: {error.strerror}") from error
    return tokenizer


def template_of(tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template that the tokenizer keeps.

    Raises:
        DataError: there is none, or it is not valid.
    """
    if (template := chat_template(tokenizer)) is None:
        hint = "name one by data.template, or start from a model that was made for chat"
        raise DataError("the model has no chat template", hint=hint)
    return template


def usable(folder: Path, recipe: str) -> bool:
    """Whether a folder holds the files of this recipe."""
    try:
        headers = [_header(folder / name) for name in FILES]
    except DataError:
        return False
    return all(header.get("recipe") == recipe and header.get("version") == VERSION for header in headers)


def write(reader: Source, tokenizer: Tokenizer, settings: Data, folder: Path, recipe: str) -> None:
    """Render and encode every record, and write those that are trained on and those that are held out.

    A record is held out by a hash of its content, whatever the order.

    Raises:
        DataError: a record is no chat, has no answer, or is refused by the template; it says which.
    """
    template = template_of(tokenizer)
    chats = sorted(
        (chat for where, record in reader.records() for chat in _chats(record, template, settings.record_field, where)),
        key=lambda chat: chat.key,
    )
    keys = sorted({chat.key for chat in chats})
    if len(keys) < 2:
        raise DataError("there are fewer than two different chats, so none can be held out", hint="give more of them")
    bound = keys[min(max(1, round(settings.held_out * len(keys))), len(keys) - 1)]
    train, held_out = ([chat for chat in chats if (chat.key < bound) is side] for side in (False, True))
    for name, part in zip(FILES, (train, held_out), strict=True):
        _write_file(folder / name, part, tokenizer, recipe)


def _chats(record: Mapping[str, Any], template: ChatTemplate, field: str, where: str) -> Iterator[Chat]:
    messages = _messages(record, field, where)
    arguments = {name: record[name] for name in ("tools", "documents", "chat_template_kwargs") if record.get(name)}
    more = arguments.pop("chat_template_kwargs", {})
    if not isinstance(more, Mapping):
        raise DataError(f'{where}: "chat_template_kwargs" is no object', hint="correct the record, or leave it out")
    arguments |= more
    try:
        samples = template.samples(messages, arguments)
    except ConfigError as error:
        raise DataError(f"{where}: {error.parts()[1]}", hint="correct the record, or leave it out") from error
    key = key_of(json.dumps(messages, sort_keys=True))
    if not any(any(trained[1:]) for _, trained in samples):
        hint = 'there is nothing to learn without a message of the role "assistant"; leave the record out'
        raise DataError(f"{where}: a chat without answers", hint=hint)
    yield from (Chat(key, tokens, trained) for tokens, trained in samples if any(trained[1:]))


def _messages(record: Mapping[str, Any], field: str, where: str) -> list[dict[str, Any]]:
    """The messages of a record, with a content of several parts of text as one text."""
    if field not in record:
        raise DataError(f"{where}: no field {field!r}", hint=f"data.field: {nearest(field, record)}")
    messages = record[field]
    if not isinstance(messages, list | tuple) or not messages:
        raise DataError(f"{where}: {field!r} is no list of messages", hint='a message is {"role": …, "content": …}')
    found = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            hint = 'a message is {"role": "user", "content": "…"}'
            raise DataError(f"{where}: message {number} is no object with a role", hint=hint)
        found.append({**message, "content": _content(message.get("content"), f"{where}: message {number}")})
    return found


def _content(content: Any, where: str) -> str:
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if content is not None and not isinstance(content, str):
        raise DataError(f"{where} has a content that is no text", hint="images and sound cannot be trained on")
    try:
        (content or "").encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where} holds half a surrogate pair", hint="repair the escape \\u....") from error
    return content or ""


def _write_file(path: Path, chats: Sequence[Chat], tokenizer: Tokenizer, recipe: str) -> None:
    tokens = np.array([token for chat in chats for token in chat.tokens], np.int32)
    trained = np.array([each for chat in chats for each in chat.trained], np.uint8)
    starts = np.cumsum([0, *(len(chat.tokens) for chat in chats)], dtype=np.int64)
    trained[starts[:-1]] = 0  # there is nothing that a first token could be told from
    content = hashlib.sha256(tokens.tobytes() + trained.tobytes() + starts.tobytes()).hexdigest()
    text = tokenizer.engine.decode(tokens[trained > 0].tolist(), skip_special_tokens=True)
    summary = Summary(recipe=recipe, content=content, bytes=str(len(text.encode())))
    write_atomic(path, save({"tokens": tokens, "trained": trained, "starts": starts}, asdict(summary)))


def _header(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, framework="numpy") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}", hint="delete it and prepare the chats again") from error


# -- samples -----------------------------------------------------------------------------------------------------------


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Items of these lengths in as few samples of `room` as best fit, the longest first, makes of them; by number."""
    packed: list[list[int]] = []
    left: dict[int, list[int]] = {}  # room that is left -> samples
    rooms: list[int] = []  # the keys of these, in order
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        place = bisect_left(rooms, lengths[item])
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

    A sample is {"input_ids", "labels", "position_ids"}, int64 (T,) each: positions begin anew with each chat, by which
    models know that chats do not see each other, and labels are the tokens themselves where they are trained, else
    `IGNORED`. What is left of a sample is padded. A chat that is longer than a sample is cut at its end, and left out
    where no answer remains.

    Raises:
        DataError: the file is damaged, or no chat remains.
    """

    skipped = duplicates = 0

    def __init__(self, path: Path, sequence: int) -> None:
        self.path, self.sequence = path, sequence
        header = self._read()
        self.content = header["content"]
        lengths = np.diff(self._starts).clip(max=sequence)
        answers = [self._trained[s : s + n].any() for s, n in zip(self._starts[:-1], lengths, strict=True)]
        self._kept = np.flatnonzero(answers)
        self.cut = int((np.diff(self._starts) > sequence).sum())
        self.left_out = len(lengths) - len(self._kept)
        if not len(self._kept):
            said = f"no chat has an answer within its first {sequence} tokens"
            raise DataError(said, hint="raise data.sequence")
        self._samples = [[int(self._kept[item]) for item in sample] for sample in pack(lengths[self._kept], sequence)]
        self.documents = len(lengths)
        self.tokens = int(lengths[self._kept].sum())
        self.targets = sum(int(self._trained[s : s + n].sum()) for s, n in zip(self._starts[:-1], lengths, strict=True))
        self.bytes = int(header["bytes"])
        self.targets_per_byte = int(self._trained.sum()) / self.bytes if self.bytes else 0.0

    def _read(self) -> dict[str, str]:
        header = _header(self.path)
        try:
            with safe_open(self.path, framework="numpy") as file:
                self._tokens, self._trained, self._starts = map(file.get_tensor, ("tokens", "trained", "starts"))
        except (OSError, SafetensorError) as error:
            raise DataError(f"{self.path} is damaged: {error}", hint="delete it and prepare the chats again") from error
        return header

    @property
    def fingerprint(self) -> str:
        """Equal if and only if the samples are."""
        return f"{self.content}:{self.sequence}"

    @property
    def ids(self) -> np.ndarray:
        """Every token, (tokens,)."""
        return self._tokens

    @property
    def notes(self) -> Iterator[str]:
        """What is to be said of how chats became samples."""
        full = self.tokens / (len(self) * self.sequence)
        yield f"{self.documents:,} chats in {len(self):,} samples of {self.sequence} tokens, which are {full:.0%} full"
        if self.cut:
            without = f", and {self.left_out} are left out, for no answer remains" if self.left_out else ""
            yield f"{self.cut} chats are longer than data.sequence and are cut{without}"

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
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
        return {
            "input_ids": torch.from_numpy(inputs),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(positions),
        }

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        return [self[index] for index in indices]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_tokens", "_trained", "_starts")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._read()
