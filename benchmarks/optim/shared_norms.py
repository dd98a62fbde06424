"""Whether ranks should share the norms of LARS out among them: a step with and without, over links and on one host.

Sharing spares each rank the reading of what others read, and costs an exchange of two numbers a tensor. A worker of the
measurement is `python -m benchmarks.optim.shared_norms` under torchrun.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import Bar, Deadline, Measured, NotRun
from benchmarks.optim.references import grouped
from shoestring.models import gpt, images
from shoestring.optim.layerwise import Lars
from shoestring.testing.netlab import netlab, netlab_available

MODELS = {"GPT of 1 M": gpt.tiny, "ResNet-50": images.resnet50}
RANKS = (2, 4)
LINKS = {"one host": None, "1 Gbit/s": "1gbit"}
ROUNDS, PATIENCE = 10, 300


def step_seconds(model: nn.Module) -> tuple[float, float]:
    """Medians of a step without and with shared norms, in alternation; a collective."""
    weights = list(model.parameters())
    for each in weights:
        each.grad = torch.randn_like(each)
    steps = [Lars(grouped(weights), lr=1e-9, sharers=sharers).step for sharers in (None, dist.group.WORLD)]
    times: list[list[float]] = [[], []]
    for number in range(2 * (ROUNDS + 1)):
        which = number % 2
        dist.barrier()
        began = time.perf_counter()
        steps[which]()
        dist.barrier()
        times[which].append(time.perf_counter() - began)
    own, shared = (statistics.median(each[1:]) for each in times)
    return own, shared


def work() -> None:
    """Of one rank; the first prints what it saw."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {name: step_seconds(build()) for name, build in MODELS.items()}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def seen(ranks: int, rate: str | None) -> dict[str, Any]:
    hosts, each = (1, ranks) if rate is None else (ranks, 1)
    with netlab(hosts=hosts, rate=rate) as lab:
        job = lab.torchrun(["-m", "benchmarks.optim.shared_norms"], nproc=each)
        job.check(PATIENCE)
        said = [line for line in job.worker_log(0).read_text().splitlines() if line.startswith("{")]
    return json.loads(said[-1])


def default_against_shared(_: Deadline) -> Measured | NotRun:
    """The most that steps without sharing take over those with it."""
    if reason := netlab_available():
        return NotRun(reason)
    ratios, said = [], []
    for link, rate in LINKS.items():
        for ranks in RANKS:
            for model, (own, shared) in seen(ranks, rate).items():
                ratios.append(own / shared)
                said.append(f"{model}, {ranks} ranks, {link}: {own * 1e3:.1f} ms, shared {shared * 1e3:.1f} ms")
    return Measured(max(ratios), "; ".join(said))


def rows() -> list[Bar]:
    return [
        Bar(
            "optim.shared-norms",
            "time of a step of LARS as it is by default, each rank with all norms, over that with norms shared out; the"
            " most of two models, 2 and 4 ranks, one host and 1 Gbit/s",
            "<=",
            1.05,
            measure=default_against_shared,
        )
    ]


if __name__ == "__main__":
    work()
