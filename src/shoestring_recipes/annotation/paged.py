"""Reads a paged interface that answers in JSON into the store, with a token, and waits where it is asked to."""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import parse_qsl, urlencode, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from shoestring.core.errors import ConfigError, DataError
from shoestring.storage.foreign import one_line, parse_json
from shoestring_recipes.annotation.store import AnnotationStore

LARGEST = 64 << 20
"""Maximum size of an answer in bytes."""
LONGEST_WAIT = 900.0
"""Maximum number of seconds that an interface may ask to wait; above it the reading ends and can be continued."""


@dataclass(frozen=True)
class PagedInterface:
    """Where a paged interface is, and how its answers are built. Names with dots lead into nested objects."""

    url: str
    """Address of the first page."""
    source: str
    """Name of the source in the store; reading continues by this name."""
    records: str = "items"
    """Name of the list of records in an answer."""
    next: str = "next"
    """Name of the whole address or of the cursor of the next page in an answer; the last answer has none."""
    parameter: str = "cursor"
    """Parameter of the address that takes the cursor."""
    identity: str = "id"
    """Name of what tells records apart."""
    text: str = "text"
    """Name of a record's text."""
    title: str = "title"
    """Name of a record's title."""
    token_variable: str = ""
    """Environment variable with the token; empty for none."""
    tries: int = 8
    """Maximum number of times that a page is requested."""
    timeout: float = 30.0
    """Seconds after which a request has failed."""


class _Stay(HTTPRedirectHandler):
    """Follows no redirects, because the token would travel along."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


def dig(document: Any, name: str) -> Any:
    """Return what a name with dots leads to in nested objects, or None."""
    for part in name.split("."):
        document = document.get(part) if isinstance(document, dict) else None
    return document


def read_pages(
    store: AnnotationStore, interface: PagedInterface, *, wait: Callable[[float], object] = time.sleep
) -> list[str]:
    """Read a paged interface from where the last call ended, page by page, into the store.

    Args:
        wait: function that waits a number of seconds.

    Returns:
        Lines that say how many records are new, and how many have no text.

    Raises:
        ConfigError: the address is wrong, or the token is missing.
        DataError: the interface refuses, fails, moves to another host, or repeats a page.
    """
    position, done = store.cursor(interface.source)
    token = _token(interface)
    seen, added, empty = set(), 0, 0
    while not done:
        if position in seen:
            raise DataError(f"`{interface.url}` sends the position `{one_line(position)[:100]}` twice")
        seen.add(position)
        document = _page(interface, _address(interface, position), token, wait)
        records = dig(document, interface.records)
        if not isinstance(records, list):
            raise DataError(f"an answer of `{interface.url}` has no list `{interface.records}`")
        usable = []
        for record in records:
            names = interface.text, interface.identity, interface.title
            text, identity, title = (dig(record, name) for name in names)
            if isinstance(text, str) and text.strip() and isinstance(identity, str | int):
                usable.append((f"{interface.url}#{identity}", title if isinstance(title, str) else "", text))
        empty += len(records) - len(usable)
        following = dig(document, interface.next)
        position, done = ("", True) if following in (None, "", False) else (str(following), False)
        _address(interface, position)  # before anything is stored
        added += store.store_records(interface.source, usable, position, done=done)
    lines = [f"{added:8} new records of {interface.source}"]
    return [*lines, f"{empty:8} records without text or identity"] if empty else lines


def _token(interface: PagedInterface) -> str:
    """Return the token, which is not sent unencrypted over a network."""
    parts = urlsplit(interface.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"`{interface.url}` is no address of an interface", hint="it begins with https://")
    if not interface.token_variable:
        return ""
    token = os.environ.get(interface.token_variable, "")
    if not token:
        raise ConfigError(f"the environment variable `{interface.token_variable}` has no token")
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise ConfigError(f"the token would be sent to `{parts.hostname}` unencrypted", hint="use https://")
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(interface: PagedInterface, position: str) -> str:
    """Return the address of the page at a position, on the same host only."""
    if not position:
        return interface.url
    first = urlsplit(interface.url)
    if position.startswith(("http://", "https://")):
        address = urlsplit(position)
        if (address.scheme, address.netloc) != (first.scheme, first.netloc):
            raise DataError(f"`{interface.url}` leads to another host, `{one_line(address.netloc)}`")
        return address.geturl()
    query = [pair for pair in parse_qsl(first.query, True) if pair[0] != interface.parameter]
    return first._replace(query=urlencode([*query, (interface.parameter, position)])).geturl()


def _page(interface: PagedInterface, url: str, token: str, wait: Callable[[float], object]) -> Any:
    """Request a page until the interface sends it."""
    headers = {"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    opener, reason = build_opener(_Stay), ""
    for number in range(interface.tries):
        pause = float(min(2**number, 60))
        try:
            with opener.open(Request(url, headers=headers), timeout=interface.timeout) as answer:
                body = answer.read(LARGEST + 1)
            if len(body) > LARGEST:
                raise DataError(f"an answer of `{interface.url}` is larger than {LARGEST >> 20} MiB")
            return parse_json(body)
        except HTTPError as error:
            reason = f"status {error.code}"
            if error.code in (401, 403):
                hint = f"look at the token in `{interface.token_variable}`" if token else "name a token's variable"
                raise DataError(f"`{interface.url}` refuses access: {reason}", hint=hint) from None
            if error.code != 429 and error.code < 500:
                raise DataError(f"`{interface.url}` has {reason}") from None
            pause = _asked(error.headers.get("Retry-After"), pause)
        except ValueError as error:
            raise DataError(f"an answer of `{interface.url}` is no JSON: {error}") from None
        except (URLError, OSError, HTTPException) as error:
            reason = one_line(str(getattr(error, "reason", error)))
        if pause > LONGEST_WAIT:
            raise DataError(f"`{interface.url}` asks to wait for {pause:.0f} s", hint="start again then: it continues")
        if number + 1 < interface.tries:
            wait(pause)
    hint = "start again later: it continues"
    raise DataError(f"`{interface.url}` failed {interface.tries} times: {reason}", hint=hint)


def _asked(header: str | None, otherwise: float) -> float:
    """Return the seconds for which a `Retry-After` asks, as a number or as a date."""
    if header is None:
        return otherwise
    if header.strip().isdecimal():
        return float(header)
    try:
        date = parsedate_to_datetime(header)
    except ValueError:
        return otherwise
    return max((date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds(), 0.0)
