"""Clients that train in turn, several on each rank: their data sets, turns, and a loader with a position for each.

A round is a turn of `steps` optimizer steps for each client that is present; all ranks train their clients at the same
time. Client number i belongs to rank i mod the number of ranks. Which clients are present depends only on the seed and
the round, so all ranks know it. A rank with fewer present clients than another is idle in the last turns of a round: it
gets samples of its first client, in a turn without a client's name, and whatever it learns from them has to be dropped.
"""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate as running_sum
from typing import Any, cast

from torch.utils.data import Dataset

from shoestring.core.errors import ConfigError, DataError
from shoestring.core.task import Batch, Collate, Repeated
from shoestring.data.draws import seed_of
from shoestring.data.loader import Loader, check_batch, sweep

log = logging.getLogger("shoestring.data")
_ROUNDS = 1000
"""Maximum number of rounds in a row without a present client."""


class Clients(Dataset[Any]):
    """The data sets of several clients. As a data set, `Clients` contains the samples of all clients, client by client.

    Args:
        parts: name of a client -> its data set, see `Loader`.
        present: function (name of a client, number of a round) -> whether the client takes part in the round; the same
            on all ranks. By default, all clients take part.

    Raises:
        DataError: there are no clients, or one has no samples.
    """

    def __init__(self, parts: Mapping[str, Dataset[Any]], present: Callable[[str, int], bool] | None = None) -> None:
        self.parts = dict(parts)
        if not parts:
            raise DataError("there are no clients", hint="return a dict with a data set for each client")
        for name, part in parts.items():
            if not (name and hasattr(part, "__len__") and hasattr(part, "__getitem__")):
                hint = "give every client a name and a data set that has a length and items"
                raise DataError(f"the client `{name}` has {type(part).__name__} as its data set", hint=hint)
        lengths = {name: len(cast(Sized, part)) for name, part in self.parts.items()}
        if empty := [name for name, length in lengths.items() if not length]:
            raise DataError(f"the client `{empty[0]}` has no samples", hint="leave clients without samples out")
        self.present = present
        self._starts = [0, *running_sum(lengths.values())]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        number = bisect_right(self._starts, index % len(self)) - 1
        return [*self.parts.values()][number][index % len(self) - self._starts[number]]

    @property
    def fingerprint(self) -> str:
        """Hash of the clients' names, and of the length and fingerprint of each client's data."""
        facts = [
            (name, len(cast(Sized, part)), str(getattr(part, "fingerprint", ""))) for name, part in self.parts.items()
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


@dataclass(frozen=True)
class Turn:
    """The client that a rank trains in a step, and where in the client's turn and in the round the step is."""

    client: str
    """Name of the client; empty if the rank is idle, so that nothing it learns counts."""
    samples: int
    """Number of the client's training samples."""
    round: int
    """Number of the round, from 0."""
    opens: bool
    """Whether the step is the first one of the round."""
    first: bool
    """Whether the step is the first one of the turn."""
    last: bool
    """Whether the step is the last one of the turn."""
    closes: bool
    """Whether the step is the last one of the round, on all ranks."""


class ClientStates(ABC):
    """Base class of a job's state that holds each client's own state and switches the model between clients."""

    steps: int
    """Number of optimizer steps in a client's turn."""

    @property
    @abstractmethod
    def clients(self) -> Sequence[str]:
        """Names of the clients whose states this rank holds."""

    @abstractmethod
    def acting(self, client: str) -> AbstractContextManager[None]:
        """Context in which the model has the client's own parameters, and the newest merged values of all others."""


class ClientLoader:
    """Iterates over optimizer steps like `Loader`, with a loader of its own for each client that this rank trains.

    Each client has an order, a position, a length and a fingerprint of its own. `turn` describes the newest step. Keep
    the loader in the job, `job.keep("loader", loader, across="own", merge=loader.merge)`, so that the feature that
    trains the clients finds it.

    Args:
        steps: number of optimizer steps in a client's turn.
        batch: number of samples in a step, over all ranks; a client's step has `batch` / `size` samples.
        absent: probability with which a client is absent from a round.
        rank, size, accumulate, seed, collate: as for `Loader`.

    Raises:
        ConfigError: there are more ranks than clients, a count is out of range, or the batch is not divisible.
    """

    def __init__(
        self,
        clients: Clients,
        *,
        steps: int,
        batch: int,
        rank: int = 0,
        size: int = 1,
        accumulate: int = 1,
        seed: int = 0,
        absent: float = 0.0,
        collate: Collate | None = None,
    ) -> None:
        check_batch(batch, rank, size, accumulate)
        if steps < 1 or not 0 <= absent < 1:
            hint = "a turn has at least 1 step, and the probability of absence is below 1"
            raise ConfigError(f"turns of {steps} steps, with an absence of {absent}", hint=hint)
        if size > len(clients.parts):
            hint = f"use at most {len(clients.parts)} ranks"
            raise ConfigError(f"{size} ranks share {len(clients.parts)} clients, so some would have none", hint=hint)
        self.clients, self.steps, self.rank, self.size = clients, steps, rank, size
        self.seed, self.absent, self.accumulate = seed, absent, accumulate
        self.loaders = {
            name: Loader(
                clients.parts[name],
                batch=batch // size,
                accumulate=accumulate,
                seed=seed_of("client", seed, name),
                collate=collate,
            )
            for name in [*clients.parts][rank::size]
        }
        self.round = 0
        """Number of the current round."""
        self.done = 0
        """Number of steps of the current round that have been taken."""
        self.turn = Turn("", 0, 0, opens=False, first=False, last=False, closes=False)
        """Turn of the newest step."""

    def present(self, number: int) -> list[list[str]]:
        """The clients that take part in a round: a list for each rank."""
        absent, asked = round(self.absent * 2**63), self.clients.present
        names = [
            name
            if seed_of("absent", self.seed, number, name) >= absent and (asked is None or asked(name, number))
            else None
            for name in self.clients.parts
        ]
        return [[name for name in names[rank :: self.size] if name is not None] for rank in range(self.size)]

    def __iter__(self) -> Iterator[tuple[Batch, ...]]:
        steps = {name: iter(loader) for name, loader in self.loaders.items()}
        while True:
            lists = self.present(self.round)
            number = self.round
            while self.done >= self.steps * max(map(len, lists)):  # the round is over, or no client is present in it
                self.round, self.done = self.round + 1, 0
                if self.round > number + _ROUNDS:
                    raise DataError(f"no client was present in {_ROUNDS} rounds", hint="lower data.absent")
                lists = self.present(self.round)
            own, (turn, within) = lists[self.rank], divmod(self.done, self.steps)
            self.done += 1
            client = own[turn] if turn < len(own) else ""
            self.turn = Turn(
                client=client,
                samples=self.loaders[client].samples if client else 0,
                round=self.round,
                opens=self.done == 1,
                first=within == 0,
                last=within == self.steps - 1,
                closes=self.done == self.steps * max(map(len, lists)),
            )
            if client:
                yield next(steps[client])
            else:  # an idle rank repeats the first samples of one of its clients, because every rank takes every step
                loader = next(iter(self.loaders.values()))
                first = next(sweep(loader.dataset, batch=loader.batch // self.accumulate, collate=loader.collate))
                yield (first.batch if isinstance(first, Repeated) else first,) * self.accumulate

    def state_dict(self) -> dict[str, Any]:
        """The position in the round, and the position of each of this rank's clients."""
        closed = self.done >= self.steps * max(map(len, self.present(self.round)))
        clients = {name: loader.state_dict() for name, loader in self.loaders.items()}
        return {"round": self.round, "done": self.done, "closed": closed, "steps": self.steps, "clients": clients}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a saved position. If the length of turns has changed, an unfinished round starts again.

        Raises:
            DataError: the state belongs to other clients, or to other data of a client.
        """
        saved = state_dict["clients"]
        if saved.keys() != self.loaders.keys():
            differing = sorted(saved.keys() ^ self.loaders.keys())
            hint = "resume with the same data, or start a new run"
            raise DataError(f"the position belongs to other clients: `{differing[0]}` is new or missing", hint=hint)
        for name, loader in self.loaders.items():
            try:
                loader.load_state_dict(saved[name])
            except DataError as error:
                _, message, hint = error.parts()
                raise DataError(f"client `{name}`: {message}", hint=hint) from error
        self.round, self.done = int(state_dict["round"]), int(state_dict["done"])
        if state_dict["steps"] != self.steps:
            self.round, self.done = self.round + bool(state_dict["closed"]), 0

    def merge(self, states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """The state of this rank from the states of another number of ranks; an unfinished round starts again."""
        clients = {name: state for of_rank in states for name, state in of_rank["clients"].items()}
        own = {name: clients[name] for name in self.loaders if name in clients}
        first = states[0]
        if not first["closed"]:
            log.warning("the number of ranks has changed, so round %d starts again", first["round"] + 1)
        return {**first, "round": first["round"] + bool(first["closed"]), "done": 0, "clients": own}

    def close(self) -> None:
        """End the loaders of all clients."""
        for loader in self.loaders.values():
            loader.close()
