"""Finds feed-forward layers whose activation `gates` can fuse; recognises them by their computation, not by class
names.

The forward pass of a module is traced to a graph (torch.fx). The module is a feed-forward layer if its only input goes
to one or two linear layers, their outputs pass through operations without parameters to a last linear layer, and the
module returns the output of the last layer. Activation and form are identified by trial: on random numbers, in double
precision, in training and in evaluation mode, the operations between the linear layers must return the same numbers as
`gates`. An activation is therefore recognised under any name, while a layer with dropout, a clamp or a scale in between
is left unchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from shoestring._torch import real_tensors
from shoestring.sparse.gates import ACTIVATIONS, Activation, Form, gated, reference

SPREADS = (0.3, 3.0, 30.0, 300.0)  # standard deviations of the random inputs of a trial
TOLERANCE = 1e-12


@dataclass(frozen=True)
class GatedLayers:
    """One feed-forward layer: the names of its linear layers, relative to `module`, and the activation between them."""

    module: nn.Module
    first: tuple[str, ...]
    """Names of the one or two layers that receive the input; if there are two, the gate's layer is first."""
    last: str
    """Name of the layer whose output is returned."""
    activation: Activation
    form: Form

    def forward(self) -> Callable[..., Tensor]:
        """Build a forward pass for `module` that uses the fused activation."""
        module, activation, form = self.module, self.activation, self.form

        def forward(*args: Tensor, **kwargs: Tensor) -> Tensor:
            (x,) = [*args, *kwargs.values()]
            x, *other = [module.get_submodule(name)(x) for name in self.first]
            return module.get_submodule(self.last)(gated(x, other[0] if other else None, activation, form))

        return forward


def find(model: nn.Module, layers: Mapping[str, nn.Linear]) -> Iterator[tuple[str, GatedLayers]]:
    """Find the feed-forward layers whose linear layers are all among `layers`, and yield each with its module name."""
    sparse = set(layers.values())
    # Modules one and two levels above a layer: some models wrap each linear layer in another module.
    above = (layer.rsplit(".", levels)[0] for layer in layers for levels in (1, 2) if layer.count(".") >= levels)
    for name in dict.fromkeys(above):
        module = model.get_submodule(name)
        gated_layers = recognise(module)
        if gated_layers is None:
            continue
        if all(module.get_submodule(layer) in sparse for layer in (*gated_layers.first, gated_layers.last)):
            yield name, gated_layers


def recognise(module: nn.Module) -> GatedLayers | None:
    """Recognise a feed-forward layer whose activation `gates` computes; return None for any other module."""
    if isinstance(module, nn.Linear | nn.ModuleList | nn.ModuleDict) or "forward" in vars(module):
        return None
    modes = {submodule: submodule.training for submodule in module.modules()}
    try:
        matches = []
        for training in (True, False):
            for submodule in modes:
                submodule.training = training
            with real_tensors():
                matches.append(_matched(module, _LinearTracer().trace(module)))
    except Exception:  # torch.fx may fail on the user's code with any exception
        return None
    finally:
        for submodule, mode in modes.items():
            submodule.training = mode
    return matches[0] if matches[0] == matches[1] else None


class _LinearTracer(fx.Tracer):
    """Traces linear layers, including subclasses of nn.Linear, as single nodes."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Linear) or super().is_leaf_module(m, module_qualified_name)


def _matched(module: nn.Module, graph: fx.Graph) -> GatedLayers | None:
    """Match a traced forward pass with the structure of a feed-forward layer; return None if the structure differs."""
    nodes = list(graph.nodes)
    modules = {node: module.get_submodule(str(node.target)) for node in nodes if node.op == "call_module"}
    linear = [node for node, submodule in modules.items() if isinstance(submodule, nn.Linear)]
    inputs = [node for node in nodes if node.op == "placeholder"]
    if len(inputs) != 1 or not 2 <= len(linear) <= 3 or any(not node.users for node in nodes[:-1]):
        return None  # an operation without users has a side effect
    *first, last = linear
    (returned,) = nodes[-1].args
    between = [node for node in nodes if node not in (*inputs, *linear, nodes[-1])]
    if returned is not last or any(node.args != (inputs[0],) or node.kwargs for node in first):
        return None
    if any(node.op == "get_attr" or set(node.all_input_nodes) & {*inputs, last} for node in between):
        return None
    if len(last.args) != 1 or not isinstance(last.args[0], fx.Node) or last.kwargs:
        return None
    kind = _kind(module, first, last, between)
    if kind is None:
        return None
    activation, form, swapped = kind
    names = [str(node.target) for node in first]
    return GatedLayers(module, tuple(reversed(names) if swapped else names), str(last.target), activation, form)


def _kind(
    module: nn.Module, first: list[fx.Node], last: fx.Node, between: list[fx.Node]
) -> tuple[Activation, Form, bool] | None:
    """Identify the operations between the layers by trial: (activation, form, whether the gate is the second of two
    layers)."""
    inner = {node: module.get_submodule(str(node.target)) for node in between if node.op == "call_module"}
    if any([*submodule.parameters(), *submodule.buffers()] for submodule in inner.values()):
        return None
    draw = torch.Generator().manual_seed(0)
    widths = [len(module.get_parameter(f"{node.target}.weight")) for node in first]
    spread = torch.tensor(SPREADS, dtype=torch.float64, device="cpu")[:, None, None]
    inputs = [spread * torch.randn(4, 3, n, generator=draw, dtype=torch.float64, device="cpu") for n in widths]
    # Inputs are cloned, because an activation may work in place.
    values: dict[fx.Node, Any] = {node: x.clone() for node, x in zip(first, inputs, strict=True)}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for node in between:
            args: Any = fx.map_arg(node.args, values.__getitem__)
            kwargs: Any = fx.map_arg(node.kwargs, values.__getitem__)
            if node.op == "call_method":
                values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                function: Any = inner[node] if node.op == "call_module" else node.target
                values[node] = function(*args, **kwargs)
        output = values[last.all_input_nodes[0]]
        if not isinstance(output, Tensor):
            return None
        forms: list[tuple[Form, bool]] = [("alone", False), ("gate_first", False), ("gate_last", False)]
        if len(inputs) == 2:
            forms = [("apart", False), ("apart", True)]
        for activation, (form, swapped) in itertools.product(ACTIVATIONS, forms):
            expected = _expected(inputs, activation, form, swapped)
            alike = output.shape == expected.shape and output.dtype == expected.dtype
            if alike and torch.allclose(output, expected, rtol=TOLERANCE, atol=TOLERANCE):
                return activation, form, swapped
    return None


def _expected(inputs: list[Tensor], activation: Activation, form: Form, swapped: bool) -> Tensor:
    if form == "alone":
        return reference(inputs[0], activation)
    gate, up = inputs if form == "apart" else inputs[0].chunk(2, dim=-1)
    if swapped or form == "gate_last":
        gate, up = up, gate
    return reference(gate, activation) * up
