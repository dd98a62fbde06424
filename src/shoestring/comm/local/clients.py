"""Trains several clients in turn on one rank: switches the model from one client to the next, and averages the clients'
updates.

A turn (the steps that one client trains in a round) begins with the merged weights theta_old, the client's own private
tensors and a new state of the optimizer. At the end of client k's turn, n_k (theta_old - theta_k) is added to a sum. At
the end of a round the model gets the weighted mean of this rank's clients, and the outer optimizer merges the ranks,
each weighed by the sum of its n_k. So the result is the same as if one server averaged all clients, for any
distribution of the clients over ranks. Private tensors are copied to and from a store of this rank, and are never part
of an exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoestring._torch import foreach_add_, foreach_copy_
from shoestring.comm.codecs.dense import split_like, unflatten
from shoestring.comm.local.outer import OuterOptimizer
from shoestring.comm.local.outer_state import keep_state, let_replicas_differ
from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, Phase
from shoestring.data.clients import ClientLoader, ClientStates, Turn
from shoestring.data.loader import Loader
from shoestring.sharded import local_part

if TYPE_CHECKING:
    from shoestring.comm.settings.federated import FedAvg


def install(attachments: Attachments, settings: FedAvg) -> None:
    """Attach federated averaging to a job: the turns of this rank's clients, and the merges between ranks."""
    settings.rounds.check_scaler(attachments.scaler, attachments.world)
    outer = OuterOptimizer(attachments, settings.rounds)
    attachments.exits.callback(outer.close)
    turns = ClientTurns(attachments, settings, outer)
    outer.schedule = turns
    outer.alone = False  # a single rank merges its clients too, and has the merged weights only after a merge
    attachments.at(Phase.FORWARD, turns.begin_step)
    attachments.phases[Phase.CLIP].insert(0, outer.before_step)  # inserted first, so that later callbacks see averages
    if settings.proximal:
        attachments.phases[Phase.CLIP].insert(0, turns.pull)
    for work in (turns.end_step, outer.after_step, turns.settle):
        attachments.at(Phase.OUTER, work)
    if attachments.world.ranks_over(DATA) > 1:
        attachments.refuse_with(outer.refuse)
    attachments.surround_evaluation(turns.merged)
    keep_state(attachments, outer)
    attachments.keep("initial", turns.initial, merged=True)
    attachments.keep("clients", turns, across="own", merge=turns.merge)
    let_replicas_differ(attachments, DATA)


class PrivateTensors:
    """The parameters and buffers of a model that stay with each client, with their values before training."""

    def __init__(self, attachments: Attachments, settings: FedAvg) -> None:
        module = attachments.module
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.tensors = {name: tensor for name, tensor in named.items() if settings.stays(name)}
        self.values = self.copy()

    def copy(self) -> dict[str, Tensor]:
        """Copy the present values of these tensors from the model."""
        return {name: local_part(tensor).detach().clone() for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def put(self, values: dict[str, Tensor]) -> None:
        """Write values, by name, to these tensors of the model."""
        for name, tensor in self.tensors.items():
            local_part(tensor).copy_(values[name])

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict.keys() != self.values.keys():
            hint = "resume with the `private` that it was saved with"
            raise ConfigError("the checkpoint was saved with other parameters that stay with clients", hint=hint)
        for name, value in state_dict.items():
            self.values[name].copy_(value)


class ClientTurns(ClientStates):
    """Trains one rank's clients in turn with one model. Holds the number of the current client, the private tensors of
    each client, and the sums of the updates of the clients that have trained in the current round."""

    def __init__(self, attachments: Attachments, settings: FedAvg, outer: OuterOptimizer) -> None:
        self.attachments, self.settings, self.outer = attachments, settings, outer
        self.steps = settings.every
        self.initial = PrivateTensors(attachments, settings)
        self.stored: dict[str, dict[str, Tensor]] = {}
        """Private tensors of this rank's clients, by client."""
        self.before = [buffer.clone() for buffer in outer.buffers]
        """Merged buffers at the beginning of the round."""
        self.sums = [torch.zeros_like(tensor) for tensor in self._before]
        self.weight, self.turns = 0.0, 0
        self.neutral = True  # whether the model has the merged weights, and no client's private tensors
        attachments.trace.facts |= dict.fromkeys(("rounds", "client_turns"), 0.0)
        attachments.trace.facts["private_bytes"] = float(sum(value.nbytes for value in self.initial.values.values()))

    # -- which client ------------------------------------------------------------------------------------------------

    @property
    def _loader(self) -> ClientLoader | Loader | None:
        states = (entry.state for entry in self.attachments.kept.values())
        return next((state for state in states if isinstance(state, ClientLoader | Loader)), None)

    @property
    def turn(self) -> Turn:
        """The turn of the current step. Without a loader of clients, each rank is a client."""
        loader = self._loader
        if isinstance(loader, ClientLoader):
            return loader.turn
        number, within = divmod(self.attachments.progress.step, self.steps)
        first, last = within == 0, within == self.steps - 1
        samples = 1 if loader is None else loader.samples
        return Turn(self._rank_name, samples, number, opens=first, first=first, last=last, closes=last)

    @property
    def _rank_name(self) -> str:
        return f"rank {self.attachments.world.index_over(DATA)}"

    @property
    def clients(self) -> Sequence[str]:
        loader = self._loader
        return [*loader.loaders] if isinstance(loader, ClientLoader) else [self._rank_name]

    # -- a step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin_step(self) -> None:
        """Called in Phase.FORWARD: in the first step of a turn, load the merged weights and the client's private
        tensors into the model, and clear the optimizer's state.

        Raises:
            ConfigError: the number of steps in the loader's turns is not `every`.
        """
        loader, turn = self._loader, self.turn
        if isinstance(loader, ClientLoader) and loader.steps != self.steps:
            hint = f"give the loader steps={self.steps}"
            message = f"the loader's turns have {loader.steps} steps, and `{self.settings.name}.every` is {self.steps}"
            raise ConfigError(message, hint=hint)
        if self.outer.equal:  # before the first step: a program may have changed the weights after `install`
            self.initial.values = self.initial.copy()
            for fragment in self.outer.fragments:
                fragment.rebase()
            self._keep_buffers()
            # All clients are stored at once, so that the saved state keeps its size.
            self.stored = {client: self.initial.copy() for client in self.clients}
        if turn.opens:
            self._clear_sums()
        if turn.first or self.neutral:
            self._finish_copies()
            self._put(self._before)
            self.initial.put(self.stored.get(turn.client, self.initial.values))
            self.attachments.optimizer.state.clear()
            self.neutral = False

    @torch.no_grad()
    def pull(self) -> None:
        """Called in Phase.CLIP: add `proximal` times (weights - merged weights) to the gradients."""
        for fragment in self.outer.fragments:
            anchors = split_like(fragment.anchor, fragment.weights)
            for parameter, weight, anchor in zip(fragment.parameters.values(), fragment.weights, anchors, strict=True):
                if parameter.grad is not None:
                    pull = (weight - anchor).to(parameter.grad.dtype)
                    local_part(parameter.grad).add_(pull, alpha=self.settings.proximal)

    @torch.no_grad()
    def end_step(self) -> None:
        """Called in Phase.OUTER before the merge: in the last step of a turn, add the client's update to the sums; in
        the last step of a round, set the model to the mean of this rank's clients."""
        turn, ends = self.turn, self.attachments.progress.last
        if (turn.last or ends) and turn.client:
            weight = float(turn.samples) if self.settings.client_weights == "samples" else 1.0
            self.stored[turn.client] = self.initial.copy()
            learnt = [before - now for before, now in zip(self._before, self._now(), strict=True)]
            foreach_add_(self.sums, learnt, alpha=weight)
            self.weight, self.turns = self.weight + weight, self.turns + 1
        if turn.closes or ends:
            share = 1 / self.weight if self.weight else 0.0
            self._put([before - share * total for before, total in zip(self._before, self.sums, strict=True)])
            self.outer.weight = self.weight
            facts = self.attachments.trace.facts
            facts["rounds"], facts["client_turns"] = facts["rounds"] + 1, facts["client_turns"] + self.turns
            self.attachments.numbers["round_clients"] = float(self.turns)

    def due(self, before: float, after: float, total: int) -> list[int]:
        """The schedule of merges: all weights are merged after the last step of a round."""
        return [*range(len(self.outer.fragments))] if self.turn.closes else []

    @torch.no_grad()
    def settle(self) -> None:
        """Called in Phase.OUTER after the merge: set private tensors to their initial values, so that all ranks have
        equal models."""
        if self.turn.closes or self.attachments.progress.last:
            self._keep_buffers()
            self._clear_sums()
            self.initial.put(self.initial.values)
            self.neutral = True

    # -- the model's tensors -----------------------------------------------------------------------------------------

    @property
    def _before(self) -> list[Tensor]:
        """The merged weights (flat) and the merged buffers, with which every turn of the round begins."""
        return [*(fragment.anchor for fragment in self.outer.fragments), *self.before]

    @torch.no_grad()
    def _now(self) -> list[Tensor]:
        """Copies of the model's present weights (flat) and buffers, in the order of `_before`."""
        return [*(fragment.flat() for fragment in self.outer.fragments), *(b.clone() for b in self.outer.buffers)]

    @torch.no_grad()
    def _put(self, tensors: Sequence[Tensor]) -> None:
        """Write weights (flat) and buffers, in the order of `_before`, to the model."""
        count = len(self.outer.fragments)
        for fragment, flat in zip(self.outer.fragments, tensors[:count], strict=True):
            unflatten(flat, fragment.weights)
        if self.outer.buffers:
            foreach_copy_(self.outer.buffers, list(tensors[count:]))

    def _finish_copies(self) -> None:
        """Wait until checkpoints have copied the weights. Checkpoints may copy until the optimizer's step, but clients
        change the weights before it."""
        self.attachments.wait_for_readers()

    def _keep_buffers(self) -> None:
        if self.before:
            foreach_copy_(self.before, self.outer.buffers)

    def _clear_sums(self) -> None:
        self.weight, self.turns = 0.0, 0
        for total in self.sums:
            total.zero_()

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Context in which the model has the merged weights, and the initial values of the private tensors."""
        self._finish_copies()
        now, private = self._now(), self.initial.copy()
        self._put(self._before)
        self.initial.put(self.initial.values)
        yield
        self._put(now)
        self.initial.put(private)

    @contextmanager
    def acting(self, client: str) -> Iterator[None]:
        if client not in self.clients:
            raise ConfigError(f"this rank has no client `{client}`", hint=f"it has {', '.join(self.clients)}")
        self._finish_copies()
        private = self.initial.copy()
        self.initial.put(self.stored.get(client, self.initial.values))
        yield
        self.initial.put(private)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        numbers = {"weight": self.weight, "turns": self.turns, "neutral": self.neutral}
        return {"private": self.stored, "sums": self.sums, "before": self.before, **numbers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        device = self.attachments.world.device
        self.stored = {
            client: {name: value.to(device, copy=True) for name, value in values.items()}
            for client, values in state_dict["private"].items()
        }
        for own, saved in zip((*self.sums, *self.before), (*state_dict["sums"], *state_dict["before"]), strict=True):
            own.copy_(saved)
        self.weight, self.turns = float(state_dict["weight"]), int(state_dict["turns"])
        self.neutral = bool(state_dict["neutral"])

    def merge(self, states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Build this rank's state from the states of another number of ranks; it has the private tensors of this rank's
        clients."""
        everything = {client: values for state in states for client, values in state["private"].items()}
        own = {client: everything[client] for client in self.clients if client in everything}
        return {**states[0], "private": own, "weight": 0.0, "turns": 0}
