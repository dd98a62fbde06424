"""Captures short forward passes of the package's own `GPT` as CUDA graphs, or compiles them, because launching their
kernels one by one takes longer than running them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shoestring.core.errors import ConfigError
from shoestring.decode.adapter import Adapter, OwnModel, adapt
from shoestring.decode.settings.generation import Passes
from shoestring.decode.stopwatch import once
from shoestring.models.cache import CachePlace, KVCache

FEW = 16
"""Largest number of tokens per row in a pass that is captured or compiled; longer passes are compute-bound."""

LEAST = 256
"""Number of cache positions that the first captured or compiled pass attends to; the number doubles whenever the text
outgrows it."""


def choose_passes(model: nn.Module, context: int | None, passes: Passes, *, patched: bool = False) -> Adapter:
    """Wrap a model for generation so that its short forward passes run plainly, as CUDA graphs or compiled.

    Args:
        passes: how short forward passes run; see `Decoding.passes` in the settings.
        context: largest number of tokens that the model sees; defaults to the model's own.
        patched: whether layers will be patched between passes, to skip sublayers or to add adapters; captured passes do
            not allow this.

    Raises:
        ConfigError: forward passes cannot be captured or compiled for this model or on this device.
    """
    plain = adapt(model, context)
    on_gpu = plain.device.type == "cuda"
    if passes == "plain" or (passes == "auto" and (patched or not on_gpu or type(plain) is not OwnModel)):
        return plain
    if type(plain) is not OwnModel:
        raise ConfigError(f"passes of {type(model).__name__} cannot be {passes}", hint="give --passes plain")
    if passes == "graphs" and not on_gpu:
        raise ConfigError("a CPU has no CUDA graphs", hint="give --passes plain or compiled")
    return Compiled(model, plain.context, backend="inductor" if passes == "compiled" else None)


@dataclass
class _Pass:
    """A pass of fixed shapes: its inputs are copied into `tokens` and `place`, and `run` returns the logits."""

    tokens: Tensor
    place: CachePlace
    run: Callable[[], Tensor]


class Compiled(OwnModel):
    """Runs the package's own `GPT` with compiled or captured short passes, whose shapes are rounded up to powers of two
    so that only a few different passes have to be prepared.

    Args:
        backend: backend of torch.compile; None compiles nothing, and captures the model's own kernels on a GPU.
    """

    captured = True

    def __init__(
        self, model: nn.Module, context: int, *, backend: str | Callable[..., Any] | None = "inductor"
    ) -> None:
        super().__init__(model, context)
        self.native_layers = None

        def step(tokens: Tensor, cache: KVCache, place: CachePlace) -> Tensor:
            return model(tokens, cache, place)

        self._step = torch.compile(step, fullgraph=True, dynamic=False, backend=backend) if backend else step
        self._passes: WeakKeyDictionary[KVCache, dict[tuple[int, int, int], _Pass]] = WeakKeyDictionary()

    def logits(self, tokens: Tensor, cache: KVCache, place: CachePlace, last: int | None) -> Tensor:
        count = tokens.shape[1]
        if count > FEW or not cache.layers:  # the first pass allocates the cache; allocations cannot be captured
            return super().logits(tokens, cache, place, last)
        shape = (
            min(rounded(place.rows.stop), cache.rows),
            rounded(count),
            min(max(LEAST, rounded(place.end)), cache.length),
        )
        passes = self._passes.setdefault(cache, {})
        if shape not in passes:
            with once():
                passes[shape] = self._prepare(cache, *shape)
        step = passes[shape]
        rows, padded, _ = shape
        positions = torch.tensor(cache.lengths[:rows])[:, None] + torch.arange(padded)
        padded_tokens = torch.zeros(rows, padded, dtype=torch.int64)
        padded_tokens[place.rows, :count] = tokens.cpu()
        # Padding tokens, and rows that are not part of this pass, write only to positions after the valid tokens of a
        # row.
        step.place.positions.copy_(positions.clamp_(max=cache.length), non_blocking=True)
        step.tokens.copy_(padded_tokens, non_blocking=True)
        logits = step.run()[place.rows, :count]
        return logits if last is None else logits[:, -last:]

    def _prepare(self, cache: KVCache, rows: int, count: int, end: int) -> _Pass:
        """Compile or capture a pass over `count` tokens in each of `rows` rows, which attend to `end` positions."""
        tokens = torch.zeros(rows, count, dtype=torch.int64, device=self.device)
        # During this preparation, the pass writes only to the last cache position, which is never attended to.
        place = CachePlace(slice(0, rows), torch.full_like(tokens, cache.length), end, aligned=False)
        config: Any = torch._dynamo.config

        def run() -> Tensor:
            with config.patch(recompile_limit=512, accumulated_recompile_limit=512):
                return self._step(tokens, cache, place)

        if self.device.type != "cuda":
            run()  # compiles
            return _Pass(tokens, place, run)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # compiles and selects kernels, which must not happen during the capture
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return _Pass(tokens, place, replay)


def rounded(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << max(count - 1, 0).bit_length()
