"""The shortest schedule of two chains of tasks on shared resources, exactly.

Progress in the two chains is a point of a rectangle, and two tasks on one resource are an obstacle in it. The shortest
schedule is the shortest path around the obstacles that moves along both axes at once wherever it can (Akers, 1956).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from shoestring.planning.simulate import Task


def optimum(tasks: Sequence[Task]) -> float:
    """Seconds of the shortest schedule of two chains: each task waits for the one before it in its chain, if any."""
    chains: list[list[tuple[float, float, str]]] = []
    member = dict[int, int]()
    for index, task in enumerate(tasks):
        if not task.after:
            member[index] = len(chains)
            chains.append([])
        else:
            (before,) = task.after
            member[index] = member[before]
        chain = chains[member[index]]
        begin = chain[-1][1] if chain else 0.0
        chain.append((begin, begin + task.seconds, task.resource))
    first, second = chains
    ends = first[-1][1], second[-1][1]
    close = 1e-12 * sum(ends)

    @cache
    def left(x: float, y: float) -> float:
        """Seconds from a corner of an obstacle, or from the start, to the end of both chains."""
        one = next((place for place, (_, end, _) in enumerate(first) if end > x + close), len(first))
        other = next((place for place, (_, end, _) in enumerate(second) if end > y + close), len(second))
        while one < len(first) and other < len(second):
            (a, b, resource), (c, d, same) = first[one], second[other]
            if resource == same:  # one chain waits, before the obstacle is met if need be, and the other passes it
                ways = [max(b - x, c - y) + left(b, c)] if c >= y - close else []
                ways += [max(a - x, d - y) + left(a, d)] if a >= x - close else []
                return min(ways)
            moved = min(b - x, d - y)  # along both axes at once, from (x, y) on
            one += b - x <= moved + close
            other += d - y <= moved + close
        return max(ends[0] - x, ends[1] - y)

    return left(0.0, 0.0)
