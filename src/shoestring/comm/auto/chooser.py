"""Implements `comm.Auto`: at the first forward pass it measures costs, predicts the time of each candidate exchange,
and attaches the best exchange.

Gradients are not exchanged while costs are measured. The measured forward and backward passes run as in gradient
accumulation, their gradients are dropped, and random state and buffers are restored. As a result, the first training
step is the same as if the user had configured the chosen exchange.
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

from shoestring import figures
from shoestring._torch import rebucket
from shoestring.comm.auto.decision import Candidate, Measurements, decide, explain_spread
from shoestring.comm.auto.trial import Trial
from shoestring.comm.codecs.codec import CodecFactory
from shoestring.core.attachments import Attachments
from shoestring.core.feature import Phase
from shoestring.core.task import Batch, Output
from shoestring.planning.links import synchronize
from shoestring.planning.simulate import Decision

log = logging.getLogger("shoestring")

TIMED_STEPS = 4  # number of steps in which the optimizer's step is timed


class Chooser:
    """Chooses an exchange at the first forward pass, and saves the choice; a resumed run uses the saved choice.

    Args:
        name: the feature's name, for messages and saved state.
        codecs: codecs that may be chosen, in order of preference; keys are calls such as `PowerSGD(rank=4)`.
        trials: number of forward and backward passes that are timed.
        torus: whether codecs may be restricted to the traffic between hosts (2D torus).
        install: function that attaches a candidate's exchange to the job.
        worth: number of DDP steps that one step with a codec is worth, by the codec's call; 1 for codecs not listed.
    """

    def __init__(
        self,
        attachments: Attachments,
        name: str,
        codecs: Mapping[str, CodecFactory],
        *,
        trials: int,
        torus: bool,
        install: Callable[[Candidate], None],
        worth: Mapping[str, float] | None = None,
    ) -> None:
        self.attachments, self.name, self.codecs, self.install = attachments, name, codecs, install
        self.trials, self.torus, self.worth = trials, torus, worth or {}
        self.choice: Candidate | None = None
        self.decision: Decision | None = None
        self.measured: Measurements | None = None
        self.inner: Any = None  # saved state of the chosen exchange
        self.times: list[float] = []
        self.forwards = 0
        self.forward = attachments.forward

    def attach(self) -> None:
        """Register with the job: choose at the first forward pass, time the first steps, and save the choice in
        checkpoints."""
        self.attachments.forward = self._first
        self.attachments.exits.callback(setattr, self.attachments, "forward", self.forward)
        self.attachments.keep(self.name, self, across="own", merge=self.merge)
        self.attachments.at(Phase.CLIP, self._check_forward_was_seen)
        self.attachments.at(Phase.GRAD, self._start_clock)
        self.attachments.at(Phase.PROJECT, self._stop_clock)

    def __str__(self) -> str:
        if self.decision is None:
            return str(self.choice or "")
        decision = self.decision
        text = (
            f"{decision.choice}, {decision.reason}; {figures.seconds(decision.seconds)} a step before the optimizer's"
        )
        worth = decision.worth.get(decision.choice, 1.0)
        whole = self.attachments.trace.facts.get("predicted_step_seconds")
        if worth != 1:
            text += f", worth {worth:.2g} of DDP's"
        if whole:
            text += f"; {figures.seconds(whole / worth)} in all for what a step of DDP learns"
        doubt = self.measured and explain_spread(self.measured)
        return f"{text}; {doubt}" if doubt else text

    # -- the first forward pass ---------------------------------------------------------------------------------------

    def _first(self, model: nn.Module, batch: Batch) -> Output:
        """Run a forward pass; before it, choose an exchange if none is chosen yet."""
        if self.choice is None and torch.is_grad_enabled() and model.training:
            began = time.perf_counter()
            trial = Trial(self.attachments, self.forward, batch, self.codecs, trials=self.trials, torus=self.torus)
            measured = self.measured = trial.measure()
            decision, choice = self.attachments.world.decide(lambda: [asdict(part) for part in self.decide(measured)])
            self.decision = Decision(**decision)
            self.adopt(Candidate.from_json(choice))
            log.info("%s: %s", self.name, self)
            self.attachments.trace.aside += time.perf_counter() - began
        self.forwards += torch.is_grad_enabled()
        return self.forward(model, batch)

    def decide(self, measured: Measurements) -> tuple[Decision, Candidate]:
        """Choose an exchange from the measurements of all ranks; called on one rank only."""
        return decide(measured, self.worth)

    def adopt(self, choice: Candidate) -> None:
        """Attach the chosen exchange; nothing is attached if the choice is DDP without a codec."""
        self.choice = choice
        model = self.attachments.model
        assert isinstance(model, DistributedDataParallel)
        if choice.bucket not in (0, model.bucket_bytes_cap):
            rebucket(model, choice.bucket)
        if choice.codec:
            before = set(self.attachments.kept)
            self.install(choice)
            (name,) = set(self.attachments.kept) - before
            self.inner = self.attachments.kept.pop(name)

    # -- the predicted time of a step ---------------------------------------------------------------------------------

    def _check_forward_was_seen(self) -> None:
        """Choose unchanged DDP if the training loop does not call `attachments.forward`, because then nothing could be
        measured."""
        if self.choice is None:
            log.warning(
                "%s: DDP is left unchanged, because this training loop does not call `job.step`; name a codec instead",
                self.name,
            )
            self.adopt(Candidate("", 1, 1, 0))

    def _start_clock(self) -> None:
        synchronize(self.attachments.world.device)
        self.began = time.perf_counter()

    def _stop_clock(self) -> None:
        """Record the seconds since `_start_clock`, which include the optimizer's step; after the last timed step,
        publish the predicted time of a whole step."""
        if self.decision is None or len(self.times) == TIMED_STEPS:
            return
        synchronize(self.attachments.world.device)
        self.times.append(time.perf_counter() - self.began)
        if len(self.times) == TIMED_STEPS:
            accumulated = self.forwards // TIMED_STEPS - 1
            facts = self.attachments.trace.facts
            # The first step is left out, because it also allocates the optimizer's state.
            rest = median(self.times[1:]) + accumulated * facts["local_seconds"]
            facts["predicted_step_seconds"] = self.decision.seconds + rest
            facts["predicted_ddp_seconds"] = next(iter(self.decision.predicted.values())) + rest
            facts["predicted_worth"] = self.decision.worth.get(self.decision.choice, 1.0)
            self.attachments.forward = self.forward

    # -- saved state --------------------------------------------------------------------------------------------------

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
        """Use the exchange that the resumed run had chosen, because training would differ with another exchange."""
        saved = json.loads(state["choice"])
        if saved and self.choice is None:
            self.adopt(Candidate.from_json(saved))
