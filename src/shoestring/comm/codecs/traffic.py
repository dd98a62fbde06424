"""Bytes on the wire: what collectives send round a ring, and what the requests of a codec come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoestring.comm.codecs.codec import Request


def ring_bytes(collective: str, nbytes: float, ranks: int) -> float:
    """Bytes that leave each of `ranks` ranks when a collective runs round a ring.

    Args:
        collective: "all-reduce", "all-gather" or "all-to-all".
        nbytes: what each rank contributes: its whole tensor, or for an all-gather its own shard.
    """
    match collective:
        case "all-reduce":
            return 2 * (ranks - 1) * nbytes / ranks
        case "all-gather":
            return (ranks - 1) * nbytes
        case "all-to-all":
            return (ranks - 1) * nbytes / ranks
    raise ValueError(f"no such collective: {collective}")


def count_bytes(requests: Sequence[Request]) -> dict[str, int]:
    """Bytes of the requests of one stage, by collective."""
    nbytes: dict[str, int] = {}
    for request in requests:
        nbytes[request.collective] = nbytes.get(request.collective, 0) + request.tensor.nbytes
    return nbytes


@dataclass
class WireBytes:
    """Bytes that one rank contributed to each stage of an exchange, by collective."""

    stages: list[dict[str, int]] = field(default_factory=list)

    def total(self, collective: str) -> int:
        return sum(stage.get(collective, 0) for stage in self.stages)

    def sent(self, ranks: int) -> float:
        """Bytes that leave one rank when all collectives run round a ring."""
        kinds = ("all-reduce", "all-gather", "all-to-all")
        return sum(ring_bytes(kind, self.total(kind), ranks) for kind in kinds)
