"""Lists the resources that a process and a model hold, so that a test can compare them before and after a job."""

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

from shoestring.distributed.join import wait_for_gloo_threads
from shoestring.testing._torch import TorchDispatchMode, global_module_hooks, process_groups, saved_tensor_hooks

HOST_BYTES = 1 << 20  # growth of Python's memory in bytes that does not count as a leak


def held_resources(model: nn.Module | None, optimizers: Iterable[Optimizer] = ()) -> Counter[str]:
    """Count all resources that are held now, by name; `after - before` counts the resources taken and not released."""
    gc.collect()
    held = Counter(_process_resources())
    if model is not None:
        held.update(_model_resources(model))
    for optimizer in optimizers:
        held.update(_hooks(vars(optimizer), "the optimizer"))
    return held


@contextmanager
def fresh_garbage() -> Iterator[None]:
    """Context in which garbage collection examines only objects made in the context, about 100 times faster."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def tensors_in_cycles() -> Iterator[list[str]]:
    """Context that yields a list; at its end, the list gets a description of the tensors left in reference cycles.

    Such tensors are only freed by the garbage collector, which does not know how large they are: until the collector
    happens to run, the activations of several steps are in memory.
    """
    descriptions = list[str]()
    gc.collect()
    enabled, flags = gc.isenabled(), gc.get_debug()
    gc.disable()
    try:
        yield descriptions
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        sizes = Counter(tuple(one.shape) for one in gc.garbage if issubclass(type(one), Tensor) and one.nbytes)
        descriptions += [f"{number} tensor(s) {shape} in a reference cycle" for shape, number in sizes.items()]
    finally:
        gc.set_debug(flags)
        gc.garbage.clear()
        if enabled:
            gc.enable()


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
        except OSError:  # the descriptor with which the folder was listed is closed by now
            continue


def _children() -> Iterator[str]:
    for entry in Path("/proc/self/task").glob("*/children"):
        try:
            yield from entry.read_text().split()
        except OSError:  # the thread has ended in the meantime
            continue


def _settings() -> Iterator[tuple[str, object]]:
    """Yield the name and value of settings of the process or thread that affect other code, such as autocast."""
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
    """Context that records the tensors created inside it, and the growth of Python's memory."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: list[weakref.ref[Tensor]] = []
        self._grown = 0

    def __enter__(self) -> Self:
        gc.collect()
        wait_for_gloo_threads()  # CPython crashes if a thread frees memory while tracing starts or stops (gh-128679)
        tracemalloc.start()
        self._grown = -tracemalloc.get_traced_memory()[0]
        super().__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        gc.collect()
        wait_for_gloo_threads()
        self._grown += tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else (result,)
        self._tensors.extend(weakref.ref(tensor) for tensor in results if isinstance(tensor, Tensor))
        return result

    def kept(self) -> list[str]:
        """Describe the tensors from inside the context that still exist, and the growth of Python's memory."""
        alive = [tensor for ref in self._tensors if (tensor := ref()) is not None]
        held = [f"a tensor of {tensor.nbytes} bytes" for tensor in alive if tensor.nbytes]  # torch keeps empty tensors
        return held + ([f"{self._grown} bytes of host memory"] if self._grown > HOST_BYTES else [])
