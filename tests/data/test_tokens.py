"""Token files: what is written comes back, windows are the definition, and damage is refused."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.errors import DataError
from shoestring.core.task import IGNORED
from shoestring.data.tokens import HEADER_BYTES, MAGIC, TokenDataset, TokenWriter, read_header, verify


def write(path, tokens, vocab_size=1000, **more):
    with TokenWriter(path, vocab_size) as writer:
        writer.append(np.asarray(tokens[: len(tokens) // 2]), size=3)
        writer.append(np.asarray(tokens[len(tokens) // 2 :]), size=4)
        return writer.finish(**{"tokenizer": "t", "recipe": "r", **more})


@given(st.lists(st.integers(0, 999), min_size=2, max_size=60), st.integers(1, 20), st.booleans())
@settings(max_examples=60)
def test_samples_are_the_windows_of_the_definition(tmp_path_factory, tokens, sequence, pad_last):
    path = tmp_path_factory.mktemp("tokens") / "some.tokens"
    write(path, tokens)
    if len(tokens) <= sequence:
        with pytest.raises(DataError, match="fewer than one sample"):
            TokenDataset(path, sequence, pad_last=pad_last)
        return
    data = TokenDataset(path, sequence, pad_last=pad_last)
    targets = []
    for index in range(len(data)):
        window = tokens[index * sequence : index * sequence + sequence + 1]
        short = sequence + 1 - len(window)
        inputs = window[:-1] + [0] * short if short == 0 else (window + [0] * short)[:sequence]
        wanted = window[1:] + [IGNORED] * short
        sample = data[index]
        assert sample["targets"].tolist() == wanted
        real = [i for i, target in enumerate(wanted) if target != IGNORED]
        assert [sample["inputs"][i].item() for i in real] == [inputs[i] for i in real]
        assert sample["inputs"].dtype == sample["targets"].dtype == torch.int64
        targets += [target for target in wanted if target != IGNORED]
    assert len(targets) == data.targets
    assert targets == (tokens[1:] if pad_last else tokens[1 : 1 + (len(tokens) - 1) // sequence * sequence])


def test_many_samples_are_the_single_ones(tmp_path):
    write(tmp_path / "a.tokens", list(range(100)))
    data = TokenDataset(tmp_path / "a.tokens", 7, pad_last=True)
    for many, index in zip(data.__getitems__([3, 14, 0, 3]), [3, 14, 0, 3], strict=True):
        assert all(torch.equal(many[name], data[index][name]) for name in ("inputs", "targets"))
    assert torch.equal(data[-1]["inputs"], data[len(data) - 1]["inputs"])
    with pytest.raises(IndexError):
        data[len(data)]


def test_a_range_of_a_file_is_a_data_set(tmp_path):
    write(tmp_path / "a.tokens", list(range(100)))
    part = TokenDataset(tmp_path / "a.tokens", 10, start=40, stop=61, size=5, documents=1)
    assert (len(part), part.tokens, part.bytes, part.documents) == (2, 21, 5, 1)
    assert part[1]["targets"].tolist() == list(range(51, 61))


def test_a_pickled_data_set_carries_no_tokens(tmp_path):
    write(tmp_path / "a.tokens", list(range(1000)) * 20)
    data = TokenDataset(tmp_path / "a.tokens", 10)
    first = data[0]
    stored = pickle.dumps(data)
    assert len(stored) < 2000
    assert torch.equal(pickle.loads(stored)[0]["inputs"], first["inputs"])  # noqa: S301 (our own bytes)


def test_the_width_follows_the_vocabulary_and_the_fingerprint_does_not(tmp_path):
    narrow = write(tmp_path / "a.tokens", [1, 2, 3], vocab_size=1 << 16)
    wide = write(tmp_path / "b.tokens", [1, 2, 3], vocab_size=(1 << 16) + 1)
    other = write(tmp_path / "c.tokens", [1, 2, 4])
    assert (narrow.dtype, wide.dtype) == ("uint16", "uint32")
    assert narrow.fingerprint == wide.fingerprint != other.fingerprint
    assert TokenDataset(tmp_path / "b.tokens", 2)[0]["targets"].tolist() == [2, 3]
    assert (narrow.tokens, narrow.bytes, narrow.documents) == (3, 7, 2)
    assert verify(tmp_path / "b.tokens") == wide


def damage(path, kind):
    content = bytearray(path.read_bytes())
    if kind == "payload":
        content[HEADER_BYTES + 5] ^= 1
    elif kind == "cut":
        del content[-1:]
    elif kind == "longer":
        content += b"\0"
    elif kind == "magic":
        content[0] ^= 1
    elif kind == "json":
        content[len(MAGIC)] = ord("x")
    elif kind == "version":
        content = content.replace(b'"version": 1', b'"version": 9')
    elif kind == "type":
        content = content.replace(b'"bytes": 7', b'"bytes":""')
    elif kind == "key":
        content = content.replace(b'"recipe"', b'"recipx"')
    elif kind == "dtype":
        content = content.replace(b"uint16", b"object")
    elif kind == "header":
        del content[100:]
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("kind", ["cut", "longer", "magic", "json", "version", "type", "key", "dtype", "header"])
def test_a_damaged_file_is_refused_when_opened(tmp_path, kind):
    write(tmp_path / "a.tokens", list(range(50)))
    before = (tmp_path / "a.tokens").read_bytes()
    damage(tmp_path / "a.tokens", kind)
    assert (tmp_path / "a.tokens").read_bytes() != before
    with pytest.raises(DataError, match=r"a\.tokens"):
        read_header(tmp_path / "a.tokens")


def test_a_flipped_bit_in_the_tokens_is_found(tmp_path):
    write(tmp_path / "a.tokens", list(range(50)))
    damage(tmp_path / "a.tokens", "payload")
    read_header(tmp_path / "a.tokens")
    with pytest.raises(DataError, match="not the ones that were written"):
        verify(tmp_path / "a.tokens")


def test_a_token_beyond_the_vocabulary_is_found(tmp_path):
    write(tmp_path / "a.tokens", [5, 10, 3], vocab_size=10)
    with pytest.raises(DataError, match="damaged"):
        verify(tmp_path / "a.tokens")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.tokens.*No such file"):
        read_header(tmp_path / "none.tokens")


def test_an_interrupted_writer_leaves_the_old_file_and_nothing_else(tmp_path):
    write(tmp_path / "a.tokens", [1, 2, 3])
    before = (tmp_path / "a.tokens").read_bytes()
    with pytest.raises(KeyError), TokenWriter(tmp_path / "a.tokens", 10) as writer:
        writer.append(np.array([7, 7]), size=2)
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["a.tokens"]
    assert (tmp_path / "a.tokens").read_bytes() == before


def test_two_at_once_in_a_folder_leave_a_whole_file(tmp_path):
    """Hosts that share a folder may have processes of the same number."""
    path = tmp_path / "a.tokens"
    with TokenWriter(path, 1000) as one, TokenWriter(path, 1000) as other:
        for writer in (one, other):
            writer.append(np.arange(50), size=3)
        one.finish(tokenizer="t", recipe="r")
        assert verify(path).tokens == 50
        other.append(np.arange(20), size=2)
        assert verify(path).tokens == 50
        other.finish(tokenizer="t", recipe="r")
    assert verify(path).tokens == 70 and [each.name for each in tmp_path.iterdir()] == ["a.tokens"]
