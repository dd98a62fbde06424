"""The hardware of a run: devices, disks, links and collectives, with their measured speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cattrs

from shoestring.core.errors import ConfigError
from shoestring.storage import foreign


@dataclass(frozen=True, kw_only=True)
class Device:
    """One rank's device: its matmul rates in FLOP/s, its copy rate in bytes/s, and its memory in bytes."""

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
    """A host's disk that holds the probed folder: `write` in bytes/s, `commit` (write 4 KiB and fsync) in seconds."""

    host: str
    write: float
    commit: float


@dataclass(frozen=True, kw_only=True)
class Link:
    """The connection from rank `source` to rank `target`: latency in seconds (alpha), bandwidth in bytes/s (1/beta)."""

    source: int
    target: int
    latency: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Speed of a kind of collective over the mesh axes `over`: latency in seconds, and bytes/s that each rank sends."""

    kind: str  # all-reduce, all-gather, all-to-all
    over: tuple[str, ...]
    ranks: int
    latency: float
    bandwidth: float
    points: tuple[tuple[float, float], ...] = ()
    """(bytes, seconds) of the measured messages, in increasing size."""

    def seconds(self, nbytes: float) -> float:
        """Seconds that a message takes: interpolated between measured sizes, proportional to size above them."""
        if not self.points:
            return self.latency + nbytes / self.bandwidth
        largest, most = self.points[-1]
        if nbytes >= largest:
            return most * nbytes / largest
        below = (0.0, self.points[0][1])
        for above in self.points:
            if nbytes <= above[0]:
                part = (nbytes - below[0]) / (above[0] - below[0])
                return below[1] * (1 - part) + above[1] * part
            below = above
        raise AssertionError("sizes increase")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All measurements of a cluster; step times are predicted from them."""

    devices: tuple[Device, ...] = ()
    stores: tuple[DiskSpeed, ...] = ()
    links: tuple[Link, ...] = ()
    collectives: tuple[Collective, ...] = ()
    slowdown: dict[str, float] = field(default_factory=dict)
    """Factors by which work of one kind slows down while work of another kind runs; see `simulate` for the keys."""

    def collective(self, kind: str, over: Sequence[str]) -> Collective:
        """Look up a kind of collective over the mesh axes `over`; raises KeyError if it was not measured."""
        measured = {(collective.kind, collective.over): collective for collective in self.collectives}
        return measured[kind, tuple(over)]


def read_cluster(path: Path) -> Cluster:
    """Read a cluster file that `shoestring probe` wrote.

    Raises:
        ConfigError: the file is missing or is not a cluster file.
    """
    try:
        return cattrs.Converter(forbid_extra_keys=True).structure(foreign.read_toml(path), Cluster)
    except OSError as error:
        message = f"cannot read `{path}`: {error.strerror or error}"
        raise ConfigError(message, hint="write it with `shoestring probe`") from error
    except (ValueError, TypeError, OverflowError, cattrs.BaseValidationError) as error:
        raise ConfigError(f"`{path}` is no cluster file: {error}", hint="write one with `shoestring probe`") from error
