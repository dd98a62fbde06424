"""Encodes the data of pages as lines, of which a browser is sent only those that it does not have.

A line is a JSON array of strings and of integers, which are numbers of texts. Lines end where rows and sections of a
page begin, so a change leaves the other lines as they were. `static/hub/worker.js` reassembles the page.
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
"""Minimum length in characters of a line that a reference may replace; shorter lines are always sent."""
BLOCK = re.compile(r"<(?:tr|li|section|article|script|form|dl|main)\b")
"""Where lines begin in HTML."""
VERY_LONG = 60_000
"""Length in characters from which lists are cut into longer lines, so that the checksums still fit into a header."""
_BLOCKS = re.compile(f"(?={BLOCK.pattern})")
_LISTS, _LONG_LISTS = (re.compile(rf"(?:[^\[\],]*,){{{count}}}|[^\[]*(?:\[|$)") for count in (16, 128))
"""Match lines of lists in JSON: 16 or 128 elements, counted from the start of a list, so that appending an element to
one list changes no line of another; or, if fewer remain, everything up to the next list."""
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
    """Map the CRC-32 of each line that a browser has, eight hexadecimal digits, to its position; {} if malformed."""
    if not _HAVE.fullmatch(have):
        return {}
    sums = [int(have[at : at + 8], 16) for at in range(0, len(have), 8)]
    return {checksum: position for position, checksum in reversed(list(enumerate(sums)))}


def difference(lines: Sequence[str], have: Mapping[int, int]) -> str:
    """The lines, with `=FIRST,COUNT` in place of those that the browser has at these positions.

    Two lines may have the same CRC-32, so the browser checks the entity tag, and asks for all lines if it differs.
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
