"""How pages open fast: templates from the browser's cache, data as differences, and links that are fetched ahead.

A worker in the browser (`static/hub/worker.js`) asks for a page by its ordinary address, with the header `Hub-Parts`.
The hub therefore checks the rule of the page's route each time the page is opened, and the browser shows stored data
only if the hub has just answered that they are current. Without the worker, pages are sent whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseNotModified
from django.middleware.csrf import get_token
from django.templatetags.static import static
from django.urls import URLPattern, get_resolver

from shoestring_hub.server import parts
from shoestring_hub.server.access import AccessRule, route
from shoestring_hub.server.texts import FORM_TOKEN, Marks, form_token_mark, marked, texts, whole

PAGES = frozenset(
    {
        "account",
        "clip",
        "clips",
        "compare",
        "feed",
        "following",
        "home",
        "people",
        "person",
        "run",
        "runs",
        "search",
        "tokens",
    }
)
"""Names of the routes whose pages are sent in parts and fetched ahead; a GET of these must not change anything."""
LINK_BYTES = 150_000
"""Maximum bytes of a page that is fetched ahead."""
PAGE_BYTES = 400_000
"""Maximum bytes that one open page fetches ahead."""
PARTS = "application/x-hub-page"
FILES = ("bundles/charts.js", "hub/plain.js")
"""Scripts that the worker fetches in advance, so that the cache has them when the first page needs them."""
_WORKER = Path(__file__).parent / "static" / "hub" / "worker.js"
_TITLE = re.compile(r"<title>([^<]*)</title>")
_UNCHECKED = r'<title data-shown="\1">Hub</title><noscript><meta http-equiv="refresh" content="0"></noscript>'


class OpeningPages:
    """Middleware that answers with parts of pages, and limits what is fetched ahead to pages that change nothing."""

    def __init__(self, respond: Callable[[HttpRequest], HttpResponse]) -> None:
        self.respond = respond

    def __call__(self, request: HttpRequest) -> HttpResponse:
        opening = settings.HUB_OPENING
        if opening.uses_worker and request.headers.get("Hub-Parts") == version():
            with marked(numbered=opening.keep_templates) as marks:
                response = self.respond(request)
                response = _in_parts(request, response, marks) if _has_html(response) else response
        else:
            response = self.respond(request)
            if opening.fetch_ahead and _is_page(request, response):
                response["Speculation-Rules"] = f'"/rules.json?{version()}"'
        return _limited(request, response)

    def process_view(self, request: Any, view: Any, names: object, arguments: object) -> HttpResponse | None:
        """Refuse requests that fetch ahead anything but a page in `PAGES`."""
        request.is_hub_page = view.__name__ in PAGES
        allowed = settings.HUB_OPENING.fetch_ahead and request.method == "GET" and request.is_hub_page
        return None if allowed or _limit(request) is None else _refusal()


def page_variables(request: HttpRequest) -> dict[str, Any]:
    """Variables of all templates: the colours that were chosen, what `ahead.js` does, and the form token's mark."""
    opening, theme = settings.HUB_OPENING, request.COOKIES.get("theme")
    variables = {
        "theme": theme if theme in ("dark", "light") else "",
        "worker": f"/worker.js?{version()}" if opening.uses_worker else "",
        "fetch_ahead": opening.fetch_ahead,
        "link_bytes": LINK_BYTES,
        "page_bytes": PAGE_BYTES,
    }
    mark = form_token_mark()
    return variables | {"csrf_token": mark} if mark else variables


def _has_html(response: HttpResponse) -> bool:
    return not response.streaming and response.get("Content-Type", "").startswith("text/html")


def _is_page(request: Any, response: HttpResponse) -> bool:
    return getattr(request, "is_hub_page", False) and response.status_code == 200 and _has_html(response)


def _in_parts(request: HttpRequest, response: HttpResponse, marks: Marks) -> HttpResponse:
    """Encode a page that was rendered with marks. Refusals and pages that are not in `PAGES` are sent whole."""
    items = marks.split(response.content.decode())
    token = get_token(request) if FORM_TOKEN in items else ""
    if not _is_page(request, response):
        response.content = whole(items, token).encode()
        return response
    lines = parts.lines_of(items, _beginnings())
    etag = parts.etag_of(lines)
    if request.headers.get("If-None-Match") == etag:
        response = HttpResponseNotModified()
    else:
        differences = settings.HUB_OPENING.send_differences
        have = parts.positions_of(request.headers.get("Hub-Have", "")) if differences else {}
        response.content = parts.difference(lines, have).encode()
        response["Content-Type"] = PARTS
    response["ETag"] = etag
    response["Hub-Form-Token"] = token
    return response


@cache
def _beginnings() -> frozenset[int]:
    return frozenset(number for number, text in enumerate(texts()) if parts.BLOCK.search(text))


# -- fetched ahead ----------------------------------------------------------------------------------------------------


def _limit(request: HttpRequest) -> int | None:
    """Maximum bytes of the answer to a request that fetches ahead; None for all other requests."""
    asked = request.headers.get("Hub-Ahead")
    if asked is not None:
        return min(int(asked), LINK_BYTES) if asked.isascii() and asked.isdecimal() and len(asked) < 9 else 0
    return LINK_BYTES if _is_prefetch(request) else None


def _is_prefetch(request: HttpRequest) -> bool:
    """Whether the browser itself fetches ahead, because of the speculation rules."""
    return "prefetch" in request.headers.get("Sec-Purpose", "")


def _limited(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    limit = _limit(request)
    if limit is None or (not _is_page(request, response) and response.get("Content-Type") != PARTS):
        return response
    if len(response.content) > limit:
        return _refusal()
    if _is_prefetch(request):
        # The browser will show this page without asking the hub again, so the page must ask before it shows itself.
        page = response.content.decode().replace("<html", "<html data-unchecked", 1)
        response.content = _TITLE.sub(_UNCHECKED, page, count=1).encode()
    return response


def _refusal() -> HttpResponse:
    return HttpResponse(status=503)  # makes browsers discard what they have fetched ahead


# -- what all browsers get --------------------------------------------------------------------------------------------


@cache
def version() -> str:
    """A digest of the templates' texts, the worker and the settings: the version of everything a browser stores."""
    stored = json.dumps([texts(), _pages(), _rules(), _files(), vars(settings.HUB_OPENING), _worker()])
    return hashlib.sha256(stored.encode()).hexdigest()[:16]


def _files() -> list[str]:
    return [static(name) for name in FILES]


@cache
def _worker() -> str:
    return _WORKER.read_text()  # own file: part of this package


def _routes() -> list[Any]:
    return [pattern for pattern in get_resolver().url_patterns if pattern.name in PAGES]


def _pages() -> list[str]:
    """Regular expressions, in JavaScript's syntax, of the paths of pages without the first slash."""
    return [one.pattern.regex.pattern.replace("(?P<", "(?<").replace(r"\Z", "$") for one in _routes()]


def _rules() -> dict[str, Any]:
    """Speculation rules: links to pages are fetched once the pointer rests on them or presses them."""
    paths = ["/" + re.sub(r"<\w+:(\w+)>", r":\1", str(one.pattern)) for one in _routes()]
    where = {"or": [{"href_matches": {"pathname": path}} for path in paths]}
    return {"prefetch": [{"source": "document", "where": where, "eagerness": "moderate"}]}


def worker_script(request: HttpRequest) -> HttpResponse:
    """The script of the worker, preceded by a constant with the settings of this hub."""
    opening = settings.HUB_OPENING
    facts = {"version": version(), "pages": _pages(), "files": _files(), "differences": opening.send_differences}
    script = f'"use strict";\nconst HUB = {json.dumps(facts)};\n{_worker()}'
    return _stored(request, script, "text/javascript")


def template_texts(request: HttpRequest) -> HttpResponse:
    """The texts of the templates, which are the same for everybody."""
    return _stored(request, json.dumps(texts() if settings.HUB_OPENING.keep_templates else ()), "application/json")


def speculation_rules(request: HttpRequest) -> HttpResponse:
    """The rules by which a browser fetches links ahead while no worker does."""
    return _stored(request, json.dumps(_rules()), "application/speculationrules+json")


def _stored(request: HttpRequest, text: str, kind: str) -> HttpResponse:
    """A response that browsers may store for a year if the request's query is the current version."""
    response = HttpResponse(text, content_type=f"{kind}; charset=utf-8")
    if request.META["QUERY_STRING"] == version():
        response["Cache-Control"] = "public, max-age=31536000, immutable"
    return response


ROUTES: list[URLPattern] = [
    route("worker.js", worker_script, AccessRule.PUBLIC),
    route("texts.json", template_texts, AccessRule.PUBLIC),
    route("rules.json", speculation_rules, AccessRule.PUBLIC),
]
