"""Differential checkpoints: steps replayed from what was exchanged are those that were trained, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import differing_ranks
import pytest
from torch import nn

from shoestring import comm, optim, parallel
from shoestring.checkpoint import Tiered, attach
from shoestring.checkpoint.recovery.explain import explain
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature
from shoestring.core.job import Job, attachments_of
from shoestring.core.trace import Trace
from shoestring.core.world import World
from shoestring.testing import jobs
from shoestring.testing.pool import Pool
from shoestring.testing.scenarios import encode


@pytest.fixture(scope="module")
def pool():
    with Pool(2) as ranks:
        yield ranks


AROUND = [optim.Clip(max_norm=0.3), optim.Schedule(warmup=3), optim.EMA(decay=0.9)]
CASES = {
    "four bits": [parallel.DDP(), comm.Quantize(bits=4)],
    "before the step": [comm.Quantize(bits=4, transport=comm.Transport(parts=3, channels=2)), *AROUND],
    "dense": [parallel.DDP(find_unused=True), comm.Dense(), *AROUND],
    "bf16": [comm.BF16()],
    "random entries": [parallel.DDP(), comm.RandomK(density=0.2, feedback=False)],
    "Muon": [parallel.DDP(), comm.Quantize(bits=8), optim.Muon()],
    "LAMB": [parallel.DDP(), comm.Quantize(bits=8), optim.LAMB()],
    "schedule-free": [parallel.DDP(), comm.Quantize(bits=8), optim.ScheduleFree()],
    "SGD, LAWA": [parallel.DDP(), comm.Quantize(bits=8), optim.SGD(momentum=0.9), optim.LAWA(every=2)],
}
SOME = (pytest.mark.slow, pytest.mark.share(2))
QUICK = {("four bits", True)}


@pytest.mark.parametrize(
    ("name", "statistics"),
    [
        pytest.param(name, statistics, marks=() if (name, statistics) in QUICK else SOME)
        for name in CASES
        for statistics in (False, True)
    ],
)
def test_a_run_that_was_killed_repeats_no_step(pool, tmp_path, name, statistics):
    """Also when it is killed a second time, before there is another checkpoint."""
    given = {"features": [encode(feature) for feature in CASES[name]], "statistics": statistics}

    def trained(place, steps, **more):
        return pool.call(differing_ranks.train, folder=str(tmp_path / place), steps=steps, **given, **more)

    through, struck = trained("through", 20), trained("struck", 15)
    again = trained("struck", 16, resume=True, memory_every=8)
    rest = trained("struck", 20, resume=True)
    for whole, before, between, after in zip(through, struck, again, rest, strict=True):
        assert between["began"] == 15 and between["first"] == before["last"]
        assert after["began"] == 16 and after["first"] == between["last"]
        assert after["losses"] == whole["losses"][16:] and after["last"] == whole["last"]


# -- what is damaged, or is not what it was ---------------------------------------------------------------------------

FOUR_BITS = [encode(parallel.DDP()), encode(comm.Quantize(bits=4))]


class Struck:
    """A run of two ranks that was killed after step 15; its newest checkpoint is of step 12."""

    def __init__(self, pool, folder, **settings):
        self.pool, self.folder = pool, str(folder)
        self.trained(15, **settings)

    def trained(self, steps, **more):
        given = {"folder": self.folder, "features": FOUR_BITS} | more
        return self.pool.call(differing_ranks.train, steps=steps, **given)

    def resumed(self, **more):
        """(step, state of each rank) of a start that trains nothing."""
        ranks = self.trained(0, resume=True, **more)
        (began,) = {rank["began"] for rank in ranks}
        return began, [rank["first"] for rank in ranks]


@pytest.fixture
def struck(pool, tmp_path):
    return Struck(pool, tmp_path / "run")


@pytest.fixture(scope="module")
def states(pool, tmp_path_factory):
    """By step, the state of each rank of a run that was not killed."""
    folder = str(tmp_path_factory.mktemp("through"))
    ranks = pool.call(differing_ranks.train, folder=folder, features=FOUR_BITS, steps=15, told=12)
    return {step: [rank["each"][str(step)] for rank in ranks] for step in (12, 13, 14, 15)}


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_damaged_on_one_rank_ends_the_replay_on_all(struck, states, rank):
    """In the averages of step 15, then in the header of step 14, then in the mark of step 13."""
    path = differing_ranks.ring_of(struck.folder, rank)
    cells = differing_ranks.cells_of(path)

    def explained():
        explanation = explain(Path(struck.folder, "checkpoints"), path.parents[1])
        return explanation.plan.step, explanation.replayed, [line for line in explanation.lines() if "replayed" in line]

    step, replayed, lines = explained()
    assert (step, replayed) == (12, 15) and lines[0].startswith("Steps 13 to 15 would be replayed after it")
    assert struck.resumed() == (15, states[15])
    for step, inside in ((15, 20_000), (14, 40), (13, 0)):
        differing_ranks.flip(path, cells[step] + inside)
        assert explained()[:2] == (12, step - 1)
        assert struck.resumed() == (step - 1, states[step - 1])


@pytest.mark.slow
def test_a_step_that_comes_out_differently_on_one_rank_is_trained_again(struck, states):
    """One byte of an average was changed together with its checksum: the weights after the step tell."""
    assert struck.resumed(fault="other average") == (13, states[13])


@pytest.mark.slow
def test_a_step_whose_average_was_changed_with_its_checksum_is_trained_again(struck, states):
    """Nothing but the entries of the weights that were noted after the step can tell."""
    ring = differing_ranks.ring_of(struck.folder, 1)
    differing_ranks.change_average(ring, differing_ranks.cells_of(ring)[14])
    assert struck.resumed() == (13, states[13])


@pytest.mark.slow
@pytest.mark.parametrize(
    "features",
    [[comm.Quantize(bits=8)], [parallel.DDP(), comm.Dense(), optim.Muon()], [parallel.DDP(), comm.BF16(), optim.SGD()]],
    ids=["before the step", "Muon", "SGD"],
)
def test_a_changed_average_is_told_by_the_weights_in_every_mode(features, pool, tmp_path):
    given = {"features": [encode(feature) for feature in features]}
    struck = Struck(pool, tmp_path / "run", **given)
    ring = differing_ranks.ring_of(struck.folder, 0)
    differing_ranks.change_average(ring, differing_ranks.cells_of(ring)[15])
    assert struck.resumed(**given)[0] == 14


@pytest.mark.slow
def test_a_replay_that_forgets_a_state_is_noticed(struck, states):
    began, ranks = struck.resumed(fault="forgotten states")
    assert began == 15 and ranks != states[15]
    assert {
        name for rank, whole in zip(ranks, states[15], strict=True) for name in rank if rank[name] != whole[name]
    } >= {"progress", "random", "loader"}


@pytest.mark.slow
def test_steps_under_another_learning_rate_are_not_replayed(struck, states):
    """Rates are of the run file, not of the checkpoint, and so what is replayed would be another run."""
    assert struck.resumed(lr=2e-2) == (12, states[12])
    assert struck.resumed() == (12, states[12])  # for the run was continued from there


@pytest.mark.slow
@pytest.mark.parametrize(
    "other", [comm.Quantize(bits=8), comm.Quantize(bits=4, transport=comm.Transport(parts=3)), comm.Dense()]
)
def test_what_another_codec_exchanged_is_not_replayed(struck, other):
    assert struck.resumed(features=[FOUR_BITS[0], encode(other)])[0] == 12


@pytest.mark.slow
def test_whoever_goes_back_gets_that_step(struck, states):
    """A checkpoint that is named is resumed as it is; and what came after it is no part of the run any more."""
    struck.trained(15, folder=struck.folder, resume=True, disk_every=4)
    struck.trained(17, resume=True, disk_every=4)
    (newest,) = differing_ranks.on_disk(struck.folder, 16)
    ranks = struck.trained(0, resume=newest)
    assert {rank["began"] for rank in ranks} == {16}
    assert struck.resumed()[0] == 16


@pytest.mark.slow
def test_a_ring_of_another_number_of_cells_is_read_and_then_replaced(struck, states):
    assert struck.resumed(differences=32) == (15, states[15])
    assert struck.trained(19, resume=True, differences=32)[0]["began"] == 15
    assert struck.resumed(differences=8)[0] == 19


# -- from disk --------------------------------------------------------------------------------------------------------

ON_DISK = {"differences": 4, "differences_on": "disk", "memory_every": 2, "disk_every": 6, "keep": 1}


@pytest.fixture
def lost(pool, tmp_path):
    """A run whose host is lost after step 15: a checkpoint of step 12 is on disk, and differences up to step 14."""
    for number in range(5):  # a disk that is busy when a checkpoint is due gets it, or the differences, later
        struck = Struck(pool, tmp_path / f"run-{number}", **ON_DISK)
        differences = list(Path(struck.folder, "checkpoints").glob("steps-00000013-00000014-*"))
        on_disk = [step for step in range(6, 16) if differing_ranks.on_disk(struck.folder, step)]
        if on_disk == [12] and len(differences) == 2:
            break
    shutil.rmtree(Path(struck.folder, "memory"))
    return struck


@pytest.mark.slow
def test_a_run_whose_host_was_lost_replays_from_disk(lost, states):
    files = sorted(Path(lost.folder, "checkpoints").glob("steps-00000013-00000014-*"))
    assert len(files) == 2
    by_rank = {path.name.rpartition("-")[2][0]: path.stat().st_size for path in files}
    assert by_rank["1"] < by_rank["0"]  # the second rank writes its own states only
    assert lost.resumed(**ON_DISK) == (14, states[14])
    ranks = lost.trained(15, resume=True, **ON_DISK)
    assert [rank["last"] for rank in ranks] == states[15]


@pytest.mark.slow
def test_files_before_the_checkpoints_that_are_kept_are_deleted(lost):
    lost.trained(31, resume=True, **ON_DISK)
    left = sorted(int(path.name[15:23]) for path in Path(lost.folder, "checkpoints").glob("steps-*"))
    assert left[0] > 14 and left[-1] == 30 and len(left) < 16


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_damaged_on_disk_ends_the_replay_on_all_ranks(lost, states, rank):
    (path,) = Path(lost.folder, "checkpoints").glob(f"steps-00000013-00000014-*-{rank}.differences")
    differing_ranks.flip(path, path.stat().st_size - 200)
    assert lost.resumed(**ON_DISK) == (13, states[13])
    differing_ranks.flip(path, 100)
    assert lost.resumed(**ON_DISK) == (12, states[12])


@pytest.mark.slow
@pytest.mark.parametrize(("place", "step"), [("disk", 15), ("memory", 14)])
def test_a_rank_whose_memory_was_lost_reads_from_disk_beside_one_that_has_it(pool, tmp_path, states, place, step):
    settings = {"differences": 6, "differences_on": place, "memory_every": 2, "disk_every": 6}
    struck = Struck(pool, tmp_path / "run", **settings)
    differing_ranks.ring_of(struck.folder, 1).unlink()
    began, ranks = struck.resumed(**settings)
    assert began == step and ranks == states[step]


# -- on another host --------------------------------------------------------------------------------------------------

TWO_HOSTS = {"hosts": 2, "differences_on": "peers", "peers_every": 4, "fault": "all arrived"}


def lose(folder: str, host: int) -> None:
    (memory,) = Path(folder, "memory").glob(f"*/*/host-{host}")
    shutil.rmtree(memory)


@pytest.mark.parametrize("host", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_lost_host_costs_no_step(pool, tmp_path, states, host):
    """Also when another one is lost before a step is trained."""
    struck = Struck(pool, tmp_path / "run", **TWO_HOSTS)
    lose(struck.folder, host)
    assert struck.resumed(**TWO_HOSTS) == (15, states[15])
    ranks = struck.trained(17, resume=True, **TWO_HOSTS)
    assert ranks[0]["began"] == 15
    lose(struck.folder, 1 - host)
    assert struck.resumed(**TWO_HOSTS) == (17, [rank["last"] for rank in ranks])


@pytest.mark.slow
def test_a_state_that_outgrows_its_messages_is_kept_on_its_own_host_only(pool, tmp_path, states):
    grown = TWO_HOSTS | {"grows": 14}
    struck = Struck(pool, tmp_path / "run", **grown)
    assert struck.resumed(**grown) == (15, states[15])
    lose(struck.folder, 1)
    assert struck.resumed(**grown) == (13, states[13])


@pytest.mark.slow
def test_what_arrived_damaged_on_another_host_ends_the_replay(pool, tmp_path, states):
    struck = Struck(pool, tmp_path / "run", **TWO_HOSTS)
    lose(struck.folder, 1)
    (path,) = Path(struck.folder, "memory").glob("*/*/host-0/steps-partner-0.ring")
    differing_ranks.flip(path, differing_ranks.cells_of(path)[14] + 100)
    assert struck.resumed(**TWO_HOSTS) == (13, states[13])


@pytest.mark.slow
def test_nothing_is_left_on_disk_of_a_run_that_ended(pool, tmp_path):
    features = [encode(parallel.DDP()), encode(comm.Quantize(bits=4))]
    folder = tmp_path / "run"
    pool.call(differing_ranks.train, folder=str(folder), features=features, steps=15, total=15, **ON_DISK)
    assert not [*folder.glob("checkpoints/steps-*")] and not [*folder.rglob("*.ring")]


# -- what cannot be replayed ------------------------------------------------------------------------------------------


def refused(*features: Feature, **settings) -> ConfigError:
    """How a job of two ranks is refused, before anything is taken."""
    given = {"differences": 8, "memory_every": 4} | settings
    job = Job(jobs.tiny(), world=World(rank=0, size=2))
    attachments_of(job).features = (*features, Tiered(**given))
    with pytest.raises(ConfigError) as caught:
        attachments_of(job).features[-1].check(attachments_of(job))
    return caught.value


@pytest.mark.parametrize(
    ("features", "named"),
    [
        ([parallel.DDP()], "no codec"),
        ([parallel.DDP(), comm.PowerSGD()], "comm.powersgd"),
        ([parallel.DDP(), comm.Quantize(bits=4, feedback=True)], "comm.quantize"),
        ([parallel.DDP(), comm.BF16(transport=comm.Transport(select="knapsack", kb_per_step=3))], "comm.bf16"),
        ([parallel.DDP(), comm.TernGrad()], "comm.terngrad"),
        ([comm.LocalSGD()], "comm.localsgd"),
        ([parallel.FSDP(), comm.Quantize()], "parallel.fsdp"),
        ([parallel.DDP(), comm.Quantize(), optim.AdaScale()], "optim.adascale"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name(features, named):
    error = refused(*features)
    assert "checkpoint.tiered.differences" in str(error) and named in str(error)


@pytest.mark.parametrize(
    "settings",
    [
        {"differences": 1},
        {"differences": -4},
        {"differences": 7},
        {"memory_every": 0},
        {"memory_every": 5},
        {"differences_on": "disk", "disk_every": 0},
    ],
)
def test_settings_that_leave_a_gap_are_refused(settings):
    refused(parallel.DDP(), comm.Quantize(), **settings)


# -- what is told -----------------------------------------------------------------------------------------------------


def test_a_run_says_that_at_most_one_step_is_repeated_and_what_that_costs(pool, tmp_path):
    (first, _) = pool.call(differing_ranks.train, folder=str(tmp_path), features=FOUR_BITS, steps=9)
    trace = Trace(steps=9, facts=first["facts"])
    told = Tiered().reduction(trace)
    assert told is not None and (told.used, told.without) == (0, 9) and "B of differences" in told.cost
    job = Job(jobs.tiny(), world=World(rank=0, size=2))
    assert "at most the newest step repeated: 8 are replayed" in Tiered(differences=8).explain(attachments_of(job))
    alone = Tiered(differences=8).explain(attachments_of(Job(jobs.tiny(), world=World())))
    assert "newest step" not in alone and alone.endswith("differences off: one rank")


def test_a_program_whose_steps_are_not_known_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="replays steps of a job"):
        attach({"model": model}, settings=Tiered(differences=8))
