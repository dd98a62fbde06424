"""Settings of data, pipeline and tensor parallelism; importing this module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal

from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, HOSTS, LOCAL, Feature, Reduction, Seam, Table, splitting
from shoestring.figures import memory, percent, seconds
from shoestring.parallel.pipeline.names import MESSAGES_FACT, STAGE, WAITED_FACT, WHOLE_FACT
from shoestring.parallel.tensor import names as tensor
from shoestring.planning.step import GradientExchange, Situation, StepPlan

if TYPE_CHECKING:
    from torch import nn

    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace
    from shoestring.core.world import World
    from shoestring.parallel.pipeline.orders import Pass
    from shoestring.parallel.pipeline.stage import Layout

FIRST_BUCKET_MB = 1.05
"""Size in MB of the smallest bucket that works with torch.compile. DDP's first bucket always has 2**20 bytes, and
torch.compile requires that no other bucket is smaller."""
SMALLER_BUCKETS_MB = (4.0, FIRST_BUCKET_MB)
"""Bucket sizes that a plan tries besides the default, which leaves most of the exchange for the end of the backward
pass if there are less than about 100 MB of gradients."""


def divisors(number: int) -> list[int]:
    """The divisors of a number, in increasing order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@dataclass(frozen=True, kw_only=True)
class DDP(Feature):
    """Replicate the model on every rank and average gradients (torch DDP); the default with several ranks."""

    bucket_mb: float = 25.0
    """Size of a gradient bucket in MB. Each bucket is all-reduced while the backward pass still runs."""
    find_unused: bool = False
    """Whether to search in each step for parameters without a gradient, by traversing the autograd graph. Needed if
    some steps do not use all parameters."""
    hosts: Literal["replicate", "leave"] = "replicate"
    """Parallelism across hosts: `replicate` averages gradients across hosts too, and `leave` lets another feature use
    the mesh axis of hosts."""

    seams: ClassVar = (Seam.SHARD,)
    averages_in_backward: ClassVar = True

    @property
    def over(self) -> tuple[str, ...]:
        return (LOCAL,) if self.hosts == "leave" else DATA

    def check(self, attachments: Attachments) -> None:
        if not 0 < self.bucket_mb < math.inf:
            raise ConfigError(f"`{self.name}.bucket_mb` must be positive, got {self.bucket_mb}")
        if attachments.wrapped:
            raise ConfigError("the model is already wrapped in DDP", hint=f"remove {self.name}")
        if self.find_unused and (names := splitting(attachments.features, attachments.world)):
            message = f"`{self.name}.find_unused` needs the whole model, but with `{names[0]}` a rank holds only a part"
            raise ConfigError(message, hint="set it to false")
        if self.bucket_mb < FIRST_BUCKET_MB and any(Seam.GRAPH in feature.seams for feature in attachments.features):
            raise ConfigError(
                f"`{self.name}.bucket_mb` of {self.bucket_mb:g} is too small for torch.compile",
                hint=f"set it to {FIRST_BUCKET_MB} or more",
            )

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.parallel.ddp import replicate

        replicate(attachments, self.over, self.bucket_mb, self.find_unused)

    @classmethod
    def alternatives(cls, situation: Situation) -> list[DDP]:
        ways = [cls(), cls(hosts="leave")] if situation.two_levels else [cls()]
        return [replace(one, bucket_mb=size) for one in ways for size in SMALLER_BUCKETS_MB]

    def plan(self, step: StepPlan) -> DDP:
        lanes = 2 if step.device == "cpu" else 1  # Gloo has two threads for each process group
        step.average(GradientExchange("all-reduce", self.over, self.bucket_mb * 2**20, lanes=lanes))
        step.buckets = step.world.ranks_over(self.over) > 1
        return self

    def explain(self, attachments: Attachments) -> str:
        replicas, hosts = attachments.world.ranks_over(self.over), attachments.world.ranks_over([HOSTS])
        if replicas == 1:
            return "off: one rank" if attachments.world.ranks_over(DATA) == 1 else "off: one rank a host"
        return f"{replicas} replicas" + (f" in each of {hosts} hosts" if self.over == (LOCAL,) else "")


@dataclass(frozen=True, kw_only=True)
class FSDP(Feature):
    """Shard parameters, gradients and optimizer state over ranks (torch FSDP2, `fully_shard`)."""

    hosts: Literal["shard", "replicate", "leave"] = "shard"
    """Parallelism across hosts: `shard` shards over all ranks, `replicate` shards within each host and replicates
    across hosts (hybrid sharding), and `leave` lets another feature use the mesh axis of hosts."""
    reshard_after_forward: bool = True
    """Whether to free gathered parameters after the forward pass and gather them again for the backward pass. This
    lowers memory and costs one more all-gather per step."""

    seams: ClassVar = (Seam.SHARD,)
    divided: ClassVar = "parameters"

    @property
    def over(self) -> tuple[str, ...]:
        return (LOCAL,) if self.hosts == "leave" else DATA

    def check(self, attachments: Attachments) -> None:
        if attachments.wrapped:
            raise ConfigError("the model is already wrapped in DDP", hint=f"remove DDP or {self.name}")
        scalars = [name for name, parameter in attachments.module.named_parameters() if parameter.ndim == 0]
        if scalars and attachments.world.ranks_over(self.over) > 1:
            raise ConfigError(
                f"`{self.name}` shards parameters along their first dimension, and `{scalars[0]}` has no dimension",
                hint="give the parameter the shape (1,), or use parallel.DDP()",
            )

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.parallel.fsdp import shard

        shard(attachments, self.over, self.hosts == "replicate", self.reshard_after_forward)

    @classmethod
    def alternatives(cls, situation: Situation) -> list[FSDP]:
        ways = [cls(), cls(hosts="replicate")] if situation.two_levels else [cls()]
        return [replace(one, reshard_after_forward=reshard) for one in ways for reshard in (True, False)]

    def plan(self, step: StepPlan) -> FSDP:
        over = DATA if self.hosts == "shard" else (LOCAL,)
        ranks = step.world.ranks_over(over)
        if ranks > 1:
            step.gathered, step.gathers = over, 2 if self.reshard_after_forward else 1
            step.average(GradientExchange("reduce-scatter", over, 0.0, every=True))
            step.divided = {"optimizer": ranks, "gradients": ranks, "parameters": ranks}
        if self.hosts == "replicate":
            step.average(GradientExchange("all-reduce", (HOSTS,), 0.0, every=True, shard=ranks))
        return self

    def explain(self, attachments: Attachments) -> str:
        hosts, ranks = attachments.world.ranks_over([HOSTS]), attachments.world.ranks_over([LOCAL])
        if hosts * ranks == 1:
            return "off: one rank"
        if self.hosts == "shard":
            return f"sharded over {hosts * ranks} ranks"
        return f"sharded over the {ranks} ranks of a host, {self.hosts}d across {hosts} hosts"

    def reduction(self, trace: Trace) -> Reduction | None:
        shards, whole = trace.facts.get("shards", 1.0), 4 * trace.gradient_bytes / 2**30
        if shards == 1:
            return None
        return Reduction(
            unit="GiB of parameters, gradients and optimizer state a rank",
            used=whole / shards,
            without=whole,
            measured=False,
            cost="gathers parameters twice a step" if self.reshard_after_forward else "gathers parameters once a step",
        )


@dataclass(frozen=True, kw_only=True)
class Pipeline(Feature):
    """Cut the model's blocks into stages on different ranks, which exchange activations instead of gradients.

    The ranks of a pipeline work on the same micro-batches one after another, so a step needs several micro-batches
    (`run.accumulate`). The result is the same as on one process.
    """

    stages: int = 0
    """Number of stages; by default the number of hosts, or with a single host the number of ranks."""
    cuts: tuple[int, ...] = ()
    """Index of the first block of each part, except the first part, such as `[4, 8]`. By default all parts have about
    the same number of multiplications."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of passes: `1f1b` runs a backward pass as soon as possible, and holds activations of few micro-batches;
    `gpipe` runs all forward passes first."""
    chunks: int = 1
    """Number of parts of the model in each stage (interleaved schedule). With more parts, stages wait less but send
    more messages."""
    ahead: int = 1
    """Additional micro-batches that a stage may have in flight, for each link between it and the last stage. More
    micro-batches hide the latency of slow links, but hold more activations."""
    pass_order: tuple[str, ...] = ()
    """Order of the passes of each stage, one text for each stage, as `shoestring plan` writes it where a step then ends
    earlier than by `schedule`: `f0.2` is the forward pass of micro-batch 2 through part 0, `b0.2` its backward pass.
    Steps with another number of micro-batches, and evaluation, follow `schedule`."""
    embeddings: Literal["auto", "first", "last"] = "auto"
    """Stage that looks up embeddings if they are tied to the output layer. With `last`, the last stage sends embedded
    tokens to the first stage and gets their gradients back. With `first`, the two stages exchange the gradient of the
    embeddings once per step, which is less for small vocabularies. `auto` is `last`, or `first` together with DDP,
    which averages gradients in one backward pass."""

    seams: ClassVar = (Seam.SHARD, Seam.WIRE)

    @property
    def over(self) -> tuple[str, ...]:
        return (STAGE,)

    def arrange(self, world: World) -> World:
        for name, least in (("stages", 0), ("chunks", 1), ("ahead", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"`{self.name}.{name}` must be at least {least}, got {getattr(self, name)}")
        stages = self.stages or (world.hosts if world.hosts > 1 else world.local_size)
        if stages == 1 or STAGE in world.axes:
            return world if stages == 1 else world.split(LOCAL, STAGE, stages)
        axes = [axis for axis in (HOSTS, LOCAL) if world.ranks_over([axis]) % stages == 0]
        if not axes:
            raise ConfigError(
                f"`{self.name}.stages` is {stages}, which divides neither {world.hosts} hosts nor "
                f"{world.local_size} ranks of a host",
                hint="set it to a number that divides one of them",
            )
        return world.split(axes[0], STAGE, stages)

    def looks_up_last(self, *, tied: bool, features: Iterable[Feature]) -> bool:
        """Whether the last stage, instead of the first, looks up embeddings."""
        one_backward = any(feature.averages_in_backward for feature in features)
        return tied and (self.embeddings == "last" or (self.embeddings == "auto" and not one_backward))

    def check(self, attachments: Attachments) -> None:
        from shoestring.parallel.pipeline.checking import check

        check(attachments, self)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.parallel.pipeline.running import attach, sum_tied

        (attach if seam is Seam.SHARD else sum_tied)(attachments, self)

    def parts(self, layout: Layout, stages: int) -> list[range]:
        """The range of blocks of each part of the model; part p belongs to stage p mod `stages`.

        Raises:
            ConfigError: there are fewer blocks than parts, or `cuts` do not give this number of parts.
        """
        return self.cut(layout.costs(), stages)

    def cut(self, costs: Sequence[float], stages: int, sends: Sequence[float] = ()) -> list[range]:
        """Cut blocks with these costs into parts; see `parts`, and for `sends` see `orders.balanced`."""
        from shoestring.parallel.pipeline.orders import balanced

        parts = stages * self.chunks
        if len(costs) < parts:
            wanted = f"{stages} stages" + (f" of {self.chunks} parts" if self.chunks > 1 else "")
            raise ConfigError(
                f"the model has {len(costs)} blocks, too few for {wanted}", hint=f"lower `{self.name}.stages`"
            )
        if not self.cuts:
            return balanced(costs, parts, sends)
        ends = (0, *self.cuts, len(costs))
        if len(self.cuts) != parts - 1 or any(end <= start for start, end in pairwise(ends)):
            message = f"`{self.name}.cuts` {[*self.cuts]} do not cut {len(costs)} blocks into {parts} parts"
            raise ConfigError(message, hint=f"give {parts - 1} increasing numbers between 1 and {len(costs) - 1}")
        return [range(*pair) for pair in pairwise(ends)]

    def planned_passes(self, stages: int, first: int, micro: int) -> tuple[list[Pass], ...] | None:
        """The passes of each stage by `pass_order`; None if it is empty, or for another number of micro-batches.

        Args:
            first: index of the first part.

        Raises:
            ConfigError: `pass_order` is no order of the passes of so many stages.
        """
        from shoestring.parallel.pipeline.orders import read_orders

        if not self.pass_order:
            return None
        try:
            every = read_orders(tuple(self.pass_order), stages, self.chunks, first)
        except ValueError as error:
            raise ConfigError(f"`{self.name}.pass_order`: {error}", hint="plan again, or remove the setting") from error
        return every if sum(one.part == 0 and not one.backward for one in every[0]) == micro else None

    def as_trained(self, model: nn.Module, world: World, features: Iterable[Feature]) -> Pipeline:
        """The same with the cuts and the place of embeddings that training uses where they are not set."""
        from shoestring.parallel.pipeline.stage import Layout

        stages = world.ranks_over([STAGE])
        if stages == 1:
            return self
        layout = Layout(model)
        cuts = tuple(part.start for part in self.parts(layout, stages)[1:])
        last = self.looks_up_last(tied=bool(layout.tied), features=features)
        return replace(self, stages=stages, cuts=cuts, embeddings="last" if last else "first")

    @classmethod
    def alternatives(cls, situation: Situation) -> list[Pipeline]:
        stages = {number for axis in DATA for number in divisors(situation.world.axes[axis]) if number > 1}
        return [
            cls(stages=number, chunks=chunks, ahead=ahead)
            for number in sorted(stages)
            for chunks in (1, 2)
            for ahead in (0, 1, 2)
            if number * chunks <= situation.blocks
        ]

    def plan(self, step: StepPlan) -> Pipeline:
        from shoestring.parallel.pipeline.orders import orders

        stages = step.world.ranks_over([STAGE])
        if stages == 1:
            return self
        model = step.model
        step.stages, step.over_stages = stages, (STAGE,)
        embeddings = self.embeddings
        # With `first`, both gradients of tied weights are sent at the same time, which takes longer on slow links.
        if embeddings == "auto" and 0 < 2 * model.tied < model.hidden[0] * step.batch / step.replicas:
            embeddings = "first"
        settled = replace(self, stages=stages, embeddings=embeddings)
        step.first = -1 if settled.looks_up_last(tied=bool(model.tied), features=step.features) else 0
        costs = [
            model.at(block.forward, step.samples) + model.at(block.backward, step.samples) for block in model.blocks
        ]
        for place, around in ((0 if step.first == 0 else -1, model.before), (-1, model.behind)):
            costs[place] += model.at(around.forward, step.samples) + model.at(around.backward, step.samples)
        links, group = step.links, step.group((STAGE,))
        boundaries = range(len(model.blocks) + 1)
        sends = [links.seconds("message", group, step.hidden(block)) for block in boundaries] if links else []
        step.parts = tuple(self.cut(costs, stages, sends))
        first = -1 if step.first < 0 else 0
        step.passes = self.planned_passes(stages, first, step.micro) or orders(
            stages, self.chunks, step.micro, self.schedule, self.ahead, first=first
        )
        return replace(settled, cuts=tuple(part.start for part in step.parts[1:]))

    def explain(self, attachments: Attachments) -> str:
        from shoestring.parallel.pipeline.stage import Layout

        stages = attachments.world.ranks_over([STAGE])
        if stages == 1:
            return "off: one stage"
        parts = self.parts(Layout(attachments.module), stages)
        counts = ", ".join(str(len(part)) for part in parts)
        order = ", passes in the order of a plan" if self.pass_order else ""
        return (
            f"{stages} stages of {counts} blocks" + (f", {self.chunks} parts each" if self.chunks > 1 else "") + order
        )

    def reduction(self, trace: Trace) -> Reduction | None:
        facts, steps = trace.facts, max(trace.steps, 1)
        if WHOLE_FACT not in facts:
            return None
        waited = facts[WAITED_FACT] / trace.training_seconds if trace.training_seconds else 0.0
        return Reduction(
            unit="bytes a step that the first rank sends",
            used=facts[MESSAGES_FACT] / steps,
            without=2 * facts[WHOLE_FACT] * (trace.ranks - 1) / trace.ranks,
            measured=True,
            cost=f"the first stage waited {percent(waited)} of the time",
        )


@dataclass(frozen=True, kw_only=True)
class Tensor(Feature):
    """Split each layer over ranks of a host (tensor parallelism; Shoeybi et al., 2019). Every rank works on the same
    samples with its own heads and features, and the ranks add up their results twice per block.

    The built-in GPT, GPT-2, ViT, and models with a tensor-parallel plan in transformers need no further settings. For
    other models, name the layers to split.
    """

    ways: int = 0
    """Number of ranks that share a layer; 0 uses all ranks of a host."""
    vocabulary_layers: Literal["auto", "split", "whole"] = "auto"
    """Whether token embeddings and the output layer are split as well (`split`) or not (`whole`); `auto` splits them
    unless a feature computes the loss in the output layer."""
    columns: tuple[str, ...] = ()
    """Layers to split by their outputs, as patterns of names such as `blocks.*.up`. For a fused layer, add the relative
    sizes of its sections: `blocks.*.qkv:8+2+2`."""
    rows: tuple[str, ...] = ()
    """Layers to split by their inputs, which are the outputs of layers in `columns`."""
    gathered: tuple[str, ...] = ()
    """Output layers and embeddings to split by the entries of the vocabulary."""
    heads: tuple[str, ...] = ()
    """Module attributes with a number of heads or features, such as `blocks.*.attention.heads`; they are divided by the
    number of ranks."""
    tiles: int = 1
    """Number of tiles in which layers of `rows` compute their outputs, so that ranks add up one tile while they compute
    the next. With 2 or more, gradients of inputs also travel while those of weights are computed, where a layer alone
    reads its input. More tiles hide more of the messages, but each message has its latency."""

    seams: ClassVar = (Seam.SHARD,)

    @property
    def over(self) -> tuple[str, ...]:
        return (tensor.TENSOR,)

    def arrange(self, world: World) -> World:
        for name, least in (("ways", 0), ("tiles", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"`{self.name}.{name}` must be at least {least}, got {getattr(self, name)}")
        ways = self.ways or world.ranks_over([LOCAL])
        if ways == 1 or tensor.TENSOR in world.axes:
            return world if ways == 1 else world.split(LOCAL, tensor.TENSOR, ways)
        if world.ranks_over([LOCAL]) % ways:
            raise ConfigError(
                f"`{self.name}.ways` is {ways}, which does not divide the {world.ranks_over([LOCAL])} ranks of a host",
                hint="set it to a divisor of that number, because layers are split only inside a host",
            )
        return world.split(LOCAL, tensor.TENSOR, ways)

    def check(self, attachments: Attachments) -> None:
        from shoestring.parallel.tensor.checking import check

        check(attachments, self)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.parallel.tensor.splitting import attach

        attach(attachments, self)

    @classmethod
    def alternatives(cls, situation: Situation) -> list[Tensor]:
        return [cls(ways=number) for number in divisors(situation.world.axes[LOCAL]) if number > 1]

    def plan(self, step: StepPlan) -> Tensor:
        ways = step.world.ranks_over([tensor.TENSOR])
        if ways > 1:
            step.ways, step.over_ways, step.tiles = ways, (tensor.TENSOR,), self.tiles
            step.whole_vocabulary = not self.splits_vocabulary(step.features)
        return replace(self, ways=ways)

    def splits_vocabulary(self, features: Iterable[Feature]) -> bool:
        """Whether token embeddings and the output layer are split as well."""
        in_loss = any(Seam.LOSS in feature.seams for feature in features)
        return self.vocabulary_layers == "split" or (self.vocabulary_layers == "auto" and not in_loss)

    def explain(self, attachments: Attachments) -> str:
        ways = attachments.world.ranks_over([tensor.TENSOR])
        tiles = f", and computes in {self.tiles} tiles" if self.tiles > 1 else ""
        return f"each layer is split over {ways} ranks{tiles}" if ways > 1 else "off: one rank"

    def reduction(self, trace: Trace) -> Reduction | None:
        facts, steps = trace.facts, max(trace.steps, 1)
        if tensor.WHOLE_FACT not in facts:
            return None
        waited = facts[tensor.WAITED_FACT] / trace.training_seconds if trace.training_seconds else 0.0
        exchanged = memory(facts[tensor.REDUCED_FACT] / steps)
        return Reduction(
            unit="bytes of weights that a rank holds",
            used=facts[tensor.HELD_FACT],
            without=facts[tensor.WHOLE_FACT],
            measured=True,
            cost=f"a rank exchanged {exchanged} of activations a step, in {percent(waited)} of the time",
        )


_AGAIN = "plan again with shoestring plan, or remove the table [parallel.planned]"


@dataclass(frozen=True, kw_only=True)
class Planned(Feature):
    """Record of a plan that `shoestring plan` wrote: the model and ranks that it is for, and its predictions.

    A run with a different model or other ranks is refused. The report shows the predictions beside the measurements.
    """

    num_hosts: int
    """Number of hosts that the plan is for."""
    num_ranks: int
    """Number of ranks, on all hosts, that the plan is for."""
    num_weights: int
    """Number of weights that the model trains."""
    seconds: float
    """Predicted seconds of a step."""
    tried_seconds: float = 0.0
    """Measured seconds of a step when the plan was tried."""
    peak_gib: float = 0.0
    """Predicted memory of a rank in GiB: weights, gradients, optimizer state and activations."""

    seams: ClassVar = (Seam.STEP,)

    def arrange(self, world: World) -> World:
        if world.size != self.num_ranks:
            raise ConfigError(f"planned for {self.num_ranks} ranks, and there are {world.size}", hint=_AGAIN)
        if world.hosts not in (self.num_hosts, 1):  # `shoestring check` assumes that all ranks are on one host
            raise ConfigError(f"planned for {self.num_hosts} hosts, and there are {world.hosts}", hint=_AGAIN)
        return world

    def check(self, attachments: Attachments) -> None:
        weights = sum(parameter.numel() for parameter in attachments.parameters)
        if weights != self.num_weights:
            message = f"planned for a model that trains {self.num_weights:,} weights, not {weights:,}"
            raise ConfigError(message, hint=_AGAIN)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        attachments.trace.facts |= {"planned_seconds": self.seconds}

    def explain(self, attachments: Attachments) -> str:
        return f"{seconds(self.seconds)} a step are planned"

    def report_items(self, trace: Trace) -> list[Table]:
        if not trace.steps:
            return []
        took = trace.training_seconds / trace.steps
        rows = (("seconds of a step", self.seconds, self.tried_seconds, took),)
        note = f"{self.num_ranks} ranks on {self.num_hosts} hosts"
        return [Table(title="The plan", head=("", "predicted", "tried", "measured"), rows=rows, note=note)]
