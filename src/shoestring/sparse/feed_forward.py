"""Feed-forward layers whose activation `gates` can fuse, found by what they compute and not by the names of classes.

A module's forward pass is traced to a graph (torch.fx). It is a feed-forward layer if its only input goes to one or two
linear layers, what they return goes through operations without parameters to one more, and that is what it returns. Of
the operations between, the form and the activation are found by trying: on random numbers, in double precision, in
training and in evaluation mode, they must return what `gates` defines. So an activation is known under any name, and
dropout, a clamp, or a scale between the products leaves a layer as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from shoestring._torch import real_tensors
from shoestring.sparse.gates import ACTIVATIONS, Activation, Form, gated, reference

SPREADS = (0.3, 3.0, 30.0, 300.0)  # standard deviations of the numbers that operations are tried on
TOLERANCE = 1e-12


@dataclass(frozen=True)
class GatedLayers:
    """The linear layers of one feed-forward layer, by their names below `module`, and what is between them."""

    module: nn.Module
    first: tuple[str, ...]
    """The layers that the input goes to: that of the gate first where there are two."""
    last: str
    activation: Activation
    form: Form

    def forward(self) -> Callable[..., Tensor]:
        """What `module` computes, with its activation fused."""
        module, activation, form = self.module, self.activation, self.form

        def forward(*args: Tensor, **kwargs: Tensor) -> Tensor:
            (x,) = [*args, *kwargs.values()]
            x, *other = [module.get_submodule(name)(x) for name in self.first]
            return module.get_submodule(self.last)(gated(x, other[0] if other else None, activation, form))

        return forward


def find(model: nn.Module, layers: Mapping[str, nn.Linear]) -> Iterator[tuple[str, GatedLayers]]:
    """The feed-forward layers whose linear layers are all among `layers`, by their names in the model."""
    names = {layer: name for name, layer in layers.items()}
    for name in dict.fromkeys(prefix for layer in layers for prefix in _prefixes(layer)):
        module = model.get_submodule(name)
        found = recognise(module)
        if found and all(module.get_submodule(each) in names for each in (*found.first, found.last)):
            yield name, found


def _prefixes(name: str) -> Iterator[str]:
    """The modules that hold a layer: those right above it and one further, where a layer has a module of its own."""
    parts = name.split(".")
    for length in (len(parts) - 1, len(parts) - 2):
        if length > 0:
            yield ".".join(parts[:length])


def recognise(module: nn.Module) -> GatedLayers | None:
    """The feed-forward layer that a module is, if it is one that `gates` computes."""
    if isinstance(module, nn.Linear | nn.ModuleList | nn.ModuleDict) or "forward" in vars(module):
        return None
    modes = {each: each.training for each in module.modules()}
    try:
        found = []
        for training in (True, False):
            for each in modes:
                each.training = training
            with real_tensors():
                found.append(_matched(module, _LinearTracer().trace(module)))
    except Exception:
        return None
    finally:
        for each, mode in modes.items():
            each.training = mode
    return found[0] if found[0] == found[1] else None


class _LinearTracer(fx.Tracer):
    """Does not look into linear layers."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Linear) or super().is_leaf_module(m, module_qualified_name)


def _matched(module: nn.Module, graph: fx.Graph) -> GatedLayers | None:
    nodes = list(graph.nodes)
    linear = [node for node in nodes if _is_linear(module, node)]
    inputs = [node for node in nodes if node.op == "placeholder"]
    if len(inputs) != 1 or not 2 <= len(linear) <= 3 or any(not node.users for node in nodes[:-1]):
        return None  # what nobody reads is done for its effect
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


def _is_linear(module: nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and isinstance(module.get_submodule(str(node.target)), nn.Linear)


def _kind(
    module: nn.Module, first: list[fx.Node], last: fx.Node, between: list[fx.Node]
) -> tuple[Activation, Form, bool] | None:
    """Which activation and form the operations between are, and whether the gate is the second of two layers."""
    inner = {node: module.get_submodule(str(node.target)) for node in between if node.op == "call_module"}
    if any([*each.parameters(), *each.buffers()] for each in inner.values()):
        return None
    draw = torch.Generator().manual_seed(0)
    widths = [len(module.get_parameter(f"{node.target}.weight")) for node in first]
    spread = torch.tensor(SPREADS, dtype=torch.float64, device="cpu")[:, None, None]
    tried = [spread * torch.randn(4, 3, n, generator=draw, dtype=torch.float64, device="cpu") for n in widths]
    values: dict[fx.Node, Any] = {node: each.clone() for node, each in zip(first, tried, strict=True)}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for node in between:
            values[node] = _computed(node, values, inner)
        found = values[last.all_input_nodes[0]]
        same = [candidate for candidate in _candidates(tried) if _is(found, _expected(tried, *candidate))]
    return same[0] if same else None


def _computed(node: fx.Node, values: Mapping[fx.Node, Any], inner: Mapping[fx.Node, nn.Module]) -> Any:
    args: Any = fx.map_arg(node.args, lambda each: values[each])
    kwargs: Any = fx.map_arg(node.kwargs, lambda each: values[each])
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function: Any = inner[node] if node.op == "call_module" else node.target
    return function(*args, **kwargs)


def _candidates(tried: list[Tensor]) -> Iterator[tuple[Activation, Form, bool]]:
    for activation in ACTIVATIONS:
        if len(tried) == 2:
            yield activation, "apart", False
            yield activation, "apart", True
            continue
        yield activation, "alone", False
        yield activation, "gate_first", False
        yield activation, "gate_last", False


def _expected(tried: list[Tensor], activation: Activation, form: Form, swapped: bool) -> Tensor:
    if form == "alone":
        return reference(tried[0], activation)
    gate, up = tried if form == "apart" else tried[0].chunk(2, dim=-1)
    if swapped or form == "gate_last":
        gate, up = up, gate
    return reference(gate, activation) * up


def _is(found: Any, expected: Tensor) -> bool:
    same_kind = isinstance(found, Tensor) and found.shape == expected.shape and found.dtype == expected.dtype
    return same_kind and torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
