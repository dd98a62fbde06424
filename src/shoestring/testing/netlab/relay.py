"""A cable that takes time, run by path on a host: frames between two TAP devices, each held for a while.

For kernels without netem. Arguments: the name of the bridge's end, and the seconds each frame is held. The host's end
is `eth0`. Both are made here, in the host's network namespace; the lab then moves the other to the bridge.
"""

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
_LARGEST = 65_550  # bytes: more than any frame
_TURN = 64  # frames read from one end before the other has its turn


def tap(name: str) -> int:
    """Make a TAP device: each read of it gives one frame, each write sends one."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


class Lane:
    """One direction: frames that have been read from one end and are not yet due at the other."""

    def __init__(self, source: int, target: int, delay: float) -> None:
        self.source, self.target, self.delay = source, target, delay
        self.held: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Read the frames that wait at the source."""
        due = time.monotonic() + self.delay
        with suppress(OSError):  # nothing waits, or the cable is cut
            for _ in range(_TURN):
                self.held.append((due, os.read(self.source, _LARGEST)))

    def give(self) -> float | None:
        """Write the frames that are due; gives the seconds to the next, None when no frame is held."""
        while self.held:
            wait = self.held[0][0] - time.monotonic()
            if wait > 0:
                return wait
            with suppress(OSError):  # cut, or the queue there is full: lost, as on a wire
                os.write(self.target, self.held.popleft()[1])
        return None


def main() -> None:
    """Make both ends, say which process this is in the machine's numbering, and carry frames for ever."""
    name, delay = sys.argv[1], float(sys.argv[2])
    os.nice(-20)  # a busy machine must not make the cable longer
    ends = tap("eth0"), tap(name)
    lanes = {ends[0]: Lane(ends[0], ends[1], delay), ends[1]: Lane(ends[1], ends[0], delay)}
    sys.stdout.write(os.readlink("/proc/self") + "\n")  # noqa: PTH115
    sys.stdout.close()
    while True:
        waits = [wait for lane in lanes.values() if (wait := lane.give()) is not None]
        ready, _, _ = select.select(ends, [], [], min(waits, default=None))
        for end in ready:
            lanes[end].take()


if __name__ == "__main__":
    main()
