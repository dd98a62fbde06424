"""Full-text search by FTS5 of SQLite or the text search of PostgreSQL, in the indexes that migration 0002 creates.

The index covers all projects, so it only filters rows that the caller may see. There are no scores: the usual ones
depend on how often a word occurs in all rows, and would reveal something about projects that are not visible.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import TypeVar

from django.db import connection
from django.db.models import Model, QuerySet
from django.db.models.expressions import RawSQL

WORDS, WORD = 8, 64
"""Maximum number of words in a search, and of characters of a word."""
_WORD = re.compile(rf"[^\s\x00-\x1f\x7f{re.escape(string.punctuation)}]+")
Row = TypeVar("Row", bound=Model)


def words_of(query: str) -> list[str]:
    """The words of a query, in lower case; punctuation separates words."""
    return [word[:WORD] for word in _WORD.findall(query.lower())][:WORDS]


def matching(rows: QuerySet[Row], words: Sequence[str]) -> QuerySet[Row]:
    """Rows in which every word of a search begins some word of the row; `words` must come from `words_of`."""
    index = f"{rows.model._meta.db_table}_words"
    if connection.vendor == "sqlite":
        sql, query = f"SELECT rowid FROM {index} WHERE {index} MATCH %s", " AND ".join(f'"{word}"*' for word in words)
    else:
        sql = f"SELECT id FROM {index} WHERE words @@ to_tsquery('pg_catalog.simple', %s)"
        query = " & ".join(f"'{word}':*" for word in words)
    return rows.filter(pk__in=RawSQL(sql, (query,)))


def excerpt(text: str, words: Sequence[str], length: int = 300) -> list[tuple[str, bool]]:
    """The part of a text around the first match, cut into pieces, each with whether it is a match."""
    if not words:
        return [(_cut(text, 0, length), False)]
    pattern = re.compile(rf"(?<![^\W_])((?:{'|'.join(map(re.escape, words))})[^\W_]*)", re.IGNORECASE)
    first = pattern.search(text)
    start = max(0, first.start() - length // 3) if first else 0
    pieces = pattern.split(_cut(text, start, length))
    return [(piece, index % 2 == 1) for index, piece in enumerate(pieces) if piece]


def _cut(text: str, start: int, length: int) -> str:
    return "…" * (start > 0) + text[start : start + length] + "…" * (start + length < len(text))
