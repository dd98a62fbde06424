"""Offloaded state against torch's own AdamW on the CPU, bit by bit, and what it takes of the host."""

import pytest
import torch
import zero_ranks
from torch.nn.functional import cross_entropy

from shoestring.core.compose import attach, compose
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Phase
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.core.leases import HostMemory, Priority
from shoestring.core.task import cross_entropy as task_loss
from shoestring.core.world import World
from shoestring.memory import Offload
from shoestring.memory.broker.tenant import BrokeredMemory, Terms
from shoestring.memory.offload import late as late_module
from shoestring.memory.offload import placement
from shoestring.memory.offload.host_memory import HostRegion
from shoestring.memory.offload.late import LateSteps, smallest
from shoestring.memory.offload.placement import LEASE, OnHost
from shoestring.memory.predicted import predict
from shoestring.models.gpt import tiny
from shoestring.optim import LAMB, SGD, AdamW
from shoestring.precision import Autocast
from shoestring.testing import FeatureSuite, jobs


@pytest.mark.slow
class TestOffload(FeatureSuite):
    feature = Offload(bucket_mb=1e-3)
    representative = False


@pytest.mark.slow
class TestLateSteps(FeatureSuite):
    feature = Offload(bucket_mb=1e-3, late=0.7)
    representative = False
    tolerance = 0.1  # most weights are a step behind, which 60 steps at a high rate show: 0.04


def backward(model, number):
    batch = jobs.batch(number)
    cross_entropy(model(batch["inputs"]).flatten(0, 1).float(), batch["targets"].flatten()).backward()


def test_what_is_less_urgent_waits_from_the_first_gradient_to_the_end_of_a_step(tmp_path):
    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)  # noqa: E731
    memory, seen = BrokeredMemory(terms=Terms(tmp_path / "broker")), []
    memory.join(watch=False)
    try:
        turns, model = memory._ledger.turns, zero_ranks.wide()
        with compose(Job(model, optimizer=optimizer, world=World(memory=memory)), [Offload()]) as job:
            for phase in (Phase.FORWARD, Phase.CLIP, Phase.OUTER):
                attachments_of(job).at(phase, lambda: seen.append(turns.yields(Priority.CHECKPOINT)))
            for step in range(2):
                job.step(jobs.batch(step))
                assert not turns.yields(Priority.CHECKPOINT)
            memory.turn(Priority.REQUIRED)  # that is never entered
            backward(model, 3)
        assert seen == 2 * [False, True, True]
        assert not turns.yields(Priority.CHECKPOINT)  # though the job ended within a step
    finally:
        memory.leave()


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
        job.optimizer.step()
        job.optimizer.zero_grad()
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
        job.optimizer.step()
        state = sum(v.nbytes for each in job.optimizer.state.values() for v in each.values() if v.ndim)
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
        job.optimizer.step()
        for total, master in zip(sums, masters, strict=True):
            master.grad = total
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
    job.close()
    assert zero_ranks.sums(offloaded) == zero_ranks.sums(by_hand)


# -- late steps --------------------------------------------------------------------------------------------------------


def late_by_hand(model, late, steps):
    """Weights that are a step behind where `late` says so, under a rate that changes."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    masters = {name: parameter.detach().float().requires_grad_() for name, parameter in named.items()}
    optimizers = {name: torch.optim.AdamW([master], lr=1e-2, fused=True) for name, master in masters.items()}
    waiting = {}

    def step(name, gradient, rate):
        masters[name].grad = gradient.float()
        optimizers[name].param_groups[0]["lr"] = rate
        optimizers[name].step()

    for number in range(steps):
        backward(model, number)
        for name, before in waiting.items():
            step(name, *before)
        rate = 1e-2 / (1 + number)
        now = {name: (parameter.grad.clone(), rate) for name, parameter in named.items()}
        waiting = {name: each for name, each in now.items() if late(name)}
        with torch.no_grad():
            for name, parameter in named.items():
                if name not in waiting:
                    step(name, *now[name])
                parameter.copy_(masters[name])
                parameter.grad = None


def late_steps(share, monkeypatch, late, begin=True):
    offloaded, by_hand = zero_ranks.wide().bfloat16(), zero_ranks.wide().bfloat16()

    def chosen(squares, sizes, given):
        assert given == share and len(squares) == len(sizes)
        return [index for index, bucket in enumerate(steps.divided.buckets) if late(bucket.parts[0].name)]

    monkeypatch.setattr(late_module, "smallest", chosen)
    optimizer = torch.optim.AdamW(offloaded.parameters(), lr=1e-2, fused=True)
    job = attach(offloaded, optimizer, Offload(stage=1, bucket_mb=1e-9, late=share))
    steps = job.kept["late steps"].state
    assert all(len(bucket.parts) == 1 for bucket in steps.divided.buckets)
    for number in range(5):
        for group in job.optimizer.param_groups:  # while the steps of the one before still wait
            group["lr"] = 1e-2 / (1 + number)
        if begin:  # a loop of one's own may leave it to the optimizer's step
            attachments_of(job).phases[Phase.FORWARD][0]()
        backward(offloaded, number)
        job.optimizer.step()
        job.optimizer.zero_grad()
    job.close()
    late_by_hand(by_hand, late, 5)
    assert zero_ranks.sums(offloaded) == zero_ranks.sums(by_hand)


@pytest.mark.parametrize("begin", [True, False])
@pytest.mark.parametrize(("share", "late"), [(1.0, lambda name: True), (0.5, lambda name: "blocks" in name)])
def test_late_steps_have_the_bits_of_steps_by_hand_with_weights_a_step_behind(share, late, begin, monkeypatch):
    late_steps(share, monkeypatch, late, begin)


def test_the_smallest_gradients_are_late_and_no_more_than_the_share():
    assert smallest([4.0, 1.0, 9.0, 0.0], [4, 10, 3, 0], 0.85) == [0, 1]
    assert smallest([4.0, 1.0, 9.0, 0.0], [4, 10, 3, 0], 0.6) == [1]
    assert smallest([4.0, 1.0, 9.0, 0.0], [4, 10, 3, 0], 0.5) == [0, 2], "a smaller bucket where one is too large"
    assert smallest([4.0, 1.0], [4, 10], 1.0) == [0, 1]
    assert smallest([], [], 0.5) == []


def test_the_report_says_how_much_was_late():
    *_, job = trained(Offload(bucket_mb=1e-3, late=0.6))
    assert 0.3 < job.trace.facts["late_share"] <= 0.6
    assert "% of the elements one step late" in Offload(late=0.6).reduction(job.trace).cost


@pytest.mark.slow
def test_a_prediction_counts_the_state_of_what_is_late_and_the_second_buffers():
    with torch.device("meta"):
        outline = tiny(vocab_size=64)
    peaks = [predict(outline, [Offload(late=late), AdamW()], task_loss, (2, 8), ranks=1).peak for late in (0.0, 0.9)]
    second = sum(parameter.nbytes for parameter in outline.parameters())  # buffers
    assert second <= peaks[1] - peaks[0] <= second + 64 * len(list(outline.parameters()))


def test_late_steps_are_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"`memory.offload.late` must be from 0 to 1, got 1.5"):
        trained(Offload(late=1.5))
    with pytest.raises(ConfigError, match="updates parameters in several calls, which Lamb cannot do"):
        compose(Job(zero_ranks.wide(), progress=Progress(total=6), world=World()), [LAMB(), Offload(late=0.5)])


# -- faults ------------------------------------------------------------------------------------------------------------


def _smaller_masters(self, job, parts, masters, twice, original=OnHost.__init__):
    original(self, job, parts, False, twice)


def _half_late(begin):
    with pytest.MonkeyPatch.context() as patch:
        late_steps(0.5, patch, lambda name: "blocks" in name, begin)


class _LiveRates(dict):
    """A group's settings as they are when they are read."""

    def __init__(self, group):
        super().__init__(group)
        self.group = group

    def __or__(self, other):
        return self.group | other


def _writes_what_is_on_time(self, index):
    return index not in self._deferred


FAULTS = {
    "the rates of the step after": (lambda: _half_late(False), (late_module, "_settings", _LiveRates)),
    "gradients overwritten before they are stepped": (
        lambda: _half_late(True),
        (OnHost, "set_aside", lambda self, name: self._arrived.discard(name)),
    ),
    "late weights that are not written": (lambda: _half_late(True), (LateSteps, "write", _writes_what_is_on_time)),
    "weights that are not written": (
        lambda: test_a_loop_of_its_own_has_the_bits_of_master_weights_stepped_by_hand(1),
        (OnHost, "write", lambda self, parts: lambda: None),
    ),
    "a micro-batch over the one before": (
        lambda: test_gradients_of_micro_batches_are_added_in_float32_on_the_host(),
        (OnHost, "_additional_buffer", lambda self, name, mean: self.travelling[name]),
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


@pytest.mark.parametrize("optimizer", [AdamW(lr=3e-3), SGD(lr=0.05)], ids=lambda each: each.name)
def test_a_step_that_overflows_is_not_made_late(optimizer):
    """torch's fused optimizers run the phases of a step that a loss scaler lets them skip."""
    job = Job(jobs.tiny(), optimizer=jobs.sgd(), progress=Progress(total=9), world=World())
    losses = []
    with compose(job, [Offload(late=1.0), Autocast(dtype="fp16"), optimizer]) as job:
        for number in range(9):
            hook = attachments_of(job).module.norm.register_full_backward_pre_hook(
                lambda _, grads: tuple(grad * float("inf") for grad in grads)
            )
            if number != 4:
                hook.remove()
            scale = attachments_of(job).scaler.get_scale()
            losses.append(float(job.step(jobs.batch(number))))
            hook.remove()
            assert (attachments_of(job).scaler.get_scale() < scale) == (number == 4)
    assert losses[-1] < losses[0]
