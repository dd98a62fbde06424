"""Chooses, before training, how ranks split the operators of a job's step: traces the step and searches a plan."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from shoestring._torch import tree_map_only, without_data
from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.feature import Feature, Seam
from shoestring.core.task import Batch, sum_and_count
from shoestring.core.whole_batch import is_over_whole_batch
from shoestring.graph.costs import GraphCosts
from shoestring.graph.meshes import search_mesh
from shoestring.graph.placements import WHOLE, Placement, ShardingRule
from shoestring.graph.program import DividedStep
from shoestring.graph.rules import RuleBook
from shoestring.graph.search import GraphPlan, SplitSearch
from shoestring.graph.trace import JointTrace, StepGraph, tensors_of, trace
from shoestring.models.blocks import routers
from shoestring.models.without_data import with_fake_tensors
from shoestring.planning.cluster import read_cluster

if TYPE_CHECKING:
    from shoestring.graph.settings import Split

GIB = 2**30
PREFIX = "model."
"""Beginning of the names of all parameters in a traced step."""
_LEAVES = (int, float, str, bytes, type(None))
"""Types of the entries that a batch may hold besides tensors."""


# -- before anything is allocated --------------------------------------------------------------------------------------


def check(attachments: Attachments, settings: Split) -> None:
    """Raise ConfigError if the step cannot be traced or no plan fits, ConflictError if another feature conflicts."""
    if settings.gib < 0:
        raise ConfigError(f"`{settings.name}.gib` must be 0 or more, got {settings.gib:g}")
    if (ranks := attachments.world.ranks_over(settings.over)) == 1:
        return
    if attachments.wrapped:
        raise ConfigError("the model is already wrapped in DDP", hint=f"remove DDP or {settings.name}")
    for feature in attachments.features:
        if feature is not settings and (reason := _refused(feature)):
            raise ConflictError(
                f"`{feature.name}` does not work with `{settings.name}`: it {reason}",
                hint=f"remove the table [{feature.name}] or [{settings.name}]",
            )
    if is_over_whole_batch(attachments):
        message = f"the loss is over the whole batch, and `{settings.name}` runs micro-batches one by one"
        raise ConflictError(message, hint=f"remove [{settings.name}]")
    if routers(attachments.module):
        message = f"{type(attachments.module).__name__} has routers, whose choice of experts cannot be traced"
        raise ConfigError(message, hint=f"remove [{settings.name}]")
    costs_of(settings, ranks)
    chosen(attachments, settings)


def _refused(feature: Feature) -> str:
    """Why a feature does not work with split operators; empty if it does."""
    reasons = {
        Seam.MODEL: "changes what modules compute or hold, and the step is traced without it",
        Seam.GRAPH: "compiles the model, and ranks run programs of the traced step in its place",
        Seam.LOSS: "changes the loss, and the step is traced without it",
        Seam.SHARD: "also decides which part of the model or of the batch a rank has",
        Seam.WIRE: "exchanges gradients, and the programs of the ranks do so already",
    }
    if reason := next((reasons[seam] for seam in feature.seams if seam in reasons), ""):
        return reason
    if type(feature).export is not Feature.export:
        return "exports weights of the whole model, but a rank holds only a part"
    return "assumes that the first rank holds the whole model" if feature.reads_first_rank else ""


# -- the traced step ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchForm:
    """The structure of a batch, the shapes and data types of its tensors, and the values of its other entries."""

    structure: Any
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, batch: Batch) -> BatchForm:
        """Describe a batch.

        Raises:
            ConfigError: the batch holds objects, in which tensors could be hidden.
        """
        leaves, structure = pytree.tree_flatten(batch)
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *_LEAVES)):
                message = (
                    f"a batch holds a {type(leaf).__name__}, and only tensors in tuples, lists and dicts are split"
                )
                raise ConfigError(message, hint="return such a batch from run.collate")
        described = ((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(structure, tuple(described))

    def __str__(self) -> str:
        return ", ".join(str(leaf[0]) if isinstance(leaf, tuple) else repr(leaf) for leaf in self.leaves)


class _TraceableStep(nn.Module):
    """A job's model with its loss, as a function of the tensors of a batch."""

    def __init__(self, attachments: Attachments, batch: Batch) -> None:
        super().__init__()
        self.model, self.batch, self.number = attachments.module, batch, None
        self.functions = attachments.forward, attachments.loss  # a tuple hides a loss that is a module from torch

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the loss sum, and the number of targets if it is a tensor; otherwise store it in `number`."""
        forward, loss = self.functions
        left = iter(tensors)
        batch = tree_map_only(Tensor, lambda _: next(left), self.batch)
        returned: Any = loss(forward(self.model, batch), batch)
        total, count = sum_and_count(returned)
        if isinstance(returned[1], Tensor):
            return total, count.detach()
        self.number = returned[1]
        return (total,)


@dataclass(frozen=True)
class TracedStep:
    """The traced computation of one micro-batch: the sum of its losses, its number of targets, and gradients."""

    step: JointTrace
    form: BatchForm
    number: float | None
    """Number of targets, if the loss returns it as a number; None if the loss returns it as a tensor."""
    modes: tuple[bool, ...]
    """For each module of the model: whether it was in training mode."""

    @property
    def digest(self) -> str:
        """A hash of the graph, equal on ranks that trace the same step."""
        return digest(self.step.graph)


def digest(graph: fx.Graph) -> str:
    """A hash of a graph's operators, arguments and shapes, equal in other processes and on other GPUs."""

    def named(one: Any) -> Any:
        if isinstance(one, torch.device):
            return one.type
        return one.__qualname__ if isinstance(one, FunctionType) else one

    total = hashlib.blake2b(digest_size=8)
    for node in graph.nodes:
        shapes = [(tuple(one.shape), one.dtype) for one in tensors_of(node)]
        arguments = fx.node.map_aggregate((node.args, dict(node.kwargs)), named)
        total.update(f"{node.name} {named(node.target)} {arguments} {shapes}\n".encode())
    return total.hexdigest()


def trace_job(attachments: Attachments, settings: Split) -> TracedStep:
    """Trace the computation of one micro-batch in training mode, without computing anything.

    Raises:
        ConfigError: the step cannot be traced, draws random numbers, or reads tensors that are neither parameters,
            buffers nor entries of the batch.
    """
    if attachments.example is None:
        message = f"`{settings.name}` traces a step before the first one, and does not know the sizes of a batch"
        raise ConfigError(message, hint="give a function that returns a batch: Job(…, example=…)")
    batch, module = attachments.example(), attachments.module
    with without_data(), _ready(module, attachments.world.device.type) as device, attachments.computing():
        fake = tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device=device), batch)
        inner = _TraceableStep(attachments, fake)
        step = trace(inner, *(leaf for leaf in pytree.tree_leaves(fake) if isinstance(leaf, Tensor)))
        traced = TracedStep(step, BatchForm.of(batch), inner.number, tuple(part.training for part in module.modules()))
    nodes = step.nodes
    known = {*nodes.parameters.values(), *nodes.buffers.values(), *nodes.inputs, *nodes.tangents}
    names = {PREFIX + name for name in attachments.named()}
    for node in step.graph.nodes:
        if (node.op == "placeholder" and node not in known) or nodes.parameters.keys() != names:
            message = f"{type(module).__name__} can only be traced with other tensors than its own parameters"
            raise ConfigError(message, hint=f"remove [{settings.name}]")
        if node.op not in ("placeholder", "call_function", "output"):
            raise ConfigError(
                f"the step reads a constant, `{node.target}`, which `{settings.name}` cannot place on ranks",
                hint="register it as a buffer of the model",
            )
        if _draws(node):
            raise ConfigError(
                f"the step draws random numbers ({node.target}), which ranks of `{settings.name}` do not draw alike",
                hint=f"set dropout to 0, or remove [{settings.name}]",
            )
    return traced


@contextmanager
def _ready(module: nn.Module, device: str) -> Iterator[str]:
    """Context in which a module can be traced: in training mode, and with fake tensors instead of tensors on `meta`.

    Yields the device type of the module's tensors.
    """
    parts = [(part, part.training, dict(part._parameters), dict(part._buffers)) for part in module.modules()]
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with_fake_tensors(module, device)
    try:
        module.train()
        yield device
    finally:
        for part, training, parameters, buffers in parts:
            part.training = training
            part._parameters.update(parameters)
            part._buffers.update(buffers)


def _draws(node: fx.Node) -> bool:
    """Whether an operator draws random numbers; attention does so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema: Any = getattr(node.target, "_schema", None)
    for place, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            value = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            return not (isinstance(value, float) and value == 0.0)
    return True


# -- the plan ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChosenPlan:
    """A plan of a step as plain numbers, so that the rank that searched it can send it to the other ranks."""

    digest: str
    """Hash of the traced step."""
    choices: list[list[int]]
    """For each axis of the mesh: the placement of each placeholder and the index of each operator's rule, in node
    order."""
    seconds: float
    """Predicted seconds of a step, without overlap."""
    memory: float
    """Predicted bytes per rank: weights, gradients, optimizer state and saved activations."""
    operators: int
    parameters: int
    sharded: int
    """Number of parameters of which each rank has a shard."""

    def divided(self, traced: TracedStep, mesh: Sequence[int]) -> DividedStep:
        """Divide the traced step among the ranks of a mesh as this plan says.

        Raises:
            ConfigError: an operator has fewer rules on this rank than on the rank that searched the plan. Rules that
                are found by trying can differ, because a busy host may reach a time limit.
        """
        divided = DividedStep.whole(traced.step)
        for ranks, choices in zip(mesh, self.choices, strict=True):
            book, pairs = RuleBook(ranks), list(zip(_deciders(divided.step), choices, strict=True))
            for node, choice in pairs:
                if node.op == "call_function" and choice >= len(book[node].rules):
                    message = f"the plan divides `{node.target}` by a rule that this rank has not found"
                    raise ConfigError(message, hint="start again when the host is less busy")
            rules = {
                node: book[node].rules[choice] if node.op == "call_function" else ShardingRule((choice,), ())
                for node, choice in pairs
            }
            divided = divided.divided(rules, ranks)
        return divided


def _deciders(step: StepGraph) -> list[fx.Node]:
    """The placeholders and operators for which a plan has a rule, in order."""
    return [node for node in step.tensors if node.target is not operator.getitem]


def chosen(attachments: Attachments, settings: Split) -> ChosenPlan | None:
    """The plan of a job's step, which the first rank searches once; None in `shoestring check` without an example."""
    return attachments.carry(settings, lambda: _choose(attachments, settings))


def _choose(attachments: Attachments, settings: Split) -> ChosenPlan | None:
    ranks_run = dist.is_initialized()  # false in `shoestring check`, which starts no ranks
    if attachments.example is None and not ranks_run:
        return None
    decide: Callable[..., Any] = attachments.world.decide if ranks_run else lambda work: work()
    return ChosenPlan(**decide(lambda: asdict(_searched(attachments, settings))))


def _searched(attachments: Attachments, settings: Split) -> ChosenPlan:
    ranks = attachments.world.ranks_over(settings.over)
    costs, memory = costs_of(settings, ranks)
    traced = trace_job(attachments, settings)
    step, books = traced.step, {axis.ranks: RuleBook(axis.ranks) for axis in costs}

    def frozen(name: str) -> Placement | None:
        return WHOLE if name and name not in step.nodes.gradients else None

    def choice(node: fx.Node, axis: GraphPlan) -> int:
        rule = axis.rules[node]
        return books[axis.ranks][node].rules.index(rule) if node.op == "call_function" else rule.outputs[0]

    plan = search_mesh(step, costs, SplitSearch(memory=memory), frozen, books)
    placements = plan.divided.placements(step)
    return ChosenPlan(
        traced.digest,
        [[choice(node, axis) for node in _deciders(one)] for one, axis in zip(plan.steps, plan.axes, strict=True)],
        plan.objective,
        plan.memory,
        len(step.operators),
        len(step.nodes.parameters),
        sum(any(at != WHOLE for at in placements[node]) for node in step.nodes.parameters.values()),
    )


def costs_of(settings: Split, ranks: int) -> tuple[Sequence[GraphCosts], float]:
    """The costs along each axis of this host's mesh, from the cluster file, and the bytes that a rank may hold.

    Raises:
        ConfigError: no cluster file is named, the file is unusable, or it describes another number of ranks.
    """
    hint = f"measure them on this host: shoestring probe --out cluster.toml --workers {ranks}"
    if not settings.cluster:
        raise ConfigError(f"`{settings.name}.cluster` names no file with the speeds of this host's ranks", hint=hint)
    cluster = read_cluster(Path(settings.cluster))
    costs = GraphCosts.of(cluster)
    if costs.ranks != ranks:
        raise ConfigError(f"`{settings.cluster}` has measured {costs.ranks} ranks, and there are {ranks}", hint=hint)
    room = settings.gib * GIB or min(device.memory for device in cluster.devices)
    return costs.over(settings.mesh or (ranks,)), room or float("inf")
