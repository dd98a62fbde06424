"""The first process of a lab, a script that ends when the lab's owner ends in any way; all namespaces end with it.

The argument is the number of an inherited pidfd of the owner. Unlike a parent-death signal, a pidfd does not fire when
only the thread that started the lab ends; unlike a pipe, a pidfd is not kept open by the owner's other children.
"""

import os
import select
import signal
import sys


def main() -> None:
    """Print this process's id as seen outside of the lab's PID namespace, then wait until the owner has ended."""
    # Orphaned processes of the hosts get this process as parent; ignoring SIGCHLD makes the kernel reap them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ipv6 = "/proc/sys/net/ipv6/conf/default/disable_ipv6"
    if os.path.exists(ipv6):  # noqa: PTH110 (pathlib costs more to import than the rest together)
        with open(ipv6, "w") as file:  # noqa: PTH123
            file.write("1")  # IPv6 is off, so that neighbour discovery does not add to the counted bytes
    owner = select.poll()
    owner.register(int(sys.argv[1]), select.POLLIN)
    sys.stdout.write(os.readlink("/proc/self") + "\n")  # noqa: PTH115
    sys.stdout.close()
    owner.poll()


if __name__ == "__main__":
    main()
