"""Deep Gradient Compression (Lin, Han, Mao, Wang, Dally, ICLR 2018)."""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring._torch import foreach_add_, foreach_mul_
from shoestring.comm.codecs.codec import Coding, ExchangeContext, Grads, Mean
from shoestring.comm.codecs.topk import Selection, SparseCodec, WireType

STAGES = 5  # number of stages of the warm-up


class DGCCodec(SparseCodec):
    """Averages sparsified *velocities* over ranks, so the optimizer must be SGD without momentum.

        u = m u + g;  v = v + u;  send the largest entries of v, and set u = 0 and v = 0 there
        Nesterov: u = m (u + g);  v = v + u + g

    Vectors and scalars are not compressed. With density 1 nothing is compressed, and the result is SGD with momentum.
    State: this rank's "velocity" u and "residual" v; "momentum", the velocity of uncompressed parameters.

    Args:
        density: fraction of entries sent after the warm-up.
        clip: maximum 2-norm of all gradients; each of N ranks clips at clip / √N. With `clip`, all gradients must be in
            one exchange.
        masking: set the velocity of sent entries to zero, so that stale momentum does not keep moving them.
        warmup: number of warm-up steps, in five equal stages whose densities fall exponentially: for 0.001 they are
            0.25, 0.063, 0.016, 0.004 and 0.001.
    """

    shared = frozenset({"momentum"})

    def __init__(
        self,
        density: float,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        clip: float | None = None,
        masking: bool = True,
        warmup: int = 0,
        selection: Selection = "exact",
        wire: WireType = "fp32",
        per_layer: bool = False,
    ) -> None:
        super().__init__(density, selection=selection, wire=wire, per_layer=per_layer)
        self.momentum, self.nesterov, self.clip = momentum, nesterov, clip
        self.masking, self.warmup = masking, warmup

    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        grads = {name: grad for name, grad in grads.items() if grad.numel()}
        sparse = {name: grad for name, grad in grads.items() if grad.ndim > 1 and self.density < 1}
        dense = {name: grad for name, grad in grads.items() if name not in sparse}
        if self.clip is not None and grads:
            norm = context.sum_over_shards(torch.nn.utils.get_total_norm(list(grads.values())).square()).sqrt()
            foreach_mul_(list(grads.values()), (self.clip * context.size**-0.5 / norm).clamp(max=1))
        if not sparse:
            if dense:
                (average,) = yield [Mean(self.flatten(dense))]
                self._deliver(dense, average)
            return
        whole = [Mean(self.flatten(dense))] if dense else []
        u, v = self.flat_state("velocity", sparse), self.flat_state("residual", sparse)
        scale = 1 + self.momentum if self.nesterov else 1.0
        # M is the next v. The velocity u is updated only after the exchange has succeeded.
        terms = self.weigh(sparse, v, u, scale, self.momentum)
        M = terms.g
        indices, values = self.select(terms, [grad.numel() for grad in sparse.values()], self.density_at(context.step))
        requests, sent = self.encode(indices, values, len(M))
        answers = yield [*whole, *requests]
        if dense:
            self._deliver(dense, answers[0])
        if terms.table is not None:
            terms.table.accelerate(u, self.momentum, nesterov=self.nesterov)
        else:
            self._accelerate(u, self.get_states("velocity", sparse), list(sparse.values()))
        if self.masking:
            u[indices] = 0
        M[indices] = values - sent
        self.replace_state("residual", sparse, M)
        self.deliver(sparse, terms.table, *self.decode(answers[len(whole) :], len(indices), len(M)), out=v)

    def density_at(self, step: int) -> float:
        """The density at a step; it falls during the warm-up."""
        stage = STAGES if step >= self.warmup else step * STAGES // self.warmup + 1
        return self.density ** (stage / STAGES)

    def _deliver(self, dense: Grads, average: Tensor) -> None:
        """Update the velocity of uncompressed parameters with their average gradient, and write the resulting update
        into the gradients."""
        u = self.flat_state("momentum", dense)
        self._accelerate(u, [u], [average])
        self.unflatten(dense, average.add_(u) if self.nesterov else average.copy_(u))

    def _accelerate(self, u: Tensor, parts: list[Tensor], g: list[Tensor]) -> None:
        """Set u to m u + g, or with Nesterov to m (u + g); `parts` are views of u in the shapes of g."""
        if self.nesterov:
            foreach_add_(parts, g)
        u *= self.momentum
        if not self.nesterov:
            foreach_add_(parts, g)
