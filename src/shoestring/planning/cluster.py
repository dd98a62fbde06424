"""What we have: devices, stores and links, with the rates that were measured on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Device:
    """One rank's device; rates in FLOP/s and bytes/s, memory in bytes."""

    rank: int
    host: str
    name: str
    memory: int
    threads: int
    matmul_fp32: float
    matmul_bf16: float
    copy: float


@dataclass(frozen=True, kw_only=True)
class Store:
    """One host's disk under the probed folder: bytes/s and seconds a commit (write of 4 KiB and fsync)."""

    host: str
    write: float
    commit: float


@dataclass(frozen=True, kw_only=True)
class Link:
    """Between two ranks, one way: seconds of latency (alpha) and bytes/s of bandwidth (1/beta)."""

    source: int
    target: int
    latency: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class Collective:
    """All ranks along `over` at once: `latency` seconds, and a second for each `bandwidth` bytes a rank hands over."""

    kind: str  # all-reduce, all-gather, all-to-all
    over: tuple[str, ...]
    ranks: int
    latency: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Everything that was measured; what plans are priced with."""

    devices: tuple[Device, ...] = ()
    stores: tuple[Store, ...] = ()
    links: tuple[Link, ...] = ()
    collectives: tuple[Collective, ...] = ()
    slowdown: dict[str, float] = field(default_factory=dict)
    """How kinds of work hinder each other, as `simulate` takes it."""

    def collective(self, kind: str, over: Sequence[str]) -> Collective:
        """That kind of collective over these dimensions of the mesh; KeyError where it was not measured."""
        return {(each.kind, each.over): each for each in self.collectives}[kind, tuple(over)]
