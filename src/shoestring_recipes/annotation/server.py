"""Serves the labelling page to browsers on this machine only. A token identifies a rater; the store holds its hash."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from shoestring.core.errors import ConfigError, DataError, ShoestringError
from shoestring.storage.foreign import parse_json
from shoestring_recipes.annotation.page import CSS, HTML, JS
from shoestring_recipes.annotation.store import AnnotationStore

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; form-action 'none'; "
    "frame-ancestors 'none'; base-uri 'none'"
)
LARGEST = 4096
"""Maximum size of a request's body in bytes."""
LONGEST_LOOK = 86400.0
"""Maximum plausible time for a label, in seconds; a longer time is stored as 0."""
LONGEST_TEXT = 100_000
"""Maximum number of characters of a text that the page shows."""
FILES = {"/": ("text/html", HTML), "/page.css": ("text/css", CSS), "/page.js": ("text/javascript", JS)}


class LabelServer(ThreadingHTTPServer):
    """A server for the tasks of one project, on the loopback address.

    Args:
        port: port to listen on; 0 takes a free one.

    Raises:
        ConfigError: the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, store: AnnotationStore, project: Any, port: int = 0) -> None:
        self.store, self.project, self.tasks = store, project, store.task_count(project)
        try:
            super().__init__(("127.0.0.1", port), LabelRequests)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on port {port}: {error}", hint="name another port") from error
        self.address = f"http://127.0.0.1:{self.server_address[1]}/"


class LabelRequests(BaseHTTPRequestHandler):
    """Answers the requests of the page."""

    server: Any  # a LabelServer
    protocol_version = "HTTP/1.1"
    server_version = "shoestring"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        """Send the page, its parts, or the next task."""
        if self.path in FILES:
            self._send(200, *FILES[self.path])
        else:
            self._answer({"/next": self._next})

    def do_POST(self) -> None:
        """Store a label, or remove the rater's last label."""
        self._answer(
            {
                "/label": self._label,
                "/undo": lambda rater, _: {"done": self.server.store.undo(self.server.project, rater.id)},
            }
        )

    def _answer(self, actions: dict[str, Any]) -> None:
        """Run the action that belongs to the path of the request, for the rater whom the token identifies."""
        try:
            body = self._body()
            scheme, _, token = self.headers.get("Authorization", "").partition(" ")
            if self.path not in actions:
                self._refuse(404, "there is no such page")
            elif self.headers.get("Host", "") != self.server.address.split("/")[2]:
                self._refuse(403, "open the page by the address that was printed")  # DNS rebinding
            elif scheme != "Bearer" or (rater := self.server.store.rater_of_token(token)) is None:
                self._refuse(401, "this link is not valid: ask for a new one")
            else:
                self._send(200, "application/json", json.dumps(actions[self.path](rater, body)))
        except (DataError, ValueError) as error:
            self.close_connection = True
            self._refuse(400, str(error))
        except ShoestringError as error:
            self._refuse(503, f"the store cannot be used: {error}")

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or int(length) > LARGEST or "Transfer-Encoding" in self.headers:
            raise ValueError("the request is too large")
        content = self.rfile.read(int(length))
        body = parse_json(content) if content else {}
        if not isinstance(body, dict):
            raise ValueError("the request is no object")
        return body

    def _next(self, rater: Any, body: dict[str, Any]) -> dict[str, Any]:
        store, project = self.server.store, self.server.project
        task, done = store.next_task(project, rater.id), store.labelled_by(project, rater.id)
        state = {"rater": rater.name, "question": project.question, "choices": project.choices, "done": done}
        if task is not None and len(task["text"]) > LONGEST_TEXT:
            task["text"] = f"{task['text'][:LONGEST_TEXT]} …"
        return {"task": None, **state, "all": self.server.tasks, **(task or {})}

    def _label(self, rater: Any, body: dict[str, Any]) -> dict[str, Any]:
        task, choice, seconds = (body.get(name) for name in ("task", "choice", "seconds"))
        whole = isinstance(task, int) and not isinstance(task, bool) and 0 < task < 2**31
        if not whole or not (choice is None or (isinstance(choice, int) and not isinstance(choice, bool))):
            raise ValueError("`task` and `choice` are no numbers")
        number = seconds if isinstance(seconds, int | float) and 0 <= seconds <= LONGEST_LOOK else 0.0
        self.server.store.add_label(self.server.project, task, rater.id, choice, number)
        return {"done": True}

    def _refuse(self, status: int, reason: str) -> None:
        self._send(status, "application/json", json.dumps({"error": reason}))

    def _send(self, status: int, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(content))),
            ("Content-Security-Policy", POLICY),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the line that the base class prints for each request."""
