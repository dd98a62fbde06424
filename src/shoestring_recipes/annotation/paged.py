"""Reads the records of a paged JSON API into the store, authenticates with a token, and waits when asked to."""

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
"""Maximum number of seconds that an interface may ask to wait; above it, reading ends and can be continued later."""


@dataclass(frozen=True)
class PagedInterface:
    """Address of a paged JSON API, and names of fields in its answers. A name with dots leads into nested objects."""

    url: str
    """Address of the first page."""
    source: str
    """Name of the source in the store, under which the position for continuing is stored."""
    records: str = "items"
    """Field of an answer with the list of records."""
    next: str = "next"
    """Field of an answer with the next page's address or cursor; missing or empty in the last answer."""
    parameter: str = "cursor"
    """Query parameter in which the cursor is sent."""
    identity: str = "id"
    """Field of a record that identifies it."""
    text: str = "text"
    """Field of a record with its text."""
    title: str = "title"
    """Field of a record with its title."""
    token_variable: str = ""
    """Environment variable with the token; empty for none."""
    tries: int = 8
    """Maximum number of times that a page is requested."""
    timeout: float = 30.0
    """Seconds after which a request has failed."""


class _Stay(HTTPRedirectHandler):
    """Follows no redirects, because the token would be sent to their targets as well."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


def dig(document: Any, name: str) -> Any:
    """Return the value that a name with dots selects in nested objects; None if there is none."""
    for part in name.split("."):
        document = document.get(part) if isinstance(document, dict) else None
    return document


def read_pages(
    store: AnnotationStore, interface: PagedInterface, *, wait: Callable[[float], object] = time.sleep
) -> list[str]:
    """Read the pages of an interface into the store, starting where the last call ended.

    Args:
        wait: function that waits a number of seconds.

    Returns:
        Lines with the number of new records, and of records without text or identity.

    Raises:
        ConfigError: the address is wrong, or the token is missing.
        DataError: the interface refuses, keeps failing, sends malformed data, or names another host or the same page.
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
        _address(interface, position)  # check the host before anything is stored
        added += store.store_records(interface.source, usable, position, done=done)
    lines = [f"{added:8} new records of {interface.source}"]
    return [*lines, f"{empty:8} records without text or identity"] if empty else lines


def _token(interface: PagedInterface) -> str:
    """Return the token, empty if there is none; refuses an address to which it would be sent unencrypted."""
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
    """Return the address of the page at a position: a cursor, or an address that must be on the same host."""
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
    """Request a page, at most `interface.tries` times, until the interface sends it."""
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
    """Return the seconds to wait by a `Retry-After` header, a number or a date; without either, `otherwise`."""
    if header is None:
        return otherwise
    if header.strip().isdecimal():
        return float(header)
    try:
        date = parsedate_to_datetime(header)
    except ValueError:
        return otherwise
    return max((date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds(), 0.0)
