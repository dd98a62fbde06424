"""The ranks of one run in lockstep on one device: codecs exchange what they would send, and bytes are counted.

On CUDA each rank's forward and backward pass is a graph, because their kernels are short: launched one by one they take
several times as long. Nothing waits for the device between two looks at the held-out loss.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.comm.contestant import CLIP, OPTIMIZERS, WARMUP
from benchmarks.comm.methods import Method
from benchmarks.comm.peers import TorchInBatches
from benchmarks.comm.setting import RANKS, Setting
from shoestring import comm
from shoestring._torch import foreach_copy_
from shoestring.comm.codecs.codec import Codec, Grads
from shoestring.comm.codecs.dense import DenseCodec, split_like
from shoestring.comm.codecs.lockstep import run_lockstep
from shoestring.comm.codecs.traffic import WireBytes
from shoestring.comm.local.fragments import Fragment
from shoestring.comm.local.second_moment import SecondMoments
from shoestring.models.gpt import GPT

ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # known to be captured
Passes = Literal["together", "in-turn", "eager"]
"""CUDA graphs of all ranks side by side, those one after the other, or no graphs."""
CHUNK = 100  # steps whose batches go to the device at once


class SeedData:
    """What all methods of a seed share, on the device: first weights, and batches as far as any has got."""

    def __init__(self, setting: Setting, folder: Path, seed: int, device: torch.device) -> None:
        self.device = device
        self._first = setting.model(seed).to(device)
        self._draws = [setting.batches(folder, rank, RANKS, seed) for rank in range(RANKS)]
        self._chunks: list[Tensor] = []

    def model(self) -> GPT:
        """A new model with the first weights."""
        return deepcopy(self._first)

    def batches(self, step: int) -> Tensor:
        """Inputs and targets of a step, (ranks, 2, sequences, T)."""
        while step >= CHUNK * len(self._chunks):
            ranks = [
                torch.stack([torch.stack([each["inputs"], each["targets"]]) for each in islice(draws, CHUNK)])
                for draws in self._draws
            ]
            self._chunks.append(torch.stack(ranks, dim=1).to(self.device))
        return self._chunks[step // CHUNK][step % CHUNK]


class StepClock:
    """Seconds that parts of steps take on the device, which is not waited for before they are read."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._cuda = device.type == "cuda"
        self._unread: list[tuple[str, Any, Any]] = []

    @contextmanager
    def time(self, part: str, wanted: bool = True) -> Iterator[None]:
        """Within, the part runs; only timed where that is `wanted`."""
        began = self._now() if wanted else None
        yield
        if wanted:
            self._unread.append((part, began, self._now()))

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> None:
        """Wait for what was timed, and note its seconds."""
        if self._cuda and self._unread:
            torch.cuda.synchronize()
        for part, began, ended in self._unread:
            seconds = began.elapsed_time(ended) / 1000 if self._cuda else ended - began
            self.seconds.setdefault(part, []).append(seconds)
        self._unread.clear()

    def median(self, part: str) -> float:
        """The median over the times that were read, which leaves out those that compiled kernels; 0 without any."""
        return median(self.seconds.get(part) or [0.0])


class Replicas:
    """All ranks of one run. Those that exchange gradients at every step share one model.

    Args:
        timed: about so many steps from one that is timed to the next. In those, ranks compute one after the other.
        passes: how ranks' passes run in steps that are not timed; see `Passes`. Without CUDA they are eager.
    """

    def __init__(self, method: Method, data: SeedData, *, timed: int = 10, passes: Passes = "together") -> None:
        self.method, self.data, self.steps, self.device = method, data, 0, data.device
        self.settings = settings_of(method)
        self.every = self.settings.every if method.local else 1
        self.stride = self.every * -(-timed // self.every)  # such that every timed step of local ones has a merge
        self.codecs = [self._make_codec() for _ in range(RANKS)]
        self.models = [data.model() for _ in range(RANKS if method.local else 1)]
        self.optimizers = [OPTIMIZERS[method.optimizer](model, method.lr) for model in self.models]
        estimated = method.local and self.settings.second_moment == "global"
        self.moments = [
            SecondMoments(SimpleNamespace(optimizer=each), RANKS)  # pyrefly: ignore[bad-argument-type]
            for each in self.optimizers
            if estimated
        ]
        with torch.no_grad():
            self.outer = [
                Fragment(dict(model.named_parameters()), self.settings.outer[1] > 0)
                for model in self.models
                if method.local
            ]
        self.sent, self.collectives = 0.0, 0  # of one rank, so far
        self.clock = StepClock(self.device)
        self.batch = data.batches(0).clone()  # of each rank, where its passes read it
        self.grads = [self._room(rank) for rank in range(RANKS)]  # where they write
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.together = passes == "together"
        if passes != "eager" and self.device.type == "cuda":
            try:
                with torch.cuda.stream(torch.cuda.current_stream()):  # a capture that fails stays on its own
                    self.graphs = self._capture()
            except RuntimeError as error:
                print(f"no CUDA graphs, so steps take longer: {str(error).splitlines()[0]}", file=sys.stderr)

    def _make_codec(self) -> Codec:
        if self.method.kind == "torch":
            return TorchInBatches(self.method.settings["rank"], start=2)  # as in contestant.py
        if self.method.dense:
            return DenseCodec(torch.bfloat16 if self.method.kind == "bf16" else None)
        return self.settings.make_codec()

    def _room(self, rank: int) -> Grads:
        """Room for a rank's gradients, which are those of its own model if it has one, or else the first rank's."""
        model = self.models[rank % len(self.models)]
        parameters: list[Tensor] = list(model.parameters())
        flat = torch.zeros(sum(each.numel() for each in parameters), device=self.device)
        room = dict(zip(dict(model.named_parameters()), split_like(flat, parameters), strict=True))
        if rank < len(self.models):
            for name, parameter in model.named_parameters():
                parameter.grad = room[name]
        return room

    # -- passes ------------------------------------------------------------------------------------------------------

    def forward_backward(self, rank: int) -> None:
        """Write the gradients of `batch[rank]` to `grads[rank]`.

        As a graph it repeats what it did to memory: so batch, weights and gradients stay where they are, weights are
        cast in every pass, and nothing is asked of the device.
        """
        model = self.models[rank % len(self.models)]
        found = torch.autograd.grad(loss_of(model, *self.batch[rank]), list(model.parameters()))
        foreach_copy_(list(self.grads[rank].values()), list(found))

    def _capture(self) -> list[torch.cuda.CUDAGraph]:
        """A graph of each rank's passes; each on its own stream, so that they share no workspace when side by side."""
        gc.collect()  # of graphs of earlier runs, which should not end while another is captured
        graphs = []
        for rank, stream in enumerate(side_streams()):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.forward_backward(rank)  # loads kernels, and allocates the stream's workspace
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self.forward_backward(rank)
            graphs.append(graph)
        return graphs

    def passes(self, *, together: bool = True) -> None:
        """All ranks' passes on the batches that are there; graphs side by side where `together`."""
        if not self.graphs:
            for rank in range(RANKS):
                self.forward_backward(rank)
        elif not together:
            for graph in self.graphs:
                graph.replay()
        else:
            here = torch.cuda.current_stream()
            for graph, stream in zip(self.graphs, side_streams(), strict=True):
                stream.wait_stream(here)
                with torch.cuda.stream(stream):
                    graph.replay()
            for stream in side_streams():
                here.wait_stream(stream)

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        timed = (self.steps + 1) % self.stride == 0
        self.batch.copy_(self.data.batches(self.steps))
        with self.clock.time("passes", timed):
            self.passes(together=self.together and not timed)
        if not self.method.local:
            with self.clock.time("exchange", timed):
                self._count(run_lockstep(self.codecs, self.grads, self.steps))
        with self.clock.time("optimizer", timed):
            self._update()
        self.steps += 1
        if self.method.local and self.steps % self.every == 0:
            with self.clock.time("exchange", timed):
                self._merge()

    def _update(self) -> None:
        for index, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            for group in optimizer.param_groups:
                group["lr"] = self.method.lr * min(1.0, (self.steps + 1) / WARMUP)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            if self.moments:
                self.moments[index].before_step()
            optimizer.step()
            if self.moments:
                self.moments[index].after_step()

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

    @torch.no_grad()
    def held_out(self, examples: Sequence[Tensor]) -> float:
        """The loss of the mean weights on inputs and targets, nats a token."""
        own = [parameter.clone() for parameter in self.models[0].parameters()]
        for parameters in zip(*(model.parameters() for model in self.models), strict=True):
            parameters[0].copy_(torch.stack(parameters).mean(0))
        loss = loss_of(self.models[0], *examples)
        for parameter, kept in zip(self.models[0].parameters(), own, strict=True):
            parameter.copy_(kept)
        return float(loss)

    def per_step(self) -> dict[str, float]:
        """Bytes and collectives of one rank a step, and its seconds of computing and of coding."""
        self.clock.read()
        steps = max(1, self.steps // self.every) * self.every  # those that were exchanged
        update = self.clock.median("optimizer") / len(self.models)
        return {
            "sent": self.sent / steps,
            "collectives": self.collectives / steps,
            "computing": self.clock.median("passes") / RANKS + update,
            "coding": self.clock.median("exchange") / RANKS / self.every,
        }

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self.clock.read()
        return {
            "models": [model.state_dict() for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "codecs": [codec.state_dict() for codec in self.codecs],
            "outer": [[outer.anchor, outer.velocity] for outer in self.outer],
            "counts": [self.steps, self.sent, self.collectives],
            "seconds": self.clock.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; weights are copied to where graphs read them."""
        for own, saved in (("models", self.models), ("optimizers", self.optimizers), ("codecs", self.codecs)):
            for each, of in zip(saved, state[own], strict=True):
                each.load_state_dict(to_device(of, self.device) if own == "codecs" else of)
        for outer, (anchor, velocity) in zip(self.outer, state["outer"], strict=True):
            outer.anchor = anchor.to(self.device)
            outer.velocity = None if velocity is None else velocity.to(self.device)
        self.steps, self.sent, self.collectives = state["counts"]
        self.clock.seconds = state["seconds"]


def settings_of(method: Method) -> Any:
    """The settings of a method of ours; of others None."""
    return method.build(getattr(comm, method.feature)) if method.kind == "ours" else None


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy, nats a token; on CUDA products are in bf16."""
    mixed = torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.is_cuda, cache_enabled=False)
    with mixed, sdpa_kernel(ATTENTION):
        output = model(inputs)
    return F.cross_entropy(output.flatten(0, 1).float(), targets.flatten())


@cache
def side_streams() -> list[torch.cuda.Stream]:
    """A stream for each rank."""
    return [torch.cuda.Stream() for _ in range(RANKS)]


def to_device(state: Any, device: torch.device) -> Any:
    """The same nested state, with its tensors on a device."""
    if isinstance(state, dict):
        return {key: to_device(value, device) for key, value in state.items()}
    return state.to(device) if isinstance(state, Tensor) else state
