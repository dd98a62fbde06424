"""A crowd of clients: short requests while long prompts are read, and what a crowd of which a third leaves costs.

The model has 25 M random weights in single precision. Time to the first token is that of the first event of a stream,
at the client. Idle and loaded phases alternate on one server; while loaded, four other clients send long prompts, each
another as soon as the last one is read.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.decode.crowd import Address, Outcome, crowd, orders, request, settled
from benchmarks.decode.server import GROWN, LEFT, SLOTS, Process, served
from benchmarks.harness import Deadline
from benchmarks.intervals import of_ratio
from benchmarks.rows import Bar, Measured
from shoestring.data.tokenizer import byte_tokenizer
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.saving import save_model

CLIENTS, LONGS, TOKENS = 64, 4, 24
CONTEXT, LONG = 2048, 1800
ROUNDS, SHORTS = 6, 20
SHORT = "def quicksort(items):"


def save_medium(folder: Path) -> Path:
    """A model of 25 M random weights in single precision."""
    torch.manual_seed(0)
    shape = {"dim": 512, "layers": 8, "heads": 8, "kv_heads": 4, "hidden": 1408, "context": CONTEXT}
    built = GPT(GPTConfig(vocab_size=257, init_std=0.08, **shape))
    save_model(
        built, byte_tokenizer(), folder / "medium", {"model": "-", "arguments": {}, "offered": {"context": CONTEXT}}
    )
    return folder / "medium"


async def first_token(address: Address, body: Mapping[str, object]) -> float:
    """Seconds from a request to the first event of its stream; the rest of the stream is read as well."""
    began, first = time.perf_counter(), 0.0
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(request({**body, "stream": True}, Connection="close"))
        async for line in reader:
            if line.startswith(b"data: {") and not first:
                if "error" in json.loads(line[6:]):
                    break
                first = time.perf_counter() - began
            if line == b"data: [DONE]\n":
                return first
        raise OSError("the stream has broken off")
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def long_prompts(address: Address, numbers: count[int]) -> None:
    """Send one long prompt after another, none of which begins like an earlier one."""
    while True:
        prompt = f"{next(numbers):06d} " + "lorem ipsum dolor " * CONTEXT
        await first_token(address, {"prompt": prompt[:LONG], "max_tokens": 1})


async def short_requests(address: Address, number: int) -> list[float]:
    """Times to the first token of short requests, one after the other with pauses between them."""
    seconds = []
    for index in range(number):
        await asyncio.sleep(0.03 * (1 + index % 7))  # so that they come at all moments of a pass
        body = {"prompt": f"{index:03d}{SHORT}", "max_tokens": 4, "seed": index}
        seconds.append(await first_token(address, body))
    return seconds


@dataclass(frozen=True)
class Waits:
    """95th percentiles of the time to the first token of short requests, in seconds, one a round."""

    idle: list[float]
    loaded: list[float]


async def _compare(address: Address, rounds: int, shorts: int) -> Waits:
    idle, loaded, numbers = [], [], count()
    for _ in range(rounds):
        idle.append(p95(await short_requests(address, shorts)))
        longs = [asyncio.create_task(long_prompts(address, numbers)) for _ in range(LONGS)]
        await asyncio.sleep(0.5)
        loaded.append(p95(await short_requests(address, shorts)))
        for task in longs:
            task.cancel()
        for result in await asyncio.gather(*longs, return_exceptions=True):
            if isinstance(result, OSError):
                raise result
        await asyncio.sleep(0.5)  # the server notices that the clients have left
    return Waits(idle, loaded)


def waits(rounds: int = ROUNDS, shorts: int = SHORTS, *flags: str) -> Waits:
    """Time to the first token of short requests, on an idle server and while long prompts are read."""
    with TemporaryDirectory() as folder, served(save_medium(Path(folder)), *flags) as process:
        asyncio.run(short_requests(process.address, 5))
        return asyncio.run(_compare(process.address, rounds, shorts))


@dataclass(frozen=True)
class Visit:
    """What a crowd has left behind."""

    outcome: Outcome
    before: dict[str, float]
    after: dict[str, float]

    @property
    def faults(self) -> dict[str, float]:
        """What should be 0: texts that never came, and what the server still holds at rest."""
        left = {name: self.after[name] for name in LEFT}
        grown = {name: max(0.0, self.after[name] - self.before[name]) for name in GROWN}
        return {"texts lost": float(self.outcome.lost), **left, **grown}


async def _visited(process: Process, clients: int, seed: int) -> tuple[Outcome, dict[str, float]]:
    """A crowd of which a third leaves, beside long prompts; then what the server holds at rest."""
    outcome, held = Outcome(), {}
    longs = [asyncio.create_task(long_prompts(process.address, count(1000 * index))) for index in range(LONGS)]
    await crowd(process.address, orders(clients, TOKENS, seed), outcome)
    for task in longs:
        task.cancel()
    failed = [result for result in await asyncio.gather(*longs, return_exceptions=True) if isinstance(result, OSError)]
    outcome.lost += len(failed)

    async def quiet() -> bool:
        held.update(await asyncio.to_thread(process.held))
        return held["connections"] <= 1 and held["slots_busy"] == held["queue_length"] == 0

    await settled(quiet)
    return outcome, held


def visit(clients: int = CLIENTS) -> Visit:
    """A server, a first crowd that fills caches and pools, and a second one."""
    with TemporaryDirectory() as folder, served(save_medium(Path(folder))) as process:
        _, before = asyncio.run(_visited(process, max(clients // 4, 1), seed=1))
        outcome, after = asyncio.run(_visited(process, clients, seed=0))
        return Visit(outcome, before, after)


def p95(values: list[float]) -> float:
    """The 95th percentile."""
    ordered = sorted(values)
    return ordered[min(int(0.95 * len(ordered)), len(ordered) - 1)]


def rows() -> list[Bar]:
    """The bars of the crowd."""

    @cache
    def visited() -> Visit:
        return visit()

    def faults(_: Deadline) -> Measured:
        found = visited()
        return Measured(sum(found.faults.values()), f"{found.faults}; {len(found.outcome.texts)} texts")

    def first(_: Deadline) -> Measured:
        found = waits()
        return of_ratio(
            found.loaded,
            found.idle,
            f"{max(found.loaded):.3f} s against {max(found.idle):.3f} s at worst, {SLOTS} slots, {ROUNDS} rounds",
        )

    crowded = f"{CLIENTS} clients at a time, a third of which leave, and {LONGS} that send long prompts"
    peers = ("starlette", "uvicorn")
    return [
        Bar(
            "serving.crowd-faults",
            f"lost texts, failed passes, and slots, threads, tasks or descriptors left behind; {crowded}",
            "<=",
            0.0,
            measure=faults,
            peers=peers,
            kind="exact",
        ),
        Bar(
            "serving.crowd-first-token",
            f"95th percentile of the time to the first token of short requests, while {LONGS} prompts of {LONG} tokens "
            "are read, over that of an idle server; 25 M weights",
            "<=",
            2.0,
            measure=first,
            baseline="the same server without long prompts",
            peers=peers,
        ),
    ]
