"""The queue of rows that wait for a slot, fair between clients and between short and long prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from shoestring.decode.request import Row

WRITTEN = 2
"""A generated token counts as much as this number of prompt tokens, as in Sheng et al., 2024."""


class Waiting:
    """Rows that wait for a slot.

    The next row is one of the client that has been served the least, by virtual token counters (Sheng et al., 2024,
    "Fairness in Serving Large Language Models"): each client's counter grows with the tokens of its prompts and texts,
    and a client that was away does not keep what it has not used. So two clients that both wait are served about the
    same number of tokens, however many requests each of them sends.

    Of one client's rows, that with the least sum of two numbers is next: the client's counter when the row came, and
    the length of its prompt. So short prompts overtake long ones, but a row is overtaken only by rows that come before
    its client has been served as many tokens as its prompt has.
    """

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        """Virtual token counter of each client that waits or has been served more than those that wait."""
        self._rows: dict[str, list[tuple[float, int, Row]]] = {}
        self._level = 0.0  # least counter of the clients that waited when the last row was taken
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
        """Remove and return the next row that suits; None if there is none."""
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
        """Remove a row that waits."""
        client = row.request.client
        self._rows[client] = sorted(entry for entry in self._rows[client] if entry[2] is not row)
        self._forget(client)

    def charge(self, client: str, tokens: float) -> None:
        """Add tokens to the counter of a client."""
        self.served[client] = max(self._level, self.served.get(client, 0.0)) + tokens

    def _forget(self, client: str) -> None:
        """Drop a client's empty queue, and the counters of clients that have no advantage to lose."""
        if not self._rows[client]:
            del self._rows[client]
        level = min((self.served[other] for other in self._rows), default=self._level)
        for other in [name for name, served in self.served.items() if name not in self._rows and served <= level]:
            del self.served[other]
