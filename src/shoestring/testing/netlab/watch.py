"""The first process of a lab, run by path: when its owner ends, however it ends, so do all namespaces with all in them.

Argument: the number of an inherited pidfd of the owner, which, unlike a parent-death signal, does not fire when merely
the thread that started the lab ends, and unlike a pipe is not held open by the owner's other children.
"""

import os
import select
import signal
import sys


def main() -> None:
    """Say which process this is in the machine's numbering, then wait for the owner's end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans of the hosts end up here; the kernel reaps them
    ipv6 = "/proc/sys/net/ipv6/conf/default/disable_ipv6"
    if os.path.exists(ipv6):  # noqa: PTH110 (pathlib costs more to import than the rest together)
        with open(ipv6, "w") as file:  # noqa: PTH123
            file.write("1")  # no neighbour discovery among the bytes that are counted
    owner = select.poll()
    owner.register(int(sys.argv[1]), select.POLLIN)
    sys.stdout.write(os.readlink("/proc/self") + "\n")  # noqa: PTH115
    sys.stdout.close()
    owner.poll()


if __name__ == "__main__":
    main()
