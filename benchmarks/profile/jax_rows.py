"""Bars of the JAX collector: lines, places of calls, memory and cost, on the ten workloads in JAX."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.profile.workloads import WORKLOADS, build
from benchmarks.rows import Bar, Measured
from benchmarks.timing import paired
from shoestring.profile import profiled
from shoestring.profile.jax_collector import JaxCollector, Key
from shoestring.profile.lines import package_of
from shoestring.profile.tree import CallTree, NodeKind

_SECONDS = 3.0
"""That a workload runs for under the collector."""

_PRICED = {"gpt": 40, "dlrm": 150, "gnn": 80}
"""Workloads whose cost is measured, and their steps: large, of many small operations, and of few."""


def _collected(step: Callable[[], object], seconds: float) -> JaxCollector:
    """What is collected while a program runs for some seconds, from the first window on."""
    collector = JaxCollector()
    collector.start()
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or collector.windows < 1:
        step()
    collector.finish()
    if collector.failure:
        raise RuntimeError(collector.failure)
    return collector


def _in_user_code(key: Key) -> bool:
    """Whether a line of the program itself, within the jitted function, is known for an operation."""
    _, operation, _ = key
    frames = operation.frames[operation.inside :] if operation.inside >= 0 else ()
    return any(not package_of(name.partition("\t")[0]) for name, _ in frames)


def user_lines(_: object = None) -> Measured:
    """The least share, over the workloads, of the time of compiled operations that has a user line."""
    shares = {}
    for name in WORKLOADS:
        workload = build(name, "jax")
        workload.step()
        totals = _collected(workload.step, _SECONDS).totals
        known = sum(numbers.own for key, numbers in totals.items() if _in_user_code(key))
        shares[name] = known / sum(numbers.own for numbers in totals.values())
    return Measured(min(shares.values()), ", ".join(f"{name} {share:.1%}" for name, share in shares.items()))


def two_call_sites(_: object = None) -> Measured:
    """How far the calls of one jitted function by two callers, three and one a round, are from 3 to 1, as a part."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def twice(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x) @ x

    def once(x: jax.Array) -> jax.Array:
        return twice(x)

    def thrice(x: jax.Array) -> jax.Array:
        return twice(twice(twice(x)))

    def work() -> None:
        x = jnp.ones((256, 256)) / 256
        for _ in range(20):
            x = thrice(once(x))
        x.block_until_ready()

    work()
    with profiled() as result:
        began = time.perf_counter()
        while time.perf_counter() - began < _SECONDS:
            work()
    ratio = _calls_of(result.profile.tree, "thrice") / _calls_of(result.profile.tree, "once")
    return Measured(abs(ratio / 3 - 1), f"{ratio:.2f} to 1")


def _calls_of(tree: CallTree, caller: str) -> int:
    """Calls of matrix products below a function."""
    above = [bool(name.endswith(f".{caller}")) for name in tree.names]
    within, total = [False] * len(tree), 0
    for node in range(1, len(tree)):
        within[node] = within[tree.parent[node]] or (tree.kind[node] == NodeKind.PYTHON and above[tree.name[node]])
        if within[node] and tree.names[tree.name[node]] == "dot_general":
            total += int(tree.count[node])
    return total


def growth(_: object = None) -> Measured:
    """Rows that a run of 12 seconds keeps beyond those of one of 3 seconds."""
    workload = build("gpt", "jax")
    workload.step()
    rows = []
    for seconds in (_SECONDS, 4 * _SECONDS):
        collector = _collected(workload.step, seconds)
        rows.append(len(collector.totals) + len(collector.sites.paths) + len(collector.programs.known))
    return Measured(rows[1] - rows[0], f"{rows[0]} rows, and {rows[1]} in four times the time")


def _steps(workload: Any, steps: int) -> None:
    for _ in range(steps):
        workload.step()


def _with_profile(workload: Any, steps: int) -> None:
    collector = JaxCollector()
    collector.start()
    _steps(workload, steps)
    collector.finish()


def _with_jax_profiler(workload: Any, steps: int) -> None:
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        _steps(workload, steps)
        jax.profiler.stop_trace()


def cost(baseline: Callable[[Any, int], None]) -> Measured:
    """CPU time with the collector over that of a baseline: the geometric mean over three workloads."""
    ratios, notes = [], []
    for name, steps in _PRICED.items():
        workload = build(name, "jax")
        ratio = paired(
            partial(_with_profile, workload, steps),
            partial(baseline, workload, steps),
            warmup=1,
            rounds=8,
            order="AB",
            clock=time.process_time,
        )
        low, high = ratio.interval
        ratios.append(ratio.median)
        notes.append(f"{name} {ratio.median:.3f} ({low:.3f} to {high:.3f})")
    return Measured(statistics.geometric_mean(ratios), ", ".join(notes))


def rows() -> list[Bar]:
    """The bars."""
    peers = ("jax", "flax", "optax")
    return [
        Bar(
            "profile.jax-lines",
            "least share, over ten workloads, of the time of compiled operations that has a user line",
            ">=",
            0.95,
            user_lines,
            peers=peers,
        ),
        Bar(
            "profile.jax-call-sites",
            "deviation of the calls of one jitted function by two callers from 3 to 1, as a part",
            "<=",
            0.15,
            two_call_sites,
            peers=peers,
        ),
        Bar(
            "profile.jax-growth",
            "rows kept by a run of 12 s beyond those of one of 3 s",
            "<=",
            10,
            growth,
            peers=peers,
            kind="exact",
        ),
        Bar(
            "profile.jax-cost",
            "CPU time under the collector over that under jax.profiler, start to stop, geometric mean of 3 workloads",
            "<=",
            1.0,
            lambda _: cost(_with_jax_profiler),
            baseline="jax.profiler without its Python tracer, for the whole of the run",
            peers=peers,
        ),
        Bar(
            "profile.jax-added",
            "CPU time under the collector over that without, geometric mean of 3 workloads",
            "<=",
            1.1,
            lambda _: cost(_steps),
            peers=peers,
        ),
    ]
