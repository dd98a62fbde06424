"""The cache of tensors by sample: what comes back, what others see, and what a killed writer leaves."""

import os
import signal
from multiprocessing import get_context

import pytest
import torch

from shoestring.core.errors import DataError
from shoestring.models import sample_cache
from shoestring.models.sample_cache import SampleCache, sample_keys

IDENTITY = {"teacher": "abc", "top_k": 2}


def batch(*rows):
    return {"inputs": torch.tensor(rows), "targets": torch.zeros(len(rows), len(rows[0]))}


def tensors(*values):
    return {
        "words": torch.tensor([[value, value + 1] for value in values]).to(torch.uint16),
        "log_probabilities": torch.tensor([[-0.5 * value] * 3 for value in values]).half(),
    }


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_key_says_what_a_model_sees_and_nothing_else():
    one, other = sample_keys(batch([1, 2, 3], [1, 2, 4]))
    assert one != other and len(one) == 16
    assert sample_keys(batch([1, 2, 4], [1, 2, 3])) == [other, one]
    assert sample_keys({**batch([1, 2, 3]), "ids": torch.tensor([7])}) == [one]
    assert sample_keys((torch.tensor([[1, 2, 3]]), None)) == [one]
    masked = {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.tensor([[1, 1, 0]])}
    assert sample_keys(masked) != sample_keys({**masked, "attention_mask": torch.tensor([[1, 1, 1]])})
    assert sample_keys(batch([1, 2], [3, 4]))[0] != sample_keys(batch([1, 2, 3, 4]))[0]
    narrow = torch.tensor([[1, 0, 2, 0, 3, 0]], dtype=torch.int32)  # the same bytes
    assert sample_keys({"inputs": narrow}) != [one] != sample_keys({"input_ids": torch.tensor([[1, 2, 3]])})


def test_what_was_written_comes_back_from_memory_and_from_disk(tmp_path):
    keys = sample_keys(batch([1, 2], [3, 4], [5, 6]))
    cache = SampleCache(tmp_path, IDENTITY)
    assert cache.missing(keys) and len(cache) == 0
    cache.write(keys[:2], tensors(1, 2))
    assert cache.missing(keys) and not cache.missing(keys[:2]) and len(cache) == 2
    assert same(cache.read([keys[1], keys[0]]), tensors(2, 1))
    cache.write(keys, tensors(9, 9, 3))  # those that are there stay
    cache.close()
    again = SampleCache(tmp_path, IDENTITY)
    assert len(again) == 3 and same(again.read(keys), tensors(1, 2, 3))
    assert [path.suffix for path in again.folder.iterdir()] == [".safetensors"]


def test_segments_are_written_when_they_are_full_and_where_shapes_change(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_cache, "SEGMENT", 3 * 10)  # of 10 bytes each
    keys = sample_keys(batch(*([number, 0] for number in range(8))))
    with_more = {"words": torch.zeros(1, 5, dtype=torch.uint16), "log_probabilities": torch.zeros(1, 6).half()}
    cache = SampleCache(tmp_path, IDENTITY)
    cache.write(keys[:5], tensors(0, 1, 2, 3, 4))
    assert len(list(cache.folder.iterdir())) == 1
    cache.write(keys[5:6], with_more)
    cache.write(keys[6:], tensors(6, 7))
    cache.close()
    again = SampleCache(tmp_path, IDENTITY)
    assert same(again.read([*keys[:5], *keys[6:]]), tensors(0, 1, 2, 3, 4, 6, 7))
    assert same(again.read(keys[5:6]), with_more)


def test_ranks_find_what_others_have_written(tmp_path):
    keys = sample_keys(batch([1, 2], [3, 4]))
    one, other = SampleCache(tmp_path, IDENTITY), SampleCache(tmp_path, IDENTITY)
    one.write(keys[:1], tensors(1))
    assert other.missing(keys[:1])
    one.flush()
    assert not other.missing(keys[:1]) and same(other.read(keys[:1]), tensors(1))
    other.write(keys[1:], tensors(2))
    other.flush()
    assert not one.missing(keys) and same(one.read(keys), tensors(1, 2))


def test_another_identity_shares_nothing(tmp_path):
    keys = sample_keys(batch([1, 2]))
    cache = SampleCache(tmp_path, IDENTITY)
    cache.write(keys, tensors(1))
    cache.close()
    other = SampleCache(tmp_path, {**IDENTITY, "teacher": "abd"})
    assert other.missing(keys)
    other.write(keys, tensors(2))
    other.flush()
    segment = next(cache.folder.iterdir())
    segment.rename(other.folder / segment.name)  # whoever moves files between them is told
    with pytest.raises(DataError, match="was written with another teacher"):
        SampleCache(tmp_path, {**IDENTITY, "teacher": "abd"})


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"\xff" * 99])
def test_a_damaged_segment_is_refused_by_name(tmp_path, damage):
    cache = SampleCache(tmp_path, IDENTITY)
    cache.write(sample_keys(batch([1, 2])), tensors(1))
    cache.close()
    segment = next(cache.folder.iterdir())
    segment.write_bytes(damage(segment.read_bytes()))
    with pytest.raises(DataError, match=segment.name):
        SampleCache(tmp_path, IDENTITY)


def wide(number):
    """What takes a while to write."""
    return {"divergence": torch.full((1, 2**20), float(number))}


def write_until_killed(folder):
    cache = SampleCache(folder, IDENTITY)
    for number in range(100):
        cache.write(sample_keys(batch([number, 1])), wide(number))
        cache.flush()


def test_a_killed_writer_leaves_whole_segments_only(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_cache, "SEGMENT", 0)
    writer = get_context("fork").Process(target=write_until_killed, args=(tmp_path,))
    writer.start()
    cache = SampleCache(tmp_path, IDENTITY)
    while len(cache) < 5:
        cache.refresh()  # a part of a segment would be refused
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    left = SampleCache(tmp_path, IDENTITY)
    assert len(left) >= 5
    for number in range(len(left)):
        keys = sample_keys(batch([number, 1]))
        assert not left.missing(keys) and same(left.read(keys), wide(number))
