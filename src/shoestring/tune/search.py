"""Proposes trials: Optuna's samplers and tables, the budget, and asynchronous successive halving."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import TrialState

from shoestring.tune.distributions import suggest
from shoestring.tune.gaussian import GaussianSampler
from shoestring.tune.settings import Halving, Study
from shoestring.tune.space import Dimension, draw
from shoestring.tune.store import Store, TrialLease, engine_options

optuna.logging.set_verbosity(optuna.logging.WARNING)


class TrialSearch:
    """Where a worker's trials come from; one object for each worker.

    Args:
        total: steps of a trial, at which none pauses.
        clock: seconds of this process, for finding trials whose proposer has died.
    """

    def __init__(
        self,
        store: Store,
        settings: Study,
        space: Sequence[Dimension],
        halving: Halving | None = None,
        total: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.settings, self.space, self.halving = store, settings, space, halving
        self.total, self.clock = total, clock
        url = store.engine.url.render_as_string(hide_password=False)
        self.storage = optuna.storages.RDBStorage(url, engine_kwargs=engine_options(url))
        self.study = optuna.create_study(
            storage=self.storage, study_name=settings.name, direction=settings.direction, load_if_exists=True
        )
        self._unknown: dict[int, float] = {}

    # -- what a worker asks -------------------------------------------------------------------------------------------

    def propose(self, owner: str, seconds: float) -> TrialLease | None:
        """Continue a paused trial that is among the best of its rung, else start a new one within the budget."""
        trials = self.store.trials()
        for paused in self._promotable(trials):
            if lease := self.store.promote(paused, owner, seconds):
                return lease
        if not self._budget_left(trials):
            return None
        self._abandon_orphans(seconds)
        # The number of the trial is part of the seed: a worker that restarts must not repeat what it has proposed.
        self.study.sampler = sampler(self.settings, self.space, len(trials))
        trial = self.study.ask()
        values = draw(tuple(self.space), lambda dimension: suggest(trial, dimension))
        if not self.store.add(trial._trial_id, trial.number, values, self.settings.trials):
            self._end_in_optuna(trial._trial_id, TrialState.FAIL)
        return self.store.take(owner, seconds)

    def pause_at(self, lease: TrialLease) -> int | None:
        pause = self.halving.step(lease.rung) if self.halving else math.inf
        return int(pause) if pause < self.total else None

    def over(self) -> bool:
        """Whether all has ended; paused trials that nothing can promote any more are ended here."""
        trials = self.store.trials()
        if any(trial.state in ("ready", "held") for trial in trials):
            return False
        if self._budget_left(trials) or self._promotable(trials):
            return False
        for trial in trials:
            if trial.state == "paused":
                self.store.prune(trial)
        self.publish()
        return True

    def publish(self) -> None:
        """Write trials that have ended to Optuna's tables. It may be repeated, and several workers may do it at once:
        all write the same."""
        for trial in self.store.unpublished():
            shown = self.storage.get_trial(trial.trial)
            if not shown.state.is_finished():
                for step, value in self.store.reports(trial.trial).items():
                    if step not in shown.intermediate_values:
                        self.storage.set_trial_intermediate_value(trial.trial, step, value)
                state = {"done": TrialState.COMPLETE, "pruned": TrialState.PRUNED}.get(trial.state, TrialState.FAIL)
                self._end_in_optuna(trial.trial, state, trial.value)
            self.store.mark_published(trial.trial)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _budget_left(self, trials: Sequence[TrialLease]) -> bool:
        hours = sum(trial.seconds for trial in trials) / 3600
        return len(trials) < self.settings.trials and not 0 < self.settings.hours <= hours

    def _promotable(self, trials: Sequence[TrialLease]) -> list[TrialLease]:
        """Paused trials to continue. At the end of the budget the best one is, even where too few others were tried."""
        if self.halving is None:
            return []
        sign = 1 if self.settings.direction == "minimize" else -1
        found = promotable(trials, self._values(trials), self.halving, sign)
        paused = [trial for trial in trials if trial.state == "paused"]
        waiting = any(trial.state in ("ready", "held", "done") for trial in trials)
        if found or waiting or not paused or self._budget_left(trials):
            return found
        step = self.halving.step
        scored = [(trial, _at(self.store.reports(trial.trial), step(trial.rung))) for trial in paused]
        usable = [(trial, score) for trial, score in scored if score is not None]
        return [each for each, _ in sorted(usable, key=lambda pair: (-pair[0].rung, sign * pair[1], pair[0].number))][
            :1
        ]

    def _values(self, trials: Sequence[TrialLease]) -> dict[int, dict[int, float]]:
        return {trial.trial: self.store.reports(trial.trial) for trial in trials}

    def _end_in_optuna(self, trial: int, state: TrialState, value: float | None = None) -> None:
        try:
            self.storage.set_trial_state_values(trial, state, None if value is None else [value])
        except UpdateFinishedTrialError:  # another worker was first
            return

    def _abandon_orphans(self, seconds: float) -> None:
        """Give up trials that exist in Optuna's tables alone for longer than a lease: their proposer has died."""
        running = self.storage.get_all_trials(self.study._study_id, deepcopy=False, states=(TrialState.RUNNING,))
        known, now = self.store.known(), self.clock()
        orphans = {trial._trial_id: trial.number for trial in running if trial._trial_id not in known}
        self._unknown = {trial: self._unknown.get(trial, now) for trial in orphans}
        for trial, since in self._unknown.items():
            if now - since > seconds:
                self.store.abandon(trial, orphans[trial])
        if any(now - since > seconds for since in self._unknown.values()):
            self.publish()


def promotable(
    trials: Sequence[TrialLease], values: dict[int, dict[int, float]], halving: Halving, sign: int
) -> list[TrialLease]:
    """Paused trials that are among the best 1/factor of all that reached their rung, the highest rung first.

    Args:
        values: what each trial has reported, by its id and by step; `sign` times a value is to be small.
    """
    found: list[TrialLease] = []
    for rung in sorted({trial.rung for trial in trials}, reverse=True):
        scores = {trial.trial: _at(values[trial.trial], halving.step(rung)) for trial in trials}
        reached = [trial for trial in trials if scores[trial.trial] is not None]
        ranked = sorted(reached, key=lambda trial: (sign * (scores[trial.trial] or 0.0), trial.number))
        best = ranked[: len(reached) // halving.factor]
        found += [trial for trial in best if trial.state == "paused" and trial.rung == rung]
    return found


def _at(values: dict[int, float], step: int) -> float | None:
    """The first value at or after a step; None where there is none, or it is not finite."""
    later = [at for at in values if at >= step]
    return values[min(later)] if later and math.isfinite(values[min(later)]) else None


def sampler(settings: Study, space: Sequence[Dimension], proposed: int) -> BaseSampler:
    """The sampler of the study for its next trial."""
    seed = settings.seed * 1_000_003 + proposed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if settings.sampler == "tpe":
            return TPESampler(seed=seed, constant_liar=True, multivariate=True, group=True)
        if settings.sampler == "random":
            return RandomSampler(seed=seed)
    return GaussianSampler(space, seed=seed, sequence=settings.seed)
