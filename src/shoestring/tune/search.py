"""Proposes trials by Optuna's samplers, within a budget, with successive halving or population based training."""

from __future__ import annotations

import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import DBAPIError

from shoestring.core.errors import ConfigError
from shoestring.tune.database import engine_options, usable
from shoestring.tune.distributions import suggest, to_optuna
from shoestring.tune.gaussian import GaussianSampler
from shoestring.tune.population import Fork, bandit, next_move, perturb, scores_of
from shoestring.tune.settings import Halving, Population, Study
from shoestring.tune.space import Dimension, draw
from shoestring.tune.store import Store, TrialLease

optuna.logging.set_verbosity(optuna.logging.WARNING)

SHOWN = 20
"""Approximate maximum number of a trial's objective values to copy to Optuna's tables; every copy takes a
transaction."""


class TrialSearch:
    """Proposes a worker's next trial; each worker has its own instance.

    Args:
        schedule: decides when trials pause and which paused trials continue; if None, all trials run to their end.
        total: number of steps of a complete trial; no trial pauses at its last step.
        clock: function that returns monotonic seconds of this process; used to find trials whose proposer has died.
    """

    def __init__(
        self,
        store: Store,
        settings: Study,
        space: Sequence[Dimension],
        schedule: Halving | Population | None = None,
        total: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.settings, self.space, self.schedule = store, settings, space, schedule
        self.total, self.clock = total, clock
        self.sign = 1 if settings.direction == "minimize" else -1
        members = schedule.size if isinstance(schedule, Population) else 0
        self.trials = members or settings.trials or sys.maxsize
        self.storage, self.study = open_optuna(store, settings)
        self._unknown: dict[int, float] = {}

    # -- called by a worker -------------------------------------------------------------------------------------------

    def propose(self, owner: str, seconds: float) -> TrialLease | None:
        """Lease a new trial, a paused trial that may continue, or a fork; None if no trial can run now.

        With halving, continuing a trial that is among the best of its rung has precedence over starting a new trial. A
        population starts all of its members first, so that they can be compared.
        """
        trials = self.store.trials()
        members_first = isinstance(self.schedule, Population) and self._room(trials)
        for move in [] if members_first else self._moves(trials):
            if isinstance(move, Fork):
                if self._fork(move, trials):
                    return self.store.take(owner, seconds)
            elif lease := self.store.promote(move, owner, seconds):
                return lease
        if not self._room(trials):
            return None
        # Give up trials that have been only in Optuna's tables for longer than a lease: their proposers died.
        running = self.storage.get_all_trials(self.study._study_id, deepcopy=False, states=(TrialState.RUNNING,))
        known, now = self.store.known(), self.clock()
        orphans = {trial._trial_id: trial.number for trial in running if trial._trial_id not in known}
        self._unknown = {trial: self._unknown.get(trial, now) for trial in orphans}
        expired = [trial for trial, since in self._unknown.items() if now - since > seconds]
        for orphan in expired:
            self.store.abandon(orphan, orphans[orphan])
        if expired:
            self.publish()
        self.study.sampler = NumberedSampler(lambda number: sampler(self.settings, self.space, number))
        trial = self.study.ask()
        values = draw(tuple(self.space), lambda dimension: suggest(trial, dimension))
        if not self.store.add(trial._trial_id, trial.number, values, self.trials):
            self._end_in_optuna(trial._trial_id, TrialState.FAIL)
        return self.store.take(owner, seconds)

    def pause_at(self, lease: TrialLease) -> int | None:
        pause = self.schedule.step(lease.rung) if self.schedule else math.inf
        return int(pause) if pause < self.total else None

    def over(self) -> bool:
        """Whether all trials have ended; first ends paused trials that can no longer continue."""
        trials = self.store.trials()
        if any(trial.state in ("ready", "held") for trial in trials):
            return False
        if self._room(trials) or self._moves(trials):
            return False
        for trial in trials:
            if trial.state == "paused":
                self.store.prune(trial)
        self.publish()
        return not self.store.unpublished()

    def publish(self, number: int | None = None) -> None:
        """Copy trial `number` to Optuna's tables, or (None) all ended trials that their workers left unpublished.

        Publishing is idempotent, and several workers may publish at once. Each worker publishes only its own trials,
        because workers that copy the same trials would wait for each other.
        """
        unpublished = self.store.unpublished(abandoned=number is None)
        for trial in unpublished:
            if number not in (None, trial.number):
                continue
            with suppress(UpdateFinishedTrialError):  # another worker has already done this
                self._show(trial)
            self.store.mark_published(trial.trial)

    def _show(self, trial: TrialLease) -> None:
        shown = self.storage.get_trial(trial.trial)
        if shown.state.is_finished():
            return
        pairs = list(self.store.reports(trial.trial).items())
        every = -(-len(pairs) // SHOWN) or 1
        for index, (step, value) in enumerate(pairs):
            chosen = index % every == 0 or index == len(pairs) - 1
            if chosen and step not in shown.intermediate_values:
                self.storage.set_trial_intermediate_value(trial.trial, step, value)
        state = {"done": TrialState.COMPLETE, "pruned": TrialState.PRUNED}.get(trial.state, TrialState.FAIL)
        self._end_in_optuna(trial.trial, state, trial.value)

    # -- budget, schedule and forks -----------------------------------------------------------------------------------

    def _spent(self, trials: Sequence[TrialLease]) -> bool:
        """Whether the budget of hours or tokens is used up."""
        hours, tokens = sum(trial.seconds for trial in trials) / 3600, sum(trial.tokens for trial in trials)
        return 0 < self.settings.hours <= hours or 0 < self.settings.tokens <= tokens

    def _room(self, trials: Sequence[TrialLease]) -> bool:
        """Whether a new trial may start."""
        return len(trials) < self.trials and not self._spent(trials)

    def _moves(self, trials: Sequence[TrialLease]) -> Sequence[TrialLease | Fork]:
        """List the paused trials that may continue, and the forks to make.

        If the budget is used up before any trial has a result, the best paused trial continues, so that the study has a
        result.
        """
        paused = [trial for trial in trials if trial.state == "paused"]
        if not paused or self.schedule is None:
            return []
        reports = self.store.all_reports()
        moves: Sequence[TrialLease | Fork] = []
        if not self._spent(trials):
            if isinstance(self.schedule, Halving):
                moves = promotable(trials, reports, self.schedule, self.sign)
            else:
                scores = scores_of(trials, reports, self.schedule, self.sign)
                chance = np.random.default_rng([self.settings.seed, len(trials)])
                move = next_move(trials, scores, self.schedule, chance)
                moves = [move] if move else []
        if moves or self._room(trials) or any(trial.state in ("ready", "held", "done") for trial in trials):
            return moves
        step = self.schedule.step
        scored = [(trial, _at(reports[trial.trial], step(trial.rung))) for trial in paused]
        usable = [(trial, score) for trial, score in scored if score is not None]
        ranked = sorted(usable, key=lambda pair: (-pair[0].rung, self.sign * pair[1], pair[0].number))
        return [trial for trial, _ in ranked[:1]]

    def _fork(self, move: Fork, trials: Sequence[TrialLease]) -> bool:
        """Add a fork that any worker may take; False if another worker has already replaced the member."""
        assert isinstance(self.schedule, Population)
        chance = np.random.default_rng([self.settings.seed, len(trials), move.ended.number])
        values = move.parent.parameters
        if self.schedule.method == "pb2":
            scores = scores_of(trials, self.store.all_reports(), self.schedule, self.sign)
            values = bandit(self.space, values, trials, scores, move.ended.rung, self.schedule, chance)
        else:
            values = perturb(self.space, values, self.schedule, chance)
        with _quiet():
            self.study.sampler = PartialFixedSampler(to_optuna(self.space, values), RandomSampler(seed=0))
        trial = self.study.ask()
        draw(tuple(self.space), lambda dimension: suggest(trial, dimension))
        trial.set_user_attr("parent", move.parent.number)
        if self.store.fork(move.ended, move.parent, trial._trial_id, trial.number, values):
            return True
        self._end_in_optuna(trial._trial_id, TrialState.FAIL)
        return False

    def _end_in_optuna(self, trial: int, state: TrialState, value: float | None = None) -> None:
        try:
            self.storage.set_trial_state_values(trial, state, None if value is None else [value])
        except UpdateFinishedTrialError:  # another worker has already done this
            return


def open_optuna(store: Store, settings: Study) -> tuple[optuna.storages.RDBStorage, optuna.Study]:
    """Open Optuna's tables and study, and create them if they are missing.

    If several workers start at the same time, all of them try to create the tables, and Optuna fails for all but the
    first. This function therefore retries to create the tables.
    """
    url = store.engine.url.render_as_string(hide_password=False)
    tries = 10
    while True:
        try:
            storage = optuna.storages.RDBStorage(url, engine_kwargs=engine_options(url))
            study = optuna.create_study(
                storage=storage, study_name=settings.name, direction=settings.direction, load_if_exists=True
            )
            return storage, study
        except (DBAPIError, StorageInternalError):
            tries -= 1
            if not tries:
                with usable(store.engine):
                    raise
            time.sleep(0.2 * random.random())
        except RuntimeError as error:  # tables of another version of Optuna
            raise ConfigError(f"Optuna cannot use its tables in the store: {str(error).partition('.')[0]}") from error


def promotable(
    trials: Sequence[TrialLease], values: dict[int, dict[int, float]], halving: Halving, sign: int
) -> list[TrialLease]:
    """Select paused trials that are among the best 1/factor of all trials that reached their rung; highest rung first.

    Args:
        values: maps a trial's id and a step to the reported value.
        sign: 1 if smaller values are better, -1 if larger values are better.
    """
    promoted: list[TrialLease] = []
    for rung in sorted({trial.rung for trial in trials}, reverse=True):
        scores = {trial.trial: _at(values[trial.trial], halving.step(rung)) for trial in trials}
        reached = [trial for trial in trials if scores[trial.trial] is not None]
        ranked = sorted(reached, key=lambda trial: (sign * (scores[trial.trial] or 0.0), trial.number))
        best = ranked[: len(reached) // halving.factor]
        promoted += [trial for trial in best if trial.state == "paused" and trial.rung == rung]
    return promoted


def _at(values: dict[int, float], step: int) -> float | None:
    """The first value at or after a step; None if there is no such value or the value is not finite."""
    later = [at for at in values if at >= step]
    return values[min(later)] if later and math.isfinite(values[min(later)]) else None


class NumberedSampler(BaseSampler):
    """Makes a new sampler for each trial, seeded by the trial's number.

    Seeding by number keeps workers that propose at the same time, or that restart, from repeating each other's
    proposals.
    """

    def __init__(self, make: Callable[[int], BaseSampler]) -> None:
        self._make = make

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        self._sampler = self._make(trial.number)
        return self._sampler.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._sampler.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._sampler.sample_independent(study, trial, param_name, param_distribution)


def sampler(settings: Study, space: Sequence[Dimension], number: int) -> BaseSampler:
    """Create the sampler that the settings select, for trial `number`."""
    seed = settings.seed * 1_000_003 + number
    with _quiet():
        if settings.sampler == "tpe":
            return TPESampler(seed=seed, constant_liar=True, multivariate=True, group=True)
        if settings.sampler == "random":
            return RandomSampler(seed=seed)
    return GaussianSampler(space, seed=seed, sequence=settings.seed)


@contextmanager
def _quiet() -> Iterator[None]:
    """Context that suppresses Optuna's warnings about experimental features."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield
