"""`shoestring probe`: measures arithmetic, memory, disks, and the links between neighbouring ranks, in seconds."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cattrs
import tomli_w
import torch
import torch.distributed as dist

from shoestring.comm.auto.probes import time_collectives
from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA
from shoestring.core.world import World
from shoestring.planning.cluster import Cluster, Device, DiskSpeed, Link
from shoestring.storage.whole import write_atomic

LARGE = 1 << 22  # bytes of the first bandwidth message; doubled until one takes PATIENCE
PATIENCE = 0.2  # seconds
DISK = 1 << 26  # bytes written to measure a disk


def probe(world: World, folder: Path) -> Cluster:
    """Measure the cluster. Every rank calls it; each host's disk is measured under `folder`.

    Raises:
        ConfigError: `folder` cannot be written.
    """
    mine: dict[str, Any] = {"device": asdict(_device(world)), "links": [asdict(link) for link in _links(world)]}
    mine["store"] = asdict(world.agree(lambda: _store(world, folder))) if world.local_rank == 0 else None
    if world.local_rank != 0:
        world.agree(lambda: None)
    everyone = [json.loads(one) for one in world.gather(json.dumps(mine).encode())]
    return Cluster(
        devices=tuple(Device(**each["device"]) for each in everyone),
        stores=tuple(DiskSpeed(**each["store"]) for each in everyone if each["store"]),
        links=tuple(Link(**link) for each in everyone for link in each["links"]),
        collectives=time_collectives(world, DATA),
    )


def write(cluster: Cluster, path: Path) -> None:
    """Write the cluster as TOML.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        write_atomic(path, tomli_w.dumps(asdict(cluster)).encode())
    except OSError as error:
        raise ConfigError(f"cannot write `{path}`: {error.strerror}") from error


def read(path: Path) -> Cluster:
    """The inverse of `write`.

    Raises:
        ConfigError: the file is missing or is no cluster file.
    """
    try:
        return cattrs.Converter(forbid_extra_keys=True).structure(tomllib.loads(path.read_text()), Cluster)
    except (OSError, ValueError, cattrs.BaseValidationError) as error:
        raise ConfigError(f"`{path}` is no cluster file: {error}", hint="write one with `shoestring probe`") from error


def describe(cluster: Cluster) -> Iterator[str]:
    """Describe what was measured, line by line."""
    for device in cluster.devices:
        yield (
            f"rank {device.rank} on {device.host}: {device.name}, {device.memory / 2**30:.1f} GiB, "
            f"matmul {device.matmul_fp32 / 1e9:.0f} GFLOP/s in fp32 and {device.matmul_bf16 / 1e9:.0f} in bf16, "
            f"memory copy {device.copy / 1e9:.1f} GB/s"
        )
    for store in cluster.stores:
        yield f"disk of {store.host}: {store.write / 1e6:.0f} MB/s, {store.commit * 1e3:.1f} ms a commit"
    for link in cluster.links:
        rate = link.bandwidth * 8 / 1e6
        yield f"rank {link.source} to rank {link.target}: {link.latency * 1e6:.0f} us, {rate:.0f} Mbit/s"
    for each in cluster.collectives:
        rate = each.bandwidth / 1e6
        yield f"{each.kind} over {each.ranks} ranks: {each.latency * 1e6:.0f} us latency, {rate:.1f} MB/s"


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """Return the median time of `work` in seconds, after one run to warm up; waits for the device."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return sorted(times[1:])[repeats // 2]


def _device(world: World) -> Device:
    device, on_gpu = world.device, world.device.type == "cuda"
    side = 8192 if on_gpu else 1024
    # Ranks of one host are measured at once, because they will also train at once.
    world.barrier()
    rates = {
        dtype: _matmul(side if dtype is torch.float32 or on_gpu else side // 4, dtype, device) for dtype in _DTYPES
    }
    source = torch.ones(1 << (30 if on_gpu else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = source.numel() / median_seconds(lambda: target.copy_(source), device)
    return Device(
        rank=world.rank,
        host=world.host,
        name=torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        memory=torch.cuda.get_device_properties(device).total_memory if on_gpu else _host_memory(),
        threads=torch.get_num_threads(),
        matmul_fp32=rates[torch.float32],
        matmul_bf16=rates[torch.bfloat16],
        copy=copied,
    )


_DTYPES = (torch.float32, torch.bfloat16)


def _matmul(side: int, dtype: torch.dtype, device: torch.device) -> float:
    a = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / median_seconds(lambda: a @ a, device)


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _store(world: World, folder: Path) -> DiskSpeed:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as file:
            commit = median_seconds(lambda: _write_and_sync(file.fileno(), b"\0" * 4096), torch.device("cpu"))
            seconds = median_seconds(
                lambda: _write_and_sync(file.fileno(), b"\0" * DISK), torch.device("cpu"), repeats=3
            )
    except OSError as error:
        raise ConfigError(f"cannot write in `{folder}`: {error.strerror}", hint="choose another --out") from error
    return DiskSpeed(host=world.host, write=DISK / seconds, commit=commit)


def _write_and_sync(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    while view:
        view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)


def _links(world: World) -> list[Link]:
    """Measure the link from each rank to the next around the ring, one at a time; the sender reports it."""
    links = []
    for source in range(world.size if world.size > 1 else 0):
        target = (source + 1) % world.size
        world.barrier()
        if world.rank == source:
            latency = _echo(world, target, torch.zeros(1, device=world.device)) / 2
            links.append(Link(source=source, target=target, latency=latency, bandwidth=_bandwidth(world, target)))
        elif world.rank == target:
            _answer(world, source)
    return links


def _echo(world: World, peer: int, message: torch.Tensor, repeats: int = 9) -> float:
    """Return the median seconds from sending `message` to the peer's answer."""
    answer = torch.zeros(1, device=world.device)

    def once() -> None:
        dist.send(torch.tensor([message.numel()], device=world.device), peer)
        dist.send(message, peer)
        dist.recv(answer, peer)

    return median_seconds(once, world.device, repeats)


def _bandwidth(world: World, peer: int) -> float:
    """Bytes/s from the difference of two sizes, so that latency cancels."""
    size = LARGE
    while True:
        small, large = (torch.zeros(n // 4, device=world.device) for n in (size // 4, size))
        one, other = _echo(world, peer, small, repeats=3), _echo(world, peer, large, repeats=3)
        if other > PATIENCE or size >= 1 << 28:
            dist.send(torch.tensor([0], device=world.device), peer)
            return (large.nbytes - small.nbytes) / max(other - one, 1e-9)
        size *= 2


def _answer(world: World, peer: int) -> None:
    """Answer the peer's `_echo`es until it announces a message of length 0."""
    length, answer = torch.zeros(1, dtype=torch.int64, device=world.device), torch.zeros(1, device=world.device)
    while True:
        dist.recv(length, peer)
        if int(length) == 0:
            return
        dist.recv(torch.empty(int(length), device=world.device), peer)
        dist.send(answer, peer)
