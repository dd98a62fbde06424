"""Skipped sublayers: every model computes what a forward pass written out by hand does, also with a cache."""

import pytest
import torch
import torch.nn.functional as F

from shoestring.core.errors import ConfigError
from shoestring.decode.adapter import adapt
from shoestring.models import sublayers as module
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.sublayers import skipping, sublayers

WORDS, WIDTH, HEADS, KEYS, HIDDEN, BLOCKS, T = 43, 24, 4, 2, 40, 3, 9
TOKENS = torch.randint(WORDS, (2, T), generator=torch.Generator().manual_seed(1))
LLAMAS = ("Llama", "Mistral", "Qwen2")


def own():
    shape = {"vocab_size": WORDS, "dim": WIDTH, "layers": BLOCKS, "heads": HEADS, "kv_heads": KEYS}
    return GPT(GPTConfig(**shape, hidden=HIDDEN, context=32, init_std=0.3))


def theirs(name, **more):
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.3, **more}
    if name == "GPT2":
        config = transformers.GPT2Config(n_embd=WIDTH, n_layer=BLOCKS, n_head=HEADS, n_positions=32, **common)
        return transformers.GPT2LMHeadModel(config)
    shape = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": BLOCKS}
    shape |= {"num_attention_heads": HEADS, "num_key_value_heads": KEYS, "max_position_embeddings": 32}
    config = getattr(transformers, f"{name}Config")(pad_token_id=0, **(shape | common))
    return getattr(transformers, f"{name}ForCausalLM")(config)


def build(name):
    torch.manual_seed(0)
    model = own() if name == "GPT" else theirs(name)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms of which none is the identity
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.double().eval()


# -- the forward passes, written out -----------------------------------------------------------------------------------


def rms(x, weight, eps, *, single=False):
    """In single precision where transformers computes it so in models of any precision."""
    y = x.float() if single else x
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def turn(heads, theta):
    half = heads.shape[-1] // 2
    # Angles are in single precision everywhere, in which positions times frequencies are rounded.
    angle = torch.arange(heads.shape[1]).float()[:, None] * (1.0 / theta ** (torch.arange(half).float() / half))
    cos, sin = angle.cos()[:, None].double(), angle.sin()[:, None].double()
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attend(q, k, v):
    """(B, T, H, D) and (B, T, K, D) to (B, T, C)."""
    k, v = (each.repeat_interleave(q.shape[2] // each.shape[2], 2) for each in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2)


def gpt(w, x, i):
    def attention(x):
        x = rms(x, w[f"blocks.{i}.attention_norm.weight"], 1e-5) @ w[f"blocks.{i}.attention.qkv.weight"].T
        q, k, v = x.view(*x.shape[:2], -1, WIDTH // HEADS).split([HEADS, KEYS, KEYS], 2)
        return attend(turn(q, 1e4), turn(k, 1e4), v) @ w[f"blocks.{i}.attention.out.weight"].T

    def mlp(x):
        x = rms(x, w[f"blocks.{i}.mlp_norm.weight"], 1e-5) @ w[f"blocks.{i}.mlp.gate_up.weight"].T
        return (F.silu(x[..., :HIDDEN]) * x[..., HIDDEN:]) @ w[f"blocks.{i}.mlp.down.weight"].T

    return {f"blocks.{i}.attention": attention, f"blocks.{i}.mlp": mlp}


def llama(w, x, i):
    at = f"model.layers.{i}"

    def linear(x, name):
        return x @ w[f"{at}.{name}.weight"].T + w.get(f"{at}.{name}.bias", 0.0)

    def attention(x):
        x = rms(x, w[f"{at}.input_layernorm.weight"], 1e-6, single=True)
        q, k, v = (linear(x, f"self_attn.{n}_proj").view(*x.shape[:2], -1, WIDTH // HEADS) for n in "qkv")
        return linear(attend(turn(q, 1e4), turn(k, 1e4), v), "self_attn.o_proj")

    def mlp(x):
        x = rms(x, w[f"{at}.post_attention_layernorm.weight"], 1e-6, single=True)
        return linear(F.silu(linear(x, "mlp.gate_proj")) * linear(x, "mlp.up_proj"), "mlp.down_proj")

    return {f"{at}.self_attn": attention, f"{at}.mlp": mlp}


def gpt2(w, x, i):
    at = f"transformer.h.{i}"

    def norm(x, name):
        return F.layer_norm(x, (WIDTH,), w[f"{at}.{name}.weight"], w[f"{at}.{name}.bias"])

    def linear(x, name):
        return x @ w[f"{at}.{name}.weight"] + w[f"{at}.{name}.bias"]

    def attention(x):
        parts = linear(norm(x, "ln_1"), "attn.c_attn").split(WIDTH, -1)
        return linear(attend(*(p.view(*x.shape[:2], HEADS, -1) for p in parts)), "attn.c_proj")

    def mlp(x):
        return linear(F.gelu(linear(norm(x, "ln_2"), "mlp.c_fc"), approximate="tanh"), "mlp.c_proj")

    return {f"{at}.attn": attention, f"{at}.mlp": mlp}


def by_hand(name, model, ratios):
    w = dict(model.state_dict())
    if name == "GPT":
        x, block, head = w["embed.weight"][TOKENS], gpt, w["embed.weight"]
    elif name == "GPT2":
        x, block = w["transformer.wte.weight"][TOKENS] + w["transformer.wpe.weight"][:T], gpt2
        head = w["transformer.wte.weight"]
    else:
        x, block, head = w["model.embed_tokens.weight"][TOKENS], llama, w["lm_head.weight"]
    for i in range(BLOCKS):
        for sublayer, add in block(w, x, i).items():
            x = ratios[sublayer] * x if sublayer in ratios else x + add(x)
    if name == "GPT2":
        x = F.layer_norm(x, (WIDTH,), w["transformer.ln_f.weight"], w["transformer.ln_f.bias"])
    else:
        x = rms(x, w["norm.weight"], 1e-5) if name == "GPT" else rms(x, w["model.norm.weight"], 1e-6, single=True)
    return x @ head.T


# -- tests -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["GPT", *LLAMAS, "GPT2"])
def test_every_sublayer_can_be_skipped_with_and_without_a_cache(name):
    model = build(name)
    names = list(sublayers(model))
    assert [sublayer.kind for sublayer in sublayers(model).values()] == ["attention", "feed-forward"] * BLOCKS
    for skipped in ([], *([each] for each in names), names[::2], names[:2], names):
        ratios = {each: 0.9 + 0.1 * i for i, each in enumerate(skipped)}
        expected = by_hand(name, model, ratios)
        adapter = adapt(model)
        cache = adapter.new_cache(2, T)
        with skipping(model, ratios):
            whole = model(TOKENS)
            parts = [adapter.read(piece, cache) for piece in TOKENS.split([5, 1, 1, 2], 1)]
        torch.testing.assert_close(getattr(whole, "logits", whole), expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=1e-10)
        kept = [i for i, each in enumerate(names[::2]) if each not in skipped]
        assert sorted(cache.layers) == kept  # a skipped attention sublayer takes no memory


@torch.no_grad()
def test_afterwards_the_model_is_as_before_also_when_contexts_are_nested_or_end_with_an_error():
    model = build("GPT")
    names = list(sublayers(model))
    before = model(TOKENS)
    with pytest.raises(RuntimeError), skipping(model, {names[0]: 1.0, names[3]: torch.tensor(0.5)}):
        inner = model(TOKENS)
        with skipping(model, {names[0]: 2.0}):
            torch.testing.assert_close(model(TOKENS), by_hand("GPT", model, {names[0]: 2.0, names[3]: 0.5}))
        assert torch.equal(model(TOKENS), inner)
        raise RuntimeError
    assert torch.equal(model(TOKENS), before)
    assert not any("forward" in each.__dict__ for each in model.modules())
    with (
        pytest.raises(ConfigError, match=r"no sublayer `blocks.0.attn`"),
        skipping(model, {names[1]: 1.0, "blocks.0.attn": 1.0}),
    ):
        pass
    assert torch.equal(model(TOKENS), before)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Gemma2", "Olmo2"])
def test_norms_of_what_a_sublayer_returns_are_skipped_with_it(name):
    model = theirs(name, **({"head_dim": 6} if name == "Gemma2" else {})).double().eval()
    found = sublayers(model)
    streams = []
    model.model.layers[1].register_forward_hook(lambda _, given, out: streams.extend((given[0], out)))
    both = [each.name for each in found.values() if each.layer == 1]
    with skipping(model, {both[0]: 3.0, both[1]: 0.5}):
        model(TOKENS)
    torch.testing.assert_close(streams[1], 1.5 * streams[0])


@pytest.mark.parametrize("name", ["GPTNeoX", "Cohere", "Phi", "OPT"])
def test_models_of_another_form_are_refused(name):
    if name == "OPT":
        transformers = pytest.importorskip("transformers")
        shape = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=WORDS, word_embed_proj_dim=16, **shape))
    else:
        model = theirs(name, num_attention_heads=2, num_key_value_heads=2)
    with pytest.raises(ConfigError, match=r"not known to compute x \+ Sub"):
        sublayers(model)


def test_a_model_with_known_names_that_adds_up_otherwise_is_refused(monkeypatch):
    model = own()
    block = model.blocks[1]

    def post_norm(x, *rest):
        x = block.attention_norm(x + block.attention(x, *rest))
        return block.mlp_norm(x + block.mlp(x))

    def parallel(x, *rest):
        return x + block.attention(block.attention_norm(x), *rest) + block.mlp(block.mlp_norm(x))

    def scaled(x, *rest):
        x = x + 0.5 * block.attention(block.attention_norm(x), *rest)
        return x + block.mlp(block.mlp_norm(x))

    for forward in (post_norm, parallel, scaled):
        monkeypatch.setattr(block, "forward", forward)
        with pytest.raises(ConfigError, match=r"its block `blocks.1`"):
            sublayers(model)
    monkeypatch.undo()
    assert len(sublayers(model)) == 2 * BLOCKS
    # What is refused would have been computed wrongly: the check is not stricter than it has to be.
    other = own()
    sublayers(other)
    block = other.blocks[1]
    monkeypatch.setattr(block, "forward", parallel)
    names = [f"blocks.1.{each}" for each in ("attention", "mlp")]
    given = torch.randn(1, 2, WIDTH)
    with skipping(other, dict.fromkeys(names, 2.0)):
        assert not torch.allclose(block(given, None, None), 4 * given)


def test_a_planted_fault_is_seen(monkeypatch):
    model = build("GPT")
    scaling = module.SkippedForward
    monkeypatch.setattr(module, "SkippedForward", lambda ratio, items, **more: scaling(ratio * 1.001, items, **more))
    name = next(iter(sublayers(model)))
    with torch.no_grad(), skipping(model, {name: 1.1}):
        assert (model(TOKENS) - by_hand("GPT", model, {name: 1.1})).abs().max() > 1e-6
