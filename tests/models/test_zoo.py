"""Families of transformers through what is promised for all; the whole matrix is `python -m benchmarks.models`."""

import json

import pytest
import torch

from benchmarks.models import zoo
from benchmarks.models.columns import Case, measure
from shoestring.core.errors import ConfigError
from shoestring.data.tokenizer import byte_tokenizer
from shoestring.models import hf, quantized
from shoestring.models.loading import load_model
from shoestring.verbs.generate import open_described

pytestmark = pytest.mark.slow  # transformers is imported
transformers = pytest.importorskip("transformers")

KINDS = ["biogpt", "ctrl", "falcon, one key", "gemma3n_text", "gpt_oss", "hunyuan_v1_moe", "mamba", "olmo", "rwkv"]
"""Families of each kind: scaled embeddings, names, own forward passes, layers that others read, mixtures, mixers, and a
model all of whose weights can be rounded."""


@pytest.mark.share(2)
@pytest.mark.parametrize("name", KINDS)
def test_weights_are_rounded_packed_trained_and_adapted_in_any_family(name, tmp_path):
    cells = measure(Case(name, tmp_path), ["tokens", "8 bits", "4 bits", "2:4", "saved", "LoRA"])
    assert {column: cell for column, cell in cells.items() if cell.state == "no"} == {}


def test_the_zoo_is_of_as_many_families_as_it_promises():
    present = set(zoo.CASES) - set(zoo.missing())
    assert len(present) >= 66 and len({zoo.family(name) for name in present}) >= 33
    before = torch.random.get_rng_state()
    first, again, other = (zoo.build("gpt2", seed).get_input_embeddings().weight for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_experts_take_the_bytes_of_their_bits(tmp_path):
    case = Case("mixtral", tmp_path)
    assert measure(case, ["4 bits"])["4 bits"].state == "yes"
    bits = quantized.quantized(load_model(tmp_path / "bits4")[0])
    assert {
        bits[f"model.layers.{layer}.mlp.experts.{name}_proj"] for layer in (0, 1) for name in ("gate_up", "down")
    } == {4}


def _saved(folder, model):
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder, 128)
    return f"hf:{folder}"


_SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
_PAIR = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
_PAIR |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
OTHERS = {
    "t5": ("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}),
    "bart": ("BartForConditionalGeneration", {**_PAIR, "max_position_embeddings": 64}),
    "bert": ("BertForMaskedLM", _SMALL),
    "vit": ("ViTForImageClassification", {**_SMALL, "image_size": 32, "patch_size": 8}),
}
WORDS = {"t5": "with an encoder", "bart": "with an encoder", "bert": "sees those behind it", "vit": "no language model"}


@pytest.mark.parametrize("family", OTHERS)
def test_models_of_other_kinds_are_refused_by_name(family, tmp_path):
    kind, settings = OTHERS[family]
    vocabulary = {} if family == "vit" else {"vocab_size": zoo.VOCABULARY}
    model = getattr(transformers, kind)(transformers.CONFIG_MAPPING[family](**settings, **vocabulary))
    name = _saved(tmp_path / family, model)
    for opened in (lambda: load_model(name), lambda: hf.build(name.removeprefix("hf:"), {}, {})):
        with pytest.raises(ConfigError, match=rf"is a `{family}`, .*{WORDS[family]}"):
            opened()


def test_a_folder_with_a_tokenizer_of_sentencepiece_alone_says_how_to_convert_it(tmp_path):
    zoo.build("llama", dtype=torch.float32).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json") as caught:
        open_described(f"hf:{tmp_path}")
    assert "SentencePiece" in caught.value.hint and "save_pretrained" in caught.value.hint


def test_a_model_of_text_and_images_trains_on_text_alone(tmp_path):
    """Gemma's token types say which tokens are an image's; some releases want them in training."""
    text = json.loads(json.dumps(zoo.CASES["gemma3_text"]().to_dict()))
    vision = {**_SMALL, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    name = _saved(tmp_path / "gemma3", transformers.Gemma3ForConditionalGeneration(config))
    model = hf.build(name.removeprefix("hf:"), {}, {})
    tokens = torch.arange(40)[None]
    trained = model.train()(input_ids=tokens).logits
    assert trained.requires_grad
    torch.testing.assert_close(trained, model.eval()(input_ids=tokens).logits)
