"""`comm.Auto` in a job: at the first forward pass it measures, prices what may be chosen, and attaches the choice.

Nothing is exchanged while it times: forward and backward passes run as in accumulation, their gradients are dropped,
and random numbers and buffers are put back. So the first step is the one that the chosen setting would have done.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoestring._torch import rebucket
from shoestring.comm.auto.deciding import Choice, Evidence, decided, doubt
from shoestring.comm.auto.probing import settle
from shoestring.comm.auto.trial import Trial
from shoestring.comm.exchange.attached import install
from shoestring.comm.settings.auto import Auto
from shoestring.core.feature import Phase
from shoestring.core.job import Job
from shoestring.core.task import Batch, Output
from shoestring.planning.simulate import Plan

log = logging.getLogger("shoestring")

SETTLED = 4  # steps after which the time of the optimizer's step is known


class Chooser:
    """Waits for the first forward pass, chooses, and keeps the choice, which a resumed run takes again."""

    def __init__(self, job: Job, settings: Auto) -> None:
        self.job, self.settings = job, settings
        self.choice: Choice | None = None
        self.plan: Plan | None = None
        self.evidence: Evidence | None = None
        self.inner: Any = None  # what the exchange itself keeps
        self.times: list[float] = []
        self.forwards = 0
        self.forward = job.forward

    def attach(self) -> None:
        self.job.forward = self._first
        self.job.exits.callback(setattr, self.job, "forward", self.forward)
        self.job.keep(self.settings.name, self, across="own", merge=self.merge)
        self.job.at(Phase.CLIP, self._missed)
        self.job.at(Phase.GRAD, self._began)
        self.job.at(Phase.PROJECT, self._ended)

    def __str__(self) -> str:
        if self.plan is None:
            return str(self.choice or "")
        said = f"{self.plan.choice}, {self.plan.reason}; {self.plan.seconds:.3g} s a step before the optimizer's"
        rough = self.evidence and doubt(self.evidence)
        return f"{said}; {rough}" if rough else said

    # -- the first forward pass ---------------------------------------------------------------------------------------

    def _first(self, model: nn.Module, batch: Batch) -> Output:
        if self.choice is None and torch.is_grad_enabled() and model.training:
            began = time.perf_counter()
            evidence = self.evidence = Trial(self.job, self.settings, self.forward, batch).evidence()
            plan, choice = self.job.world.decide(lambda: [asdict(each) for each in decided(evidence)])
            self.plan = Plan(**plan)
            self.adopt(Choice.of(choice))
            log.info("%s: %s", self.settings.name, self)
            self.job.trace.aside += time.perf_counter() - began
        self.forwards += torch.is_grad_enabled()
        return self.forward(model, batch)

    def adopt(self, choice: Choice) -> None:
        """Attach the choice; where it is DDP as it stands, nothing."""
        self.choice = choice
        model = self.job.model
        assert isinstance(model, DistributedDataParallel)
        if choice.bucket not in (0, model.bucket_bytes_cap):
            rebucket(model, choice.bucket)
        if choice.codec:
            before = set(self.job.kept)
            install(self.job, choice.settings(self.settings.torus))
            (name,) = set(self.job.kept) - before
            self.inner = self.job.kept.pop(name)

    # -- what the step is predicted to take ---------------------------------------------------------------------------

    def _missed(self) -> None:
        """A loop of its own never calls `job.forward`, so there is nothing that could be timed without its batches."""
        if self.choice is None:
            log.warning(
                "%s: left as it is, for this loop makes its own steps; name a codec instead", self.settings.name
            )
            self.adopt(Choice("", 1, 1, 0))

    def _began(self) -> None:
        settle(self.job.world.device)
        self.began = time.perf_counter()

    def _ended(self) -> None:
        if self.plan is None or len(self.times) == SETTLED:
            return
        settle(self.job.world.device)
        self.times.append(time.perf_counter() - self.began)
        if len(self.times) == SETTLED:
            before = self.forwards // SETTLED - 1
            facts = self.job.trace.facts
            rest = median(self.times[1:]) + before * facts["local_seconds"]
            facts["predicted_step_seconds"] = self.plan.seconds + rest
            facts["predicted_ddp_seconds"] = next(iter(self.plan.predicted.values())) + rest
            self.job.forward = self.forward

    # -- what survives ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        inner = self.inner.state.state_dict() if self.inner else {}
        return {"choice": json.dumps(self.choice and asdict(self.choice)), "inner": inner}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._again(state_dict)
        if self.inner:
            self.inner.state.load_state_dict(state_dict["inner"])

    def merge(self, states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        self._again(states[0])
        inner = self.inner.merge([each["inner"] for each in states], rank, size) if self.inner else {}
        return {"choice": states[0]["choice"], "inner": inner}

    def _again(self, state: Mapping[str, Any]) -> None:
        """Take the choice of the run that this one resumes: another would not go on as that one did."""
        saved = json.loads(state["choice"])
        if saved and self.choice is None:
            self.adopt(Choice.of(saved))
