"""One step's difference: what ranks exchanged in it, and all other state as it was after it.

A difference holds, in their compact form, the averages that all ranks got; each state but those that the optimizer's
step makes again (weights, its own state, averages of weights); the buffers that training has changed; and what the step
depended on besides: progress, the optimizer's settings, and by what gradients were corrected for unequal counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoestring._torch import foreach_mul_
from shoestring.checkpoint.differences.averages import KeptAverages
from shoestring.checkpoint.format.checksum import crc32
from shoestring.checkpoint.format.tree import decode, encode, root
from shoestring.core.job import Job

_AVERAGE = "average "
_SAMPLE = 16  # entries of each tensor that tell whether a replayed step did what the step did


@dataclass
class Basis:
    """What a step depended on besides weights and averages."""

    progress: dict[str, Any]
    """As it was before the step."""
    unused: list[str]
    """Trained parameters without a gradient."""
    options: int
    """Of the optimizer's groups: a checksum of their rates and other settings in this step."""


@dataclass(eq=False)
class StepContent:
    """What differences of one job are made of, and put back into."""

    job: Job
    averages: KeptAverages
    count: float = 0.0
    """`Progress.count` after the newest step: what the next one divides by."""
    _samples: list[Tensor] = field(default_factory=list)
    _sampled: list[int] = field(default_factory=list)
    _buffers: list[tuple[str, nn.Module, str, tuple[int, int]]] = field(default_factory=list)
    """Name of a buffer, the module that has it, its name there, and its version when this start of the run began."""
    _changed: set[str] = field(default_factory=set)
    """Buffers that training has changed since the checkpoint that this start continues."""

    def begin(self) -> None:
        """Begin a start of the run, from the state as it is now."""
        self.count = self.job.progress.count
        self._buffers = []
        for path, module in self.job.module.named_modules():
            for key, buffer in module.named_buffers(recurse=False):
                name = f"{path}.{key}" if path else key
                always = name in self._changed or getattr(module, "track_running_stats", False)  # updated in secret
                self._buffers.append((name, module, key, (0, -1) if always else _version(buffer)))

    # -- a step -------------------------------------------------------------------------------------------------------

    def basis(self) -> Basis:
        """What the step that the optimizer is about to make depends on."""
        progress = self.job.progress
        now = {"step": progress.step, "position": progress.position, "gain": progress.gain, "total": progress.total}
        unused = [name for name, tensor in self.job.trained.items() if tensor.grad is None]
        return Basis(now, unused, _options(self.job.built_optimizer.param_groups))

    def _ratio(self) -> float | None:
        """What `core.step` multiplied the averages of DDP by, for ranks had counted other numbers of targets than
        expected; None where that is not known. Without DDP, gradients are corrected before they travel."""
        progress = self.job.progress
        if self.job.engine != "ddp" or not progress.count:
            return 1.0
        if progress.unread is not None:  # on an accelerator the expected count stays as it is
            return progress.count / float(progress.unread[1])
        return self.count / progress.count if self.count else None

    def describe(self, basis: Basis) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """(header, tensors) of the newest step's difference; None where it cannot be replayed."""
        averages, ratio = self.averages.averages(), self._ratio()
        self.count = self.job.progress.count
        if averages is None or ratio is None:
            return None
        tensors = {f"{_AVERAGE}{part}.{n}": each for part, of in enumerate(averages) for n, each in enumerate(of)}
        trees = {}
        for name, kept in self.job.kept.items():
            if kept.across != "shard":
                found: dict[str, Tensor] = {}
                trees[name] = encode(kept.state.state_dict(), root(name), found)
                tensors |= {f"state {path}": each for path, each in found.items()}
        tensors |= {f"buffer {name}": each for name, each, version in self._now() if _version(each) != version}
        tensors["sample"] = self.sample()
        header = {"basis": vars(basis), "ratio": ratio, "averages": [len(of) for of in averages], "trees": trees}
        return header, tensors

    def sample(self) -> Tensor:
        """A few entries of every trained tensor, as they are now."""
        with torch.no_grad():
            trained = [tensor.detach() for tensor in self.job.trained.values() if tensor.numel()]
            places = [tensor.data_ptr() for tensor in trained]
            if places != self._sampled:
                self._sampled = places
                flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in trained]
                self._samples = [each[:: -(-len(each) // _SAMPLE)] for each in flat]
            return torch.cat(self._samples) if self._samples else torch.empty(0)

    # -- replaying ----------------------------------------------------------------------------------------------------

    def step(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
        """Make a step again from its difference; whether it did the same as then."""
        job, basis = self.job, Basis(**header["basis"])
        vars(job.progress).update(basis.progress)
        device = job.world.device
        averages = [
            [tensors[f"{_AVERAGE}{part}.{n}"].to(device) for n in range(count)]
            for part, count in enumerate(header["averages"])
        ]
        with self.averages.replayed(averages):
            for name, tensor in job.trained.items():
                if name in basis.unused:
                    tensor.grad = None
            if header["ratio"] != 1.0 and (gradients := job.gradients):
                exact = torch.tensor(header["ratio"], dtype=torch.float64, device=device)
                foreach_mul_(gradients, exact.float() if job.defers else header["ratio"])
            job.built_optimizer.step()
        same = _options(job.built_optimizer.param_groups) == basis.options
        job.built_optimizer.zero_grad(set_to_none=True)
        return same and torch.equal(self.sample().cpu(), tensors["sample"])

    def finish(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take the states that replayed steps do not make, as they were after the last of them."""
        there = header["trees"].keys() & self.job.kept.keys()
        for name in sorted(there, key=lambda name: name == "random"):  # random numbers last, for the rest may draw some
            state = decode(header["trees"][name], lambda path: tensors[f"state {path}"].clone())
            self.job.kept[name].state.load_state_dict(state)
        with torch.no_grad():
            for name, buffer in self.job.module.named_buffers():
                if (saved := tensors.get(f"buffer {name}")) is not None:
                    buffer.copy_(saved)
                    self._changed.add(name)

    def _now(self) -> Iterator[tuple[str, Tensor, tuple[int, int]]]:
        """(name, buffer, version at first) of each buffer."""
        for name, module, key, version in self._buffers:
            if (buffer := getattr(module, key, None)) is not None:
                yield name, buffer, version


def shared(name: str) -> bool:
    """Whether a tensor of a difference is the same on all ranks."""
    return name.startswith(_AVERAGE)


def _version(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version


def _options(groups: Sequence[Mapping[str, Any]]) -> int:
    """A checksum of the numbers and words in an optimizer's groups."""
    plain = [
        {key: float(value) if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in groups
    ]
    return crc32(json.dumps(plain, sort_keys=True, default=str).encode())
