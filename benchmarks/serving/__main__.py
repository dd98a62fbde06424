"""The command line of serving's benchmark; see the package's docstring."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.harness import Bar, main
from benchmarks.rows import RESULTS
from benchmarks.serving import adapters, crowd, structured, tools

PARTS: Mapping[str, Callable[[], Iterable[Bar]]] = {
    "adapters": adapters.rows,
    "crowd": crowd.rows,
    "structured": structured.rows,
    "tools": tools.rows,
}
"""The bars of each part; their ids begin with `serving.` and the part's name."""


def command(argv: Sequence[str]) -> int:
    """The harness's command line, in which a part may be named without `serving.`."""
    whole = [f"serving.{word}" if word.partition("-")[0] in PARTS else word for word in argv]
    return main("serving", lambda: [bar for rows in PARTS.values() for bar in rows()], whole, RESULTS)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
