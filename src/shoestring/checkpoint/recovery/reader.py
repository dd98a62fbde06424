"""Reading a checkpoint from wherever its parts are: this host's memory and disk, or another host's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoestring.checkpoint.format.layout import PRIVATE, Box, box_of, sources
from shoestring.checkpoint.format.manifest import CheckpointId, Entry
from shoestring.checkpoint.format.part import Part, Piece
from shoestring.checkpoint.format.tree import decode, encode, root
from shoestring.checkpoint.tiers import peer_copies
from shoestring.checkpoint.tiers.rank_group import RankGroup
from shoestring.checkpoint.tiers.staging import apart_name, home
from shoestring.core.errors import CheckpointError
from shoestring.core.job import Kept
from shoestring.core.world import World

log = logging.getLogger("shoestring")

MEMORY, DISK = "memory", "disk"


@dataclass(frozen=True)
class Offer:
    """A file with a part of a checkpoint, that the ranks of one host can read."""

    checkpoint: CheckpointId
    host: int
    level: str
    path: str
    part: str
    entry: Entry
    notes: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> tuple[int, str]:
        return self.host, self.path

    @property
    def held(self) -> bool:
        return Path(self.path).name.startswith("held-")


def opened(offer: Offer) -> Part:
    """An offer's part, mapped."""
    return Part.open(Path(offer.path), offer.entry.nbytes, offer.entry.sums, slot=offer.level == MEMORY)


@dataclass(frozen=True)
class Read:
    """A box of a piece of a part that some host offers."""

    tensor: str
    offer: int
    piece: int
    box: Box
    server: int
    """The present rank that reads it from memory or disk."""


@dataclass(eq=False)
class Reader:
    """The pieces of all offers of a checkpoint, and reading them wherever they are."""

    world: World
    group: RankGroup
    offers: list[Offer]
    parts: dict[int, Part] = field(default_factory=dict)
    pieces: dict[str, list[tuple[Box, tuple[int, int]]]] = field(default_factory=dict)
    """By tensor: the boxes that can be read, as (box, (offer, piece)), the nearest first."""
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)
    abouts: dict[str, dict[str, Any]] = field(default_factory=dict)
    _plan: dict[str, list[Read]] = field(default_factory=dict)
    _asked: list[dict[str, list[Any]]] = field(default_factory=list)
    _headers: list[Any] = field(default_factory=list)

    @property
    def host(self) -> int:
        return self.world.rank // self.world.local_size

    def open(self) -> set[tuple[int, str]]:
        """Read the headers on the hosts that have them, and tell them to all; the damaged ones."""
        damaged, headers = [], []
        for index, offer in enumerate(self.offers):
            if offer.host != self.host or offer.part.startswith(peer_copies.PARITY):
                continue
            try:
                self.parts[index] = part = opened(offer)
                if self._server(index) == self.world.rank:
                    part.verify(0, 8)
                    offer.checkpoint.claims(part)
                    headers.append([index, part.about, [_described(piece) for piece in part.pieces]])
            except CheckpointError as error:
                log.warning("%s", error)
                damaged.append(list(offer.key))
        if any(bad := self.group.all_gather(damaged)):
            return {(host, path) for each in bad for host, path in each}
        self._headers = [each for listed in self.group.all_gather(headers) for each in listed]
        return set()

    def sort(self) -> None:
        """Sort the pieces in the headers by their tensors.

        Raises:
            CheckpointError: on all ranks: two of them are of different tensors under one name.
        """
        of: dict[str, int] = {}
        for index, about, pieces in sorted(self._headers, key=lambda each: self._distance(each[0])):
            self.abouts.setdefault(self.offers[index].part, about)
            for number, (tensor, shape, offset, extent, dtype) in enumerate(pieces):
                kind = getattr(torch, dtype), tuple(shape)
                if self.kinds.setdefault(tensor, kind) != kind:
                    one, other = (
                        f"{k} {s} in `{self.offers[i].path}`"
                        for (k, s), i in ((self.kinds[tensor], of[tensor]), (kind, index))
                    )
                    raise CheckpointError(f"`{tensor}` is {one} and {other}")
                of.setdefault(tensor, index)
                self.pieces.setdefault(tensor, []).append((Box(tuple(offset), tuple(extent)), (index, number)))

    def _server(self, index: int) -> int:
        """The rank that reads an offer for others."""
        return self.offers[index].host * self.world.local_size + index % self.world.local_size

    def _distance(self, index: int) -> tuple[bool, bool, bool, int]:
        offer = self.offers[index]
        far = offer.host != self.host
        return far, offer.level == DISK, offer.held, index

    def locate(self, tensor: str, box: Box) -> list[Read]:
        """What to read for a box of a tensor.

        Raises:
            CheckpointError: it is not all there.
        """
        covering = sources(box, self.pieces.get(tensor, []))
        if covering is None or tensor not in self.kinds:
            raise CheckpointError(f"`{tensor}` is incomplete")
        reads = []
        for part, (index, piece) in covering:
            near = self.offers[index].host == self.host
            reads.append(Read(tensor, index, piece, part, self.world.rank if near else self._server(index)))
        return reads

    def verify(self, reads: Mapping[str, list[Read]]) -> set[tuple[int, str]]:
        """Verify what all ranks will read, on the ranks that read it; the damaged offers."""
        self._plan = dict(reads)
        asks = {
            name: [
                [read.offer, read.piece, read.box.offset, read.box.shape, read.server]
                for read in each
                if read.server != self.world.rank
            ]
            for name, each in reads.items()
        }
        self._asked = self.group.all_gather(asks)
        damaged = []
        mine = {(read.offer, read.piece) for each in reads.values() for read in each if read.server == self.world.rank}
        mine |= {(o, p) for name in reads for _, o, p, _ in self._requests(name)}
        for index, number in sorted(mine):
            try:
                piece = self.parts[index].pieces[number]
                self.parts[index].verify(piece.start, piece.stop)
            except CheckpointError as error:
                log.warning("%s", error)
                damaged.append(list(self.offers[index].key))
        return {(host, path) for each in self.group.all_gather(damaged) for host, path in each}

    def _requests(self, name: str) -> Iterator[tuple[int, int, int, Box]]:
        """(rank, offer, piece, box) of what others want from this rank."""
        for rank, asked in enumerate(self._asked):
            for offer, piece, offset, shape, server in asked[name]:
                if server == self.world.rank:
                    yield rank, offer, piece, Box(tuple(offset), tuple(shape))

    def fetch(self, name: str) -> list[Tensor]:
        """The tensors of one planned group of reads: views of what is near, copies of what was sent; a collective.

        Raises:
            ConnectionError: on this rank alone, after the exchange: something did not arrive whole.
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
            raise ConnectionError(f"what rank {min(damaged)} sent did not arrive whole")
        return got

    def _at(self, index: int, number: int, box: Box) -> Tensor:
        part = self.parts[index]
        return part.read(part.pieces[number], box)


def _described(piece: Piece) -> list[Any]:
    return [piece.tensor, piece.shape, piece.box.offset, piece.box.shape, str(piece.dtype).removeprefix("torch.")]


# -- what a rank wants ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Wanted:
    """The states that this rank needs of a checkpoint, and the boxes of tensors that they are made of."""

    kept: Mapping[str, Kept]
    world: World
    checkpoint: CheckpointId
    reader: Reader

    def __post_init__(self) -> None:
        self._boxes: dict[str, dict[str, tuple[Box, DTensor | None]]] = {}  # by name of what is kept, and tensor
        self._reads: dict[str, list[list[Read]]] = {}  # by name, of each of its tensors
        self._placed: dict[str, DTensor] = {}
        """By tensor, or by what its path begins with: what it is placed like on this rank."""
        for name, kept in self.kept.items():
            tensors: dict[str, Tensor] = {}
            encode(kept.state.state_dict(), root(name), tensors)
            for path, tensor in (*tensors.items(), *_moments(root(name), kept.state)):
                if isinstance(tensor, DTensor):
                    key = f"{home(tensor, self.world.rank)}:{path}" if kept.across == "own" else path
                    self._placed[key] = tensor
        self._trees = {rank: self._about(rank) for rank in range(self.checkpoint.ranks)}

    def _about(self, rank: int) -> dict[str, Any]:
        try:
            return self.reader.abouts[f"{PRIVATE}-{rank}"]
        except KeyError as error:
            raise CheckpointError(f"the state of former rank {rank} is missing") from error

    @property
    def about(self) -> Mapping[str, Any]:
        """What its first rank said of it when it was saved."""
        return self._trees[0]

    @property
    def saved(self) -> set[str]:
        """The names of all states that it holds."""
        return {name for about in self._trees.values() for trees in about["trees"].values() for name in trees}

    def reads(self) -> dict[str, list[Read]]:
        """Everything to read, for each name that is kept."""
        for name in self.kept:
            self._boxes[name] = {}
            self._visit(name, partial(self._want, self._boxes[name]))
            self._reads[name] = [self.reader.locate(tensor, box) for tensor, (box, _) in self._boxes[name].items()]
        return {name: [read for reads in each for read in reads] for name, each in self._reads.items()}

    def state(self, name: str) -> dict[str, Any] | None:
        """One state, which shares nothing with slots or files; None where it starts afresh. A collective."""
        tensors, ready = iter(self.reader.fetch(name)), {}
        for (tensor, (box, placed)), reads in zip(self._boxes[name].items(), self._reads[name], strict=True):
            whole = torch.empty(box.shape, dtype=self.reader.kinds[tensor][0])
            for read in reads:
                whole[read.box.inside(box)].copy_(next(tensors))
            ready[tensor] = whole if placed is None else _as(placed, whole)
        return self._visit(name, lambda leaf, _: ready[leaf])

    def _want(self, boxes: dict[str, tuple[Box, DTensor | None]], tensor: str, placed: bool) -> Tensor:
        """Note that a tensor is needed: this rank's box of it where it is placed as one here, else all of it."""
        shape = self.reader.kinds[tensor][1] if tensor in self.reader.kinds else ()
        like = self._like(tensor, shape) if placed else None
        if like is not None:
            boxes[tensor] = box_of(tensor, like), like
        else:
            boxes.setdefault(tensor, (Box((0,) * len(shape), shape), None))
        return torch.empty(0)

    def _like(self, tensor: str, shape: tuple[int, ...]) -> DTensor | None:
        """What a saved tensor is placed like on this rank; None where it comes back whole.

        A fresh optimizer's state of a parameter lies as what the optimizer would make of that parameter: a moment as
        the parameter itself, and a factor of a moment (Adafactor), which has as many dimensions, as a new tensor of it.
        """
        if (mine := self._placed.get(tensor)) is not None:
            return mine if tuple(mine.shape) == shape else None
        parameter = self._placed.get(tensor.rpartition("/")[0])
        if parameter is None or tuple(parameter.shape) == shape:
            return parameter
        if parameter.ndim != len(shape) or not shape:
            return None
        factor = parameter.detach().new_zeros(shape)
        return factor if isinstance(factor, DTensor) else None

    def _visit(self, name: str, leaf: Callable[[str, bool], Tensor]) -> dict[str, Any] | None:
        """This rank's state, its tensors from `leaf`; None for what the checkpoint lacks or what starts afresh.

        What was one state for all is where each rank begins, should they hold their own now; the other way round, all
        resume from the first one's.
        """
        each = self.kept[name]
        first = self._trees[0]["trees"]
        if name in first["shared"]:
            return decode(first["shared"][name], lambda path: leaf(self._apart(path), True))
        if name not in first["own"]:
            return None
        if each.across != "own":
            return self._own(0, name, leaf, placed=False)
        ranks, same = self.checkpoint.ranks, self.checkpoint.local == self.world.local_size
        if ranks == self.world.size and (each.merge is None or same):
            return self._own(self.world.rank, name, leaf, placed=True)
        if each.merge is None:
            return None
        states = [self._own(rank, name, leaf, placed=False) for rank in range(ranks)]
        return each.merge(states, self.world.rank, self.world.size) if name in self._reads else None

    def _apart(self, path: str) -> str:
        """The name of this rank's own tensor in a shared state, where as many ranks saved one each."""
        name = apart_name(path, self.world.rank)
        return name if self.checkpoint.ranks == self.world.size and name in self.reader.kinds else path

    def _own(self, rank: int, name: str, leaf: Callable[[str, bool], Tensor], *, placed: bool) -> dict[str, Any]:
        about = self._trees[rank]
        return decode(about["trees"]["own"][name], partial(self._owned, about["homes"], rank, leaf, placed))

    def _owned(
        self, homes: Mapping[str, str], rank: int, leaf: Callable[[str, bool], Tensor], placed: bool, path: str
    ) -> Tensor:
        return leaf(f"{homes.get(path, rank)}:{path}", placed)


def _moments(path: str, state: object) -> Iterator[tuple[str, Tensor]]:
    """(path below which its state is saved, parameter): a fresh optimizer's state will lie as its parameters do."""
    if isinstance(state, Optimizer):
        parameters = (parameter for group in state.param_groups for parameter in group["params"])
        yield from ((f"{path}/state/{index}", parameter) for index, parameter in enumerate(parameters))


def _as(placed: DTensor, local: Tensor) -> DTensor:
    """A local tensor as part of one that is placed like another."""
    local = local.to(placed.to_local().device)
    layout = {"shape": placed.shape, "stride": placed.stride()}
    return DTensor.from_local(local, placed.device_mesh, placed.placements, run_check=False, **layout)
