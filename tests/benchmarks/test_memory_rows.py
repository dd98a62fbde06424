"""The code of the bars of fine-tuning, on shapes that take a second."""

import math

import torch

from benchmarks.harness import Deadline
from benchmarks.memory import lora
from shoestring.models.gpt import GPTConfig


def test_adapters_over_a_drawn_model_of_4_bits_train():
    shape = GPTConfig(vocab_size=512, dim=64, layers=2, heads=4, kv_heads=2, hidden=128, context=64, tied=False)
    gib, loss = lora.largest(shape, 64, torch.device("cpu"))
    assert math.isnan(gib) and abs(loss - math.log(512)) < 1


def test_the_shape_on_a_gpu_has_8_billion_parameters():
    with torch.device("meta"):
        from shoestring.models.gpt import GPT

        count = sum(each.numel() for each in GPT(lora.eight_billion()).parameters())
    assert 7.9e9 < count < 8.1e9


def test_a_topic_is_trained_on_or_held_out(tmp_path):
    from shoestring.data.tokenizer import byte_tokenizer

    byte_tokenizer().save(tmp_path / "tokenizer.json")
    train_on, held_out = lora.Contest(tmp_path, Deadline(), sequence=63).domain(tmp_path)
    assert train_on.shape[1] == held_out.shape[1] == 64
    assert 0.05 < len(held_out) / len(train_on) < 0.3
