"""The attention and feed-forward sublayers of a language model, and a context in which some of them are skipped.

A sublayer adds to the residual stream: y = x + Sub(norm(x)). Skipped, it scales the stream instead, y = r · x, with
the ratio r of the lengths ‖y‖ / ‖x‖ that it would have caused (He et al., AdaSkip, AAAI 2025). The model's code stays
as it is: within the context the norm returns what it is given, and the sublayer returns (r - 1) times that.
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
"""Names within a block: the sublayer, the norm before it and the norm of what it returns, for each of the two kinds."""

PROBE = 4
"""Tokens that a model reads once, to see which layout it has."""


@dataclass(frozen=True)
class Sublayer:
    """A sublayer, by the names of its modules."""

    name: str
    """As `named_modules` has it."""
    kind: Kind
    layer: int
    """Index of its block."""
    entry: str
    """Name of the module that reads the residual stream: the norm before it, or itself where there is none."""
    norms: tuple[str, ...]
    """Names of the norms of what it reads and of what it returns."""
    items: int
    """Items of the tuple that it returns; 0 where it returns a tensor."""


@dataclass
class _Call:
    """What a module was given and what it returned."""

    given: Tensor
    returned: Tensor
    items: int


_KNOWN: WeakKeyDictionary[nn.Module, dict[str, Sublayer]] = WeakKeyDictionary()


def sublayers(model: nn.Module) -> Mapping[str, Sublayer]:
    """The sublayers of a model by name, in the order in which they run.

    The first call lets the model read a few tokens and compares every block with the layouts known here, so that a
    model that adds its sublayers up in another way is refused and never computed wrongly.

    Raises:
        ConfigError: the blocks of the model are not of the form y = x + Sub(norm(x)), or not known.
    """
    if model not in _KNOWN:
        _KNOWN[model] = {sublayer.name: sublayer for sublayer in _found(model)}
    return _KNOWN[model]


@contextmanager
def skipping(model: nn.Module, ratios: Mapping[str, float | Tensor]) -> Iterator[None]:
    """Within the context, y = r · x in place of y = x + Sub(norm(x)) for the sublayers that `ratios` names.

    A skipped attention sublayer neither reads nor writes a cache. May be nested.

    Args:
        ratios: r of each sublayer to skip: a number, or a 0-d tensor on the model's device.

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
            patch(name, _scaling(ratio, known[name].items))
            for norm in known[name].norms:
                patch(norm, _identity)
        yield
    finally:
        for module, before in reversed(patched):
            if before is None:
                del module.forward
            else:
                module.forward = before


def read(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    """The stream among the arguments of a module."""
    return arguments[0] if arguments else named["hidden_states"]


def _identity(x: Tensor) -> Tensor:
    return x


def _scaling(ratio: float | Tensor, items: int) -> Callable[..., Any]:
    rest, scale = (None,) * (items - 1), ratio - 1

    def forward(*arguments: Any, **named: Any) -> Any:
        scaled = read(arguments, named) * scale
        return (scaled, *rest) if items else scaled

    return forward


def _found(model: nn.Module) -> Iterator[Sublayer]:
    blocks = repeated(model)
    names = {module: name for name, module in model.named_modules()}
    if not blocks:
        raise ConfigError(f"{type(model).__name__} has no list of blocks, so no sublayer of it can be skipped")
    if len(set(blocks)) < len(blocks):
        raise ConfigError(f"{type(model).__name__} runs a block several times, so no sublayer of it can be skipped")
    for index, (block, calls) in enumerate(zip(blocks, _calls(model, blocks), strict=True)):
        layout = next((each for each in LAYOUTS if _follows(calls, each)), None)
        if layout is None:
            raise ConfigError(
                f"sublayers of {type(model).__name__} cannot be skipped: its block `{names[block]}` is not known to "
                "compute x + Sub(norm(x)), attention first and feed-forward after it",
                hint="pre-norm models such as Llama, Mistral, Qwen, Gemma 2 and GPT-2 are known; blocks whose "
                "attention and feed-forward read the same input (GPT-NeoX, Phi) are not of this form",
            )
        for kind, (name, before, after) in zip(KINDS, layout, strict=True):
            norms = tuple(f"{names[block]}.{norm}" for norm in (before, after) if norm)
            entry = f"{names[block]}.{before or name}"
            yield Sublayer(f"{names[block]}.{name}", kind, index, entry, norms, calls[name].items)


@torch.no_grad()
def _calls(model: nn.Module, blocks: list[nn.Module]) -> list[dict[str, _Call]]:
    """What the modules directly in each block were given and returned by name, and the block itself under no name."""
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
    """Whether a block added its sublayers up as the layout says."""
    wanted = {"", *(name for row in layout for name in row)}
    if not wanted <= calls.keys():
        return False
    x = calls[""].given
    for sublayer, before, after in layout:
        given = x
        for name in filter(None, (before, sublayer, after)):
            if not _same(calls[name].given, given):
                return False
            given = calls[name].returned
        if given.shape != x.shape:
            return False
        x = x + given
    return _same(calls[""].returned, x)


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal up to rounding."""
    if one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= 8 * torch.finfo(one.dtype).eps * other.abs().max())
