"""`python -m benchmarks.profile.planted [NAME ...]`: what each fix gains, and how long each clean program takes."""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial

import torch

from benchmarks.profile.planted import CLEAN, PLANTED
from benchmarks.timing import paired


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    small = []
    for program in PLANTED:
        if names and program.name not in names and program.analysis not in names:
            continue
        ratio = paired(
            partial(program.run, program.steps),
            partial(program.fixed, program.steps),
            rounds=6,
            warmup=1,
            order="AB",
            clock=program.clock,
        )
        low, high = ratio.interval
        print(
            f"{program.analysis:16} {program.name:22} {ratio.median:6.2f}x ({low:.2f} to {high:.2f})"
            f"  {ratio.a_seconds:.2f} s, fixed {ratio.b_seconds:.2f} s",
            flush=True,
        )
        if ratio.median < 1.05:
            small.append(program.name)
    for program in CLEAN:
        if not names or program.name in names or "clean" in names:
            program.run(1)
            times = [_seconds(partial(program.run, program.steps)) for _ in range(3)]
            print(f"clean            {program.name:22} {statistics.median(times):.2f} s", flush=True)
    if small:
        print(f"their fix gains less than 5%: {', '.join(small)}")
    return int(bool(small))


def _seconds(run: partial[object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
