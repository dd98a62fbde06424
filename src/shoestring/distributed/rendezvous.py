"""How ranks find each other, and which of them still answer after an exchange between them has failed."""

from __future__ import annotations

import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import PrefixStore  # documented all the same

from shoestring._torch import Store
from shoestring.core.errors import PeerError

ANSWER = 5.0  # seconds that ranks have to answer: those alive notice a failure within a step of each other
POLL = 0.02  # seconds between two reads of the store
RESTART = (
    'start again to resume from the newest checkpoint: the same command with run.resume = "auto", or torchrun with '
    "--max-restarts"
)

# Gloo has no error class of its own: its messages begin with its source file, but for one.
_GLOO = re.compile(r"(?:\[\S*gloo/\S+:\d+\] *|(?=Application timeout caused pair closure))(.*)", re.DOTALL)
_LATE = re.compile(r"timed? ?out", re.IGNORECASE)


@dataclass(frozen=True)
class Membership:
    """All ranks of one start, and the store in which those still alive can answer.

    Args:
        hosts: the host of each rank.
        store: the part of the store that belongs to this start alone.
        address: host and port on which the store listens.
        timeout: seconds that an exchange waits for other ranks.
    """

    rank: int
    hosts: Sequence[str]
    store: Store
    address: tuple[str, int]
    timeout: float

    def missing_ranks(self) -> list[int] | None:
        """Answer, and return the ranks that do not answer in time; None if the store itself does not."""
        missing, end = set(range(len(self.hosts))), time.monotonic() + ANSWER
        try:
            # A store behind a cut link blocks for as long as TCP retries; a new connection fails in time.
            socket.create_connection(self.address, ANSWER).close()
            self.store.set(f"alive/{self.rank}", "")
            while missing and time.monotonic() < end:
                missing -= {rank for rank in missing if self.store.check([f"alive/{rank}"])}
                time.sleep(POLL)
        except (OSError, RuntimeError):
            return None
        return sorted(missing)

    def describe(self, ranks: Sequence[int]) -> str:
        """Name the ranks: "rank 1 on host1 and rank 3 on host3"."""
        return " and ".join(f"rank {rank} on {self.hosts[rank]}" for rank in ranks)

    @contextmanager
    def explain_failures(self) -> Iterator[None]:
        """Turn a failed exchange inside into a PeerError that names the exchange and the ranks that are lost."""
        try:
            yield
        except RuntimeError as error:
            cause = failure_cause(error)
            if cause is None:
                raise
            exchange, why = cause
            if _LATE.search(why):
                why = f"nothing arrived for {self.timeout:g} s"
            raise self._peer_error(f"{exchange}: {why}" if exchange else why) from error

    def _peer_error(self, why: str) -> PeerError:
        me = self.describe([self.rank])
        with _sigterm_ignored():
            missing = self.missing_ranks()
        if missing is None:
            others = self.describe([rank for rank in range(len(self.hosts)) if rank != self.rank])
            return PeerError(f"{me} reaches neither {others} nor the rendezvous store: {why}", hint=RESTART)
        if missing:
            return PeerError(f"{me} has lost {self.describe(missing)}: {why}", hint=RESTART)
        slow = "if a rank or a link is slow, raise run.timeout; "
        return PeerError(f"{me}: an exchange failed, though all ranks answer: {why}", hint=slow + RESTART)


@contextmanager
def _sigterm_ignored() -> Iterator[None]:
    """Ignore SIGTERM, with which an agent that has noticed the loss by itself ends the ranks of its host."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def failure_cause(error: BaseException) -> tuple[str, str] | None:
    """Name the exchange that failed, and why, in the engine's words and one line; None for an error of another kind.

    The name is what stands before Gloo's message, as `comm` puts it there; "" if nothing does.
    """
    exchange, why = "", str(error)
    if gloo := _GLOO.search(why):
        exchange, why = why[: gloo.start()].strip(": "), gloo[1]
    elif not isinstance(error, dist.DistError):
        return None
    return exchange, why.splitlines()[0].split(". ")[0].strip()


def register(store: Store, address: tuple[str, int], rank: int, size: int, timeout: float) -> Membership:
    """Wait for all ranks, and agree on a part of the store to which no earlier start has written.

    An elastic agent gives restarted ranks the store of those that died, in which torch would look up the addresses of
    the dead and try to reach them. So the first rank draws a token. The others greet it with tokens of their own and
    read its answer under those, so neither side can mistake what an earlier start has left for an answer.

    Raises:
        PeerError: some ranks have not come in `timeout` seconds.
        RuntimeError: the store cannot be reached, or the first rank has not come.
    """
    store, token = PrefixStore("shoestring", store), secrets.token_hex(8)
    if rank != 0:
        store.set(f"hello/{rank}", token)
        token = store.get(f"welcome/{token}").decode()
    ours = PrefixStore(token, store)
    ours.set(f"host/{rank}", socket.gethostname())
    if rank == 0:
        _welcome(store, ours, token, size, timeout)
    return Membership(rank, [ours.get(f"host/{other}").decode() for other in range(size)], ours, address, timeout)


def _welcome(store: Store, ours: Store, token: str, size: int, timeout: float) -> None:
    """Answer every greeting with the token, even those that dead ranks have left, until all ranks are registered."""
    missing, end = set(range(1, size)), time.monotonic() + timeout
    while missing:
        if time.monotonic() > end:
            raise PeerError(f"rank {min(missing)} of {size} did not come in {timeout:g} s", hint="is its host up?")
        for rank in missing:
            if store.check([f"hello/{rank}"]):
                store.set(f"welcome/{store.get(f'hello/{rank}').decode()}", token)
        time.sleep(POLL)
        missing -= {rank for rank in missing if ours.check([f"host/{rank}"])}
