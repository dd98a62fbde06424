"""The benchmark of serving: its parts can be named alone, and the timed work runs."""

import time

import pytest
import torch

from benchmarks.serving import adapters
from benchmarks.serving.__main__ import command
from shoestring.models.gpt import GPT, GPTConfig


def test_a_part_is_named_without_the_area(capsys):
    assert command(["--list", "--only", "adapters"]) == 0
    assert "serving.adapters-rate  >= 0.85" in capsys.readouterr().out
    assert command(["--list", "--only", "nothing"]) == 2


@pytest.mark.slow
def test_eight_adapters_are_compared_with_one_and_with_none():
    torch.manual_seed(0)
    built = GPT(GPTConfig(vocab_size=260, dim=32, layers=1, heads=2, kv_heads=1, hidden=48, context=128)).eval()
    ones = adapters.compared(built, tokens=2, rounds=6, clock=time.process_time)
    assert all(len(one.ratios) == 6 for one in ones)
