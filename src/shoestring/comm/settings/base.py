"""What all exchanges of gradients at every step have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_type_hints

from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, HOSTS, LOCAL, Feature, Reduction, Seam

if TYPE_CHECKING:
    from torch import nn

    from shoestring.comm.codecs.codec import Codec
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace

KINDS: dict[Any, tuple[type, str]] = {int: (Integral, "a whole number"), float: (Real, "a number")}


@dataclass(frozen=True, kw_only=True)
class Exchange(Feature):
    """An exchange of gradients at every step: a codec, and how its messages are divided and routed."""

    parts: int = 2
    """Number of parts that the gradients of a step are exchanged in. With more parts the first ones overlap with more
    of the backward pass, at the price of more collectives and their latency."""
    channels: int = 1
    """Number of parts that may be exchanged at the same time, each over a process group of its own. More channels use
    a link with high latency better, and compete for a busy one."""
    torus: bool = True
    """Whether the codec runs between hosts only, on sums formed inside each host (2D torus). It applies where several
    hosts have several ranks each."""
    budget_kb: float = 0.0
    """Average number of kB that each rank may send in a step. Each step sends as many parameters as fit, and the
    residuals of the others grow until they are sent; 0 sends all."""
    select: Literal["auto", "gain", "hypernetwork", "per-node", "knapsack", "uniform"] = "auto"
    """Method that selects the parameters to send within `budget_kb`: by what sending them lowers the loss by, as it was
    lately ("gain"), as a small network learns to predict it ("hypernetwork"), or as a network on each rank predicts it
    for that rank alone ("per-node"); by the size of what is left to send ("knapsack"); or each as often ("uniform").
    "auto" takes the gain."""

    seams: ClassVar = (Seam.WIRE,)
    runs_alone: ClassVar = False
    """Whether the codec also runs on a single rank, because it does a part of the optimizer's work."""

    @abstractmethod
    def make_codec(self) -> Codec:
        """Make a new codec with these settings, for all parameters."""

    def make_budgeted_codec(self) -> Codec:
        """Make a new codec with these settings, which sends only selected parameters where there is a budget."""
        if not self.budget_kb:
            return self.make_codec()
        if self.select == "per-node":
            return self.make_per_node_codec()
        from shoestring.comm.selection.budget import BudgetedCodec, Uniform
        from shoestring.comm.selection.hypernetwork import Hypernetwork
        from shoestring.comm.selection.knapsack import GainKnapsack, Knapsack

        kinds = {"hypernetwork": Hypernetwork, "knapsack": Knapsack, "uniform": Uniform}
        return BudgetedCodec(self.make_codec, kinds.get(self.select, GainKnapsack)(), 1e3 * self.budget_kb)

    def make_per_node_codec(self) -> Codec:
        """Make a new codec that sends the parameters which each rank selects for itself.

        Raises:
            ConfigError: the codec needs the same parameters on all ranks.
        """
        raise ConfigError(
            f'`{self.name}` needs the same layers on all ranks, but with `select = "per-node"` each rank sends its own',
            hint='use [comm.dense] or [comm.bf16], or `select = "gain"`',
        )

    @property
    def cost(self) -> str:
        """What the reduction costs, in words."""
        return "gradients are approximate; the residual is added later"

    def why_not_replayed(self, job: Job) -> str:
        """Why steps cannot be replayed from what was exchanged, with what to do; empty where they can."""
        if self.budget_kb or not self.make_codec().replays:
            return "it keeps state of its own on each rank; use [comm.quantize] with feedback = false, or [comm.bf16]"
        if self.torus and min(job.world.ranks_over([axis]) for axis in DATA) > 1:
            return "set `torus = false`: ranks of one host exchange other rows each"
        return ""

    @property
    def needs_all_gradients(self) -> bool:
        """Whether the codec must have all gradients of a step at once, so that `parts` does not apply."""
        return self.select == "per-node"

    @property
    def exchanges(self) -> int:
        """Number of exchanges a step."""
        return 1 if self.needs_all_gradients else self.parts

    def check(self, job: Job) -> None:
        check_types(self, job)
        for name in ("parts", "channels"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{self.name}.{name}` must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.budget_kb < math.inf:
            raise ConfigError(f"`{self.name}.budget_kb` must be a number of kB, got {self.budget_kb}")
        if self.select != "auto" and not self.budget_kb:
            raise ConfigError(
                f'`{self.name}.select = "{self.select}"` has nothing to select, because all parameters are sent',
                hint="set `budget_kb` to the kB that a step may send",
            )
        if self.budget_kb:
            self._check_budget(job)
        refuse_sparse(self.name, job.model)

        from shoestring._torch import has_hook

        if has_hook(job.model):
            raise ConfigError(
                "DDP already has a communication hook, and takes only one",
                hint=f"register no hook, or remove `{self.name}`",
            )
        sharding = [feature for feature in job.features if feature.engine in ("fsdp", "zero")]
        if job.world.ranks_over(DATA) > 1 and {axis for feature in sharding for axis in feature.over}.issuperset(DATA):
            raise ConfigError(
                f"`{self.name}` has nothing to exchange, because the gradients are sharded over all ranks",
                hint=f'shard inside hosts only, with {sharding[0].name}.hosts = "leave"',
            )

    def _check_budget(self, job: Job) -> None:
        """Refuse a budget that does not carry the numbers that travel beside layers, as far as it is known by now."""
        from shoestring.comm.selection.budget import BudgetedCodec
        from shoestring.comm.selection.per_node import PerNodeCodec

        codec, hosts = self.make_budgeted_codec(), job.world.ranks_over([HOSTS])
        ranks = hosts if hosts > 1 else job.world.ranks_over(DATA)
        if isinstance(codec, BudgetedCodec | PerNodeCodec):
            codec.find_overhead(sum(tensor.numel() > 0 for tensor in job.trained.values()), ranks)

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.comm.exchange.attach import install

        install(job, self)

    def explain(self, job: Job) -> str:
        hosts, local = job.world.ranks_over([HOSTS]), job.world.ranks_over([LOCAL])
        if hosts * local == 1:
            return "one rank: nothing is sent" if self.runs_alone else "off: one rank"
        hierarchical = self.torus and hosts > 1 and local > 1
        between = f"{hosts} hosts, of sums inside each" if hierarchical else f"{hosts * local} ranks"
        select = "gain" if self.select == "auto" else self.select
        budget = f"{select} within {self.budget_kb:g} kB a step, " if self.budget_kb else ""
        parts = f"in {self.exchanges} parts " if self.exchanges > 1 else ""
        when = "during the backward pass" if job.engine == "ddp" else "before the step"
        return f"between {between}, {budget}{parts}{when}"

    def reduction(self, trace: Trace) -> Reduction | None:
        facts = trace.facts
        if not facts.get("wire_steps"):
            return None
        exposed = facts["wire_exposed"] / facts["wire_steps"]
        return Reduction(
            unit="MB sent a rank and step",
            used=facts["wire_bytes"] / facts["wire_steps"] / 1e6,
            without=facts["wire_without"] / 1e6,
            measured=True,
            cost=f"{self.cost}; {1e3 * exposed:.0f} ms of exposed communication a step",
        )


def refuse_sparse(name: str, model: nn.Module) -> None:
    """Raise ConfigError for a model whose gradients are sparse tensors, which the feature `name` does not exchange."""
    if any(getattr(module, "sparse", False) is True for module in model.modules()):
        raise ConfigError(f"`{name}` does not exchange sparse gradients", hint="use nn.Embedding(sparse=False)")


def check_types(feature: Feature, job: Job) -> None:
    """Raise a ConfigError where a setting is no number but should be, or a trained parameter is no real number.

    Codecs and merges would lose the imaginary part of complex gradients.
    """
    for name, kind in get_type_hints(type(feature)).items():
        if kind in KINDS and not isinstance(value := getattr(feature, name), KINDS[kind][0]):
            raise ConfigError(f"`{feature.name}.{name}` must be {KINDS[kind][1]}, got {value!r}")
    if found := [name for name, tensor in job.trained.items() if tensor.is_complex()]:
        raise ConfigError(
            f"`{feature.name}` exchanges real numbers, and the parameter `{found[0]}` is complex",
            hint="train its real and imaginary parts as one real parameter, and use torch.view_as_complex",
        )
