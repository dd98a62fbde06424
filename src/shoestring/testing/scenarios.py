"""The scenarios of the conformance suite: functions that train or compose, on one rank or on each rank of a pool.

A single rank is the test's own process. Arguments and results are of JSON types; `encode` serialises features.
"""

from __future__ import annotations

import base64
import gc
import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import chdir, suppress
from dataclasses import asdict, dataclass
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, TypeVar
from weakref import ref

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoestring.checkpoint.format.state import pack, unpack
from shoestring.core.attachments import Attachments
from shoestring.core.compose import attach, compose
from shoestring.core.feature import DATA, Feature, Seam, export_weights, splits_replicas
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import ModelState, Progress
from shoestring.core.task import call_model, cross_entropy
from shoestring.core.world import World
from shoestring.models import slorb
from shoestring.settings import structure
from shoestring.testing import jobs
from shoestring.testing.held_resources import Allocations, fresh_garbage, held_resources, tensors_in_cycles

Encoded = Mapping[str, Any]
T = TypeVar("T")


def encode(feature: Feature) -> dict[str, Any]:
    kind = type(feature)
    return {"of": f"{kind.__module__}:{kind.__qualname__}", "settings": asdict(feature)}


def decode(encoded: Encoded) -> Feature:
    module, _, name = encoded["of"].partition(":")
    return structure(encoded["settings"], getattr(import_module(module), name), name, "the suite")


@cache
def here() -> World:
    """Return the world of this process with its process groups; all scenarios in a process share it."""
    if not dist.is_initialized():
        return World()
    world = World.current()
    assert world.mesh is not None
    return world


def build(model: str, *, dropout: float = 0.0, precise: bool = False) -> nn.Module:
    if "torch._dynamo" in sys.modules:  # by default, dynamo silently stops compiling after a few recompilations
        config = sys.modules["torch._dynamo"].config
        config.recompile_limit, config.fail_on_recompile_limit_hit = 128, True
    module, _, name = model.partition(":")
    built = getattr(import_module(module), name)(dropout)
    return built.double() if precise else built


def features_of(encoded: Iterable[Encoded], folder: str = "") -> list[Feature]:
    """Decode features; features that write files get `folder` to write to, unless `folder` is empty."""
    features = [decode(feature) for feature in encoded]
    return [feature.placed(Path(folder)) if folder else feature for feature in features]


def _in_empty_folder(scenario: Callable[..., T]) -> Callable[..., T]:
    """Decorate a scenario to run in an empty working folder, which is deleted afterwards."""

    @wraps(scenario)
    def run(**arguments: Any) -> T:
        with TemporaryDirectory() as folder, chdir(folder):
            return scenario(**arguments)

    return run


# -- training ---------------------------------------------------------------------------------------------------------


@_in_empty_folder
def train(
    *,
    model: str,
    features: Sequence[Encoded],
    steps: int,
    folder: str,
    stop: int = 0,
    resume: bool = False,
    precise: bool = False,
    dropout: float = 0.0,
    ragged: bool = False,
    open_end: bool = False,
) -> dict[str, Any]:
    """Train a model with features, from step 0 or from the newest checkpoint.

    Args:
        folder: folder that features write to.
        stop: step after which `Job.stop` ends the run, as a signal would; 0 trains for all `steps`.
        resume: whether to resume from the newest checkpoint.
        precise: whether to train in fp64.
        ragged: whether ranks have different numbers of targets.
        open_end: whether the job does not know the number of steps, as in a user's own training loop.
    """
    world = here()
    progress = Progress(total=0 if open_end else steps)
    built = build(model, dropout=dropout, precise=precise)
    job = Job(built, optimizer=jobs.sgd(), progress=progress, world=world, example=_example)
    job = compose(job, features_of(features, folder))
    torch.manual_seed(1000 + world.rank)
    with job:
        start = job.restore("auto") if resume and job.restore is not None else 0
        losses = []
        for number in range(start or 0, steps):
            if number + 1 == stop:
                job.stop()
            losses.append(float(job.step(jobs.batch(number, *_share(job), ragged=ragged))))
            if attachments_of(job).stopping:
                break
        return {"start": start, "losses": losses, "held_out": _held_out(job)} | _state(job)


def exported(*, model: str, features: Sequence[Encoded], steps: int, folder: str) -> list[float]:
    """Return the held-out losses of a trained job, and of a model without features with the job's exported weights."""
    world = here()
    several = features_of(features, folder)
    with compose(Job(build(model), optimizer=jobs.sgd(), progress=Progress(total=steps), world=world), several) as job:
        for number in range(steps):
            job.step(jobs.batch(number, world.rank, world.size))
        states = {name: entry.state.state_dict() for name, entry in job.kept.items()}
        weights = {name: value.clone() for name, value in attachments_of(job).weights().items()}
        weights = export_weights(attachments_of(job).features, weights, states)
        trained = _held_out(job)
    plain = build(model)
    slorb.fill(plain, weights)
    return [trained, _held_out(compose(Job(plain, optimizer=jobs.sgd(), world=World())))]


def _held_out(job: Job) -> float:
    """Return the held-out loss in nats per token; features that change only the training loss do not affect it."""
    total, count = job.evaluate(jobs.batch(jobs.HELD_OUT + number, *_share(job)) for number in range(4))
    return total / count


def _example() -> dict[str, Tensor]:
    """Return a whole batch, as every rank gets it if all ranks work on the same samples."""
    return jobs.batch(0)


def _share(job: Job) -> tuple[int, int]:
    """Return the index of this rank among the ranks that read different samples, and the number of such ranks."""
    return job.world.index_over(DATA), job.world.ranks_over(DATA)


def _state(job: Job) -> dict[str, Any]:
    """Return the weights, and a digest of each state that should be the same on all ranks."""
    same = {name: _digest(entry.state.state_dict()) for name, entry in job.kept.items() if entry.across == "same"}
    return _weights(job.model, attachments_of(job)) | {"same": same}


def _digest(state: Mapping[str, Any]) -> str:
    """Hash the content of a state after a round trip through the checkpoint format; the order of keys matters."""
    total = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            total.update(f"{value.dtype} {tuple(value.shape)}".encode())
            total.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            add(list(value.items()))
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            total.update(repr(value).encode())

    add(unpack(pack(state)))
    return total.hexdigest()


def _weights(model: nn.Module, attachments: Attachments | None = None) -> dict[str, Any]:
    """All weights of a model, including weights that other ranks train (stages of a pipeline)."""
    state = ModelState(model).state_dict()
    if attachments is None:
        whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
    else:
        whole = {name: attachments.whole(name, value) for name, value in attachments.weights().items()}
    if attachments is not None and attachments.parted:
        for data in attachments.world.gather(pack(whole)):
            whole = unpack(data) | whole
        whole = {name: whole[name] for name in state}
    flat = np.concatenate([value.detach().double().numpy().ravel() for value in whole.values()])
    return {"names": list(whole), "weights": base64.b64encode(flat.tobytes()).decode()}


@_in_empty_folder
def foreign(*, model: str, features: Sequence[Encoded], steps: int, folder: str) -> dict[str, Any]:
    """Train in a loop such as users write, with one call of `attach`; on several ranks the loop itself uses DDP."""
    world = here()
    network = build(model)
    several = features_of(features, folder)
    if world.size > 1 and not any(Seam.SHARD in feature.seams for feature in several):
        network = DistributedDataParallel(network)
    optimizer = jobs.sgd()([parameter for parameter in network.parameters() if parameter.requires_grad])
    torch.manual_seed(1000 + world.rank)

    job = attach(network, optimizer, *several)
    network, optimizer = job.model, job.optimizer
    losses = []
    for number in range(steps):
        batch = jobs.batch(number, world.rank, world.size)
        loss = F.cross_entropy(network(batch["inputs"]).flatten(0, -2), batch["targets"].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    result = {"losses": losses} | _weights(network)
    job.close()
    return result


# -- taking and releasing ---------------------------------------------------------------------------------------------


class PlannedError(Exception):
    """Exception that scenarios raise on purpose, to test that everything is released."""


@dataclass(frozen=True, kw_only=True)
class Stumble(Feature):
    """A feature that raises when it is applied, which happens after all other features were applied."""

    seams: ClassVar = (Seam.STEP,)

    def why_not_replayed(self, attachments: Attachments) -> str:
        return ""  # no step is run with this feature

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        raise PlannedError


@_in_empty_folder
def release(*, model: str, features: Sequence[Encoded], folder: str, ending: str, returns_model: bool) -> list[str]:
    """Use a job and close it; returns the names of resources that were not released.

    Args:
        ending: how the job ends: "normally", or by an exception "in forward", "in backward" or "while attaching" a
            later feature.
        returns_model: whether closing the job must restore the model; if not, nothing may keep the model alive.
    """
    several = features_of(features, folder)
    if any(map(splits_replicas, several)):  # the first job makes process groups that the world keeps for later jobs
        _use(build(model), several, here(), [], "normally")
    with fresh_garbage():
        left = _left(build(model), several, ending, returns_model)
        return left + [f"the file {path} outside of the run's folder" for path in sorted(Path().rglob("*"))]


def _left(built: nn.Module, several: list[Feature], ending: str, returns_model: bool) -> list[str]:
    world = here()
    optimizers: list[Optimizer] = []
    jobs.sgd()(
        [nn.Parameter(torch.zeros(1))]
    )  # the first optimizer imports torch's compiler, which sets environment variables
    before = held_resources(built if returns_model else None)
    several += [Stumble()] if ending == "while attaching" else []
    # With a pipeline, the failure of one stage is a RuntimeError in the other stages.
    failures = (PlannedError, RuntimeError) if any(map(splits_replicas, several)) else PlannedError
    cycles = list[str]()
    with suppress(*([failures] if isinstance(failures, type) else failures)):
        cycles = _use(built, several, world, optimizers, ending)
    after = held_resources(built if returns_model else None, optimizers)
    left = cycles + sorted((after - before).elements())
    if not returns_model:
        watched = ref(built)
        del built
        optimizers.clear()
        gc.collect()
        left += ["the model itself"] if watched() is not None else []
    return left


def _use(
    model: nn.Module, features: list[Feature], world: World, optimizers: list[Optimizer], ending: str
) -> list[str]:
    """Take two steps; returns descriptions of the second step's tensors that only the garbage collector frees."""
    steps = 0

    def fail(_: Tensor) -> None:
        raise PlannedError

    def optimizer(parameters: list[nn.Parameter]) -> Optimizer:
        optimizers.append(jobs.sgd()(parameters))
        return optimizers[-1]

    def forward(module: nn.Module, batch: Any) -> Any:
        try:
            return call_model(module, batch)
        finally:  # a stage of a pipeline leaves the model's forward pass by an exception
            if ending == "in forward" and steps:
                raise PlannedError

    def loss(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        total, count = cross_entropy(output, batch)
        if ending == "in backward" and steps:
            total.register_hook(fail)
        return total, count

    made = Job(model, forward, loss, optimizer, Progress(total=3), world, example=_example)
    with compose(made, features) as job:
        job.step(jobs.batch(steps, *_share(job)))
        steps = 1  # `forward` and `loss` read `steps`
        with tensors_in_cycles() as cycles:
            job.step(jobs.batch(steps, *_share(job)))
    return cycles


@_in_empty_folder
def refuse(*, model: str, features: Sequence[Encoded], folder: str) -> dict[str, Any]:
    """Compose features that must be refused; returns the error, and the resources that were taken nevertheless.

    Resources are compared for the second of two attempts, because the first attempt may import modules.
    """
    with suppress(Exception):
        job = Job(build(model), optimizer=jobs.sgd(), world=here(), example=_example)
        compose(job, features_of(features, folder))
    built = build(model)
    several = features_of(features, folder)
    job = Job(built, optimizer=jobs.sgd(), world=here(), example=_example)
    error = message = ""
    with fresh_garbage():
        before = held_resources(built)
        with Allocations() as allocations:
            try:
                compose(job, several)
            except Exception as raised:
                error, message = type(raised).__name__, f"{raised}"
        left = sorted((held_resources(built) - before).elements()) + allocations.kept()
    left += [f"the file {path}" for path in Path(folder).rglob("*")]
    return {"error": error, "message": message, "left": left}


@_in_empty_folder
def owns(*, model: str, features: Sequence[Encoded], folder: str) -> list[str]:
    """Return the names of seams that features take without declaring them in their `seams`."""
    several, factory = features_of(features, folder), jobs.sgd()
    seams = {seam for feature in several for seam in feature.seams}
    job = Job(build(model), optimizer=factory, world=here(), example=_example)
    with compose(job, several):
        took = {
            Seam.OPTIM: attachments_of(job).build_optimizer is not factory,
            Seam.SHARD: job.model is not attachments_of(job).module,
        }
        return [seam.name for seam, changed in took.items() if changed and seam not in seams]
