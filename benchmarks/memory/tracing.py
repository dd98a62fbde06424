"""Tracing: how much of the peak has a name, what tracing costs, and whether planted tensors are found."""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache
from itertools import accumulate

import torch
from torch import nn
from torch._C._autograd import DeviceType

from benchmarks.harness import Bar, Measured, Paired, run_command
from benchmarks.machine import ROOT
from benchmarks.memory.programs import PROGRAMS, Program, build
from shoestring.memory import traced
from shoestring.memory.tracing.comparison import compare
from shoestring.memory.tracing.recorder import AllocationRecorder
from shoestring.memory.tracing.recording import BlockName, MemoryProfile

STEPS, ROUNDS = 4, 12
PLANTS = ("parameter", "buffer", "activation", "optimizer state", "line")
SEEDS = tuple(range(20))


@cache
def accounts() -> dict[str, tuple[MemoryProfile, int]]:
    """Of each program its recording, and the most bytes by torch's own events, as its profiler saw them meanwhile."""
    found = {}
    for name in PROGRAMS:
        gc.collect()
        with torch.profiler.profile(profile_memory=True) as profile:
            recorder = AllocationRecorder()
            recorder.start()
            program = build(name)
            for _ in range(3):
                program.step()
            recording = recorder.stop()
        assert profile.profiler is not None and profile.profiler.kineto_results is not None
        events = profile.profiler.kineto_results.events()
        cpu = [event for event in events if event.name() == "[memory]" and event.device_type() == DeviceType.CPU]
        sizes = (event.nbytes() for event in cpu)  # pyrefly: ignore[missing-attribute]
        found[name] = recording, max(accumulate(sizes))
        del program
    return found


def named() -> Measured:
    """The least share of torch's bytes at the peak that have a name."""
    shares = {}
    for name, (recording, theirs) in accounts().items():
        kinds = recording.main.by_kind()
        shares[name] = (sum(kinds.values()) - kinds.get("unnamed", 0)) / theirs
    return Measured(min(shares.values()), _each(shares))


def unnamed_activations() -> Measured:
    """The largest share of activations without a module or line, or without an operator."""
    shares = {}
    for name, (recording, _) in accounts().items():
        held = [each for each in recording.main.held() if each.name.kind in ("activation", "unnamed")]
        missing = sum(each.nbytes for each in held if not (each.name.name and each.name.operator))
        shares[name] = missing / sum(each.nbytes for each in held)
    return Measured(max(shares.values()), _each(shares))


def time_of_traced_steps() -> Measured:
    """The largest ratio of processor time, with tracing over without, in turns in one process."""
    ratios = {name: _traced_over_plain(build(name)) for name in PROGRAMS}
    worst = max(ratios, key=lambda name: ratios[name].median)
    return ratios[worst].measured(f"{worst}: {ratios[worst]}")


def _traced_over_plain(program: Program) -> Paired:
    def timed() -> float:
        program.step()
        began = time.process_time()
        for _ in range(STEPS):
            program.step()
        return time.process_time() - began

    ratios, samples = [], ([], [])
    for number in range(ROUNDS + 1):
        for turn in (0, 1) if number % 2 else (1, 0):
            gc.collect()
            if turn:
                recorder = AllocationRecorder()
                recorder.start()
                samples[turn].append(timed())
                recorder.stop()
            else:
                samples[turn].append(timed())
        if number:
            ratios.append(samples[1][-1] / samples[0][-1])
    return Paired(tuple(ratios), statistics.median(samples[1]) / STEPS, statistics.median(samples[0]) / STEPS)


_CHILD = "from benchmarks.memory.tracing import seconds_afterwards; print(seconds_afterwards({}))"


def seconds_afterwards(record: bool) -> float:
    """The least processor seconds of a step of the GPT, after a recording has ended or without one."""
    program, best = build("gpt"), float("inf")
    for _ in range(2):
        if record:
            with traced():
                program.step()
        else:
            program.step()
    for _ in range(40):
        began = time.process_time()
        program.step()
        best = min(best, time.process_time() - began)
    return best


def time_of_untraced_steps() -> Measured:
    """The ratio of processes that have recorded before over those that have not."""
    ratios, samples = [], ([], [])
    for number in range(6):
        for turn in (0, 1) if number % 2 else (1, 0):
            said = run_command([sys.executable, "-c", _CHILD.format(bool(turn))], cwd=ROOT)
            samples[turn].append(float(said))
        ratios.append(samples[1][-1] / samples[0][-1])
    return Paired(tuple(ratios), statistics.median(samples[1]), statistics.median(samples[0])).measured()


def told_apart() -> Measured:
    """Of 20 tensors, planted in a module or beside the model, how many are the first change that is named."""
    missed = []
    for seed in SEEDS:
        plant = PLANTS[seed % len(PLANTS)]
        program = build("gpt", seed)
        before = _recorded(program)
        del program
        gc.collect()  # what is alive when a recording begins has no name, if it is of a model that is gone
        program = build("gpt", seed)
        expected = _plant(program, plant, random.Random(seed))
        changes = compare(before, _recorded(program)).changes
        found = changes[0].name if changes else BlockName("", "")
        if not expected(found):
            missed.append(f"{plant} with seed {seed}: {found}")
        del program, expected
        gc.collect()
    return Measured(1 - len(missed) / len(SEEDS), "; ".join(missed))


def _recorded(program: Program) -> MemoryProfile:
    with traced() as memory:
        for _ in range(3):
            program.step()
    return memory.profile


def _plant(program: Program, plant: str, draw: random.Random) -> Callable[[BlockName], bool]:
    """Let the program hold one more tensor; returns whether a name is its own."""
    modules = dict(program.model.named_modules())
    path = draw.choice(
        [name for name, module in modules.items() if isinstance(module, nn.Linear) and "lm_head" not in name]
    )
    module, size = modules[path], draw.randrange(50_000, 400_000)
    if plant == "parameter":
        module.register_parameter("planted", nn.Parameter(torch.zeros(size)))
        return lambda name: name[:2] == ("parameter", f"{path}.planted")
    if plant == "buffer":
        module.register_buffer("planted", torch.zeros(size))
        return lambda name: name[:2] == ("buffer", f"{path}.planted")
    if plant == "optimizer state":
        program.step()
        parameter = module.get_parameter("weight")
        program.optimizer.state[parameter]["planted"] = torch.zeros(size)
        return lambda name: name[:2] == ("optimizer state", f"{path}.weight.planted")
    if plant == "activation":
        forward, held = module.forward, []

        def holding(x: torch.Tensor) -> torch.Tensor:
            held[:] = [torch.zeros(size)]
            return forward(x)

        module.forward = holding
        return lambda name: name[:2] == ("activation", path)
    program.beside = lambda: torch.zeros(size)
    return lambda name: name.kind == "other" and name.name.startswith("memory/tracing.py:")


def _each(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.4f}" for name, share in shares.items())


def rows() -> list[Bar]:
    """The bars of tracing."""
    three = "a GPT, a ResNet and a Hugging Face Llama"
    return [
        Bar(
            "memory.tracing-named",
            f"sum of the named bytes at the peak over the most bytes by torch's own events, least of {three}",
            ">=",
            0.98,
            lambda _: named(),
            peers=("transformers",),
            kind="exact",
        ),
        Bar(
            "memory.tracing-unnamed",
            f"share of activations at the peak without module or line and operator, most of {three}",
            "<=",
            0.02,
            lambda _: unnamed_activations(),
            peers=("transformers",),
            kind="exact",
        ),
        Bar(
            "memory.tracing-time",
            f"processor time of a traced step over that of one that is not, in turns, most of {three}",
            "<=",
            1.3,
            lambda _: time_of_traced_steps(),
            peers=("transformers",),
        ),
        Bar(
            "memory.tracing-off",
            "processor time of a step after a recording has ended, over that in processes that never recorded",
            "<=",
            1.01,
            lambda _: time_of_untraced_steps(),
        ),
        Bar(
            "memory.tracing-planted",
            "two runs of a GPT that differ in one planted tensor (a parameter, buffer, activation, optimizer state, or "
            "beside the model): share of 20 in which the first change of the comparison is named as that tensor",
            ">=",
            1.0,
            lambda _: told_apart(),
            seeds=SEEDS,
            kind="exact",
        ),
    ]
