"""The ASGI application: routes, access control, admission of requests, metrics and the access log."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from h11 import LocalProtocolError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoestring.core.errors import ConfigError
from shoestring.decode.constraint import Grammar, Grammars
from shoestring.decode.serve.adapters import AdapterCatalog
from shoestring.decode.serve.answering import Answer, Stream, unless_gone
from shoestring.decode.serve.asking import Asked
from shoestring.decode.serve.engine_thread import EngineThread
from shoestring.decode.serve.errors import RequestError, busy, invalid, stopping
from shoestring.decode.serve.forms import AnswerForm, ChatForm, CompletionForm
from shoestring.decode.serve.limits import Limits, Ticket
from shoestring.decode.serve.metrics import Metrics
from shoestring.decode.serve.responses import ResponseForm
from shoestring.decode.serve.served import Served
from shoestring.decode.serve.understanding import Kind, Understanding, parsed
from shoestring.decode.settings.serving import Serving, is_loopback

log = logging.getLogger("shoestring.serve")

OPEN = ("/", "/page.js", "/page.css", "/health")
"""Paths that need no API key: the web page, which holds no secrets, and the health check for a supervisor."""
ADMINISTRATION = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Paths that need the key of an administrator."""
BODIES = 16
"""Limit on the request bodies in memory, as a multiple of the largest size of one body; further bodies are refused with
status 429."""
GONE = 499
"""HTTP status that is logged if the client disconnected before the answer."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}


class App:
    """The server's application, `asgi`, with the model, the engine's thread and the limits.

    The engine's thread starts and ends with the application's lifespan.

    Args:
        adapters: adapters that clients may choose; by default there are none.
    """

    def __init__(
        self, served: Served, worker: EngineThread, settings: Serving, adapters: AdapterCatalog | None = None
    ) -> None:
        self.served, self.worker, self.settings = served, worker, settings
        self.adapters = adapters or AdapterCatalog(worker.engine.model, served, settings)
        self.understanding = Understanding(served, settings.preparation)
        self.metrics = Metrics()
        self.limits = Limits(settings, len(worker.engine.seated) + settings.queue)
        self.held = 0
        """Bytes of request bodies in memory."""
        self._grammars: Grammars | None = None
        self._reading = threading.Lock()
        self.stopping = False
        """Whether the server is shutting down; it then refuses new requests."""
        self.connections = 0
        """Number of open connections."""
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route(ADMINISTRATION[0], self.load_adapter, methods=["POST"]),
            Route(ADMINISTRATION[1], self.unload_adapter, methods=["POST"]),
            Route("/health", self.health),
            Route("/metrics", self.prometheus),
            *(Route(path, self.page) for path in PAGE),
        ]
        middleware = [Middleware(_Gate, app=self)]
        if settings.allow_origin:
            pages = Middleware(
                CORSMiddleware,
                allow_origins=list(settings.allow_origin),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # client libraries send custom headers; these give web pages no further rights
                expose_headers=["Retry-After", "X-Should-Retry", *_LIMITS],
            )
            middleware.insert(0, pages)
        self.asgi = Starlette(
            routes=routes,
            middleware=middleware,
            exception_handlers={
                RequestError: _refused,
                HTTPException: _no_route,
                ClientDisconnect: _gone,
                Exception: _bug,
            },
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.worker.start()
        await self.worker.warm()
        try:
            yield
        finally:
            await asyncio.to_thread(self.understanding.close)
            await self.worker.close()

    # -- texts ---------------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, "completion", lambda _: CompletionForm(self.served))

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, "chat", lambda _: ChatForm(self.served))

    async def responses(self, request: Request) -> Response:
        return await self._answer(request, "response", lambda asked: ResponseForm(self.served, asked.repeated))

    async def _answer(self, request: Request, kind: Kind, form_of: Callable[[Asked], AnswerForm]) -> Response:
        """Answer a request for texts with one JSON document or a stream."""
        began, key = time.monotonic(), request.scope["key"]
        self._admit(1)
        self.limits.count_request(key)
        asked = await self._understand(request, kind, began)
        adapter = self.adapters.find(asked.model)
        grammar = await self._compiled(request, asked, began)
        form = form_of(asked)
        form.head["model"] = asked.model or self.served.name
        texts = len(asked.prompts) * asked.count
        self._admit(texts)
        prompt = sum(len(prompt.tokens) for prompt in asked.prompts)
        request.scope["ticket"] = self.limits.admit(key, texts, prompt, texts * (asked.max_new or 0))
        namespace = "" if self.settings.share_prefixes else str(key)
        answer = Answer(
            asked, form, self.served, self.worker, self.metrics, began, namespace, adapter, str(key), grammar
        )
        answer.start()  # no await since `_admit`, so no other request can have filled the queue
        request.scope["answer"] = answer
        seconds = self.settings.timeout - (time.monotonic() - began)
        if asked.stream:
            return Stream(answer, seconds)
        try:
            return JSONResponse(await unless_gone(request.receive, answer.whole(), seconds))
        finally:
            answer.close()

    async def _understand(self, request: Request, kind: Kind, began: float) -> Asked:
        """Receive the body of a request, and parse and check it; afterwards the body is no longer in memory."""
        raw = bytearray()
        try:
            await self._receive(request, raw)
            if self.understanding.inline(kind, raw):
                return self.understanding.now(kind, raw)
            seconds = self.settings.timeout - (time.monotonic() - began)
            return await unless_gone(request.receive, self.understanding.later(kind, bytes(raw)), seconds)
        finally:
            self.held -= len(raw)

    async def _compiled(self, request: Request, asked: Asked, began: float) -> Grammar | None:
        """Compile the answer format of a request; None if the request sets none."""
        answer_format = asked.answer_format
        if answer_format is None:
            return None

        def compile_format() -> Grammar:  # runs in another thread
            with self._reading:
                if self._grammars is None:  # reading the tokenizer takes a second if its vocabulary is large
                    tokenizer = self.served.tokenizer
                    self._grammars = Grammars(tokenizer.engine.to_str(), tokenizer.vocab_size, self.served.stop)
            return self._grammars.compile(answer_format)

        seconds = self.settings.timeout - (time.monotonic() - began)
        try:
            return await unless_gone(request.receive, asyncio.to_thread(compile_format), seconds)
        except ConfigError as error:
            raise invalid(str(error), asked.format_field, "format") from error

    def _check_open(self) -> None:
        """Refuse requests while the server shuts down, or after the engine's thread has ended."""
        if self.stopping:
            raise stopping()
        if not self.worker.alive:
            raise RequestError(503, "the engine is not running", code="engine_stopped")

    def _admit(self, texts: int) -> None:
        """Refuse a request whose texts do not fit into the queue."""
        self._check_open()
        slots = len(self.worker.engine.seated)
        if texts > slots + self.settings.queue:
            raise invalid(
                f"{texts} texts are too many: at most {slots + self.settings.queue} can be queued at a time",
                "n",
            )
        if self.worker.unfinished + texts > slots + self.settings.queue:
            raise busy(f"{self.waiting} texts are already waiting; try again later", seconds=5)

    @property
    def waiting(self) -> int:
        """Number of texts that wait for a slot."""
        return max(0, self.worker.unfinished - len(self.worker.engine.seated))

    async def _receive(self, request: Request, received: bytearray) -> None:
        """Receive the body of a request, within the limits on its size and time."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError(
                415, "the body is not declared as JSON; send the header `Content-Type: application/json`"
            )
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestError(415, "the body is compressed; send it uncompressed")
        limit, length = self.settings.body, 0
        try:
            async with asyncio.timeout(self.settings.patience):
                async for part in request.stream():
                    length += len(part)
                    if length <= limit:
                        if self.held + len(part) > BODIES * limit:
                            raise busy("too many long requests are waiting; try again later", seconds=5)
                        received += part
                        self.held += len(part)
                    elif length > 2 * limit:
                        # Up to here, the rest is received and dropped: a client reads an error only after sending.
                        break
        except TimeoutError as error:
            raise RequestError(408, "the body did not arrive in time", headers={"Connection": "close"}) from error
        if length > limit:
            raise RequestError(413, f"the body has more than {limit} bytes", headers={"Connection": "close"})

    # -- about the server ----------------------------------------------------------------------------------------------

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._cards()})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.adapters.find(name)
        return JSONResponse(next(card for card in self._cards() if card["id"] == name))

    def _cards(self) -> list[dict[str, Any]]:
        """The descriptions of the model and its adapters in the format of OpenAI's API, with further fields for the web
        page."""
        model = {
            "id": self.served.name,
            "object": "model",
            "created": self.served.created,
            "owned_by": "shoestring",
            "context": self.served.context,
            "max_tokens": self.served.max_tokens,
            "chat": self.served.chat,
            "drafts": self.worker.engine.speculator is not None,
        }
        return [model, *(model | card for card in self.adapters.cards())]

    async def load_adapter(self, request: Request) -> Response:
        return PlainTextResponse(await self.adapters.load(await self._content(request)))

    async def unload_adapter(self, request: Request) -> Response:
        return PlainTextResponse(await self.adapters.unload(await self._content(request)))

    async def _content(self, request: Request) -> Any:
        """Receive and parse the body of an administrator's request."""
        # Starlette matches paths less strictly than `_Gate`: a path with a line feed at its end leads here as well.
        if not request.scope.get("administrator"):
            raise RequestError(404, "there is nothing at this path")
        self._check_open()
        raw = bytearray()
        try:
            await self._receive(request, raw)
            return parsed(raw)
        finally:
            self.held -= len(raw)

    async def health(self, _: Request) -> Response:
        if self.stopping or not self.worker.alive:
            return JSONResponse({"status": "stopping" if self.stopping else "failed"}, 503)
        return JSONResponse({"status": "ok"})

    async def prometheus(self, _: Request) -> Response:
        engine, counts = self.worker.engine, self.worker.engine.counts
        drafts, drafted, accepted = counts.drafts.drafts, sum(counts.drafts.drafted), sum(counts.drafts.accepted)
        counters = {
            "generated_tokens_total": ("Tokens generated.", counts.generated),
            "prompt_tokens_total": ("Prompt tokens that the model has read.", counts.read),
            "reused_prompt_tokens_total": ("Prompt tokens that were taken from the cache.", counts.reused),
            "decoding_passes_total": ("Passes of the model over all active texts.", counts.passes),
            "prompt_passes_total": ("Passes of the model over a part of a prompt.", counts.chunks),
            "drafts_total": ("Drafts that were verified.", drafts),
            "drafted_tokens_total": ("Tokens drafted.", drafted),
            "accepted_tokens_total": ("Drafted tokens that were accepted.", accepted),
            "failed_passes_total": ("Passes of the model that raised an error.", counts.failed),
        }
        gauges = {
            "connections": ("Open connections.", self.connections),
            "asyncio_tasks": ("Tasks of the event loop.", len(asyncio.all_tasks())),
            "slots": ("Texts that can be generated at the same time.", len(engine.seated)),
            "adapters": ("Adapters in memory.", len(self.adapters.loaded)),
            "slots_busy": ("Slots with a text.", sum(row is not None for row in engine.seated)),
            "queue_length": ("Texts that wait for a slot.", self.waiting),
            "acceptance_length": (
                "Mean number of tokens that a pass with a draft adds.",
                1 + accepted / max(drafts, 1),
            ),
        }
        return PlainTextResponse(self.metrics.text(counters, gauges), media_type="text/plain; version=0.0.4")

    async def page(self, request: Request) -> Response:
        file, kind = PAGE[request.url.path]
        content = files("shoestring.decode.serve").joinpath("page", file).read_text("utf-8")
        headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
        return Response(content, media_type=kind, headers=headers)


class _Gate:
    """Middleware that checks, counts and logs every request; the log line does not show the content of the request."""

    def __init__(self, inner: ASGIApp, app: App) -> None:
        self.inner, self.app = inner, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.inner(scope, receive, send)
        began, status = time.monotonic(), GONE

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                limits = () if scope.get("key") is None else self.app.limits.headers(scope["key"])
                message["headers"] = [*message["headers"], *_HEADERS, *limits]
            try:
                await send(message)
            except LocalProtocolError:  # uvicorn has refused the rest of the request and closed the connection
                status = GONE

        try:
            try:
                self._check(Request(scope))
                await self.inner(scope, receive, noting)
            except RequestError as refusal:
                await refusal.response()(scope, receive, noting)
            except Exception:
                status = 500
                raise
        finally:
            ticket: Ticket | None = scope.get("ticket")
            if ticket is not None:
                used = scope["answer"].usage() if "answer" in scope else {"total_tokens": 0}
                self.app.limits.settle(ticket, used["total_tokens"])
            path = scope["path"] if scope.get("endpoint") is not None else "other"
            path = "/v1/models" if path.startswith("/v1/models/") else path
            self.app.metrics.requests.add(path=path, status=str(status))
            self._log(scope, status, time.monotonic() - began)

    def _check(self, request: Request) -> None:
        """Refuse a request that was sent to another host name, or that lacks a valid API key where one is needed."""
        settings = self.app.settings
        host = re.sub(r":\d*$", "", request.headers.get("host", ""))
        if settings.loopback and not is_loopback(host):
            # DNS rebinding: if a web page's host name resolves to this machine, the browser treats this server as the
            # page's own origin.
            raise RequestError(403, "this server only answers requests to names of this machine, such as localhost")
        scheme, _, rest = request.headers.get("authorization", "").partition(" ")
        key = rest.strip() if scheme.lower() == "bearer" else ""
        if request.scope["path"] in ADMINISTRATION:
            if not settings.administrators:
                raise RequestError(403, "this server has no administrators; start it with --admin-key-file")
            if not settings.is_administrator(key):
                raise RequestError(
                    401,
                    "no valid administrator's key was sent as a bearer token",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            request.scope["administrator"] = True
        elif request.scope["path"] not in OPEN:
            number = settings.find_key(key)
            request.scope["key"] = number
            if number is None:
                hint = {"WWW-Authenticate": "Bearer"}
                raise RequestError(
                    401, "no valid API key was sent as a bearer token", code="invalid_api_key", headers=hint
                )

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        """Write one line to the access log."""
        client, path = scope.get("client") or ("-", 0), scope.get("raw_path", b"").decode("ascii", "replace")
        answer: Answer | None = scope.get("answer")
        tokens = ""
        if answer is not None:
            used = answer.usage()
            tokens = f", {used['prompt_tokens']} + {used['completion_tokens']} tokens"
        log.info("%s %s %s %d %.3f s%s", client[0], scope["method"], path[:80], status, seconds, tokens)


_LIMITS = [f"x-ratelimit-{name}-{unit}" for unit in ("requests", "tokens") for name in ("limit", "remaining", "reset")]
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
]


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error.response()


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {404: "there is nothing at this path", 405: f"this path takes no {request.method[:20]}"}
    return RequestError(error.status_code, known.get(error.status_code, error.detail), headers=error.headers).response()


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=GONE)


async def _bug(_: Request, __: Exception) -> Response:
    return RequestError(500, "the server has failed; see the server's log", code="failed").response()
