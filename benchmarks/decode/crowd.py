"""Clients of a server: many that want text, of which some leave, and requests that are malformed or too large."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

Address = tuple[str, int]

PATIENCE = 300.0
"""Seconds after which an answer counts as never come."""


@dataclass(frozen=True)
class Order:
    """A text that a client wants."""

    prompt: str
    tokens: int
    seed: int
    leaves: bool = False
    """The client disconnects in the middle."""

    @property
    def body(self) -> dict[str, object]:
        return {"prompt": self.prompt, "max_tokens": self.tokens, "seed": self.seed}


@dataclass
class Outcome:
    """What became of a crowd."""

    texts: dict[Order, str] = field(default_factory=dict)
    seconds: dict[Order, float] = field(default_factory=dict)
    statuses: Counter[int] = field(default_factory=Counter)
    """Of the hostile requests; 0 where there was no answer."""
    lost: int = 0
    """Clients that stayed and got no whole answer."""


def orders(count: int, tokens: int, seed: int = 0) -> list[Order]:
    """Texts of different prompts and lengths; every third client leaves."""
    draw = random.Random(seed)
    words = ("def", "class", "return", "import", "for", "while", "lambda")
    return [
        Order(
            prompt=" ".join(draw.choices(words, k=draw.randint(1, 12))),
            tokens=draw.randint(tokens // 2, tokens),
            seed=draw.randrange(2**31),
            leaves=index % 3 == 2,
        )
        for index in range(count)
    ]


def request(body: object, path: str = "/v1/completions", **headers: str) -> bytes:
    """A request as bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(content))}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content


async def crowd(address: Address, wanted: Sequence[Order], outcome: Outcome, repeats: int = 1) -> None:
    """All clients at the same time, each with `repeats` texts one after the other."""

    async def client(order: Order) -> None:
        for _ in range(repeats):
            began = time.perf_counter()
            try:
                text = await asyncio.wait_for(_streamed(address, order), PATIENCE)
            except (OSError, ValueError, KeyError):
                text = None
            if order.leaves:
                continue
            if text is None:
                outcome.lost += 1
            else:
                outcome.texts[order] = text
                outcome.seconds[order] = max(time.perf_counter() - began, outcome.seconds.get(order, 0.0))

    await asyncio.gather(*map(client, wanted))


async def _streamed(address: Address, order: Order) -> str | None:
    """The text; None where it breaks off, or the client leaves."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(request({**order.body, "stream": True}, Connection="close"))
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n")[0]:
            return None
        parts, ended = [], False
        async for line in reader:
            if line == b"data: [DONE]\n":
                ended = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                parts.append(event["choices"][0]["text"])
                if order.leaves and len(parts) > order.seed % max(order.tokens // 2, 1):
                    writer.transport.abort()
                    return None
        return "".join(parts) if ended else None
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


VALUES = (None, True, -1, 0, 2**70, 1e300, "", "a", "\ud800", [], [[]], {}, {"a": [1]}, ["a", 1], [-1], "x" * 3000)
FIELDS = ("model", "prompt", "messages", "max_tokens", "n", "seed", "stop", "stream", "logprobs", "echo", "temperature")
FIELDS += ("top_p", "top_k", "stream_options", "logit_bias", "tools", "user", "suffix", "best_of", "nonsense")
PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models/x",
    "/",
    "/metrics",
    "/v1/../x",
    "/%00",
    "/" + "a" * 5000,
)


FOR_FEW, FOR_MANY = 0.5, 30.0
"""Seconds that a hostile client waits for an answer, which may never come: after a few bytes, and after many, which a
busy machine takes its time to pass on."""
MANY = 1 << 20


def hostile(count: int, seed: int = 0, body: int = 4 << 20) -> Iterator[tuple[bytes, bool]]:
    """Requests, nearly none of them valid, and whether the client waits for an answer.

    Args:
        body: the largest body that the server takes, in bytes; a few requests have more.
    """
    draw = random.Random(seed)
    valid = request({"prompt": "a", "max_tokens": 1})
    for number in range(count):
        kind = draw.random()
        if number % 500 == 250:
            yield request(b" " * (body + draw.randint(1, body // 4))), True
        elif kind < 0.25:
            yield _mutated(valid, draw), True
        elif kind < 0.6:
            fields = {draw.choice(FIELDS): draw.choice(VALUES) for _ in range(draw.randint(1, 5))}
            yield request({"prompt": "a", "max_tokens": 1, **fields}, path=draw.choice(PATHS)), True
        elif kind < 0.7:
            yield request(bytes(draw.randbytes(draw.randint(0, 400))), path=draw.choice(PATHS[:2])), True
        elif kind < 0.8:
            yield valid[: draw.randint(1, len(valid) - 1)], False
        elif kind < 0.85:
            yield request({"prompt": "a" * draw.randint(1, 9), "max_tokens": 50, "stream": draw.random() < 0.5}), False
        elif kind < 0.9:
            yield (
                _head(draw, {"Transfer-Encoding": "chunked"}) + draw.choice((b"zz\r\n", b"5\r\nab", b"-1\r\n\r\n")),
                True,
            )
        elif kind < 0.95:
            yield _head(draw, {"X-" + "a" * draw.randint(1, 50): "b" * draw.randint(0, 40000)}), True
        else:
            yield (
                draw.choice((b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0" * 50, b"GET\r\n\r\n")),
                True,
            )


def _mutated(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, 6)):
        at = draw.randrange(len(changed))
        change = draw.randrange(3)
        if change == 0:
            changed[at] = draw.randrange(256)
        elif change == 1:
            del changed[at : at + draw.randint(1, 4)]
        else:
            changed[at:at] = draw.randbytes(draw.randint(1, 4))
    return bytes(changed)


def _head(draw: random.Random, headers: dict[str, str]) -> bytes:
    method = draw.choice(("POST", "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "X" * 300))
    lines = "".join(f"{name}: {value}\r\n" for name, value in {"Host": "localhost", **headers}.items())
    return f"{method} {draw.choice(PATHS)} HTTP/1.1\r\n{lines}\r\n".encode()


async def flood(address: Address, requests: Iterator[tuple[bytes, bool]], outcome: Outcome, at_once: int = 16) -> None:
    """Send all of them, so many at a time."""

    async def sender() -> None:
        for data, waits in requests:
            outcome.statuses[await _status(address, data, waits)] += 1

    await asyncio.gather(*(sender() for _ in range(at_once)))


async def _status(address: Address, data: bytes, waits: bool) -> int:
    try:
        reader, writer = await asyncio.open_connection(*address)
    except OSError:
        return 0
    try:
        writer.write(data)
        if not waits:
            await asyncio.sleep(0)
            return 0
        answer = await asyncio.wait_for(reader.read(65536), FOR_FEW if len(data) < MANY else FOR_MANY)
        return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0
    except OSError:
        return 0
    finally:
        writer.transport.abort()


async def settled(ready: Callable[[], Awaitable[bool]], seconds: float = 30.0) -> bool:
    """Whether something becomes so in time."""
    end = time.monotonic() + seconds
    while not await ready():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.1)
    return True
