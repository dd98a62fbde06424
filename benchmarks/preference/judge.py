"""The tokens of pairs, and the reward accuracy of a model with adapters, computed alike for both libraries."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.preference import peer
from benchmarks.preference.generator import TEMPLATE


def encoded(engine: Any, record: Mapping[str, Any]) -> list[tuple[int, list[int]]]:
    """The tokens of the prompt with each of the two answers, and the number of those of the prompt."""
    prompt = f"<|im_start|>user\n{record['prompt'][0]['content']}<|im_end|><|im_start|>assistant\n"
    start = len(engine.encode(prompt).ids)
    texts = (f"{prompt}{record[side][0]['content']}<|im_end|>" for side in ("chosen", "rejected"))
    tokens = [engine.encode(text).ids for text in texts]
    assert tokens[0][0] == engine.token_to_id("<|im_start|>"), "special tokens are read as characters"
    return [(start, answer) for answer in tokens]


@torch.no_grad()
def judge(base: str, adapter: str, records: Sequence[Mapping[str, Any]]) -> float:
    """Share of pairs whose chosen answer has the higher log-ratio of the model with its adapter to that without."""
    transformers, peft = map(importlib.import_module, ("transformers", "peft"))
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, adapter).eval()
    tokenizer = peer.fast_tokenizer(f"{base}/tokenizer.json", TEMPLATE)
    texts = [answer for record in records for answer in encoded(tokenizer.backend_tokenizer, record)]
    ratios: list[Tensor] = []
    for first in range(0, len(texts), 64):
        part = texts[first : first + 64]
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for _, text in part], batch_first=True)
        places = torch.arange(tokens.shape[1] - 1)
        learnt = torch.stack([(places >= start - 1) & (places < len(text) - 1) for start, text in part])

        def score(tokens: Tensor = tokens, learnt: Tensor = learnt) -> Tensor:
            values = model(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
            return (values * learnt).sum(-1)

        with_adapter = score()
        with model.disable_adapter():
            ratios.append(with_adapter - score())
    chosen, rejected = torch.cat(ratios).view(-1, 2).T
    return float((chosen > rejected).float().mean())
