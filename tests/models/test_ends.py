"""Ends and defaults of sampling: as transformers reads them, and the same in every verb and every export."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.errors import ConfigError, DataError
from shoestring.data.chat_ends import ends_of_answers
from shoestring.data.chat_template import chat_template
from shoestring.data.tokenizer import Tokenizer, byte_tokenizer
from shoestring.decode.settings.generation import SamplingOptions, SamplingRule, SeededOptions
from shoestring.models.beside import complete
from shoestring.models.description import describe_model
from shoestring.models.generation_config import ends_of, sampling_of, with_ends
from tests.decode.small_server import CHATML, tokenizer

IDS = st.integers(0, 20)
NAMED = st.none() | IDS | st.lists(IDS, min_size=1, max_size=4, unique=True)
STRANGE = st.sampled_from(
    [True, False, "2", 1.5, math.nan, -3, 2**200, [], [[1]], {"a": 1}, [True], ["x", 4], [None, 3]]
)
GENERATIONS = st.none() | st.fixed_dictionaries({}, optional={"eos_token_id": NAMED, "temperature": st.just(0.7)})
CONFIGS = st.fixed_dictionaries(
    {"model_type": st.just("llama")},
    optional={"eos_token_id": NAMED, "text_config": st.fixed_dictionaries({}, optional={"eos_token_id": NAMED})},
)


def listed(named):
    return [] if named is None else named if isinstance(named, list) else [named]


# -- which tokens end a text -------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(GENERATIONS, CONFIGS)
def test_ends_are_those_of_transformers(tmp_path_factory, generation, config):
    """Where generation_config.json is there and names none, transformers stops nowhere; we read on."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("files")
    (folder / "config.json").write_text(json.dumps(config))
    read = {"config_file_name": "config.json", "_from_model_config": True}
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
        read = {}
    theirs = listed(transformers.GenerationConfig.from_pretrained(folder, **read).eos_token_id)
    ours = ends_of(generation or {}, config)
    assert ours == theirs or (not theirs and ours == ends_of({}, config))
    assert set(describe_model(folder, byte_tokenizer()).ends) == {*ours, byte_tokenizer().end_of_text}


@given(
    *[st.dictionaries(st.just("eos_token_id"), NAMED | STRANGE)] * 2, st.none() | IDS, st.none() | st.integers(1, 30)
)
def test_what_is_no_token_ends_no_text_and_is_told(generation, config, end, vocabulary):
    notes = []
    ends = ends_of(generation, config, end, vocabulary, notes)
    assert len(set(ends)) == len(ends) and all(type(token) is int and token >= 0 for token in ends)
    assert end is None or ends[0] == end
    assert vocabulary is None or all(token < vocabulary for token in ends if token != end)
    first = next((table["eos_token_id"] for table in (generation, config) if any(
        entry is not None for entry in listed(table.get("eos_token_id")))), None)  # fmt: skip
    entries = [entry for entry in listed(first) if entry is not None]
    good = [e for e in entries if type(e) is int and e >= 0 and (vocabulary is None or e < vocabulary)]
    assert set(ends) == {*good, *listed(end)}
    assert len(notes) == len(entries) - len(good)
    assert all(len(note) < 120 and "\n" not in note for note in notes)


@given(*[st.dictionaries(st.just("eos_token_id"), NAMED)] * 2, st.lists(IDS, max_size=3, unique=True))
def test_learnt_ends_are_added_behind_those_that_are_named(generation, config, learnt):
    before = ends_of(generation, config)
    new_generation, new_config = with_ends(generation, config, learnt)
    after = ends_of(new_generation, new_config)
    assert after == [*before, *(end for end in learnt if end not in before)]
    if after != before:  # for programs that read one of the files alone
        assert set(after) <= set(ends_of({}, new_config)) & set(ends_of(new_generation, {}))
    else:
        assert new_config == config
        assert not generation or set(learnt) <= set(ends_of(new_generation, {}))
    assert with_ends(new_generation, new_config, learnt) == (new_generation, new_config)


def test_an_end_of_the_text_part_stays_there():
    config = {"text_config": {"eos_token_id": 3, "vocab_size": 9}}
    assert with_ends({}, {}, [4, 4]) == ({"eos_token_id": 4}, {"eos_token_id": 4})
    assert with_ends({}, config, [4]) == (
        {"eos_token_id": [3, 4]},
        {"text_config": {"eos_token_id": [3, 4], "vocab_size": 9}},
    )


@pytest.mark.parametrize("content", ["[1]", "{", "nul"])
def test_a_damaged_file_is_an_error_of_one_line(tmp_path, content):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(DataError, match=r"generation_config\.json` is not a JSON object") as caught:
        describe_model(tmp_path, byte_tokenizer())
    assert "\n" not in caught.value.parts()[1]


# -- how texts are sampled ---------------------------------------------------------------------------------------------

NUMBERS = st.floats() | st.integers(-3, 60) | st.none() | STRANGE
RULES = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "repetition_penalty"), NUMBERS),
        "do_sample": st.none() | st.booleans(),
    },
)
OPTIONS = {
    "temperature": st.floats(0, 5),
    "top_k": st.integers(0, 50),
    "top_p": st.floats(0.01, 1),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.1, 3),
}


@given(RULES, st.fixed_dictionaries({}, optional=OPTIONS))
def test_what_the_user_gives_wins_over_the_model_and_the_model_over_the_verb(generation, given_options):
    verb = SamplingRule(temperature=0.8, top_p=0.95)
    defaults = SamplingOptions(**given_options).over(sampling_of(generation), verb)
    for name, value in given_options.items():
        assert getattr(defaults.rule, name) == value and name not in defaults.from_model
    for name, value in defaults.from_model.items():
        assert getattr(defaults.rule, name) == value and math.isfinite(value)
        assert generation.get(name) is not None or name == "temperature"
    if generation.get("do_sample") is False and "temperature" not in given_options:
        assert defaults.rule.greedy
    if not sampling_of(generation).keys() - {"repetition_penalty"}:
        assert defaults.rule.top_p == given_options.get("top_p", 0.95)


def test_the_model_names_its_sampling():
    named = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
    defaults = SeededOptions(top_k=5).over(sampling_of(named), SamplingRule(min_p=0.5))
    assert defaults.rule == SamplingRule(temperature=0.6, top_p=0.9, top_k=5, repetition_penalty=1.05)
    assert "temperature 0.6, top_p 0.9, repetition_penalty 1.05" in str(defaults)
    assert str(SamplingOptions().over({}, SamplingRule())) == ""
    assert sampling_of({"do_sample": False, "temperature": 0.6}) == {"temperature": 0.0}
    assert sampling_of({"do_sample": True}) == {"temperature": 1.0}


def test_a_number_of_the_model_that_is_out_of_range_is_told_and_ignored(caplog):
    rule = SamplingOptions().over({"top_p": 7.0, "temperature": 0.5}, SamplingRule()).rule
    assert rule == SamplingRule(temperature=0.5) and "top_p is 7.0" in caplog.text
    with pytest.raises(ConfigError, match="temperature"):
        SamplingOptions(temperature=-1)


# -- which ends are learnt ---------------------------------------------------------------------------------------------

TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "tagged, with a line behind": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
    ),
    "no token at the end": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        "<|endoftext|>",
    ),
    "the end-of-text token": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        "<|endoftext|>",
    ),
    "a token between channels, too": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "thinks<|im_start|>{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
    ),
}
TALKS = st.lists(st.lists(st.text("ab <|im_end|>\n", max_size=8), min_size=1, max_size=3), min_size=1, max_size=3)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=12)
@given(talks=TALKS)
def test_the_end_of_answers_is_found(name, talks):
    template, end = TEMPLATES[name]
    config = {"eos_token": "<|endoftext|>", "chat_template": template}
    companions = {"tokenizer_config.json": json.dumps(config).encode()}
    tokens = Tokenizer(tokenizer().engine, companions=companions)
    rendered, ids, trained, starts = chat_template(tokens), [], [], [0]
    for talk in talks:
        roles = [{"role": role, "content": text or "x"} for text in talk for role in ("user", "assistant")]
        for sample, flags in rendered.samples(roles):
            ids, trained = ids + sample, trained + flags
            starts.append(len(ids))
    found = ends_of_answers(np.array(ids), np.array(trained, np.uint8), starts, tokens)
    assert {tokens.engine.token_to_id(end)} <= set(found) <= {tokens.engine.token_to_id(end), tokens.end_of_text}


def test_nothing_is_learnt_of_nothing():
    tokens = tokenizer(CHATML)
    none = np.zeros(0, np.int64)
    assert ends_of_answers(none, none, [0], tokens) == []
    assert ends_of_answers(np.array([tokens.end_of_text]), np.array([0]), [0, 1], tokens) == []
    assert ends_of_answers(np.array([tokens.end_of_text]), np.array([1]), [0, 1], tokens) == [tokens.end_of_text]


# -- what lies beside a model ------------------------------------------------------------------------------------------

FILES = {
    "LICENSE": b"mine",
    "chat_template.jinja": b"{{ messages }}",
    "preprocessor_config.json": b"{}",
    "tokenizer.model": b"\0\1",
    "README.md": b"# model",
}


@settings(max_examples=40)
@given(
    generation=GENERATIONS,
    original=CONFIGS,
    beside=st.sets(st.sampled_from(sorted(FILES))),
    written=st.fixed_dictionaries({}, optional={"eos_token_id": NAMED, "use_cache": st.just(False)}) | st.none(),
    learnt=st.lists(IDS, max_size=2, unique=True),
    adapters=st.booleans(),
)
def test_a_folder_is_completed(tmp_path_factory, generation, original, beside, written, learnt, adapters):
    source, new = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("new")
    contents = {name: FILES[name] for name in beside} | {"config.json": json.dumps(original).encode()}
    contents |= {} if generation is None else {"generation_config.json": json.dumps(generation).encode()}
    contents |= {"model.safetensors": b"weights", "model.safetensors.index.json": b"{}", "adapter_config.json": b"{}"}
    for name, content in contents.items():
        (source / name).write_bytes(content)
    (new / ("adapter_config.json" if adapters else "config.json")).write_text('{"own": 1}')
    if written is not None:
        (new / "generation_config.json").write_text(json.dumps(written))
    complete(new, source, learnt=learnt)
    assert all((new / name).read_bytes() == FILES[name] for name in beside)
    assert not list(new.glob("*.safetensors*"))
    assert (new / "config.json").exists() is not adapters
    assert (new / "adapter_config.json").exists() is adapters
    left = json.loads(file.read_text()) if (file := new / "generation_config.json").exists() else {}
    if generation is not None and not learnt:
        assert file.read_bytes() == contents["generation_config.json"]
    if generation is None:
        assert "use_cache" not in left
    assert left.get("temperature") == (generation or {}).get("temperature")
    config = {} if adapters else json.loads((new / "config.json").read_text())
    if generation is not None or written is None or not ends_of(written, {}):
        named = ends_of(generation or {}, {k: v for k, v in original.items() if not adapters and k != "text_config"})
        assert set(learnt) | set(named) <= set(ends_of(left, config))
    assert adapters or config["own"] == 1
