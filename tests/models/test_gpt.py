"""The transformer: causality, cache, determinism, the forms it must survive, and refusals."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shoestring.core.errors import ConfigError
from shoestring.models import gpt
from shoestring.models.cache import KVCache
from shoestring.models.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=61, dim=48, layers=3, heads=6, kv_heads=2, hidden=80, context=24, init_std=0.1)


def build(config=CONFIG, seed=0):
    torch.manual_seed(seed)
    return GPT(config)


def tokens(batch=2, count=24, vocabulary=61):
    return torch.randint(vocabulary, (batch, count), generator=torch.Generator().manual_seed(1))


def rotate_one(vector, position, theta):
    """From the definition: the pair (i, i + D/2) is a complex number, multiplied by e^(j · position · frequency)."""
    half = len(vector) // 2
    turned = [0.0] * len(vector)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(vector))
        number = complex(vector[i], vector[i + half]) * complex(math.cos(angle), math.sin(angle))
        turned[i], turned[i + half] = number.real, number.imag
    return turned


def test_rotary_matches_its_definition():
    heads = torch.randn(1, 5, 2, 8, generator=torch.Generator().manual_seed(0))
    config = replace(CONFIG, dim=48, heads=6, rope_theta=100.0)
    turned = gpt.rotate(heads, *gpt.rotary_table(config, torch.arange(3, 8)))
    for t in range(5):
        for head in range(2):
            expected = rotate_one(heads[0, t, head].tolist(), 3 + t, 100.0)
            assert turned[0, t, head].tolist() == pytest.approx(expected, abs=1e-5)


def test_no_token_sees_a_later_one():
    model, before = build(), tokens()
    after = before.clone()
    after[:, 10] = (after[:, 10] + 1) % 61
    difference = (model(before) - model(after)).abs().amax(dim=(0, 2))
    assert torch.all(difference[:10] == 0)
    assert torch.all(difference[10:] > 0)


@pytest.mark.parametrize("cuts", [[24], [10, 14], [1] * 24, [9, 1, 1, 6, 7]])
def test_cached_logits_equal_those_of_the_full_forward(cuts):
    model, batch = build(), tokens()
    cache = KVCache(2, CONFIG.context)
    pieces = torch.cat([model(piece, cache) for piece in batch.split(cuts, dim=1)], dim=1)
    assert torch.allclose(pieces, model(batch), rtol=0, atol=1e-5)
    assert cache.lengths == [24, 24]


def test_a_shortened_cache_forgets():
    model, batch = build(), tokens()
    cache = KVCache(2, CONFIG.context)
    with torch.no_grad():
        model(batch[:, :12], cache)
        model((batch[:, 12:20] + 1) % 61, cache)
        cache.lengths = [12, 12]
        again = model(batch[:, 12:], cache)
        assert torch.allclose(again, model(batch)[:, 12:], rtol=0, atol=1e-5)


def test_more_tokens_than_the_context_are_refused():
    model = build()
    cache = KVCache(1, CONFIG.context)
    with pytest.raises(ConfigError, match="25 tokens exceed the model's context of 24"):
        model(tokens(1, 25))
    model(tokens(1, 20), cache)
    with pytest.raises(ConfigError, match="25 tokens"):
        model(tokens(1, 5), cache)


@pytest.mark.parametrize("tied", [True, False])
def test_the_seed_decides_also_through_meta(tied):
    config = replace(CONFIG, tied=tied)
    direct = build(config, 5)
    with torch.device("meta"):
        late = GPT(config)
    late.to_empty(device="cpu")
    torch.manual_seed(5)
    late.reset_parameters()
    assert torch.equal(direct(tokens()), late(tokens()))
    assert not list(direct.buffers())
    assert not torch.equal(direct.embed.weight, build(config, 6).embed.weight)


@pytest.mark.parametrize("name", ["attention.qkv", "mlp.gate_up"])
def test_a_contiguous_part_of_a_fused_layer_is_refused(name):
    """As torch's ColwiseParallel computes it: the layer keeps its number of outputs, and has the first half of them."""
    model = GPT(GPTConfig(vocab_size=16, dim=16, layers=1, heads=2, kv_heads=2, hidden=16, context=8))
    layer = model.blocks[0].get_submodule(name)
    layer.weight = nn.Parameter(layer.weight.detach().chunk(2)[0])
    with pytest.raises(ConfigError, match="of a fused layer"):
        model(torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.slow
def test_a_model_is_outlined_without_torchs_compiler():
    """Importing it takes a second of every start of a server."""
    program = (
        "import sys, torch\n"
        "shape = dict(vocab_size=64, dim=32, layers=2, heads=2, kv_heads=1, hidden=64, context=16)\n"
        "from shoestring.models.gpt import GPT, GPTConfig\n"
        "with torch.device('meta'): GPT(GPTConfig(**shape))\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "False\n"


def test_residual_writers_start_smaller():
    config = replace(CONFIG, dim=192, hidden=512, layers=8, init_std=0.02)
    model = build(config)
    for block in model.blocks:
        assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
        for layer in (block.attention.out, block.mlp.down):
            assert layer.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_untied_and_tied_differ_by_the_output_layer():
    names = {name for name, _ in build(replace(CONFIG, tied=False)).named_parameters()}
    assert names - {name for name, _ in build().named_parameters()} == {"head.weight"}


def test_grouped_queries_equal_full_heads_with_repeated_keys_and_values():
    grouped = build()
    full = build(replace(CONFIG, kv_heads=6))
    state = dict(grouped.state_dict())
    for layer in range(CONFIG.layers):
        name = f"blocks.{layer}.attention.qkv.weight"
        query, shared = state[name].split([48, 32])
        state[name] = torch.cat([query, shared.view(4, 8, 48).repeat_interleave(3, dim=0).reshape(96, 48)])
    assert torch.allclose(functional_call(full, state, (tokens(),)), grouped(tokens()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("untied", [True, False])
def test_flops_match_those_torch_counts(untied):
    config = replace(CONFIG, tied=not untied)
    model = build(config)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens(1, 24)).sum().backward()
    assert counter.get_total_flops() == 24 * model.flops_per_token(24)


def test_autocast_and_half_precision_stay_close():
    model, batch = build(), tokens()
    exact = model(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (model(batch) - exact).abs().max() < 0.05 * exact.std()
    assert (build().bfloat16()(batch).float() - exact).abs().max() < 0.1 * exact.std()


def test_blocks_checkpoint_with_the_same_gradients():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, wrapped = build(), build()
    for i, block in enumerate(wrapped.blocks):
        wrapped.blocks[i] = checkpoint_wrapper(block)
    for model in (plain, wrapped):
        F.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten()).backward()
    pairs = zip(plain.parameters(), wrapped.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


@pytest.mark.slow
def test_it_traces_without_graph_breaks():
    compiled = torch.compile(build(), backend="eager", fullgraph=True)
    assert torch.allclose(compiled(tokens()), build()(tokens()), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dim": 0}, "GPTConfig.dim is 0"),
        ({"layers": -1}, "GPTConfig.layers is -1"),
        ({"hidden": 1.5}, "GPTConfig.hidden is 1.5"),
        ({"vocab_size": True}, "GPTConfig.vocab_size is True"),
        ({"norm_eps": 0.0}, "GPTConfig.norm_eps is 0.0"),
        ({"rope_theta": float("nan")}, "GPTConfig.rope_theta is nan"),
        ({"dim": 50}, "dim = 50 is not a multiple of heads = 6"),
        ({"kv_heads": 4}, "heads = 6 is not a multiple of kv_heads = 4"),
        ({"dim": 42}, "= 7 is odd"),
    ],
)
def test_sizes_that_do_not_fit_are_named(wrong, message):
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **wrong)


@pytest.mark.parametrize(
    ("preset", "millions"), [("tiny", 1), ("mini", 8.5), ("small", 47), ("gpt124m", 124), ("gpt1b", 1076)]
)
def test_presets_have_the_size_they_say(preset, millions):
    with torch.device("meta"):
        model = getattr(gpt, preset)()
        other = getattr(gpt, preset)(vocab_size=100, context=32, layers=2)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.1)
    assert (other.config.vocab_size, other.config.context, other.config.layers) == (100, 32, 2)


def test_an_unknown_override_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown model setting `layer`.*did you mean `layers`"):
        gpt.tiny(layer=2)
