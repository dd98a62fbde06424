"""Chat templates for models without one: what they write, when they are taken, and what is said of others."""

import json
import logging

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from shoestring.core.errors import DataError
from shoestring.data import built_in_templates
from shoestring.data.built_in_templates import TEMPLATES, with_template
from shoestring.data.chat_template import chat_template, template_source
from shoestring.data.tokenizer import Tokenizer, byte_tokenizer, train_bpe

TEXTS = [f"What do {name} cost?\n{name}: {count} euros" for count, name in enumerate(["apples", "pears", "milk"])] * 9


def without_template(end="</s>", special=(), bos=""):
    """A byte-level BPE with spaces that join words, as of a model that continues text."""
    engine = tokenizers.Tokenizer.from_str(train_bpe(TEXTS, 300).engine.to_str())
    engine.add_special_tokens([end, *special, *([bos] if bos else [])])
    config = {"eos_token": end} | ({"bos_token": bos} if bos else {})
    return Tokenizer(engine, companions={"tokenizer_config.json": json.dumps(config).encode()})


@pytest.fixture(autouse=True)
def say_everything_again():
    built_in_templates._warn.cache_clear()


MESSAGES = st.lists(
    st.tuples(
        st.text(alphabet=st.characters(exclude_categories=["Cs", "Co", "Cn"]), max_size=8), st.text("ab ", max_size=4)
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=40, deadline=None)
@given(talk=MESSAGES, bos=st.sampled_from(["", "<s>"]), system=st.booleans(), named=st.sampled_from([*TEMPLATES, ""]))
def test_an_answer_follows_its_prompt_and_ends_with_a_token_that_ends_answers(talk, bos, system, named):
    tokenizer = with_template(without_template(special=["<|im_start|>", "<|im_end|>"], bos=bos), named)
    template = chat_template(tokenizer)
    messages = [{"role": "system", "content": "Be brief."}] if system else []
    for question, answer in talk:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    ((tokens, trained),) = template.samples(messages, {})
    prompt = template.encode(messages[:-1], {})
    assert tokens[: len(prompt)] == prompt and not trained[len(prompt) - 1] and trained[len(prompt)]
    ends = template.ends()
    assert tokens[max(at for at, learnt in enumerate(trained) if learnt)] in ends
    if bos and named == "plain":
        assert tokens[0] == tokenizer.engine.token_to_id(bos) and tokens.count(tokens[0]) == 1


def test_a_model_keeps_its_own_template_and_another_gets_one_that_fits_its_tokens(caplog):
    own = without_template()
    own.companions["chat_template.jinja"] = b"{{ messages[0].content }}"
    assert template_source(with_template(own, "")) == "{{ messages[0].content }}" and not caplog.records
    assert "<|im_start|>" in template_source(
        with_template(without_template(special=["<|im_start|>", "<|im_end|>"]), "")
    )
    assert "</s>" in template_source(with_template(without_template(), ""))
    said = [record.message for record in caplog.records]
    assert len(said) == 2 and 'data.template = "chatml"' in said[0] and 'data.template = "plain"' in said[1]
    with_template(without_template(), "")  # is said once
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("chatml", r'has no <\|im_start\|> and no <\|im_end\|>[\s\S]*"plain"'),
        ("plane", r"cannot read the chat template `plane`[\s\S]*did you mean `plain`"),
        ("mine.jinja", r"cannot read the chat template `mine.jinja`[\s\S]*plain or chatml"),
    ],
)
def test_a_template_that_cannot_be_is_refused_with_a_way_out(named, message):
    with pytest.raises(DataError, match=message):
        with_template(without_template(), named)


def test_a_tokenizer_without_an_end_takes_no_plain_template():
    engine = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(DataError, match="no end-of-text token"):
        with_template(Tokenizer(engine), "")


def test_marks_that_are_no_tokens_are_named(tmp_path, caplog):
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    with caplog.at_level(logging.WARNING, "shoestring.data"):
        with_template(without_template(special=["<|im_start|>", "<|im_end|>"]), str(file))
        assert not caplog.records
        with_template(byte_tokenizer(), str(file))
    (record,) = caplog.records
    assert "`<|im_start|>` of the chat template" in record.message and "12 tokens" in record.message
