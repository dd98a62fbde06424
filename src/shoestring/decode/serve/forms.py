"""The JSON of answers: of OpenAI's completions and of its chat, whole and in the pieces of a stream."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from shoestring.data.tokenizer import Tokenizer
from shoestring.decode.request import TokenLogprob
from shoestring.decode.serve.served import Served
from shoestring.decode.serve.writing import Shown

Json = dict[str, Any]

LOWEST = -9999.0
"""Stands for the logarithm of 0, which JSON cannot spell, as in OpenAI's API."""


class AnswerForm(ABC):
    """One answer, whose parts share an identifier and a time."""

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
        """The answer at once."""
        return {**self.head, "object": self.whole_kind, "choices": list(choices), "usage": usage}

    def piece(self, choices: Sequence[Json], usage: Json | None = None) -> Json:
        """An event of a stream."""
        return {**self.head, "object": self.piece_kind, "choices": list(choices), "usage": usage}

    @abstractmethod
    def choice(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        """A whole text."""

    @abstractmethod
    def part(self, index: int, text: str, logprobs: Json | None, reason: str | None, first: bool) -> Json:
        """Some of a text."""

    @abstractmethod
    def logprobs(self, tokens: Sequence[Shown], echoed: int) -> Json:
        """Of tokens; `echoed` characters stand before the text that they belong to."""


class CompletionForm(AnswerForm):
    prefix = "cmpl"
    whole_kind = piece_kind = "text_completion"

    def choice(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def part(self, index: int, text: str, logprobs: Json | None, reason: str | None, first: bool) -> Json:
        return self.choice(index, text, logprobs, reason)

    def logprobs(self, tokens: Sequence[Shown], echoed: int) -> Json:
        return {
            "tokens": [name(self.tokenizer, shown.entry.token) for shown in tokens],
            "token_logprobs": [max(shown.entry.logprob, LOWEST) for shown in tokens],
            "top_logprobs": [
                {
                    name(self.tokenizer, token): max(value, LOWEST)
                    for token, value in [*reversed(shown.entry.top), shown.entry[:2]]
                }
                for shown in tokens
            ],
            "text_offset": [echoed + shown.start for shown in tokens],
        }

    def prompt_logprobs(self, tokens: Sequence[int], entries: Sequence[TokenLogprob]) -> Json:
        """Of a prompt, whose first token has none."""
        offsets, stream, length = [], self.tokenizer.stream(), 0
        for token in tokens:
            offsets.append(length)
            length += len(stream.add(token))
        found = self.logprobs([Shown(*pair) for pair in zip(entries, offsets[1:], strict=True)], 0)
        first: Json = {"tokens": name(self.tokenizer, tokens[0]), "text_offset": 0}
        return {key: [first.get(key), *values] for key, values in found.items()}


class ChatForm(AnswerForm):
    prefix, whole_kind, piece_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def part(self, index: int, text: str, logprobs: Json | None, reason: str | None, first: bool) -> Json:
        delta: Json = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, tokens: Sequence[Shown], echoed: int) -> Json:
        def described(token: int, value: float) -> Json:
            return {
                "token": name(self.tokenizer, token),
                "logprob": max(value, LOWEST),
                "bytes": list(self.tokenizer.token_bytes(token)),
            }

        return {
            "content": [
                described(*shown.entry[:2]) | {"top_logprobs": [described(*other) for other in shown.entry.top]}
                for shown in tokens
            ],
            "refusal": None,
        }


def name(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; one that is part of a character as `bytes:\\xe2\\x82`, as OpenAI's API writes it."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def joined(first: Json | None, second: Json | None) -> Json | None:
    """Log-probabilities of two stretches of a text."""
    if first is None or second is None:
        return first or second
    return {key: value + second[key] if isinstance(value, list) else value for key, value in first.items()}


def usage(prompt: int, generated: int, reused: int) -> Json:
    """Tokens that were read and generated, and how many of the former were in the cache."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": reused},
    }
