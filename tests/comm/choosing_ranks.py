"""What test_plan runs on every rank of a pool."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from shoestring import comm, parallel
from shoestring.comm.auto.chooser import rebucket
from shoestring.comm.auto.decision import Candidate
from shoestring.comm.auto.trial import Trial
from shoestring.core.compose import compose
from shoestring.core.job import Job, attachments_of
from shoestring.testing import jobs
from shoestring.testing.scenarios import here
from shoestring.training.throughput import Meter


def made(allow: tuple[str, ...] = ()) -> Job:
    torch.manual_seed(0)
    features = [parallel.DDP(), comm.Auto(allow=allow, trials=1)]
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return compose(Job(jobs.tiny(0.1), optimizer=optimizer, world=here()), features)


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + here().rank)
    tokens = torch.randint(0, jobs.VOCABULARY, (2, 9), generator=generator)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def digest(job: Job) -> str:
    return hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in attachments_of(job).module.parameters())
    ).hexdigest()


def steps(*, choice: dict[str, Any] | None = None, count: int = 4) -> dict[str, Any]:
    """Some steps, with a choice given or measured; and what a checkpoint after half of them leads to."""
    with made(("powersgd(rank=2)",)) as job:
        chooser = job.kept["comm.auto"].state
        if choice is not None:
            chooser.load_state_dict({"choice": _json(choice), "inner": {"round": 0, "codec": {}, "locals": 1}})
        losses = [float(job.step(batch(step))) for step in range(count)]
        return {
            "digest": digest(job),
            "losses": losses,
            "hooked": job.model._comm_hooks != [],
            "said": str(chooser),
            "kept": sorted(job.kept),
            "facts": {key: job.trace.facts[key] for key in sorted(job.trace.facts) if "predicted" in key},
        }


def rates() -> dict[str, Any]:
    """What the meter says of three steps, of which the first begins with a trial, and when each has ended."""
    rows: list[dict[str, float]] = []

    class Rows:
        def write(self, step: int, values: Mapping[str, float]) -> None:
            rows.append(dict(values))

        def close(self) -> None:
            return

    with made() as job:
        began, walls = time.perf_counter(), []  # before the meter's own clock starts
        with Meter(job, [Rows()], 0.0, 0.0) as meter:
            for step in range(3):
                meter.step(job.step(batch(step)))
                walls.append(time.perf_counter() - began)
        names = ("step_seconds", "tokens_per_second")
        return {name: [row[name] for row in rows] for name in names} | {"wall": walls, "aside": job.trace.aside}


def _json(choice: dict[str, Any]) -> str:
    return json.dumps(choice)


def trial_leaves_nothing() -> dict[str, Any]:
    """Random state, gradients and weights before and after the measurements."""
    with made() as job:
        job.model.train()
        before, state = digest(job), torch.get_rng_state()
        chooser = job.kept["comm.auto"].state
        evidence = Trial(attachments_of(job), chooser.forward, batch(0), chooser.codecs, trials=1, torus=True).measure()
        return {
            "same": digest(job) == before and torch.equal(torch.get_rng_state(), state),
            "gradients": sum(p.grad is not None for p in attachments_of(job).module.parameters()),
            "order": list(evidence.arrival),
            "kinds": [each.kind for each in evidence.links],
            "slowdown": dict(evidence.cluster().slowdown),
        }


def rebucketed() -> list[list[float]]:
    """Gradients of one step with DDP's buckets as they were, and formed anew before the first and second step."""
    found = []
    for at in (None, 0, 1):
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(jobs.tiny(0.0), gradient_as_bucket_view=True)
        for step in range(3):
            if step == at:
                rebucket(model, 512)
            model.zero_grad()
            given = batch(step)
            model(given["inputs"]).float().pow(2).mean().backward()
        found.append([float(p.grad.double().sum()) for p in model.parameters() if p.grad is not None])
    return found


def again() -> dict[str, Any]:
    """A run that is saved after two steps and continues, against one that was not stopped."""
    choice = Candidate("powersgd(rank=2)", 2, 1, 1024, ("*.bias",))
    state = {"choice": _json(vars(choice)), "inner": {"round": 0, "codec": {}, "locals": 1}}
    with made(("powersgd(rank=2)",)) as job:
        job.kept["comm.auto"].state.load_state_dict(state)
        for step in range(2):
            job.step(batch(step))
        saved = {name: kept.state.state_dict() for name, kept in job.kept.items()}
        saved = _copied(saved)
        for step in range(2, 4):
            job.step(batch(step))
        whole = digest(job)
    with made(("powersgd(rank=2)",)) as job:
        for name, kept in list(job.kept.items()):
            kept.state.load_state_dict(saved[name])
        for step in range(2, 4):
            job.step(batch(step))
        return {"whole": whole, "again": digest(job), "kinds": sorted(saved["comm.auto"]["inner"]["codec"])}


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value.clone() if isinstance(value, torch.Tensor) else value
