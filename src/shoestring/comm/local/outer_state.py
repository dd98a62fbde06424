"""Attaches an outer optimizer to a job, and saves its state: the state of each rank, and the state that all ranks
share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoestring.comm.exchange.worker import WorkerTask
from shoestring.comm.local.outer import ASKED, WEIGHT, OuterOptimizer, PendingMerge, any_failed
from shoestring.comm.local.second_moment import AVERAGED_FOR
from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, LOCAL, Phase
from shoestring.sharded import is_sharded

if TYPE_CHECKING:
    from shoestring.comm.settings.local_steps import LocalSteps

log = logging.getLogger("shoestring")


def install(attachments: Attachments, settings: LocalSteps) -> None:
    """Attach an outer optimizer, which merges the job's replicas after optimizer steps."""
    settings.check_scaler(attachments.scaler, attachments.world)
    outer = OuterOptimizer(attachments, settings)
    attachments.exits.callback(outer.close)
    attachments.at(Phase.OUTER, outer.after_step)
    attachments.phases[Phase.CLIP].insert(0, outer.before_step)  # inserted first, so that later callbacks see averages
    if attachments.world.ranks_over(settings.over) > 1:
        attachments.refuse_with(outer.refuse)
    keep_state(attachments, outer)
    let_replicas_differ(attachments, settings.over)


def keep_state(attachments: Attachments, outer: OuterOptimizer) -> None:
    """Register what checkpoints save: the outer optimizer's state, equal for all replicas, and the state of each rank's
    codecs."""
    sharded = any(is_sharded(parameter) for parameter in attachments.module.parameters())
    attachments.keep("outer", SharedState(outer), across="shard" if sharded else "same", merged=True)
    own = RankState(outer)
    attachments.keep("replica", own, across="own", merge=own.merge)


def average_former_replicas(attachments: Attachments) -> None:
    """Let a single replica resume from the mean of the weights of several replicas in a checkpoint."""
    attachments.kept["model"] = replace(attachments.kept["model"], merge=average_weights)


def let_replicas_differ(attachments: Attachments, over: Sequence[str]) -> None:
    """Register that weights and optimizer state differ between the replicas along the mesh axes `over`."""
    replicas, replica = attachments.world.ranks_over(over), attachments.world.index_over(over)

    def take_one(states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Choose the state of one former rank: the same state for all ranks of one replica, and different states for
        different replicas."""
        return states[replica * len(states) // replicas]

    def take_first(states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        return states[0]

    merges = {"model": average_weights, "optimizer": take_one}
    for name, saved in attachments.kept.items():
        if not saved.merged:
            merge = merges.get(name, saved.merge or (None if saved.across == "own" else take_first))
            attachments.kept[name] = replace(saved, across="own", merge=merge)
    attachments.merge_apart = take_first


def average_weights(states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Average the weights of all replicas, in float64, so that the mean of equal weights is exactly that weight."""

    def mean(tensors: Sequence[Tensor]) -> Tensor:
        if not tensors[0].is_floating_point():
            return tensors[0]
        return torch.stack(list(tensors)).mean(0, dtype=torch.float64).to(tensors[0].dtype)

    return {name: mean([state[name] for state in states]) for name in states[0]}


class SharedState:
    """State that is equal for all replicas: the outer optimizer's state, and exchanged means that are not merged
    yet."""

    def __init__(self, outer: OuterOptimizer) -> None:
        self.outer = outer

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        fragments = self.outer.fragments
        anchors = [fragment.to_saved(fragment.anchor) for fragment in fragments]
        velocities = [fragment.to_saved(fragment.velocity) for fragment in fragments if fragment.velocity is not None]
        flights = []
        for merge in self.outer.pending:
            if any_failed(merge.status.result()):
                continue
            means = [fragments[i].to_saved(mean) for i, mean in zip(merge.fragments, merge.means, strict=True)]
            head = {"fragments": merge.fragments, "due": merge.due, "plain": merge.plain}
            flights.append({**head, "means": means, "buffers": merge.buffers, "told": merge.status.result()})
        joined = {"anchor": _join(anchors), "velocity": _join(velocities)}
        averaged_for = self.outer.attachments.optimizer.param_groups[0].get(AVERAGED_FOR, 1)
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
            for group in self.outer.attachments.optimizer.param_groups:  # earlier versions did not save this key
                group[AVERAGED_FOR] = state_dict.get(AVERAGED_FOR, moments.replicas)

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
        # If the number of replicas has changed, all replicas start from the mean weights, which then count as the
        # weights sent. If the number is unchanged, `RankState` loads the weights that each replica has sent.
        moves = self.outer.settings.late_merge == "move"
        sent = [fragment.anchor - mean for fragment, mean in zip(fragments, means, strict=True)] if moves else []
        device = means[0].device
        buffers = [buffer.to(device) for buffer in saved["buffers"]]
        size, rows = self.outer.attachments.world.ranks_over(DATA), saved["told"].clone()
        rows[:, ASKED] = 0  # votes to stop were for the saved run only
        rows = torch.nn.functional.pad(rows, (0, WEIGHT + 1 - rows.shape[1]))  # earlier versions had fewer columns
        rows = rows if len(rows) == size else rows.new_zeros(size, rows.shape[1])
        return PendingMerge(
            saved["fragments"], saved["due"], saved["plain"], means, buffers, WorkerTask.completed(rows), sent
        )


def _join(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for part in parts for name, tensor in part.items()}


class RankState:
    """State of one rank: residuals of the codecs, number of target tokens reported, and weights sent in pending
    merges."""

    def __init__(self, outer: OuterOptimizer) -> None:
        self.outer = outer
        torus = outer.channel.route.inner is not None
        self.locals = outer.attachments.world.ranks_over([LOCAL]) if outer.sharded or torus else 1

    def state_dict(self) -> dict[str, Any]:
        for merge in self.outer.pending:
            merge.status.result()  # wait, because the exchange changes the codec's state
        sent = [merge.sent for merge in self.outer.pending if not any_failed(merge.status.result())]
        codecs = {"codec": self.outer.codec.state_dict(), "gradients": self.outer.gradient_codec.state_dict()}
        return {"locals": self.locals, "told": self.outer.reported_tokens, "sent": sent, **codecs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        reported, tokens = state_dict["told"], self.outer.attachments.progress.tokens
        self.outer.reported_tokens = tokens if reported is None else reported
        self.outer.tokens_before = tokens
        self.outer.codec.load_state_dict(state_dict["codec"])
        self.outer.gradient_codec.load_state_dict(state_dict.get("gradients", {}))
        for merge, sent in zip(self.outer.pending, state_dict.get("sent", ()), strict=False):
            merge.sent = [tensor.to(merge.means[0].device, copy=True) for tensor in sent]

    def merge(self, states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Merge the residuals of ranks that hold the same rows; residuals are lost if the number of ranks per host has
        changed."""
        merged: dict[str, Any] = {"locals": self.locals, "told": None, "codec": {}, "gradients": {}, "sent": ()}
        if states[0]["locals"] != self.locals:
            log.warning("comm: residuals are lost, because the number of ranks per host has changed")
            return merged
        alike = states[rank % self.locals :: self.locals]
        for name, codec in (("codec", self.outer.codec), ("gradients", self.outer.gradient_codec)):
            merged[name] = codec.merge_states([state.get(name, {}) for state in alike])
        return merged
