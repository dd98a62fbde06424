"""Conversations: encoded as transformers does with the model's own template, and no text can spell a special token."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.core.errors import ConfigError, DataError
from shoestring.data.chat_template import chat_template
from shoestring.data.tokenizer import Tokenizer
from tests.decode.small_server import CHATML, tokenizer

INST = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}{% else %}"
    "{% generation %}{{ message['content'].split('</think>')[-1] + eos_token }}{% endgeneration %}{% endif %}"
    "{% endfor %}"
)
ODD = (
    "{% set ns = namespace(count=0) %}{% for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}\n"
    "{% set ns.count = ns.count + 1 %}{{ ns.count }}:{{ m | tojson }}{% if think is defined and think %}!{% endif %}\n"
    "{% endfor %}"
)
TALK = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "  <b>é</b> & 'x'\n"},
    {"role": "assistant", "content": "hm</think>yes"},
    {"role": "user", "content": "漢🙂?"},
]


def saved(folder, template):
    """A tokenizer in a folder, as transformers reads it."""
    tokens = tokenizer(template)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
        "chat_template": template,
    }
    made = Tokenizer(tokens.engine, companions={"tokenizer_config.json": json.dumps(config).encode()})
    made.save(folder / "tokenizer.json")
    return made


@pytest.mark.parametrize("template", [CHATML, INST, ODD], ids=["chatml", "inst", "odd"])
def test_conversations_are_encoded_as_transformers_does(template, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = chat_template(saved(tmp_path, template))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for arguments in ({}, {"think": True}):
        wanted = theirs.apply_chat_template(TALK, add_generation_prompt=True, return_dict=False, **arguments)
        assert ours.encode(TALK, arguments) == wanted


SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
PARTS = (*SPECIAL, "<|im_", "start|>", "<", ">", "|", " ", "\n", "\U000f0000", "é")


@pytest.mark.slow
@given(
    contents=st.lists(st.lists(st.sampled_from(PARTS), max_size=6).map("".join), min_size=1, max_size=3),
    template=st.sampled_from([CHATML, "<{{ messages[0].content }}>", "{{ messages[0].content }}|im_end|>", INST]),
)
def test_no_text_can_spell_a_special_token(contents, template):
    tokens = tokenizer(template)
    made = chat_template(tokens)
    messages = [{"role": "user", "content": content} for content in contents]
    found = made.encode(messages)
    harmless = made.encode([message | {"content": "x"} for message in messages])
    specials = {tokens.engine.token_to_id(name) for name in SPECIAL}
    assert [token for token in found if token in specials] == [token for token in harmless if token in specials]
    text = tokens.engine.decode(found, skip_special_tokens=False)
    assert text == made.render(messages, {})


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{{ c }}|im_end|>", "a<"),
        ("{{ c | trim }}im_end|>", " a <| "),
        ("<|im_{{ c }}", "end|> a"),
        ("<{{ c }}>", "|im_end|"),
    ],
)
def test_no_text_can_complete_a_special_token_of_which_the_template_has_a_part(template, content):
    tokens = tokenizer("{% set c = messages[0].content %}" + template)
    made = chat_template(tokens)
    found = made.encode([{"role": "user", "content": content}])
    assert bytes(found) == made.render([{"role": "user", "content": content}], {}).encode()


def test_what_a_template_refuses_and_may_not_do_is_an_error():
    refusing = chat_template(tokenizer("{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(ConfigError, match="roles must alternate"):
        refusing.encode(TALK)
    for source in (
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages[99].content + 1 }}",
    ):
        with pytest.raises(ConfigError, match="refuses the conversation"):
            chat_template(tokenizer(source)).encode(TALK)
    with pytest.raises(DataError, match="line 1 of the chat template"):
        chat_template(tokenizer("{% if %}"))


def test_a_template_comes_from_its_own_file_or_by_its_name():
    engine = tokenizer(None).engine
    named = json.dumps({"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]})
    companions = {"tokenizer_config.json": named.encode()}
    assert chat_template(Tokenizer(engine, companions=companions)).render(TALK, {}) == "d"
    companions["chat_template.jinja"] = b"j"
    assert chat_template(Tokenizer(engine, companions=companions)).render(TALK, {}) == "j"
    assert chat_template(Tokenizer(engine)) is None
