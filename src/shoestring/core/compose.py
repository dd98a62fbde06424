"""Attach features to a job, or to the model and optimizer of a program with a training loop of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import nn
from torch.optim import Optimizer

from shoestring import facts
from shoestring._torch import unscale_before_steps
from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.feature import (
    Feature,
    Phase,
    Seam,
    arrange_mesh,
    check_owners,
    order_of_application,
    resolve_all,
    splitting,
)
from shoestring.core.job import Job, attachments_of
from shoestring.core.task import Params
from shoestring.core.whole_batch import is_over_whole_batch
from shoestring.core.world import World


def compose(job: Job, features: Sequence[Feature] = (), *, dry: bool = False) -> Job:
    """Attach features to a job: fill in "auto" settings, refuse conflicts, check each feature, apply it at its seams.

    Nothing is changed or allocated before all checks have passed. If an `apply` fails, the job is closed.

    Args:
        dry: stop after the checks, without applying the features.

    Raises:
        ConfigError: a feature does not fit the job, or ranks have different settings. ConflictError: two features own
            the same seam.
    """
    check_features(features)
    attachments = attachments_of(job)
    world = attachments.world
    world.alike(facts.of_features(features, total=job.progress.total), "attach the same features on all ranks")
    attachments.world = arrange_mesh(world, features)
    attachments.features = features = resolve_all(features, attachments.world)
    check_owners(features)
    for axis in unkept(features, attachments.world, attachments.replicas):
        message = f"{attachments.world.axes[axis]} ranks over {axis}, but nothing keeps their models equal"
        raise ConfigError(message, hint="add parallel.DDP()")
    if isinstance(attachments.build_optimizer, Optimizer):
        attachments.build_optimizer = _factory_of(attachments.build_optimizer, attachments)
    if not attachments.parameters:
        raise ConfigError(f"{type(attachments.model).__name__} has no trainable parameters")
    for feature in features:
        if feature.adds_parameters and attachments.wrapped:
            message = f"`{feature.name}` adds parameters, which DDP would not average: it has already wrapped the model"
            raise ConfigError(message, hint="attach the feature first, then wrap the model in DDP")
        feature.check(attachments)
    if dry:
        return job
    try:
        _apply_all(attachments)
        if attachments.run_micro_batches is not None and is_over_whole_batch(attachments):
            owner = attachments.owners["how micro-batches are run"]
            raise ConflictError(
                f"the loss is over the whole batch, and `{owner}` runs micro-batches one by one",
                hint=f"remove [{owner}]",
            )
    except BaseException:
        job.close()
        raise
    return job


def check_features(features: Sequence[object]) -> None:
    """Raise ConfigError if an object is not a feature, or has a setting that is not among the allowed values."""
    for feature in features:
        if isinstance(feature, type):
            raise ConfigError(f"`{feature.__name__}` is a class, not settings", hint=f"write `{feature.__name__}()`")
        if not isinstance(feature, Feature):
            raise ConfigError(f"{type(feature).__name__} is no feature", hint="give objects such as `optim.Clip()`")
        for name, kind in get_type_hints(type(feature)).items():
            if get_origin(kind) is Literal and (value := getattr(feature, name)) not in get_args(kind):
                raise ConfigError(f"`{feature.name}.{name}` cannot be {value!r}", hint=f"valid: {get_args(kind)}")


def unkept(features: Sequence[Feature], world: World, replicas: Sequence[str] = ()) -> list[str]:
    """The mesh axes, of more than one rank, along which no feature keeps the ranks' models equal or merges them.

    Args:
        replicas: axes along which gradients are averaged without a feature.
    """
    owners = (feature for feature in features if {Seam.SHARD, Seam.WIRE} & set(feature.seams))
    owned = set(replicas).union(*(feature.over for feature in owners))
    return [axis for axis, ranks in world.axes.items() if ranks > 1 and axis not in owned]


def _apply_all(attachments: Attachments) -> None:
    """Apply the features seam by seam; within a seam, in the order of `order_of_application`.

    Why the seams have this order:

    1. MODEL comes first: it determines what the model computes and which parameters it has. MODEL also freezes modules,
       so that SHARD can shard them.
    2. GRAPH: passes are collected, then the model is compiled once. The hooks of DDP and FSDP2 are added later: if
    torch.compile traced them, they would break the graph. 3. LOSS: the loss is wrapped before anything is sharded; it
    may use modules that MODEL set up (a teacher). 4. SHARD determines how the model is distributed, and which tensors
    the optimizer steps. 5. WIRE registers its hooks on the wrapper that SHARD put around the model. 6. OPTIM: the
    optimizer is built over the tensors that SHARD chose. 7. STEP adds functions to the phases of the optimizer's step;
    by then the optimizer exists.
    """
    for seam in Seam:
        for place, feature in order_of_application(attachments.features):
            if place is seam:
                attachments.attaching = feature.name, seam
                feature.apply(attachments, seam)
        attachments.attaching = "the program", None
        if seam is Seam.GRAPH and (compiler := attachments.graph.compiler()):
            attachments.module.compile(backend=compiler)
            attachments.exits.callback(setattr, attachments.module, "_compiled_call_impl", None)
        if seam is Seam.SHARD:
            attachments.agree_on_trained()
        if seam is Seam.OPTIM:
            attachments.build()
            if "OPTIM" not in attachments.owners:  # the settings of a feature at OPTIM were compared by `compose`
                built = facts.of_optimizer(attachments.optimizer, attachments.world.axes)
                attachments.world.alike(built, "build the same optimizer on all ranks")


def attach(
    model: nn.Module, optimizer: Optimizer, *features: Feature, scaler: torch.amp.GradScaler | None = None
) -> Job:
    """Attach features to the model and optimizer of a program with a training loop of its own.

    The features run in hooks of the model and the optimizer, so the loop stays as it is. If a feature wraps the model
    (DDP) or builds an optimizer (AdamW), the loop uses `attach(…).model` and `attach(…).optimizer`.

    Args:
        scaler: the loop's own loss scaler for fp16, if it has one.

    Returns:
        The job. The loop may call `keep`, `restore` and `close` of the job, but not `step`: the loop calls its own
        optimizer's `step`.

    Raises:
        ConfigError: as in `compose`; also for a feature at LOSS, because the loop computes the loss itself, and for a
            feature that runs the micro-batches.
    """
    check_features(features)
    for feature in features:
        if Seam.LOSS in feature.seams:
            hint = "compose a Job and call its `step`"
            raise ConfigError(f"`{feature.name}` changes the loss, which this loop computes itself", hint=hint)
    job = Job(model, optimizer=optimizer)
    attachments = attachments_of(job)
    if scaler is not None:
        attachments.scaler = scaler
    compose(job, features)
    if attachments.run_micro_batches is not None or (names := splitting(features, attachments.world)):
        job.close()
        owner = attachments.owners.get("how micro-batches are run", "")
        message = (
            f"`{owner}` runs the forward and backward passes, which this loop does itself"
            if owner
            else f"with `{names[0]}` ranks work on the same samples, and this loop reads its own on each"
        )
        raise ConfigError(message, hint="compose a Job and call its `step`")
    if scaler is not None:
        attachments.exits.callback(unscale_before_steps(job.optimizer))
    if attachments.phases[Phase.FORWARD]:
        hook: Any = torch.compiler.disable(_before_forward(attachments))
        attachments.exits.callback(job.model.register_forward_pre_hook(hook).remove)
    return job


def _before_forward(attachments: Attachments) -> Callable[[nn.Module, object], None]:
    """Build a hook that runs Phase.FORWARD before the first forward pass of each step."""
    done = -1

    def before(module: nn.Module, _: object) -> None:
        nonlocal done
        if module.training and done != attachments.progress.step:
            done = attachments.progress.step
            attachments.run(Phase.FORWARD)

    return before


def _factory_of(optimizer: Optimizer, attachments: Attachments) -> Callable[[Params], Optimizer]:
    """Build a factory that returns `optimizer` over the tensors that are trained when the factory is called.

    An owner of SHARD may have replaced the parameters, as `fully_shard` does. Then the trained tensors are not the
    tensors that the optimizer was built with.
    """
    # Accelerate wraps the optimizer, and steps the wrapped one only when gradients are complete. So the hooks must be
    # registered on the wrapped optimizer.
    optimizer = inner if isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer) else optimizer
    names = {parameter: name for name, parameter in attachments.named().items()}

    def over_trained(_: Params) -> Optimizer:
        now = attachments.named()
        for group in optimizer.param_groups:
            group["params"] = [now.get(names.get(parameter, ""), parameter) for parameter in group["params"]]
        if added := [tensor for name, tensor in attachments.trained.items() if name not in names.values()]:
            optimizer.add_param_group({"params": added})
        return optimizer

    return over_trained
