"""Fields of a request's JSON object, each checked as it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoestring.core.errors import nearest
from shoestring.decode.serve.errors import RequestError, invalid


class Fields:
    """The fields of an object. `null` is as good as a field that is not there, as clients send it.

    Every method raises a `RequestError` of status 400 that names the field.

    Args:
        where: the path of the object in the request, for messages.
    """

    def __init__(self, content: Any, where: str = "") -> None:
        self.where = where
        if not isinstance(content, dict):
            raise invalid(f"`{where}` is not an object" if where else "the body is not a JSON object", where or None)
        self.content: dict[str, Any] = content
        self.known: set[str] = set()

    def get(self, name: str) -> Any:
        """The value as it is; None where there is none."""
        self.known.add(name)
        return self.content.get(name)

    def wrong(self, name: str, problem: str) -> RequestError:
        """The refusal that says what is wrong with a field."""
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
        """A text, or a list of them: at most `count` of 1 to `length` characters each."""
        value = self.get(name)
        values = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(is_text(one) and 0 < len(one) <= length for one in values):
            raise self.wrong(name, f"is neither a text nor a list of texts, of 1 to {length} characters each")
        if len(values) > count:
            raise self.wrong(name, f"has more than {count} texts")
        return values

    def only(self, name: str, values: Sequence[Any], reason: str) -> None:
        """Refuse any value but those that change nothing."""
        value = self.get(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in values):
            raise self.wrong(name, f"is not supported: {reason}")

    def ignore(self, *names: str) -> None:
        """Fields that change no text, whatever they are."""
        self.known.update(names)

    def finish(self) -> None:
        """Refuse fields that nothing has read: they might have changed the text."""
        for name in self.content:
            if name not in self.known:
                raise self.wrong(name[:60], f"is not known; {nearest(name[:60], self.known)}")


def is_text(value: Any) -> bool:
    """Whether it is a string of characters only; JSON can spell halves of surrogate pairs, which are none."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value))
