"""What ranks of a pool do for the bars of safety; arguments and results are of JSON types."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoestring import optim, parallel
from shoestring.checkpoint.format.state import pack, unpack
from shoestring.core.compose import compose
from shoestring.core.feature import Feature
from shoestring.core.job import Job
from shoestring.core.kept import Progress
from shoestring.core.world import World
from shoestring.models.gpt import tiny
from shoestring.testing.scenarios import decode

VOCABULARY, SEQUENCE = 64, 16
UNSENT = ("residual", "unsent", "velocity")  # kinds of state that the model has yet to be given


def equal(model: nn.Module) -> bool:
    """Whether all ranks have the same weights, bit by bit."""
    content = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    digest = torch.frombuffer(bytearray(hashlib.sha256(content).digest()), dtype=torch.uint8)
    digests = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, digest)
    return all(torch.equal(other, digest) for other in digests)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens that follow each other by a rule, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    first = torch.randint(VOCABULARY, (4, 1), generator=generator)
    tokens = (first + 3 * torch.arange(SEQUENCE + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def job(feature: Feature, total: int) -> Job:
    torch.manual_seed(0)
    model = tiny(vocab_size=VOCABULARY, context=SEQUENCE, dim=32, layers=2, hidden=64)
    of_its_own = "OPTIM" in [seam.name for seam in feature.seams]
    features: list[Feature] = [feature] if of_its_own else [feature, optim.AdamW(lr=3e-3)]
    if "WIRE" in [seam.name for seam in feature.seams]:
        features.append(parallel.DDP(bucket_mb=0.02))
    return compose(Job(model, progress=Progress(total=total), world=World.current()), features)


def train(*, feature: Mapping[str, Any], steps: int, every: int) -> dict[str, Any]:
    """Steps after which replicas differed, where they must not; and losses."""
    differing, losses = [], []
    with job(decode(feature), steps) as running:
        for step in range(steps):
            losses.append(float(running.step(batch(step, running.world.rank))))
            if (step + 1) % every == 0 and not equal(running.model):
                differing.append(step)
    return {"differing": differing, "losses": losses}


def leave(*, feature: Mapping[str, Any], steps: int, folder: str) -> bool:
    """Train, and leave what the exchange keeps in the folder, one file a rank."""
    with job(decode(feature), 0) as running:
        for step in range(steps):
            running.step(batch(step, running.world.rank))
        content = pack(running.kept["comm"].state.state_dict())
        (Path(folder) / f"{running.world.rank}").write_bytes(content)
    return True


def join(*, feature: Mapping[str, Any], former: int, folder: str) -> dict[str, Any]:
    """Go on with other ranks: how far the mean of what is kept is off what it was, relatively; and equal replicas."""
    states = [unpack((Path(folder) / f"{rank}").read_bytes()) for rank in range(former)]
    with job(decode(feature), 0) as running:
        kept, world = running.kept["comm"], running.world
        assert kept.merge is not None
        kept.state.load_state_dict(kept.merge(states, world.rank, world.size))
        off = difference([state["codec"] for state in states], kept.state.state_dict()["codec"])
        replicas = []
        for step in range(5):
            running.step(batch(100 + step, world.rank))
            replicas.append(equal(running.model))
    return {"off": off, "has_residual": any(kind in states[0]["codec"] for kind in UNSENT), "equal": all(replicas)}


def difference(before: Sequence[Mapping[str, Any]], now: Mapping[str, Any]) -> float:
    """Of the means over ranks of all residuals: the largest difference, over the largest entry."""
    worst = 0.0
    pairs = [(kind, name) for kind in UNSENT for name in before[0].get(kind, {})]
    for kind, name in pairs:
        was = torch.stack([state[kind][name].double() for state in before]).mean(0)
        mean = now[kind][name].double().clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        worst = max(worst, float((mean - was).abs().max() / was.abs().max().clamp_min(1e-30)))
    return worst
