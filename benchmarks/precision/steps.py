"""Traced steps of models in 32 bits, under autocast and narrowed by the pass, and their gradients."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from benchmarks.graph.models import Case, Shape, WithLoss, gpt, llama, resnet_case, text_case, vit_case
from shoestring.graph._torch import nodes_of_joint
from shoestring.graph.trace import JointTrace, trace
from shoestring.precision.graph_pass import DEFAULT, Rules, count_bytes, count_casts, count_elements, narrow
from shoestring.precision.lists import ALLOW
from shoestring.precision.operators import operator_name

_TEXT = Shape(4, dim=128, hidden=352, vocabulary=512, tokens=64, batch=4)
MODELS: Mapping[str, Case] = {
    "gpt": text_case(gpt, _TEXT),
    "llama": text_case(llama, _TEXT),
    "vit": vit_case(Shape(4, dim=128, hidden=512, vocabulary=100, batch=4), 64),
    "resnet50": resnet_case(16, 64, 100, batch=8),
}
SEEDS = 5
"""Draws of weights and batches, over which errors are compared."""


class UnderAutocast(nn.Module):
    """A model that runs under autocast in bf16."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: Tensor = self.inner(*inputs)
        return loss


@dataclass(frozen=True)
class Drawn:
    """A model with its loss, and a batch."""

    model: nn.Module
    batch: Sequence[Tensor]

    @cached_property
    def exact(self) -> dict[str, Tensor]:
        """The gradients in double precision."""
        model = copy.deepcopy(self.model).double()
        model(*[tensor.double() if tensor.is_floating_point() else tensor for tensor in self.batch]).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    def error(self, step: JointTrace, interpreter: type[fx.Interpreter] = fx.Interpreter) -> float:
        """Relative error of a step's gradients: the norm of all differences over the norm of all gradients."""
        made, exact = gradients(step, self.model, self.batch, interpreter).gradients, self.exact
        differences = torch.stack([(made[name].double() - exact[name]).norm() for name in made])
        return float(differences.norm() / torch.stack([exact[name].norm() for name in made]).norm())


@cache
def drawn(name: str, seed: int) -> Drawn:
    """A model with random weights, and a random batch."""
    torch.manual_seed(seed)
    return Drawn(WithLoss(MODELS[name].prepare()()).train(), MODELS[name].batch())


class RoundedProducts(fx.Interpreter):
    """Runs a graph, and computes products of 16-bit tensors in fp32 from their values, rounding the results.

    That is what units for bf16 do, which add in fp32; products of bf16 tensors are slow on most CPUs.
    """

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or operator_name(n) not in ALLOW:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        args, kwargs = pytree.tree_map_only(Tensor, _widened, (args, kwargs))
        made = self.call_function(n.target, args, kwargs)
        if isinstance(made, Tensor):
            return made.to(n.meta["val"].dtype)
        both = zip(made, n.meta["val"], strict=True)
        return tuple(one.to(like.dtype) if isinstance(one, Tensor) else one for one, like in both)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


class Computed(NamedTuple):
    """What a step computes."""

    loss: float
    gradients: dict[str, Tensor]


def gradients(
    step: JointTrace, model: nn.Module, batch: Sequence[Tensor], interpreter: type[fx.Interpreter] = fx.Interpreter
) -> Computed:
    """Compute a traced step of a model, operator by operator."""
    nodes, own = step.nodes, {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {node: own[_own_name(name, own)].detach() for name, node in {**nodes.parameters, **nodes.buffers}.items()}
    values |= dict(zip(nodes.inputs, batch, strict=True)) | {node: torch.ones(()) for node in nodes.tangents}
    holders = [node for node in step.module.graph.nodes if node.op == "placeholder"]
    outputs = interpreter(step.module).run(*(values[node].clone() for node in holders), enable_io_processing=False)
    returned = next(node for node in step.module.graph.nodes if node.op == "output").args[0]
    places = {node: place for place, node in enumerate(returned) if isinstance(node, fx.Node)}
    # The pass may have replaced gradients by casts of them, so they are looked up anew.
    made = {
        _own_name(name, own): outputs[places[node]]
        for name, node in nodes_of_joint(step.module.graph).gradients.items()
    }
    (loss,) = (
        output for output in outputs if isinstance(output, Tensor) and not output.ndim and output.is_floating_point()
    )
    return Computed(float(loss), made)


def _own_name(name: str, own: Mapping[str, Tensor]) -> str:
    """The model's own name of a parameter, which is traced within a wrapper under autocast."""
    return name if name in own else name.removeprefix("inner.")


@dataclass(frozen=True)
class Cast:
    """What a way to narrow does to a step."""

    step: JointTrace
    casts: int
    elements: float
    """Fraction of the elements that operators compute in 16 bits."""
    ahead: float
    """The same, of the forward pass alone."""
    nbytes: int
    """Bytes that operators and casts read and write, one after the other."""


def plain(name: str, seed: int) -> JointTrace:
    """The step in 32 bits."""
    case = drawn(name, seed)
    return trace(case.model, *case.batch)


def autocast(name: str, seed: int) -> Cast:
    """The step that torch's autocast makes of the model."""
    case = drawn(name, seed)
    return _cast(trace(UnderAutocast(case.model), *case.batch))


def by_graph(name: str, seed: int, rules: Rules = DEFAULT) -> Cast:
    """The step as the pass narrows it."""
    step = plain(name, seed)
    narrow(step.module, rules)
    return _cast(step)


def _cast(step: JointTrace) -> Cast:
    graph = step.module.graph
    # Of the loss; gradients of squares, such as 2 x, belong to the backward pass, though no gradient goes into them.
    needed, made = set[fx.Node](), {*nodes_of_joint(graph).gradients.values()}
    output = next(node for node in graph.nodes if node.op == "output")
    waiting = [node for node in output.args[0] if node is not None and node not in made]
    while waiting:
        if (node := waiting.pop()) not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    every = count_elements(graph, torch.bfloat16)
    ahead = count_elements(graph, torch.bfloat16, lambda node: node in needed)
    return Cast(step, count_casts(graph), every[0] / every[1], ahead[0] / ahead[1], count_bytes(graph))
