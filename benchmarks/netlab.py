"""netlab: the rate that a link has against the one asked for, the delay likewise, and what killed labs leave behind."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

from benchmarks.harness import Bar, Deadline, Measured, NotRun, main
from shoestring.testing.netlab import Lab, netlab, netlab_available
from shoestring.testing.netlab.links import bits_per_second
from tests.rigs.leftovers import left_after

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


def shaped(rate: str, coalesce: bool) -> tuple[float, float]:
    """What a link shaped to `rate` carries in parts of it: (away from the host, towards the host)."""
    bits = bits_per_second(rate)
    seconds, window = (8.0 if bits < 5_000_000 else 4.0), max(bits // 8 // 50, 16_384)
    with netlab(hosts=2, coalesce=coalesce) as lab:
        lab.rate(0, rate)
        sent = goodput(lab, seconds, window)
        lab.rate(0, None)
        lab.rate(1, rate)
        received = goodput(lab, seconds, window)
    return sent / bits, received / bits


def rate_error(rate: str, coalesce: bool, _: Deadline) -> Measured | NotRun:
    """How far the rate is off, in the worse direction."""
    if reason := netlab_available():
        return NotRun(reason)
    sent, received = shaped(rate, coalesce)
    return Measured(max(abs(sent - 1), abs(received - 1)), f"sending {sent:.4f}, receiving {received:.4f} of the rate")


def busy_seconds() -> float:
    """How long this machine's processors have worked since it was started."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def cost_of_coalesced(_: Deadline) -> Measured | NotRun:
    """Processor time of TCP at 100 Mbit/s with coalesced frames over that with single ones, the least of three each."""
    if reason := netlab_available():
        return NotRun(reason)
    least = [float("inf")] * 2
    for turn in range(6):
        with netlab(hosts=2, rate="100mbit", coalesce=turn % 2 == 1) as lab:
            before = busy_seconds()
            goodput(lab, 4.0, 250_000)
            least[turn % 2] = min(least[turn % 2], busy_seconds() - before)
    single, coalesced = least
    return Measured(coalesced / single, f"{coalesced:.2f} and {single:.2f} s in 5 s of transfer, two programs included")


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


def rows() -> list[Bar]:
    """The bars: rates from 1 Mbit/s to 1 Gbit/s within 5%, a delay within 15%, and nothing left by killed labs."""
    rates = [
        Bar(
            f"netlab.rate-{rate}",
            f"a link at {rate}: how far TCP's rate with its headers is off, in parts, in the worse direction",
            "<=",
            0.05,
            measure=functools.partial(rate_error, rate, False),
        )
        for rate in RATES
    ]
    rates += [
        Bar(
            f"netlab.coalesced-{rate}",
            f"a link at {rate} whose frames pass by the millisecond: how far the rate is off, in parts",
            "<=",
            0.05,
            measure=functools.partial(rate_error, rate, True),
        )
        for rate in ("100mbit", "1gbit")
    ]
    delay = "a link with 10 ms one way: how far the median round trip is off 20 ms, in parts"
    left = "processes, namespaces, interfaces, mounts and folders left by 20 labs whose owners were killed with SIGKILL"
    return [
        *rates,
        Bar(
            "netlab.coalesced-cost",
            "processor time of TCP at 100 Mbit/s with frames that pass by the millisecond over that of single frames",
            "<=",
            0.5,
            measure=cost_of_coalesced,
            baseline="frames one by one",
        ),
        Bar("netlab.delay", delay, "<=", 0.15, measure=delay_error),
        Bar("netlab.leftovers", left, "<=", 0, measure=leftovers, kind="exact"),
    ]


if __name__ == "__main__":
    sys.exit(main("netlab", rows))
