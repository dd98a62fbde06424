"""Splits the layers of a model over ranks: each rank holds parts of the weights, and ranks exchange activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.collectives import broadcast_tensors
from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, Phase
from shoestring.core.shard_order import ShardOrder
from shoestring.figures import percent
from shoestring.models import hf
from shoestring.models.blocks import is_transposed
from shoestring.models.gpt import Embedding
from shoestring.parallel.tensor.collectives import (
    GatherParts,
    OverlappedColumns,
    SharedInput,
    SharingRanks,
    SumParts,
    SumTiles,
)
from shoestring.parallel.tensor.names import HELD_FACT, TENSOR, WHOLE_FACT
from shoestring.parallel.tensor.plan import Cut, SplitPlan, dim_of, plan_of
from shoestring.sharded import is_sharded, placed_like

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from shoestring.parallel.settings import Tensor as Settings


PROBE = 16
"""Number of tokens on which the split model must compute the same logits as the whole model."""


def attach(attachments: Attachments, settings: Settings) -> None:
    """Split the model over the ranks of the mesh axis; does nothing if there is only one rank."""
    if attachments.world.ranks_over([TENSOR]) > 1:
        attachments.claim([TENSOR], trained=True, whole=True)
        plan = plan_of(attachments.module, settings, settings.splits_vocabulary(attachments.features))
        Splitting(attachments, plan, settings.tiles).attach()


def _fingerprint(stepped: DTensor) -> Tensor:
    """Two numbers that tell gradients apart: the norm, and a sum that is weighted by position."""
    assert is_sharded(stepped.grad)
    gradient = stepped.grad.to_local().detach().flatten().double()
    places = torch.linspace(-1, 1, len(gradient), dtype=torch.float64, device=gradient.device)
    return torch.stack([gradient.norm(), gradient @ places])


def _is_trained(parameter: Tensor) -> bool:
    return parameter.requires_grad


class Splitting:
    """Splits a model's layers, and runs this rank's parts of them."""

    def __init__(self, attachments: Attachments, plan: SplitPlan, tiles: int) -> None:
        world = attachments.world
        group, mesh = world.group([TENSOR]), world.mesh
        assert group is not None and mesh is not None
        # The ranks of this rank's pipeline stage: those that share its layers, and those that read other samples.
        mesh = mesh[tuple(axis for axis in world.axes if axis in (*DATA, TENSOR))]
        self.attachments, self.model, self.plan, self.mesh = attachments, attachments.module, plan, mesh
        self.tiles = tiles
        self.ranks = SharingRanks(group, attachments.trace)
        self.parts: dict[nn.Parameter, nn.Parameter] = {}  # whole parameter -> this rank's part of it
        self.stepped: dict[nn.Parameter, DTensor] = {}  # part or shared parameter -> tensor that the optimizer steps
        self.orders: dict[nn.Parameter, ShardOrder] = {}
        self._compared = self._called = False
        self._readings: dict[str, SharedInput] = {}  # name of a parent module -> input that its layers share
        self.layers = {  # the layers to split, except layers of other pipeline stages
            name: cut for name, cut in plan.layers.items() if _is_trained(self._weight(name))
        }
        # Ranks may have initialised their weights differently, so all take those of the group's first rank.
        held = [*self.model.parameters(), *self.model.buffers()]
        broadcast_tensors([tensor for tensor in held if not tensor.is_meta], group)
        for name, cut in self.layers.items():
            module = self.model.get_submodule(name)
            weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
            dim = dim_of(module, cut.way)
            self._part(weight, dim, cut.sections)
            if bias is not None and cut.way != "rows":
                self._part(bias, 0, cut.sections)

    def attach(self) -> None:
        """Let the optimizer step this rank's parts, and let the layers compute with them."""
        before = self._answer()
        attachments, facts = self.attachments, self.attachments.trace.facts
        named = {name: tensor for name, tensor in attachments.named().items() if tensor.requires_grad}
        whole = {name: tensor for name, tensor in named.items() if isinstance(tensor, nn.Parameter)}
        for tensor in whole.values():
            if tensor not in self.parts:  # foreach operations cannot mix DTensors and plain tensors
                self.stepped[tensor] = self._placed(tensor.detach(), None, tensor.shape, tensor.stride())
        attachments.shard(
            over=(),
            sync=self._sync,
            trained={name: self.stepped[self.parts.get(tensor, tensor)] for name, tensor in whole.items()},
            orders={name: self.orders[tensor] for name, tensor in whole.items() if tensor in self.orders},
        )
        attachments.at(Phase.CLIP, self._move_gradients)
        facts[WHOLE_FACT] = float(sum(tensor.nbytes for tensor in self.model.parameters()))
        attachments.patch(self.model, partial(self._first, self.model.forward))
        for name, cut in self.layers.items():
            self._run(name, self.model.get_submodule(name), cut)
        for name in self.plan.summed:
            for parameter in filter(_is_trained, self.model.get_submodule(name).parameters()):
                attachments.exits.callback(parameter.register_hook(self._summed).remove)
        for module in self.model.modules():
            for name, parameter in [*module._parameters.items()]:
                if parameter in self.parts:
                    module._parameters[name] = self.parts[parameter]
        for path, number in self.plan.divided.items():
            owner, _, attribute = path.rpartition(".")
            if owner != "config":
                self._set(self.model.get_submodule(owner), attribute, number // self.ranks.size)
        # Whether the model uses dropout is judged by its modules and its configuration.
        config: Any = getattr(self.model, "config", None)
        numbers = vars(config).items() if config is not None else ()
        rates = [module.p for module in self.model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]
        rates += [
            value for name, value in numbers if ("dropout" in name or "pdrop" in name) and isinstance(value, float)
        ]
        if any(rate > 0 for rate in rates):
            attachments.at(Phase.FORWARD, self._draw_alike)
        self._check_answer(before)
        facts[HELD_FACT] = float(sum(tensor.nbytes for tensor in self.model.parameters()))

    def _draw_alike(self) -> None:
        """Let all ranks draw the same random numbers in a step, so that dropout masks of shared tensors are equal."""
        device = self.attachments.world.device
        state = torch.get_rng_state().to(device)
        broadcast_tensors([state], self.ranks.group)
        torch.set_rng_state(state.cpu())
        if device.type == "cuda":
            state = torch.cuda.get_rng_state(device).to(device)
            broadcast_tensors([state], self.ranks.group)
            torch.cuda.set_rng_state(state.cpu(), device)

    @torch.no_grad()
    def _answer(self) -> Tensor | None:
        """Logits of a transformers language model for a few tokens; None for other models and for pipeline stages."""
        model: Any = self.model
        if not hf.is_pretrained(model) or self.attachments.elsewhere or model.get_output_embeddings() is None:
            return None
        if any(tensor.is_meta for tensor in model.parameters()):
            return None
        training = {module: module.training for module in model.modules()}
        tokens = torch.arange(PROBE, device=self.attachments.world.device)[None] % len(
            model.get_input_embeddings().weight
        )
        try:
            return model.eval()(tokens).logits.double()
        finally:
            for module, mode in training.items():
                module.training = mode

    def _check_answer(self, before: Tensor | None) -> None:
        """Raise ConfigError if the split model computes different logits, as when a norm needs all features.

        Raises:
            ConfigError: the logits differ by more than the order of summation explains.
        """
        after = self._answer()
        if before is None or after is None:
            return
        kind = next(self.model.parameters()).dtype
        apart = float((after - before).abs().max() / before.abs().max().clamp(min=1e-30))
        if apart > (1e-3 if kind.itemsize > 2 else 1e-1):
            model = type(self.model).__name__
            raise ConfigError(
                f"{model} computes something else with its layers split: its logits are {percent(apart)} off",
                hint="something between the layers needs all features: use parallel.FSDP() for this model",
            )

    def _weight(self, layer: str) -> nn.Parameter:
        return self.model.get_submodule(layer).get_parameter("weight")

    # -- weights -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _part(self, parameter: nn.Parameter, dim: int, sections: tuple[int, ...]) -> None:
        if parameter in self.parts:  # tied
            return
        shape, stride = parameter.shape, parameter.stride()
        ordered = parameter.detach()
        if len(sections) > 1:
            order = self.orders[parameter] = ShardOrder.of(shape, dim, sections, self.ranks.size)
            ordered = order.into(ordered)
        chunks = ordered.chunk(self.ranks.size, dim)
        local = chunks[self.ranks.index].contiguous().clone()
        part = self.parts[parameter] = nn.Parameter(local)
        self.stepped[part] = self._placed(local, dim, shape, stride)

    def _placed(self, local: Tensor, dim: int | None, shape: torch.Size, stride: tuple[int, ...]) -> DTensor:
        """The DTensor of a part that is split along `dim`; if `dim` is None, of a tensor that all ranks have."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        names = self.mesh.mesh_dim_names or ()
        placements = [Replicate() if dim is None or name != TENSOR else Shard(dim) for name in names]
        placed = DTensor.from_local(local, self.mesh, placements, run_check=False, shape=shape, stride=stride)
        placed.requires_grad_()
        return placed

    # -- gradients ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _sync(self, last: bool) -> Iterator[None]:
        yield
        if last:
            self._move_gradients()
            if not self._compared:
                self._compare()

    def _move_gradients(self) -> None:
        """Move the gradients to the tensors that the optimizer steps."""
        for part, stepped in self.stepped.items():
            if part.grad is not None:
                stepped.grad = placed_like(part.grad, stepped)
                part.grad = None

    def _compare(self) -> None:
        """Check in the first step that all ranks have the same gradients of the parameters that they share.

        Raises:
            ConfigError: a shared parameter is applied to something that differs between ranks, so the split is wrong.
        """
        self._compared, parts = True, {*self.parts.values()}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        shared = [part for part, stepped in self.stepped.items() if part not in parts and stepped.grad is not None]
        if not shared:
            return
        probes = torch.stack([_fingerprint(self.stepped[part]) for part in shared])
        high, low = probes.clone(), probes.clone()
        dist.all_reduce(high, dist.ReduceOp.MAX, group=self.ranks.group)
        dist.all_reduce(low, dist.ReduceOp.MIN, group=self.ranks.group)
        apart = (high - low).abs().amax(1) > 1e-3 * high.abs().amax(1)
        for part in (shared[number] for number in apart.nonzero().flatten().tolist()):
            raise ConfigError(
                f"`{names[part]}` has a different gradient on each rank: it is applied to results of a single rank",
                hint="the choice of split layers does not fit the model: use parallel.FSDP() for this model",
            )

    def _summed(self, gradient: Tensor) -> Tensor:
        return self.ranks.sum(gradient.clone())

    # -- forward passes ----------------------------------------------------------------------------------------------

    def _first(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass; an error in the first call is reported as an error of the split."""
        if self._called:
            return inner(*args, **kwargs)
        try:
            output = inner(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"{type(self.model).__name__} does not run with its layers split: {error}",
                hint="the model uses a size that is not divided with its layers: use parallel.FSDP() for this model",
            ) from error
        self._called = True
        return output

    def _run(self, name: str, module: nn.Module, cut: Cut) -> None:
        """Let a layer compute with this rank's part of its weight."""
        reading = self._readings.setdefault(name.rpartition(".")[0], SharedInput(self.ranks))
        whole = module.get_parameter("weight").shape[dim_of(module, cut.way)]  # replaced by this rank's part only later
        sizes = [len(part) for part in torch.arange(whole).chunk(self.ranks.size)]
        size, inner = sizes[self.ranks.index], module.forward
        if cut.way == "vocabulary":
            self.attachments.patch(module, partial(self._look_up, inner, sum(sizes[: self.ranks.index]), size))
            padding: Any = getattr(module, "padding_idx", None)
            if padding is not None:
                row = padding - sum(sizes[: self.ranks.index])
                self._set(module, "padding_idx", row if 0 <= row < size else None)
            if isinstance(module, Embedding):  # this class computes logits too, as a tied output layer
                self._set(module, "logits", partial(self._gathered, module.logits, SharedInput(self.ranks), sizes))
            self._set(module, "num_embeddings", size)
        elif cut.way == "rows":
            self.attachments.patch(module, partial(self._rows, module))
            self._set(module, "nx" if is_transposed(module) else "in_features", size)
        else:
            self._set(module, "nf" if is_transposed(module) else "out_features", size)
            if cut.way == "columns" and self.tiles > 1 and self._reads_alone(name, module):
                self.attachments.patch(module, partial(self._columns, module))
            elif cut.way == "columns":
                self.attachments.patch(module, lambda hidden: inner(reading(hidden)))
            else:
                self.attachments.patch(module, partial(self._gathered, inner, reading, sizes))

    def _reads_alone(self, name: str, module: nn.Module) -> bool:
        """Whether a module computes only a linear layer, and no other split layer reads the same input."""
        parent = name.rpartition(".")[0]
        readers = [
            other for other, cut in self.layers.items() if other.rpartition(".")[0] == parent and cut.way != "rows"
        ]
        return readers == [name] and "forward" not in vars(module)

    def _columns(self, module: nn.Module, hidden: Tensor) -> Tensor:
        weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
        weight = weight.t() if is_transposed(module) else weight
        output = OverlappedColumns.apply(hidden, weight, bias, self.ranks)
        assert isinstance(output, Tensor)
        return output

    def _rows(self, module: nn.Module, hidden: Tensor) -> Tensor:
        weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
        if self.tiles > 1:
            output = SumTiles.apply(hidden, weight.t() if is_transposed(module) else weight, self.ranks, self.tiles)
        else:
            output = hidden @ weight if is_transposed(module) else F.linear(hidden, weight)
            output = SumParts.apply(output, self.ranks)
        assert isinstance(output, Tensor)
        return output if bias is None else output + bias

    def _look_up(self, inner: Callable[[Tensor], Tensor], first: int, size: int, entries: Tensor) -> Tensor:
        own = entries - first
        inside = (own >= 0) & (own < size)
        hidden = inner(own.where(inside, 0)).masked_fill(~inside[..., None], 0.0)
        output = SumParts.apply(hidden, self.ranks)
        assert isinstance(output, Tensor)
        return output

    def _gathered(
        self, inner: Callable[[Tensor], Tensor], reading: SharedInput, sizes: list[int], hidden: Tensor
    ) -> Tensor:
        output = GatherParts.apply(inner(reading(hidden)), self.ranks, sizes)
        assert isinstance(output, Tensor)
        return output

    def _set(self, module: nn.Module, attribute: str, value: Any) -> None:
        """Set an attribute of a module until the job is closed."""
        if attribute not in vars(module):
            setattr(module, attribute, value)
            self.attachments.exits.callback(delattr, module, attribute)
        else:
            self.attachments.exits.callback(setattr, module, attribute, vars(module)[attribute])
            setattr(module, attribute, value)
