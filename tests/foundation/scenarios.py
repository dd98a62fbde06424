"""What two ranks do in one launch; each scenario's result goes into one JSON file, which the tests assert on."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import torch
import toy

from shoestring import comm, optim, parallel
from shoestring.checkpoint.format.state import unpack
from shoestring.core.compose import compose
from shoestring.core.errors import NonFiniteError, ShoestringError
from shoestring.core.job import Job, attachments_of
from shoestring.core.task import call_model
from shoestring.core.world import World
from shoestring.distributed.join import gloo_threads, join
from shoestring.run import parse
from shoestring.training.loop import train

STEPS = 20
SETTINGS = (optim.AdamW(lr=3e-3), optim.Clip(max_norm=0.5), optim.Schedule(warmup=5))


# -- equality ---------------------------------------------------------------------------------------------------------


def losses(world: World, *features, accumulate: int = 1, steps: int = STEPS) -> list[float]:
    """The losses of the global batches of `toy.batches`, cut as the loader cuts them."""
    torch.manual_seed(0)
    with Job(toy.model(), call_model, world=world) as job:
        job.progress.total = steps
        compose(job, [*features, *SETTINGS])
        result = []
        for inputs, targets in toy.batches(steps):
            cut = [part.reshape(accumulate, world.size, -1, toy.LENGTH)[:, world.rank] for part in (inputs, targets)]
            result.append(float(job.step(*zip(*cut, strict=True))))
        return result


def equality(world: World) -> dict[str, list[float]]:
    alone = World()
    return {
        "one": losses(alone),
        "one accumulating": losses(alone, accumulate=4),
        "ddp": losses(world, parallel.DDP()),
        "ddp small buckets": losses(world, parallel.DDP(bucket_mb=0.001)),
        "ddp accumulating": losses(world, parallel.DDP(), accumulate=2),
        "fsdp": losses(world, parallel.FSDP()),
        "fsdp keeping": losses(world, parallel.FSDP(reshard_after_forward=False)),
        "fsdp accumulating": losses(world, parallel.FSDP(), accumulate=2),
        "bf16": losses(world, parallel.DDP(), comm.BF16()),
    }


# -- the world --------------------------------------------------------------------------------------------------------


def exchanges(world: World) -> dict:
    def fail(rank: int) -> None:
        if world.rank == rank:
            raise ShoestringError("broken", hint="mend it")

    errors = []
    for rank in range(world.size):
        try:
            world.agree(lambda rank=rank: fail(rank))
        except ShoestringError as error:
            errors.append(str(error))
    return {
        "gather": [len(each) for each in world.gather(b"x" * 1000 * world.rank)],
        "nothing": [each.decode() for each in world.gather(b"")],
        "broadcast": world.broadcast(b"from the first" if world.first else None).decode(),
        "empty broadcast": world.broadcast(b"").decode(),
        "decide": world.decide(lambda: {"rank": world.rank}),
        "errors": errors,
    }


# -- a loss that is not finite on one rank ----------------------------------------------------------------------------


def poisoned(world: World) -> dict:
    torch.manual_seed(0)
    with compose(Job(toy.model(), world=world), [parallel.DDP(), optim.AdamW()]) as job:
        data = toy.batches(3)
        inputs, targets = data[0]
        half = slice(4 * world.rank, 4 * world.rank + 4)
        job.step((inputs[half], targets[half]))
        before = [parameter.clone() for parameter in attachments_of(job).parameters]
        attachments_of(job).loss = lambda output, batch: (
            output.sum() * (float("inf") if world.rank else 1.0),
            torch.tensor(4),
        )
        try:
            job.step((inputs[half], targets[half]))
            said = "nothing"
        except NonFiniteError as error:
            said = str(error)
        same = all(torch.equal(one, other) for one, other in zip(before, attachments_of(job).parameters, strict=True))
        return {"said": said, "weights kept": same, "step": job.progress.step}


def stopped(world: World) -> dict:
    """The second rank asks for the end: both see it after the same step."""
    torch.manual_seed(0)
    with compose(Job(toy.model(), world=world), [parallel.DDP(), optim.AdamW()]) as job:
        made = 0
        for inputs, targets in toy.batches(6):
            half = slice(4 * world.rank, 4 * world.rank + 4)
            if made == 3 and world.rank == 1:
                job.stop()
            job.step((inputs[half], targets[half]))
            made += 1
            if attachments_of(job).stopping:
                break
        return {"made": made}


# -- whole runs -------------------------------------------------------------------------------------------------------


def whole(world: World, folder: Path, area: dict, *, resume: Path | None = None, **settings) -> dict:
    """Train the toy on its samples; losses by step, ids by micro-batch, a hash of the last checkpoint's tensors."""
    toy.seen.clear()
    workers = settings.pop("workers", 0)
    document = {
        "run": {
            "model": "toy:model",
            "data": "toy:samples",
            "loss": "toy:recorded",
            "steps": 10,
            "batch": 8,
            "seed": 3,
            "folder": str(folder),
            "resume": str(resume) if resume else False,
        }
        | settings,
        "model": {"dropout": 0.2},
        "data": {"workers": workers},
        "optim": {"adamw": {"lr": 0.01}, "clip": {}, "schedule": {"warmup": 2}},
        "checkpoint": {"plain": {"every": 4, "keep": 9}},
    } | area
    train(parse(document, name="toy"), world)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"losses": {row["step"]: row["loss"] for row in rows}, "ids": list(toy.seen), "save": digest(folder, 10)}


def digest(folder: Path, step: int) -> dict[str, float]:
    """Exact sums of what the checkpoint of `step` holds for the model and the optimizer, by name."""
    shared = unpack(save(folder, step).read_bytes())["shared"]
    tensors = dict(shared["model"])
    for name, state in shared["optimizer"]["state"].items():
        tensors |= {f"{name}.{key}": value for key, value in state.items()}
    weights = {name: torch.arange(1, tensor.numel() + 1) for name, tensor in tensors.items()}
    return {name: float((tensor.double().flatten() * weights[name]).sum()) for name, tensor in tensors.items()}


def save(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}.safetensors"


SHARDINGS = {"ddp": {}, "fsdp": {"parallel": {"fsdp": {}}}}
CASES = [("ddp", 0, 1), ("ddp", 1, 2), ("fsdp", 1, 1), ("fsdp", 0, 2)]  # sharding, loader workers, micro-batches


def resumes(world: World, root: Path) -> dict:
    """Each case straight through, and from its checkpoint in the middle of the first epoch."""
    results = {}
    for sharding, workers, accumulate in CASES:
        name = f"{sharding} workers={workers} accumulate={accumulate}"
        options = {"workers": workers, "accumulate": accumulate}
        area, folder = SHARDINGS[sharding], root / name
        through = whole(world, folder, area, **options)
        again = whole(world, root / f"{name} again", area, resume=save(folder, 4), **options)
        results[name] = {"through": through, "again": again}
    return results


def changing_ranks(world: World, root: Path) -> list[list[list[int]]]:
    """The ids that all ranks saw in steps 1 to 4 of two ranks, 5 to 8 of one, 9 and 10 of two; by part and rank."""
    sharded = SHARDINGS["fsdp"]
    first = whole(world, root / "2", sharded)["ids"][:4]
    second: list[list[int]] = []
    if world.first:
        second = whole(World(), root / "1", {}, resume=save(root / "2", 4))["ids"][:4]
    world.barrier()
    third = whole(world, root / "2 again", sharded, resume=save(root / "1", 8))["ids"]
    return [[json.loads(one) for one in world.gather(json.dumps(part).encode())] for part in (first, second, third)]


def refused(world: World, root: Path) -> str:
    """A checkpoint of another model, resumed on both ranks."""
    try:
        whole(world, root / "wide", {"model": {"width": 24}}, resume=save(root / "2", 4))
    except ShoestringError as error:
        return str(error)
    return "nothing"


# -- golden losses ----------------------------------------------------------------------------------------------------


def corpus(folder: Path) -> str:
    """Ten files of words drawn by a linear congruential generator, so that no version of anything changes them."""
    folder.mkdir()
    state = 1
    for number in range(10):
        words = []
        for _ in range(400):
            state = (1103515245 * state + 12345) % 2**31
            words.append(("lorem", "ipsum", "dolor", "sit", "amet", "sed", "do", "ut")[state >> 28] + " " * (state % 2))
        (folder / f"{number}.txt").write_text("\n".join(words))
    return str(folder / "*.txt")


def golden(world: World, root: Path) -> dict:
    """The losses of 50 steps of a small GPT with everything the quickstart has, and what they depend on."""
    document = {
        "run": {"data": "", "steps": 50, "batch": 8, "seed": 1, "deterministic": True},
        "model": {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 64},
        "data": {"tokenizer": "bytes", "sequence": 32, "held_out": 0.2},
        "optim": {"adamw": {"lr": 0.004}, "clip": {}, "schedule": {"shape": "trapezoid", "warmup": 5, "final": 0.0}},
    }
    document["run"]["data"] = world.decide(lambda: corpus(root / "corpus"))
    results: dict = {"fingerprint": fingerprint()}
    for name, of in (("one", World()), ("two", world)):
        if of.size == world.size or world.first:
            document["run"]["folder"] = str(root / f"golden {name}")
            train(parse(document, name="golden"), of)
            rows = map(json.loads, (root / f"golden {name}" / "metrics.jsonl").read_text().splitlines())
            results[name] = [row["loss"] for row in rows if "loss" in row]
        world.barrier()
    torch.use_deterministic_algorithms(False)
    return results


def fingerprint() -> dict[str, object]:
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def main(out: Path) -> None:
    torch.set_num_threads(1)
    with join() as world:
        results = {
            "equality": equality(world),
            "exchanges": exchanges(world),
            "poisoned": [json.loads(one) for one in world.gather(json.dumps(poisoned(world)).encode())],
            "stopped": [json.loads(one) for one in world.gather(json.dumps(stopped(world)).encode())],
            "resumes": resumes(world, out.parent),
            "changing": changing_ranks(world, out.parent),
            "refused": refused(world, out.parent),
            "threads": [int(one) for one in world.gather(str(len(gloo_threads())).encode())],
            "golden": golden(world, out.parent),
        }
        if world.first:
            out.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
