"""Runs an untrusted chat template in a process with limits on time and memory, to convert conversations to tokens or
text."""

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
        samples = self._call("samples", messages, arguments)
        return [(tokens, trained) for tokens, trained in samples]

    def encode(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], longest: int | None = None
    ) -> list[int]:
        """Like `ChatTemplate.encode`; the conversation must consist of JSON types.

        Raises:
            ConfigError: as for `ChatTemplate.encode`, or the conversation takes too long or too much memory.
            DataError: the template is not valid.
        """
        return self._call("encode", messages, arguments, longest)

    def ends(self) -> list[int]:
        """As `ChatTemplate.ends`.

        Raises:
            ConfigError: the template takes too long or too much memory.
            DataError: the template is not valid.
        """
        return self._call("ends")

    def render(self, messages: Sequence[Mapping[str, Any]], *, ask: bool = True) -> str:
        """Like `ChatTemplate.render` without further arguments; the conversation must consist of JSON types.

        Raises:
            ConfigError: the template refuses the conversation, or takes too long or too much memory.
            DataError: the template is not valid.
        """
        return self._call("render", messages, {}, ask=ask)

    def _call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        job = [method, arguments, keywords]
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
    """Build the handler that runs in the confined process: it takes the name of a method of `ChatTemplate` and its
    arguments as JSON, and returns the method's result as JSON.
    """
    tokenizer = Tokenizer.load(setup.decode())
    compiled: list[ChatTemplate] = []

    def handle(job: bytes) -> bytes:
        method, arguments, keywords = json.loads(job)
        try:
            if not compiled:  # compiled here because the limits apply only while a call is handled, not during set-up
                compiled.append(ChatTemplate(tokenizer, template_source(tokenizer) or ""))
            result = getattr(compiled[0], method)(*arguments, **keywords)
        except ShoestringError as error:
            return json.dumps({"error": error.parts()}).encode()
        return json.dumps({"result": result}).encode()

    return handle
