"""The choice between exchanges at every step and local steps, for a bare model.

Both can still be attached at the first forward pass, because no DDP has wrapped the model. So exchanges at every step
run right before the optimizer's step here, and do not overlap with the backward pass. Until the choice is made, state
is declared as that of replicas that differ, each with its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoestring.comm.auto.chooser import Chooser
from shoestring.comm.auto.cost_model import MAIN, PricedExchange
from shoestring.comm.auto.decision import MARGIN, Candidate, Measurements
from shoestring.comm.codecs.codec import CodecFactory
from shoestring.comm.exchange.attach import install
from shoestring.comm.exchange.coordinator import deal_cohorts
from shoestring.comm.local.outer_state import install as install_local
from shoestring.comm.local.schedule import merges_per_step
from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, HOSTS, LOCAL, Seam
from shoestring.core.job import Job
from shoestring.core.kept import Kept
from shoestring.core.trace import Trace
from shoestring.planning.cluster import Cluster
from shoestring.planning.simulate import Decision, Priced, Task, choose, makespan, simulate

if TYPE_CHECKING:
    from shoestring.comm.settings.local_steps import LocalSteps
    from shoestring.comm.settings.per_step import Exchange

GRADIENTS = " of gradients"  # ends the name of the codec of a method's first steps


@dataclass(frozen=True)
class PricedLocalSteps:
    """Local steps on average over a run.

    Args:
        merge: all fragments' exchanges as one. gradients: an exchange of the first steps.
        merges: merges a step. starting: share of the run in which gradients are averaged.
        delay: steps that are computed while an exchange of one of the `fragments` is on the wire.
    """

    merge: PricedExchange
    gradients: PricedExchange
    merges: float
    starting: float
    delay: int
    fragments: int

    def predict(self, trace: Trace, cluster: Cluster) -> Trace:
        code, wire = self._split(self.merge, trace, cluster)
        own = makespan(trace)
        # Fragments are under way one after the other, so that no more than the steps between two merges hides them.
        exposed = max(0.0, wire - min(self.fragments * self.delay, 1 / self.merges) * own)
        first = sum(self._split(self.gradients, trace, cluster))
        local = self.merges * (1 - self.starting)
        return simulate([
            Task("step", "compute", own, MAIN),
            Task("gradients", "wire", self.starting * first, MAIN),
            Task("code", "compute", local * code, MAIN),
            Task("exposed", "wait", local * exposed, MAIN),
        ])  # fmt: skip

    def _split(self, exchange: PricedExchange, trace: Trace, cluster: Cluster) -> tuple[float, float]:
        """Seconds of coding, and of all else that an exchange adds to a step."""
        predicted = exchange.predict(trace, cluster)
        code = sum(span.stop - span.start for span in predicted.spans if span.name == "code")
        return code, makespan(predicted) - makespan(trace) - code


def list_codecs(exchanges: Mapping[str, Exchange], local: Mapping[str, LocalSteps]) -> dict[str, CodecFactory]:
    """The codecs that must be timed, by the call of their method."""
    each_step = {call: exchange.make_codec for call, exchange in exchanges.items()}
    merges = {call: method.make_codec for call, method in local.items()}
    first = {call + GRADIENTS: method.make_gradient_codec for call, method in local.items() if method.start}
    return each_step | merges | first


def choose_method(
    measured: Measurements,
    exchanges: Iterable[str],
    local: Mapping[str, LocalSteps],
    worth: Mapping[str, float],
    total: int,
) -> Decision:
    """Choose the method that reaches a loss first; the first exchange, unless another method is faster by `MARGIN`."""
    costs = measured.costs()

    def price_exchange(call: str) -> PricedExchange:
        return PricedExchange(
            over=(HOSTS,) if measured.shard > 1 else DATA,
            costs=(costs[call],),
            cohorts=deal_cohorts(measured.sizes, 1),
            channels=1,
            bucket=0,
            inner=(LOCAL,),
            shard=measured.shard,
        )

    def price_local(call: str, method: LocalSteps) -> PricedLocalSteps:
        return PricedLocalSteps(
            merge=price_exchange(call),
            gradients=price_exchange(call + GRADIENTS if method.start else call),
            merges=merges_per_step(method.every, method.final_every, total),
            starting=min(1.0, method.start / total) if total else 0.0,
            delay=method.delay,
            fragments=method.fragments,
        )

    prices: dict[str, Priced] = {call: price_exchange(call) for call in exchanges}
    prices |= {call: price_local(call, method) for call, method in local.items()}
    return choose(prices, measured.trace(), measured.cluster(), margin=MARGIN, worth=worth)


class ReplicaChooser(Chooser):
    """See `Chooser`; the first of the exchanges at every step is the baseline."""

    def __init__(
        self,
        job: Job,
        name: str,
        exchanges: Mapping[str, Exchange],
        local: Mapping[str, LocalSteps],
        worth: Callable[[int], Mapping[str, float]],
        *,
        trials: int,
        torus: bool,
    ) -> None:
        codecs = list_codecs(exchanges, local)
        super().__init__(job, name, codecs, trials=trials, torus=torus, install=self.install_method)
        self.exchanges, self.local, self.find_worth = exchanges, local, worth
        self.restoring = False

    def decide(self, measured: Measurements) -> tuple[Decision, Candidate]:
        total = self.job.progress.total
        decision = choose_method(measured, self.exchanges, self.local, self.find_worth(total), total)
        return decision, Candidate(decision.choice, 1, 1, 0)

    def adopt(self, choice: Candidate) -> None:
        """Attach the choice."""
        self.choice = choice
        before = set(self.job.kept)
        self.install(choice)
        joined = JoinedState({name: self.job.kept.pop(name) for name in set(self.job.kept) - before})
        self.inner = Kept(joined, "own", joined.merge)

    def install_method(self, choice: Candidate) -> None:
        if choice.codec in self.exchanges:
            install(self.job, self.exchanges[choice.codec])
            return
        method = self.local[choice.codec]
        if not self.restoring:  # replicas of a resumed run differ
            method.apply(self.job, Seam.SHARD)
        install_local(self.job, method)

    def _adopt_saved(self, state: Mapping[str, Any]) -> None:
        self.restoring = True
        super()._adopt_saved(state)
        self.restoring = False

    def _check_forward_was_seen(self) -> None:
        if self.choice is None:
            raise ConfigError(
                f"`{self.name}` chooses at the first forward pass, and this training loop does not call `job.step`",
                hint="name one method, as in [comm.localsgd]",
            )


class JoinedState:
    """Several kept states as one."""

    def __init__(self, kept: Mapping[str, Kept]) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return {name: kept.state.state_dict() for name, kept in self.kept.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, kept in self.kept.items():
            kept.state.load_state_dict(state_dict[name])

    def merge(self, states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        return {
            name: kept.merge([state[name] for state in states], rank, size) if kept.merge else states[0][name]
            for name, kept in self.kept.items()
        }
