"""GGUF of every architecture: what is written is read back, llama.cpp writes the same texts, and each key counts."""

import importlib
from random import Random

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, pre_tokenizers

from shoestring.core.errors import ConfigError
from shoestring.data.tokenizer import byte_tokenizer
from shoestring.models import gguf, gguf_file, gguf_keys, gguf_tokenizer, gguf_weights, quantized
from shoestring.models.gguf_architectures import ARCHITECTURES
from shoestring.models.gguf_rope import factors_of
from shoestring.models.gpt import GPT
from tests.rigs import gguf_models as rig

library = pytest.importorskip("gguf")
pytest.importorskip("transformers")

IDS = list(range(3, 43))


@pytest.fixture(scope="module")
def bpe():
    return rig.byte_level()


def test_the_tiny_models_are_of_all_architectures():
    assert {name.partition(",")[0] for name in rig.MODELS} - {"mistral"} == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", rig.MODELS)
def test_a_model_comes_back_with_its_logits(name, bpe, tmp_path):
    model = rig.build(name, bpe.vocab_size + 5)
    gguf.save(model, bpe, tmp_path / "model.gguf", "f32")
    back, tokenizer = gguf.load(tmp_path / "model.gguf")
    assert torch.equal(rig.logits(back, IDS), rig.logits(model, IDS))
    assert not any(tensor.is_meta for tensor in (*back.parameters(), *back.buffers()))
    text = f"{rig.TEXT}<think>a<|im_end|>"
    assert tokenizer.encode(text) == bpe.encode(text)
    assert rig.read_special(tokenizer, text) == rig.read_special(bpe, text)
    gguf.save(back, tokenizer, tmp_path / "again.gguf", "f32")
    (first, weights), (second, same) = (
        gguf_file.read(tmp_path / name, library) for name in ("model.gguf", "again.gguf")
    )
    assert str(first) == str(second)
    assert {n: w.data.tobytes() for n, w in weights.items()} == {n: w.data.tobytes() for n, w in same.items()}


@pytest.mark.parametrize("kind, bound", [("f16", 5e-3), ("q8_0", 0.05), ("q4_0", 0.4)])
@pytest.mark.parametrize("name", ["llama, biases and width of heads", "gpt2", "gemma3", "gptneox"])
def test_rounded_models_come_back_and_are_not_rounded_twice(name, kind, bound, bpe, tmp_path):
    model = rig.build(name, bpe.vocab_size + 5)
    gguf.save(model, bpe, tmp_path / "model.gguf", kind)
    back, tokenizer = gguf.load(tmp_path / "model.gguf")
    ours = rig.logits(model, IDS)
    assert 0 < (rig.logits(back, IDS) - ours).norm() < bound * ours.norm()
    assert set(quantized.quantized(back).values()) - {8} == {"f16": set(), "q8_0": set(), "q4_0": {4}}[kind]
    gguf.save(back, tokenizer, tmp_path / "again.gguf", kind)
    if name != "gemma3":  # whose embeddings are scaled, and so not kept as blocks
        assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()


def test_rounding_errs_no_more_than_ggmls(tmp_path):
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    for bits, kind in ((8, "Q8_0"), (4, "Q4_0")):
        raw = library.GGMLQuantizationType[kind]
        blocks = gguf_weights.as_blocks(torch.nn.Linear(128, 64).requires_grad_(False), torch.arange(64), bits)
        assert blocks.shape == library.quants.quantize(weight.numpy(), raw).shape
        layer = torch.nn.Linear(128, 64, bias=False)
        layer.weight.data = weight
        ours, theirs = (
            torch.from_numpy(library.quants.dequantize(data, raw)) - weight
            for data in (
                gguf_weights.as_blocks(layer, torch.arange(64), bits),
                library.quants.quantize(weight.numpy(), raw),
            )
        )
        assert ours.norm() <= theirs.norm() * (1 + 1e-6)


# -- keys --------------------------------------------------------------------------------------------------------------


def keys(path):
    return gguf_file.read(path, library)[0]


def test_keys_and_types_of_tokens_are_those_that_another_reader_finds(tmp_path):
    tokenizer = rig.byte_level()
    tokenizer.companions["chat_template.jinja"] = b"{{ messages }}"
    end, think, turn = (tokenizer.engine.token_to_id(token) for token in ("<|endoftext|>", "<think>", "<|im_end|>"))
    path = tmp_path / "model.gguf"
    gguf.save(rig.build("gemma2", tokenizer.vocab_size + 2), tokenizer, path, "f16", ends=(turn, end))
    fields = library.GGUFReader(path).fields
    found = {name: field.contents() for name, field in fields.items()}
    expected = {
        "general.architecture": "gemma2", "gemma2.context_length": 64, "gemma2.embedding_length": 64,
        "gemma2.block_count": 2, "gemma2.feed_forward_length": 96, "gemma2.attention.head_count": 4,
        "gemma2.attention.head_count_kv": 2, "gemma2.attention.key_length": 16, "gemma2.attention.sliding_window": 8,
        "gemma2.attn_logit_softcapping": 50.0, "gemma2.final_logit_softcapping": 30.0, "gemma2.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.eos_token_id": turn,
        "tokenizer.ggml.eot_token_id": end, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    types = found["tokenizer.ggml.token_type"]
    assert [types[i] for i in (0, 5, think, turn, len(types) - 1)] == [3, 1, 4, 3, 5]
    assert gguf.ends_of(path) == [turn, end]
    back = gguf.load(path)[1]
    assert back.end_of_text == turn and back.companions["chat_template.jinja"] == b"{{ messages }}"


def written(path, values=(), drop=(), rename=None):
    """A small Llama's file by another writer, with keys changed."""
    model, tokenizer = rig.build("llama", 300), byte_tokenizer()
    gguf.save(model, tokenizer, path, "f32")
    stored, tensors = gguf_file.read(path, library)
    stored = {name: value for name, value in stored.items() if name not in drop} | dict(values)
    writer = library.GGUFWriter(path.with_suffix(".new"), stored.pop("general.architecture"))
    for name, value in stored.items():
        gguf._add(writer, name, value.tolist() if hasattr(value, "tolist") else value)
    for name, tensor in tensors.items():
        writer.add_tensor((rename or {}).get(name, name), tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)
    return path


def rope_of(path):
    model = gguf.load(path)[0]
    return None if isinstance(model, GPT) else model.config.rope_parameters


@pytest.mark.parametrize(
    "values, rope",
    [
        ({"llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        ({"llama.rope.scaling.type": "linear"}, None),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
             "llama.rope.scaling.original_context_length": 16},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
        ({"llama.rope.dimension_count": 8}, {"partial_rotary_factor": 0.5}),
    ],
)  # fmt: skip
def test_scaled_positions_are_read_as_llama_cpp_takes_them(values, rope, tmp_path):
    stored = rope_of(written(tmp_path / "model.gguf", values))
    assert (stored is None) == (rope is None)
    assert rope is None or rope.items() <= stored.items()


@pytest.mark.parametrize(
    "factor, low, high, original", [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (4.0, 1.5, 7.25, 512)]
)
@pytest.mark.parametrize("theta, width", [(5e5, 128), (1e4, 16), (5e5, 4)])
def test_llama_3s_numbers_are_found_from_its_factors(factor, low, high, original, theta, width):
    from shoestring.models import gguf_rope

    rope = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": original}  # fmt: skip
    factors = factors_of(rope, theta, width)
    back = gguf_rope._llama3(factors.astype(float), theta, width, original, "x")
    assert abs(factors_of(back, theta, width) / factors - 1).max() < 1e-5
    if (theta, width) == (5e5, 128):
        assert back.items() >= rope.items()


@pytest.mark.parametrize(
    "values, message",
    [
        ({"llama.attention.sliding_window": 8}, r"llama\.attention\.sliding_window is 8"),
        ({"llama.attention.clamp_kqv": 8.0}, r"llama\.attention\.clamp_kqv is 8\.0"),
        ({"llama.logit_scale": 0.25}, r"llama\.logit_scale is 0\.25"),
        ({"llama.expert_count": 8}, r"llama\.expert_count is 8"),
        ({"llama.attention.causal": False}, r"attention\.causal"),
        ({"llama.something_new": "yes"}, r"llama\.something_new is 'yes'"),
        ({"llama.attention.value_length": 8}, r"attention\.value_length is 8"),
        ({"llama.rope.scaling.type": "longer"}, r"rope\.scaling\.type is 'longer'"),
        ({"llama.rope.scaling.yarn_ext_factor": 0.5}, r"yarn_ext_factor is 0\.5"),
        ({"llama.rope.scaling.attn_factor": 2.0}, r"attn_factor is 2\.0"),
        ({"tokenizer.ggml.unheard_of": 1}, r"tokenizer\.ggml\.unheard_of"),
        ({"general.type": "adapter"}, "no model, but 'adapter'"),
        ({"split.count": 3}, "one of 3 files"),
    ],
)  # fmt: skip
def test_keys_that_change_the_text_and_are_not_computed_are_refused_by_name(values, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        gguf.load(written(tmp_path / "model.gguf", values))


def test_keys_that_change_nothing_are_no_matter(tmp_path):
    values = {
        "general.name": "x", "general.license": "mit", "general.sampling.temp": 0.5,
        "llama.rope.scaling.finetuned": True,
        "llama.expert_count": 0, "llama.attention.causal": True, "llama.tensor_data_layout": "Meta AI original pth",
        "quantize.imatrix.file": "x", "tokenizer.chat_template.rag": "y", "somebody.note": 3, "llama.pooling_type": 0,
    }  # fmt: skip
    assert isinstance(gguf.load(written(tmp_path / "model.gguf", values))[0], GPT)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("gemma2", {"query_pre_attn_scalar": 99}, "query_pre_attn_scalar = 16"),
        ("falcon", {"alibi": True}, "alibi = True"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gemma3", {"layer_types": ["full_attention"] * 6}, "layer_types"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ("llama", {"unheard_of": 3}, "unheard_of = 3"),
        ("llama", {"model_type": "lemma"}, "type 'lemma'"),
    ],
)
def test_models_that_llama_cpp_does_not_compute_are_refused_by_name(name, change, message):
    config = rig.build(name, 300).config
    usual = type(config)().to_dict()
    with pytest.raises(ConfigError, match=message):
        content = config.to_dict() | change
        gguf_keys.keys_of(gguf_keys.architecture_of(content), content, usual)


def test_a_window_that_llama_cpp_lacks_bounds_the_context(tmp_path, caplog):
    model = rig.build("mistral", 300)
    model.config.sliding_window = 24
    gguf.save(model, byte_tokenizer(), tmp_path / "model.gguf", "f32")
    assert keys(tmp_path / "model.gguf")["llama.context_length"] == 24 and "no sliding window" in caplog.text


@pytest.mark.parametrize("rule", [*gguf_tokenizer.RULES, "byte fallback"])
def test_a_tokenizer_comes_back(rule, tmp_path):
    tokenizer = rig.byte_fallback() if rule == "byte fallback" else rig.split_as(gguf_tokenizer.RULES[rule])
    table = gguf_tokenizer.keys_of(tokenizer, tokenizer.vocab_size + 3)
    table = {name: np.array(value) if isinstance(value, list) and not isinstance(value[0], str) else value
             for name, value in table.items()}  # fmt: skip
    assert table["tokenizer.ggml.pre"] == (rule if rule in gguf_tokenizer.RULES else "default")
    back = gguf_tokenizer.read(table, tmp_path / "model.gguf", tokenizer.vocab_size + 3)
    draw = Random(0)
    for text in ("", " ", "a", *(rig.random_text(draw) for _ in range(100))):
        assert back.encode(text) == tokenizer.encode(text)
        assert rig.read_special(back, text) == rig.read_special(tokenizer, text)
        assert back.decode(back.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    again = gguf_tokenizer.keys_of(back, tokenizer.vocab_size + 3)
    assert {name: again[name] for name in table if "merges" not in name} == {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in table.items() if "merges" not in name
    }  # fmt: skip


def test_tokenizers_that_llama_cpp_does_not_have_are_refused():
    tokenizer = rig.byte_level()
    tokenizer.engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    with pytest.raises(ConfigError, match="splits texts in a way"):
        gguf_tokenizer.keys_of(tokenizer, 400)
    with pytest.raises(ConfigError, match="the model has only 200"):
        gguf_tokenizer.keys_of(rig.byte_level(), 200)


# -- llama.cpp itself --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.share(2)
@pytest.mark.skipif(not rig.has_llama_cpp(), reason="needs the package xllamacpp")
@pytest.mark.parametrize("name", rig.MODELS)
def test_llama_cpp_writes_the_same_text_and_what_it_saves_is_read(name, tmp_path):
    benchmark = importlib.import_module("benchmarks.models.gguf")
    path = tmp_path / "model.gguf"
    assert all(benchmark.near_column(name, path, kind).startswith("yes") for kind in ("f16", "q8_0", "q4_0"))
    assert benchmark.text_column(name, path) == "yes"
    assert benchmark.saved_column(path, tmp_path / "again.gguf") == "yes"


@pytest.mark.slow
@pytest.mark.skipif(not rig.has_llama_cpp(), reason="needs the package xllamacpp")
@pytest.mark.parametrize("first", [True, False])
def test_llama_cpp_stops_at_each_end_that_a_file_names(first, tmp_path):
    tokenizer = rig.byte_level()
    tokenizer.engine.add_special_tokens([AddedToken("<done>", normalized=False)])
    done, prompt = tokenizer.engine.token_to_id("<done>"), tokenizer.encode("the lazy dog")
    model = rig.build("llama", done + 3)
    hidden = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
    model.lm_head.weight.data[done] = 3 * hidden.detach()  # the likeliest token behind the prompt
    stops = []
    for ends in ((tokenizer.end_of_text,), (done, tokenizer.end_of_text) if first else (tokenizer.end_of_text, done)):
        gguf.save(model, tokenizer, tmp_path / "model.gguf", "f32", ends)
        with rig.llama_cpp(tmp_path / "model.gguf") as server:
            stops.append(server.post("/completion", prompt=prompt, n_predict=4, temperature=0)["stop_type"])
    assert stops == ["limit", "eos"]


@pytest.mark.slow
@pytest.mark.skipif(not rig.has_llama_cpp(), reason="needs the package xllamacpp")
def test_llama_cpp_makes_the_same_tokens(tmp_path):
    rows = importlib.import_module("benchmarks.models.gguf").token_rows(tmp_path / "model.gguf")
    assert [row for row in rows if row[1] != "yes"] == []
