"""The command line of decode's benchmark; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from benchmarks import decode
from benchmarks.decode import (
    distillation,
    exactness,
    peer_serving,
    peers,
    pretrained,
    server,
    skipping,
    speculation,
    weights,
)
from benchmarks.decode.pairs import Pairs
from benchmarks.harness import Bar, Deadline, main, resumable
from benchmarks.machine import ROOT
from benchmarks.rows import RESULTS


def flags() -> argparse.ArgumentParser:
    known = resumable("decode")
    known.add_argument("--cache", type=Path, default=ROOT / ".cache" / "decode")
    known.add_argument("--pictures", action="store_true")
    return known


def command(argv: Sequence[str]) -> int:
    """The harness's command line, and what the package's docstring says."""
    known, rest = flags().parse_known_args(argv)
    deadline = Deadline(60 * known.budget)

    @cache
    def drafters() -> distillation.Drafters:
        return distillation.Drafters(known.runs / "distillation", known.cache, check=deadline.check)

    @cache
    def trained() -> Pairs:
        return Pairs(known.cache, check=deadline.check)

    @cache
    def pairs() -> speculation.Contest:
        return speculation.Contest(trained(), known.runs / "pairs")

    @cache
    def comparison() -> skipping.Comparison:
        model = pretrained.Pretrained(known.cache, check=deadline.check)
        return skipping.Comparison(known.runs / "skipping", model, deadline.check)

    if known.pictures:
        print(skipping.draw(comparison()))
        return 0

    def rows() -> list[Bar]:
        return [
            *exactness.rows(),
            *weights.rows(trained),
            *speculation.rows(pairs),
            *decode.gpu_rows(),
            *distillation.rows(drafters),
            *skipping.rows(comparison),
            *server.rows(),
            *peers.rows(),
            *peer_serving.rows(),
        ]

    return main("decode", rows, rest, RESULTS)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
