"""Signals to a process that trains."""

import signal

import pytest
import torch
from torch import nn

from shoestring.core.compose import compose
from shoestring.core.job import Job, attachments_of
from shoestring.optim import AdamW
from shoestring.training.failures import stop_on_signals

INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.fixture
def usual():
    """The signals that took their usual course, which here is to be noted."""
    noted = []
    before = {number: signal.signal(number, lambda number, _: noted.append(number)) for number in (INT, TERM)}
    yield noted
    for number, handler in before.items():
        signal.signal(number, handler)


def job():
    return compose(Job(nn.Linear(2, 2), loss=lambda output, _: (output.sum(), torch.tensor(1.0))), [AdamW()])


@pytest.mark.parametrize(
    "sent, usually",
    [
        ([TERM], []),
        ([TERM, TERM, TERM], []),  # of a batch system, of torchrun, and of the batch system when the time is up
        ([TERM, INT, TERM], [INT]),
        ([INT], []),
        ([INT, INT, TERM], [INT, TERM]),  # somebody at a terminal, who does not want to wait
    ],
)
def test_the_first_signal_stops_after_the_step_and_only_a_second_interrupt_goes_further(usual, sent, usually):
    with job() as one:
        with stop_on_signals(one):
            for number in sent:
                signal.raise_signal(number)
            assert usual == usually
            one.step((torch.ones(1, 2),))
            assert attachments_of(one).stopping
        signal.raise_signal(TERM)
    assert usual == [*usually, TERM]
