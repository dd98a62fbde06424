"""The parts of a model that a rank holds, and forward passes that run only one of these parts.

The model's own `forward` runs unchanged, so a model needs no changes for a pipeline. The layers before the blocks run
on every stage; an embedding that the stage does not hold gives zeros. This is harmless, because the input of a part's
first block is replaced by the activations that the previous stage sent. Blocks of earlier parts are skipped. After the
last block of a part, an exception ends the forward pass and carries out the activations for the next stage.
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
"""Names of parameters that are used after the blocks, wherever the model declares them."""


class LeftError(BaseException):
    """Ends a model's forward pass after the last block of a part; a BaseException, so that models do not catch it."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Hidden(NamedTuple):
    """What a part of the model returns in place of the model's output, within a wrapper such as DDP."""

    hidden: Tensor


class Layout:
    """The layout of a model: which parameters belong to which block, and which are used before and after the blocks.

    Raises:
        ConfigError: the model has no repeated blocks, or has several lists of blocks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.blocks = model, repeated(model)
        lists = {id(child) for child in _lists(model)}
        if not self.blocks:
            hint = "put its layers in an nn.ModuleList, in which each layer takes what the previous layer returns"
            raise ConfigError(f"{type(model).__name__} has no repeated blocks to cut at", hint=hint)
        if len(lists) > 1:
            raise ConfigError(
                f"{type(model).__name__} has {len(lists)} lists of blocks, but a pipeline can cut only one",
                hint="models with an encoder and a decoder are not supported",
            )
        # If a block shared a parameter with another block or with the rest of the model, several stages might train it.
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
                    raise self._shared(f"block {block_of[parameter]} and layers outside the blocks", name)
        self.block_of = block_of
        before, behind, met = list[nn.Parameter](), list[nn.Parameter](), False
        for name, parameter in model.named_parameters(remove_duplicate=False):
            met |= parameter in self.block_of
            if parameter not in self.block_of:
                (behind if met or _BEHIND.fullmatch(name) else before).append(parameter)
        if isinstance(model, GPT) and model.head is None:
            behind += [*model.embed.parameters()]
        self.before, self.behind = {*before}, {*behind}

    def _shared(self, places: str, name: str) -> ConfigError:
        message = f"{places} of {type(self.model).__name__} share `{name}`, but a pipeline would train two copies of it"
        return ConfigError(message, hint="only an embedding and the output layer may be tied")

    def replace(self, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Replace parameters in this layout, so that it no longer keeps the old ones in memory."""
        self.block_of = {replaced.get(parameter, parameter): block for parameter, block in self.block_of.items()}
        self.before, self.behind = (
            {replaced.get(parameter, parameter) for parameter in parameters}
            for parameters in (self.before, self.behind)
        )

    @property
    def tied(self) -> list[str]:
        """Names of parameters that are used both before and after the blocks."""
        both = self.before & self.behind
        return [name for name, parameter in self.model.named_parameters() if parameter in both]

    def held(self, parts: Sequence[range], own: Sequence[int], first: int) -> set[nn.Parameter]:
        """The parameters that a rank with the parts `own` holds; see `Stage` for the arguments."""
        inside = [self.blocks[index] for part in own if part >= 0 for index in parts[part]]
        held = {parameter for block in inside for parameter in block.parameters()}
        return held | (self.before if first in own else set()) | (self.behind if len(parts) - 1 in own else set())

    def costs(self) -> list[float]:
        """Multiplications per token of each block; layers before and after the blocks count in the first and last."""
        looked_up = {module.weight for module in self.model.modules() if isinstance(module, nn.Embedding)}

        def cost(parameters: Any) -> float:
            return float(sum(parameter.numel() for parameter in parameters if parameter.ndim > 1)) or 1.0

        costs = [cost(block.parameters()) for block in self.blocks]
        costs[0] += cost(self.before - looked_up)
        costs[-1] += cost(self.behind)
        return costs


def first_part(layout: Layout, settings: Pipeline, features: Sequence[Feature]) -> Literal[-1, 0]:
    """Index of the part that has the layers before the blocks: 0, or -1 if the last stage has them."""
    return -1 if settings.looks_up_last(tied=bool(layout.tied), features=features) else 0


def own_parts(parts: Sequence[range], first: int, index: int, stages: int) -> list[int]:
    """Indices of the parts of stage `index`."""
    return [part for part in range(first, len(parts)) if part % stages == index]


def _lists(model: nn.Module) -> Iterator[nn.ModuleList]:
    for child in model.children():
        if not isinstance(child, nn.ModuleList):
            yield from _lists(child)
        elif len(child):
            yield child


class Stage:
    """The parts of a model that a rank holds, and their forward passes.

    Args:
        parts: range of blocks of each part of the model. own: indices of this rank's parts.
        first: index of the part with the layers before the blocks: 0; or -1, a part that has no blocks.
    """

    def __init__(
        self, attachments: Attachments, layout: Layout, parts: Sequence[range], own: Sequence[int], first: int
    ) -> None:
        self.attachments, self.layout, self.parts, self.own = attachments, layout, parts, own
        self.first, self.last = first, len(parts) - 1
        self.current, self.begun = 0, False  # the part that runs now, and whether its blocks have begun
        self._received: Tensor | None = None
        self._hooked: nn.Module | None = None
        self._checked = set[int]()
        self._calls = 0  # number of calls of the model for the current batch
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
        """Free the parameters that only other stages use, and make forward passes run one part."""
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
        # Move the parameters `gone` to the meta device, and freeze all parameters that this rank does not hold.
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
            received: activations from the previous part, (B, T, C); None for the first part.
            call: function that calls the model on a batch.

        Returns:
            The model's output if this is the last part; otherwise the activations that the next part needs.
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
        """Run the model; return `Hidden` if a `LeftError` ended it, so that wrappers such as DDP see no exception."""
        try:
            return inner(*args, **kwargs)
        except LeftError as left:
            # Do not return the exception: its traceback refers to frames that refer to it, and this reference cycle
            # would keep the activations alive.
            return Hidden(left.hidden)

    def _leave_early(self, module: nn.Module, args: Any, output: Any) -> None:
        self._calls += 1
        if self._calls > 1:  # a second call would lack the results of earlier stages, which ran only the first call
            raise ConfigError(
                "`forward` calls the model several times for a batch",
                hint="a pipeline needs a single call: put the inputs into one batch, or use parallel.DDP()",
            )
        if isinstance(output, Hidden):
            raise LeftError(output.hidden)
        if self.current != self.last:
            block = max(self.blocks(self.current), default=0)
            raise ConfigError(
                f"{type(self.layout.model).__name__} returned without calling its block {block}",
                hint="a pipeline needs blocks that are called one after another",
            )

    def _run_block(self, index: int, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        part, blocks = self.part_of[index], self.blocks(self.current)
        if part != self.current:
            hidden = _first(args, kwargs)
            if self.current < 0:
                self._check_inputs(index, args, kwargs)
                raise LeftError(hidden)
            # Some blocks return a tuple, and the model takes its first item. A tensor with one more dimension behaves
            # in the same way: indexing it with 0 gives the hidden states.
            return hidden[None] if self._received is None or hidden.ndim <= self._received.ndim else hidden
        self._check_inputs(index, args, kwargs)
        self.begun = True
        if index == blocks[0] and self._received is not None:
            place = _place(args, kwargs)
            if isinstance(place, int):
                args = (*args[:place], self._received, *args[place + 1 :])
            else:
                kwargs = kwargs | {place: self._received}
        output = inner(*args, **kwargs)
        if index == blocks[-1] and self.current != self.last:
            raise LeftError(_hidden(output, index))
        return output

    def _check_inputs(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """In the first pass, refuse a block that gets more than hidden states from trained layers.

        Stages send only hidden states to each other.

        Raises:
            ConfigError: another argument of the block depends on weights, such as embeddings that every block gets.
        """
        if self.current in self._checked or not torch.is_grad_enabled():
            return
        place = _place(args, kwargs)
        others = {key: value for key, value in (*enumerate(args), *kwargs.items()) if key != place}
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(others)):
            raise ConfigError(
                f"block {index} gets more than its hidden states from the layers before it",
                hint="a pipeline sends only hidden states between stages: use parallel.FSDP() or memory.Zero()",
            )

    @contextmanager
    def _checking(self) -> Iterator[None]:
        """Context of a part's first pass: checks which parameters it reads, and gives embeddings' outputs gradients.

        The gradients show `_check_inputs` which arguments depend on embeddings, even on frozen ones.
        """
        with ExitStack() as stack:
            stack.enter_context(_Reads(self))
            for module in self.layout.model.modules():
                if isinstance(module, nn.Embedding) and module.weight in self.layout.before:
                    stack.callback(module.register_forward_hook(_with_gradient).remove)
            yield


class _Reads(TorchFunctionMode):
    """Raises ConfigError if a forward pass reads a parameter that another stage trains."""

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
            f"a stage reads `{name}`, which another stage trains",
            hint="a pipeline needs parameters that are used only on the side of the blocks where they are declared",
        )
        try:
            result = func(*args, **(kwargs or {}))
        except RuntimeError as error:  # the parameter is on the meta device, so it has no values here
            raise refusal from error
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            raise refusal  # the function read the values; functions that only read a shape return no tensor
        return result


def _with_gradient(module: nn.Module, args: Any, output: Any) -> None:
    if torch.is_grad_enabled() and isinstance(output, Tensor) and not output.requires_grad:
        output.requires_grad_()


def _zeros(width: int, dtype: torch.dtype, indices: Tensor) -> Tensor:
    """Zeros in place of the output of an embedding that another stage holds: indices (…) -> (…, C)."""
    return torch.zeros((), dtype=dtype, device=indices.device).expand(*indices.shape, width)


def _place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
    """Position or name of the argument with a block's hidden states: the first floating-point tensor."""
    for key, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Tensor) and value.is_floating_point():
            return key
    raise ConfigError("a block got no hidden states", hint="a pipeline needs blocks that take a floating-point tensor")


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    place = _place(args, kwargs)
    return args[place] if isinstance(place, int) else kwargs[place]


def _hidden(output: Any, index: int) -> Tensor:
    """The hidden states that a block returned: its output if that is a tensor, or the first item of a tuple."""
    hidden = output[0] if isinstance(output, tuple) else output
    if not isinstance(hidden, Tensor):
        raise ConfigError(
            f"block {index} returned a {type(hidden).__name__}", hint="a pipeline needs blocks that return a tensor"
        )
    return hidden
