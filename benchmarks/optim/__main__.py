"""The command line of optim's benchmark; see the package's docstring."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache

from benchmarks.harness import Bar, Deadline, main, resumable
from benchmarks.optim import cache as samples
from benchmarks.optim import eight_bit, images, layerwise, shared_norms, text


def command(argv: Sequence[str]) -> int:
    """The harness's command line, and what the package's docstring says."""
    known, rest = resumable("optim").parse_known_args(argv)
    deadline = Deadline(60 * known.budget)

    @cache
    def contest() -> images.Contest:
        return images.Contest(known.runs / "images", deadline.check)

    @cache
    def texts() -> text.Contest:
        return text.Contest(known.runs / "text", deadline.check)

    def rows() -> list[Bar]:
        return [
            *layerwise.rows(),
            *eight_bit.rows(),
            *shared_norms.rows(),
            *samples.rows(),
            *images.rows(contest),
            *text.rows(texts),
        ]

    return main("optim", rows, rest)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
