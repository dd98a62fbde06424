"""Faults that other libraries have had, and input that holds no preference: each is named in a line, or cannot be."""

import json
import random

import pytest
import torch

import shoestring as ss
from shoestring import run as runs
from shoestring.core.errors import ConfigError, DataError, ShoestringError
from shoestring.core.job import attachments_of
from shoestring.data import Data
from shoestring.data.corpus import prepare_source
from shoestring.data.preferences import KINDS
from shoestring.data.tokenizer import byte_tokenizer
from shoestring.memory import LoRA
from shoestring.models.gpt import GPT
from shoestring.models.saving import save_model
from shoestring.optim import SGD
from shoestring.preference import DPO
from shoestring.preference.losses import AnswerScores, dpo, simpo
from shoestring.training.data_loading import check_teachers
from tests.decode.small_server import CHATML, tokenizer
from tests.preference.test_objective import batch, model
from tests.preference.test_runs import pairs, write

REFUSES = CHATML.replace(
    "{% for message in messages %}",
    "{% for message in messages %}{% if 'forbidden' in message['content'] %}"
    "{{ raise_exception('a word that I do not say') }}{% endif %}",
)
TRIMS = CHATML.replace("message['content'] + '<|im_end|>", "message['content'] | trim + '<|im_end|>")


def prepared(tmp_path, records, template=CHATML, **settings):
    """The corpus of records, and its tokenizer."""
    tokenizer(template).save(tmp_path / "tokenizer.json")
    chosen = {"form": "preference", "tokenizer": str(tmp_path / "tokenizer.json"), "sequence": 128, "held_out": 0.2}
    return prepare_source(write(tmp_path / "p.jsonl", records), Data(**chosen | settings), tmp_path / "prepared")


def answers_of(corpus):
    """The tokens that are learnt of each answer, and all of its tokens, by kind."""
    found = []
    for part in (corpus.train, corpus.held_out):
        for sample in (part[index] for index in range(len(part))):
            for number in sample["answers"].unique().tolist():
                if number >= 0:
                    own = sample["answers"] == number
                    labels = sample["labels"][own]
                    found.append((number % KINDS, labels[labels >= 0].tolist(), sample["input_ids"][own].tolist()))
    return found


# -- known faults ------------------------------------------------------------------------------------------------------


def test_no_truncation_takes_an_answer_or_its_prompt(tmp_path):
    """Each answer ends as it does in the data, behind its whole prompt; or its pair is left out."""
    drawn = random.Random(0)
    records = [
        {"prompt": "p" * drawn.randint(1, 60), "chosen": "c" * drawn.randint(1, 60) + str(number), "rejected": "r"}
        for number in range(40)
    ]
    corpus = prepared(tmp_path, records)
    whole = {
        f"<|im_start|>user\n{record['prompt']}<|im_end|>\n<|im_start|>assistant\n{record[side]}<|im_end|>"
        for record in records
        for side in ("chosen", "rejected")
    }  # fmt: skip
    left_out = corpus.train.left_out + corpus.held_out.left_out
    found = answers_of(corpus)
    assert 0 < left_out < len(records) and len(found) == 2 * (len(records) - left_out)
    for _, _, tokens in found:
        text = corpus.tokenizer.engine.decode(tokens, skip_special_tokens=False)
        assert text.rstrip("\n") in whole


@pytest.mark.parametrize("ending", ["", "<|im_end|>"])
def test_an_answer_has_one_end_token(tmp_path, ending):
    """Also if its text spells the end token, as data that were rendered before do."""
    records = [record | {"chosen": record["chosen"] + ending} for record in pairs(8)]
    corpus = prepared(tmp_path, records)
    end = corpus.tokenizer.engine.token_to_id("<|im_end|>")
    for _, learnt, _ in answers_of(corpus):
        assert learnt.count(end) == 1 and learnt[-1] == end


def test_sums_are_not_means():
    """DPO's own loss takes sums over tokens whatever their number; the variants per token take means."""
    scores = lambda policy, tokens: AnswerScores(*(torch.tensor([float(v)]) for v in (policy, tokens, -3)))  # noqa: E731
    losses = {
        variant: [float(dpo(scores(-2, n), scores(-4, 2), beta=0.3, variant=variant, smoothing=0.0)) for n in (1, 10)]
        for variant in ("sigmoid", "hinge", "ipo", "normalized")
    }
    for variant, (short, long) in losses.items():
        assert (short == long) is (variant in ("sigmoid", "hinge")), variant
    short, long = (float(simpo(scores(-2, n), scores(-4, 2), beta=2.0, margin=1.0, smoothing=0.0)) for n in (1, 10))
    assert short > long


def test_the_reference_reads_the_tokens_of_the_policy(tmp_path):
    """A reference whose folder has another chat template is not rendered by that."""
    save_model(model().float(), tokenizer("{{ messages[0]['content'] }}"), tmp_path, origin())
    read = []
    feature = DPO(reference=str(tmp_path), cache_folder="")
    with ss.compose(ss.Job(model().float()), [feature, SGD(lr=0.5, momentum=0.0, nesterov=False)]) as job:
        objective = attachments_of(job).loss.__self__
        objective.frozen.register_forward_pre_hook(lambda _, args: read.append(args[0].clone()))
        loss = float(job.step(batch()))
    assert len(read) == 1 and torch.equal(read[0], batch()["input_ids"])
    assert loss == pytest.approx(0.6931472, abs=1e-6)  # it has the weights that training begins with


def origin():
    return {"model": "shoestring.models.gpt:tiny", "arguments": {}, "offered": {"context": 48}}


# -- bad input ---------------------------------------------------------------------------------------------------------

ASK, SAY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("record", "template", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, CHATML, "not a known chat format; its keys are `prompt`, `chosen`"),
        ({"prompt": "a", "chosen": "b", "rejected": 1}, CHATML, "'rejected' is int, not text"),
        ({"prompt": "a", "chosen": "b", "rejected": ["c", "d"]}, CHATML, "message 1 is not an object with a role"),
        ({"chosen": [ASK, SAY], "rejected": [ASK | {"content": "z"}, SAY]}, CHATML, "without a prompt or an answer"),
        ({"prompt": "a", "chosen": "b", "rejected": []}, CHATML, "'rejected' is not a list of messages"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, None, ""),
        ({"prompt": "a", "chosen": "b", "rejected": [ASK]}, CHATML, "the rejected answer has nothing to learn"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, CHATML, "the chosen and the rejected answer are identical"),
        ({"prompt": "a", "chosen": "b", "rejected": " b "}, TRIMS, "renders the chosen and the rejected answer alike"),
        ({"prompt": "a", "chosen": "b", "rejected": "forbidden"}, REFUSES, "the rejected answer: .*that I do not say"),
        ({"prompt": "a", "chosen": "forbidden", "rejected": "b"}, REFUSES, "the chosen answer: .*that I do not say"),
    ],
)
def test_records_are_refused_in_one_line_that_names_them(tmp_path, record, template, message):
    records = [*pairs(2), record]
    if template is None:  # an empty answer is one: the end of the text alone
        assert any(len(learnt) == 1 for _, learnt, _ in answers_of(prepared(tmp_path, records)))
        return
    with pytest.raises(DataError, match=f"p.jsonl:3: .*{message}|p.jsonl:3: {message}") as error:
        prepared(tmp_path, records, template)
    said, reason = str(error.value).splitlines()[0], error.value.parts()
    assert "\n" not in reason[1] and said and json.dumps(reason)


def test_a_reference_of_another_vocabulary_is_refused(tmp_path):
    save_model(model(vocab_size=12).float(), byte_tokenizer(), tmp_path / "other", origin())
    feature = DPO(reference=str(tmp_path / "other"), cache_folder="")
    for features in ([feature], [LoRA(rank=2), feature]):
        with pytest.raises(ConfigError, match=r"`preference.dpo.reference` knows 12 tokens, and the trained one 11"):
            ss.compose(ss.Job(model().float()), features)


def test_a_reference_of_another_tokenizer_is_refused(tmp_path):
    save_model(model().float(), byte_tokenizer(), tmp_path / "other", origin())
    _, document = runs.read("preference")
    document["run"] |= {"model": str(tmp_path), "data": "p.jsonl"}
    document["preference"]["dpo"]["reference"] = str(tmp_path / "other")
    with pytest.raises(ShoestringError, match=r"`preference.dpo`.* another tokenizer"):
        check_teachers(runs.parse(document, name="pairs"), tokenizer())
    check_teachers(runs.parse(document, name="pairs"), byte_tokenizer())


def test_a_reference_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ShoestringError, match="nowhere"):
        ss.compose(ss.Job(model()), [DPO(reference=str(tmp_path / "nowhere"), cache_folder="")])
    assert isinstance(model(), GPT)
