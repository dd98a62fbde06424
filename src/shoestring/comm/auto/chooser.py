"""`comm.Auto` in a job: at the first forward pass it measures, prices the candidates, and attaches its choice.

Nothing is exchanged while it measures. Forward and backward passes run as in gradient accumulation, their gradients are
dropped, and random state and buffers are restored. So the first step is the same as if the choice had been set.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoestring._torch import rebucket
from shoestring.comm.auto.decision import Candidate, Measurements, decide, explain_spread
from shoestring.comm.auto.probes import synchronize
from shoestring.comm.auto.trial import Trial
from shoestring.comm.codecs.codec import CodecFactory
from shoestring.core.feature import Phase
from shoestring.core.job import Job
from shoestring.core.task import Batch, Output
from shoestring.planning.simulate import Decision

log = logging.getLogger("shoestring")

TIMED_STEPS = 4  # steps after which the time outside forward and backward passes is known


class Chooser:
    """Waits for the first forward pass, makes the choice, and saves it; a resumed run takes the saved choice.

    Args:
        name: the feature's name, for messages and saved state.
        codecs: codecs that may be chosen, by call, the preferred one first.
        trials: forward and backward passes that are timed.
        torus: whether codecs may run between hosts only.
        install: attaches the exchange of a candidate to the job.
        worth: steps of DDP that a step of a codec is worth, by call, where that is not 1.
    """

    def __init__(
        self,
        job: Job,
        name: str,
        codecs: Mapping[str, CodecFactory],
        *,
        trials: int,
        torus: bool,
        install: Callable[[Candidate], None],
        worth: Mapping[str, float] | None = None,
    ) -> None:
        self.job, self.name, self.codecs, self.install = job, name, codecs, install
        self.trials, self.torus, self.worth = trials, torus, worth or {}
        self.choice: Candidate | None = None
        self.decision: Decision | None = None
        self.measured: Measurements | None = None
        self.inner: Any = None  # what the exchange itself keeps
        self.times: list[float] = []
        self.forwards = 0
        self.forward = job.forward

    def attach(self) -> None:
        self.job.forward = self._first
        self.job.exits.callback(setattr, self.job, "forward", self.forward)
        self.job.keep(self.name, self, across="own", merge=self.merge)
        self.job.at(Phase.CLIP, self._check_forward_was_seen)
        self.job.at(Phase.GRAD, self._start_clock)
        self.job.at(Phase.PROJECT, self._stop_clock)

    def __str__(self) -> str:
        if self.decision is None:
            return str(self.choice or "")
        decision = self.decision
        text = f"{decision.choice}, {decision.reason}; {decision.seconds:.3g} s a step before the optimizer's"
        worth, whole = decision.worth.get(decision.choice, 1.0), self.job.trace.facts.get("predicted_step_seconds")
        if worth != 1:
            text += f", worth {worth:.2g} of DDP's"
        if whole:
            text += f"; {whole / worth:.3g} s in all for what a step of DDP learns"
        doubt = self.measured and explain_spread(self.measured)
        return f"{text}; {doubt}" if doubt else text

    # -- the first forward pass ---------------------------------------------------------------------------------------

    def _first(self, model: nn.Module, batch: Batch) -> Output:
        if self.choice is None and torch.is_grad_enabled() and model.training:
            began = time.perf_counter()
            trial = Trial(self.job, self.forward, batch, self.codecs, trials=self.trials, torus=self.torus)
            measured = self.measured = trial.measure()
            decision, choice = self.job.world.decide(lambda: [asdict(part) for part in self.decide(measured)])
            self.decision = Decision(**decision)
            self.adopt(Candidate.from_json(choice))
            log.info("%s: %s", self.name, self)
            self.job.trace.aside += time.perf_counter() - began
        self.forwards += torch.is_grad_enabled()
        return self.forward(model, batch)

    def decide(self, measured: Measurements) -> tuple[Decision, Candidate]:
        """Decide from what all ranks measured; called on one rank."""
        return decide(measured, self.worth)

    def adopt(self, choice: Candidate) -> None:
        """Attach the choice; nothing where it is DDP as it stands."""
        self.choice = choice
        model = self.job.model
        assert isinstance(model, DistributedDataParallel)
        if choice.bucket not in (0, model.bucket_bytes_cap):
            rebucket(model, choice.bucket)
        if choice.codec:
            before = set(self.job.kept)
            self.install(choice)
            (name,) = set(self.job.kept) - before
            self.inner = self.job.kept.pop(name)

    # -- the predicted time of a step ---------------------------------------------------------------------------------

    def _check_forward_was_seen(self) -> None:
        """A training loop that never calls `job.forward` gives no batches, so nothing can be timed."""
        if self.choice is None:
            log.warning(
                "%s: DDP is left as it is, because this training loop does not call `job.step`; name a codec instead",
                self.name,
            )
            self.adopt(Candidate("", 1, 1, 0))

    def _start_clock(self) -> None:
        synchronize(self.job.world.device)
        self.began = time.perf_counter()

    def _stop_clock(self) -> None:
        if self.decision is None or len(self.times) == TIMED_STEPS:
            return
        synchronize(self.job.world.device)
        self.times.append(time.perf_counter() - self.began)
        if len(self.times) == TIMED_STEPS:
            accumulated = self.forwards // TIMED_STEPS - 1
            facts = self.job.trace.facts
            rest = median(self.times[1:]) + accumulated * facts["local_seconds"]
            facts["predicted_step_seconds"] = self.decision.seconds + rest
            facts["predicted_ddp_seconds"] = next(iter(self.decision.predicted.values())) + rest
            facts["predicted_worth"] = self.decision.worth.get(self.decision.choice, 1.0)
            self.job.forward = self.forward

    # -- what survives a restart --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        inner = self.inner.state.state_dict() if self.inner else {}
        return {"choice": json.dumps(self.choice and asdict(self.choice)), "inner": inner}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._adopt_saved(state_dict)
        if self.inner:
            self.inner.state.load_state_dict(state_dict["inner"])

    def merge(self, states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        self._adopt_saved(states[0])
        inner = self.inner.merge([state["inner"] for state in states], rank, size) if self.inner else {}
        return {"choice": states[0]["choice"], "inner": inner}

    def _adopt_saved(self, state: Mapping[str, Any]) -> None:
        """Take the choice of the run that this one resumes; with another choice it would train differently."""
        saved = json.loads(state["choice"])
        if saved and self.choice is None:
            self.adopt(Candidate.from_json(saved))
