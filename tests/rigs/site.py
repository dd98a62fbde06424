"""A web site on loopback with everything that crawls must survive, and a count of the requests for each path."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, str], bytes]


def page(body: str, title: str = "") -> Answer:
    """An HTML page."""
    text = f"<html><head><title>{title}</title></head><body>{body}</body></html>"
    return 200, {"Content-Type": "text/html; charset=utf-8"}, text.encode()


def redirect(target: str) -> Answer:
    """A redirect."""
    return 302, {"Location": target}, b""


class LoopbackSite(ThreadingHTTPServer):
    """A site whose answers are looked up by path, without the query; as a context it serves.

    Args:
        answers: what to send for a path, or a function of the whole path and the headers.
        pause: seconds that each request takes.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, answers: dict[str, Answer | Callable[[str, Any], Answer]], pause: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.answers, self.pause, self.requests = answers, pause, Counter[str]()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> LoopbackSite:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Be silent about clients that were killed."""

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        self.shutdown()
        self.server_close()


class _Requests(BaseHTTPRequestHandler):
    server: Any  # a LoopbackSite
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.requests[self.path] += 1
        time.sleep(self.server.pause)
        found = self.server.answers.get(self.path.partition("?")[0], (404, {"Content-Type": "text/plain"}, b"no"))
        status, headers, body = found(self.path, self.headers) if callable(found) else found
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def tree(pages: int) -> dict[str, Answer | Callable[[str, Any], Answer]]:
    """Pages `/0` to `/N`, each of which links to the next three, to the first one, and to itself in two ways."""

    def numbered(number: int) -> Answer:
        below = [child for child in range(3 * number + 1, 3 * number + 4) if child < pages]
        links = [f"/{child}" for child in (*below, 0)] + [f"/{number}#a", f"/{number}"]
        return page(f"Text of page {number}. " + " ".join(f"<a href='{link}'>x</a>" for link in links), f"{number}")

    return {f"/{number}": numbered(number) for number in range(pages)}
