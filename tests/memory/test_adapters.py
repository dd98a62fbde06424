"""Adapters against their formulas, their folders in PEFT's format, and the models that they are merged into."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shoestring.core.compose import compose
from shoestring.core.errors import CheckpointError
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.memory import LoRA
from shoestring.memory.adapters.leaving import gather_adapters
from shoestring.models import adapter_folder, quantized
from shoestring.models.adapters import Adapted, LowRank, fresh, merge, row_norms, take_off
from shoestring.models.blocks import is_transposed
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.llama import save_pretrained
from shoestring.models.loading import load_model
from shoestring.optim import AdamW

SHAPE = GPTConfig(vocab_size=64, dim=32, hidden=64, layers=2, heads=4, kv_heads=2, context=32)


def gpt(seed=0):
    torch.manual_seed(seed)
    return GPT(SHAPE).eval()


def drawn(rows, columns, rank=4, dora=False, dtype=torch.float32):
    a, b = torch.randn(rank, columns, dtype=dtype), torch.randn(rows, rank, dtype=dtype) / 8
    return LowRank(a, b, 0.5, torch.rand(rows, dtype=dtype) + 0.5 if dora else None)


def adapters_of(model, layers=("blocks.0.attention.qkv", "blocks.1.mlp.down"), dora=False):
    weights = {name: model.get_submodule(name).weight for name in layers}
    return {name: drawn(*weight.shape, dora=dora) for name, weight in weights.items()}


@pytest.mark.parametrize("bias", [True, False])
def test_lora_is_its_formula_and_leaves_no_trace(bias):
    layer, x = nn.Linear(6, 5, bias=bias).double(), torch.randn(2, 3, 6, dtype=torch.float64)
    before, adapter = layer(x), drawn(5, 6, dtype=torch.float64)
    adapted = Adapted(layer, layer.forward, adapter)
    expected = before + 0.5 * (x @ adapter.a.T @ adapter.b.T)
    torch.testing.assert_close(adapted(x), expected)
    torch.testing.assert_close(x @ adapter.merged(layer.weight).T + (layer.bias if bias else 0), expected)
    take_off(layer)
    assert torch.equal(layer(x), before) and not [name for name, _ in layer.named_parameters() if "lora" in name]


@pytest.mark.parametrize("bias", [True, False])
def test_dora_is_its_formula_with_norms_that_count_as_constants(bias):
    """Values and gradients against the paper's equation 11, written out with the whole matrix."""
    layer, x = nn.Linear(6, 5, bias=bias).double(), torch.randn(7, 6, dtype=torch.float64)
    weight, adapter = layer.weight.detach().clone(), drawn(5, 6, dora=True, dtype=torch.float64)
    a, b, m = (tensor.clone().requires_grad_() for tensor in adapter.tensors)
    adapted, whole = Adapted(layer, layer.forward, adapter), weight + 0.5 * b @ a
    expected = x @ (m / torch.linalg.vector_norm(whole, dim=1).detach())[:, None].mul(whole).T
    expected = expected + layer.bias.detach() if bias else expected
    torch.testing.assert_close(adapted(x), expected)
    cotangent = torch.randn_like(expected)
    adapted(x).backward(cotangent)
    expected.backward(cotangent)
    for ours, theirs in ((layer.lora_A, a), (layer.lora_B, b), (layer.lora_magnitude, m)):
        torch.testing.assert_close(ours.grad, theirs.grad)
    merged = adapter.merged(weight)
    torch.testing.assert_close(x @ merged.T + (layer.bias if bias else 0), expected)


def test_new_adapters_change_nothing_and_follow_their_seed():
    a, b = fresh((48, 64), 4, seed=3)
    assert not b.any() and a.abs().max() <= 1 / 8 and math.isclose(a.std(), 1 / 8 / 3**0.5, rel_tol=0.1)
    assert torch.equal(a, fresh((48, 64), 4, seed=3)[0]) and not torch.equal(a, fresh((48, 64), 4, seed=4)[0])
    layer, x = nn.Linear(64, 48), torch.randn(3, 64)
    lengths = row_norms(layer.weight.detach(), torch.float32)
    torch.testing.assert_close(Adapted(layer, layer.forward, LowRank(a, b, 2.0, lengths))(x), layer(x))


def test_dropout_touches_what_goes_into_the_adapter_alone():
    layer, x = nn.Linear(64, 8), torch.ones(500, 64)
    adapted = Adapted(layer, layer.forward, LowRank(torch.ones(1, 64), torch.zeros(8, 1), 1.0), dropout=0.5)
    torch.testing.assert_close(adapted(x), layer(x))
    nn.init.ones_(layer.lora_B)
    low = (adapted(x) - layer(x)).detach()
    assert low.std() > 1 and abs(float(low.mean()) - 64) < 2
    layer.eval()
    torch.testing.assert_close(adapted(x) - layer(x), torch.full((500, 8), 64.0))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [3, 100])
def test_gradients_flow_through_a_quantised_layer_and_no_dense_weight_is_held(bits, rows):
    dense = nn.Linear(64, 24)
    layer = quantized.of(dense, bits)
    dense.weight.data.copy_(layer.dense())
    x = torch.randn(rows, 64)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: held.append(tensor) or tensor, lambda tensor: tensor):
        y = layer(ours)
    assert all(tensor.dtype in (torch.uint8, torch.int16) for tensor in held)
    expected = dense(theirs)
    torch.testing.assert_close(y, expected, atol=2e-3, rtol=1e-3)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-2, rtol=1e-2)


# -- folders -----------------------------------------------------------------------------------------------------------


def written(folder, model, adapters, base=""):
    adapter_folder.write(folder, model, adapters, base=base, fingerprint=adapter_folder.fingerprint_of(model, adapters))
    return folder


@pytest.mark.parametrize("dora", [False, True])
@torch.no_grad()
def test_a_folder_comes_back_and_generates_as_the_model_with_its_adapters(tmp_path, dora):
    model, tokens = gpt(), torch.arange(20)[None]
    (tmp_path / "base").mkdir()
    save_pretrained(model, tmp_path / "base")
    adapters = adapters_of(model, dora=dora)
    written(tmp_path / "adapter", model, adapters, str(tmp_path / "base"))
    for name, adapter in adapters.items():
        layer = model.get_submodule(name)
        layer.forward = Adapted(layer, layer.forward, adapter)
    wanted = model(tokens)
    back, _ = load_model(tmp_path / "adapter")
    torch.testing.assert_close(back(tokens), wanted, atol=1e-5, rtol=0)
    assert not torch.allclose(gpt()(tokens), wanted, atol=1e-2)
    again = adapter_folder.read(tmp_path / "adapter", gpt()).layers
    for name, adapter in adapters.items():
        for one, other in zip(again[name].tensors, adapter.tensors, strict=True):
            assert torch.equal(one, other)


def test_parts_of_a_fused_layer_share_one_factor_in_the_file(tmp_path):
    model = gpt()
    written(tmp_path, model, adapters_of(model))
    tensors, config = (
        load_file(tmp_path / "adapter_model.safetensors"),
        json.loads((tmp_path / "adapter_config.json").read_text()),
    )
    start = "base_model.model.model.layers.0.self_attn."
    assert torch.equal(tensors[f"{start}q_proj.lora_A.weight"], tensors[f"{start}v_proj.lora_A.weight"])
    assert tensors[f"{start}q_proj.lora_B.weight"].shape == (32, 4)
    assert tensors[f"{start}k_proj.lora_B.weight"].shape == (16, 4)
    assert config["target_modules"] == sorted(
        [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"] + ["model.layers.1.mlp.down_proj"]
    )
    assert (config["r"], config["lora_alpha"], config["use_dora"]) == (4, 2.0, False)
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    written(tmp_path, model, adapters_of(model, layers))
    short = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert short == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@torch.no_grad()
def test_different_adapters_of_the_parts_of_a_layer_are_joined(tmp_path):
    """As others train them: query and value alone, each with a rank and scale of its own."""
    model, tokens = gpt(), torch.arange(16)[None]
    start, rows = "base_model.model.model.layers.1.self_attn.", {"q_proj": 32, "v_proj": 16}
    tensors, weight = {}, model.blocks[1].attention.qkv.weight
    ranks = {"q_proj": 4, "v_proj": 2}
    changes = {}
    for name, count in rows.items():
        a, b = torch.randn(ranks[name], 32), torch.randn(count, ranks[name])
        tensors |= {f"{start}{name}.lora_A.weight": a, f"{start}{name}.lora_B.weight": b}
        changes[name] = {"q_proj": 8 / 4, "v_proj": 6 / 2}[name] * b @ a
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "alpha_pattern": {"v_proj": 6}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    adapters = adapter_folder.read(tmp_path, model).layers
    assert adapters["blocks.1.attention.qkv"].a.shape == (6, 32)
    expected = gpt()
    expected.blocks[1].attention.qkv.weight[:32] += changes["q_proj"]
    expected.blocks[1].attention.qkv.weight[48:] += changes["v_proj"]
    merge(model, adapters)
    torch.testing.assert_close(model(tokens), expected(tokens), atol=1e-5, rtol=0)
    assert torch.equal(weight[32:48], gpt().blocks[1].attention.qkv.weight[32:48])


def test_adapters_of_another_model_are_refused(tmp_path):
    model = gpt()
    folder = written(tmp_path / "adapter", model, adapters_of(model))
    with pytest.raises(CheckpointError, match="trained on other weights"):
        adapter_folder.read(folder, gpt(seed=1))
    adapter_folder.read(folder, gpt().bfloat16())
    other = GPT(GPTConfig(vocab_size=64, dim=64, hidden=64, layers=2, heads=4, kv_heads=2, context=32))
    with pytest.raises(
        CheckpointError,
        match=r"layers.0.self_attn.q_proj` is for a weight of shape \(32, 32\), but this model's has \(64, 64\)",
    ):
        adapter_folder.read(folder, other)
    shallow = GPT(GPTConfig(vocab_size=64, dim=32, hidden=64, layers=1, heads=4, kv_heads=2, context=32))
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.down_proj`, which GPT does not have"):
        adapter_folder.read(folder, shallow)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save has 'lm_head', but the file has no weights of this module"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, change, said):
    model = gpt()
    folder = written(tmp_path, model, adapters_of(model))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=said):
        adapter_folder.read(folder, model)


def test_folders_that_hold_no_adapter_say_why(tmp_path):
    model = gpt()
    folder = written(tmp_path, model, adapters_of(model))
    with pytest.raises(CheckpointError, match="does not say which model it belongs to"):
        load_model(folder)
    save_file({"base_model.model.x.lora_embedding_A": torch.ones(2, 2)}, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="lora_embedding_A`, which belong to no adapter"):
        adapter_folder.read(folder, model)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot load"):
        adapter_folder.read(folder, model)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        adapter_folder.read(folder, model)


# -- PEFT itself -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@torch.no_grad()
def test_peft_computes_the_same_and_its_own_adapters_enter(tmp_path, dora, kind):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base, tokens = tmp_path / "base", torch.arange(20)[None]
    base.mkdir()
    if kind == "llama":
        save_pretrained(gpt(), base)
    else:
        config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32)
        transformers.GPT2LMHeadModel(config).save_pretrained(base)
    ours, _ = load_model(base)
    layers = [name for name, each in ours.named_modules() if isinstance(each, nn.Linear) or is_transposed(each)]
    layers = [name for name in layers if "head" not in name]
    every = adapter_folder.parts_of(ours)
    shapes = {name: ours.get_submodule(name).weight.shape for name in layers}
    shapes = {name: shape[::-1] if is_transposed(ours.get_submodule(name)) else shape for name, shape in shapes.items()}
    assert set(layers) <= set(every)
    written(tmp_path / "adapter", ours, {name: drawn(*shape, dora=dora) for name, shape in shapes.items()}, str(base))
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    mine, _ = load_model(tmp_path / "adapter")
    logits = getattr(mine(tokens), "logits", mine(tokens))
    torch.testing.assert_close(logits, theirs(tokens).logits, atol=1e-5, rtol=1e-5)

    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    targets = ["q_proj", "v_proj", "down_proj"] if kind == "llama" else ["c_attn", "c_fc"]
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=targets, use_dora=dora, use_rslora=True, rank_pattern={targets[1]: 2},
        task_type="CAUSAL_LM",
    )  # fmt: skip
    trained = peft.get_peft_model(plain, settings).eval()
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    trained.save_pretrained(tmp_path / "theirs")
    mine, _ = load_model(tmp_path / "theirs")
    logits = getattr(mine(tokens), "logits", mine(tokens))
    torch.testing.assert_close(logits, trained(tokens).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["ours", "llama"])
def test_peft_opens_modules_that_were_trained_whole_and_its_own_enter(tmp_path, kind, tied):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base, tokens = tmp_path / "base", torch.arange(20)[None]
    base.mkdir()
    if kind == "ours":
        save_pretrained(GPT(replace(SHAPE, tied=tied)), base)
    else:
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied,
        )  # fmt: skip
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(base)
    ours = load_model(base)[0] if kind == "ours" else transformers.AutoModelForCausalLM.from_pretrained(base)
    feature = LoRA(rank=2, modules_to_train=("*embed*",) if tied else ("*embed*", "*head"))
    batch = {"inputs": tokens, "targets": tokens.flip(1)} if kind == "ours" else {"input_ids": tokens, "labels": tokens}
    with compose(Job(ours, world=World()), [feature, AdamW(lr=3e-2)]) as job:
        embedding = ours.get_parameter("embed.weight" if kind == "ours" else "model.embed_tokens.weight")
        first = embedding.detach().clone()
        for _ in range(3):
            job.step(batch)
        with attachments_of(job).evaluating(), torch.no_grad():
            wanted = getattr(ours(tokens), "logits", ours(tokens))
            assert not torch.equal(
                first, ours.get_submodule("embed" if kind == "ours" else "model.embed_tokens").weight
            )
        gather_adapters(attachments_of(job), feature.name, str(base), 0.0)(tmp_path)
    with torch.no_grad():
        theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
        torch.testing.assert_close(wanted, theirs(tokens).logits, atol=1e-5, rtol=1e-5)
        mine = load_model(tmp_path / "adapter")[0](tokens)
        torch.testing.assert_close(wanted, getattr(mine, "logits", mine), atol=1e-5, rtol=1e-5)

    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    settings = peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], task_type="CAUSAL_LM"
    )
    trained = peft.get_peft_model(plain, settings).eval()
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(1.5)
        trained.save_pretrained(tmp_path / "theirs")
        mine = load_model(tmp_path / "theirs")[0](tokens)
        torch.testing.assert_close(getattr(mine, "logits", mine), trained(tokens).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@torch.no_grad()
def test_a_base_in_nf4_computes_what_it_does_in_transformers(tmp_path):
    pytest.importorskip("bitsandbytes")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 257, "dim": 128, "hidden": 256, "layers": 2, "heads": 2, "kv_heads": 2, "context": 64}
    tokens = torch.arange(20)[None]
    save_pretrained(GPT(GPTConfig(**shape)), tmp_path)
    dense, _ = load_model(tmp_path)
    ours, _ = load_model(tmp_path)
    compose(Job(ours, world=World()), [LoRA(rank=2, base_bits=4, base_type="nf4")])
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings)
    wanted = theirs(tokens).logits
    apart, cost = (float((each(tokens) - wanted).norm()) for each in (ours, dense))
    # Theirs rounds queries, keys and values apart, ours together: the eight bits of their scales differ.
    assert 0 < apart < 0.1 * cost
