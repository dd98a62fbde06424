"""One rank of a pair: python -m benchmarks.parallel.plan_worker OUT PAIR QUOTA-GROUP, under torchrun.

Plans the run, predicts the plans by hand, and times all of them in blocks in which their steps alternate. A pair that
is not measured is predicted only; its seconds are the predicted ones. The first rank writes OUT.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

import shoestring as ss
from benchmarks.parallel.pairs import Pair, merged
from benchmarks.parallel.planning import BEST, pair_named
from benchmarks.parallel.quotas import join
from shoestring.core.trace import Trace
from shoestring.core.world import World
from shoestring.planner.outlook import look
from shoestring.planner.search import chosen
from shoestring.planner.trying import for_trial
from shoestring.run import Run, parse
from shoestring.training.build import build_job, build_loader
from shoestring.training.data_loading import DataSets, open_data, to_device
from shoestring.training.user_code import UserCode, import_user_code
from shoestring.verbs.plan import plan

BLOCKS = 5


def main(out: Path, pair: Pair, group: str) -> None:
    join(group)
    limit = {"memory": {"budget": {"gib": pair.gib}}} if pair.gib else {}
    run = parse(merged(pair.run, limit))
    by_hand = {name: parse(pair.document(name)) for name in pair.plans}
    with ss.join() as world, ExitStack() as stack:
        plain = parse(pair.run)
        code = import_user_code(plain)
        data = open_data(plain, world, out.parent / "data", code)
        stack.callback(data.close)
        planned = plan(run, world) if pair.measured else None
        outlook = look(plain, code, world, data, pair.gib)
        slowdown: Mapping[str, float] = {}
        if planned and planned.exchanged and planned.exchanged.chooser.measured:
            slowdown = planned.exchanged.chooser.measured.cluster().slowdown
        began = time.perf_counter()
        plans = outlook.plans(slowdown)
        searching = time.perf_counter() - began
        runs = by_hand | {BEST: planned.run if planned else outlook.search.file(chosen(plans))}
        predicted = {name: outlook.priced(one, slowdown).seconds for name, one in runs.items()}
        if planned and planned.choice is not None:
            predicted[BEST] = planned.predicted
        seconds = timed(runs, code, world, data) if planned else {name: [own] for name, own in predicted.items()}
        if world.first:
            told = {
                "predicted": predicted,
                "seconds": seconds,
                "searching": searching,
                "exchange": planned.exchanged.took if planned and planned.exchanged else 0.0,
                "chosen": str(outlook.priced(runs[BEST], slowdown)),
                "plans": len(plans),
            }
            out.write_text(json.dumps(told))


def timed(runs: Mapping[str, Run], code: UserCode, world: World, data: DataSets) -> dict[str, list[float]]:
    """Seconds of a step of each run, block by block, of the slowest rank."""
    with ExitStack() as stack:
        steps = {name: step_of(run, code, world, data, stack) for name, run in runs.items()}
        for step in steps.values():
            step()
            step()  # the first steps build buffers, and tell shapes
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(BLOCKS):
            for name, step in steps.items():
                step()  # a step behind another plan's is slower than one behind its own, as all are in training
                dist.barrier()
                began = time.perf_counter()
                step()
                dist.barrier()
                seconds[name].append(time.perf_counter() - began)
    return seconds


def step_of(run: Run, code: UserCode, world: World, data: DataSets, stack: ExitStack) -> Callable[[], object]:
    """A step of a job of its own."""
    run = for_trial(run, world)
    job = stack.enter_context(build_job(run, code, world, data, stack.enter_context(Trace(rank=world.rank))))
    loader = build_loader(job, data, run.settings, 0)
    stack.callback(loader.close)
    batches = iter(loader)
    job.model.train()
    return lambda: job.step(*(to_device(batch, world.device) for batch in next(batches)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), pair_named(sys.argv[2]), sys.argv[3])
