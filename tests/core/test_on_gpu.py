"""A job on a GPU, whose numbers are read a step late; and the world of a program that made its group itself."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD

from shoestring.core.compose import compose
from shoestring.core.errors import NonFiniteError
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.testing import jobs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def stepped(steps, spoiled=0):
    """A job after so many steps, of which one has no finite loss."""
    job = Job(jobs.tiny().cuda(), optimizer=partial(SGD, lr=0.1))
    whole = attachments_of(job).loss

    def loss(output, batch):
        total, count = whole(output, batch)
        return total * (float("nan") if job.progress.step + 1 == spoiled else 1.0), count

    attachments_of(job).loss = loss
    with compose(job, []):
        for number in range(steps):
            job.step({name: each.cuda() for name, each in jobs.batch(number).items()})
    return job


def test_the_last_steps_tokens_are_counted_once():
    job = stepped(3)
    assert job.progress.tokens == 2 * jobs.BATCH * jobs.SEQUENCE
    for _ in range(2):
        attachments_of(job).verify()
        assert job.progress.tokens == 3 * jobs.BATCH * jobs.SEQUENCE


def test_a_loss_that_is_not_finite_is_told_a_step_late_or_at_the_end():
    with pytest.raises(NonFiniteError, match="at step 2"):
        stepped(3, spoiled=2)
    job = stepped(3, spoiled=3)
    with pytest.raises(NonFiniteError, match="at step 3"):
        attachments_of(job).verify()


@pytest.mark.parametrize("backend", [None, "nccl", "cuda:nccl,cpu:gloo", "gloo"])
def test_the_world_is_on_gpus_where_the_group_can_talk_of_them(tmp_path, backend):
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert World.current().device.type == ("cpu" if backend == "gloo" else "cuda")
    finally:
        dist.destroy_process_group()
