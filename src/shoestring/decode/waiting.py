"""The queue of rows that wait for a slot; it is fair among clients, and between short and long prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from shoestring.decode.request import Row

WRITTEN = 2
"""Number of prompt tokens that count as much as one generated token, as in Sheng et al., 2024."""


class Waiting:
    """A queue of the rows that wait for a slot.

    The next row belongs to the client that has been served the least, as measured by virtual token counters (Sheng et
    al., 2024, "Fairness in Serving Large Language Models"). Each client's counter grows with the tokens of its prompts
    and texts. A client that returns after a pause does not get credit for the time of the pause. Two clients with
    waiting rows are therefore served about the same number of tokens, however many requests each of them sends.

    Among the rows of one client, the row with the smallest key is next. The key is the client's counter at the row's
    arrival plus the length of the row's prompt. Short prompts therefore overtake long ones, but only for a time: rows
    that arrive after the client has been served as many tokens as a row's prompt has cannot overtake that row.
    """

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        """Virtual token counters of the clients that wait, or that were served more than the waiting clients."""
        self._rows: dict[str, list[tuple[float, int, Row]]] = {}
        self._level = 0.0  # smallest counter of a waiting client when a row was taken for the last time
        self._number = 0

    def __iter__(self) -> Iterator[Row]:
        return (row for rows in self._rows.values() for _, _, row in rows)

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def add(self, row: Row) -> None:
        """Queue a row."""
        client = row.request.client
        if client not in self._rows:
            level = min((self.served[other] for other in self._rows), default=self._level)
            self.served[client] = max(level, self.served.get(client, 0.0))
        self._number += 1
        key = self.served[client] + len(row.history)
        heappush(self._rows.setdefault(client, []), (key, self._number, row))

    def take(self, suits: Callable[[Row], bool] = lambda _: True) -> Row | None:
        """Remove and return the next row for which `suits` is true; None if there is none."""
        self._level = min((self.served[client] for client in self._rows), default=self._level)
        for client in sorted(self._rows, key=self.served.__getitem__):
            rows, passed = self._rows[client], []
            while rows:
                entry = heappop(rows)
                if suits(entry[2]):
                    break
                passed.append(entry)
            else:
                entry = None
            for other in passed:
                heappush(rows, other)
            if entry is not None:
                self._forget(client)
                return entry[2]
        return None

    def remove(self, row: Row) -> None:
        """Remove a waiting row."""
        client = row.request.client
        self._rows[client] = sorted(entry for entry in self._rows[client] if entry[2] is not row)
        self._forget(client)

    def charge(self, client: str, tokens: float) -> None:
        """Add tokens to the counter of a client."""
        self.served[client] = max(self._level, self.served.get(client, 0.0)) + tokens

    def _forget(self, client: str) -> None:
        """Drop the client's queue if it is empty, and the counters of clients without waiting rows if they do not
        exceed the smallest counter of the waiting clients."""
        if not self._rows[client]:
            del self._rows[client]
        level = min((self.served[other] for other in self._rows), default=self._level)
        for other in [name for name, served in self.served.items() if name not in self._rows and served <= level]:
            del self.served[other]
