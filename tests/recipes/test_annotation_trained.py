"""The recipe `annotation` at toy size: planted raters, labels from a table, and a report with a table of the raters."""

import json

import numpy as np
import pytest
import torch

from shoestring.cli import main
from shoestring.core.errors import ConfigError, DataError
from shoestring_recipes.annotation.planted import LOOK_ALIKES, NAMES, confusions, planted
from shoestring_recipes.annotation.raters import RaterModel, consensus_of, majority
from shoestring_recipes.annotation.task import KINDS, data, loss, read_table, targets
from tests.recipes.toys import train_toy

TOY = [
    *("--steps", "2", "--batch", "16", "--evaluate_every", "0", "--optim.schedule.warmup", "1"),
    *("--data.arguments.images", "600", "--data.arguments.held_out", "64"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_toy(tmp_path_factory, "annotation", *TOY)


@pytest.mark.slow
def test_the_report_has_figures_and_a_table_of_the_raters(trained):
    last = [row for row in map(json.loads, (trained / "metrics.jsonl").open()) if "log_loss" in row][-1]
    assert 0 < last["log_loss"] < 10 and 0 <= last["accuracy"] <= 1 and 0 <= last["calibration"] <= 1
    page = (trained / "report.html").read_text()
    assert "kappa with the others" in page and "rater 11" in page


def test_planted_raters_confuse_what_looks_alike():
    rng = np.random.default_rng(0)
    table = confusions(50, 0.3, rng)
    np.testing.assert_allclose(table.sum(2), 1)
    assert 0.25 < 1 - np.einsum("rkk->rk", table).mean() < 0.35
    for kind, wrong in enumerate(LOOK_ALIKES):
        assert set(np.flatnonzero(table[:, kind].sum(0))) == {kind, *wrong}
    truth = rng.integers(0, len(NAMES), 3000)
    labels = planted(truth, 12, 3, 0.3, seed=1)
    assert labels.counts.sum(1).tolist() == [3] * 3000 and len(labels.item) == 9000
    rate = (labels.label != truth[labels.item]).mean()
    assert 0.2 < rate < 0.4
    consensus = consensus_of(labels)
    assert consensus.model is RaterModel.CONFUSION
    soft = consensus.soft
    assert (soft.argmax(1) == truth).mean() > (majority(labels) == truth).mean()
    likely = -np.log(soft[np.arange(3000), truth] + 1e-9).mean()
    votes = -np.log(targets(labels, "votes")[0][np.arange(3000), truth] + 1e-9).mean()
    assert likely < votes and planted(truth, 12, 3, 0.3, seed=1).label.tolist() == labels.label.tolist()


@pytest.mark.slow
def test_targets_are_probabilities_and_the_loss_their_cross_entropy():
    prints = set()
    for kind in KINDS:
        samples, held_out = data(labels=kind, images=200, held_out=20)
        prints.add(samples.fingerprint)
        assert torch.allclose(samples.soft.sum(1), torch.ones(200), atol=1e-5)
        assert (samples.soft.max(1).values == 1).all() == (kind == "majority")
        assert (held_out.reviewed is not None) == (kind == "soft")
        assert torch.equal(held_out.soft.argmax(1), held_out.images.labels)
    batch = {"targets": samples.soft[:4]}
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    total, count = loss(logits, batch)
    assert count == 4 and total == pytest.approx(float(-(logits.log_softmax(1) * batch["targets"]).sum()))
    assert len(prints) == 3
    with pytest.raises(ConfigError, match="did you mean `soft`"):
        data(labels="sof", images=20)
    with pytest.raises(ConfigError, match="from 1 to the number of raters, 2"):
        data(raters=2, per_image=3, images=20)


@pytest.mark.slow
def test_labels_of_ones_own_are_read_from_a_table(tmp_path, capsys):
    path = tmp_path / "labels.csv"
    rows = [f"fashion-mnist/{17 + number},{rater},{NAMES[number % 10]}" for number in range(40) for rater in "abc"]
    path.write_text("\n".join(["url,rater,label", *rows, "fashion-mnist/3,a,"]))
    labels, numbers, names = read_table(path, 60000)
    assert numbers == list(range(17, 57)) and names == ["a", "b", "c"] and labels.label.tolist()[:4] == [0, 0, 0, 1]
    samples, held_out = data(table=str(path), held_out=8)
    assert torch.equal(samples.soft.argmax(1)[:10], torch.arange(10)) and len(samples) == 40
    assert [one.note for one in held_out.reviewed.judgements] == [""] * 3
    for line, message in (
        ("fashion-mnist/60000,a,bag", "no image `fashion-mnist/60000`"),
        ("cats/1,a,bag", "no image `cats/1`"),
        ("fashion-mnist/1,a,bags", "did you mean `bag`"),
    ):
        path.write_text(f"url,rater,label\n{line}\n")
        with pytest.raises(DataError, match=message):
            read_table(path, 60000)
    assert main(["train", "annotation", *TOY, "--data.arguments.table", str(path)]) != 0
    assert "error:" in capsys.readouterr().err
