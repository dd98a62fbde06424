"""The command line of the recipes' benchmark; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.harness import Bar, Deadline, main, resumable
from benchmarks.recipes import annotation, faces, federated, generation, lanes, quality, reply, retrieval

PARTS: Mapping[str, Callable[[Path, Deadline], Iterable[Bar]]] = {
    "annotation": annotation.rows,
    "faces": faces.rows,
    "federated": federated.rows,
    "generation": generation.rows,
    "lanes": lanes.rows,
    "quality": quality.rows,
    "reply": reply.rows,
    "retrieval": retrieval.rows,
}
"""The bars of each recipe, given the folder of its stored runs and when they must have ended. The ids begin with
`recipes.` and the recipe's name."""


def command(argv: Sequence[str]) -> int:
    """The harness's command line, in which a part may be named without `recipes.`."""
    known, rest = argparse.ArgumentParser(add_help=False, parents=[resumable("recipes")]).parse_known_args(argv)
    deadline = Deadline(60 * known.budget)
    whole = [f"recipes.{word}" if word.partition("-")[0] in PARTS else word for word in rest]
    return main(
        "recipes", lambda: [bar for name, rows in PARTS.items() for bar in rows(known.runs / name, deadline)], whole
    )


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
