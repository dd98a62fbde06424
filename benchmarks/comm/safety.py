"""Bars of what must not go wrong: replicas that part, residuals that are lost, ranks that die."""

from __future__ import annotations

import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.comm import ranks
from benchmarks.harness import Bar, Deadline, Measured, NotRun
from benchmarks.restart import CLOSE
from shoestring import comm
from shoestring.core.errors import WorldError
from shoestring.core.feature import Feature
from shoestring.testing.netlab import netlab, netlab_available
from shoestring.testing.pool import Pool
from shoestring.testing.scenarios import encode
from tests.rigs.lab_run import EVERY, PATIENCE, STRIKE, LabRun, difference

STEPS = 200
ROUNDS = 3

PER_STEP: dict[str, Feature] = {
    "dense": comm.Dense(transport=comm.Transport(parts=3, channels=2)),
    "bf16": comm.BF16(),
    "powersgd": comm.PowerSGD(rank=2, transport=comm.Transport(parts=3)),
    "powersgd alternate": comm.PowerSGD(rank=2, alternate=True, wire="bf16"),
    "8 bits": comm.Quantize(bits=8),
    "4 bits": comm.Quantize(bits=4, rounding="nearest", feedback=True),
    "sign": comm.Sign(),
    "terngrad": comm.TernGrad(),
    "topk": comm.TopK(density=0.05),
    "randomk": comm.RandomK(density=0.1),
    "dgc": comm.DGC(density=0.05),
    "hypernetwork": comm.Dense(transport=comm.Transport(select="hypernetwork", kb_per_step=20.0)),
}
LOCAL: dict[str, Feature] = {
    "local SGD": comm.LocalSGD(every=5),
    "diloco 4 bits": comm.DiLoCo(every=5, codec="4bit"),
    "sparseloco": comm.SparseLoCo(every=5),
}


@cache
def outcomes() -> dict[str, dict[str, Any]]:
    """What four ranks saw in 200 steps by each codec, compared after every step, or after every merge."""
    found = {}
    with Pool(4) as pool:
        for name, feature in (PER_STEP | LOCAL).items():
            every = 5 if name in LOCAL else 1
            found[name] = pool.call(ranks.train, feature=encode(feature), steps=STEPS, every=every)[0]
    return found


def replicas(_: Deadline) -> Measured:
    """Steps after which the weights of four ranks were not all equal, over all codecs."""
    found = outcomes()
    fell = ", ".join(f"{name} {each['losses'][0]:.2f} to {each['losses'][-1]:.2f}" for name, each in found.items())
    return Measured(sum(len(each["differing"]) for each in found.values()), f"training losses: {fell}")


def resumed(_: Deadline) -> Measured:
    """What is kept by four ranks and taken over by two: the worst relative difference of the mean residual."""
    worst = {}
    with tempfile.TemporaryDirectory() as folder, Pool(4) as four, Pool(2) as two:
        for name, feature in PER_STEP.items():
            place = Path(folder) / name
            place.mkdir()
            four.call(ranks.leave, feature=encode(feature), steps=12, folder=str(place))
            results = two.call(ranks.join, feature=encode(feature), former=4, folder=str(place))
            if results[0]["has_residual"]:
                worst[name] = max(result["off"] for result in results)
            if not all(result["equal"] for result in results):
                worst[name] = 1.0
    return Measured(max(worst.values()), ", ".join(f"{name} {value:.1e}" for name, value in worst.items()))


def struck(lab_run: LabRun, name: str, *codec: str) -> bool:
    """Kill a rank within a run: whether the other says which, and the restart ends with the losses of a quiet run."""
    with netlab(hosts=2, rate="100mbit", shared=lab_run.shared) as lab:
        job = lab_run.start(lab, name, *codec, "--run.timeout", "6", restarts=3)
        lab_run.reach(job, name, STRIKE)
        lab.kill(1)
        job.check(PATIENCE)
        said = job.output(0)
    resumed = f"resumed from step {STRIKE - STRIKE % EVERY}; " in said
    return resumed and said.count("error: rank 0 on host0 has lost rank 1 on host1: ") == 1


def died(_: Deadline) -> Measured | NotRun:
    """The share of rounds in which a killed rank is named and nothing is lost."""
    if reason := netlab_available():
        return NotRun(reason)
    codec, good, notes = ("--comm.powersgd.rank", "2"), 0, []
    with tempfile.TemporaryDirectory() as folder:
        lab_run = LabRun.prepare(Path(folder))
        expected = lab_run.local("local", *codec)
        for number in range(ROUNDS):
            name = f"round-{number}"
            try:
                named = struck(lab_run, name, *codec)
            except (WorldError, RuntimeError) as error:
                print(f"{name}: {error}", file=sys.stderr)
                named = False
            off = difference(expected, lab_run.losses(name))
            good += named and off <= CLOSE
            notes.append(f"{'named' if named else 'not named'}, losses off by {off:.1g}")
    return Measured(good / ROUNDS, "; ".join(notes))


def rows() -> list[Bar]:
    """All bars of this module."""
    each = f"{len(PER_STEP) + len(LOCAL)} codecs and ways of local steps, {STEPS} steps each on 4 ranks"
    what = f"steps after which the weights of the ranks were not all equal: {each}"
    kept = "mean residual on 2 ranks that continue after 4: worst relative difference over the codecs"
    death = "a rank killed within an exchange: share of rounds in which it is named and the restart loses nothing"
    return [
        Bar("comm.replicas", what, "<=", 0, measure=replicas, kind="exact"),
        Bar("comm.resume-ranks", kept, "<=", 1e-6, measure=resumed, kind="exact"),
        Bar("comm.rank-lost", death, ">=", 1.0, measure=died, kind="exact"),
    ]
