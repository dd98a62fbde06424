"""The server under clients that leave and malformed requests: what it loses, leaks and delays, and its text."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit
from urllib.request import urlopen

import torch

from benchmarks.decode.crowd import Address, Order, Outcome, crowd, flood, hostile, orders, settled
from benchmarks.harness import Deadline
from benchmarks.rows import Bar, Measured
from shoestring.data.tokenizer import Tokenizer, byte_tokenizer
from shoestring.decode.engine import Engine, generate
from shoestring.decode.request import Request
from shoestring.decode.settings.generation import Sampling
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.loading import load_model
from shoestring.models.saving import save_model

CLIENTS, HOSTILE, SLOTS, TOKENS = 64, 10_000, 8, 48
GROWN = ("threads", "descriptors", "asyncio_tasks")
LEFT = ("slots_busy", "queue_length", "failed_passes_total")


def save_small(folder: Path) -> Path:
    """A model of 2 M random weights in double precision, in which text does not depend on the batch's shape."""
    torch.manual_seed(0)
    built = GPT(
        GPTConfig(vocab_size=257, dim=192, layers=4, heads=6, kv_heads=3, hidden=512, context=256, init_std=0.08)
    )
    origin = {"model": "-", "arguments": {}, "offered": {"context": 256}}
    save_model(built.double(), byte_tokenizer(), folder / "small", origin)
    return folder / "small"


@dataclass(frozen=True)
class Process:
    """A server in a process of its own."""

    pid: int
    address: Address

    def held(self) -> dict[str, float]:
        """Threads, file descriptors, MiB of memory, and what the server says of itself."""
        proc = Path(f"/proc/{self.pid}")
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        descriptors = len(list((proc / "fd").iterdir()))  # before the request below, whose connection may linger
        host, port = self.address
        with urlopen(f"http://{host}:{port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.removeprefix("shoestring_"): float(value) for name, value in values} | {
            "threads": float(status["Threads"]),
            "descriptors": float(descriptors),
            "mib": int(status["VmRSS"].split()[0]) / 1024,
        }


@contextmanager
def served(folder: Path | str, *arguments: str) -> Iterator[Process]:
    """`shoestring serve` of a model, ended with SIGTERM."""
    command = [sys.executable, "-m", "shoestring", "serve", str(folder), "--port", "0", "--slots", str(SLOTS)]
    log = Path(str(folder).removeprefix("hf:")).parent / "server.log"
    with (
        log.open("wb") as errors,
        subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if "http://" not in said:
                raise RuntimeError(f"the server did not start: {log.read_text()}")
            url = urlsplit(next(word for word in said.split() if word.startswith("http://")).rstrip(":"))
            yield Process(process.pid, (url.hostname or "", url.port or 0))
        finally:
            process.terminate()
            process.wait(60)


@dataclass(frozen=True)
class Storm:
    """What came of the server's worst hour."""

    outcome: Outcome
    before: dict[str, float]
    """After a first storm of a tenth of the size, which fills caches and pools."""
    after: dict[str, float]
    alive: bool
    engine: dict[Order, float]
    """Seconds in which the engine alone ends the texts of those who stay."""
    texts: dict[Order, str]
    """What `generate` writes."""

    @property
    def faults(self) -> dict[str, float]:
        """What must not be: each of them should be 0."""
        leaks = {name: self.after[name] for name in LEFT}
        grown = {name: max(0.0, self.after[name] - self.before[name]) for name in GROWN}
        errors = sum(count for status, count in self.outcome.statuses.items() if status >= 500)
        return {"crashes": float(not self.alive), "texts lost": self.outcome.lost, "5xx": errors, **leaks, **grown}

    @property
    def wrong(self) -> int:
        """Texts that are not what `generate` writes."""
        return sum(self.outcome.texts.get(order) != text for order, text in self.texts.items())


async def _weather(
    process: Process, wanted: list[Order], count: int, seed: int, most: Mapping[str, float] = {}
) -> tuple[Outcome, dict[str, float]]:
    """A crowd and a flood; then waits until the server is at rest: a socket is closed a moment after its answer.

    Args:
        most: what it held at rest before; what still holds more after half a minute has leaked.

    Returns:
        What came of them, and what the server holds at rest, as it was last looked at.
    """
    outcome, held = Outcome(), {}
    await asyncio.gather(crowd(process.address, wanted, outcome), flood(process.address, hostile(count, seed), outcome))

    async def quiet() -> bool:
        held.update(await asyncio.to_thread(process.held))
        at_rest = held["connections"] <= 1 and held["slots_busy"] == held["queue_length"] == 0
        return at_rest and all(held[name] <= most[name] for name in GROWN if name in most)

    await settled(quiet)
    return outcome, held


def storm(clients: int = CLIENTS, count: int = HOSTILE, check: Callable[[], None] = lambda: None) -> Storm:
    """A server, a crowd and a flood at the same time; then the engine alone, with the same texts at the same time."""
    with TemporaryDirectory() as folder:
        path = save_small(Path(folder))
        wanted = orders(clients, TOKENS)
        with served(path) as process:
            _, before = asyncio.run(_weather(process, orders(clients, TOKENS, seed=1), count // 10, seed=1))
            check()
            outcome, after = asyncio.run(_weather(process, wanted, count, seed=0, most=before))
            alive = Path(f"/proc/{process.pid}").exists()
        check()
        built, tokenizer = load_model(path)
        assert tokenizer is not None
    staying = [order for order in wanted if not order.leaves]
    texts = {order: _generated(built, tokenizer, order) for order in staying}
    return Storm(outcome, before, after, alive, _engine_alone(built, tokenizer, staying), texts)


def _engine_alone(built: torch.nn.Module, tokenizer: Tokenizer, wanted: list[Order]) -> dict[Order, float]:
    engine, began, ends = Engine(built, slots=SLOTS), time.perf_counter(), {}
    rows = {engine.submit(_request(tokenizer, order)): order for order in wanted}
    while engine.busy:
        for row in engine.step():
            if row.ending is not None:
                ends[rows[row]] = time.perf_counter() - began
    engine.close()
    return ends


def _request(tokenizer: Tokenizer, order: Order) -> Request:
    return Request(
        tokens=tokenizer.encode(order.prompt),
        max_new=order.tokens,
        sampling=Sampling(seed=order.seed),
        stop=frozenset({tokenizer.end_of_text}),
    )


def _generated(built: torch.nn.Module, tokenizer: Tokenizer, order: Order) -> str:
    asked, text = _request(tokenizer, order), tokenizer.stream()
    tokens = generate(built, asked.tokens, max_new=asked.max_new, sampling=asked.sampling, stop=[tokenizer.end_of_text])
    return "".join(map(text.add, tokens)) + text.rest()


def p95(seconds: dict[Order, float]) -> float:
    """The 95th percentile."""
    ordered = sorted(seconds.values())
    return ordered[min(int(0.95 * len(ordered)), len(ordered) - 1)]


def rows() -> list[Bar]:
    """Every bar of the server; one storm gives all of them."""

    @cache
    def once() -> Storm:
        return storm()

    def faults(_: Deadline) -> Measured:
        found = once()
        statuses = ", ".join(
            f"{count} of {status or 'no answer'}" for status, count in sorted(found.outcome.statuses.items())
        )
        return Measured(sum(found.faults.values()), f"{found.faults}; statuses: {statuses}")

    def memory(_: Deadline) -> Measured:
        found = once()
        return Measured(found.after["mib"] - found.before["mib"], f"of {found.before['mib']:.0f} MiB")

    def latency(_: Deadline) -> Measured:
        found = once()
        server, engine = p95(found.outcome.seconds), p95(found.engine)
        cores = len(os.sched_getaffinity(0))
        return Measured(server / engine, f"{server:.2f} s against {engine:.2f} s, on {cores} cores with the clients")

    def text(_: Deadline) -> Measured:
        found = once()
        return Measured(found.wrong, f"of {len(found.texts)} texts, {sum(map(len, found.texts.values()))} characters")

    under = f"{CLIENTS} clients at a time, a third of which leave, and {HOSTILE} malformed or oversized requests"
    return [
        Bar(
            "decode.server-faults",
            f"crashes, lost texts, server errors, and slots, threads, tasks or descriptors left behind; {under}",
            "<=",
            0.0,
            measure=faults,
            peers=("starlette", "uvicorn"),
            kind="exact",
        ),
        Bar(
            "decode.server-memory",
            f"growth of the server's memory, MiB, after a tenth of the same; {under}",
            "<=",
            16.0,
            measure=memory,
            peers=("starlette", "uvicorn"),
        ),
        Bar(
            "decode.server-latency",
            f"95th percentile of the time of a whole text, over that of the engine alone with the same texts; {under}",
            "<=",
            4.0,
            measure=latency,
            baseline="the engine without a server",
            peers=("starlette", "uvicorn"),
        ),
        Bar(
            "decode.server-text",
            f"texts that differ from what `generate` writes with the same seed, in fp64; {under}",
            "<=",
            0.0,
            measure=text,
            peers=("starlette", "uvicorn"),
            kind="exact",
        ),
    ]
