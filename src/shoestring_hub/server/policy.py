"""The content security policy of the hub's pages: they load the hub's own scripts and styles, and nothing inline."""

from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest, HttpResponse

PAGE = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self'; "
    "connect-src 'self'; frame-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
REPORT = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; form-action 'none'; frame-ancestors 'self'; base-uri 'none'"
)
"""Policy for reports, which come from users: their scripts have no access to the hub's origin, cookies or network."""


class ContentSecurityPolicy:
    """Adds the default policy to responses that set none, and forbids caching of responses that do not allow it."""

    def __init__(self, respond: Callable[[HttpRequest], HttpResponse]) -> None:
        self.respond = respond

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.respond(request)
        response.setdefault("Content-Security-Policy", PAGE)
        response.setdefault("Cache-Control", "private, no-store")
        return response
