"""Deep Gradient Compression (Lin, Han, Mao, Wang, Dally, ICLR 2018)."""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring._torch import foreach_add_, foreach_mul_
from shoestring.comm.codecs.codec import Coding, ExchangeContext, Grads, Mean
from shoestring.comm.codecs.fused import WeightedSum
from shoestring.comm.codecs.topk import Selection, SparseCodec, WireType

STAGES = 5  # of the warm-up


class DGCCodec(SparseCodec):
    """The average of the ranks' *velocities*, sparsified: the optimizer must be SGD without momentum of its own.

        u = m u + g;  v = v + u;  send the largest of v, and there u = 0 and v = 0
        Nesterov: u = m (u + g);  v = v + u + g

    Vectors and scalars travel whole; so does all at density 1, where this is SGD with momentum.
    State: "velocity" u and "residual" v of this rank; "momentum", the velocity of what travels whole.

    Args:
        density: after the warm-up.
        clip: of the 2-norm of the gradients, which must travel together; each rank of N clips at clip / √N.
        masking: set the velocity of what is sent to zero, so that stale momentum does not carry it on.
        warmup: steps in five equal stages, whose densities fall exponentially to the last: of 0.001, these are 0.25,
            0.063, 0.016, 0.004 and 0.001.
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
            yield from self._whole(dense)
            return
        whole = [Mean(self.gathered(dense))] if dense else []
        u, v, g = self.flat("velocity", sparse), self.flat("residual", sparse), self.gathered(sparse)
        terms = WeightedSum(
            g, v, u, 1 + self.momentum if self.nesterov else 1.0, self.momentum
        )  # the next v; u must wait
        indices, values = self.select(terms, [grad.numel() for grad in sparse.values()], self.density_at(context.step))
        requests, sent = self.encode(indices, values, len(g))
        answers = yield [*whole, *requests]
        if dense:
            self._deliver(dense, answers[0])
        self._accelerate(u, self.get_states("velocity", sparse), list(sparse.values()))
        if self.masking:
            u[indices] = 0
        g[indices] = values - sent
        self.replace("residual", sparse, g)
        self.spread(sparse, self.decode(answers[len(whole) :], len(indices), out=v))

    def density_at(self, step: int) -> float:
        stage = STAGES if step >= self.warmup else step * STAGES // self.warmup + 1
        return self.density ** (stage / STAGES)

    def _whole(self, dense: Grads) -> Coding:
        if dense:
            (average,) = yield [Mean(self.gathered(dense))]
            self._deliver(dense, average)

    def _deliver(self, dense: Grads, average: Tensor) -> None:
        """The velocity of an average that came whole."""
        u = self.flat("momentum", dense)
        self._accelerate(u, [u], [average])
        self.spread(dense, average.add_(u) if self.nesterov else average.copy_(u))

    def _accelerate(self, u: Tensor, parts: list[Tensor], g: list[Tensor]) -> None:
        """u = m u + g, or m (u + g), where `parts` are those of u in the shapes of g."""
        if self.nesterov:
            foreach_add_(parts, g)
        u *= self.momentum
        if not self.nesterov:
            foreach_add_(parts, g)
