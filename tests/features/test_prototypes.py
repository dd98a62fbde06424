"""Techniques to come, held to the whole contract beside a codec and the checkpoint cache; core knows none of them."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from prototypes import Adapter, HostState, Offload, ShardedState, Smooth, Sparse, Tight

from shoestring.checkpoint import Tiered
from shoestring.comm import PowerSGD
from shoestring.core.compose import compose
from shoestring.core.feature import Feature
from shoestring.core.job import Job
from shoestring.core.leases import Priority
from shoestring.core.world import World
from shoestring.parallel import FSDP
from shoestring.testing import FeatureSuite, jobs

PARTNERS = (PowerSGD(rank=2), Tiered())


class TestSparse(FeatureSuite):
    feature = Sparse()
    tolerance = 0.1
    partners: ClassVar = PARTNERS


class TestAdapter(FeatureSuite):
    feature = Adapter()
    tolerance = 0.3
    partners: ClassVar = PARTNERS


class TestSmooth(FeatureSuite):
    feature = Smooth()
    tolerance = 0.8
    partners: ClassVar = PARTNERS


@pytest.mark.slow
class TestShardedState(FeatureSuite):
    feature = ShardedState()
    ranks: ClassVar = (2,)
    reshards = False
    partners: ClassVar = (Tiered(),)


class TestOffload(FeatureSuite):
    feature = Offload()
    partners: ClassVar = (*PARTNERS, FSDP())
    clashes: ClassVar = {"parallel.fsdp": "it moves whole tensors"}


class TestOffloadWithoutALease(TestOffload):
    companions: ClassVar = (Tight(),)


def offloaded(*features: Feature) -> Job:
    return compose(Job(jobs.tiny(), optimizer=jobs.sgd(), world=World()), [*features, Offload()])


def momenta(job: Job) -> list[torch.Tensor]:
    return [state["momentum_buffer"] for state in job.optimizer.state.values()]


def test_offloaded_state_is_leased_and_on_the_device_during_the_step_alone():
    with offloaded() as job:
        for number in range(2):
            job.step(jobs.batch(number))
        between = [value.data_ptr() for value in momenta(job)]
        during = []
        job.optimizer.register_step_pre_hook(lambda *_: during.extend(v.data_ptr() for v in momenta(job)))
        job.step(jobs.batch(2))
        assert between == [value.data_ptr() for value in momenta(job)]  # one copy on the host, used again
        assert len(during) == len(between) and not set(during) & set(between)
        nbytes = sum(value.nbytes for value in momenta(job))
        assert job.world.memory.leases == {HostState.LEASE: (nbytes, Priority.CACHE)}
        assert job.trace.facts["bytes_on_host"] == nbytes
    assert not job.world.memory.leases


@pytest.mark.parametrize("refused_after", [0, 2, 4])
def test_a_lease_that_is_refused_during_training_changes_no_bit(refused_after):
    with compose(Job(jobs.tiny(), optimizer=jobs.sgd(), world=World())) as plain:
        expected = [float(plain.step(jobs.batch(number))) for number in range(6)]
    with offloaded() as job:
        losses = []
        for number in range(6):
            if number == refused_after:
                job.world.memory.budget = 0.0
            losses.append(float(job.step(jobs.batch(number))))
            assert (HostState.LEASE in job.world.memory.leases) == (number < refused_after)
        assert losses == expected


def test_what_is_required_is_granted_and_the_offloaded_state_gives_way():
    with offloaded() as job:
        job.world.memory.settle(100_000)
        job.step(jobs.batch(0))
        memory = job.world.memory
        assert HostState.LEASE in memory.leases and memory.take("needed", int(memory.budget))
        assert HostState.LEASE in memory.leases  # it is in use until the next step
        job.step(jobs.batch(1))
        assert list(memory.leases) == ["needed"]
