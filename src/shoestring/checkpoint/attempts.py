"""Counting the attempts to load a generation, over restarts: what ends the process each time is not loaded for ever.

A kill from outside may come during a load, too, so several attempts must have ended so before a generation is given up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from shoestring.checkpoint.circle import Circle
from shoestring.checkpoint.disk import MARK
from shoestring.checkpoint.files import Files
from shoestring.checkpoint.generation import Generation
from shoestring.storage.guarded import read_regular

LIMIT = 1 << 20  # bytes of the longest mark
MOST = 10
"""Attempts in a row after which a generation is given up. On a busy machine a kill from outside strikes a load one time
in ten, and nothing that was safe may be lost to those."""


@dataclass(eq=False)
class Attempts:
    """What is known of attempts that did not end; every method is a collective.

    Args:
        folder: of the run's generations; nothing is counted without it.
        host: number of this host, if this rank writes for it.
    """

    circle: Circle
    files: Files
    folder: Path | None
    host: int | None
    counts: dict[str, int] = field(default_factory=dict)

    def look(self) -> None:
        """Find what any rank knows: the most of each."""
        for found in self.circle.tell(_read(self.folder) if self.folder and self.host is not None else {}):
            self.counts |= {name: max(count, self.counts.get(name, 0)) for name, count in found.items()}

    def exhausted(self, generation: Generation) -> bool:
        return self.counts.get(generation.name, 0) >= MOST

    @contextmanager
    def counted(self, generation: Generation) -> Iterator[None]:
        """Count what is done as an attempt unless it ends; an error ends it if it does not come of a rank's death."""
        before = dict(self.counts)
        self._write({**before, generation.name: before.get(generation.name, 0) + 1})
        self.circle.tell(None)  # nobody begins before it is written
        try:
            yield
        except (RuntimeError, OSError):
            raise
        except BaseException:
            self._write(before)
            raise
        self._write({name: count for name, count in before.items() if name != generation.name})

    def _write(self, counts: dict[str, int]) -> None:
        """Where it cannot be written, nothing is counted: a disk that cannot be written to may still be read."""
        if self.folder is None or self.host is None:
            return
        path = self.folder / f"{MARK}{self.host}"
        with suppress(OSError):
            if counts:
                self.files.folder(self.folder)
                self.files.replace(path, json.dumps(counts).encode(), durable=False)
            else:
                self.files.unlink(path)


def _read(folder: Path) -> dict[str, int]:
    """By the names of generations, from the marks of all hosts that are seen here; damaged ones count nothing."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for path in folder.glob(f"{MARK}*"):
            with suppress(OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError):
                for name, count in json.loads(read_regular(path, LIMIT)).items():
                    found[name] = max(int(count), found.get(name, 0))
    return found
