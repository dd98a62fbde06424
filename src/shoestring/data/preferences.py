"""Preference data as tokens: pairs of answers to one prompt, or single rated answers.

A prepared file has the format of `chats`, in which each answer, together with its prompt, is a separate chat. The file
has two more tensors: `records`, the number of the record that each answer belongs to, and `kinds`, the kind of each
answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import save
from torch import Tensor

from shoestring import figures
from shoestring.core.errors import ConfigError, DataError
from shoestring.core.task import IGNORED
from shoestring.data import Data
from shoestring.data.built_in_templates import with_template
from shoestring.data.chat_formats import Message, PreferencePair, RatedAnswer, parse_record
from shoestring.data.chat_messages import silenced
from shoestring.data.chats import FILES, ChatDataset, Summary, pack
from shoestring.data.confined_template import ConfinedTemplate
from shoestring.data.sources import Source, key_of
from shoestring.data.tokenizer import Tokenizer
from shoestring.storage import foreign
from shoestring.storage.whole import write_atomic

CHOSEN, REJECTED, MISMATCHED = range(3)
"""Kinds of answers: chosen or desirable; rejected or undesirable; answer to another prompt (for KTO)."""
KINDS = 3
ANSWERS = "answers"
"""Name of a sample's entry that says which answer each token belongs to. Its values are `KINDS` · n + kind for tokens
of an answer of the n-th record, and -1 for padding and for beginnings that several answers share."""
_SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class EncodedAnswer:
    """A prompt followed by an answer: the tokens of both, and flags of the tokens that belong to the answer."""

    kind: int
    tokens: list[int]
    trained: list[bool]


@dataclass(frozen=True)
class EncodedRecord:
    """The answers of one record, which are placed in the same sample."""

    key: int
    """Hash of the prompt; decides whether the record is held out, so that all answers to a prompt are on the same side
    of the split."""
    answers: list[EncodedAnswer]


# -- preparing ---------------------------------------------------------------------------------------------------------


def write(reader: Source, tokenizer: Tokenizer, settings: Data, folder: Path, recipe: str) -> None:
    """Render and encode every record, and write the training and the held-out records.

    Raises:
        DataError: a record holds no preference, its two answers are identical, or the template refuses it; the message
            names the record.
    """
    with closing(ConfinedTemplate(tokenizer)) as template:
        rated = settings.form == "rated"
        parsed = sorted(parsed_records(reader, settings), key=lambda item: key_of_prompt(item[1]))
        keys = sorted({key_of_prompt(record) for _, record in parsed})
        if len(keys) < 2:
            raise DataError("there are fewer than two different prompts, so none can be held out", hint="give more")
        bound = keys[min(max(1, round(settings.held_out * len(keys))), len(keys) - 1)]
        for name, held_out in zip(FILES, (False, True), strict=True):
            part = [(where, record) for where, record in parsed if (key_of_prompt(record) < bound) is held_out]
            records = _rated(part, template) if rated else [_pair(record, template, where) for where, record in part]
            _write_file(folder / name, records, tokenizer, recipe)


def check_records(reader: Source, tokenizer: Tokenizer, settings: Data, characters: int) -> None:
    """Render and encode the first records, about `characters` in all, and discard the result.

    Raises:
        DataError: as for `write`.
    """
    with closing(ConfinedTemplate(with_template(tokenizer, settings.template))) as template:
        for where, record in parsed_records(reader, settings):
            if isinstance(record, PreferencePair):
                _pair(record, template, where)
            else:
                _rated([(where, record)], template)
            characters -= len(str(record))
            if characters <= 0:
                return


def parsed_records(reader: Source, settings: Data) -> Iterator[tuple[str, PreferencePair | RatedAnswer]]:
    """Iterate over the parsed records of a source, each with its location, for error messages. If `data.form` is
    "rated", a pair becomes two rated answers.

    Raises:
        DataError: a record holds no preference, or a single answer where a pair is needed, or its two answers are
            identical.
    """
    for where, values, _ in reader.records(settings.record_field):
        parsed = parse_record(values, settings.record_field, where)
        if isinstance(parsed, PreferencePair):
            if parsed.chosen == parsed.rejected:
                raise DataError(
                    f"{where}: the chosen and the rejected answer are identical", hint="leave the record out"
                )
            if settings.form == "rated":
                for answer, desirable in ((parsed.chosen, True), (parsed.rejected, False)):
                    yield where, RatedAnswer(parsed.prompt, answer, desirable, parsed.arguments)
                continue
        elif not isinstance(parsed, RatedAnswer):
            hint = "a pair has `prompt`, `chosen` and `rejected`; a rated answer `prompt`, `completion` and `label`"
            raise DataError(f"{where}: not a preference, but a record of the format {parsed.format}", hint=hint)
        elif settings.form == "preference":
            hint = 'train with [preference.kto] and data.form = "rated"'
            raise DataError(f"{where}: a rated answer, but pairs are needed", hint=hint)
        yield where, parsed


def key_of_prompt(record: PreferencePair | RatedAnswer) -> int:
    return key_of(json.dumps(record.prompt, sort_keys=True))


def _pair(record: PreferencePair | RatedAnswer, template: ConfinedTemplate, where: str) -> EncodedRecord:
    assert isinstance(record, PreferencePair)
    answers = [
        _answer(kind, record.prompt, answer, record.arguments, template, f"{where}: the {_SIDES[kind]} answer")
        for kind, answer in enumerate((record.chosen, record.rejected))
    ]
    if answers[CHOSEN].tokens == answers[REJECTED].tokens:
        hint = "leave the record out, or correct the template, which drops what tells them apart"
        raise DataError(f"{where}: the chat template renders the chosen and the rejected answer alike", hint=hint)
    return EncodedRecord(key_of_prompt(record), answers)


def _rated(part: Sequence[tuple[str, PreferencePair | RatedAnswer]], template: ConfinedTemplate) -> list[EncodedRecord]:
    """Encode rated answers. Each record also gets the answer of the next record as a mismatched answer, from which KTO
    estimates KL."""
    records = []
    for number, (where, record) in enumerate(part):
        assert isinstance(record, RatedAnswer)
        other_where, other = part[(number + 1) % len(part)]
        assert isinstance(other, RatedAnswer)
        kind = CHOSEN if record.desirable else REJECTED
        own = _answer(kind, record.prompt, record.completion, record.arguments, template, where)
        place = f"{where}: with the answer of {other_where}"
        strange = _answer(MISMATCHED, record.prompt, other.completion, record.arguments, template, place)
        records.append(EncodedRecord(key_of_prompt(record), [own, strange]))
    return records


def _answer(
    kind: int,
    prompt: Sequence[Message],
    answer: Sequence[Message],
    arguments: Mapping[str, Any],
    template: ConfinedTemplate,
    where: str,
) -> EncodedAnswer:
    """Render and encode a prompt and its answer; the prompt is not trained on."""
    try:
        samples = template.samples([*map(silenced, prompt), *answer], dict(arguments))
    except ConfigError as error:
        raise DataError(f"{where}: {error.parts()[1]}", hint="correct the record, or leave it out") from error
    learnt = [(tokens, trained) for tokens, trained in samples if any(trained[1:])]
    if len(learnt) != 1:
        what = "has nothing to learn" if not learnt else "has several turns, which the chat template renders apart"
        raise DataError(f"{where} {what}", hint="an answer is the last message, of the role assistant")
    return EncodedAnswer(kind, *learnt[0])


def _write_file(path: Path, records: Sequence[EncodedRecord], tokenizer: Tokenizer, recipe: str) -> None:
    answers = [answer for record in records for answer in record.answers]
    tokens = np.array([token for answer in answers for token in answer.tokens], np.int32)
    trained = np.array([flag for answer in answers for flag in answer.trained], np.uint8)
    starts = np.cumsum([0, *(len(answer.tokens) for answer in answers)], dtype=np.int64)
    trained[starts[:-1]] = 0  # a first token has no context to be predicted from
    numbers = np.array([number for number, record in enumerate(records) for _ in record.answers], np.int64)
    kinds = np.array([answer.kind for answer in answers], np.uint8)
    tensors = {"tokens": tokens, "trained": trained, "starts": starts, "records": numbers, "kinds": kinds}
    content = hashlib.sha256(b"".join(tensor.tobytes() for tensor in tensors.values())).hexdigest()
    text = tokenizer.engine.decode(tokens[trained > 0].tolist(), skip_special_tokens=True)
    summary = Summary(recipe=recipe, content=content, bytes=str(len(text.encode())))
    write_atomic(path, save(tensors, asdict(summary)))


# -- samples -----------------------------------------------------------------------------------------------------------


class PreferenceDataset(ChatDataset):
    """Map-style data set of the records in a prepared file, several in each sample of `sequence` tokens.

    A sample is like a sample of `ChatDataset`, with the additional entry `ANSWERS`, int64 (T,). All answers of a record
    are in one sample. No answer is ever cut: a record whose answers do not fit into a sample is left out.

    Args:
        packed: whether answers are packed; False gives each record its own sample and each of its answers its own row,
            for models in which packed answers would attend to each other. Entries are then (R, T), for the R answers
            of a record and the longest answer of T <= `sequence` tokens, and there are no `position_ids`.
        shared: whether the beginning that all answers of a record have in common is stored only once in a sample. An
            additional entry `attention_mask`, bool (1, T, T), lets all answers attend to the beginning but not to each
            other. The last token before the answers is repeated for every answer, because the first token of each
            answer needs a separate position that predicts it.

    Raises:
        DataError: the file is damaged.
    """

    def __init__(self, path: Path, sequence: int, *, packed: bool = True, shared: bool = False) -> None:
        self.path, self.sequence, self.packed, self.shared = path, sequence, packed, shared
        header = self._read()
        self.content = header["content"]
        lengths = np.diff(self._starts)
        bounds = np.searchsorted(self._records, np.arange(self.documents + 1))
        members = [np.arange(first, end) for first, end in pairwise(bounds.tolist())]
        self._common = [self._beginning(answers) if shared else 0 for answers in members]
        """For each record, the number of tokens that its answers share in a sample."""
        sizes = np.array(
            [
                int(lengths[own].sum()) - (len(own) - 1) * common
                for own, common in zip(members, self._common, strict=True)
            ]
        )
        longest = np.array([int(lengths[answers].max()) for answers in members])
        fitting = np.flatnonzero((sizes if packed else longest) <= sequence)
        self.cut, self.left_out = 0, len(sizes) - len(fitting)
        self._shortest = int((sizes if packed else longest).min(initial=0))
        samples = pack(sizes[fitting].tolist(), sequence) if packed else [[item] for item in range(len(fitting))]
        whole = sum(int(lengths[members[item]].sum()) for item in fitting)
        self._saved = 1 - int(sizes[fitting].sum()) / max(whole, 1)
        self._samples = [[int(answer) for item in sample for answer in members[fitting[item]]] for sample in samples]
        self._row = sequence if packed else int(longest[fitting].max(initial=0))
        self.room = len(samples) * sequence if packed else sum(map(len, self._samples)) * self._row
        self.tokens = int(sizes[fitting].sum())
        fits = np.isin(self._records, fitting)
        self.targets = sum(
            int(self._trained[start:end].sum())
            for start, end, there in zip(self._starts[:-1], self._starts[1:], fits, strict=True)
            if there
        )
        # A loss over preferences cannot be converted to bits per byte.
        self.bytes, self.targets_per_byte = int(header["bytes"]), 0.0

    def _read(self) -> dict[str, str]:
        header = super()._read()
        try:
            with foreign.open_safetensors(self.path, "numpy") as file:
                self._records, self._kinds = map(file.get_tensor, ("records", "kinds"))
            if not len(self._records) == len(self._kinds) == len(self._starts) - 1:
                raise ValueError("its parts do not fit each other")
            if (np.diff(self._records, prepend=0) < 0).any() or (self._kinds >= KINDS).any():
                raise ValueError("its records overlap or are out of order")
        except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
            raise DataError(f"{self.path} is damaged: {error}", hint="delete it and prepare the data again") from error
        self.documents = int(self._records[-1]) + 1 if len(self._records) else 0
        return header

    def _beginning(self, answers: np.ndarray) -> int:
        """Number of tokens at the beginning of a record that all its answers can share; excludes the token before the
        first trained token, which every answer needs separately."""
        texts = [self._tokens[self._starts[answer] : self._starts[answer + 1]] for answer in answers]
        shortest = min(map(len, texts))
        alike = np.all([text[:shortest] == texts[0][:shortest] for text in texts], axis=0)
        trained = (self._trained[self._starts[answer] : self._starts[answer + 1]] for answer in answers)
        firsts = [int(flags.argmax()) if flags.any() else len(flags) for flags in trained]
        differs = shortest if alike.all() else int(alike.argmin())
        return max(0, min(differs, *firsts) - 1)

    def check_fits(self) -> None:
        """Raise DataError if no record fits into a sample; called once the layout is decided, because records may fit
        in another layout."""
        if not len(self):
            raise DataError(
                f"no record fits into a sample of {self.sequence} tokens; the shortest takes {self._shortest}",
                hint="raise data.sequence",
            )

    @property
    def fingerprint(self) -> str:
        return super().fingerprint + (":shared" if self.shared else "")

    @property
    def notes(self) -> Iterator[str]:
        """Sentences for the user about how records were packed and left out."""
        full = figures.percent(self.tokens / max(self.room, 1))
        shape = f"{self.sequence} tokens" if self.packed else f"one row of {self._row} tokens for each answer"
        yield f"{self.documents:,} preferences in {len(self):,} samples of {shape}, which are {full} full"
        if self.shared:
            yield f"answers to one prompt share it, so there are {figures.percent(self._saved)} fewer tokens to read"
        if self.left_out:
            yield f"{self.left_out:,} preferences do not fit into data.sequence and are left out; no answer is cut"

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        if self.packed:
            return self._packed(index)
        rows = self._samples[index]
        inputs, labels = np.zeros((len(rows), self._row), np.int64), np.full((len(rows), self._row), IGNORED, np.int64)
        answers = np.full((len(rows), self._row), -1, np.int64)
        for row, answer in enumerate(rows):
            own = slice(self._starts[answer], self._starts[answer + 1])
            tokens, count = self._tokens[own], self._starts[answer + 1] - self._starts[answer]
            inputs[row, :count], answers[row, :count] = tokens, self._kinds[answer]
            labels[row, :count] = np.where(self._trained[own], tokens, IGNORED)
        arrays = {"input_ids": inputs, "labels": labels, ANSWERS: answers}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _packed(self, index: int) -> dict[str, Tensor]:
        inputs, positions = np.zeros(self.sequence, np.int64), np.zeros(self.sequence, np.int64)
        labels, answers = (np.full(self.sequence, value, np.int64) for value in (IGNORED, -1))
        records = np.full(self.sequence, -1)
        at, number, record = 0, -1, -1
        for answer in self._samples[index]:
            start, end = map(int, self._starts[answer : answer + 2])
            begins = self._common[self._records[answer]]
            if self._records[answer] != record:
                record, number = self._records[answer], number + 1
                inputs[at : at + begins], positions[at : at + begins] = (
                    self._tokens[start : start + begins],
                    range(begins),
                )
                records[at : at + begins] = number
                at += begins
            own = slice(at, at := at + end - start - begins)
            tokens = self._tokens[start + begins : end]
            inputs[own], positions[own] = tokens, range(begins, end - start)
            labels[own] = np.where(self._trained[start + begins : end], tokens, IGNORED)
            answers[own], records[own] = KINDS * number + int(self._kinds[answer]), number
        positions[at:] = range(self.sequence - at)
        arrays = {"input_ids": inputs, "labels": labels, "position_ids": positions, ANSWERS: answers}
        if self.shared:
            seen = (answers[:, None] == answers) | (answers < 0)
            arrays["attention_mask"] = np.tril(seen & (records[:, None] == records))[None]
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in ("_records", "_kinds")}
