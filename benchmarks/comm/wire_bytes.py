"""Bars of what leaves a host's interface against what the papers' encodings need, computed here and not by the codecs.

As a program, `python -m benchmarks.comm.wire_bytes OUT` is one rank under torchrun.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist

from benchmarks.comm.efficiency import Ask
from benchmarks.comm.setting import RANKS
from benchmarks.comm.store import environment
from benchmarks.comm.worker import sent_bytes
from benchmarks.harness import Bar, Deadline, Measured, NotRun
from shoestring import comm
from shoestring.comm.per_step import Exchange
from shoestring.comm.wire import Wire
from shoestring.testing.netlab import netlab, netlab_available

REPEATS = 10
LARGE = 256 * 1024
RING, GATHER = 2 * (RANKS - 1) / RANKS, RANKS - 1  # what a rank sends of a message: all-reduced (or owned), gathered


@dataclass(frozen=True)
class Case:
    """One matrix by one codec: its settings, its shape, and the bytes of a rank's encoded message."""

    name: str
    settings: Exchange
    shape: tuple[int, int]
    encoded: float
    factor: float
    collectives: int

    @property
    def expected(self) -> float:
        """Bytes that a rank must send."""
        return self.encoded * self.factor


def sparse(n: int, density: float, value: int) -> float:
    """Bytes of k values and of their places, as k sorted integers below n in Elias and Fano's code."""
    k = max(1, math.floor(n * density))
    low = max(0, math.floor(math.log2(n / k)))
    return k * value + (k * low + k + n / 2**low) / 8


def low_rank(n: int, m: int) -> float:
    """Bytes of both factors of rank 4; of the matrix, where those would not be half of it."""
    return 16.0 * (n + m) if 8 * (n + m) < n * m else 4.0 * n * m


def codecs() -> dict[str, tuple[Exchange, Callable[[int, int], float], float, int]]:
    """Settings, encoded bytes of an (n, m) matrix, the part of them that a rank sends, and in how many collectives."""
    buckets = 4 / 512  # an fp32 scale for 512 entries
    return {
        "dense": (comm.Dense(), lambda n, m: 4.0 * n * m, RING, 1),
        "bf16": (comm.BF16(), lambda n, m: 2.0 * n * m, RING, 1),
        "powersgd": (comm.PowerSGD(rank=4), low_rank, RING, 2),
        "powersgd alternate": (comm.PowerSGD(rank=4, alternate=True), lambda n, m: low_rank(n, m) / 2, RING, 1),
        "8 bits": (comm.Quantize(bits=8), lambda n, m: (1 + buckets) * n * m, RING, 2),
        "4 bits": (comm.Quantize(bits=4), lambda n, m: (0.5 + buckets) * n * m, RING, 2),
        "sign": (comm.Sign(), lambda n, m: (0.125 + buckets) * n * m, RING, 2),
        "terngrad": (comm.TernGrad(), lambda n, m: 4 + n * m / 4, GATHER, 2),
        "topk": (comm.TopK(density=0.01, how="exact"), lambda n, m: sparse(n * m, 0.01, 2), GATHER, 1),
        "randomk": (comm.RandomK(density=0.05), lambda n, m: 0.2 * n * m, RING, 1),
    }


def cases(least: int, most: int) -> list[Case]:
    """For every codec the smallest matrix of 512 columns with at least `least` bytes encoded, and at most `most`."""
    found = []
    for name, (settings, encoded, factor, collectives) in codecs().items():
        rows = next((rows for rows in (2**power for power in range(4, 17)) if encoded(rows, 512) >= least), 0)
        if rows and encoded(rows, 512) <= most:
            found.append(Case(name, settings, (rows, 512), encoded(rows, 512), factor, collectives))
    return found


ALL = (*cases(2 * 1024, 32 * 1024), *cases(64 * 1024, LARGE - 1), *cases(LARGE, 4 * LARGE))


def counted(case: Case, wire: Wire) -> float:
    """Bytes that this rank's interface sends for one exchange, the mean over some."""
    generator, codec = torch.Generator().manual_seed(wire.rank), case.settings.codec()
    sent = 0
    for step in range(REPEATS + 2):
        dist.barrier()
        if step == 2:
            sent = sent_bytes()
        wire.run(codec, {"weight": torch.randn(case.shape, generator=generator)}, step)
    return (sent_bytes() - sent) / REPEATS


def barriers(count: int) -> float:
    """Bytes of one barrier."""
    dist.barrier()
    sent = sent_bytes()
    for _ in range(count):
        dist.barrier()
    return (sent_bytes() - sent) / count


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with Wire(dist.group.WORLD, torch.device("cpu")) as wire:
        between = barriers(20)
        found = [counted(case, wire) - between for case in ALL]
        (out / f"bytes-{wire.rank}.json").write_text(json.dumps(found))
        dist.barrier()
    dist.destroy_process_group()


# -- bars --------------------------------------------------------------------------------------------------------------


def launched() -> list[float]:
    """Bytes a rank and exchange of all cases."""
    with tempfile.TemporaryDirectory() as folder, netlab(hosts=RANKS) as lab:
        worker = ["-m", "benchmarks.comm.wire_bytes", folder]
        lab.torchrun(worker, env=environment()).check(timeout=600)
        ranks = [json.loads((Path(folder) / f"bytes-{rank}.json").read_text()) for rank in range(RANKS)]
    return [fmean(each) for each in zip(*ranks, strict=True)]


def worst(ask: Ask, large: bool, _: Deadline) -> Measured | NotRun:
    """Of large messages the largest ratio; of small ones the largest difference."""
    if reason := netlab_available():
        return NotRun(reason)
    measured = ask().store.kept(f"bytes-{REPEATS}-{len(ALL)}", launched)
    chosen = [(case, sent) for case, sent in zip(ALL, measured, strict=True) if (case.encoded >= LARGE) == large]
    found = {
        f"{case.name} {case.encoded / 1024:.0f} kB": sent / case.expected
        if large
        else (sent - case.expected) / case.collectives
        for case, sent in chosen
    }
    note = ", ".join(f"{name} {value:.3f}" if large else f"{name} {value:+.0f}" for name, value in found.items())
    return Measured(max(found.values()), note)


def rows(ask: Ask) -> list[Bar]:
    """All bars of this module."""
    large = "interface bytes over encoded bytes, messages of 256 kB and more, the worst codec"
    small = "interface bytes beyond encoded bytes, a collective, messages below 256 kB, the worst codec"
    return [
        Bar("comm.bytes-large", large, "<=", 1.07, measure=partial(worst, ask, True)),
        Bar("comm.bytes-small", small, "<=", 2048, measure=partial(worst, ask, False)),
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
