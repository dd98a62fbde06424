"""The attention and feed-forward sublayers of a language model, and a context in which some of them are skipped.

A sublayer adds to the residual stream: y = x + Sub(norm(x)). If it is skipped, the stream is scaled instead, y = r · x,
where r estimates the ratio ‖y‖ / ‖x‖ (He et al., AdaSkip, AAAI 2025). The model's code does not change: within the
context the norm is the identity, and the sublayer returns (r - 1) times its input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shoestring.core.errors import ConfigError, nearest
from shoestring.models import hf
from shoestring.models.blocks import repeated

Kind = Literal["attention", "feed-forward"]
KINDS: tuple[Kind, Kind] = ("attention", "feed-forward")

LAYOUTS: tuple[tuple[tuple[str, str, str], tuple[str, str, str]], ...] = (
    (("attention", "attention_norm", ""), ("mlp", "mlp_norm", "")),  # our GPT
    (("self_attn", "input_layernorm", ""), ("mlp", "post_attention_layernorm", "")),  # Llama, Mistral, Qwen, Phi-3
    (("self_attn", "input_layernorm", ""), ("block_sparse_moe", "post_attention_layernorm", "")),
    (("attn", "ln_1", ""), ("mlp", "ln_2", "")),  # GPT-2, GPT Neo
    (
        ("self_attn", "input_layernorm", "post_attention_layernorm"),
        ("mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),  # Gemma 2 and 3
    (("self_attn", "", "post_attention_layernorm"), ("mlp", "", "post_feedforward_layernorm")),  # OLMo 2
)
"""Known layouts of a block: the names of the sublayer, of its input norm and of its output norm (empty if there is
none), for attention and for feed-forward."""

PROBE = 4
"""Number of tokens in the forward pass that finds out the layout of a model."""


@dataclass(frozen=True)
class Sublayer:
    """A sublayer and the names of its modules."""

    name: str
    """Name of the sublayer's module in `named_modules`."""
    kind: Kind
    layer: int
    """Index of the sublayer's block."""
    entry: str
    """Name of the module that reads the residual stream: the input norm, or the sublayer itself if it has no input
    norm."""
    norms: tuple[str, ...]
    """Names of the sublayer's input norm and output norm, where it has them."""
    items: int
    """Length of the tuple that the sublayer returns; 0 if it returns a tensor."""


@dataclass
class _Call:
    """Input and output of a module in a recorded forward pass; `items` as in `Sublayer`."""

    input: Tensor
    output: Tensor
    items: int


_KNOWN: WeakKeyDictionary[nn.Module, dict[str, Sublayer]] = WeakKeyDictionary()


def sublayers(model: nn.Module) -> Mapping[str, Sublayer]:
    """The sublayers of a model by name, in the order in which they run.

    The first call runs the model on a few tokens and compares every block numerically with the known layouts, so that a
    model that combines its sublayers in another way raises an error instead of giving wrong results.

    Raises:
        ConfigError: the blocks of the model are not of the form y = x + Sub(norm(x)), or their layout is unknown.
    """
    if model in _KNOWN:
        return _KNOWN[model]
    blocks = repeated(model)
    names = {module: name for name, module in model.named_modules()}
    if not blocks:
        raise ConfigError(f"{type(model).__name__} has no list of blocks, so no sublayer of it can be skipped")
    if len(set(blocks)) < len(blocks):
        raise ConfigError(f"{type(model).__name__} runs a block several times, so no sublayer of it can be skipped")
    known: dict[str, Sublayer] = {}
    for index, (block, calls) in enumerate(zip(blocks, _calls(model, blocks), strict=True)):
        layout = next((layout for layout in LAYOUTS if _follows(calls, layout)), None)
        if layout is None:
            raise ConfigError(
                f"sublayers of {type(model).__name__} cannot be skipped: its block `{names[block]}` is not known to "
                "compute x + Sub(norm(x)), attention first and feed-forward after it",
                hint="pre-norm models such as Llama, Mistral, Qwen, Gemma 2 and GPT-2 are known; blocks whose "
                "attention and feed-forward read the same input (GPT-NeoX, Phi) are not of this form",
            )
        for kind, (part, before, after) in zip(KINDS, layout, strict=True):
            norms = tuple(f"{names[block]}.{norm}" for norm in (before, after) if norm)
            name, entry = f"{names[block]}.{part}", f"{names[block]}.{before or part}"
            known[name] = Sublayer(name, kind, index, entry, norms, calls[part].items)
    _KNOWN[model] = known
    return known


@contextmanager
def skipping(model: nn.Module, ratios: Mapping[str, float | Tensor]) -> Iterator[None]:
    """Context in which the sublayers in `ratios` compute y = r · x instead of y = x + Sub(norm(x)).

    A skipped attention sublayer neither reads nor writes a cache. Contexts may be nested.

    Args:
        ratios: r of each sublayer to skip, by name: a number, or a 0-d tensor on the model's device.

    Raises:
        ConfigError: the model has no such sublayer; see `sublayers`.
    """
    known, patched = sublayers(model), list[tuple[nn.Module, Any]]()

    def patch(name: str, forward: Callable[..., Any]) -> None:
        module = model.get_submodule(name)
        patched.append((module, module.__dict__.get("forward")))
        module.forward = forward

    try:
        for name, ratio in ratios.items():
            if name not in known:
                raise ConfigError(f"{type(model).__name__} has no sublayer `{name}`", hint=nearest(name, list(known)))
            patch(name, SkippedForward(ratio, known[name].items))
            for norm in known[name].norms:
                patch(norm, SkippedForward(1.0, 0, is_norm=True))
        yield
    finally:
        for module, before in reversed(patched):
            if before is None:
                del module.forward
            else:
                module.forward = before


def read(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    """Get the residual stream from the arguments of a module's call."""
    return arguments[0] if arguments else named["hidden_states"]


class SkippedForward:
    """The forward pass of a skipped sublayer or of one of its norms: the sublayer returns (ratio - 1) times the stream,
    a norm returns the stream.

    Args:
        items: as in `Sublayer`.
    """

    def __init__(self, ratio: float | Tensor, items: int, *, is_norm: bool = False) -> None:
        self.ratio, self.items, self.is_norm = ratio, items, is_norm

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        x = read(arguments, named)
        if self.is_norm:
            return x
        scaled = x * (self.ratio - 1)
        return (scaled, *[None] * (self.items - 1)) if self.items else scaled


@torch.no_grad()
def _calls(model: nn.Module, blocks: list[nn.Module]) -> list[dict[str, _Call]]:
    """Inputs and outputs of the direct children of each block by name, and of the block itself under the name ""."""
    calls: list[dict[str, _Call]] = [{} for _ in blocks]

    def record(into: dict[str, _Call], name: str) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], returned: Any) -> None:
            first = returned[0] if isinstance(returned, tuple) else returned
            if (arguments or "hidden_states" in named) and isinstance(first, Tensor):
                items = len(returned) if isinstance(returned, tuple) else 0
                into[name] = _Call(read(arguments, named), first, items)

        return hook

    handles = [
        module.register_forward_hook(record(into, name), with_kwargs=True)
        for block, into in zip(blocks, calls, strict=True)
        for name, module in (("", block), *block.named_children())
    ]
    training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        tokens = torch.arange(PROBE, device=device)[None]
        model(tokens, use_cache=False) if hf.is_pretrained(model) else model(tokens)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return calls


def _follows(calls: Mapping[str, _Call], layout: tuple[tuple[str, str, str], ...]) -> bool:
    """Whether the recorded inputs and outputs of a block agree with a layout."""
    wanted = {"", *(name for row in layout for name in row)}
    if not wanted <= calls.keys():
        return False
    x = calls[""].input
    for sublayer, before, after in layout:
        value = x
        for name in filter(None, (before, sublayer, after)):
            if not _same(calls[name].input, value):
                return False
            value = calls[name].output
        if value.shape != x.shape:
            return False
        x = x + value
    return _same(calls[""].output, x)


def _same(actual: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    if actual.shape != expected.shape:
        return False
    return bool((actual - expected).abs().max() <= 8 * torch.finfo(actual.dtype).eps * expected.abs().max())
