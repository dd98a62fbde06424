"""Error responses in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response


class RequestError(Exception):
    """An error that is sent to the client.

    Args:
        status: HTTP status.
        message: text for people: what is wrong and what to do.
        param: the field of the request that is at fault.
        code: short identifier of the kind of error, for programs.
        headers: headers of the response.
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
        # The message and the field name may quote the client's text; lone surrogates in it cannot be encoded.
        self.message, self.param = _sendable(message), None if param is None else _sendable(param)

    @property
    def content(self) -> dict[str, Any]:
        """The JSON of the response."""
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The HTTP response."""
        return JSONResponse(self.content, self.status, dict(self.headers or {}))


def invalid(message: str, param: str | None = None, code: str | None = None) -> RequestError:
    """Build the error for an invalid request."""
    return RequestError(400, message, param=param, code=code)


def too_long(context: int, length: str, param: str) -> RequestError:
    """Build the error for a prompt that does not fit into the context.

    Args:
        context: size of the context in tokens.
        length: length of the prompt, with its unit.
    """
    message = f"the prompt has {length}, which leaves no room in the context of {context} tokens"
    return invalid(message, param, "context_length_exceeded")


def busy(message: str, seconds: int) -> RequestError:
    """Build the error for too many requests at the same time; the client may try again after `seconds`."""
    return RequestError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})


def stopping() -> RequestError:
    """Build the error for a request that arrives, or is unfinished, while the server shuts down."""
    return RequestError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "30"})


def overdue(seconds: float) -> RequestError:
    """Build the error for a request that took too long. The client should not try again, because that would take as
    long."""
    return RequestError(
        503, f"the text took longer than {seconds:g} s", code="timeout", headers={"x-should-retry": "false"}
    )


def unread() -> RequestError:
    """Build the error for a client that reads its stream so slowly that too many tokens wait to be sent."""
    return RequestError(503, "the answer was not read fast enough", code="unread")


def _sendable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
