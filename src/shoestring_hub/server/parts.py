"""Data of pages as lines, of which a browser gets only those that it does not have.

A line is a JSON array of numbers of texts and of strings. Lines end where rows and sections of a page begin, so a
change leaves the other lines as they were. `static/hub/worker.js` puts the page together again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence

from shoestring_hub.server.texts import Item

LONG = 2000
"""Length in characters from which a string is cut into lines of its own."""
SHORTEST = 24
"""Length in characters from which a browser may have a line already; the names of shorter ones would not pay."""
BLOCK = re.compile(r"<(?:tr|li|section|article|script|form|dl|main)\b")
"""Where lines begin in HTML."""
VERY_LONG = 60_000
"""Length in characters from which lists are cut into longer lines, so that the checksums still fit into a header."""
_BLOCKS = re.compile(f"(?={BLOCK.pattern})")
_LISTS, _LONG_LISTS = (re.compile(rf"(?:[^\[\],]*,){{{count}}}|[^\[]*(?:\[|$)") for count in (16, 128))
"""Lines of lists in JSON: so many elements, counted from the start of a list, so that an element that is appended to
one list moves no other line; or else all up to the next list."""
_HAVE = re.compile(r"(?:[0-9a-f]{8}){0,1000}")


def lines_of(items: Iterable[Item], beginnings: Collection[int]) -> list[str]:
    """Encode a page; lines begin at the texts whose numbers are in `beginnings`."""
    lines: list[str] = []
    line: list[Item] = []

    def end() -> None:
        if line:
            lines.append(_encode(line))
            line.clear()

    for item in items:
        if isinstance(item, str) and len(item) > LONG:
            end()
            # Each part of a long string is a line, so that a change in the string leaves most lines as they were.
            for block in _BLOCKS.split(item):
                lists = _LISTS if len(block) < VERY_LONG else _LONG_LISTS
                parts = lists.findall(block) if len(block) > LONG else [block]
                lines.extend(_encode([part]) for part in parts if part)
            continue
        if item in beginnings:
            end()
        line.append(item)
    end()
    return lines


def _encode(line: Sequence[Item]) -> str:
    return json.dumps(line, separators=(",", ":"))  # in ASCII, so that both sides count the same bytes


def etag_of(lines: Sequence[str]) -> str:
    """The entity tag of a page's data."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    return f'"{base64.urlsafe_b64encode(digest).decode()[:22]}"'


def positions_of(have: str) -> dict[int, int]:
    """Decode what a browser says that it has: eight hexadecimal digits, a CRC-32, for each line. Malformed is empty."""
    if not _HAVE.fullmatch(have):
        return {}
    sums = [int(have[at : at + 8], 16) for at in range(0, len(have), 8)]
    return {checksum: position for position, checksum in reversed(list(enumerate(sums)))}


def difference(lines: Sequence[str], have: Mapping[int, int]) -> str:
    """The lines, with `=FIRST,COUNT` in place of those that the browser has at these positions.

    A CRC-32 may be that of another line: the browser compares the entity tag, and asks for all lines if it differs.
    """
    sent: list[str] = []
    first = count = 0
    for line in [*lines, ""]:
        position = have.get(zlib.crc32(line.encode())) if len(line) >= SHORTEST else None
        if count and position == first + count:
            count += 1
            continue
        if count:
            sent.append(f"={first},{count}")
            count = 0
        if position is None:
            sent.append(line)
        else:
            first, count = position, 1
    return "\n".join(sent[:-1])
