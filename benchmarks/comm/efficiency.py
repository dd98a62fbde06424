"""Bars of time to a loss: ours at each rate, against every peer, with a cool-down, and a whole run on slow links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import geometric_mean

from benchmarks.comm.contest import Contest
from benchmarks.comm.curves import WINDOW
from benchmarks.comm.figure import Figure
from benchmarks.comm.peers import has_epfml
from benchmarks.comm.setting import RANKS, Setting
from benchmarks.comm.spec import Spec
from benchmarks.harness import Bar, Deadline, Measured
from benchmarks.intervals import of_ratio
from benchmarks.rows import Interval

LEAST = {"100mbit": 0.85, "10mbit": 0.75, "1mbit": 0.45}
WHOLE_RATE, WHOLE_STEPS = "100mbit", 96

Ask = Callable[[], Contest]


def described(contest: Contest) -> str:
    """The sizes that all figures of time to a loss have in common."""
    sizes = contest.sizes

    def of(setting: Setting) -> str:
        parameters = sum(parameter.numel() for parameter in setting.model(0).parameters())
        return f"{parameters / 1e6:.2f} M parameters"

    return (
        f"curves of {of(sizes.learner)}, {sizes.learner.batch} x {sizes.learner.sequence} tokens a step on {RANKS} "
        f"ranks, seconds of {of(sizes.setting)}; target: DDP's loss at step {sizes.steps}, {sizes.most} times the steps"
        f" given; constant rates after a warm-up; held-out curves smoothed over {WINDOW} looks, {sizes.look} steps "
        f"apart; frames pass by the millisecond at 100 Mbit/s; steps of DDP over 10 s and merges over "
        f"{sizes.patience:g} s count as the wire alone; settings and"
        f" rates of learning chosen on seed {sizes.tuning_seed}, {sizes.tuning_steps} steps"
    )


def over_seeds(value: float, worth: Sequence[float], others: Sequence[float] | None = None) -> Interval | None:
    """The interval of an efficiency, or of a ratio of two, that what a step is worth on each seed leaves open.

    Seconds a step are medians over many steps in one run, so they add little to it.
    """
    if len(worth) < 2:
        return None
    ratio = of_ratio(worth, others or [1.0] * len(worth))
    low, high = ratio.interval or (ratio.value, ratio.value)
    return value * low / ratio.value, value * high / ratio.value


def in_short(figure: Figure) -> str:
    """Its name and its efficiency at the last mark."""
    bound = "at most " if max(figure.worth) in figure.bounded else ""
    return f"{figure.method.name} {bound}{figure.value:.3f}"


def last(figure: Figure) -> tuple[float, ...]:
    """What a step is worth at the last mark, by seed."""
    return figure.worth[max(figure.worth)]


def ours(ask: Ask, rate: str, _: Deadline) -> Measured:
    contest = ask()
    best, *others = contest.ours(rate)
    said = "; ".join(f"{in_short(other)}: {other}" for other in others)
    return Measured(
        best.value, f"{best}; of the other families {said}; {described(contest)}", over_seeds(best.value, last(best))
    )


def ahead(ask: Ask, rate: str, _: Deadline) -> Measured:
    """Our better figure over the best peer's, and everybody's loss at the time that DDP needs on a free network."""
    contest = ask()
    own, peers = contest.ours(rate), contest.peers(rate)
    said = "; ".join(map(in_short, peers)) + ("" if has_epfml() else "; epfml's powersgd is not installed")
    at = contest.sizes.steps
    time = at * own[0].free
    losses = ", ".join(
        f"{figure.method.name} {'no run as long' if loss is None else f'{loss:.3f}'}"
        for figure in (*own, *peers)
        for loss in [contest.loss_at(figure, time)]
    )
    note = f"{in_short(own[0])}; peers: {said}; losses after {time:.0f} s, which are {at} steps of DDP"
    ratio = own[0].value / peers[0].value
    interval = over_seeds(ratio, last(own[0]), last(peers[0]))
    return Measured(ratio, f"{note} on a free network: {losses}; best peer: {peers[0]}", interval)


def cooled(ask: Ask, rate: str, _: Deadline) -> Measured:
    """The same ratio, each with a cool-down."""
    contest = ask()
    sides, said, worths = [], [], []
    for figure in (contest.ours(rate)[0], contest.peers(rate)[0]):
        learner = contest.learner(figure.method)
        worth = (1.0,) * len(contest.sizes.seeds) if learner == contest.dense else contest.cooled(learner)
        worths.append(worth)
        sides.append(geometric_mean(worth) * figure.free / figure.seconds)
        said.append(f"{figure.method.name} {sides[-1]:.3f}, worth {', '.join(f'{each:.3f}' for each in worth)}")
    ratio = sides[0] / sides[1]
    return Measured(ratio, "; ".join(said), over_seeds(ratio, *worths))


def whole(ask: Ask, by_peer: bool, _: Deadline) -> Measured:
    """How far the seconds of a run on slow links are off steps times seconds a step."""
    contest = ask()
    figure = (contest.peers(WHOLE_RATE) if by_peer else contest.ours(WHOLE_RATE))[0]
    method = figure.method
    steps = -(-WHOLE_STEPS // method.period) * method.period
    spec = Spec(
        methods=(method,), turn=steps, rate=WHOLE_RATE, seed=contest.sizes.seeds[0], horizon=steps,
        setting=contest.sizes.setting, coalesce=True,
    )  # fmt: skip
    (logs,) = contest.timed(spec)
    real = max(sum(log["seconds"]) for log in logs)
    computed = figure.pace.elapsed(steps)
    note = f"{method.name}, {steps} steps at {WHOLE_RATE}: {real:.1f} s, computed {computed:.1f} s"
    return Measured(abs(real / computed - 1), note)


def rows(ask: Ask, seeds: tuple[int, ...]) -> list[Bar]:
    """All bars of this module; `ask` gives the contest once something is measured."""
    peers = "DDP fp32, DDP bf16 hook, torch's PowerSGD hook, epfml's powersgd, DiLoCo (outer 0.7, 0.9)"
    bars = []
    for rate, least in LEAST.items():
        short = rate.removesuffix("mbit")
        what = f"time-to-loss efficiency at {short} Mbit/s of the best of ours; 1 is DDP on a free network"
        bars += [
            Bar(
                f"comm.efficiency-{short}",
                what,
                ">=",
                least,
                measure=partial(ours, ask, rate),
                seeds=seeds,
                kind="drawn",
            ),
            Bar(
                f"comm.ahead-{short}",
                f"time-to-loss efficiency at {short} Mbit/s over that of the best peer",
                ">=",
                1.0,
                measure=partial(ahead, ask, rate),
                baseline=peers,
                seeds=seeds,
                peers=("torch", "powersgd"),
                kind="drawn",  # runs of timed launches are stored, and the machine was calm then
            ),
            Bar(
                f"comm.cooled-{short}",
                f"the same, both with a cool-down, to the loss at its end, {short} Mbit/s",
                ">=",
                1.0,
                measure=partial(cooled, ask, rate),
                baseline=peers,
                seeds=seeds,
                peers=("torch", "powersgd"),
                kind="drawn",  # runs of timed launches are stored, and the machine was calm then
            ),
        ]
    for name, by_peer in (("ours", False), ("peer", True)):
        what = (
            f"a whole run of {'the best peer' if by_peer else 'ours'} at 100 Mbit/s: seconds off the computed, in parts"
        )
        bars.append(Bar(f"comm.whole-{name}", what, "<=", 0.05, measure=partial(whole, ask, by_peer), seeds=seeds[:1]))
    return bars
