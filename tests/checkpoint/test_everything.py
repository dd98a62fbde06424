"""Several faults at once: what the runs may load and lose, and that the judge sees what it is for."""

import os

import pytest

from tests.rigs.checkpointing import everything
from tests.rigs.checkpointing.damage import DAMAGES
from tests.rigs.checkpointing.drawn_plans import POINTS, STEPPED, smallest
from tests.rigs.checkpointing.everything import FaultPlan, Rig, Round
from tests.rigs.checkpointing.strikes import Strike
from tests.rigs.checkpointing.trainee import REPLAYED, FaultyRun, finished, run
from tests.shares import share

DRAWN = share(15, 3)  # benchmarks/checkpoint carries 500 plans out
KILLED = Strike(kind="kill", rank=1, point="after forward", count=7)


def strike(kind, point, count=1, amount=0.0, rank=0):
    return Strike(kind=kind, rank=rank, point=point, count=count, amount=amount)


PLANS = {
    "a stopped rank on a slow link, killed, its host lost and a part of another checkpoint damaged": FaultPlan(
        under="ddp", hosts=2, rounds=(Round(
            strikes=(strike("stop", "after forward", 3, 0.1), strike("slow", "after stage", 2, 2e5), KILLED),
            lost=(1,), damages=(("bit flip", 3),),
        ),),
    ),
    "two starts at once, one of which is cut off, on a full disk": FaultPlan(
        under="ddp", hosts=2, rounds=(Round(
            strikes=(strike("full", "create: private part", amount=4), strike("cut", "after optimizer", 6, rank=1)),
            rival="here",
        ),),
    ),
    "two starts at once, the clock of one of which goes back": FaultPlan(
        under=REPLAYED, rounds=(Round(strikes=(strike("clock", "after forward", 3, 60),), rival="here"),),
    ),
    "another host takes over a run whose clock goes back": FaultPlan(
        under="fsdp", hosts=2, rounds=(Round(
            strikes=(strike("clock", "lock: lock", amount=86400), KILLED), rival="elsewhere", agent=False,
        ),),
    ),
    "differences that are damaged, twice": FaultPlan(
        under=REPLAYED, settings={"differences_on": "disk"}, rounds=(
            Round(strikes=(KILLED,), damages=(("differences", 1), ("differences", 2), ("missing file", 3))),
            Round(strikes=(strike("kill", "after difference", 2),), damages=(("seal", 4),)),
        ),
    ),
}  # fmt: skip


@pytest.mark.slow
def test_a_start_that_tells_of_no_step_for_too_long_hangs(rig, monkeypatch):
    monkeypatch.setattr(everything, "ENDS", 0)
    monkeypatch.setattr(everything, "BUSY", 2.5)  # seconds, less than an exchange may take
    silent = FaultPlan(rounds=(Round(strikes=(strike("slow", "after forward", 1, 1.0),)),))
    assert rig.judge(silent).wrong == ("start 0 hung",)


class Alive:
    """A rank that has not ended."""

    exitcode, pid, killed = None, os.getpid(), False

    def kill(self):
        self.killed = True


def test_a_start_that_tells_of_steps_has_longer(tmp_path):
    rank, told = Alive(), tmp_path / "told-0.jsonl"
    start = everything.Start(FaultyRun(folder=str(tmp_path), start=1), [rank], allowed=0.0)
    for step in range(3):
        with told.open("a") as file:
            file.write(f"[1, 0.0, {step}]\n")
        start.attend(agent=False)
        assert not start.hung and not rank.killed
    with told.open("a") as file:
        file.write("[0, 0.0, 3]\n")  # another start's
    start.attend(agent=False)
    assert start.hung and rank.killed


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    return Rig(tmp_path_factory.mktemp("rig"))


@pytest.mark.slow
@pytest.mark.share(2)
@pytest.mark.parametrize("name", PLANS)
def test_a_run_survives(rig, name):
    outcome = rig.judge(PLANS[name])
    assert outcome.wrong == () and not outcome.refused
    assert len(outcome.struck) == len(PLANS[name].faults) or "starts" in name or "takes over" in name


@pytest.mark.slow
def test_runs_survive_what_is_drawn(rig):
    outcomes = []

    def fails(plan):
        outcomes.append(rig.judge(plan))
        return bool(outcomes[-1].wrong)

    assert smallest(20, DRAWN, fails) is None and not any(each.wrong for each in outcomes)
    assert len({name for each in outcomes for name in each.struck}) >= DRAWN // 2


# -- the judge --------------------------------------------------------------------------------------------------------

PAGES = tuple(("zero page", seed) for seed in range(6))
LOST = Round(strikes=(KILLED,), lost=(0,))
PLANTED = {
    "trust_what_is_read": (Round(strikes=(KILLED,), damages=PAGES), "is not that of the undisturbed run"),
    "acknowledge_early": (LOST, "resumed from step 0, step 4 was safe"),
    "lock_nobody_out": (Round(strikes=(KILLED,), rival="here"), "began while another one trained"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_in_the_code_is_seen(rig, fault):
    each, words = PLANTED[fault]
    plan = FaultPlan(under="ddp", rounds=(each,))
    assert any(words in line for line in rig.judge(plan, f"planted_faults:{fault}").wrong)
    assert rig.judge(plan).wrong == ()


# -- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_plans_are_plain_data():
    drawn = []
    smallest(7, 30, lambda plan: bool(drawn.append(plan)))
    assert len(drawn) >= 20
    for plan in drawn:
        assert FaultPlan.loads(plan.dumps()) == plan and len(plan.faults) > 1
    again = []
    smallest(7, 30, lambda plan: bool(again.append(plan)))
    assert again == drawn
    kinds = {name.removeprefix("damage: ") for plan in drawn for name in plan.faults}
    assert {"kill", "stop", "full", "slow", "cut", "clock", "lost host", "two starts here"} <= kinds
    assert kinds & DAMAGES.keys()


def test_the_smallest_plan_that_fails_is_found():
    plan = smallest(3, 60, lambda plan: "lost host" in plan.faults and "kill" in plan.faults)
    assert plan is not None and sorted(plan.faults) == ["kill", "lost host"]


@pytest.mark.slow
def test_all_points_are_passed(tmp_path):
    missing = {*POINTS, *STEPPED}
    for attempt in range(5):  # a disk that is busy when a checkpoint is due gets it later, or not in this run
        for under in ("ddp", REPLAYED):
            task = FaultyRun(folder=str(tmp_path / f"{under}-{attempt}"), under=under)
            task.place.mkdir()
            assert run(task)
            missing -= finished(task).points.keys()
        if not missing:
            break
    assert not missing
