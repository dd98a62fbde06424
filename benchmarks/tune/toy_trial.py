"""A trial without torch: a recurrence that saves every few steps, as `shoestring train` does.

`python toy_trial.py FOLDER X STEPS EVERY PAUSE`: its loss after STEPS steps is a function of X alone. Every step
that is computed, also a repeated one, is a line of steps.log.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

# -- the same function for those who check it


def advance(state: float, x: float, step: int) -> float:
    return 0.9 * state + (x - 0.3) ** 2 + step * 1e-3


def undisturbed(x: float, steps: int) -> float:
    state = 1.0
    for step in range(1, steps + 1):
        state = advance(state, x, step)
    return state


def train(
    folder: Path, x: float, steps: int, every: int, pause: float, stopping: Sequence[int] = ()
) -> Iterator[tuple[int, float]]:
    """Continue from the checkpoint in `folder`, if there is one; yields step and loss after each checkpoint.

    Args:
        pause: seconds of a step.
        stopping: saves at once, after any step, while it is not empty.
    """
    checkpoint = folder / "checkpoint.json"
    step, state = json.loads(checkpoint.read_text()) if checkpoint.exists() else (0, 1.0)
    with (folder / "steps.log").open("a") as log:
        while step < steps:
            time.sleep(pause)
            step += 1
            state = advance(state, x, step)
            log.write(f"{step}\n")
            log.flush()
            if step % every == 0 or step == steps or stopping:
                aside = folder / f"checkpoint.{os.getpid()}"
                aside.write_text(json.dumps([step, state]))
                aside.replace(checkpoint)
                yield step, state


def main(at: str, x: float, steps: int, every: int, pause: float) -> int:
    folder = Path(at)
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
    with (folder / "metrics.jsonl").open("a") as metrics:
        for step, state in train(folder, x, steps, every, pause, stopping):
            metrics.write("\n" + json.dumps({"step": step, "loss": state}) + "\n")
            metrics.flush()
            if stopping and step < steps:
                return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])))
