"""Several hosts on one Linux machine, with real slow links, lost hosts and counted bytes.

    with netlab(hosts=4, rate="100mbit") as lab:        # delay=0.02 adds 20 ms, one way
        job = lab.torchrun(["train.py"], max_restarts=3)
        lab.rate(1, "10mbit")                           # slow one link; cut(1) and mend(1) it
        lab.kill(rank=2)                                # SIGKILL, as the out-of-memory killer would
        lab.remove(3)                                   # power lost: processes, /dev/shm and disk are gone
        lab.add(3)
        job.join(3)
        job.check(timeout=600)
        print(lab.bytes(0))          # Traffic(rx=…, tx=…)

Each host has network, mount, PID, UTS and IPC namespaces of its own: a tmpfs of a given size as `/dev/shm`, another as
scratch disk (`DISK`), an `/etc/hosts` in which `host0`, `host1` … resolve, and one interface, `eth0`, shaped both ways.
`SHARED` is one folder for all of them, a stand-in for NFS, when `shared=` names one. The rest of the file system is the
machine's. The hosts reach each other and nothing else: the bridge between them has a network namespace of its own too,
so the machine's network is never touched.

Ranks that share a core lose time to the emulation of a fast link, which no cable would take from them.
`netlab(rate="100mbit", coalesce=True)` takes less than half of that, by a setting of the machine that is given back.

Needs root, iproute2 and util-linux; `netlab_available()` says what is missing.
"""

from shoestring.testing.netlab.hosts import DISK, LOGS, SHARED
from shoestring.testing.netlab.lab import Lab, netlab
from shoestring.testing.netlab.links import Traffic
from shoestring.testing.netlab.machine import netlab_available
from shoestring.testing.netlab.programs import Program

__all__ = ["DISK", "LOGS", "SHARED", "Lab", "Program", "Traffic", "netlab", "netlab_available"]
