"""What the operators of a block take and return, from a step on fake tensors, and the time that they need by that."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from shoestring._torch import tree_leaves
from shoestring.memory.predicted import LiveTensors
from shoestring.memory.recompute import call_name, contexts_holding, operator_name

_SLOW = frozenset(
    [
        "gelu",
        "gelu_backward",
        "silu",
        "silu_backward",
        "tanh",
        "sigmoid",
        "exp",
        "log",
        "erf",
        "pow",
        "sin",
        "cos",
        "_softmax",
        "_log_softmax",
        "softplus",
        "mish",
        "native_layer_norm",
        "native_layer_norm_backward",
        "_fused_rms_norm",
        "native_dropout",
    ]
)
"""Operators that take several times as long as copying what they read and write, at least on a CPU."""


class DeviceRates(NamedTuple):
    """How fast a device is, roughly."""

    flops: float
    """Of matrix products, in FLOP/s."""
    copied: float
    """Bytes/s, read and written, of elementwise operators."""
    slow: float
    """The same of those in `_SLOW`."""
    launch: float
    """Seconds of an operator of a step that does nothing, with what Python and autograd do around it."""
    chosen: float
    """Seconds that an operator of a block takes longer, forward and again, where some of the block are held."""
    host: float
    """Bytes/s of copies between it and pinned host memory."""


class BlockCall(NamedTuple):
    """A call of an operator in the forward pass of a block."""

    name: str
    seconds: float
    nbytes: int
    """What it returns; 0 where that cannot be held, for it is a view or written in place."""


class CostedTensors(LiveTensors):
    """Also notes what operators cost, and those of the forward pass of one block.

    Args:
        block: path of the block.

    Attributes:
        calls: of operators in the block's forward pass, in order.
        needed: number of them after which the backward pass has all that it needs of the block.
        seconds: of all operators of the step. operators: number of them.
    """

    def __init__(self, rates: DeviceRates, block: str, rounding: int = 1) -> None:
        super().__init__(rounding)
        self.rates, self.block = rates, block
        self.calls: list[BlockCall] = []
        self.needed = 0
        self.seconds = 0.0
        self.operators = 0
        self._counts = Counter[str]()
        self._makers: dict[int, int] = {}  # storage -> index of the call that made it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "prim":  # asks a fake tensor for its device
            return returned
        old, new = _storages((args, kwargs)), _storages(returned)
        own = {key: nbytes for key, nbytes in new.items() if key not in old}
        seconds = self.rates.launch
        if own or func._schema.is_mutable:
            seconds += _seconds(self.rates, func, args, kwargs or {}, returned)
        self.seconds += seconds
        self.operators += 1
        if not self.backward and self.block in self.modules:
            self._note(func, seconds, old, own)
        return returned

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor), super().following(model):
            yield

    def _saved(self, tensor: Tensor) -> Tensor:
        """What runs again ends with what the backward pass needs last."""
        if self.block in self.modules:
            maker = self._makers.get(tensor.untyped_storage()._cdata, -1)
            self.needed = max(self.needed, maker + 1)
        return tensor

    def _note(self, func: Any, seconds: float, old: Mapping[int, int], own: Mapping[int, int]) -> None:
        name = operator_name(func)
        self._counts[name] += 1
        if func._schema.is_mutable:  # what is written over cannot be held
            for key in old.keys() & self._makers.keys():
                maker = self._makers[key]
                self.calls[maker] = self.calls[maker]._replace(nbytes=0)
        self._makers |= dict.fromkeys(own, len(self.calls))
        self.calls.append(BlockCall(call_name(func, self._counts[name]), seconds, sum(own.values())))


def _storages(tensors: Any) -> dict[int, int]:
    """Bytes by storage."""
    held = (each.untyped_storage() for each in tree_leaves(tensors) if isinstance(each, Tensor))
    return {storage._cdata: storage.nbytes() for storage in held}


def _seconds(rates: DeviceRates, func: Any, args: Any, kwargs: Any, returned: Any) -> float:
    packet = func.overloadpacket
    name = packet.__name__
    moved = sum(each.nbytes for each in tree_leaves((args, kwargs, returned)) if isinstance(each, Tensor))
    taken = moved / (rates.slow if name in _SLOW else rates.copied)
    if packet in flop_registry:
        taken = max(taken, flop_registry[packet](*args, **kwargs, out_val=returned) / rates.flops)
    elif name.startswith("_scaled_dot_product"):
        query, key = args[0].shape, args[1].shape  # (samples, heads, tokens, dim)
        flops = 4 * query.numel() * key[-2] * (2.5 if "backward" in name else 1)
        taken = max(taken, flops / rates.flops)
    return taken


AROUND = 5.0
"""Times as long as alone as an operator takes in a step, where it does nothing: of a GPT on a CPU."""


def measure_rates(device: str) -> DeviceRates:
    """Of this machine; takes a second or two."""
    x, flat = torch.rand(1024, 1024, device=device), torch.rand(1 << 22, device=device)
    tiny, out = torch.rand(1, device=device), torch.empty_like(flat)
    pinned = torch.rand(flat.shape, pin_memory=flat.is_cuda)
    return DeviceRates(
        2 * 1024**3 / _least(lambda: x @ x),
        2 * flat.nbytes / _least(lambda: torch.add(flat, 1, out=out)),
        2 * flat.nbytes / _least(lambda: torch.tanh(flat, out=out)),
        AROUND * _least(lambda: tiny + 1, calls=100),
        AROUND * _chosen(tiny.requires_grad_()),
        flat.nbytes / _least(lambda: flat.copy_(pinned, non_blocking=True)),
    )


def _chosen(tiny: Tensor, calls: int = 64) -> float:
    def chain(tensor: Tensor) -> Tensor:
        for _ in range(calls):
            tensor = tensor + 1
        return tensor

    def again(**options: Any) -> object:
        return checkpoint(chain, tiny, use_reentrant=False, **options).backward()

    return max(_least(lambda: again(context_fn=contexts_holding(("mm",)))) - _least(again), 0.0) / calls


def _least(work: Callable[[], object], calls: int = 1) -> float:
    taken = []
    for _ in range(12):
        began = time.perf_counter()
        for _ in range(calls):
            work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - began) / calls)
    return min(taken)


LEAST = 0.02
"""Part of a block's time below which a call is not held."""


class RecomputeLevel(NamedTuple):
    """A way to recompute a block: what is held, and what that changes."""

    keep: tuple[str, ...]
    nbytes: int
    """Held for a block, beside its input."""
    seconds: float
    """To run the rest again."""


def levels(calls: Sequence[BlockCall], most: int = 6) -> list[RecomputeLevel]:
    """Ways to recompute a block, from nothing held to the most that is worth it.

    Holding the calls with the most seconds a byte first is the best choice at each of the sums of bytes that it passes
    through (Dantzig's bound of the knapsack). Of many, those that are far apart are taken.
    """
    whole = sum(call.seconds for call in calls)
    long = (call for call in calls if call.nbytes and call.seconds >= LEAST * whole)
    worth = sorted(long, key=lambda call: call.nbytes / call.seconds)
    found = [RecomputeLevel((), 0, whole)]
    for call in worth:
        last = found[-1]
        found.append(RecomputeLevel((*last.keep, call.name), last.nbytes + call.nbytes, last.seconds - call.seconds))
    apart = [found[0]]
    for level in found[1:]:
        if apart[-1].seconds - level.seconds >= whole / most:
            apart.append(level)
    return apart
