"""LARS and LAMB: right against references and timm's, and what a step costs beside torch's fused SGD."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.harness import Bar, Deadline, Measured, NotRun, paired
from benchmarks.optim.references import STEPS, furthest, grouped, lambed, larsed, problem, train
from shoestring.optim.layerwise import Lamb, Lars
from shoestring.optim.trust import DynamicBound

TIMM = "timm==1.0.31"
SHAPES = [(512, 512)] * 40 + [(512, 2048)] * 20 + [(512,)] * 100 + [(1024, 256)] * 40
"""Of 200 tensors, 42 million elements."""
ROUNDS = 25


def against_references(_: Deadline) -> Measured:
    """The largest deviation in float64, of LARS in all its forms and of LAMB and LAMBC."""
    found: dict[str, float] = {}
    for inside in (True, False):
        for nesterov in (True, False):
            for larc in (True, False):
                how: dict[str, Any] = {"momentum": 0.9, "nesterov": nesterov, "trust": 0.02}
                wanted = larsed(*problem(), [2.0, 0.05], decay=0.01, inside=inside, larc=larc, **how)
                weights, gradients = problem()
                clip = "larc" if larc else "none"
                ours = Lars(grouped(weights), weight_decay=0.01, rate_in_velocity=inside, clip=clip, **how)
                names = {"rate inside": inside, "Nesterov": nesterov, "LARC": larc}
                name = ", ".join(["LARS", *(key for key, on in names.items() if on)])
                found[name] = furthest(train(ours, weights, gradients, [2.0, 0.05]), wanted)
    for most, name in ((10.0, "LAMB"), (1.0, "LAMBC")):
        wanted = lambed(*problem(), 0.02, decay=0.01, most=most)
        weights, gradients = problem()
        ours = Lamb(grouped(weights), weight_decay=0.01, max_ratio=most)
        found[name] = furthest(train(ours, weights, gradients, [0.02, 0.02]), wanted)
    said = ", ".join(f"{name} {value:.1e}" for name, value in found.items())
    return Measured(max(found.values()), f"{STEPS} steps with a warm-up; {said}")


def against_timm(_: Deadline) -> Measured | NotRun:
    """The largest deviation in float64 from timm's, at settings that it has."""
    with TemporaryDirectory() as folder:
        try:
            lars, lamb = (_timm(Path(folder), name) for name in ("lars", "lamb"))
        except (subprocess.SubprocessError, OSError) as error:
            return NotRun(f"{TIMM} cannot be had: {error}")
    found: dict[str, float] = {}
    for larc in (False, True):
        ours: Callable[[Any], Optimizer] = lambda groups, larc=larc: Lars(  # noqa: E731
            groups, momentum=0.9, trust=0.02, rate_in_velocity=False, clip="larc" if larc else "none"
        )
        theirs: Callable[[Any], Optimizer] = lambda groups, larc=larc: lars.Lars(  # noqa: E731
            groups, lr=0.5, momentum=0.9, trust_coeff=0.02, trust_clip=larc
        )
        found["LARC" if larc else "LARS"] = _apart(ours, theirs, 0.5)
    for clip in (False, True):
        found["LAMBC" if clip else "LAMB"] = _apart(
            lambda groups, clip=clip: Lamb(groups, max_ratio=1.0 if clip else float("inf")),
            lambda groups, clip=clip: lamb.Lamb(groups, lr=0.02, max_grad_norm=None, trust_clip=clip),
            0.02,
        )
    said = ", ".join(f"{name} {value:.1e}" for name, value in found.items())
    return Measured(max(found.values()), f"{STEPS} steps with a warm-up; {said}")


def _apart(ours: Callable[[Any], Optimizer], theirs: Callable[[Any], Optimizer], lr: float) -> float:
    def run(build: Callable[[Any], Optimizer], mine: bool) -> list[torch.Tensor]:
        weights, gradients = problem()
        zero, kept = weights[-1], weights[:-1]  # timm's ratio of a weight of zeros is another

        def known(now: Any, step: int) -> list[torch.Tensor]:
            return gradients([*now, zero], step)[:-1]

        matrices, vectors = grouped(kept)
        matrices["weight_decay"] = 0.01
        if not mine:
            vectors.pop("adapts")  # what does not decay does not adapt there
        return train(build([matrices, vectors]), kept, known, [lr, lr])

    return furthest(run(ours, True), run(theirs, False))


def _timm(folder: Path, name: str) -> Any:
    """One file of timm's, as a module of a package of its own: timm itself wants torchvision."""
    package = "timm_optim"
    if package not in sys.modules:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), TIMM]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extractall(folder, [each for each in wheel.namelist() if each.startswith("timm/optim/")])
        sys.modules[package] = ModuleType(package)
        vars(sys.modules[package])["__path__"] = [str(folder / "timm" / "optim")]
    return import_module(f"{package}.{name}")


def step_time(_: Deadline) -> Measured:
    """Of a step of LARS over one of torch's fused SGD."""

    def stepper(build: Callable[[Any], Optimizer]) -> Callable[[], Any]:
        weights = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        for each in weights:
            each.grad = torch.randn_like(each)
        return build(weights).step

    def ours(clip: Any = "none") -> Callable[[], Any]:
        return stepper(lambda weights: Lars(grouped(weights), lr=1e-9, clip=clip))

    theirs = stepper(lambda weights: torch.optim.SGD(weights, 1e-9, momentum=0.9, weight_decay=1e-4, fused=True))
    found = paired(ours(), theirs, rounds=ROUNDS, warmup=3)
    bound = paired(ours(DynamicBound(0.5, 10.0, 100)), theirs, rounds=ROUNDS, warmup=3)
    lamb = paired(stepper(lambda weights: Lamb(grouped(weights), lr=1e-9)), theirs, rounds=ROUNDS, warmup=3)
    elements = sum(torch.Size(shape).numel() for shape in SHAPES)
    note = f"{len(SHAPES)} tensors, {elements / 1e6:.0f} M elements, {torch.get_num_threads()} threads; {found}; "
    return found.measured(note + f"with dynamic clipping {bound.median:.2f}, LAMB {lamb.median:.2f}")


def rows() -> list[Bar]:
    return [
        Bar(
            "optim.layerwise-reference",
            "largest deviation of LARS and LAMB from references in float64 after 100 steps, over a tensor's norm",
            "<=",
            1e-6,
            measure=against_references,
            kind="exact",
        ),
        Bar(
            "optim.layerwise-timm",
            "largest deviation of LARS, LARC, LAMB and LAMBC from timm's after 100 steps, over a tensor's norm",
            "<=",
            1e-6,
            measure=against_timm,
            peers=("timm",),
            kind="exact",
        ),
        Bar(
            "optim.lars-step",
            "time of a step of LARS over 200 tensors over that of torch's fused SGD",
            "<=",
            1.5,
            measure=step_time,
            baseline="torch's fused SGD",
        ),
    ]
