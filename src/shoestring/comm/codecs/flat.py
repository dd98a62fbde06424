"""Base class of codecs that work on all gradients of an exchange as one flat tensor, and functions that sparse codecs
share."""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring._torch import foreach_copy_
from shoestring.comm.codecs.codec import Codec, Grads
from shoestring.comm.codecs.dense import flatten, split_like, unflatten
from shoestring.comm.codecs.fused import WeightedSum
from shoestring.comm.codecs.grad_table import GradTable, takes


class FlatCodec(Codec):
    """A codec that works on all gradients of an exchange as one flat fp32 tensor.

    The states of parameters are views of flat tensors, so that swapping buffers replaces a state without a copy.
    """

    reads_in_place = True
    """Whether kernels, where available, read gradients in place, without a flat copy of the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self._flats: dict[tuple[str, ...], tuple[Tensor, list[Tensor]]] = {}
        self._buffers: dict[tuple[str, ...], Tensor] = {}

    def flatten(self, grads: Grads) -> Tensor:
        """Copy the entries of all gradients into one flat buffer. The caller then passes the buffer to `unflatten`,
        which frees it for reuse, or to `replace_state`, which makes it the state."""
        tensors, buffer = list(grads.values()), self._take_buffer(grads)
        foreach_copy_(split_like(buffer, tensors), tensors)
        return buffer

    def _take_buffer(self, grads: Grads) -> Tensor:
        """Take a free flat fp32 buffer for the entries of all gradients, or allocate one; its contents are
        arbitrary."""
        buffer = self._buffers.pop(tuple(grads), None)
        if buffer is None:
            first, n = next(iter(grads.values())), sum(grad.numel() for grad in grads.values())
            return torch.empty(n, dtype=torch.float32, device=first.device)
        return buffer

    def weigh(
        self, grads: Grads, e: Tensor, u: Tensor | None = None, scale: float = 1.0, momentum: float = 0.0
    ) -> WeightedSum:
        """Describe the sum M = scale g + e + momentum u, to be computed later; kernels may then read the gradients in
        place."""
        table = GradTable(list(grads.values())) if self.reads_in_place and takes(grads.values()) else None
        M = self.flatten(grads) if table is None else self._take_buffer(grads)
        return WeightedSum(M, e, u, scale, momentum, table)

    def deliver(self, grads: Grads, table: GradTable | None, indices: Tensor, values: Tensor, out: Tensor) -> None:
        """Replace gradients by the sum of all ranks' entries (ranks, k), added in the order of the ranks.

        `out` is overwritten (with a table, only at the indices), and then freed for reuse as a buffer.
        """
        if table is None:
            self.unflatten(grads, sum_entries(indices, values, out))
            return
        table.write(indices, sum_entries(indices, values, out, everywhere=False))
        self._buffers[tuple(grads)] = out

    def unflatten(self, grads: Grads, flat: Tensor) -> None:
        """Copy the entries of `flat` into the gradients, the inverse of `flatten`; frees `flat` for reuse as a
        buffer."""
        unflatten(flat, list(grads.values()))
        self._buffers[tuple(grads)] = flat

    def flat_state(self, kind: str, grads: Grads) -> Tensor:
        """The states from `get_states` as one flat tensor that shares memory with them."""
        states = self.get_states(kind, grads)
        whole, parts = self._flats.get((kind, *grads), (None, []))
        if whole is None or any(state is not part for state, part in zip(states, parts, strict=True)):
            # Free the flat tensors and buffers of earlier sets of gradients that contain any of these parameters.
            for key in [key for key in list(self._flats) if key[0] == kind and not grads.keys().isdisjoint(key[1:])]:
                del self._flats[key]
            for key in [key for key in list(self._buffers) if not grads.keys().isdisjoint(key) and key != tuple(grads)]:
                del self._buffers[key]
            whole = flatten(states)
            self.replace_state(kind, grads, whole)
        return whole

    def replace_state(self, kind: str, grads: Grads, whole: Tensor) -> None:
        """Set the states of one kind to views of the flat tensor `whole`."""
        parts = split_like(whole, list(grads.values()))
        self._flats[kind, *grads] = whole, parts
        self.state[kind].update(zip(grads, parts, strict=True))


def count_entries(n: int, density: float) -> int:
    """Number of entries to select from n at a density; at least one."""
    return min(n, max(1, round(density * n)))


def sum_entries(indices: Tensor, values: Tensor, out: Tensor, *, everywhere: bool = True) -> Tensor:
    """Write the sum of all ranks' entries (ranks, k) into `out`, added in the order of the ranks.

    Args:
        everywhere: write zeros to all other entries of `out`; if false, leave them unchanged.
    """
    if everywhere:
        out.zero_()
    else:
        out.index_fill_(0, indices.flatten(), 0)
    for own_indices, own_values in zip(indices, values, strict=True):
        out.index_add_(0, own_indices, own_values)
    return out


def poison(x: Tensor) -> Tensor:
    """A scalar to add to what is sent: 0, or NaN if any entry of `x` is not finite, even one that is not sent."""
    return 0 * x.sum()
