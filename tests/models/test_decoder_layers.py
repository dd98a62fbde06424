"""All layers of a decoder in one native call give what the modules give, for each model for which they are used."""

import gc
import weakref
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from shoestring.decode.adapted import AdaptedRows
from shoestring.decode.adapter import adapt
from shoestring.models import decoder_parts, quantized, sublayers
from shoestring.models.adapters import LowRank
from shoestring.models.adapters_by_row import place
from shoestring.models.cache import KVCache
from shoestring.models.gpt import GPT, Block, GPTConfig

ROOM = 64


def gpt(layers=2, heads=2, group=1, head_width=16, hidden=96, tied=False, bits=None, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    config = GPTConfig(
        vocab_size=64, dim=heads * head_width, layers=layers, heads=heads, kv_heads=heads // group, hidden=hidden,
        context=ROOM, tied=tied, init_std=0.2,
    )  # fmt: skip
    model = GPT(config).eval().to(dtype)
    if bits:
        quantized.replace(model, quantized.choose(model, bits)[0], rounded=True)
    return model


def read(adapter, chunks):
    """The logits of the real tokens of passes: tokens (B, T), and the number of real ones of each row."""
    cache = adapter.new_cache(len(chunks[0][0]), ROOM)
    results = []
    for tokens, counts in chunks:
        logits = adapter.read(tokens, cache, counts=counts)
        results += [row[:count] for row, count in zip(logits, counts, strict=True)]
    return torch.cat(results).float()


def texts(batch, counts, vocabulary=64, prompt=20):
    """Passes over rows of unlike lengths: a prompt, whatever `counts` says, and a token each."""
    generator = torch.Generator().manual_seed(0)

    def some(count):
        return torch.randint(3, vocabulary, (batch, count), generator=generator)

    lengths = [prompt - 3 * row for row in range(batch)]
    return [(some(prompt), lengths), (some(max(counts)), counts), (some(1), [1] * batch)]


def both(adapter, chunks):
    """The logits of native layers and those of the modules; native ones are known to have been used."""
    layers, used = adapter.native_layers, []
    run = layers.run
    layers.run = lambda *arguments: used.append(0) or run(*arguments)
    try:
        ours = read(adapter, chunks)
        adapter.native_layers = None
        theirs = read(adapter, chunks)
    finally:
        adapter.native_layers = layers
        del layers.run
    assert len(used) == sum(tokens.shape[1] <= 16 for tokens, _ in chunks)
    return ours, theirs


def apart(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.std())


def check(model, passes, most):
    """Compare native layers with the modules; those of bf16 may be as far from float32 as the modules are."""
    ours, theirs = both(adapt(model), passes)
    if next(model.parameters()).dtype is torch.float32:
        assert apart(ours, theirs) < most
    else:
        exact = read(adapt(deepcopy(model).float()), passes)
        assert apart(ours, exact) < 1.5 * apart(theirs, exact) + 0.02


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    shape=st.fixed_dictionaries(
        {
            "layers": st.integers(1, 3),
            "heads": st.sampled_from([2, 4]),
            "group": st.sampled_from([1, 2]),
            "head_width": st.sampled_from([16, 48, 64]),
            "hidden": st.sampled_from([32, 96, 160]),
            "tied": st.booleans(),
        }
    ),
    bits=st.sampled_from([None, 8, 4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    counts=st.lists(st.integers(0, 16), min_size=1, max_size=4).filter(any),
)
def test_native_layers_are_the_modules(shape, bits, dtype, counts):
    model, passes = gpt(**shape, bits=bits, dtype=dtype), texts(len(counts), counts)
    check(model, passes, most=1e-4 if bits is None else 1e-3)


SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": ROOM, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OWN = {
    "llama": {"attention_bias": True, "rope_parameters": SCALED | {"original_max_position_embeddings": 16}},
    "qwen2": {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 2},
    "gemma3_text": {"sliding_window": 10, "query_pre_attn_scalar": 7},
    "granite": {"embedding_multiplier": 1.0},
    **{family: {"sliding_window": 10} for family in ("mistral", "ministral", "olmo3", "exaone4")},
}
"""Settings beside `SIZES`: windows that are shorter than the texts, biases, scaled positions."""


def pretrained(family, dtype=torch.float32, **more):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **OWN.get(family, {}), **more})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that norms and biases count, and attention is not even
            parameter.mul_(3) if parameter.dim() > 1 else parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("family", sorted(decoder_parts.FAMILIES))
def test_native_layers_are_those_of_every_family(family):
    for dtype in (torch.float32, torch.bfloat16):
        model = pretrained(family, dtype)
        for counts in ([1], [2, 1, 0], [16, 9, 1]):
            check(model, texts(len(counts), counts, SIZES["vocab_size"]), most=1e-4)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("granite", {"residual_multiplier": 0.5}),
        ("granite", {"embedding_multiplier": 3.0}),
        ("granite", {"logits_scaling": 2.0}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("llama", {"head_dim": 24}),
        ("llama", {"hidden_act": "relu"}),
    ],
)
def test_a_model_of_a_known_family_that_differs_runs_its_modules(family, settings):
    assert getattr(adapt(pretrained(family, **settings)), "native_layers", None) is None


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_bits_alone_and_beside_others(bits, dtype):
    layers = adapt(gpt(bits=bits, dtype=dtype, head_width=32, hidden=160)).native_layers

    def streams(passes):
        cache, results = KVCache(len(passes[0][0]), ROOM), []
        with torch.inference_mode():
            for tokens, counts in passes:
                assert layers.fits(tokens, cache)
                place = cache.place(tokens.shape[1], tokens.device, counts=counts)
                stream = layers.run(tokens, cache, place)
                cache.lengthen(tokens.shape[1], place, counts)
                results.append([row[:count] for row, count in zip(stream, counts, strict=True)])
        return results

    passes = texts(3, [5, 4, 2], prompt=12)
    beside = streams(passes)
    for row in range(3):
        alone = streams([(tokens[row : row + 1, : counts[row]], [counts[row]]) for tokens, counts in passes])
        for one, others in zip(alone, beside, strict=True):
            assert torch.equal(one[0], others[row])


def test_weights_that_change_in_any_way_are_the_ones_that_are_used():
    model = gpt()
    adapter, passes = adapt(model), texts(1, [3])
    before = read(adapter, passes)

    def changed():
        ours, theirs = both(adapter, passes)
        assert apart(ours, theirs) < 1e-3
        return ours

    with torch.no_grad():
        model.blocks[0].mlp.down.weight.mul_(2)
    first = changed()
    model.load_state_dict({name: tensor * 1.5 for name, tensor in model.state_dict().items()}, assign=True)
    second = changed()
    model.blocks[1].mlp.gate_up.weight.data = torch.randn_like(model.blocks[1].mlp.gate_up.weight)
    third = changed()
    model.blocks[1].mlp.down = type(model.blocks[1].mlp.down)(96, 32, 1.0)
    fourth = changed()
    model.blocks[0] = Block(model.config, 0).eval()
    fifth = changed()
    quantized.replace(model, quantized.choose(model, 8)[0], rounded=True)
    sixth = changed()
    for one, other in pairwise([before, first, second, third, fourth, fifth, sixth]):
        assert apart(one, other) > 1e-5


def test_modules_that_compute_something_else_are_run_themselves():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Other(nn.Module):
        def forward(self, x):
            return x

    token = torch.zeros(1, 1, dtype=torch.int64)
    for change in (
        lambda model: setattr(model.blocks[0].mlp, "down", Doubled(96, 32, bias=False)),
        lambda model: setattr(model.blocks[0], "mlp", Other()),
        lambda model: setattr(model.blocks[0], "mlp_norm", nn.LayerNorm(32)),
        lambda model: parametrize.register_parametrization(model.blocks[0].mlp.down, "weight", Other()),
        lambda model: model.blocks[0].mlp.down.bfloat16(),
    ):
        model = gpt()
        adapter = adapt(model)
        assert passes_of(adapter, token)
        change(model)
        assert not passes_of(adapter, token)
        assert adapt(model).native_layers is None or not passes_of(adapt(model), token)


def test_a_cache_of_another_type_is_not_written_to():
    model = gpt()
    adapter = adapt(model)
    cache = adapter.new_cache(1, ROOM)
    adapter.read(torch.zeros(1, 3, dtype=torch.int64), cache)
    model.bfloat16()
    with torch.inference_mode():
        assert not adapter.native_layers.fits(torch.zeros(1, 1, dtype=torch.int64), cache)


def passes_of(adapter, tokens):
    with torch.inference_mode():
        return adapter.native_layers.fits(tokens, KVCache(1, 1))


def test_a_model_that_somebody_watches_or_changes_runs_its_modules():
    model, token = gpt(), torch.zeros(1, 1, dtype=torch.int64)
    adapter = adapt(model)
    assert passes_of(adapter, token)
    for module in (model, model.blocks[0], model.blocks[1].mlp, model.blocks[1].mlp.down, model.blocks[0].mlp_norm):
        for hook in (module.register_forward_hook, module.register_forward_pre_hook):
            handle = hook(lambda *_: None)
            assert not passes_of(adapter, token)
            handle.remove()
            assert passes_of(adapter, token)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not passes_of(adapter, token)
    handle.remove()
    model.blocks[1].mlp.forward = lambda x: x
    assert not passes_of(adapter, token)
    del model.blocks[1].mlp.forward
    assert not adapter.native_layers.fits(token, KVCache(1, 1))  # gradients
    assert not passes_of(adapter, torch.zeros(1, 17, dtype=torch.int64))
    assert not passes_of(adapter, torch.zeros(1, 0, dtype=torch.int64))
    assert passes_of(adapter, token)
    assert not passes_of(adapt(model.double()), token)


@pytest.mark.parametrize("family", ["", "llama", "gemma3_text", "olmo2"])
def test_skipped_sublayers_scale_the_stream(family):
    model = pretrained(family) if family else gpt(layers=4)
    names, passes, adapter = list(sublayers.sublayers(model)), texts(2, [3, 1]), adapt(model)
    seen = [read(adapter, passes)]
    for skipped in (names[:1], names[3:4], names[2:6], names):
        ratios = {name: 0.7 + 0.1 * index for index, name in enumerate(skipped)}
        with sublayers.skipping(model, ratios):
            ours, theirs = both(adapter, passes)
        assert apart(ours, theirs) < 1e-4
        seen.append(ours)
    seen.append(read(adapter, passes))
    assert torch.equal(seen[0], seen[-1])
    assert all(apart(one, other) > 1e-2 for one, other in pairwise(seen))


def test_a_model_with_dropout_is_run_by_its_modules_in_training():
    model = pretrained("seed_oss")
    adapter, token = adapt(model), torch.zeros(1, 1, dtype=torch.int64)
    assert passes_of(adapter, token)
    model.train()
    assert not passes_of(adapter, token)


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_rows_with_adapters_are_those_of_the_modules(bits):
    model = gpt(head_width=32, hidden=160, bits=bits)
    rows = AdaptedRows(adapt(model))
    generator = torch.Generator().manual_seed(5)

    def loaded(rank, names):
        factors = {}
        for name in names:
            outputs, inputs = rows.layers[name].layer.out_features, rows.layers[name].layer.in_features
            a, b = (torch.randn(*shape, generator=generator) for shape in ((rank, inputs), (outputs, rank)))
            factors[name] = LowRank(a, b / rank, 0.5)
        return place(factors, rows.layers, "it")

    names = list(rows.layers)
    adapters = [loaded(3, names[:3]), None, loaded(8, names)]
    results = []
    for layers in (rows.inner.native_layers, None):
        rows.inner.native_layers, cache = layers, rows.new_cache(3, ROOM)
        for row, adapter in enumerate(adapters):
            rows.assign(cache, row, adapter)
        for tokens, counts in texts(3, [2, 1, 2]):
            logits = rows.read(tokens, cache, counts=counts)
            results += [row[:count] for row, count in zip(logits, counts, strict=True)]
    ours, theirs = (torch.cat(part) for part in (results[:9], results[9:]))
    assert 0 < apart(ours, theirs) < 1e-3


def test_what_is_not_finite_stays():
    model = gpt()
    with torch.no_grad():
        model.embed.weight[5, 0] = torch.nan
        model.embed.weight[6, 1] = torch.inf
    adapter = adapt(model)
    cache = adapter.new_cache(3, ROOM)
    logits = adapter.read(torch.tensor([[4], [5], [6]]), cache)
    assert logits[0].isfinite().all() and logits[1].isnan().all() and not logits[2].isfinite().any()


@pytest.mark.slow
def test_a_model_is_freed_with_its_adapters():
    model = gpt()
    adapter, gone = adapt(model), weakref.ref(model)
    read(adapter, texts(1, [2]))
    del model, adapter
    gc.collect()
    assert gone() is None
