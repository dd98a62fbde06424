"""Bars of time to a loss: ours at each rate, against every peer, and a whole run on slow links."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.comm.contest import LOCAL, PER_STEP, Contest, Family, Figure
from benchmarks.comm.curves import WINDOW, final, steps_to
from benchmarks.comm.peers import has_epfml
from benchmarks.comm.setting import RANKS
from benchmarks.comm.spec import Spec
from benchmarks.harness import Bar, Deadline, Measured

LEAST = {"100mbit": 0.95, "10mbit": 0.90, "1mbit": 0.75}
WHOLE_RATE = "100mbit"

Ask = Callable[[], Contest]


def described(contest: Contest) -> str:
    """The sizes that all figures of time to a loss have in common."""
    sizes, setting = contest.sizes, contest.sizes.setting
    parameters = sum(parameter.numel() for parameter in setting.model(0).parameters())
    return (
        f"{parameters / 1e6:.2f} M parameters, {setting.batch} x {setting.sequence} tokens a step on {RANKS} ranks; "
        f"target: DDP's loss at step {sizes.steps}; constant rates after a warm-up; held-out curves smoothed over "
        f"{WINDOW} looks, {sizes.look} steps apart; settings chosen on seed {sizes.tuning_seed}"
    )


def ours(ask: Ask, family: Family, rate: str, _: Deadline) -> Measured:
    contest = ask()
    figure = contest.best(family, rate)
    return Measured(figure.value, f"{figure}; {described(contest)}")


def ahead(ask: Ask, rate: str, _: Deadline) -> Measured:
    """Our better figure over the best peer's."""
    contest = ask()
    best = max((contest.best(family, rate) for family in (PER_STEP, LOCAL)), key=lambda figure: figure.value)
    peers = contest.peers(rate)
    others = "; ".join(f"{peer.method.name} {peer.value:.3f}" for peer in peers)
    others += "" if has_epfml() else "; epfml's powersgd is not installed, and left out"
    return Measured(best.value / peers[0].value, f"{best.method.name} {best.value:.3f}; peers: {others}")


def whole(ask: Ask, by_peer: bool, _: Deadline) -> Measured:
    """How far a run's seconds to the target are off steps times seconds a step; all of it on slow links."""
    contest = ask()
    if by_peer:
        figure = contest.peers(WHOLE_RATE)[0]
    else:
        figure = max((contest.best(family, WHOLE_RATE) for family in (PER_STEP, LOCAL)), key=lambda each: each.value)
    spec, steps, target = whole_spec(contest, figure)
    (logs,) = contest.store.get(spec)["logs"]
    real = max(sum(log["seconds"]) for log in logs)
    loss = logs[0]["held_out"][-1][1]
    note = (
        f"{figure.method.name}, {steps} steps at {WHOLE_RATE}: {real:.1f} s, computed {steps * figure.seconds:.1f} s; "
        f"held-out loss at the end {loss:.4f}, target {target:.4f}"
    )
    return Measured(abs(real / (steps * figure.seconds) - 1), note)


def whole_spec(contest: Contest, figure: Figure) -> tuple[Spec, int, float]:
    """A run of the first seed as long as it needs to DDP's loss; for local steps up to the merge after that."""
    seed, sizes, method = contest.sizes.seeds[0], contest.sizes, figure.method
    target = final(contest.curve(contest.dense, seed), sizes.steps)
    as_curve = contest.dense if method.kind in ("ddp", "bf16") else method  # taken to need as many steps as DDP
    needed = steps_to(contest.curve(as_curve, seed), target) or sizes.length
    steps = -int(-needed // method.period) * method.period
    unshaped = contest.curve_spec(method, seed)
    spec = Spec(
        methods=(method,), turn=steps, rate=WHOLE_RATE, seed=seed, horizon=unshaped.horizon, setting=sizes.setting
    )
    return spec, steps, target


def rows(ask: Ask, seeds: tuple[int, ...]) -> list[Bar]:
    """All bars of this module; `ask` gives the contest once something is measured."""
    bars = []
    for rate, least in LEAST.items():
        short = rate.removesuffix("mbit")
        for name, family in (("codec", PER_STEP), ("local", LOCAL)):
            what = f"time-to-loss efficiency at {short} Mbit/s of the best {family.name}; 1 is a free network"
            bars.append(
                Bar(
                    f"comm.efficiency-{name}-{short}",
                    what,
                    ">=",
                    least,
                    measure=partial(ours, ask, family, rate),
                    baseline="DDP on a free network",
                    seeds=seeds,
                )
            )
        bars.append(
            Bar(
                f"comm.ahead-{short}",
                f"time-to-loss efficiency at {short} Mbit/s over that of the best peer",
                ">=",
                1.0,
                measure=partial(ahead, ask, rate),
                baseline="DDP fp32, DDP bf16 hook, torch's PowerSGD hook, epfml's powersgd, DiLoCo (outer 0.7, 0.9)",
                seeds=seeds,
                peers=("torch", "powersgd"),
            )
        )
    for name, by_peer in (("ours", False), ("peer", True)):
        what = (
            f"a whole run of {'the best peer' if by_peer else 'ours'} at 100 Mbit/s: seconds off the computed, in parts"
        )
        bars.append(Bar(f"comm.whole-{name}", what, "<=", 0.05, measure=partial(whole, ask, by_peer), seeds=seeds[:1]))
    return bars
