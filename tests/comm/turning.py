"""What the ranks do in the tests of federated averaging: clients with data of their own train a small model in turn."""

from __future__ import annotations

import hashlib
from functools import cache
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoestring.core.compose import compose
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.core.world import World
from shoestring.data.clients import ClientLoader, Clients
from shoestring.testing.scenarios import Encoded, features_of, here

SIZES = {"ann": 5, "bob": 9, "cem": 4, "dua": 16, "eva": 6}
BATCH, RATE = 4, 0.05
ABSENT = {("bob", 1), ("ann", 2), ("cem", 2), ("dua", 2), ("eva", 2)}
"""Clients that miss a round: in the third one only `bob` is there."""
SENDING = {"all_reduce": 0, "all_to_all_single": 1, "all_gather": 1, "all_gather_into_tensor": 1, "send": 0, "isend": 0}
"""Which argument of a collective is sent; a broadcast sends on the first rank only, and nothing here broadcasts."""


class Rows(TensorDataset):
    """Inputs (3 numbers) and targets (2) of a client, drawn from its name."""

    draws = False

    def __init__(self, name: str) -> None:
        generator = torch.Generator().manual_seed(sum(name.encode()))
        shape = SIZES[name], 5
        super().__init__(torch.randn(shape, generator=generator, dtype=torch.float64) + len(name))
        self.fingerprint = name

    def __getitem__(self, index: Any) -> dict[str, Tensor]:
        (row,) = super().__getitem__(index)
        return {"inputs": row[:3], "targets": row[3:]}


class Styled(nn.Module):
    """A shared regression with a norm, and a second one, `style`, that shares nothing with it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.shared, self.style = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([self.shared(self.norm(inputs)), self.style(inputs)])


@cache
def first_weights() -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Styled().double().state_dict()


def styled() -> Styled:
    model = Styled().double()
    model.load_state_dict(first_weights())
    return model


def present(name: str, number: int) -> bool:
    return (name, number) not in ABSENT


def clients_of(names: str = " ".join(SIZES), *, misses: bool = True) -> Clients:
    return Clients({name: Rows(name) for name in names.split()}, present if misses else None)


def error(output: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
    """Half the squared error of both regressions, summed over samples; that of `style` is scaled."""
    parts = (output - targets).square().sum((1, 2)) / 2
    return parts[0] + scale * parts[1]


def build(feature: list[Encoded], world: World, steps: int, scale: float = 1.0, folder: str = "") -> Any:
    """A job with a loader of clients; each client trains on BATCH samples, whatever the number of ranks."""
    (settings, *others) = features_of(feature, folder)
    job = Job(
        styled(),
        loss=lambda output, batch: (error(output, batch["targets"], scale), torch.tensor(len(batch["targets"]))),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=0.9),
        progress=Progress(total=steps),
        world=world,
    )
    compose(job, [settings, *others])
    loader = ClientLoader(
        clients_of(), steps=settings.every, batch=BATCH * world.size, rank=world.rank, size=world.size, seed=7
    )
    job.keep("loader", loader, across="own", merge=loader.merge)
    return job, loader


def run(
    *,
    feature: list[Encoded],
    rounds: int = 0,
    steps: int = 10**6,
    alone: bool = False,
    folder: str = "",
    resume: bool = False,
    stop: int = 0,
    scale: float = 1.0,
) -> dict[str, Any]:
    """Train whole rounds, or up to a step; the weights after each round, and what stays with clients.

    Args:
        alone: whether one rank has all clients. stop: step after which the run is left as if it were killed.
    """
    world = World() if alone else here()
    job, loader = build(feature, world, 0 if rounds else steps, scale, folder)
    payload, results = hashlib.sha256(), {"rounds": [], "turns": [], "numbers": [], "start": 0}
    with job, spied(payload):
        if resume and job.restore is not None:
            results["start"] = job.restore("auto") or 0
        for (batch,) in loader:
            job.step(batch)
            turn = loader.turn
            results["turns"].append([turn.round, turn.client])
            if turn.closes or job.done:
                results["rounds"].append(state(job))
                results["numbers"].append(job.numbers.get("round_clients", 0.0))
            if (rounds and turn.closes and turn.round + 1 == rounds) or job.done:
                break
            if stop and job.progress.step == stop:
                break
        states = job.kept["clients"].state
        results["private"] = {
            client: {name: value.tolist() for name, value in values.items()}
            for client, values in states.state_dict()["private"].items()
        }
        results["sent"] = payload.hexdigest()
        results["exported"] = exported(job)
        results["acting"] = {}
        for client in states.clients:
            with attachments_of(job).evaluating(), states.acting(client):
                results["acting"][client] = state(job)
        results["after"] = state(job)
        reduction = attachments_of(job).features[0].reduction(job.trace)
        results["cost"] = "" if reduction is None else reduction.cost
    return results


def state(job: Job) -> dict[str, Any]:
    tensors = attachments_of(job).module.state_dict()
    return {name: value.tolist() for name, value in tensors.items() if value.is_floating_point()}


def exported(job: Job) -> dict[str, Any]:
    (feature, *_), weights = attachments_of(job).features, dict(attachments_of(job).weights())
    states = {name: entry.state.state_dict() for name, entry in job.kept.items()}
    return {name: value.tolist() for name, value in feature.export(weights, states).items() if "num" not in name}


class spied:
    """Adds the content of every tensor that a collective of `torch.distributed` sends within to a hash."""

    def __init__(self, payload: Any) -> None:
        self.payload, self.before = payload, {name: getattr(dist, name) for name in SENDING}

    def __enter__(self) -> None:
        for name, function in self.before.items():
            setattr(dist, name, self.watching(function, SENDING[name]))

    def __exit__(self, *_: object) -> None:
        for name, function in self.before.items():
            setattr(dist, name, function)

    def watching(self, function: Any, place: int) -> Any:
        def watched(*arguments: Any, **named: Any) -> Any:
            self.payload.update(
                arguments[place].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
            return function(*arguments, **named)

        return watched


# -- the same by hand --------------------------------------------------------------------------------------------------


def by_hand(rounds: int, every: int, weigh: bool, proximal: float, private: bool) -> list[dict[str, Any]]:
    """The weights after each round of a server that averages all clients that are present."""
    server, stored, results = styled(), dict[str, dict[str, Tensor]](), []
    begun = {name: value.clone() for name, value in server.state_dict().items()}
    loader = ClientLoader(clients_of(misses=False), steps=1, batch=BATCH, seed=7)
    batches = {name: iter(own) for name, own in loader.loaders.items()}
    for number in range(rounds):
        merged = {name: value.clone() for name, value in server.state_dict().items()}
        total, weights = dict.fromkeys(merged, 0.0), 0.0
        for name in (name for name in SIZES if present(name, number)):
            model = styled()
            model.load_state_dict(merged | (stored.get(name, {key: begun[key] for key in begun if "style" in key})
                                            if private else {}))  # fmt: skip
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
            for (batch,) in islice(batches[name], every):
                loss = error(model(batch["inputs"]), batch["targets"]) / BATCH
                pulled = [
                    (parameter - merged[key]).square().sum()
                    for key, parameter in model.named_parameters()
                    if not (private and "style" in key)
                ]
                optimizer.zero_grad()
                (loss + proximal / 2 * sum(pulled)).backward()
                optimizer.step()
            weight = SIZES[name] if weigh else 1.0
            weights += weight
            values = {key: value.clone() for key, value in model.state_dict().items()}
            stored[name] = {key: value for key, value in values.items() if "style" in key}
            total = {key: total[key] + weight * values[key] for key in merged}
        server.load_state_dict({
            key: begun[key] if private and "style" in key else total[key] / weights
            if value.is_floating_point() else value for key, value in merged.items()
        })  # fmt: skip
        results.append({key: value.tolist() for key, value in server.state_dict().items() if "num" not in key})
    return [*results, {name: {key: value.tolist() for key, value in one.items()} for name, one in stored.items()}]
