"""Selective distillation in a job, against its definition word by word; the cache in place of the teacher; refusals."""

import copy
from dataclasses import replace

import drafting
import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.core.errors import CheckpointError, ConfigError, ConflictError
from shoestring.core.job import attachments_of
from shoestring.core.trace import Trace
from shoestring.decode import Distill
from shoestring.decode.drafter_training import CACHED, COMPUTED
from shoestring.sparse import AST
from shoestring.testing import jobs

ALL = Distill(teacher="drafting:teacher")
SELECTED = replace(ALL, reference="drafting:reference", fraction=0.3)


def distilling(feature, *, trace=None, lr=0.2):
    made = ss.Job(jobs.tiny(), optimizer=jobs.sgd(lr), trace=trace or Trace())
    return ss.compose(made, [feature])


def divergence(model: nn.Module, batch):
    """KL(teacher ‖ model) of each token that counts, in double precision."""
    with torch.no_grad():
        p, q = (each(batch["inputs"]).double().softmax(-1) for each in (drafting.teacher(), model))
    return (p * (p / q).log()).sum(-1)[batch["targets"] != -100]


def test_the_loss_is_the_mean_divergence_of_all_tokens():
    batch = jobs.batch(0, ragged=True)
    with distilling(ALL) as job:
        loss = float(job.step(batch))
        assert loss == pytest.approx(float(divergence(jobs.tiny(), batch).mean()), rel=1e-5)
        assert float(job.numbers["divergence"]) == pytest.approx(loss, rel=1e-5)
        p, q = (model(batch["inputs"]).detach().softmax(-1) for model in (drafting.teacher(), jobs.tiny()))
        accepted = torch.minimum(p, q).sum(-1)[batch["targets"] != -100].mean()
        assert float(job.numbers["acceptance"]) == pytest.approx(float(accepted), rel=1e-5)
        assert job.numbers["teacher_seconds"] > 0


def test_the_loss_is_the_mean_over_the_selected_tokens_alone():
    """The mean over all tokens, which AdaSPEC's released code takes, would be a fraction of it."""
    batch = jobs.batch(0, ragged=True)
    with distilling(replace(SELECTED, reference="drafting:stranger"), lr=0.0) as job:
        first = float(job.step(batch))  # the same batch gives the threshold, and the model stays
        own, theirs = (divergence(model, batch) for model in (jobs.tiny(), drafting.stranger()))
        assert first == pytest.approx(float(own.mean()), rel=1e-4)
        second = float(job.step(batch))
    gap = own - theirs
    highest = gap.sort(descending=True).indices[: round(0.3 * len(gap))]
    assert second == pytest.approx(float(own[highest].mean()), rel=1e-3)
    assert float(job.numbers["selected"]) == pytest.approx(0.3, abs=0.02)
    assert abs(second - float(own.sort(descending=True).values[: len(highest)].mean())) > 0.1  # not by its own alone
    assert abs(second - first) > 0.1


@pytest.mark.parametrize("resumed_at", [0, 3])
def test_tokens_are_selected_by_the_steps_before_each_counting_half_of_the_next(resumed_at):
    """By the setting: the threshold is a quantile of all earlier scores, those of n steps ago with a weight of 2^-n."""
    feature = replace(SELECTED, reference="drafting:stranger", fraction=0.3)
    job, seen = distilling(feature, lr=0.5), []
    for step in range(7):
        if step and step == resumed_at:
            saved, job = (
                {name: copy.deepcopy(each.state.state_dict()) for name, each in job.kept.items()},
                distilling(feature, lr=0.5),
            )
            for name, each in job.kept.items():
                each.state.load_state_dict(saved[name])
        batch = jobs.batch(step, ragged=True)
        gap = divergence(attachments_of(job).module, batch) - divergence(drafting.stranger(), batch)
        if seen:
            scores = torch.cat(seen)
            ages = torch.cat([torch.full_like(each, len(seen) - 1 - at) for at, each in enumerate(seen)])
            order = scores.argsort(descending=True)
            above = (0.5**ages)[order].cumsum(0)
            threshold = float(scores[order][(above >= 0.3 * above[-1]).to(torch.int64).argmax()])
            kept = float(job.kept["decode.distill"].state.threshold)
            assert kept == pytest.approx(threshold, rel=0.03, abs=2e-3)
        loss = float(job.step(batch))
        if seen:
            chosen = gap >= kept
            assert float(job.numbers["selected"]) == pytest.approx(float(chosen.double().mean()), abs=0.02)
        assert loss > 0
        seen.append(gap)


def test_a_step_of_which_no_token_is_selected_learns_from_all():
    with distilling(SELECTED, lr=0.0) as job:
        job.step(jobs.batch(0))
        job.kept["decode.distill"].state.threshold.fill_(1e6)
        loss = float(job.step(jobs.batch(1)))
    assert loss == pytest.approx(float(divergence(jobs.tiny(), jobs.batch(1)).mean()), rel=1e-4)


def test_objective_and_temperature_reach_the_loss():
    batch = jobs.batch(0)
    with distilling(replace(ALL, objective="tv", temperature=2.0)) as job:
        loss = float(job.step(batch))
    p, q = (model(batch["inputs"]).detach().div(2).softmax(-1) for model in (drafting.teacher(), jobs.tiny()))
    assert loss == pytest.approx(4 * float((p - q).abs().sum(-1).mean()) / 2, rel=1e-4)


# -- the cache ---------------------------------------------------------------------------------------------------------


def losses(feature, monkeypatch=None, *, steps=4):
    """Over two epochs of as many samples, and how often the teacher read one."""
    trace = Trace()
    with distilling(feature, trace=trace) as job:
        if monkeypatch is not None:
            for frozen in attachments_of(job).frozen_modules.values():
                monkeypatch.setattr(frozen, "forward", None)
        found = [float(job.step(jobs.batch(number % (steps // 2)))) for number in range(steps)]
    return found, trace.facts.get(COMPUTED, 0), trace.facts.get(CACHED, 0)


@pytest.mark.parametrize("feature", [ALL, SELECTED], ids=["all tokens", "selected tokens"])
def test_later_epochs_and_runs_do_without_teacher_and_reference(tmp_path, monkeypatch, feature):
    cached = replace(feature, cache_folder=str(tmp_path), top_k=jobs.VOCABULARY)
    first, computed, read = losses(cached)
    assert (computed, read) == (2 * jobs.BATCH, 2 * jobs.BATCH)
    again, computed, read = losses(cached, monkeypatch)
    assert (again, computed, read) == (first, 0, 4 * jobs.BATCH)
    without, computed, read = losses(feature)
    assert without == pytest.approx(first, rel=1e-2) and (computed, read) == (0, 0)
    lines = [feature.reduction(_trace(facts)) for facts in ({}, {COMPUTED: 1.0, CACHED: 3.0})]
    assert lines[0] is None and (lines[1].used, lines[1].without) == (1, 4)


def _trace(facts):
    trace = Trace()
    trace.facts |= facts
    return trace


def test_another_teacher_temperature_or_number_of_words_is_not_taken_from_the_cache(tmp_path):
    cached = replace(ALL, cache_folder=str(tmp_path), top_k=8)
    losses(cached)
    for other in ({"teacher": "drafting:reference"}, {"temperature": 2.0}, {"top_k": 9}, {"drawn": 5}):
        assert losses(replace(cached, **other))[1] == 2 * jobs.BATCH, other
    assert losses(cached)[1] == 0


def test_the_cache_of_a_run_lies_in_its_folder_unless_its_path_is_absolute(tmp_path):
    assert replace(ALL, cache_folder="teacher").placed(tmp_path).cache_folder == str(tmp_path / "teacher")
    assert replace(ALL, cache_folder="/shared").placed(tmp_path).cache_folder == "/shared"
    assert ALL.placed(tmp_path) == ALL


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (Distill(), "names no model"),
        (replace(ALL, fraction=0.0), r"must lie in \(0, 1\]"),
        (replace(ALL, temperature=0.0), "must be positive"),
        (replace(ALL, top_k=0), "at least 1"),
        (replace(ALL, drawn=-1), "at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(feature, message):
    with pytest.raises(ConfigError, match=message):
        distilling(feature)


def test_what_else_changes_the_loss_is_refused():
    made = ss.Job(jobs.tiny(), optimizer=jobs.sgd())
    with pytest.raises(ConflictError, match=r"`sparse.ast` changes the loss too"):
        ss.compose(made, [AST(), ALL])


def test_a_teacher_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no model"):
        distilling(replace(ALL, teacher=str(tmp_path)))
