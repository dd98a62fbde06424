"""What `comm.Auto` measures on every rank at the first forward pass, on the real model and batch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoestring.comm.auto.deciding import Evidence, Seen
from shoestring.comm.auto.probing import coded, collectives, hindrance, settle
from shoestring.comm.codecs.codec import Turn
from shoestring.comm.settings.auto import Auto, exchange
from shoestring.core.feature import DATA, HOSTS, LOCAL
from shoestring.core.job import Job
from shoestring.core.task import Batch, Output
from shoestring.planning.cluster import Collective

PIECES = 8  # runs of gradients on which codecs are timed
LARGEST = 1 << 25  # bytes of the largest message


class Trial:
    """The measurements of this rank; what all ranks measured comes together as `Evidence`."""

    def __init__(self, job: Job, settings: Auto, forward: Callable[[nn.Module, Batch], Output], batch: Batch) -> None:
        self.job, self.settings, self.forward, self.batch = job, settings, forward, batch
        self.world = job.world
        self.parameters = {n: p for n, p in job.module.named_parameters() if p.requires_grad}
        self.total = sum(parameter.nbytes for parameter in self.parameters.values())
        self.torus = settings.torus and min(self.world.ranks_over([axis]) for axis in DATA) > 1
        self.order = list(reversed(self.parameters))  # as the coordinator deals them

    def evidence(self) -> Evidence:
        """Measure; every rank calls it, and gets the same."""
        model = self.job.model
        assert isinstance(model, DistributedDataParallel)
        with untouched(self.job):
            self.local_pass()
            passes = [self._timed_pass() for _ in range(self.settings.trials)]
            marks = {name: median(each[name] for each in passes) for name in passes[0]}
            # The order in which gradients arrive is the first rank's for all, as it is for DDP's buckets.
            arrival = self.world.decide(lambda: sorted(self.order, key=lambda name: marks[name]))
            links = self._collectives()
            mine = {"marks": marks, "coded": self._coded(), "slowdown": self._slowdown(marks["end"], links)}
            mine["passes"] = [each["end"] for each in passes]
        self.job.trace.facts["local_seconds"] = marks["end"]
        everyone = self.world.gather(json.dumps(mine).encode())
        return Evidence(
            sizes={name: parameter.nbytes for name, parameter in self.parameters.items()},
            arrival=arrival,
            pieces=[sum(self.parameters[name].nbytes for name in piece) for piece in self._pieces()],
            links=links,
            ranks=[Seen.of(json.loads(each)) for each in everyone],
            bucket=model.bucket_bytes_cap,
            lanes=1 if "nccl" in dist.get_backend_config(model.process_group) else 2,
            shard=self.world.ranks_over([LOCAL]) if self.torus else 1,
        )

    def _collectives(self) -> tuple[Collective, ...]:
        over = {DATA, (HOSTS,), (LOCAL,)} if self.torus else {DATA}
        return tuple(
            each for one in sorted(over) for each in collectives(self.world, one, min(2 * self.total, LARGEST))
        )

    def local_pass(self) -> None:
        """One forward and backward pass of this rank alone."""
        with self.job.sync(False):
            with self.job.computing():
                total, count = self.job.loss(self.forward(self.job.model, self.batch), self.batch)
            self.mark("forward")
            (total / count).backward()
        for parameter in self.parameters.values():
            parameter.grad = None

    def mark(self, name: str) -> None:
        """Overwritten while a pass is timed."""

    def _timed_pass(self) -> dict[str, float]:
        """Seconds from the beginning of a pass to the end of its forward pass, to each gradient, and to its end."""
        clock = Clock(self.world.device)
        names = {parameter: name for name, parameter in self.parameters.items()}
        hooks = [p.register_post_accumulate_grad_hook(lambda p: clock.mark(names[p])) for p in names]
        self.mark = clock.mark
        self.world.barrier()
        settle(self.world.device)
        clock.mark("begin")
        try:
            self.local_pass()
        finally:
            del self.mark
            for hook in hooks:
                hook.remove()
        clock.mark("end")
        found = clock.seconds("begin")
        return {name: found.get(name, found["end"]) for name in ("forward", *self.parameters, "end")}

    def _pieces(self) -> list[list[str]]:
        """The names in the coordinator's order, in at most `PIECES` runs of about equal bytes."""
        passed = 0
        runs: list[list[str]] = [[] for _ in range(PIECES)]
        for name in self.order:
            runs[min(PIECES - 1, passed * PIECES // self.total)].append(name)
            passed += self.parameters[name].nbytes
        return [run for run in runs if run]

    def _coded(self) -> dict[str, list[Any]]:
        """Per codec, its work on each piece and then on all gradients; all ranks at once, since they share cores."""
        size = self.world.ranks_over([HOSTS] if self.torus else DATA)
        turn = Turn(self.world.rank % size, size, 0)
        grads = {name: torch.randn_like(p) * 1e-3 for name, p in self.parameters.items()}
        chosen = [*self._pieces(), self.order]
        found: dict[str, list[Any]] = {}
        for call in ("dense", *self.settings.allow):
            self.world.barrier()
            make = exchange(call).codec
            found[call] = [asdict(coded(make, {n: grads[n] for n in names}, turn)) for names in chosen]
        return found

    def _slowdown(self, backward: float, links: tuple[Collective, ...]) -> dict[str, float]:
        """How computing, coding and the wire hinder each other while a forward and backward pass goes on."""
        ring = next(each for each in links if (each.kind, each.over) == ("all-reduce", DATA))
        alone = self._agreed(backward)
        wanted = int((alone / 4 - ring.latency) * ring.bandwidth)
        message = torch.zeros(max(1024, min(self.total, wanted) // 4), device=self.world.device)
        one = self._agreed(_seconds(lambda: self._reduce(message, 3), self.world.device) / 3)
        self.world.barrier()
        wire = hindrance(self._settled_pass, lambda times: self._reduce(message, times), (alone, one))
        scratch = torch.zeros(1 << 22, device=self.world.device)
        once = _seconds(lambda: _busy(scratch, 8), self.world.device) / 8
        self.world.barrier()
        code = hindrance(self._settled_pass, lambda times: _busy(scratch, times), (alone, once))
        return {
            "compute beside wire": wire["one"],
            "wire beside compute": wire["other"],
            "compute beside compute": (code["one"] + code["other"]) / 2,
        }

    def _agreed(self, seconds: float) -> float:
        """The slowest rank's."""
        return max(json.loads(each) for each in self.world.gather(json.dumps(seconds).encode()))

    def _reduce(self, message: Tensor, times: int) -> None:
        for _ in range(times):
            dist.all_reduce(message)
        settle(self.world.device)

    def _settled_pass(self) -> None:
        self.local_pass()
        settle(self.world.device)


class Clock:
    """Marks on a device's own line of time: at once on a CPU, events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: dict[str, Any] = {}

    def mark(self, name: str) -> None:
        if self.device.type == "cuda":
            self.marks[name] = torch.cuda.Event(enable_timing=True)
            self.marks[name].record()
        else:
            self.marks[name] = time.perf_counter()

    def seconds(self, origin: str) -> dict[str, float]:
        """From the mark `origin` to every other."""
        settle(self.device)
        began = self.marks[origin]
        if self.device.type == "cuda":
            return {name: began.elapsed_time(mark) / 1e3 for name, mark in self.marks.items()}
        return {name: mark - began for name, mark in self.marks.items()}


@contextmanager
def untouched(job: Job) -> Iterator[None]:
    """Put back the random state and the buffers, whatever runs inside."""
    buffers = [(buffer, buffer.clone()) for buffer in job.module.buffers()]
    devices = [job.world.device] if job.world.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def _busy(scratch: Tensor, times: int) -> None:
    """Work like a codec's: passes over memory, beside whatever the main thread does."""
    stream = torch.cuda.Stream(scratch.device) if scratch.device.type == "cuda" else None
    with torch.cuda.stream(stream) if stream else torch.no_grad():
        for _ in range(times):
            scratch.add_(1.0).abs_()
    settle(scratch.device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    work()
    settle(device)
    began = time.perf_counter()
    work()
    settle(device)
    return time.perf_counter() - began
