"""On-policy distillation: whose text is learnt from, that it is a constant to the gradient, and in which steps."""

import copy
from dataclasses import replace

import drafting  # noqa: F401  # the teacher is named by it
import pytest
import torch

import shoestring as ss
from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.feature import Feature
from shoestring.core.job import attachments_of
from shoestring.core.task import call_model
from shoestring.core.trace import Trace
from shoestring.decode import Distill
from shoestring.decode.drafter_training import CACHED, COMPUTED
from shoestring.decode.engine import generate
from shoestring.decode.on_policy import OnPolicy, texts_of
from shoestring.decode.randomness import Purpose, key, uniform
from shoestring.decode.settings.generation import Sampling
from shoestring.models.gpt import tiny
from shoestring.models.sample_cache import sample_keys
from shoestring.parallel import FSDP
from shoestring.precision import Autocast
from shoestring.testing import jobs

DATA = Distill(teacher="drafting:teacher")
OWN = replace(DATA, on_policy=1.0)
HALF = replace(DATA, on_policy=0.5)
PROMPT = 2  # a quarter of 9 tokens


def distilling(*features: Feature, lr=0.2, trace=None):
    return ss.compose(ss.Job(jobs.tiny(), optimizer=jobs.sgd(lr), trace=trace or Trace()), list(features))


def reading(job):
    """What the model reads in training, step by step."""
    seen = []
    attachments_of(job).module.register_forward_pre_hook(
        lambda _, given: seen.append(given[0]) if torch.is_grad_enabled() else None
    )
    return seen


def by_hand(model, batch, step):
    """The texts as `generate` gives them, one by one."""
    for row, each in enumerate(sample_keys(batch)):
        sampling = Sampling(seed=key(int.from_bytes(each[:7]), Purpose.TEXT, step) >> 1)
        prompt = batch["inputs"][row, :PROMPT].tolist()
        made = generate(model, prompt, max_new=jobs.SEQUENCE + 1 - PROMPT, sampling=sampling, context=jobs.SEQUENCE)
        yield [*prompt, *made]


def test_text_is_sampled_from_the_present_weights_and_from_the_samples_first_tokens():
    texts = []
    with distilling(OWN, lr=2.0) as job:
        seen = reading(job)
        for step in range(3):
            texts.append(list(by_hand(copy.deepcopy(attachments_of(job).module).eval(), jobs.batch(0), step)))
            job.step(jobs.batch(0))
        former = list(by_hand(jobs.tiny().eval(), jobs.batch(0), 2))
    assert [inputs.tolist() for inputs in seen] == [[text[:-1] for text in step] for step in texts]
    assert texts[2] != former  # of the same numbers, but of the weights that the run began with


def test_the_gradient_is_that_of_the_same_text_as_data_and_nothing_of_the_prompt_counts():
    for around in ([], [Autocast(dtype="bf16")]):
        with distilling(OWN, *around) as own, distilling(DATA, *around) as data:
            (text,) = [torch.tensor(list(by_hand(jobs.tiny().eval(), jobs.batch(0), 0)))]
            if around:  # it is sampled in the same precision, so that it may be another text
                seen = reading(own)
            loss = own.step(jobs.batch(0))
            inputs = seen[0] if around else text[:, :-1]
            targets = text[:, 1:].clone() if not around else torch.cat((inputs[:, 1:], inputs[:, :1]), 1)
            targets[:, : PROMPT - 1] = -100
            assert float(loss) == float(data.step({"inputs": inputs, "targets": targets}))
            for name, weight in attachments_of(own).module.named_parameters():
                assert torch.equal(weight, attachments_of(data).module.get_parameter(name)), name
            assert attachments_of(own).module.training and own.numbers["sampling_seconds"] > 0


def test_without_it_training_is_what_it_was_and_with_it_steps_on_data_are():
    batches = [jobs.batch(number) for number in range(12)]
    chosen = [uniform(0, Purpose.TEXT, step) < 0.5 for step in range(12)]
    assert 3 < sum(chosen) < 9
    with distilling(DATA, lr=0.0) as job:
        assert attachments_of(job).forward is call_model
        plain = [float(job.step(batch)) for batch in batches]
    with distilling(HALF, lr=0.0) as job:
        mixed = [float(job.step(batch)) for batch in batches]
    assert [one != other for one, other in zip(plain, mixed, strict=True)] == chosen


def test_how_a_batch_is_divided_changes_nothing():
    batch = jobs.batch(0)
    parts = [{name: each[start : start + 2] for name, each in batch.items()} for start in range(0, 8, 2)]
    with distilling(OWN) as whole, distilling(OWN) as divided:
        for _ in range(3):
            assert float(divided.step(*parts)) == pytest.approx(float(whole.step(batch)), rel=1e-5)


def test_what_a_teacher_says_of_the_drafters_text_is_not_cached(tmp_path):
    trace = Trace()
    with distilling(replace(HALF, cache_folder=str(tmp_path)), trace=trace, lr=0.0) as job:
        for step in range(12):
            job.step(jobs.batch(step % 2))
    on_data = 12 - sum(uniform(0, Purpose.TEXT, step) < 0.5 for step in range(12))
    assert trace.facts[COMPUTED] == (12 - on_data + 2) * jobs.BATCH
    assert trace.facts[CACHED] == (on_data - 2) * jobs.BATCH


def test_evaluation_reads_the_data():
    with distilling(OWN) as job, distilling(DATA) as other:
        assert job.evaluate([jobs.batch(0)]) == other.evaluate([jobs.batch(0)])


# -- batches -----------------------------------------------------------------------------------------------------------


def own_text(batch, **settings):
    torch.manual_seed(0)
    job = ss.Job(tiny(vocab_size=32, context=12, layers=1, dim=16, heads=2, kv_heads=2, hidden=16))
    return OnPolicy(attachments_of(job), replace(OWN, **settings)).written(batch)


def test_each_form_of_a_batch_keeps_its_form_and_what_does_not_count():
    tokens = torch.randint(32, (3, 11), generator=torch.Generator().manual_seed(0))
    counts = torch.ones(3, 11, dtype=torch.bool)
    counts[0, :6] = counts[1, 9:] = counts[2] = False  # a long prompt, padding, and nothing that counts
    counts[:, 0] = False
    targets = torch.where(counts, tokens, -100)[:, 1:]
    mapping = own_text({"inputs": tokens[:, :-1], "targets": targets, "id": torch.arange(3)}, prompt_fraction=0.25)
    pair = own_text((tokens[:, :-1], targets), prompt_fraction=0.25)
    labels = own_text({"input_ids": tokens, "labels": torch.where(counts, tokens, -100)}, prompt_fraction=0.25)
    assert torch.equal(mapping["inputs"], pair[0]) and torch.equal(mapping["targets"], pair[1])
    assert torch.equal(mapping["id"], torch.arange(3))
    for inputs, wanted in ((mapping["inputs"], mapping["targets"]), (labels["input_ids"], labels["labels"][:, 1:])):
        written = texts_of({"inputs": inputs[:, : wanted.shape[1]], "targets": wanted})
        kept = torch.zeros(3, 11, dtype=torch.bool)
        kept[0, :6] = kept[1, :3] = kept[1, 9:] = kept[2] = True
        assert torch.equal(written.counted, counts & ~kept)
        assert torch.equal(
            written.tokens[kept[:, :-1].nonzero(as_tuple=True)], tokens[kept[:, :-1].nonzero(as_tuple=True)]
        )
        assert (written.tokens != tokens)[~kept].float().mean() > 0.8


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"inputs": torch.zeros(2, 4, dtype=torch.int64), "targets": torch.ones(2, 4, dtype=torch.int64)}, "follow"),
        ((torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)), "token ids"),
    ],
)
def test_what_is_no_text_is_refused(batch, message):
    with pytest.raises(ConfigError, match=message):
        own_text(batch)


def test_settings_out_of_range_and_a_model_that_is_sharded_are_refused():
    for wrong in ({"on_policy": 1.1}, {"prompt_fraction": 1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            distilling(replace(OWN, **wrong))
    with pytest.raises(ConflictError, match="FSDP shards it"):
        distilling(OWN, FSDP())
