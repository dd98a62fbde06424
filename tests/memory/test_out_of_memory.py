"""Out of memory names what was largest and the knob."""

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring import figures
from shoestring.core.errors import ShoestringError
from shoestring.core.job import attachments_of
from shoestring.memory import Recompute
from shoestring.memory.exhausted import REST, explain
from shoestring.training.failures import enough_memory

NONE_SUCH = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1500000 bytes.")


def trained(**settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 4096), nn.Linear(4096, 1))
    return ss.Job(
        model, forward=lambda net, x: net(x), loss=lambda y, x: (y.sum(), torch.tensor(float(len(x)))), **settings
    )


def test_what_is_held_is_counted_by_kind(monkeypatch):
    with trained() as job, ss.compose(job, []):
        job.step(torch.ones(2, 2048))
        monkeypatch.setattr("shoestring.memory.exhausted._taken", lambda job: 150_000_000)
        held, hint = explain(attachments_of(job), NONE_SUCH)
    weights = sum(parameter.nbytes for parameter in attachments_of(job).module.parameters())
    assert f"optimizer state {figures.memory(2 * weights)}" in held
    assert f"parameter {figures.memory(weights)}" in held
    assert f"{REST} {figures.memory(150_000_000 - 3 * weights)}" in held
    assert held.startswith("asked for 1.43 MiB while it held")
    assert "the parameter 0.weight, 32 MiB" in held or "0.weight.exp_avg" in held
    assert "most is optimizer state" in hint and "[memory.lora]" in hint
    assert "[memory.zero]" not in hint  # of no use to one rank


def test_knobs_that_are_on_are_not_named(monkeypatch):
    monkeypatch.setattr("shoestring.memory.exhausted._taken", lambda job: 10**12)
    model = nn.Sequential(nn.ModuleList([nn.Linear(4, 4)]))
    job = ss.Job(model)
    assert "[memory.recompute]" in explain(attachments_of(job), NONE_SUCH).hint
    attachments_of(job).features = (Recompute(),)
    hint = explain(attachments_of(job), NONE_SUCH).hint
    assert "[memory.recompute]" not in hint and "run.accumulate" in hint


def test_a_real_failure_is_explained():
    job = trained()
    with (
        pytest.raises(ShoestringError, match="out of memory on cpu at step 1: asked for") as failure,
        enough_memory(job),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert "run.batch" in failure.value.hint or "most is" in failure.value.hint


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="another"), enough_memory(trained()):
        raise RuntimeError("another")
