"""Native functions below operators: sampled by the thread's own timer, with operators' own time shared out to them."""

import ctypes
import multiprocessing
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from shoestring.core.errors import ConfigError
from shoestring.profile import native_frames, profiled
from shoestring.profile.analyses.reading import Reading
from shoestring.profile.collector import Collector
from shoestring.profile.lines import by_line
from shoestring.profile.native_frames import plain
from shoestring.profile.summary import by_native_function, by_operator, summary
from shoestring.profile.tree import NodeKind, without_native

HEADERS = Path(sysconfig.get_path("include"), "Python.h")
pytestmark = pytest.mark.skipif(
    not (sys.platform == "linux" and shutil.which("c++") and HEADERS.is_file()),
    reason="needs Linux, a C++ compiler and Python's headers",
)


def work(rounds=60):
    values = torch.rand(100_000)
    weights = torch.rand(200, 200, requires_grad=True)
    for _ in range(rounds):
        torch.sort(values)
        (weights @ weights).sum().backward()


@pytest.fixture(scope="module")
def profile():
    work(2)
    with profiled(native_frames=True) as result:
        work()
    return result.profile


def own_of(tree, label):
    return sum(int(tree.own[node]) for node in range(len(tree)) if tree.label(node) == label)


@pytest.mark.slow
def test_operators_give_their_own_time_to_native_functions_and_nothing_is_lost(profile):
    tree = profile.tree
    whole = without_native(tree)
    assert own_of(tree, "aten::sort") <= 0.2 * own_of(whole, "aten::sort") > 0
    assert tree.own.sum() == tree.inclusive[0] == whole.inclusive[0] == whole.own.sum()
    assert (tree.own >= 0).all()
    assert not (whole.kind == NodeKind.NATIVE).any()
    native = np.flatnonzero(tree.kind == NodeKind.NATIVE)
    assert np.isin(tree.kind[tree.parent[native]], (NodeKind.NATIVE, NodeKind.OPERATOR, NodeKind.BACKWARD)).all()
    assert (tree.kind[tree.parent[native]] == NodeKind.NATIVE).any()
    assert any("torch" in name for name in by_native_function(tree))


@pytest.mark.slow
def test_a_function_is_below_the_operator_that_calls_it(profile):
    """Sorting calls itself for parts of the whole; a product of matrices is in the backward pass, too."""
    tree = profile.tree
    below = {
        name: {
            tree.label(node)
            for node in np.flatnonzero(tree.kind == NodeKind.NATIVE)
            if tree.label(int(tree.nearest(tree.kind != NodeKind.NATIVE)[node])) == name
        }
        for name in ("aten::sort", "aten::mm")
    }
    assert below["aten::sort"] and below["aten::mm"]
    assert len(below["aten::sort"] & below["aten::mm"]) <= 0.2 * len(below["aten::sort"] | below["aten::mm"])
    assert not any("callpaths" in name for names in below.values() for name in names)
    # Operators call `at::_ops` for others, and for themselves behind autograd; what called them is above them.
    outermost = tree.kind[tree.parent] != NodeKind.NATIVE
    first = {tree.label(node) for node in np.flatnonzero((tree.kind == NodeKind.NATIVE) & outermost)}
    assert first and not any("at::_ops::" in name for name in first)


def test_lines_operators_and_analyses_are_as_without(profile):
    whole = without_native(profile.tree)
    assert {name: each.total for name, each in by_line(profile.tree).items()} == {
        name: each.total for name, each in by_line(whole).items()
    }
    assert sum(own for own, _ in by_operator(whole).values()) > 0
    assert not (Reading(profile).tree.kind == NodeKind.NATIVE).any()
    assert "native function, without those that it calls" in "\n".join(summary(profile))


def test_the_file_and_a_merge_keep_them(profile, tmp_path):
    from shoestring.profile import load
    from shoestring.profile.comparison import merged

    profile.save(tmp_path / "p.npz")
    back = load(tmp_path / "p.npz")
    assert by_native_function(back.tree) == by_native_function(profile.tree)
    twice = by_native_function(merged([back, back], ["a", "b"]).tree)
    assert twice == {name: 2 * own for name, own in by_native_function(profile.tree).items()}


@pytest.mark.slow
def test_other_threads_are_sampled_too():
    def of_thread():
        torch.rand(10).sum()
        work(40)

    with profiled(native_frames=True) as result:
        thread = threading.Thread(target=of_thread)
        thread.start()
        thread.join()
    assert sum(by_native_function(result.profile.tree).values()) > 0


def in_a_fork(queue):
    torch.set_num_threads(1)
    work(5)
    queue.put("done")


def test_a_fork_and_a_second_profile_go_on():
    torch.set_num_threads(1)
    with profiled(native_frames=True):
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=in_a_fork, args=(queue,))
        child.start()
        assert queue.get(timeout=60) == "done"
        child.join(60)
        assert child.exitcode == 0
    with profiled() as plainly:
        work(3)
    assert not (plainly.profile.tree.kind == NodeKind.NATIVE).any()


@pytest.mark.slow
def test_no_timer_outlives_a_profile():
    """The first timer of a process has the number 0, so it is looked for in a new process."""
    program = (
        "import torch, threading\n"
        "from pathlib import Path\n"
        "from shoestring.profile import profiled\n"
        "def work():\n"
        "    for _ in range(400): torch.rand(64, 64).sum()\n"
        "timers = Path('/proc/self/timers')\n"
        "for _ in range(2):\n"
        "    with profiled(native_frames=True):\n"
        "        work()\n"
        "        thread = threading.Thread(target=work)\n"
        "        thread.start()\n"
        "        thread.join()\n"
        "        print(timers.read_text().count('signal:'))\n"
        "    print(timers.read_text().count('signal:'))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    during, after, during_second, after_second = map(int, done.stdout.split())
    assert after == after_second == 0 and 1 <= during <= 2 and 1 <= during_second <= 2  # one a thread


def test_beside_another_program_that_takes_the_signal_it_is_refused(monkeypatch):
    collector = Collector(native_frames=True)
    collector.start()
    collector.stop()  # our handler stays
    before = ctypes.create_string_buffer(512)
    libc = ctypes.CDLL(None)
    libc.sigaction(int(signal.SIGPROF), None, before)
    try:
        signal.signal(signal.SIGPROF, lambda *_: None)
        with pytest.raises(ConfigError, match="another profiler has the signal SIGPROF"), profiled(native_frames=True):
            pass
        with profiled():  # nothing is left running
            work(1)
    finally:
        libc.sigaction(int(signal.SIGPROF), before, None)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("at::native::sum(at::Tensor const&, bool)", "at::native::sum"),
        (
            "void at::(anonymous namespace)::f<float, std::vector<int>>(float*) const",
            "void at::(anonymous namespace)::f",
        ),
        ("mkl_blas_sgemm", "mkl_blas_sgemm"),
        ("+0x1234", "+0x1234"),
    ],
)
def test_names_are_shown_without_types(name, short):
    assert plain(name) == short


@pytest.mark.slow
def test_beyond_the_most_stacks_only_operators_are_known(monkeypatch):
    monkeypatch.setattr(native_frames, "MOST", 1)
    with profiled(native_frames=True) as result:
        work(40)
    tree = result.profile.tree
    assert tree.own.sum() == tree.inclusive[0]
    assert len({tree.parent[node] for node in np.flatnonzero(tree.kind == NodeKind.NATIVE)}) <= native_frames.FRAMES
