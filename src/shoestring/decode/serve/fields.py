"""Reads the fields of a request's JSON object, and checks their types and ranges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoestring.core.errors import nearest
from shoestring.decode.serve.errors import RequestError, invalid


class RequestFields:
    """The fields of a JSON object in a request. Some clients send `null` for unset fields, so `null` counts as missing.

    A wrong field raises a `RequestError` of status 400 that names the field.

    Args:
        where: path of the object in the request, for messages.
    """

    def __init__(self, content: Any, where: str = "") -> None:
        self.where = where
        if not isinstance(content, dict):
            raise invalid(f"`{where}` is not an object" if where else "the body is not a JSON object", where or None)
        self.content: dict[str, Any] = content
        self.known: set[str] = set()

    def get(self, name: str) -> Any:
        """The unchecked value of a field; None if the field is missing."""
        self.known.add(name)
        return self.content.get(name)

    def wrong(self, name: str, problem: str) -> RequestError:
        """Build the error that says what is wrong with a field."""
        path = f"{self.where}.{name}" if self.where else name
        return invalid(f"`{path}` {problem}", path)

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not is_text(value):
            raise self.wrong(name, "is not a text of valid Unicode characters")
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(name, f"is not an integer from {low} to {high}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(name, f"is not a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "is neither true nor false")
        return value

    def texts(self, name: str, count: int, length: int) -> list[str]:
        """Read a field that holds one text, or a list of at most `count` texts, of 1 to `length` characters each."""
        value = self.get(name)
        values = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(is_text(text) and 0 < len(text) <= length for text in values):
            raise self.wrong(name, f"is neither a text nor a list of texts, of 1 to {length} characters each")
        if len(values) > count:
            raise self.wrong(name, f"has more than {count} texts")
        return values

    def only(self, name: str, values: Sequence[Any], reason: str) -> None:
        """Refuse every value of an unsupported field, except the `values` that have no effect."""
        value = self.get(name)
        # The types are compared as well, because in Python True == 1.
        if value is not None and not any(type(value) is type(allowed) and value == allowed for allowed in values):
            raise self.wrong(name, f"is not supported: {reason}")

    def ignore(self, *names: str) -> None:
        """Accept these fields with any value."""
        self.known.update(names)

    def finish(self) -> None:
        """Refuse unknown fields, because the client expects them to have an effect."""
        for name in self.content:
            if name not in self.known:
                raise self.wrong(name[:60], f"is not known; {nearest(name[:60], self.known)}")


def is_text(value: Any) -> bool:
    """Whether a value is a string without lone surrogates, which JSON can express but UTF-8 cannot encode."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value))
