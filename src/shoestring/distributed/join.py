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
from shoestring.distributed.rendezvous import Roll, meet

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_TURN = 0.5  # seconds between looks at the parent where the kernel does not tell


@contextmanager
def join(*, timeout: float = 600.0) -> Iterator[World]:
    """Join the world that torchrun started this process in (or be alone), and leave it at the end.

    Args:
        timeout: seconds a collective may wait for another rank before it fails instead of hanging.

    Raises:
        WorldError: there are more ranks than GPUs on this host, or not equally many on each.
        PeerError: the ranks do not find each other; inside the block, one of them or the way to it was lost.
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
    roll = _meet(timeout)
    with roll.explained():
        limit = timedelta(seconds=timeout)
        dist.init_process_group(backend, store=roll.store, rank=roll.rank, world_size=size, timeout=limit)
        try:
            yield World(roll.rank, size, local_rank, local_size, device)
        finally:
            dist.destroy_process_group()
            settle()


def end_with_agent() -> None:
    """Have this process killed when the elastic agent that started it has ended, however that ended.

    Workers that outlive a killed agent would train on beside those that the next one starts. What they have saved in
    shared memory stays there. Other programs' children, without an agent, are left alone.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    agent = os.getppid()
    if not _killed_with_parent():
        threading.Thread(target=_watch, args=(agent,), name="watch-agent", daemon=True).start()
    if os.getppid() != agent:  # it ended in between
        os.kill(os.getpid(), signal.SIGKILL)


def _killed_with_parent() -> bool:
    """Ask the kernel for it; whether it will, which it can on Linux."""
    try:
        return ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def _watch(agent: int) -> None:
    while os.getppid() == agent:
        time.sleep(_TURN)
    os.kill(os.getpid(), signal.SIGKILL)


def _meet(timeout: float) -> Roll:
    address = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0))
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        return meet(store, address, rank, size, timeout)
    except (RuntimeError, ValueError) as error:
        raise PeerError(
            f"the ranks did not find each other at {address[0]}:{address[1]}: {str(error).splitlines()[0]}",
            hint="is that address right, and reached from this host?",
        ) from error


def settle(patience: float = 10.0) -> None:
    """Wait until Gloo's threads have let go of the tensors of the last exchange.

    They do so a moment after the exchange has returned, and need the interpreter's lock for it. A thread that waits
    for the lock when the interpreter is taken apart is unwound by Python (up to 3.13) through a destructor, so a
    process that has finished everything would end with SIGABRT (github.com/pytorch/pytorch/issues/190489). A group that
    nothing refers to stops its threads when it is destroyed; but a model in DDP refers to its group.

    Here the lock is free while this thread sleeps. Who is found asleep before and after, and was not awake in between,
    waits for something else: for the next exchange, which does not come.

    Args:
        patience: seconds, after which they are left to themselves.
    """
    end, before = time.monotonic() + patience, None
    while time.monotonic() < end:
        now = gloo_threads()
        if None not in now and now == before:
            return
        before = now
        time.sleep(0.001)


def gloo_threads() -> list[int | None]:
    """How often each of Gloo's threads has fallen asleep so far; None for one that is awake."""
    found: list[int | None] = []
    for task in Path("/proc/self/task").glob("*/status"):  # nothing where the system is not Linux
        try:
            status = dict(line.split(":\t", 1) for line in task.read_text().splitlines())
        except OSError:  # it has just ended
            continue
        if status["Name"] == "pt_gloo_runloop":
            found.append(int(status["voluntary_ctxt_switches"]) if status["State"].startswith("S") else None)
    return found
