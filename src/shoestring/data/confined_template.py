"""Runs an untrusted chat template in a process with limits on time and memory, to convert conversations to samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from shoestring.confined import Confined, LimitError
from shoestring.core.errors import ConfigError, DataError, ShoestringError
from shoestring.data.chat_template import ChatTemplate, template_source
from shoestring.data.tokenizer import Tokenizer

SECONDS = 60.0
"""Time limit for one conversation, in seconds."""


class ConfinedTemplate:
    """The chat template of a tokenizer, compiled and rendered in a process of its own, which `close` ends."""

    def __init__(self, tokenizer: Tokenizer, seconds: float = SECONDS) -> None:
        self._confined = Confined(build_samples, tokenizer.dump().encode(), seconds=seconds)

    def samples(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> list[tuple[list[int], list[bool]]]:
        """Like `ChatTemplate.samples`; the conversation must consist of JSON types.

        Raises:
            ConfigError: as for `ChatTemplate.samples`, or the conversation takes too long or too much memory.
            DataError: the template is not valid.
        """
        samples = self._call([messages, arguments])
        return [(tokens, trained) for tokens, trained in samples]

    def ends(self) -> list[int]:
        """As `ChatTemplate.ends`.

        Raises:
            ConfigError: the template takes too long or too much memory.
            DataError: the template is not valid.
        """
        return self._call(None)

    def _call(self, job: Any) -> Any:
        try:
            answer = json.loads(self._confined.call(json.dumps(job, default=str).encode()))
        except LimitError as error:
            raise ConfigError(f"the model's chat template cannot render the conversation: {error}") from error
        if "error" in answer:
            raise ShoestringError.from_parts(answer["error"])
        return answer["result"]

    def close(self) -> None:
        self._confined.close()


def answer_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids, in ascending order, of the tokens by which a model trained with its tokenizer's chat template ends its
    answers. Empty if there is no template, or if the template is not valid or cannot be rendered.
    """
    with suppress(ConfigError, DataError):
        if template_source(tokenizer) is not None:
            with closing(ConfinedTemplate(tokenizer)) as template:
                return tuple(template.ends())
    return ()


def build_samples(setup: bytes) -> Callable[[bytes], bytes]:
    """Build the handler that runs in the confined process: it takes a conversation as JSON and returns its samples as
    JSON; for null it returns the tokens that end answers.
    """
    tokenizer = Tokenizer.load(setup.decode())
    compiled: list[ChatTemplate] = []

    def handle(job: bytes) -> bytes:
        talk = json.loads(job)
        try:
            if not compiled:  # compiled here because the limits apply only while a call is handled, not during set-up
                compiled.append(ChatTemplate(tokenizer, template_source(tokenizer) or ""))
            result = compiled[0].ends() if talk is None else compiled[0].samples(*talk)
        except ShoestringError as error:
            return json.dumps({"error": error.parts()}).encode()
        return json.dumps({"result": result}).encode()

    return handle
