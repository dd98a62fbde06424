"""Copies a rank's differences to another host's memory, so that no step is lost when a host is lost.

Averages are equal on all ranks, so the partner rank on the other host already has them. Only a rank's own states are
sent, a few kilobytes per step. A message is sent during the next forward and backward pass, and has arrived before the
next optimizer step. The partner stores the message in a separate ring buffer in its host's memory. A rank that has lost
its differences receives the stored states from its partner, together with the partner's averages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoestring.checkpoint.differences.batches import same
from shoestring.checkpoint.differences.difference import shared
from shoestring.checkpoint.differences.ring import CellPlan, Found, Ring, first
from shoestring.checkpoint.tiers.peer_copies import partner
from shoestring.checkpoint.tiers.rank_group import RankGroup

Read = Callable[[int], Found | None]
_SPARE = 4096  # bytes added to a message's length, beside a quarter of the first length: states may grow


class Partner:
    """Exchanges differences between hosts. All methods are collectives.

    Rank `keeper` stores this rank's differences, and this rank stores the differences of rank `kept`. Ranks `keeper`
    and `kept` are on other hosts.

    Args:
        local: number of ranks per host.
        ring: ring buffer for the differences of rank `kept`.
    """

    def __init__(self, group: RankGroup, local: int, ring: Ring) -> None:
        self.group, self.ring = group, ring
        hosts, host, on_host = group.size // local, group.rank // local, group.rank % local
        self.keeper = partner(host, hosts) * local + on_host
        self.kept = next(index for index in range(hosts) if partner(index, hosts) == host) * local + on_host
        self._grown = ""
        self._sent = torch.empty(0, dtype=torch.uint8)
        self._wait: Callable[[], None] | None = None

    @property
    def lacking(self) -> str:
        """Reason why the newest difference of this rank or of rank `kept` is not stored; empty if both are stored."""
        return self._grown or self.ring.refused or self.ring.slot.lacking

    def send(self, step: int, difference: Found | None) -> int:
        """Start to send this rank's own states of a step, and to receive the states of rank `kept`.

        All messages have the same length, on which the ranks agree at the first message. A difference that does not fit
        into this length is not sent. Messages are received directly into the ring buffer, because a host's failure may
        end this process before it could copy a message.

        Args:
            difference: the difference of the step; None sends an empty message.

        Returns:
            The length of the message in bytes.
        """
        self.settle()
        plan = None
        if difference is not None:
            header, tensors = difference
            plan = CellPlan(header, {name: tensor for name, tensor in tensors.items() if not shared(name)})
        if not len(self._sent):
            needed = max(self.group.all_gather(0 if plan is None else plan.nbytes))
            if not needed:
                return 0
            self._sent = torch.zeros(needed + needed // 4 + _SPARE, dtype=torch.uint8)
        length = len(self._sent)
        self._sent[:1] = 0  # a message without magic number counts as empty
        self._grown = ""
        if plan is not None and plan.nbytes <= length:
            plan.put(self._sent)
        elif plan is not None:
            self._grown = f"a rank's own state has grown to {plan.nbytes} bytes, but messages have {length}"
        cell = self.ring.cell(step, length)
        if cell is None:
            cell = torch.empty(length, dtype=torch.uint8)
        self._wait = self.group.start_exchange((self.keeper, self._sent), (self.kept, cell[:length]))
        return length

    def settle(self) -> None:
        """Wait until the newest message has been sent and received."""
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()

    # -- giving back --------------------------------------------------------------------------------------------------

    def give_back(self, base: int, count: int, read: Read, ring: Ring, follows: Callable[[Found], bool]) -> None:
        """Get back this rank's lost differences from rank `keeper`, and send back the differences of rank `kept`.

        Args:
            base: step of the checkpoint that was loaded.
            count: number of steps directly after the checkpoint whose differences this rank still has.
            read: function that reads this rank's own difference of a step.
            ring: this rank's own ring buffer, to which the differences are written.
            follows: function that tells whether a difference is part of the run's history.
        """
        opened = self.ring.open()

        def complete(step: int) -> Found | None:
            """Return the difference of rank `kept` in a step, completed by this rank's averages."""
            stored, own = self.ring.read(step) if opened else None, read(step)
            if stored is None or own is None or not follows(stored) or not same(stored, own):
                return None
            return stored[0], stored[1] | {name: tensor for name, tensor in own[1].items() if shared(name)}

        counts = self.group.all_gather(count)
        plans, step = list[CellPlan](), base + counts[self.kept] + 1
        while (difference := complete(step + len(plans))) is not None:
            plans.append(CellPlan(*difference))
        lengths: Sequence[Sequence[int]] = self.group.all_gather([plan.nbytes for plan in plans])
        wanted = lengths[self.keeper]
        # The differences to send lie in this rank's ring buffer. If received differences will overwrite the ring
        # buffer, copy the differences first.
        cells = [*map(_bytes, plans)] if wanted else map(_bytes, plans)
        for cell, nbytes in itertools.zip_longest(cells, wanted):
            arrived = torch.empty(nbytes or 0, dtype=torch.uint8)
            sends = [] if cell is None else [(self.kept, cell)]
            self.group.exchange(sends, [] if nbytes is None else [(self.keeper, arrived)])
            if (difference := first(arrived)) is not None:  # a damaged difference ends the replay
                ring.write(*difference)


def _bytes(plan: CellPlan) -> Tensor:
    data = torch.empty(plan.nbytes, dtype=torch.uint8)
    plan.put(data)
    return data
