"""How ranks find each other, and who is still there after an exchange between them has failed."""

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
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]  # documented all the same

from shoestring._torch import Store
from shoestring.core.errors import PeerError

ANSWER = 5.0  # seconds that ranks have to answer: those alive notice within a step of each other
TURN = 0.02  # seconds between looks into the store
RESTART = (
    'starting again goes on from the last save: the same command with run.resume "auto", or torchrun --max-restarts'
)

# Gloo has no error class of its own: its messages begin with its source file, but for one.
_GLOO = re.compile(r"(?:\[\S*gloo/\S+:\d+\] *|(?=Application timeout caused pair closure))(.*)", re.DOTALL)
_LATE = re.compile(r"timed? ?out", re.IGNORECASE)


@dataclass(frozen=True)
class Roll:
    """The list of all ranks, and the store where those still alive can say so.

    Args:
        hosts: the host of each rank.
        store: for this start of the ranks alone.
        address: where the store listens.
        timeout: seconds that an exchange waits.
    """

    rank: int
    hosts: Sequence[str]
    store: Store
    address: tuple[str, int]
    timeout: float

    def call(self) -> list[int] | None:
        """Answer, and wait for the others' answers: the ranks that gave none; None where the store gave none."""
        missing, end = set(range(len(self.hosts))), time.monotonic() + ANSWER
        try:
            # A store behind a cut link would block for as long as TCP tries; a new connection says so in time.
            socket.create_connection(self.address, ANSWER).close()
            self.store.set(f"alive/{self.rank}", "")
            while missing and time.monotonic() < end:
                missing -= {rank for rank in missing if self.store.check([f"alive/{rank}"])}
                time.sleep(TURN)
        except (OSError, RuntimeError):
            return None
        return sorted(missing)

    def name(self, ranks: Sequence[int]) -> str:
        """The ranks in words, such as "rank 1 on host1 and rank 3 on host3"."""
        return " and ".join(f"rank {rank} on {self.hosts[rank]}" for rank in ranks)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn a failed exchange inside into a PeerError that names who is lost."""
        try:
            yield
        except RuntimeError as error:
            why = reason(error)
            if why is None:
                raise
            raise self._lost(f"nothing came for {self.timeout:g} s" if _LATE.search(why) else why) from error

    def _lost(self, why: str) -> PeerError:
        me = self.name([self.rank])
        with _undisturbed():
            missing = self.call()
        if missing is None:
            others = self.name([rank for rank in range(len(self.hosts)) if rank != self.rank])
            return PeerError(f"{me} reaches neither {others} nor the store where they met: {why}", hint=RESTART)
        if missing:
            return PeerError(f"{me} has lost {self.name(missing)}: {why}", hint=RESTART)
        slow = "if a rank or a link is slow, raise run.timeout; "
        return PeerError(f"{me}: an exchange failed, though all ranks answer: {why}", hint=slow + RESTART)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without SIGTERM, with which an agent ends the ranks of its host where it hears of the loss by itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def reason(error: BaseException) -> str | None:
    """Why an exchange failed, in its engine's words and one line; None for an error of another kind."""
    message = str(error)
    if found := _GLOO.search(message):
        message = found[1]
    elif not isinstance(error, dist.DistError):
        return None
    return message.splitlines()[0].split(". ")[0].strip()


def meet(store: Store, address: tuple[str, int], rank: int, size: int, timeout: float) -> Roll:
    """Wait for all ranks, and agree on a part of the store that no earlier start of them has written to.

    An elastic agent hands the ranks that it starts again the store of those that died, where torch would look up, and
    try to reach, the addresses of the dead. So the first rank draws a token. The others greet it with one of their own,
    and read its answer under that, so neither can take what is left of an earlier start for an answer.

    Raises:
        PeerError: some have not come in `timeout` seconds.
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
    return Roll(rank, [ours.get(f"host/{each}").decode() for each in range(size)], ours, address, timeout)


def _welcome(store: Store, ours: Store, token: str, size: int, timeout: float) -> None:
    """Answer every greeting with the token, also those left by ranks that died, until all ranks are in."""
    missing, end = set(range(1, size)), time.monotonic() + timeout
    while missing:
        if time.monotonic() > end:
            raise PeerError(f"rank {min(missing)} of {size} did not come in {timeout:g} s", hint="is its host up?")
        for rank in missing:
            if store.check([f"hello/{rank}"]):
                store.set(f"welcome/{store.get(f'hello/{rank}').decode()}", token)
        time.sleep(TURN)
        missing -= {rank for rank in missing if ours.check([f"host/{rank}"])}
