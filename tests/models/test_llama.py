"""The Llama layout: transformers computes the same logits from our folders, and we from its; bad folders are named."""

import json
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.llama import INDEX, SINGLE, from_llama_config, load_pretrained, save_pretrained, save_state

BASE = GPTConfig(vocab_size=61, dim=48, layers=2, heads=6, kv_heads=6, hidden=80, context=24, init_std=0.2)
CONFIGS = {
    "tied": BASE,
    "grouped-queries": replace(BASE, kv_heads=2, tied=False, rope_theta=500.0),
    "one-key-head": replace(BASE, kv_heads=1, norm_eps=1e-3),
}


def build(config=BASE):
    torch.manual_seed(0)
    return GPT(config)


def tokens():
    return torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(1))


def edit(path, **entries):
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **entries}))


def retensor(folder, change):
    tensors = safetensors.torch.load_file(folder / SINGLE)
    change(tensors)
    safetensors.torch.save_file(tensors, folder / SINGLE, {"format": "pt"})


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("shard", [2**30, 20_000])
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_computes_our_logits(tmp_path, transformers, name, shard):
    model = build(CONFIGS[name])
    save_pretrained(model, tmp_path, max_shard_bytes=shard)
    assert (tmp_path / INDEX).exists() == (shard == 20_000)
    theirs, report = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        assert (theirs(tokens()).logits - model(tokens())).abs().max() <= 1e-5


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize(("tied", "kv_heads", "theta"), [(True, 4, 10_000.0), (False, 2, 777.0)])
def test_we_compute_the_logits_of_transformers(tmp_path, transformers, tied, kv_heads, theta, shard):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        initializer_range=0.2,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    ours = load_pretrained(tmp_path)
    assert (ours.config.tied, ours.config.rope_theta, ours.config.kv_heads) == (tied, theta, kv_heads)
    with torch.no_grad():
        assert (theirs(tokens()).logits - ours(tokens())).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", [2**30, 5_000])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_round_trip_changes_nothing_and_the_result_trains(tmp_path, name, shard, dtype):
    model = build(CONFIGS[name]).to(dtype)
    save_pretrained(model, tmp_path, max_shard_bytes=shard)
    again = load_pretrained(tmp_path)
    assert again.config == model.config
    for (left, ours), (right, theirs) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert left == right
        assert theirs.requires_grad
        assert ours.dtype == theirs.dtype == dtype
        assert torch.equal(ours, theirs)
    again(tokens()).sum().backward()


def test_shards_respect_the_limit(tmp_path):
    save_pretrained(build(), tmp_path, max_shard_bytes=20_000)
    sizes = [sum(t.nbytes for t in safetensors.torch.load_file(f).values()) for f in tmp_path.glob("*.safetensors")]
    assert len(sizes) > 2
    assert max(sizes) <= 20_000
    assert json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"] == sum(sizes)


@pytest.mark.parametrize(("first", "second"), [(2**30, 20_000), (20_000, 2**30), (20_000, 5_000)])
def test_saving_again_leaves_nothing_of_the_model_before(tmp_path, first, second):
    (tmp_path / "tokenizer.json").write_text("{}")
    save_pretrained(build(), tmp_path, max_shard_bytes=first)
    other = build(replace(BASE, layers=1))
    save_pretrained(other, tmp_path, max_shard_bytes=second)
    assert torch.equal(load_pretrained(tmp_path)(tokens()), other(tokens()))
    assert (tmp_path / "tokenizer.json").exists()
    named = set(json.loads((tmp_path / INDEX).read_text())["weight_map"].values()) if second < 2**30 else {SINGLE}
    assert {path.name for path in tmp_path.glob("*.safetensors")} == named


def test_an_interrupted_write_over_a_model_is_not_a_model(tmp_path, monkeypatch):
    save_pretrained(build(), tmp_path)

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shoestring.models.llama.write_atomic", full)
    with pytest.raises(OSError, match="No space"):
        save_pretrained(build(replace(BASE, layers=1)), tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is of type 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_parameters is of type 'llama3'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rotates only part of a head"),
        ({"rope_parameters": [1]}, "rope_parameters is not a table"),
        ({"head_dim": 16}, "head_dim = 16 is not supported"),
        ({"hidden_size": "48"}, "GPTConfig.dim is '48'"),
    ],
)
def test_what_the_model_does_not_compute_is_refused(tmp_path, entries, message):
    save_pretrained(build(), tmp_path)
    edit(tmp_path / "config.json", **entries)
    with pytest.raises(ConfigError, match=message):
        load_pretrained(tmp_path)


def test_a_config_of_transformers_4_is_read_with_its_defaults():
    old = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "rope_scaling": None,
    }
    expected = GPTConfig(
        vocab_size=61, dim=48, hidden=80, layers=2, heads=6, kv_heads=6, context=2048, tied=False, norm_eps=1e-6
    )
    assert from_llama_config(old, "config.json") == expected
    assert from_llama_config({**old, "rope_theta": 500.0}, "config.json").rope_theta == 500.0
    del old["hidden_size"]
    with pytest.raises(ConfigError, match=r"config\.json lacks hidden_size"):
        from_llama_config(old, "config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing tensors: model\.norm\.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "unexpected tensors: extra"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(7)}),
            r"model\.norm\.weight has shape \(7,\), not \(48,\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}),
            r"model\.norm\.weight holds torch\.int8",
        ),
        (lambda t: t.update({"lm_head.weight": torch.zeros(61, 48)}), r"unexpected tensors: lm_head\.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, message):
    save_pretrained(build(), tmp_path)
    retensor(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(tmp_path)


def test_a_copy_of_the_tied_embedding_and_stored_frequencies_do_no_harm(tmp_path):
    model = build()
    save_pretrained(model, tmp_path)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    retensor(tmp_path, add)
    assert torch.equal(load_pretrained(tmp_path)(tokens()), model(tokens()))


def test_a_folder_of_pickles_is_refused_unopened(tmp_path):
    save_pretrained(build(), tmp_path)
    (tmp_path / SINGLE).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no model\.safetensors.*pickles, which are not loaded"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/outside.safetensors", "model.bin", ""])
def test_an_index_cannot_point_elsewhere(tmp_path, file):
    save_pretrained(build(), tmp_path, max_shard_bytes=20_000)
    edit(tmp_path / INDEX, weight_map={"model.norm.weight": file})
    with pytest.raises(CheckpointError, match=r"not a \.safetensors file beside it"):
        load_pretrained(tmp_path)


def test_damaged_files_are_named(tmp_path):
    save_pretrained(build(), tmp_path, max_shard_bytes=20_000)
    shard = min(tmp_path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=f"{shard.name} cannot be read"):
        load_pretrained(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} cannot be read"):
        load_pretrained(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": 3}')
    with pytest.raises(CheckpointError, match="no table `weight_map`"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json is not a JSON object"):
        load_pretrained(tmp_path)


def test_an_incomplete_state_is_not_written(tmp_path):
    state = build().state_dict()
    del state["norm.weight"]
    with pytest.raises(CheckpointError, match=r"lacks norm\.weight"):
        save_state(BASE, state, tmp_path)
    assert not list(tmp_path.iterdir())
