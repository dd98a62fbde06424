"""Register the ranks of a start in a shared store, and find out which ranks still answer after a failed collective."""

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
from torch.distributed import PrefixStore  # the documented path of the class

from shoestring._torch import Store
from shoestring.core.errors import PeerError, WorldError

ANSWER = 5.0  # seconds in which ranks must answer; all live ranks notice a failure within the duration of one step
POLL = 0.02  # seconds between two reads of the store
RESTART = (
    'start again to resume from the newest checkpoint: the same command with run.resume = "auto", or torchrun with '
    "--max-restarts"
)

# Gloo has no error class of its own. All Gloo messages except one begin with the path of a Gloo source file.
_GLOO = re.compile(r"(?:\[\S*gloo/\S+:\d+\] *|(?=Application timeout caused pair closure))(.*)", re.DOTALL)
_LATE = re.compile(r"timed? ?out", re.IGNORECASE)


@dataclass(frozen=True)
class Membership:
    """The ranks of one start of a job, and the store through which they find out which ranks are still alive.

    Args:
        rank: this rank.
        hosts: host name of each rank.
        store: key-value store, with a key prefix that no other start of the job uses.
        address: host and port on which the store listens.
        timeout: seconds that a collective waits for other ranks.
    """

    rank: int
    hosts: Sequence[str]
    store: Store
    address: tuple[str, int]
    timeout: float

    def missing_ranks(self) -> list[int] | None:
        """Announce that this rank is alive, and return the ranks that do not announce themselves within `ANSWER`
        seconds.

        The result is None if the store cannot be reached.
        """
        missing, end = set(range(len(self.hosts))), time.monotonic() + ANSWER
        try:
            # If the network link to the store is cut, calls of the store block for as long as TCP retries. Opening a
            # new connection, in contrast, fails after the timeout that is passed here.
            socket.create_connection(self.address, ANSWER).close()
            self.store.set(f"alive/{self.rank}", "")
            while missing and time.monotonic() < end:
                missing -= {rank for rank in missing if self.store.check([f"alive/{rank}"])}
                time.sleep(POLL)
        except (OSError, RuntimeError):
            return None
        return sorted(missing)

    def unequal_loops(self, missing: Sequence[int]) -> str:
        """Describe the ranks whose training loops have ended while other ranks' loops continue; returns "" if there are
        none."""
        steps: dict[str, dict[int, int]] = {"ended": {}, "left": {}}
        for event, by_rank in steps.items():
            for rank in range(len(self.hosts)):
                if self.store.check([f"{event}/{rank}"]):
                    by_rank[rank] = int(self.store.get(f"{event}/{rank}"))  # -1 if the loop has not ended
        ended = {rank: step for rank, step in steps["ended"].items() if step >= 0}
        later = {rank: step for rank, step in steps["left"].items() if rank not in missing and rank not in ended}
        if not ended or not any(step >= min(ended.values()) for step in later.values()):
            return ""
        done = ", ".join(f"{self.describe([rank])} ended its loop after step {step}" for rank, step in ended.items())
        return f"{done}, and {self.describe(list(later))} continued to step {max(later.values()) + 1}"

    def describe(self, ranks: Sequence[int]) -> str:
        """Return a text that names the ranks and their hosts, such as "rank 1 on host1 and rank 3 on host3"."""
        return " and ".join(f"rank {rank} on {self.hosts[rank]}" for rank in ranks)

    @contextmanager
    def explain_failures(self) -> Iterator[None]:
        """Context manager that replaces the error of a failed collective by an error that names the lost ranks.

        The new error is a PeerError with the name of the failed collective and the lost ranks, or a WorldError if some
        ranks have ended their training loops and others have not.
        """
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

    def _peer_error(self, why: str) -> WorldError:
        """Find out which ranks are lost, and return the error to raise.

        Args:
            why: the backend's reason for the failure.
        """
        me = self.describe([self.rank])
        with _sigterm_ignored():
            missing = self.missing_ranks()
            unequal = "" if missing is None else self.unequal_loops(missing)
        if unequal:
            hint = "give all ranks the same number of batches, or set the Job's `total` and end the loop at `job.done`"
            return WorldError(f"loops of unequal length: {unequal}", hint=hint)
        if missing is None:
            others = self.describe([rank for rank in range(len(self.hosts)) if rank != self.rank])
            return PeerError(f"{me} reaches neither {others} nor the rendezvous store: {why}", hint=RESTART)
        if missing:
            return PeerError(f"{me} has lost {self.describe(missing)}: {why}", hint=RESTART)
        slow = "if a rank or a link is slow, raise run.timeout; "
        return PeerError(f"{me}: an exchange failed, though all ranks answer: {why}", hint=slow + RESTART)


@contextmanager
def _sigterm_ignored() -> Iterator[None]:
    """Context manager that ignores SIGTERM, which the elastic agent might send before this rank has reported the
    failure."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def failure_cause(error: BaseException) -> tuple[str, str] | None:
    """Return (name of the failed collective, the backend's reason in one line); None if the error has another cause.

    The name is the text that `comm` puts before Gloo's message. The name may be empty.
    """
    exchange, why = "", str(error)
    if gloo := _GLOO.search(why):
        exchange, why = why[: gloo.start()].strip(": "), gloo[1]
    elif not isinstance(error, dist.DistError):
        return None
    return exchange, why.splitlines()[0].split(". ")[0].strip()


def register(store: Store, address: tuple[str, int], rank: int, size: int, timeout: float) -> Membership:
    """Wait for all ranks, and agree on a prefix of the store's keys that no earlier start has used.

    An elastic agent gives restarted ranks the same store as the ranks that died. Without a new prefix, torch would read
    the addresses of dead ranks from the store and try to connect to them. So the first rank draws a random token for
    this start, which becomes the prefix. Every other rank writes a random token of its own to the store, and the first
    rank writes its answer under that rank's token. So no rank can mistake an entry of an earlier start for an answer.

    Raises:
        PeerError: some ranks have not registered within `timeout` seconds.
        RuntimeError: the store cannot be reached, or the first rank has not registered.
    """
    store, token = PrefixStore("shoestring", store), secrets.token_hex(8)
    if rank != 0:
        store.set(f"hello/{rank}", token)
        token = store.get(f"welcome/{token}").decode()
    ours = PrefixStore(token, store)
    ours.set(f"host/{rank}", socket.gethostname())
    if rank == 0:
        _welcome(store, ours, token, size, timeout)
    hosts = [ours.get(f"host/{peer}").decode() for peer in range(size)]
    return Membership(rank, hosts, ours, address, timeout)


def _welcome(store: Store, ours: Store, token: str, size: int, timeout: float) -> None:
    """Run on the first rank: answer every request with the token of this start, until all ranks have registered.

    Requests of dead ranks are answered too, because they cannot be distinguished from new requests.
    """
    missing, end = set(range(1, size)), time.monotonic() + timeout
    while missing:
        if time.monotonic() > end:
            message = f"rank {min(missing)} of {size} did not join within {timeout:g} s"
            raise PeerError(message, hint="check that the host of this rank is up")
        for rank in missing:
            if store.check([f"hello/{rank}"]):
                store.set(f"welcome/{store.get(f'hello/{rank}').decode()}", token)
        time.sleep(POLL)
        missing -= {rank for rank in missing if ours.check([f"host/{rank}"])}
