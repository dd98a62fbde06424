"""What a run writes down of its steps when one of them does not end well."""

import pytest

from shoestring.core.compose import compose
from shoestring.core.errors import PeerError
from shoestring.core.feature import Phase
from shoestring.core.job import Job
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

    job.at(phase, fail)
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
