"""Records the allocations of this process in windows, and stores the window with the highest peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shoestring.memory.tracing import native_table
from shoestring.memory.tracing.labels import ModuleNames, Named, labels, optimizer_state, own_modules, parts
from shoestring.memory.tracing.naming import Namer, is_inside, named
from shoestring.memory.tracing.recording import MemoryFacts, MemoryProfile, MemoryWindow, StepPeak

_STEPS = 512  # maximum number of entries in the list of steps; if exceeded, pairs of adjacent entries are merged


class AllocationRecorder:
    """Records the allocations of all threads from `start` to `stop`; a process can have only one active recorder.

    A window ends after each optimizer step, while gradients still exist. Blocks are named only if the window's peak is
    the highest so far, so recording costs little if all steps have similar peaks.

    Args:
        held: function that lists further named tensors, such as shards that the optimizer updates instead of
            parameters.
        freed: maximum number of freed blocks to record per window, for the timeline; blocks alive at the peak are
            always recorded.
        mimic: for tests: whether to treat the CPU allocator's reports to profilers as reports of an accelerator.
    """

    def __init__(self, held: Named | None = None, *, freed: int = 1 << 18, mimic: bool = False) -> None:
        self.held, self.freed, self.mimic = held, freed, mimic
        self.modules = ModuleNames()
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.inputs: list[tuple[str, weakref.ref[Tensor]]] = []
        self.windows: dict[int, MemoryWindow] = {}
        self.steps: dict[int, list[StepPeak]] = {}
        self.reserved: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self.step = 0
        self.hooks = ExitStack()
        self.library: Any = None

    def start(self) -> None:
        """Start recording.

        Raises:
            CompileError: there is no compiler, or Python's headers are missing.
            RuntimeError: allocations are being recorded already, or another library has replaced the CPU's allocator.
        """
        self.library = library = native_table.library()
        refused = library.allocations_start(int(torch.cuda.is_available()), int(self.mimic), self.freed)
        if refused:
            holder = (
                "being recorded in this process already" if refused == 1 else "served by another library's allocator"
            )
            raise RuntimeError(f"allocations are {holder}")
        # Report CPU tensors that already exist to the native observer.
        for tensor in own_modules(Tensor):
            with suppress(Exception):  # tensors without memory, such as fake tensors, raise errors
                for part in parts(tensor):
                    if part.device.type == "cpu":
                        self.library.allocations_adopt(part.untyped_storage()._cdata)
        self.modules.expect(own_modules())
        self.optimizers.update(own_modules(Optimizer))
        library.allocations_fold()
        self.depth = 0
        for hook in (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ):
            self.hooks.callback(hook.remove)

    def stop(self) -> MemoryProfile:
        """Stop recording, and return the recording."""
        self.hooks.close()
        self.fold()
        counts = native_table.counts()
        namer = Namer(self.modules)
        resident = 0
        with suppress(OSError, ValueError):  # the system may not report the peak of resident bytes
            lines = Path("/proc/self/status").read_text().splitlines()
            resident = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
        facts = MemoryFacts(
            steps={device_name(number): steps for number, steps in self.steps.items()},
            resident=resident,
            reserved={device_name(number): held for number, held in self.reserved.items()},
            used={device_name(number): used for number, used in self.used.items()},
            host=_pinned(),
            events=counts.events,
            failed=f"{counts.failed:,} bytes for {namer.of_context(counts.context, True)}" if counts.failed else "",
        )
        self.library.allocations_stop()
        return MemoryProfile({device_name(number): window for number, window in self.windows.items()}, facts)

    def fold(self) -> None:
        """End the current window, store the window if its peak is the highest so far, and begin the next window."""
        accelerators = torch.cuda.device_count() if torch.cuda.is_available() else int(self.mimic)
        devices = range(1 + min(accelerators, native_table.DEVICES - 1))  # 0 is the CPU
        totals = {number: native_table.device(number) for number in devices}
        higher = [
            number
            for number, device in totals.items()
            if device.peak and device.peak > (self.windows[number].peak if number in self.windows else 0)
        ]
        if higher:
            blocks, namer, counts = native_table.blocks(), Namer(self.modules), native_table.counts()
            where = labels(self._names())
            for number in higher:
                columns, names = named(blocks[blocks["device"] == number], counts.begun_at, where, namer)
                peak = totals[number].event
                self.windows[number] = MemoryWindow(columns, names, peak, self.step, counts.forgotten)
        for number, device in totals.items():
            if device.peak:
                self._count(number, StepPeak(self.step, 1, device.peak, device.total))
                if number in higher and number:
                    self.reserved[number] = device.reserved
                    self.used[number] = _used(number)
        self.library.allocations_fold()

    def largest(self) -> MemoryProfile:
        """End the current window, and return the recording so far."""
        self.fold()
        return MemoryProfile({device_name(number): window for number, window in self.windows.items()})

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        if torch.compiler.is_compiling():
            return
        number = self.modules.number(module)
        if number in self.modules.tops and is_inside(arguments):
            self.inputs = [(name, tensor) for name, tensor in self.inputs if tensor() is not None][-64:]
            for index, argument in enumerate(arguments):
                if isinstance(argument, Tensor):
                    self.inputs.append((f"argument {index} of the model", weakref.ref(argument)))
        self.library.allocations_enter(number)

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.library.allocations_leave(self.modules.number(module))

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        self.optimizers.add(optimizer)
        self.library.allocations_optimizer(1)

    def _after_update(self, *_: Any) -> None:
        self.library.allocations_optimizer(0)
        self.fold()
        self.step += 1

    # -- windows -----------------------------------------------------------------------------------------------------

    def _names(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (kind, name, tensor) of all tensors that currently have a name."""
        names: dict[int, str] = {}
        for kind, name, tensor in self.modules.held():
            if kind == "parameter":
                names[id(tensor)] = name
            yield kind, name, tensor
        for kind, name, tensor in self.held() if self.held else ():
            names[id(tensor)] = name
            yield kind, name, tensor
        yield from optimizer_state(self.optimizers, names)
        for name, reference in self.inputs:
            if (tensor := reference()) is not None:
                yield "input", name, tensor

    def _count(self, number: int, step: StepPeak) -> None:
        """Add the peak of a step; if there are too many entries, merge pairs of adjacent entries."""
        steps = self.steps.setdefault(number, [])
        steps.append(step)
        if len(steps) > _STEPS:
            pairs = zip(steps[::2], steps[1::2], strict=False)
            odd = steps[-1:] if len(steps) % 2 else []
            self.steps[number] = [
                replace(first, steps=first.steps + last.steps, peak=max(first.peak, last.peak), after=last.after)
                for first, last in pairs
            ] + odd


def device_name(number: int) -> str:
    """Torch's name of the CPU (0) or of accelerator `number` - 1."""
    return f"cuda:{number - 1}" if number else "cpu"


def _used(number: int) -> int:
    """Bytes of an accelerator's memory that all programs together use."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info(number - 1)
    return total - free


def _pinned() -> dict[str, int]:
    """Peak bytes of host memory that torch has pinned, as an entry of `MemoryFacts.host`; empty without CUDA."""
    if not torch.cuda.is_available():
        return {}
    with suppress(RuntimeError, AttributeError):
        held = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
        return {"pinned host memory": int(held)} if held else {}
    return {}
