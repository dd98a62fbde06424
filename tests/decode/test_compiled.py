"""Compiled passes of rounded shapes: the texts are those of passes of exact shapes."""

import pytest
import torch

from shoestring.core.errors import ConfigError
from shoestring.decode.compiled import Compiled, rounded
from shoestring.decode.drafters.skipping import SkippingDrafter
from shoestring.decode.engine import Engine, Request
from shoestring.decode.settings import Sampling, Speculation
from shoestring.decode.skipping.adapters import OnlineSkipping
from shoestring.models.gpt import GPT, GPTConfig


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    shape = {"vocab_size": 50, "dim": 32, "layers": 1, "heads": 4, "kv_heads": 2, "hidden": 48}
    return GPT(GPTConfig(**shape, context=300, init_std=0.3)).double()


def texts(model, adapter, slots):
    engine = Engine(adapter, slots=slots, chunk=20)
    numbers = torch.Generator().manual_seed(0)
    rows = [
        engine.submit(
            Request(
                tokens=torch.randint(50, (length,), generator=numbers).tolist(),
                max_new=12,
                sampling=Sampling(temperature=index % 2, seed=index),
            )
        )
        for index, length in enumerate((3, 40, 250))
    ]
    while engine.busy:
        engine.step()
    return [row.text for row in rows]


def test_texts_are_those_of_the_model_that_is_not_compiled_and_few_shapes_are_compiled(model):
    seen = []

    def count(graph, _):
        seen.append(graph)
        return graph.forward

    compiled = Compiled(model, 300, backend=count)
    assert texts(model, compiled, 3) == texts(model, model, 3)
    # Rows 1, 2 and 3 (all of them), 1 to 16 tokens, 256 or all 300 positions.
    assert 1 <= len(seen) <= 3 * 5 * 2


def test_what_padding_writes_is_never_seen(model):
    compiled = Compiled(model, 300, backend="eager")
    tokens = torch.randint(50, (2, 30), generator=torch.Generator().manual_seed(0))
    cache = compiled.new_cache(3, 24)
    compiled.read(tokens[:1, :20], cache, rows=slice(0, 1))
    compiled.read(tokens[1:, :9], cache, rows=slice(2, 3))
    got = compiled.read(tokens[:1, 20:23], cache, rows=slice(0, 1))  # writes padding to rows 0, 1 and 2
    torch.testing.assert_close(got, model(tokens[:1, :23])[:, 20:], rtol=0, atol=1e-12)
    got = compiled.read(tokens[1:, 9:14], cache, rows=slice(2, 3))
    torch.testing.assert_close(got, model(tokens[1:, :14])[:, 9:], rtol=0, atol=1e-12)
    got = compiled.read(tokens[:1, 23:24], cache, rows=slice(0, 1), wanted="last")
    torch.testing.assert_close(got, model(tokens[:1, :24])[:, 23:], rtol=0, atol=1e-12)


def test_rounding():
    assert [rounded(n) for n in (0, 1, 2, 3, 4, 5, 16, 17)] == [1, 1, 2, 4, 4, 8, 16, 32]


def test_a_compiled_model_skips_nothing_and_says_so(model):
    compiled = Compiled(model, 300, backend="eager")
    with pytest.raises(ConfigError, match="a compiled model cannot skip sublayers"):
        Engine(compiled, drafter=SkippingDrafter(Speculation(drafter="skip")))
    with pytest.raises(ConfigError, match="a compiled model cannot skip sublayers"):
        OnlineSkipping(compiled, 0.2, 100)
