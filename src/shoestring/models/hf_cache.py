"""Forward passes of transformers models with a cache: either `KVCache`, whose rows may differ in length, or the model's
own cache object, which holds one text."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.models.cache import CachePlace, KVCache


class RaggedPasses:
    """Runs a causal language model of transformers with `KVCache` and its attention masks, in place of the model's own.

    Args:
        model: the transformers model.
        argument: name of the argument of `forward` that takes a cache.
        context: maximum number of positions.
    """

    def __init__(self, model: nn.Module, argument: str, context: int) -> None:
        self.model, self.argument, self.context = model, argument, context
        config: Any = model.config
        text = config.get_text_config()
        self.shortens = _shortens(model)
        self.kinds: list[str] = getattr(text, "layer_types", None) or []
        self.window: int | None = getattr(text, "sliding_window", None)
        if self.window and not getattr(text, "use_sliding_window", True):
            self.window = None
        self.additive = getattr(text, "_attn_implementation", "sdpa") not in ("sdpa", "flex_attention")

    def logits(self, tokens: Tensor, cache: KVCache, place: CachePlace, last: int | None) -> Tensor:
        """Read tokens (B, T) into the cache at `place`; returns logits (B, T, V), or (B, last, V) for only the last
        tokens."""
        # Without this limit, the padding of a full row would have a position beyond the last one.
        positions = place.positions.clamp(max=self.context - 1)
        options: dict[str, Any] = {"logits_to_keep": last} if last and self.shortens else {}
        options[self.argument] = _CacheOfPass(cache, place)
        masks = {kind: self._mask(place, self.window_of(kind)) for kind in set(self.kinds) or {""}}
        logits = self.model(
            input_ids=tokens,
            position_ids=positions.expand(len(tokens), -1),
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            use_cache=True,
            **options,
        ).logits
        return logits if last is None else logits[:, -last:]

    def window_of(self, kind: str) -> int | None:
        """Maximum number of positions that a token attends to in layers of a kind, or None for no limit; the kind is ""
        if the configuration names no kinds."""
        return self.window if kind in ("", "sliding_attention") else None

    def _mask(self, place: CachePlace, window: int | None) -> Tensor:
        mask = place.mask(window)
        if not self.additive:
            return mask
        # Eager attention adds the mask to the scores, so the mask must be 0 or a large negative number.
        dtype = next(self.model.parameters()).dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


class _CacheOfPass:
    """Adapts `KVCache`, for one pass, to the cache interface that transformers' layers expect."""

    def __init__(self, cache: KVCache, place: CachePlace) -> None:
        self.cache, self.place = cache, place

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self.cache.append(layer_idx, keys, values, self.place)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.place.end - self.place.positions.shape[1]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.place.end, 0

    is_compileable = False


@dataclass(frozen=True)
class OwnCache:
    """How a model of transformers reads one text into its own cache, as observed by running it."""

    argument: str
    """Name of the argument of `forward` that takes the cache, and of the output that returns it."""
    made: bool = False
    """Whether the first pass needs an empty cache object as an argument; otherwise the model creates the object."""
    positions: str = ""
    """Name of the argument of `forward` that takes the positions of a pass's tokens; empty if there is none.
    "cache_position", which older releases use, is only passed if the cache is not empty."""
    pieces: bool = True
    """Whether a pass that adds several tokens to a nonempty cache gives the same logits as adding them one by one."""
    crops: bool = True
    """Whether the cache can drop its last tokens."""
    switches: tuple[int, ...] = ()
    """Lengths beyond which a text must be read again from its start, because the cached values of its first tokens
    change there."""
    carried: tuple[tuple[str, str], ...] = ()
    """State outside the cache that a pass changes: pairs of a module's class name and the name of its attribute."""


@dataclass
class TextCache:
    """The cache object of one text, and how many tokens it holds."""

    length: int = 0
    state: Any = None
    """The cache object that the model returned; None before the first pass."""
    carried: list[Any] | None = None
    """This text's values of the attributes in `OwnCache.carried`; None before the first pass."""
    earlier: list[TextCache] = field(default_factory=list)
    """Copies of the text's cache at smaller lengths, for caches that cannot be cropped."""

    def copied(self) -> TextCache:
        """A deep copy of the cache, without its `earlier` copies."""
        return copy.deepcopy(replace(self, earlier=[]))


class TextPasses:
    """Runs a transformers model on single texts, with one of the model's own cache objects for each text."""

    def __init__(self, model: nn.Module, own: OwnCache) -> None:
        self.model, self.own = model, own
        self.shortens = _shortens(model)
        self.device = next(model.parameters()).device
        self._carriers = [
            (module, name, _copied(getattr(module, name)))
            for kind, name in own.carried
            for module in model.modules()
            if type(module).__name__ == kind and hasattr(module, name)
        ]

    @contextmanager
    def carriers_restored(self) -> Iterator[None]:
        """Context after which the model's state outside of caches is restored to its initial value."""
        try:
            yield
        finally:
            for module, name, fresh in self._carriers:
                setattr(module, name, _copied(fresh))

    def extend(self, cache: TextCache, text: Tensor, count: int, last: int | None = None) -> Tensor:
        """Read the last tokens of a text into its cache.

        Args:
            cache: cache of this text's earlier tokens; the cached text may differ from `text` only after the first N -
                `count` tokens.
            text: (N,), the whole text.
            count: number of new tokens, at the end of the text.
            last: number of last tokens whose logits are returned; defaults to `count`.

        Returns:
            Logits (1, last, V).
        """
        last, end = last or count, len(text)
        self.shorten(cache, end - count)
        if count > 1 and cache.length and not self.own.crops:
            cache.earlier = [cache.copied()]
        logits: list[Tensor] = []
        try:
            for start, stop, fresh in self._passes(cache.length, end):
                if start == 0:
                    cache.length, cache.state = 0, None
                logits.append(self._pass(cache, text[start:stop], min(fresh, max(last - (end - stop), 1))))
        except BaseException:
            cache.length, cache.state, cache.carried, cache.earlier = 0, None, None, []
            raise
        return logits[0] if len(logits) == 1 else torch.cat(logits, 1)[:, -last:]

    def shorten(self, cache: TextCache, length: int) -> None:
        """Remove all but the first `length` tokens from a cache; fewer tokens are left if the cache cannot be cropped
        to this length."""
        cache.earlier = [copied for copied in cache.earlier if copied.length <= length]
        if cache.length <= length:
            return
        switched = any(length <= switch < cache.length for switch in self.own.switches)
        if self.own.crops and length and not switched:
            cache.state.crop(length - cache.length)
            cache.length = length
            return
        source = cache.earlier[-1].copied() if cache.earlier else TextCache()
        cache.length, cache.state, cache.carried = source.length, source.state, source.carried

    def _passes(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """Plan the passes that read a text from `start` to `end`. Each pass is a triple: its first position, its end
        position (exclusive), and how many of its last positions no earlier pass has computed logits for."""
        passes: list[tuple[int, int, int]] = []
        for switch in sorted(self.own.switches):
            if 0 < start <= switch < end:
                passes += [*self._pieces(start, switch), (0, switch + 1, 1)]
                start = switch + 1
        return passes + self._pieces(start, end)

    def _pieces(self, start: int, end: int) -> list[tuple[int, int, int]]:
        if start == end:
            return []
        if self.own.pieces or start == 0:
            return [(start, end, end - start)]
        return [(position, position + 1, 1) for position in range(start, end)]

    def _pass(self, cache: TextCache, tokens: Tensor, keep: int) -> Tensor:
        # Restoring the state ensures that no other object mistakes this text's state for the model's initial state.
        with self.carriers_restored():
            return self._read(cache, tokens, keep)

    def _read(self, cache: TextCache, tokens: Tensor, keep: int) -> Tensor:
        for index, (module, name, fresh) in enumerate(self._carriers):
            setattr(module, name, _copied(fresh if cache.carried is None else cache.carried[index]))
        options: dict[str, Any] = {"logits_to_keep": keep} if self.shortens else {}
        if cache.state is None and self.own.made:
            cache.state = import_module("transformers").DynamicCache(config=self.model.config)
        if cache.state is not None:
            options[self.own.argument] = cache.state
        positions = torch.arange(cache.length, cache.length + len(tokens), device=self.device)
        if self.own.positions == "position_ids":
            options["position_ids"] = positions[None]
        elif self.own.positions and cache.length:
            options[self.own.positions] = positions
        output = self.model(input_ids=tokens[None].to(self.device), use_cache=True, **options)
        cache.state = getattr(output, self.own.argument, cache.state)
        cache.length += len(tokens)
        if self._carriers:
            cache.carried = [_copied(getattr(module, name)) for module, name, _ in self._carriers]
        return output.logits[:, -keep:]


def carried_by(model: nn.Module, act: Callable[[], Any]) -> tuple[tuple[str, str], ...]:
    """Find the attributes of a model's modules that calling `act` changes, as pairs of class name and attribute name;
    their values are restored afterwards."""

    def values() -> dict[tuple[nn.Module, str], Any]:
        return {
            (module, name): _copied(value)
            for module in model.modules()
            for name, value in (*vars(module).items(), *module._buffers.items())
            if isinstance(value, Tensor | int | float | None) and name != "training"
        }

    before = values()
    act()
    after = values()
    changed = []
    for place, value in before.items():
        now = after.get(place)
        if isinstance(value, Tensor) and isinstance(now, Tensor):
            same = value.shape == now.shape and bool((value == now).all())
        else:
            same = value is now or (type(value) is type(now) and bool(value == now))
        if not same:
            changed.append(place)
    for module, name in changed:
        setattr(module, name, before[module, name])
    return tuple(sorted({(type(module).__name__, name) for module, name in changed}))


def _copied(value: Any) -> Any:
    with torch.inference_mode(False):  # training may use the model's values afterwards
        return value.detach().clone() if isinstance(value, Tensor) else value


def _shortens(model: nn.Module) -> bool:
    """Whether the model can compute logits of the last positions only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def cache_argument(model: nn.Module, output: Any) -> str:
    """Name of the argument of `forward` that takes a cache; empty if there is none.

    Args:
        output: the model's output in a pass with `use_cache`.
    """
    arguments = inspect.signature(model.forward).parameters
    returned = [name for name in output if name in arguments] if hasattr(output, "keys") else []
    annotated = [name for name, argument in arguments.items() if "Cache" in str(argument.annotation)]
    return next((name for name in (*returned, *annotated) if name not in ("logits", "loss", "labels")), "")
