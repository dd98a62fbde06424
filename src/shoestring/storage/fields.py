"""Reads the entries of untrusted tables: checks the type and range of every entry, and raises one-line errors."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar

from shoestring.core.errors import ShoestringError

T = TypeVar("T")

REQUIRED: Final[Any] = object()
"""Marks an entry as required when passed in place of a default."""
MOST = 2**31 - 1
"""Default upper bound of the numbers that `Fields.count` accepts."""


class Fields:
    """Reads the entries of a table, such as a parsed JSON object; an entry that is null counts as missing.

    Args:
        table: the table, whose entries are not trusted.
        where: name of the table in error messages, such as a path.
        error: class of the errors that are raised.
        hint: advice to the user that the errors show.

    Raises:
        ShoestringError: an entry is missing, of another type, or out of range. The error's class is `error`.
    """

    def __init__(self, table: Any, where: str, error: type[ShoestringError], hint: str = "") -> None:
        self.where, self.error, self.hint = where, error, hint
        if not isinstance(table, Mapping):
            raise error(f"{where} is not a table of entries", hint=hint)
        self._table: Mapping[str, Any] = table

    def __contains__(self, name: str) -> bool:
        return self._table.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def get(self, name: str) -> Any:
        """Return an entry of any type; None if it is missing."""
        return self._table.get(name)

    def holds_text(self, name: str) -> bool:
        """Whether the entry is a string; useful for entries that may also have other types."""
        return isinstance(self._table.get(name), str)

    def _read(self, name: str, default: T, kind: type | tuple[type, ...], wanted: str) -> Any:
        value = self._table.get(name)
        if value is None and default is not REQUIRED:
            return default
        if value is None:
            raise self.error(f"{self.where} lacks {name}", hint=self.hint)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self._refuse(name, value, wanted)
        return value

    def _refuse(self, name: str, value: Any, wanted: str) -> None:
        huge = isinstance(value, int) and abs(value) >= 2**256  # Python refuses to print very long integers
        text = "a huge number" if huge else reprlib.repr(value)
        raise self.error(f"{self.where}: {name} is not {wanted}, but {text}", hint=self.hint)

    def count(self, name: str, default: T = REQUIRED, *, least: int = 1, most: int = MOST) -> int | T:
        """Read an entry that is a whole number from `least` to `most`."""
        wanted = f"a whole number from {least} to {most}"
        value = self._read(name, default, int, wanted)
        if value is not default and not least <= value <= most:
            self._refuse(name, value, wanted)
        return value

    def number(self, name: str, default: T = REQUIRED) -> float | T:
        """Read an entry that is a finite number."""
        value = self._read(name, default, (int, float), "a number")
        if value is not default and not (abs(value) < 1e300 and math.isfinite(value)):
            self._refuse(name, value, "a finite number")
        return value

    def flag(self, name: str, default: T = REQUIRED) -> bool | T:
        """Read an entry that is true or false."""
        return self._read(name, default, bool, "true or false")

    def text(self, name: str, default: T = REQUIRED) -> str | T:
        """Read an entry that is a string; refuses strings with lone surrogates, which UTF-8 cannot encode."""
        value = self._read(name, default, str, "a text")
        if value is not default and any("\ud800" <= character <= "\udfff" for character in value):
            self._refuse(name, value, "a text in Unicode")
        return value

    def table(self, name: str, default: T = REQUIRED) -> dict[str, Any] | T:
        """Read an entry that is a nested table; the types of the nested entries are not checked."""
        return self._read(name, default, dict, "a table")

    def texts(self, name: str, default: T = REQUIRED) -> list[str] | T:
        """Read an entry that is a list of strings."""
        value = self._read(name, default, list, "a list of texts")
        if value is not default and not all(isinstance(entry, str) for entry in value):
            self._refuse(name, value, "a list of texts")
        return value

    def tables(self, name: str) -> list[dict[str, Any]]:
        """Read an entry that is a list of tables; returns an empty list if the entry is missing."""
        value = self._read(name, [], list, "a list of tables")
        if not all(isinstance(entry, dict) for entry in value):
            self._refuse(name, value, "a list of tables")
        return value

    def entries(self, name: str) -> Fields:
        """Wrap the nested table `name` in `Fields`; a missing table counts as an empty table."""
        return Fields(self.table(name, {}), f"{self.where}: {name}", self.error, self.hint)
