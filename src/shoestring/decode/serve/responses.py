"""Builds answers to /v1/responses in the JSON of OpenAI's API, as one document or as the events of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoestring.decode.serve.errors import RequestError
from shoestring.decode.serve.forms import AnswerForm, Json, event
from shoestring.decode.serve.served import Served
from shoestring.decode.serve.tool_calls import Content, ToolCall
from shoestring.decode.serve.writing import Shown

_FIXED: Json = {
    "background": False,
    "error": None,
    "metadata": {},
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "text": {"format": {"type": "text"}},
    "truncation": "disabled",
}
"""Fields that are the same in all answers, because other values are not supported."""


class ResponseForm(AnswerForm):
    """An answer of one text as a list of items: messages and function calls, in the order in which they were written.

    Args:
        repeated: fields of the request that the answer repeats.
    """

    prefix = "resp"

    def __init__(self, served: Served, repeated: Mapping[str, Any]) -> None:
        super().__init__(served)
        self.response: Json = {
            "id": self.head["id"].replace("-", "_"),
            "object": "response",
            "created_at": int(time.time()),
            "model": served.name,
            "status": "in_progress",
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **_FIXED,
            **repeated,
        }
        self._events = 0
        self._message: Json | None = None  # the last item of the output, if text can be added to it

    def whole(self, choices: Sequence[Json], usage: Json) -> Json:
        return self._completed(usage)

    def choice(self, index: int, content: Sequence[Content], logprobs: Json | None, reason: str | None) -> Json:
        for _ in self.pieces(index, content, logprobs, reason, first=True):
            pass  # `pieces` also adds to the output; the events are not needed
        return {}

    def parts(
        self, index: int, content: Sequence[Content], logprobs: Json | None, reason: str | None, first: bool
    ) -> Iterator[Json]:
        """Add text and calls to the output, and yield the events that report them."""
        for part in content:
            if isinstance(part, ToolCall):
                yield from self._close()
                yield from self._call(part)
            else:
                yield from self._write(part)
        if reason is not None:
            cut = reason == "length"
            self.response["status"] = "incomplete" if cut else "completed"
            self.response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
            if not self.response["output"]:
                yield from self._write("")
            yield from self._close("incomplete" if cut else "completed")

    def logprobs(self, tokens: Sequence[Shown], echoed: int) -> Json:
        raise NotImplementedError("log-probabilities are refused in the request")

    # -- streams -------------------------------------------------------------------------------------------------------

    def begin(self) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event({"type": kind, "response": self.response})

    def pieces(
        self,
        index: int,
        content: Sequence[Content],
        logprobs: Json | None,
        reason: str | None,
        first: bool,
        draft: Json | None = None,
    ) -> Iterator[bytes]:
        return map(self._event, self.parts(index, content, logprobs, reason, first))

    def end(self, usage: Json, wanted: bool) -> Iterator[bytes]:
        response = self._completed(usage)
        yield self._event({"type": f"response.{response['status']}", "response": response})

    def failure(self, error: RequestError) -> bytes:
        # The field `error`, as in the other APIs, is added because OpenAI's clients raise an exception where it occurs.
        fields = {name: error.content["error"][name] for name in ("code", "message", "param")}
        return self._event({"type": "error", **fields, **error.content})

    def _event(self, content: Json) -> bytes:
        data = event({**content, "sequence_number": self._events}, content["type"])
        self._events += 1
        return data

    # -- the output ----------------------------------------------------------------------------------------------------

    def _completed(self, usage: Json) -> Json:
        """Complete the response with its token counts, under the names of this API."""
        self.response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return self.response

    def _open(self, kind: str, item: Json) -> tuple[Json, Json]:
        """Add an item to the output; returns the item, and the fields by which events refer to it."""
        item = {"id": f"{kind}_{secrets.token_hex(12)}", "status": "in_progress", **item}
        self.response["output"].append(item)
        return item, {"item_id": item["id"], "output_index": len(self.response["output"]) - 1}

    def _write(self, text: str) -> Iterator[Json]:
        """Add text to the open message, or to a new one."""
        if self._message is None:
            item, at = self._open("msg", {"type": "message", "role": "assistant", "content": []})
            self._message = item
            yield {"type": "response.output_item.added", "output_index": at["output_index"], "item": item}
            item["content"].append({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
            yield {"type": "response.content_part.added", **at, "content_index": 0, "part": item["content"][0]}
        self._message["content"][0]["text"] += text
        if text:
            yield {"type": "response.output_text.delta", **self._place(), "delta": text, "logprobs": []}

    def _close(self, status: str = "completed") -> Iterator[Json]:
        """End the open message, if there is one."""
        if self._message is None:
            return
        item, at = self._message, self._place()
        item["status"], part = status, item["content"][0]
        yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **at, "part": part}
        yield {"type": "response.output_item.done", "output_index": at["output_index"], "item": item}
        self._message = None

    def _place(self) -> Json:
        """The fields by which events refer to the open message, which is the last item."""
        output = self.response["output"]
        return {"item_id": output[-1]["id"], "output_index": len(output) - 1, "content_index": 0}

    def _call(self, call: ToolCall) -> Iterator[Json]:
        """Add a call to the output."""
        item, at = self._open("fc", {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""})
        yield {"type": "response.output_item.added", "output_index": at["output_index"], "item": item}
        item["arguments"], item["status"] = call.arguments, "completed"
        yield {"type": "response.function_call_arguments.delta", **at, "delta": call.arguments}
        done = {"name": call.name, "arguments": call.arguments}
        yield {"type": "response.function_call_arguments.done", **at, **done}
        yield {"type": "response.output_item.done", "output_index": at["output_index"], "item": item}
