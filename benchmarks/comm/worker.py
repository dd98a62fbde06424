"""One rank of a launch: python -m benchmarks.comm.worker SPEC.json OUT, under torchrun.

OUT gets `ready-R` once everything is built and warm, the measuring begins when `go` is there, and `rank-R.json` is
what came of it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.comm.contestant import Contestant, contestant, mean_weights
from benchmarks.comm.curves import WINDOW
from benchmarks.comm.spec import Spec
from shoestring.core.world import World

TOKENS = "tokens"  # the folder of the token files, beside that of the launch


@dataclass
class Log:
    """What one method did on one rank."""

    seconds: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)  # bytes through the interface, headers included
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)
    said: str = ""


def sent_bytes(table: Path = Path("/proc/self/net/dev")) -> int:
    """Bytes that this host's interfaces have sent, loopback aside."""
    lines = (line.partition(":") for line in table.read_text().splitlines()[2:])
    return sum(int(rest.split()[8]) for name, _, rest in lines if name.strip() != "lo")


def turn(one: Contestant, log: Log, steps: int) -> None:
    """Train `steps` steps, from one barrier to the next."""
    dist.barrier()
    sent, began = sent_bytes(), time.perf_counter()
    for _ in range(steps):
        log.losses.append(one.step())
        log.seconds.append((now := time.perf_counter()) - began)
        log.sent.append((total := sent_bytes()) - sent)
        sent, began = total, now
    dist.barrier()


def look(one: Contestant, log: Log) -> None:
    """The held-out loss of the weights that the run would save now."""
    with mean_weights(one.module) if one.method.local else torch.no_grad():
        log.held_out.append((one.steps, one.held_out()))


def curve(one: Contestant, log: Log, spec: Spec) -> None:
    """A whole run, with looks that no clock sees."""
    for start in range(0, spec.steps, stride := spec.look or spec.steps):
        if spec.look:
            look(one, log)
        turn(one, log, min(stride, spec.steps - start))
        newest = [loss for _, loss in log.held_out[-WINDOW:]]
        if len(newest) == WINDOW and sum(newest) / WINDOW <= spec.until:  # equal on all ranks
            break
    look(one, log)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def alternating(ones: list[Contestant], rounds: int) -> Iterator[int]:
    """Forwards, backwards, and so on."""
    for number in range(rounds):
        yield from range(len(ones)) if number % 2 == 0 else reversed(range(len(ones)))


def measure(spec: Spec, out: Path, world: World) -> list[Log]:
    ones = [contestant(method, spec, out.parent / TOKENS, world) for method in spec.methods]
    for one in ones:
        turn(one, Log(), spec.warm)
    (out / f"ready-{world.rank}").touch()
    wait_for(out / "go")
    logs = [Log() for _ in ones]
    if len(ones) == spec.rounds == 1:
        curve(ones[0], logs[0], spec)
    else:
        for index in alternating(ones, spec.rounds):
            turn(ones[index], logs[index], spec.turn)
    for one, log in zip(ones, logs, strict=True):
        log.facts, log.said = one.facts(), one.said()
        one.close()
    return logs


def main(spec: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = World.current()
    logs = measure(Spec.parse(spec.read_text()), out, world)
    (out / f"rank-{world.rank}.json").write_text(json.dumps([vars(log) for log in logs]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
