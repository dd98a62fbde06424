"""Each kind of thing that a feature may take is seen, and its release as well."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook

from shoestring.testing.held_resources import Allocations, fresh_garbage, held_resources
from shoestring.testing.jobs import sgd, tiny

Parts = tuple[nn.Module, torch.optim.Optimizer]


@contextmanager
def removing(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    yield
    handle.remove()


@contextmanager
def patched(module: nn.Module) -> Iterator[None]:
    module.forward = module.forward
    yield
    del module.forward


@contextmanager
def thread(_: Parts) -> Iterator[None]:
    done = threading.Event()
    runner = threading.Thread(target=done.wait, name="runner")
    runner.start()
    yield
    done.set()
    runner.join()


@contextmanager
def process(_: Parts) -> Iterator[None]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield
    child.communicate(b"\n")


@contextmanager
def variable(_: Parts) -> Iterator[None]:
    os.environ["SHOESTRING_TEST"] = "1"
    yield
    del os.environ["SHOESTRING_TEST"]


@contextmanager
def handler(_: Parts) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGUSR2, before)


@contextmanager
def wide_type(_: Parts) -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextmanager
def other_class(parts: Parts) -> Iterator[None]:
    block = parts[0].blocks[0]
    before, block.__class__ = type(block), type("Other", (type(block),), {})
    yield
    block.__class__ = before


TAKERS: dict[str, Callable[[Parts], AbstractContextManager[object]]] = {
    r"a hook \(forward_hooks\) on `blocks.1`": lambda p: removing(
        p[0].get_submodule("blocks.1").register_forward_hook(lambda *_: None)
    ),
    r"a hook \(backward_hooks\) on `embedding.weight`": lambda p: removing(
        p[0].get_parameter("embedding.weight").register_hook(lambda grad: grad)
    ),
    r"a hook \(post_accumulate_grad_hooks\) on `norm.bias`": lambda p: removing(
        p[0].get_parameter("norm.bias").register_post_accumulate_grad_hook(lambda _: None)
    ),
    r"a hook \(optimizer_step_pre_hooks\) on the optimizer": lambda p: removing(
        p[1].register_step_pre_hook(lambda *_: None)
    ),
    r"a hook \(global_forward_hooks\) on all modules": lambda _: removing(
        register_module_forward_hook(lambda *_: None)
    ),
    r"a patched `forward` of `blocks.0.up`": lambda p: patched(p[0].get_submodule("blocks.0.up")),
    r"`blocks.0` being a Other": other_class,
    r"the setting hooks for saved tensors = True": lambda _: saved_tensors_hooks(lambda x: x, lambda x: x),
    r"the setting gradients = False": lambda _: torch.no_grad(),
    r"the setting autocast = True": lambda _: torch.autocast("cpu", torch.bfloat16),
    r"the setting default type = torch.float64": wide_type,
    r"the thread `runner`": thread,
    r"the process \d+": process,
    r"the open file .*test_held_resources.py": lambda _: Path(__file__).open(),  # noqa: SIM115  (the test closes it)
    r"the environment variable SHOESTRING_TEST=1": variable,
    r"the setting handler of SIGUSR2 = .*": handler,
}


@pytest.fixture(autouse=True)
def few_objects() -> Iterator[None]:
    """Each look collects garbage, which takes a second where many modules are loaded."""
    with fresh_garbage():
        yield


@pytest.mark.parametrize("words", TAKERS)
def test_what_is_taken_is_seen_until_it_is_released(words: str) -> None:
    model = tiny()
    parts = (model, sgd()([*model.parameters()]))
    before = held_resources(model, parts[1:])
    with TAKERS[words](parts):
        held = sorted(held_resources(model, parts[1:]) - before)
    assert sorted(held_resources(model, parts[1:]) - before) == []
    assert any(re.fullmatch(words, each) for each in held), held


def test_kept_allocations_are_seen_and_passing_ones_are_not() -> None:
    with Allocations() as passing:
        torch.zeros(1000).sum()
        np.zeros(1 << 20)
    assert passing.kept() == []
    with Allocations() as lasting:
        tensor, array = torch.zeros(1000), np.zeros(1 << 20)
    tensors, host = lasting.kept()
    assert tensors == f"a tensor of {tensor.nbytes} bytes"
    assert int(host.split()[0]) >= array.nbytes
