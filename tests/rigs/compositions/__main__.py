"""`python -m tests.rigs.compositions FIRST STOP`: judge the compositions of a range of seeds."""

from __future__ import annotations

import sys
import time
from collections import Counter

from tests.rigs.compositions.draws import draw
from tests.rigs.compositions.verdict import Judge


def main(first: int, stop: int) -> int:
    """Print every fault with its composition, and how many there are of each kind; 1 if there are faults."""
    began, counts = time.monotonic(), Counter[str]()
    with Judge() as judge:
        for seed in range(first, stop):
            try:
                composition = draw(seed)
                verdict = judge(composition)
            except Exception as error:
                print(f"FAULT crash: {draw(seed)}\n    {error!r}", flush=True)
                counts["crash"] += 1
                continue
            counts[verdict.kind] += 1
            if not verdict.good:
                print(f"FAULT {verdict.kind}: {composition}\n    {verdict.detail}\n", flush=True)
    print(f"{dict(counts)} in {time.monotonic() - began:.0f} s")
    return int(any(kind not in ("equal", "lossy", "refused") for kind in counts))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
