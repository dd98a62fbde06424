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
    obstacles = [(a, b, c, d) for a, b, one in first for c, d, other in second if one == other]
    ends = first[-1][1], second[-1][1]
    close = 1e-12 * sum(ends)

    @cache
    def left(x: float, y: float) -> float:
        """Seconds from a corner of an obstacle, or from the start, to the end of both chains."""
        hit: tuple[float, float, float, float, float] | None = None
        for a, b, c, d in obstacles:
            until = max(a - x, c - y, 0.0)  # both chains go on until they reach the obstacle
            ahead = x + until < b - close and y + until < d - close
            if ahead and (hit is None or until < hit[0]):
                hit = until, a, b, c, d
        if hit is None:
            return max(ends[0] - x, ends[1] - y)
        _, a, b, c, d = hit
        # One chain waits, before the obstacle is met if need be, and the other passes it first.
        ways = [max(b - x, c - y) + left(b, c)] if c >= y - close else []
        ways += [max(a - x, d - y) + left(a, d)] if a >= x - close else []
        return min(ways)

    return left(0.0, 0.0)
