"""What a model of transformers does with caches and neighbours is observed, stored, and observed again if need be."""

import json

import pytest
import torch

from benchmarks.models import zoo
from shoestring.models.behaviour import Behaviour, observe, packing_fault
from shoestring.models.shrunken import LENGTH, MOST_WEIGHTS, shrink

transformers = pytest.importorskip("transformers")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home folder, so that nothing has been observed yet; returns the folder of observations."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache" / "shoestring" / "behaviour"


def stored(home):
    (file,) = home.iterdir()
    return file


@pytest.mark.slow
def test_an_observation_is_stored_and_a_damaged_one_is_made_again(home):
    model = zoo.build("gpt2")
    first = observe(model)
    assert first.cache == "ours" and first.rows_independent and first.packing_isolates
    file = stored(home)
    original = file.read_bytes()
    table = json.loads(original)
    file.write_text(json.dumps(table | {"why": "read from the file"}))
    assert observe(model).why == "read from the file"
    for damaged in (b"", original[:-9], json.dumps(table | {"cache": 3}).encode()):
        file.write_bytes(damaged)
        assert observe(model) == first
        assert stored(home).read_bytes() == original


@pytest.mark.slow
def test_another_configuration_is_observed_anew_but_not_other_weights(home):
    observe(zoo.build("gpt2", seed=0))
    observe(zoo.build("gpt2", seed=1))
    assert len(list(home.iterdir())) == 1
    observe(zoo.build("gpt2, untied"))
    assert len(list(home.iterdir())) == 2


@pytest.mark.slow
def test_observing_leaves_no_trace(home):
    model = zoo.build("llama, dynamic").train()
    before, state = {name: tensor.clone() for name, tensor in model.state_dict().items()}, torch.get_rng_state()
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    cached = model.config.use_cache
    observe(model)
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.use_cache is cached
    for name, tensor in (*before.items(), *buffers.items()):
        assert torch.equal(model.get_buffer(name) if name in buffers else model.state_dict()[name], tensor)


def test_lengths_of_a_copy_are_told_by_those_of_the_model():
    sizes = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 8}
    ropes = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [4.0] * 64}
    config = transformers.Phi3Config(
        **sizes,
        intermediate_size=8192,
        vocab_size=200_000,
        max_position_embeddings=131_072,
        original_max_position_embeddings=4096,
        rope_parameters={**ropes, "original_max_position_embeddings": 4096, "rope_theta": 1e4},
        sliding_window=None,
    )
    with torch.device("meta"):
        model = transformers.Phi3ForCausalLM(config)
    copied = shrink(model)
    assert sum(parameter.numel() for parameter in copied.model.parameters()) < MOST_WEIGHTS
    assert copied.length == LENGTH > 24 and copied.scaled == {24: 4096}
    assert model.config.hidden_size == 2048  # the model's own configuration is as it was
    observed = observe(model)
    assert observed.switches == [4096] and not observed.rows_independent and observed.cache == "its own"


def test_a_model_whose_copy_cannot_be_built_is_run_itself(monkeypatch, home, caplog):
    class Demanding(transformers.GPT2LMHeadModel):
        """Takes no configuration but the one it was made with."""

        known = None

        def __init__(self, config):
            super().__init__(config)
            if Demanding.known not in (None, config):
                raise ValueError("another configuration")
            Demanding.known = config

    model = Demanding(zoo.CASES["gpt2"]()).double().eval()
    observed = observe(model)
    assert isinstance(observed, Behaviour) and not observed.copied and observed.cache == "ours"
    assert "no small copy of Demanding can be run" in caplog.text


@pytest.mark.parametrize("cache", [False, True])
def test_a_cache_that_is_on_hides_where_packed_texts_begin(cache):
    model = zoo.build("llama")
    model.config.use_cache = cache
    assert bool(packing_fault(model, 100)) is cache
