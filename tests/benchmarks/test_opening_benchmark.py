"""The benchmark of pages that open fast, at toy size: every situation once, and a bar of each."""

import pytest

pytest.importorskip("django")

from benchmarks.harness import Deadline
from benchmarks.hub import clicking, opening
from benchmarks.rows import Measured
from tests.browser import needs_chromium


@pytest.mark.slow
@needs_chromium
def test_every_situation_is_measured_and_taken_apart(monkeypatch):
    monkeypatch.setattr(opening, "RESTED_ON", 3)
    monkeypatch.setattr(opening, "SPARE", 2)
    clicks = opening.measure(1)
    assert set(clicks.opened) == {
        "cold, desktop", "cold, phone", "cold without delay", *opening.HOVERS, "touch",
        *(f"{name} alone" for name in opening.ALONE),
    }  # fmt: skip
    for situation, (opened,) in clicks.opened.items():
        assert opened.seconds > 0.02 and opened.paint > 0, situation
        whole = opened.connection + opened.data + opened.template + opened.paint
        assert whole == pytest.approx(opened.seconds)
    (cold,) = clicks.opened["cold, desktop"]
    assert cold.connection == clicking.TRIP and cold.data >= clicking.TRIP and cold.seconds > 3 * clicking.TRIP
    how = {situation: opened[0].preloaded for situation, opened in clicks.opened.items()}
    assert {how[name] for name in (*opening.HOVERS, "touch", "templates alone", "differences alone")} == {"worker"}
    assert how["ahead alone"] == "navigational-prefetch" and "worker" not in (how["none alone"], how["cold, phone"])
    assert 0 < clicks.one_link < clicks.many_links
    monkeypatch.setattr(opening, "clicks_of", lambda rounds: clicks)
    for bar in opening.rows(1):
        measured = bar.measure(Deadline())
        assert isinstance(measured, Measured) and measured.interval is None and measured.note


def test_the_proxy_delays_each_direction_and_the_first_bytes_by_a_handshake_too():
    import socket
    import threading
    import time

    listener = socket.create_server(("127.0.0.1", 0))

    def echo():
        connection, _ = listener.accept()
        while data := connection.recv(100):
            connection.sendall(data)

    threading.Thread(target=echo, daemon=True).start()
    with clicking.DelayingProxy(listener.getsockname()[1], 0.1) as proxy:
        client = socket.create_connection(("127.0.0.1", proxy.port))
        for trips in (2, 1):
            start = time.monotonic()
            client.sendall(b"abc")
            assert client.recv(100) == b"abc"
            assert time.monotonic() - start >= trips * 0.1 - 0.005
        assert proxy.received == 6 and len(proxy.handshakes) == 1
        client.close()
    listener.close()
