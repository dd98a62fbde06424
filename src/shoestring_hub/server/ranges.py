"""Sends a stored file, or the range of it that a player asks for, without reading the file into memory.

Django's `FileResponse` ignores `Range`. A range without an end is answered with at most `WINDOW` bytes, as the standard
allows: a player that pauses would otherwise keep one of the server's few threads waiting until it plays on. A request
for several ranges at once is refused with 416, because no player sends one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from django.conf import settings
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    HttpResponseBase,
    HttpResponseNotModified,
    StreamingHttpResponse,
)

from shoestring.storage import foreign

WINDOW = 2 << 20
"""Maximum bytes of the answer to a range without an end."""
BLOCK = 128 << 10
_RANGE = re.compile(r"bytes=\s*(\d{0,18})\s*-\s*(\d{0,18})\s*", re.ASCII | re.IGNORECASE)


class NoSuchRangeError(Exception):
    """The file has no byte of the range, or several ranges are asked for."""


def range_of(header: str, size: int) -> tuple[int, int] | None:
    """First and last position of the range that a header asks for; None if all bytes are to be sent.

    Raises:
        NoSuchRangeError: the answer is 416.
    """
    if not header.lower().startswith("bytes="):
        return None  # as for a malformed range, the standard says to ignore a unit that is not known
    if "," in header:
        raise NoSuchRangeError
    match = _RANGE.fullmatch(header)
    if match is None or match[1] == match[2] == "":
        return None
    if not match[1]:
        count = min(int(match[2]), size)
        first, last = size - count, size - 1
    else:
        first = int(match[1])
        if match[2] and int(match[2]) < first:
            return None
        last = min(int(match[2]) if match[2] else first + WINDOW - 1, size - 1)
    if first > last:
        raise NoSuchRangeError
    return first, last


def send_file(request: HttpRequest, path: Path, kind: str) -> HttpResponseBase:
    """The answer to GET or HEAD for a file that never changes and is named by its digest.

    With `--clip-accel`, the proxy sends the file: the answer names its path below the folder of clips.
    """
    if not path.is_file():
        raise Http404
    size, etag = path.stat().st_size, f'"{path.name}"'
    response: HttpResponseBase
    if settings.HUB_CLIPS.accel:
        response = HttpResponse(content_type=kind)
        response["X-Accel-Redirect"] = settings.HUB_CLIPS.accel + path.relative_to(settings.HUB.clips).as_posix()
    elif etag in request.headers.get("If-None-Match", ""):
        response = HttpResponseNotModified()
    else:
        response = _send(request, path, kind, size, etag)
    response["ETag"], response["Accept-Ranges"] = etag, "bytes"
    return response


def _send(request: HttpRequest, path: Path, kind: str, size: int, etag: str) -> HttpResponseBase:
    part = None
    if request.method == "GET" and request.headers.get("If-Range", etag) == etag:
        try:
            part = range_of(request.headers.get("Range", ""), size)
        except NoSuchRangeError:
            response = HttpResponse(status=416, content_type="text/plain")
            response["Content-Range"] = f"bytes */{size}"
            return response
    first, last = part or (0, size - 1)
    if request.method == "HEAD":
        answer: HttpResponseBase = HttpResponse(content_type=kind)
    else:
        answer = StreamingHttpResponse(_blocks(path, first, last), content_type=kind, status=206 if part else 200)
    answer["Content-Length"] = str(last - first + 1)
    if part:
        answer["Content-Range"] = f"bytes {first}-{last}/{size}"
    return answer


def _blocks(path: Path, first: int, last: int) -> Iterator[bytes]:
    with foreign.open_file(path) as file:
        file.seek(first)
        left = last - first + 1
        while left > 0 and (block := file.read(min(BLOCK, left))):
            left -= len(block)
            yield block
