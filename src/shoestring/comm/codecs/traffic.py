"""Counts bytes on the wire, of ring collectives and of a codec's requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoestring.comm.codecs.codec import Request


def ring_bytes(collective: str, nbytes: float, ranks: int) -> float:
    """Bytes that each of `ranks` ranks sends when a collective runs as a ring.

    Args:
        collective: "all-reduce", "all-gather" or "all-to-all".
        nbytes: bytes that each rank contributes: the whole tensor, or the rank's own shard for an all-gather.
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
    """Bytes of the requests of one stage, by kind of collective."""
    nbytes: dict[str, int] = {}
    for request in requests:
        nbytes[request.collective] = nbytes.get(request.collective, 0) + request.tensor.nbytes
    return nbytes


@dataclass
class WireBytes:
    """Bytes that one rank contributed to each stage of an exchange, by kind of collective."""

    stages: list[dict[str, int]] = field(default_factory=list)

    def total(self, collective: str) -> int:
        return sum(stage.get(collective, 0) for stage in self.stages)

    def sent(self, ranks: int) -> float:
        """Bytes that one rank sends if all collectives run as rings."""
        kinds = ("all-reduce", "all-gather", "all-to-all")
        return sum(ring_bytes(kind, self.total(kind), ranks) for kind in kinds)
