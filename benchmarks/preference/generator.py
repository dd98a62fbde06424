"""Pairs from a generator whose preference is known, and a small model that knows its language.

Each word has a worth, drawn once. An answer's utility is the sum of its words' worths over the root of their number, so
that length is no advantage; which of two answers is chosen is drawn by Bradley and Terry's model.
"""

from __future__ import annotations

import importlib
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from shoestring.data.tokenizer import Tokenizer, train_bpe

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML without a newline after a message, so that both libraries train on the same tokens."""
STRENGTH = 2.0
"""Factor of the difference of utilities in Bradley and Terry's model."""
_SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "wo", "zu")


def utility(worths: Mapping[str, float], answer: str) -> float:
    """The utility of an answer; about standard normal."""
    words = answer.split()
    return sum(worths[word] for word in words) / math.sqrt(len(words))


@dataclass(frozen=True)
class Language:
    """Words with their worths, and the numbers of words of prompts and answers."""

    words: int = 200
    prompt: tuple[int, int] = (6, 8)
    answer: tuple[int, int] = (9, 12)

    def vocabulary(self) -> list[str]:
        drawn = random.Random(0)
        found: dict[str, None] = {}
        while len(found) < self.words:
            found["".join(drawn.choices(_SYLLABLES, k=drawn.randint(1, 3)))] = None
        return list(found)

    def worths(self) -> dict[str, float]:
        drawn = random.Random(1)
        return {word: drawn.gauss(0, 1) for word in self.vocabulary()}

    def pairs(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Records of messages, as both libraries read them; no two have the same prompt."""
        drawn, words, worths = random.Random(f"pairs {seed}"), self.vocabulary(), self.worths()
        text = lambda lengths: " ".join(drawn.choices(words, k=drawn.randint(*lengths)))  # noqa: E731
        records, prompts = [], set()
        while len(records) < count:
            prompt, one, two = text(self.prompt), text(self.answer), text(self.answer)
            if prompt in prompts or one == two:
                continue
            prompts.add(prompt)
            if drawn.random() > 1 / (1 + math.exp(-STRENGTH * (utility(worths, one) - utility(worths, two)))):
                one, two = two, one
            sides = {"prompt": ("user", prompt), "chosen": ("assistant", one), "rejected": ("assistant", two)}
            records.append({name: [{"role": role, "content": said}] for name, (role, said) in sides.items()})
        return records

    def best_accuracy(self, records: Sequence[dict[str, Any]]) -> float:
        """Share of the records whose chosen answer has the higher utility: what knowing the generator gives."""
        worths = self.worths()
        values = (
            [utility(worths, record[side][0]["content"]) for side in ("chosen", "rejected")] for record in records
        )
        return sum(one > two for one, two in values) / len(records)

    def tokenizer(self) -> Tokenizer:
        """A BPE of the language with ChatML's tokens."""
        texts = (
            " ".join(part["content"] for side in record.values() for part in side) for record in self.pairs(500, 0)
        )
        trained = train_bpe(["user\n", "assistant\n", *texts], 300 + 2 * self.words)
        trained.engine.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
        tokenizer = Tokenizer(trained.engine, companions={"tokenizer_config.json": json.dumps(config).encode()})
        tokenizer.engine.encode_special_tokens = False  # texts here come from the template, special tokens included
        return tokenizer


def write(path: Path, records: Sequence[dict[str, Any]]) -> str:
    """Write records as lines of JSON."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@dataclass(frozen=True)
class Shape:
    """The base model, a Llama."""

    hidden: int = 128
    layers: int = 4
    steps: int = 400
    """Steps of pretraining, of 32 texts; 0 leaves the weights as they are drawn."""


def build_base(folder: Path, language: Language, shape: Shape) -> None:
    """Write a model of transformers that was trained on answers of the generator, chosen and rejected alike."""
    transformers = importlib.import_module("transformers")
    tokenizer = language.tokenizer()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=shape.hidden, intermediate_size=8 * shape.hidden // 3,
        num_hidden_layers=shape.layers, num_attention_heads=shape.hidden // 32, max_position_embeddings=2048,
        num_key_value_heads=shape.hidden // 32, tie_word_embeddings=True, use_cache=False,
        eos_token_id=tokenizer.engine.token_to_id("<|im_end|>"), bos_token_id=None,
        pad_token_id=tokenizer.engine.token_to_id("<|endoftext|>"),
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step, batch in zip(range(shape.steps), _texts(language, tokenizer), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - step / shape.steps)
        logits = model(batch).logits[:, :-1]
        targets = batch[:, 1:].masked_fill(batch[:, 1:] == config.pad_token_id, -100)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")


def _texts(language: Language, tokenizer: Tokenizer) -> Iterator[torch.Tensor]:
    """Batches of 32 conversations, of which half end with the answer that was rejected."""
    pad = tokenizer.engine.token_to_id("<|endoftext|>")
    assert pad is not None
    number = 0
    while True:
        number += 1
        texts = []
        for index, record in enumerate(language.pairs(32, 10_000 + number)):
            answer = record["chosen" if index % 2 else "rejected"][0]["content"]
            prompt = record["prompt"][0]["content"]
            said = f"<|im_start|>user\n{prompt}<|im_end|><|im_start|>assistant\n{answer}<|im_end|>"
            texts.append(torch.tensor(tokenizer.engine.encode(said).ids))
        yield torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=pad)
