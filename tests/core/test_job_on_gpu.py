"""A job on a GPU: its numbers are read a step late, and all of them are there at the end."""

from functools import partial

import pytest
import torch
from torch.optim import SGD

from shoestring.core.errors import NonFiniteError
from shoestring.core.job import Job, compose
from shoestring.testing import jobs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def stepped(steps, spoiled=0):
    """A job after so many steps, of which one has no finite loss."""
    job = Job(jobs.tiny().cuda(), optimizer=partial(SGD, lr=0.1))
    whole = job.loss

    def loss(output, batch):
        total, count = whole(output, batch)
        return total * (float("nan") if job.progress.step + 1 == spoiled else 1.0), count

    job.loss = loss
    with compose(job, []):
        for number in range(steps):
            job.step({name: each.cuda() for name, each in jobs.batch(number).items()})
    return job


def test_the_last_steps_tokens_are_counted_once():
    job = stepped(3)
    assert job.progress.tokens == 2 * jobs.BATCH * jobs.SEQUENCE
    for _ in range(2):
        job.verify()
        assert job.progress.tokens == 3 * jobs.BATCH * jobs.SEQUENCE


def test_a_loss_that_is_not_finite_is_told_a_step_late_or_at_the_end():
    with pytest.raises(NonFiniteError, match="at step 2"):
        stepped(3, spoiled=2)
    job = stepped(3, spoiled=3)
    with pytest.raises(NonFiniteError, match="at step 3"):
        job.verify()
