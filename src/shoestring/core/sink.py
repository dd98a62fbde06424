"""Where numbers go while a run is going."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Sink(Protocol):
    """Takes the numbers of one step. `close` is called once, also after an exception."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
