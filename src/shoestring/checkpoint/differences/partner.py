"""What a rank of another host keeps of this rank's differences, so that a lost host costs no step.

Averages are equal on all ranks, so the partner has them; sent is only what is this rank's own, some kilobytes a step. A
message is on its way beside the next forward and backward pass, and there before the next optimizer step begins. What
arrived is kept in a ring of its own in that host's memory, and given back from there, joined with the averages.
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
_SPARE = 4096  # bytes by which a message is longer than the first one needs, and a quarter: states that grow a little


class Partner:
    """The rank that keeps this one's differences, and that of which this one keeps them; all methods are collectives.

    Args:
        local: ranks of a host.
        ring: for what arrives.
    """

    def __init__(self, group: RankGroup, local: int, ring: Ring) -> None:
        self.group, self.ring = group, ring
        hosts, host, on_host = group.size // local, group.rank // local, group.rank % local
        self.keeper = partner(host, hosts) * local + on_host
        self.kept = next(h for h in range(hosts) if partner(h, hosts) == host) * local + on_host
        self._grown = ""
        self._sent = torch.empty(0, dtype=torch.uint8)
        self._wait: Callable[[], None] | None = None

    @property
    def lacking(self) -> str:
        """Why the newest difference of one of the two is not kept."""
        return self._grown or self.ring.refused or self.ring.slot.lacking

    def send(self, step: int, found: Found | None) -> int:
        """Send what is this rank's own in a step's difference, and begin to receive the other's; None sends nothing.

        Returns:
            The bytes of the message.

        All ranks send messages of the length that they agree on at the first; one that does not fit is left out. It
        arrives in the ring itself: whole there, it outlives this process, which may learn of a lost host by its end.
        """
        self.settle()
        plan = None
        if found is not None:
            plan = CellPlan(found[0], {name: each for name, each in found[1].items() if not shared(name)})
        if not len(self._sent):
            needed = max(self.group.all_gather(0 if plan is None else plan.nbytes))
            if not needed:
                return 0
            self._sent = torch.zeros(needed + needed // 4 + _SPARE, dtype=torch.uint8)
        length = len(self._sent)
        self._sent[:1] = 0  # no mark
        self._grown = ""
        if plan is not None and plan.nbytes <= length:
            plan.put(self._sent)
        elif plan is not None:
            self._grown = f"a rank's own state has grown to {plan.nbytes} bytes, more than its messages of {length}"
        cell = self.ring.cell(step, length)
        if cell is None:
            cell = torch.empty(length, dtype=torch.uint8)
        self._wait = self.group.start_exchange((self.keeper, self._sent), (self.kept, cell[:length]))
        return length

    def settle(self) -> None:
        """Wait for what is on its way."""
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()

    # -- giving back --------------------------------------------------------------------------------------------------

    def give_back(self, base: int, count: int, read: Read, ring: Ring, follows: Callable[[Found], bool]) -> None:
        """Fill `ring` with the steps that this rank has lost, as far as its keeper has them.

        Args:
            base: the step that is continued.
            count: steps after it that this rank has, one after the other.
            read: (step) -> this rank's own difference.
            follows: whether a difference is one of the run.
        """
        there = self.ring.open()

        def whole(step: int) -> Found | None:
            """A step's difference of the other rank, with the averages that this one has."""
            others, own = self.ring.read(step) if there else None, read(step)
            if others is None or own is None or not follows(others) or not same(others, own):
                return None
            return others[0], others[1] | {name: each for name, each in own[1].items() if shared(name)}

        has = self.group.all_gather(count)
        plans, step = list[CellPlan](), base + has[self.kept] + 1
        while (found := whole(step + len(plans))) is not None:
            plans.append(CellPlan(*found))
        lengths: Sequence[Sequence[int]] = self.group.all_gather([plan.nbytes for plan in plans])
        wanted = lengths[self.keeper]
        # Where this rank's own ring is filled, too, what it gives is copied first: it may lie there.
        cells = [*map(_bytes, plans)] if wanted else map(_bytes, plans)
        for cell, nbytes in itertools.zip_longest(cells, wanted):
            arrived = torch.empty(nbytes or 0, dtype=torch.uint8)
            sends = [] if cell is None else [(self.kept, cell)]
            self.group.exchange(sends, [] if nbytes is None else [(self.keeper, arrived)])
            if (found := first(arrived)) is not None:  # a damaged one ends what can be replayed
                ring.write(*found)


def _bytes(plan: CellPlan) -> Tensor:
    data = torch.empty(plan.nbytes, dtype=torch.uint8)
    plan.put(data)
    return data
