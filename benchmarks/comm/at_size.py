"""The contest at size: replicas in lockstep on one device, in parts that end in time and continue where they were.

python -m benchmarks.comm.at_size [--folder FOLDER] [--work WORK] [--minutes 9] [--passes HOW] [--check] …

Each run is a method at a rate of learning and a seed. FOLDER gets its curve once it is whole, a small file. WORK has
the tokens, and the state of a run that the end of the time has cut off, which the next call continues. Bytes are
counted, and times on a link are bytes over its rate, plus the latency of each collective; nothing is sent. Computing is
timed on this device.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from benchmarks.comm.curves import WINDOW, final, steps_to
from benchmarks.comm.methods import BF16, DDP, TORCH, Method, local, muon
from benchmarks.comm.replicas import Passes, Replicas, SeedData
from benchmarks.comm.setting import RANKS, Setting
from benchmarks.harness import Deadline, Environment, OutOfBudget, origin, used
from benchmarks.machine import ROOT
from benchmarks.rows import RESULTS, Bar, Measured
from shoestring.checkpoint.format.state import pack, unpack
from shoestring.core.errors import ConfigError
from shoestring.data import Data
from shoestring.data.corpus import prepare_source
from shoestring.data.tokens import read_header
from shoestring.storage.whole import write_atomic
from shoestring.testing.netlab.links import bits_per_second

LINKS = ("1gbit", "100mbit")
LATENCY = 0.5e-3  # seconds of one collective between hosts of a local network, as Gloo's small ones take
HIDDEN = 2 / 3  # of a step's computing, its backward pass, beside which an exchange at every step travels
SLOWER = 10.0  # times that a step takes as long on the GPU that notes are of, too
LAST = 15.0  # seconds in which a state is written at the end of the time
FOLDER = RESULTS / "runs" / "comm-at-size"
WORK = ROOT / ".cache" / "comm-at-size"


@dataclass(frozen=True, kw_only=True)
class TorchText(Setting):
    """On the Python files of torch: five times as much text as the standard library, so that little is read twice."""

    def corpus(self, folder: Path) -> None:
        """See `Setting`; tokens that are there are used as they are, so that they can be carried to other machines."""
        if not (folder / "train.tokens").exists():
            source = f"{Path(torch.__file__).parent}/**/*.py"
            prepare_source(source, Data(vocabulary=self.vocabulary, sequence=self.sequence), folder)


@dataclass(frozen=True, kw_only=True)
class AtSize:
    """What is run; the methods are compared at rates of learning that each is tuned to on a seed of its own.

    Ours are the settings that were ahead at 100, 10 and 1 Mbit/s in the contest on slow links, without what lets
    exchanges travel beside later steps; so is DiLoCo.
    """

    name: str = "30m"
    setting: Setting = field(
        default_factory=lambda: TorchText(dim=512, layers=9, heads=8, hidden=1408, sequence=256, batch=32)
    )
    """30 M parameters."""
    steps: int = 1000
    """Of DDP, whose loss then is the target."""
    most: int = 2
    """Times as many steps that a method is given."""
    look: int = 25
    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3)
    """Of learning; the grid grows until the best is inside it, to at most two more."""
    tuning_steps: int = 200
    tuning_seed: int = 100
    seed: int = 31
    save: int = 100
    """Steps between two looks at the time that is left."""
    timed: int = 10
    """Steps from one that is timed to the next."""
    peers: tuple[Method, ...] = (
        DDP,
        BF16,
        TORCH,
        local("DiLoCo", "DiLoCo", every=30),
        muon(local("DiLoCo", "DiLoCo", every=30)),
    )
    own: tuple[Method, ...] = (
        local("LocalSGD H=2 4 bits", "LocalSGD", every=2, codec="4bit", second_moment="global"),
        local("LocalSGD H=4 sign", "LocalSGD", every=4, codec="sign", second_moment="global"),
        local("SparseLoCo H=4", "SparseLoCo", every=4, k=32, second_moment="global"),
    )

    @property
    def methods(self) -> tuple[Method, ...]:
        return (*self.peers, *self.own)

    @property
    def margin(self) -> int:
        """Steps beyond those of which the smoothed loss is wanted."""
        return WINDOW // 2 * self.look


LARGE = AtSize(name="119m", setting=TorchText(dim=896, layers=12, heads=14, hidden=2432, sequence=256, batch=32))
TRIAL = AtSize(
    name="trial",
    setting=Setting(dim=16, layers=1, heads=2, hidden=32, sequence=16, batch=8, held_out=8),
    steps=8,
    look=2,
    rates=(1e-3,),
    tuning_steps=4,
    save=3,
    timed=1,
    peers=(DDP, BF16, TORCH, local("DiLoCo", "DiLoCo", every=3)),
    own=(local("SparseLoCo H=2", "SparseLoCo", every=2, k=8, second_moment="global"),),
)


@dataclass
class AtSizeContest:
    """Runs, and what comes of them; raises OutOfBudget when the time of this part is up."""

    size: AtSize
    folder: Path
    """Of curves."""
    work: Path
    """Of tokens and of the state of a run that was cut off."""
    device: torch.device
    deadline: Deadline
    passes: Passes = "together"
    data: dict[int, SeedData] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)

    # -- runs ----------------------------------------------------------------------------------------------------------

    def run(self, method: Method, seed: int, steps: int, until: float = -math.inf) -> dict[str, Any]:
        """A whole run: its curve, and bytes, collectives and seconds of a step; continued where it was.

        Args:
            until: the smoothed loss with which it ends early, the last look that it is smoothed with included.
        """
        words = f"{self.size.name} {method.name} {method.lr:g} {seed} {steps}"
        key = re.sub(r"[^\w.-]+", "-", words)
        done, part = self.folder / f"{key}.json", self.work / f"{key}.safetensors"
        if not done.exists():
            if self.deadline.left() < LAST:
                raise OutOfBudget
            found = self._made(method, seed, steps, until, part)
            write_atomic(done, json.dumps({**origin(), **found}).encode() + b"\n")
            part.unlink(missing_ok=True)
        self.runs[key] = used(json.loads(done.read_text()))
        return self.runs[key]

    def _made(self, method: Method, seed: int, steps: int, until: float, part: Path) -> dict[str, Any]:
        began, curve = time.monotonic(), list[tuple[int, float]]()
        replicas = self.replicas(method, seed, self.passes)
        if part.exists():
            state = unpack(part.read_bytes())
            replicas.load_state_dict(state["replicas"])
            curve = [(step, loss) for step, loss in state["curve"]]
        first = replicas.steps
        while replicas.steps < steps:
            if replicas.steps % self.size.look == 0 and (not curve or curve[-1][0] < replicas.steps):
                curve.append((replicas.steps, replicas.held_out(self.examples)))
                if len(curve) >= WINDOW and sum(loss for _, loss in curve[-WINDOW:]) / WINDOW <= until:
                    break
            if replicas.steps % self.size.save == 0 and replicas.steps > first and self.deadline.left() < LAST:
                part.with_suffix(".new").write_bytes(pack({"replicas": replicas.state_dict(), "curve": curve}))
                part.with_suffix(".new").replace(part)
                raise OutOfBudget
            replicas.step()
        if curve[-1][0] < replicas.steps:
            curve.append((replicas.steps, replicas.held_out(self.examples)))
        spent = (time.monotonic() - began) / max(1, replicas.steps - first)
        said = f"{method.name}, rate {method.lr:g}, seed {seed}: {curve[-1][1]:.3f} at step {replicas.steps}"
        print(f"  {said}, {1e3 * spent:.1f} ms a step", file=sys.stderr, flush=True)
        facts = {"method": method.name, "lr": method.lr, "device": device_name(self.device), "text": self.text}
        return {**facts, "graphs": bool(replicas.graphs), "held_out": curve, **replicas.per_step()}

    def replicas(self, method: Method, seed: int, passes: Passes) -> Replicas:
        if seed not in self.data:
            self.data[seed] = SeedData(self.size.setting, self.tokens, seed, self.device)
        return Replicas(method, self.data[seed], timed=self.size.timed, passes=passes)

    @cached_property
    def tokens(self) -> Path:
        self.size.setting.corpus(self.work / "tokens")
        return self.work / "tokens"

    @cached_property
    def text(self) -> str:
        """Which text it is; empty where none was written."""
        path = self.tokens / "train.tokens"
        return read_header(path).fingerprint[:12] if path.exists() else ""

    @cached_property
    def examples(self) -> list[Tensor]:
        held_out = self.size.setting.examples(self.tokens, 0, 1)
        return [held_out[name].to(self.device) for name in ("inputs", "targets")]

    # -- figures -------------------------------------------------------------------------------------------------------

    def tuned(self, method: Method) -> Method:
        """At the rate of learning with the lowest loss on the seed for choosing."""
        size, losses, wanted = self.size, dict[float, float](), list(self.size.rates)
        while wanted:
            for lr in wanted:
                curve = self.run(method.at(lr), size.tuning_seed, size.tuning_steps)["held_out"]
                loss = final(curve, size.tuning_steps)
                losses[lr] = loss if math.isfinite(loss) else math.inf
            best = min(losses, key=losses.__getitem__)
            inside = min(losses) < best < max(losses) or len(size.rates) == 1
            wanted = [best * (2 if best == max(losses) else 0.5)] * (not inside and len(losses) < len(size.rates) + 2)
        return method.at(min(losses, key=losses.__getitem__))

    def chosen(self, method: Method) -> tuple[Method, dict[str, Any], float]:
        """A method at its rate of learning, its run, and the steps of DDP that one of its steps is worth.

        A method that does not get to DDP's loss counts as having got there with its last step. The bf16 hook is taken
        to learn as DDP does.
        """
        size, dense = self.size, self.tuned(DDP)
        run = self.run(dense, size.seed, size.steps + size.margin)
        if method.kind == "ddp":
            return dense, run, 1.0
        if method.kind == "bf16":
            return method.at(dense.lr), self.run(method.at(dense.lr), size.seed, 2 * size.look), 1.0
        target = final(run["held_out"], size.steps)
        best = self.tuned(method)
        found = self.run(best, size.seed, size.most * size.steps + size.margin, target)
        needed = steps_to(found["held_out"], target) or size.most * size.steps
        return best, found, (steps_to(run["held_out"], target) or size.steps) / needed

    def efficiency(self, method: Method, link: str, slower: float = 1.0) -> float:
        """Time-to-loss efficiency: 1 is DDP on a network without cost.

        Args:
            slower: times that computing and coding take as long as on this device.
        """
        free = slower * self.chosen(DDP)[1]["computing"]
        method, run, worth = self.chosen(method)
        return worth * free / self.seconds(run, method, link, slower)

    def seconds(self, run: dict[str, Any], method: Method, link: str, slower: float = 1.0) -> float:
        """Of a step on a link: an exchange at every step travels beside the backward pass, a merge by itself."""
        wire = 8 * run["sent"] / bits_per_second(link) + LATENCY * run["collectives"]
        hidden = 0.0 if method.local else HIDDEN * slower * run["computing"]
        return slower * (run["computing"] + run["coding"]) + max(0.0, wire - hidden)

    def ahead(self, link: str) -> Measured:
        """The best of ours over the best peer.

        Raises:
            ConfigError: its runs are of different texts.
        """
        found, ratio = self._efficiencies(link)
        slow, slow_ratio = self._efficiencies(link, SLOWER)
        if len({run["text"] for run in self.runs.values()}) > 1:
            raise ConfigError(f"the runs in {self.folder} are of different texts", hint="delete them, and run again")
        devices = " and ".join(sorted({run["device"] for run in self.runs.values()}))
        parameters = sum(each.numel() for each in self.size.setting.model(0).parameters())
        said = [
            f"{parameters / 1e6:.0f} M parameters, {RANKS} ranks on one {devices}, to DDP's loss of step"
            f" {self.size.steps}; {'; '.join(self._said(method, found) for method in self.size.methods)}",
            f"where computing and coding take {SLOWER:g} times as long {slow_ratio:.3g}: "
            + ", ".join(f"{name} {value:.3g}" for name, value in slow.items()),
        ]
        return Measured(ratio, "; ".join(said))

    def so_far(self, link: str) -> str:
        """What has come of the methods whose runs are whole, where others are not."""
        said = [f"{link}/s:"]
        for method in self.size.methods:
            with suppress(OutOfBudget):
                found, slower = (self.efficiency(method, link, times) for times in (1.0, SLOWER))
                said.append(f"{self._said(method, {method.name: found})}; computing {SLOWER:g} x as long {slower:.3g}")
        return "\n  ".join(said)

    def _efficiencies(self, link: str, slower: float = 1.0) -> tuple[dict[str, float], float]:
        found = {method.name: self.efficiency(method, link, slower) for method in self.size.methods}
        best, peer = (max(found[method.name] for method in some) for some in (self.size.own, self.size.peers))
        return found, best / peer

    def _said(self, method: Method, efficiencies: dict[str, float]) -> str:
        best, run, worth = self.chosen(method)
        bound = "at most " if worth <= 1 / self.size.most else ""
        spent = f"computing {1e3 * run['computing']:.2g} ms, coding {1e3 * run['coding']:.2g}"
        return (
            f"{method.name} {efficiencies[method.name]:.3g} (a step is worth {bound}{worth:.2g} and sends"
            f" {run['sent'] / 1e6:.3g} MB, {spent}; rate {best.lr:g})"
        )


def device_name(device: torch.device) -> str:
    """What a run computed on, and how."""
    return f"{torch.cuda.get_device_name(device)} in bf16" if device.type == "cuda" else "CPU"


def measure(link: str, deadline: Deadline) -> Measured:
    """A part of the contest, and its result once all runs are whole.

    Raises:
        OutOfBudget: they are not; the next call continues.
    """
    return contest(AtSize(), deadline).ahead(link)


def contest(size: AtSize, deadline: Deadline, folder: Path = FOLDER, work: Path = WORK) -> AtSizeContest:
    """The contest on this machine's GPU, or else on its processor."""
    for each in (folder, work):
        each.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return AtSizeContest(size, folder, work, device, deadline)


def rows() -> list[Bar]:
    """Bars that need a GPU."""
    return [
        Bar(
            f"comm.at-size-{link.removesuffix('bit')}",
            f"time-to-loss efficiency of the best of ours over the best peer, 30 M parameters, {link}/s; in lockstep",
            ">=",
            1.0,
            measure=partial(measure, link),
            baseline="DDP fp32 and bf16 hook, torch PowerSGD (rank 4), DiLoCo and MuLoCo (H = 30, outer 0.7, 0.9)",
            seeds=(AtSize().seed,),
            gpu=True,
        )
        for link in LINKS
    ]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comm.at_size")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--tree", default="", help="git's tree to record, for a copy without its history")
    parser.add_argument("--large", action="store_true", help="119 M parameters in the place of 30 M")
    parser.add_argument("--so-far", action="store_true", help="print what came of the runs that are whole, run nothing")
    parser.add_argument("--trial", action="store_true")
    parser.add_argument("--passes", choices=get_args(Passes), default="together", help="how passes run on CUDA")
    parser.add_argument(
        "--check", action="store_true", help="compare ways to run passes; the last line is for --passes"
    )
    flags = parser.parse_args(argv)
    if flags.tree:
        Environment.capture(tree=flags.tree)
    size = TRIAL if flags.trial else LARGE if flags.large else AtSize()
    found = contest(size, Deadline(60 * flags.minutes), flags.folder, flags.work)
    found.passes = flags.passes
    if flags.check:
        from benchmarks.comm.at_size_check import check

        print(check(found))
        return 0
    if flags.so_far:
        found.deadline = Deadline(0)
        print("\n".join(map(found.so_far, LINKS)))
        return 0
    try:
        for link in LINKS:
            print(link, found.ahead(link))
    except OutOfBudget:
        print("not whole yet: call it again to continue", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
