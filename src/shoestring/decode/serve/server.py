"""Uvicorn with two additions: time limits on connections, and a shutdown that lets running texts finish."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoestring.core.errors import ConfigError
from shoestring.decode.serve.app import App
from shoestring.decode.settings.serving import Serving

log = logging.getLogger("shoestring.serve")

LAST = 5.0
"""Time limit, in seconds, for sending the last answers after the last text has ended."""
_FRAMING = {b"content-length", b"transfer-encoding"}
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Connection(H11Protocol):
    """A connection that is closed if the client takes longer than `patience` seconds to send a request or to read what
    the server has sent."""

    owner: App
    patience: float

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.owner.connections += 1
        channel = transport.get_extra_info("socket")
        # asyncio sets TCP_NODELAY only if the listener names its protocol; without the option, the end of an answer is
        # 40 ms late.
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # With TCP_USER_TIMEOUT, the kernel ends a connection whose client reads nothing, even after the server has
        # closed it.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self.patience))
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.owner.connections -= 1
        self._unwatch()
        self._end_stall()

    def pause_writing(self) -> None:
        """Start the time limit for a client that may have stopped reading; asyncio calls this when the write buffer is
        full."""
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall()

    def _watch_stall(self) -> None:
        """End the connection unless the client reads something in the next `patience` seconds."""
        unsent = self.transport.get_write_buffer_size()

        def check() -> None:
            if self.transport.get_write_buffer_size() < unsent:
                self._watch_stall()
            else:
                self.transport.abort()

        self._end_stall()
        self._stalled = self.loop.call_later(self.patience, check)

    def _end_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and _FRAMING.issubset(name for name, _ in self.headers):
            # Request smuggling: a proxy may have used Content-Length where h11 uses the chunks, so the bytes that
            # follow could be another client's request. The connection is therefore closed after this request (RFC 9112,
            # section 6.3).
            self.headers.append(CLOSE_HEADER)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # an answer has begun already
            self.transport.abort()

    def _watch(self) -> None:
        """Start the time limit for the next request, or stop the limit while a request is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch()
        elif self._deadline is None and not self.transport.is_closing():

            def expire() -> None:
                self._deadline = None
                unsent, self._unsent = self._unsent, self.transport.get_write_buffer_size()
                if self._unsent > 0 and (not unsent or self._unsent < unsent):  # the client still reads the last answer
                    self._watch()
                else:
                    self.transport.abort()

            self._deadline = self.loop.call_later(self.patience, expire)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    """A uvicorn server that handles no signals, because `serve` handles them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(settings: Serving) -> socket.socket:
    """Open a socket that listens on the host and port of the settings.

    Raises:
        ConfigError: the address is not available.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            settings.host.strip("[]"), settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {settings.host}, port {settings.port}: {reason}", hint="--port 0 takes a free port"
        ) from error


def url_of(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    app: App, listener: socket.socket, *, stop: asyncio.Event | None = None, ready: Callable[[], object] = lambda: None
) -> None:
    """Answer requests until a signal arrives or `stop` is set; then refuse new requests, and give running texts `grace`
    seconds to end.

    SIGTERM and SIGINT are handled if this runs in the main thread; a second signal cuts the running texts off at once.

    Args:
        listener: a socket from `listen`; closed at the end.
        stop: stops the server when set.
        ready: called as soon as the server answers requests.
    """
    stop = stop or asyncio.Event()
    settings = app.settings
    connection = type("Connection", (_Connection,), {"owner": app, "patience": settings.patience})
    config = uvicorn.Config(
        app.asgi,
        http=connection,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",
        access_log=False,
        limit_concurrency=settings.clients,
        timeout_graceful_shutdown=int(LAST),
        server_header=False,
        proxy_headers=False,
    )
    server, hurry = _Server(config), asyncio.Event()
    loop, handled = asyncio.get_running_loop(), threading.current_thread() is threading.main_thread()
    for number in SIGNALS if handled else ():
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.005)
        ready()
        waiting = asyncio.create_task(stop.wait())
        await asyncio.wait((waiting, running), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        app.stopping = True
        if app.worker.unfinished:
            log.info("the server is stopping: %d running texts have %g s to end", app.worker.unfinished, settings.grace)
        end = loop.time() + settings.grace
        while app.worker.unfinished and loop.time() < end and not hurry.is_set():
            await asyncio.sleep(0.02)
        app.worker.cancel_all()
        while app.worker.unfinished and app.worker.alive and loop.time() < end + LAST:
            await asyncio.sleep(0.02)
        server.should_exit = True
        await running
    finally:
        for number in SIGNALS if handled else ():
            loop.remove_signal_handler(number)


@contextmanager
def serving(app: App) -> Iterator[str]:
    """Context manager that runs the server in a separate thread until the block ends; yields the server's URL."""
    listener, started = listen(app.settings), threading.Event()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    url = url_of(listener)

    def run() -> None:
        try:
            loop.run_until_complete(serve(app, listener, stop=stop, ready=started.set))
        finally:
            started.set()
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    thread = threading.Thread(target=run, name="shoestring-server")
    thread.start()
    try:
        started.wait()
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
