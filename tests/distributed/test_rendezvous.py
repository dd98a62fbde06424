"""Finding each other in a store that earlier starts have written to, and telling who is lost."""

from __future__ import annotations

import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from shoestring.core.errors import PeerError, WorldError
from shoestring.distributed import rendezvous

RESET = "[/src/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:3: Connection reset by peer. GLHF"
LATE = "[/src/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation to complete"


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(server):
    return dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)


def register_all(server, size=3, timeout=20.0):
    with ThreadPoolExecutor(size) as pool:
        address = ("127.0.0.1", server.port)
        starts = [
            pool.submit(rendezvous.register, client(server), address, rank, size, timeout) for rank in range(size)
        ]
        return [members.result() for members in starts]


def missing(starts):
    with ThreadPoolExecutor(len(starts)) as pool:
        return list(pool.map(rendezvous.Membership.missing_ranks, starts))


def test_ranks_share_a_part_of_the_store_and_know_each_others_hosts(server):
    starts = register_all(server)
    starts[1].store.set("address", "mine")
    assert [members.store.get("address") for members in starts] == [b"mine"] * 3
    assert [list(members.hosts) for members in starts] == [[socket.gethostname()] * 3] * 3


def test_nothing_of_an_earlier_start_is_seen_by_the_next(server):
    for members in register_all(server):
        members.store.set(f"address/{members.rank}", "of the dead")
        members.store.set(f"alive/{members.rank}", "")
    for members in register_all(server):
        assert not any(members.store.check([f"address/{rank}"]) for rank in range(3))
        assert not any(members.store.check([f"alive/{rank}"]) for rank in range(3))


def test_a_first_rank_that_answers_greetings_of_the_dead_still_waits_for_the_living(server):
    store = dist.PrefixStore("shoestring", client(server))
    store.set("hello/1", "of the dead")
    first, second = register_all(server, 2)
    first.store.set("x", "1")
    assert second.store.get("x") == b"1"


def test_a_rank_that_does_not_come_is_named(server):
    with pytest.raises(PeerError, match=r"rank 1 of 2 did not join within 0\.2 s"):
        rendezvous.register(client(server), ("127.0.0.1", server.port), 0, 2, 0.2)


def test_the_roll_names_who_does_not_answer(server, monkeypatch):
    starts = register_all(server)
    assert missing(starts) == [[], [], []]
    monkeypatch.setattr(rendezvous, "ANSWER", 0.3)
    assert missing([members for members in register_all(server) if members.rank != 1]) == [[1], [1]]


def test_the_roll_says_that_the_store_is_gone(server):
    (members,) = register_all(server, 1)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()
    assert rendezvous.Membership(members.rank, members.hosts, members.store, nobody, 1.0).missing_ranks() is None


def test_a_failed_exchange_becomes_one_line_that_names_the_lost(server, monkeypatch):
    monkeypatch.setattr(rendezvous, "ANSWER", 0.3)
    members, host = register_all(server)[0], socket.gethostname()
    members.store.set("alive/2", "")
    lost = rf"^rank 0 on {host} has lost rank 1 on {host}: Read error .*reset by peer \("
    with pytest.raises(PeerError, match=lost), members.explain_failures():
        raise RuntimeError(RESET)
    members.store.set("alive/1", "")
    slow = r"though all ranks answer: nothing arrived for 20 s .*raise run\.timeout"
    with pytest.raises(PeerError, match=slow), members.explain_failures():
        raise RuntimeError(LATE)
    named = r"all ranks answer: comm\.topk, part 2: nothing arrived for 20 s"
    with pytest.raises(PeerError, match=named), members.explain_failures():
        raise RuntimeError(f"comm.topk, part 2: {LATE}")
    assert PeerError.code != 2


def test_other_errors_pass(server):
    (members,) = register_all(server, 1)
    with pytest.raises(RuntimeError, match="shapes"), members.explain_failures():
        raise RuntimeError("shapes do not match")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError(RESET), ("", "Read error [10.0.0.2]:3: Connection reset by peer")),
        (RuntimeError(LATE), ("", "Timed out waiting 10000ms for recv operation to complete")),
        (
            RuntimeError(f"comm.topk, part 2: {RESET}"),
            ("comm.topk, part 2", "Read error [10.0.0.2]:3: Connection reset by peer"),
        ),
        (RuntimeError("Application timeout caused pair closure"), ("", "Application timeout caused pair closure")),
        (dist.DistNetworkError("Broken pipe"), ("", "Broken pipe")),
        (RuntimeError("mat1 and mat2"), None),
    ],
)
def test_causes(error, cause):
    assert rendezvous.failure_cause(error) == cause


def test_an_agents_signal_does_not_silence_the_reason(server, monkeypatch):
    monkeypatch.setattr(rendezvous, "ANSWER", 0.5)
    members = register_all(server, 2)[0]

    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(PeerError, match="has lost rank 1"), members.explain_failures():
        raise RuntimeError(RESET)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(("notes", "said"), [
    ({"ended/1": 3, "left/0": 3, "ended/0": -1},
     "rank 1 on b ended its loop after step 3, and rank 0 on a continued to step 4"),
    ({"ended/0": 3, "ended/1": 3}, ""),
    ({"ended/1": 3, "ended/0": -1}, ""),  # rank 0 was killed
    ({"ended/1": 3, "left/0": 2}, ""),  # it failed before the others had ended
    ({"left/0": 3, "left/1": 2}, ""),
], ids=["unequal", "equal", "killed", "failed", "both failed"])  # fmt: skip
def test_loops_of_unequal_length_are_named_with_their_steps(notes, said):
    store = dist.HashStore()
    for key, step in notes.items():
        store.set(key, str(step))
    members = rendezvous.Membership(0, ["a", "b"], store, ("", 0), 1.0)
    assert members.unequal_loops([]) == said


def test_a_failed_exchange_of_loops_of_unequal_length_is_no_lost_rank(server, monkeypatch):
    monkeypatch.setattr(rendezvous, "ANSWER", 0.05)
    first, second, *_ = register_all(server, size=2)
    second.store.set("ended/1", "5")
    first.store.set("left/0", "6")
    with pytest.raises(WorldError, match=r"unequal length: rank 1 .* after step 5") as caught, first.explain_failures():
        raise RuntimeError(RESET)
    assert not isinstance(caught.value, PeerError) and caught.value.code == 2  # starting again would not help
