"""Join the process group of the ranks that torchrun has started, and leave it in order."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shoestring._torch import own_device
from shoestring.core.errors import PeerError, WorldError
from shoestring.core.world import World
from shoestring.distributed.rendezvous import Membership, register
from shoestring.lifetime import end_with

OWN_RUN = "shoestring-agent-"
"""Prefix of the run id that `launch` passes to torchrun's agent; the agent's process id follows the prefix."""


@contextmanager
def join(*, timeout: float = 600.0) -> Iterator[World]:
    """Context manager that joins the process group of the ranks that torchrun started; without torchrun, this process
    is the only rank.

    Args:
        timeout: seconds that a collective waits for another rank before the collective fails.

    Raises:
        WorldError: this host has more ranks than GPUs, or hosts have different numbers of ranks.
        PeerError: the ranks cannot connect to each other, or inside the context a rank dies or becomes unreachable.
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
            f"{local_size} workers on a host with {torch.cuda.device_count()} GPUs", hint="start one worker per GPU"
        )
    if size % local_size:
        raise WorldError(
            f"{size} ranks cannot be divided evenly among hosts with {local_size} ranks",
            hint="start equally many ranks on every host",
        )
    if local_size == size:
        # By default, Gloo listens on the address that the host name resolves to, which other hosts can reach. On one
        # host, loopback is enough.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    members = _rendezvous(timeout)
    with members.explain_failures():
        limit = timedelta(seconds=timeout)
        dist.init_process_group(backend, store=members.store, rank=members.rank, world_size=size, timeout=limit)
        try:
            yield World(members.rank, size, local_rank, local_size, device, store=members.store)
        finally:
            dist.destroy_process_group()
            wait_for_gloo_threads()


def end_with_agent() -> None:
    """Make sure that this process is killed when the elastic agent that started it ends, for any reason.

    Otherwise workers of a killed agent would continue to train, beside the workers that the next agent starts.
    Checkpoints in shared memory survive when the workers are killed. This function does nothing in a process that no
    elastic agent started.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    # `launch` writes the agent's process id into the run id. The parent's process id is not reliable: the agent may
    # have ended while this process imported torch. Other launchers may put any number there, such as a Slurm job id.
    before, own, number = os.environ["TORCHELASTIC_RUN_ID"].partition(OWN_RUN)
    agent = int(number) if own and not before and number.isdecimal() else os.getppid()
    end_with(agent)


def _rendezvous(timeout: float) -> Membership:
    address = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0))
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        return register(store, address, rank, size, timeout)
    except (RuntimeError, ValueError) as error:
        raise PeerError(
            f"the ranks did not find each other at {address[0]}:{address[1]}: {str(error).splitlines()[0]}",
            hint="check that the address is right and that this host can connect to it",
        ) from error


def wait_for_gloo_threads(patience: float = 10.0) -> None:
    """Wait until Gloo's threads have released the tensors of the last collective.

    Gloo's threads release the tensors shortly after a collective has returned, and need Python's global interpreter
    lock (GIL) to do so. At shutdown, Python (up to 3.13) unwinds the stack of a thread that waits for the GIL. A Gloo
    thread waits for the GIL in a destructor, so a process that has finished its work would end with SIGABRT
    (github.com/pytorch/pytorch/issues/190489). Destroying a process group stops its threads only if nothing else holds
    a reference to the group, but a model in DDP does.

    This function sleeps between checks, and the GIL is free meanwhile. So a Gloo thread that stays asleep is not
    waiting for the GIL. The thread is idle until the next collective, and no collective follows.

    Args:
        patience: seconds after which this function returns even if threads are still busy.
    """
    end, before = time.monotonic() + patience, None
    while time.monotonic() < end:
        now = gloo_threads()
        if None not in now and now == before:
            return
        before = now
        time.sleep(0.001)


def gloo_threads() -> list[int | None]:
    """Return how often each Gloo thread of this process has fallen asleep so far, or None for a thread that is
    awake."""
    sleeps: list[int | None] = []
    for task in Path("/proc/self/task").glob("*/status"):  # there are no such files on systems other than Linux
        try:
            status = dict(line.split(":\t", 1) for line in task.read_text().splitlines())
        except OSError:  # the thread has just ended
            continue
        if status["Name"] == "pt_gloo_runloop":
            sleeps.append(int(status["voluntary_ctxt_switches"]) if status["State"].startswith("S") else None)
    return sleeps
