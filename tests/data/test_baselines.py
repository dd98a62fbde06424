"""The n-gram model against a dictionary, and sums to one; the compressors against their own files."""

import gzip
import lzma
import math
import random
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.errors import ConfigError
from shoestring.data.baselines import gzip_bits, witten_bell, witten_bell_bits, xz_bits

texts = st.binary(max_size=200) | st.text("ab\0", max_size=200).map(str.encode)


def reference(train, held_out, order):
    """The recursion of Witten and Bell's model, one dictionary a context."""
    seen = defaultdict(Counter)
    padded = bytes(order - 1) + train
    for at, byte in enumerate(train, order - 1):
        for length in range(order):
            seen[padded[at - length : at]][byte] += 1

    def probability(byte, context, length):
        lower = probability(byte, context, length - 1) if length else 1 / 256
        after = seen.get(context[len(context) - length :])
        if after is None:
            return lower
        return (after[byte] + len(after) * lower) / (after.total() + len(after))

    padded = bytes(order - 1) + held_out
    return [probability(byte, padded[at : at + order - 1], order - 1) for at, byte in enumerate(held_out)]


@given(texts, texts, st.integers(1, 8))
@settings(max_examples=150)
def test_it_is_the_model_of_the_definition(train, held_out, order):
    np.testing.assert_allclose(witten_bell(train, held_out, order), reference(train, held_out, order), rtol=1e-12)


@given(texts, st.binary(min_size=4, max_size=4) | st.text("ab\0", min_size=4, max_size=4).map(str.encode))
@settings(max_examples=40)
def test_the_256_bytes_after_any_context_sum_to_one(train, context):
    held_out = b"".join(context + bytes([byte]) for byte in range(256))
    assert witten_bell(train, held_out, 5)[4::5].sum() == pytest.approx(1, abs=1e-12)


def test_bits_are_the_mean_code_length():
    draw = random.Random(0)
    train, held_out = (bytes(draw.choices(b"abcd", (5, 3, 1, 1), k=k)) for k in (5000, 500))
    expected = -sum(map(math.log2, reference(train, held_out, 3))) / 500
    assert witten_bell_bits(train, held_out, 3) == pytest.approx(expected, rel=1e-12)
    assert witten_bell_bits(train, held_out, 3) < 2
    assert witten_bell_bits(b"", held_out) == 8


def test_contexts_across_a_separator_are_those_of_the_joined_text():
    """A document's first byte is predicted after the separator, as in training."""
    train = b"\0".join(b"xy%c" % letter for letter in b"abcdefgh")
    assert witten_bell(train, b"zz\0x", 2)[-1] > 0.5


def test_orders_beyond_a_64_bit_code_are_refused():
    for order in (0, 9):
        with pytest.raises(ConfigError, match=f"order {order}"):
            witten_bell(b"a", b"a", order)


def test_compressors_at_level_nine():
    text = "".join(f"line {i} of {i % 7}\n" for i in range(4000)).encode()
    assert gzip_bits(text) == 8 * len(gzip.compress(text, 9)) / len(text)
    assert xz_bits(text) == 8 * len(lzma.compress(text, preset=9)) / len(text)
    assert xz_bits(text) < gzip_bits(text) < 2.5
