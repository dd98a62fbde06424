"""What runs: a model, its loss, its optimizer, and what must survive; and how features attach to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from shoestring.core._torch import foreach_mul_
from shoestring.core.adapters import (
    Batch,
    Output,
    Params,
    call_model,
    cross_entropy,
    following,
    sum_and_count,
)
from shoestring.core.errors import ConfigError, NonFiniteError
from shoestring.core.feature import HOSTS, LOCAL, Feature, Phase, Seam, check_owners, ordered
from shoestring.core.kept import ModelState, OptimizerState, Progress, RandomState
from shoestring.core.trace import Trace, span
from shoestring.core.world import World

Forward = Callable[[nn.Module, Batch], Output]
Loss = Callable[[Output, Batch], tuple[Tensor, Tensor]]
Across = Literal["same", "shard", "own"]
Merge = Callable[[Sequence[dict[str, Any]], int, int], dict[str, Any]]


@dataclass(frozen=True)
class Kept:
    """Something that must survive; see `Job.keep`."""

    state: Stateful
    across: Across
    merge: Merge | None


@dataclass(eq=False)
class Job:
    """A model and all that is done to it. Close it, or use it as a context manager, to release what features took.

    Args:
        model: on the job's device; wrapped by the SHARD seam, while `module` stays the user's own.
        forward: (model, batch) -> output; apart from `loss`, so that a teacher's loss needs no second forward pass.
        loss: (output, batch) -> (sum, count), both 0-d tensors. Their totals over micro-batches and ranks are divided
            once, so unequal counts stay exact.
        optimizer: parameters -> torch.optim.Optimizer, called after SHARD has settled the parameters; or an optimizer
            over the model's parameters, which is then given those.
    """

    model: nn.Module
    forward: Forward = call_model
    loss: Loss = cross_entropy
    optimizer: Callable[[Params], Optimizer] | Optimizer = AdamW
    progress: Progress = field(default_factory=Progress)
    world: World = field(default_factory=World.current)
    trace: Trace = field(default_factory=Trace)

    def __post_init__(self) -> None:
        self.module = self.model
        if isinstance(self.optimizer, Optimizer):
            self.optimizer = following(self.optimizer, self.model)
        self.features: tuple[Feature, ...] = ()
        self.exits = ExitStack()
        self.backend: str | Callable[..., Any] | None = None  # torch.compile's; None runs eagerly
        self.replicas: tuple[str, ...] = ()  # mesh dimensions over which SHARD averages the gradients of each step
        self.sync: Callable[[bool], AbstractContextManager[Any]] = lambda last: nullcontext()  # around a micro-batch
        self.scaler = torch.amp.GradScaler(self.world.device.type, enabled=False)
        self.kept: dict[str, Kept] = {}
        self.numbers: dict[str, float | Tensor] = {}  # the loss, and what features publish; for sinks
        self.restore: Callable[[str], int | None] | None = None  # ("auto" | path) -> the step resumed from
        self.refuse: Callable[[NonFiniteError], None] = _raise  # replicas that train alone end together
        self.stopping = False
        self._phases: dict[Phase, list[Callable[[], None]]] = {phase: [] for phase in Phase}
        self._stop_asked = self._silent = False
        self.defers = self.world.device.type != "cpu"  # reading a step's numbers would wait: it is done one step late
        if isinstance(self.model, DistributedDataParallel):
            self.module, self.replicas, self.sync = self.model.module, (HOSTS, LOCAL), no_sync(self.model)

    # -- what features use -------------------------------------------------------------------------------------------

    def at(self, phase: Phase, work: Callable[[], None]) -> None:
        """Do `work` in this phase of every optimizer step; work of one phase keeps the order of the calls."""
        self._phases[phase].append(work)

    def keep(self, name: str, state: Stateful, *, across: Across = "same", merge: Merge | None = None) -> None:
        """Say what must survive a restart.

        Args:
            across: whether ranks hold "same" state, a "shard" each of one state, or their "own".
            merge: (the own states of all former ranks, new rank, new size) -> this rank's state, for when the number
                of ranks changed; without it own state starts afresh then.
        """
        if name in self.kept:
            raise ConfigError(f"two features keep state under the name `{name}`")
        self.kept[name] = Kept(state, across, merge)

    def patch(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Let `module` run `forward` in place of its own until the job is closed; parameters keep their names."""
        before = vars(module).get("forward")
        module.forward = forward
        undo = partial(setattr, module, "forward", before) if before else partial(delattr, module, "forward")
        self.exits.callback(undo)

    @property
    def engine(self) -> str:
        """Torch's engine that the model runs or will run under: "ddp", "fsdp" or "" for none."""
        if isinstance(self.model, DistributedDataParallel):
            return "ddp"
        return next((feature.engine for feature in self.features if feature.engine), "")

    @property
    def parameters(self) -> Params:
        """What is trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def gradients(self) -> list[Tensor]:
        """This rank's part of every gradient there is, for foreach operations in place."""
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]

    # -- what loops use ----------------------------------------------------------------------------------------------

    def step(self, *batches: Batch) -> Tensor:
        """One optimizer step over one batch, or over several micro-batches whose gradients accumulate.

        Returns:
            The mean loss over all micro-batches and ranks that average gradients; 0-d, detached, on the device.

        Raises:
            NonFiniteError: the loss is NaN or infinite, on all ranks at the same step. On a CPU the weights are still
                those of the step before; on an accelerator, where reading a loss would stall, one step more was done.
        """
        self.trace.step = self.progress.step
        sums = torch.zeros(3, dtype=torch.float64, device=self.world.device)  # loss, count, votes to stop
        sums[2] = float(self._stop_asked)
        work = None
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with self.sync(last):
                with span("forward", "compute"):
                    total, count = sum_and_count(self.loss(self.forward(self.model, batch), batch))
                sums[:2] += torch.stack([total.detach().double(), count.double()])
                work = self._add_up(sums) if last else None
                with span("backward", "compute"):
                    self.scaler.scale(total / self._divisor(count, len(batches))).backward()
        if work is not None:
            with span("loss", "wire", sums.nbytes):
                work.wait()
        self._settle(sums)
        loss = self.numbers["loss"] = (sums[0] / sums[1]).float()
        self._apply(sums)
        return loss

    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """(sum, count) of the loss over the batches of all ranks; every rank must bring equally many."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        training = self.model.training
        self.model.eval()
        with torch.no_grad(), span("evaluate", "compute"):
            for batch in batches:
                total, count = sum_and_count(self.loss(self.forward(self.model, batch), batch))
                sums += torch.stack([total.double(), count.double()])
        self.model.train(training)
        if self.world.size > 1:
            dist.all_reduce(sums)
        return float(sums[0]), int(sums[1])

    def stop(self) -> None:
        """Ask for the end; `stopping` turns true on all ranks after the same step. Safe in a signal handler."""
        self._stop_asked = True

    def close(self) -> None:
        """Release what features took, newest first."""
        self.exits.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- the step's parts --------------------------------------------------------------------------------------------

    def _add_up(self, sums: Tensor) -> dist.Work | None:
        """Start adding loss, count and votes over the ranks; it travels while the backward pass computes."""
        group = self.world.group(self.replicas)
        return dist.all_reduce(sums, group=group, async_op=True) if group is not None else None

    def _divisor(self, count: Tensor, batches: int) -> Tensor | float:
        """What a micro-batch's loss is divided by before the backward pass.

        The true divisor, the count over all micro-batches and ranks, is known only after the backward pass has begun.
        One process with one micro-batch knows it; others take the previous step's, which all ranks agree on, and
        `_apply` corrects the gradients where the counts turn out to differ. SHARD averages over `ranks`, hence its
        part in the divisor.
        """
        ranks = self.world.ranks_over(self.replicas)
        if ranks == batches == 1:
            self.progress.count = 0.0
            return count
        if not self.progress.count:
            counts = count.double() * batches
            if group := self.world.group(self.replicas):
                dist.all_reduce(counts, group=group)
            self.progress.count = max(float(counts), 1.0)
        return self.progress.count / ranks

    def _settle(self, sums: Tensor) -> None:
        """Read the sums where that is free: at once on a CPU, one step late on an accelerator."""
        ready, self.progress.unread = (self.progress.unread, sums.clone()) if self.defers else (sums, None)
        if ready is None:
            return
        loss, count, votes = ready.tolist()
        if not (math.isfinite(loss) and count):
            self.built_optimizer.zero_grad(set_to_none=True)
            at = f"at step {self.progress.step + 1 - (ready is not sums)}"
            said = f"the loss became {loss} {at}"
            hint = "the last save is good; resume with a lower learning rate or with [optim.clip]"
            if not count:
                said, hint = f"there is no loss {at}: none of its targets count", ""
            self.refuse(NonFiniteError(said, hint=hint))
            return
        self.progress.tokens += int(count)
        self.stopping = votes > 0

    def verify(self) -> None:
        """Count the newest step; NonFiniteError if its loss was not finite. For saves and the end: it waits."""
        loss, count, _ = (0.0, 0.0, 0.0) if self.progress.unread is None else self.progress.unread.tolist()
        if not math.isfinite(loss):
            raise NonFiniteError(f"the loss became {loss} at step {self.progress.step}")
        self.progress.tokens, self.progress.unread = self.progress.tokens + int(count), None

    def _apply(self, sums: Tensor) -> None:
        self.scaler.unscale_(self.built_optimizer)
        if self.progress.count and self.gradients:  # there are none after a refused loss
            self._correct(sums[1])
        with span("optimizer", "compute"):
            self.scaler.step(self.built_optimizer)
            self.scaler.update()
            self.built_optimizer.zero_grad(set_to_none=True)

    def _correct(self, count: Tensor) -> None:
        """Turn gradients divided by the expected count into gradients divided by the true one."""
        ratio = self.progress.count / count
        if count.device.type != "cpu":  # comparing would wait for the device
            foreach_mul_(self.gradients, ratio.float())
        elif float(ratio) != 1.0:
            foreach_mul_(self.gradients, float(ratio))
            self.progress.count = float(count)

    @contextmanager
    def _silently(self) -> Iterator[None]:
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def _before(self, *_: object) -> None:
        if not self._silent:
            self._do(Phase.CLIP, Phase.GRAD, Phase.WAIT)

    def _after(self, *_: object) -> None:
        if not self._silent:
            self._do(Phase.PROJECT, Phase.OUTER)
            self.progress.step += 1
            self._do(Phase.CAPTURE)
            self.trace.step = self.progress.step

    def _do(self, *phases: Phase) -> None:
        for phase in phases:
            for work in self._phases[phase]:
                work()

    def build(self) -> None:
        """Build the optimizer and hang the phases around its step, so that foreign loops run them as well."""
        assert not isinstance(self.optimizer, Optimizer)
        self.built_optimizer = self.optimizer(self.parameters)
        if not isinstance(self.built_optimizer, Optimizer):
            raise ConfigError(
                f"`optimizer` returned a {type(self.built_optimizer).__name__}, not a torch.optim.Optimizer",
                hint="give a function from parameters to an optimizer, or the optimizer itself",
            )
        self.exits.callback(self.built_optimizer.register_step_pre_hook(self._before).remove)
        self.exits.callback(self.built_optimizer.register_step_post_hook(self._after).remove)
        self.trace.parameters = sum(parameter.numel() for parameter in self.parameters)
        self.trace.gradient_bytes = sum(p.numel() * p.element_size() for p in self.parameters)
        self.trace.ranks = self.world.size
        self.keep("model", ModelState(self.model), across="shard")
        self.keep("optimizer", OptimizerState(self.model, self.built_optimizer, self._silently), across="shard")
        self.keep("scaler", self.scaler)
        self.keep("progress", self.progress)
        self.keep("random", RandomState(self.world.device), across="own")


def _raise(error: Exception) -> None:
    raise error


def no_sync(model: DistributedDataParallel) -> Callable[[bool], AbstractContextManager[Any]]:
    """`Job.sync` for DDP: exchange gradients in the last micro-batch only."""
    return lambda last: nullcontext() if last else model.no_sync()


def compose(job: Job, features: Sequence[Feature] = ()) -> Job:
    """Attach features to a job: resolve, refuse conflicts, check, then apply seam by seam.

    Nothing is changed or allocated before every check has passed; if an `apply` fails, what was taken is released.

    Raises:
        ConfigError: a feature does not fit the job. ConflictError: two features own one seam.
    """
    _check_features(features)
    features = tuple(feature.resolve(job.world) for feature in features)
    check_owners(features)
    _check_replicas(job, features)
    job.features = features
    if not job.parameters:
        raise ConfigError(f"{type(job.model).__name__} has no trainable parameters")
    for feature in features:
        feature.check(job)
    try:
        _apply_all(job)
    except BaseException:
        job.close()
        raise
    return job


def _check_features(features: Sequence[object]) -> None:
    for feature in features:
        if isinstance(feature, type):
            raise ConfigError(f"`{feature.__name__}` is a class, not settings", hint=f"write `{feature.__name__}()`")
        if not isinstance(feature, Feature):
            raise ConfigError(f"{feature!r} is no feature", hint="give objects such as `optim.Clip()`")


def _check_replicas(job: Job, features: Sequence[Feature]) -> None:
    """Every mesh dimension with several ranks needs someone who keeps their models equal, or merges them."""
    keeping = [feature.over for feature in features if {Seam.SHARD, Seam.WIRE} & set(feature.seams)]
    owned = set(job.replicas).union(*keeping)
    for dimension in (HOSTS, LOCAL):
        if job.world.ranks_over([dimension]) > 1 and dimension not in owned:
            raise ConfigError(
                f"{job.world.ranks_over([dimension])} ranks over {dimension}, but nothing keeps their models equal",
                hint="add parallel.DDP()",
            )


def _apply_all(job: Job) -> None:
    pairs = ordered(job.features)
    for seam in Seam:
        for of, feature in pairs:
            if of is seam:
                feature.apply(job, seam)
        if seam is Seam.GRAPH and job.backend is not None:
            job.module.compile(backend=job.backend)
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
    _check_features(features)
    for feature in features:
        if Seam.LOSS in feature.seams:
            raise ConfigError(
                f"`{feature.name}` changes the loss, which this loop computes itself",
                hint="compose a Job and call its `step`, or its `loss`",
            )

    return compose(Job(model, optimizer=optimizer), features)
