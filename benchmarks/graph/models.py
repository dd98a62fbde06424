"""The models whose steps are traced: the built-in GPT, transformers' Llama and ViT with random weights, a ResNet-50."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring._torch import without_data
from shoestring.graph.trace import JointTrace, trace
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.without_data import with_fake_tensors


class WithLoss(nn.Module):
    """A model that returns its loss: the mean cross-entropy of its logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        output = self.inner(inputs)
        logits = output if isinstance(output, Tensor) else output.logits
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer and of its batch."""

    layers: int
    dim: int = 256
    heads: int = 4
    hidden: int = 704
    vocabulary: int = 8192
    tokens: int = 256
    batch: int = 8


SMALL = Shape(2, dim=32, hidden=64, vocabulary=64, tokens=16, batch=4)
"""Small enough to compute every operator by every rule."""


Build = Callable[[], nn.Module]
"""Builds a model, after all that this needs has been imported."""


def gpt(shape: Shape) -> Build:
    """The built-in GPT."""
    config = GPTConfig(
        vocab_size=shape.vocabulary,
        dim=shape.dim,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.heads,
        hidden=shape.hidden,
        context=shape.tokens,
    )
    return lambda: GPT(config)


def llama(shape: Shape) -> Build:
    """transformers' Llama, with grouped-query attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.dim,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // 2,
        max_position_embeddings=shape.tokens,
        use_cache=False,
    )
    return lambda: LlamaForCausalLM(config)


def vit(shape: Shape, size: int) -> Build:
    """transformers' ViT for pictures of `size` pixels in patches of 16."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=size,
        hidden_size=shape.dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.hidden,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = shape.vocabulary
    return lambda: ViTForImageClassification(config)


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions (He et al., 2015), with the stride in the second one."""

    def __init__(self, inputs: int, middle: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * middle
        self.layers = nn.Sequential(
            *_convolved(inputs, middle, 1),
            nn.ReLU(),
            *_convolved(middle, middle, 3, stride),
            nn.ReLU(),
            *_convolved(middle, outputs, 1),
        )
        alike = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if alike else nn.Sequential(*_convolved(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


def _convolved(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)


class ResNet50(nn.Module):
    """ResNet-50; `width` is the number of channels of the first layer, 64 in the paper."""

    def __init__(self, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        layers, channels = [*_convolved(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], width
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                layers.append(Bottleneck(channels, width << stage, 2 if stage and not block else 1))
                channels = 4 * (width << stage)
        self.features = nn.Sequential(*layers)
        self.classify = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x).mean((2, 3)))


@dataclass(frozen=True)
class Case:
    """A model with its loss, and a batch for it."""

    prepare: Callable[[], Build]
    batch: Callable[[], Sequence[Tensor]]
    real_weights: bool = False
    """Whether the model can only be traced through dynamo, which does not take its inputs without data."""

    def fake(self) -> JointTrace:
        """The traced step, without weights if possible."""
        build = self.prepare()
        if self.real_weights:
            return trace(WithLoss(build()).train(), *self.batch())
        with torch.device("meta"):
            model = WithLoss(build())
        with without_data():
            model, batch = with_fake_tensors(model, "cpu"), self.batch()
        return trace(model.train(), *batch)

    def real(self, *, in_double: bool = True) -> tuple[JointTrace, nn.Module, Sequence[Tensor]]:
        """The traced step in double precision, with the model and the batch that it was traced of.

        Args:
            in_double: whether norms are in double precision too, where the model's own round to single precision.
        """
        torch.manual_seed(0)
        model = WithLoss(self.prepare()()).double().train()
        if in_double:
            _use_norms_in_double(model)
        batch = [tensor.double() if tensor.is_floating_point() else tensor for tensor in self.batch()]
        return trace(model, *batch), model, batch


def _use_norms_in_double(model: nn.Module) -> None:
    """Put torch's RMSNorm in the place of a model's own, such as Llama's, which computes in single precision."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm") and not isinstance(module, nn.RMSNorm):
            weight = module.get_parameter("weight")
            norm = nn.RMSNorm(weight.numel(), eps=float(getattr(module, "variance_epsilon", 1e-6)))
            norm.weight = weight
            model.set_submodule(name, norm)


def _texts(shape: Shape) -> Sequence[Tensor]:
    size = (shape.batch, shape.tokens)
    return torch.randint(shape.vocabulary, size), torch.randint(shape.vocabulary, size)


def _pictures(batch: int, size: int, classes: int) -> Sequence[Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))


def text_case(model: Callable[[Shape], Build], shape: Shape) -> Case:
    return Case(lambda: model(shape), lambda: _texts(shape))


def vit_case(shape: Shape, size: int) -> Case:
    return Case(lambda: vit(shape, size), lambda: _pictures(shape.batch, size, shape.vocabulary))


def resnet_case(width: int, size: int, classes: int, batch: int = 8) -> Case:
    return Case(lambda: lambda: ResNet50(width, classes), lambda: _pictures(batch, size, classes))


_VIT_S = Shape(12, dim=384, heads=6, hidden=1536, vocabulary=1000)
SMALL_CASES: dict[str, Case] = {
    "gpt": text_case(gpt, SMALL),
    "llama": text_case(llama, SMALL),
    "vit": vit_case(SMALL, 64),
    "resnet50": resnet_case(8, 32, 64, batch=4),
}
"""Models of two layers or an eighth of the width, which are computed."""
CASES: dict[str, Case] = {
    "gpt8": text_case(gpt, Shape(8)),
    "gpt12": text_case(gpt, Shape(12)),
    "llama8": replace(text_case(llama, Shape(8)), real_weights=True),
    "vit-s": vit_case(_VIT_S, 224),
    "resnet50": resnet_case(64, 224, 1000),
}
"""Models of the usual shapes, which are only traced."""
FEW_LAYERS: dict[str, Case] = {
    "gpt2": text_case(gpt, Shape(2)),
    "llama2": replace(text_case(llama, Shape(2)), real_weights=True),
    "vit2": vit_case(replace(_VIT_S, layers=2), 224),
}
"""Two layers of them."""
