"""What a run writes down of its steps when one of them does not end well."""

import pytest
import torch

from shoestring.core.compose import compose
from shoestring.core.errors import PeerError
from shoestring.core.feature import Phase
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.report.reading import read
from shoestring.report.sinks import JsonLines
from shoestring.testing import jobs
from shoestring.training.throughput import Meter


def rows_of(tmp_path, phase):
    """The losses that the steps had, and those written, of a run whose third step fails in a phase."""
    job = compose(Job(jobs.tiny(), optimizer=jobs.sgd(), world=World()))
    seen = []

    def fail():
        seen.append(float(job.numbers["loss"]))
        if len(seen) == 3:
            raise PeerError("rank 1 is lost")

    attachments_of(job).at(phase, fail)
    with pytest.raises(PeerError), job, Meter(job, [JsonLines(tmp_path / "metrics.jsonl")], 0.0, 0.0) as meter:
        for number in range(5):
            meter.step(job.step(jobs.batch(number, 0, 1)))
    return seen, read(tmp_path).columns["loss"]


def test_a_step_whose_checkpoint_fails_is_written_down(tmp_path):
    seen, written = rows_of(tmp_path, Phase.CAPTURE)
    assert written == dict(enumerate(seen, 1)) and len(written) == 3


def test_a_step_that_was_not_made_is_not(tmp_path):
    seen, written = rows_of(tmp_path, Phase.CLIP)
    assert written == dict(enumerate(seen[:2], 1))


class Kept:
    """A sink that keeps the names of the metrics."""

    def __init__(self):
        self.names = set()

    def write(self, step, values):
        self.names |= set(values)

    def close(self):
        return


@pytest.mark.parametrize(("batch", "unit"), [(3, "samples"), (4, "tokens"), (0, "tokens")])
def test_where_a_sample_has_one_target_a_step_is_of_samples(batch, unit):
    kept = Kept()
    job = compose(Job(torch.nn.Linear(2, 5), optimizer=jobs.sgd(), world=World()))
    with job, Meter(job, [kept], 0.0, 0.0, batch) as meter:
        for _ in range(3):
            meter.step(job.step((torch.ones(3, 2), torch.tensor([0, 1, 2]))))
        assert meter.unit == unit
    assert f"{unit}_per_second" in kept.names and not kept.names & {"samples_per_second", "tokens_per_second"} - {
        f"{unit}_per_second"
    }
