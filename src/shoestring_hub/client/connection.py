"""Requests to a hub: JSON or bytes over one persistent connection, repeated while the hub cannot be reached.

All requests to the hub can safely be repeated, so a request whose answer was lost is sent again.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from contextlib import suppress
from itertools import chain, repeat
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from shoestring.core.errors import ConfigError, ShoestringError
from shoestring.storage import foreign
from shoestring_hub.client.logins import LOOPBACK, Login

TIMEOUT = 30.0
"""Seconds that one request may wait for the hub."""
ANSWER_LIMIT = 64 << 20
"""Maximum size of a JSON answer, in bytes."""
FULL = 507
"""HTTP status of the hub's answer when its disk is full."""
_NAPS = (0.1, 0.3, 1.0, 2.0)
"""Seconds between attempts; the last value is repeated."""


class HubError(ShoestringError):
    """The hub refuses a request: `status` is the HTTP status, and `facts` holds the fields of the JSON answer."""

    def __init__(self, message: str, status: int, facts: dict[str, Any]) -> None:
        super().__init__(message, hint=_HINTS.get(status, ""))
        self.status, self.facts = status, facts

    @property
    def is_final(self) -> bool:
        """Whether the hub would refuse the same request again; false for a full disk, where space may be freed."""
        return self.status != FULL


class HubOutageError(ShoestringError):
    """The hub cannot be reached, or cannot answer now; the same request may succeed later."""

    code = 75  # EX_TEMPFAIL of sysexits.h: running the command again may help


_HINTS = {401: "make a new token on the hub, and log in again: shoestring hub login ADDRESS"}


class Connection:
    """A connection to a hub with a token.

    Args:
        patience: seconds for which a request is tried again while the hub cannot be reached; 0 tries once.
    """

    def __init__(self, login: Login, patience: float = 60.0, timeout: float = TIMEOUT) -> None:
        self.login, self.patience = login, patience
        url = urlsplit(login.address)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"`{login.address}` is not the address of a hub", hint="https://hub.example.org")
        if url.scheme == "http" and url.hostname not in LOOPBACK:
            raise ConfigError(f"`{login.address}` would send the token without TLS", hint="write https://")
        self._base = url.path.rstrip("/")
        if url.scheme == "https":
            self._http: http.client.HTTPConnection = http.client.HTTPSConnection(
                url.hostname, url.port, timeout=timeout, context=ssl.create_default_context()
            )
        else:
            self._http = http.client.HTTPConnection(url.hostname, url.port, timeout=timeout)

    def ask(self, method: str, path: str, body: Any = b"", /, **query: Any) -> dict[str, Any]:
        """Send a request with a body of bytes or of JSON, and return the answer, a JSON object.

        Raises:
            HubError: the hub refuses the request.
            HubOutageError: the hub still cannot be reached, or still fails, after `patience` seconds.
        """
        data = body if isinstance(body, bytes | memoryview) else json.dumps(body).encode()
        answer = self._repeat(method, self._target(path, query), data)
        try:
            value = foreign.parse_json(answer)
        except ValueError as error:
            raise HubError(f"`{self.login.address}` did not answer as a hub does: {error}", 502, {}) from error
        if not isinstance(value, dict):
            raise HubError(f"`{self.login.address}` did not answer as a hub does", 502, {})
        return value

    def fetch(self, path: str, limit: int, body: Any = None) -> bytes:
        """Fetch at most `limit` bytes from a path, by a POST request with `body` as JSON, or by GET if `body` is None.

        Raises:
            HubError, HubOutageError: as for `ask`.
        """
        method, data = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
        return self._repeat(method, self._target(path, {}), data, limit)

    def close(self) -> None:
        """Close the connection; a later request opens it again."""
        self._http.close()

    def _target(self, path: str, query: dict[str, Any]) -> str:
        return f"{self._base}/api/{quote(path)}{'?' if query else ''}{urlencode(query)}"

    def _repeat(self, method: str, target: str, data: bytes | memoryview, limit: int = ANSWER_LIMIT) -> bytes:
        end = time.monotonic() + self.patience
        for nap in chain(_NAPS, repeat(_NAPS[-1])):
            try:
                return self._once(method, target, data, limit)
            except (OSError, http.client.HTTPException, HubOutageError) as error:
                self._http.close()
                if isinstance(error, ssl.SSLCertVerificationError) or time.monotonic() + nap > end:
                    reason = error.parts()[1] if isinstance(error, ShoestringError) else str(error)
                    message = f"cannot reach the hub at {self.login.address}: {reason or type(error).__name__}"
                    hint = "repeat the command once the hub answers; data already sent is kept"
                    raise HubOutageError(message, hint=hint) from error
                time.sleep(nap)
        raise AssertionError("naps never end")

    def _once(self, method: str, target: str, data: bytes | memoryview, limit: int) -> bytes:
        self._http.request(method, target, data, {"Authorization": f"Bearer {self.login.token}"})
        response = self._http.getresponse()
        answer = response.read(limit + 1)
        if len(answer) > limit:
            self._http.close()
            raise HubError(f"the answer to `{target}` is too long", 502, {})
        if response.status >= 500 and response.status != FULL:
            raise HubOutageError(f"it answers {response.status} {response.reason}")
        if response.status >= 300:
            facts: Any = {}
            with suppress(ValueError):
                facts = foreign.parse_json(answer)
            facts = facts if isinstance(facts, dict) else {}
            message = foreign.one_line(str(facts.get("error", response.reason)))[:300]
            raise HubError(f"the hub refuses: {message}", response.status, facts)
        return answer
