"""The loop against a hand-written one, and several ranks against one."""

import json

import pytest
import ranks
import torch
import toy

from shoestring import memory, optim, parallel, precision
from shoestring.core.compose import attach, compose
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World

SETTINGS = (optim.AdamW(lr=3e-3), optim.Clip(max_norm=0.5), optim.Schedule(warmup=5))

pytestmark = pytest.mark.slow  # one launch of two ranks serves all of them


def seeded(**arguments):
    torch.manual_seed(0)
    return toy.model(**arguments)


def ours(data, *features, **arguments):
    with Job(seeded(**arguments), world=World()) as job:
        job.progress.total = len(data)
        compose(job, [*features, *SETTINGS])
        return [float(job.step(batch)) for batch in data], [
            parameter.detach() for parameter in attachments_of(job).parameters
        ]


@pytest.mark.parametrize("arguments", [{}, {"dropout": 0.2, "layers": 3}], ids=["plain", "dropout"])
def test_one_process_is_bit_identical_to_a_hand_written_loop(arguments):
    data, model = toy.batches(50), seeded(**arguments)
    expected = toy.plain_losses(model, data)
    losses, weights = ours(data, **arguments)
    assert losses == expected
    assert expected[-1] < expected[0] - 0.5  # it learns, so the losses could differ
    assert all(torch.equal(one, other) for one, other in zip(weights, model.parameters(), strict=True))


def test_another_learning_rate_is_told_apart():
    data = toy.batches(50)
    assert toy.plain_losses(seeded(), data, lr=3.0001e-3) != ours(data)[0]


@pytest.mark.parametrize(
    "feature",
    [
        precision.Autocast(dtype="fp32"),
        memory.Recompute(),
        parallel.DDP(),
        parallel.FSDP(),
        optim.Clip.neutral,
    ],
    ids=lambda feature: feature.name,
)
def test_what_changes_no_number_changes_no_bit(feature):
    data = toy.batches(10)
    assert ours(data, feature)[0] == ours(data)[0]


def test_features_in_a_foreign_loop_give_the_same_losses():
    data, model = toy.batches(50), seeded()
    expected = toy.plain_losses(seeded(), data)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), fused=True)
    job = attach(model, optimizer, *SETTINGS[1:])
    job.progress.total = len(data)
    losses = []
    for inputs, targets in data:
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == expected
    assert job.progress.step == 50


def relative(one, other):
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


RUNS = ["one accumulating", "ddp", "ddp small buckets", "ddp accumulating", "fsdp", "fsdp keeping", "fsdp accumulating"]


@pytest.mark.parametrize("run", RUNS)
def test_two_ranks_equal_one(two_ranks, run):
    losses = two_ranks["equality"]
    assert relative(losses[run], losses["one"]) < 1e-5


@pytest.mark.parametrize("run", ["fsdp", "fsdp keeping", "fsdp accumulating"])
def test_sharded_equals_replicated(two_ranks, run):
    losses = two_ranks["equality"]
    assert relative(losses[run], losses["ddp"]) < 1e-5


def test_one_in_the_launch_equals_one_here(two_ranks):
    assert relative(two_ranks["equality"]["one"], ours(toy.batches(20))[0]) < 1e-5


def test_bf16_on_the_wire_is_close_and_is_not_the_same(two_ranks):
    losses = two_ranks["equality"]
    assert 0 < relative(losses["bf16"], losses["ddp"]) < 1e-2


@pytest.mark.slow
def test_hybrid_sharding_on_two_hosts_of_two_equals_replication(tmp_path):
    out = tmp_path / "results.json"
    ranks.run(ranks.HERE / "hybrid.py", str(out), size=4, local_size=2)
    results = json.loads(out.read_text())
    assert results["hosts"] == [2, 2]
    assert relative(results["hybrid"], results["ddp"]) < 1e-5
    assert relative(results["sharded"], results["ddp"]) < 1e-5
    assert relative(results["ddp"], ours(toy.batches(8))[0]) < 1e-5


def test_exchanges_between_ranks(two_ranks):
    assert two_ranks["exchanges"] == {
        "gather": [0, 1000],
        "nothing": ["", ""],
        "broadcast": "from the first",
        "empty broadcast": "",
        "decide": {"rank": 0},
        "errors": ["broken (hint: mend it)", "rank 1: broken (hint: mend it)"],
    }


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_and_leaves_the_weights(two_ranks):
    for rank in two_ranks["poisoned"]:
        assert "the loss became" in rank["said"] and "at step 2" in rank["said"]
        assert rank["weights kept"] and rank["step"] == 1


def test_all_ranks_stop_after_the_same_step(two_ranks):
    assert two_ranks["stopped"] == [{"made": 4}, {"made": 4}]


def test_the_threads_of_gloo_are_known_by_their_name(two_ranks):
    assert all(threads >= 1 for threads in two_ranks["threads"])
