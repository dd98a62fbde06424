"""netlab: the rate that a link has against the one asked for, the delay likewise, and what killed labs leave behind."""

from __future__ import annotations

import functools
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks.harness import Bar, Deadline, Measured, NotRun, main
from shoestring.testing.netlab import Lab, lab_folders, netlab, netlab_available
from shoestring.testing.netlab.lab_folders import LabRecord
from shoestring.testing.netlab.links import bits_per_second
from shoestring.testing.netlab.machine import Identity, parent

RATES = ("1mbit", "10mbit", "100mbit", "1gbit")
_FRAME, _PAYLOAD = 1514, 1448  # bytes: a full Ethernet frame of TCP with time stamps, and what it carries

# Argument: seconds to measure for, after one second in which the bucket's first fill is used up. Prints bit/s.
_SINK = """
import socket, sys, time
link = socket.create_server(("", 5000)).accept()[0]
buffer, taken, begin = bytearray(1 << 20), 0, time.monotonic()
while time.monotonic() < begin + 1:
    link.recv_into(buffer)
begin = time.monotonic()
while (now := time.monotonic()) < begin + float(sys.argv[1]):
    taken += link.recv_into(buffer)
print(taken * 8 / (now - begin))
"""
# Argument: bytes on their way at most. With as many as the link takes, none is lost, and none arrives out of order.
_SOURCE = """
import socket, sys
while True:
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, int(sys.argv[1]))
    try:
        link.connect(("host1", 5000))
        break
    except OSError:
        link.close()
try:
    while True:
        link.sendall(bytes(1 << 18))
except OSError:
    pass
"""
_PING = """
import socket, sys, time
peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if socket.gethostname() == "host1":
    peer.bind(("", 5001))
    while True:
        peer.sendto(*peer.recvfrom(64))
peer.settimeout(0.2)
def trip():
    begin = time.monotonic()
    peer.sendto(b"?", ("host1", 5001))
    peer.recv(64)
    return time.monotonic() - begin
times = []
while len(times) < 60:
    try:
        times.append(trip())
    except OSError:
        time.sleep(0.05)
print(sorted(times[10:])[25])
"""

# An owner to be killed.
_OWNER = """
import sys
from shoestring.testing.netlab import netlab
with netlab(hosts=2, rate="100mbit") as lab:
    lab.start(["sh", "-c", "sleep 1000 & exec sleep 1000"])
    print("up", flush=True)
    sys.stdin.read()
"""


def goodput(lab: Lab, seconds: float, window: int) -> float:
    """What TCP carries from host 0 to host 1, as bit/s on the wire: each 1448 bytes with their 66 of headers."""
    sink = lab.start([sys.executable, "-S", "-c", _SINK, str(seconds)], hosts=[1])
    source = lab.start([sys.executable, "-S", "-c", _SOURCE, str(window)], hosts=[0])
    try:
        sink.check(timeout=seconds + 60)
    finally:
        source.kill()
        sink.kill()
    return float(sink.output(1)) * _FRAME / _PAYLOAD


def shaped(rate: str) -> tuple[float, float]:
    """What a link shaped to `rate` carries in parts of it: (away from the host, towards the host)."""
    bits = bits_per_second(rate)
    seconds, window = (8.0 if bits < 5_000_000 else 4.0), max(bits // 8 // 50, 16_384)
    with netlab(hosts=2) as lab:
        lab.rate(0, rate)
        sent = goodput(lab, seconds, window)
        lab.rate(0, None)
        lab.rate(1, rate)
        received = goodput(lab, seconds, window)
    return sent / bits, received / bits


def rate_error(rate: str, _: Deadline) -> Measured | NotRun:
    """How far the rate is off, in the worse direction."""
    if reason := netlab_available():
        return NotRun(reason)
    sent, received = shaped(rate)
    return Measured(max(abs(sent - 1), abs(received - 1)), f"sending {sent:.4f}, receiving {received:.4f} of the rate")


def delay_error(_: Deadline) -> Measured | NotRun:
    """How far the median round trip over a link with 10 ms one way is off 20 ms, in parts."""
    if reason := netlab_available():
        return NotRun(reason)
    with netlab(hosts=2, rate="100mbit", delay=0.01) as lab:
        echo = lab.start([sys.executable, "-S", "-c", _PING], hosts=[1])
        trip = float(lab.run([sys.executable, "-S", "-c", _PING], hosts=[0])[0])
        echo.kill()
    return Measured(abs(trip / 0.02 - 1), f"median round trip {trip * 1000:.2f} ms")


def leftovers(_: Deadline) -> Measured | NotRun:
    """What 20 labs with killed owners leave."""
    if reason := netlab_available():
        return NotRun(reason)
    left = left_after(20)
    return Measured(len(left), "; ".join(left[:5]))


def left_after(rounds: int) -> list[str]:
    """Start a lab, kill its owner with SIGKILL, start the next, `rounds` times: in words, whatever is left after all.

    Looked at are the processes and namespaces of those labs, and this machine's interfaces, mounts and lab folders.
    """
    before = surroundings()
    left: list[str] = []
    folders: list[Path] = []
    for _ in range(rounds):
        owner = start_owner()
        folders.append(folder_of(owner.pid))
        family = set(descendants(owner.pid))
        namespaces = {name for identity in family for name in _namespaces(identity.pid)} - _namespaces(os.getpid())
        kill(owner)
        # The names of namespaces are given again, so what counts is who was in them at the time of the kill.
        family |= set(_inhabitants(namespaces, time.clock_gettime(time.CLOCK_BOOTTIME)))
        left += [f"process {identity.pid}" for identity in family if not ends(identity)]
    with netlab(hosts=1):  # the next start, which clears away
        pass
    left += [f"folder {folder}" for folder in folders if folder.exists()]
    return left + sorted(surroundings() - before)


def start_owner() -> subprocess.Popen[str]:
    """Start a process that owns a lab of two hosts with programs on them, and waits to be killed."""
    pipe, environment = subprocess.PIPE, {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _OWNER]
    owner = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    assert owner.stdout is not None
    if owner.stdout.readline() != "up\n":
        raise RuntimeError("the lab to be killed did not start")
    return owner


def kill(owner: subprocess.Popen[str]) -> None:
    """Kill the owner of a lab with SIGKILL."""
    owner.kill()
    owner.wait()
    assert owner.stdin is not None and owner.stdout is not None
    owner.stdin.close()
    owner.stdout.close()


def folder_of(owner: int) -> Path:
    """The folder of the lab that process `owner` has."""
    return next(folder for folder in lab_folders.folders() if LabRecord.read(folder).owner.pid == owner)


def surroundings() -> set[str]:
    """The interfaces of this process's own network, and its mounts where a lab makes some on its hosts."""
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    places = ("/proc", "/dev/shm", "/etc/hosts", str(lab_folders.ROOT))
    mounts = {f"mount {line[0]} at {line[4]}" for line in lines if line[4].startswith(places)}
    return mounts | {f"interface {path.name}" for path in Path("/sys/class/net").iterdir()}


def descendants(pid: int) -> Iterator[Identity]:
    """The processes that `pid` has started, directly or not."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and parent(int(entry.name)) == pid:
            with suppress(ProcessLookupError):
                yield Identity.of(int(entry.name))
            yield from descendants(int(entry.name))


def _namespaces(pid: int) -> set[str]:
    names = set()
    for kind in ("net", "mnt", "uts", "ipc", "pid"):
        try:
            names.add(str(Path(f"/proc/{pid}/ns/{kind}").readlink()))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return names


def _inhabitants(namespaces: set[str], by: float) -> Iterator[Identity]:
    """The processes in any of the namespaces that have started by a time in seconds since boot."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and namespaces & _namespaces(int(entry.name)):
            with suppress(ProcessLookupError):
                identity = Identity.of(int(entry.name))
                if identity.started <= by * os.sysconf("SC_CLK_TCK"):
                    yield identity


def ends(identity: Identity, timeout: float = 20.0) -> bool:
    """Whether a process that is bound to end does."""
    try:
        handle = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return True
    try:
        return not identity.alive() or bool(select.select([handle], [], [], timeout)[0])
    finally:
        os.close(handle)


def rows() -> list[Bar]:
    """The bars: rates from 1 Mbit/s to 1 Gbit/s within 5%, a delay within 15%, and nothing left by killed labs."""
    rates = [
        Bar(
            f"netlab.rate-{rate}",
            f"a link at {rate}: how far TCP's rate with its headers is off, in parts, in the worse direction",
            "<=",
            0.05,
            measure=functools.partial(rate_error, rate),
        )
        for rate in RATES
    ]
    delay = "a link with 10 ms one way: how far the median round trip is off 20 ms, in parts"
    left = "processes, namespaces, interfaces, mounts and folders left by 20 labs whose owners were killed with SIGKILL"
    return [
        *rates,
        Bar("netlab.delay", delay, "<=", 0.15, measure=delay_error),
        Bar("netlab.leftovers", left, "<=", 0, measure=leftovers),
    ]


if __name__ == "__main__":
    sys.exit(main("netlab", rows))
