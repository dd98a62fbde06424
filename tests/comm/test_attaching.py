"""One line in a program of one's own: what may happen to its model before, meanwhile and after."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import attaching

import shoestring as ss
from shoestring import comm, sparse
from shoestring.core.compose import compose
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job, attachments_of
from shoestring.testing.scenarios import encode
from tests.small_jobs import batch, small_job


def equal(results: list[dict]) -> bool:
    return all(each["digests"] == results[0]["digests"] for each in results)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("again", [False, True])
def test_training_on_after_closing_is_plain_ddp(pool, parts, again):
    """All six or twelve steps are those of DDP: `Dense` averages as it does."""
    results = pool.call(
        attaching.closed, feature=encode(comm.Dense(transport=comm.Transport(parts=parts))), again=again
    )
    assert equal(results)
    assert results[0]["cap"][0] == results[0]["cap"][1]


def test_a_job_that_is_finished_early_counts_each_step_once():
    with compose(small_job(), [comm.DGC(density=0.5)]) as job:
        for _ in range(3):
            job.step(batch())
        job.finish()
    assert job.trace.facts["wire_steps"] == 3


@pytest.mark.parametrize("attach", [comm.attach, sparse.attach])
def test_an_areas_own_attach_says_what_to_write(attach):
    model = nn.Linear(4, 4)
    with pytest.raises(
        ConfigError, match=r"`shoestring\.attach` now serves every area.*`ss\.attach\(model, optimizer, ss\."
    ):
        attach(model, comm.Sign(), torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("attached", "said"),
    [
        (lambda m, o: ss.attach(m, o, comm.Quantize(bits=3)), r"`comm\.quantize\.bits` cannot be 3"),
        (lambda m, o: ss.attach(m, comm.Sign(), o), "SGD is no feature"),
        (lambda m, o: ss.attach(m, o, comm.PowerSGD(rank="4")), r"`comm\.powersgd\.rank` must be a whole number"),
        (lambda m, o: ss.attach(m, o, comm.Quantize(rounding="nearest")), "without `feedback`"),
        (lambda m, o: ss.attach(m, o, comm.LocalSGD(every=2.5)), r"`comm\.localsgd\.every` must be a whole number"),
        (lambda m, o: ss.attach(m, o, comm.DiLoCo(codec="8bits")), r"`comm\.diloco\.codec`: cannot read.*\"8bit\""),
        (lambda m, o: ss.attach(m, o, comm.DiLoCo(codec="bit8")), "did you mean `8bit`"),
        (lambda m, o: ss.attach(m, o, comm.Selective(codec="nope")), r"`comm\.selective\.codec`: there is no codec"),
        (lambda m, o: ss.attach(m, o, comm.Selective(uncompressed=("wieght",))), "is called `wieght`"),
    ],
)
def test_bad_input_is_named(attached, said):
    model = nn.Linear(4, 4)
    with pytest.raises((ConfigError, TypeError), match=said) as caught:
        attached(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("feature", [comm.Dense(), comm.Sign(), comm.SparseLoCo(), comm.Auto()])
def test_complex_parameters_are_refused(feature):
    model = nn.Linear(4, 4)
    model.phase = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="the parameter `phase` is complex"):
        feature.check(attachments_of(Job(model)))
    model.phase.requires_grad_(False)
    feature.check(attachments_of(Job(model)))


@pytest.mark.parametrize("parts", [1, 2])
def test_a_static_graph(pool, parts):
    plain = pool.call(attaching.static, feature=None, steps=4)
    ours = pool.call(attaching.static, feature=encode(comm.Dense(transport=comm.Transport(parts=parts))), steps=4)
    assert ours[0] == ours[1]
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(plain[0]))


@pytest.mark.parametrize(
    "feature", [comm.Dense(), comm.PowerSGD(rank=2, transport=comm.Transport(parts=3))], ids=["dense", "powersgd"]
)
def test_a_bare_model_begins_equal_and_may_have_layers_frozen(pool, feature):
    results = pool.call(attaching.frozen, feature=encode(feature))
    assert equal(results)
    heads = results[0]["heads"]
    assert heads[1] == heads[2] == heads[3]
    assert len(set(heads)) == 4


@pytest.mark.parametrize(("thaw", "name"), [(False, "head.0.weight"), (True, "frozen.weight")])
def test_what_was_not_trained_when_it_was_attached_is_refused(pool, thaw, name):
    for said in pool.call(attaching.added, feature=encode(comm.Dense()), thaw=thaw):
        assert "was not trained when `comm.dense` was attached, and is now" in said
        assert f"`{name}`" in said


def test_what_was_frozen_when_local_steps_were_attached_is_refused():
    job = small_job()
    attachments_of(job).module.up.requires_grad_(False)
    with compose(job, [comm.DiLoCo(every=2)]):
        job.step(batch())
        attachments_of(job).module.up.requires_grad_(True)
        with pytest.raises(ConfigError, match=r"`up.bias` was not trained when `comm\.diloco` was attached") as error:
            job.step(batch())
        assert "`up.weight`" in str(error.value) and job.progress.step == 1


def test_local_steps_name_themselves_where_they_refuse_sparse_gradients():
    model = nn.Embedding(4, 4, sparse=True)
    with pytest.raises(ConfigError, match=r"`comm\.localsgd` does not exchange sparse gradients"):
        ss.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), comm.LocalSGD())


def test_a_loss_scaler_is_refused_by_replicas_that_differ(pool):
    for said in pool.call(attaching.scaled, feature=encode(comm.LocalSGD())):
        assert len(said) == 2
        assert all(each.startswith("`comm.localsgd` cannot use a loss scaler") for each in said)


CONSERVING = [
    comm.TopK(density=0.1),
    comm.PowerSGD(rank=1),
    comm.Quantize(bits=4, rounding="nearest", feedback=True),
    comm.Dense(transport=comm.Transport(select="uniform", kb_per_step=3.0)),
    pytest.param(comm.Dense(transport=comm.Transport(select="per-node", kb_per_step=3.0)), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("feature", CONSERVING, ids=lambda feature: feature.name + feature.transport.select)
@pytest.mark.parametrize(
    ("wrap", "own_step", "none", "micro"),
    [
        (True, False, True, 1),
        pytest.param(True, True, True, 1, marks=pytest.mark.slow),
        pytest.param(True, True, False, 1, marks=pytest.mark.slow),
        (True, False, True, 2),
        pytest.param(False, False, True, 1, marks=pytest.mark.slow),  # the conformance suite trains bare models
    ],
    ids=["ddp", "ddp-without-optimizer", "zeroed", "accumulated", "bare"],
)
def test_what_an_unused_layer_is_owed_stays_owed(pool, feature, wrap, own_step, none, micro):
    """Each step uses one of two layers. All gradients there were are used, or in a residual in the end."""
    arguments = {"steps": 6, "wrap": wrap, "own_step": own_step, "none": none, "micro": micro}
    for result in pool.call(attaching.conserved, feature=encode(feature), **arguments):
        assert result["residuals"] > 1e-4
        assert result["apart"] < 1e-6


def test_dgc_clips_the_norm_of_all_gradients_whatever_the_parts(pool):
    """Each of two ranks at 0.1 over the root of 2; all have the same gradient, so it is also the norm of the mean."""
    for parts in (1, 2, 4):
        feature = comm.DGC(lr=0.01, momentum=0.0, density=1.0, max_norm=0.1, transport=comm.Transport(parts=parts))
        for norms in pool.call(attaching.clipped, feature=encode(feature), local=2, shard=False):
            assert norms == pytest.approx([0.1 / 2**0.5] * 2, rel=1e-5)


@pytest.mark.parametrize("shard", [
    pytest.param(False, marks=pytest.mark.slow, id="torus"), pytest.param(True, id="fsdp"),
])  # fmt: skip
def test_dgc_clips_the_norm_of_a_hosts_gradient_where_its_ranks_have_rows_of_it(four, shard):
    feature = comm.DGC(lr=0.01, momentum=0.0, density=1.0, max_norm=0.1)
    for norms in four.call(attaching.clipped, feature=encode(feature), local=2, shard=shard):
        assert norms == pytest.approx([0.1 / 2**0.5] * 2, rel=1e-5)


LATER = [
    (comm.Quantize(bits=8, rounding="nearest", feedback=True), 3e38),
    (comm.Sign(), 3e38),
    (comm.PowerSGD(rank=2), 1e36),
]


@pytest.mark.parametrize(("feature", "size"), LATER, ids=lambda value: getattr(value, "name", None))
def test_an_overflow_after_the_first_answers_enters_no_residual(pool, feature, size):
    """Each rank's entries are finite, and so is what it sends first; what is made of them is not."""
    for result in pool.call(attaching.overflowed, feature=encode(feature), size=size):
        assert result["finite"] == [True, True, False, True]
        before, given_up, after = result["states"][1:]
        if feature.name == "comm.powersgd":  # rounds a residual beside a gradient of that size, and adds nothing
            assert all(0 <= each <= 1.001 * was for each, was in zip(given_up, before, strict=True))
        else:
            assert given_up == before
        assert all(0 < each < 1e3 for each in after)


@pytest.mark.parametrize("feature", CONSERVING, ids=lambda feature: feature.name + feature.transport.select)
def test_what_is_owed_keeps_its_size_when_the_loss_scale_changes(pool, feature):
    """The scale doubles after every second step; residuals are of gradients without it."""
    arguments = {"steps": 7, "wrap": True, "own_step": False, "none": True, "micro": 1, "scaled": True}
    for result in pool.call(attaching.conserved, feature=encode(feature), **arguments):
        assert result["residuals"] > 1e-4
        assert result["apart"] < 1e-6


@pytest.mark.parametrize("fused", [False, True])
def test_all_ranks_skip_a_step_that_overflows_on_one(pool, fused):
    """Without DDP gradients are exchanged in the optimizer's step, which the scaler leaves out where they overflow.

    They are exchanged without the scale of 1024: what is left of them is not larger than gradients are.
    """
    results = pool.call(attaching.skipped, feature=encode(comm.Sign()), fused=fused)
    assert equal(results)
    assert all(0 < each["residual"] < 1 for each in results)
    digests = results[0]["digests"]
    assert [one == other for one, other in pairwise(digests)] == [True, False, False]
    assert all(each["scales"] == [1024, 512, 512, 512] and not each["patched"] for each in results)
