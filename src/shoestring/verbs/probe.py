"""`shoestring probe`: measures compute, memory, disks, and the links between neighbouring ranks, within seconds."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w
import torch
import torch.distributed as dist

from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA
from shoestring.core.world import World
from shoestring.figures import memory, seconds, size
from shoestring.planning.cluster import Cluster, Device, DiskSpeed, Link
from shoestring.planning.links import time_collectives
from shoestring.storage.whole import write_atomic

LARGE = 1 << 22  # bytes of the first message for bandwidth; doubled until a message takes longer than PATIENCE
PATIENCE = 0.2  # seconds
DISK = 1 << 26  # bytes to write when a disk is measured


def probe(world: World, out: Path) -> Cluster:
    """Measure the cluster; the first rank writes the results to the file `out`. Every rank must call this function.

    On every host, the disk that holds the folder of `out` is measured.

    Raises:
        ConfigError: the folder or the file cannot be written.
    """
    own: dict[str, Any] = {"device": asdict(_device(world)), "links": [asdict(link) for link in _links(world)]}
    own["store"] = world.agree(lambda: asdict(_disk(world, out.parent)) if world.local_rank == 0 else None)
    everyone = [json.loads(data) for data in world.gather(json.dumps(own).encode())]
    cluster = Cluster(
        devices=tuple(Device(**part["device"]) for part in everyone),
        stores=tuple(DiskSpeed(**part["store"]) for part in everyone if part["store"]),
        links=tuple(Link(**link) for part in everyone for link in part["links"]),
        collectives=time_collectives(world, DATA),
    )

    def write() -> None:
        try:
            write_atomic(out, tomli_w.dumps(asdict(cluster)).encode())
        except OSError as error:
            raise ConfigError(f"cannot write `{out}`: {error.strerror}") from error

    world.decide(write)
    return cluster


def describe(cluster: Cluster) -> Iterator[str]:
    """Describe the measurements of a cluster, line by line."""
    for device in cluster.devices:
        yield (
            f"rank {device.rank} on {device.host}: {device.name}, {memory(device.memory)}, "
            f"matmul {device.matmul_fp32 / 1e9:.0f} GFLOP/s in fp32 and {device.matmul_bf16 / 1e9:.0f} in bf16, "
            f"memory copy {size(device.copy)}/s"
        )
    for store in cluster.stores:
        yield f"disk of {store.host}: {size(store.write)}/s, {seconds(store.commit)} a commit"
    for link in cluster.links:
        rate = link.bandwidth * 8 / 1e6
        yield f"rank {link.source} to rank {link.target}: {seconds(link.latency)}, {rate:.0f} Mbit/s"
    for link in cluster.collectives:
        yield f"{link.kind} over {link.ranks} ranks: {seconds(link.latency)} latency, {size(link.bandwidth)}/s"


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """The median duration of `work` in seconds, after one run to warm up; waits for the device."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return sorted(times[1:])[repeats // 2]


def _device(world: World) -> Device:
    """Measure the device of this rank."""
    device, on_gpu = world.device, world.device.type == "cuda"
    side = 8192 if on_gpu else 1024
    # All ranks of a host are measured at the same time, because they also share the host when they train.
    world.barrier()

    def matmul_rate(side: int, dtype: torch.dtype) -> float:
        a = torch.randn(side, side, device=device).to(dtype)
        return 2 * side**3 / median_seconds(lambda: a @ a, device)

    fp32 = matmul_rate(side, torch.float32)
    bf16 = matmul_rate(side if on_gpu else side // 4, torch.bfloat16)  # smaller, because CPUs may lack bf16 units
    source = torch.ones(1 << (30 if on_gpu else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = source.numel() / median_seconds(lambda: target.copy_(source), device)
    return Device(
        rank=world.rank,
        host=world.host,
        name=torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        memory=torch.cuda.get_device_properties(device).total_memory
        if on_gpu
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        threads=torch.get_num_threads(),
        matmul_fp32=fp32,
        matmul_bf16=bf16,
        copy=copied,
    )


def _disk(world: World, folder: Path) -> DiskSpeed:
    """Measure the disk that holds a folder."""
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
    """Measure the link from each rank to the next one around the ring, one link at a time. The sending rank returns the
    result."""
    links = []
    for source in range(world.size if world.size > 1 else 0):
        target = (source + 1) % world.size
        world.barrier()
        if world.rank == source:
            latency = _echo(world, target, torch.zeros(1, device=world.device)) / 2
            links.append(Link(source=source, target=target, latency=latency, bandwidth=_bandwidth(world, target)))
        elif world.rank == target:
            # Answer the messages of `_echo`, each of which follows its length, until `_bandwidth` sends the length 0.
            length, answer = torch.zeros(1, dtype=torch.int64, device=world.device), torch.zeros(1, device=world.device)
            dist.recv(length, source)
            while int(length):
                dist.recv(torch.empty(int(length), device=world.device), source)
                dist.send(answer, source)
                dist.recv(length, source)
    return links


def _bandwidth(world: World, peer: int) -> float:
    """Bandwidth in bytes/s. It is computed from the difference between the times of two message sizes, so that the
    latency cancels."""
    size = LARGE
    while True:
        small, large = (torch.zeros(n // 4, device=world.device) for n in (size // 4, size))
        short, long = _echo(world, peer, small, repeats=3), _echo(world, peer, large, repeats=3)
        if long > PATIENCE or size >= 1 << 28:
            dist.send(torch.tensor([0], device=world.device), peer)
            return (large.nbytes - small.nbytes) / max(long - short, 1e-9)
        size *= 2


def _echo(world: World, peer: int, message: torch.Tensor, repeats: int = 9) -> float:
    """Median time, in seconds, from sending `message` to receiving the peer's answer."""
    answer = torch.zeros(1, device=world.device)

    def once() -> None:
        dist.send(torch.tensor([message.numel()], device=world.device), peer)
        dist.send(message, peer)
        dist.recv(answer, peer)

    return median_seconds(once, world.device, repeats)
