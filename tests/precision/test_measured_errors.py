"""[precision.graph] with measure: errors of gradients change the bits of operators while a job trains."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from shoestring.core.errors import ConfigError
from shoestring.core.job import attachments_of
from shoestring.parallel import FSDP
from shoestring.precision import Graph
from shoestring.precision.fact_names import CHOSEN, CHOSEN_TITLE
from shoestring.testing.jobs import batch, sgd, tiny

NAME = "precision.graph"


@pytest.fixture(autouse=True)
def compiles():
    """Torch compiles a module's code eight times, and then runs it as it is: no test takes compilations of others."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def job_of(*features, model=None, dropout=0.0):
    return ss.compose(ss.Job(model or tiny(dropout), optimizer=sgd(0.05)), features)


def stepped(job, numbers):
    return [job.step(batch(number)).item() for number in numbers]


def until_changed(job, most=80):
    """Train until the list has changed; the number of steps."""
    for number in range(most):
        job.step(batch(number))
        if job.trace.facts.get("list_changes"):
            return number + 1
    raise AssertionError("the list did not change")


def record(job):
    return json.loads(job.kept[NAME].state.state_dict()["record"])


@pytest.mark.slow
def test_measuring_changes_no_bit_of_a_run_until_it_decides():
    torch.manual_seed(3)
    with job_of(Graph(dtype="bf16"), dropout=0.1) as job:
        plain = stepped(job, range(3))
    torch.manual_seed(3)
    with job_of(Graph(dtype="bf16", measure=2), dropout=0.1) as job:
        assert stepped(job, range(3)) == plain
        assert len(record(job)["effects"]) == job.trace.facts["measured_steps"] == 2
        assert 0 < job.trace.facts["gradient_error"] < 0.1
        # Of dropout the same masks are drawn by all ways to compute, or errors would be as large as the gradients.
        assert job.trace.facts["gradient_error_bound"] < 0.1
        assert job.trace.aside == job.trace.facts["measuring_seconds"] > 0


@pytest.mark.slow
def test_gradients_in_32_bits_are_those_of_the_model():
    with job_of(settings := Graph(dtype="bf16", measure=1)) as job:
        measurements = job.kept[NAME].state
        measurements.batch = data = batch(0)
        with measurements._apart():
            exact, narrow = (measurements.gradients(rules) for rules in (None, measurements.graphs.rules))
            autocast = measurements.gradients(None, autocast=True)
        own = [parameter for parameter in job.model.parameters() if parameter.requires_grad]
        plain = tiny()
        loss = F.cross_entropy(plain(data["inputs"]).flatten(0, 1), data["targets"].flatten())
        wanted = torch.autograd.grad(loss, [one for one in plain.parameters() if one.requires_grad])
        assert len(own) == len(wanted) == len(exact)
        for one, other, few, theirs in zip(wanted, exact, narrow, autocast, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
            assert 0 < (few - one).norm() < 0.2 * one.norm()
            assert 0 < (theirs - one).norm() < 0.2 * one.norm()
        assert all(one.grad is None for one in own)
        assert settings.report_items(job.trace) == ()


@pytest.mark.slow
def test_a_small_bound_widens_and_a_large_one_narrows():
    with job_of(strict := Graph(dtype="bf16", measure=1, error=1e-5, error_relative_to="gradients")) as job:
        before = stepped(job, range(1)) and job.trace.facts["narrowed_elements"]
        until_changed(job)
        job.step(batch(90))
        assert job.trace.facts["narrowed_elements"] == 0 < before
        job.step(batch(91))
        assert job.trace.facts["gradient_error"] <= 1e-5
        table, _ = strict.report_items(job.trace)
        assert table.title == CHOSEN_TITLE
        assert {bits for _, bits in table.rows} == {32}
        assert "changed 1 times" in strict.explain(attachments_of(job))
        assert "for measuring errors in" in strict.reduction(job.trace).cost
    with job_of(Graph(dtype="bf16", measure=1, error=50.0, changes=1)) as job:
        steps = until_changed(job)
        job.step(batch(90))
        after, measured = job.trace.facts["narrowed_elements"], job.trace.facts["measured_steps"]
        assert before < after <= 1
        assert 16 in {bits for name, bits in job.trace.facts.items() if name.startswith(CHOSEN)}
        assert measured == steps  # nothing is measured after the last change


@pytest.mark.slow
def test_a_resumed_run_computes_as_if_it_had_not_stopped():
    settings = Graph(dtype="bf16", measure=1, error=1e-5, error_relative_to="gradients")
    with job_of(settings) as job:
        done = until_changed(job)
        stepped(job, range(done, done + 2))
        saved = {name: copy.deepcopy(entry.state.state_dict()) for name, entry in job.kept.items()}
        rest = stepped(job, range(done + 2, done + 5))
        last = record(job)
    for before in (0, 1):  # the second one has compiled its graphs before it loads
        with job_of(settings) as other:
            stepped(other, range(before))
            for name, state in saved.items():
                other.kept[name].state.load_state_dict(copy.deepcopy(state))
            assert stepped(other, range(done + 2, done + 5)) == rest
            assert record(other) == last
            assert last["changes"] == 1 and len(last["effects"]) == 5


class Rooted(nn.Module):
    """A model whose gradient is not a number, though its loss is."""

    def __init__(self):
        super().__init__()
        self.inner, self.zero = tiny(), nn.Parameter(torch.zeros(1))

    def forward(self, tokens):
        return self.inner(tokens) + torch.sqrt(self.zero * self.zero)


@pytest.mark.slow
def test_gradients_that_are_no_numbers_decide_nothing():
    with job_of(Graph(dtype="bf16", measure=1, error_relative_to="gradients"), model=Rooted()) as job:
        job.step(batch(0))
        assert record(job) == {"bounds": [], "changes": 0, "chosen": {}, "effects": {}, "errors": []}
        assert "gradient_error" not in job.trace.facts


@pytest.mark.slow
def test_shapes_that_vary_are_measured():
    with job_of(Graph(dtype="bf16", measure=1, error=0.1, error_relative_to="gradients")) as job:
        for rows in (8, 5, 7):
            data = {name: tensor[:rows] for name, tensor in batch(rows).items()}
            assert torch.isfinite(job.step(data))
        assert len(record(job)["effects"]) == 3
        json.dumps(job.trace.facts)  # no symbol of a size is among them


@pytest.mark.slow
def test_a_loop_that_computes_its_own_loss_measures_nothing(caplog):
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING), ss.attach(model, optimizer, Graph(dtype="bf16", measure=1)) as job:
        for number in range(2):
            data = batch(number)
            F.cross_entropy(job.model(data["inputs"]).flatten(0, 1), data["targets"].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert "measured_steps" not in job.trace.facts
    assert len([line for line in caplog.messages if "nothing is measured" in line]) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"error": 0.0}, "error` must be a number above 0, got 0"),
        ({"error": -0.1}, "error` must be a number above 0, got -0.1"),
        ({"error": float("nan")}, "error` must be a number above 0, got nan"),
        ({"measure": -1}, "measure` must be at least 0"),
        ({"changes": 0}, "changes` must be at least 1"),
        ({"error_relative_to": "fp32"}, "cannot be 'fp32'"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        job_of(Graph(dtype="bf16", **{"measure": 1} | settings))


def test_divided_parameters_are_refused():
    with pytest.raises(ConfigError, match=r"`parallel.fsdp` divides the parameters"):
        job_of(Graph(dtype="bf16", measure=1), FSDP())


@pytest.mark.slow
def test_a_compiler_has_the_same_groups():
    """What was measured operator by operator holds for the graphs that a compiler gets."""
    facts = []
    for compiler in ((), (ss.graph.Compile(),)):
        with job_of(Graph(dtype="bf16", measure=1, error=50.0, changes=1), *compiler) as job:
            until_changed(job)
            job.step(batch(90))
            own = {name: value for name, value in job.trace.facts.items() if name.startswith((CHOSEN, "narrowed"))}
            facts.append(own)
    assert facts[0] == facts[1]
