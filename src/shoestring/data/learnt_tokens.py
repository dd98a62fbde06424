"""Finds the text of a rendered chat that is trained on ("learnt"): the model's answers, each with the token that ends
it.

An answer is located by comparing renderings with different answers. The answer begins where its prompt ends. The answer
ends after the first special token that follows the text that changes with the answer. If a template marks answers
itself, by `{% generation %}`, an answer begins at the mark. The token that ends the answer is added if the template
leaves it outside the marked text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shoestring.core.errors import ConfigError

BEGIN, END, FILLER = "\ufdd0", "\ufdd1", "\ufdd2"
"""Noncharacters of Unicode: `BEGIN` and `END` enclose text that a template marks as the model's, and `FILLER` stands
for another answer."""
NEVER_FILLED = ("role", "id", "type", "tool_call_id")
"""Keys of a message whose values templates check, so that other text cannot replace them."""
Span = tuple[int, int]
Message = Mapping[str, Any]


class Render(Protocol):
    """Renders messages; raises ConfigError if the template refuses them.

    Args:
        ask: whether the text ends with the prompt for the model's answer.
        tagged: whether `BEGIN` and `END` are put around text that the template marks as the model's.
    """

    def __call__(self, messages: Sequence[Message], *, ask: bool = False, tagged: bool = False) -> str: ...


class AnswerFinder:
    """Finds the answers in rendered chats.

    Args:
        special: the special tokens of the tokenizer.
    """

    def __init__(self, render: Render, special: Sequence[str]) -> None:
        self._render = render
        # Longest first, because a regular expression takes the first alternative that matches.
        token = "|".join(sorted(map(re.escape, special), key=len, reverse=True)) or r"(?!)"
        self._ends = re.compile(f"(?:{token})+")
        self._ends_here = re.compile(rf"\s*(?:{token})+")
        self._next_token = re.compile(rf"\s*(?:{token})")
        self._token = re.compile(token)

    def texts(self, messages: Sequence[Message], learnt: Sequence[bool]) -> list[tuple[str, list[Span]]]:
        """The texts to train on, each with the spans that are trained on.

        The whole chat is one text. An answer gets a separate text, which ends with the answer, if the template renders
        the answer differently once other messages follow (without its reasoning, say), or if no special token ends it
        in the whole chat.

        Raises:
            ConfigError: the template refuses the messages, or an answer cannot be located in the rendered text.
        """
        whole, spans, apart = self._tagged(messages)[0], list[Span](), list[tuple[str, list[Span]]]()
        for number in [number for number, is_learnt in enumerate(learnt) if is_learnt]:
            text, answer = self._answer(messages[: number + 1])
            end = answer[-1][1]
            ended = self._has_end(text[:end])
            if not whole.startswith(text[:end]):
                apart.append((text if ended else text[:end], answer))
            elif ended:
                spans += answer
            elif follows := self._next_token.match(whole, end):
                # The special token that begins the next message also ends the answer, as in GLM.
                spans += [*answer[:-1], (answer[-1][0], follows.end())]
            elif not whole[end:].strip():
                whole = whole[:end]
                spans += answer
            else:
                apart.append((text[:end], answer))
        return [*apart, *([(whole, spans)] if spans or not apart else [])]

    def _answer(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Render messages of which the last is an answer; returns the text, and the spans of the answer in the text."""
        text, marked = self._tagged(messages)
        try:
            start, end = self._compared(messages, text)
            marked = [span for span in marked if span[1] > start]
        except ConfigError:
            if not marked:
                raise
            earlier = self._tagged(messages[:-1])[1] if len(messages) > 1 else []
            marked = marked[len(earlier) :]
            if not marked:
                raise
            start, end = marked[0][0], marked[-1][1]
        if not marked:
            return text, [(start, end)]
        first, last = marked[-1]
        inner = text[first:last].rstrip()
        if self._has_end(inner):  # white space after the token that ends an answer belongs to the next message
            last = first + len(inner)
        elif follows := self._ends_here.match(text, last):
            last = follows.end()
        return text, [*marked[:-1], (first, last)]

    def _has_end(self, text: str) -> bool:
        """Whether a text ends in a special token."""
        tail = text[-200:]
        return any(match.end() == len(tail) for match in self._token.finditer(tail))

    def _tagged(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Render messages; returns the text, and the spans of the text that the template marks as the model's."""
        text, spans = "", list[Span]()
        for part in re.split(f"([{BEGIN}{END}])", self._render(messages, tagged=True)):
            if part == BEGIN:
                spans.append((len(text), len(text)))
            elif part == END:
                spans[-1] = (spans[-1][0], len(text))
            else:
                text += part
        return text, [span for span in spans if span[0] < span[1]]

    def _compared(self, messages: Sequence[Message], text: str) -> Span:
        """Find where the last message begins and ends in the text of all messages, by comparing this text with other
        renderings."""
        try:
            other = self._render([*messages[:-1], filled(messages[-1])])
        except ConfigError as error:
            start = self._start(messages[:-1], text, text)
            if start is None:
                raise ConfigError(_unclear(messages, "is refused where another text stands in its place")) from error
            stripped = text.rstrip()
            return start, len(stripped) if self._has_end(stripped) else len(text)
        if other == text:
            raise ConfigError(_unclear(messages, "is left out by it"))
        start = self._start(messages[:-1], text, other)
        if start is None:
            start = len(_common_beginning(text, other))
        changed = max(start, len(text) - len(_common_beginning(text[::-1], other[::-1])))
        ends = self._ends.search(text, changed)
        return start, ends.end() if ends else len(text)

    def _start(self, before: Sequence[Message], text: str, other: str) -> int | None:
        """Find where the prompt for an answer ends in a text; None if the template cannot render the messages before
        the answer.

        Args:
            other: the rendered text with another answer in place of this one.

        Raises:
            ConfigError: the text does not begin with the prompt.
        """
        try:
            asked, plain = self._render(before, ask=True), self._render(before)
            if not before and asked == plain:  # a template may write the prompt only after a message
                return None
            if text.startswith(asked):
                return len(asked)
        except ConfigError:
            return None
        # A prompt may end with a token that the rendered answer lacks (such as one that starts reasoning).
        start = len(_common_beginning(asked, text, other))
        if start < len(_common_beginning(asked, plain)):
            raise ConfigError(f"the model's chat template changes the text before message {len(before) + 1}")
        cut = next((match for match in self._token.finditer(text) if match.start() < start < match.end()), None)
        return cut.start() if cut else start


def _unclear(messages: Sequence[Message], reason: str) -> str:
    return f"what the model is to learn cannot be told from its chat template: message {len(messages)} {reason}"


def filled(message: Message) -> dict[str, Any]:
    """The message with each of its texts replaced by another text, or with only its content replaced if all its texts
    are empty."""

    def other_for(value: Any) -> Any:
        if isinstance(value, str):
            return FILLER if value else ""
        if isinstance(value, Mapping):
            return {key: entry if key in NEVER_FILLED else other_for(entry) for key, entry in value.items()}
        return [other_for(entry) for entry in value] if isinstance(value, list | tuple) else value

    other = other_for(message)
    return other if other != message else {**message, "content": FILLER}


def _common_beginning(*texts: str) -> str:
    return os.path.commonprefix(texts)  # noqa: RUF071 - of characters
