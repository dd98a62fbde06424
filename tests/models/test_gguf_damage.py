"""GGUF files of strangers: whatever their keys say, a model opens that computes, or there is an error of one line."""

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.errors import DataError, ShoestringError
from shoestring.models import gguf, gguf_file
from tests.rigs import gguf_models as rig
from tests.shares import share

library = pytest.importorskip("gguf")
pytest.importorskip("transformers")

NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 16, 64, 96, 300, 10_000, 2**31 - 1, 2**32 - 1]) | st.integers(0, 2**32 - 1)
FLOATS = st.sampled_from([0.0, -1.0, 1.0, 1e-30, 1e30, float("nan"), float("inf")]) | st.floats(width=32)
VALUES = st.one_of(
    NUMBERS,
    FLOATS,
    st.booleans(),
    st.sampled_from(["", "gpt2", "llama", "yarn", "linear", "longrope", "\u2581", "\x00", "x" * 300]),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=3),
    st.lists(FLOATS, min_size=1, max_size=3),
    st.lists(st.text(max_size=4), min_size=1, max_size=3),
)
EXTRA = ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length",
         "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.freq_base_swa", "attention.sliding_window",
         "attention.scale", "attention.sliding_window_pattern", "expert_count", "attention.causal")  # fmt: skip
OF_TOKENS = ("eot_token_id", "unknown_token_id", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces", "pre")


@pytest.fixture(scope="module", params=["llama", "gemma2", "phi3, longrope", "llama, byte fallback"])
def whole(request, tmp_path_factory):
    """Values and tensors of a small file, and where changed ones are written."""
    path = tmp_path_factory.mktemp("damage") / "model.gguf"
    tokenizer = rig.byte_fallback() if "byte" in request.param else rig.byte_level()
    gguf.save(rig.build(request.param.removesuffix(", byte fallback"), tokenizer.vocab_size), tokenizer, path, "f16")
    values, tensors = gguf_file.read(path, library)
    return values, {name: np.array(tensor.data) for name, tensor in tensors.items()}, path.with_name("other.gguf")


def write(values, tensors, path):
    writer = library.GGUFWriter(path, "llama")
    writer.kv_data[0].clear()
    for name, value in values.items():
        gguf._add(writer, name, value.tolist() if isinstance(value, np.ndarray) else value)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@settings(max_examples=12)
@given(data=st.data())
def test_a_file_with_other_values_opens_or_is_refused_in_one_line(whole, data):
    open_damaged(whole, data)


@pytest.mark.slow
@settings(max_examples=share(400, 150))
@given(data=st.data())
def test_many_files_with_other_values_open_or_are_refused_in_one_line(whole, data):
    open_damaged(whole, data)


def open_damaged(whole, data):
    """Open a file with one or two keys removed, changed or added."""
    values, tensors, path = whole
    prefix = values["general.architecture"]
    names = [*values, *(f"{prefix}.{name}" for name in EXTRA), *(f"tokenizer.ggml.{name}" for name in OF_TOKENS)]
    changed = dict(values)
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        value = changed.get(name)
        if isinstance(value, list | np.ndarray) and data.draw(st.booleans()):  # one entry of many
            value = value.tolist() if isinstance(value, np.ndarray) else list(value)
            entry = data.draw(st.text(max_size=3) if isinstance(value[0], str) else st.integers(0, 9))
            value[data.draw(st.integers(0, len(value) - 1))] = type(value[0])(entry)
            changed[name] = value
        elif data.draw(st.booleans()):
            changed[name] = data.draw(VALUES)
        else:
            changed.pop(name, None)
    write(changed, tensors, path)
    logging.disable(logging.WARNING)
    try:
        model, tokenizer = gguf.load(path)
    except ShoestringError as error:
        assert str(error) and "\n" not in str(error)
        return
    finally:
        logging.disable(logging.NOTSET)
    ids = list(range(8)) if tokenizer is None else tokenizer.encode_prompt("the dog")[:8]
    assert rig.logits(model, ids).shape == (len(ids), len(tensors["token_embd.weight"]))


@pytest.mark.parametrize("name", ["eos", "bos", "eot", "unknown", "padding"])
def test_a_token_beyond_the_vocabulary_is_named(whole, name):
    values, tensors, path = whole
    write(values | {f"tokenizer.ggml.{name}_token_id": len(tensors["token_embd.weight"])}, tensors, path)
    with pytest.raises(DataError, match=rf"{name}_token_id is not a whole number from 0 to \d+, but \d+"):
        gguf.load(path)


def test_more_tokens_than_the_model_has_are_refused(whole):
    values, tensors, path = whole
    tokens = [*values["tokenizer.ggml.tokens"], "one more"]
    write(values | {"tokenizer.ggml.tokens": tokens}, tensors, path)
    with pytest.raises(DataError, match="tokens for a model of"):
        gguf.load(path)
