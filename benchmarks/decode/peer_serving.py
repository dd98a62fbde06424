"""`shoestring serve` beside llama.cpp's server: processor time of a token, and time to the first token.

Both serve the same GGUF file with 8 slots and one thread for the products, so that the clients have the other core.
Requests are prompts of 19 tokens, none of which begins like another, with answers of 24, streamed, greedy. A round is
as many requests to one server and then to the other; the next begins with the other. Ratios are ours over theirs.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.calm import was_calm
from benchmarks.decode.contestants import CONTEXT, KINDS
from benchmarks.decode.crowd import Address, request
from benchmarks.decode.peers import folder_of
from benchmarks.harness import Deadline
from benchmarks.rows import Bar, Measured, NotRun
from benchmarks.timing import Paired

CLIENTS = (1, 8, 32)
SLOTS, PROMPT, ANSWER, ROUNDS = 8, 19, 24, 12
REQUESTS = {1: 6, 8: 32, 32: 64}
"""Requests of a round, by the number of clients."""
STARTS = 6
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Server:
    """A server in a process of its own."""

    pid: int
    address: Address

    def cpu(self) -> float:
        """Processor seconds that it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS


@contextmanager
def started(command: Sequence[str], log: Path) -> Iterator[Server]:
    """A server that prints its address when it is ready, ended with SIGTERM; with one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if "http://" in line), "")
            if not line:
                raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")
            url = urlsplit(next(word for word in line.split() if word.startswith("http://")).rstrip(":"))
            yield Server(process.pid, (url.hostname or "", url.port or 0))
        finally:
            process.terminate()
            process.wait(60)


def commands(file: Path) -> dict[str, list[str]]:
    """The commands of both servers of a GGUF file."""
    ours = ["-m", "shoestring", "serve", str(file), "--port", "0", "--slots", str(SLOTS), "--context", str(CONTEXT)]
    llama = ["-m", "benchmarks.decode.llama_server", str(file), "1", str(SLOTS), str(CONTEXT)]
    return {"ours": [sys.executable, *ours], "llama.cpp": [sys.executable, *llama]}


@dataclass
class Round:
    """What a round of requests cost."""

    cpu: float
    """Processor seconds of the server a token."""
    first: list[float]
    """Seconds to the first token, of each request."""

    @property
    def p50(self) -> float:
        return statistics.median(self.first)

    @property
    def p95(self) -> float:
        """The 95th percentile; with fewer than 20 requests, the largest."""
        return sorted(self.first)[min(len(self.first) - 1, int(0.95 * len(self.first)))]


async def _streamed(address: Address, prompt: str) -> tuple[float, int]:
    """Seconds from a request to its first token, and the number of tokens of the answer."""
    began, first, tokens = time.perf_counter(), 0.0, 0
    body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(request(body, Connection="close"))
        async for line in reader:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - began
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"the server refused a request: {event}")
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            if line.strip() == b"data: [DONE]":
                return first, tokens
        raise OSError("the stream has broken off")
    finally:
        writer.close()


async def _visited(address: Address, clients: int, prompts: list[str]) -> tuple[list[float], int]:
    waiting, seconds, tokens = iter(prompts), [], 0

    async def client() -> None:
        nonlocal tokens
        for prompt in waiting:
            first, written = await _streamed(address, prompt)
            seconds.append(first)
            tokens += written

    await asyncio.gather(*(client() for _ in range(clients)))
    return seconds, tokens


def visit(server: Server, clients: int, number: int) -> Round:
    """Send the requests of a round, whose prompts begin with its number."""
    prompts = [f"{number:06d} {index:04d} of a text"[:PROMPT].ljust(PROMPT, "x") for index in range(REQUESTS[clients])]
    before = server.cpu()
    first, tokens = asyncio.run(_visited(server.address, clients, prompts))
    if tokens < 0.9 * ANSWER * len(prompts):
        raise RuntimeError(f"{tokens} tokens came of {ANSWER * len(prompts)}: the answers end early")
    return Round((server.cpu() - before) / tokens, first)


@cache
def compared(width: int, clients: int) -> dict[str, list[Round]]:
    """Rounds of both servers, in turns; one that other work disturbed is made again."""
    file = folder_of(188) / f"{KINDS[width]}.gguf"
    rounds: dict[str, list[Round]] = {"ours": [], "llama.cpp": []}
    wanted = commands(file)
    log = folder_of(188) / "server.log"
    with started(wanted["ours"], log) as ours, started(wanted["llama.cpp"], log.with_suffix(".llama.log")) as theirs:
        servers = {"ours": ours, "llama.cpp": theirs}
        number = 0
        while len(rounds["ours"]) < ROUNDS:
            order = list(servers.items())[:: 1 if number % 2 else -1]
            number += 1
            was_calm()
            made = {name: visit(server, clients, number) for name, server in order}
            if number > 2 and was_calm():
                for name, each in made.items():
                    rounds[name].append(each)
    return rounds


def measured(width: int, clients: int, what: Callable[[Round], float], unit: float, _: Deadline) -> Measured | NotRun:
    """The median ratio of ours over llama.cpp's."""
    if importlib.util.find_spec("xllamacpp") is None:
        return NotRun("the package xllamacpp is not installed")
    rounds = compared(width, clients)
    ours, theirs = ([what(each) for each in rounds[name]] for name in ("ours", "llama.cpp"))
    medians = statistics.median(ours), statistics.median(theirs)
    ratio = Paired(tuple(a / b for a, b in zip(ours, theirs, strict=True)), *medians)
    return ratio.measured(f"{unit * medians[0]:.2f} ms over {unit * medians[1]:.2f}; {ratio}")


def ready(_: Deadline) -> Measured:
    """Processor seconds until a server of a tiny model, whose weights are read in no time, takes requests."""
    file = folder_of(0) / f"{KINDS[32]}.gguf"
    seconds = []
    for _round in range(STARTS):
        with started(commands(file)["ours"], file.with_suffix(".log")) as server:
            seconds.append(server.cpu())
    return Measured(statistics.median(seconds), f"{min(seconds):.2f} to {max(seconds):.2f} s in {STARTS} starts")


def first_request(_: Deadline) -> Measured:
    """The time of the first request after a start over that of later ones."""
    file, ratios = folder_of(188) / f"{KINDS[8]}.gguf", []
    while len(ratios) < STARTS:
        was_calm()
        with started(commands(file)["ours"], file.with_suffix(".log")) as server:
            seconds = []
            for index in range(9):
                began = time.perf_counter()
                asyncio.run(_streamed(server.address, f"{index:04d} of a text".ljust(PROMPT, "x")))
                seconds.append(time.perf_counter() - began)
        if was_calm():
            ratios.append(seconds[0] / statistics.median(seconds[1:]))
    return Measured(
        statistics.median(ratios), f"{min(ratios):.3f} to {max(ratios):.3f} in {STARTS} starts, 188 M, 8 bits"
    )


def rows() -> Iterator[Bar]:
    """Every bar."""
    what = "processor seconds until a server of a tiny model takes requests"
    yield Bar("decode.peer-serve-ready", what, "<=", 1.5, ready, baseline="")
    what = "time of the first request after a start over that of later ones"
    yield Bar("decode.peer-serve-first-request", what, "<=", 1.3, first_request, baseline="later requests")
    for width, name in {8: "8bit", 4: "4bit", 32: "fp32"}.items():
        for clients in CLIENTS if width == 8 else (8,):
            for key, what, of in (
                ("cpu", "processor time of the server a token", lambda each: each.cpu),
                ("first", "median time to the first token", lambda each: each.p50),
                ("first-p95", "95th percentile of the time to the first token", lambda each: each.p95),
            ):
                yield Bar(
                    f"decode.peer-serve-{key}-{name}-{clients}",
                    f"{what} over llama.cpp's server, {name}, {clients} clients, 1 thread",
                    "<=",
                    1.0,
                    partial(measured, width, clients, of, 1e3),
                    baseline="llama.cpp",
                    peers=("xllamacpp",),
                )
