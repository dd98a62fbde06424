"""Programs of ranks of small divided steps, as they are, in tiles, and in the order that `overlap` finds."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoestring.graph.costs import GraphCosts, ring
from shoestring.graph.lockstep import difference, random_plan, real_values, run_whole
from shoestring.graph.meshes import search_mesh
from shoestring.graph.overlap import overlap
from shoestring.graph.placements import divide_over
from shoestring.graph.program import DividedStep
from shoestring.graph.rules import RuleBook
from shoestring.graph.running import run_rank
from shoestring.graph.tiles import regions_of, tiled
from shoestring.graph.trace import trace
from shoestring.models.gpt import tiny
from tests.graph.steps import Convolutional, WithLoss, texts


def gpt():
    model = tiny(vocab_size=32, context=8, dim=16, layers=1, heads=4, kv_heads=4, hidden=32)
    return WithLoss(model).double(), texts(32, 8, batch=16)


def pictures():
    model = WithLoss(Convolutional()).double().train()
    return model, (torch.randn(16, 3, 8, 8, dtype=torch.float64), torch.randint(4, (16,)))


STEPS = {"gpt": gpt, "pictures": pictures}


AXES = "one", "two"


@cache
def device_mesh(mesh: tuple[int, ...]) -> DeviceMesh:
    """The mesh of a pool's ranks, whose groups are made once."""
    return init_device_mesh("cpu", mesh, mesh_dim_names=AXES[: len(mesh)])


def traced(name):
    """A step, and the values of its placeholders in order."""
    torch.manual_seed(0)
    model, batch = STEPS[name]()
    step = trace(model, *batch)
    values = real_values(step, model, *batch)
    return step, values, [values[node] for node in step.module.graph.nodes if node.op == "placeholder"]


def axes(mesh):
    """Links on which messages take about as long as what they could overlap with, along each axis of a mesh."""
    ranks = math.prod(mesh)
    return GraphCosts.of(ring(ranks, latency=1e-6, bandwidth=2e9, flops=2e10, copy=4e9)).over(mesh)


def costs(ranks):
    """The same for ranks of one axis."""
    return axes((ranks,))[0]


def program_of(step, mesh, plan):
    """The program of a rank, by the plan that the search finds or by drawn ones for each axis."""
    if plan == "found":
        return search_mesh(step, axes(mesh)).divided.program()
    divided, draw = DividedStep.whole(step), random.Random(plan)
    for ranks in mesh:
        divided = divided.divided(random_plan(divided.step, RuleBook(ranks), draw), ranks)
    return divided.program()


def in_tiles(program, tiles, products=2):
    """The program with every message in tiles that can be, along the first axis that can; and the regions."""
    book = RuleBook(tiles)
    regions = [region for begun in program.messages for region in [next(regions_of(begun, book, products), None)]]
    regions = [region for region in regions if region is not None]
    return tiled(program, regions), regions


def changed(program, how):
    """The program as it is, in tiles, or in the order that is found."""
    if how == "tiles":
        return in_tiles(program, 2)[0]
    return overlap(program, axes(program.mesh)[-1], rounds=5).program if how == "order" else program


def off_by(*, model: str, plan: int | str, how: str, mesh: Sequence[int]) -> dict:
    """Run a program on this rank of a process group: the largest difference of its outputs from those of one rank."""
    mesh, rank = tuple(mesh), dist.get_rank()
    groups = [axis.get_group() for axis in map(device_mesh(mesh).__getitem__, AXES[: len(mesh)])]
    step, values, inputs = traced(model)
    program = changed(program_of(step, mesh, plan), how)
    own = [divide_over(value, to, mesh)[rank] for value, to in zip(inputs, program.inputs, strict=True)]
    outputs = run_rank(program, own, groups)
    whole = run_whole(step, values)
    wanted = [
        one if one is None else divide_over(one, to, mesh)[rank] for one, to in zip(whole, program.outputs, strict=True)
    ]
    return {"off": difference(outputs, wanted), "messages": [str(node.args[1:]) for node in program.messages]}
