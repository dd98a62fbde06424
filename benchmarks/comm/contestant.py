"""A model in training by one method, in a loop that is the same for all and knows nothing of shoestring."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from benchmarks.comm import peers
from benchmarks.comm.methods import Method
from benchmarks.comm.spec import Spec
from shoestring import comm
from shoestring.comm.exchange.wire import Wire
from shoestring.core.compose import attach
from shoestring.core.job import Job, attachments_of
from shoestring.core.task import call_model
from shoestring.core.world import World
from shoestring.models.gpt import GPT
from shoestring.optim.muon import MuonAdamW, not_matrices

WARMUP = 20  # steps of linear rise; then the rate is constant, so that a run of any length is a part of a longer one
CLIP = 1.0


class Contestant:
    """One method's model, optimizer and data on this rank."""

    def __init__(self, method: Method, spec: Spec, folder: Path, world: World) -> None:
        self.method, self.world, self.steps = method, world, 0
        self.cooling = spec.cool * spec.horizon  # steps before the end
        self.horizon = spec.horizon
        self.module = spec.setting.model(spec.seed)
        self.batches = spec.setting.batches(folder, world.rank, world.size, spec.seed)
        self.examples = spec.setting.examples(folder, world.rank, world.size)
        self.model: nn.Module = self.module
        if method.ddp:
            self.model = DistributedDataParallel(
                self.module,
                bucket_cap_mb=method.bucket_mb,
                gradient_as_bucket_view=True,
            )
        self.optimizer = OPTIMIZERS[method.optimizer](self.module, method.lr)
        self.epfml: peers.Epfml | None = None
        self.job: Job | None = None

    def step(self) -> float:
        """One step on the next batch: the loss on this rank's part, before it."""
        self._warm_up()
        batch = next(self.batches)
        output = (
            call_model(self.model, batch) if self.job is None else attachments_of(self.job).forward(self.model, batch)
        )
        loss = F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        if self.method.kind == "sync":
            dist.barrier()
        if self.epfml is not None:
            self.epfml.step(self.optimizer, CLIP)
        else:
            nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.steps += 1
        return float(loss.detach())

    def held_out(self) -> float:
        """The loss over all ranks' held-out sequences, nats a token."""
        with torch.no_grad():
            output = self.module(self.examples["inputs"])
            loss = F.cross_entropy(output.flatten(0, 1), self.examples["targets"].flatten()).double()
        dist.all_reduce(loss)
        return float(loss) / self.world.size

    def facts(self) -> dict[str, float]:
        """What the feature counted."""
        return {} if self.job is None else {name: float(value) for name, value in self.job.trace.facts.items()}

    def said(self) -> str:
        """What the features have to say of themselves."""
        if self.job is None:
            return ""
        attachments = attachments_of(self.job)
        return "; ".join(feature.explain(attachments) for feature in attachments.features)

    def close(self) -> None:
        if self.job is not None:
            self.job.close()

    def _warm_up(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.method.lr * min(1.0, (self.steps + 1) / WARMUP)
            if self.cooling:
                group["lr"] *= min(1.0, (self.horizon - self.steps) / self.cooling)


def contestant(method: Method, spec: Spec, folder: Path, world: World) -> Contestant:
    """Build a method's model and attach the method to it."""
    one = Contestant(method, spec, folder, world)
    settings: dict[str, Any] = dict(method.settings)
    if method.kind == "bf16":
        ddp(one.model).register_comm_hook(None, peers.bf16_hook)
    elif method.kind == "torch":
        peers.torch_powersgd(ddp(one.model), settings["rank"], start=2)
    elif method.kind == "epfml":
        one.epfml = peers.Epfml(list(one.module.parameters()), **settings)
    elif method.kind in ("ours", "torch in ours"):
        kind = getattr(comm, method.feature) if method.kind == "ours" else peers.TorchInOurs
        one.job = attach(one.model, one.optimizer, method.build(kind))
        one.job.progress.total = method.horizon or spec.horizon
        one.optimizer = one.job.optimizer
        if spec.delays:
            delay(spec.delays, world.rank)
    return one


def ddp(model: nn.Module) -> DistributedDataParallel:
    assert isinstance(model, DistributedDataParallel)
    return model


def adamw(module: GPT, lr: float) -> Optimizer:
    matrices = [parameter for parameter in module.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in module.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def muon(module: GPT, lr: float) -> Optimizer:
    """As optim.muon builds it: steps of AdamW's size, and AdamW itself for embeddings, the head and vectors."""
    aside = not_matrices(module)
    named = dict(module.named_parameters())
    vectors = [parameter for parameter in named.values() if parameter.ndim < 2]
    tables = [named[name] for name in aside]
    rest = [parameter for name, parameter in named.items() if parameter.ndim >= 2 and name not in aside]
    groups = [
        {"params": rest, "weight_decay": 0.1, "muon": True},
        {"params": tables, "weight_decay": 0.1, "muon": False},
        {"params": vectors, "weight_decay": 0.0, "muon": False},
    ]
    return MuonAdamW([group | {"lr": lr} for group in groups])


OPTIMIZERS = {"adamw": adamw, "muon": muon}


@contextmanager
def mean_weights(module: nn.Module) -> Iterator[None]:
    """Within, the weights are their mean over the ranks, as a run of local steps would save them."""
    with torch.no_grad():
        own = [parameter.clone() for parameter in module.parameters()]
        for parameter in module.parameters():
            dist.all_reduce(parameter)
            parameter /= dist.get_world_size()
        yield
        for parameter, kept in zip(module.parameters(), own, strict=True):
            parameter.copy_(kept)


def delay(longest: float, rank: int) -> None:
    """Let this rank find each of its exchanges complete later than it is, by a random time of its own."""
    start, waits = Wire.start, torch.Generator().manual_seed(rank)

    def late(self: Wire, requests: Any) -> Any:
        answer = start(self, requests)

        def wait() -> list[Tensor]:
            time.sleep(longest * float(torch.rand((), generator=waits)))
            return answer()

        return wait

    Wire.start = late
