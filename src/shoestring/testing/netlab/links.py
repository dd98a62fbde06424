"""The cables of a lab: a bridge in a namespace of its own, a veth pair a host, and tbf or htb at both ends of each.

Shaping is at the host's end for what it sends and at the bridge's end for what it receives (tbf(8), htb(8)). Up to
100 Mbit/s segmentation offload is off, so that an interface counts what a wire would carry: each frame with its own
headers. At higher rates a processor could not keep up with single frames, and offload stays on; each is still charged.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from shoestring.core.errors import ConfigError, WorldError
from shoestring.testing.netlab.machine import tool

MOST_HOSTS = 250
EXACT = 100_000_000
"""The fastest rate in bit/s at which frames pass one by one."""
COALESCED = 12_000_000
"""The fastest rate in bit/s at which frames pass one by one although they may be coalesced: one a millisecond."""
_FRAME = 1514  # bytes: Ethernet header and 1500 of payload
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class Traffic(NamedTuple):
    """Bytes that a host has received and sent since it was started, with Ethernet headers.

    On links faster than 100 Mbit/s many frames pass as one, and their headers count once: up to 4.4% too little.
    """

    rx: int
    tx: int


def address(host: int) -> str:
    """The address of a host, in a subnet that exists inside the lab only."""
    return f"10.77.0.{host + 1}"


def names() -> str:
    """The text of `/etc/hosts`: every host there could be, so that one added later resolves at once."""
    lines = ["127.0.0.1 localhost"]
    for host in range(MOST_HOSTS):
        # The second line is for who asks what a peer of an IPv6 socket is called; its name is another, as host0 has
        # to stay one address.
        lines += [f"{address(host)} host{host}", f"::ffff:{address(host)} host{host}.lab"]
    return "\n".join([*lines, ""])


def bits_per_second(rate: str) -> int:
    """A rate as tc writes it ("1mbit", "2.5gbit") in bit/s.

    Raises:
        ConfigError: it is not one.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", rate.strip().lower())
    bits = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if bits < 8_000:
        raise ConfigError(f"netlab: {rate!r} is not a rate", hint='write "100mbit" or "1gbit"; 8kbit is the least')
    return bits


def build_bridge(switch: int) -> None:
    """Make the bridge in the network namespace of process `switch`."""
    _ip(switch, "link add name br0 type bridge forward_delay 0 mcast_snooping 0", "link set br0 up", "link set lo up")


def plug(switch: int, host: int, init: int, *, relayed: bool = False) -> None:
    """Join host number `host`, whose first process is `init`, to the bridge: by veth, or by its relay's two devices."""
    if relayed:
        _ip(init, f"link set h{host} netns {switch}")
    else:
        _ip(switch, f"link add name h{host} type veth peer name eth0 netns {init}")
    _ip(switch, f"link set h{host} master br0 up")
    # A fixed hardware address: a host that comes back is found without waiting for old ARP entries to time out.
    mac = f"02:00:0a:4d:00:{host + 1:02x}"
    _ip(
        init,
        "link set lo up",
        f"addr add {address(host)}/24 dev eth0",
        f"link set eth0 address {mac} up",
    )


def unplug(switch: int, host: int) -> None:
    """Take a host's cable away; both ends disappear."""
    _ip(switch, f"link del h{host}")


def cut(switch: int, host: int) -> None:
    """Pull the cable of a host: it loses the carrier, and nothing passes."""
    _ip(switch, f"link set h{host} down")


def mend(switch: int, host: int) -> None:
    """Put the cable of a host back."""
    _ip(switch, f"link set h{host} up")


def shape(pid: int, device: str, rate: str | None, *, coalesce: bool = False) -> None:
    """Limit what leaves through `device` in the network namespace of process `pid`; None takes the limit away.

    Args:
        coalesce: see `coalescing`; of rates at which a millisecond lets more than a frame pass.
    """
    bits = None if rate is None else bits_per_second(rate)
    coalesced = coalesce and bits is not None and bits > COALESCED
    # Of connections that are open already, tbf takes the batches apart that are too long for a slower rate.
    _ip(pid, f"link set {device} gso_max_segs {1 if bits is not None and bits <= EXACT else 64}")
    words = "pfifo limit 1000" if bits is None or coalesced else tbf(bits)
    lines = [f"qdisc replace dev {device} root {words}", *(htb(device, bits) if coalesced else ())]
    _inside(pid, ["tc", "-batch", "-"], "\n".join([*lines, ""]))


def tbf(bits: int) -> str:
    """A token bucket for `bits`/s: it holds 4 ms, as timers on a busy machine come late, and queues 50 ms.

    At low rates both are a few frames, else a stream of small packets would be dropped rather than delayed.
    """
    burst = max(bits // 8 * 4 // 1000, 4 * _FRAME)
    limit = max(bits // 8 * 50 // 1000, 32 * _FRAME)
    return f"tbf rate {bits}bit burst {burst} limit {limit}"


def htb(device: str, bits: int) -> list[str]:
    """The same limit by htb with hysteresis, as lines for tc: the queue, its one class, and what waits in it.

    It sends what a millisecond lets through, and then nothing for a millisecond; after a pause twice as much.
    """
    burst, limit = bits // 8 // 1000, bits // 8 * 50 // 1000
    both = f"rate {bits}bit ceil {bits}bit burst {burst} cburst {burst} quantum {_FRAME}"
    return [
        f"qdisc replace dev {device} root handle 1: htb default 1",
        f"class add dev {device} parent 1: classid 1:1 htb {both}",
        f"qdisc add dev {device} parent 1:1 handle 2: bfifo limit {limit}",
    ]


def counters(pid: int) -> Traffic:
    """What `eth0` in the network namespace of process `pid` has counted."""
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
