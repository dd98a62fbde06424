"""The workloads train: two steps of each run, are finite, and are the same from the same seed."""

import math

import pytest

from benchmarks.profile.workloads import WORKLOADS, build


def losses(name, framework, seed):
    workload = build(name, framework, seed)
    return [workload.step(), workload.step()]


@pytest.mark.parametrize("name", WORKLOADS)
def test_two_steps_of_a_workload_in_pytorch_have_a_finite_loss_that_the_seed_decides(name):
    first = losses(name, "torch", 0)
    assert all(map(math.isfinite, first))
    assert first == losses(name, "torch", 0)
    assert first != losses(name, "torch", 1)


@pytest.mark.slow
@pytest.mark.share(6)
@pytest.mark.parametrize("name", WORKLOADS)
def test_two_steps_of_a_workload_in_jax_have_a_finite_loss(name):
    pytest.importorskip("jax")
    assert all(map(math.isfinite, losses(name, "jax", 0)))


def test_an_unknown_workload_is_refused_with_those_there_are():
    with pytest.raises(KeyError, match="no workload `bert`; there are gpt, llama"):
        build("bert")
