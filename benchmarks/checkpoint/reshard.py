"""What any number of ranks saved is loaded by any other number, bitwise, and in little more memory than it fills."""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import os
import re
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from benchmarks.harness import Bar, Deadline, Measured
from shoestring.checkpoint import Tiered
from shoestring.checkpoint.format.checksum import CHUNK
from shoestring.core.compose import compose
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.core.world import World
from shoestring.parallel import DDP, FSDP
from tests.rigs.checkpointing.trainee import PATIENCE, fresh

SHAPES = ((5, 7), (1, 3), (3, 5, 2), (13, 3), (8, 8), (2, 1), (17,), (1,), ())
MOST = 8


class Odd(nn.Module):
    """Parameters of uneven shapes, most of which no number of ranks divides; and one larger one."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(7)
        self.all = nn.ParameterList(torch.randn(shape or (1,), generator=drawn) for shape in SHAPES)
        self.large = nn.Parameter(torch.randn(rows, 64, generator=drawn))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, batch: Tensor) -> Tensor:
        return sum((each.sum() for each in self.all), batch.mean()) + (batch @ self.large.t()[:, :8]).square().mean()


def job_of(folder: Path, memory: Path, under: str, rows: int, **settings: Any) -> Job:
    world = World.current()
    features = [FSDP() if under == "fsdp" else DDP(), Tiered(folder=str(folder), memory_folder=str(memory), **settings)]
    if world.size == 1:
        features = features[1:]
    job = Job(
        Odd(rows),
        forward=lambda model, batch: model(batch),
        loss=lambda output, batch: (output, torch.tensor(1)),
        optimizer=partial(AdamW, lr=1e-2),
        progress=Progress(total=3),
        world=world,
    )
    return compose(job, features)


def digest(job: Job) -> str:
    """Of the whole state, gathered."""
    found = hashlib.sha256()
    names = {id(parameter): name for name, parameter in attachments_of(job).module.named_parameters()}
    state = {names[id(p)]: s for p, s in job.optimizer.state.items()}
    tensors = [tensor for _, tensor in sorted(attachments_of(job).module.state_dict().items())]
    tensors += [value for name in sorted(state) for _, value in sorted(state[name].items())]
    for tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.update(whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def rank_of(text: str, rank: int) -> None:
    """One rank: train and save, or load from each of several folders."""
    task = json.loads(text)
    place, ranks = Path(task["folder"]), task["ranks"]
    with (place / "said.txt").open("ab") as said:
        os.dup2(said.fileno(), 2)
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    torch.set_num_threads(1)
    meeting = place / f"meeting-{task['what']}-{ranks}"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    found: dict[str, Any] = {}
    for of in task["of"]:
        folder, memory = place / f"saves-{of}", place / f"memory-{of}"
        settings = {"memory_every": 2, "peers_every": 0, "disk_every": 0}
        with closing(job_of(folder, memory, task["under"], task["rows"], **settings)) as job:
            if task["what"] == "save":
                for _ in range(2):  # the third would be the last, which leaves nothing in memory
                    job.step(torch.ones(8, 64))
                found[of] = digest(job)
                if task["disk"]:
                    job.stop()
                    job.step(torch.ones(8, 64))
                    found[of] = digest(job)
            else:
                meter = Peak()
                assert job.restore is not None
                with meter:
                    step = job.restore("auto")
                found[of] = [step, digest(job), meter.added]
    (place / f"{task['what']}-{ranks}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


class Peak:
    """The most private memory that this process had within a block, beyond what it has after it; bytes.

    After it, for a new optimizer has no state before it is loaded.
    """

    def __enter__(self) -> Peak:
        self._most, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.0005):
            self._most = max(self._most, private_bytes())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        gc.collect()
        self.added = self._most - private_bytes()


def private_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def launch(task: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank of a task found.

    Raises:
        RuntimeError: a rank failed.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["benchmarks.checkpoint.reshard"])
    ranks = [server.Process(target=rank_of, args=(json.dumps(task), rank)) for rank in range(task["ranks"])]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(2 * PATIENCE)
        rank.kill()
    place = Path(task["folder"])
    if any(rank.exitcode for rank in ranks):
        raise RuntimeError((place / "said.txt").read_text()[-2000:])
    paths = [place / f"{task['what']}-{task['ranks']}-{rank}.json" for rank in range(task["ranks"])]
    return [json.loads(path.read_text()) for path in paths]


def pairs(folder: Path, sizes: range, *, disk: bool, under: str = "fsdp", rows: int = 9) -> dict[tuple[int, int], bool]:
    """Whether what so many ranks saved was loaded bitwise by so many others, for all pairs of sizes."""
    base = {"folder": str(fresh(folder)), "under": under, "rows": rows, "disk": disk}
    saved = {size: launch({**base, "what": "save", "ranks": size, "of": [size]})[0][str(size)] for size in sizes}
    found = {}
    for size in sizes:
        for loaded in launch({**base, "what": "load", "ranks": size, "of": list(sizes)}):
            for of, (step, digest, _) in loaded.items():
                good = digest == saved[int(of)] and step == (3 if disk else 2)
                found[int(of), size] = found.get((int(of), size), True) and good
    return found


def extra_memory(folder: Path, before: int, after: int, rows: int) -> tuple[int, int]:
    """(bytes that loading took at its peak, bytes of a rank's shard of the state), on the rank that took most."""
    base = {"folder": str(fresh(folder)), "under": "fsdp", "rows": rows, "disk": True}
    launch({**base, "what": "save", "ranks": before, "of": [before]})
    loaded = launch({**base, "what": "load", "ranks": after, "of": [before]})
    shard = 3 * 4 * 64 * -(-rows // after)
    return max(found[str(before)][2] for found in loaded), shard


def rows(cache: Path | None = None) -> list[Bar]:
    """The bars."""

    def all_pairs(deadline: Deadline) -> Measured:
        found: dict[str, bool] = {}
        with TemporaryDirectory() as folder:
            for disk in (True, False):
                deadline.check()
                place = "disk" if disk else "memory"
                equal = pairs(Path(folder) / "saves", range(1, MOST + 1), disk=disk)
                found |= {f"{before} to {after} from {place}": good for (before, after), good in equal.items()}
        bad = [pair for pair, good in found.items() if not good]
        return Measured(1 - len(bad) / len(found), f"{len(found)} pairs{'; not: ' * bool(bad)}{', '.join(bad[:5])}")

    def memory(deadline: Deadline) -> Measured:
        with TemporaryDirectory() as folder:
            most = [extra_memory(Path(folder) / "saves", before, after, 120_000) for before, after in ((2, 3), (3, 2))]
        told = ", ".join(f"{extra / 1e6:.1f} MB for a shard of {shard / 1e6:.1f} MB" for extra, shard in most)
        return Measured(max(extra / (shard + CHUNK) for extra, shard in most), told)

    return [
        Bar(
            "checkpoint.reshard",
            "state under FSDP with uneven shapes, saved by 1 to 8 ranks and loaded by 1 to 8, from memory and disk: "
            "share of pairs in which all of it is equal bit for bit",
            ">=",
            1.0,
            all_pairs,
            kind="exact",
        ),
        Bar(
            "checkpoint.reshard-memory",
            "private memory at the peak of loading under another number of ranks beyond what is left after it, over a "
            "shard and a chunk",
            "<=",
            1.0,
            memory,
            kind="exact",
        ),
    ]
