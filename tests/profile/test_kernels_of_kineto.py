"""What Kineto says of an accelerator is on the operators that launched it; events are made up, for there is no GPU."""

from dataclasses import dataclass

import pytest
import torch

from shoestring.profile.kineto import EventFold, alone, dropped, idle, ran
from shoestring.profile.tree import NodeKind
from tests.profile.built_programs import FILE, MILLISECOND, Program, only


@dataclass
class Event:
    """As torch's `_KinetoEvent`."""

    kind: str
    begins: int
    takes: int
    correlation: int = 0
    linked: int = 0
    device: int = 0
    called: str = "k"

    def __getattr__(self, name):
        values = {
            "name": self.called,
            "device_index": self.device,
            "start_ns": self.begins,
            "duration_ns": self.takes,
            "correlation_id": self.correlation,
            "linked_correlation_id": self.linked,
            **self.kinds(),
        }
        if name not in values:
            raise AttributeError(name)
        return lambda: values[name]

    def kinds(self):
        return {"activity_type": self.kind}


class OldEvent(Event):
    """As torch 2.11's, which does not say what it is."""

    def kinds(self):
        on_cpu = self.kind in ("cpu_op", "cuda_runtime")
        kind = torch.autograd.DeviceType.CPU if on_cpu else torch.autograd.DeviceType.CUDA
        return {"device_type": kind, "is_user_annotation": self.kind == "gpu_user_annotation"}


def kernel(begins, takes, **more):
    return Event("kernel", begins, takes, **more)


def copy(begins, takes, **more):
    return Event("gpu_memcpy", begins, takes, called="Memcpy HtoD", **more)


@pytest.mark.parametrize("event", [Event, OldEvent])
def test_what_ran_on_the_device_is_told_from_all_else(event):
    named = {
        "kernel": "k",
        "gpu_memcpy": "Memcpy DtoH (Device -> Pinned)",
        "gpu_memset": "Memset (Device)",
        "gpu_user_annotation": "a part",
        "cpu_op": "aten::copy_",
        "cuda_runtime": "cudaMemcpyAsync",
    }
    work = ran([event(kind, start, 1, called=name) for start, (kind, name) in enumerate(named.items())])
    assert [(each.name, each.copies) for each in work] == [
        ("k", False), ("Memcpy DtoH (Device -> Pinned)", True), ("Memset (Device)", True)
    ]  # fmt: skip


def test_gaps_are_those_in_which_a_device_has_nothing_to_run():
    work = ran([kernel(30, 10), kernel(0, 10), kernel(5, 15), kernel(50, 5), kernel(25, 1, device=1)])
    assert [each.start for each in work] == [0, 5, 25, 30, 50]
    assert idle(work) == [0, 0, 0, 10, 10]


def test_copies_are_alone_where_no_kernel_of_their_device_runs():
    events = [
        kernel(10, 10),
        kernel(15, 15),
        kernel(50, 10),
        copy(0, 100),
        copy(12, 3),
        copy(32, 8),
        copy(12, 3, device=1),
    ]
    found = {(each.start, each.device): lone for each, lone in zip(ran(events), alone(ran(events)), strict=True)}
    assert found[0, 0] == 70
    assert found[12, 0] == 0
    assert found[32, 0] == 8
    assert found[12, 1] == 3
    assert found[10, 0] == 0


def test_launches_without_a_kernel_are_dropped_records():
    launches = [Event("cuda_runtime", n, 1, correlation=n, called="cudaLaunchKernel") for n in range(5)]
    assert dropped([*launches, *[kernel(9, 1, correlation=n) for n in (0, 1, 3)]]) == 2


def activated(x):
    return x.exp()  # the line


class Results:
    """What torch.profiler recorded on a CPU, and besides what a GPU would have run for it."""

    def __init__(self, profiler, events):
        self.recorded, self.made_up = profiler.profiler.kineto_results, events

    def experimental_event_tree(self):
        return self.recorded.experimental_event_tree()

    def events(self):
        return [*self.recorded.events(), *self.made_up]


def correlation(roots, name):
    left = list(roots)
    while left:
        event = left.pop()
        if event.name == name:
            return event.correlation_id
        left += event.children
    raise AssertionError(name)


def test_kernels_are_below_the_operator_that_launched_them_and_on_its_line():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as profiler:
        activated(torch.ones(3))
    launcher = correlation(profiler.profiler.kineto_results.experimental_event_tree(), "aten::exp")
    fold = EventFold(timed=False)
    fold.add(Results(profiler, [kernel(0, 40, linked=launcher), kernel(100, 60, linked=launcher), kernel(200, 7)]), 10)
    tree = fold.builder.build()
    node, lost = (
        int(each) for each in sorted((tree.kind == NodeKind.KERNEL).nonzero()[0], key=lambda n: tree.depth[n])[::-1]
    )
    assert tree.names[tree.name[tree.parent[node]]] == "aten::exp"
    assert (tree.device[node], tree.idle[node], tree.count[node]) == (1000, 600, 20)
    assert (tree.parent[lost], tree.device[lost]) == (0, 70)
    line = activated.__code__.co_firstlineno + 1
    lines = [tree.place(n) for n in range(len(tree)) if tree.kind[n] == NodeKind.PYTHON]
    assert (__file__, line) in lines
    assert tree.own.sum() == 0, "operators have their times from elsewhere"


# -- analyses ---------------------------------------------------------------------------------------------------------


def on_device(program, above, name, device, count, **columns):
    node = program.builder.node(above, NodeKind.KERNEL, name)
    program.builder.add(node, count=count, device=round(device * MILLISECOND), **columns)


@pytest.mark.parametrize(("each", "found"), [(0.004, True), (0.4, False)])
def test_an_accelerator_that_waits_for_short_kernels_is_found_and_one_that_waits_for_long_ones_is_not(each, found):
    program = Program().model()
    operator = program.call(program.line(20), "add", 30)
    on_device(program, operator, "elementwise", 4000 * each, 4000, idle=40 * MILLISECOND)
    findings = program.found("launches")
    assert len(findings) == found
    if found:
        assert "4000 kernels that take 4 µs each" in only(findings, 20).evidence


@pytest.mark.parametrize(("lone", "found"), [(30, True), (1, False)])
def test_copies_that_nothing_overlaps_are_found(lone, found):
    program = Program().model()
    operator = program.call(program.line(21), "to", 5)
    on_device(program, operator, "Memcpy HtoD", 31, 100, alone=lone * MILLISECOND)
    findings = program.found("overlap")
    assert len(findings) == found
    if found:
        least, most = only(findings, 21).gain
        assert least < 30 / 55 < most
        assert findings[0].file == FILE
