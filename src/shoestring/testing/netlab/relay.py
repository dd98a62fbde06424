"""Emulates a cable with a delay: a script, run on a host, that passes frames between two TAP devices after the delay.

The relay replaces netem, which some kernels lack. The arguments are the name of the device at the bridge's end and the
delay of each frame in seconds. The device at the host's end is `eth0`. The script makes both devices in the host's
network namespace; the lab then moves the bridge's device to the bridge's namespace.
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
_LARGEST = 65_550  # size of a read in bytes; larger than any frame
_TURN = 64  # maximum number of frames to read from one device before the other device is read


def tap(name: str) -> int:
    """Make a TAP device; each read of the returned descriptor takes one frame, and each write sends one."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


class Lane:
    """One direction of the cable: a queue of frames that were read at one end and are not yet due at the other end."""

    def __init__(self, source: int, target: int, delay: float) -> None:
        self.source, self.target, self.delay = source, target, delay
        self.held: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Read the frames that are waiting at the source, and queue them."""
        due = time.monotonic() + self.delay
        with suppress(OSError):  # no frame is waiting, or the cable is cut
            for _ in range(_TURN):
                self.held.append((due, os.read(self.source, _LARGEST)))

    def give(self) -> float | None:
        """Write the frames that are due; return the seconds until the next frame is due, or None if there is none."""
        while self.held:
            wait = self.held[0][0] - time.monotonic()
            if wait > 0:
                return wait
            with suppress(OSError):  # the cable is cut or the queue is full: the frame is lost
                os.write(self.target, self.held.popleft()[1])
        return None


def main() -> None:
    """Make both devices, print this process's id as seen outside of the host, and pass frames on until killed."""
    name, delay = sys.argv[1], float(sys.argv[2])
    os.nice(-20)  # highest priority, so that a busy machine does not add to the delay
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
