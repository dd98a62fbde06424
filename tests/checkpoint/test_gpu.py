"""Saving what a GPU trains: copies on their way while it continues, and a restart that resumes bitwise."""

import tempfile
import threading
from contextlib import closing
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from shoestring.checkpoint import Tiered
from shoestring.checkpoint.format.part import Part
from shoestring.checkpoint.tiers.slots import Slot, seals, slots_folder
from shoestring.checkpoint.tiers.staging import Stager
from shoestring.core.compose import compose
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.core.world import World
from shoestring.testing import jobs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LARGE = 1 << 28  # weights, a gigabyte: copying them takes ten times as long as a step


@pytest.fixture
def settings(tmp_path):
    """Saves to memory after every step; a file system in memory, for others' files cannot be pinned."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        yield Tiered(folder=str(tmp_path / "saves"), memory_folder=memory, memory_every=1, disk_every=0)


class Counting(nn.Module):
    """Weights that all are the number of the step, so that a late or torn copy shows."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(LARGE, device="cuda"))

    def forward(self, _):
        return -self.weights.sum()


def counting(settings):
    return compose(
        Job(
            Counting(),
            loss=lambda output, _: (output, torch.ones((), device="cuda")),
            optimizer=partial(SGD, lr=1.0),
            progress=Progress(total=1000),
        ),
        [settings],
    )


def sealed(settings):
    """Of each slot that is whole: the step, and what its weights are."""
    folder, found = slots_folder(settings, World()), {}
    for _, record in seals(folder):
        (entry,) = (each for name, each in record.parts.items() if name.startswith("private"))
        part = Part.open(folder / entry.file, entry.nbytes, entry.sums, slot=True)
        (weights,) = (part.read(piece) for piece in part.pieces if piece.tensor.endswith("weights"))
        found[record.checkpoint.step] = {weights.min().item(), weights.max().item()}
    return found


def test_what_is_saved_is_of_one_step_though_training_continues(settings, monkeypatch):
    waited, reserved = [], []
    told, reserve = Stager.waited, Slot.reserve

    def listening(stager):
        waited.append(told(stager))
        return waited[-1]

    def watched(slot, sizes):
        reserved.append(threading.current_thread().name)
        reserve(slot, sizes)

    monkeypatch.setattr(Stager, "waited", listening)
    monkeypatch.setattr(Slot, "reserve", watched)
    with closing(counting(settings)) as job:
        saves = 0
        for _ in range(400):
            before = job.trace.facts.get("checkpoint_bytes", 0.0)
            job.step((torch.zeros(1, device="cuda"),))
            saves += job.trace.facts["checkpoint_bytes"] > before
            if saves == 9:  # every slot was filled three times
                break
    assert reserved and {*reserved} == {"checkpoint-seal"}
    assert sum(waited) > 0 and job.trace.facts["checkpoint_stall"] > sum(waited)
    found = sealed(settings)  # the run did not end, so they are there
    assert len(found) == settings.slots and all(values == {step} for step, values in found.items())


def tiny(settings, steps):
    job = Job(
        jobs.tiny(0.1).cuda(),
        optimizer=partial(AdamW, lr=1e-2, fused=True),
        progress=Progress(total=steps + 1),  # it does not end by itself
    )
    torch.manual_seed(7)
    return compose(job, [settings] if settings else [])


def go_on(job, until):
    for number in range(job.progress.step, until):
        job.step({name: each.cuda() for name, each in jobs.batch(number).items()})
    tensors = [
        *attachments_of(job).module.parameters(),
        *(v for state in job.optimizer.state.values() for v in state.values()),
    ]
    return [each.detach().cpu() for each in tensors], torch.cuda.get_rng_state()


def test_a_run_resumes_bitwise_from_what_was_in_memory(settings):
    with closing(tiny(None, 40)) as job:
        expected, random = go_on(job, 40)
    with closing(tiny(settings, 40)) as job:
        while not sealed_steps(settings) and job.progress.step < 30:
            go_on(job, job.progress.step + 1)
    with closing(tiny(settings, 40)) as job:
        began = job.restore("auto")
        assert began is not None and 0 < began <= 30
        found, drawn = go_on(job, 40)
    assert all(map(torch.equal, found, expected)) and torch.equal(drawn, random)


def test_state_of_the_optimizer_that_lies_on_the_host_is_of_the_same_step(settings):
    """AdamW's step counts, unless it is fused: the host, which runs ahead, counts on while copies are on their way."""
    model = nn.Linear(LARGE >> 12, 1 << 10).cuda()
    job = Job(model, loss=lambda output, _: (output.sum(), torch.ones((), device="cuda")), optimizer=AdamW)
    with closing(compose(job, [settings])) as job:
        for _ in range(12):
            job.step((torch.ones(1, LARGE >> 12, device="cuda"),))
        folder = slots_folder(settings, World())
        for _, record in seals(folder):
            (entry,) = (each for name, each in record.parts.items() if name.startswith("private"))
            part = Part.open(folder / entry.file, entry.nbytes, entry.sums, slot=True)
            counts = {float(part.read(piece)) for piece in part.pieces if piece.tensor.endswith("/step")}
            assert counts == {float(record.checkpoint.step)}


def test_memory_that_cannot_be_pinned_does(tmp_path):
    """A file on a disk. That CUDA refused it must not come up as an error of some later kernel."""
    with closing(
        tiny(Tiered(folder=str(tmp_path / "saves"), memory_folder=str(tmp_path), memory_every=1, disk_every=0), 9)
    ) as job:
        go_on(job, 9)
        assert job.trace.facts["checkpoint_bytes"] > 0


def sealed_steps(settings):
    return [record.checkpoint.step for _, record in seals(slots_folder(settings, World()))]
