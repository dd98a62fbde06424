"""Builds answers in the JSON of OpenAI's API: for completions and chats, as one document or as the events of a
stream."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from shoestring.data.tokenizer import Tokenizer
from shoestring.decode.request import TokenLogprob
from shoestring.decode.serve.asking import Prompt
from shoestring.decode.serve.errors import RequestError
from shoestring.decode.serve.served import Served
from shoestring.decode.serve.tool_calls import Content, ToolCall
from shoestring.decode.serve.writing import Shown

Json = dict[str, Any]

LOWEST = -9999.0
"""Log-probability that is reported for an impossible token, as in OpenAI's API, because JSON has no infinity."""


class AnswerForm(ABC):
    """Builds the JSON of one answer; all chunks of a streamed answer share an identifier and a time."""

    prefix: ClassVar[str]
    whole_kind: ClassVar[str]
    piece_kind: ClassVar[str]

    def __init__(self, served: Served) -> None:
        self.tokenizer = served.tokenizer
        self.head: Json = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": served.name,
            "system_fingerprint": None,
        }

    def whole(self, choices: Sequence[Json], usage: Json) -> Json:
        """Build the whole answer."""
        return {**self.head, "object": self.whole_kind, "choices": list(choices), "usage": usage}

    @abstractmethod
    def choice(self, index: int, content: Sequence[Content], logprobs: Json | None, reason: str | None) -> Json:
        """Build the entry of one whole text in an answer."""

    # -- streams -------------------------------------------------------------------------------------------------------

    def begin(self) -> Iterator[bytes]:
        """Build the events before the first piece of a stream."""
        return iter(())

    def pieces(
        self,
        index: int,
        content: Sequence[Content],
        logprobs: Json | None,
        reason: str | None,
        first: bool,
        draft: Json | None = None,
    ) -> Iterator[bytes]:
        """Build the events of one piece of a text."""
        for part in self.parts(index, content, logprobs, reason, first):
            yield event(self._chunk([part | ({"draft": draft} if draft else {})]))
            draft = None

    def end(self, usage: Json, wanted: bool) -> Iterator[bytes]:
        """Build the events after the last piece of a stream.

        Args:
            wanted: whether the client has asked for the token counts.
        """
        if wanted:
            yield event(self._chunk([], usage))
        yield b"data: [DONE]\n\n"

    def failure(self, error: RequestError) -> bytes:
        """Build the last event of a stream that has failed."""
        return event(error.content)

    def _chunk(self, choices: Sequence[Json], usage: Json | None = None) -> Json:
        return {**self.head, "object": self.piece_kind, "choices": list(choices), "usage": usage}

    @abstractmethod
    def parts(
        self, index: int, content: Sequence[Content], logprobs: Json | None, reason: str | None, first: bool
    ) -> Iterator[Json]:
        """Build the entries of one piece of a text; each entry is sent in a separate event."""

    @abstractmethod
    def logprobs(self, tokens: Sequence[Shown], echoed: int) -> Json:
        """Build the log-probabilities of the tokens that are sent.

        Args:
            echoed: number of characters of the prompt that the answer repeats before the text.
        """


class CompletionForm(AnswerForm):
    prefix = "cmpl"
    whole_kind = piece_kind = "text_completion"

    def choice(self, index: int, content: Sequence[Content], logprobs: Json | None, reason: str | None) -> Json:
        return {"index": index, "text": text_of(content), "logprobs": logprobs, "finish_reason": reason}

    def parts(
        self, index: int, content: Sequence[Content], logprobs: Json | None, reason: str | None, first: bool
    ) -> Iterator[Json]:
        yield self.choice(index, content, logprobs, reason)

    def logprobs(self, tokens: Sequence[Shown], echoed: int) -> Json:
        return {
            "tokens": [name(self.tokenizer, shown.entry.token, shown.first) for shown in tokens],
            "token_logprobs": [max(shown.entry.logprob, LOWEST) for shown in tokens],
            "top_logprobs": [
                {
                    name(self.tokenizer, token, shown.first): max(value, LOWEST)
                    for token, value in [*reversed(shown.entry.top), shown.entry[:2]]
                }
                for shown in tokens
            ],
            "text_offset": [echoed + shown.start for shown in tokens],
        }

    def prompt_logprobs(self, prompt: Prompt, entries: Sequence[TokenLogprob]) -> Json:
        """Build the log-probabilities of a prompt that the answer repeats; the first token has none."""
        stream, shown, length = self.tokenizer.stream((), prompt.skip_special_tokens), list[Shown](), 0
        unscored = TokenLogprob(prompt.tokens[0], 0.0, [])
        for number, (token, entry) in enumerate(zip(prompt.tokens, [unscored, *entries], strict=True)):
            shown.append(Shown(entry, min(length, len(prompt.text)), not stream.begun))
            if number >= prompt.added:
                text = stream.add(token)
                # Some tokenizers put a space before text that follows a special token.
                length += len(text if prompt.text.startswith(text, length) else text.removeprefix(" "))
        columns = self.logprobs(shown, 0)
        return columns | {key: [None, *columns[key][1:]] for key in ("token_logprobs", "top_logprobs")}


class ChatForm(AnswerForm):
    prefix, whole_kind, piece_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, content: Sequence[Content], logprobs: Json | None, reason: str | None) -> Json:
        text, calls = text_of(content), calls_of(content)
        message: Json = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def parts(
        self, index: int, content: Sequence[Content], logprobs: Json | None, reason: str | None, first: bool
    ) -> Iterator[Json]:
        text, calls = text_of(content), calls_of(content)
        deltas: list[Json] = []
        if first or text or logprobs or not calls:
            deltas.append({"role": "assistant", "content": text} if first else {"content": text} if text else {})
        for call in calls:
            head = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
            for entry in (head, {"function": {"arguments": call.arguments}}):
                deltas.append({"tool_calls": [{"index": call.index, **entry}]})
        for number, delta in enumerate(deltas, 1):
            last = number == len(deltas)
            yield {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason if last else None}
            logprobs = None

    def logprobs(self, tokens: Sequence[Shown], echoed: int) -> Json:
        def described(token: int, value: float, first: bool) -> Json:
            return {
                "token": name(self.tokenizer, token, first),
                "logprob": max(value, LOWEST),
                "bytes": list(self.tokenizer.token_bytes(token, first)),
            }

        return {
            "content": [
                described(*shown.entry[:2], shown.first)
                | {"top_logprobs": [described(*other, shown.first) for other in shown.entry.top]}
                for shown in tokens
            ],
            "refusal": None,
        }


def text_of(content: Sequence[Content]) -> str:
    """The text of an answer, or of a piece of an answer, without its tool calls."""
    return "".join(part for part in content if isinstance(part, str))


def calls_of(content: Sequence[Content]) -> list[ToolCall]:
    """The tool calls in an answer, or in a piece of an answer."""
    return [part for part in content if isinstance(part, ToolCall)]


def event(content: Json, name: str = "") -> bytes:
    """Encode a server-sent event; an empty name is left out."""
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"


def name(tokenizer: Tokenizer, token: int, first: bool = False) -> str:
    """A token as text; an incomplete UTF-8 character is written as `bytes:\\xe2\\x82`, as in OpenAI's API.

    Args:
        first: whether the token is the first visible token of its text.
    """
    raw = tokenizer.token_bytes(token, first)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def joined(first: Json | None, second: Json | None) -> Json | None:
    """Concatenate the log-probabilities of two pieces of a text."""
    if first is None or second is None:
        return first or second
    return {key: value + second[key] if isinstance(value, list) else value for key, value in first.items()}


def usage(prompt: int, generated: int, reused: int) -> Json:
    """Build the token counts of an answer: tokens of the prompt, generated tokens, and prompt tokens found in the
    cache."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": reused},
    }
