"""Limits for each API key: requests and tokens per minute, and places in the queue."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shoestring.decode.serve.errors import RequestError, busy
from shoestring.decode.settings.serving import Serving

Unit = Literal["requests", "tokens"]


class Allowance:
    """The remaining amount of a limit per minute, as a token bucket. The amount grows continuously up to the limit, and
    falls below 0 if a request uses more than it has reserved.

    Args:
        limit: largest amount per minute.
        now: the present time in seconds.
    """

    def __init__(self, limit: int, now: float) -> None:
        self.limit, self._left, self._at = limit, float(limit), now

    def left(self, now: float) -> float:
        """The remaining amount at the time `now`."""
        self._left = min(float(self.limit), self._left + (now - self._at) * self.limit / 60)
        self._at = now
        return self._left

    def use(self, amount: float, now: float) -> None:
        """Subtract `amount` from what remains; a negative `amount` is added to what remains."""
        self._left = self.left(now) - amount

    def seconds_until(self, amount: float, now: float) -> float:
        """Seconds until the remaining amount reaches `amount`."""
        return max(0.0, (amount - self.left(now)) * 60 / self.limit)


@dataclass
class Ticket:
    """The texts and tokens that one admitted request has reserved."""

    key: int
    """Index of the API key."""
    texts: int
    """Number of texts."""
    tokens: int
    """Number of tokens that were reserved from the key's allowance."""


class Limits:
    """Keeps account of the requests, tokens and texts of each API key.

    Args:
        settings: the server's settings, with the limits. Without API keys, the limits hold for all clients together.
        places: largest number of texts, of all keys together, that are being generated or waiting.
        clock: returns the time in seconds.
    """

    def __init__(self, settings: Serving, places: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute: dict[Unit, int] = {
            "requests": settings.requests_per_minute,
            "tokens": settings.tokens_per_minute,
        }
        self._clock = clock
        # If there are several keys, one key can fill at most half of the queue.
        self._share = places - settings.queue // 2 if len(settings.keys) > 1 else places
        self._texts: Counter[int] = Counter()
        self._allowances: dict[tuple[int, Unit], Allowance] = {}

    def count_request(self, key: int) -> None:
        """Count a request, before it is parsed.

        Raises:
            RequestError: the key has reached its limit of requests.
        """
        if (allowance := self._allowance(key, "requests")) is not None:
            self._take(allowance, "requests", 1)

    def admit(self, key: int, texts: int, prompt: int, generated: int) -> Ticket:
        """Admit a parsed request. The returned `Ticket` must be handed to `settle` when the request ends.

        Args:
            texts: number of texts.
            prompt: number of tokens of all prompts.
            generated: largest number of tokens that the client has asked for, or 0 if the client has set no limit.

        Raises:
            RequestError: the request would exceed the key's limit of texts or tokens.
        """
        if self._texts[key] + texts > self._share:
            raise busy(f"{self._texts[key]} texts of this API key are already waiting; try again later", seconds=5)
        ticket = Ticket(key, texts, prompt + generated)
        if (allowance := self._allowance(key, "tokens")) is not None:
            if prompt > allowance.limit:
                raise RequestError(
                    429,
                    f"the prompt has {prompt} tokens, and this API key may use {allowance.limit} tokens per minute",
                    code="rate_limit_exceeded",
                    headers={"x-should-retry": "false"},
                )
            ticket.tokens = min(ticket.tokens, allowance.limit)
            self._take(allowance, "tokens", ticket.tokens)
        self._texts[key] += texts
        return ticket

    def settle(self, ticket: Ticket, used: int) -> None:
        """Release the places and the unused tokens of a request that has ended; a request that has used more tokens
        than it had reserved is charged for the difference."""
        self._texts[ticket.key] -= ticket.texts
        if (allowance := self._allowance(ticket.key, "tokens")) is not None:
            allowance.use(used - ticket.tokens, self._clock())

    def headers(self, key: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield the headers of OpenAI's API that tell a client the remaining amounts of its limits."""
        now = self._clock()
        for unit in self.per_minute:
            if (allowance := self._allowance(key, unit)) is not None:
                values: Sequence[tuple[str, str]] = (
                    ("limit", str(allowance.limit)),
                    ("remaining", str(max(0, math.floor(allowance.left(now) + 1e-9)))),
                    ("reset", duration(allowance.seconds_until(allowance.limit, now))),
                )
                for name, value in values:
                    yield f"x-ratelimit-{name}-{unit}".encode(), value.encode()

    def _allowance(self, key: int, unit: Unit) -> Allowance | None:
        """The allowance of a key; None if there is no limit."""
        limit = self.per_minute[unit]
        if not limit:
            return None
        return self._allowances.setdefault((key, unit), Allowance(limit, self._clock()))

    def _take(self, allowance: Allowance, unit: Unit, amount: int) -> None:
        """Take from an allowance, or raise a `RequestError` if too little is left."""
        now = self._clock()
        # Rounding in `left` is tolerated: a client that has waited as long as it was told must not be refused.
        if (wait := allowance.seconds_until(amount, now)) <= 1e-6:
            return allowance.use(amount, now)
        seconds = max(1, math.ceil(wait))
        raise RequestError(
            429,
            f"this API key may use {allowance.limit} {unit} per minute, and this request needs {amount} while "
            f"{max(0, math.floor(allowance.left(now)))} are left; try again in {seconds} s",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(seconds), "retry-after-ms": str(math.ceil(1000 * wait))},
        )


def duration(seconds: float) -> str:
    """Format a time as in the headers of OpenAI's API: `6m0s`, `1.5s` or `12ms`."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{minutes:.0f}m{rest:.3g}s" if minutes else f"{rest:.4g}s"
