"""Programs whose memory is traced: a GPT and a ResNet as found in public repositories, and transformers' Llama."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.profile.workloads.torch_models import gpt, resnet

Hook = Callable[[], object]


@dataclass
class Program:
    """A model, its optimizer and a step on seeded data."""

    name: str
    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[], Tensor]
    beside: Hook = lambda: None
    """Called between the forward and the backward pass."""

    def step(self) -> None:
        """One optimizer step."""
        loss = self.loss()
        held = self.beside()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        del held


def a_gpt() -> Program:
    """The GPT of the profiler's workloads."""
    model = gpt.GPT()
    tokens = torch.randint(0, gpt.VOCABULARY, (16, gpt.CONTEXT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Program("gpt", model, optimizer, lambda: model(tokens, tokens))


def a_resnet() -> Program:
    """The ResNet of the profiler's workloads."""
    model = resnet.ResNet()
    images, labels = torch.randn(32, 3, resnet.SIZE, resnet.SIZE), torch.randint(0, resnet.CLASSES, (32,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Program("resnet", model, optimizer, lambda: F.cross_entropy(model(images), labels))


def a_llama() -> Program:
    """A small LlamaForCausalLM of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config)
    tokens = torch.randint(0, config.vocab_size, (8, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Program("llama", model, optimizer, lambda: model(input_ids=tokens, labels=tokens).loss)


PROGRAMS: dict[str, Callable[[], Program]] = {"gpt": a_gpt, "resnet": a_resnet, "llama": a_llama}


def build(name: str, seed: int = 0) -> Program:
    """The program of this name, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return PROGRAMS[name]()
