"""Answers other than success, in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response


class RequestError(Exception):
    """A request that is not answered as asked.

    Args:
        status: of HTTP.
        message: what is wrong and what to do, for the client.
        param: the field of the request that is at fault.
        code: a word for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers
        # What clients send may hold halves of surrogate pairs, which cannot be sent back.
        self.message, self.param = _sendable(message), None if param is None else _sendable(param)

    @property
    def content(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The answer."""
        return JSONResponse(self.content, self.status, dict(self.headers or {}))


def invalid(message: str, param: str | None = None, code: str | None = None) -> RequestError:
    """What is asked for is wrong."""
    return RequestError(400, message, param=param, code=code)


def busy(message: str, seconds: int) -> RequestError:
    """Too much is asked for at the same time; the client may ask again after so many seconds."""
    return RequestError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})


def stopping() -> RequestError:
    """The server ends."""
    return RequestError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "30"})


def overdue(seconds: float) -> RequestError:
    """The request took too long; to ask again would take as long."""
    return RequestError(
        503, f"the text took longer than {seconds:g} s", code="timeout", headers={"x-should-retry": "false"}
    )


def _sendable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
