"""The links of a lab: a bridge in its own network namespace, and for each host a veth pair with limited bandwidth.

The queueing disciplines tbf(8) or htb(8) limit the bandwidth: at the host's end for sent frames, and at the bridge's
end for received frames. Up to 100 Mbit/s segmentation offload is off, so that an interface counts the bytes that a wire
would carry, with headers for each frame. At higher rates a processor could not keep up with single frames, so offload
stays on; the bandwidth limit still counts each frame.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from shoestring.core.errors import ConfigError, WorldError
from shoestring.testing.netlab.machine import tool

MOST_HOSTS = 250
EXACT = 100_000_000
"""Highest rate in bit/s at which segmentation offload is off, so that frames pass one by one."""
COALESCED = 12_000_000
"""Highest rate in bit/s at which `coalesce` has no effect, because at most one frame passes per millisecond."""
_FRAME = 1514  # size of a frame in bytes: an Ethernet header and 1500 bytes of payload
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class Traffic(NamedTuple):
    """Bytes that a host has received (`rx`) and sent (`tx`) since it was started, with Ethernet headers.

    On links faster than 100 Mbit/s, many frames pass as one frame with one header, so the count is up to 4.4% too low.
    """

    rx: int
    tx: int


def address(host: int) -> str:
    """Return the IP address of a host, in a subnet that exists only inside the lab."""
    return f"10.77.0.{host + 1}"


def names() -> str:
    """Return the content of `/etc/hosts`, with all possible hosts, so that the names of hosts added later resolve."""
    lines = ["127.0.0.1 localhost"]
    for host in range(MOST_HOSTS):
        # The second line lets programs look up the name of an IPv6 socket's peer. The second line uses another name, so
        # that each host's name still resolves to a single address.
        lines += [f"{address(host)} host{host}", f"::ffff:{address(host)} host{host}.lab"]
    return "\n".join([*lines, ""])


def bits_per_second(rate: str) -> int:
    """Convert a rate in tc's notation ("1mbit", "2.5gbit") to bit/s.

    Raises:
        ConfigError: the rate is malformed, or below 8 kbit/s.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", rate.strip().lower())
    bits = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if bits < 8_000:
        raise ConfigError(f"netlab: {rate!r} is not a rate", hint='write "100mbit" or "1gbit"; 8kbit is the least')
    return bits


def build_bridge(switch: int) -> None:
    """Make the lab's bridge in the network namespace of the process with id `switch`."""
    _ip(switch, "link add name br0 type bridge forward_delay 0 mcast_snooping 0", "link set br0 up", "link set lo up")


def plug(switch: int, host: int, init: int, *, relayed: bool = False) -> None:
    """Connect a host, whose first process has the id `init`, to the bridge by a veth pair or by its relay's devices."""
    if relayed:
        _ip(init, f"link set h{host} netns {switch}")
    else:
        _ip(switch, f"link add name h{host} type veth peer name eth0 netns {init}")
    _ip(switch, f"link set h{host} master br0 up")
    # With a fixed hardware address, a host that was removed and added again can be reached before old ARP entries
    # expire.
    mac = f"02:00:0a:4d:00:{host + 1:02x}"
    _ip(
        init,
        "link set lo up",
        f"addr add {address(host)}/24 dev eth0",
        f"link set eth0 address {mac} up",
    )


def unplug(switch: int, host: int) -> None:
    """Remove a host's link with the network devices at both ends."""
    _ip(switch, f"link del h{host}")


def cut(switch: int, host: int) -> None:
    """Disconnect a host's link: the host sees that the carrier is lost, and no frames pass."""
    _ip(switch, f"link set h{host} down")


def mend(switch: int, host: int) -> None:
    """Reconnect a host's link after `cut`."""
    _ip(switch, f"link set h{host} up")


def shape(pid: int, device: str, rate: str | None, *, coalesce: bool = False) -> None:
    """Limit the sending bandwidth of `device` in the network namespace of the process with id `pid`.

    Args:
        rate: bandwidth in tc's notation; None removes the limit.
        coalesce: whether to send frames in batches (see `coalescing`), at rates above `COALESCED`.
    """
    bits = None if rate is None else bits_per_second(rate)
    coalesced = coalesce and bits is not None and bits > COALESCED
    # Open connections may still send longer batches; tbf splits batches that are too long for the rate.
    _ip(pid, f"link set {device} gso_max_segs {1 if bits is not None and bits <= EXACT else 64}")
    words = "pfifo limit 1000" if bits is None or coalesced else tbf(bits)
    lines = [f"qdisc replace dev {device} root {words}", *(htb(device, bits) if coalesced else ())]
    _inside(pid, ["tc", "-batch", "-"], "\n".join([*lines, ""]))


def tbf(bits: int) -> str:
    """Return tc's words for a token bucket filter (tbf) that limits a device to `bits` per second.

    The burst is 4 ms long, because timers of a busy machine fire late; the queue is 50 ms long. At low rates the burst
    and the queue are a few frames long; if they were shorter, a stream of small packets would be dropped rather than
    delayed.
    """
    burst = max(bits // 8 * 4 // 1000, 4 * _FRAME)
    limit = max(bits // 8 * 50 // 1000, 32 * _FRAME)
    return f"tbf rate {bits}bit burst {burst} limit {limit}"


def htb(device: str, bits: int) -> list[str]:
    """Return tc's lines that limit a device by htb with hysteresis: the queueing discipline, its only class, and its
    queue.

    htb with hysteresis sends the frames of one millisecond at once, then waits for a millisecond. After a pause, htb
    sends twice as many frames at once.
    """
    burst, limit = bits // 8 // 1000, bits // 8 * 50 // 1000
    both = f"rate {bits}bit ceil {bits}bit burst {burst} cburst {burst} quantum {_FRAME}"
    return [
        f"qdisc replace dev {device} root handle 1: htb default 1",
        f"class add dev {device} parent 1: classid 1:1 htb {both}",
        f"qdisc add dev {device} parent 1:1 handle 2: bfifo limit {limit}",
    ]


def counters(pid: int) -> Traffic:
    """Read the byte counters of `eth0` in the network namespace of the process with id `pid`."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        device, _, figures = line.partition(":")
        if device.strip() == "eth0":
            fields = figures.split()
            return Traffic(rx=int(fields[0]), tx=int(fields[8]))
    raise WorldError(f"netlab: process {pid} has no eth0")


def _ip(pid: int, *commands: str) -> None:
    _inside(pid, ["ip", "-batch", "-"], "\n".join(commands) + "\n")


def _inside(pid: int, command: list[str], stdin: str) -> None:
    tool(["nsenter", "--target", str(pid), "--net", *command], stdin=stdin)
