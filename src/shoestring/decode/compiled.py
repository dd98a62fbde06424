"""Small passes of our GPT, captured on a GPU, and compiled: launching kernels one by one takes longer than they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shoestring.core.errors import ConfigError
from shoestring.decode.adapter import Adapter, OwnModel, adapt
from shoestring.decode.settings import Passes
from shoestring.decode.stopwatch import once
from shoestring.models.cache import CachePlace, KVCache

FEW = 16
"""The most tokens of each row for which a pass is compiled; longer ones are bound by arithmetic."""

LEAST = 256
"""The fewest positions of the cache that a compiled pass attends to; twice as many whenever those are full."""


def choose_passes(model: nn.Module, context: int | None, passes: Passes, *, skips: bool = False) -> Adapter:
    """The adapter of a model whose passes over few tokens run as a user asks: see `Passes` in the settings.

    Args:
        context: the most tokens that are seen; default the model's own.
        skips: sublayers of the model will be skipped, which a pass that is fixed cannot do.

    Raises:
        ConfigError: the passes of this model, or on this device, cannot be captured or compiled.
    """
    plain = adapt(model, context)
    on_gpu = plain.device.type == "cuda"
    if passes == "plain" or (passes == "auto" and (skips or not on_gpu or type(plain) is not OwnModel)):
        return plain
    if type(plain) is not OwnModel:
        raise ConfigError(f"passes of {type(model).__name__} cannot be {passes}", hint="give --passes plain")
    if passes == "graphs" and not on_gpu:
        raise ConfigError("a CPU has no CUDA graphs", hint="give --passes plain or compiled")
    return Compiled(model, plain.context, backend="inductor" if passes == "compiled" else None)


@dataclass
class _Pass:
    """A pass of fixed shapes: what it reads is copied into `tokens` and `place`, and `run` gives the logits."""

    tokens: Tensor
    place: CachePlace
    run: Callable[[], Tensor]


class Compiled(OwnModel):
    """Our `GPT`, its passes of few tokens in shapes rounded up to powers of two, so that few shapes are compiled.

    Args:
        backend: of torch.compile; None captures the kernels on a GPU as the model launches them.
    """

    captured = True

    def __init__(
        self, model: nn.Module, context: int, *, backend: str | Callable[..., Any] | None = "inductor"
    ) -> None:
        super().__init__(model, context)

        def step(tokens: Tensor, cache: KVCache, place: CachePlace) -> Tensor:
            return model(tokens, cache, place)

        self._step = torch.compile(step, fullgraph=True, dynamic=False, backend=backend) if backend else step
        self._passes: WeakKeyDictionary[KVCache, dict[tuple[int, int, int], _Pass]] = WeakKeyDictionary()

    def logits(self, tokens: Tensor, cache: KVCache, place: CachePlace, last: int | None) -> Tensor:
        count = tokens.shape[1]
        if count > FEW or not cache.layers:  # the first pass takes the cache's memory
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
        given = torch.zeros(rows, padded, dtype=torch.int64)
        given[place.rows, :count] = tokens.cpu()
        # Rows that are not of this pass, and padding, write behind what is valid.
        step.place.positions.copy_(positions.clamp_(max=cache.length), non_blocking=True)
        step.tokens.copy_(given, non_blocking=True)
        logits = step.run()[place.rows, :count]
        return logits if last is None else logits[:, -last:]

    def _prepare(self, cache: KVCache, rows: int, count: int, end: int) -> _Pass:
        tokens = torch.zeros(rows, count, dtype=torch.int64, device=self.device)
        # Until it is told where to, the pass writes to the position that is never attended to.
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
            for _ in range(3):  # compiles, and chooses kernels, before anything is captured
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
    """The next power of two."""
    return 1 << max(count - 1, 0).bit_length()
