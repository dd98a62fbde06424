"""Answers to requests, sent as one JSON document or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from shoestring.core.errors import NonFiniteError
from shoestring.decode.constraint import ConstraintError, Grammar
from shoestring.decode.request import Request, TokenLogprob
from shoestring.decode.serve.asking import Asked
from shoestring.decode.serve.engine_thread import Batch, EngineThread, News
from shoestring.decode.serve.errors import RequestError, overdue, stopping, unread
from shoestring.decode.serve.forms import AnswerForm, CompletionForm, Json, joined, name, usage
from shoestring.decode.serve.metrics import Metrics
from shoestring.decode.serve.served import Served
from shoestring.decode.serve.tool_calls import FORMS, CallParser, Content
from shoestring.decode.serve.writing import Shown, Writing
from shoestring.models.adapters_by_row import LoadedAdapter

log = logging.getLogger("shoestring.serve")

T = TypeVar("T")
PARTING = 2.0
"""Time limit, in seconds, for sending the final error event of a stream."""


@dataclass
class _Text:
    """The state of one text of an answer."""

    writing: Writing
    calls: CallParser | None = None
    """Finds tool calls in the text; None if the text may contain no calls."""
    counted: int = 0
    """Number of generated tokens, including a token that completes a stop string."""
    reused: int = 0
    """Number of tokens of the prompt that were already in the cache."""
    begun: float = 0.0
    """Time of the first token, by `time.monotonic`; 0 before the first token."""
    done: bool = False
    parts: list[Content] = field(default_factory=list)
    """Text and calls so far; used only if the answer is not streamed."""
    logprobs: Json | None = None
    """Log-probabilities so far; used only if the answer is not streamed."""
    reason: str | None = None
    """Why the text ended; None while it is generated."""

    @property
    def over(self) -> bool:
        """Whether the text is complete although the engine may still be generating it."""
        return self.writing.stopped or (self.calls is not None and self.calls.finished)

    def split(self, text: str, *, last: bool = False) -> list[Content]:
        """Split new text into text and calls that can be sent now; with `last`, no more text follows."""
        if self.calls is None or self.calls.finished:
            return [text] if text and self.calls is None else []
        parts = self.calls.add(text)
        return parts + self.calls.end() if last else parts


@dataclass(frozen=True)
class Said:
    """A piece of a text, ready to be sent."""

    index: int
    """Index of the text in the answer."""
    content: Sequence[Content]
    """Text and tool calls."""
    logprobs: Json | None
    reason: str | None
    """Why the text ended; None before its last piece."""
    first: bool
    """Whether this is the first piece of the text."""
    draft: Json | None = None
    """Drafted tokens of the piece, how many of them were accepted, and the number of characters of the accepted tokens;
    None unless the client has asked for drafts."""


class Answer:
    """The answer to one request. `start` queues the texts; `close` must be called afterwards, and frees their slots.

    Args:
        began: time at which the request arrived, by `time.monotonic`.
        namespace: cached keys and values of prompts are reused only by requests of the same namespace.
        adapter: low-rank adapter that the texts are generated with; None for the model alone.
        client: client that sent the request; slots are shared fairly among clients.
        grammar: the compiled format of the texts; None allows any text.
    """

    def __init__(
        self,
        asked: Asked,
        form: AnswerForm,
        served: Served,
        worker: EngineThread,
        metrics: Metrics,
        began: float,
        namespace: str = "",
        adapter: LoadedAdapter | None = None,
        client: str = "",
        grammar: Grammar | None = None,
    ) -> None:
        self.asked, self.form, self.worker, self.metrics, self.began = asked, form, worker, metrics, began
        most = served.max_tokens if asked.max_new is None else asked.max_new
        # All texts of the first prompt, then all texts of the second prompt, and so on.
        self.requests = [
            Request(
                tokens=prompt.tokens,
                max_new=min(most, served.context - len(prompt.tokens)),  # a full context ends a text with `length`
                sampling=replace(asked.sampling, seed=(asked.sampling.seed + number) % 2**63),
                changes=asked.changes,
                constraint=None if grammar is None else grammar.start(),
                stop=served.stop.union(asked.stop_token_ids),
                logprobs=asked.logprobs,
                prompt_logprobs=asked.echo and asked.logprobs is not None,
                namespace=namespace,
                adapter=adapter,
                client=client,
            )
            for prompt in asked.prompts
            for number in range(asked.count)
        ]
        self.texts = [_text(asked, served, request) for request in self.requests]
        self.batch: Batch | None = None

    def start(self) -> None:
        """Queue the texts for the engine."""
        self.batch = self.worker.submit(self.requests)

    def close(self) -> None:
        """Cancel the unfinished texts."""
        if self.batch is not None:
            self.worker.cancel(self.batch)

    async def said(self) -> AsyncIterator[Said]:
        """Yield pieces of the texts as they grow.

        Raises:
            RequestError: a text cannot be finished.
        """
        assert self.batch is not None
        while not all(text.done for text in self.texts):
            news = await self.batch.take()
            if self.batch.overrun:
                self.metrics.endings.add(reason="unread")
                raise unread()
            if not self.texts[news.index].done:
                try:
                    piece = self._take(news)
                except RequestError:
                    raise
                except Exception as error:  # for example, the tokenizer cannot decode a token
                    log.exception("a text could not be written")
                    self.metrics.endings.add(reason="failed")
                    raise _failed(error) from error
                yield piece
                await asyncio.sleep(0)  # lets other tasks run between the pieces of a long backlog
                if self.texts[news.index].done and news.ending is None:
                    self.worker.cancel(self.batch, news.index)

    def _take(self, news: News) -> Said:
        """Turn the progress of a text into a piece to send, and end the text at a stop string."""
        text, now = self.texts[news.index], time.monotonic()
        if news.ending in ("cancelled", "failed"):
            self.metrics.endings.add(reason=news.ending)
            raise stopping() if news.ending == "cancelled" else _failed(news.error)
        first = not text.begun
        if first:
            text.begun, text.reused = now, news.reused
            self.metrics.first_token.observe(now - self.began)
        echo: list[Content] = []
        logprobs: Json | None = None
        if first and self.asked.echo:
            prompt = self._prompt(news.index)
            echo = [prompt.text]
            if self.asked.logprobs is not None and isinstance(self.form, CompletionForm):
                logprobs = self.form.prompt_logprobs(prompt, news.prompt_logprobs)
        content, shown, drafted = self._grow(text, news)
        if text.over or news.ending is not None:
            reason = "stop" if text.over else news.ending
            called = text.calls is not None and text.calls.calls > 0
            self._finish(text, "tool_calls" if called and reason == "stop" else reason, now)
        if self.asked.logprobs is not None and (shown or first):
            echoed = len(self._prompt(news.index).text) if self.asked.echo else 0
            logprobs = joined(logprobs, self.form.logprobs(shown, echoed))
        draft = None
        if self.asked.drafts and news.drafted:
            names = [name(self.form.tokenizer, token) for token in news.drafted]
            draft = {"tokens": names, "accepted": news.accepted, "characters": drafted}
        return Said(news.index, [*echo, *content], logprobs, text.reason, first, draft)

    def _grow(self, text: _Text, news: News) -> tuple[list[Content], list[Shown], int]:
        """Add new tokens to a text, up to its end; returns what can be sent now, and the number of characters that
        come from drafted tokens."""
        content, shown, drafted = list[Content](), list[Shown](), 0
        entries: Sequence[TokenLogprob | None] = news.logprobs or [None] * len(news.tokens)
        for position, (token, entry) in enumerate(zip(news.tokens, entries, strict=True)):
            piece = text.writing.add(token, entry)
            text.counted += 1
            content += text.split(piece.text, last=text.writing.stopped)
            shown += piece.tokens
            drafted += len(piece.text) if position < news.accepted else 0
            if text.over:
                break
        if news.ending is not None and not text.over:
            piece = text.writing.end()
            content += text.split(piece.text, last=True)
            shown += piece.tokens
        return content, shown, drafted

    def _finish(self, text: _Text, reason: str | None, now: float) -> None:
        """Mark a text as done, and count it in the metrics."""
        text.done, text.reason = True, reason
        self.metrics.endings.add(reason=str(reason))
        self.metrics.whole.observe(now - self.began)
        if text.counted > 1:
            self.metrics.per_token.observe((now - text.begun) / (text.counted - 1))

    def _prompt(self, index: int) -> Any:
        return self.asked.prompts[index // self.asked.count]

    def usage(self) -> Json:
        """Token counts of the answer; a prompt counts once, however many texts continue it."""
        return usage(
            sum(len(prompt.tokens) for prompt in self.asked.prompts),
            sum(text.counted for text in self.texts),
            # Only the first text of each prompt counts; for further texts, the prompt is cached by the first one.
            sum(text.reused for text in self.texts[:: self.asked.count]),
        )

    async def whole(self) -> Json:
        """Wait until all texts have ended, and return the whole answer."""
        async for piece in self.said():
            text = self.texts[piece.index]
            text.parts += piece.content
            text.logprobs = joined(text.logprobs, piece.logprobs)
        choices = [
            self.form.choice(index, text.parts, text.logprobs, text.reason) for index, text in enumerate(self.texts)
        ]
        return self.form.whole(choices, self.usage())

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events."""
        for data in self.form.begin():
            yield data
        async for piece in self.said():
            if piece.first or piece.content or piece.logprobs or piece.reason or piece.draft:
                for data in self.form.pieces(
                    piece.index, piece.content, piece.logprobs, piece.reason, piece.first, piece.draft
                ):
                    yield data
        for data in self.form.end(self.usage(), self.asked.usage):
            yield data


class Stream(Response):
    """A response that sends an answer as it is generated. After an error, the last event of the stream is the error
    instead of [DONE].

    Args:
        answer: a started answer; it is closed at the end.
        seconds: time limit of the whole response.
    """

    def __init__(self, answer: Answer, seconds: float) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self.answer, self.seconds = answer, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_events() -> None:
            async for data in self.answer.events():
                await send(_body(data, more=True))
            await send(_body(b""))

        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await unless_gone(receive, send_events(), self.seconds)
        except ClientDisconnect:
            return
        except RequestError as refusal:
            last = self.answer.form.failure(refusal)
            # A client that reads nothing will not read the error either; its connection is then closed anyway.
            async with asyncio.timeout(PARTING):
                await send(_body(last))
        except Exception:
            log.exception("an answer could not be streamed")
            async with asyncio.timeout(PARTING):
                await send(_body(self.answer.form.failure(_failed())))
        finally:
            self.answer.close()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T], seconds: float) -> T:
    """Return the result of `work`, but cancel it if the client disconnects or the time is up.

    Raises:
        ClientDisconnect: the client has disconnected.
        RequestError: the time is up.
    """

    async def disconnection() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks: tuple[asyncio.Task[T], asyncio.Task[None]] = (
        asyncio.create_task(work),
        asyncio.create_task(disconnection()),
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


def _text(asked: Asked, served: Served, request: Request) -> _Text:
    """Create the state of a text before its first token."""
    calls = None if asked.calling is None else FORMS[asked.calling.form](asked.calling)
    marks = () if calls is None else calls.marks()
    stream = served.tokenizer.stream(request.tokens, asked.skip_special_tokens, marks)
    return _Text(Writing(stream, asked.stops), calls)


def _body(data: bytes, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _failed(error: Exception | None = None) -> RequestError:
    """Build the error that is sent to a client whose text has failed."""
    if isinstance(error, NonFiniteError):
        return RequestError(500, str(error), code="not_finite", headers={"x-should-retry": "false"})
    if isinstance(error, ConstraintError):
        return RequestError(500, str(error), code="format", headers={"x-should-retry": "false"})
    return RequestError(500, "the text could not be generated; the server's log says why", code="failed")
