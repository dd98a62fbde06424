"""Reads a checkpoint whose parts may be in the memory or on the disk of this host or of other hosts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoestring.checkpoint.format.layout import PRIVATE, Box, boxes_of, order_at, sources, whole
from shoestring.checkpoint.format.manifest import CheckpointId
from shoestring.checkpoint.format.part import Part
from shoestring.checkpoint.format.tree import decode, encode, merged_states, root
from shoestring.checkpoint.recovery.offers import DISK, Offer
from shoestring.checkpoint.tiers import peer_copies
from shoestring.checkpoint.tiers.rank_group import RankGroup
from shoestring.checkpoint.tiers.staging import apart_name, home, orders_of
from shoestring.core.attachments import Kept
from shoestring.core.errors import CheckpointError
from shoestring.core.shard_order import ShardOrder
from shoestring.core.world import World
from shoestring.sharded import is_sharded, placed_like

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

log = logging.getLogger("shoestring")


Damage = dict[tuple[int, str], str]
"""Maps the key of a damaged offer to a description of the damage."""


@dataclass(frozen=True)
class Read:
    """A request to read a box of a tensor from one piece of an offered part."""

    tensor: str
    offer: int
    piece: int
    box: Box
    server: int
    """The rank that reads the box from memory or disk; it sends the box if another rank needs it."""


@dataclass(eq=False)
class Reader:
    """Reads the tensors of a checkpoint from its offers, which may lie on any host.

    Methods are called in this order: `open`, `sort`, `locate` for each tensor, `verify` for all reads, `fetch` for each
    group of reads.
    """

    world: World
    group: RankGroup
    offers: list[Offer]
    parts: dict[int, Part] = field(default_factory=dict)
    pieces: dict[str, list[tuple[Box, tuple[int, int]]]] = field(default_factory=dict)
    """Maps the name of a tensor to its readable boxes, as (box, (offer, piece)), sorted by distance, the nearest
    first."""
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)
    """Maps the name of a tensor to its data type and shape."""
    abouts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Maps the name of a part to its metadata."""
    _plan: dict[str, list[Read]] = field(default_factory=dict)
    """Maps the name of a group of reads to this rank's reads."""
    _asked: list[dict[str, list[Any]]] = field(default_factory=list)
    """One mapping per rank, from the name of a group to the reads that the rank requests from other ranks."""
    _headers: list[Any] = field(default_factory=list)
    """A tuple (index of the offer, metadata, pieces) for each offer of all hosts."""

    @property
    def host(self) -> int:
        return self.world.rank // self.world.local_size

    def open(self) -> Damage:
        """Memory-map this host's offers, and share their headers with all ranks; returns the damaged offers. One rank
        reads and shares each header. A collective.
        """
        damaged, headers = [], []
        for index, offer in enumerate(self.offers):
            if offer.host != self.host or offer.part.startswith(peer_copies.PARITY):
                continue
            try:
                self.parts[index] = part = offer.open()
                if self._server(index) == self.world.rank:
                    part.verify(0, 8)
                    offer.checkpoint.claims(part)
                    pieces = [
                        [
                            piece.tensor,
                            piece.shape,
                            piece.box.offset,
                            piece.box.shape,
                            str(piece.dtype)[len("torch.") :],
                        ]
                        for piece in part.pieces
                    ]
                    headers.append([index, part.about, pieces])
            except CheckpointError as error:
                log.warning("%s", error)
                damaged.append((offer, error))
        if wrong := gather_damage(self.group, damaged):
            return wrong
        self._headers = [header for of_rank in self.group.all_gather(headers) for header in of_rank]
        return {}

    def sort(self) -> None:
        """Collect the pieces of each tensor from the headers; pieces on this host and in memory come first.

        Raises:
            CheckpointError: two pieces of a tensor disagree on its data type or shape; raised on all ranks.
        """
        origin: dict[str, int] = {}

        def distance(index: int) -> tuple[bool, bool, bool, int]:
            offer = self.offers[index]
            return offer.host != self.host, offer.level == DISK, offer.held, index

        for index, about, pieces in sorted(self._headers, key=lambda header: distance(header[0])):
            self.abouts.setdefault(self.offers[index].part, about)
            for number, (tensor, shape, offset, extent, dtype) in enumerate(pieces):
                kind = getattr(torch, dtype), tuple(shape)
                if (known := self.kinds.setdefault(tensor, kind)) != kind:
                    here = f"{known[0]} {known[1]} in `{self.offers[origin[tensor]].path}`"
                    there = f"{kind[0]} {kind[1]} in `{self.offers[index].path}`"
                    raise CheckpointError(f"`{tensor}` is {here} and {there}")
                origin.setdefault(tensor, index)
                self.pieces.setdefault(tensor, []).append((Box(tuple(offset), tuple(extent)), (index, number)))

    def _server(self, index: int) -> int:
        """Return the rank that reads an offer for other hosts; offers are distributed over the ranks of their host."""
        return self.offers[index].host * self.world.local_size + index % self.world.local_size

    def locate(self, tensor: str, box: Box) -> list[Read]:
        """Return the reads that together make up a box of a tensor.

        Raises:
            CheckpointError: the offers do not cover the box.
        """
        covering = sources(box, self.pieces.get(tensor, []))
        if covering is None or tensor not in self.kinds:
            raise CheckpointError(f"`{tensor}` is incomplete")
        reads = []
        for shared, (index, piece) in covering:
            near = self.offers[index].host == self.host
            reads.append(Read(tensor, index, piece, shared, self.world.rank if near else self._server(index)))
        return reads

    def verify(self, reads: Mapping[str, list[Read]]) -> Damage:
        """Verify all bytes that any rank will read; returns the damaged offers. A collective.

        Args:
            reads: maps the name of a group to this rank's reads.
        """
        self._plan = dict(reads)
        asks = {
            name: [
                [read.offer, read.piece, read.box.offset, read.box.shape, read.server]
                for read in group
                if read.server != self.world.rank
            ]
            for name, group in reads.items()
        }
        self._asked = self.group.all_gather(asks)
        damaged = []
        served = {
            (read.offer, read.piece) for group in reads.values() for read in group if read.server == self.world.rank
        }
        served |= {(offer, piece) for name in reads for _, offer, piece, _ in self._requests(name)}
        for index, number in sorted(served):
            try:
                piece = self.parts[index].pieces[number]
                self.parts[index].verify(piece.start, piece.stop)
            except CheckpointError as error:
                log.warning("%s", error)
                damaged.append((self.offers[index], error))
        return gather_damage(self.group, damaged)

    def _requests(self, name: str) -> Iterator[tuple[int, int, int, Box]]:
        """Yield (rank, offer, piece, box) for each read that another rank requests from this rank."""
        for rank, asked in enumerate(self._asked):
            for offer, piece, offset, shape, server in asked[name]:
                if server == self.world.rank:
                    yield rank, offer, piece, Box(tuple(offset), tuple(shape))

    def fetch(self, name: str) -> list[Tensor]:
        """Read the tensors of one group, as views of this host's files or copies that other ranks send. A collective.

        Raises:
            ConnectionError: a tensor was damaged during transfer; raised only on this rank, after the exchange.
        """
        sends = [(rank, self._at(offer, piece, box).contiguous()) for rank, offer, piece, box in self._requests(name)]
        got, receives = [], []
        for read in self._plan[name]:
            if read.server == self.world.rank:
                got.append(self._at(read.offer, read.piece, read.box))
            else:
                got.append(torch.empty(read.box.shape, dtype=self.kinds[read.tensor][0]))
                receives.append((read.server, got[-1]))
        if damaged := self.group.exchange(sends, receives):
            raise ConnectionError(f"data that rank {min(damaged)} sent arrived damaged")
        return got

    def _at(self, index: int, number: int, box: Box) -> Tensor:
        part = self.parts[index]
        return part.read(part.pieces[number], box)


def gather_damage(group: RankGroup, damaged: Sequence[tuple[Offer, CheckpointError]]) -> Damage:
    """All-gather the damaged offers that the ranks have detected; a collective."""
    gathered = group.all_gather([[*offer.key, error.parts()[1]] for offer, error in damaged])
    return {(host, path): reason for of_rank in gathered for host, path, reason in of_rank}


_Region = tuple[list[tuple[Box, Box]], "DTensor | None"]
"""Boxes of a tensor, as pairs (box of the whole tensor, box of the local tensor), and the DTensor into which to load
the boxes, or None."""


# -- what a rank wants ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Wanted:
    """The states that this rank loads from a checkpoint, and the boxes of tensors that these states need."""

    states: Mapping[str, Kept]
    """The states of this run, by name."""
    world: World
    checkpoint: CheckpointId
    reader: Reader

    def __post_init__(self) -> None:
        self._boxes: dict[str, dict[str, _Region]] = {}  # maps a state and a tensor to the region to read
        self._reads: dict[str, list[list[list[Read]]]] = {}  # maps a state to reads by tensor and box
        self._placed: dict[str, DTensor] = {}
        """Maps a path to a DTensor of this rank; saved tensors at this path, or directly below it, get the same
        placement."""
        self._orders = dict[str, ShardOrder]()
        for name, entry in self.states.items():
            tensors: dict[str, Tensor] = {}
            self._orders |= orders_of(entry.state)
            encode(entry.state.state_dict(), root(name), tensors)
            if isinstance(entry.state, Optimizer):
                # A new optimizer has no state yet. Its state for parameter N, at the path state/N, will get the
                # placement of parameter N.
                parameters = (parameter for group in entry.state.param_groups for parameter in group["params"])
                tensors |= {f"{root(name)}/state/{index}": parameter for index, parameter in enumerate(parameters)}
            for path, tensor in tensors.items():
                if is_sharded(tensor):
                    key = f"{home(tensor, self.world.rank)}:{path}" if entry.across == "own" else path
                    self._placed[key] = tensor
        self._trees = {rank: self._about(rank) for rank in range(self.checkpoint.ranks)}
        self._shared = merged_states([about["trees"]["shared"] for about in self._trees.values()])

    def _about(self, rank: int) -> dict[str, Any]:
        try:
            return self.reader.abouts[f"{PRIVATE}-{rank}"]
        except KeyError as error:
            raise CheckpointError(f"the state of former rank {rank} is missing") from error

    @property
    def about(self) -> Mapping[str, Any]:
        """Metadata of the private part of the first rank."""
        return self._trees[0]

    @property
    def saved(self) -> set[str]:
        """Names of all states in the checkpoint."""
        return {name for about in self._trees.values() for trees in about["trees"].values() for name in trees}

    def reads(self) -> dict[str, list[Read]]:
        """All reads that this rank needs, by state."""
        for name in self.states:
            self._boxes[name] = {}
            self._visit(name, partial(self._want, self._boxes[name]))
            self._reads[name] = [
                [self.reader.locate(tensor, box) for box, _ in boxes]
                for tensor, (boxes, _) in self._boxes[name].items()
            ]
        return {
            name: [read for boxes in tensors for reads in boxes for read in reads]
            for name, tensors in self._reads.items()
        }

    def state(self, name: str) -> dict[str, Any] | None:
        """Read one state; returns None if the checkpoint does not have the state for this rank, so that the state
        starts afresh. A collective."""
        tensors, ready = iter(self.reader.fetch(name)), {}
        for (tensor, (boxes, placed)), of_boxes in zip(self._boxes[name].items(), self._reads[name], strict=True):
            local = torch.empty(
                boxes[0][1].shape if placed is None else placed.to_local().shape, dtype=self.reader.kinds[tensor][0]
            )
            for (box, place), reads in zip(boxes, of_boxes, strict=True):
                region = local[place.inside(whole(local.shape))]
                for read in reads:
                    region[read.box.inside(box)].copy_(next(tensors))
            if placed is not None:
                local = placed_like(local.to(placed.to_local().device), placed)
            ready[tensor] = local
        return self._visit(name, lambda leaf, _: ready[leaf])

    def _want(self, boxes: dict[str, _Region], tensor: str, placed: bool) -> Tensor:
        """Record which boxes of a tensor to read: this rank's boxes if the tensor is a DTensor in this run, otherwise
        the whole tensor."""
        shape = self.reader.kinds[tensor][1] if tensor in self.reader.kinds else ()
        like = self._like(tensor, shape) if placed else None
        if like is not None:
            boxes[tensor] = boxes_of(tensor, like, order_at(tensor, like, self._orders)), like
        else:
            boxes.setdefault(tensor, ([(whole(shape), whole(shape))], None))
        return torch.empty(0)

    def _like(self, tensor: str, shape: tuple[int, ...]) -> DTensor | None:
        """Return a DTensor with the placement that a saved tensor gets on this rank; None if the whole tensor is
        loaded. The state of a new optimizer gets the same placement that the optimizer itself would choose. A moment
        gets the placement of its parameter. A factor of a moment (in Adafactor), which has as many dimensions as the
        parameter, gets the placement of a new tensor created from the parameter.
        """
        if (present := self._placed.get(tensor)) is not None:
            return present if tuple(present.shape) == shape else None
        parameter = self._placed.get(tensor.rpartition("/")[0])
        if parameter is None or tuple(parameter.shape) == shape:
            return parameter
        if parameter.ndim != len(shape) or not shape:
            return None
        factor = parameter.detach().new_zeros(shape)
        return factor if is_sharded(factor) else None

    def _visit(self, name: str, leaf: Callable[[str, bool], Tensor]) -> dict[str, Any] | None:
        """Return this rank's state, with tensors from `leaf`; None if the checkpoint lacks the state, so that it starts
        afresh. A state that was saved once for all ranks, but is now separate on each rank, begins equal on all ranks.
        If each rank saved its own state, but all ranks now share one state, the ranks resume from the result of
        `merge`, or from the first rank's state if there is no `merge`.
        """
        entry = self.states[name]
        first = self._trees[0]["trees"]
        ranks, same_hosts = self.checkpoint.ranks, self.checkpoint.local == self.world.local_size
        if name in self._shared:

            def shared_leaf(path: str) -> Tensor:
                own = apart_name(path, self.world.rank)  # name of a buffer that each rank saved separately
                return leaf(own if ranks == self.world.size and own in self.reader.kinds else path, True)

            return decode(self._shared[name], shared_leaf)
        if name not in first["own"]:
            return None
        if entry.across != "own" and entry.merge is None:
            return self._own(0, name, leaf, placed=False)
        if entry.across == "own" and ranks == self.world.size and (entry.merge is None or same_hosts):
            return self._own(self.world.rank, name, leaf, placed=True)
        if entry.merge is None:
            return None
        states = [self._own(rank, name, leaf, placed=False) for rank in range(ranks)]
        return entry.merge(states, self.world.rank, self.world.size) if name in self._reads else None

    def _own(self, rank: int, name: str, leaf: Callable[[str, bool], Tensor], *, placed: bool) -> dict[str, Any]:
        """Return a state that a former rank saved separately, because the state's `across` was "own"."""
        about = self._trees[rank]
        homes = about["homes"]
        return decode(about["trees"]["own"][name], lambda path: leaf(f"{homes.get(path, rank)}:{path}", placed))
