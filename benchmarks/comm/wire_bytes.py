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
from shoestring.comm.codecs.traffic import ring_bytes
from shoestring.comm.exchange.wire import Wire
from shoestring.comm.settings.per_step import Exchange
from shoestring.testing.netlab import netlab, netlab_available

REPEATS = 10
RATE = "100mbit"  # frames of 1,514 bytes, as on a cable; unshaped, up to 64 kB share one header
ALLOWED = 1.07
LARGE = 256 * 1024
RING, GATHER = ring_bytes("all-reduce", 1, RANKS), ring_bytes("all-gather", 1, RANKS)  # sent by a rank for each byte


@dataclass(frozen=True)
class Encoding:
    """One codec: its settings, and the size of its messages, computed without it."""

    settings: Exchange
    message: Callable[[int], float]
    """Bytes of the larger messages for a square matrix, by its number of rows."""
    part: float
    """Bytes that a rank sends for each byte of a message."""
    messages: float
    """Messages of that size in an exchange; a reduce-scatter and its all-gather together count as one."""
    collectives: int


@dataclass(frozen=True)
class MatrixCase:
    """A square matrix by one codec."""

    name: str
    codec: Encoding
    side: int

    @property
    def message(self) -> float:
        return self.codec.message(self.side)

    @property
    def expected(self) -> float:
        """Bytes that a rank must send."""
        return self.message * self.codec.part * self.codec.messages


def sparse(n: int, density: float, value: int) -> float:
    """Bytes of k values and of their places, as k sorted integers below n in Elias and Fano's code."""
    k = max(1, math.floor(n * density))
    low = max(0, math.floor(math.log2(n / k)))
    return k * value + (k * low + k + n / 2**low) / 8


def codecs() -> dict[str, Encoding]:
    scale = 4 / 512  # an fp32 scale for 512 entries
    half = comm.PowerSGD(rank=16, alternate=True)
    topk = comm.TopK(density=0.01, topk_method="exact")
    return {
        "dense": Encoding(comm.Dense(), lambda n: 4.0 * n * n, RING, 1, 1),
        "bf16": Encoding(comm.BF16(), lambda n: 2.0 * n * n, RING, 1, 1),
        "powersgd r16": Encoding(comm.PowerSGD(rank=16), lambda n: 64.0 * n, RING, 2, 2),
        "powersgd r16 alternate": Encoding(half, lambda n: 64.0 * n, RING, 1, 1),
        "8 bits": Encoding(comm.Quantize(bits=8), lambda n: (1 + scale) * n * n, RING, 1, 2),
        "4 bits": Encoding(comm.Quantize(bits=4), lambda n: (0.5 + scale) * n * n, RING, 1, 2),
        "sign": Encoding(comm.Sign(), lambda n: (0.125 + scale) * n * n, RING, 1, 2),
        "terngrad": Encoding(comm.TernGrad(), lambda n: 4 + n * n / 4, GATHER, 1, 2),
        "topk": Encoding(topk, lambda n: sparse(n * n, 0.01, 2), GATHER, 1, 1),
        "randomk": Encoding(comm.RandomK(density=0.05), lambda n: 0.2 * n * n, RING, 1, 1),
    }


def cases(least: int) -> list[MatrixCase]:
    """For every codec the smallest matrix whose message has at least `least` bytes."""
    sides = [128 * count for count in range(1, 65)]
    return [
        MatrixCase(name, codec, next(side for side in sides if codec.message(side) >= least and pays(codec, side)))
        for name, codec in codecs().items()
    ]


def pays(codec: Encoding, side: int) -> bool:
    """Whether PowerSGD compresses such a matrix: where its factors are less than half of it."""
    rank = getattr(codec.settings, "rank", 0)
    return 4 * rank * side < side * side


ALL = tuple(cases(LARGE))


def counted(case: MatrixCase, wire: Wire) -> float:
    """Bytes that this rank's interface sends for one exchange, the mean over some."""
    generator, codec = torch.Generator().manual_seed(wire.rank), case.codec.settings.make_codec()
    sent = 0
    for step in range(REPEATS + 2):
        dist.barrier()
        if step == 2:
            sent = sent_bytes()
        wire.run(codec, {"weight": torch.randn(case.side, case.side, generator=generator)}, step)
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
    with tempfile.TemporaryDirectory() as folder, netlab(hosts=RANKS, rate=RATE) as lab:
        worker = ["-m", "benchmarks.comm.wire_bytes", folder]
        lab.torchrun(worker, env=environment()).check(timeout=600)
        ranks = [json.loads((Path(folder) / f"bytes-{rank}.json").read_text()) for rank in range(RANKS)]
    return [fmean(each) for each in zip(*ranks, strict=True)]


def worst(ask: Ask, _: Deadline) -> Measured | NotRun:
    """The largest ratio."""
    if reason := netlab_available():
        return NotRun(reason)
    measured = ask().store.kept(f"bytes-{RATE}-{REPEATS}-{len(ALL)}", launched)
    found = {
        f"{case.name} {case.message / 1024:.0f} kB": sent / case.expected
        for case, sent in zip(ALL, measured, strict=True)
    }
    return Measured(max(found.values()), ", ".join(f"{name} {value:.3f}" for name, value in found.items()))


def rows(ask: Ask) -> list[Bar]:
    """All bars of this module."""
    large = "interface bytes over encoded bytes, messages of 256 kB and more, the worst codec"
    return [Bar("comm.bytes-large", large, "<=", ALLOWED, measure=partial(worst, ask), kind="exact")]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
