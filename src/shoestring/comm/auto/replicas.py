"""Chooses between local steps and gradient exchanges at every step, for a model without DDP.

Either method can still be attached at the first forward pass, because the model is not wrapped in DDP. Without DDP,
exchanges at every step run right before the optimizer's step, and do not overlap with the backward pass. Until the
choice is made, checkpoints are set up for local steps: replicas may differ, and each rank saves its own state.
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
from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, HOSTS, LOCAL, Seam
from shoestring.core.kept import Kept
from shoestring.core.trace import Trace
from shoestring.planning.cluster import Cluster
from shoestring.planning.simulate import Decision, Priced, Task, choose, makespan, simulate

if TYPE_CHECKING:
    from shoestring.comm.settings.base import Exchange
    from shoestring.comm.settings.local_steps import LocalSteps

GRADIENTS = " of gradients"  # suffix that names the codec of a method's first steps, which average gradients


@dataclass(frozen=True)
class PricedLocalSteps:
    """Cost model of local steps; predicts the average time of a step over the whole run.

    Args:
        merge: the exchange of all fragments at once.
        gradients: the exchange of gradients in a step at the start of the run.
        merges: number of merges per step.
        starting: fraction of the run's steps, at its start, that average gradients.
        delay: number of steps computed while one of the `fragments` is being exchanged.
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
        # Fragments are exchanged one after the other, so their exchanges overlap at most with the steps between two
        # merges.
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
        """Seconds that an exchange adds to a step, as (coding, everything else)."""
        predicted = exchange.predict(trace, cluster)
        code = sum(span.stop - span.start for span in predicted.spans if span.name == "code")
        return code, makespan(predicted) - makespan(trace) - code


def list_codecs(exchanges: Mapping[str, Exchange], local: Mapping[str, LocalSteps]) -> dict[str, CodecFactory]:
    """List the codecs to be timed, keyed by the call of the method that uses them."""
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
    """Choose the method that reaches a given loss first, if it is faster than the first of `exchanges` by `MARGIN`;
    else choose the first of `exchanges`."""
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
    """`Chooser` for a model without DDP: the baseline is the first of `exchanges`, not DDP."""

    def __init__(
        self,
        attachments: Attachments,
        name: str,
        exchanges: Mapping[str, Exchange],
        local: Mapping[str, LocalSteps],
        worth: Callable[[int], Mapping[str, float]],
        *,
        trials: int,
        torus: bool,
    ) -> None:
        codecs = list_codecs(exchanges, local)
        super().__init__(attachments, name, codecs, trials=trials, torus=torus, install=self.install_method)
        self.exchanges, self.local, self.find_worth = exchanges, local, worth
        self.restoring = False

    def decide(self, measured: Measurements) -> tuple[Decision, Candidate]:
        total = self.attachments.progress.total
        decision = choose_method(measured, self.exchanges, self.local, self.find_worth(total), total)
        return decision, Candidate(decision.choice, 1, 1, 0)

    def adopt(self, choice: Candidate) -> None:
        """Attach the chosen method, and join its saved states into one."""
        self.choice = choice
        before = set(self.attachments.kept)
        self.install(choice)
        joined = JoinedState({name: self.attachments.kept.pop(name) for name in set(self.attachments.kept) - before})
        self.inner = Kept(joined, "own", joined.merge)

    def install_method(self, choice: Candidate) -> None:
        if choice.codec in self.exchanges:
            install(self.attachments, self.exchanges[choice.codec])
            return
        method = self.local[choice.codec]
        if not self.restoring:  # replicas of a resumed run differ, and must not be made equal
            method.apply(self.attachments, Seam.SHARD)
        install_local(self.attachments, method)

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
    """Joins the saved states of several parts of the chosen method into one state."""

    def __init__(self, parts: Mapping[str, Kept]) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.state.load_state_dict(state_dict[name])

    def merge(self, states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        return {
            name: part.merge([state[name] for state in states], rank, size) if part.merge else states[0][name]
            for name, part in self.parts.items()
        }
