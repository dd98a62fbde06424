"""Wraps the private interfaces of torch that only this area uses: joint graphs, and the sharding strategies of DTensor.

Checked with torch 2.13. The other private interfaces are in `shoestring/_torch.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shoestring._torch import tree_leaves, tree_map_only, without_data


def joint_graph(model: nn.Module, inputs: Sequence[Any], *, dynamo: bool = False) -> fx.GraphModule:
    """Trace the forward and backward pass of a model that returns its loss, without decomposing operators.

    Nothing is computed: parameters and inputs are replaced by fake tensors, unless they are fake already.

    Args:
        dynamo: capture the forward pass by torch's analysis of bytecode first. This takes as long again, but also
            captures programs that take another branch while they are compiled.
    """
    # Imported here because these imports take seconds.
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._subclasses.fake_tensor import FakeTensor

    tensors = (*model.parameters(), *model.buffers(), *tree_leaves(inputs))
    modes = [tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)]
    mode: Any = modes[0] if modes else without_data()
    captured: Any = model
    if dynamo:
        from torch._dynamo import config
        from torch._dynamo.functional_export import dynamo_graph_capture_for_export

        # By default, dynamo treats a number as unknown if the same line of code has met another value before.
        with fx.traceback.preserve_node_meta(), mode, config.patch(automatic_dynamic_shapes=False):
            captured = dynamo_graph_capture_for_export(model)(*inputs)
    with ExitStack() as stack, mode:
        return aot_export_joint_with_descriptors(stack, captured, tuple(inputs), decompositions={}).graph_module


def merge_tied(graph: fx.Graph, model: nn.Module) -> None:
    """Give a parameter with several names one placeholder in a joint graph, under its first name, and one gradient."""
    from torch._functorch._aot_autograd import descriptors

    first: dict[nn.Parameter, str] = {}
    owners = {name: first.setdefault(one, name) for name, one in model.named_parameters(remove_duplicate=False)}
    (output,) = (node for node in graph.nodes if node.op == "output")
    holders = {node.meta["desc"].expr(): node for node in graph.nodes if node.op == "placeholder"}
    kinds, values = list[Any](output.meta["desc"]), list[Any](output.args[0])
    for name, owner in owners.items():
        alias, own = descriptors.ParamAOTInput(name), descriptors.ParamAOTInput(owner)
        if name == owner or not {alias.expr(), own.expr()} <= holders.keys():
            continue
        holders[alias.expr()].replace_all_uses_with(holders[own.expr()])
        graph.erase_node(holders[alias.expr()])
        if descriptors.GradAOTOutput(alias) not in kinds:
            continue  # the parameter is frozen
        place, total = kinds.index(descriptors.GradAOTOutput(alias)), kinds.index(descriptors.GradAOTOutput(own))
        gradients = [values[one] for one in (total, place) if values[one] is not None]
        if len(gradients) == 2:
            with graph.inserting_before(output):
                summed = graph.call_function(torch.ops.aten.add.Tensor, tuple(gradients))
            summed.meta["val"] = gradients[0].meta["val"]
            gradients = [summed]
        values[total] = next(iter(gradients), None)
        del kinds[place], values[place]
    output.args, output.meta["desc"] = (tuple(values),), kinds


class JointOutput(NamedTuple):
    """The meaning of an output of a joint graph."""

    kind: Literal["gradient", "buffer", "result"]
    name: str
    """Name of the parameter whose gradient it is, or of the buffer whose new value it is; empty for a result of the
    forward pass."""


class JointNodes(NamedTuple):
    """The placeholders of a joint graph by kind, the nodes of its gradients, and the meaning of its outputs."""

    parameters: dict[str, fx.Node]
    buffers: dict[str, fx.Node]
    inputs: list[fx.Node]
    tangents: list[fx.Node]
    gradients: dict[str, fx.Node]
    """Name of a parameter -> node of its gradient; a frozen parameter has none."""
    outputs: list[JointOutput]
    """The meaning of each output, in order."""


def nodes_of_joint(graph: fx.Graph) -> JointNodes:
    """Sort the placeholders of a graph that `joint_graph` traced, and pair parameters with their gradients."""
    from torch._functorch._aot_autograd import descriptors, fx_utils

    pairs = fx_utils.get_param_and_grad_nodes(graph)
    holders = [node for node in graph.nodes if node.op == "placeholder"]

    def of_kind(kind: type) -> list[fx.Node]:
        return [node for node in holders if isinstance(node.meta["desc"], kind)]

    def described(desc: Any) -> JointOutput:
        if isinstance(desc, descriptors.GradAOTOutput):
            return JointOutput("gradient", getattr(desc.grad_of, "target", ""))
        if isinstance(desc, descriptors.InputMutationAOTOutput):
            return JointOutput("buffer", getattr(desc.mutated_input, "target", ""))
        return JointOutput("result", "")

    return JointNodes(
        parameters={parameter.target: node for parameter, (node, _) in pairs.items()},
        buffers={node.meta["desc"].target: node for node in of_kind(descriptors.BufferAOTInput)},
        inputs=of_kind(descriptors.PlainAOTInput),
        tangents=of_kind(descriptors.TangentAOTInput),
        gradients={
            parameter.target: gradient for parameter, (_, gradient) in pairs.items() if isinstance(gradient, fx.Node)
        },
        outputs=[described(desc) for node in graph.nodes if node.op == "output" for desc in node.meta["desc"]],
    )


Row = list[Placement | None]
"""A strategy: a placement for each output (None for one that the operator leaves out), then for each tensor input."""


def sharding_strategies(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], ranks: int) -> list[Row] | None:
    """torch's sharding strategies for an operator over one mesh axis; None if torch has none."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    own = getattr(propagator, "op_single_dim_strategy_funcs", {}).get(op)
    if own is not None:
        args, kwargs = tree_map_only(Tensor, _meta_of, (tuple(args), dict(kwargs)))
        known = (Placement, type(None))
        return [[one if isinstance(one, known) else Shard(one.dim) for one in row] for row in own(op, args, kwargs)]
    if op in propagator.op_strategy_funcs:
        return list(_followed(op, tuple(args), dict(kwargs), ranks))
    return None


def _meta_of(tensor: Tensor) -> Any:
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


@cache
def _mesh_of(ranks: int) -> DeviceMesh:
    """A mesh without process groups, only to ask torch for strategies."""
    return DeviceMesh("cpu", torch.arange(ranks), _init_backend=False, _rank=0)


def _followed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: int) -> Iterator[Row]:
    """Strategies that depend on the inputs' placements: asked with one placement for all inputs, or for one input."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    options = list[list[Placement]]()
    for tensor in tensors:
        split = [Shard(dim) for dim, size in enumerate(tensor.shape) if size and size % ranks == 0]
        options.append([Replicate(), *split, *([Partial()] if tensor.is_floating_point() else [])])
    every = dict.fromkeys(placement for own in options for placement in own)
    asked = [tuple(placement if placement in own else Replicate() for own in options) for placement in every]
    for slot, own in enumerate(options):
        asked += [tuple(placement if slot == at else Replicate() for at in range(len(tensors))) for placement in own]
    for placements in dict.fromkeys(asked):
        try:
            yield from _ask(op, args, kwargs, placements, ranks)
        except (RuntimeError, ValueError, AssertionError, IndexError):
            continue  # the strategy does not accept these placements of the inputs


def _ask(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], placements: Sequence[Placement], ranks: int
) -> list[Row]:
    """The strategies for inputs with these placements; a strategy may ask for other placements instead."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy

    propagator, mesh = DTensor._op_dispatcher.sharding_propagator, _mesh_of(ranks)
    left = iter(placements)

    def place(tensor: Tensor) -> OpStrategy:
        return OpStrategy([OpSpec(DTensorSpec(mesh, (next(left),), tensor_meta=_meta_of(tensor)))])

    def convert(argument: Any) -> Any:
        if isinstance(argument, list | tuple) and any(isinstance(one, Tensor) for one in argument):
            return TupleStrategy([place(one) for one in argument])
        return place(argument) if isinstance(argument, Tensor) else argument

    schema = OpSchema(
        op,
        tuple(convert(argument) for argument in args),
        {name: convert(argument) for name, argument in kwargs.items()},
        schema_info=propagator.op_to_schema_info.get(op),
    )
    strategy: Callable[[OpSchema], Any] = propagator.op_strategy_funcs[op]
    rows = list[Row]()
    for spec in getattr(strategy(schema), "strategies", ()):
        outputs = spec.output_specs
        outputs = outputs if isinstance(outputs, tuple) else (outputs,) * len(op._schema.returns)
        inputs = spec.input_specs or outputs[:1] * len(placements)  # by default, inputs are placed like the output
        rows.append([None if one is None else one.placements[0] for one in (*outputs, *inputs)])
    return rows


def returns_view(op: Any) -> bool:
    """Whether an operator returns a view of one of its arguments, by its signature."""
    return any(one.alias_info is not None and not one.alias_info.is_write for one in op._schema.returns)


@cache
def import_all() -> None:
    """Import all modules that the first call of a custom operator and the first trace would import."""
    from torch import _dynamo  # noqa: F401
    from torch._subclasses import fake_tensor

    fake_tensor.FakeTensorMode()


def is_overload(op: Any) -> bool:
    """Whether an operator is an overload in torch's dispatcher, which has a signature."""
    return isinstance(op, torch._ops.OpOverload)


def changes_inputs(op: Any) -> bool:
    """Whether an operator changes its arguments, by its signature."""
    return bool(op._schema.is_mutable)
