"""Plans of faults, drawn by hypothesis, which also looks for the smallest one that fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky, NoSuchExample

from tests.rigs.checkpointing.damage import DAMAGES
from tests.rigs.checkpointing.everything import FaultPlan, Round
from tests.rigs.checkpointing.strikes import Kind, Strike
from tests.rigs.checkpointing.survivors import DIFFERENCES
from tests.rigs.checkpointing.trainee import REPLAYED

STEPPED = ("after forward", "after backward", "after finish staging", "after optimizer", "after difference")
"""Points that are passed at every step."""
POINTS = (
    "lock: lock", "create: new history", "rename: new history",
    "reserve: own private", "unlink: own seal", "after stage", "create: new seal", "rename: new seal", "after seal",
    "reserve: held private", "unlink: held seal", "after replicate",
    "folder: folder aside", "create: private part", "write: private part", "sync: private part", "read: private part",
    "sync folder: folder aside", "create: new manifest", "sync: new manifest", "rename: new manifest",
    "read: manifest", "rename: folder aside", "sync folder: saves", "rename: latest", "after persist",
    "rename: folder", "remove: folder aside", "create: new differences", "rename: new differences",
)  # fmt: skip
"""Points of a start and of a save."""
AMOUNTS: Mapping[Kind, Sequence[float]] = {
    "kill": (0.0,),
    "stop": (0.05, 0.5, 2.0, 20.0),  # the last one is longer than the others wait
    "full": (1.0, 4.0, 20.0, 1000.0),
    "slow": (1.0, 2e3, 2e5),  # with the first nothing arrives in time
    "cut": (0.0,),
    "clock": (60.0, 86400.0, 1e9),
}


@st.composite
def strikes(draw: st.DrawFn) -> Strike:
    """One fault at a point: most often a kill."""
    kinds: Sequence[Kind] = ("kill", "kill", "kill", *AMOUNTS)
    kind = draw(st.sampled_from(kinds))
    point = draw(st.one_of(st.sampled_from(STEPPED), st.sampled_from(POINTS)))
    count = draw(st.integers(1, 8 if point in STEPPED else 3))
    amount = draw(st.sampled_from(AMOUNTS[kind]))
    return Strike(kind=kind, rank=draw(st.integers(0, 1)), point=point, count=count, amount=amount)


@st.composite
def rounds(draw: st.DrawFn, hosts: int, *, shared: bool, replayed: bool) -> Round:
    """A start with one to three faults while it lives, and up to two after it."""
    rivals = ("", "", "", "here", "elsewhere") if shared else ("", "", "", "here")
    names = (*DAMAGES, *([DIFFERENCES] * 3 if replayed else []))
    damage = st.tuples(st.sampled_from(names), st.integers(0, 1 << 16))
    lost = st.lists(st.integers(0, hosts - 1), max_size=1)
    return Round(
        strikes=tuple(draw(st.lists(strikes(), min_size=1, max_size=3))),
        rival=draw(st.sampled_from(rivals)),
        agent=draw(st.booleans()),
        lost=tuple(draw(lost)),
        damages=tuple(draw(st.lists(damage, max_size=2))),
    )


@st.composite
def plans(draw: st.DrawFn) -> FaultPlan:
    """A run with at least two faults in one to three starts."""
    under = draw(st.sampled_from(("ddp", "fsdp", REPLAYED)))
    hosts = draw(st.integers(1, 2))
    shared = hosts == 1 or draw(st.booleans())
    given = {
        "redundancy": draw(st.sampled_from(("copy", "parity"))),
        "keep": draw(st.integers(1, 2)),
        "overlap": draw(st.booleans()),
    }
    if under == REPLAYED:
        given["differences_on"] = draw(st.sampled_from(("memory", "peers", "disk")))
    started = draw(st.lists(rounds(hosts, shared=shared, replayed=under == REPLAYED), min_size=1, max_size=3))
    return FaultPlan(under=under, hosts=hosts, shared=shared, settings=given, rounds=tuple(started))


def smallest(seed: int, count: int, fails: Callable[[FaultPlan], bool]) -> FaultPlan | None:
    """Draw so many plans by a seed, up to the first that fails, and look for the smallest that fails like it.

    Args:
        fails: carries a plan out.

    Returns:
        None if none of them fails.
    """
    few = settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    try:
        return find(plans(), lambda plan: len(plan.faults) > 1 and fails(plan), settings=few, random=Random(seed))
    except (NoSuchExample, Flaky):  # of one that fails by chance, the caller knows the plan
        return None
