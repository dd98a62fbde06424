"""The view of a job that features get: its model, loss, optimizer, step phases and checkpointed states."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoestring._torch import call_closure_first, own_name
from shoestring.core.errors import ConfigError, ConflictError, NonFiniteError
from shoestring.core.feature import DATA, Divided, Feature, Phase, Seam
from shoestring.core.frozen import Reference, digest, freeze, shared_names
from shoestring.core.graph import GraphPass, GraphPasses
from shoestring.core.kept import (
    Across,
    Context,
    Kept,
    Merge,
    ModelState,
    OptimizerState,
    Progress,
    RandomState,
    Stateful,
)
from shoestring.core.shard_order import Orders, ShardOrder
from shoestring.core.step import MicroBatches, after_update, before_update
from shoestring.core.task import Batch, Forward, Loss, Params
from shoestring.core.trace import Trace
from shoestring.core.world import World
from shoestring.sharded import is_sharded, local_part
from shoestring.wrapped import is_wrapped, last_only, unwrap

T = TypeVar("T")

STEPPED = "what the optimizer steps"
"""Key in `Attachments.owners` for the feature that chooses the tensors that the optimizer steps."""


class Attachments:
    """The interface of a job that features see: the argument of their `check`, `apply` and `explain`.

    The methods from `at` to `add_pass` add to lists: any number of features may call them, and entries keep the order
    of the calls. The methods from `own` to `refuse_with` claim something that only one feature may own; a second
    feature that claims the same thing gets a ConflictError. Features must not assign to the attributes, except that a
    feature at LOSS replaces `loss` by a function that wraps it, and a feature at MODEL or SHARD wraps `forward` in the
    same way.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        loss: Loss,
        optimizer: Callable[[Params], Optimizer] | Optimizer,
        progress: Progress,
        world: World,
        trace: Trace,
    ) -> None:
        self.model = model  # the module that a forward pass calls; a feature at SHARD may wrap it
        self.module = unwrap(model)  # the user's module without any wrapper
        self.forward, self.loss = forward, loss
        self.task_loss = loss  # the loss of evaluations: the user's loss, unless a feature changes the training task
        self.build_optimizer = optimizer  # builds the optimizer, after SHARD; a feature at OPTIM may replace it
        self.optimizer: Optimizer  # the optimizer, once `build_optimizer` has been called
        self.progress, self.world, self.trace = progress, world, trace
        self.example: Callable[[], Batch] | None = None  # makes a batch with the sizes of a rank's micro-batches
        self.features: tuple[Feature, ...] = ()
        self.exits = ExitStack()  # callbacks that release resources when the job is closed; the last added runs first
        self.numbers: dict[str, float | Tensor] = {}  # metrics of the newest step: the loss, and features' metrics
        self.evaluated: dict[str, Tensor] = {}  # name of an additional metric -> (sum, count) in this evaluation
        self.data_axes: tuple[str, ...] = DATA  # mesh axes along which ranks read different samples
        self.replicas: tuple[str, ...] = ()  # mesh axes over which gradients are averaged
        self.defers = world.device.type != "cpu"  # read the loss one step late, because reading waits for the device
        self.kept: dict[str, Kept] = {}
        self.frozen_modules: dict[str, nn.Module] = {}  # see `frozen`; FSDP shards them as well
        self.phases: dict[Phase, list[Callable[[], None]]] = {phase: [] for phase in Phase}
        self.graph = GraphPasses()
        self.owners: dict[str, str] = {}  # resource with one owner -> name of the feature that owns it
        self.attaching: tuple[str, Seam | None] = ("the program", None)  # name of the feature being applied; its seam
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=False)
        self.restore: Callable[[str], int | None] | None = None  # see `restore_with`
        self.refuse: Callable[[NonFiniteError], None] = _raise
        self.run_micro_batches: Callable[[MicroBatches], None] | None = None
        self.stop_requested = False  # whether this rank votes to stop; the votes are summed over ranks with the loss
        self.stopping = False  # whether all ranks have agreed to stop
        self.merged = True  # whether all ranks hold the same weights (or shards of them) after the newest step
        self.after_merges: list[Callable[[], None]] = []  # called between OUTER and CAPTURE of steps with `merged` True
        self.merge_apart: Merge | None = None  # default `merge` of `keep`; set where ranks train separate replicas
        self.hooks_are_off = False
        self._around_step: list[Callable[[bool], AbstractContextManager[Any]]] = []
        self._around_forward: list[Context] = []
        self._around_evaluation: list[Context] = []
        self._readers: list[Callable[[], None]] = []
        self.trainers: Mapping[str, tuple[int, ...]] = {}  # parameter -> ranks that train it; empty if all ranks do
        self.elsewhere: set[str] = set()  # names of parameters that other ranks hold and this rank does not need
        self.holders: dict[str, tuple[int, ...]] = {}  # parameter -> the ranks that hold it, if not all ranks do
        self.orders: dict[str, ShardOrder] = {}  # parameter -> order of its DTensor, if the two differ
        self.run_over: tuple[str, ...] = ()  # mesh axes of the feature that set `run_micro_batches`
        self.parted: tuple[str, ...] = ()  # mesh axes along which ranks train different parameters (pipeline stages)
        self._trained: Mapping[str, Tensor] | None = None
        self._refresh: Callable[[], None] | None = None
        self._carried: dict[int, Any] = {}
        if is_wrapped(model):
            self.replicas = DATA
            self._around_step.append(last_only(model))
        self._own_name = cache(partial(own_name, self.module))  # parameter names without torch.compile's prefix

    # -- any number of features ---------------------------------------------------------------------------------------

    def at(self, phase: Phase, work: Callable[[], None]) -> None:
        """Call `work` in this phase of every optimizer step, after the functions that were added earlier."""
        self.phases[phase].append(work)

    def keep(
        self, name: str, state: Stateful, *, across: Across = "same", merge: Merge | None = None, merged: bool = False
    ) -> None:
        """Save `state` in checkpoints and restore it from them. Raise ConfigError if the name is already in use.

        Args:
            across: "same" if all ranks have the same state, "shard" if each rank has a shard of one state, "own" if
                each rank has a state of its own.
            merge: function (states of all former ranks, new rank, new world size) -> state of this rank. `merge` is
                called for "own" states when the number of ranks has changed. Without `merge`, an "own" state is then
                initialized anew.
            merged: whether the state is constant or changes only in `after_merges`, and so is equal on all ranks even
                where they train separate replicas. Other states are then saved as "own".
        """
        if name in self.kept:
            raise ConfigError(f"two features keep state under the name `{name}`")
        if isinstance(state, LRScheduler):  # checkpoints are written before a scheduler steps; rates are settings
            raise ConfigError(f"`{name}` would resume with wrong learning rates", hint="use optim.Schedule instead")
        if self.merge_apart is not None and not merged:
            across, merge = "own", merge or self.merge_apart
        self.kept[name] = Kept(state, across, merge, merged)

    def patch(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Replace the `forward` of `module` until the job is closed; parameters keep their names.

        A later patch of the same module replaces the earlier one, and may call it.
        """
        before = vars(module).get("forward")
        module.forward = forward
        undo = partial(setattr, module, "forward", before) if before else partial(delattr, module, "forward")
        self.exits.callback(undo)

    def frozen(self, name: str, module: nn.Module, source: str) -> nn.Module:
        """Use a module without training it: another model, such as a teacher, or layers of this model below adapters.

        The module moves to the job's device, and is in evaluation mode without gradients until the job is closed. FSDP
        shards the module like the model. If the model's forward pass or the loss calls the module, it runs under the
        job's autocast. A checkpoint holds `source` and a hash of the tensors, not the tensors; it can be restored only
        if the hash is the same.

        Args:
            source: name or path of the model that the tensors come from, in a form that `open_model` accepts.

        Raises:
            ConfigError: `source` is missing, the model trains parameters of the module, ranks have different tensors,
                or SHARD was applied already.
        """
        owner, at = self.attaching
        if "model" in self.kept or (at is not None and at >= Seam.SHARD):
            raise ConfigError(f"`{owner}` freezes `{name}` after the model was sharded", hint="freeze it at MODEL")
        reference = Reference(source, digest(module), shared_names(module, self.module, f"`{owner}`: `{name}`"))
        if len(set(self.world.gather(reference.digest.encode()))) > 1:
            raise ConfigError(f"the frozen module `{name}` from `{source}` differs between ranks")
        self.keep(f"frozen.{name}", reference, merged=True)
        self.exits.callback(freeze(module.to(self.world.device)))
        self.frozen_modules[name] = module
        return module

    def carry(self, feature: Feature, build: Callable[[], T]) -> T:
        """Return an object that is the same at all seams of `feature`, so that one `apply` can pass it to the next.

        The first call for a feature builds it with `build`; later calls return the same object.
        """
        if id(feature) not in self._carried:
            self._carried[id(feature)] = build()
        return self._carried[id(feature)]

    def count_evaluated(self, name: str, total: Tensor, count: Tensor) -> None:
        """Add a batch to a metric that is averaged over all batches and ranks of the running evaluation."""
        sums = torch.stack((total.detach().double(), count.double()))
        self.evaluated[name] = self.evaluated[name] + sums if name in self.evaluated else sums

    def evaluated_means(self) -> dict[str, float]:
        """Means of the metrics that features added by `count_evaluated` in the newest evaluation. A collective."""
        names = sorted(self.evaluated)
        if not names:
            return {}
        sums = torch.stack([self.evaluated[name] for name in names])
        if self.world.size > 1:
            torch.distributed.all_reduce(sums)
        return {
            name: float(total / count) if count else math.nan for name, (total, count) in zip(names, sums, strict=True)
        }

    def surround(self, context: Context) -> None:
        """Enter `context()` around the forward pass and loss together (autocast), in training and in evaluation."""
        self._around_forward.append(context)

    def read_beside(self, wait: Callable[[], None]) -> None:
        """Register a function that waits until a feature stops reading weights during training, as checkpoints do."""
        self._readers.append(wait)

    def wait_for_readers(self) -> None:
        """Wait until no feature reads weights; call this before changing weights outside of the optimizer's step."""
        for wait in self._readers:
            wait()

    def surround_evaluation(self, context: Context) -> None:
        """Enter `context()` around each evaluation, to evaluate with other weights, such as a moving average."""
        self._around_evaluation.append(context)

    def add_pass(self, work: GraphPass, *, on: Literal["forward", "joint"] = "forward") -> None:
        """Add a pass over the traced graph, to run before compilation and after earlier passes. Call it only at GRAPH.

        Args:
            on: "forward" sees the forward graph as torch.compile captures it; "joint" sees the forward and backward
                pass in one graph of ATen operators, before it is partitioned.
        """
        self._at_seam("graph passes", Seam.GRAPH)
        (self.graph.joint if on == "joint" else self.graph.forward).append(work)

    # -- one owner each -----------------------------------------------------------------------------------------------

    def own(self, what: str, seam: Seam) -> None:
        """Make the feature that is being attached the only owner of `what`, a resource of `seam`.

        Raises:
            ConflictError: another feature owns `what`. ConfigError: the feature is attached at another seam.
        """
        owner = self._at_seam(what, seam)
        if (former := self.owners.get(what, owner)) != owner:
            hint = f"remove the table [{former}] or [{owner}]"
            raise ConflictError(f"`{former}` and `{owner}` both own {what}", hint=hint)
        self.owners[what] = owner

    def _at_seam(self, what: str, seam: Seam) -> str:
        owner, at = self.attaching
        if at is not None and at is not seam:
            raise ConfigError(f"`{owner}` takes {what} at {at.name}, but {what} belongs to {seam.name}")
        return owner

    def shard(
        self,
        model: nn.Module | None = None,
        *,
        over: Sequence[str],
        sync: Callable[[bool], AbstractContextManager[Any]] | None = None,
        trained: Mapping[str, Tensor] | None = None,
        refresh: Callable[[], None] | None = None,
        run: Callable[[MicroBatches], None] | None = None,
        elsewhere: Collection[str] = (),
        orders: Orders | None = None,
    ) -> None:
        """Set how the model is distributed over mesh axes, and which tensors the optimizer steps.

        Features call this at SHARD. One feature owns each mesh axis; one feature may set `trained`, and one may set
        `run`.

        The feature that calls this guarantees three things. After the backward pass of the last micro-batch, the
        `.grad` of each trained tensor is the mean over the ranks along `over`, for the shard that this rank holds. A
        trained tensor, with its gradient and its optimizer state, is a DTensor if and only if ranks hold different
        shards of it. The forward pass after an optimizer step uses the values that the step wrote.

        Args:
            model: module to call instead of the model, such as a DDP wrapper around it.
            over: mesh axes over which the feature averages gradients.
            sync: function (is this the last micro-batch?) -> context around a micro-batch, so that gradients are
                exchanged only in the last one.
            trained: name of a parameter -> tensor that the optimizer steps instead of the parameter (a shard, an fp32
                master, a copy on the host), with as many elements. This rank trains only these parameters; other
                ranks may train different ones. By default the optimizer steps the parameters themselves.
            refresh: copies `trained` into the parameters; called after a checkpoint was loaded.
            run: runs the micro-batches of each step instead of `step.run_in_order`, in any order (a pipeline), and
                must obey these rules. Among the ranks that read the same samples, exactly one calls `loss` on the
                output of a micro-batch, and `backward` on the tensor that `loss` returns. (If `run` computes losses in
                a graph of its own, that rank calls `add` instead of `loss`, and the backward pass starts with
                `gradient_of`.) Forward passes and losses run within `computing`. The backward pass of a micro-batch
                runs within `sync(last)`, where `last` says whether the micro-batch is this rank's last one in the step;
                forward passes run outside `sync`. All communication is complete when `run` returns, because the step
                then sums losses over the ranks and corrects all gradients by the true divisor. Evaluations call `run`
                as well, with `training` False and gradients off; in an evaluation `run` does no backward pass.
            elsewhere: names of parameters, trained or not, that other ranks hold and this rank does not need. If this
                rank has tensors under these names, their values are not the model's.
            orders: name of a parameter in `trained` -> the order of its DTensor, if the DTensor stores the elements in
                a different order than the parameter does (a fused weight).
        """
        self.claim(over, trained=trained is not None)
        self.average_over(over)
        self.orders |= orders or {}
        self.elsewhere |= {*elsewhere}
        self.model = self.model if model is None else model
        if sync is not None:
            self._around_step.append(sync)
        if run is not None:
            self.own("how micro-batches are run", Seam.SHARD)
            self.run_micro_batches = run
            self.run_over = tuple(
                axis for axis in self.world.axes if self.owners.get(f"SHARD over {axis}") == self.attaching[0]
            )
        if trained is not None:
            owner, parameters = self.attaching[0], self._parameters()
            for name, tensor in trained.items():
                if name not in parameters:
                    raise ConfigError(f"`{owner}` gives the optimizer `{name}`, which is no parameter of the model")
                if tensor.numel() != parameters[name].numel():
                    sizes = f"{tensor.numel()} elements for `{name}`, which has {parameters[name].numel()}"
                    hint = "a shard of a tensor must be a DTensor, which has the shape of the whole tensor"
                    raise ConfigError(f"`{owner}` gives the optimizer {sizes}", hint=hint)
                for placement in getattr(tensor, "placements", ()):
                    if placement.is_partial():
                        message = f"`{owner}` gives the optimizer `{name}` as {placement}, which no rank has as a value"
                        raise ConfigError(message, hint="reduce it: its placements must be Shard or Replicate")
            self._trained, self._refresh = dict(trained), refresh

    def claim(self, over: Sequence[str], *, trained: bool = False, whole: bool = False) -> None:
        """Claim what `shard` will set, before anything is allocated for it.

        Args:
            over: the mesh axes to claim. trained: whether the feature chooses which tensors the optimizer steps.
            whole: whether the feature needs whole parameters, and cannot work with parameters that are already sharded.

        Raises:
            ConflictError: another feature owns one of these axes or `STEPPED`, or has sharded parameters.
        """
        for axis in over:
            self.own(f"SHARD over {axis}", Seam.SHARD)
        if trained:
            self.own(STEPPED, Seam.SHARD)
        sharded = [name for name, tensor in self._parameters().items() if is_sharded(tensor)] if whole else []
        if sharded:
            owner = self.attaching[0]
            others = sorted({other for what, other in self.owners.items() if "SHARD over" in what} - {owner})
            former = f"`{others[0]}` has" if others else "the program has"
            message = f"`{owner}` needs whole parameters, and {former} sharded `{sharded[0]}`"
            raise ConflictError(message, hint=f"remove the table [{owner}], or use parallel.FSDP() in its place")

    def check_gradients(self) -> None:
        """Raise ConfigError if the tensors that a feature passed as `shard(trained=…)` all have no gradient."""
        if self._trained is not None and not self.gradients:
            owner = self.owners[STEPPED]
            message = f"after the backward pass, no tensor that `{owner}` gives to the optimizer has a gradient"
            raise ConfigError(message)

    def average_over(self, axes: Sequence[str]) -> None:
        """Average gradients over these mesh axes as well."""
        self.replicas = tuple(axis for axis in self.world.axes if axis in self.replicas or axis in axes)

    def exchange(self, over: Sequence[str]) -> None:
        """Make the feature the owner of WIRE over mesh axes, and average gradients over them as well."""
        for axis in over:
            self.own(f"WIRE over {axis}", Seam.WIRE)
        self.average_over(over)

    def compile_with(self, backend: str | Callable[..., Any]) -> None:
        """Compile the model with torch.compile and this backend, which gets the graph after all passes have run."""
        self.own("the compiler's backend", Seam.GRAPH)
        self.graph.backend = backend

    def build_with(self, optimizer: Callable[[Params], Optimizer]) -> None:
        """Set the factory that builds the optimizer from a list of parameters."""
        self.own("OPTIM", Seam.OPTIM)
        self.build_optimizer = optimizer

    def scale_with(self, scaler: torch.amp.GradScaler) -> None:
        """Set the loss scaler for fp16, which scales losses before backward passes and unscales gradients later."""
        self.own("the loss scale", Seam.MODEL)
        self.scaler = scaler

    def restore_with(self, restore: Callable[[str], int | None]) -> None:
        """Set the function that restores a checkpoint: it takes "auto" or a path, and returns the step resumed from."""
        self.own("restoring", Seam.STEP)
        self.restore = restore

    def refuse_with(self, refuse: Callable[[NonFiniteError], None]) -> None:
        """Call `refuse` with the error when a loss is not finite, instead of raising the error.

        Ranks that train separate replicas need this, because a NaN loss on one rank must end the run on all ranks.
        """
        self.own("the answer to a loss that is not finite", Seam.STEP)
        self.refuse = refuse

    # -- what is trained ---------------------------------------------------------------------------------------------

    @property
    def wrapped(self) -> bool:
        """Whether the program has wrapped the model in DDP itself, before any feature was attached."""
        return is_wrapped(self.model)

    @property
    def divided(self) -> Divided:
        """Which tensors are sharded over ranks; see `Feature.divided`."""
        return next((feature.divided for feature in self.features if feature.divided), "")

    @property
    def averages_in_backward(self) -> bool:
        """Whether gradients are averaged during the backward pass; see `Feature.averages_in_backward`."""
        return self.wrapped or any(feature.averages_in_backward for feature in self.features)

    @property
    def trained(self) -> Mapping[str, Tensor]:
        """Name of a parameter -> tensor that the optimizer steps for it, whose `.grad` holds the gradient."""
        if self._trained is not None:
            return self._trained
        return {name: parameter for name, parameter in self._parameters().items() if parameter.requires_grad}

    def named(self) -> Mapping[str, Tensor]:
        """All parameters by name: the tensors of `trained`, and the parameters that are not trained."""
        return {**self._parameters(), **self.trained}

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {self._own_name(name): parameter for name, parameter in self.module.named_parameters()}

    def weights(self) -> dict[str, Any]:
        """This rank's shards of the model's parameters and buffers by name, including those of frozen modules.

        Parameters that only other ranks train or hold are missing.
        """
        trained = self.trained if self.trainers else self._trained or {}
        return ModelState(self.model, trained, leave_out=self.elsewhere, trainers=self.trainers).state_dict()

    def whole(self, name: str, value: Any) -> Any:
        """Gather the full tensor, in the parameter's order, of a shard that `weights` returned. A collective."""
        if not is_sharded(value):
            return value
        return self.orders[name].back(value.full_tensor()) if name in self.orders else value.full_tensor()

    def agree_on_trained(self) -> None:
        """Find out which ranks train which parameters: stages of a pipeline train different ones. A collective."""
        own = [sorted(self.trained), sorted(self.elsewhere)]
        gathered = [json.loads(data) for data in self.world.gather(json.dumps(own).encode())]  # own file: of this job
        names, elsewhere = ([of_rank[part] for of_rank in gathered] for part in (0, 1))
        for name in sorted(set().union(*elsewhere)):
            self.holders[name] = tuple(rank for rank, missing in enumerate(elsewhere) if name not in missing)
        if all(of_rank == names[0] for of_rank in names):
            return
        trainers: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(names):
            for name in of_rank:
                trainers.setdefault(name, []).append(rank)
        self.trainers = {name: tuple(ranks) for name, ranks in trainers.items()}
        self.parted = tuple(axis for axis in self.world.axes if self.world.differs_along(axis, names))

    def total(self, values: Tensor, names: Sequence[str]) -> Tensor:
        """Sum `values`, one number per trained tensor, over all trained parameters of the model.

        If ranks train different parameters, this is a collective; a parameter that several ranks train counts once.

        Args:
            values: numbers of shape (n,), equal on the ranks that train the same tensors.
            names: n names of `trained`.
        """
        group = self.world.group(self.parted)
        if group is None:
            return values.sum()
        parts = {*torch.distributed.get_process_group_ranks(group)}
        times = [len(parts.intersection(self.trainers[name])) for name in names]
        total = (values / torch.tensor(times, device=values.device, dtype=values.dtype)).sum()
        torch.distributed.all_reduce(total, group=group)
        return total

    @property
    def alike(self) -> tuple[str, ...]:
        """The mesh axes along which gradients are averaged and ranks train the same parameters."""
        return tuple(axis for axis in self.replicas if axis not in self.parted)

    @property
    def parameters(self) -> list[Any]:
        """The tensors that the optimizer steps."""
        return list(self.trained.values())

    @property
    def gradients(self) -> list[Tensor]:
        """This rank's shards of all gradients, as plain tensors that foreach operations may change in place."""
        grads = [tensor.grad for tensor in self.trained.values() if tensor.grad is not None]
        return [local_part(grad) for grad in grads]

    # -- around a step -----------------------------------------------------------------------------------------------

    def run(self, *phases: Phase) -> None:
        """Call all functions that were added to these phases."""
        for phase in phases:
            for work in self.phases[phase]:
                work()

    def sync(self, last: bool) -> AbstractContextManager[None]:
        """Context around the passes of a micro-batch; gradients are exchanged only if `last` is True."""
        return _enter_all(partial(context, last) for context in self._around_step)

    def computing(self) -> AbstractContextManager[None]:
        """Context around a forward pass and its loss: all contexts that `surround` added."""
        return _enter_all(self._around_forward)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context around an evaluation: evaluation mode, no gradients, and the contexts of `surround_evaluation`."""
        training = self.model.training
        if self._around_evaluation:
            self.wait_for_readers()
        with _enter_all(self._around_evaluation), torch.no_grad():
            self.model.eval()
            yield
            self.model.train(training)

    @contextmanager
    def hooks_off(self) -> Iterator[None]:
        """Context in which calls of `optimizer.step` run no phases.

        `OptimizerState` allocates new state by a step with zero gradients, which must not count as a training step.
        """
        self.hooks_are_off = True
        try:
            yield
        finally:
            self.hooks_are_off = False

    # -- the end -----------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether training is over: the total number of steps is reached, or all ranks have agreed to stop."""
        return self.stopping or self.progress.done

    def verify(self) -> None:
        """Read the newest step's loss, count its targets, and raise NonFiniteError if it is NaN or infinite.

        Reading waits for the device.
        """
        loss, count, _ = (0.0, 0.0, 0.0) if self.progress.unread is None else self.progress.unread.tolist()
        if not math.isfinite(loss):
            raise NonFiniteError(f"the loss became {loss} at step {self.progress.step}")
        self.progress.tokens, self.progress.unread = self.progress.tokens + int(count), None

    def finish(self) -> None:
        """See `Job.finish`."""
        if self.progress.step and not self.done:
            self.stopping = True
            self.run(Phase.CAPTURE)

    # -- what `compose` does between the seams -----------------------------------------------------------------------

    def build(self) -> None:
        """Build the optimizer, run phases in its step hooks, and register the states that all checkpoints hold."""
        assert not isinstance(self.build_optimizer, Optimizer)
        self.optimizer = self.build_optimizer(self.parameters)
        if not isinstance(self.optimizer, Optimizer):
            message = f"`optimizer` returned a {type(self.optimizer).__name__}, not a torch.optim.Optimizer"
            raise ConfigError(message, hint="give a function from parameters to an optimizer, or the optimizer itself")
        self.world.note("ended", -1)  # overwrites the note that an earlier job of this process may have left
        self.exits.callback(call_closure_first(self.optimizer))
        self.exits.callback(self.optimizer.register_step_pre_hook(lambda *_: before_update(self)).remove)
        self.exits.callback(self.optimizer.register_step_post_hook(lambda *_: after_update(self)).remove)
        counts = [float(tensor.numel()) for tensor in self.parameters]
        sizes = torch.tensor(counts, dtype=torch.float64, device=self.world.device)
        self.trace.parameters = int(self.total(sizes, [*self.trained]))
        self.trace.gradient_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.parameters)
        self.trace.ranks = self.world.size
        frozen = [entry.state.within_model for entry in self.kept.values() if isinstance(entry.state, Reference)]
        trained = self.trained if self.trainers else self._trained or {}
        left_out = self.elsewhere.union(*frozen)
        holders = {**self.holders, **self.trainers}
        model = ModelState(self.model, trained, self._refresh, left_out, self.trainers, holders, self.orders)
        self.keep("model", model, across="shard")
        optimizer = OptimizerState(self.optimizer, self.named, self.hooks_off, self.trainers, self.orders)
        self.keep("optimizer", optimizer, across="shard")
        self.keep("scaler", self.scaler)
        self.keep("progress", self.progress)
        self.keep("random", RandomState(self.world.device), across="own")


def _raise(error: Exception) -> None:
    """Raise the error of a loss that is not finite; the default of `Attachments.refuse`."""
    raise error


@contextmanager
def _enter_all(contexts: Iterable[Context]) -> Iterator[None]:
    """Enter several contexts, one inside the other."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield
