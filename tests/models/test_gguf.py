"""GGUF: what is written comes back, and transformers, another reader, computes the same from it."""

import json

import pytest
import torch

from shoestring.cli import main
from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.data.tokenizer import byte_tokenizer, train_bpe
from shoestring.models import gguf, gguf_weights, quantized
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.loading import load_model
from shoestring.models.saving import save_model
from tests.rigs import gguf_models as rig

library = pytest.importorskip("gguf")

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on " * 5


def gpt(tied, vocabulary=300):
    torch.manual_seed(0)
    shape = {"dim": 64, "hidden": 96, "layers": 2, "heads": 4, "kv_heads": 2, "context": 32, "rope_theta": 5e4}
    return GPT(GPTConfig(vocab_size=vocabulary, **shape, tied=tied, init_std=0.1)).eval()


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([TEXT], 290)


TOKENS = torch.arange(20)[None] * 3


@pytest.mark.parametrize("kind, bound", [("f32", 0.0), ("f16", 2e-3), ("q8_0", 0.02), ("q4_0", 0.3)])
@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_what_is_written_is_read_back_and_quantised_layers_stay_so(kind, bound, tied, bpe, tmp_path):
    model = gpt(tied)
    gguf.save(model, bpe, tmp_path / "model.gguf", kind)
    back, tokenizer = load_model(tmp_path / "model.gguf")
    assert back.config.__dict__ | {"init_std": 0} == model.config.__dict__ | {"init_std": 0}
    logits, again = model(TOKENS), back(TOKENS)
    assert (again - logits).norm() <= bound * logits.norm() + 1e-6
    assert tokenizer.encode(TEXT) == bpe.encode(TEXT) and tokenizer.end_of_text == bpe.end_of_text
    its = set(quantized.quantized(back).values())
    assert its == {"f32": set(), "f16": set(), "q8_0": {8}, "q4_0": {4, 8}}[kind]
    gguf.save(back, bpe, tmp_path / "again.gguf", kind)  # nothing is rounded twice
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0"])
@torch.inference_mode()
def test_transformers_reads_the_same_model(kind, bpe, tmp_path):
    transformers = pytest.importorskip("transformers")
    gguf.save(gpt(tied=False), bpe, tmp_path / "model.gguf", kind)
    ours, _ = load_model(tmp_path / "model.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    near = 1e-4 if kind == "f32" else 1e-3  # ours rounds the inputs of such products to integers of 16 bits
    torch.testing.assert_close(theirs(TOKENS).logits, ours(TOKENS), atol=near, rtol=near)
    if kind == "f32":
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
        assert tokenizer(TEXT, add_special_tokens=False).input_ids == bpe.encode(TEXT)


@torch.inference_mode()
def test_other_quantised_types_are_rounded_to_8_bits_which_is_said(bpe, tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO", "shoestring")
    names = {8: "Q8_0", 4: "Q5_0"}
    write = gguf_weights.as_blocks

    def five(module, order, bits):
        if bits == 8:
            return write(module, order, bits)
        return library.quants.quantize(gguf_weights._weight(module)[order].numpy(), library.GGMLQuantizationType.Q5_0)

    monkeypatch.setattr(gguf_weights, "as_blocks", five)
    tensors = gguf.tensors_of
    monkeypatch.setattr(
        gguf, "tensors_of", lambda *given: ((n, d, r and names[int(r[1])]) for n, d, r in tensors(*given))
    )
    model = gpt(tied=True)
    gguf.save(model, bpe, tmp_path / "model.gguf", "q4_0")
    back, _ = load_model(tmp_path / "model.gguf")
    assert set(quantized.quantized(back).values()) == {8} and "14 tensors of Q5_0 are rounded to 8 bits" in caplog.text
    assert (back(TOKENS) - model(TOKENS)).norm() < 0.15 * model(TOKENS).norm()


def test_the_byte_tokenizer_comes_back_too(tmp_path):
    gguf.save(gpt(tied=True), byte_tokenizer(), tmp_path / "model.gguf", "f16")
    tokenizer = load_model(tmp_path / "model.gguf")[1]
    assert tokenizer is None or tokenizer.encode(TEXT) == byte_tokenizer().encode(TEXT)


def test_the_verb_writes_a_file_that_generates(bpe, tmp_path, capsys):
    save_model(gpt(tied=True), bpe, tmp_path / "model", {"offered": {"context": 32}})
    file = tmp_path / "small.gguf"
    assert main(["quantize", str(tmp_path / "model"), "--format", "gguf", "--bits", "4", "--out", str(file)]) == 0
    assert "weights of the type q4_0" in capsys.readouterr().out
    assert main(["generate", str(file), "--prompt", "the dog", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("the dog")
    assert main(["quantize", str(tmp_path / "model"), "--bits", "16", "--out", str(tmp_path / "other")]) == 2


def test_what_is_no_llama_and_what_is_damaged_is_refused(bpe, tmp_path):
    path = tmp_path / "model.gguf"
    gguf.save(gpt(tied=True), bpe, path, "q8_0")
    whole = path.read_bytes()
    for damaged in (b"", b"GGUF", whole[:1000], whole[:-4000], b"XXXX" + whole[4:]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="not a readable GGUF file"):
            load_model(path)
    path.write_bytes(whole.replace(b"llama", b"lemma"))
    with pytest.raises(ConfigError, match="architecture 'lemma'"):
        load_model(path)
    path.write_bytes(whole.replace(b"blk.1.ffn_up", b"blk.1.ffn_xx"))
    with pytest.raises(ConfigError, match=r"unknown tensors: blk\.1\.ffn_xx"):
        load_model(path)
    with pytest.raises(ConfigError, match="only language models"):
        gguf.save(torch.nn.Linear(2, 2), None, tmp_path / "x.gguf", "f32")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_file_becomes_a_folder_that_can_be_trained_and_a_file_again(name, tmp_path, capsys):
    pytest.importorskip("transformers")
    tokenizer = rig.byte_level()
    ends = (tokenizer.engine.token_to_id("<|im_end|>"), tokenizer.end_of_text)
    file, folder, again = tmp_path / "a.gguf", tmp_path / "folder", tmp_path / "b.gguf"
    gguf.save(rig.build(name, tokenizer.vocab_size + 3), tokenizer, file, "q8_0", ends)
    assert main(["quantize", str(file), "--bits", "32", "--out", str(folder)]) == 0
    (model, _), (back, its) = load_model(file), load_model(folder)
    assert not quantized.quantized(back) and quantized.quantized(model)
    torch.testing.assert_close(
        rig.logits(back, list(range(20))), rig.logits(model, list(range(20))), atol=1e-3, rtol=1e-3
    )
    assert its.encode(TEXT) == tokenizer.encode(TEXT) and its.end_of_text == ends[0]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == list(ends)
    assert main(["quantize", str(file), "--format", "gguf", "--bits", "8", "--out", str(again)]) == 0
    assert torch.equal(rig.logits(load_model(again)[0], [1, 2, 3]), rig.logits(model, [1, 2, 3]))
    assert main(["generate", str(again), "--prompt", "the dog", "--tokens", "5"]) == 0
    capsys.readouterr()
    assert main(["quantize", str(folder), "--bits", "16", "--out", str(tmp_path / "x")]) == 2
    assert "for GGUF only" in capsys.readouterr().err
