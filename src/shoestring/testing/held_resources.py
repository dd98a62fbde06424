"""The resources that a process and a model hold at one moment, so that before and after can be compared."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoestring.testing._torch import TorchDispatchMode, global_module_hooks, process_groups, saved_tensor_hooks

HOST_BYTES = 1 << 20  # Python objects below this may come and go


def held_resources(model: nn.Module | None, optimizers: Iterable[Optimizer] = ()) -> Counter[str]:
    """Name every resource held now, so that `after - before` is what was taken and not released."""
    gc.collect()
    held = Counter(_process_resources())
    if model is not None:
        held.update(_model_resources(model))
    for optimizer in optimizers:
        held.update(_hooks(vars(optimizer), "the optimizer"))
    return held


@contextmanager
def fresh_garbage() -> Iterator[None]:
    """Collecting garbage looks at objects made inside only, which is some hundred times faster."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _model_resources(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        where = f"`{path}`" if path else "the model"
        yield f"{where} being a {type(module).__name__}"
        yield from _hooks(vars(module), where)
        for name, value in vars(module).items():
            if callable(value) and not isinstance(value, nn.Module) and hasattr(type(module), name):
                yield f"a patched `{name}` of {where}"
    for path, parameter in model.named_parameters():
        yield f"`{path}` being a {type(parameter).__name__}"
        names = ("_backward_hooks", "_post_accumulate_grad_hooks")
        yield from _hooks({name: getattr(parameter, name, None) for name in names}, f"`{path}`")


def _hooks(attributes: Mapping[str, Any], where: str) -> Iterator[str]:
    for name, value in attributes.items():
        if name.endswith("_hooks") and isinstance(value, Mapping):
            for _ in value:
                yield f"a hook ({name.strip('_')}) on {where}"


def _process_resources() -> Iterator[str]:
    yield from (f"the thread `{thread.name}`" for thread in threading.enumerate())
    yield from (f"the open file {target}" for target in _open_files())
    yield from (f"the process {pid}" for pid in _children())
    yield from ("a process group" for _ in range(process_groups()))
    yield from (
        f"a hook ({name.strip('_')}) on all modules" for name, n in global_module_hooks().items() for _ in range(n)
    )
    yield from (f"the environment variable {name}={value}" for name, value in os.environ.items())
    yield from (f"the setting {name} = {value}" for name, value in _settings())


def _open_files() -> Iterator[str]:
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            yield str(entry.readlink())
        except OSError:  # the descriptor that lists the folder
            continue


def _children() -> Iterator[str]:
    for entry in Path("/proc/self/task").glob("*/children"):
        try:
            yield from entry.read_text().split()
        except OSError:  # a thread that has ended meanwhile
            continue


def _settings() -> Iterator[tuple[str, object]]:
    """What is set for the whole process or thread, and changes what other code computes or does."""
    yield "hooks for saved tensors", saved_tensor_hooks()
    yield "gradients", torch.is_grad_enabled()
    yield "autocast", torch.is_autocast_enabled("cpu")
    yield "default type", torch.get_default_dtype()
    yield "deterministic algorithms", torch.are_deterministic_algorithms_enabled()
    yield "threads", torch.get_num_threads()
    yield "trace function", sys.gettrace()
    yield "exception hook", sys.excepthook
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGCHLD):
        yield f"handler of {number.name}", signal.getsignal(number)


class Allocations(TorchDispatchMode):
    """Records the tensors created inside its `with` block, and the growth of Python's own memory."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: list[weakref.ref[Tensor]] = []
        self._grown = 0

    def __enter__(self) -> Self:
        gc.collect()
        tracemalloc.start()
        self._grown = -tracemalloc.get_traced_memory()[0]
        super().__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        gc.collect()
        self._grown += tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else (result,)
        self._tensors.extend(weakref.ref(each) for each in results if isinstance(each, Tensor))
        return result

    def kept(self) -> list[str]:
        """What is still held, in words."""
        alive = [tensor for ref in self._tensors if (tensor := ref()) is not None]
        held = [f"a tensor of {tensor.nbytes} bytes" for tensor in alive]
        return held + ([f"{self._grown} bytes of host memory"] if self._grown > HOST_BYTES else [])
