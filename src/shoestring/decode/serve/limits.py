"""Limits on what each API key may ask for: requests and tokens per minute, and places in the queue."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shoestring.decode.serve.errors import RequestError, busy
from shoestring.decode.serve.settings import Serving

Unit = Literal["requests", "tokens"]


class Allowance:
    """What is left of a limit per minute. It grows continuously, up to the limit of one minute (a token bucket), and is
    below 0 after more was used than had been asked for.

    Args:
        limit: largest number per minute.
        now: the time in seconds.
    """

    def __init__(self, limit: int, now: float) -> None:
        self.limit, self._left, self._at = limit, float(limit), now

    def left(self, now: float) -> float:
        """What is left."""
        self._left = min(float(self.limit), self._left + (now - self._at) * self.limit / 60)
        self._at = now
        return self._left

    def use(self, amount: float, now: float) -> None:
        """Take from what is left, or give back if the amount is negative."""
        self._left = self.left(now) - amount

    def seconds_until(self, amount: float, now: float) -> float:
        """Seconds until so much is left."""
        return max(0.0, (amount - self.left(now)) * 60 / self.limit)


@dataclass
class Ticket:
    """The right of one admitted request to its texts and tokens."""

    key: int
    """Index of the API key."""
    texts: int
    """Number of texts."""
    tokens: int
    """Number of tokens that were taken from the key's allowance in advance."""


class Limits:
    """Keeps account of what each API key uses.

    Args:
        settings: the limits. Without API keys, they hold for all clients together.
        places: largest number of texts of all keys that are generated or wait.
        clock: the time in seconds.
    """

    def __init__(self, settings: Serving, places: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute: dict[Unit, int] = {
            "requests": settings.requests_per_minute,
            "tokens": settings.tokens_per_minute,
        }
        self._clock = clock
        # One key leaves room in the queue for the others.
        self._share = places - settings.queue // 2 if len(settings.keys) > 1 else places
        self._texts: Counter[int] = Counter()
        self._allowances: dict[tuple[int, Unit], Allowance] = {}

    def count_request(self, key: int) -> None:
        """Count a request, before it is parsed.

        Raises:
            RequestError: the key has sent as many requests as it may.
        """
        if (allowance := self._allowance(key, "requests")) is not None:
            self._take(allowance, "requests", 1)

    def admit(self, key: int, texts: int, prompt: int, generated: int) -> Ticket:
        """Admit a parsed request. Its `Ticket` must be handed to `settle` when the request ends.

        Args:
            texts: number of texts.
            prompt: number of tokens of all prompts.
            generated: largest number of tokens that the client has asked for, or 0 if it has named none.

        Raises:
            RequestError: the key has as many texts or tokens as it may have.
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
        """Give back the places of a request that has ended, and the tokens that it has not used; a request that used
        more than it had taken is charged for the rest."""
        self._texts[ticket.key] -= ticket.texts
        if (allowance := self._allowance(ticket.key, "tokens")) is not None:
            allowance.use(used - ticket.tokens, self._clock())

    def headers(self, key: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield the headers of OpenAI's API that tell a client what is left of its limits."""
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
        """What a key may still use; None if there is no limit."""
        limit = self.per_minute[unit]
        if not limit:
            return None
        return self._allowances.setdefault((key, unit), Allowance(limit, self._clock()))

    def _take(self, allowance: Allowance, unit: Unit, amount: int) -> None:
        """Take from an allowance, or raise a `RequestError` if too little is left."""
        now = self._clock()
        # Rounding in `left` must not refuse what the client was told to come back for.
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
    """A time as in the headers of OpenAI's API: `6m0s`, `1.5s` or `12ms`."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{minutes:.0f}m{rest:.3g}s" if minutes else f"{rest:.4g}s"
