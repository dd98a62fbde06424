"""The families of methods that compete: each has three settings, so that ours and the peers are tuned for as long."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.comm.methods import EPFML, TORCH, Method, local, muon, ours


@dataclass(frozen=True)
class Family:
    """Settings of one method that are tried against each other, each at rates of learning of its own."""

    name: str
    bases: tuple[Method, ...]


FOUR_BITS = ours("Quantize 4 feedback", "Quantize", bits=4, rounding="nearest", feedback=True, parts=12, channels=3)
PEERS = (
    Family("torch's PowerSGD hook", (TORCH, TORCH.but(rank=8), muon(TORCH.but(rank=8)))),
    Family("epfml's powersgd", (EPFML, EPFML.but(iterations=1), EPFML.but(rank=8, iterations=1))),
    Family("DiLoCo", tuple(local("DiLoCo", "DiLoCo", every=every) for every in (25, 50, 100))),
    Family("MuLoCo", tuple(muon(local("DiLoCo", "DiLoCo", every=every)) for every in (25, 50, 100))),
)
PER_STEP = Family(
    "per-step codec",
    (
        FOUR_BITS,
        muon(FOUR_BITS),
        ours("PowerSGD r8 alternate bf16", "PowerSGD", rank=8, alternate=True, wire="bf16"),
    ),
)
# Streamed so that the wire hides: between four hosts a merge at 4 bits takes 6 steps at 10 Mbit/s and 55 at 1.
EVERY_8 = local("LocalSGD H=8 4bit", "LocalSGD", every=8, fragments=4, delay=2, codec="4bit")
EVERY_64 = local("LocalSGD H=64 4bit", "LocalSGD", every=64, fragments=6, delay=10, codec="4bit")
OUTER_64 = local("DiLoCo H=64 4bit", "DiLoCo", every=64, fragments=6, delay=10, codec="4bit")
LOCAL = Family("local steps", (EVERY_8, EVERY_64, replace(EVERY_8.but(start=20), horizon=1800)))
MUON = Family("local steps of Muon", (muon(EVERY_8), muon(EVERY_64), muon(OUTER_64)))
OURS = (PER_STEP, LOCAL, MUON)
