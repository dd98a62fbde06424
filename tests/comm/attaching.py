"""What two ranks do in the tests of attaching to a program of one's own: close, freeze, add, leave layers unused."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from exchanges import Awkward, digest
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from shoestring.comm.exchange import wire
from shoestring.comm.exchange.ddp_hook import in_memory_order
from shoestring.core.attachments import Attachments
from shoestring.core.compose import attach, compose
from shoestring.core.errors import ConfigError, ShoestringError
from shoestring.core.feature import Feature, Phase, Seam
from shoestring.core.job import Job
from shoestring.core.world import World
from shoestring.parallel import FSDP
from shoestring.precision import Autocast
from shoestring.testing import scenarios

Grads = dict[str, Tensor]


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, (x.mean((1, 2, 3)) > 0).long() + (x[:, 0].amax((1, 2)) > 1).long()


def backward(model: nn.Module, step: int, scaler: GradScaler | None = None) -> None:
    x, y = batch(step, World.current().rank)
    loss = F.cross_entropy(model(x), y)
    (loss if scaler is None else scaler.scale(loss)).backward()


def replicated(**settings: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Awkward(), bucket_cap_mb=0.004, **settings)


def closed(*, feature: dict[str, Any], again: bool) -> dict[str, Any]:
    """Three steps with an exchange, and three after it was closed; `again` attaches it anew for three more."""
    model = replicated(find_unused_parameters=True)
    optimizer = SGD(model.parameters(), lr=0.05)
    cap, digests = model.bucket_bytes_cap, []

    def steps(first: int) -> None:
        for step in range(first, first + 3):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            digests.append(digest(model))

    for round_ in range(2 if again else 1):
        with attach(model, optimizer, scenarios.decode(feature)):
            steps(6 * round_)
        steps(6 * round_ + 3)
    return {"digests": digests, "cap": [cap, model.bucket_bytes_cap]}


def static(*, feature: dict[str, Any] | None, steps: int) -> list[float]:
    model = DistributedDataParallel(Awkward(), static_graph=True)  # of one bucket, which attaching splits
    optimizer = SGD(model.parameters(), lr=0.05)
    job = attach(model, optimizer, scenarios.decode(feature)) if feature else None
    for step in range(steps):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    if job is not None:
        job.close()
    return torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()


def frozen(*, feature: dict[str, Any]) -> dict[str, Any]:
    """A bare model, of which a layer is frozen after two steps and trained again after four."""
    model = Awkward()
    torch.manual_seed(World.current().rank)
    nn.init.normal_(model.conv.weight)  # of its own on every rank
    model.conv.to(memory_format=torch.channels_last)
    optimizer = SGD(model.parameters(), lr=0.05)
    digests, heads = [], []
    with attach(model, optimizer, scenarios.decode(feature)):
        digests.append(digest(model))
        for step in range(6):
            model.head.requires_grad_(step not in (2, 3))
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            digests.append(digest(model))
            heads.append(float(model.head.weight.detach().double().sum()))
    return {"digests": digests, "heads": heads}


def added(*, feature: dict[str, Any], thaw: bool) -> str:
    """Train what was not trained when the exchange was attached: a layer that is new, or one that was frozen."""
    model = Awkward()
    optimizer = SGD(model.parameters(), lr=0.05)
    with attach(model, optimizer, scenarios.decode(feature)):
        if thaw:
            model.frozen.requires_grad_(True)
        else:
            model.head = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 3))
            optimizer.add_param_group({"params": model.head.parameters()})
        backward(model, 0)
        try:
            optimizer.step()
        except ShoestringError as error:
            return str(error)
    return ""


def local_gradients(model: nn.Module, step: int) -> Grads:
    """This rank's own gradients; zeros of what it does not use."""
    x, y = batch(step, World.current().rank)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(F.cross_entropy(model(x), y), list(trained.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(trained.items(), found, strict=True)}


def conserved(
    *, feature: dict[str, Any], steps: int, wrap: bool, own_step: bool, none: bool, micro: int, scaled: bool = False
) -> dict[str, Any]:
    """The largest difference between all gradients there were and those that were used, with the residuals in the end.

    Args:
        own_step: leave out the optimizer's step. none: set gradients to None after a step, not to zero.
        micro: backward passes a step, each of which is exchanged. scaled: by a loss scaler, whose scale doubles.
    """
    world = World.current()
    model = replicated(find_unused_parameters=True) if wrap else Awkward()
    plain: Awkward = model.module if wrap else model
    optimizer = SGD(model.parameters(), lr=0.0)
    settings = scenarios.decode(feature)
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scaled)
    job = attach(model, optimizer, settings, scaler=scaler)
    trained = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    there, used = ({name: torch.zeros_like(p) for name, p in trained.items()} for _ in range(2))
    with job:
        for step in range(steps):
            for part in range(micro):
                plain.path = (step + part) % 2
                for name, grad in local_gradients(plain, micro * step + part).items():
                    there[name] += grad
                backward(model, micro * step + part, scaler)
            scaler.unscale_(optimizer)
            if not wrap:
                optimizer.step()
            for name, parameter in trained.items():
                if parameter.grad is not None:
                    used[name] += parameter.grad
            if wrap and not own_step:
                scaler.step(optimizer)
                scaler.update()
            model.zero_grad(set_to_none=none)
        residuals = residual(job)
    return {
        "apart": _apart(there, used, residuals, world),
        "residuals": max(float(each.abs().max()) for each in residuals.values()),
    }


def residual(job: Job) -> Grads:
    state = job.kept["comm"].state.state_dict()["codec"]
    return state.get("unsent") or state["residual"]


def _apart(there: Grads, used: Grads, residuals: Grads, world: World) -> float:
    worst = 0.0
    for name, total in there.items():
        left = residuals.get(name, torch.zeros(total.shape)).view(total.shape)
        mine = torch.stack([in_memory_order(total, total), left])
        torch.distributed.all_reduce(mine)
        mean, left = mine / world.size
        worst = max(worst, float((mean - left - in_memory_order(used[name], total)).abs().max()))
    return worst


def overflowed(*, feature: dict[str, Any], size: float) -> dict[str, Any]:
    """Gradients of usual size, then one step of `size`, on every rank, then usual ones again."""
    torch.manual_seed(0)
    model = nn.Linear(48, 40, bias=False)
    pattern = torch.randn(40, 48).clamp_(-1, 1)
    optimizer = SGD(model.parameters(), lr=0.0)
    finite, states = [], []
    with attach(model, optimizer, scenarios.decode(feature)) as job:
        for step in range(4):
            model.weight.grad = (size if step == 2 else 1.0) * pattern
            optimizer.step()
            finite.append(bool(model.weight.grad.isfinite().all()))
            state = job.kept["comm"].state.state_dict()["codec"]
            states.append([float(each.norm()) for each in state["residual"].values()])
    return {"finite": finite, "states": states}


def skipped(*, feature: dict[str, Any], fused: bool) -> dict[str, Any]:
    """A bare model with a loss scaler: at one step the gradients of one rank overflow."""
    world = World.current()
    model = Awkward(torch.contiguous_format)
    optimizer, scaler = SGD(model.parameters(), lr=0.05, fused=fused), GradScaler("cpu", init_scale=1024.0)
    digests, scales = [], []
    with attach(model, optimizer, scenarios.decode(feature), scaler=scaler) as job:
        for step in range(4):
            backward(model, step, scaler)
            if step == 1 and world.rank == 1:
                assert model.head.bias.grad is not None
                model.head.bias.grad[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            digests.append(digest(model))
            scales.append(scaler.get_scale())
        largest = max(float(each.abs().max()) for each in residual(job).values())
    patched = "unscale_" in vars(scaler) or getattr(optimizer, "_step_supports_amp_scaling", False) != fused
    return {"digests": digests, "scales": scales, "residual": largest, "patched": patched}


def scaled(*, feature: dict[str, Any]) -> list[str]:
    """What is said of a loss scaler: in a loop of one's own, and of one that another feature brings."""
    local, said = scenarios.decode(feature), []
    model = Awkward()
    try:
        attach(model, SGD(model.parameters(), lr=0.05), local, scaler=GradScaler("cpu"))
    except ConfigError as error:
        said.append(str(error))
    try:
        compose(Job(Awkward(), world=World.current()), [Autocast(dtype="fp16"), local])
    except ConfigError as error:
        said.append(str(error))
    return said


def alone(*, feature: dict[str, Any], timeout: float) -> str:
    """The first rank makes a step, the other none, in groups that wait for so many seconds."""
    wire.timeout_of = lambda _: timedelta(seconds=timeout)
    model = Awkward()
    optimizer, said = SGD(model.parameters(), lr=0.05), ""
    with attach(model, optimizer, scenarios.decode(feature)):
        if World.current().first:
            backward(model, 0)
            try:
                optimizer.step()
            except RuntimeError as error:
                said = str(error)
        torch.distributed.barrier()  # the other stays until then
    return said


def clipped(*, feature: dict[str, Any], local: int, shard: bool) -> list[float]:
    """The norm of the gradients after the exchange of a step in which all ranks have the same large ones."""
    whole = World.current()
    world = World(rank=whole.rank, size=whole.size, local_rank=whole.rank % local, local_size=local)
    norms = []

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        return 100 * F.cross_entropy(output, batch[1], reduction="sum"), torch.tensor(len(batch[1]))

    features = [FSDP(hosts="leave"), Norms()] if shard else [Norms()]
    job = Job(Awkward(torch.contiguous_format), loss=loss, world=world)
    with compose(job, [scenarios.decode(feature), *features]):
        for step in range(2):
            job.step(batch(step, 0))
            norms.append(float(job.numbers["norm"]))
    return norms


@dataclass(frozen=True, kw_only=True)
class Norms(Feature):
    """Publishes the norm of the whole gradient."""

    seams: ClassVar = (Seam.STEP,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        def measure() -> None:
            grads = [each.grad for each in attachments.parameters if each.grad is not None]
            whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
            attachments.numbers["norm"] = torch.nn.utils.get_total_norm(whole)

        attachments.at(Phase.GRAD, measure)
