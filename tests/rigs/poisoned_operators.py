"""Poisoned operators: generated operators that crash, hang, write, lie or end processes, each tried by `discover`.

    python -m tests.rigs.poisoned_operators SEED FIRST COUNT

prints a line of JSON for each operator that this process has survived. `right` says whether it got a reason, or only
rules by which ranks compute what one rank does, and whether nothing was left or changed outside. Where the sandbox
fails, an operator can end the session of the process that tries it, but not more.
"""

import ctypes
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch

from shoestring.graph.discovery import discover
from shoestring.graph.placements import difference, divide, join
from shoestring.sandbox import SandboxBounds

BOUNDS = SandboxBounds(memory=256 << 20, processor=1, seconds=4.0)
SHAPES = ((8, 12), (12, 6))
BASES = {
    "product": lambda x, y: x @ y,
    "rows": lambda x, y: torch.softmax(x, -1) * y.square().sum(),
    "joined": lambda x, y: torch.cat([x.sum(0), y.amax(1)]),
}
FOREVER = 1000.0


def crash(draw, folder):
    number = draw.choice([signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT, signal.SIGSTOP, signal.SIGXCPU])
    return draw.choice([lambda: ctypes.string_at(draw.randrange(4096)), os.abort, lambda: signal.raise_signal(number)])


def leave(draw, folder):
    status = draw.randrange(256)
    return draw.choice([lambda: os._exit(status), lambda: sys.exit(status), lambda: ctypes.CDLL(None).exit(status)])


def loop(draw, folder):
    def python():
        while True:
            pass

    def products():
        while True:
            torch.ones(64, 64) @ torch.ones(64, 64)

    return draw.choice([python, products])


def sleep(draw, folder):
    seconds = draw.choice([0.001, 0.01, FOREVER])
    return draw.choice([lambda: time.sleep(seconds), lambda: threading.Event().wait(seconds)])


def fill_memory(draw, folder):
    taken, size = [], 1 << draw.randrange(16, 28)

    def tensors():
        while True:
            taken.append(torch.ones(size, dtype=torch.uint8))

    def texts():
        while True:
            taken.append(bytearray(size))

    return draw.choice([tensors, texts, lambda: torch.empty(1 << 60, dtype=torch.uint8)])


class MuteError(Exception):
    def __str__(self):
        raise ValueError("no words")


def fail(draw, folder):
    error = draw.choice(
        [
            ValueError("no\n\x1b[2Jwords"),
            RuntimeError("x" * 10_000_000),
            MuteError(),
            KeyboardInterrupt(),
            MemoryError(),
        ]
    )

    def act():
        raise error

    return act


def print_much(draw, folder):
    text, count = draw.choice(["words\n", "\0", '{"rules": []}\n']), draw.randrange(1, 10_000)

    def python():
        print(text * count, flush=True)
        sys.stderr.write(text)

    return draw.choice([python, lambda: os.write(draw.choice([1, 2]), text.encode() * count)])


def close_files(draw, folder):
    first = draw.randrange(4)
    return lambda: os.closerange(first, 256)


def write_to_all_files(draw, folder):
    data = draw.choice([b'd{"rules": [[[0, 0], [0]]], "reason": ""}', draw.randbytes(50), b"r" * 1000])

    def act():
        for number in range(64):
            with suppress(OSError):
                os.write(number, data)

    return act


def kill_others(draw, folder):
    number, mine = draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGINT]), os.getpid()
    acts = [
        lambda: os.killpg(os.getpgid(os.getppid()), number),
        lambda: os.kill(os.getppid(), number),
        lambda: os.kill(mine, number),
        lambda: signal.pidfd_send_signal(os.pidfd_open(mine), number),
        lambda: resource.prlimit(mine, resource.RLIMIT_CPU, (0, 0)),
        lambda: os.sched_setaffinity(mine, {0}),
    ]
    return draw.choice(acts)


def recurse(draw, folder):
    def deeper(depth):
        return deeper(depth + 1) + 1

    def without_limit():
        sys.setrecursionlimit(1 << 30)
        deeper(0)

    return draw.choice([lambda: deeper(0), without_limit])


def write_files(draw, folder):
    old, name = folder / "old", str(folder / "new")

    def connect():
        with socket.create_connection(("127.0.0.1", 9)):
            pass

    def fork():
        if not os.fork():
            os._exit(0)

    acts = [
        lambda: Path(name).write_text("words"),
        lambda: old.write_text("other words"),
        old.unlink,
        lambda: old.rename(name),
        lambda: os.truncate(old, 0),
        lambda: Path(name).mkdir(),
        lambda: subprocess.run(["touch", name], check=True),
        lambda: os.execvp("touch", ["touch", name]),
        connect,
        fork,
    ]
    return draw.choice(acts)


def start_threads(draw, folder):
    status, count = draw.randrange(256), draw.randrange(1, 8)

    def leave_later():
        time.sleep(0.01)
        os._exit(status)

    def act():
        for _ in range(count):
            threading.Thread(target=draw.choice([leave_later, loop(draw, folder)]), daemon=True).start()

    return act


def change_settings(draw, folder):
    return draw.choice(
        [
            lambda: torch.set_default_dtype(torch.float16),
            lambda: sys.path.clear(),
            lambda: os.environ.clear(),
            lambda: setattr(torch, "equal", lambda *_: True),
            lambda: setattr(os, "_exit", lambda *_: None),
            lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        ]
    )


def act_later(draw, folder):
    """What another kind does, but at a later call only."""
    act, left = draw.choice([crash, leave, fail, kill_others])(draw, folder), draw.randrange(2, 60)

    def count():
        nonlocal left
        left -= 1
        if not left:
            act()

    return count


def other_shape(draw):
    return draw.choice(
        [
            lambda x, y, out: out[:-1].clone(),
            lambda x, y, out: out[None],
            lambda x, y, out: out.float(),
            lambda x, y, out: out.repeat(2, *[1] * (out.ndim - 1)),
            lambda x, y, out: (out, out),
            lambda x, y, out: None,
            lambda x, y, out: 1,
            lambda x, y, out: out.to_sparse(),
        ]
    )


def no_numbers(draw):
    number, place = draw.choice([float("nan"), float("inf")]), draw.randrange(4)

    def change(x, y, out):
        out = out.clone()
        out.view(-1)[place] = number
        return out

    return draw.choice([change, lambda x, y, out: torch.full_like(out, number)])


def random_numbers(draw):
    size = 10.0 ** -draw.randrange(4)
    return draw.choice(
        [
            lambda x, y, out: out + size * torch.randn_like(out),
            lambda x, y, out: out + size * random.random(),
            lambda x, y, out: out + time.perf_counter(),
        ]
    )


def changed_inputs(draw):
    def change(x, y, out):
        draw.choice([lambda: x.add_(1), y.zero_, lambda: x.numpy().fill(3), lambda: y[:1].mul_(2)])()
        return out

    return change


def view(draw):
    return draw.choice([lambda x, y, out: x.view(-1)[: out.numel()].view_as(out), lambda x, y, out: x])


def nearly_right(draw):
    """What holds for some numbers and sizes only."""
    return draw.choice(
        [
            lambda x, y, out: out + 1e-6 * x.abs().max(),
            lambda x, y, out: out * x.shape[0],
            lambda x, y, out: out + (x.shape[0] > 5),
            lambda x, y, out: out.flip(0),
            lambda x, y, out: out - out.mean(),
            lambda x, y, out: out.round(),
        ]
    )


ACTS = (
    crash, leave, loop, sleep, fill_memory, fail, print_much, close_files, write_to_all_files, kill_others, recurse,
    write_files, start_threads, change_settings, act_later,
)  # fmt: skip
"""Kinds that do something before they compute what they declare."""
RESULTS = (other_shape, no_numbers, random_numbers, changed_inputs, view, nearly_right)
"""Kinds that compute something else."""
KINDS = (*ACTS, *RESULTS)


class Poisoned:
    """An operator of a drawn kind, registered with torch: `kind` and `base` are its names."""

    def __init__(self, seed, number, folder):
        draw = random.Random(f"{seed} {number}")
        kind = KINDS[number % len(KINDS)]
        self.kind, self.base = kind.__name__, draw.choice(list(BASES))
        compute, self.changed = BASES[self.base], lambda x, y, out: out
        if kind in ACTS:
            act = kind(draw, folder)

            def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                act()
                return compute(x, y)
        else:
            change = kind(draw)
            if kind is nearly_right:
                self.changed = change

            def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return change(x, y, compute(x, y))

        operator = torch.library.custom_op(f"poisoned::of_{seed}_{number}", body, mutates_args=())
        operator.register_fake(compute)
        self.op = getattr(torch.ops.poisoned, f"of_{seed}_{number}").default

    def computed(self, x, y):
        return self.changed(x, y, BASES[self.base](x, y))

    def holds(self, rule):
        """Whether ranks compute by a rule what one rank does."""
        draw = torch.Generator().manual_seed(7)
        inputs = [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in SHAPES]
        shards = [divide(tensor, place, 2, draw) for tensor, place in zip(inputs, rule.inputs, strict=True)]
        rows = [self.computed(*(column[rank] for column in shards)) for rank in range(2)]
        return difference([join(rows, rule.outputs[0])], [self.computed(*inputs)]) < 1e-9


def try_one(seed, number):
    """What became of an operator, and whether that is right."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "old").write_text("words")
        poisoned = Poisoned(seed, number, folder)
        tensors = [torch.empty(shape, dtype=torch.float64, device="meta") for shape in SHAPES]
        outputs = [BASES[poisoned.base](*tensors)]
        before = outside(folder)
        rules, reason = discover(poisoned.op, tensors, {}, outputs, 2, BOUNDS)
        right = all(map(poisoned.holds, rules)) and bool(rules) != bool(reason) and outside(folder) == before
        return {
            "number": number,
            "kind": poisoned.kind,
            "rules": [str(rule) for rule in rules],
            "reason": reason,
            "right": right,
        }


def outside(folder):
    """What an operator may not change: files, open files, children, and limits of this process."""
    files = {path.name: path.read_text() for path in folder.iterdir()}
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    limits = [resource.getrlimit(limit) for limit in (resource.RLIMIT_CPU, resource.RLIMIT_AS)]
    return files, sorted(Path("/proc/self/fd").iterdir()), children, limits, os.sched_getaffinity(0)


def survived(seed, count, stop=lambda: None):
    """What became of operators that are tried one after the other; those that end their process are left out.

    Args:
        stop: called between processes; may raise an error.
    """
    first = 0
    while first < count:
        stop()
        command = [sys.executable, "-m", __spec__.name, str(seed), str(first), str(count - first)]
        done = subprocess.run(
            command, capture_output=True, text=True, start_new_session=True, check=False, timeout=20 * (count - first)
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        yield from lines
        first += len(lines) + bool(done.returncode)


if __name__ == "__main__":
    torch.set_num_threads(1)
    begin, size = int(sys.argv[2]), int(sys.argv[3])
    for case in range(begin, begin + size):
        print(json.dumps(try_one(int(sys.argv[1]), case)), flush=True)
