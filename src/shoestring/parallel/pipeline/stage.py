"""The parts of a model that a rank holds: each forward pass of the model runs one part of its blocks.

The model's own `forward` runs as it is, so a model needs no change. What lies before its blocks runs on each stage,
with zeros in place of an embedding that the stage does not hold, because what the first block of a part gets from there
is replaced by what the stage before has sent. Blocks of earlier parts are passed by. Behind the last block of a part,
the forward pass is left with what the next stage needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature
from shoestring.models.blocks import repeated
from shoestring.models.gpt import GPT
from shoestring.planning.system import return_memory

if TYPE_CHECKING:
    from shoestring.parallel.settings import Pipeline

_BEHIND = re.compile(r"(.*\.)?(final_?(layer_?)?norm|ln_f|norm_f|lm_head|head|score|classifier|pooler)(\..*)?")
"""Parameters that are read behind the blocks, wherever a model has them."""


class LeftError(BaseException):
    """Leaves a model's forward pass behind the last block of a part; no error, so nothing may catch it."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Hidden(NamedTuple):
    """What a part of the model returns in place of the model's output, within a wrapper such as DDP."""

    hidden: Tensor


class Layout:
    """Which parameters belong to which blocks of a model, and which are read before and behind the blocks.

    Raises:
        ConfigError: the model has no repeated blocks, or parameters in several lists of blocks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.blocks = model, repeated(model)
        lists = {id(child) for child in _lists(model)}
        if not self.blocks:
            hint = "put its layers in an nn.ModuleList, each of which takes what the one before returns"
            raise ConfigError(f"{type(model).__name__} has no repeated blocks to cut at", hint=hint)
        if len(lists) > 1:
            raise ConfigError(
                f"{type(model).__name__} has {len(lists)} lists of blocks, and a pipeline cuts one",
                hint="an encoder beside a decoder is not supported",
            )
        self.block_of = self._block_of()
        before, behind, met = list[nn.Parameter](), list[nn.Parameter](), False
        for name, parameter in model.named_parameters(remove_duplicate=False):
            met |= parameter in self.block_of
            if parameter not in self.block_of:
                (behind if met or _BEHIND.fullmatch(name) else before).append(parameter)
        if isinstance(model, GPT) and model.head is None:
            behind += [*model.embed.parameters()]
        self.before, self.behind = {*before}, {*behind}

    def _block_of(self) -> dict[nn.Parameter, int]:
        """The block of each parameter of a block.

        Raises:
            ConfigError: blocks share a parameter with each other or with the rest of the model, so that several stages
                might train it.
        """
        block_of: dict[nn.Parameter, int] = {}
        inside = set[nn.Module]()
        for index, block in enumerate(self.blocks):
            inside.update(block.modules())
            for name, parameter in block.named_parameters():
                if block_of.setdefault(parameter, index) != index:
                    raise self._shared(f"blocks {block_of[parameter]} and {index}", name)
        for module in {*self.model.modules()} - inside:
            for name, parameter in module._parameters.items():
                if parameter in block_of:
                    raise self._shared(f"block {block_of[parameter]} and what lies outside of the blocks", name)
        return block_of

    def _shared(self, places: str, name: str) -> ConfigError:
        message = f"{places} of {type(self.model).__name__} share `{name}`, which a pipeline would train apart"
        return ConfigError(message, hint="only an embedding and the output layer may be tied")

    def replace(self, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Look at other parameters in place of some, which nothing holds then."""
        self.block_of = {replaced.get(parameter, parameter): block for parameter, block in self.block_of.items()}
        self.before, self.behind = (
            {replaced.get(parameter, parameter) for parameter in parameters}
            for parameters in (self.before, self.behind)
        )

    @property
    def tied(self) -> list[str]:
        """Names of parameters that are read both before and behind the blocks."""
        both = self.before & self.behind
        return [name for name, parameter in self.model.named_parameters() if parameter in both]

    def held(self, parts: Sequence[range], own: Sequence[int], first: int) -> set[nn.Parameter]:
        """The parameters of some parts of the model; see `Stage`."""
        inside = [self.blocks[index] for part in own if part >= 0 for index in parts[part]]
        held = {parameter for block in inside for parameter in block.parameters()}
        return held | (self.before if first in own else set()) | (self.behind if len(parts) - 1 in own else set())

    def costs(self) -> list[float]:
        """Multiplications for a token, by block; the first and the last also have what lies before and behind them."""
        looked_up = {module.weight for module in self.model.modules() if isinstance(module, nn.Embedding)}

        def cost(parameters: Any) -> float:
            return float(sum(parameter.numel() for parameter in parameters if parameter.ndim > 1)) or 1.0

        costs = [cost(block.parameters()) for block in self.blocks]
        costs[0] += cost(self.before - looked_up)
        costs[-1] += cost(self.behind)
        return costs


def first_part(layout: Layout, settings: Pipeline, features: Sequence[Feature]) -> Literal[-1, 0]:
    """The part with what lies before the blocks: 0, or -1, of the last stage."""
    return -1 if settings.looks_up_last(tied=bool(layout.tied), features=features) else 0


def own_parts(parts: Sequence[range], first: int, index: int, stages: int) -> list[int]:
    """The parts of a stage."""
    return [part for part in range(first, len(parts)) if part % stages == index]


def _lists(model: nn.Module) -> Iterator[nn.ModuleList]:
    for child in model.children():
        if not isinstance(child, nn.ModuleList):
            yield from _lists(child)
        elif len(child):
            yield child


class Stage:
    """What a rank holds of a model, and its forward passes.

    Args:
        parts: the blocks of each part of the model. own: the parts of this rank.
        first: the part with what lies before the blocks: 0, or -1, which has no blocks.
    """

    def __init__(
        self, attachments: Attachments, layout: Layout, parts: Sequence[range], own: Sequence[int], first: int
    ) -> None:
        self.attachments, self.layout, self.parts, self.own = attachments, layout, parts, own
        self.first, self.last = first, len(parts) - 1
        self.current, self.begun = 0, False  # the part that runs, and whether its blocks have begun
        self._received: Tensor | None = None
        self._hooked: nn.Module | None = None
        self._checked = set[int]()
        self._calls = 0  # of the model, for the batch that runs
        self.part_of = {block: part for part, blocks in enumerate(parts) for block in blocks}
        held = layout.held(parts, own, first)
        self.foreign = {parameter: name for name, parameter in layout.model.named_parameters() if parameter not in held}

    def blocks(self, part: int) -> range:
        return self.parts[part] if part >= 0 else range(0)

    @property
    def elsewhere(self) -> list[str]:
        """All names of the parameters that this rank does not hold."""
        named = self.layout.model.named_parameters(remove_duplicate=False)
        return [name for name, parameter in named if parameter in self.foreign]

    def attach(self) -> None:
        """Let go of what other stages hold, and let forward passes run one part."""
        attachments, model = self.attachments, self.layout.model
        for index, block in enumerate(self.layout.blocks):
            attachments.patch(block, partial(self._run_block, index, block.forward))
        gone = {parameter for parameter in self.foreign if parameter in self.layout.block_of}
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        for module in embeddings:
            if module.weight in self.foreign and module.weight not in self.layout.block_of:
                attachments.patch(module, partial(_zeros, module.embedding_dim, module.weight.dtype))
                gone.add(module.weight)
        if self.last not in self.own:
            gone |= {parameter for parameter in self.foreign if parameter in self.layout.behind}
        self._leave(gone)

    def _leave(self, gone: set[nn.Parameter]) -> None:
        """Put parameters that other ranks hold on `meta`, and train none of those that this one does not hold."""
        on_meta = dict[nn.Parameter, nn.Parameter]()
        for module in self.layout.model.modules():
            for name, parameter in [*module._parameters.items()]:
                if parameter in gone:
                    if parameter not in on_meta:
                        on_meta[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
                        self.foreign[on_meta[parameter]] = self.foreign.pop(parameter)
                    module._parameters[name] = on_meta[parameter]
        self.layout.replace(on_meta)
        for parameter in self.foreign:
            parameter.requires_grad_(False)
        gone.clear()
        on_meta.clear()
        return_memory()

    # -- forward passes ----------------------------------------------------------------------------------------------

    def forward(self, part: int, received: Tensor | None, call: Callable[[], Any]) -> Any:
        """Run a part of the model.

        Args:
            received: what the part before has returned, (B, T, C); None for the first part.
            call: calls the model on a batch.

        Returns:
            The model's output for the last part, and otherwise what the next part needs.
        """
        self.current, self.begun, self._received, self._calls = part, False, received, 0
        outermost = self.attachments.model
        if self._hooked is not outermost:
            self.attachments.exits.callback(outermost.register_forward_hook(self._leave_early).remove)
            self.attachments.patch(self.layout.model, partial(self._run_model, self.layout.model.forward))
            self._hooked = outermost
        try:
            if part in self._checked:
                return call()
            with self._checking():
                return call()
        except LeftError as left:
            return left.hidden
        finally:
            self._received = None
            if torch.is_grad_enabled():
                self._checked.add(part)

    def _run_model(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass: within a wrapper such as DDP, nothing is raised."""
        try:
            return inner(*args, **kwargs)
        except LeftError as left:
            # Not the exception: frames that hold it are in its traceback, and keep the activations in a cycle.
            return Hidden(left.hidden)

    def _leave_early(self, module: nn.Module, args: Any, output: Any) -> None:
        self._calls += 1
        if self._calls > 1:  # earlier stages have run the first call only
            raise ConfigError(
                "`forward` calls the model several times for a batch",
                hint="a pipeline needs one call: put what is compared into one batch, or use parallel.DDP()",
            )
        if isinstance(output, Hidden):
            raise LeftError(output.hidden)
        if self.current != self.last:
            block = max(self.blocks(self.current), default=0)
            raise ConfigError(
                f"{type(self.layout.model).__name__} returned without calling its block {block}",
                hint="a pipeline needs blocks that are called one after the other",
            )

    def _run_block(self, index: int, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        part, blocks = self.part_of[index], self.blocks(self.current)
        if part != self.current:
            hidden = _first(args, kwargs)
            if self.current < 0:
                self._check_inputs(index, args, kwargs)
                raise LeftError(hidden)
            # Some blocks return a tuple, whose first item the model takes: so does this, with a dimension more.
            return hidden[None] if self._received is None or hidden.ndim <= self._received.ndim else hidden
        self._check_inputs(index, args, kwargs)
        self.begun = True
        if index == blocks[0] and self._received is not None:
            args, kwargs = _with_first(args, kwargs, self._received)
        output = inner(*args, **kwargs)
        if index == blocks[-1] and self.current != self.last:
            raise LeftError(_hidden(output, index))
        return output

    def _check_inputs(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """In the first passes, refuse a block that gets more than hidden states from weights: stages send these alone.

        Raises:
            ConfigError: another argument depends on weights, such as embeddings that every block gets.
        """
        if self.current in self._checked or not torch.is_grad_enabled():
            return
        place = _place(args, kwargs)
        others = {key: value for key, value in (*enumerate(args), *kwargs.items()) if key != place}
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(others)):
            raise ConfigError(
                f"block {index} gets more than its hidden states from the layers before it",
                hint="a pipeline sends only these to another stage: use parallel.FSDP(), or memory.Zero()",
            )

    @contextmanager
    def _checking(self) -> Iterator[None]:
        """Context of the first pass: watches which parameters it reads; what frozen embeddings give has gradients."""
        with ExitStack() as stack:
            stack.enter_context(_Reads(self))
            for module in self.layout.model.modules():
                if isinstance(module, nn.Embedding) and module.weight in self.layout.before:
                    stack.callback(module.register_forward_hook(_with_gradient).remove)
            yield


class _Reads(TorchFunctionMode):
    """Refuses a forward pass that reads a parameter which another stage trains."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stage, leaves = self.stage, pytree.tree_leaves((args, kwargs))
        checked = stage.current == stage.first or stage.begun
        parameters = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)] if checked else []
        name = next(filter(None, map(stage.foreign.get, parameters)), "")
        if not name:
            return func(*args, **(kwargs or {}))
        refusal = ConfigError(
            f"a stage reads `{name}`, which another one trains",
            hint="a pipeline needs a model that reads it on the same side of its blocks as it is declared",
        )
        try:
            result = func(*args, **(kwargs or {}))
        except RuntimeError as error:  # it has no numbers here
            raise refusal from error
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            raise refusal  # it did not only look at a shape or a storage
        return result


def _with_gradient(module: nn.Module, args: Any, output: Any) -> None:
    if torch.is_grad_enabled() and isinstance(output, Tensor) and not output.requires_grad:
        output.requires_grad_()


def _zeros(width: int, dtype: torch.dtype, indices: Tensor) -> Tensor:
    """In place of an embedding that another stage holds: (…) to (…, C)."""
    return torch.zeros((), dtype=dtype, device=indices.device).expand(*indices.shape, width)


def _place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
    """Where a block gets its hidden states: the first floating tensor among its arguments."""
    for key, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Tensor) and value.is_floating_point():
            return key
    raise ConfigError("a block got no hidden states", hint="a pipeline needs blocks that take a floating tensor")


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    place = _place(args, kwargs)
    return args[place] if isinstance(place, int) else kwargs[place]


def _with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    place = _place(args, kwargs)
    if isinstance(place, int):
        return (*args[:place], hidden, *args[place + 1 :]), kwargs
    return args, kwargs | {place: hidden}


def _hidden(output: Any, index: int) -> Tensor:
    """The hidden states in what a block returned: the tensor, or the first item of a tuple."""
    hidden = output[0] if isinstance(output, tuple) else output
    if not isinstance(hidden, Tensor):
        raise ConfigError(
            f"block {index} returned a {type(hidden).__name__}", hint="a pipeline needs blocks that return a tensor"
        )
    return hidden
