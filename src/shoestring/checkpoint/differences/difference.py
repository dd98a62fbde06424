"""The difference of a step: the data with which the step can be replayed on the state that preceded the step.

A difference holds four things. First, the averaged gradients that all ranks received, in the codec's compact form.
Second, the states after the step, except those that replaying the optimizer step recomputes (weights, optimizer state,
averages of weights). Third, the buffers that training has changed. Fourth, the other inputs of the step: progress, the
optimizer's settings, and the factor that corrected gradients for unequal numbers of targets on the ranks.
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
from shoestring.core.attachments import Attachments

_AVERAGE = "average "
_SAMPLE = 16  # approximate number of entries per tensor that are compared after a replayed step


@dataclass
class Basis:
    """The inputs of a step except for weights and averaged gradients."""

    progress: dict[str, Any]
    """Fields of `Progress` before the step."""
    unused: list[str]
    """Names of trained parameters that had no gradient."""
    options: int
    """Checksum of the optimizer's settings in this step, such as the learning rates of its parameter groups."""


@dataclass(eq=False)
class StepContent:
    """Describes steps of a job as differences, and replays steps from them."""

    attachments: Attachments
    averages: KeptAverages
    count: float = 0.0
    """Value of `Progress.count` after the newest step, which is the divisor of the next step's loss."""
    _samples: list[Tensor] = field(default_factory=list)
    _sampled: list[int] = field(default_factory=list)
    _buffers: list[tuple[str, nn.Module, str, tuple[int, int]]] = field(default_factory=list)
    """For each buffer of the model: its full name, its module, its name in the module, and its version at the beginning
    of this start of the run."""
    _changed: set[str] = field(default_factory=set)
    """Names of the buffers that the replayed steps changed, after the checkpoint from which this start resumed."""

    def begin(self) -> None:
        """Store the versions of all buffers and the count at the beginning of this start of the run."""
        self.count = self.attachments.progress.count
        self._buffers = []
        for path, module in self.attachments.module.named_modules():
            for key, buffer in module.named_buffers(recurse=False):
                name = f"{path}.{key}" if path else key
                # Kernels update running statistics without increasing the buffer's version, so such buffers are always
                # recorded.
                always = name in self._changed or getattr(module, "track_running_stats", False)
                self._buffers.append((name, module, key, (0, -1) if always else _version(buffer)))

    # -- a step -------------------------------------------------------------------------------------------------------

    def basis(self) -> Basis:
        """Return the inputs of the next optimizer step; called directly before the step."""
        progress = self.attachments.progress
        now = {"step": progress.step, "position": progress.position, "gain": progress.gain, "total": progress.total}
        unused = [name for name, tensor in self.attachments.trained.items() if tensor.grad is None]
        return Basis(now, unused, _options(self.attachments.optimizer.param_groups))

    def describe(self, basis: Basis) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return the difference of the newest step as (header, tensors); None if the step cannot be replayed."""
        averages, progress = self.averages.averages(), self.attachments.progress
        # The factor by which `core.step` multiplied averages, because the number of targets differed from the expected
        # number. It is 1 if gradients are not averaged during the backward pass, as in DDP, because such gradients are
        # corrected before the exchange.
        if not self.attachments.averages_in_backward or not progress.count:
            ratio = 1.0
        elif progress.unread is not None:  # on an accelerator, `count` is still the expected number
            ratio = progress.count / float(progress.unread[1])
        else:
            ratio = self.count / progress.count if self.count else None  # None: the expected number is not known
        self.count = progress.count
        if averages is None or ratio is None:
            return None
        tensors = {f"{_AVERAGE}{part}.{n}": data for part, group in enumerate(averages) for n, data in enumerate(group)}
        trees = {}
        for name, entry in self.attachments.kept.items():
            if entry.across != "shard":
                leaves: dict[str, Tensor] = {}
                trees[name] = encode(entry.state.state_dict(), root(name), leaves)
                tensors |= {f"state {path}": leaf for path, leaf in leaves.items()}
        tensors |= {f"buffer {name}": buffer for name, buffer, version in self._now() if _version(buffer) != version}
        tensors["sample"] = self.sample()
        header = {"basis": vars(basis), "ratio": ratio, "averages": [len(group) for group in averages], "trees": trees}
        return header, tensors

    def sample(self) -> Tensor:
        """Return the current values of a few entries of every trained tensor; two states are compared by these
        entries."""
        with torch.no_grad():
            trained = [tensor.detach() for tensor in self.attachments.trained.values() if tensor.numel()]
            places = [tensor.data_ptr() for tensor in trained]
            if places != self._sampled:  # the views stay valid as long as no tensor moves
                self._sampled = places
                flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in trained]
                self._samples = [entries[:: -(-len(entries) // _SAMPLE)] for entries in flat]
            return torch.cat(self._samples) if self._samples else torch.empty(0)

    # -- replaying ----------------------------------------------------------------------------------------------------

    def step(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
        """Replay a step from its difference; returns whether the resulting weights and settings equal the recorded
        weights and settings."""
        attachments, basis = self.attachments, Basis(**header["basis"])
        vars(attachments.progress).update(basis.progress)
        device = attachments.world.device
        averages = [
            [tensors[f"{_AVERAGE}{part}.{n}"].to(device) for n in range(count)]
            for part, count in enumerate(header["averages"])
        ]
        with self.averages.replayed(averages):
            for name, tensor in attachments.trained.items():
                if name in basis.unused:
                    tensor.grad = None
            if header["ratio"] != 1.0 and (gradients := attachments.gradients):
                exact = torch.tensor(header["ratio"], dtype=torch.float64, device=device)
                foreach_mul_(gradients, exact.float() if attachments.defers else header["ratio"])
            attachments.optimizer.step()
        same = _options(attachments.optimizer.param_groups) == basis.options
        attachments.optimizer.zero_grad(set_to_none=True)
        return same and torch.equal(self.sample().cpu(), tensors["sample"])

    def finish(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """After the last replayed step, load its recorded states and buffers, which replaying does not recompute."""
        there = header["trees"].keys() & self.attachments.kept.keys()
        for name in sorted(there, key=lambda name: name == "random"):  # random states last, as in `resume.load`
            state = decode(header["trees"][name], lambda path: tensors[f"state {path}"].clone())
            self.attachments.kept[name].state.load_state_dict(state)
        with torch.no_grad():
            for name, buffer in self.attachments.module.named_buffers():
                if (saved := tensors.get(f"buffer {name}")) is not None:
                    buffer.copy_(saved)
                    self._changed.add(name)

    def _now(self) -> Iterator[tuple[str, Tensor, tuple[int, int]]]:
        """Yield the name of each buffer that still exists, the buffer, and its version at the beginning of this start
        of the run."""
        for name, module, key, version in self._buffers:
            if (buffer := getattr(module, key, None)) is not None:
                yield name, buffer, version


def shared(name: str) -> bool:
    """Whether the name of a tensor in a difference marks it as an average, which is the same on all ranks."""
    return name.startswith(_AVERAGE)


def _version(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version


def _options(groups: Sequence[Mapping[str, Any]]) -> int:
    """Compute the checksum of the settings of an optimizer's parameter groups."""
    plain = [
        {key: float(value) if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in groups
    ]
    return crc32(json.dumps(plain, sort_keys=True, default=str).encode())
