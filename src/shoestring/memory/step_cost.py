"""Estimates the time of a step and of a block's operators on fake tensors, and chooses results to hold in memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
"""Operators that take several times as long as copying the same number of bytes, at least on a CPU."""


class DeviceRates(NamedTuple):
    """Approximate speed of a device."""

    flops: float
    """Rate of matrix products, in FLOP/s."""
    copied: float
    """Throughput of bandwidth-bound elementwise operators, in bytes read and written per second."""
    slow: float
    """Throughput of the operators in `_SLOW`, in bytes read and written per second."""
    launch: float
    """Overhead of an operator call in a step (launch, Python and autograd), in seconds."""
    chosen: float
    """Overhead of selective checkpointing per operator call (forward pass plus recomputation), in seconds."""
    host: float
    """Throughput of copies between the device and pinned host memory, in bytes per second."""


class BlockCall(NamedTuple):
    """A call of an operator in the forward pass of a block."""

    name: str
    seconds: float
    nbytes: int
    """Size of the result in bytes; 0 if the result cannot be held, because it is a view or is overwritten."""


class CostedTensors(LiveTensors):
    """Tracks tensors, estimates the time of every operator of a step, and lists the operators of one block.

    Args:
        block: path of the block.

    Attributes:
        calls: calls of operators in the block's forward pass, in order.
        needed: number of leading entries of `calls` that recomputation must run, because the backward pass needs their
            results.
        seconds: estimated time of all operators of the step.
        operators: number of operator calls of the step.
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
        if func.namespace == "prim":  # such as prim.device, which runs nothing
            return returned
        old, new = _storages((args, kwargs)), _storages(returned)
        own = {key: nbytes for key, nbytes in new.items() if key not in old}
        seconds = self.rates.launch
        if own or func._schema.is_mutable:
            seconds += _seconds(self.rates, func, args, kwargs or {}, returned)
        self.seconds += seconds
        self.operators += 1
        if not self.backward and self.block in self.modules:
            name = operator_name(func)
            self._counts[name] += 1
            if func._schema.is_mutable:  # a result that is overwritten cannot be held
                for key in old.keys() & self._makers.keys():
                    maker = self._makers[key]
                    self.calls[maker] = self.calls[maker]._replace(nbytes=0)
            self._makers |= dict.fromkeys(own, len(self.calls))
            self.calls.append(BlockCall(call_name(func, self._counts[name]), seconds, sum(own.values())))
        return returned

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor), super().following(model):
            yield

    def _saved(self, tensor: Tensor) -> Tensor:
        """Note which call created a tensor that autograd saves, as recomputation stops after the last such call."""
        if self.block in self.modules:
            maker = self._makers.get(tensor.untyped_storage()._cdata, -1)
            self.needed = max(self.needed, maker + 1)
        return tensor


def _storages(tensors: Any) -> dict[int, int]:
    """Map each storage of the tensors to its size in bytes."""
    storages = (tensor.untyped_storage() for tensor in tree_leaves(tensors) if isinstance(tensor, Tensor))
    return {storage._cdata: storage.nbytes() for storage in storages}


def _seconds(rates: DeviceRates, func: Any, args: Any, kwargs: Any, returned: Any) -> float:
    """Estimate an operator's seconds by the roofline model: the longer of the times to move bytes and to compute."""
    packet = func.overloadpacket
    name = packet.__name__
    moved = sum(tensor.nbytes for tensor in tree_leaves((args, kwargs, returned)) if isinstance(tensor, Tensor))
    taken = moved / (rates.slow if name in _SLOW else rates.copied)
    if packet in flop_registry:
        taken = max(taken, flop_registry[packet](*args, **kwargs, out_val=returned) / rates.flops)
    elif name.startswith("_scaled_dot_product"):
        query, key = args[0].shape, args[1].shape  # (samples, heads, tokens, dim)
        # 2 FLOP per multiply-add; two products in the forward pass, and five in the backward pass, as it recomputes the
        # scores.
        flops = 4 * query.numel() * key[-2] * (2.5 if "backward" in name else 1)
        taken = max(taken, flops / rates.flops)
    return taken


AROUND = 5.0
"""Ratio of an operator's overhead in a step to its overhead in a loop of only this operator; measured with a GPT on a
CPU."""


def measure_rates(device: str) -> DeviceRates:
    """Measure the rates of one of this machine's devices; takes one to two seconds."""
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
    """Seconds that selective checkpointing adds to an operator call."""

    def chain(tensor: Tensor) -> Tensor:
        for _ in range(calls):
            tensor = tensor + 1
        return tensor

    def again(**options: Any) -> object:
        return checkpoint(chain, tiny, use_reentrant=False, **options).backward()

    return max(_least(lambda: again(context_fn=contexts_holding(("mm",)))) - _least(again), 0.0) / calls


def _least(work: Callable[[], object], calls: int = 1) -> float:
    """Time of a call of `work` in seconds, in the shortest of 12 runs, which other load disturbs least."""
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
"""Minimum fraction of a block's time that a call must take, so that holding the call's result is worthwhile."""


class RecomputeLevel(NamedTuple):
    """A way to recompute a block: the calls whose results are held, the results' memory, and the recomputation time."""

    keep: tuple[str, ...]
    """Names of the calls whose results are held."""
    nbytes: int
    """Bytes of the held results per block, without the block's input."""
    seconds: float
    """Seconds to recompute the calls whose results are not held."""


def levels(calls: Sequence[BlockCall], most: int = 6) -> list[RecomputeLevel]:
    """Find about `most` ways to recompute a block, from holding no results to holding all results worth holding.

    Results are added in order of seconds per byte, which is optimal for each total of bytes that occurs in this order
    (Dantzig's bound of the knapsack problem). Levels whose times hardly differ are left out.
    """
    whole = sum(call.seconds for call in calls)
    long = (call for call in calls if call.nbytes and call.seconds >= LEAST * whole)
    worth = sorted(long, key=lambda call: call.nbytes / call.seconds)
    frontier = [RecomputeLevel((), 0, whole)]
    for call in worth:
        last = frontier[-1]
        frontier.append(RecomputeLevel((*last.keep, call.name), last.nbytes + call.nbytes, last.seconds - call.seconds))
    apart = [frontier[0]]
    for level in frontier[1:]:
        if apart[-1].seconds - level.seconds >= whole / most:
            apart.append(level)
    return apart
