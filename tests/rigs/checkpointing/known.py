"""A run whose state is a function of the step, so that whatever is restored can be told right from wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shoestring.checkpoint import Tiered
from shoestring.checkpoint.format.tree import encode
from shoestring.checkpoint.recovery.resume import resume
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.checkpoint.tiers.slots import slots_folder
from shoestring.checkpoint.tiers.tiered import Checkpointer
from shoestring.core.errors import CheckpointError
from shoestring.core.job import Kept
from shoestring.core.kept import Progress
from shoestring.core.world import World

STEPS = 11  # the newest is in own memory only, the one before on peers, and two of the earlier ones on disk
BETWEEN = 2  # steps between two checkpoints to disk only
PAGE = 4096  # bytes that a disk writes at once
REFUSALS = ("damaged or incomplete", "none of them can be used")  # of a run whose checkpoints are all damaged


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """A run."""

    folder: str
    ranks: int = 2
    local: int = 1
    """Ranks of a host."""
    peers: Literal["copy", "parity", "off"] = "copy"
    shared: bool = True
    """Whether the hosts have one disk."""
    peers_every: int = 2
    disk_every: int = 4

    @property
    def place(self) -> Path:
        return Path(self.folder)

    @property
    def hosts(self) -> int:
        return self.ranks // self.local

    def disk(self, host: int) -> Path:
        return self.place / "now" / ("saves" if self.shared else f"host-{host}") / "steps"

    def memory(self, host: int) -> Path:
        return self.place / "now" / f"memory-{host}"


@dataclass
class KnownState:
    """State that is a function of the step."""

    make: Callable[[int], dict[str, Any]]
    content: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.content = state_dict


def trained(checkpointer: Checkpointer, state: KnownState, progress: Progress, steps: Iterable[int]) -> None:
    """Save the states of these steps, each as far as it goes."""
    for step in steps:
        state.content, progress.step = state.make(step), step
        checkpointer.wait()
        checkpointer.capture(False)
        checkpointer.drain()


def common(mesh: DeviceMesh, step: int) -> dict[str, Any]:
    """What all ranks hold alike, and a tensor that they hold in uneven shards."""
    draw = torch.Generator().manual_seed(step)
    whole = torch.randn(4 * mesh.size() + 1, 300, generator=draw, dtype=torch.float64)
    mine = whole.tensor_split([-(-len(whole) // mesh.size()) * (r + 1) for r in range(mesh.size() - 1)])
    local = mine[mesh.get_local_rank()].contiguous()
    return {
        "weight": torch.randn(61, 129, generator=draw),
        "half": torch.randn(701, generator=draw).bfloat16(),
        "sharded": DTensor.from_local(local, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride()),
        "none": torch.empty(0, 3),
        "words": ["step", step, None, (True, 0.5)],
    }


def private(rank: int, step: int) -> dict[str, Any]:
    """What a rank has for itself."""
    draw = torch.Generator().manual_seed(1000 * rank + step)
    return {"bytes": torch.randint(256, (9000 + 977 * rank,), dtype=torch.uint8, generator=draw), "rank": rank}


@dataclass
class Trainee:
    """A rank: what it keeps, and its part in saving."""

    setting: RunSetup
    progress: Progress
    states: dict[str, KnownState]
    checkpointer: Checkpointer

    @classmethod
    def of(cls, setting: RunSetup, files: Files | None = None) -> Trainee:
        """A collective."""
        rank = dist.get_rank()
        world = World(rank, setting.ranks, rank % setting.local, setting.local)
        mesh = DeviceMesh("cpu", list(range(setting.ranks)))
        states = {"model": KnownState(partial(common, mesh)), "mine": KnownState(partial(private, rank))}
        host, progress = rank // setting.local, Progress()
        kept = {
            "model": Kept(states["model"], "shard", None),
            "mine": Kept(states["mine"], "own", None),
            "progress": Kept(progress, "same", None),
        }
        settings = Tiered(
            memory_every=1, peers_every=setting.peers_every, disk_every=setting.disk_every,
            folder=str(setting.disk(host)), memory_folder=str(setting.memory(host)),
            redundancy=setting.peers,
        )  # fmt: skip
        checkpointer = Checkpointer(
            kept, progress, world, settings, slots_folder(settings, world), set, files or Files()
        )
        return cls(setting, progress, states, checkpointer)

    def at(self, step: int) -> None:
        self.progress.step = step
        for state in self.states.values():
            state.content = state.make(step)

    def train(self, steps: int) -> None:
        """Save the states of so many steps, each as far as it goes."""
        for step in range(1, steps + 1):
            self.at(step)
            self.checkpointer.wait()
            self.checkpointer.capture(False)
            self.checkpointer.drain()

    def restored(self) -> tuple[int | None, str]:
        """Restore; the step that was claimed and what is wrong with what was loaded, or why nothing was."""
        self.at(0)
        try:
            step = resume(self.checkpointer, "auto")
        except CheckpointError as error:
            return None, "" if any(words in str(error) for words in REFUSALS) else str(error)
        if step is None:
            return None, "" if self.progress.step == 0 else "nothing was found, yet something loaded"
        good = self.progress.step == step and all(same(s.content, s.make(step)) for s in self.states.values())
        return step, "" if good else f"not the state of step {step}"


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states are equal, bit for bit."""
    leaves: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    trees = [encode(state, "", found) for state, found in zip((one, other), leaves, strict=True)]
    return trees[0] == trees[1] and all(_bits(leaf) == _bits(leaves[1][path]) for path, leaf in leaves[0].items())


def _bits(leaf: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
    return leaf.dtype, leaf.shape, local.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# -- checkpoints to disk only ------------------------------------------------------------------------------------------


def content(rank: int, step: int) -> dict[str, Any]:
    """What a rank keeps: a bit more than two pages."""
    draw = torch.Generator().manual_seed(1000 * rank + step)
    return {"bytes": torch.randint(256, (2 * PAGE + 100,), dtype=torch.uint8, generator=draw), "step": step}


def build_checkpointer(root: Path, rank: int, ranks: int, files: Files) -> tuple[Checkpointer, KnownState, Progress]:
    """A rank that saves to disk below `root`, in a folder of a folder that are not there yet."""
    state, progress = KnownState(partial(content, rank)), Progress()
    kept = {"mine": Kept(state, "own", None), "progress": Kept(progress, "same", None)}
    memory = root.with_name(f"{root.name}-memory-{rank}")
    settings = Tiered(
        folder=str(root / "run" / "saves"), memory_folder=str(memory), memory_every=BETWEEN, disk_every=BETWEEN,
        redundancy="off", keep=1,
    )  # fmt: skip
    world = World(rank, ranks, 0, 1)
    return Checkpointer(kept, progress, world, settings, slots_folder(settings, world), set, files), state, progress
