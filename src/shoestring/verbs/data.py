"""`shoestring data show`: the samples that training makes of data, and which of their tokens the model learns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from shoestring import run as runs
from shoestring.core.errors import ConfigError, DataError, ShoestringError
from shoestring.data import Data
from shoestring.data.built_in_templates import with_template
from shoestring.data.chat_formats import format_of
from shoestring.data.chats import parsed_chats, samples_of
from shoestring.data.confined_template import ConfinedTemplate
from shoestring.data.piped import spool
from shoestring.data.sources import HuggingFace, Source, TextFiles, open_source
from shoestring.data.tokenizer import Tokenizer, load_tokenizer
from shoestring.models.tokenizer_files import require_tokenizer
from shoestring.training.data_loading import context_of, sequence_of, tokenizer_of
from shoestring.verbs.settings import DataView

_SHOWN = 1000
"""Maximum number of characters of a text to show."""


@dataclass(frozen=True)
class RenderedPiece:
    """A part of a rendered record in which all tokens are alike: all learnt or all not, all special or all not."""

    text: str
    learnt: bool
    special: bool
    """Whether the part is a single special token; ordinary text in the data can never encode to such a token."""


@dataclass(frozen=True)
class ShownSample:
    """A sample that training makes from a record."""

    pieces: tuple[RenderedPiece, ...]
    """The parts of the sample, without the tokens that are cut off."""
    tokens: int
    learnt: int
    """Number of tokens that the model learns, among the tokens that are not cut off."""
    cut: int
    """Number of tokens that are cut off because they do not fit into data.sequence."""
    left_out: str = ""
    """Why training leaves out the sample; empty if training uses it."""


@dataclass(frozen=True)
class ShownRecord:
    """A record, and the samples that training makes from it."""

    where: str
    samples: tuple[ShownSample, ...]
    left_out: str = ""
    """Why training leaves out the record; empty if training uses it."""


@dataclass
class ShownData:
    """What training reads from one data source."""

    source: str
    format: str = ""
    """Format of the records: messages, sharegpt, alpaca, prompt-completion or text."""
    records: int = 0
    samples: int = 0
    """Number of samples before packing joins several into one; 0 without a tokenizer."""
    tokens: int = 0
    learnt: int = 0
    cut: int = 0
    """Number of samples that are cut off at data.sequence."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Reason -> number of samples or records that training leaves out for this reason."""
    ends: list[str] = field(default_factory=list)
    """Tokens at which the learnt answers end."""
    refusal: str = ""
    """Why training refuses the data, and what to do; empty if it accepts all records that were read."""
    stopped: bool = False
    """Whether reading stopped before the end of the data."""
    first: list[ShownRecord] = field(default_factory=list)


def show(source: str, view: DataView | None = None) -> list[ShownData]:
    """Read training data as training does, without writing anything.

    Args:
        source: a data source as in run.data; or a run file, all of whose data sources are shown.

    Raises:
        ConfigError: the run file or the model does not exist, or the run's data set is built by the user's code.
        DataError: the data or the chat template does not exist.
    """
    view = view or DataView()
    if source.endswith(".toml"):
        run = runs.look(source)
        if "run.data" in run.unread or run.has_own_data:
            raise ConfigError(f"`{source}` has a data set that is built by the user's own code, not text or chats")
        path = tokenizer_of(run)
        model = "" if "run.model" in run.unread else run.settings.model
        settings = replace(run.data, sequence=sequence_of(run.data, model, run.model))
        settings = settings if run.data.form == "chat" else replace(settings, template="")
        tokenizer = None if path in ("bpe", "bytes") else load_tokenizer(Path(path))
        return [_show(name, settings, tokenizer, view) for name in run.sources]
    form = "text" if view.form == "text" else "chat"
    settings = Data(
        form=form, field=view.field, template=view.template if form == "chat" else "", sequence=view.sequence
    )
    tokenizer = load_tokenizer(require_tokenizer(view.model)) if view.model else None
    if not settings.sequence:
        context = None
        with suppress(ShoestringError):  # the folder may hold only a tokenizer, which is enough to show data
            context = context_of(view.model, {})
        settings = replace(settings, sequence=settings.longest(context))
    return [_show(source, settings, tokenizer, view)]


def _show(source: str, settings: Data, tokenizer: Tokenizer | None, view: DataView) -> ShownData:
    with TemporaryDirectory(prefix="shoestring-data-") as folder:
        readable = spool(source, Path(folder))
        if view.form == "auto" and settings.form == "chat" and not _is_chat(readable, settings):
            settings = replace(settings, form="text", template="")
        shown = ShownData(source)
        reader = open_source(readable, settings.record_field)
        if settings.form == "text":
            _read_texts(reader, tokenizer, view, shown)
        elif tokenizer is None:
            raise ConfigError("chats need the chat template of a model", hint="name a model with --model")
        else:
            _read_chats(reader, with_template(tokenizer, settings.template), settings, view, shown)
    if readable != source:  # the source is a pipe, and `readable` a copy that is deleted by now
        shown.refusal = shown.refusal.replace(readable, source)
        shown.first = [replace(record, where=record.where.replace(readable, source)) for record in shown.first]
    return shown


def _is_chat(source: str, settings: Data) -> bool:
    """Whether the first record of a source is a chat. If the source has errors, reading it later raises them."""
    reader = open_source(source, settings.record_field)
    if not isinstance(reader, TextFiles | HuggingFace):
        return False
    if isinstance(reader, TextFiles) and not reader.holds_records:
        return False
    first = next(reader.records(settings.record_field), None)
    return bool(settings.field) or first is None or format_of(first.values) != "text"


def _read_texts(reader: Source, tokenizer: Tokenizer | None, view: DataView, shown: ShownData) -> None:
    shown.format = "text"
    try:
        for document in reader.documents():
            if view.most and shown.records == view.most:
                shown.stopped = True
                return
            shown.records += 1
            tokens = len(tokenizer.encode(document.text)) if tokenizer else 0
            shown.tokens, shown.learnt = shown.tokens + tokens, shown.learnt + tokens
            if len(shown.first) < view.first:
                more = len(document.text) - _SHOWN
                text = document.text[:_SHOWN] + (f"… ({more:,} characters more)" if more > 0 else "")
                sample = ShownSample((RenderedPiece(text, learnt=True, special=False),), tokens, tokens, 0)
                shown.first.append(ShownRecord(f"text {shown.records}", (sample,)))
    except DataError as error:
        shown.refusal = str(error)


def _read_chats(reader: Source, tokenizer: Tokenizer, settings: Data, view: DataView, shown: ShownData) -> None:
    with closing(ConfinedTemplate(tokenizer)) as template:
        try:
            for where, record in parsed_chats(reader, settings.record_field):
                if view.most and shown.records == view.most:
                    shown.stopped = True
                    break
                shown.format = record.format
                samples = []
                for chat in samples_of(record, template, where):
                    tokens, flags = chat.tokens[: settings.sequence], chat.trained[: settings.sequence]
                    flags = [False, *flags[1:]]  # the first token is never learnt: nothing before it predicts it
                    answer = "" if any(flags) else f"no answer begins within its first {settings.sequence:,} tokens"
                    pieces, cut = tuple(_pieces(tokens, flags, tokenizer)), len(chat.tokens) - len(tokens)
                    samples.append(ShownSample(pieces, len(chat.tokens), sum(flags), cut, answer))
                reason = "" if record.learnt else "the record has a weight of 0"
                _count(shown, samples, reason)
                if len(shown.first) < view.first:
                    shown.first.append(ShownRecord(where, tuple(samples), reason))
        except DataError as error:
            shown.refusal = str(error)
        names = map(tokenizer.engine.id_to_token, template.ends())
        shown.ends = [name for name in names if name is not None]


def _count(shown: ShownData, samples: list[ShownSample], reason: str) -> None:
    shown.records += 1
    for sample in samples:
        shown.samples += 1
        shown.tokens += sample.tokens
        shown.learnt += sample.learnt
        shown.cut += sample.cut > 0
    for left_out in (reason, *(sample.left_out for sample in samples)):
        if left_out:
            shown.left_out[left_out] = shown.left_out.get(left_out, 0) + 1


def _pieces(tokens: list[int], flags: list[bool], tokenizer: Tokenizer) -> Iterator[RenderedPiece]:
    added = tokenizer.engine.get_added_tokens_decoder()
    special = {number for number, token in added.items() if token.special}
    kinds = [
        (flag, number if token in special else -1)
        for number, (token, flag) in enumerate(zip(tokens, flags, strict=True))
    ]
    for (learnt, place), group in groupby(enumerate(tokens), key=lambda item: kinds[item[0]]):
        ids = [token for _, token in group]
        yield RenderedPiece(tokenizer.engine.decode(ids, skip_special_tokens=False), learnt, place >= 0)
