"""Each rank chooses its own layers, by its own small network; layers that no rank has chosen are not sent.

The idea is from "Layer-Wised Sparsification Based on Hypernetwork" (Wu, Ye, ICANN 2024), where a hypernetwork on each
node chooses the layers to transmit. Only the abstract is public, so the protocol is our own design:

1. Each rank adds its residual to its gradient, M = g + e. The rank's network maps data about the rank's layers to a
mask.
2. The masks are all-gathered, one bit per layer. If the union of the masks exceeds the budget, the layers chosen by the
   fewest ranks are not sent.
3. A reduce-scatter, implemented as an all-to-all: every layer is divided into one shard per rank, and a rank sends the
   shards of the layers that it has chosen, each to the rank that sums this shard.
4. An all-gather distributes the sums of all layers that any rank has chosen.

Let P be the number of entries per shard in the layers that one rank has chosen (the maximum over ranks), and U the same
number for the layers that at least one rank has chosen. Then each rank sends (ranks - 1) (P + U) entries: as many as a
ring all-reduce if all ranks choose the same layers, and up to (ranks + 1) / 2 times as many if no two ranks choose the
same layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring._torch import foreach_norm
from shoestring.comm.codecs.bits import pack, packed_bytes, unpack
from shoestring.comm.codecs.codec import AllGather, AllToAll, Codec, Coding, ExchangeContext, Grads
from shoestring.comm.selection.budget import Layers, Notes, Selector, natural_order
from shoestring.comm.selection.hypernetwork import Hypernetwork
from shoestring.core.errors import ConfigError

MEMORY = 0.9  # decay of the average of ‖g‖² over steps
HEADER = 64  # maximum bytes sent to each other rank besides masks and entries: a norm, and padding of rows to 16 bytes


@dataclass(frozen=True)
class LayerPiece:
    """Entries of a layer that are chosen together: all entries, or a part of them if the layer costs over half the
    budget."""

    name: str
    start: int
    stop: int
    shard: int  # number of entries that each rank sums

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]"

    def of(self, flats: Grads) -> Tensor:
        """A view of this piece's entries, given flat tensors by layer name."""
        return flats[self.name][self.start : self.stop]

    def shards(self, flats: Grads, ranks: int) -> Tensor:
        """This piece's entries as (ranks, shard), padded with zeros."""
        entries = self.of(flats)
        return F.pad(entries, (0, ranks * self.shard - len(entries))).view(ranks, -1)


@dataclass(frozen=True)
class Union:
    """The pieces that are sent by any rank, and the pieces that each rank sends."""

    pieces: list[LayerPiece]
    sent: list[list[LayerPiece]]

    @property
    def longest(self) -> int:
        """P: number of entries per shard that one rank sends; the maximum over ranks."""
        return max(sum(piece.shard for piece in own) for own in self.sent)

    @property
    def total(self) -> int:
        """U: number of entries per shard that at least one rank sends."""
        return sum(piece.shard for piece in self.pieces)


class PerNodeCodec(Codec):
    """Averages the layers that ranks have chosen. A rank adds to its residual the gradients of the layers that it has
    not chosen.

    State: "residual"; "delivered", the entries that this rank sent; "seen", data about this rank's pieces; "notes" of
    the selector; and "carried", the unused bytes. Only "carried" is equal on all ranks.

    Args:
        budget: bytes that a rank may send per step. Unused bytes are carried over, up to the price of the largest
            piece, so any n steps together send at most n budgets plus this price.
        selector: chooses pieces from this rank's data. The networks of all ranks start with the same weights and draw
            the same random numbers; they differ only through their training data.
        dtype: data type of the entries on the wire. Rounding errors are added to the residual.
        warmup: number of steps that send all layers regardless of the budget.
    """

    stages = 3
    shared = frozenset({"carried"})

    def __init__(
        self, budget: float, *, selector: Selector | None = None, dtype: torch.dtype = torch.float32, warmup: int = 2
    ) -> None:
        super().__init__()
        self.budget, self.selector, self.dtype, self.warmup = budget, selector or Hypernetwork(), dtype, warmup

    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        flats = {name: grads[name].view(-1) for name in sorted(grads, key=natural_order) if grads[name].numel()}
        if not flats:
            return
        M = {name: self.get_state("residual", name, grads[name]).view(-1) + flat for name, flat in flats.items()}
        ranks, rank, pieces = context.size, context.rank, self._divide(flats, context.size)
        norm, seen = self._look(pieces, flats, M)
        mask, notes = self._choose(pieces, seen, context)
        _, answer = yield [AllGather(norm), AllGather(pack(torch.from_numpy(mask)[None].to(norm.device), 1)[0])]
        masks = unpack(answer, 1, len(pieces)).cpu().numpy().astype(bool)
        union, carried = self._admit(masks, pieces, context)
        own, averages, delivered = union.sent[rank], dict[LayerPiece, Tensor](), dict[str, Tensor]()
        if union.total:
            rows = torch.cat([norm.new_empty(ranks, 0), *(piece.shards(M, ranks) for piece in own)], dim=1)
            rows = F.pad(rows, (0, union.longest - rows.shape[1])).to(self.dtype)
            # Each rank receives other rows. Floating-point tensors that are received must be equal on all ranks (see
            # `Codec.code`), so the rows are sent as bytes.
            (received,) = yield [AllToAll(rows.view(torch.uint8))]
            mean = _sum(received.view(self.dtype), union) / ranks
            rounded = mean.to(self.dtype)
            (gathered,) = yield [AllGather(rounded)]
            averages = _cut(gathered, union.pieces)
            delivered = {str(piece): piece.of(M).clone() for piece in own}
            for piece in own:
                piece.of(M).sub_(piece.of(M).to(self.dtype))
            for piece, error in _cut(ranks * (mean - rounded), union.pieces).items():
                summed = piece.of(M)[rank * piece.shard :][: piece.shard]
                summed += error[: len(summed)]
        for piece in pieces:
            entries = piece.of(flats)
            entries.copy_(averages[piece].reshape(-1)[: len(entries)]) if piece in averages else entries.zero_()
        seen["waited"] = np.array([0.0 if str(p) in delivered else 1 + seen["waited"][i] for i, p in enumerate(pieces)])
        self.state["residual"] |= {name: tensor.view(grads[name].shape) for name, tensor in M.items()}
        self.state |= {"delivered": delivered, "notes": notes}
        self.state["seen"] = {name: torch.from_numpy(values) for name, values in seen.items()}
        self.state["carried"] = {"bytes": torch.tensor(carried, dtype=torch.float64)}

    def _divide(self, flats: Grads, ranks: int) -> list[LayerPiece]:
        """Divide layers into equal pieces that cost at most half a budget each."""
        largest = max(1, int(self.budget / max(1, 4 * self._price(ranks)))) * ranks
        pieces = []
        for name, flat in flats.items():
            n = len(flat)
            size = math.ceil(n / math.ceil(n / largest))
            ends = [(start, min(start + size, n)) for start in range(0, n, size)]
            pieces += [LayerPiece(name, start, stop, math.ceil((stop - start) / ranks)) for start, stop in ends]
        return pieces

    def _look(self, pieces: Sequence[LayerPiece], flats: Grads, M: Grads) -> tuple[Tensor, dict[str, np.ndarray]]:
        """Compute the norm of all of this rank's M, (1,), and this rank's arrays for `Layers`; "next" is the gain of
        the previous choice, which the next choice will use."""
        residual = {name: tensor.view(-1) for name, tensor in self.state["residual"].items()}
        delivered = self.state.get("delivered", {})
        gradients = [piece.of(flats).float() for piece in pieces]
        before = [delivered[str(piece)] if str(piece) in delivered else piece.of(residual) for piece in pieces]
        gains = [torch.dot(gradient, earlier.float()) for gradient, earlier in zip(gradients, before, strict=True)]
        norms = [foreach_norm(tensors) for tensors in (gradients, [piece.of(M).float() for piece in pieces])]
        columns = torch.stack([torch.stack(column) for column in (*norms, gains)])
        gradient, accumulated, gain = columns.nan_to_num(0, 0, 0).double().cpu().numpy()
        seen = {name: values.cpu().numpy() for name, values in self.state.get("seen", {}).items()}
        if not seen or len(seen["waited"]) != len(pieces):
            seen = {"gradient": gradient**2, "waited": np.zeros(len(pieces)), "next": np.zeros(len(pieces))}
        average = MEMORY * seen["gradient"] + (1 - MEMORY) * gradient**2
        now = {"gradient": average, "accumulated": accumulated, "gain": seen["next"], "next": gain}
        return columns[1].norm().view(1), now | {"waited": seen["waited"]}

    def _choose(
        self, pieces: Sequence[LayerPiece], seen: dict[str, np.ndarray], context: ExchangeContext
    ) -> tuple[np.ndarray, Notes]:
        """Choose this rank's pieces; returns a mask (pieces,), and the selector's notes."""
        mask, notes = np.ones(len(pieces), np.uint8), self.state.get("notes", {})
        if self._sends_all(context):
            return mask, notes
        allowance = self._allowance(len(pieces), context.size)
        known = {name: seen[name] for name in ("gradient", "accumulated", "gain", "waited")}
        known["entries"] = np.array([piece.stop - piece.start for piece in pieces], float)
        known["price"] = 2.0 * self._price(context.size) * np.array([piece.shard for piece in pieces])
        chosen, notes = self.selector.choose(Layers(context.step, self.budget, allowance, **known), notes)
        mask[:] = 0
        mask[list(chosen)] = 1
        return mask, notes

    def _sends_all(self, context: ExchangeContext) -> bool:
        """Whether this step sends all layers, without choosing."""
        return context.step < self.warmup or context.size == 1

    def _price(self, ranks: int) -> int:
        """Bytes that a rank sends for each entry of P or of U."""
        return (ranks - 1) * self.dtype.itemsize

    def _allowance(self, pieces: int, ranks: int) -> float:
        """Bytes of entries that a rank may send in this step; at least the price of a piece."""
        carried = self.state.get("carried", {"bytes": torch.zeros(())})
        return float(carried["bytes"]) + self.budget - self.find_overhead(pieces, ranks)

    def find_overhead(self, pieces: int, ranks: int) -> int:
        """Bytes of masks and headers that a rank sends per step.

        Raises:
            ConfigError: masks and headers take more than half the budget.
        """
        overhead = (ranks - 1) * (HEADER + packed_bytes(pieces, 1))
        if 2 * overhead > self.budget:
            raise ConfigError(
                f"a budget of {self.budget:.0f} bytes a step is less than twice the {overhead} bytes of masks of "
                f"{pieces} pieces of layers",
                hint="raise `transport.kb_per_step`",
            )
        return overhead

    def _admit(self, masks: np.ndarray, pieces: Sequence[LayerPiece], context: ExchangeContext) -> tuple[Union, float]:
        """Decide which pieces are sent, and how many bytes are carried over; the results are equal on all ranks."""
        if self._sends_all(context):
            return admit(masks, pieces, math.inf, np.zeros(len(pieces))), 0.0
        allowance, price = self._allowance(len(pieces), context.size), self._price(context.size)
        draws = np.random.default_rng((1, context.step)).random(len(pieces))
        union = admit(masks, pieces, allowance / price, draws)
        left = allowance - price * (union.longest + union.total)
        return union, min(left, 2.0 * price * max(piece.shard for piece in pieces))

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Merge the residuals only. The pieces of tensors and the costs of sending them depend on the number of
        ranks, so the networks start untrained."""
        return super().merge_states([{"residual": state.get("residual", {})} for state in states])


def admit(masks: np.ndarray, pieces: Sequence[LayerPiece], entries: float, draws: np.ndarray) -> Union:
    """Admit pieces in order of the number of ranks that chose them, while P + U stays within `entries`; `draws` break
    ties.

    Args:
        masks: which pieces each rank has chosen; (ranks, pieces), bool.
    """
    votes, own, total, taken = masks.sum(0), np.zeros(len(masks), int), 0, []
    for number in np.lexsort((draws, -votes)):
        shard = pieces[number].shard
        more = own + masks[:, number] * shard
        if votes[number] and more.max() + total + shard <= entries:
            own, total = more, total + shard
            taken.append(int(number))
    taken.sort()
    return Union([pieces[i] for i in taken], [[pieces[i] for i in taken if mask[i]] for mask in masks])


def _cut(rows: Tensor, pieces: Sequence[LayerPiece]) -> dict[LayerPiece, Tensor]:
    """Split the last dimension of rows into views, one for each piece, by the pieces' shard sizes."""
    sizes = [piece.shard for piece in pieces]
    return dict(zip(pieces, rows[..., : sum(sizes)].split(sizes, dim=-1), strict=True))


def _sum(rows: Tensor, union: Union) -> Tensor:
    """Sum the received shards (ranks, P) in the order of the ranks: (U,) in fp32."""
    total = rows.new_zeros(union.total, dtype=torch.float32)
    sums = _cut(total, union.pieces)
    for row, sent in zip(rows.float(), union.sent, strict=True):
        for piece, entries in _cut(row, sent).items():
            sums[piece] += entries
    return total
