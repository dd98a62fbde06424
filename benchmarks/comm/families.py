"""The families of methods that compete: each has three settings, so that ours and the peers are tuned for as long."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.comm.methods import EPFML, TORCH, Method, local, muon, ours


@dataclass(frozen=True)
class Family:
    """Settings of one method that are tried against each other, each at rates of learning of its own."""

    name: str
    bases: tuple[Method, ...]


PEERS = (
    Family("torch's PowerSGD hook", (TORCH, TORCH.but(rank=8), muon(TORCH.but(rank=8)))),
    Family("epfml's powersgd", (EPFML, EPFML.but(iterations=1), EPFML.but(rank=8, iterations=1))),
    Family("DiLoCo", tuple(local("DiLoCo", "DiLoCo", every=every) for every in (25, 10, 50))),
    Family("MuLoCo", tuple(muon(local("DiLoCo", "DiLoCo", every=every)) for every in (25, 10, 50))),
)
PER_STEP = Family(
    "per-step codec",
    (
        ours("Quantize 4 feedback", "Quantize", bits=4, rounding="nearest", feedback=True, parts=12, channels=3),
        ours("PowerSGD r4", "PowerSGD", rank=4),
        ours("PowerSGD r8 alternate bf16", "PowerSGD", rank=8, alternate=True, wire="bf16"),
    ),
)
LOCAL = Family(
    "local steps",
    (
        local("LocalSGD H=8 4bit", "LocalSGD", every=8, codec="4bit", delay=6),
        local("LocalSGD H=32 4bit", "LocalSGD", every=32, codec="4bit", delay=28),
        local("LocalSGD H=4 to 40 4bit", "LocalSGD", every=4, final_every=40, start=20, codec="4bit", horizon=1800),
    ),
)
MUON = Family(
    "local steps of Muon",
    (
        muon(local("LocalSGD H=8 4bit", "LocalSGD", every=8, codec="4bit", delay=6)),
        muon(local("LocalSGD H=32 4bit", "LocalSGD", every=32, codec="4bit", delay=28)),
        muon(local("LocalSGD H=8 rank 4", "LocalSGD", every=8, codec="powersgd(rank=4)", delay=6)),
    ),
)
OURS = (PER_STEP, LOCAL, MUON)
