"""What a run says that it will survive: at its start, once that is planned, and when it becomes another."""

import logging
import random
from itertools import pairwise

import pytest
from torch import nn

from shoestring.checkpoint import Tiered
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.checkpoint.tiers.keeper import Standing
from shoestring.checkpoint.tiers.save_schedule import LEVELS, CheckpointSchedule
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from tests.rigs.checkpointing.known import build_checkpointer, trained


def planned(schedule, steps, seconds=0.0, step=10.0):
    """What is said once so many steps between checkpoints were planned from such measurements."""
    schedule.steps = dict(zip(LEVELS, steps, strict=True))
    schedule._seconds = dict.fromkeys(LEVELS, seconds)
    schedule._steps = {False: [step], True: [step]}
    return schedule.news()


def test_the_start_says_how_each_loss_is_survived():
    assert CheckpointSchedule(Tiered(), 4).survives() == (
        "a killed process: yes, from memory, saved as often as pays; "
        "one host of 4 lost: yes, by copies on others, saved as often as pays; "
        "all of it lost: yes, from disk, saved as often as pays"
    )
    assert (
        CheckpointSchedule(Tiered(memory_every=0, disk_every=0), 1).survives() == "to disk at the end and on a signal"
    )
    fixed = CheckpointSchedule(Tiered(memory_every=2, peers_every=6, disk_every=60, redundancy="parity"), 8)
    assert "one host of 8 lost: yes, by parity over sets of 4, saved every 6 steps" in fixed.survives()
    assert planned(fixed, (2, 6, 60), 1.0) == ""  # that is no news


def test_steps_are_said_once_planned_and_when_they_change_twofold():
    schedule = CheckpointSchedule(Tiered(), 4)
    assert schedule.news() == ""
    assert planned(schedule, (4, 8, 16)) == ""  # nothing was measured
    assert planned(schedule, (3, 12, 600), seconds=9) == (
        "a killed process: yes, from memory, at most 4 steps repeated; "
        "one host of 4 lost: yes, by copies on others, at most 13 steps repeated; "
        "all of it lost: yes, from disk, at most 601 steps repeated"
    )
    assert planned(schedule, (3, 12, 600), 9) == planned(schedule, (5, 23, 301), 9) == ""
    assert "at most 25 steps repeated" in planned(schedule, (3, 24, 600), 9)
    assert "at most 13 steps repeated" in planned(schedule, (3, 12, 600), 9)
    assert "one host of" not in planned(schedule, (3, 0, 600), 9)  # it does not pay: the disk is for that, too
    assert planned(schedule, (3, 0, 600), 9) == ""
    assert "one host of 4 lost: yes" in planned(schedule, (3, 12, 600), 9)


def test_what_changes_by_less_than_a_minute_is_no_news():
    schedule = CheckpointSchedule(Tiered(), 4)
    assert planned(schedule, (1, 12, 600), 0.9, step=0.1)
    assert planned(schedule, (5, 0, 1190), 0.9, step=0.1) == ""
    assert planned(schedule, (5, 0, 1200), 0.9, step=0.1)


def test_a_level_that_does_not_work_promises_nothing():
    schedule = CheckpointSchedule(Tiered(memory_every=2, disk_every=60, differences=8), 1)
    schedule.replays = True
    assert "from memory, at most the newest step repeated" in schedule.survives()
    schedule.lacking, schedule.replays = {"memory": "no room", "peers": "", "disk": ""}, False
    promise = "saved every 60 steps"
    assert (
        schedule.survives() == f"a killed process: yes, from disk, {promise}; all of it lost: yes, from disk, {promise}"
    )
    schedule.lacking = {"memory": "", "peers": "", "disk": "no space"}
    assert schedule.survives().endswith("all of it lost: no, the disk takes no checkpoints")
    schedule.lacking, schedule.outlives = {"memory": "", "peers": "", "disk": ""}, False  # on another rank
    assert schedule.survives().startswith(f"a killed process: yes, from disk, {promise}")


def test_steps_between_checkpoints_are_no_more_than_the_run_has():
    schedule = CheckpointSchedule(Tiered(), 1)
    schedule.total = 100
    assert "from disk, at the end only, because the run is short" in planned(schedule, (3, 0, 600), 9)
    fixed = CheckpointSchedule(Tiered(disk_every=100), 1)
    fixed.total = 100
    assert fixed.survives().endswith("from disk, at the end only, because the run is short")


def test_levels_that_are_dropped_are_not_planned_again():
    schedule = CheckpointSchedule(Tiered(), 4)
    schedule.postpone({"memory", "peers"})
    schedule.drop("memory", "peers")
    schedule.agreed([1.0, 0.0, 0.1, 0.1, 0.1, 60.0], 10)
    assert schedule.steps["memory"] == schedule.steps["peers"] == 0 < schedule.steps["disk"]
    assert schedule.due(1) == set() and not schedule.has_peers
    assert schedule.due(schedule.steps["disk"]) == {"disk"}


@pytest.mark.parametrize("every", ["auto", 2])
def test_a_run_says_what_was_planned(tmp_path, caplog, every):
    caplog.set_level(logging.INFO, "shoestring")
    checkpointer, state, progress = build_checkpointer(tmp_path / "disk", 0, 1, Files())
    checkpointer.schedule = checkpointer.keeper.schedule = CheckpointSchedule(
        Tiered(memory_every=every, disk_every=every), 1
    )
    trained(checkpointer, state, progress, range(1, 80))
    checkpointer.close()
    said = [line for line in caplog.messages if "lost: yes, from disk, at most" in line]
    assert bool(said) == (every == "auto") and all(one != other for one, other in pairwise(said))


@pytest.mark.parametrize("beside", [1.0, 1.1])
def test_a_plan_stands_where_step_times_scatter(beside):
    """Evaluation takes fifty steps' time, and steps beside checkpoints are by chance no slower than others."""
    draw, schedule, now = random.Random(0), CheckpointSchedule(Tiered(), 1), 0.0
    schedule.stalled(0.004)
    schedule.took("memory", 0.02)
    schedule.took("disk", 0.15)
    planned = []
    for step in range(1, 1000):
        busy = step % 7 == 0
        now += 0.2 * draw.uniform(0.7, 1.3) * (beside if busy else 1.0) + (10.0 if step % 200 == 0 else 0.0)
        schedule.stepped(now, step, beside=busy)
        if step > 100 and step % 10 == 0:
            schedule.agreed(schedule.costs(), step)
            planned.append(dict(schedule.steps))
    for name in ("memory", "disk"):
        found = sorted(each[name] for each in planned)
        assert found[0] >= 5 and found[-1] <= 2.5 * found[0], (name, found)


def test_levels_are_planned_once_they_are_measured():
    schedule = CheckpointSchedule(Tiered(memory_every=0), 1)
    schedule.agreed([1.0, 0.0, 0.1, 0.1, 0.0, 0.0], 4)  # of all, a copy in memory alone
    assert schedule.steps == {"memory": 0, "peers": 0, "disk": 16}
    schedule.agreed([1.0, 0.0, 0.1, 0.1, 0.0, 9.0], 16)
    assert schedule.steps["memory"] == 0 and schedule.steps["disk"] > 100
    schedule = CheckpointSchedule(Tiered(), 2)
    schedule.agreed([1.0, 0.0, 0.1, 0.1, 0.0, 0.0], 4)
    assert schedule.steps["memory"] > 16 and (schedule.steps["peers"], schedule.steps["disk"]) == (8, 16)


def test_the_report_promises_what_the_run_could_do(tmp_path):
    """At its end a run knows that its memory had no room; at its start it cannot."""
    checkpointer, *_ = build_checkpointer(tmp_path / "disk", 0, 1, Files())
    job = Job(nn.Linear(2, 2), world=World())
    before = checkpointer.settings.explain(attachments_of(job))
    job.keep("checkpoint", checkpointer.schedule)
    checkpointer.standing.lacks("memory", "no room for 3 MB in `/dev/shm`")
    after = checkpointer.settings.explain(attachments_of(job))
    checkpointer.close()
    assert "a killed process: yes, from memory" in before and "a killed process: yes, from disk" in after


def test_one_rank_of_a_host_says_that_its_memory_has_no_room(caplog):
    for local in range(3):
        Standing(local == 0, local == 0).lacks("memory", f"no room for 3 MB in `/dev/shm/own-{local}`")
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
