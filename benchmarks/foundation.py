"""The bars of the main job: the loop against a hand-written one, ranks against one, resumes, start, quality.

python -m benchmarks.foundation [--strict] [--only foundation.PREFIX] [--list]
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import loops
from benchmarks.calm import was_calm
from benchmarks.harness import Bar, Deadline, Measured, NotRun, main, paired
from benchmarks.intervals import of_median
from benchmarks.rows import Kind
from benchmarks.timing import commands_cpu_time
from shoestring import optim
from shoestring.core.compose import compose
from shoestring.core.job import Job
from shoestring.core.kept import Progress
from shoestring.core.world import World
from shoestring.models.gpt import tiny

ROOT = Path(__file__).parents[1]
SCENARIOS = ROOT / "tests" / "foundation"
PEERS = {"accelerate": loops.accelerate, "lightning": loops.lightning, "transformers": loops.trainer}
"""Loops of other tools, by the package that must be installed."""
STEPS, BATCH, SEQUENCE, VOCABULARY = 50, 4, 128, 2048
LR, WARMUP, CLIP = 4e-3, 5, 1.0


# -- the hand-written loop ---------------------------------------------------------------------------------------------


def _batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (steps, BATCH, SEQUENCE + 1), generator=generator)
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return tiny(vocab_size=VOCABULARY, context=SEQUENCE)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)


def _scale(total: int, step: int) -> float:
    """The factor of the learning rate: a warm-up, then half a cosine to a tenth."""
    done = (step - WARMUP) / (total - WARMUP)
    return (step + 1) / WARMUP if step < WARMUP else 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2


def _plain(model: nn.Module, data: Sequence[tuple[Tensor, Tensor]], total: int) -> Callable[[int, int], list[float]]:
    """The loop as one would write it; gives the losses of the steps asked for."""
    optimizer = _optimizer(model)

    def run(first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            inputs, targets = data[step % len(data)]
            for group in optimizer.param_groups:
                group["lr"] = LR * _scale(total, step)
            loss = F.cross_entropy(model(inputs).view(-1, VOCABULARY), targets.view(-1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    return run


def _ours(data: Sequence[tuple[Tensor, Tensor]], total: int) -> Callable[[int, int], list[float]]:
    features = [optim.AdamW(lr=LR), optim.Clip(max_norm=CLIP), optim.Schedule(warmup=WARMUP)]
    job = compose(Job(_model(), progress=Progress(total=total), world=World()), features)
    return lambda first, last: [float(job.step(data[step % len(data)])) for step in range(first, last)]


def bit_identical(_: Deadline) -> float:
    data = _batches(STEPS)
    plain, ours = _plain(_model(), data, STEPS)(0, STEPS), _ours(data, STEPS)(0, STEPS)
    return sum(one == other for one, other in zip(plain, ours, strict=True))


def throughput(other: str, _: Deadline) -> Measured | NotRun:
    """Tokens a second over those of a loop by hand, or of another tool's, one of `PEERS`."""
    rounds, warmup, at_once = 60, 2, 3  # with 12, the interval is wider than what is looked for
    if other and find_spec(other) is None:
        return NotRun(f"{other} is not installed: `pip install {other}`")
    total = (2 * rounds + warmup) * at_once + 1
    data = _batches(8)
    if other:
        recipe = {"optimizer": _optimizer, "scale": partial(_scale, total), "clip": CLIP, "steps": total}
        theirs = PEERS[other](_model(), data, at_once, recipe)
    else:
        theirs = partial(next, _in_turn(_plain(_model(), data, total), at_once))
    if other in ("", "accelerate"):
        ours = partial(next, _in_turn(_ours(data, total), at_once))
    else:
        turns, step = loops.Turns(range(total), at_once, total), _ours(data, total)
        ours = turns.start(lambda: [step(number, number + 1) for number in turns])
    return paired(theirs, ours, rounds=rounds, warmup=warmup).measured()


def _in_turn(loop: Callable[[int, int], list[float]], at_once: int) -> Iterator[list[float]]:
    done = 0
    while True:
        yield loop(done, done + at_once)
        done += at_once


# -- two ranks ---------------------------------------------------------------------------------------------------------


@cache
def scenarios() -> dict[str, Any]:
    """What the tests' launch of two ranks writes."""
    sys.path.insert(0, str(SCENARIOS))
    import ranks  # pyrefly: ignore[missing-import]

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        ranks.run(SCENARIOS / "scenarios.py", str(out), size=2, local_size=2)
        return json.loads(out.read_text())


def _difference(runs: Sequence[str], reference: str) -> Measured:
    losses = scenarios()["equality"]
    worst = {run: max(abs(a - b) / abs(b) for a, b in zip(losses[run], losses[reference], strict=True)) for run in runs}
    return Measured(max(worst.values()), ", ".join(f"{run} {value:.1e}" for run, value in worst.items()))


def two_ranks(_: Deadline) -> Measured:
    return _difference(["one accumulating", "ddp", "ddp accumulating"], "one")


def sharded(_: Deadline) -> Measured:
    return _difference(["fsdp", "fsdp accumulating"], "ddp")


def golden(_: Deadline) -> Measured:
    made, stored = scenarios()["golden"], json.loads((ROOT / "tests" / "golden" / "losses.json").read_text())
    pairs = [(a, b) for ranks in ("one", "two") for a, b in zip(made[ranks], stored[ranks], strict=True)]
    alike = "the same" if made["fingerprint"] == stored["fingerprint"] else "another"
    return Measured(max(abs(a - b) / abs(b) for a, b in pairs), f"{alike} fingerprint as recorded")


def resumed(_: Deadline) -> Measured:
    cases = scenarios()["resumes"]
    differing = [
        name
        for name, case in cases.items()
        if case["again"]["save"] != case["through"]["save"]
        or any(loss != case["through"]["losses"][step] for step, loss in case["again"]["losses"].items())
    ]
    return Measured(len(differing), "; ".join(differing or cases))


def samples(_: Deadline) -> Measured:
    """Samples of the first epoch that were not seen exactly once when 2 ranks became 1 and then 2 again."""
    parts = scenarios()["changing"]
    steps = [sorted(chain(*ids)) for part in parts for ids in zip(*[rank for rank in part if rank], strict=True)]
    epoch = list(chain(*steps))[:48]
    return Measured(sum(epoch.count(sample) != 1 for sample in range(48)), f"{len(steps)} steps, 48 samples an epoch")


# -- the command line and the quickstart -------------------------------------------------------------------------------


def _shoestring(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, check=True, text=True, capture_output=True, **more)


def processor_seconds(verb: Sequence[str], alone: str, what: str, rounds: int, _: Deadline) -> Measured:
    """Processor seconds of a command, in turns with a program that tells how fast the machine is.

    Args:
        alone: code of the program. what: what it does, for the note.
    """
    own, beside = [], []
    while len(own) < rounds:
        began = commands_cpu_time()
        _shoestring("-m", "shoestring", *verb)
        between = commands_cpu_time()
        _shoestring("-c", alone)
        ended = commands_cpu_time()
        if was_calm():
            own.append(between - began)
            beside.append(ended - between)
    return of_median(own, f"{what} alone takes {median(beside):.2f} s")


help_seconds = partial(processor_seconds, ["--help"], "import numpy", "importing numpy", 15)
check_seconds = partial(
    processor_seconds,
    ["check", "quickstart"],
    "import torch; torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0).step()",
    "importing torch and making an optimizer",
    9,
)


def help_without_torch(_: Deadline) -> float:
    code = "import sys, shoestring.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
    return int(_shoestring("-c", code + "print('torch' in sys.modules)").stdout.splitlines()[-1] == "False")


def quickstart(run: Path | None, _: Deadline) -> Measured | NotRun:
    """The 5-gram's bits per byte minus the model's, of a run folder or of a new run."""
    with tempfile.TemporaryDirectory() as folder:
        path = run or Path(folder) / "run"
        if run is None:
            _shoestring("-m", "shoestring", "train", "quickstart", "--workers", "auto", "--run.folder", str(path))
        summary = json.loads((path / "summary.json").read_text())
    if not summary["baselines"]:
        return NotRun("the run has no baselines")
    ours, theirs = summary["bits_per_byte"]["held out"], summary["baselines"]["5-gram (Witten-Bell)"]
    others = ", ".join(f"{name} {value:.3f}" for name, value in summary["baselines"].items())
    note = f"held out {ours:.3f}, training {summary['bits_per_byte']['training']:.3f}; {others}"
    return Measured(theirs - ours, f"{note}; {summary['tokens']:,} tokens in {summary['seconds']:.0f} s")


def rows(run: Path | None = None) -> list[Bar]:
    def bar(
        name: str,
        what: str,
        op: Any,
        value: float,
        measure: Callable[..., Any],
        baseline: str = "",
        kind: Kind = "exact",
    ) -> Bar:
        named = f"foundation.{name}"
        return Bar(named, what, op, value, measure=measure, baseline=baseline, peers=("torch",), kind=kind)

    plain = "a hand-written PyTorch loop"
    return [
        bar("bit-identical", f"losses of {STEPS} steps that are bit-identical", ">=", STEPS, bit_identical, plain),
        bar(
            "throughput",
            "tokens per second over those of the loop",
            ">=",
            0.98,
            partial(throughput, ""),
            plain,
            "timed",
        ),
        *(
            replace(
                bar(
                    f"throughput-{name}",
                    "tokens per second over those of the loop",
                    ">=",
                    1.0,
                    partial(throughput, name),
                ),
                baseline={"transformers": "transformers' Trainer", "lightning": "Lightning's Trainer"}.get(name, name),
                peers=("torch", name),
                kind="timed",
            )
            for name in PEERS
        ),
        bar("two-ranks", "largest relative difference of a loss, 20 steps, fp32", "<=", 1e-5, two_ranks, "one rank"),
        bar("fsdp", "largest relative difference of a loss, 20 steps, fp32", "<=", 1e-5, sharded, "DDP"),
        bar("golden", "largest relative difference of 100 losses", "<=", 1e-4, golden, "tests/golden/losses.json"),
        bar("resume-bitwise", "cases that do not resume bit for bit on equal ranks", "<=", 0, resumed),
        bar("resume-samples", "samples not seen exactly once on 2, 1, 2 ranks", "<=", 0, samples),
        bar("help-seconds", "processor seconds of `shoestring --help`", "<=", 0.3, help_seconds, kind="timed"),
        bar(
            "check-seconds",
            "processor seconds of `shoestring check quickstart`",
            "<=",
            2.2,
            check_seconds,
            kind="timed",
        ),
        bar("help-torch", "`shoestring --help` imports no torch (1 is yes)", ">=", 1, help_without_torch),
        replace(
            bar("quickstart", "bits per byte better than the 5-gram, held out", ">=", 0.0, partial(quickstart, run)),
            baseline="Witten-Bell 5-gram on the same files",
            command="make train",
            kind="drawn",
        ),
    ]


def command_line(arguments: list[str]) -> int:
    """`--run FOLDER` takes the quickstart's figures from a run that is there."""
    run = None
    if "--run" in arguments:
        at = arguments.index("--run")
        run = Path(arguments[at + 1]).absolute()
        del arguments[at : at + 2]
    return main("foundation", partial(rows, run), arguments)


if __name__ == "__main__":
    sys.exit(command_line(sys.argv[1:]))
