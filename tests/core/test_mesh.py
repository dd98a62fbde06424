"""Named axes of the mesh: groups over any of them, and what counts along those that share the work on one sample."""

from __future__ import annotations

from dataclasses import replace

import mesh_ranks
import pytest

from shoestring import parallel
from shoestring.core.compose import compose
from shoestring.core.errors import ConfigError, ConflictError, WorldError
from shoestring.core.feature import HOSTS, LOCAL
from shoestring.core.job import Job
from shoestring.core.world import World
from shoestring.testing import Pool, jobs


@pytest.fixture(scope="module")
def pool():
    with Pool(4, timeout=100) as pool:
        yield pool


def test_a_world_has_two_axes_until_one_is_split():
    world = World(rank=5, size=8, local_rank=1, local_size=4)
    assert (world.axes, World().axes) == ({HOSTS: 2, LOCAL: 4}, {HOSTS: 1, LOCAL: 1})
    assert (world.ranks_over([HOSTS]), world.ranks_over((LOCAL, HOSTS)), world.ranks_over(["tensor"])) == (2, 8, 1)
    split = world.split(LOCAL, "tensor", 2).split(HOSTS, "pipeline", 2)
    assert split.axes == {HOSTS: 1, "pipeline": 2, LOCAL: 2, "tensor": 2}
    assert [split.index_over([axis]) for axis in split.axes] == [0, 1, 0, 1]
    assert (split.index_over([HOSTS, LOCAL]), split.index_over(["pipeline", "tensor"])) == (0, 3)
    assert split.split(HOSTS, "tensor", 2) is split
    assert (split.hosts, split.local_size, split.host_of(5)) == (2, 4, 1)  # machines stay what they are


def test_a_world_with_other_hosts_shares_no_mesh():
    world = World(size=4, local_size=4)
    split, other = world.split(LOCAL, "tensor", 2), replace(world, local_size=2)
    assert world.split(LOCAL, "tensor", 2) is split is not other.split(LOCAL, "tensor", 2)
    assert other.split(LOCAL, "tensor", 2).axes == {HOSTS: 2, LOCAL: 1, "tensor": 2}


@pytest.mark.parametrize(
    ("axis", "added", "size", "message"),
    [
        (LOCAL, "tensor", 3, "the 4 ranks over local cannot be split into groups of 3 for tensor"),
        ("nowhere", "tensor", 2, "the 1 ranks over nowhere cannot be split into groups of 2"),
        (LOCAL, "tensor", 0, "cannot be split into groups of 0 for tensor"),
        (LOCAL, HOSTS, 4, "the mesh already has an axis hosts of 2 ranks, not 4"),
    ],
)
def test_a_split_that_is_not_possible_is_refused(axis, added, size, message):
    with pytest.raises(WorldError, match=message):
        World(size=8, local_size=4).split(axis, added, size)


def test_a_layout_has_as_many_ranks_as_there_are():
    with pytest.raises(WorldError, match=r"2 \(hosts\) x 3 \(local\) ranks does not fit 4 ranks"):
        World(size=4, layout={HOSTS: 2, LOCAL: 3})


def test_an_axis_has_one_owner_and_needs_one():
    world = World(size=4, local_size=4)
    with pytest.raises(ConfigError, match="2 ranks over local, but nothing keeps their models equal"):
        compose(Job(jobs.tiny(), world=world), [mesh_ranks.Columns()])
    split = world.split(LOCAL, "tensor", 2)
    with pytest.raises(ConfigError, match="2 ranks over tensor, but nothing keeps their models equal"):
        compose(Job(jobs.tiny(), world=split), [parallel.DDP()])
    with pytest.raises(ConflictError, match="both own SHARD over tensor"):
        compose(Job(jobs.tiny(), world=World()), [mesh_ranks.Columns(ranks=1), mesh_ranks.Columns(ranks=1)])


@pytest.mark.slow
def test_groups_over_any_axes_are_the_same_everywhere_and_wait_as_long_as_the_world(pool):
    told = pool.call(mesh_ranks.geometry)
    assert told[0]["axes"] == {"hosts": 2, "local": 1, "tensor": 2} and told[0]["hosts"] == 2
    for rank, each in enumerate(told):
        groups = each["groups"]
        assert groups["tensor"] == groups["localxtensor"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert groups["hosts"] == groups["hostsxlocal"] == [rank % 2, rank % 2 + 2]
        assert groups["hostsxtensor"] == groups["hostsxlocalxtensorxpipeline"] == [0, 1, 2, 3]
        assert groups[""] == groups["local"] == groups["pipeline"] == [rank]


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["ddp", "fsdp", "hybrid"])
def test_two_by_two_ranks_compute_what_one_does_and_samples_count_once(pool, beside):
    alone = mesh_ranks.steps(beside=beside, number=4)
    told = pool.call(mesh_ranks.steps, beside=beside, number=4)
    for each in told:
        assert each["losses"] == pytest.approx(alone["losses"], rel=1e-9)
        assert each["weights"] == pytest.approx(alone["weights"], abs=1e-9)
        assert each["tokens"] == alone["tokens"]
        assert each["held_out"] == pytest.approx(alone["held_out"], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["powersgd", "local steps"])
def test_exchanges_count_data_parallel_ranks_only(pool, beside):
    """What they approximate differs from one rank's, but not between the ranks that share the work."""
    alone = mesh_ranks.steps(beside=beside, number=4)
    told = pool.call(mesh_ranks.steps, beside=beside, number=4)
    for each in told:
        assert each["tokens"] == alone["tokens"]
        assert each["weights"] == told[0]["weights"]
        assert each["held_out"][1] == alone["held_out"][1]


def test_any_rank_may_stop_all_and_any_loss_that_is_not_finite_is_refused_by_all(pool):
    assert {len(each["losses"]) for each in pool.call(mesh_ranks.steps, beside="ddp", number=4, stop_at=2)} == {2}
    assert set(pool.call(mesh_ranks.poisoned)) == {"the loss became nan at step 1"}


@pytest.mark.slow
def test_a_run_reads_the_same_samples_along_a_tensor_axis(pool, tmp_path):
    alone = mesh_ranks.whole_run(folder=str(tmp_path / "alone"))
    told = pool.call(mesh_ranks.whole_run, folder=str(tmp_path / "four"))
    for first, second in ((0, 1), (2, 3)):
        assert told[first]["seen"] == told[second]["seen"]
    both = [sorted(one + other) for one, other in zip(told[0]["seen"], told[2]["seen"], strict=True)]
    assert both == [sorted(ids) for ids in alone["seen"]]
    assert told[0]["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert all(each["ended"] == ["finished", told[0]["losses"][-1]] for each in told)
    assert told[0]["held_out"] == pytest.approx(alone["held_out"], rel=1e-4)


@pytest.mark.slow
def test_a_stop_asked_for_on_one_rank_ends_the_run_on_all_after_the_same_step(pool, tmp_path):
    told = pool.call(mesh_ranks.whole_run, folder=str(tmp_path / "four"), stops=3)
    assert all(each["ended"] == ["stopped", told[0]["losses"][-1]] for each in told)
    assert [len(each["seen"]) for each in told] == [2] * 4
