"""Changes to shoestring itself that a profile led to; what was there before stands here, to be measured against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.profile.cases.case import Case, Step, with_changes
from shoestring.decode import drawing, sampling
from shoestring.decode.engine import Engine
from shoestring.decode.request import Request
from shoestring.decode.settings.generation import Sampling
from shoestring.models.gpt import GPT, GPTConfig


def generation() -> Step:
    """Sixteen texts of sixteen tokens from an untrained model, eight at a time; repetition is penalized."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=8192, dim=128, layers=3, heads=4, kv_heads=2, hidden=352, context=256)
    model, prompts = GPT(config), torch.randint(0, 8192, (16, 24)).tolist()

    def step() -> None:
        engine = Engine(model, slots=8)
        for seed, prompt in enumerate(prompts):
            chosen = Sampling(top_p=0.9, repetition_penalty=1.1, seed=seed)
            engine.submit(Request(tokens=prompt, max_new=16, sampling=chosen))
        while engine.busy:
            engine.step()
        engine.close()

    return step


def penalize_before(logits: Tensor, tokens: Sequence[int], penalty: float) -> Tensor:
    """All tokens of the vocabulary were computed."""
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    seen[:, torch.tensor(tokens)] = True
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def generation_before() -> Step:
    step = with_changes(generation(), drawing, penalize=penalize_before)
    return with_changes(step, sampling, _descending=lambda chances: chances.topk(chances.shape[-1]).values)


CASES = [Case("decode-sampling", generation_before, generation, steps=1)]
