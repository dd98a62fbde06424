"""Bars of what PowerSGD adds to a step, ours against torch's hook at equal rank, and of what torch's hook dies of."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from statistics import median

from benchmarks.comm.contest import Contest
from benchmarks.comm.curves import WINDOW, final, stretches
from benchmarks.comm.efficiency import Ask
from benchmarks.comm.methods import NONE, SYNC, TORCH, Method, ours
from benchmarks.comm.setting import Setting
from benchmarks.comm.spec import Spec
from benchmarks.harness import Bar, Deadline, Measured
from benchmarks.intervals import of_mean
from shoestring.core.errors import WorldError

RANK = 4
OURS = ours("ours", "PowerSGD", rank=RANK, parts=4, bucket_mb=4)
AFTER = ours("ours, one part after the backward pass", "PowerSGD", rank=RANK, parts=1, bucket_mb=1000)
HALF = ours("ours, alternate", "PowerSGD", rank=RANK, parts=4, bucket_mb=4, alternate=True)
SMALL = ours("ours, alternate, bf16", "PowerSGD", rank=RANK, parts=4, bucket_mb=4, alternate=True, wire="bf16")
THEIRS = replace(AFTER, name="torch's arithmetic in our coordinator", kind="torch in ours")
ABLATION = (NONE, SYNC, TORCH, THEIRS, AFTER, OURS, HALF, SMALL)

BIG = Setting(dim=512, layers=8, hidden=1408, batch=4, held_out=4)  # 107 MB of gradients: several buckets of 25 MB
LAUNCHES = 3
SEEDS, LR = (1, 2, 3), 3e-3


def added(contest: Contest, rate: str) -> dict[str, float]:
    """Seconds that each method adds to a step: the median over rounds, within which all take turns."""
    rounds, turn = (8, 3) if contest.sizes.slow_steps >= 20 else (2, 2)
    spec = Spec(methods=ABLATION, turn=turn, rounds=rounds, warm=4, rate=rate, seed=1, setting=contest.sizes.setting)
    logs = contest.store.get(spec)["logs"]
    means = [stretches(ranks, turn) for ranks in logs]
    return {
        method.name: median(mine - free for mine, free in zip(own, means[0], strict=True))
        for method, own in zip(ABLATION, means, strict=True)
    }


def share(ask: Ask, rate: str, method: Method, other: Method, _: Deadline) -> Measured:
    """What one method adds over what the other adds."""
    seconds_added = added(ask(), rate)
    note = "; ".join(f"{name} {1e3 * seconds:+.0f} ms" for name, seconds in seconds_added.items())
    return Measured(seconds_added[method.name] / max(seconds_added[other.name], 1e-3), f"added a step: {note}")


def loss(ask: Ask, _: Deadline) -> Measured:
    """Held-out loss of ours minus that of torch's hook after equally many steps, at the same learning rate."""
    contest = ask()
    at, look = (100, 10) if contest.sizes.slow_steps >= 20 else (8, 2)

    def loss_of(method: Method, seed: int) -> float:
        length = at + WINDOW * look
        spec = Spec(methods=(method,), turn=length, look=look, seed=seed, horizon=length, setting=contest.sizes.setting)
        return final(contest.store.get(spec)["logs"][0][0]["held_out"], at)

    own = ours("PowerSGD r4", "PowerSGD", rank=RANK, start=2).at(LR)  # the hook starts no earlier
    gaps = [loss_of(own, seed) - loss_of(TORCH.at(LR), seed) for seed in SEEDS]
    return of_mean(gaps, f"after {at} steps at {LR:g}, by seed " + ", ".join(f"{gap:+.4f}" for gap in gaps))


def crashes(ask: Ask, _: Deadline) -> Measured:
    """Launches with several buckets and late completions that do not end."""
    contest = ask()
    own = ours("ours, several buckets", "PowerSGD", rank=1, parts=4, channels=2)
    hook = replace(TORCH.but(rank=1), name="torch's hook, several buckets", bucket_mb=own.bucket_mb)
    failed = sum(not ends(contest, own, trial) for trial in range(LAUNCHES))
    outcome = "ends" if ends(contest, hook, 0) else "does not end"
    return Measured(failed, f"of {LAUNCHES}; such a launch of torch's hook, without delays, {outcome}")


def ends(contest: Contest, method: Method, trial: int) -> bool:
    """Whether a launch of ten steps ends."""
    setting = BIG
    if contest.sizes.slow_steps < 20:
        setting, method = contest.sizes.setting, replace(method, bucket_mb=0.05)
    spec = Spec(
        methods=(method,), turn=8, warm=2, rate="100mbit", delays=0.2, setting=setting, trial=trial, timeout=300
    )
    try:
        return bool(contest.store.get(spec)["logs"])
    except WorldError as error:
        print(f"{method.name}: {error}", file=sys.stderr)
        return False


def rows(ask: Ask) -> list[Bar]:
    """All bars of this module."""
    hook = "torch's PowerSGD hook, one bucket, the same rank"
    bars = [
        Bar(
            "comm.powersgd-added-100",
            f"time that PowerSGD of rank {RANK} adds to a step at 100 Mbit/s over the hook's",
            "<=",
            0.5,
            measure=partial(share, ask, "100mbit", OURS, TORCH),
            baseline=hook,
        )
    ]
    kernels = (
        "time added at 100 Mbit/s, all after the backward pass: our kernels over torch's arithmetic, one coordinator"
    )
    overlap = "time added at 100 Mbit/s: ours in four parts during the backward pass over one part after it"
    pairs = {
        "kernels": (kernels, AFTER, THEIRS),
        "overlap": (overlap, OURS, AFTER),
    }
    bars += [
        Bar(f"comm.ablation-{name}", what, "<=", 1.0, measure=partial(share, ask, "100mbit", method, other))
        for name, (what, method, other) in pairs.items()
    ]
    what = f"held-out loss of PowerSGD of rank {RANK} minus the hook's after equally many steps, nats a token"
    bars.append(
        Bar(
            "comm.powersgd-loss", what, "<=", 0.01, measure=partial(loss, ask), baseline=hook, seeds=SEEDS, kind="drawn"
        )
    )
    what = f"launches of {LAUNCHES} with 25 MB buckets at 100 Mbit/s and random late completions that fail"
    bars.append(Bar("comm.buckets", what, "<=", 0, measure=partial(crashes, ask), baseline=hook, kind="exact"))
    return bars
