"""What becomes of a family of transformers whose layers are split over two ranks."""

from __future__ import annotations

from typing import Any

from shoestring.testing.pool import Pool, RankError
from tests.rigs import pipelines

CLOSE = 1e-5
"""Difference of losses, and of sums over weights relative to these: some families compute in fp32 in between."""


def kind(two: Pool, name: str) -> str:
    """`equal`, `refused`, or how a family trains otherwise on two ranks than in one process."""
    arguments: dict[str, Any] = {"model": f"zoo: {name}", "micro": 1, "stop": 3}
    wanted = pipelines.train(**arguments)
    try:
        results = two.call(pipelines.train, tensor={}, **arguments)
    except RankError as error:
        return "refused" if error.kind in ("ConfigError", "ConflictError") else f"{error.kind}: {error}"[:500]
    losses = max(
        abs(one - other) for result in results for one, other in zip(result["losses"], wanted["losses"], strict=True)
    )
    sums = results[0]["weights"]
    if sums.keys() != wanted["weights"].keys():
        return f"other weights: {sorted(sums.keys() ^ wanted['weights'].keys())[:3]}"
    weights = max(
        abs(one - other) / (1 + abs(other))
        for of_name in sums
        for one, other in zip(sums[of_name], wanted["weights"][of_name], strict=True)
    )
    return "equal" if max(losses, weights) <= CLOSE else f"losses {losses:.1g} off, weights {weights:.1g}"
