"""Settings of federated averaging: clients train in turn, and what they have learnt is merged every round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shoestring import figures
from shoestring.comm.settings.base import check_types, refuse_sparse
from shoestring.comm.settings.calls import parse_exchange
from shoestring.comm.settings.local_steps import PLAIN, LocalSteps
from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, Curve, Feature, Inexact, Reduction, Seam
from shoestring.data import ForClients

if TYPE_CHECKING:
    from torch import Tensor

    from shoestring.comm.codecs.codec import Codec
    from shoestring.comm.settings.base import Exchange
    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace

__all__ = ["FedAvg"]


@dataclass(frozen=True, kw_only=True)
class FedAvg(ForClients, Feature):
    """Clients train in turn, each from the merged weights, and every round merges what they have learnt.

    With `data.clients`, a rank trains several clients; otherwise each rank is a client. Every turn begins with a new
    state of the optimizer. McMahan et al., 2017 (arXiv 1602.05629); with `proximal`, FedProx (Li et al., 2020, arXiv
    1812.06127); with `private`, FedPer (Arivazhagan et al., 2019, arXiv 1912.00818).
    """

    every: int = 20
    """Number of optimizer steps in a client's turn, between two merges. A larger value sends less, and lets the clients
    drift further apart."""
    private: tuple[str, ...] = ()
    """Patterns of names, such as `style.*`, of parameters and buffers that stay with each client. They are neither sent
    nor merged; a checkpoint of the rank holds them, and the exported model has their initial values."""
    client_weights: Literal["samples", "equal"] = "samples"
    """Weights of the clients in a merge: "samples" weighs each client by the number of its training samples, "equal"
    gives all clients the same weight."""
    proximal: float = 0.0
    """Strength of the pull towards the merged weights, which is added to the gradients: `proximal` times the distance
    (FedProx). A larger value keeps clients closer together, and lets each learn less in its turn. 0 adds nothing."""
    outer_lr: float = 1.0
    """Learning rate of the outer optimizer. Without momentum, 1 moves the weights to the mean of the clients."""
    outer_momentum: float = 0.0
    """Decay of the outer optimizer's velocity (FedAvgM). A larger value averages over more rounds and reacts more
    slowly."""
    codec: str = "fp32"
    """Encoding of the data that ranks send each other: "fp32", "bf16", "8bit", "4bit", or a codec of exchanges at every
    step, written as a call: "powersgd(rank=4)", "sign". Fewer bits send less. The errors of 8 and 4 bits, signs, low
    rank and sparse entries are added to the next exchange (error feedback)."""

    seams: ClassVar = (Seam.SHARD, Seam.STEP)

    @cached_property
    def rounds(self) -> ClientRounds:
        """Settings of the local steps that merge the ranks."""
        return ClientRounds(feature=self, every=self.every, replica="rank")

    @property
    def over(self) -> tuple[str, ...]:
        return DATA

    @property
    def inexact(self) -> Inexact:
        return "replicas"

    def stays(self, name: str) -> bool:
        """Whether the parameter or buffer with this name stays with each client."""
        return any(fnmatchcase(name, pattern) for pattern in self.private)

    def find_codec(self) -> Exchange:
        """The settings of `codec`."""
        return parse_exchange(PLAIN.get(self.codec, self.codec), f"{self.name}.codec", PLAIN)

    def check(self, attachments: Attachments) -> None:
        check_types(self, attachments)
        if not 0 <= self.proximal < math.inf:
            raise ConfigError(f"`{self.name}.proximal` must be zero or a positive number, got {self.proximal}")
        self.rounds.check(attachments)
        refuse_sparse(self.name, attachments.model)
        self.find_codec().check(attachments)
        names = [name for name, _ in (*attachments.module.named_parameters(), *attachments.module.named_buffers())]
        for pattern in self.private:
            if names and not any(fnmatchcase(name, pattern) for name in names):
                message = f"`{self.name}.private`: no parameter or buffer is called `{pattern}`"
                raise ConfigError(message, hint=f"the model has {', '.join(names[:3])}, …; a pattern is `style.*`")
        trained = [name for name, tensor in attachments.module.named_parameters() if tensor.requires_grad]
        if trained and all(map(self.stays, trained)):
            hint = "name only what is each client's own"
            raise ConfigError(f"`{self.name}.private` leaves no trained parameter to merge", hint=hint)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        if seam is Seam.SHARD:
            self.rounds.apply(attachments, seam)
        else:
            from shoestring.comm.local.clients import install

            install(attachments, self)

    def export(self, weights: dict[str, Tensor], states: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the merged weights; parameters and buffers that stay with clients have their initial values."""
        merged = {**states.get("outer", {}).get("anchor", {}), **states.get("initial", {})}
        changed = {name: merged[name].to(weights[name].dtype) for name in weights.keys() & merged.keys()}
        return weights | changed

    def explain(self, attachments: Attachments) -> str:
        sizes = {name: tensor.numel() for name, tensor in attachments.module.named_parameters()}
        private = sum(size for name, size in sizes.items() if self.stays(name))
        stays = f", {private:,} of {sum(sizes.values()):,} parameters stay with each client" if private else ""
        pull = f", pulled to the merged weights by {self.proximal:g}" if self.proximal else ""
        by = "their numbers of samples" if self.client_weights == "samples" else "equal weights"
        return f"turns of {self.every} steps, merged by {by}{stays}{pull}"

    def reduction(self, trace: Trace) -> Reduction | None:
        facts, reduction = trace.facts, self.rounds.reduction(trace)
        if reduction is None or not facts.get("rounds"):
            return None
        turns = facts["client_turns"] / facts["rounds"]
        stays = f"; {figures.size(facts['private_bytes'])} stay with each client" if facts["private_bytes"] else ""
        sent = facts["outer_bytes"] / facts["rounds"]
        cost = f"clients differ within a round; {facts['rounds']:.0f} rounds, each of {turns:.1f} turns of this rank"
        return replace(reduction, cost=f"{cost} and {figures.size(sent)} sent by it{stays}")

    def report_items(self, trace: Trace) -> Sequence[Curve]:
        if not trace.facts.get("rounds"):
            return ()
        return (Curve(title="Clients of this rank in the newest round", metrics={"round_clients": "clients"}),)


@dataclass(frozen=True, kw_only=True)
class ClientRounds(LocalSteps):
    """The local steps of `FedAvg`, in which a rank is a replica."""

    feature: FedAvg
    """The settings of federated averaging."""

    @property
    def name(self) -> str:
        return self.feature.name

    @property
    def outer(self) -> tuple[float, float, bool]:
        return self.feature.outer_lr, self.feature.outer_momentum, False

    def merges(self, name: str) -> bool:
        return not self.feature.stays(name)

    def make_codec(self) -> Codec:
        return self.feature.find_codec().make_codec()
