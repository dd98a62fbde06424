"""The texts of a JSON document."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice, permutations, product
from typing import Any

ORDERS = 200


def texts_of(document: Any) -> Iterator[str]:
    """Texts of a document: with its numbers as they are in the suite, or with whole ones without a point, or with one,
    and with the keys of its objects in up to `ORDERS` orders. To JSON Schema, these are the same."""
    seen = set[str]()
    for of in (lambda number: number, int, float):
        with suppress(OverflowError):  # an integer beyond all floats
            for ordered in islice(_in_orders(_with_whole(document, of)), ORDERS):
                text = json.dumps(ordered, ensure_ascii=False)
                if text not in seen:
                    yield text
                seen.add(text)


def _in_orders(value: Any) -> Iterator[Any]:
    """The document with the keys of its objects in all orders, first as they are."""
    if isinstance(value, dict):
        for names in permutations(value):
            for parts in product(*(islice(_in_orders(value[name]), ORDERS) for name in names)):
                yield dict(zip(names, parts, strict=True))
    elif isinstance(value, list):
        yield from map(list, product(*(islice(_in_orders(part), ORDERS) for part in value)))
    else:
        yield value


def _with_whole(value: Any, of: Callable[[float], float]) -> Any:
    """The document with `of` applied to its whole numbers."""
    if isinstance(value, dict):
        return {name: _with_whole(part, of) for name, part in value.items()}
    if isinstance(value, list):
        return [_with_whole(part, of) for part in value]
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
    return of(value) if whole else value
