"""The throughput meter: writes the metrics of each step, which are loss, throughput, memory and features' metrics."""

from __future__ import annotations

import math
import resource
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.core.job import Job, attachments_of
from shoestring.report.sinks import Sink
from shoestring.training.evaluation import Evaluated
from shoestring.training.newest_rows import MetricsRow

# Peak FLOP/s of dense bf16 matrix products (fp16 before Ampere) by device name, from the vendors' data sheets. The
# first name that the device's name contains is used, so longer names come first.
PEAKS = (
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10", 125e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
    ("V100", 125e12),
    ("T4", 65e12),
)


def peak_flops(device: torch.device) -> float | None:
    """Peak FLOP/s of the device in bf16; None if not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS if part in name), None)


def memory_gib(device: torch.device) -> float:
    """Peak memory so far in GiB: on a GPU, the memory allocated by torch; on a CPU, the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class _Mark(NamedTuple):
    time: float
    tokens: int
    waited: float


class Meter:
    """Measures throughput, and on the first rank writes the metrics of each step to every sink.

    On an accelerator, a loss is read one step after it was computed, so that reading never makes the device wait.

    Args:
        sinks: destinations of the metrics; empty on ranks other than the first.
        flops_per_token: floating-point operations of a forward and a backward pass per token, to compute the MFU (model
            FLOPs utilisation).
        nats_to_bits: factor that converts nats per token to bits per byte; 0 if not known.
        batch: number of samples of a step. If a step has as many targets as samples, as with images, throughput is in
            samples per second.
    """

    def __init__(
        self, job: Job, sinks: Sequence[Sink], flops_per_token: float, nats_to_bits: float, batch: int = 0
    ) -> None:
        self.job, self.sinks, self.nats_to_bits, self.batch = job, sinks, nats_to_bits, batch
        peak = peak_flops(job.world.device)
        self.mfu_per_rate = flops_per_token / (peak * job.world.size) if peak else 0.0
        self.waited = 0.0
        self.latest: dict[str, float] = {}  # the last value of each metric, on every rank
        self.tokens_before = job.progress.tokens  # tokens that earlier starts of the run trained on
        self.recent: deque[float] = deque(maxlen=64)
        self.unit = "tokens"
        self._marks: deque[_Mark] = deque([self._mark()], maxlen=16)
        self._pending: tuple[int, Tensor, dict[str, float | Tensor]] | None = None
        self.began = self._taken = job.progress.step
        self.evaluated = 0
        """Number of evaluations of step `began` that an earlier start of the run has already written."""

    def step(self, loss: Tensor) -> None:
        """Record the newest step and its loss, and write them; on an accelerator, write them one step later."""
        self._taken = self.job.progress.step
        self._marks.append(self._mark())
        self.flush()
        self._pending = (self.job.progress.step, loss, self._numbers())
        if not attachments_of(self.job).defers:
            self.flush()

    def _mark(self) -> _Mark:
        return _Mark(time.perf_counter() - self.job.trace.aside, self.job.progress.tokens, self.waited)

    def flush(self) -> None:
        """Write the metrics of the recorded step if they are not written yet."""
        if self._pending is None:
            return
        (step, loss, numbers), self._pending = self._pending, None
        value = float(loss)
        self.recent.append(value)
        values = {"loss": value} | {name: float(number) for name, number in numbers.items()}
        if self.nats_to_bits:
            values["bits_per_byte"] = value * self.nats_to_bits
        self.write(step, values | self._pace(self._marks))

    def unwritten(self) -> Iterator[MetricsRow]:
        """Rows of metrics that were not written to any sink yet, for the checkpoint that is being made now."""
        job, newest = self.job, []
        if self._pending is not None:
            newest.append(self._pending)
        if job.progress.step > self._taken and "loss" in job.numbers:  # a step that is not recorded yet
            newest.append((job.progress.step, torch.as_tensor(job.numbers["loss"]), self._numbers()))
        for step, loss, numbers in newest:
            bits = {"bits_per_byte": loss * self.nats_to_bits} if self.nats_to_bits else {}
            yield MetricsRow(step, {"loss": loss} | numbers | bits | self._pace([*self._marks, self._mark()]))

    def _numbers(self) -> dict[str, float | Tensor]:
        return {"lr": self.job.optimizer.param_groups[0]["lr"]} | self.job.numbers

    def write_evaluation(self, step: int, results: Evaluated) -> None:
        """Write the results of an evaluation, unless an earlier start of the run has already written them."""
        if step == self.began and self.evaluated:
            self.latest |= results.values
            return
        for sink in self.sinks if results.findings else ():
            if (show := getattr(sink, "show", None)) is not None:
                show(step, results.findings)
        if results.values:
            self.write(step, results.values)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write metrics to every sink."""
        self.latest |= values
        for sink in self.sinks:
            sink.write(step, values)

    @property
    def seconds_per_step(self) -> float:
        """Median duration, in seconds, of the last 15 steps or fewer; NaN before the first step."""
        times = [mark.time for mark in self._marks]
        gaps = sorted(after - before for before, after in pairwise(times))
        return gaps[len(gaps) // 2] if gaps else math.nan

    def _pace(self, marks: Sequence[_Mark]) -> dict[str, float]:
        first, last = marks[0], marks[-1]
        seconds = last.time - first.time
        targets = last.tokens - first.tokens
        rate = targets / seconds
        self.unit = "samples" if targets == self.batch * (len(marks) - 1) else "tokens"
        values = {
            f"{self.unit}_per_second": rate,
            "step_seconds": last.time - marks[-2].time,
            "data_wait": (last.waited - first.waited) / seconds,
            "memory_gib": memory_gib(self.job.world.device),
        }
        return values | ({"mfu": rate * self.mfu_per_rate} if self.mfu_per_rate else {})

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for sink in self.sinks:
                stack.callback(sink.close)
            if self.job.progress.step > self._taken:  # an error after the optimizer step: the step's row is missing
                self.step(torch.as_tensor(self.job.numbers["loss"]))
            self.flush()
