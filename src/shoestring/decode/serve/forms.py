"""Builds answers in the JSON of OpenAI's API: for completions and chats, as one document or as the chunks of a
stream."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from shoestring.data.tokenizer import Tokenizer
from shoestring.decode.request import TokenLogprob
from shoestring.decode.serve.asking import Prompt
from shoestring.decode.serve.served import Served
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

    def piece(self, choices: Sequence[Json], usage: Json | None = None) -> Json:
        """Build one event of a stream."""
        return {**self.head, "object": self.piece_kind, "choices": list(choices), "usage": usage}

    @abstractmethod
    def choice(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        """Build the entry of one whole text in an answer."""

    @abstractmethod
    def part(self, index: int, text: str, logprobs: Json | None, reason: str | None, first: bool) -> Json:
        """Build the entry of one piece of a text in an event of a stream."""

    @abstractmethod
    def logprobs(self, tokens: Sequence[Shown], echoed: int) -> Json:
        """Build the log-probabilities of the tokens that are sent.

        Args:
            echoed: number of characters of the prompt that the answer repeats before the text.
        """


class CompletionForm(AnswerForm):
    prefix = "cmpl"
    whole_kind = piece_kind = "text_completion"

    def choice(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def part(self, index: int, text: str, logprobs: Json | None, reason: str | None, first: bool) -> Json:
        return self.choice(index, text, logprobs, reason)

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

    def choice(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def part(self, index: int, text: str, logprobs: Json | None, reason: str | None, first: bool) -> Json:
        delta: Json = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

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


def name(tokenizer: Tokenizer, token: int, first: bool = False) -> str:
    """A token as text; an incomplete UTF-8 character is written as `bytes:\\xe2\\x82`, as in OpenAI's API.

    Args:
        first: whether the token is the first visible one of its text.
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
