"""Ten small training programs, each in PyTorch and in JAX, written the way such code is found in public repositories.

They are frozen: what the profiler finds in them is told as case studies, so neither their code nor their sizes are
tuned afterwards. Each has a model, a loss, an optimizer and a loader of seeded data; sizes are such that a step takes
5 to 60 ms of CPU on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

Framework = Literal["torch", "jax"]

FRAMEWORKS: tuple[Framework, ...] = ("torch", "jax")

WORKLOADS = {
    "gpt": "GPT, as in nanoGPT: 4 layers, width 128, causal language modelling of characters",
    "llama": "Llama-like: RMS norm, rotary positions, SwiGLU, 8 query heads over 2 key and value heads",
    "vit": "ViT: 4 by 4 patches of 32 by 32 images, class token, classification",
    "resnet": "ResNet with basic blocks, as for CIFAR-10: 3 stages, batch normalization, SGD with momentum",
    "unet": "U-Net: segmentation of 64 by 64 images, 3 levels, skip connections, cross-entropy and Dice loss",
    "dlrm": "DLRM-like: embedding bags over 8 categorical features, dot interactions, click prediction",
    "gnn": "GNN: GraphSAGE-like message passing over a citation graph, node classification",
    "conformer": "Conformer: self-attention, depthwise convolution and two half feed-forwards a block, CTC loss",
    "diffusion": "Diffusion: a step of DDPM training of a noise predictor, with a moving average of the weights",
    "encoder": "Transformer encoder, post-norm as in the original publication, masked language modelling",
}


@dataclass
class Workload:
    """A training program that is run step by step."""

    name: str
    batches: Iterator[Any]
    train_step: Callable[[Any], float]

    def step(self) -> float:
        """Train on the next batch; its loss."""
        batch = next(self.batches)
        return self.train_step(batch)


def build(name: str, framework: Framework = "torch", seed: int = 0) -> Workload:
    """The workload of this name, ready to train.

    Raises:
        KeyError: there is no workload of this name.
    """
    if name not in WORKLOADS:
        raise KeyError(f"no workload `{name}`; there are {', '.join(WORKLOADS)}")
    return import_module(f"benchmarks.profile.workloads.{framework}_models.{name}").build(seed)


def forever(loader: Iterable[Any]) -> Iterator[Any]:
    """Batches of one epoch after the other."""
    while True:
        yield from loader
