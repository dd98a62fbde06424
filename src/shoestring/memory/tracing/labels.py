"""Names of the tensors that a program holds: its modules' parameters and buffers, gradients, and optimizer state."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoestring._torch import is_fake

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


class Label(NamedTuple):
    """A tensor in memory."""

    address: int
    """Of the storage."""
    offset: int
    nbytes: int
    kind: str
    name: str


Named = Callable[[], Iterable[tuple[str, str, Tensor]]]
"""Gives (kind, name, tensor) of what is held when it is called."""


def own_modules(kind: type = nn.Module) -> list[Any]:
    """All modules (or optimizers) that are alive, as the garbage collector knows them."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def roots(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those that are in no other."""
    modules = list(modules)
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    return [module for module in modules if id(module) not in inner]


def plain(name: str) -> str:
    """A name without what wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unwrapped(module: nn.Module) -> nn.Module:
    """The program's own module below wrappers that take the whole model."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(inner := module._modules.get("_orig_mod"), nn.Module):
            module = inner
        else:
            return module


@dataclass(eq=False)
class ModuleNames:
    """Every module that ran has a number and a name: its path in the outermost module that holds it.

    The first of several outermost modules to run has plain names; the others have their type before them.
    """

    names: list[str] = field(default_factory=lambda: [""])
    wires: set[int] = field(default_factory=set)
    """Numbers of modules that only exchange gradients."""
    tops: set[int] = field(default_factory=set)
    """Numbers of the outermost modules."""
    roots: list[weakref.ref[nn.Module]] = field(default_factory=list)
    waiting: list[weakref.ref[nn.Module]] = field(default_factory=list)
    """Outermost modules that did not run yet."""
    _numbers: dict[int, tuple[weakref.ref[nn.Module], int]] = field(default_factory=dict)

    def number(self, module: nn.Module) -> int:
        """The number of a module; one that was not known before is the outermost of its own."""
        found = self._numbers.get(id(module))
        if found is None:
            holder = next(
                (root for root in _alive(self.waiting) if any(each is module for each in root.modules())), None
            )
            self.add_root(module if holder is None else holder)
            if id(module) not in self._numbers:  # it was taken out of where it was, or added later
                self._add(module, type(module).__name__)
            found = self._numbers[id(module)]
        return found[1]

    def expect(self, modules: Iterable[nn.Module]) -> None:
        """Know modules that may run."""
        self.waiting += [weakref.ref(module) for module in roots(modules)]

    def add_root(self, module: nn.Module) -> None:
        """BlockName a module and all those in it."""
        inner = unwrapped(module)
        if inner is not module and id(module) not in self._numbers:
            self._add(module, type(module).__name__)
            self.wires.add(self._numbers[id(module)][1])
        if id(inner) in self._numbers:
            return
        self.roots.append(weakref.ref(inner))
        title = self._title(inner)
        for path, each in inner.named_modules():
            if id(each) not in self._numbers:
                self._add(each, (plain(path) and title + plain(path)) or type(inner).__name__)
        self.tops.add(self._numbers[id(inner)][1])

    def _title(self, root: nn.Module) -> str:
        return "" if self.alive()[:1] == [root] else f"{type(root).__name__}: "

    def _add(self, module: nn.Module, name: str) -> None:
        key, numbers = id(module), self._numbers
        numbers[key] = weakref.ref(module, lambda _: numbers.pop(key, None)), len(self.names)
        self.names.append(name)

    def alive(self) -> list[nn.Module]:
        """The outermost modules that ran."""
        return _alive(self.roots)

    def held(self) -> Iterator[tuple[str, str, Tensor]]:
        """Kind, name and tensor of all parameters, gradients and buffers."""
        ran = self.alive()
        for root in [*ran, *(each for each in map(unwrapped, _alive(self.waiting)) if each not in ran)]:
            title = self._title(root)
            for path, parameter in root.named_parameters():
                name = title + plain(path)
                yield "parameter", name, parameter
                if parameter.grad is not None:
                    yield "gradient", name, parameter.grad
            for path, buffer in root.named_buffers():
                yield "buffer", title + plain(path), buffer


def _alive(references: Iterable[weakref.ref[nn.Module]]) -> list[nn.Module]:
    found = (each() for each in references)
    return [module for module in found if module is not None]


STEPPED = "what the optimizer steps"
"""Stands behind a parameter's name for what is stepped in its place. State has the parameter's name alone, so that two
runs with and without such tensors differ by what they have more of."""


def optimizer_state(optimizers: Iterable[Optimizer], names: Mapping[int, str]) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, name and tensor of optimizers' state, and of what they step that is no parameter of a module.

    Args:
        names: of parameters, by their id.
    """
    for optimizer in optimizers:
        stepped = [each for group in optimizer.param_groups for each in group["params"]]
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
    if isinstance(state, Tensor):
        yield key, state
    elif isinstance(state, Mapping):
        for inner, value in state.items():
            yield from _tensors(value, f"{key}.{inner}" if key else str(inner))
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from _tensors(value, f"{key}.{index}")


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory of their own that a tensor is made of: a shard, or what a quantized one packs."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            yield from parts(tensor.to_local())
    elif flatten := getattr(tensor, "__tensor_flatten__", None):
        for name in flatten()[0]:
            yield from parts(getattr(tensor, name))
    elif tensor.layout == torch.strided and tensor.device.type != "meta" and not is_fake(tensor):
        yield tensor


def labels(held: Iterable[tuple[str, str, Tensor]]) -> list[Label]:
    """Where named tensors lie; of two in one place the first."""
    found: dict[tuple[int, int], Label] = {}
    for kind, name, tensor in held:
        for part in parts(tensor):
            if not part.numel():
                continue
            try:
                base = part.untyped_storage().data_ptr()
                offset = part.data_ptr() - base
            except RuntimeError:  # a wrapper of some library, which says that it is strided and has no storage
                continue
            if (base, offset) not in found:
                found[base, offset] = Label(base, offset, part.numel() * part.element_size(), kind, name)
    return list(found.values())
