"""Offloaded state against torch's own AdamW on the CPU, bit by bit, and what it takes of the host."""

import pytest
import torch
import zero_ranks
from torch.nn.functional import cross_entropy

from shoestring.core.compose import attach, compose
from shoestring.core.job import Job
from shoestring.core.kept import Progress
from shoestring.core.leases import HostMemory
from shoestring.core.world import World
from shoestring.memory import Offload
from shoestring.memory.offload import placement
from shoestring.memory.offload.host_memory import HostRegion
from shoestring.memory.offload.placement import LEASE, OnHost
from shoestring.optim import AdamW
from shoestring.testing import FeatureSuite, jobs


@pytest.mark.slow
class TestOffload(FeatureSuite):
    feature = Offload(bucket_mb=1e-3)
    representative = False


def backward(model, number):
    batch = jobs.batch(number)
    cross_entropy(model(batch["inputs"]).flatten(0, 1).float(), batch["targets"].flatten()).backward()


@pytest.mark.parametrize("micro", [1, 2])
def test_a_loop_of_its_own_has_the_bits_of_master_weights_stepped_by_hand(micro):
    offloaded, by_hand = zero_ranks.wide().bfloat16(), zero_ranks.wide().bfloat16()
    job = attach(offloaded, torch.optim.AdamW(offloaded.parameters(), lr=1e-2, fused=True), Offload(stage=1))
    parameters = [parameter for parameter in by_hand.parameters() if parameter.requires_grad]
    masters = [parameter.detach().float().requires_grad_() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    for step in range(6):
        for index in range(micro):
            for model in (offloaded, by_hand):
                backward(model, step * micro + index)
        job.built_optimizer.step()
        job.built_optimizer.zero_grad()
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
    job.close()
    assert zero_ranks.sums(offloaded) == zero_ranks.sums(by_hand)


def trained(*features):
    model = zero_ranks.wide()
    with compose(Job(model, progress=Progress(total=6), world=World()), [AdamW(lr=1e-2), *features]) as job:
        losses = [float(job.step(jobs.batch(number))) for number in range(6)]
        model.state_dict()
        return losses, zero_ranks.sums(model), job


def test_float32_parameters_are_trained_to_the_bits_of_a_run_without():
    losses, weights, _ = trained()
    with_it, same, job = trained(Offload())
    assert with_it == losses and same == weights
    assert LEASE not in job.world.memory.leases  # given back


def test_the_host_s_memory_is_what_is_needed():
    region = HostRegion(1000, torch.device("cpu"))
    one, two = region.take((3, 5), torch.float32), region.take((7,), torch.bfloat16)
    assert (one.shape, two.shape, region.used) == ((3, 5), (7,), 128)
    assert two.data_ptr() - one.data_ptr() == 64
    model = torch.nn.Linear(300, 400).bfloat16()
    job = attach(model, torch.optim.AdamW(model.parameters()), Offload())
    with job:
        model(torch.ones(1, 300, dtype=torch.bfloat16)).sum().backward()
        job.built_optimizer.step()
        state = sum(v.nbytes for each in job.built_optimizer.state.values() for v in each.values() if v.ndim)
        parameters = 300 * 400 + 400
        taken, _ = job.world.memory.leases[LEASE]
        assert state == 8 * parameters
        assert taken <= 1.001 * (4 + 2 + 8) * parameters


def test_gradients_of_micro_batches_are_added_in_float32_on_the_host():
    offloaded, by_hand = zero_ranks.wide().bfloat16(), zero_ranks.wide().bfloat16()
    job = attach(offloaded, torch.optim.SGD(offloaded.parameters(), lr=0.1), Offload())
    parameters = [parameter for parameter in by_hand.parameters() if parameter.requires_grad]
    masters = [parameter.detach().float().requires_grad_() for parameter in parameters]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    for step in range(2):
        sums = [torch.zeros_like(master) for master in masters]
        for index in range(3):
            for model in (offloaded, by_hand):
                backward(model, step * 3 + index)
            for total, parameter in zip(sums, parameters, strict=True):
                total += parameter.grad
                parameter.grad = None
        job.built_optimizer.step()
        for total, master in zip(sums, masters, strict=True):
            master.grad = total
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
    job.close()
    assert zero_ranks.sums(offloaded) == zero_ranks.sums(by_hand)


# -- faults ------------------------------------------------------------------------------------------------------------


def _smaller_masters(self, job, parts, masters, original=OnHost.__init__):
    original(self, job, parts, False)


FAULTS = {
    "weights that are not written": (
        lambda: test_a_loop_of_its_own_has_the_bits_of_master_weights_stepped_by_hand(1),
        (OnHost, "write", lambda self, parts: lambda: None),
    ),
    "a micro-batch over the one before": (
        lambda: test_gradients_of_micro_batches_are_added_in_float32_on_the_host(),
        (OnHost, "_another", lambda self, name, mean: self.travelling[name]),
    ),
    "masters of 16 bits": (
        lambda: test_a_loop_of_its_own_has_the_bits_of_master_weights_stepped_by_hand(1),
        (OnHost, "__init__", _smaller_masters),
    ),
    "gradients that are kept for the next step": (
        lambda: test_gradients_of_micro_batches_are_added_in_float32_on_the_host(),
        (OnHost, "keep", lambda self, part, mean: self.travelling[part.name]),
    ),
    "a lease that is not given back": (
        lambda: test_float32_parameters_are_trained_to_the_bits_of_a_run_without(),
        (HostMemory, "give", lambda self, name: None),
    ),
    "blocks of a power of two": (
        lambda: test_the_host_s_memory_is_what_is_needed(),
        (placement, "aligned", lambda nbytes: 1 << (nbytes - 1).bit_length()),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_offloading_is_seen(fault, monkeypatch):
    check, (owner, name, planted) = FAULTS[fault]
    monkeypatch.setattr(owner, name, planted)
    with pytest.raises(AssertionError):
        check()
