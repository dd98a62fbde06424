"""Names the tensors that a program holds: parameters and buffers of modules, gradients, and optimizer state."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoestring._torch import is_fake
from shoestring.sharded import is_sharded

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


class Label(NamedTuple):
    """A named tensor and its place in memory."""

    address: int
    """Address of the storage."""
    offset: int
    """Offset of the tensor in the storage, in bytes."""
    nbytes: int
    kind: str
    name: str


Named = Callable[[], Iterable[tuple[str, str, Tensor]]]
"""Function that lists (kind, name, tensor) of the tensors held at the time of the call."""


def own_modules(kind: type = nn.Module) -> list[Any]:
    """All living objects of a type, such as modules or optimizers, found through the garbage collector."""
    # Not isinstance, because isinstance may run a __class__ property of a foreign object.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


def roots(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The outermost modules among `modules`: modules that are not a child of another module."""
    modules = list(modules)
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    return [module for module in modules if id(module) not in inner]


def plain(name: str) -> str:
    """Strip the parts that wrappers add from the name of a module or parameter."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside the wrappers DDP and torch.compile."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(inner := module._modules.get("_orig_mod"), nn.Module):
            module = inner
        else:
            return module


@dataclass(eq=False)
class ModuleNames:
    """Assigns numbers and names to all modules that run; a name is the module's path in its outermost module.

    Names in the first outermost module that runs are plain paths; names in any other outermost module begin with that
    module's type.
    """

    names: list[str] = field(default_factory=lambda: [""])
    """Names of the modules in the order of their numbers; number 0 means "no module"."""
    wires: set[int] = field(default_factory=set)
    """Numbers of wrapper modules that only exchange gradients."""
    tops: set[int] = field(default_factory=set)
    """Numbers of the outermost modules."""
    roots: list[weakref.ref[nn.Module]] = field(default_factory=list)
    """Outermost modules that ran."""
    waiting: list[weakref.ref[nn.Module]] = field(default_factory=list)
    """Outermost modules that have not run yet."""
    _numbers: dict[int, tuple[weakref.ref[nn.Module], int]] = field(default_factory=dict)

    def number(self, module: nn.Module) -> int:
        """Return a module's number; an unknown module outside all modules in `waiting` becomes an outermost module."""
        known = self._numbers.get(id(module))
        if known is None:
            holder = next(
                (root for root in _alive(self.waiting) if any(inner is module for inner in root.modules())), None
            )
            self.add_root(module if holder is None else holder)
            if id(module) not in self._numbers:  # the module was moved, or was added to its parent later
                self._add(module, type(module).__name__)
            known = self._numbers[id(module)]
        return known[1]

    def expect(self, modules: Iterable[nn.Module]) -> None:
        """Add modules that may run later to `waiting`."""
        self.waiting += [weakref.ref(module) for module in roots(modules)]

    def add_root(self, module: nn.Module) -> None:
        """Assign numbers and names to an outermost module and to all modules in it."""
        inner = unwrapped(module)
        if inner is not module and id(module) not in self._numbers:
            self._add(module, type(module).__name__)
            self.wires.add(self._numbers[id(module)][1])
        if id(inner) in self._numbers:
            return
        self.roots.append(weakref.ref(inner))
        title = self._title(inner)
        for path, child in inner.named_modules():
            if id(child) not in self._numbers:
                self._add(child, (plain(path) and title + plain(path)) or type(inner).__name__)
        self.tops.add(self._numbers[id(inner)][1])

    def _title(self, root: nn.Module) -> str:
        """Prefix of the names of the modules in an outermost module."""
        return "" if self.alive()[:1] == [root] else f"{type(root).__name__}: "

    def _add(self, module: nn.Module, name: str) -> None:
        key, numbers = id(module), self._numbers
        numbers[key] = weakref.ref(module, lambda _: numbers.pop(key, None)), len(self.names)
        self.names.append(name)

    def alive(self) -> list[nn.Module]:
        """The outermost modules that ran and still exist."""
        return _alive(self.roots)

    def held(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (kind, name, tensor) of all parameters, gradients and buffers."""
        ran = self.alive()
        for root in [*ran, *(module for module in map(unwrapped, _alive(self.waiting)) if module not in ran)]:
            title = self._title(root)
            for path, parameter in root.named_parameters():
                name = title + plain(path)
                yield "parameter", name, parameter
                if parameter.grad is not None:
                    yield "gradient", name, parameter.grad
            for path, buffer in root.named_buffers():
                yield "buffer", title + plain(path), buffer


def _alive(references: Iterable[weakref.ref[nn.Module]]) -> list[nn.Module]:
    modules = (reference() for reference in references)
    return [module for module in modules if module is not None]


STEPPED = "what the optimizer steps"
"""Suffix, in parentheses, that is added to a parameter's name for a tensor that the optimizer updates instead of the
parameter. Names of optimizer state lack this suffix, so that optimizer state has the same name in runs with and without
such tensors."""


def optimizer_state(optimizers: Iterable[Optimizer], names: Mapping[int, str]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (kind, name, tensor) of optimizer state, and of updated tensors that are not parameters of a module.

    Args:
        names: maps the ids of parameters to their names.
    """
    for optimizer in optimizers:
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(stepped):
            name = names.get(id(parameter), "")
            if not name:
                name = f"{type(optimizer).__name__}: tensor {index}"
                yield "optimizer state", f"{name} (stepped in place of a parameter)", parameter
                if parameter.grad is not None:
                    yield "gradient", name, parameter.grad
            for key, value in _tensors(optimizer.state.get(parameter, {})):
                yield "optimizer state", f"{name.removesuffix(f' ({STEPPED})')}.{key}", value


def _tensors(state: Any, key: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) of the tensors in a nested state."""
    if isinstance(state, Tensor):
        yield key, state
    elif isinstance(state, Mapping):
        for inner, value in state.items():
            yield from _tensors(value, f"{key}.{inner}" if key else str(inner))
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from _tensors(value, f"{key}.{index}")


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors in a tensor: itself, a DTensor's local shard, or the parts of a quantized tensor."""
    if is_sharded(tensor):
        with torch.no_grad():
            yield from parts(tensor.to_local())
    elif flatten := getattr(tensor, "__tensor_flatten__", None):
        for name in flatten()[0]:
            yield from parts(getattr(tensor, name))
    elif tensor.layout == torch.strided and tensor.device.type != "meta" and not is_fake(tensor):
        yield tensor


def labels(held: Iterable[tuple[str, str, Tensor]]) -> list[Label]:
    """Make labels of named tensors; if several tensors are at the same address, the first name is used."""
    by_place: dict[tuple[int, int], Label] = {}
    for kind, name, tensor in held:
        for part in parts(tensor):
            if not part.numel():
                continue
            try:
                base = part.untyped_storage().data_ptr()
                offset = part.data_ptr() - base
            except RuntimeError:  # a library's wrapper that claims to be strided, but has no storage
                continue
            if (base, offset) not in by_place:
                by_place[base, offset] = Label(base, offset, part.numel() * part.element_size(), kind, name)
    return list(by_place.values())
