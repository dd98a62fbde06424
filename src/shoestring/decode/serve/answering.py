"""An answer, from the texts of a batch: whole, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from shoestring.core.errors import NonFiniteError
from shoestring.decode.request import TokenLogprob
from shoestring.decode.serve.asking import Asked
from shoestring.decode.serve.engine_thread import Batch, EngineThread, News
from shoestring.decode.serve.errors import RequestError, overdue, stopping
from shoestring.decode.serve.forms import AnswerForm, CompletionForm, Json, joined, name, usage
from shoestring.decode.serve.metrics import Metrics
from shoestring.decode.serve.served import Served
from shoestring.decode.serve.writing import Writing

T = TypeVar("T")
PARTING = 2.0
"""Seconds to send the last words of a stream that is cut off."""


@dataclass
class _Text:
    """One text on its way out."""

    writing: Writing
    counted: int = 0
    """Tokens, up to and with the one that completes a stop string."""
    reused: int = 0
    begun: float = 0.0
    done: bool = False
    parts: list[str] = field(default_factory=list)
    logprobs: Json | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Said:
    """Some of a text, ready to be sent."""

    index: int
    text: str
    logprobs: Json | None
    reason: str | None
    first: bool
    draft: Json | None = None
    """The tokens that were drafted for it, how many of them were accepted, and how many characters those have."""


class Answer:
    """The answer to one request: `start` takes slots, and whoever calls it calls `close`, which frees them.

    Args:
        began: when the request came, by `time.monotonic`.
    """

    def __init__(
        self, asked: Asked, form: AnswerForm, served: Served, worker: EngineThread, metrics: Metrics, began: float
    ) -> None:
        self.asked, self.form, self.worker, self.metrics, self.began = asked, form, worker, metrics, began
        self.requests = asked.requests(served)
        stream = served.tokenizer.stream
        self.texts = [_Text(Writing(stream(), asked.stops)) for _ in self.requests]
        self.batch: Batch | None = None

    def start(self) -> None:
        """Have the texts generated."""
        self.batch = self.worker.submit(self.requests)

    def close(self) -> None:
        """End what is unfinished."""
        if self.batch is not None:
            self.worker.cancel(self.batch)

    async def said(self) -> AsyncIterator[Said]:
        """The texts as they grow.

        Raises:
            RequestError: a text cannot be finished.
        """
        assert self.batch is not None
        while not all(text.done for text in self.texts):
            news = await self.batch.news.get()
            if not self.texts[news.index].done:
                yield self._take(news)
                if self.texts[news.index].done and news.ending is None:
                    self.worker.cancel(self.batch, news.index)

    def _take(self, news: News) -> Said:
        text, now = self.texts[news.index], time.monotonic()
        if news.ending in ("cancelled", "failed"):
            self.metrics.endings.add(reason=news.ending)
            raise stopping() if news.ending == "cancelled" else _failed(news)
        first = not text.begun
        if first:
            text.begun, text.reused = now, news.reused
            self.metrics.first_token.observe(now - self.began)
        echo = self._echo(news) if first else Said(news.index, "", None, None, False)
        shown, pieces = [], [echo.text]
        drafted = 0
        entries: Sequence[TokenLogprob | None] = news.logprobs or [None] * len(news.tokens)
        for position, (token, entry) in enumerate(zip(news.tokens, entries, strict=True)):
            piece = text.writing.add(token, entry)
            text.counted += 1
            pieces.append(piece.text)
            shown += piece.tokens
            drafted += len(piece.text) if position < news.accepted else 0
            if text.writing.stopped:
                break
        if news.ending is not None and not text.writing.stopped:
            piece = text.writing.end()
            pieces.append(piece.text)
            shown += piece.tokens
        if text.writing.stopped or news.ending is not None:
            self._finish(text, "stop" if text.writing.stopped else news.ending, now)
        logprobs = echo.logprobs
        if self.asked.logprobs is not None and (shown or first):
            echoed = len(self._prompt(news.index).text) if self.asked.echo else 0
            logprobs = joined(logprobs, self.form.logprobs(shown, echoed))
        draft = None
        if self.asked.drafts and news.drafted:
            names = [name(self.form.tokenizer, token) for token in news.drafted]
            draft = {"tokens": names, "accepted": news.accepted, "characters": drafted}
        return Said(news.index, "".join(pieces), logprobs, text.reason, first, draft)

    def _finish(self, text: _Text, reason: str | None, now: float) -> None:
        text.done, text.reason = True, reason
        self.metrics.endings.add(reason=str(reason))
        self.metrics.whole.observe(now - self.began)
        if text.counted > 1:
            self.metrics.per_token.observe((now - text.begun) / (text.counted - 1))

    def _prompt(self, index: int) -> Any:
        return self.asked.prompts[index // self.asked.count]

    def _echo(self, news: News) -> Said:
        """The prompt, where it is to be repeated."""
        if not self.asked.echo:
            return Said(news.index, "", None, None, True)
        prompt, logprobs = self._prompt(news.index), None
        if self.asked.logprobs is not None and isinstance(self.form, CompletionForm):
            logprobs = self.form.prompt_logprobs(prompt.tokens, news.prompt_logprobs)
        return Said(news.index, prompt.text, logprobs, None, True)

    def usage(self) -> Json:
        """Tokens; each prompt counts once."""
        return usage(
            sum(len(prompt.tokens) for prompt in self.asked.prompts),
            sum(text.counted for text in self.texts),
            sum(max((text.reused for text in group), default=0) for group in self._groups()),
        )

    def _groups(self) -> list[list[_Text]]:
        """The texts of each prompt."""
        count = self.asked.count
        return [self.texts[at : at + count] for at in range(0, len(self.texts), count)]

    async def whole(self) -> Json:
        """The answer at once."""
        async for said in self.said():
            text = self.texts[said.index]
            text.parts.append(said.text)
            text.logprobs = joined(text.logprobs, said.logprobs)
        choices = [
            self.form.choice(index, "".join(text.parts), text.logprobs, text.reason)
            for index, text in enumerate(self.texts)
        ]
        return self.form.whole(choices, self.usage())

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        async for said in self.said():
            if said.first or said.text or said.logprobs or said.reason or said.draft:
                part = self.form.part(said.index, said.text, said.logprobs, said.reason, said.first)
                part |= {"draft": said.draft} if said.draft else {}
                yield event(self.form.piece([part]))
        if self.asked.usage:
            yield event(self.form.piece([], self.usage()))
        yield b"data: [DONE]\n\n"


class Stream(Response):
    """An answer that is sent as it comes. An error in the middle becomes an event, and there is no [DONE] then.

    Args:
        answer: one that has started; it is closed in the end.
        seconds: that all of it may take.
    """

    def __init__(self, answer: Answer, seconds: float) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self.answer, self.seconds = answer, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await unless_gone(receive, self._send(send), self.seconds)
        except ClientDisconnect:
            return
        except RequestError as refusal:
            last = event(refusal.content)
            # A client that takes nothing in does not get this either; the connection is then closed as it is.
            async with asyncio.timeout(PARTING):
                await send(_body(last))
        finally:
            self.answer.close()

    async def _send(self, send: Send) -> None:
        async for data in self.answer.events():
            await send(_body(data, more=True))
        await send(_body(b""))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T], seconds: float) -> T:
    """What `work` returns, unless the client disconnects or it takes too long: it is then cancelled.

    Raises:
        ClientDisconnect: the client is gone.
        RequestError: it took too long.
    """
    tasks: tuple[asyncio.Task[T], asyncio.Task[None]] = (
        asyncio.create_task(work),
        asyncio.create_task(_disconnection(receive)),
    )
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        if tasks[1].done():
            raise ClientDisconnect
        raise overdue(seconds)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnection(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(content: Json) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _body(data: bytes, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _failed(news: News) -> RequestError:
    if isinstance(news.error, NonFiniteError):
        return RequestError(500, str(news.error), code="not_finite", headers={"x-should-retry": "false"})
    return RequestError(500, "the text could not be generated; the server's log says why", code="failed")
