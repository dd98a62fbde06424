"""The hardware of a run: devices, disks, links and collectives, with the rates measured on them."""

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
class DiskSpeed:
    """One host's disk under the probed folder: `write` in bytes/s, `commit` (write 4 KiB and fsync) in seconds."""

    host: str
    write: float
    commit: float


@dataclass(frozen=True, kw_only=True)
class Link:
    """The way from one rank to another: latency in seconds (alpha) and bandwidth in bytes/s (1/beta)."""

    source: int
    target: int
    latency: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective over the mesh axes `over`: latency in seconds, bandwidth in bytes/s that each rank sends."""

    kind: str  # all-reduce, all-gather, all-to-all
    over: tuple[str, ...]
    ranks: int
    latency: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All measurements of a cluster, from which plans are priced."""

    devices: tuple[Device, ...] = ()
    stores: tuple[DiskSpeed, ...] = ()
    links: tuple[Link, ...] = ()
    collectives: tuple[Collective, ...] = ()
    slowdown: dict[str, float] = field(default_factory=dict)
    """Factors by which kinds of work slow each other down, as `simulate` takes them."""

    def collective(self, kind: str, over: Sequence[str]) -> Collective:
        """Look up a kind of collective over these mesh axes; KeyError if it was not measured."""
        return {(each.kind, each.over): each for each in self.collectives}[kind, tuple(over)]
