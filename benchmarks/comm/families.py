"""The families of methods that compete: each has three settings, so that ours and the peers are tuned for as long."""

from __future__ import annotations

from dataclasses import dataclass

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
# Streamed so that the wire hides behind one step. Of every entry and step 4 bits send 3 bits at H = 2, which is 0.16 s
# at 100 Mbit/s; signs 0.38 at H = 4, 0.2 s at 10 Mbit/s; a 128th of the entries 0.06 at H = 4, 0.3 s at 1 Mbit/s.
STREAMED = (
    local("LocalSGD H=2 4 bits", "LocalSGD", every=2, fragments=2, delay=1, codec="4bit", second_moment="global"),
    local("LocalSGD H=4 sign", "LocalSGD", every=4, fragments=4, delay=1, codec="sign", second_moment="global"),
    local("SparseLoCo H=4", "SparseLoCo", every=4, fragments=4, delay=1, k=32, second_moment="global"),
)
SIGNS = STREAMED[1]
LOCAL = Family("local steps", STREAMED)
TWO_STEPS_LATE = {"fragments": 4, "delay": 2}
MUON = Family(  # its steps divide by no second moment
    "local steps of Muon",
    (
        muon(local("LocalSGD H=4 sign", "LocalSGD", every=4, **TWO_STEPS_LATE, codec="sign", second_moment="own")),
        muon(local("SparseLoCo H=4", "SparseLoCo", every=4, **TWO_STEPS_LATE, k=128)),
        muon(local("SparseLoCo H=8", "SparseLoCo", every=8, **TWO_STEPS_LATE, k=64)),
    ),
)
OURS = (PER_STEP, LOCAL, MUON)
