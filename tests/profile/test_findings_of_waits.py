"""Loops that wait, and memory that grows: what a profile promises, and which line it names."""

import ast

import pytest

from shoestring.profile.analyses.gains import TOLD, gain
from shoestring.profile.analyses.statements import Text, waits
from shoestring.profile.recording import Facts
from shoestring.profile.tree import NodeKind
from tests.profile.built_programs import FILE, Program, only
from tests.profile.test_findings_of_waste import PREFIX, at, program, rising

WAITS = {
    "clock": "while time.perf_counter() < end:\n    n += 1",
    "clock-in-body": "while True:\n    n += f(n)\n    if time.monotonic() - begun > 3:\n        break",
    "clock-in-variable": "while left > 0:\n    now = perf_counter()\n    left = end - now\n    n = n * 2",
    "event": "while not stopped.is_set():\n    pass",
    "flag": "while not self.ready:\n    n += 1",
    "file": "while not path.exists():\n    continue",
    "forever": "while True:\n    if done:\n        return\n    x = 1",
    "thread": "while thread.is_alive():\n    spins += 1",
}
COMPUTES = {
    "counter": "while i < n:\n    i += 1",
    "for": "for i in range(n):\n    total += i",
    "converges": "while error > 1e-6:\n    x, error = step(x)",
    "on-an-object": "while not converged(model):\n    update(model)",
    "queue": "while queue:\n    work(queue.pop())",
    "break": "while True:\n    x = x / 2\n    if x < 1:\n        break",
    "endless": "while True:\n    serve()",
    "method": "while not solver.done:\n    solver.step()",
}


@pytest.mark.parametrize(
    ("text", "found"),
    [(text, True) for text in WAITS.values()] + [(text, False) for text in COMPUTES.values()],
    ids=[*WAITS, *COMPUTES],
)
def test_a_loop_that_waits_is_told_from_one_that_computes(text, found):
    inside = "def f():\n" + "".join(f"    {line}\n" for line in text.splitlines())
    (loop,) = (each for each in ast.walk(ast.parse(inside)) if isinstance(each, ast.For | ast.While))
    assert waits(loop) == found
    assert Text.of(inside).loops


SPIN = """
def train(n):
    while time.perf_counter() < end:
        n += 1
    for i in range(n):
        n += i * i
"""


@pytest.mark.parametrize(("line", "waiting"), [("n += 1", True), ("n += i * i", False)])
def test_nothing_is_promised_for_a_busy_wait(line, waiting):
    built = program(SPIN)
    built.line(at(SPIN, line), python=5000.0)
    findings = [*built.found("python"), *built.found("hotspot")]
    (hotspot,) = (each for each in findings if "one line takes most" in each.title)
    assert hotspot.line == at(SPIN, line) and hotspot.gain is None
    assert ("ends when a clock or a condition says so" in hotspot.advice) == waiting
    assert len(findings) == 1 + (not waiting)
    assert all(each.gain is None or each.gain[1] <= TOLD for each in findings)


def test_what_a_timed_loop_calls_is_not_promised_either():
    text = "def main():\n    while time.time() < end:\n        work()\n\n"
    text += "def work():\n    for i in range(9):\n        s += i\n"
    built = program(text)
    above = built.line(at(text, "work()"), "main")
    built.builder.add(
        built.builder.node(above, NodeKind.PYTHON, built_name(built, "work"), at(text, "s += i")), own=5 * 10**9
    )
    assert built.found("python") == []


def built_name(built, function):
    (file,) = built.sources
    return f"{file}\t{function}"


def test_no_gain_is_told_beyond_what_is_measured():
    assert gain("python", 0.9999).most <= TOLD < 1
    assert gain("python", 0.5).most < TOLD


GROWS = """
def load(names):
    tensors = []
    for name in names:
        tensors.append(torch.load(name))
    return tensors

def note(history, loss):
    history.append(loss)

def train(data):
    history = []
    for x in data:
        loss = model(x)
        note(history, loss)
        optimizer.step()
    done.append(history)
"""


@pytest.mark.parametrize("steps", [True, False], ids=["optimizer", "no-optimizer"])
def test_growth_is_named_in_the_loop_over_steps(steps):
    """The data is kept as well, and is larger; but it was there before the first step."""
    built = Program()
    built.sources = {FILE: PREFIX + GROWS}
    built.call(built.line(at(GROWS, "tensors.append"), "load"), "stack", 1.0, bytes=10**9)
    built.line(at(GROWS, "loss = model"), python=50.0)
    above = built.line(at(GROWS, "  note(history"))
    built.builder.node(above, NodeKind.PYTHON, built_name(built, "note"), at(GROWS, "history.append(loss)"))
    if steps:
        built.call(built.line(at(GROWS, "optimizer.step")), "Optimizer.step#SGD.step", 1.0, kind=NodeKind.SPAN)
    built.facts = Facts(memory=rising(200))
    only(built.found("growth"), at(GROWS, "history.append(loss)"))
