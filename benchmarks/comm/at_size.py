"""The contest at size: replicas in lockstep on one device, in parts that end in time and continue where they were.

python -m benchmarks.comm.at_size [--folder FOLDER] [--minutes 9] [--trial]

Each run is a method at a rate of learning and a seed. FOLDER has its state, which is replaced every so many steps, and
its curve once it is whole. A run that was cut off continues, so parts of ten minutes add up; the folder may be carried
to another machine. Bytes are counted, and times on a link are bytes over its rate, plus the latency of each
collective; nothing is sent.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.comm.contestant import CLIP, WARMUP, adamw
from benchmarks.comm.curves import final, steps_to
from benchmarks.comm.methods import BF16, DDP, Method, local, ours
from benchmarks.comm.setting import RANKS, Setting
from benchmarks.harness import Deadline, OutOfBudget
from benchmarks.machine import ROOT
from benchmarks.rows import Bar, Measured
from shoestring import comm
from shoestring.checkpoint.format.state import pack, unpack
from shoestring.comm.codecs.codec import Grads
from shoestring.comm.codecs.dense import DenseCodec
from shoestring.comm.codecs.lockstep import run_lockstep
from shoestring.comm.codecs.traffic import WireBytes
from shoestring.comm.local.fragments import Fragment
from shoestring.testing.netlab.links import bits_per_second

LINKS = ("1gbit", "100mbit")
LATENCY = 0.5e-3  # seconds of one collective between hosts of a local network, as Gloo's small ones take
HIDDEN = 2 / 3  # of a step's computing, its backward pass, beside which an exchange at every step travels


@dataclass(frozen=True, kw_only=True)
class AtSize:
    """What is run; the methods are compared at rates of learning that each is tuned to on a seed of its own."""

    setting: Setting = field(
        default_factory=lambda: Setting(dim=512, layers=9, heads=8, hidden=1408, sequence=256, batch=32)
    )
    """30 M parameters."""
    steps: int = 1000
    most: int = 2
    """Times as many steps that a method is given."""
    look: int = 25
    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3)
    tuning_steps: int = 200
    tuning_seed: int = 100
    seed: int = 31
    save: int = 100
    """Steps between two times that a run's state is written."""
    peers: tuple[Method, ...] = (DDP, BF16, local("DiLoCo", "DiLoCo", every=30))
    own: tuple[Method, ...] = (
        ours("Quantize 4 feedback", "Quantize", bits=4, rounding="nearest", feedback=True),
        ours("PowerSGD r8 alternate", "PowerSGD", rank=8, alternate=True),
        local("LocalSGD H=4 sign", "LocalSGD", every=4, codec="sign"),
        local("SparseLoCo H=8", "SparseLoCo", every=8),
    )


LARGE = AtSize(setting=Setting(dim=896, layers=12, heads=14, hidden=2432, sequence=256, batch=32))  # 119 M
TRIAL = AtSize(
    setting=Setting(dim=16, layers=1, heads=2, hidden=32, sequence=16, batch=8, held_out=8),
    steps=8,
    look=2,
    rates=(1e-3,),
    tuning_steps=4,
    save=3,
    peers=(DDP, local("DiLoCo", "DiLoCo", every=3)),
    own=(ours("Quantize 4 feedback", "Quantize", bits=4, rounding="nearest", feedback=True),),
)


class Replicas:
    """All ranks of one run, on one device. Those that exchange gradients at every step share one model."""

    def __init__(self, method: Method, size: AtSize, seed: int, folder: Path, device: torch.device) -> None:
        self.method, self.size, self.steps = method, size, 0
        settings: Any = None if method.dense else getattr(comm, method.feature)(**method.settings)
        self.settings = settings
        self.every = settings.every if method.local else 1
        plain = torch.bfloat16 if method.kind == "bf16" else None
        self.codecs = [DenseCodec(plain) if method.dense else settings.make_codec() for _ in range(RANKS)]
        self.models = [size.setting.model(seed).to(device) for _ in range(RANKS if method.local else 1)]
        self.optimizers = [adamw(model, method.lr) for model in self.models]
        with torch.no_grad():
            self.outer = [
                Fragment(dict(model.named_parameters()), settings.outer[1] > 0) for model in self.models if method.local
            ]
        self.batches = [size.setting.batches(folder, rank, RANKS, seed) for rank in range(RANKS)]
        self.examples = move(size.setting.examples(folder, 0, 1), device)
        self.device = device
        self.sent, self.collectives = 0.0, 0  # of one rank, so far
        self.computing = self.coding = 0.0  # seconds of one rank, so far

    def step(self) -> None:
        began = self._now()
        grads = [self._backward(rank) for rank in range(RANKS)]
        computed = self._now()
        if not self.method.local:
            self._count(run_lockstep(self.codecs, grads, self.steps))
            for name, parameter in self.models[0].named_parameters():
                parameter.grad = grads[0][name]
        coded = self._now()
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = self.method.lr * min(1.0, (self.steps + 1) / WARMUP)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        stepped = self._now()
        if self.method.local and self.steps % self.every == 0:
            self._merge()
        self.computing += (computed - began) / RANKS + (stepped - coded) / len(self.models)
        self.coding += (coded - computed + self._now() - stepped) / RANKS

    def _backward(self, rank: int) -> Grads:
        """One rank's gradients; they stay where its own model has them if it has one."""
        model, batch = self.models[rank % len(self.models)], move(next(self.batches[rank]), self.device)
        F.cross_entropy(model(batch["inputs"]).flatten(0, 1).float(), batch["targets"].flatten()).backward()
        if self.method.local:
            return {}
        grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        model.zero_grad()
        return grads

    @torch.no_grad()
    def _merge(self) -> None:
        means = [outer.anchor - outer.flat() for outer in self.outer]
        named = [outer.split_named(mean) for outer, mean in zip(self.outer, means, strict=True)]
        self._count(run_lockstep(self.codecs, named, self.steps // self.every))
        for outer, mean in zip(self.outer, means, strict=True):
            outer.step_outer(mean, *self.settings.outer)
            outer.adopt()

    def _count(self, wire: WireBytes) -> None:
        self.sent += wire.sent(RANKS)
        self.collectives += sum(len(stage) for stage in wire.stages)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @torch.no_grad()
    def held_out(self) -> float:
        """The loss of the mean weights, nats a token."""
        own = [[parameter.clone() for parameter in model.parameters()] for model in self.models[:1]]
        for parameters in zip(*(model.parameters() for model in self.models), strict=True):
            parameters[0].copy_(torch.stack(parameters).mean(0))
        output = self.models[0](self.examples["inputs"])
        loss = F.cross_entropy(output.flatten(0, 1).float(), self.examples["targets"].flatten())
        for parameter, kept in zip(self.models[0].parameters(), own[0], strict=True):
            parameter.copy_(kept)
        return float(loss)

    def state_dict(self) -> dict[str, Any]:
        return {
            "models": [model.state_dict() for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "codecs": [codec.state_dict() for codec in self.codecs],
            "outer": [[outer.anchor, outer.velocity] for outer in self.outer],
            "counts": [self.steps, self.sent, self.collectives, self.computing, self.coding],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for own, saved in (("models", self.models), ("optimizers", self.optimizers), ("codecs", self.codecs)):
            for each, of in zip(saved, state[own], strict=True):
                each.load_state_dict(to_device(of, self.device) if own == "codecs" else of)
        for outer, (anchor, velocity) in zip(self.outer, state["outer"], strict=True):
            outer.anchor = anchor.to(self.device)
            outer.velocity = None if velocity is None else velocity.to(self.device)
        self.steps, self.sent, self.collectives, self.computing, self.coding = state["counts"]
        for batches in self.batches:
            for _ in range(self.steps):
                next(batches)


def move(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def to_device(state: Any, device: torch.device) -> Any:
    """The same nested state, with its tensors on a device."""
    if isinstance(state, dict):
        return {key: to_device(value, device) for key, value in state.items()}
    return state.to(device) if isinstance(state, Tensor) else state


@dataclass
class AtSizeContest:
    """Runs, and what comes of them; `check` raises when the time of this part is up."""

    size: AtSize
    folder: Path
    device: torch.device
    deadline: Deadline

    def run(self, method: Method, seed: int, steps: int) -> dict[str, Any]:
        """A whole run: its curve, and bytes, collectives and seconds of a step; continued where it was."""
        key = f"{method.name}-{method.lr:g}-{seed}-{steps}".replace(" ", "_").replace("=", "")
        done, part = self.folder / f"{key}.json", self.folder / f"{key}.safetensors"
        if done.exists():
            return json.loads(done.read_text())
        tokens = self.folder / "tokens"
        self.size.setting.corpus(tokens)
        replicas, curve = Replicas(method, self.size, seed, tokens, self.device), []
        if part.exists():
            state = unpack(part.read_bytes())
            replicas.load_state_dict(state["replicas"])
            curve = [tuple(point) for point in state["curve"]]
        while replicas.steps < steps:
            if replicas.steps % self.size.look == 0 and (not curve or curve[-1][0] < replicas.steps):
                curve.append((replicas.steps, replicas.held_out()))
            if replicas.steps % self.size.save == 0 and replicas.steps:
                aside = part.with_suffix(".new")
                aside.write_bytes(pack({"replicas": replicas.state_dict(), "curve": curve}))
                aside.replace(part)
                self.deadline.check()
            replicas.step()
        curve.append((replicas.steps, replicas.held_out()))
        a_step = {name: getattr(replicas, name) / steps for name in ("sent", "collectives", "computing", "coding")}
        done.write_text(json.dumps({"method": method.name, "lr": method.lr, "held_out": curve, **a_step}))
        part.unlink(missing_ok=True)
        return json.loads(done.read_text())

    def tuned(self, method: Method) -> Method:
        """At the rate of learning with the lowest loss on the seed for choosing."""
        size = self.size
        runs = {lr: self.run(method.at(lr), size.tuning_seed, size.tuning_steps)["held_out"] for lr in size.rates}
        return method.at(min(runs, key=lambda lr: final(runs[lr], size.tuning_steps)))

    def efficiency(self, method: Method, link: str) -> float:
        """Steps of DDP that a step is worth, over the time that it takes in steps without communication.

        A method that does not get to DDP's loss counts as having got there with its last step.
        """
        dense = self.run(self.tuned(DDP), self.size.seed, self.size.steps)
        most = self.size.most * self.size.steps
        found = dense if method.dense else self.run(self.tuned(method), self.size.seed, most)
        target = final(dense["held_out"], self.size.steps)
        worth = 1.0 if method.dense else self.size.steps / (steps_to(found["held_out"], target) or most)
        return worth * dense["computing"] / self.seconds(found, method, link, dense["computing"])

    def seconds(self, run: dict[str, Any], method: Method, link: str, computing: float) -> float:
        """Of a step on a link: an exchange at every step travels beside the backward pass, a merge by itself."""
        wire = 8 * run["sent"] / bits_per_second(link) + LATENCY * run["collectives"]
        hidden = 0.0 if method.local else HIDDEN * computing
        return computing + run["coding"] + max(0.0, wire - hidden)

    def ahead(self, link: str) -> Measured:
        """The best of ours over the best peer."""
        found = {method.name: self.efficiency(method, link) for method in (*self.size.peers, *self.size.own)}
        best = max(found[method.name] for method in self.size.own)
        peer = max(found[method.name] for method in self.size.peers)
        said = "; ".join(f"{name} {value:.3g}" for name, value in found.items())
        parameters = sum(each.numel() for each in self.size.setting.model(0).parameters())
        return Measured(best / peer, f"{parameters / 1e6:.0f} M parameters, {RANKS} ranks, to DDP's loss: {said}")


def measure(link: str, deadline: Deadline) -> Measured:
    """A part of the contest, and its result once all runs are whole.

    Raises:
        OutOfBudget: they are not; the next call continues.
    """
    folder = ROOT / ".cache" / "comm-at-size"
    folder.mkdir(parents=True, exist_ok=True)
    return AtSizeContest(AtSize(), folder, torch.device("cuda"), deadline).ahead(link)


def rows() -> list[Bar]:
    """Bars that need a GPU."""
    return [
        Bar(
            f"comm.at-size-{link.removesuffix('bit')}",
            f"time-to-loss efficiency of the best of ours over the best peer, 30 M parameters, {link}/s; in lockstep",
            ">=",
            1.0,
            measure=partial(measure, link),
            baseline="DDP fp32, DDP bf16 hook, DiLoCo (outer 0.7, 0.9)",
            seeds=(AtSize().seed,),
            gpu=True,
        )
        for link in LINKS
    ]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comm.at_size")
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / "comm-at-size")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--large", action="store_true", help="119 M parameters in the place of 30 M")
    parser.add_argument("--trial", action="store_true")
    flags = parser.parse_args(argv)
    flags.folder.mkdir(parents=True, exist_ok=True)
    size = TRIAL if flags.trial else LARGE if flags.large else AtSize()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    contest = AtSizeContest(size, flags.folder, device, Deadline(60 * flags.minutes))
    try:
        for link in LINKS:
            print(link, contest.ahead(link))
    except OutOfBudget:
        print("not whole yet: call it again to continue", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
