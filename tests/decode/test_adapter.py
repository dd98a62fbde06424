"""Models of transformers read into our cache: rows of unlike length give the logits of reading each text whole."""

import pytest
import torch

from shoestring.decode.adapter import OwnCached, Pretrained, Whole, adapt
from shoestring.decode.engine import generate
from shoestring.decode.settings.generation import Sampling

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=5),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=8, use_sliding_window=True, **SLIDING),
    "phi3": transformers.Phi3Config(**SIZES),
    "gemma2": transformers.Gemma2Config(**SIZES, head_dim=8, **SLIDING),
    "gpt2": transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=32),
    "gpt_neox": transformers.GPTNeoXConfig(**{**SIZES, "num_key_value_heads": None}),
    "bloom": transformers.BloomConfig(vocab_size=60, hidden_size=16, n_layer=2, n_head=2),
    "mamba": transformers.MambaConfig(vocab_size=60, hidden_size=16, num_hidden_layers=2, state_size=4),
    "openai-gpt": transformers.OpenAIGPTConfig(vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=32),
}


def build(kind):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]).double().eval()


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gpt2", "phi3", "gemma2", "gpt_neox"])
def test_reading_rows_of_unlike_lengths_into_our_cache_equals_reading_whole(kind):
    model = build(kind)
    assert isinstance(adapt(model), Pretrained)
    # Masks of transformers' own attention have a finite minimum.
    assert difference(model, adapt(model)) < 1e-5


@torch.no_grad()
def difference(model, adapter):
    """Largest error of the logits of two texts of unlike lengths that are read into a cache, in standard deviations."""
    tokens = torch.randint(3, 60, (2, 14), generator=torch.Generator().manual_seed(0))
    cache = adapter.new_cache(2, 16)
    adapter.read(tokens[:1, :6], cache, rows=slice(0, 1))
    adapter.read(tokens[1:, :1], cache, rows=slice(1, 2))
    cached = adapter.read(torch.stack([tokens[0, 6:14], tokens[1, 1:9]]), cache, counts=[8, 3])
    exact = model(tokens).logits
    errors = torch.cat([cached[0] - exact[0, 6:14], cached[1, :3] - exact[1, 1:4]])
    return float(errors.abs().max() / exact.std())


@pytest.mark.parametrize("kind", ["mistral", "qwen3", "gemma2"])
def test_a_sliding_window_slides_in_the_cache_too(kind):
    model = build(kind)
    tokens = torch.randint(60, (1, 20), generator=torch.Generator().manual_seed(0))
    adapter = adapt(model)
    cache = adapter.new_cache(1, 20)
    pieces = torch.cat([adapter.read(piece, cache) for piece in tokens.split([9, 1, 1, 4, 5], 1)], 1)
    torch.testing.assert_close(pieces, model(tokens).logits, rtol=0, atol=1e-5)
    adapter.passes.window = None
    cache = adapter.new_cache(1, 20)
    assert (adapter.read(tokens, cache) - pieces).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["bloom", "mamba"])
def test_a_model_that_cannot_take_our_cache_has_its_own(kind, caplog):
    model = build(kind)
    adapter = adapt(model, 32)
    assert isinstance(adapter, OwnCached)
    assert "read whole" not in caplog.text
    assert difference(model, adapter) < 1e-5


def test_a_model_without_a_cache_is_read_whole_and_says_so(caplog):
    model = build("openai-gpt")
    adapter = adapt(model, 32)
    assert isinstance(adapter, Whole)
    assert "OpenAIGPTLMHeadModel reads its whole text again for each token, which is slow" in caplog.text
    assert difference(model, adapter) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom", "mamba", "openai-gpt"])
def test_greedy_text_is_that_of_transformers(kind):
    model = build(kind)
    greedy = list(generate(model, [3, 4], max_new=20, sampling=Sampling(temperature=0)))
    wanted = model.generate(torch.tensor([[3, 4]]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert greedy == wanted[0, 2:].tolist()


def test_eager_attention_takes_masks_that_are_added():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"], attn_implementation="eager").double().eval()
    assert isinstance(adapt(model), Pretrained)
    assert difference(model, adapt(model)) < 1e-5
