"""`shoestring chat`: a conversation with a trained model, formatted by the model's chat template."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from shoestring import figures
from shoestring.core.errors import ConfigError, DataError
from shoestring.data.chat_messages import Message, read_messages
from shoestring.data.confined_template import ConfinedTemplate
from shoestring.data.tokenizer import Tokenizer
from shoestring.decode.engine import Request
from shoestring.decode.settings.generation import Conversing, Sampling, SamplingRule, SeededOptions
from shoestring.models import huge_pages
from shoestring.models.description import Description
from shoestring.storage import foreign
from shoestring.storage.whole import write_atomic
from shoestring.verbs.generate import DEFAULT, build_engine, open_described

log = logging.getLogger("shoestring")

CONTEXT = 8192
"""Number of tokens that the KV cache can hold, unless the settings give a different number."""
ANSWER = 512
"""Number of tokens that are reserved for an answer, unless the settings limit answers to fewer."""


@dataclass(frozen=True)
class AnswerRates:
    """How fast the model read a conversation and wrote an answer."""

    read: int
    """Number of tokens of the conversation that the model had to read; tokens already in its cache are not counted."""
    waited: float
    """Time to the first token, in seconds."""
    written: int
    """Number of tokens of the answer."""
    writing: float
    """Time from the first token to the last, in seconds."""
    drafted: int
    """Number of tokens that a drafter proposed."""
    accepted: int
    """Number of proposed tokens that the model accepted."""
    ending: str
    """Why the answer ended; the value of `Row.ending`."""

    def __str__(self) -> str:
        parts = [f"tokens read: {self.read:,}; the first written after {figures.seconds(self.waited)}"]
        parts += [f"written: {self.written:,}"]
        if self.written > 1 and self.writing > 0:
            parts[-1] += f", {(self.written - 1) / self.writing:.1f} a second"
        if self.drafted:
            parts.append(f"{figures.percent(self.accepted / self.drafted)} of {self.drafted:,} drafted tokens accepted")
        if self.ending == "length":
            parts.append("cut off by the limit of tokens")
        return "; ".join(parts)


class Dialogue:
    """A conversation with a model. `close` ends the process that renders the chat template.

    The template is rendered anew for each answer, but the model reads only tokens that are not in its cache yet.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, description: Description, settings: Conversing | None = None
    ) -> None:
        """
        Raises:
            ConfigError: the model has no chat template, or a setting is out of range.
        """
        self.settings = settings = settings or Conversing()
        if not description.chat:
            raise ConfigError("the model has no chat template", hint="continue a text with `shoestring generate`")
        self.engine = build_engine(
            model,
            tokenizer,
            settings.decoding,
            context=settings.context or None,
            room=None if settings.context else CONTEXT,
            skip=settings.skip,
        )
        self.tokenizer = tokenizer
        self.ends = frozenset(description.ends)
        self.own_sampling = SeededOptions().over(description.sampling, DEFAULT).from_model
        """Sampling settings that the model's files name."""
        self.messages: list[Message] = []
        self.left_out = 0
        """Number of messages at the beginning that do not fit into the context, so the model no longer sees them."""
        self.rates: AnswerRates | None = None
        """Reading and writing speed of the newest answer."""
        self.options: SeededOptions = settings.sampling
        """Sampling settings; may be changed between answers."""
        self.system = settings.system
        """System message of the conversation; empty if there is none."""
        self._tries = 0
        self._template = ConfinedTemplate(tokenizer)
        self.begin(settings.system)

    def close(self) -> None:
        self._template.close()
        self.engine.close()

    def begin(self, system: str) -> None:
        """Start a new conversation with a system message, or without a system message if `system` is empty."""
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system else []
        self.left_out = 0

    def rule(self) -> SamplingRule:
        """The sampling rule in force: `options`, then the settings that the model's files name, then the default."""
        return self.options.over(self.own_sampling, DEFAULT).rule

    def ask(self, question: str) -> Generator[str]:
        """Yield the answer to a question in pieces. If the caller stops reading, the conversation keeps the part of the
        answer that was yielded. If the answer failed, the next question replaces this one.

        Raises:
            ConfigError: the template refuses the question, or the question does not fit into the context. The
                question is then removed from the conversation.
        """
        self._tries = 0
        if self.messages and self.messages[-1]["role"] == "user":  # the last question, whose answer failed
            self.messages.pop()
        self.messages.append({"role": "user", "content": question})
        return self._answer(forget=1)

    def retry(self) -> Generator[str]:
        """Yield another answer to the last question in pieces, sampled with a different seed.

        Raises:
            ConfigError: nothing has been asked.
        """
        if not any(message["role"] == "user" for message in self.messages):
            raise ConfigError("nothing has been asked yet")
        if self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        self._tries += 1
        return self._answer()

    def undo(self) -> None:
        """Forget the last question and its answer.

        Raises:
            ConfigError: nothing has been asked.
        """
        asked = [number for number, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            raise ConfigError("nothing has been asked yet")
        del self.messages[asked[-1] :]

    def save(self, path: Path) -> None:
        """Write the conversation as a file with one chat; `shoestring train finetune --data FILE` can train on it."""
        write_atomic(path, json.dumps({"messages": self.messages}, ensure_ascii=False).encode() + b"\n")

    def load(self, path: Path) -> None:
        """Continue a conversation that `save` wrote, or the first chat of any .jsonl file of chats.

        Raises:
            DataError: the file holds no chat. OSError: the file cannot be read.
        """
        line = next((line for line in foreign.read_lines(path) if line.strip()), b"")
        try:
            record = foreign.parse_json(line)
        except ValueError as error:
            raise DataError(f"{path}: the first line is not JSON", hint="`/save FILE` writes such a file") from error
        values = record if isinstance(record, Mapping) else {}
        key = next((key for key in ("messages", "conversations") if key in values), "messages")
        self.messages = read_messages(values.get(key), f"{path}, line 1", key)
        self.system = self.messages[0]["content"] if self.messages[0]["role"] == "system" else ""
        self.left_out = 0

    # -- answers -------------------------------------------------------------------------------------------------------

    def _answer(self, forget: int = 0) -> Generator[str]:
        """Yield the next answer in pieces, and add it to the conversation.

        Args:
            forget: number of messages to remove again if the conversation cannot be rendered.
        """
        try:
            tokens = self._rendered()
        except Exception:
            del self.messages[len(self.messages) - forget :]
            raise
        return self._written(tokens)

    def _rendered(self) -> list[int]:
        """Tokens of the conversation; the oldest questions are left out if there is no room for an answer."""
        window, variables = self.engine.window, self.settings.variables()
        reserve = min(self.settings.max_tokens or ANSWER, window // 4)
        longest, length = window * self.tokenizer.longest, ""
        for shown in shorter_and_shorter(self.messages):
            characters = sum(len(str(message["content"])) for message in shown)
            length = f"{characters:,} characters"
            if characters > longest:
                continue
            tokens = self._template.encode(shown, variables) or list(self.tokenizer.ends)
            length = f"{len(tokens):,} tokens"
            if len(tokens) + reserve <= window:
                self.left_out = len(self.messages) - len(shown)
                return tokens
        raise ConfigError(
            f"the question and the system message have {length}, but the context is {window:,} tokens, of which "
            f"{reserve:,} are reserved for the answer",
            hint="ask in fewer words, or give a larger --context",
        )

    def _written(self, tokens: Sequence[int]) -> Generator[str]:
        drafts = self.engine.counts.drafts
        drafted, accepted = sum(drafts.drafted), sum(drafts.accepted)
        row = self.engine.submit(
            Request(
                tokens=tokens,
                max_new=self.settings.max_tokens or self.engine.window,
                sampling=Sampling(**vars(self.rule()), seed=(self.options.seed + self._tries) % 2**63),
                stop=self.ends,
            )
        )
        text = self.tokenizer.stream(tokens, self.settings.skip_special_tokens)
        answer: list[str] = []
        began = time.perf_counter()
        first = last = None
        try:
            while row.ending is None:
                for changed in self.engine.step():
                    for token in changed.fresh:
                        last = time.perf_counter()
                        first = first or last
                        answer.append(text.add(token))
                        yield answer[-1]
            if row.error is not None:
                raise row.error
            answer.append(text.rest())
            yield answer[-1]
        finally:
            self.engine.cancel(row)
            if row.error is None:
                self.messages.append({"role": "assistant", "content": "".join(answer)})
            now = time.perf_counter()
            self.rates = AnswerRates(
                read=len(tokens) - row.reused,
                waited=(first or now) - began,
                written=len(row),
                writing=(last or now) - (first or now),
                drafted=sum(drafts.drafted) - drafted,
                accepted=sum(drafts.accepted) - accepted,
                ending=str(row.ending),
            )


def shorter_and_shorter(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the conversation, then ever shorter ones without the oldest question and its answer.

    The last one has only the last question. The system messages at the beginning always stay.
    """
    system = next((place for place, message in enumerate(messages) if message["role"] != "system"), len(messages))
    asked = [place for place, message in enumerate(messages) if message["role"] == "user" and place >= system]
    yield list(messages)
    for place in asked[1:]:
        yield [*messages[:system], *messages[place:]]


def converse(
    model: str | Path, settings: Conversing | None = None, *, say: Callable[[str], object] = lambda _: None
) -> Dialogue:
    """Open a trained model for a conversation, on the GPU if there is one.

    Args:
        model: run folder, model folder, folder of an adapter, .gguf file, or hf:NAME.
        say: function that is called with a line about the sampling settings in the model's files.

    Raises:
        CheckpointError: there is no such model. ConfigError: the model has no tokenizer or no chat template, or a
            setting is out of range.
    """
    settings = settings or Conversing()
    opened, tokenizer, description = open_described(model)
    huge_pages.settle(opened)
    if chosen := str(settings.sampling.over(description.sampling, DEFAULT)):
        say(chosen)
    return Dialogue(opened, tokenizer, description, settings)


def changed(options: SeededOptions, name: str, value: str) -> SeededOptions:
    """Return the sampling settings with one setting changed.

    Raises:
        ConfigError: there is no such setting, or the value is out of range.
    """
    known = vars(options)
    if name not in known:
        raise ConfigError(f"there is no setting `{name}`", hint=f"known: {', '.join(known)}")
    try:
        number: Any = (int if name in ("top_k", "seed") else float)(value)
    except ValueError as error:
        raise ConfigError(f"{name} is `{value}`", hint="give a number") from error
    return replace(options, **{name: number})
