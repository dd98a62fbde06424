"""Joining the world that torchrun started this process in."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shoestring.core.errors import PeerError, WorldError
from shoestring.core.world import World, own_device
from shoestring.distributed.rendezvous import Membership, register

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_POLL = 0.5  # seconds between two looks at the parent where the kernel does not send a signal


@contextmanager
def join(*, timeout: float = 600.0) -> Iterator[World]:
    """Join the world that torchrun started this process in, or be a world of one rank; leave it at the end.

    Args:
        timeout: seconds a collective may wait for another rank before it fails instead of hanging.

    Raises:
        WorldError: this host has more ranks than GPUs, or hosts have different numbers of ranks.
        PeerError: the ranks do not find each other; or, inside the block, a rank or the link to it was lost.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield World(device=own_device(0))
        return
    end_with_agent()
    size, local_rank = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", 0))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    device = own_device(local_rank)
    if device.type == "cuda" and local_size > torch.cuda.device_count():
        raise WorldError(
            f"{local_size} workers on a host with {torch.cuda.device_count()} GPUs", hint="start one worker a GPU"
        )
    if size % local_size:
        raise WorldError(f"{size} ranks do not divide into hosts of {local_size}", hint="start as many on each host")
    if local_size == size:
        # Gloo would listen on the address the host name resolves to; ranks of one host need no more than loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    members = _rendezvous(timeout)
    with members.explain_failures():
        limit = timedelta(seconds=timeout)
        dist.init_process_group(backend, store=members.store, rank=members.rank, world_size=size, timeout=limit)
        try:
            yield World(members.rank, size, local_rank, local_size, device)
        finally:
            dist.destroy_process_group()
            wait_for_gloo_threads()


def end_with_agent() -> None:
    """Have this process killed when the elastic agent that started it ends, for whatever reason.

    Workers that outlive a killed agent would keep training beside those that the next agent starts. Their checkpoints
    in shared memory stay there. Processes without an elastic agent are left alone.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    agent = os.getppid()
    if not _killed_with_parent():
        threading.Thread(target=_watch, args=(agent,), name="watch-agent", daemon=True).start()
    if os.getppid() != agent:  # it has ended meanwhile
        os.kill(os.getpid(), signal.SIGKILL)


def _killed_with_parent() -> bool:
    """Ask the kernel to kill this process with its parent; whether it will, which Linux can."""
    try:
        return ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def _watch(agent: int) -> None:
    while os.getppid() == agent:
        time.sleep(_POLL)
    os.kill(os.getpid(), signal.SIGKILL)


def _rendezvous(timeout: float) -> Membership:
    address = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0))
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        return register(store, address, rank, size, timeout)
    except (RuntimeError, ValueError) as error:
        raise PeerError(
            f"the ranks did not find each other at {address[0]}:{address[1]}: {str(error).splitlines()[0]}",
            hint="check that the address is right and that this host can reach it",
        ) from error


def wait_for_gloo_threads(patience: float = 10.0) -> None:
    """Wait until Gloo's threads have released the tensors of the last exchange.

    They do so a moment after the exchange has returned, and need the interpreter's lock for it. Python (up to 3.13)
    ends a thread that waits for the lock at shutdown by unwinding it, here through a destructor, so a process that has
    finished everything would end with SIGABRT (github.com/pytorch/pytorch/issues/190489). A group that nothing refers
    to stops its threads when it is destroyed; but a model in DDP refers to its group.

    The lock is free while this thread sleeps. A thread that is asleep before and after, and was not awake in between,
    does not wait for the lock but for the next exchange, which does not come.

    Args:
        patience: seconds after which the threads are left as they are.
    """
    end, before = time.monotonic() + patience, None
    while time.monotonic() < end:
        now = gloo_threads()
        if None not in now and now == before:
            return
        before = now
        time.sleep(0.001)


def gloo_threads() -> list[int | None]:
    """Count how often each of Gloo's threads has fallen asleep so far; None for one that is awake."""
    sleeps: list[int | None] = []
    for task in Path("/proc/self/task").glob("*/status"):  # nothing where the system is not Linux
        try:
            status = dict(line.split(":\t", 1) for line in task.read_text().splitlines())
        except OSError:  # it has just ended
            continue
        if status["Name"] == "pt_gloo_runloop":
            sleeps.append(int(status["voluntary_ctxt_switches"]) if status["State"].startswith("S") else None)
    return sleeps
