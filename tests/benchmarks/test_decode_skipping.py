"""The comparison of rules for skipping, on a model of two layers: cases are stored, and what they say is read off."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.decode import skipping
from shoestring.data.tokens import TokenWriter
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.llama import save_pretrained
from shoestring.models.sublayers import skipping as without


@pytest.fixture
def comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(skipping, "WINDOWS", {24: 2, 48: 2})
    monkeypatch.setattr(skipping, "DECODED", 16)
    monkeypatch.setattr(skipping, "SKIPPED", (1,))
    monkeypatch.setattr(skipping, "ORACLE", (1,))
    torch.manual_seed(0)
    shape = {"vocab_size": 31, "dim": 16, "layers": 3, "heads": 4, "kv_heads": 2, "hidden": 24, "context": 48}
    folder = tmp_path / "model"
    save_pretrained(GPT(GPTConfig(**shape, init_std=0.3)), folder)
    with TokenWriter(folder / "held_out.tokens", 31) as writer:
        writer.append(np.random.default_rng(0).integers(0, 31, 600), size=600)
        writer.finish(tokenizer="", recipe="")
    return skipping.Comparison(tmp_path / "runs", SimpleNamespace(folder=folder))


@pytest.mark.slow
def test_rules_are_compared_at_equal_bytes_and_stored(comparison, tmp_path, monkeypatch):
    gain, gap = skipping.quality(comparison), skipping.distance(comparison)
    case = comparison.cases[48, 1]["rules"]
    assert case["ours"]["saved"] >= case["AdaSkip as released"]["saved"] >= 1 / 3 * 0.8
    best = min(case[name]["nats"] for name in (*skipping.PUBLISHED, "SkipDecode"))
    assert f"48 tokens, {case['ours']['saved']:.0%} saved: {math.exp(best - case['ours']['nats']):.3f}" in gain.note
    assert f"48 tokens, bytes of 1 layers: {case['ours']['nats'] - case['greedy oracle']['nats']:+.3f}" in gap.note
    assert skipping.draw(comparison, tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setattr(skipping.Comparison, "_case", lambda *_: pytest.fail("made twice"))
    again = skipping.Comparison(comparison.folder, comparison.pretrained)
    assert skipping.quality(again) == gain


@torch.no_grad()
def test_decoded_tokens_are_measured_behind_a_prompt_that_was_read_whole(comparison):
    _, test = comparison.texts(24)
    ratios = {"blocks.0.attention": 1.0, "blocks.2.mlp": 0.9}
    nats = test.nats(ratios)
    assert nats.shape == (2, 16)
    torch.testing.assert_close(test.nats(ratios), nats)  # the cache forgets what was decoded
    cache = test.adapter.new_cache(2, 24)
    test.adapter.read(test.prompt, cache)
    with without(comparison.model, ratios):
        steps = [test.adapter.read(test.rest[:, i : i + 1], cache) for i in range(16)]
    logits = torch.cat(steps, 1)
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), test.rest[:, 1:], reduction="none")
    torch.testing.assert_close(nats, expected, rtol=1e-4, atol=1e-4)
