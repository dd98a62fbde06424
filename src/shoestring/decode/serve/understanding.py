"""Parses requests: turns the bytes of a body into a checked request with encoded prompts.

Requests whose parsing may take long are parsed in worker processes, which can be killed. The worker processes parse
chats, whose templates are programs, and long requests. One worker process parses the long requests and another the
short chats, so that a short chat never waits for a long request. Short completions are parsed directly in the server's
process. This module does not import torch, because the worker processes import the module.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, Literal

from shoestring.confined import Confined, LimitError
from shoestring.core.errors import DataError
from shoestring.data.tokenizer import Tokenizer
from shoestring.decode.serve import asking
from shoestring.decode.serve.asking import Asked, Prompt
from shoestring.decode.serve.errors import RequestError, invalid
from shoestring.decode.serve.served import Served
from shoestring.decode.serve.tool_calls import Calling
from shoestring.decode.settings.generation import AnswerFormat, LogitChanges, Sampling, SamplingDefaults, SamplingRule

Kind = Literal["completion", "chat", "response", "check"]

INLINE = 8192
"""Largest size, in bytes, of a completion that is parsed in the server's process, and of a chat that counts as
short."""
_KINDS: dict[str, Callable[[Any, Served], Asked]] = {
    "completion": asking.completion,
    "chat": asking.chat,
    "response": asking.response,
}
_SCHEMAS = (b"response_format", b"structured_outputs")
"""Fields that may hold a schema; rewriting a schema may take long."""
_CONVERSATIONS = {"completion": "prompt", "chat": "messages", "response": "input"}
"""The field that holds the text of the prompt, by the kind of the request."""


class Understanding:
    """Parses requests; in a worker process, parsing a request may take at most `seconds`."""

    def __init__(self, served: Served, seconds: float) -> None:
        self.served = served
        numbers = {name: getattr(served, name) for name in ("name", "context", "max_tokens", "vocabulary", "chat")}
        setup = json.dumps([numbers, asdict(served.defaults.rule), served.tokenizer.dump()]).encode()  # read by `build`
        self.confined = Confined(build, setup, seconds=seconds, count=2)
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="shoestring-request") for _ in range(2)]

    def check(self) -> None:
        """Start the first worker process, and compile the chat template in it.

        Raises:
            DataError: the template is not valid, or cannot be compiled within the limits.
        """
        try:
            answer = json.loads(self.confined.call(b"check"))
        except LimitError as error:
            raise DataError(f"the chat template cannot be compiled: {error}") from error
        if answer["error"]:
            raise DataError(answer["error"])

    def inline(self, kind: Kind, raw: bytes | bytearray) -> bool:
        """Whether parsing a request cannot take long, so that `now` may parse it in the server's process."""
        return kind == "completion" and len(raw) <= INLINE and not any(name in raw for name in _SCHEMAS)

    def now(self, kind: Kind, raw: bytes | bytearray) -> Asked:
        """Parse a short request in the server's process.

        Raises:
            RequestError: the request is not valid.
        """
        return _KINDS[kind](parsed(raw), self.served)

    async def later(self, kind: Kind, raw: bytes) -> Asked:
        """Parse a request in a worker process.

        Raises:
            RequestError: the request is not valid, or its parsing took too long.
        """
        number = int(len(raw) > INLINE)
        attachments = kind.encode() + b" " + raw
        try:
            reply = await asyncio.get_running_loop().run_in_executor(
                self._threads[number], self.confined.call, attachments, number
            )
        except LimitError as error:
            raise invalid(f"the prompt could not be prepared: {error}", _CONVERSATIONS[kind], "limit") from error
        # The reply consists of the length of the head, the head as JSON, and the tokens of all prompts.
        length = int.from_bytes(reply[:8], "big")
        head: dict[str, Any] = json.loads(reply[8 : 8 + length])
        if "status" in head:
            raise RequestError(**head)
        tokens, prompts = array("q", reply[8 + length :]), list[Prompt]()
        for count, fields in head.pop("prompts"):
            prompts.append(Prompt(tokens=tokens[:count], **fields))
            tokens = tokens[count:]
        head["sampling"] = Sampling(**head["sampling"])
        bias = {int(token): number for token, number in head["changes"].pop("bias").items()}  # keys in JSON are text
        head["changes"] = LogitChanges(bias=bias, **head["changes"])
        head["answer_format"] = head["answer_format"] and AnswerFormat(*head["answer_format"])
        head["calling"] = head["calling"] and Calling(**head["calling"])
        return Asked(prompts=prompts, **head)

    def close(self) -> None:
        """End the worker processes."""
        self.confined.close()
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)


def parsed(raw: bytes | bytearray) -> Any:
    """Parse the body of a request as JSON.

    Raises:
        RequestError: the body is not valid JSON.
    """
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:  # a body that is not UTF-8 raises ValueError too
        raise invalid(f"the body is not valid JSON: {str(error)[:200]}") from error


# -- in the other processes --------------------------------------------------------------------------------------------


def build(setup: bytes) -> Callable[[bytes], bytes]:
    """Build the function that parses requests in a worker process. The function takes bytes: the kind of the request, a
    space, and the body."""
    numbers, rule, tokenizer = json.loads(setup)
    defaults = SamplingDefaults(SamplingRule(**rule), {})
    served = Served(**numbers, tokenizer=Tokenizer.load(tokenizer), defaults=defaults)

    def handle(attachments: bytes) -> bytes:
        kind, _, raw = attachments.partition(b" ")
        if kind == b"check":
            try:
                error = "" if served.template is not None or not served.chat else "there is no chat template"
            except DataError as problem:
                error = str(problem)
            return json.dumps({"error": error}).encode()
        try:
            asked = _KINDS[kind.decode()](parsed(raw), served)
        except RequestError as refusal:
            names = ("status", "message", "param", "code", "headers")
            return _packed({name: getattr(refusal, name) for name in names})
        prompts = [
            (len(prompt.tokens), {name: getattr(prompt, name) for name in ("text", "added", "skip_special_tokens")})
            for prompt in asked.prompts
        ]
        tokens = array("q", [token for prompt in asked.prompts for token in prompt.tokens])
        return _packed({**asdict(replace(asked, prompts=[])), "prompts": prompts}, tokens.tobytes())

    return handle


def _packed(head: Mapping[str, Any], tail: bytes = b"") -> bytes:
    encoded = json.dumps(head).encode()
    return len(encoded).to_bytes(8, "big") + encoded + tail
