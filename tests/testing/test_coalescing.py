"""Frames of a lab's links that pass by the millisecond, and the setting of the machine that this takes."""

import os

import pytest

from shoestring.testing.netlab import coalescing, netlab, netlab_available
from tests.rigs.leftovers import kill, start_owner
from tests.testing.on_hosts import python
from tests.waiting import until

REASON = netlab_available() or (None if os.access(coalescing.SETTING, os.W_OK) else "htb cannot be set here")
pytestmark = [pytest.mark.netlab, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


@pytest.mark.slow
def test_frames_of_a_fast_link_pass_by_the_millisecond_and_no_faster():
    taker = """
        import socket, sys, time
        link = socket.create_server(("", 7000)).accept()[0]
        link.recv(1 << 20)
        pieces, taken, begin = 0, 0, time.monotonic()
        while piece := link.recv(1 << 20):
            pieces, taken = pieces + 1, taken + len(piece)
        print(pieces, taken * 8 / (time.monotonic() - begin))
    """
    giver = """
        import socket
        while True:
            try:
                link = socket.create_connection(("host1", 7000))
                break
            except OSError:
                pass
        link.sendall(bytes(10_000_000))
    """

    def transfer(lab):
        job = lab.start(python(taker), hosts=[1])
        lab.run(python(giver), hosts=[0])
        job.check(30)
        pieces, rate = map(float, job.output(1).split())
        return pieces, rate

    with netlab(hosts=2, rate="100mbit", coalesce=True) as other:
        other.rate(0, "50mbit")  # a link may be shaped again
        other.rate(0, "100mbit")
        pieces, rate = transfer(other)
        assert rate < 101e6
        other.rate(0, "10mbit")
        assert "tbf" in other.run(["tc", "qdisc", "show", "dev", "eth0"], hosts=[0])[0]
    with netlab(hosts=2, rate="100mbit") as other:
        assert 2 * pieces < transfer(other)[0]


def test_the_machine_has_its_setting_back_once_no_lab_needs_another():
    def now():
        return coalescing.SETTING.read_text().strip()

    def is_back():  # tests beside this one may need it, too
        return now() == before or coalescing.needed()

    before = coalescing.resting().strip()
    with netlab(hosts=1, coalesce=True):
        with netlab(hosts=1, coalesce=True):
            pass
        with netlab(hosts=1):
            assert now() == "1"
    until(is_back)
    owner = start_owner(coalesce=True)
    assert now() == "1"
    kill(owner)
    with netlab(hosts=1):
        until(is_back)
