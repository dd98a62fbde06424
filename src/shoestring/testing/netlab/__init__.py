"""A lab of virtual hosts on one Linux machine, with slow links, failing hosts and byte counters.

    with netlab(hosts=4, rate="100mbit") as lab:        # delay=0.02 adds 20 ms, one way
        job = lab.torchrun(["train.py"], max_restarts=3)
        lab.rate(1, "10mbit")                           # slow one link; cut(1) and mend(1) it
        lab.kill(rank=2)                                # SIGKILL, as the out-of-memory killer would
        lab.remove(3)                                   # power lost: processes, /dev/shm and disk are gone
        lab.add(3)
        job.join(3)
        job.check(timeout=600)
        print(lab.bytes(0))          # Traffic(rx=…, tx=…)

Each host has its own network, mount, PID, UTS and IPC namespaces. A host has a tmpfs of limited size as `/dev/shm`,
another tmpfs as scratch disk (`DISK`), an `/etc/hosts` in which `host0`, `host1` … resolve, and one network interface,
`eth0`, whose bandwidth is limited in both directions. With `shared=`, all hosts see one folder as `SHARED`, as over
NFS. The host shares the rest of the file system with the machine. The hosts can reach only each other: the bridge
between them is in a network namespace of its own, so the machine's network is not changed.

Emulating a fast link takes processor time from ranks that share cores, which a real cable would not.
`netlab(rate="100mbit", coalesce=True)` takes less than half of this processor time, by changing a setting of the
machine while the lab runs.

The lab needs root, iproute2 and util-linux; `netlab_available()` says what is missing.
"""

from shoestring.testing.netlab.hosts import DISK, LOGS, SHARED
from shoestring.testing.netlab.lab import Lab, netlab
from shoestring.testing.netlab.links import Traffic
from shoestring.testing.netlab.machine import netlab_available
from shoestring.testing.netlab.programs import Program

__all__ = ["DISK", "LOGS", "SHARED", "Lab", "Program", "Traffic", "netlab", "netlab_available"]
