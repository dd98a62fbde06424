"""What we have: devices, stores and links, with the rates that were measured on them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import cattrs
import tomli_w

from shoestring.core.errors import ConfigError
from shoestring.core.files import write_atomic


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
class Cluster:
    """Everything that `shoestring probe` measured; what plans are priced with."""

    devices: tuple[Device, ...]
    stores: tuple[Store, ...] = ()
    links: tuple[Link, ...] = ()
    all_reduce_latency: float = 0.0
    """Seconds of an all-reduce of 8 bytes over all ranks."""

    def write(self, path: Path) -> None:
        try:
            write_atomic(path, tomli_w.dumps(asdict(self)).encode())
        except OSError as error:
            raise ConfigError(f"cannot write `{path}`: {error.strerror}") from error

    @classmethod
    def read(cls, path: Path) -> Cluster:
        """The inverse of `write`.

        Raises:
            ConfigError: the file is missing or is no cluster file.
        """
        try:
            return cattrs.Converter(forbid_extra_keys=True).structure(tomllib.loads(path.read_text()), cls)
        except (OSError, ValueError, cattrs.BaseValidationError) as error:
            raise ConfigError(
                f"`{path}` is no cluster file: {error}", hint="make one with `shoestring probe`"
            ) from error

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for device in self.devices:
            yield (
                f"rank {device.rank} on {device.host}: {device.name}, {device.memory / 2**30:.1f} GiB, "
                f"matmul {device.matmul_fp32 / 1e9:.0f} GFLOP/s in fp32 and {device.matmul_bf16 / 1e9:.0f} in bf16, "
                f"memory copy {device.copy / 1e9:.1f} GB/s"
            )
        for store in self.stores:
            yield f"disk of {store.host}: {store.write / 1e6:.0f} MB/s, {store.commit * 1e3:.1f} ms a commit"
        for link in self.links:
            rate = link.bandwidth * 8 / 1e6
            yield f"rank {link.source} to rank {link.target}: {link.latency * 1e6:.0f} us, {rate:.0f} Mbit/s"
        if self.all_reduce_latency:
            yield f"all-reduce of 8 bytes over {len(self.devices)} ranks: {self.all_reduce_latency * 1e6:.0f} us"
