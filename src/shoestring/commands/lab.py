"""Arguments of `shoestring lab`: virtual hosts with slow links on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StartLab:
    """Arguments of `shoestring lab up`."""

    hosts: int = 2
    """Number of hosts to start."""
    rate: str = "100mbit"
    """Bandwidth of each host's link in each direction, in the notation of Linux's tc, such as 10mbit or 1gbit."""
    delay: float = 0.0
    """Delay of each link in each direction, in seconds; 0.02 is 20 ms."""
    coalesce: bool = False
    """Release frames once per millisecond at rates above 12 Mbit/s. Emulating the links then takes less processor time
    from the programs on the hosts. This changes a setting of the machine until `shoestring lab down`."""

    def __call__(self) -> int:
        from shoestring.testing.netlab.by_hand import up

        up(self.hosts, self.rate, delay=self.delay, coalesce=self.coalesce)
        return 0


@dataclass(frozen=True)
class EndLab:
    """The verb `shoestring lab down`, which has no arguments."""

    def __call__(self) -> int:
        from shoestring.testing.netlab.by_hand import down

        down()
        return 0


@dataclass(frozen=True)
class RunInLab:
    """Arguments of `shoestring lab run`."""

    host: str = ""
    """Host to run the command on, such as host0; defaults to all hosts."""

    def __call__(self, command: Sequence[str]) -> int:
        from shoestring.testing.netlab.by_hand import run

        return run(list(command), self.host or None)
