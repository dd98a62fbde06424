"""Measures for `comm.Auto`: at the first forward pass every rank times passes, collectives and codecs on the real model
and batch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoestring.comm.auto.decision import Measurements, RankMeasurements
from shoestring.comm.auto.probes import measure_slowdown, time_codec
from shoestring.comm.codecs.codec import CodecFactory, ExchangeContext
from shoestring.comm.codecs.lockstep import LATE
from shoestring.core.attachments import Attachments
from shoestring.core.feature import DATA, HOSTS, LOCAL
from shoestring.core.task import Batch, Output
from shoestring.planning.cluster import Collective
from shoestring.planning.links import synchronize, time_collectives

PIECES = 8  # number of pieces, each of consecutive gradients, on which codecs are timed
LARGEST = 1 << 25  # bytes of the largest message


class Trial:
    """Takes the measurements of this rank, and gathers the measurements of all ranks."""

    def __init__(
        self,
        attachments: Attachments,
        forward: Callable[[nn.Module, Batch], Output],
        batch: Batch,
        codecs: Mapping[str, CodecFactory],
        *,
        trials: int,
        torus: bool,
    ) -> None:
        self.attachments, self.forward, self.batch = attachments, forward, batch
        self.codecs, self.trials = codecs, trials
        self.world = attachments.world
        self.parameters = {n: p for n, p in attachments.module.named_parameters() if p.requires_grad}
        self.total = sum(parameter.nbytes for parameter in self.parameters.values())
        self.torus = torus and min(self.world.ranks_over([axis]) for axis in DATA) > 1
        self.order = list(reversed(self.parameters))  # names in the coordinator's order

    def measure(self) -> Measurements:
        """Measure on this rank, and gather the measurements of all ranks. Every rank must call this, and gets the same
        result."""
        # This method runs inside a forward pass, under autocast. Codecs must run without autocast; `computing` turns
        # autocast on again.
        with restoring(self.attachments), torch.autocast(self.world.device.type, enabled=False):
            self.local_pass()
            passes = [self._timed_pass() for _ in range(self.trials)]
            marks = {name: median(seconds[name] for seconds in passes) for name in passes[0]}
            # All ranks use the first rank's order of gradients, as DDP does for its buckets.
            arrival = self.world.decide(lambda: sorted(self.order, key=lambda name: marks[name]))
            meshes = sorted({DATA, (HOSTS,), (LOCAL,)} if self.torus else {DATA})
            largest = min(2 * self.total, LARGEST)
            links = tuple(link for over in meshes for link in time_collectives(self.world, over, largest))
            own: dict[str, Any] = {
                "marks": marks,
                "coded": self._time_codecs(),
                "slowdown": self._slowdown(marks["end"], links),
            }
            own["passes"] = [seconds["end"] for seconds in passes]
        self.attachments.trace.facts["local_seconds"] = marks["end"]
        everyone = self.world.gather(json.dumps(own).encode())
        return Measurements(
            sizes={name: parameter.nbytes for name, parameter in self.parameters.items()},
            arrival=arrival,
            pieces=[sum(self.parameters[name].nbytes for name in piece) for piece in self._pieces()],
            links=links,
            ranks=[RankMeasurements.from_json(json.loads(message)) for message in everyone],
            bucket=self.attachments.model.bucket_bytes_cap
            if isinstance(self.attachments.model, DistributedDataParallel)
            else 0,
            lanes=1 if "nccl" in dist.get_backend_config(getattr(self.attachments.model, "process_group", None)) else 2,
            shard=self.world.ranks_over([LOCAL]) if self.torus else 1,
        )

    def local_pass(self, mark: Callable[[str], None] = lambda name: None) -> None:
        """Run a forward and a backward pass without exchange; `mark("forward")` is called after the forward pass."""
        with self.attachments.sync(False):
            with self.attachments.computing():
                total, count = self.attachments.loss(self.forward(self.attachments.model, self.batch), self.batch)
            mark("forward")
            (total / count).backward()
        for parameter in self.parameters.values():
            parameter.grad = None

    def _timed_pass(self) -> dict[str, float]:
        """Time one pass; return the seconds from its start to the end of the forward pass, to each gradient, and to the
        end."""
        clock = Clock(self.world.device)
        names = {parameter: name for name, parameter in self.parameters.items()}
        hooks = [p.register_post_accumulate_grad_hook(lambda p: clock.mark(names[p])) for p in names]
        self.world.barrier()
        synchronize(self.world.device)
        clock.mark("begin")
        try:
            self.local_pass(clock.mark)
        finally:
            for hook in hooks:
                hook.remove()
        clock.mark("end")
        seconds = clock.seconds("begin")
        return {name: seconds.get(name, seconds["end"]) for name in ("forward", *self.parameters, "end")}

    def _pieces(self) -> list[list[str]]:
        """Split the names, in the coordinator's order, into at most `PIECES` consecutive groups with about equal
        bytes."""
        passed = 0
        runs: list[list[str]] = [[] for _ in range(PIECES)]
        for name in self.order:
            runs[min(PIECES - 1, passed * PIECES // self.total)].append(name)
            passed += self.parameters[name].nbytes
        return [run for run in runs if run]

    def _time_codecs(self) -> dict[str, list[Any]]:
        """Time each codec on each piece and then on all gradients. All ranks time codecs at once, because ranks of a
        host share cores."""
        size = self.world.ranks_over([HOSTS] if self.torus else DATA)
        context = ExchangeContext(self.world.rank % size, size, LATE)
        grads = {name: torch.randn_like(p) * 1e-3 for name, p in self.parameters.items()}
        runs = [{name: grads[name] for name in names} for names in [*self._pieces(), self.order]]
        timings: dict[str, list[Any]] = {}
        for call, make in self.codecs.items():
            self.world.barrier()
            timings[call] = [asdict(time_codec(make, run, context)) for run in runs]
        return timings

    def _slowdown(self, backward: float, links: tuple[Collective, ...]) -> dict[str, float]:
        """Measure how much computation, coding and communication slow each other down during a forward and backward
        pass."""
        ring = next(link for link in links if (link.kind, link.over) == ("all-reduce", DATA))
        alone = self._agreed(backward)
        nbytes = int((alone / 4 - ring.latency) * ring.bandwidth)  # all-reducing this takes 1/4 of a pass
        message = torch.zeros(max(1024, min(self.total, nbytes) // 4), device=self.world.device)
        reduce_seconds = self._agreed(_seconds(lambda: self._reduce(message, 3), self.world.device) / 3)
        self.world.barrier()
        wire = measure_slowdown(self._settled_pass, lambda times: self._reduce(message, times), (alone, reduce_seconds))
        scratch = torch.zeros(1 << 22, device=self.world.device)
        load_seconds = _seconds(lambda: _load_memory(scratch, 8), self.world.device) / 8
        self.world.barrier()
        code = measure_slowdown(self._settled_pass, lambda times: _load_memory(scratch, times), (alone, load_seconds))
        return {
            "compute beside wire": wire["one"],
            "wire beside compute": wire["other"],
            "compute beside compute": (code["one"] + code["other"]) / 2,
        }

    def _agreed(self, seconds: float) -> float:
        """The maximum of `seconds` over all ranks."""
        return max(json.loads(message) for message in self.world.gather(json.dumps(seconds).encode()))

    def _reduce(self, message: Tensor, times: int) -> None:
        for _ in range(times):
            dist.all_reduce(message)
        synchronize(self.world.device)

    def _settled_pass(self) -> None:
        self.local_pass()
        synchronize(self.world.device)


class Clock:
    """Named time marks: clock times on a CPU, events of the current stream on a GPU."""

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
        """Seconds from the mark `origin` to every mark."""
        synchronize(self.device)
        began = self.marks[origin]
        if self.device.type == "cuda":
            return {name: began.elapsed_time(mark) / 1e3 for name, mark in self.marks.items()}
        return {name: mark - began for name, mark in self.marks.items()}


@contextmanager
def restoring(attachments: Attachments) -> Iterator[None]:
    """Restore the random state and the buffers at the end of the context."""
    buffers = [(buffer, buffer.clone()) for buffer in attachments.module.buffers()]
    devices = [attachments.world.device] if attachments.world.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def _load_memory(scratch: Tensor, times: int) -> None:
    """Imitate the work of a codec: pass over memory `times` times, on a separate stream."""
    stream = torch.cuda.Stream(scratch.device) if scratch.device.type == "cuda" else None
    with torch.cuda.stream(stream) if stream else torch.no_grad():
        for _ in range(times):
            scratch.add_(1.0).abs_()
    synchronize(scratch.device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of `work`, after one warm-up run."""
    work()
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began
