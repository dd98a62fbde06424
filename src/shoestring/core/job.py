"""What runs: a model, its loss, its optimizer, and what must survive; and what features may take of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import InitVar, dataclass, field
from functools import cache, partial
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoestring._torch import own_name
from shoestring.core.errors import ConfigError, ConflictError, NonFiniteError
from shoestring.core.feature import DATA, Feature, Phase, Seam
from shoestring.core.frozen import Reference, digest, freeze, shared_names
from shoestring.core.graph import Graph, GraphPass
from shoestring.core.kept import Across, Context, Kept, Merge, ModelState, OptimizerState, Progress, RandomState
from shoestring.core.step import Step, no_sync, raise_error
from shoestring.core.task import Batch, Forward, Loss, Params, call_model, cross_entropy
from shoestring.core.trace import Trace
from shoestring.core.world import World

T = TypeVar("T")


@dataclass(eq=False)
class Job:
    """A model and all that is done to it. Close it, or use it as a context manager, to release what features took.

    Args:
        model: on the job's device; wrapped by the SHARD seam, while `module` stays the user's own.
        forward: (model, batch) -> output; apart from `loss`, so that a teacher's loss needs no second forward pass.
        loss: (output, batch) -> (sum, count), both 0-d tensors. Their totals over micro-batches and ranks are divided
            once, so unequal counts stay exact. Features at LOSS wrap it; evaluation uses the one given here.
        optimizer: parameters -> torch.optim.Optimizer, called after SHARD has settled the parameters; or an optimizer
            over the model's parameters, which is then given those.
        total: optimizer steps to do, or a loader whose length gives them; schedules decay over them. 0 is open.
    """

    model: nn.Module
    forward: Forward = call_model
    loss: Loss = cross_entropy
    optimizer: Callable[[Params], Optimizer] | Optimizer = AdamW
    progress: Progress = field(default_factory=Progress)
    world: World = field(default_factory=World.current)
    trace: Trace = field(default_factory=Trace)
    total: InitVar[int | Sized] = 0

    def __post_init__(self, total: int | Sized) -> None:
        self.progress.total = (total if isinstance(total, int) else len(total)) or self.progress.total
        self.module = self.model
        self.task_loss = self.loss
        self.features: tuple[Feature, ...] = ()
        self.exits = ExitStack()
        self.graph = Graph()
        self.data_axes: tuple[str, ...] = DATA  # mesh axes along which ranks read different samples
        self.replicas: tuple[str, ...] = ()  # mesh axes over which the gradients of each step are averaged
        self.scaler = torch.amp.GradScaler(self.world.device.type, enabled=False)
        self.kept: dict[str, Kept] = {}
        self.frozen_modules: dict[str, nn.Module] = {}  # by name; an owner of SHARD may shard them beside the model
        self.numbers: dict[str, float | Tensor] = {}  # the loss, and what features publish; for sinks
        self.restore: Callable[[str], int | None] | None = None  # ("auto" | path) -> the step resumed from
        self.refuse: Callable[[NonFiniteError], None] = raise_error
        self.stopping = False
        self.owners: dict[str, str] = {}  # what has one owner -> the feature that took it
        self.attaching: tuple[str, Seam | None] = ("the program", None)  # whose `apply` runs, and at which seam
        self.phases: dict[Phase, list[Callable[[], None]]] = {phase: [] for phase in Phase}
        self._step = Step(self)
        self._around_step: list[Callable[[bool], AbstractContextManager[Any]]] = []
        self._around_forward: list[Context] = []
        self._around_evaluation: list[Context] = []
        self._trained: Mapping[str, Tensor] | None = None
        self._refresh: Callable[[], None] | None = None
        self._carried: dict[int, Any] = {}
        self.defers = self.world.device.type != "cpu"  # reading a step's numbers would wait: it is done one step late
        if isinstance(self.model, DistributedDataParallel):
            self.module, self.replicas = self.model.module, DATA
            self._around_step.append(no_sync(self.model))
        self._own_name = cache(partial(own_name, self.module))  # without what torch.compile adds to it

    # -- what features use: any number of them -----------------------------------------------------------------------

    def at(self, phase: Phase, work: Callable[[], None]) -> None:
        """Do `work` in this phase of every optimizer step; work of one phase keeps the order of the calls."""
        self.phases[phase].append(work)

    def keep(self, name: str, state: Stateful, *, across: Across = "same", merge: Merge | None = None) -> None:
        """Keep state across restarts: checkpoints hold it.

        Args:
            across: whether ranks hold "same" state, a "shard" each of one state, or their "own".
            merge: (the own states of all former ranks, new rank, new size) -> this rank's state, for when the number
                of ranks changed; without it own state starts afresh then.
        """
        if name in self.kept:
            raise ConfigError(f"two features keep state under the name `{name}`")
        if isinstance(state, LRScheduler):  # rates are settings of a run, and a step is saved before it has stepped
            raise ConfigError(f"`{name}` would resume at other learning rates", hint="use optim.Schedule in its place")
        self.kept[name] = Kept(state, across, merge)

    def patch(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Let `module` run `forward` in place of its own until the job is closed; parameters keep their names."""
        before = vars(module).get("forward")
        module.forward = forward
        undo = partial(setattr, module, "forward", before) if before else partial(delattr, module, "forward")
        self.exits.callback(undo)

    def frozen(self, name: str, module: nn.Module, source: str) -> nn.Module:
        """Use `module` without training it: another model, such as a teacher, or layers of this one below adapters.

        It moves to the job's device, and is in evaluation mode and without gradients until the job is closed; FSDP
        shards it beside the model. Called in the model's forward pass or in the loss, it runs under the job's autocast.
        A checkpoint holds `source`, as `open_model` takes it, and a hash; it cannot be restored with other tensors.

        Raises:
            ConfigError: no source, shared trained parameters, different tensors on ranks, or SHARD was applied already.
        """
        owner, at = self.attaching
        if "model" in self.kept or (at is not None and at >= Seam.SHARD):
            raise ConfigError(f"`{owner}` freezes `{name}` after the model was sharded", hint="freeze it at MODEL")
        reference = Reference(source, digest(module), shared_names(module, self.module, f"`{owner}`: `{name}`"))
        if len(set(self.world.gather(reference.digest.encode()))) > 1:
            raise ConfigError(f"the frozen module `{name}` from `{source}` differs between ranks")
        self.keep(f"frozen.{name}", reference)
        self.exits.callback(freeze(module.to(self.world.device)))
        self.frozen_modules[name] = module
        return module

    def carry(self, feature: Feature, build: Callable[[], T]) -> T:
        """What `build` returned when this feature called first: state for its `apply` at the next seams."""
        if id(feature) not in self._carried:
            self._carried[id(feature)] = build()
        return self._carried[id(feature)]

    def surround(self, context: Context) -> None:
        """Enter `context()` around the forward pass and loss together (autocast), in training and in evaluation."""
        self._around_forward.append(context)

    def surround_evaluation(self, context: Context) -> None:
        """Enter `context()` around each evaluation, for weights of its own (a moving average)."""
        self._around_evaluation.append(context)

    def add_pass(self, work: GraphPass, *, on: Literal["forward", "joint"] = "forward") -> None:
        """Run a pass over the traced graph before it is compiled; passes of one kind keep the order of the calls.

        Args:
            on: "forward" sees the forward graph as torch.compile captures it; "joint" sees the forward and backward
                pass in one graph of ATen operators, before it is partitioned.
        """
        self._at_seam("graph passes", Seam.GRAPH)
        (self.graph.joint if on == "joint" else self.graph.forward).append(work)

    # -- what features use: one owner each ---------------------------------------------------------------------------

    def own(self, what: str, seam: Seam) -> None:
        """Record the feature that is being attached as the one owner of `what`, which belongs to `seam`.

        Raises:
            ConflictError: another feature owns it. ConfigError: the feature is not being attached at that seam.
        """
        owner = self._at_seam(what, seam)
        if former := self.owners.get(what):
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
    ) -> None:
        """Set what an owner of SHARD settles: how the model is spread over mesh axes, and what the optimizer steps.

        The owner promises that after the backward pass of the last micro-batch each trained tensor's `.grad` is the
        mean over the ranks along `over`, for the part of it that this rank holds; that a trained tensor is a DTensor
        exactly where ranks hold different parts of one tensor, and its gradient and optimizer state with it; and that
        once the optimizer has stepped, the next forward pass uses what it wrote.

        Args:
            model: what is called in place of `model`, if that is another module (DDP).
            over: the mesh axes over which it averages gradients.
            sync: (last micro-batch?) -> context around each micro-batch, to exchange gradients in the last one only.
            trained: name of a parameter -> the tensor that the optimizer steps in its place (a shard, an fp32 master,
                a copy on the host), with as many elements; parameters that are not named are not trained by this rank.
                By default the parameters themselves.
            refresh: writes `trained` back into the parameters; called after a state was loaded.
        """
        for axis in over:
            self.own(f"SHARD over {axis}", Seam.SHARD)
        self.average_over(over)
        self.model = self.model if model is None else model
        if sync is not None:
            self._around_step.append(sync)
        if trained is not None:
            self.own("what the optimizer steps", Seam.SHARD)
            self._check_trained(trained)
            self._trained, self._refresh = dict(trained), refresh

    def _check_trained(self, trained: Mapping[str, Tensor]) -> None:
        owner, parameters = self.attaching[0], self._parameters()
        for name, tensor in trained.items():
            if name not in parameters:
                raise ConfigError(f"`{owner}` gives the optimizer `{name}`, which is no parameter of the model")
            if tensor.numel() != parameters[name].numel():
                sizes = f"{tensor.numel()} elements for `{name}`, which has {parameters[name].numel()}"
                hint = "a part of a tensor must be a DTensor, which knows the whole one"
                raise ConfigError(f"`{owner}` gives the optimizer {sizes}", hint=hint)

    def check_gradients(self) -> None:
        """ConfigError where an owner of SHARD left no gradient on any of what it gave to the optimizer."""
        if self._trained is not None and not self.gradients:
            owner = self.owners["what the optimizer steps"]
            raise ConfigError(f"after the backward pass, what `{owner}` gives to the optimizer has no gradient")

    def average_over(self, axes: Sequence[str]) -> None:
        """Count these mesh axes among those over which the gradients of each step are averaged."""
        self.replicas = tuple(axis for axis in self.world.axes if axis in self.replicas or axis in axes)

    def exchange(self, over: Sequence[str]) -> None:
        """Take the averaging of gradients over mesh axes where no owner of SHARD does it."""
        for axis in over:
            self.own(f"WIRE over {axis}", Seam.WIRE)
        self.average_over(over)

    def compile_with(self, backend: str | Callable[..., Any]) -> None:
        """Compile the model with torch.compile and this backend, around which the passes of the graph compose."""
        self.own("the compiler's backend", Seam.GRAPH)
        self.graph.backend = backend

    def build_with(self, optimizer: Callable[[Params], Optimizer]) -> None:
        """Build the optimizer with this factory."""
        self.own("OPTIM", Seam.OPTIM)
        self.optimizer = optimizer

    def scale_with(self, scaler: torch.amp.GradScaler) -> None:
        """Scale the loss before the backward pass and the gradients back before the step, for fp16."""
        self.own("the loss scale", Seam.MODEL)
        self.scaler = scaler

    def restore_with(self, restore: Callable[[str], int | None]) -> None:
        """Let `restore` bring back what is kept: "auto" or a path -> the step resumed from, None if it starts."""
        self.own("restoring", Seam.STEP)
        self.restore = restore

    def refuse_with(self, refuse: Callable[[NonFiniteError], None]) -> None:
        """Let `refuse` answer a loss that is not finite, for replicas that train alone and must end together."""
        self.own("the answer to a loss that is not finite", Seam.STEP)
        self.refuse = refuse

    # -- what is trained ---------------------------------------------------------------------------------------------

    @property
    def engine(self) -> str:
        """What the model runs or will run under: "ddp", "fsdp", "zero" or "" for none."""
        if isinstance(self.model, DistributedDataParallel):
            return "ddp"
        return next((feature.engine for feature in self.features if feature.engine), "")

    @property
    def trained(self) -> Mapping[str, Tensor]:
        """Name of a parameter -> the tensor that the optimizer steps for it, and whose `.grad` holds its gradient."""
        if self._trained is not None:
            return self._trained
        return {name: parameter for name, parameter in self._parameters().items() if parameter.requires_grad}

    def named(self) -> Mapping[str, Tensor]:
        """`trained`, and the parameters that are not trained."""
        return {**self._parameters(), **self.trained}

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {self._own_name(name): parameter for name, parameter in self.module.named_parameters()}

    def weights(self) -> dict[str, Any]:
        """The model's parameters and buffers by name, frozen ones too, as they were trained: this rank's part."""
        return ModelState(self.model, self._trained or {}).state_dict()

    @property
    def parameters(self) -> list[Any]:
        """What the optimizer steps."""
        return list(self.trained.values())

    @property
    def gradients(self) -> list[Tensor]:
        """This rank's part of every gradient there is, for foreach operations in place."""
        grads = [tensor.grad for tensor in self.trained.values() if tensor.grad is not None]
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
        return self._step(batches)

    def sync(self, last: bool) -> AbstractContextManager[None]:
        """Surrounds a micro-batch: gradients are exchanged in the `last` one only."""
        return _entered(partial(context, last) for context in self._around_step)

    def computing(self) -> AbstractContextManager[None]:
        """Surrounds a forward pass and its loss, as `surround` said."""
        return _entered(self._around_forward)

    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """(sum, count) of the task's own loss over the batches of all ranks, which must bring equally many."""
        return self._step.evaluate(batches)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Surrounds an evaluation: evaluation mode, no gradients, and what `surround_evaluation` said."""
        training = self.model.training
        with _entered(self._around_evaluation), torch.no_grad():
            self.model.eval()
            yield
            self.model.train(training)

    def verify(self) -> None:
        """Count the newest step; NonFiniteError if its loss was not finite. It waits for the device."""
        self._step.verify()

    def stop(self) -> None:
        """Ask for the end; `stopping` turns true on all ranks after the same step. Safe in a signal handler."""
        self._step.stop_requested = True

    @property
    def done(self) -> bool:
        """Whether training is over: the total is reached, or the end was asked for."""
        return self.stopping or self.progress.done

    def finish(self) -> None:
        """Make the step just done the last one, so that features save it; no effect if it was already. A collective."""
        if self.progress.step and not self.done:
            self.stopping = True
            self._step.run(Phase.CAPTURE)

    def close(self) -> None:
        """Release what features took, newest first."""
        self.exits.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self.exits:
            if error is None:
                self.finish()

    def build(self) -> None:
        """Build the optimizer and hang the phases around its step, so that foreign loops run them as well."""
        assert not isinstance(self.optimizer, Optimizer)
        self.built_optimizer = self.optimizer(self.parameters)
        if not isinstance(self.built_optimizer, Optimizer):
            said = f"`optimizer` returned a {type(self.built_optimizer).__name__}, not a torch.optim.Optimizer"
            raise ConfigError(said, hint="give a function from parameters to an optimizer, or the optimizer itself")
        self.exits.callback(self.built_optimizer.register_step_pre_hook(self._step.before_update).remove)
        self.exits.callback(self.built_optimizer.register_step_post_hook(self._step.after_update).remove)
        self.trace.parameters = sum(tensor.numel() for tensor in self.parameters)
        self.trace.gradient_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.parameters)
        self.trace.ranks = self.world.size
        frozen = [kept.state.within_model for kept in self.kept.values() if isinstance(kept.state, Reference)]
        model = ModelState(self.model, self._trained or {}, self._refresh, frozenset().union(*frozen))
        self.keep("model", model, across="shard")
        self.keep("optimizer", OptimizerState(self.built_optimizer, self.named, self._step.hooks_off), across="shard")
        self.keep("scaler", self.scaler)
        self.keep("progress", self.progress)
        self.keep("random", RandomState(self.world.device), across="own")


@contextmanager
def _entered(contexts: Iterable[Context]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield
