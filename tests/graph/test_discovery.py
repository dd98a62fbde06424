"""Rules that are found by trying an operator: right, used by the search, and never at this process's expense."""

import ctypes
import gc
import json
import os
import re
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from shoestring.confined import LimitError
from shoestring.graph.costs import ring
from shoestring.graph.discovery import discover
from shoestring.graph.explain import explain
from shoestring.graph.lockstep import (
    check_rules,
    compute,
    difference,
    divide,
    join,
    real_values,
    run_divided,
    run_whole,
)
from shoestring.graph.rules import RuleBook
from shoestring.sandbox import SandboxBounds, run_in_sandbox
from tests.graph.steps import WithLoss
from tests.rigs.poisoned_operators import KINDS, survived

FEW = SandboxBounds(memory=256 << 20, processor=5, seconds=60.0)
TWO = "(Tensor x, Tensor y) -> Tensor"


def defined(name, declared, body=None, schema=TWO):
    """A new operator; `body` is what it does instead of what it declares."""
    operator = torch.library.custom_op(f"tried::{name}", body or declared, mutates_args=(), schema=schema)
    operator.register_fake(declared)
    return operator


def rules_of(name, declared, *shapes, more=(), ranks=2, bounds=FEW):
    """The rules that are found of an operator, as texts, and the reason why there are none."""
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    op = getattr(torch.ops.tried, name).default
    rules, reason = discover(op, [*tensors, *more], {}, [declared(*tensors, *more)], ranks, bounds)
    return {str(rule) for rule in rules}, reason


def heads(x, count):
    """Softmax over each of so many parts of a row, in single precision."""
    return x.unflatten(-1, (count, -1)).float().softmax(-1).flatten(-2).to(x.dtype)


def sixes(x):
    """Another operator for one size only."""
    return x.exp() * (1 + (x.shape[0] == 6))


def signs(x):
    """Another operator for some numbers only."""
    return x.exp() + (x.flatten()[0] > 0)


def test_rules_are_those_by_which_shards_make_the_whole():
    for name, declared, schema in (
        ("product", lambda x, y: x @ y, TWO),
        ("heads", heads, "(Tensor x, int count) -> Tensor"),
        ("mean", lambda x: x.mean(), "(Tensor x) -> Tensor"),
        ("most", lambda x: x.amax(), "(Tensor x) -> Tensor"),
        ("roots", lambda x: x.sqrt(), "(Tensor x) -> Tensor"),
        ("sixes", sixes, "(Tensor x) -> Tensor"),
        ("signs", signs, "(Tensor x) -> Tensor"),
    ):
        defined(name, declared, schema=schema)
    product = {"S(0), R -> S(0)", "R, S(1) -> S(1)", "S(1), S(0) -> P", "P, R -> P", "R, P -> P"}
    for ranks in (2, 6):
        assert rules_of("product", lambda x, y: x @ y, (96, 192), (192, 60), ranks=ranks) == (product, "")
    assert rules_of("heads", heads, (24, 6, 96), more=(4,)) == ({"S(0) -> S(0)", "S(1) -> S(1)"}, "")
    means = {"S(0) -exchange-> R", "S(1) -exchange-> R", "P -> P"}
    assert rules_of("mean", lambda x: x.mean(), (96, 12)) == (means, "")
    assert rules_of("roots", lambda x: x.sqrt(), (96, 12)) == ({"S(0) -> S(0)", "S(1) -> S(1)"}, "")
    assert rules_of("sixes", sixes, (96, 12)) == ({"S(1) -> S(1)"}, "")
    assert rules_of("signs", signs, (96, 12))[0] == set()
    rules, reason = rules_of("most", lambda x: x.amax(), (96, 12))
    assert not rules
    assert "combine by their maximum only" in reason


def test_a_mean_over_shards_is_averaged_by_the_ranks():
    defined("average", lambda x: x.mean(), schema="(Tensor x) -> Tensor")
    graph, x = fx.Graph(), torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    source = graph.placeholder("x")
    node = graph.call_function(torch.ops.tried.average.default, (source,))
    source.meta["val"], node.meta["val"] = x.to("meta"), x.to("meta").mean()
    rules = RuleBook(2)[node].rules
    assert {rule.exchange.nbytes for rule in rules if rule.exchange} == {8}
    for rule in rules:
        shards = compute(node, rule, [divide(x, rule.inputs[0], 2)])
        assert difference([join(shards[0], rule.outputs[0])], [x.mean()]) < 1e-15


def end_parent(x, y):
    os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)


def write(x, y):
    Path("new").write_text("words")
    return x + y


def hang(x, y):
    time.sleep(100)


POISONS = {
    "segfault": (lambda x, y: ctypes.string_at(0), "by signal SIGSEGV"),
    "exit": (lambda x, y: os._exit(3), "with status 3"),
    "hang": (hang, "longer than 0.5 s"),
    "memory": (lambda x, y: bytearray(1 << 40), "more than 256 MiB of memory"),
    "error": (lambda x, y: {}["\x1b no\nkey"], "raised KeyError: .* no.*key"),
    "group": (end_parent, "raised PermissionError"),
    "write": (write, "raised PermissionError"),
    "closes": (lambda x, y: os.closerange(0, 99), "raised|status|closed"),
    "mutates": (lambda x, y: x.add_(1) + y, "changes its inputs"),
    "random": (lambda x, y: x + y + torch.rand(()), "draws random numbers"),
    "shape": (lambda x, y: (x + y)[:1].clone(), "other shapes"),
    "nan": (lambda x, y: x + y + float("nan"), "NaN"),
    "number": (lambda x, y: 3, "raised|something else"),
}
"""Name -> an operator that declares a sum, and the reason that it gets."""


def test_what_an_operator_does_wrong_is_the_reason_why_it_stays_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gc.collect()  # what other tests have left open
    files = len(list(Path("/proc/self/fd").iterdir()))
    for name, (body, words) in POISONS.items():
        defined(f"poison_{name}", lambda x, y: x + y, body)
        bounds = replace(FEW, seconds=0.5) if name == "hang" else FEW
        rules, reason = rules_of(f"poison_{name}", lambda x, y: x + y, (8, 6), (8, 6), bounds=bounds)
        assert not rules, name
        assert re.search(words, reason), f"{name}: {reason}"
        assert reason.isprintable()
    assert len(list(Path("/proc/self/fd").iterdir())) <= files
    assert not list(tmp_path.iterdir())


def test_a_sandbox_computes_and_reads_but_changes_nothing(tmp_path):
    path, mine = tmp_path / "old", os.getpid()
    path.write_text("words")
    acts = {
        "write": lambda: path.write_text("other words"),
        "remove": path.unlink,
        "connect": lambda: socket.socket(),
        "start": os.fork,
        "run": lambda: os.execv("/bin/true", ["true"]),
        "end": lambda: os.kill(mine, 0),
        "end all": lambda: os.kill(-1, 0),
    }

    def work():
        thread = threading.Thread(target=lambda: done.append(path.read_text()))
        done, refused = list[str](), list[str]()
        thread.start()
        thread.join()
        for name, act in acts.items():
            try:
                act()
            except PermissionError:
                refused.append(name)
        return json.dumps([done, refused]).encode()

    assert json.loads(run_in_sandbox(lambda: None, work)) == [["words"], list(acts)]
    with pytest.raises(LimitError, match="it raised SystemExit: 3"):
        run_in_sandbox(lambda: None, lambda: exit(3))


def scaled(x, weight):
    return x.tanh() * weight


def scaled_backward(gradient, x, weight):
    return gradient * weight * (1 - x.tanh().square()), (gradient * x.tanh()).sum(0)


class Scaled(nn.Module):
    """A linear layer, an operator of this program, and another linear layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x):
        return self.second(torch.ops.tried.scaled(self.first(x), self.weight))


def test_operators_of_a_model_are_divided_by_rules_that_were_tried():
    forward = defined("scaled", scaled, schema="(Tensor x, Tensor weight) -> Tensor")
    defined("scaled_backward", scaled_backward, schema="(Tensor g, Tensor x, Tensor w) -> (Tensor, Tensor)")
    forward.register_autograd(
        lambda ctx, gradient: torch.ops.tried.scaled_backward(gradient, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    torch.manual_seed(0)
    model, batch = WithLoss(Scaled()).double(), (torch.randn(8, 16, dtype=torch.float64), torch.randint(8, (8,)))
    explained = explain(model, *batch, cluster=ring(2, latency=1e-9, bandwidth=1e12, flops=1e6, copy=1e6))
    step, book, values = explained.step, explained.books[2], real_values(explained.step, model, *batch)
    kinds = {str(node.target).removeprefix("tried."): book[node] for node in step.operators if book[node].tried}
    assert {str(rule) for rule in kinds["scaled_backward.default"].rules} >= {"S(0), S(0), R -> S(0), P"}
    assert any(
        "found by trying them: tried.scaled.default, tried.scaled_backward" in line for line in explained.lines()
    )
    assert max(check.error for check in check_rules(step, book, values)) < 1e-10
    plan = explained.plan.axes[0].rules
    assert any(plan[node].divides for node in step.operators if book[node].tried)
    assert difference(run_divided(step, plan, values, 2), run_whole(step, values)) < 1e-10
    untried = RuleBook(2, bounds=None)
    assert {untried[node].reason for node in step.operators if book[node].tried} == {"torch has no strategy for it"}


@pytest.mark.slow
def test_poisoned_operators_are_survived():
    results = list(survived(1, len(KINDS)))
    assert [result["kind"] for result in results] == [kind.__name__ for kind in KINDS]
    assert not [result for result in results if not result["right"]]
