"""How features attach to a job, and to a program with a loop of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import nn
from torch.optim import Optimizer

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Phase, Seam, arrange_mesh, check_owners, order_of_application
from shoestring.core.job import Job
from shoestring.core.task import Params


def compose(job: Job, features: Sequence[Feature] = ()) -> Job:
    """Attach features to a job: resolve, refuse conflicts, check, then apply seam by seam.

    Nothing is changed or allocated before every check has passed; if an `apply` fails, what was taken is released.

    Raises:
        ConfigError: a feature does not fit the job. ConflictError: two features own one seam.
    """
    check_features(features)
    job.world = arrange_mesh(job.world, features)
    features = tuple(feature.resolve(job.world) for feature in features)
    check_owners(features)
    _check_replicas(job, features)
    job.features = features
    if isinstance(job.optimizer, Optimizer):
        job.optimizer = _factory_of(job.optimizer, job)
    if not job.parameters:
        raise ConfigError(f"{type(job.model).__name__} has no trainable parameters")
    for feature in features:
        if feature.adds_parameters and job.engine == "ddp" and job.model is not job.module:
            said = f"`{feature.name}` adds parameters, and DDP has wrapped the model without them"
            raise ConfigError(said, hint="attach it to the model before DDP does")
        feature.check(job)
    try:
        _apply_all(job)
    except BaseException:
        job.close()
        raise
    return job


def check_features(features: Sequence[object]) -> None:
    for feature in features:
        if isinstance(feature, type):
            raise ConfigError(f"`{feature.__name__}` is a class, not settings", hint=f"write `{feature.__name__}()`")
        if not isinstance(feature, Feature):
            raise ConfigError(f"{type(feature).__name__} is no feature", hint="give objects such as `optim.Clip()`")
        for name, kind in get_type_hints(type(feature)).items():
            if get_origin(kind) is Literal and (value := getattr(feature, name)) not in get_args(kind):
                raise ConfigError(f"`{feature.name}.{name}` cannot be {value!r}", hint=f"valid: {get_args(kind)}")


def _check_replicas(job: Job, features: Sequence[Feature]) -> None:
    """Every mesh axis with several ranks needs someone who keeps their models equal, or merges them."""
    keeping = [feature.over for feature in features if {Seam.SHARD, Seam.WIRE} & set(feature.seams)]
    owned = set(job.replicas).union(*keeping)
    for axis, ranks in job.world.axes.items():
        if ranks > 1 and axis not in owned:
            said = f"{ranks} ranks over {axis}, but nothing keeps their models equal"
            raise ConfigError(said, hint="add parallel.DDP()")


def _apply_all(job: Job) -> None:
    """Apply seam by seam; inside a seam in the given order, which for a run file is that of `feature.AREAS`.

    The order of the seams, each with its reason:

    1. MODEL: all others see what the model computes and which parameters it has then. Modules are frozen by
       now, so that SHARD can shard them.
    2. GRAPH: passes are collected, then the model is compiled once. DDP's and FSDP2's hooks come later and so lie
       outside of the compiled graph, which they would break.
    3. LOSS: wraps the loss before anything is sharded, with what MODEL has set up (a teacher).
    4. SHARD: settles how the model is spread and which tensors the optimizer steps.
    5. WIRE: hooks into the engine that SHARD has put around the model.
    6. OPTIM: the optimizer is built over what SHARD left to be stepped.
    7. STEP: hangs its phases on the optimizer, which must exist for that.
    """
    pairs = order_of_application(job.features)
    for seam in Seam:
        for of, feature in pairs:
            if of is seam:
                job.attaching = feature.name, seam
                feature.apply(job, seam)
        job.attaching = "the program", None
        if seam is Seam.GRAPH and (compiler := job.graph.compiler()):
            job.module.compile(backend=compiler)
            job.exits.callback(setattr, job.module, "_compiled_call_impl", None)
        if seam is Seam.OPTIM:
            job.build()


def attach(model: nn.Module, optimizer: Optimizer, *features: Feature) -> Job:
    """Attach features to a program with a loop of its own: its `model` and `optimizer`, as they are.

    The features run in hooks of the two, so the loop stays as it is. A feature that wraps the model (DDP) gives the
    wrapped one as `attach(…).model`, and one that builds an optimizer (AdamW) gives it as `.built_optimizer`.

    Raises:
        ConfigError: as `compose` does; and for a feature at LOSS, which a loop with its own loss would pass by.
    """
    check_features(features)
    for feature in features:
        if Seam.LOSS in feature.seams:
            hint = "compose a Job and call its `step`, or its `loss`"
            raise ConfigError(f"`{feature.name}` changes the loss, which this loop computes itself", hint=hint)
    job = compose(Job(model, optimizer=optimizer), features)
    if job.phases[Phase.FORWARD]:
        hook: Any = torch.compiler.disable(_before_forward(job))
        job.exits.callback(job.model.register_forward_pre_hook(hook).remove)
    return job


def _before_forward(job: Job) -> Callable[[nn.Module, object], None]:
    """Does the work of Phase.FORWARD before the first forward pass of each step."""
    done = -1

    def before(module: nn.Module, _: object) -> None:
        nonlocal done
        if module.training and done != job.progress.step:
            done = job.progress.step
            for work in job.phases[Phase.FORWARD]:
                work()

    return before


def _factory_of(optimizer: Optimizer, job: Job) -> Callable[[Params], Optimizer]:
    """A factory that returns `optimizer` over what is trained then: `fully_shard` puts others in its place."""
    # Accelerate's wrapper calls the optimizer inside only where gradients are complete: hooks belong on that one.
    inner = getattr(optimizer, "optimizer", None)
    optimizer = inner if isinstance(inner, Optimizer) else optimizer
    names = {parameter: name for name, parameter in job.named().items()}

    def over_trained(_: Params) -> Optimizer:
        now = job.named()
        for group in optimizer.param_groups:
            group["params"] = [now.get(names.get(each, ""), each) for each in group["params"]]
        if added := [tensor for name, tensor in job.trained.items() if name not in names.values()]:
            optimizer.add_param_group({"params": added})
        return optimizer

    return over_trained
