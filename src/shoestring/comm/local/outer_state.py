"""Attaches an outer optimizer to a job, and saves its state: the state of each rank, and the state shared by all."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoestring.comm.exchange.worker import WorkerTask
from shoestring.comm.local.outer import ASKED, OuterOptimizer, PendingMerge, any_failed
from shoestring.comm.local.second_moment import AVERAGED_FOR
from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, LOCAL, Phase
from shoestring.core.job import Job

if TYPE_CHECKING:
    from shoestring.comm.settings.local_steps import LocalSteps

log = logging.getLogger("shoestring")


def install(job: Job, settings: LocalSteps) -> None:
    """Merge the job's replicas after its optimizer's steps from now on."""
    settings.check_scaler(job.scaler, job.world)
    outer = OuterOptimizer(job, settings)
    job.exits.callback(outer.close)
    job.at(Phase.OUTER, outer.after_step)
    job.phases[Phase.CLIP].insert(0, outer.before_step)  # as under DDP, all other work sees the average
    if job.world.ranks_over(settings.over) > 1:
        job.refuse_with(outer.refuse)
    keep_state(job, outer)
    let_replicas_differ(job, settings.over)


def keep_state(job: Job, outer: OuterOptimizer) -> None:
    """Declare what is saved of the outer optimizer, which is the same for all replicas, and of each rank's codecs."""
    sharded = any(isinstance(parameter, DTensor) for parameter in job.module.parameters())
    job.keep("outer", SharedState(outer), across="shard" if sharded else "same")
    own = RankState(outer)
    job.keep("replica", own, across="own", merge=own.merge)


def let_replicas_differ(job: Job, over: Sequence[str]) -> None:
    """Declare that weights and optimizer state differ between the replicas along these mesh axes."""
    replicas, mine = job.world.ranks_over(over), job.world.index_over(over)

    def take_one(states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """One former rank's state: the same for all ranks of a replica, different replicas take different ones."""
        return states[mine * len(states) // replicas]

    def take_first(states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        return states[0]

    for name, merge in {
        "model": average_weights,
        "optimizer": take_one,
        "scaler": take_first,
        "progress": take_first,
    }.items():
        job.kept[name] = replace(job.kept[name], across="own", merge=merge)


def average_weights(states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Average the weights of all replicas, in float64, so that the mean of equal weights is equal to them."""

    def mean(tensors: Sequence[Tensor]) -> Tensor:
        if not tensors[0].is_floating_point():
            return tensors[0]
        return torch.stack(list(tensors)).mean(0, dtype=torch.float64).to(tensors[0].dtype)

    return {name: mean([state[name] for state in states]) for name in states[0]}


class SharedState:
    """State that is the same for all replicas: the outer optimizer's, and exchanged means that are not merged yet."""

    def __init__(self, outer: OuterOptimizer) -> None:
        self.outer = outer

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        fragments = self.outer.fragments
        anchors = [fragment.to_saved(fragment.anchor) for fragment in fragments]
        velocities = [fragment.to_saved(fragment.velocity) for fragment in fragments if fragment.velocity is not None]
        flights = [self._save(merge) for merge in self.outer.pending if not any_failed(merge.status.result())]
        joined = {"anchor": _join(anchors), "velocity": _join(velocities)}
        averaged_for = self.outer.job.built_optimizer.param_groups[0].get(AVERAGED_FOR, 1)
        return {**joined, "flights": flights, "equal": self.outer.equal, AVERAGED_FOR: averaged_for}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for fragment in self.outer.fragments:
            fragment.load(fragment.anchor, state_dict["anchor"])
            if fragment.velocity is not None and state_dict["velocity"]:
                fragment.load(fragment.velocity, state_dict["velocity"])
        self.outer.pending = [self._restore(saved) for saved in state_dict["flights"]]
        self.outer.equal = bool(state_dict.get("equal"))  # earlier versions exchanged no gradients
        if (moments := self.outer.moments) is not None:
            for group in self.outer.job.built_optimizer.param_groups:  # earlier versions did not say
                group[AVERAGED_FOR] = state_dict.get(AVERAGED_FOR, moments.replicas)

    def _save(self, merge: PendingMerge) -> dict[str, Any]:
        means = zip(merge.fragments, merge.means, strict=True)
        named = [self.outer.fragments[i].to_saved(mean) for i, mean in means]
        head = {"fragments": merge.fragments, "due": merge.due, "plain": merge.plain}
        return {**head, "means": named, "buffers": merge.buffers, "told": merge.status.result()}

    def _restore(self, saved: dict[str, Any]) -> PendingMerge:
        fragments = [self.outer.fragments[i] for i in saved["fragments"] if i < len(self.outer.fragments)]
        if [list(named) for named in saved["means"]] != [list(fragment.parameters) for fragment in fragments]:
            raise ConfigError(
                "the checkpoint was saved while other fragments were being exchanged",
                hint="resume with the `fragments` and `layout` that it was saved with",
            )
        means = [torch.zeros_like(fragment.anchor) for fragment in fragments]
        for fragment, mean, named in zip(fragments, means, saved["means"], strict=True):
            fragment.load(mean, named)
        # Replicas of another number start from their mean: they sent what came of the exchange. The others' own weights
        # are loaded later (RankState).
        moves = self.outer.settings.late_merge == "move"
        sent = [fragment.anchor - mean for fragment, mean in zip(fragments, means, strict=True)] if moves else []
        device = means[0].device
        buffers = [buffer.to(device) for buffer in saved["buffers"]]
        size, told = self.outer.job.world.ranks_over(DATA), saved["told"].clone()
        told[:, ASKED] = 0  # votes to stop concerned the run that was saved
        told = told if len(told) == size else told.new_zeros(size, told.shape[1])
        return PendingMerge(
            saved["fragments"], saved["due"], saved["plain"], means, buffers, WorkerTask.completed(told), sent
        )


def _join(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for part in parts for name, tensor in part.items()}


class RankState:
    """State of one rank: its codecs' residuals, and the number of target tokens that it has reported."""

    def __init__(self, outer: OuterOptimizer) -> None:
        self.outer = outer
        torus = outer.channel.route.inner is not None
        self.locals = outer.job.world.ranks_over([LOCAL]) if outer.sharded or torus else 1

    def state_dict(self) -> dict[str, Any]:
        for merge in self.outer.pending:
            merge.status.result()  # the codec changes its state until then
        sent = [merge.sent for merge in self.outer.pending if not any_failed(merge.status.result())]
        codecs = {"codec": self.outer.codec.state_dict(), "gradients": self.outer.gradient_codec.state_dict()}
        return {"locals": self.locals, "told": self.outer.reported_tokens, "sent": sent, **codecs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        told = state_dict["told"]
        self.outer.reported_tokens = self.outer.job.progress.tokens if told is None else told
        self.outer.codec.load_state_dict(state_dict["codec"])
        self.outer.gradient_codec.load_state_dict(state_dict.get("gradients", {}))
        for merge, sent in zip(self.outer.pending, state_dict.get("sent", ()), strict=False):
            merge.sent = [one.to(merge.means[0].device, copy=True) for one in sent]

    def merge(self, states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Merge the residuals of ranks that hold the same rows; they are lost if hosts had another number of ranks."""
        merged: dict[str, Any] = {"locals": self.locals, "told": None, "codec": {}, "gradients": {}, "sent": ()}
        if states[0]["locals"] != self.locals:
            log.warning("comm: residuals are lost, because hosts have another number of ranks, which hold other rows")
            return merged
        alike = states[rank % self.locals :: self.locals]
        for name, codec in (("codec", self.outer.codec), ("gradients", self.outer.gradient_codec)):
            merged[name] = codec.merge_states([state.get(name, {}) for state in alike])
        return merged
