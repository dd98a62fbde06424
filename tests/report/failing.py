"""Losses for real runs that fail at their fourth step, each in its own way."""

import os
import signal

import torch

from shoestring.core.task import cross_entropy

FAILS_AT = 4
calls = [0]


def _fourth() -> bool:
    calls[0] += 1
    return calls[0] == FAILS_AT


def raises(output, batch):
    if torch.is_grad_enabled() and _fourth() and os.environ.get("RANK", "1") == "1":
        raise ValueError("labels <b>out of range</b>")
    return cross_entropy(output, batch)


def nan(output, batch):
    total, count = cross_entropy(output, batch)
    return (total * float("nan") if torch.is_grad_enabled() and _fourth() else total), count


def out_of_memory(output, batch):
    if torch.is_grad_enabled() and _fourth():
        raise MemoryError
    return cross_entropy(output, batch)


def killed(output, batch):
    if torch.is_grad_enabled() and _fourth():
        os.kill(os.getpid(), signal.SIGKILL)
    return cross_entropy(output, batch)
